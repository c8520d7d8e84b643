//! Replicas with programs of their own, as where a batch does not divide evenly: what they do
//! together, they come to in one order.
//!
//! Replicas share the sums of their gradients, stage by stage, and the optimizer step. Each program
//! by itself is proven by [`verify`](super::verify()). A sum over the replicas is started and not
//! waited for until the optimizer step, which is last, so that no replica can keep another from
//! getting there, as long as the same ranks of all of them start the same sums in the same order.

use super::VerifyError;
use crate::action::Cost;
use crate::ir::{Action, Schedule};

/// Proves for programs that are verified, one for each replica, that they go together.
///
/// # Errors
/// [`VerifyError::Replicas`], where they are programs of different stages, or sum them over the
/// replicas in different orders.
pub fn verify_replicas(programs: &[&Schedule]) -> Result<(), VerifyError> {
    let Some((first, others)) = programs.split_first() else { return Ok(()) };
    for other in others {
        if (other.pp(), &other.placement) != (first.pp(), &first.placement) {
            return Err(VerifyError::Replicas("they have different stages".into()));
        }
        if other.validates_late() != first.validates_late() {
            return Err(VerifyError::Replicas("only some of them validate updates late".into()));
        }
        for rank in 0..first.pp() {
            let [here, there] = [first, other].map(|program| summed(&program.ranks[rank]));
            if here != there {
                return Err(VerifyError::Replicas(format!(
                    "rank {rank} sums stages {here:?} in that order in one replica, and {there:?} \
                     in another"
                )));
            }
        }
    }
    Ok(())
}

/// The stages that a rank sums over the replicas, in order.
fn summed(actions: &[Action]) -> Vec<usize> {
    let sums = actions.iter().filter(|action| action.row().cost == Cost::ReplicaReduce);
    sums.filter_map(Action::stage).collect()
}

/// Proves for such programs what [`verify_issue_order`](super::verify_issue_order) proves for one:
/// that all ranks of all replicas can start their operations strictly in the order of their
/// programs, sums over the replicas among them.
///
/// # Errors
/// [`VerifyError::Replicas`], with the ranks that wait for each other.
pub fn verify_replicas_issue_order(programs: &[&Schedule]) -> Result<(), VerifyError> {
    verify_replicas(programs)?;
    let pp = programs.first().map_or(0, |program| program.pp());
    let mut next = vec![vec![0usize; pp]; programs.len()];
    loop {
        let mut moved = false;
        for (replica, program) in programs.iter().enumerate() {
            for rank in 0..pp {
                while let Some(action) = program.ranks[rank].get(next[replica][rank]) {
                    match ends(programs, &next, replica, rank, action) {
                        None => break,
                        Some(ends) => ends.iter().for_each(|(k, rank)| next[*k][*rank] += 1),
                    }
                    moved = true;
                }
            }
        }
        if !moved {
            break;
        }
    }
    let mut stuck = Vec::new();
    for (replica, (program, next)) in programs.iter().zip(&next).enumerate() {
        for (rank, actions) in program.ranks.iter().enumerate() {
            let waits = actions.get(next[rank]);
            stuck.extend(waits.map(|action| format!("replica {replica}, rank {rank} at {action}")));
        }
    }
    match stuck.is_empty() {
        true => Ok(()),
        false => Err(VerifyError::Replicas(format!(
            "no one order of operations, as these wait for each other: {}",
            stuck.join("; ")
        ))),
    }
}

/// Whose next action the operation at `(replica, rank)` is, where all of them are there: its own,
/// the other end's of a message, and the other replicas' of a sum over them.
fn ends(
    programs: &[&Schedule],
    next: &[Vec<usize>],
    replica: usize,
    rank: usize,
    action: &Action,
) -> Option<Vec<(usize, usize)>> {
    let at = |k: usize, rank: usize| programs[k].ranks[rank].get(next[k][rank]);
    if let Action::ReplicaReduce { .. } = action {
        let all = (0..programs.len()).map(|k| (k, rank));
        return all.clone().all(|(k, rank)| at(k, rank) == Some(action)).then(|| all.collect());
    }
    let Some((peer, message)) = programs[replica].other_end(action) else {
        return Some(vec![(replica, rank)]);
    };
    let other = at(replica, peer).and_then(|action| programs[replica].other_end(action));
    (other == Some((rank, message))).then(|| vec![(replica, rank), (replica, peer)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::Message;
    use crate::lower::{LowerOptions, in_issue_order, lower, with_sums_in_order_of};
    use crate::schedules::{KINDS, Shape, generate};
    use crate::verify::{VerifyLimits, verify};

    /// Replicas with one micro-batch fewer, or one round, go together with the others for every
    /// kind and shape that there is a program for, once their sums are in one order.
    #[test]
    fn replicas_of_all_kinds_with_fewer_micro_batches_go_together() {
        let options = LowerOptions { replicas: true, ..LowerOptions::default() };
        let mut moved = 0;
        for kind in KINDS.iter().filter(|kind| !kind.is_searched()) {
            let mut found = 0;
            for (pp, most) in [(1, 3), (2, 3), (2, 6), (3, 7), (4, 6), (4, 9), (4, 12), (8, 20)] {
                for virtual_stages in [kind.stages.default_number(), 4] {
                    for (fewer, unit) in [(most - 1, most), (most - 1, 2), (most - pp, most)] {
                        let of = |micro_batches: usize| {
                            let unit = unit.min(micro_batches.max(1));
                            let shape = Shape { pp, virtual_stages, micro_batches, unit };
                            generate(kind.name, &shape).map(|compact| lower(&compact, &options))
                        };
                        let (Ok(first), Ok(last)) = (of(most), of(fewer)) else { continue };
                        if first.placement != last.placement {
                            // `auto` chooses that, too.
                            assert!(verify_replicas(&[&first, &last]).is_err());
                            continue;
                        }
                        found += 1;
                        let what =
                            format!("{} P {pp} V {virtual_stages} {most} {fewer}", kind.name);
                        moved += usize::from(verify_replicas(&[&first, &last]).is_err());
                        let last = with_sums_in_order_of(&first, &last);
                        for program in [&first, &last] {
                            verify(program, &VerifyLimits::default()).unwrap();
                        }
                        verify_replicas(&[&first, &first, &last])
                            .unwrap_or_else(|e| panic!("{what}: {e}"));
                    }
                }
            }
            assert!(found >= 8, "{}: {found}", kind.name);
        }
        assert!(moved > 0, "some kind comes to different orders by itself");
    }

    /// Where operations are strictly in order, some kinds' replicas go together and some do not.
    #[test]
    fn one_order_of_operations_is_proven_or_refused() {
        let options = LowerOptions { replicas: true, ..LowerOptions::default() };
        let (mut proven, mut all) = (0, 0);
        for kind in KINDS {
            for (pp, most) in [(2, 5), (4, 9)] {
                let program = |micro_batches: usize| {
                    let virtual_stages = kind.stages.default_number();
                    let shape = Shape { pp, virtual_stages, micro_batches, unit: micro_batches };
                    let compact = generate(kind.name, &shape).ok()?;
                    Some(in_issue_order(&lower(&compact, &options)))
                };
                let (Some(first), Some(last)) = (program(most), program(most - 1)) else {
                    continue;
                };
                let last = with_sums_in_order_of(&first, &last);
                all += 1;
                proven += usize::from(verify_replicas_issue_order(&[&first, &last]).is_ok());
            }
        }
        println!("{proven} of {all} have one order");
        assert!(proven > 0);
    }

    fn program(ranks: [Vec<Action>; 2]) -> Schedule {
        let placement = vec![0, 1, 0, 1];
        Schedule { placement, units: vec![1], ranks: ranks.to_vec(), ..Schedule::default() }
    }

    #[test]
    fn sums_in_another_order_are_refused() {
        let sum = |stage| Action::ReplicaReduce { stage };
        let first = program([vec![sum(2), sum(0)], vec![sum(3), sum(1)]]);
        let last = program([vec![sum(2), sum(0)], vec![sum(1), sum(3)]]);
        assert_eq!(verify_replicas(&[&first, &first]), Ok(()));
        let error = verify_replicas(&[&first, &last]).unwrap_err().to_string();
        assert!(error.contains("rank 1 sums stages [3, 1] in that order"), "{error}");
        let other = Schedule { placement: vec![1, 0, 1, 0], ..first.clone() };
        assert!(verify_replicas(&[&first, &other]).is_err());
    }

    /// Each replica by itself has an order, and so have the sums; together they have none.
    #[test]
    fn a_circle_through_two_replicas_is_found() {
        let sum = |stage| Action::ReplicaReduce { stage };
        let message = Message::Activation;
        let sends = Action::Send { message, stage: 0, micro_batch: 0 };
        let takes = Action::Recv { message, stage: 1, micro_batch: 0 };
        // One replica sums on rank 0 before the message that rank 1 needs before its sum; the other
        // sums on rank 1 first.
        let first = program([vec![sum(0), sends], vec![takes, sum(1)]]);
        let last = program([vec![sends, sum(0)], vec![sum(1), takes]]);
        for alone in [&first, &last] {
            assert_eq!(verify_replicas_issue_order(&[alone, alone]), Ok(()));
        }
        assert_eq!(verify_replicas(&[&first, &last]), Ok(()), "nobody waits for a sum");
        let error = verify_replicas_issue_order(&[&first, &last]).unwrap_err().to_string();
        assert!(error.contains("replica 0, rank 0 at AR0; replica 0, rank 1 at <A1.0"), "{error}");
    }
}
