//! Walks with keys of their own for every part: the starts that tight budgets need.
//!
//! A pattern is periodic, but where a unit's end meets the next one's start each part of a walk
//! has times of its own. So every class has, in every part, a start, a part of it that is
//! proportional to the rank, and one that is proportional to the micro-batch. These some 80
//! numbers are annealed: one changes the place of hundreds of entries together, and the list that
//! they make keeps to the walk and to memory. The same numbers, added to the times of an order
//! that annealing found, move its entries together, too: then the list mends what they break.

use super::anneal::{Annealer, Temperatures, exponent};
use super::pattern::{Order, WAITS, list};
use super::problem::Problem;
use super::random::{Random, logarithm};
use super::sequence::RankOrders;
use super::walk::Walk;

/// Keys of all entries as few numbers.
#[derive(Clone, Debug)]
pub(super) struct Drift {
    pub(super) walk: Walk,
    /// First micro-batch of each part, and the number of micro-batches.
    firsts: Vec<usize>,
    /// By `part · 2V + class`.
    start: Vec<f64>,
    slope: Vec<f64>,
    pace: Vec<f64>,
    /// Memory that an F leaves free, in forwards of its stage, by `part · V + v`.
    reserve: Vec<f64>,
    impatience: f64,
}

/// Units of a walk whose keys drift.
const UNITS_MAX: usize = 3;
/// Walks drawn for one that loads memory least.
const DRAWS: usize = 48;

/// The walk of some drawn at random that needs least memory at the bottom.
fn few_gathers(p: &Problem, random: &mut Random) -> Walk {
    let draws = (0..DRAWS).map(|_| Walk::random(p, p.window(), random));
    draws.min_by_key(|walk| walk.load(p.v, p.window())).expect("some were drawn")
}

/// A walk that holds few activations at the bottom, on average over micro-batches; of those that do
/// so within a hundredth, one whose first parts are smallest: they are the first to be back, while
/// ranks have nothing but forwards to run.
fn growing(p: &Problem, random: &mut Random) -> Walk {
    let g = p.window();
    let mut all: Vec<Walk> = (0..DRAWS).map(|_| Walk::random(p, g, random)).collect();
    let mut descend = |walk: &mut Walk, height: &dyn Fn(&Walk) -> usize| {
        for _ in 0..DRAWS {
            let mut next = walk.clone();
            next.mutate(p, g, random);
            if next.gathers(p.v, g) <= p.gathers_max && height(&next) <= height(walk) {
                *walk = next;
            }
        }
    };
    let held = |walk: &Walk| walk.held(p.v, g);
    all.iter_mut().for_each(|walk| descend(walk, &held));
    let least = all.iter().map(held).min().unwrap_or(0);
    let first = |walk: &Walk| match held(walk) {
        held if 100 * held <= 101 * least => walk.units[0][0],
        held => p.b + held,
    };
    all.iter_mut().for_each(|walk| descend(walk, &first));
    let parts = |walk: &Walk| (first(walk), walk.units.concat());
    all.into_iter().min_by_key(parts).expect("some were drawn")
}

/// Whether gathers are so few that even a light walk leaves at the bottom room for no more than
/// one and a half forwards a rank: what is on its way there and back fills about one. More
/// than [`UNITS_MAX`] units have too many numbers to anneal.
pub(super) fn narrow(p: &Problem, random: &Random) -> bool {
    if !p.tight || p.gathers_max == usize::MAX {
        return false;
    }
    let walk = few_gathers(p, &mut random.clone());
    let load = walk.load(p.v, p.window()) as i64;
    let f = p.need.iter().max().copied().unwrap_or(0);
    walk.units.len() <= UNITS_MAX && 2 * (p.memory - load * f) <= 3 * p.ranks as i64 * f
}

impl Drift {
    /// The parts of a walk, everything zero.
    fn still(p: &Problem, walk: Walk) -> Drift {
        let mut firsts = vec![0];
        for part in walk.units.iter().flatten() {
            firsts.push(firsts[firsts.len() - 1] + part);
        }
        let (n, none) = (firsts.len() - 1, Vec::new);
        let mut drift = Drift {
            walk,
            firsts,
            start: none(),
            slope: none(),
            pace: none(),
            reserve: vec![0.0; n * p.v],
            impatience: 0.0,
        };
        for numbers in [&mut drift.start, &mut drift.slope, &mut drift.pace] {
            numbers.resize(n * p.classes, 0.0);
        }
        drift
    }

    /// A growing walk that slides, its parts one after the other.
    fn random(p: &Problem, random: &mut Random) -> Drift {
        let mut walk = growing(p, random);
        walk.slides = true;
        let mut drift = Drift::still(p, walk);
        let (v, work) = (p.v, p.work_unit());
        let (f, back) = (p.take[0] as f64, p.take[v] as f64);
        let last = (p.ranks - 1) as f64;
        for (part, pair) in drift.firsts.windows(2).enumerate() {
            let (first, size) = (pair[0] as f64 * v as f64 * work, (pair[1] - pair[0]) as f64);
            for l in 0..v {
                let down = p.ranks > 1 && p.stage[l] > p.stage[(p.ranks - 1) * v + l];
                let (k, far) = (part * p.classes + l, if down { last } else { 0.0 });
                drift.slope[k] = if down { -f } else { f };
                drift.slope[k + v] = if down { back } else { -back };
                drift.start[k] = first + l as f64 * size * f + far * f;
                let after = v as f64 * size * f + (v - 1 - l) as f64 * size * (work - f);
                drift.start[k + v] = first + after - far * back;
                drift.pace[k] = 2.0 * work * random.unit();
                drift.pace[k + v] = 2.0 * work * random.unit();
                drift.reserve[part * v + l] = (v - 1 - l) as f64;
            }
        }
        drift.impatience = 1.0;
        drift
    }

    /// Changes one to three numbers by at most `scale`, mostly by less.
    fn mutate(&mut self, p: &Problem, scale: f64, random: &mut Random) {
        let work = p.work_unit();
        for _ in 0..1 + random.below(3) {
            let k = random.below(self.start.len());
            let by = (2.0 * random.unit() - 1.0) * scale / (1 << random.below(3)) as f64;
            match random.below(20) {
                0..9 => self.start[k] += 8.0 * by * work,
                9..11 => {
                    let all = self.start.iter_mut().skip(k % p.classes).step_by(p.classes);
                    all.for_each(|start| *start += 8.0 * by * work);
                }
                11..13 => self.slope[k] += by * work,
                13..17 => self.pace[k] += by * work,
                17 => {
                    let reserve = &mut self.reserve[k % (p.v * (self.firsts.len() - 1))];
                    *reserve = (*reserve + 4.0 * by).max(0.0);
                }
                18 => self.impatience = (self.impatience + by).max(0.0),
                _ => {
                    self.pace[k] += by * work;
                    self.start[k] -= 4.0 * by * work;
                }
            }
        }
    }

    /// Writes the keys, which are added to `base`.
    fn write(&self, p: &Problem, base: &[f64], order: &mut Order) {
        order.impatience = self.impatience;
        for (part, pair) in self.firsts.windows(2).enumerate() {
            for at in 0..p.ranks * p.classes {
                let (r, class) = (at / p.classes, at % p.classes);
                let k = part * p.classes + class;
                let first = self.start[k] + self.slope[k] * r as f64;
                for i in pair[0]..pair[1] {
                    let cell = at * p.b + i;
                    order.keys[cell] = base[cell] + first + self.pace[k] * (i - pair[0]) as f64;
                    if class < p.v {
                        let reserve = self.reserve[part * p.v + class];
                        order.spare[cell] = (reserve * p.need[at] as f64) as i64;
                    }
                }
            }
        }
    }
}

/// An order that drifts, and how long it waits.
pub(super) struct Drifting {
    pub(super) drift: Drift,
    order: Order,
    base: Vec<f64>,
    pub(super) waits: i64,
}

impl Drifting {
    /// A walk at random that comes to its end; none where few do.
    pub(super) fn walk(annealer: &mut Annealer) -> Option<Drifting> {
        let p = annealer.p;
        (0..TRIES).find_map(|_| {
            let mut drift = Drift::random(p, &mut annealer.random);
            for _ in 0..annealer.random.below(20) {
                drift.mutate(p, 1.0, &mut annealer.random);
            }
            Drifting::new(annealer, drift, vec![0.0; p.entries()])
        })
    }

    /// From the times of a plan that kept to `walk`.
    pub(super) fn timed(
        annealer: &mut Annealer,
        walk: &Walk,
        plan: &RankOrders,
    ) -> Option<Drifting> {
        let p = annealer.p;
        annealer.decoder.load(p, plan, &mut annealer.residency)?;
        let base = annealer.starts(plan).into_iter().map(|at| at as f64).collect();
        Drifting::new(annealer, Drift::still(p, walk.clone()), base)
    }

    fn new(annealer: &mut Annealer, drift: Drift, base: Vec<f64>) -> Option<Drifting> {
        let p = annealer.p;
        let mut order = Order::new(p, p.longest_w_of_all());
        order.phases = Some(drift.walk.phases(p, p.window()));
        let mut drifting = Drifting { drift, order, base, waits: i64::MAX };
        drifting.waits = drifting.list(annealer, &drifting.drift.clone(), i64::MAX)?.1;
        Some(drifting)
    }

    /// The sequences of some numbers, if they wait at most `allowed`.
    fn list(
        &mut self,
        annealer: &mut Annealer,
        drift: &Drift,
        allowed: i64,
    ) -> Option<(Vec<Vec<u8>>, i64)> {
        let p = annealer.p;
        drift.write(p, &self.base, &mut self.order);
        list(p, &self.order, allowed, &mut annealer.decoder.effort)
    }

    /// Anneals the numbers for an effort of `entries` entries, changed by at most `scale`.
    pub(super) fn anneal(
        &mut self,
        annealer: &mut Annealer,
        entries: u64,
        temperatures: Temperatures,
        scale: f64,
    ) {
        let unit = annealer.p.work_unit() * WAITS as f64;
        let Temperatures { hot, cold } = temperatures;
        let cooling = logarithm(cold / hot);
        let start = annealer.decoder.effort;
        let (mut here, mut waits) = (self.drift.clone(), self.waits);
        loop {
            let done = (annealer.decoder.effort - start) as f64 / entries.max(1) as f64;
            if done >= 1.0 {
                return;
            }
            let mut next = here.clone();
            next.mutate(annealer.p, scale * (1.0 - 0.8 * done), &mut annealer.random);
            let heat = hot * unit * exponent(cooling * done);
            let allowed = waits + (annealer.random.exponential() * heat) as i64;
            if let Some((_, found)) = self.list(annealer, &next, allowed) {
                (here, waits) = (next, found);
                if found < self.waits {
                    (self.drift, self.waits) = (here.clone(), found);
                }
            }
        }
    }

    /// The best sequences so far.
    pub(super) fn plan(&mut self, annealer: &mut Annealer) -> Option<RankOrders> {
        let drift = self.drift.clone();
        let (entries, _) = self.list(annealer, &drift, i64::MAX)?;
        RankOrders::new(annealer.p, entries, self.order.threshold)
    }
}

/// Tries for a walk that comes to its end.
const TRIES: usize = 40;

#[cfg(test)]
mod tests {
    use super::super::residency::ResidencyCounter;
    use super::super::{Budgets, Objective};
    use super::*;
    use zeropp_schedule::ir::vee;
    use zeropp_schedule::schedules::{OrderCosts, Shape};

    fn problem(pp: usize, b: usize, memory: i64, gathers: Option<usize>) -> Problem {
        let shape = Shape { pp, virtual_stages: 4, micro_batches: b, unit: b };
        let costs = OrderCosts::uniform(4 * pp, 925, 900, 465, 60).with_limit(memory);
        let budgets = Budgets { gathered: Some(2), gathers, ..Budgets::default() };
        Problem::new(&shape, &costs, &budgets, vee(pp, 4), Objective::OwnSpan)
    }

    #[test]
    fn a_step_is_narrow_where_both_memory_and_gathers_are_few() {
        let narrow = |memory, gathers| narrow(&problem(8, 24, memory, gathers), &Random::new(1));
        assert!(narrow(64, Some(12)));
        let wide = [(72, Some(12)), (64, Some(14)), (64, None)];
        assert_eq!(wide.map(|(memory, gathers)| narrow(memory, gathers)), [false; 3]);
        // Five units of five micro-batches: as narrow, but of too many numbers.
        let many = problem(4, 24, 32, Some(24));
        let few = problem(4, 12, 32, Some(12));
        assert_eq!([&many, &few].map(|p| super::narrow(p, &Random::new(1))), [false, true]);
    }

    #[test]
    fn a_walk_that_grows_holds_little_and_begins_with_the_smallest_part_that_then_can_be() {
        for b in [12, 24, 30] {
            let p = problem(8, b, 64, Some(12));
            // Two units and a detour in one of them, in all sizes.
            let split = |n: usize| (1..n).map(move |part| vec![part, n - part]);
            let cut = |n: usize| {
                let first = split(n).map(move |unit| vec![unit, vec![b - n]]);
                let last = split(n).map(move |unit| vec![vec![b - n], unit]);
                first.chain(last)
            };
            let walk = |units| Walk { units, slides: true };
            let all: Vec<Walk> = (2..b).flat_map(cut).map(walk).collect();
            let held = |walk: &Walk| walk.held(4, 2);
            let least = all.iter().map(held).min().expect("there are some");
            let near = |walk: &&Walk| 100 * held(walk) <= 101 * least;
            let first = all.iter().filter(near).map(|walk| walk.units[0][0]).min();
            for seed in 1..20 {
                let found = growing(&p, &mut Random::new(seed));
                assert!(near(&&found) && found.gathers(4, 2) <= 12, "{found:?}");
                assert_eq!(Some(found.units[0][0]), first, "{found:?}");
            }
        }
    }

    #[test]
    fn drifting_walks_wait_less_and_stay_walks() {
        let p = problem(4, 12, 32, Some(12));
        let mut annealer = Annealer::new(&p, 3);
        let mut drifting = Drifting::walk(&mut annealer).expect("some walk ends");
        let at_first = drifting.waits;
        drifting.anneal(&mut annealer, 500_000, Temperatures { hot: 0.5, cold: 0.02 }, 1.0);
        assert!(drifting.waits < at_first * 3 / 4, "{} of {at_first}", drifting.waits);
        let plan = drifting.plan(&mut annealer).expect("a plan");
        let listed = annealer.offer(&plan, "walk").expect("it runs");
        let walk = drifting.drift.walk.clone();
        for (r, sequence) in plan.sequences.iter().enumerate() {
            let gathers = ResidencyCounter::default().count(&p, r, sequence, true);
            assert!(gathers <= walk.gathers(4, 2), "{gathers} on rank {r}: {walk:?}");
        }
        // From its own times it goes on, and what comes out keeps to the same walk.
        let mild = Temperatures { hot: 0.03, cold: 0.002 };
        let annealed = annealer.anneal(&plan, 500_000, mild, "walk");
        let annealed = annealed.expect("it runs");
        assert!(annealed.score < listed);
        let again = Drifting::timed(&mut annealer, &walk, &annealed.plan);
        let mut again = again.expect("times of an order list an order");
        let plan = again.plan(&mut annealer).expect("a plan");
        assert!(annealer.offer(&plan, "again").expect("it runs") < listed);
        let excess = |(r, sequence)| ResidencyCounter::default().excess(&p, r, sequence);
        assert_eq!(plan.sequences.iter().enumerate().map(excess).sum::<usize>(), 0);
    }
}
