//! How far ranks may go in a step before they know that the update before it was right.

use super::ComputePrograms;
use crate::ir::{Action, Compute, Task};

/// The number of compute actions in each rank's warm-up: forwards before its first backward, of
/// which none needs, by any way, what a rank does after its own warm-up. So all ranks' warm-ups
/// together can run, and run again, without any of what follows them.
pub(super) fn warm_ups(programs: &ComputePrograms) -> Vec<usize> {
    // Of a split head nothing stands in a warm-up, nor what makes its input.
    let first_out = programs.schedule.wide_stage().map_or(usize::MAX, |wide| wide - 1);
    let is_forward = |action: &Action| {
        action.computes().all(|task| task.kind == Compute::F && task.stage < first_out)
    };
    let until_backward = |program: &Vec<Action>| {
        program.iter().position(|action| !is_forward(action)).unwrap_or(program.len())
    };
    let mut ends: Vec<usize> = programs.ranks.iter().map(until_backward).collect();
    let micro_batches = programs.schedule.micro_batches();
    let mut made = vec![None; (programs.schedule.stages() + 1) * micro_batches];
    for (rank, program) in programs.ranks.iter().enumerate() {
        for (at, action) in program.iter().enumerate() {
            for Task { kind, stage, micro_batch } in action.computes() {
                if kind == Compute::F {
                    made[stage * micro_batches + micro_batch] = Some((rank, at));
                }
            }
        }
    }
    let stages = programs.schedule.stages();
    let is_in = |ends: &[usize], task: Task| {
        let message = task.kind.needs(task.stage, stages);
        let producer = message.and_then(|message| message.producer(task.stage, stages));
        let from = producer.and_then(|stage| made[stage * micro_batches + task.micro_batch]);
        from.is_none_or(|(rank, at)| at < ends[rank])
    };
    // A shorter warm-up may shorten those that need it.
    loop {
        let mut changed = false;
        for (rank, program) in programs.ranks.iter().enumerate() {
            let warm_up = program[..ends[rank]].iter();
            let is_out = |action: &Action| !action.computes().all(|task| is_in(&ends, task));
            if let Some(end) = warm_up.into_iter().position(is_out) {
                ends[rank] = end;
                changed = true;
            }
        }
        if !changed {
            return ends;
        }
    }
}
