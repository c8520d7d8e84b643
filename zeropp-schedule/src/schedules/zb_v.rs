//! ZB-V by hand: two chunks a rank in the shape of a V (Pipeline Parallelism with Controllable
//! Memory, and the Zero Bubble article).
//!
//! Rank r holds stages r and 2p − 1 − r. With F = B = W and m ≥ 2p no rank idles between its first
//! F and its last W, and every rank holds at most what 1F1B holds on rank 0.

use super::costs::OrderCosts;
use super::timing::best_within;
use super::v_blocks::{v_half, v_min};
use super::vee::{VeeRank, two_chunks};
use super::zb_v_auto::best;
use super::{ScheduleError, Shape};
use crate::ir::{Action, Compute, Schedule, vee};

/// ZB-V for `costs` and their memory limit (none means what ZB-V by hand holds): the order by hand,
/// the automatic one, or that of V-Half or V-Min, whichever is better for the costs' objective.
/// V must be 2, one unit of B.
///
/// # Errors
/// V other than 2, costs that are not one a stage, a memory limit that no order keeps.
pub fn zb_v(shape: &Shape, costs: &OrderCosts) -> Result<Schedule, ScheduleError> {
    let by_hand = generate(shape)?;
    costs.check("zb-v", shape.stages())?;
    let most = 2 * shape.pp as i64 * costs.mem_f.iter().max().unwrap_or(&0);
    let limit = costs.mem_limit.unwrap_or(most);
    let blocks = [v_half(shape, costs), v_min(shape, costs)];
    let blocks = blocks.into_iter().filter_map(|made| Some(made.ok()?.ranks));
    let others = best(shape, costs).into_iter().chain(blocks);
    let others = others.map(|ranks| {
        let ranks = ranks.into_iter().map(stage_after_stage).collect();
        Schedule { ranks, ..by_hand.clone() }
    });
    let all = std::iter::once(by_hand.clone()).chain(others).collect();
    best_within(all, costs, limit).ok_or_else(|| {
        let value = costs.mem_limit.unwrap_or(0).max(0) as usize;
        let works = format!("it must hold the activations of p micro-batches, {most}");
        ScheduleError::Field { kind: "zb-v", field: "mem_limit", value, works }
    })
}

/// ZB-V by hand for any P and B; V must be 2. One unit of B.
///
/// The phases are those of a step of at least 2p − 1 micro-batches; for fewer, the longer step is
/// written and the micro-batches that do not exist are left out, which keeps every order.
pub(super) fn generate(shape: &Shape) -> Result<Schedule, ScheduleError> {
    two_chunks("zb-v", shape)?;
    let Shape { pp, micro_batches, .. } = *shape;
    let n = micro_batches.max(2 * pp - 1);
    let ranks = (0..pp)
        .map(|rank| {
            let mut order = rank_order(rank, pp, n);
            order.retain(|a| a.computes().all(|t| t.micro_batch < micro_batches));
            order
        })
        .collect();
    let (placement, units) = (vee(pp, 2), vec![micro_batches]);
    Ok(Schedule { kind: "zb-v".into(), placement, units, ranks, ..Schedule::default() })
}

/// The W that a rank has left at its end, stage after stage, so that each stage's run layer by
/// layer before its reduction ([`LayerRun`](crate::ir::LayerRun)).
fn stage_after_stage(mut order: Vec<Action>) -> Vec<Action> {
    let is_w = |action: &&Action| matches!(action, Action::Compute { kind: Compute::W, .. });
    let left = order.iter().rev().take_while(is_w).count();
    let begin = order.len() - left;
    let last = order.last().and_then(Action::stage);
    order[begin..].sort_by_key(|w| w.stage() == last);
    order
}

fn rank_order(rank: usize, pp: usize, n: usize) -> Vec<Action> {
    use Compute::{B, F, W};
    let mut r = VeeRank::new(rank, pp, n);
    r.repeat(2 * (pp - rank) - 1, &[(F, 0)]);
    r.repeat(rank, &[(F, 1), (F, 0)]);
    r.repeat(pp - rank, &[(F, 1), (B, 1), (W, 1)]);
    while r.left(F, 1) > 0 {
        if r.left(F, 0) > 0 {
            r.push(F, 0);
        }
        r.repeat(1, &[(B, 0), (W, 0), (F, 1), (B, 1), (W, 1)]);
    }
    r.repeat(rank, &[(B, 0), (B, 1)]);
    r.repeat(pp - rank, &[(B, 0), (W, 0)]);
    r.repeat(r.left(W, 1), &[(W, 1)]);
    r.repeat(r.left(W, 0), &[(W, 0)]);
    r.order
}
