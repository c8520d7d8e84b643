//! Lowering holds for any order that respects the dependencies, not only for those of the
//! generators: stages placed anywhere, visits that alternate, units that interleave, split and
//! whole backwards, overlapped pairs.

use std::collections::HashSet;

use proptest::prelude::*;

use super::*;
use crate::memory::{Ledger, MemoryBytes, StageBytes};
use crate::simulate::{Costs, simulate};
use crate::verify::{VerifyLimits, verify, verify_issue_order};

/// Builds a schedule by running a random ready action at a time.
struct Builder<'a> {
    placement: Vec<usize>,
    micro_batches: usize,
    split: bool,
    overlap: bool,
    done: HashSet<Task>,
    /// Per stage, the micro-batch whose W is next.
    next_w: Vec<usize>,
    /// The micro-batch whose F is next on the last stage.
    next_head: usize,
    choices: std::iter::Cycle<std::slice::Iter<'a, u16>>,
    ranks: Vec<Vec<Action>>,
}

impl Builder<'_> {
    fn ready(&self, kind: Compute, stage: usize, i: usize) -> bool {
        let done = |kind, stage| self.done.contains(&Task { kind, stage, micro_batch: i });
        let back = |s| done(Compute::B, s) || done(Compute::BW, s);
        let gradient = || stage + 1 == self.placement.len() || back(stage + 1);
        !done(kind, stage)
            && match kind {
                Compute::F => {
                    let next = stage + 1 < self.placement.len() || self.next_head == i;
                    next && (stage == 0 || done(Compute::F, stage - 1))
                }
                Compute::B => self.split && done(Compute::F, stage) && gradient(),
                Compute::W => done(Compute::B, stage) && self.next_w[stage] == i,
                Compute::BW => {
                    let next = !self.split && self.next_w[stage] == i;
                    next && done(Compute::F, stage) && gradient()
                }
                Compute::R => false,
            }
    }

    fn all_ready(&self) -> Vec<Task> {
        let mut all = Vec::new();
        for kind in [Compute::F, Compute::B, Compute::W, Compute::BW] {
            for stage in 0..self.placement.len() {
                for i in 0..self.micro_batches {
                    if self.ready(kind, stage, i) {
                        all.push(Task { kind, stage, micro_batch: i });
                    }
                }
            }
        }
        all
    }

    fn choose(&mut self, from: usize) -> usize {
        usize::from(*self.choices.next().expect("a cycle")) % from
    }

    fn finish(&mut self, Task { kind, stage, micro_batch: i }: Task) {
        self.done.insert(Task { kind, stage, micro_batch: i });
        if matches!(kind, Compute::W | Compute::BW) {
            self.next_w[stage] += 1;
        }
        if kind == Compute::F && stage + 1 == self.placement.len() {
            self.next_head += 1;
        }
    }

    fn build(mut self, units: Vec<usize>) -> Schedule {
        loop {
            let ready = self.all_ready();
            if ready.is_empty() {
                break;
            }
            let task = ready[self.choose(ready.len())];
            let rank = self.placement[task.stage];
            let here = |other: &&Task| self.overlap && self.placement[other.stage] == rank;
            let pair = |other: &Task| Action::overlap(task, *other);
            let action = ready.iter().filter(here).find_map(pair).unwrap_or(task.into());
            action.computes().for_each(|c| self.finish(c));
            self.ranks[rank].push(action);
        }
        Schedule {
            kind: "file".into(),
            placement: self.placement,
            units,
            ranks: self.ranks,
            ..Schedule::default()
        }
    }
}

prop_compose! {
    fn any_schedule()(
        pp in 1usize..4, extra in proptest::collection::vec(0usize..8, 0..5),
        units in proptest::collection::vec(1usize..4, 1..4),
        split: bool, overlap: bool, choices in proptest::collection::vec(any::<u16>(), 1..200),
    ) -> Schedule {
        // Every rank has a stage; the others are anywhere.
        let mut placement: Vec<usize> = (0..pp).collect();
        for place in extra {
            placement.insert(place % (placement.len() + 1), place % pp);
        }
        let stages = placement.len();
        let builder = Builder {
            placement,
            micro_batches: units.iter().sum(),
            split,
            overlap,
            done: HashSet::new(),
            next_w: vec![0; stages],
            next_head: 0,
            choices: choices.iter().cycle(),
            ranks: vec![Vec::new(); pp],
        };
        builder.build(units.clone())
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        cases: 600,
        ..Default::default()
    })]

    #[test]
    fn any_order_lowers_to_a_good_program(
        schedule in any_schedule(), prefetch in 0usize..4, recompute: bool, replicas: bool,
        residency in 0usize..3, late: bool, redone in proptest::option::of(0usize..4),
        out in 0usize..4, out_later: bool,
    ) {
        let residency = [Residency::Auto, Residency::PerVisit, Residency::LookAhead][residency];
        prop_assert_eq!(verify(&schedule, &VerifyLimits::default()), Ok(()));
        let sync = if late { OptimizerSync::Late } else { OptimizerSync::Barrier };
        let copies = LowerOptions { out, out_later, ..LowerOptions::default() };
        let options =
            LowerOptions { prefetch, recompute, redone, replicas, residency, sync, ..copies };
        let lowered = lower(&schedule, &options);
        // An overlapped pair needs both its stages, whatever the prefetch.
        let overlaps = |a: &Action| matches!(a, Action::Overlap { .. });
        let pairs = usize::from(schedule.ranks.iter().flatten().any(overlaps));
        let gathered_max = Some(1 + prefetch + pairs);
        let limits = VerifyLimits { gathered_max, ..Default::default() };
        prop_assert_eq!(verify(&lowered, &limits), Ok(()));
        prop_assert_eq!(&lower(&lowered, &options), &lowered);
        let ordered = in_issue_order(&lowered);
        prop_assert_eq!(verify(&ordered, &VerifyLimits::default()), Ok(()));
        prop_assert_eq!(verify_issue_order(&ordered), Ok(()));

        let bytes = StageBytes {
            input: 1, activation: 3, stash: 2, weights: 5, gradient: 7, message: 1, workspace: 4,
            gradient_in_forward: 3,
            keeps_first_gradient: schedule.micro_batches() % 2 == 0, ..StageBytes::default()
        };
        let bytes = vec![bytes; schedule.stages()];
        for program in &lowered.ranks {
            let mut ledger = Ledger::new(program, &bytes);
            program.iter().for_each(|a| ledger.run(a));
            prop_assert_eq!(ledger.now(), MemoryBytes::default());
        }

        // With free collectives and no recomputation, lowering changes no time.
        let costs = Costs::uniform(schedule.stages(), 5, 4, 3, 2);
        let timed = simulate(&lowered, &costs).unwrap();
        if !recompute {
            let plain = simulate(&schedule, &costs).unwrap();
            for (a, b) in plain.ranks.iter().zip(&timed.ranks) {
                let computes = b.spans.iter().filter(|s| s.action.computes().next().is_some());
                prop_assert_eq!(a.spans.iter().collect::<Vec<_>>(), computes.collect::<Vec<_>>());
            }
        }
    }
}
