//! Interleaved 1F1B and interleaved zero bubble, on looping stages.
//!
//! Micro-batches pass in rounds: a rank runs one round on its first stage, the same round on its
//! second, and so on; backwards take the stages in reverse. Interleaved 1F1B (Megatron-LM, section
//! 2.2) runs whole backwards; interleaved zero bubble (as in PyTorch) splits them and lets W trail
//! by as many backwards as the rank's number.

use super::costs::OrderCosts;
use super::{ScheduleError, Shape};
use crate::ir::{Action, Compute, Schedule, Task, looping, reversed_slices};

/// The order of a rank's forwards and of its backwards.
struct Rounds {
    rank: usize,
    pp: usize,
    virtual_stages: usize,
    /// Micro-batches in one round.
    round: usize,
    /// Whether a round is a sample in slices, whose backwards come from the last to the first.
    is_sample: bool,
    /// Forwards of this rank, V·m.
    total: usize,
}

impl Rounds {
    /// Chunk (0..V), and micro-batch of the `step`-th forward.
    fn at(&self, step: usize) -> (usize, usize) {
        let block = step / self.round;
        let micro_batch = (block / self.virtual_stages) * self.round + step % self.round;
        (block % self.virtual_stages, micro_batch)
    }

    fn forward(&self, step: usize) -> Action {
        let (chunk, micro_batch) = self.at(step);
        Action::compute(Compute::F, chunk * self.pp + self.rank, micro_batch)
    }

    fn backward(&self, kind: Compute, step: usize) -> Action {
        let (chunk, mut micro_batch) = self.at(step);
        if self.is_sample {
            micro_batch = reversed_slices(micro_batch, self.round);
        }
        let stage = (self.virtual_stages - 1 - chunk) * self.pp + self.rank;
        Action::compute(kind, stage, micro_batch)
    }

    /// `warm_up` forwards, then forward and backward in turn. Where backwards are split, each is
    /// followed by the W of the one `rank` places before it, of slices by its own.
    fn order(&self, warm_up: usize, backward: Compute) -> Vec<Action> {
        let warm_up = warm_up.min(self.total);
        let mut order: Vec<Action> = (0..warm_up).map(|i| self.forward(i)).collect();
        let delay = match backward {
            Compute::B if self.is_sample => 0,
            Compute::B => self.rank,
            _ => self.total,
        };
        for i in 0..self.total {
            order.extend((warm_up + i < self.total).then(|| self.forward(warm_up + i)));
            order.push(self.backward(backward, i));
            order.extend((i >= delay).then(|| self.backward(Compute::W, i - delay)));
        }
        if backward == Compute::B {
            let done = self.total.saturating_sub(delay);
            order.extend((done..self.total).map(|i| self.backward(Compute::W, i)));
        }
        order
    }
}

/// Interleaved 1F1B: rank r runs 2(p − 1 − r) + (V − 1)·round forwards, then F and BW in turn, then
/// the backwards that are left. One unit of B.
pub(super) fn generate(shape: &Shape) -> Result<Schedule, ScheduleError> {
    let Shape { pp, virtual_stages, .. } = *shape;
    all_ranks("interleaved", shape, |rounds| {
        let warm_up = 2 * (pp - 1 - rounds.rank) + (virtual_stages - 1) * rounds.round;
        rounds.order(warm_up, Compute::BW)
    })
}

/// Interleaved zero bubble: rank r runs (p − 1 − r) + (V − 1)·round forwards, then F and B in turn
/// with W trailing by r backwards, then what is left. One unit of B.
pub(super) fn generate_zb(shape: &Shape) -> Result<Schedule, ScheduleError> {
    let Shape { pp, virtual_stages, .. } = *shape;
    all_ranks("interleaved-zb", shape, |rounds| {
        let warm_up = (pp - 1 - rounds.rank) + (virtual_stages - 1) * rounds.round;
        rounds.order(warm_up, Compute::B)
    })
}

/// The same of samples in so many slices, in rounds of a sample: rank r runs
/// (V − 1)·n + (n − 1) + 2(p − 1 − r) forwards, so that the last rank has all slices of a sample on
/// its last stage, then F and B in turn, each B with its W. A unit is a sample. It needs no fewer
/// slices than ranks: a slice is back on the first rank when the sample's last one has left it.
/// With so many `more` forwards ahead.
pub(super) fn in_slices(
    shape: &Shape,
    slices: usize,
    more: usize,
) -> Result<Schedule, ScheduleError> {
    let Shape { pp, virtual_stages, micro_batches, .. } = *shape;
    if slices < pp && virtual_stages > 1 {
        let works = format!(
            "a round of a sample has no fewer slices than pp = {pp}; use that many, or zeropp"
        );
        let kind = "interleaved-zb";
        return Err(ScheduleError::Field { kind, field: "slices", value: slices, works });
    }
    let total = virtual_stages * micro_batches;
    let order = |rank| {
        let rounds = Rounds { rank, pp, virtual_stages, round: slices, is_sample: true, total };
        let warm_up = (virtual_stages - 1) * slices + (slices - 1) + 2 * (pp - 1 - rank);
        rounds.order(warm_up + more, Compute::B)
    };
    Ok(Schedule {
        kind: "interleaved-zb".into(),
        placement: looping(pp, virtual_stages),
        units: vec![slices; micro_batches / slices],
        ranks: (0..pp).map(order).collect(),
        ..Schedule::default()
    })
}

fn all_ranks(
    kind: &'static str,
    shape: &Shape,
    order: impl Fn(&Rounds) -> Vec<Action>,
) -> Result<Schedule, ScheduleError> {
    let Shape { pp, virtual_stages, micro_batches, .. } = *shape;
    let round = round_size(kind, pp, micro_batches)?;
    let total = virtual_stages * micro_batches;
    let rounds = |rank| Rounds { rank, pp, virtual_stages, round, is_sample: false, total };
    Ok(Schedule {
        kind: kind.into(),
        placement: looping(pp, virtual_stages),
        units: vec![micro_batches],
        ranks: (0..pp).map(|rank| order(&rounds(rank))).collect(),
        ..Schedule::default()
    })
}

/// Micro-batches in one round: p where m is a multiple of p, m where m < p, else m divided by the
/// number of whole p in it, which must divide it.
fn round_size(kind: &'static str, pp: usize, m: usize) -> Result<usize, ScheduleError> {
    let rounds = (m / pp).max(1);
    if m.is_multiple_of(rounds) {
        return Ok(m / rounds);
    }
    let works = format!(
        "with pp = {pp} it must split into {rounds} equal rounds, as {} or {} does",
        m - m % rounds,
        m - m % pp + pp,
    );
    Err(ScheduleError::Field { kind, field: "micro-batches", value: m, works })
}

/// The end of an interleaved 1F1B step as the Zero Bubble paper's table counts it: from the last
/// rank back to the first (for gradients the other way) only the first micro-batch of a round is
/// waited for. For the paper's profiles that is p·c less than what any run can reach, so use it to
/// compare with the table and the simulator for everything else.
///
/// # Errors
/// As the generator's.
pub fn interleaved_as_printed(shape: &Shape, costs: &OrderCosts) -> Result<u64, ScheduleError> {
    let schedule = generate(shape)?;
    costs.check("interleaved", shape.stages())?;
    let Shape { pp, micro_batches: m, .. } = *shape;
    let round = round_size("interleaved", pp, m)?;
    let last = shape.stages() - 1;
    // Ends of F and of BW by stage and micro-batch.
    let mut done = [vec![None; (last + 1) * m], vec![None; (last + 1) * m]];
    let (mut now, mut next) = (vec![0; pp], vec![0; pp]);
    let mut left: usize = schedule.ranks.iter().map(Vec::len).sum();
    while left > 0 {
        for rank in 0..pp {
            let step = schedule.ranks[rank].get(next[rank]).and_then(|a| a.computes().next());
            let Some(Task { kind, stage, micro_batch: i }) = step else { continue };
            let forward = kind == Compute::F;
            let (input, wrap) = match forward {
                true => (stage.checked_sub(1), rank == 0),
                false => ((stage < last).then_some(stage + 1), rank == pp - 1),
            };
            let row = usize::from(!forward);
            let waits = input.filter(|_| !wrap || i % round == 0);
            let arrival = match waits.map(|from| done[row][from * m + i]) {
                None => 0,
                Some(None) => continue,
                Some(Some(end)) => end + costs.send,
            };
            let takes = if forward { costs.f[stage] } else { costs.b[stage] + costs.w[stage] };
            now[rank] = arrival.max(now[rank]) + takes;
            done[row][stage * m + i] = Some(now[rank]);
            next[rank] += 1;
            left -= 1;
        }
    }
    Ok(now.into_iter().max().unwrap_or(0))
}
