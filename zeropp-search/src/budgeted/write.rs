//! From sequences to a schedule: every W, gather, free, reduction and recomputation as an action.

use super::decode::OrderTimes;
use super::problem::Problem;
use super::residency::{ResidencyCounter, ends_unit};
use super::sequence::{RankOrders, RankSequence};
use zeropp_schedule::ir::{Action, Compute, Schedule, Task};

/// The name of the scheduler's kind.
pub(super) const KIND: &str = "auto";

/// Writes down `plan`, which the decoder runs once more. None where it cannot run.
pub(super) fn write(p: &Problem, plan: &RankOrders) -> Option<Schedule> {
    let mut residency = ResidencyCounter::default();
    let mut decoder = OrderTimes::new(p);
    decoder.load(p, plan, &mut residency)?;
    let mut schedule = p.empty_schedule(KIND);
    for (r, sequence) in plan.sequences.iter().enumerate() {
        let order = actions(p, r, sequence, &decoder.w_before(p, r, sequence));
        schedule.ranks[r] = with_weights(p, r, sequence, &order, &mut residency);
    }
    Some(schedule)
}

/// The compute actions of a sequence with `w_before[n]` W before entry n and the rest at the end,
/// each with the entry that it is, if it is one.
fn actions(
    p: &Problem,
    r: usize,
    sequence: &RankSequence,
    w_before: &[usize],
) -> Vec<(Option<usize>, Action)> {
    let stage = |class: usize| p.stage[r * p.v + class % p.v];
    let is_b = |class: usize| class >= p.v && class < p.classes;
    let entries = sequence.entries.iter().zip(&sequence.batch).map(|(l, i)| (usize::from(*l), *i));
    let mut waiting = entries.clone().filter(|(class, _)| is_b(*class));
    let mut order = Vec::with_capacity(3 * p.v * p.b);
    let next_w = |waiting: &mut dyn Iterator<Item = (usize, u16)>| {
        let (class, i) = waiting.next().expect("a B for each W");
        (None, Action::compute(Compute::W, stage(class), usize::from(i)))
    };
    for (at, (class, i)) in entries.clone().enumerate() {
        (0..w_before[at]).for_each(|_| order.push(next_w(&mut waiting)));
        if class < p.classes {
            let kind = if is_b(class) { Compute::B } else { Compute::F };
            order.push((Some(at), Action::compute(kind, stage(class), usize::from(i))));
        }
    }
    while order.len() < 3 * p.v * p.b {
        order.push(next_w(&mut waiting));
    }
    order
}

/// Adds gathers and frees as [`ResidencyCounter`] finds them, reductions after the last W of each
/// stage and unit, and recomputation.
pub(super) fn with_weights(
    p: &Problem,
    r: usize,
    sequence: &RankSequence,
    order: &[(Option<usize>, Action)],
    residency: &mut ResidencyCounter,
) -> Vec<Action> {
    residency.count(p, r, sequence, true);
    let stage = |v: u32| p.stage[r * p.v + v as usize];
    let mut frees = residency.frees.clone();
    frees.sort_by_key(|free| free.after);
    let (mut frees, mut gathers) = (frees.iter().peekable(), residency.gathers.iter().peekable());
    let mut all = Vec::with_capacity(order.len() * 5 / 4);
    let mut entries = 0;
    for (entry, action) in order {
        while let Some(gather) = gathers.next_if(|g| g.gate as usize <= entries) {
            // What it replaces goes first.
            while let Some(free) = frees.next_if(|free| free.after < gather.gate) {
                all.push(Action::Free { stage: stage(free.v) });
            }
            all.push(Action::AllGather { stage: stage(gather.v) });
        }
        let Task { kind, stage: s, micro_batch: i } =
            action.computes().next().expect("a compute action");
        if kind == Compute::B && p.recomputes[s] {
            all.push(Action::compute(Compute::R, s, i));
        }
        all.push(*action);
        if let Some(entry) = entry {
            entries = entry + 1;
            // A W that the sequence asks for is an entry, too, but never the last use of a stage.
            while sequence.entries.get(entries).is_some_and(|l| usize::from(*l) == p.classes) {
                entries += 1;
            }
        } else if kind == Compute::W && ends_unit(p, i) {
            all.push(Action::ReduceScatter { stage: s });
        }
    }
    all.extend(frees.map(|free| Action::Free { stage: stage(free.v) }));
    all
}
