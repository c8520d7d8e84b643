//! Stages with copies on several ranks: the copies that a stage has go together.
//!
//! Ranks either have the same stages or none in common, so that they are the replicas of each other
//! and sum their gradients in one group. A sum is started and not waited for until the optimizer
//! step, as between replicas with programs of their own.

use super::VerifyError;
use super::replicas::summed;
use crate::ir::Schedule;

/// Routes must be as many as there are micro-batches, and lead over ranks that are replicas.
pub(super) fn header(schedule: &Schedule) -> Result<(), VerifyError> {
    let fail = |message: String| Err(VerifyError::Header(message));
    let Schedule { routes, placement, .. } = schedule;
    let Some(first) = routes.first() else { return Ok(()) };
    let micro_batches = schedule.micro_batches();
    if routes.len() != micro_batches {
        let routes = routes.len();
        return fail(format!(
            "{routes} routes are not one for each of {micro_batches} micro-batches"
        ));
    }
    if first != placement {
        return fail(format!("the placement {placement:?} is not the first route, {first:?}"));
    }
    let (stages, ranks) = (schedule.stages(), schedule.pp());
    for (micro_batch, route) in routes.iter().enumerate() {
        if route.len() != stages || route.iter().any(|rank| *rank >= ranks) {
            return fail(format!(
                "the route of micro-batch {micro_batch} is {route:?}; it needs a rank of \
                 0..{ranks} for each of {stages} stages"
            ));
        }
    }
    let all = schedule.stages_of_all();
    for (rank, held) in all.iter().enumerate() {
        for (other, there) in all.iter().enumerate().skip(rank + 1) {
            if held != there && held.iter().any(|stage| there.contains(stage)) {
                return fail(format!(
                    "ranks {rank} and {other} have stages {held:?} and {there:?}; ranks with a \
                     stage in common have to have all in common"
                ));
            }
        }
    }
    Ok(())
}

/// Copies of a stage are summed, all of them in one order.
pub(super) fn sums(schedule: &Schedule) -> Result<(), VerifyError> {
    if schedule.routes.is_empty() || schedule.is_forward_only() || !super::is_program(schedule) {
        return Ok(());
    }
    let held = schedule.stages_of_all();
    for (rank, stages) in held.iter().enumerate() {
        let Some(first) = held[..rank].iter().position(|other| other == stages) else { continue };
        let [here, there] = [rank, first].map(|rank| summed(&schedule.ranks[rank]));
        if here != there || here.len() != stages.len() {
            return Err(VerifyError::Replicas(format!(
                "rank {first} sums stages {there:?} in that order, and rank {rank}, which has \
                 copies of {stages:?}, sums {here:?}"
            )));
        }
    }
    Ok(())
}
