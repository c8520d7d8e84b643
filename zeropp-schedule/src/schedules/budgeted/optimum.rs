//! The judge of small cases: the least largest own span of all orders within the budgets, with
//! several stages a rank and few of them gathered at once.
//!
//! Branch and bound in time. The rank that is free first runs an action whose input is there, with
//! any stage dropped for the one it needs, or it waits; after a wait it must take what it waited
//! for, as a rank does that follows an order. Gathers take no time: how many there are, and how
//! many stages fit, is what limits an order. W run in any order of stages.

use std::collections::HashMap;

use super::problem::{NOBODY, Problem};

const NEVER: i64 = i64::MAX;
/// Stages a rank that it has room for.
const V_MAX: usize = 3;
/// States kept for comparison, over all and for the same work done.
const KEPT_MAX: usize = 400_000;
const ALIKE_MAX: usize = 12;

/// What was found out.
pub(super) struct Optimum {
    /// The least span known.
    pub(super) span: i64,
    /// Whether there is none below.
    pub(super) proven: bool,
}

/// The least largest own span, from one that is known down to `enough`, looking at `nodes_max`
/// starts of orders.
pub(super) fn optimum(p: &Problem, known: i64, enough: i64, nodes_max: u64) -> Optimum {
    assert!(p.v <= V_MAX && !p.timed);
    let rank = |r: usize| Rank { left: p.work[r], ..Rank::default() };
    let mut arrivals = vec![NEVER; p.letters()];
    let first = p.stage.iter().position(|s| *s == 0).expect("there is a stage 0");
    let from = (first / p.v * p.classes + first % p.v) * p.b;
    arrivals[from..from + p.b].fill(0);
    let mut search = Search {
        p,
        arrivals,
        ranks: (0..p.ranks).map(rank).collect(),
        best: known,
        enough,
        nodes_left: nodes_max,
        seen: HashMap::new(),
        kept: 0,
    };
    search.visit();
    let proven = search.nodes_left > 0 || search.best <= enough;
    Optimum { span: search.best, proven }
}

#[derive(Clone, Copy, Default)]
struct Rank {
    now: i64,
    first: Option<i64>,
    /// Since when it waits, and the arrival that it has let pass, if it waits.
    asleep: Option<(i64, i64)>,
    memory: i64,
    left: i64,
    /// Stages held, a bit each.
    held: u32,
    gathers: usize,
    /// F, B and W done by stage.
    done: [u16; 3 * V_MAX],
}

struct Search<'a> {
    p: &'a Problem,
    /// By `(rank · 2V + class) · B + i`.
    arrivals: Vec<i64>,
    ranks: Vec<Rank>,
    best: i64,
    enough: i64,
    nodes_left: u64,
    seen: HashMap<Vec<u16>, Vec<Vec<i64>>>,
    kept: usize,
}

impl Search<'_> {
    fn visit(&mut self) {
        if self.nodes_left == 0 || self.best <= self.enough {
            return;
        }
        self.nodes_left -= 1;
        let open = (0..self.p.ranks).filter(|r| self.ranks[*r].left > 0);
        let Some((at, r)) = open.map(|r| (self.time(r), r)).min() else {
            self.best = self.best.min(self.bound(0));
            return;
        };
        if at == NEVER || self.bound(at) >= self.best || self.dominated() {
            return;
        }
        let before = self.ranks[r];
        if let Some((since, _)) = before.asleep
            && self.waiting_w(r).any(|l| since + self.p.w[r * self.p.v + l] <= at)
        {
            // A W would have fitted.
            return;
        }
        for backward in [true, false] {
            for l in 0..self.p.v {
                let class = if backward { self.p.v + l } else { l };
                self.try_letter(r, class, at);
            }
        }
        if before.asleep.is_none() {
            for l in self.waiting_w(r).collect::<Vec<_>>() {
                self.run_w(r, l);
                self.visit();
                self.ranks[r] = before;
            }
        }
        let since = before.asleep.map_or(before.now, |(since, _)| since);
        self.ranks[r].asleep = Some((since, at));
        self.visit();
        self.ranks[r] = before;
    }

    fn done(&self, r: usize, row: usize, l: usize) -> u16 {
        self.ranks[r].done[row * V_MAX + l]
    }

    /// Stages of rank `r` with a W that could run.
    fn waiting_w(&self, r: usize) -> impl Iterator<Item = usize> + use<'_> {
        (0..self.p.v).filter(move |l| self.done(r, 2, *l) < self.done(r, 1, *l))
    }

    /// Arrival of the next micro-batch of a class; NEVER where it is not on its way.
    fn arrival(&self, r: usize, class: usize) -> i64 {
        let i = usize::from(self.done(r, class / self.p.v, class % self.p.v));
        match i < self.p.b {
            true => self.arrivals[(r * self.p.classes + class) * self.p.b + i],
            false => NEVER,
        }
    }

    /// When rank `r` decides next.
    fn time(&self, r: usize) -> i64 {
        let Rank { now, asleep, .. } = self.ranks[r];
        let Some((_, passed)) = asleep else { return now };
        let next = (0..self.p.classes).map(|class| self.arrival(r, class));
        next.filter(|arrival| *arrival > passed).min().unwrap_or(NEVER)
    }

    /// Runs the next micro-batch of a class, if it can start at `at`, with every choice of the
    /// stage that is dropped for its own.
    fn try_letter(&mut self, r: usize, class: usize, at: i64) {
        let p = self.p;
        let (before, arrival) = (self.ranks[r], self.arrival(r, class));
        let there = if before.asleep.is_some() { arrival == at } else { arrival <= at };
        if !there || before.memory + p.need[r * p.classes + class] > p.memory {
            return;
        }
        let (own, mut drops) = (1u32 << (class % p.v), vec![0]);
        if before.held & own == 0 {
            if before.gathers == p.gathers_max {
                return;
            }
            if u64::from(before.held.count_ones()) >= p.room {
                drops = (0..p.v).map(|l| 1 << l).filter(|bit| before.held & bit != 0).collect();
            }
        }
        let link = p.link[r * p.classes + class];
        let i = usize::from(self.done(r, class / p.v, class % p.v));
        let cell = link.cell as usize + i;
        for drop in drops {
            let rank = &mut self.ranks[r];
            rank.gathers += usize::from(before.held & own == 0);
            rank.held = before.held & !drop | own;
            rank.now = at + p.take[r * p.classes + class];
            rank.first.get_or_insert(at);
            rank.asleep = None;
            rank.memory += p.delta[r * p.classes + class];
            rank.left -= p.take[r * p.classes + class];
            rank.done[class / p.v * V_MAX + class % p.v] += 1;
            let end = rank.now;
            if link.rank != NOBODY {
                self.arrivals[cell] = end + link.delay;
            }
            self.visit();
            if link.rank != NOBODY {
                self.arrivals[cell] = NEVER;
            }
            self.ranks[r] = before;
        }
    }

    fn run_w(&mut self, r: usize, l: usize) {
        let (takes, freed) = (self.p.w[r * self.p.v + l], self.p.freed[r * self.p.v + l]);
        let rank = &mut self.ranks[r];
        rank.now += takes;
        rank.left -= takes;
        rank.memory -= freed;
        rank.done[2 * V_MAX + l] += 1;
    }

    /// The least span that can still come of it if nothing starts before `at`; exact where all is
    /// done.
    fn bound(&self, at: i64) -> i64 {
        let mut most = 0;
        for (r, rank) in self.ranks.iter().enumerate() {
            let Some(first) = rank.first else {
                most = most.max(self.p.work[r]);
                continue;
            };
            let now = if rank.left > 0 { rank.now.max(at) } else { rank.now };
            most = most.max(now + rank.left - first);
            if usize::from(rank.done[V_MAX]) < self.p.b {
                most = most.max(self.last_return(r, at) - first);
            }
        }
        most
    }

    /// When the last micro-batch can have had its W on rank `r`'s first stage at the earliest.
    ///
    /// Micro-batches go first in, first out. So a rank runs all its F of stages up to `s` before
    /// the last micro-batch's F of stage `s` ends, and before that one's B of stage `s` all its F,
    /// and all its B of stages from `s` on.
    fn last_return(&self, r: usize, now: i64) -> i64 {
        let p = self.p;
        let (low, stages) = (p.stage[r * p.v], p.placement.len());
        let mut end = 0;
        // Its F from the first stage to the last, then its B back.
        let forward = (0..stages).map(|s| (s, 0));
        let backward = (low..stages).rev().map(|s| (s, p.v));
        for (s, first) in forward.chain(backward) {
            let q = p.placement[s];
            let before = |l: usize| (p.stage[q * p.v + l] <= s, p.stage[q * p.v + l] >= s);
            let (mut work, mut own, mut class) = (0, 0, 0);
            for l in 0..p.v {
                let left = |row: usize| p.b as i64 - i64::from(self.done(q, row, l));
                let take = |row: usize| p.take[q * p.classes + row * p.v + l];
                let (upto, from) = before(l);
                work += if upto || first > 0 { left(0) * take(0) } else { 0 };
                work += if from && first > 0 { left(1) * take(1) } else { 0 };
                if upto && from {
                    class = first + l;
                    own = left(first / p.v);
                }
            }
            if own == 0 {
                continue;
            }
            let at = q * p.classes + class;
            let known = self.arrivals[at * p.b + p.b - 1];
            if known != NEVER {
                end = known;
            }
            end = (end + p.take[at]).max(self.ranks[q].now.max(now) + work);
            if s != low || first == 0 {
                end += p.link[at].delay;
            }
        }
        end + p.w[r * p.v]
    }

    /// Whether an earlier node had done the same work no later, where no rank waits. Ranks that
    /// follow the same orders from then on end no later either.
    fn dominated(&mut self) -> bool {
        if self.ranks.iter().any(|rank| rank.asleep.is_some()) {
            return false;
        }
        let p = self.p;
        let mut key: Vec<u16> = Vec::with_capacity(p.ranks * (3 * V_MAX + 1));
        let mut times: Vec<i64> = Vec::new();
        for rank in &self.ranks {
            key.extend(rank.done);
            key.push(rank.held as u16);
            times.extend([rank.now, rank.gathers as i64]);
        }
        for r in 0..p.ranks {
            for class in 0..p.classes {
                let i = usize::from(self.done(r, class / p.v, class % p.v));
                let cells = &self.arrivals[(r * p.classes + class) * p.b..][i..p.b];
                times.extend(cells.iter().take_while(|arrival| **arrival != NEVER));
            }
        }
        let alike = self.seen.entry(key).or_default();
        if alike.iter().any(|known| known.iter().zip(&times).all(|(k, t)| k <= t)) {
            return true;
        }
        if self.kept < KEPT_MAX && alike.len() < ALIKE_MAX {
            alike.push(times);
            self.kept += 1;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::super::bound::bound;
    use super::super::random::Random;
    use super::super::{Budgets, Objective, Placement, Request, schedule};
    use super::*;
    use crate::ir::{looping, vee};
    use crate::schedules::{Costs, Shape};

    /// What a number of cases came to.
    #[derive(Debug, Default)]
    struct Count {
        cases: usize,
        proven: usize,
        optimal: usize,
        /// No order is more than 2 % faster.
        close: usize,
        /// Some order is.
        far: usize,
        /// Over the bound at most, in per cent, where the judge ended neither way.
        worst: f64,
    }

    impl Count {
        /// Judges an order of `span` by the optimum, else by whether any other is 2 % faster.
        fn judge(&mut self, p: &Problem, span: i64, nodes: u64) {
            let least = bound(p);
            let best = optimum(p, span, least, nodes);
            assert!(least <= best.span && best.span <= span);
            self.cases += 1;
            self.proven += usize::from(best.proven);
            self.optimal += usize::from(best.proven && span == best.span);
            // Orders below this are more than 2 % faster.
            let enough = (span * 100 + 101) / 102;
            let faster = match best.proven || least >= enough {
                true => best,
                false => optimum(p, enough.min(best.span), least, nodes),
            };
            let known = faster.proven || least >= enough;
            if faster.span < enough {
                self.far += 1;
            } else if known {
                self.close += 1;
            } else {
                self.worst = self.worst.max(100.0 * (span as f64 / least as f64 - 1.0));
            }
        }
    }

    /// The search against the judge, in random cases of up to `most` ranks, stages a rank and
    /// micro-batches.
    fn against(
        cases: usize,
        most: (usize, usize, usize),
        evaluations: Option<u64>,
        nodes: u64,
    ) -> Count {
        let mut random = Random::new(11);
        let mut count = Count::default();
        while count.cases < cases {
            let pp = 2 + random.below(most.0 - 1);
            let v = 1 + random.below(most.1);
            let b = 2 + random.below(most.2 - 1);
            let mut draw = |low: usize, more: usize| (low + random.below(more)) as u64;
            let (f, back, w, send) = (draw(5, 16), draw(5, 16), draw(3, 18), draw(0, 4));
            let memory = (2 * pp * v) as i64 + draw(0, 2 * pp * v) as i64;
            let gathered = draw(1, v) as usize;
            let gathers = gathered + 2 * (v - gathered) * draw(1, 3) as usize;
            let shape = Shape { pp, virtual_stages: v, micro_batches: b, unit: b };
            let costs = Costs::uniform(pp * v, f, back, w, send).with_limit(memory);
            let (gathered, gathers) = (Some(gathered as u64), Some(gathers));
            let budgets = Budgets { gathered, gathers, ..Budgets::default() };
            let (placement, placed) = match draw(0, 2) {
                0 => (Placement::Looping, looping(pp, v)),
                _ => (Placement::Vee, vee(pp, v)),
            };
            let objective = Objective::OwnSpan;
            let (shape, budgets, costs) = (&shape, &budgets, &costs);
            let seed = 1;
            let request =
                Request { shape, costs, budgets, objective, placement, seed, evaluations };
            // Some draws leave no room for any order.
            let Ok(found) = schedule(&request) else { continue };
            let p = Problem::new(shape, costs, budgets, placed, objective);
            count.judge(&p, found.span as i64, nodes);
        }
        count
    }

    #[test]
    fn it_agrees_with_the_judge_of_one_stage_a_rank() {
        let mut random = Random::new(3);
        for _ in 0..12 {
            let mut draw = |low: usize, more: usize| (low + random.below(more)) as u64;
            let (pp, b) = (draw(2, 2) as usize, draw(2, 3) as usize);
            let limit = draw(pp, 2 * pp) as i64 + 1;
            let costs = Costs::uniform(pp, draw(3, 9), draw(3, 9), draw(3, 9), draw(0, 3))
                .with_limit(limit);
            let shape = Shape { pp, virtual_stages: 1, micro_batches: b, unit: b };
            let verdict = crate::judge::judge(&shape, &costs, &|| false).unwrap();
            let budgets = Budgets::default();
            let p = Problem::new(&shape, &costs, &budgets, looping(pp, 1), Objective::OwnSpan);
            let best = optimum(&p, 10 * verdict.own_span as i64, 0, 1 << 22);
            assert!(verdict.optimal && best.proven);
            assert_eq!(best.span as u64, verdict.own_span, "{costs:?}");
        }
    }

    #[test]
    fn fewer_gathers_than_an_order_needs_leave_none() {
        // Two stages a rank, one gathered: 2V − 1 = 3 gathers at least.
        let shape = Shape { pp: 2, virtual_stages: 2, micro_batches: 2, unit: 2 };
        let costs = Costs::uniform(4, 4, 4, 4, 0);
        let least = |gathered: u64, gathers: usize| {
            let (gathered, gathers) = (Some(gathered), Some(gathers));
            let budgets = Budgets { gathered, gathers, ..Budgets::default() };
            let p = Problem::new(&shape, &costs, &budgets, vee(2, 2), Objective::OwnSpan);
            let best = optimum(&p, 1000, 0, 1 << 20);
            assert!(best.proven);
            best.span
        };
        assert_eq!(least(1, 2), 1000);
        assert!(least(2, 2) <= least(1, 3) && least(1, 3) < 1000);
        assert_eq!(least(2, 2), least(1, 9));
    }

    #[test]
    fn small_cases_within_budgets_of_weights_are_mostly_optimal() {
        let count = against(24, (3, 3, 3), Some(300), 60_000);
        assert!(2 * count.optimal >= count.cases, "{count:?}");
        assert!(10 * count.close >= 8 * count.cases, "{count:?}");
    }

    #[test]
    #[ignore = "minutes; prints the figures that the page on the scheduler quotes"]
    fn three_hundred_small_cases_within_budgets_of_weights() {
        println!("{:?}", against(300, (4, 3, 8), None, 1_000_000));
    }
}
