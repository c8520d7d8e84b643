//! The programs of a run: a schedule lowered and verified, for every replica, which have not all as
//! many micro-batches where a batch does not divide evenly (ADR 70).

use zeropp_schedule::ir::Schedule;
use zeropp_schedule::lower::{LowerOptions, in_issue_order, lower, with_sums_in_order_of};
use zeropp_schedule::memory::StageBytes;
use zeropp_schedule::schedules::{OrderCosts, forwards_of};
use zeropp_schedule::simulate::{self, SimulateError, simulate};
use zeropp_schedule::timeline::{MemoryPoint, RankTimeline, Timeline};
use zeropp_schedule::verify::{
    VerifyError, VerifyLimits, verify, verify_issue_order, verify_replicas,
    verify_replicas_issue_order,
};

use crate::deal::Deal;

/// The verified program of a schedule that has compute actions alone. With `one_order` all ranks
/// issue what they do together in one order, as NCCL wants it (ADR 31).
///
/// # Errors
/// A program that would not run through.
pub fn lowered(
    compact: &Schedule,
    options: &LowerOptions,
    one_order: bool,
) -> Result<Schedule, VerifyError> {
    let forward_only = compact.is_forward_only();
    let limits = VerifyLimits { forward_only, ..VerifyLimits::default() };
    let program = lower(compact, options);
    verify(&program, &limits)?;
    if !one_order {
        return Ok(program);
    }
    let program = in_issue_order(&program);
    verify(&program, &limits)?;
    verify_issue_order(&program)?;
    Ok(program)
}

/// The verified program of a validation loss: the forwards of `training`, with so many stages
/// gathered ahead.
///
/// # Errors
/// A program that would not run through.
pub fn forwards(
    training: &Schedule,
    prefetch: usize,
    one_order: bool,
) -> Result<Schedule, VerifyError> {
    let options = LowerOptions { prefetch, ..LowerOptions::default() };
    lowered(&forwards_of(training), &options, one_order)
}

/// The generators' costs of stages with these times that keep `bytes`: those that a run's schedule
/// is made for, and a plan's. Of the first `recomputed` entries, of stages that are done again as a
/// whole, that is part of their B. A rank may keep up to `mem_limit` bytes from F to W.
pub fn generator_costs(
    costs: &simulate::Costs,
    bytes: &[StageBytes],
    recomputed: usize,
    mem_limit: Option<i64>,
) -> OrderCosts {
    // Kinds that are named after a number of activations count what B keeps for W within them,
    // also where it is more, as with selective recomputation. A limit in bytes is of all bytes.
    let stash = |m: &StageBytes| match mem_limit {
        Some(_) => *m,
        None => StageBytes { stash: m.stash.min(m.activation), ..*m },
    };
    let memory = bytes.iter().map(stash).collect();
    let mut weighed = OrderCosts::from(&simulate::Costs { memory, ..costs.clone() });
    weighed.mem_limit = mem_limit;
    weighed.send = message_ns(costs);
    for (b, stage) in weighed.b.iter_mut().zip(&costs.stages).take(recomputed) {
        *b += stage.r_ns;
    }
    weighed
}

/// What a message takes, the largest one where they differ.
pub fn message_ns(costs: &simulate::Costs) -> u64 {
    let largest = costs.memory.iter().map(|m| costs.link.transfer_ns(m.message)).max();
    let transfer = u64::try_from(largest.unwrap_or(0)).unwrap_or(u64::MAX / 8);
    costs.link.latency_ns.saturating_add(transfer)
}

/// The rank that keeps most from forward to backward at once in a simulated step, and its bytes.
pub fn most_kept(simulated: &Timeline) -> Option<(usize, u64)> {
    let peak = |bytes: u64, m: &MemoryPoint| bytes.max(m.bytes);
    let peaks = simulated.ranks.iter().map(|r| (r.pp, r.memory.iter().fold(0, peak)));
    peaks.max_by_key(|(_, most)| *most)
}

/// The verified programs of all pipeline ranks, for every replica of a run.
#[derive(Clone, Debug, Default)]
pub struct Programs {
    deal: Deal,
    /// Of those with the most micro-batches; the first is one.
    pub most: Schedule,
    /// Of those that have fewer, if there are any.
    pub fewer: Option<Schedule>,
}

impl Programs {
    /// Replicas that are dealt as many micro-batches each.
    pub fn alike(deal: Deal, program: Schedule) -> Programs {
        Programs { deal, most: program, fewer: None }
    }

    /// Replicas of which some have `fewer`, whose sums are brought into the order of `most`.
    ///
    /// # Errors
    /// Programs of replicas that do not run through.
    pub fn of_two(deal: Deal, most: Schedule, fewer: &Schedule) -> Result<Programs, VerifyError> {
        let fewer = with_sums_in_order_of(&most, fewer);
        verify(&fewer, &VerifyLimits::default())?;
        Ok(Programs { deal, most, fewer: Some(fewer) })
    }

    /// Programs from elsewhere, as [`each`](Self::each) had them there, verified; none where there
    /// are not as many as `deal` wants, or they are for other meshes or batches.
    ///
    /// # Errors
    /// A program that would not run through.
    pub fn given(
        deal: Deal,
        pp: usize,
        all: Vec<Schedule>,
    ) -> Result<Option<Programs>, VerifyError> {
        let wanted = [deal.most].into_iter().chain(deal.fewer());
        let samples = |of: &Schedule| of.micro_batches() / of.slices_per_sample();
        let found = all.iter().map(|program| (program.pp(), samples(program)));
        if !found.eq(wanted.map(|n| (pp, n))) {
            return Ok(None);
        }
        for program in &all {
            verify(program, &VerifyLimits::default())?;
        }
        let mut all = all.into_iter();
        let most = all.next().expect("one is wanted");
        Ok(Some(Programs { deal, most, fewer: all.next() }))
    }

    /// The same with `of` each program in place of it.
    ///
    /// # Errors
    /// Its first.
    pub fn map<E>(&self, of: impl Fn(&Schedule) -> Result<Schedule, E>) -> Result<Programs, E> {
        let fewer = self.fewer.as_ref().map(&of).transpose()?;
        Ok(Programs { deal: self.deal, most: of(&self.most)?, fewer })
    }

    /// Whether the programs of the replicas go together, in one order of all that they do together
    /// where that is wanted.
    ///
    /// # Errors
    /// Why they do not.
    pub fn check(&self, one_order: bool) -> Result<(), VerifyError> {
        let replicas = self.deal.to_vec().len();
        let all: Vec<&Schedule> = (0..replicas).map(|replica| self.of(replica)).collect();
        match (&self.fewer, one_order) {
            (None, _) => Ok(()),
            (_, true) => verify_replicas_issue_order(&all),
            (_, false) => verify_replicas(&all),
        }
    }

    /// Those of a replica.
    pub fn of(&self, replica: usize) -> &Schedule {
        let has_fewer = self.deal.of_replica(replica) < self.deal.most;
        self.fewer.as_ref().filter(|_| has_fewer).unwrap_or(&self.most)
    }

    /// The different ones, those for the most micro-batches first.
    pub fn each(&self) -> impl Iterator<Item = &Schedule> {
        [&self.most].into_iter().chain(&self.fewer)
    }

    /// Units of a step of all replicas together.
    pub fn units(&self) -> usize {
        let replicas = 0..self.deal.to_vec().len();
        replicas.map(|replica| self.of(replica).units.len()).sum()
    }

    /// A step by the simulator: of one replica where all are alike, else of every one, each from
    /// the start of the step.
    ///
    /// # Errors
    /// Costs that are not these programs'.
    pub fn simulated(&self, costs: &simulate::Costs) -> Result<Timeline, SimulateError> {
        let mut whole = simulate(&self.most, costs)?;
        let Some(fewer) = &self.fewer else { return Ok(whole) };
        let (most, fewer) = (std::mem::take(&mut whole.ranks), simulate(fewer, costs)?.ranks);
        for (group, has) in self.deal.to_vec().into_iter().enumerate() {
            let ranks = if has < self.deal.most { &fewer } else { &most };
            let name = |rank: &RankTimeline| format!("pp {} · dp {group}", rank.pp);
            let of = |rank: &RankTimeline| RankTimeline { name: name(rank), group, ..rank.clone() };
            whole.ranks.extend(ranks.iter().map(of));
        }
        Ok(whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zeropp_schedule::schedules::{KINDS, Shape};
    use zeropp_search::generate_with_costs;

    /// With selective recomputation B keeps more for W than F has kept for B.
    #[test]
    fn a_limit_in_bytes_counts_all_that_b_keeps_for_w() {
        for kind in KINDS.iter().filter(|kind| kind.obeys_limit) {
            let virtual_stages = (1..4).find(|v| kind.stages.allows(*v)).expect("some V");
            let shape = Shape { pp: 2, virtual_stages, micro_batches: 8, unit: 4 };
            let keeps = StageBytes { activation: 10, stash: 16, ..StageBytes::default() };
            let memory = vec![keeps; shape.stages()];
            let times = simulate::StageCosts { f_ns: 10, b_ns: 10, w_ns: 10, ..Default::default() };
            let stages = vec![times; shape.stages()];
            let costs =
                simulate::Costs { stages, memory: memory.clone(), ..simulate::Costs::default() };
            for each in [3, 4, 6, 10] {
                let limit = 10 * each * virtual_stages as u64;
                let order = generator_costs(&costs, &memory, 0, Some(limit as i64));
                let made = match generate_with_costs(kind.name, &shape, &order) {
                    // Builders that fill a limit with F may find no room for what B adds.
                    Err(_) if each < 10 => continue,
                    made => made.expect(kind.name),
                };
                let program = lowered(&made, &LowerOptions::default(), false).expect(kind.name);
                let timeline = simulate(&program, &costs).expect("these costs");
                let (_, most) = most_kept(&timeline).expect("ranks keep something");
                assert!(most <= limit, "{}: {most} of {limit}", kind.name);
            }
        }
    }
}
