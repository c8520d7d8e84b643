//! Where the judge of small cases has come to: ranks, what they hold and what is on its way.

use super::problem::Problem;

/// An input that is not made yet.
pub(super) const NEVER: i64 = i64::MAX;
/// Stages a rank that there is room for.
pub(super) const V_MAX: usize = 3;

/// For each set of stages, a bit each, the fewest gathers after which a rank can hold it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sets([u8; 1 << V_MAX]);

impl Sets {
    pub(super) const NONE: Sets = {
        let mut sets = [u8::MAX; 1 << V_MAX];
        sets[0] = 0;
        Sets(sets)
    };

    /// Stage `l` is needed: it replaces any other where `room` are held.
    pub(super) fn need(&mut self, l: usize, room: u64) {
        let before = std::mem::replace(&mut self.0, [u8::MAX; 1 << V_MAX]);
        let own = 1usize << l;
        for (held, &count) in before.iter().enumerate().filter(|(_, count)| **count < u8::MAX) {
            let mut reach = |set: usize, count: u8| self.0[set] = self.0[set].min(count);
            if held & own != 0 {
                reach(held, count);
            } else if u64::from(held.count_ones()) < room {
                reach(held | own, count + 1);
            } else {
                let held_ones = (0..V_MAX).map(|gone| 1 << gone).filter(|gone| held & gone != 0);
                held_ones.for_each(|gone| reach((held & !gone) | own, count + 1));
            }
        }
    }

    pub(super) fn fewest(&self) -> usize {
        usize::from(self.0.into_iter().min().unwrap_or(0))
    }

    /// The same where a gather more leads from one set to another, and a free costs nothing.
    pub(super) fn within_reach(&self) -> [u8; 1 << V_MAX] {
        std::array::from_fn(|set| {
            let from = self.0.iter().enumerate();
            let counts = from.map(|(h, n)| n.saturating_add((set & !h).count_ones() as u8));
            counts.min().unwrap_or(u8::MAX)
        })
    }

    pub(super) fn counts(&self) -> [u8; 1 << V_MAX] {
        self.0
    }
}

#[derive(Clone, Copy)]
pub(super) struct JudgedRank {
    pub(super) now: i64,
    /// Since when it waits, and the arrival that it has let pass, if it waits.
    pub(super) asleep: Option<(i64, i64)>,
    pub(super) memory: i64,
    pub(super) left: i64,
    pub(super) sets: Sets,
    /// Classes that could have run in place of the last W, a bit each.
    pub(super) barred: u32,
    /// F, B and W done by stage.
    pub(super) done: [u16; 3 * V_MAX],
}

impl JudgedRank {
    pub(super) fn done(&self, row: usize, l: usize) -> usize {
        usize::from(self.done[row * V_MAX + l])
    }

    /// W of stage `l` that could run.
    pub(super) fn waiting_w(&self, l: usize) -> usize {
        self.done(1, l) - self.done(2, l)
    }
}

pub(super) struct SearchState {
    /// By `(rank · 2V + class) · B + i`.
    pub(super) arrivals: Vec<i64>,
    pub(super) ranks: Vec<JudgedRank>,
}

impl SearchState {
    pub(super) fn new(p: &Problem) -> SearchState {
        let rank = |r: usize| JudgedRank {
            now: 0,
            asleep: None,
            memory: 0,
            left: p.work[r],
            sets: Sets::NONE,
            barred: 0,
            done: [0; 3 * V_MAX],
        };
        let mut arrivals = vec![NEVER; p.entries()];
        let first = p.stage.iter().position(|s| *s == 0).expect("there is a stage 0");
        let from = (first / p.v * p.classes + first % p.v) * p.b;
        arrivals[from..from + p.b].fill(0);
        SearchState { arrivals, ranks: (0..p.ranks).map(rank).collect() }
    }

    /// Arrival of the next micro-batch of a class; NEVER where it is not on its way.
    pub(super) fn arrival(&self, p: &Problem, r: usize, class: usize) -> i64 {
        let i = self.ranks[r].done(class / p.v, class % p.v);
        match i < p.b {
            true => self.arrivals[(r * p.classes + class) * p.b + i],
            false => NEVER,
        }
    }

    /// When rank `r` decides next.
    pub(super) fn time(&self, p: &Problem, r: usize) -> i64 {
        let JudgedRank { now, asleep, .. } = self.ranks[r];
        let Some((_, passed)) = asleep else { return now };
        let next = (0..p.classes).map(|class| self.arrival(p, r, class));
        next.filter(|arrival| *arrival > passed).min().unwrap_or(NEVER)
    }
}
