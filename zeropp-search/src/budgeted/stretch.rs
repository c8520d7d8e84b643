//! Long steps from short ones: a good order of fewer micro-batches, its middle repeated.
//!
//! A middle that repeats every m micro-batches is the same order of actions, later by the same time
//! each time. So every entry of the short plan has its start as a key, copies of the middle have
//! it plus a whole number of periods, and each rank sorts its entries by their keys.

use super::anneal::{Annealer, Temperatures};
use super::problem::Problem;
use super::sequence::RankOrders;
use super::starting_point::{StartingPoint, by_score};
use super::{Budgets, Request};
use zeropp_schedule::schedules::Shape;

/// Entries below which a step is short, and above which even the short one would be long.
pub(super) const SHORT: usize = 2000;
const LONG: usize = 1 << 14;

/// Temperatures at which the seams of a repeated middle are mended.
const MENDING: Temperatures = Temperatures { hot: 0.08, cold: 0.004 };

/// How a step is made shorter: micro-batches of a period, and how many periods are left out.
struct PeriodCut {
    period: usize,
    copies: usize,
    gathers: Option<usize>,
}

/// A cut that leaves some three periods.
fn cut(p: &Problem, budgets: &Budgets) -> Option<PeriodCut> {
    if p.units.len() > 1 || !(SHORT..LONG).contains(&p.entries()) {
        return None;
    }
    let g = p.window();
    match budgets.gathers.filter(|_| p.tight && g < p.v) {
        Some(gathers) => {
            let each = 2 * (p.v - g);
            let units = (gathers.saturating_sub(g) / each).min(p.b);
            let copies = units.checked_sub(3).filter(|n| *n > 0)?;
            let gathers = Some(gathers - copies * each);
            Some(PeriodCut { period: p.b.div_ceil(units), copies, gathers })
        }
        None => {
            let copies = (p.b / p.ranks).checked_sub(3).filter(|n| *n > 0)?;
            Some(PeriodCut { period: p.ranks, copies, gathers: None })
        }
    }
}

/// The shape and the budgets of a short step in place of a long one.
pub(super) fn shortened(p: &Problem, request: &Request) -> Option<(Shape, Budgets)> {
    let cut = cut(p, request.budgets)?;
    let b = p.b - cut.period * cut.copies;
    let shape = Shape { micro_batches: b, unit: b, ..*request.shape };
    Some((shape, Budgets { gathers: cut.gathers, ..request.budgets.clone() }))
}

/// Seeds for a long step from a search over a short one, that of `inner`, by `entries` entries.
pub(super) fn seeds(
    annealer: &mut Annealer,
    inner: &mut Annealer,
    track: usize,
    entries: u64,
) -> Vec<StartingPoint> {
    let (p, small) = (annealer.p, inner.p);
    let b = small.b;
    annealer.decoder.effort += inner.decoder.effort;
    let Some(best) = inner.best.clone() else { return Vec::new() };
    if inner.offer(&best.plan, &best.from).is_none() {
        return Vec::new();
    }
    let starts = inner.starts(&best.plan);
    let more = p.b - b;
    let mut pool: Vec<StartingPoint> = Vec::new();
    let periods = (p.ranks.div_ceil(2)..=b / 2).filter(|m| more.is_multiple_of(*m));
    for period in periods {
        for first in 0..=b - period {
            for shift in shifts(small, &starts, first, period) {
                let copy = Copy { first, period, more, shift };
                annealer.decoder.effort += p.entries() as u64;
                let Some(mut plan) = copy.plan(p, small, &best.plan, &starts) else { continue };
                plan.stride = period;
                let name = format!("{} of {b}, {period} repeated", best.from);
                let Some(score) = annealer.offer(&plan, &name) else { continue };
                pool.push(StartingPoint {
                    track,
                    plan,
                    score,
                    excess: 0,
                    name,
                    walk: None,
                    pattern: None,
                });
            }
        }
        by_score(&mut pool);
        pool.truncate(2);
    }
    // The seams gather too often; that is mended before others are compared with it.
    annealer.penalty *= 4;
    for seed in &mut pool {
        if let Some(reached) = annealer.anneal(&seed.plan, entries / 4, MENDING, &seed.name) {
            (seed.plan, seed.score) = (reached.plan, reached.score);
            seed.excess = reached.excess;
        }
    }
    annealer.penalty /= 4;
    pool
}

/// How much later a copy may be: a period's work, or as much as the short plan takes for it.
fn shifts(p: &Problem, starts: &[i64], first: usize, period: usize) -> Vec<i64> {
    let work = (p.work_unit() * (p.v * period) as f64) as i64;
    let mut shifts = vec![work + work / 50, work + work / 12];
    let to = (first + period).min(p.b - 1);
    if to > first {
        let all = starts.chunks(p.b).map(|i| i[to] - i[first]);
        let mean = all.sum::<i64>() / (p.ranks * p.classes) as i64;
        shifts.push(mean * period as i64 / (to - first) as i64);
    }
    shifts
}

/// A middle and its copies.
struct Copy {
    first: usize,
    period: usize,
    /// Micro-batches that the copies add.
    more: usize,
    shift: i64,
}

impl Copy {
    /// The micro-batch of the short plan that `i` is a copy of, and by how much it is later.
    fn source(&self, i: usize) -> (usize, i64) {
        let copies = match i.checked_sub(self.first) {
            None => 0,
            Some(after) => (after / self.period).min(self.more / self.period),
        };
        (i - copies * self.period, copies as i64 * self.shift)
    }

    /// The long plan. An F that memory has no room for waits until a B has made some.
    fn plan(
        &self,
        p: &Problem,
        short: &Problem,
        plan: &RankOrders,
        starts: &[i64],
    ) -> Option<RankOrders> {
        let mut sequences = Vec::with_capacity(p.ranks);
        for r in 0..p.ranks {
            let mut keys: Vec<(i64, u8)> = Vec::with_capacity(p.classes * p.b);
            for class in 0..p.classes {
                let cell = (r * p.classes + class) * short.b;
                keys.extend((0..p.b).map(|i| {
                    let (from, later) = self.source(i);
                    (starts[cell + from] + later, class as u8)
                }));
            }
            keys.sort_unstable();
            sequences.push(within_memory(p, r, keys.into_iter().map(|(_, class)| class)));
        }
        RankOrders::new(p, sequences, plan.sequences[0].threshold)
    }
}

/// The entries with F delayed while activations would not fit even if all W had run.
fn within_memory(p: &Problem, r: usize, entries: impl Iterator<Item = u8>) -> Vec<u8> {
    let whole = |class: usize| p.delta[r * p.classes + class];
    let (mut held, mut late) = (0i64, std::collections::VecDeque::<u8>::new());
    let mut sequence = Vec::new();
    for entry in entries {
        let class = usize::from(entry);
        if class < p.v {
            late.push_back(entry);
        } else {
            // Its W are taken for granted.
            held -= whole(class - p.v);
            sequence.push(entry);
        }
        while let Some(&next) = late.front() {
            let class = usize::from(next);
            if held + p.need[r * p.classes + class] > p.memory {
                break;
            }
            held += whole(class);
            sequence.push(next);
            late.pop_front();
        }
    }
    sequence
}
