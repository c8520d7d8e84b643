//! Hanayo (SC '23): W waves over the ranks, to and fro, with no second copy of the model.
//!
//! A rank has V = 2W stages. A wave's stages go down the ranks 0..P−1 and back up P−1..0, so at
//! both turns two stages in a row are on one rank and nothing is sent. The order follows from one
//! rule: a rank that is free runs what is ready, backwards first, and of what is alike the lowest
//! micro-batch. Rank 0 lets a micro-batch in while fewer than P are under way, so that no rank
//! holds more than the P micro-batches of 1F1B's first one.

use super::{ScheduleError, Shape};
use crate::ir::{Action, Compute, Schedule, vee};

const NAME: &str = "hanayo";
/// Slots of a forward and of a whole backward: T_F = T_B = T_W.
const SLOTS: [u64; 2] = [1, 2];

/// Hanayo for any P and B with V = 2W; one unit of B, whole backwards.
pub(super) fn generate(shape: &Shape) -> Result<Schedule, ScheduleError> {
    let Shape { pp, virtual_stages, micro_batches, .. } = *shape;
    if !virtual_stages.is_multiple_of(2) {
        let works = "it must be even: a wave goes down the ranks and back up".into();
        let (field, value) = ("virtual_stages", virtual_stages);
        return Err(ScheduleError::Field { kind: NAME, field, value, works });
    }
    let placement = vee(pp, virtual_stages);
    let ranks = Waves::new(&placement, pp, micro_batches).run();
    let units = vec![micro_batches];
    Ok(Schedule { kind: NAME.into(), placement, units, ranks, ..Schedule::default() })
}

/// A task that a rank may run: its start, whether it is a forward, its micro-batch and its stage.
/// Of several the least is preferred.
type Ready = (u64, bool, usize, usize);

/// The step as far as it has run.
struct Waves<'a> {
    placement: &'a [usize],
    micro_batches: usize,
    /// When each rank is free.
    free: Vec<u64>,
    /// When each micro-batch's forward (0) and backward (1) of each stage ended, as far as they
    /// ran.
    ends: [Vec<Vec<u64>>; 2],
    /// The task that each rank would run next, by what has run: only those of a rank and of the
    /// stages beside one that has run are looked at again, as planners make many of these.
    next: Vec<Option<Ready>>,
    ranks: Vec<Vec<Action>>,
}

impl Waves<'_> {
    fn new(placement: &[usize], pp: usize, micro_batches: usize) -> Waves<'_> {
        let none = || vec![Vec::with_capacity(micro_batches); placement.len()];
        let (free, ends, ranks) = (vec![0; pp], [none(), none()], vec![Vec::new(); pp]);
        let next = vec![None; pp];
        let mut waves = Waves { placement, micro_batches, free, ends, next, ranks };
        (0..pp).for_each(|rank| waves.look(rank));
        waves
    }

    /// Always takes the task that starts first, and of several the one the rule prefers.
    fn run(mut self) -> Vec<Vec<Action>> {
        while let Some((start, is_forward, micro_batch, stage)) =
            self.next.iter().copied().flatten().min()
        {
            let (rank, backward) = (self.placement[stage], usize::from(!is_forward));
            let end = start + SLOTS[backward];
            self.ends[backward][stage].push(end);
            self.free[rank] = end;
            let kind = [Compute::F, Compute::BW][backward];
            self.ranks[rank].push(Action::compute(kind, stage, micro_batch));
            let beside = [stage.checked_sub(1), Some(stage), Some(stage + 1)].into_iter().flatten();
            for rank in beside.filter_map(|stage| self.placement.get(stage)) {
                self.look(*rank);
            }
        }
        self.ranks
    }

    /// Finds the next task of a rank. Every stage takes its micro-batches in order, so each has one
    /// candidate in each direction.
    fn look(&mut self, rank: usize) {
        let pp = self.free.len();
        let of_round = |round: usize| {
            let at = if round.is_multiple_of(2) { rank } else { pp - 1 - rank };
            round * pp + at
        };
        let stages = (0..self.placement.len() / pp).map(of_round);
        let tasks = stages.flat_map(|stage| [(0, stage), (1, stage)]);
        let ready = tasks.filter_map(|(backward, stage)| {
            let micro_batch = self.ends[backward][stage].len();
            let start = self.ready(backward, stage, micro_batch)?.max(self.free[rank]);
            Some((start, backward == 0, micro_batch, stage))
        });
        self.next[rank] = ready.min();
    }

    /// When the task could start but for its rank; none while what it waits for has not run.
    fn ready(&self, backward: usize, stage: usize, micro_batch: usize) -> Option<u64> {
        let end =
            |backward: usize, stage: usize, m: usize| self.ends[backward][stage].get(m).copied();
        if micro_batch == self.micro_batches {
            return None;
        }
        match (backward, stage) {
            (0, 0) => match micro_batch.checked_sub(self.free.len()) {
                Some(before) => end(1, 0, before),
                None => Some(0),
            },
            (0, _) => end(0, stage - 1, micro_batch),
            (_, last) if last + 1 == self.placement.len() => end(0, last, micro_batch),
            _ => end(1, stage + 1, micro_batch),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::metrics::Metrics;
    use crate::schedules::{Shape, generate};
    use crate::simulate::{Costs, simulate};

    fn metrics(pp: usize, virtual_stages: usize, micro_batches: usize) -> Metrics {
        let shape = Shape { pp, virtual_stages, micro_batches, unit: micro_batches };
        let mut costs = Costs::uniform(shape.stages(), 1, 1, 1, 0);
        costs.memory.iter_mut().for_each(|m| m.activation = 1);
        let schedule = generate("hanayo", &shape).unwrap();
        Metrics::new(&schedule, &simulate(&schedule, &costs).unwrap(), &costs)
    }

    #[test]
    fn one_wave_over_two_ranks() {
        let shape = Shape { pp: 2, virtual_stages: 2, micro_batches: 3, unit: 3 };
        let schedule = generate("hanayo", &shape).unwrap();
        let line = |rank: &Vec<crate::ir::Action>| {
            rank.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
        };
        insta::assert_snapshot!(schedule.ranks.iter().map(line).collect::<Vec<_>>().join("\n"), @r"
    0F0 0F1 3F0 3BW0 3F1 3BW1 0BW0 0F2 0BW1 3F2 3BW2 0BW2
    1F0 2F0 1F1 2F1 2BW0 1BW0 2BW1 1BW1 1F2 2F2 2BW2 1BW2
    ");
    }

    /// By hand with one slot a forward and two a whole backward: P = 2 and two micro-batches take
    /// `0F0 0F1 . 3F0 3BW 3F1 3BW . 0BW .. 0BW` on rank 0, 16 slots, and P = 4 and four take 36.
    #[test]
    fn the_makespans_are_those_of_the_rule() {
        let makespan = |pp, v, m| metrics(pp, v, m).makespan_ns;
        assert_eq!([makespan(2, 2, 2), makespan(4, 2, 4)], [16, 36]);
    }

    #[test]
    fn no_rank_holds_more_than_p_micro_batches() {
        for (pp, v, m) in [(2, 2, 9), (4, 2, 16), (4, 4, 12), (3, 6, 7), (1, 2, 3)] {
            let peaks = metrics(pp, v, m).peak_activation;
            assert!(peaks.iter().all(|peak| *peak <= (pp * v) as u64), "{pp} {v} {m}: {peaks:?}");
        }
    }
}
