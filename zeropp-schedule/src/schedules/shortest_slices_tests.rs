//! How far orders of slices are from the shortest there are, by looking at all of small ones.

use std::collections::HashSet;

use super::*;
use crate::ir::{Action, Compute, Schedule, reversed_slices};
use crate::metrics::Metrics;
use crate::simulate::{Costs, simulate};

/// Two ranks with V stages each that take turns of one slot: how far each stage is, F and B, and
/// how many W each rank has done, of whichever stage.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Progress {
    forwards: Vec<u8>,
    backwards: Vec<u8>,
    weights: [u8; 2],
}

/// All orders of `samples` in so many slices, samples one after another.
struct Orders {
    virtual_stages: usize,
    slices: usize,
    all: u8,
    /// What each rank holds at most: slices between F and B of a stage, and those between B and W.
    held: [(usize, usize); 2],
}

impl Orders {
    /// What a rank may do in the next slot; nothing else where it can do anything, as waiting
    /// never makes room.
    fn turns(&self, now: &Progress, rank: usize) -> Vec<Progress> {
        let stages = 2 * self.virtual_stages;
        let mut turns = Vec::new();
        let (backwards, forwards) = (self.done(now, rank), sum(&now.forwards, rank));
        let (activations, stashes) = self.held[rank];
        let room = usize::from(forwards - backwards) < activations;
        let room_behind = usize::from(backwards - now.weights[rank]) < stashes;
        for stage in (rank..stages).step_by(2) {
            let (f, b) = (now.forwards[stage], now.backwards[stage]);
            if room && f < self.all && (stage == 0 || now.forwards[stage - 1] > f) {
                let mut next = now.clone();
                next.forwards[stage] += 1;
                turns.push(next);
            }
            let is_there = || usize::from(f) > reversed_slices(b.into(), self.slices);
            let follows = || stage + 1 == stages || now.backwards[stage + 1] > b;
            if room_behind && b < self.all && is_there() && follows() {
                let mut next = now.clone();
                next.backwards[stage] += 1;
                turns.push(next);
            }
        }
        if now.weights[rank] < self.done(now, rank) {
            let mut next = now.clone();
            next.weights[rank] += 1;
            turns.push(next);
        }
        turns
    }

    /// Backwards of a rank.
    fn done(&self, now: &Progress, rank: usize) -> u8 {
        sum(&now.backwards, rank)
    }

    /// Slots that a rank still computes in.
    fn left(&self, now: &Progress, rank: usize) -> usize {
        let each =
            |done: &[u8]| done.iter().skip(rank).step_by(2).map(|n| usize::from(*n)).sum::<usize>();
        let done = each(&now.forwards) + each(&now.backwards) + usize::from(now.weights[rank]);
        3 * self.virtual_stages * usize::from(self.all) - done
    }

    /// Slots of the shortest order, where there is one of no more than `most`.
    fn shortest(&self, most: usize) -> Option<usize> {
        let none = vec![0; 2 * self.virtual_stages];
        let start = Progress { forwards: none.clone(), backwards: none, weights: [0; 2] };
        let mut states = HashSet::from([start]);
        for slot in 0..=most {
            if states.iter().any(|now| (0..2).all(|rank| self.left(now, rank) == 0)) {
                return Some(slot);
            }
            let mut next = HashSet::new();
            for now in &states {
                let both = [self.turns(now, 0), self.turns(now, 1)];
                let [of_first, of_second] = both.map(|turns| match turns.is_empty() {
                    true => vec![now.clone()],
                    false => turns,
                });
                for first in &of_first {
                    // What the other rank does sees what was done before this slot only.
                    next.extend(of_second.iter().map(|second| joined(now, first, second)));
                }
            }
            next.retain(|now| (0..2).all(|rank| slot + 1 + self.left(now, rank) <= most));
            states = next;
        }
        None
    }
}

fn sum(done: &[u8], rank: usize) -> u8 {
    done.iter().skip(rank).step_by(2).sum()
}

/// What each rank of a schedule holds at most, as [`Orders`] counts it.
fn held(schedule: &Schedule) -> [(usize, usize); 2] {
    [0, 1].map(|rank| {
        let (mut most, mut activations, mut stashes) = ((0, 0), 0usize, 0usize);
        for action in &schedule.ranks[rank] {
            match action {
                Action::Compute { kind: Compute::F, .. } => activations += 1,
                Action::Compute { kind: Compute::B, .. } => {
                    (activations, stashes) = (activations - 1, stashes + 1)
                }
                Action::Compute { kind: Compute::W, .. } => stashes -= 1,
                _ => {}
            }
            most = (most.0.max(activations), most.1.max(stashes));
        }
        most
    })
}

/// Both turns of a slot.
fn joined(now: &Progress, first: &Progress, second: &Progress) -> Progress {
    let add = |now: &[u8], a: &[u8], b: &[u8]| -> Vec<u8> {
        now.iter().zip(a.iter().zip(b)).map(|(now, (a, b))| a + b - now).collect()
    };
    Progress {
        forwards: add(&now.forwards, &first.forwards, &second.forwards),
        backwards: add(&now.backwards, &first.backwards, &second.backwards),
        weights: [first.weights[0], second.weights[1]],
    }
}

/// Slots of a schedule, and what its ranks hold.
fn slots(kind: &str, shape: &Shape, slices: usize) -> (usize, [(usize, usize); 2]) {
    let schedule = generate_sliced(kind, shape, &vec![256; slices]).expect("n >= P");
    let costs = Costs::uniform(schedule.cost_entries(), 1, 1, 1, 0);
    let timeline = simulate(&schedule, &costs).unwrap();
    (Metrics::new(&schedule, &timeline, &costs).makespan_ns as usize, held(&schedule))
}

#[test]
fn a_unit_of_slices_is_the_shortest_order_there_is_and_rounds_that_of_those_that_hold_as_little() {
    let mut looked_at = 0;
    for (virtual_stages, slices, samples) in
        [(1, 2, 1), (1, 3, 1), (1, 2, 2), (1, 3, 2), (2, 2, 1), (2, 3, 1), (2, 2, 2), (2, 3, 2)]
    {
        let shape = Shape { pp: 2, virtual_stages, micro_batches: samples, unit: samples };
        let shortest = |held, most| {
            Orders { virtual_stages, slices, all: (samples * slices) as u8, held }.shortest(most)
        };
        let what = format!("V {virtual_stages}, n {slices}, M {samples}");
        let (unit, _) = slots("zeropp", &shape, slices);
        let without_limit = [(usize::MAX, usize::MAX); 2];
        assert_eq!(shortest(without_limit, unit), Some(unit), "{what}: a unit of all samples");
        let (rounds, held) = slots("interleaved-zb", &shape, slices);
        assert_eq!(shortest(held, rounds), Some(rounds), "{what}: rounds, {held:?}");
        assert!(rounds <= unit + 1, "{what}: {rounds} slots, a unit {unit}");
        looked_at += 1;
    }
    assert_eq!(looked_at, 8);
}
