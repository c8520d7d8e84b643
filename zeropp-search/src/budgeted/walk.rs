//! Walks: skeletons for ranks that cannot hold all of their stages gathered.
//!
//! A rank of V stages holds a *window* of g neighbouring ones. A unit's forwards move the window
//! down from the first stages to the last, its backwards up again. At both turns the window stays:
//! at the bottom F and B of the last g stages interleave freely, as in ZB-V; at the top the next
//! unit's forwards fill the last one's backwards. n units cost g + 2n(V − g) gathers; with g = 1
//! that is ZeroPP's 2V − 1 for the first. A *detour* goes up by one stage in the middle of a unit
//! and down again: two gathers more, and the memory of that stage's activations is free earlier.
//!
//! A window *jumps* by g stages, or it *slides* by one. That costs the same gathers, and two stages
//! between which the micro-batches turn on one rank (1 and 2 on the first rank of a V) run by
//! turns: the first micro-batch goes on without waiting for the others.

use super::problem::Problem;
use super::random::Random;

/// Units, and how each one's stay at the bottom is cut by detours.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Walk {
    /// For each unit, micro-batches between detours.
    pub(super) units: Vec<Vec<usize>>,
    /// Whether the window moves by one stage at a time.
    pub(super) slides: bool,
}

/// How far each class must get before the walk goes on, and how far it may get.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Phase {
    pub(super) must: Vec<u16>,
    pub(super) may: Vec<u16>,
}

impl Walk {
    /// The windows' first stages, from the top to the bottom.
    fn windows(&self, v: usize, g: usize) -> Vec<usize> {
        let step = if self.slides { 1 } else { g };
        let mut starts: Vec<usize> = (0..v - g).step_by(step).collect();
        starts.push(v - g);
        starts
    }

    /// The phases of one rank, the last one without limits.
    pub(super) fn phases(&self, p: &Problem, g: usize) -> Vec<Phase> {
        let (v, b) = (p.v, p.b as u16);
        let windows = self.windows(v, g);
        let bottom = windows.len() - 1;
        let mut maker = Maker { v, g, must: vec![0; 2 * v], may: vec![0; 2 * v], all: Vec::new() };
        let mut done = 0u16;
        for unit in &self.units {
            let (before, size) = (done, unit.iter().sum::<usize>() as u16);
            done += size;
            let part = before + unit.first().copied().unwrap_or(0) as u16;
            let detour = v.checked_sub(g + 1).filter(|_| unit.len() > 1);
            for (j, &first) in windows.iter().enumerate().take(bottom) {
                // Forwards on the way down; the stage of the detour only as far as its first part.
                let to = |stage: usize| if detour == Some(stage) { part } else { done };
                maker.forwards(first, windows[j + 1], &to);
                maker.close();
            }
            self.stay(&mut maker, windows[bottom], before, unit, detour);
            for j in (0..bottom).rev() {
                let first = windows[j];
                // What leaves next: the last stage on the way up, the first at the turn.
                let leaves = match self.slides {
                    true if j > 0 => first + g - 1..first + g,
                    true => first..first + 1,
                    false => first..windows[j + 1].min(first + g),
                };
                maker.backwards(first, leaves, done);
                if j > 0 {
                    maker.close();
                }
            }
            // At the top the next unit's forwards join in: its first phase follows without a close.
        }
        maker.must = vec![b; 2 * v];
        maker.may = vec![b; 2 * v];
        maker.close();
        maker.all
    }

    /// The stay at the bottom, with its detours.
    fn stay(&self, maker: &mut Maker, first: usize, before: u16, unit: &[usize], d: Option<usize>) {
        let v = maker.v;
        let mut to = before;
        for (n, part) in unit.iter().enumerate() {
            to += *part as u16;
            maker.forwards(first, v, &|_| to);
            let leaves = if self.slides { v - 1..v } else { first..v };
            maker.backwards(first, leaves, to);
            maker.close();
            if let (Some(stage), Some(next)) = (d, unit.get(n + 1)) {
                // Up: the backwards of the part that is done, then the next part's forwards.
                let further = to + *next as u16;
                maker.allow(v + stage, to);
                maker.allow(stage, further);
                if self.slides {
                    maker.forwards(stage, stage, &|_| further);
                }
                maker.close();
            }
        }
    }

    /// The most activations that wait for the way up while the window is at the bottom.
    pub(super) fn load(&self, v: usize, g: usize) -> usize {
        let of = |unit: &Vec<usize>| {
            let part = unit.iter().max().copied().unwrap_or(0);
            v.saturating_sub(g + 1) * unit.iter().sum::<usize>() + part
        };
        self.units.iter().map(of).max().unwrap_or(0)
    }

    /// The same while each micro-batch's part is there, summed over micro-batches.
    pub(super) fn held(&self, v: usize, g: usize) -> usize {
        let of = |unit: &Vec<usize>| {
            let above = v.saturating_sub(g + 1) * unit.iter().sum::<usize>();
            unit.iter().map(|part| part * (above + part)).sum::<usize>()
        };
        self.units.iter().map(of).sum()
    }

    /// The gathers it costs if every rank keeps to it.
    pub(super) fn gathers(&self, v: usize, g: usize) -> usize {
        let turns: usize = self.units.iter().map(|parts| v - g + parts.len() - 1).sum();
        g + 2 * turns
    }

    /// A walk of at most `most` gathers over `b` micro-batches.
    pub(super) fn random(p: &Problem, g: usize, random: &mut Random) -> Walk {
        let (v, b) = (p.v, p.b);
        let each = 2 * (v - g);
        let turns_max = p.gathers_max.min(g + each * b).saturating_sub(g).max(each);
        let most = (turns_max / each).clamp(1, b);
        let units = match most {
            0..=8 => (most - random.below(most.min(3))).max(1),
            // So many are allowed that memory decides.
            _ => 1 + random.below(8),
        };
        let mut left = ((turns_max - units * each) / 2).min(2 * units);
        let sizes = match p.units.len() {
            1 => split(b, units, random),
            // The cut of sums is given, and the walk keeps to it.
            _ => p.units.clone(),
        };
        let detours = v > g + 1 && !random.once_in(4);
        let mut parts: Vec<usize> = vec![1; sizes.len()];
        while detours && left > 0 {
            let unit = random.below(sizes.len());
            left -= 1;
            parts[unit] = (parts[unit] + 1).min(sizes[unit]);
        }
        let cut = |(n, k): (usize, usize), random: &mut Random| split(n, k, random);
        let units = sizes.into_iter().zip(parts).map(|s| cut(s, random)).collect();
        Walk { units, slides: random.once_in(2) }
    }

    /// Moves micro-batches between neighbouring parts, or cuts and joins them.
    pub(super) fn mutate(&mut self, p: &Problem, g: usize, random: &mut Random) {
        let mut flat: Vec<(usize, usize)> = (0..self.units.len())
            .flat_map(|u| (0..self.units[u].len()).map(move |n| (u, n)))
            .collect();
        if random.once_in(12) {
            self.slides = !self.slides;
            return;
        }
        let at = random.below(flat.len());
        let (u, n) = flat.swap_remove(at);
        if random.once_in(8) && p.v > g + 1 {
            if self.units[u].len() > 1 && n > 0 {
                let joined = self.units[u].remove(n);
                self.units[u][n - 1] += joined;
            } else if self.units[u][n] > 1 {
                let half = self.units[u][n] / 2;
                self.units[u][n] -= half;
                self.units[u].insert(n + 1, half);
            }
            return;
        }
        let Some(&(u2, n2)) = flat.get(random.below(flat.len().max(1))) else { return };
        let whole = p.units.len() > 1 && u2 != u;
        let by = 1 + random.below(2);
        if !whole && self.units[u][n] > by {
            self.units[u][n] -= by;
            self.units[u2][n2] += by;
        }
    }
}

/// `n` as a sum of `parts` numbers, equal ones or somewhat unequal ones.
fn split(n: usize, parts: usize, random: &mut Random) -> Vec<usize> {
    let parts = parts.clamp(1, n);
    let mut left = n;
    let mut all = Vec::with_capacity(parts);
    let equal = random.once_in(2);
    for after in (0..parts).rev() {
        let even = left as f64 / (after + 1) as f64;
        let some = if equal { even } else { even * (0.7 + 0.6 * random.unit()) };
        let size = match after {
            0 => left,
            _ => (some + 0.5) as usize,
        };
        let size = size.clamp(1, left - after);
        all.push(size);
        left -= size;
    }
    all
}

struct Maker {
    v: usize,
    g: usize,
    must: Vec<u16>,
    may: Vec<u16>,
    all: Vec<Phase>,
}

impl Maker {
    /// Forwards of the window at `first`; those of stages before `next` must be done in it.
    fn forwards(&mut self, first: usize, next: usize, to: &dyn Fn(usize) -> u16) {
        for stage in first..(first + self.g).min(self.v) {
            self.may[stage] = self.may[stage].max(to(stage));
            if stage < next {
                self.must[stage] = self.must[stage].max(to(stage));
            }
        }
    }

    /// Backwards of the window at `first`; those of the stages in `leaves` must be done in it.
    fn backwards(&mut self, first: usize, leaves: std::ops::Range<usize>, to: u16) {
        for stage in first..(first + self.g).min(self.v) {
            self.may[self.v + stage] = self.may[self.v + stage].max(to);
        }
        for stage in leaves {
            self.must[self.v + stage] = self.must[self.v + stage].max(to);
        }
    }

    fn allow(&mut self, class: usize, to: u16) {
        self.may[class] = self.may[class].max(to);
        self.must[class] = self.must[class].max(to);
    }

    fn close(&mut self) {
        self.all.push(Phase { must: self.must.clone(), may: self.may.clone() });
    }
}

#[cfg(test)]
mod tests {
    use super::super::pattern::{Pattern, list};
    use super::super::residency::ResidencyCounter;
    use super::super::sequence::RankOrders;
    use super::super::{Budgets, Objective};
    use super::*;
    use zeropp_schedule::ir::vee;
    use zeropp_schedule::schedules::{OrderCosts, Shape};

    #[test]
    fn a_window_that_slides_lets_two_stages_take_turns_where_one_that_jumps_does_not() {
        let shape = Shape { pp: 4, virtual_stages: 4, micro_batches: 6, unit: 6 };
        let costs = OrderCosts::uniform(16, 20, 20, 10, 1);
        let budgets = Budgets { gathered: Some(2), ..Budgets::default() };
        let p = Problem::new(&shape, &costs, &budgets, vee(4, 4), Objective::OwnSpan);
        // While all F of the stage that the window leaves next are not done, which others may run?
        let beside = |slides: bool, stage: usize| {
            let walk = Walk { units: vec![vec![6]], slides };
            let phases = walk.phases(&p, 2);
            let leaves = phases.into_iter().find(|phase| phase.must[stage] == 6);
            leaves.expect("it is left").may[stage + 1]
        };
        assert_eq!([beside(false, 1), beside(true, 1)], [0, 6]);
        assert_eq!([beside(false, 0), beside(true, 0)], [6, 6]);
    }

    #[test]
    fn a_walk_costs_what_it_says() {
        let mut random = Random::new(2);
        let mut listed = 0;
        for (v, g) in [(3, 2), (4, 2), (4, 3), (5, 2), (6, 2), (6, 3), (8, 2)] {
            let shape = Shape { pp: 2, virtual_stages: v, micro_batches: 12, unit: 12 };
            let costs = OrderCosts::uniform(2 * v, 20, 20, 10, 1).with_limit(30 * v as i64);
            let most = g + 2 * (v - g) * 3;
            let (gathered, gathers) = (Some(g as u64), Some(most));
            let budgets = Budgets { gathered, gathers, ..Budgets::default() };
            let p = Problem::new(&shape, &costs, &budgets, vee(2, v), Objective::OwnSpan);
            assert_eq!(p.window(), g);
            for _ in 0..40 {
                let mut pattern = Pattern::random(&p, g, &mut random);
                pattern.walk.get_or_insert_with(|| Walk::random(&p, g, &mut random));
                let walk = pattern.walk.clone().expect("just put there");
                assert!(walk.gathers(v, g) <= most);
                assert_eq!(walk.units.iter().flatten().sum::<usize>(), 12);
                let order = pattern.order(&p, g);
                let found = list(&p, &order, i64::MAX, &mut 0);
                let Some((entries, _)) = found else { continue };
                let plan = RankOrders::new(&p, entries, order.threshold);
                let Some(plan) = plan else { continue };
                listed += 1;
                for (r, sequence) in plan.sequences.iter().enumerate() {
                    let count = ResidencyCounter::default().count(&p, r, sequence, false);
                    assert!(count <= walk.gathers(v, g), "{v} {g} {walk:?}: {count}");
                }
            }
        }
        assert!(listed > 100, "{listed}");
    }
}
