//! Simulated annealing over sequences.

use super::decode::OrderTimes;
use super::ledger::WHOLE;
use super::moves::{Changed, change};
use super::problem::Problem;
use super::random::Random;
use super::residency::{ResidencyCounter, visit_alike};
use super::sequence::{Change, RankOrders};

/// Between which temperatures a plan anneals, in units of a micro-batch's work on one stage.
#[derive(Clone, Copy, Debug)]
pub(super) struct Temperatures {
    pub(super) hot: f64,
    pub(super) cold: f64,
}

/// The best plan within all limits so far.
#[derive(Clone, Debug)]
pub(super) struct Best {
    /// The largest span, by the objective.
    pub(super) value: i64,
    pub(super) plan: RankOrders,
    /// The skeleton it grew from.
    pub(super) from: String,
}

/// Where annealing came to.
pub(super) struct Reached {
    pub(super) plan: RankOrders,
    pub(super) score: i64,
    /// By how much it breaks the limits on gathers and gradients.
    pub(super) excess: usize,
}

/// The search's tools, made once.
pub(super) struct Annealer<'a> {
    pub(super) p: &'a Problem,
    pub(super) decoder: OrderTimes,
    pub(super) residency: ResidencyCounter,
    pub(super) random: Random,
    pub(super) best: Option<Best>,
    /// The price of one gather above the limit, in units of the score.
    pub(super) penalty: i64,
}

impl<'a> Annealer<'a> {
    pub(super) fn new(p: &'a Problem, seed: u64) -> Annealer<'a> {
        Annealer {
            p,
            decoder: OrderTimes::new(p),
            residency: ResidencyCounter::default(),
            random: Random::new(seed),
            best: None,
            penalty: (0.8 * p.work_unit() * WHOLE as f64) as i64 + 1,
        }
    }

    /// The score of a whole plan, limits broken included; none where it cannot run. Keeps it if it
    /// is the best.
    pub(super) fn offer(&mut self, plan: &RankOrders, from: &str) -> Option<i64> {
        let score = self.decoder.load(self.p, plan, &mut self.residency)?;
        let excess: usize = self.excesses(plan).iter().sum();
        if excess == 0 {
            self.keep(plan, from);
        }
        Some(score + excess as i64 * self.penalty)
    }

    /// Start of each class and micro-batch, by `(rank · 2V + class) · B + i`.
    pub(super) fn starts(&self, plan: &RankOrders) -> Vec<i64> {
        let p = self.p;
        let mut starts = vec![0; p.entries()];
        for (r, sequence) in plan.sequences.iter().enumerate() {
            for (at, (&entry, &i)) in sequence.entries.iter().zip(&sequence.batch).enumerate() {
                let class = usize::from(entry);
                if class < p.classes {
                    let cell = (r * p.classes + class) * p.b + usize::from(i);
                    starts[cell] = self.decoder.start(r, at);
                }
            }
        }
        starts
    }

    fn excesses(&mut self, plan: &RankOrders) -> Vec<usize> {
        let sequences = plan.sequences.iter().enumerate();
        sequences.map(|(r, sequence)| self.residency.excess(self.p, r, sequence)).collect()
    }

    /// The same of one changed sequence, which was `before`.
    fn excess_of(
        &mut self,
        change: &Change,
        before: usize,
        old: &RankOrders,
        new: &RankOrders,
    ) -> usize {
        let (p, r) = (self.p, change.rank);
        let (old, new) = (&old.sequences[r], &new.sequences[r]);
        // A change up to the end moves W alone.
        let w = change.to == usize::MAX;
        match p.units.len() == 1 && (w || visit_alike(p, old, new, change.from..change.to)) {
            true => before,
            false => self.residency.excess(p, r, new),
        }
    }

    /// Keeps the plan that the decoder timed last, which keeps all limits, if it is the best.
    fn keep(&mut self, plan: &RankOrders, from: &str) {
        let value = self.decoder.value();
        match &mut self.best {
            Some(best) if best.value <= value => {}
            Some(best) => {
                best.value = value;
                best.plan
                    .sequences
                    .iter_mut()
                    .zip(&plan.sequences)
                    .for_each(|(to, sequence)| to.copy(sequence));
                best.from.clear();
                best.from.push_str(from);
            }
            None => self.best = Some(Best { value, plan: plan.clone(), from: from.into() }),
        }
    }

    /// Changes `plan` for an effort of `entries` entries, of which one change of a large step may
    /// be a good part, at these temperatures.
    pub(super) fn anneal(
        &mut self,
        plan: &RankOrders,
        entries: u64,
        temperatures: Temperatures,
        from: &str,
    ) -> Option<Reached> {
        let p = self.p;
        let mut energy = self.decoder.load(p, plan, &mut self.residency)?;
        let (mut current, mut next) = (plan.clone(), plan.clone());
        let mut excess = self.excesses(plan);
        let mut over: usize = excess.iter().sum();
        energy += over as i64 * self.penalty;
        let unit = p.work_unit() * WHOLE as f64;
        let Temperatures { hot, cold } = temperatures;
        let cooling = super::random::logarithm(cold / hot);
        let (start, mut heat) = (self.decoder.effort, hot * unit);
        let (mut changed, mut new_excess): (Changed, Vec<usize>) = (Vec::new(), Vec::new());
        for step in 0u64.. {
            let spent = self.decoder.effort - start;
            if spent >= entries {
                break;
            }
            if step.is_multiple_of(64) {
                heat = hot * unit * exponent(cooling * spent as f64 / entries as f64);
            }
            // Every try counts, also one that is refused before it is timed.
            self.decoder.effort += 4;
            let good = change(p, &mut next, &self.decoder, &mut self.random, &mut changed);
            let slack = (self.random.exponential() * heat) as i64;
            let taken = good && {
                new_excess.clear();
                for change in &changed {
                    let now = self.excess_of(change, excess[change.rank], &current, &next);
                    new_excess.push(now);
                }
                let old: usize = changed.iter().map(|c| excess[c.rank]).sum();
                let now = over + new_excess.iter().sum::<usize>() - old;
                let fine = now as i64 * self.penalty;
                let allowed = energy + slack - fine;
                let decoder = &mut self.decoder;
                match decoder.attempt(p, &next, &changed, allowed, &mut self.residency) {
                    Some(score) => {
                        energy = score + fine;
                        over = now;
                        true
                    }
                    None => false,
                }
            };
            if taken {
                self.decoder.accept(p, &next);
                for (change, more) in changed.iter().zip(&new_excess) {
                    excess[change.rank] = *more;
                    current.sequences[change.rank].copy(&next.sequences[change.rank]);
                }
                if over == 0 {
                    self.keep(&current, from);
                }
            } else {
                if good {
                    self.decoder.reject();
                }
                for &Change { rank, .. } in &changed {
                    next.sequences[rank].copy(&current.sequences[rank]);
                }
            }
        }
        Some(Reached { plan: current, score: energy, excess: over })
    }
}

/// e^x for x ≤ 0 from exact operations, as accurate as a temperature needs.
pub(super) fn exponent(x: f64) -> f64 {
    // e^x = (e^(x/1024))^1024, the inner one from its series.
    let y = x / 1024.0;
    let mut power = 1.0 + y * (1.0 + y * (0.5 + y * (1.0 / 6.0)));
    for _ in 0..10 {
        power *= power;
    }
    power
}
