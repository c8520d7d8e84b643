//! Copies of activations out of a rank's memory and in again, in the time of a run.

use std::collections::{HashMap, HashSet};

use crate::ir::{Action, Compute, Schedule};

use super::Costs;

/// To or from where the copies are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Out,
    In,
}

/// The copies of one rank: they go one after the other, in the order of its program; those out and
/// those in by themselves where a place takes both at once.
pub struct CopyQueue {
    /// What each takes, by stage and micro-batch.
    takes: HashMap<(usize, usize), u64>,
    /// When the last copy of each is done.
    ends: HashMap<(usize, usize), u64>,
    /// When all are, those out and those in.
    free: [u64; 2],
    apart: bool,
}

impl CopyQueue {
    /// Those of the program of `rank`; most programs have none.
    ///
    /// # Panics
    /// Panics if `costs` are not the schedule's.
    pub fn new(schedule: &Schedule, costs: &Costs, rank: usize) -> CopyQueue {
        let program = &schedule.ranks[rank];
        let out = program.iter().filter_map(|action| match *action {
            Action::Out { stage, micro_batch } => Some((stage, micro_batch)),
            _ => None,
        });
        let mut takes: HashMap<_, _> = out.map(|at| (at, 0)).collect();
        if !takes.is_empty() {
            let redone: HashSet<_> = program
                .iter()
                .flat_map(Action::computes)
                .filter(|task| task.kind == Compute::R)
                .map(|task| (task.stage, task.micro_batch))
                .collect();
            for (at, takes) in &mut takes {
                let entry = schedule.cost_entry(rank, at.0, at.1);
                *takes = costs.copy_ns(costs.memory[entry].kept(redone.contains(at))) as u64;
            }
        }
        CopyQueue { takes, ends: HashMap::new(), free: [0; 2], apart: costs.copies_apart }
    }

    /// Starts one of a stage and micro-batch at `now`, or when those before it are done: when it
    /// begins and ends.
    pub fn start(&mut self, at: (usize, usize), now: u64) -> (u64, u64) {
        // The second one of a stage and micro-batch is the one in.
        let way = if self.ends.contains_key(&at) { Way::In } else { Way::Out };
        let times = self.pass(way, now, self.takes.get(&at).copied().unwrap_or(0));
        self.ends.insert(at, times.1);
        times
    }

    /// Starts a copy that takes so long: when it begins and ends.
    pub(super) fn pass(&mut self, way: Way, now: u64, takes: u64) -> (u64, u64) {
        let free = &mut self.free[if self.apart { way as usize } else { 0 }];
        let start = now.max(*free);
        *free = start + takes;
        (start, *free)
    }

    /// When the last one of this stage and micro-batch is done; 0 where there is none.
    pub fn end(&self, at: (usize, usize)) -> u64 {
        self.ends.get(&at).copied().unwrap_or(0)
    }
}
