//! V-Half and V-Min: building blocks with controlled memory (Pipeline Parallelism with Controllable
//! Memory).
//!
//! Two chunks a rank in the shape of a V. One micro-batch's F and B have fixed slots on every rank;
//! the block is repeated every six slots, so that what a rank holds is the block's life span over
//! six. W take the first free slots. V-Half holds about half of what 1F1B holds, V-Min about a
//! third; both idle less than 1F1B. The slots fit F = B = W; for other times they give the order,
//! in which a rank that would wait may run a later action early if the peak stays what it was.

use super::costs::OrderCosts;
use super::timing::{Timing, time};
use super::v_reorder::reorder;
use super::vee::two_chunks;
use super::{ScheduleError, Shape};
use crate::ir::{Action, Compute, Schedule, vee};

/// Slots between one micro-batch and the next: F, B and W of two chunks.
const PERIOD: usize = 6;

/// Slots of a micro-batch's F and B of both chunks on one rank, by the time they come.
type Block = [(Compute, usize, usize); 4];

/// V-Half for `costs`; V must be 2, one unit of B. With equal stages no rank holds more than
/// (p + 2) / 2 micro-batches.
///
/// # Errors
/// V other than 2, costs that are not one a stage, a memory limit below what the order holds.
pub fn v_half(shape: &Shape, costs: &OrderCosts) -> Result<Schedule, ScheduleError> {
    let p = shape.pp;
    let shift = if p.is_multiple_of(2) { 3 } else { 0 };
    let block = |r: usize| {
        use Compute::{B, F};
        // For one rank the second arm's F and B follow each other without a slot between.
        [
            (F, 0, 2 * r),
            (F, 1, 3 * p - r - 2),
            (B, 1, 3 * p + shift + 2 * r - 1),
            (B, 0, 6 * p + shift - r - 2),
        ]
    };
    // V-Min's order may hold less and take less time: where there are few micro-batches, none of
    // which waits for another.
    generate("v-half", shape, costs, &[&block, &v_min_block(p)])
}

/// V-Min for `costs`; V must be 2, one unit of B. With equal stages no rank holds more than
/// (p + 4) / 3 micro-batches.
///
/// # Errors
/// V other than 2, costs that are not one a stage, a memory limit below what the order holds.
pub fn v_min(shape: &Shape, costs: &OrderCosts) -> Result<Schedule, ScheduleError> {
    generate("v-min", shape, costs, &[&v_min_block(shape.pp)])
}

fn v_min_block(p: usize) -> impl Fn(usize) -> Block {
    use Compute::{B, F};
    let shift = if p.is_multiple_of(3) { 2 } else { 0 };
    move |r| {
        [(F, 0, r), (F, 1, 2 * p - 1 - r), (B, 1, 2 * p + shift + r), (B, 0, 4 * p + shift - 1 - r)]
    }
}

/// The best order of the first block, or of a later one that holds no more than the first.
fn generate(
    kind: &'static str,
    shape: &Shape,
    costs: &OrderCosts,
    blocks: &[&dyn Fn(usize) -> Block],
) -> Result<Schedule, ScheduleError> {
    two_chunks(kind, shape)?;
    costs.check(kind, shape.stages())?;
    let all: Vec<(Vec<Vec<Action>>, Timing)> =
        blocks.iter().flat_map(|block| orders(shape, costs, block)).collect();
    let peak = all[0].1.peak();
    let least = all.iter().map(|(_, timing)| timing.peak()).min().unwrap_or(0);
    let limit = costs.mem_limit.unwrap_or(i64::MAX).min(peak);
    let kept = all.into_iter().filter(|(_, timing)| timing.peak() <= limit);
    let Some((ranks, _)) = kept.min_by_key(|(_, timing)| timing.rank(costs.objective)) else {
        let works = format!("it must hold at least {least}; `v-min` needs least");
        let value = limit.max(0) as usize;
        return Err(ScheduleError::Field { kind, field: "mem_limit", value, works });
    };
    Ok(Schedule {
        kind: kind.into(),
        placement: vee(shape.pp, 2),
        units: vec![shape.micro_batches],
        ranks,
        ..Schedule::default()
    })
}

/// The block repeated, and that with later actions run early, any or W alone.
fn orders(
    shape: &Shape,
    costs: &OrderCosts,
    block: &dyn Fn(usize) -> Block,
) -> [(Vec<Vec<Action>>, Timing); 3] {
    let Shape { pp, micro_batches, .. } = *shape;
    let placement = vee(pp, 2);
    let plain: Vec<Vec<Action>> = (0..pp).map(|r| repeat(r, pp, micro_batches, block(r))).collect();
    let clock = |ranks: &[Vec<Action>]| {
        let timing = time(ranks, &placement, micro_batches, costs);
        timing.unwrap_or_else(|_| unreachable!("an order by slots cannot be stuck"))
    };
    let timing = clock(&plain);
    let peak = timing.peak();
    let [any, w] = [false, true].map(|w_only| {
        let ranks = reorder(&plain, &placement, micro_batches, costs, peak, w_only);
        let timing = clock(&ranks);
        (ranks, timing)
    });
    [(plain, timing), any, w]
}

/// One rank's order: the block every [`PERIOD`] slots, W in the first free slots.
fn repeat(rank: usize, pp: usize, m: usize, block: Block) -> Vec<Action> {
    let stage = |chunk: usize| if chunk == 0 { rank } else { 2 * pp - 1 - rank };
    let last = block.iter().map(|b| b.2).max().unwrap_or(0) + PERIOD * m;
    let mut slots: Vec<Option<Action>> = vec![None; last + 2 * m + PERIOD];
    for (kind, chunk, offset) in block {
        for i in 0..m {
            let slot = &mut slots[offset + PERIOD * i];
            assert!(slot.is_none(), "the block's slots are distinct modulo the period");
            *slot = Some(Action::compute(kind, stage(chunk), i));
        }
    }
    let mut waiting = std::collections::VecDeque::new();
    for slot in &mut slots {
        match slot {
            Some(Action::Compute { kind: Compute::B, stage, micro_batch }) => {
                waiting.push_back(Action::compute(Compute::W, *stage, *micro_batch));
            }
            Some(_) => {}
            None => *slot = waiting.pop_front(),
        }
    }
    slots.into_iter().flatten().chain(waiting).collect()
}
