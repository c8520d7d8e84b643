//! How many micro-batches of a unit are done again and how many are put out: the fewest that fit.

use super::super::order::{by_memory, in_order};
use super::super::space;
use super::Pass;
use crate::exact;
use crate::layout::{Layout, Recompute};

/// Actions of what is simulated for that.
const BUDGET: usize = 1_200_000;

/// Memory that there is, and actions that may still be simulated.
struct Limits {
    memory: u64,
    budget: usize,
}

impl Pass<'_> {
    /// Looks for the numbers of micro-batches that are done again and put out, where some may be,
    /// in units of every size that is worth it: what differs from a good layout in one of the three
    /// alone is too large or too slow, so that no climb leads through it to the next one.
    pub(super) fn balance_copies(&mut self, memory: u64) {
        if self.again || !self.job.may_put_out() {
            return;
        }
        let fastest = self.fitting(memory).min_by(|a, b| in_order(a, b));
        let leanest = || self.known.values().flatten().min_by(|a, b| by_memory(a, b));
        let Some(from) = fastest.or_else(leanest).map(|planned| planned.layout.clone()) else {
            return;
        };
        if !from.in_units() || from.slices > 1 {
            return;
        }
        let mut limits = Limits { memory, budget: BUDGET };
        let from = Layout { prefetch: 1, ..from };
        let mut best = (f64::INFINITY, from.clone());
        for unit in space::even_units(self.job, &from) {
            let layout = Layout { unit, ..from.clone() };
            let found = (self.balanced_s(&layout, &mut limits), layout);
            best = if found.0 < best.0 { found } else { best };
        }
        // Where nothing is gathered ahead there may be room for more.
        if from.zero3 > 1 {
            self.balanced_s(&Layout { prefetch: 0, ..best.1 }, &mut limits);
        }
    }

    /// Seconds of the fastest layout that has such units and fits, as far as one more or one less
    /// that is done again leads to it; infinite where none fits.
    fn balanced_s(&mut self, layout: &Layout, limits: &mut Limits) -> f64 {
        let numbers: Vec<usize> = match self.job.fixed.recompute {
            None => (0..=layout.unit).collect(),
            Some(Recompute::Full) => vec![layout.unit],
            Some(_) => vec![0],
        };
        let (mut at, last) = (0, numbers.len() - 1);
        let mut here = self.fewest_out_s(layout, numbers[at], limits);
        while here.is_infinite() && at < last {
            at = (2 * at + 1).min(last);
            here = self.fewest_out_s(layout, numbers[at], limits);
        }
        for by in [-1, 1] {
            while let Some(number) = at.checked_add_signed(by).and_then(|at| numbers.get(at)) {
                let beside = self.fewest_out_s(layout, *number, limits);
                if beside >= here {
                    break;
                }
                (at, here) = (at.saturating_add_signed(by), beside);
            }
        }
        here
    }

    /// Seconds of the layout that does so many of a unit again and puts out as few as it takes to
    /// fit; infinite where none does.
    fn fewest_out_s(&mut self, layout: &Layout, again: usize, limits: &mut Limits) -> f64 {
        let recompute = match (again, self.job.fixed.recompute) {
            (0, given) => given.unwrap_or(Recompute::Selective),
            _ => Recompute::Full,
        };
        let redone = (1..layout.unit).contains(&again).then_some(again);
        let room = self.job.room_outside();
        let mut step_s = |out: usize, out_later: bool| {
            let layout = Layout { recompute, redone, out, out_later, ..layout.clone() };
            if !self.known.contains_key(&layout) {
                limits.budget = limits.budget.checked_sub(exact::actions(&layout))?;
                self.simulate(vec![layout.clone()]);
            }
            let planned = self.known[&layout].as_ref()?;
            let is_room = planned.outside() <= room;
            let step_s = if is_room { planned.step_s } else { f64::INFINITY };
            (planned.worst().1.total() <= limits.memory).then_some(step_s)
        };
        let (mut fewer, mut enough) = (0, layout.unit);
        let Some(mut best) = step_s(enough, false) else { return f64::INFINITY };
        while fewer < enough {
            let out = fewer.midpoint(enough);
            match step_s(out, false) {
                Some(found) => (enough, best) = (out, found),
                None => fewer = out + 1,
            }
        }
        if enough > 0 && layout.moments && layout.unit < layout.micro_batches {
            best = step_s(enough, true).map_or(best, |later| later.min(best));
        }
        best
    }
}
