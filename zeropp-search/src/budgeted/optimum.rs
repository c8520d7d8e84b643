//! The judge of small cases: the least largest own span of all orders within the budgets, with
//! several stages a rank and few of them gathered at once.
//!
//! Branch and bound in time. The rank that is free first runs an action whose input is there, or it
//! waits; after a wait it must take what it waited for, as a rank does that follows an order, and
//! after a W nothing that could have run in its place. Gathers take no time: for each set of stages
//! the fewest are known after which a rank can hold it. `deadlines` says which orders are too late.

use std::collections::HashMap;

use super::deadlines::Deadlines;
use super::judged::{NEVER, SearchState, V_MAX};
use super::problem::{NO_RANK, Problem};

/// States kept for comparison, over all and for the same work done.
const KEPT_MAX: usize = 2_000_000;
const ALIKE_MAX: usize = 24;

/// The result of a proof.
pub(super) struct ProvenSpan {
    /// The least span known.
    pub(super) span: i64,
    /// Whether there is none below.
    pub(super) proven: bool,
}

/// The least largest own span, from one that is known down to `enough`, looking at `nodes_max`
/// starts of orders.
pub(super) fn optimum(p: &Problem, known: i64, enough: i64, nodes_max: u64) -> ProvenSpan {
    assert!(p.v <= V_MAX && !p.timed && known < i64::from(u16::MAX) / 2);
    let mut search = ProofSearch::new(p, known, enough, nodes_max);
    search.visit(true);
    search.verdict()
}

struct ProofSearch<'a> {
    p: &'a Problem,
    /// Whether gathers are to be counted.
    counts: bool,
    deadlines: Deadlines,
    state: SearchState,
    best: i64,
    enough: i64,
    nodes_left: u64,
    /// Goes through all orders: only to check the judge.
    plain: bool,
    /// By the work done: when each rank is free, what has arrived, and its gathers.
    seen: HashMap<Box<[u16]>, Vec<Box<[u16]>>>,
    kept: usize,
}

impl ProofSearch<'_> {
    fn new(p: &Problem, known: i64, enough: i64, nodes_max: u64) -> ProofSearch<'_> {
        ProofSearch {
            p,
            counts: p.tight && p.gathers_max < usize::MAX,
            deadlines: Deadlines::new(p),
            state: SearchState::new(p),
            best: known,
            enough,
            nodes_left: nodes_max,
            plain: false,
            seen: HashMap::new(),
            kept: 0,
        }
    }

    fn verdict(&self) -> ProvenSpan {
        let proven = self.nodes_left > 0 || self.best <= self.enough;
        ProvenSpan { span: self.best, proven }
    }

    /// `acted`: something has run since the node before this one.
    fn visit(&mut self, acted: bool) {
        if self.nodes_left == 0 || self.best <= self.enough {
            return;
        }
        self.nodes_left -= 1;
        let (p, state) = (self.p, &self.state);
        let open = (0..p.ranks).filter(|r| state.ranks[*r].left > 0);
        let Some((at, r)) = open.map(|r| (state.time(p, r), r)).min() else {
            self.best = self.best.min(self.deadlines.own_span(state));
            return;
        };
        if at == NEVER || !self.plain && self.deadlines.missed(p, state, at, self.best) {
            return;
        }
        if acted && !self.plain && self.dominated() {
            return;
        }
        let before = self.state.ranks[r];
        let mut w: Vec<usize> = (0..p.v).filter(|l| before.waiting_w(*l) > 0).collect();
        if let Some((since, _)) = before.asleep
            && w.iter().any(|l| since + p.w[r * p.v + l] <= at)
        {
            // A W would have fitted.
            return;
        }
        let mut could = 0u32;
        for backward in [true, false] {
            for l in 0..p.v {
                let class = if backward { p.v + l } else { l };
                could |= u32::from(self.try_entry(r, class, at)) << class;
            }
        }
        if before.asleep.is_none() {
            // Where they are alike it does not matter which one.
            w.truncate(if p.same_w[r] { 1 } else { p.v });
            for l in w {
                self.run_w(r, l);
                self.state.ranks[r].barred = before.barred | could;
                self.visit(true);
                self.state.ranks[r] = before;
            }
        }
        let since = before.asleep.map_or(before.now, |(since, _)| since);
        self.state.ranks[r].asleep = Some((since, at));
        self.visit(false);
        self.state.ranks[r] = before;
    }

    /// Runs the next micro-batch of a class; false if it cannot start at `at`.
    fn try_entry(&mut self, r: usize, class: usize, at: i64) -> bool {
        let p = self.p;
        let (before, arrival) = (self.state.ranks[r], self.state.arrival(p, r, class));
        let there = if before.asleep.is_some() { arrival == at } else { arrival <= at };
        if !there || before.memory + p.need[r * p.classes + class] > p.memory {
            return false;
        }
        let mut sets = before.sets;
        if self.counts {
            sets.need(class % p.v, p.room);
            if sets.fewest() > p.gathers_max {
                return false;
            }
        }
        if !self.plain && before.barred & (1 << class) != 0 {
            return true;
        }
        let link = p.link[r * p.classes + class];
        let i = before.done(class / p.v, class % p.v);
        let cell = link.cell as usize + i;
        let takes = p.take[r * p.classes + class];
        let rank = &mut self.state.ranks[r];
        rank.sets = sets;
        (rank.asleep, rank.barred) = (None, 0);
        rank.now = at + takes;
        rank.memory += p.delta[r * p.classes + class];
        rank.left -= takes;
        rank.done[class / p.v * V_MAX + class % p.v] += 1;
        if link.rank != NO_RANK {
            self.state.arrivals[cell] = rank.now + link.delay;
        }
        if self.plain || !self.counts || self.gathers_suffice(r) {
            self.visit(true);
        }
        if link.rank != NO_RANK {
            self.state.arrivals[cell] = NEVER;
        }
        self.state.ranks[r] = before;
        true
    }

    /// Whether rank `r` has gathers enough for the last micro-batch's way down and up again.
    fn gathers_suffice(&self, r: usize) -> bool {
        let (p, rank) = (self.p, &self.state.ranks[r]);
        let mut sets = rank.sets;
        let left = |row: usize| (0..p.v).filter(move |l| rank.done(row, *l) < p.b);
        left(0).for_each(|l| sets.need(l, p.room));
        left(1).rev().for_each(|l| sets.need(l, p.room));
        sets.fewest() <= p.gathers_max
    }

    fn run_w(&mut self, r: usize, l: usize) {
        let (takes, freed) = (self.p.w[r * self.p.v + l], self.p.freed[r * self.p.v + l]);
        let rank = &mut self.state.ranks[r];
        rank.now += takes;
        rank.left -= takes;
        rank.memory -= freed;
        rank.done[2 * V_MAX + l] += 1;
    }

    /// Whether an earlier node had done the same work no later and with no more gathers. Ranks that
    /// follow the same orders from then on end no later either.
    fn dominated(&mut self) -> bool {
        let p = self.p;
        let ranks = &self.state.ranks;
        let mut key: Vec<u16> = Vec::with_capacity(p.ranks * 3 * V_MAX);
        let (mut known, mut new): (Vec<u16>, Vec<u16>) = (Vec::new(), Vec::new());
        for (r, rank) in ranks.iter().enumerate() {
            key.extend_from_slice(&rank.done[..2 * V_MAX]);
            match p.same_w[r] {
                true => key.push(rank.done[2 * V_MAX..].iter().sum()),
                false => key.extend_from_slice(&rank.done[2 * V_MAX..]),
            }
            // A rank that waits starts after what it has let pass.
            let free = rank.asleep.map_or(rank.now, |(since, passed)| since.max(passed));
            known.push(free as u16);
            new.push(free as u16);
            if self.counts {
                known.extend(rank.sets.within_reach().map(u16::from));
                new.extend(rank.sets.counts().map(u16::from));
            }
        }
        for (r, rank) in ranks.iter().enumerate() {
            for class in 0..p.classes {
                let i = rank.done(class / p.v, class % p.v);
                let cells = &self.state.arrivals[(r * p.classes + class) * p.b..][i..p.b];
                let there = cells.iter().take_while(|arrival| **arrival != NEVER);
                known.extend(there.clone().map(|arrival| *arrival as u16));
                new.extend(there.map(|arrival| *arrival as u16));
            }
        }
        let alike = self.seen.entry(key.into()).or_default();
        if alike.iter().any(|known| known.iter().zip(&new).all(|(k, n)| k <= n)) {
            return true;
        }
        // A rank that waits, or that has put a W first, may no longer do all that it could.
        let open = ranks.iter().all(|rank| rank.asleep.is_none());
        if open && self.kept < KEPT_MAX && alike.len() < ALIKE_MAX {
            alike.push(known.into());
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
    use zeropp_schedule::ir::{looping, vee};
    use zeropp_schedule::schedules::{OrderCosts, Shape};

    /// The sums over a number of cases.
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
            let costs = OrderCosts::uniform(pp * v, f, back, w, send).with_limit(memory);
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
            let costs = OrderCosts::uniform(pp, draw(3, 9), draw(3, 9), draw(3, 9), draw(0, 3))
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
    fn it_finds_what_a_walk_through_all_orders_finds() {
        let mut random = Random::new(17);
        let (mut found, mut none) = (0, 0);
        for _ in 0..40 {
            let v = 2 + random.below(2);
            let b = 5 - v - random.below(4 - v);
            let mut draw = |low: usize, more: usize| (low + random.below(more)) as u64;
            let (f, back, w, send) = (draw(3, 9), draw(3, 9), draw(1, 9), draw(0, 4));
            let costs = OrderCosts::uniform(2 * v, f, back, w, send);
            let costs = costs.with_limit((2 * v + draw(0, 4) as usize) as i64);
            let gathered = draw(1, v);
            let gathers = gathered as usize + draw(0, 4) as usize + v - 1;
            let (gathered, gathers) = (Some(gathered), Some(gathers));
            let budgets = Budgets { gathered, gathers, ..Budgets::default() };
            let shape = Shape { pp: 2, virtual_stages: v, micro_batches: b, unit: b };
            let placed = if draw(0, 2) == 0 { looping(2, v) } else { vee(2, v) };
            let p = Problem::new(&shape, &costs, &budgets, placed, Objective::OwnSpan);
            let mut all = ProofSearch { plain: true, ..ProofSearch::new(&p, 1000, 0, 1 << 23) };
            all.visit(true);
            if !all.verdict().proven {
                continue;
            }
            let best = optimum(&p, 1000, 0, 1 << 20);
            assert!(best.proven);
            assert_eq!(
                best.span,
                all.best,
                "{placed:?} {costs:?} {budgets:?}",
                placed = p.placement
            );
            found += usize::from(best.span < 1000);
            none += usize::from(best.span == 1000);
        }
        assert!(found > 10 && none > 0, "{found} {none}");
    }

    #[test]
    fn fewer_gathers_than_an_order_needs_leave_none() {
        // Two stages a rank, one gathered: 2V − 1 = 3 gathers at least.
        let shape = Shape { pp: 2, virtual_stages: 2, micro_batches: 2, unit: 2 };
        let costs = OrderCosts::uniform(4, 4, 4, 4, 0);
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
