//! Forward only: what a validation loss takes, on the stages of any training schedule.
//!
//! Within a unit a rank runs all forwards of one of its stages before those of the next, so it
//! gathers each stage once: **V all-gathers** per rank and unit, and no reduction. Units are those
//! of the training schedule, so that as many messages are under way as in training at most.

use super::Planning;
use super::kind::{Kind, Rate, StagesPerRank, StepForm};
use crate::ir::{Action, Compute, Schedule, looping};

/// The row of this schedule. It trains nothing, so it is not among [`KINDS`](super::KINDS).
pub const FORWARD: Kind = Kind {
    name: "forward",
    about: "forwards alone, for a validation loss; gathers V times per rank and unit",
    stages: StagesPerRank::Any(2),
    step: StepForm::Units,
    rate: Rate::Makespan,
    obeys_limit: false,
    plans_gathers: false,
    placement: looping,
    splits: false,
    planning: Planning::Not("it trains nothing"),
    note: |_| None,
    with_unit: None,
    ahead: None,
    in_slices: None,
    generate: |shape, _| Ok(forward(&looping(shape.pp, shape.virtual_stages), &shape.units())),
};

/// The forwards of stages that are placed as `placement` says, for `units` of micro-batches.
fn forward(placement: &[usize], units: &[usize]) -> Schedule {
    let (placement, units) = (placement.to_vec(), units.to_vec());
    forwards_of(&Schedule { placement, units, ..Schedule::default() })
}

/// The forwards of the stages of `schedule`, where and in what units they are there.
pub fn forwards_of(schedule: &Schedule) -> Schedule {
    let Schedule { placement, units, head_blocks, sample_slices, .. } = schedule.clone();
    let pp = placement.iter().max().map_or(0, |last| last + 1);
    let kind = FORWARD.name.into();
    let mut forwards =
        Schedule { kind, placement, units, head_blocks, sample_slices, ranks: Vec::new() };
    let program = |rank: usize| {
        let slice = forwards.wide_stage().filter(|wide| forwards.has(rank, *wide));
        let stages: Vec<usize> = forwards.stages_of(rank).into_iter().chain(slice).collect();
        let mut program = Vec::new();
        let mut first = 0;
        for size in &forwards.units {
            for stage in &stages {
                let unit = first..first + size;
                program.extend(unit.map(|i| Action::compute(Compute::F, *stage, i)));
            }
            first += size;
        }
        program
    };
    forwards.ranks = (0..pp).map(program).collect();
    forwards
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::vee;
    use crate::lower::{LowerOptions, in_issue_order, lower};
    use crate::memory::{StageBytes, predict};
    use crate::simulate::{Costs, simulate};
    use crate::verify::{VerifyLimits, verify, verify_issue_order};

    fn limits() -> VerifyLimits {
        VerifyLimits { forward_only: true, gathered_max: Some(2), ..VerifyLimits::default() }
    }

    fn gathers(program: &[Action]) -> usize {
        program.iter().filter(|a| matches!(a, Action::AllGather { .. })).count()
    }

    /// On any placement: verified, V gathers a rank and unit, no reduction and no step.
    #[test]
    fn every_stage_is_gathered_once_a_unit() {
        for (pp, v) in [(1, 1), (1, 3), (2, 1), (2, 2), (3, 4), (4, 2), (8, 2)] {
            for units in [vec![1], vec![3], vec![7, 7], vec![4, 4, 2]] {
                for placement in [looping(pp, v), vee(pp, v)] {
                    let compact = forward(&placement, &units);
                    assert!(compact.is_forward_only());
                    verify(&compact, &limits()).unwrap();
                    let program = lower(&compact, &LowerOptions::default());
                    verify(&program, &limits()).unwrap();
                    let ordered = in_issue_order(&program);
                    verify(&ordered, &VerifyLimits { gathered_max: None, ..limits() }).unwrap();
                    verify_issue_order(&ordered).unwrap();
                    for actions in &program.ranks {
                        assert!(gathers(actions) <= v * units.len());
                        // Neighbouring stages of one unit on one rank are gathered all the same.
                        assert!(gathers(actions) >= v * units.len());
                        let other = |a: &Action| {
                            use Action::{OptimizerStep, ReduceScatter, ReplicaReduce};
                            matches!(a, ReduceScatter { .. } | ReplicaReduce { .. } | OptimizerStep)
                        };
                        assert!(!actions.iter().any(other));
                    }
                }
            }
        }
    }

    /// V rounds of U slots follow each other without a gap where U is at least P.
    #[test]
    fn it_takes_the_forwards_and_one_filling_of_the_pipeline() {
        for (pp, v, unit) in [(1, 1, 1), (2, 2, 3), (4, 2, 4), (4, 3, 7)] {
            let schedule = forward(&looping(pp, v), &[unit, unit]);
            let program = lower(&schedule, &LowerOptions::default());
            let timeline = simulate(&program, &Costs::uniform(pp * v, 10, 0, 0, 0)).unwrap();
            let last = timeline.ranks.iter().flat_map(|r| &r.spans).map(|s| s.end_ns).max();
            assert_eq!(last, Some(10 * (2 * v * unit + pp - 1) as u64), "{pp} {v} {unit}");
        }
    }

    #[test]
    fn nothing_is_kept_for_a_backward() {
        let bytes =
            StageBytes { input: 3, activation: 100, weights: 50, message: 3, ..Default::default() };
        let program = lower(&forward(&looping(2, 2), &[4]), &LowerOptions::default());
        for held in predict(&program, &[bytes; 4]) {
            assert_eq!((held.activation, held.gradient, held.weight_stash), (3, 0, 0));
            assert_eq!(held.gathered, 100, "the stage at work and the next one");
        }
    }

    /// Training refuses it, and so it does what is more than forwards.
    #[test]
    fn a_schedule_either_trains_or_does_not() {
        let forwards = forward(&looping(2, 1), &[2]);
        let error = verify(&forwards, &VerifyLimits::default()).unwrap_err().to_string();
        assert!(error.contains("0B0 is missing"), "{error}");
        let shape = super::super::Shape { pp: 2, virtual_stages: 1, micro_batches: 2, unit: 2 };
        let training = super::super::generate("1f1b", &shape).unwrap();
        assert!(!training.is_forward_only());
        let error = verify(&training, &limits()).unwrap_err().to_string();
        assert!(error.contains("only forwards"), "{error}");
        let mut stepping = lower(&forwards, &LowerOptions::default());
        stepping.ranks[0].push(Action::OptimizerStep);
        let error = verify(&stepping, &limits()).unwrap_err().to_string();
        assert!(error.contains("only forwards"), "{error}");
        let mut short = forwards;
        short.ranks[1].pop();
        let error = verify(&short, &limits()).unwrap_err().to_string();
        assert!(error.contains("too few"), "{error}");
    }
}
