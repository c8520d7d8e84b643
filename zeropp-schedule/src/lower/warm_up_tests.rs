//! Updates that are validated late: warm-ups of every kind, alone and in whole programs.

use std::collections::BTreeSet;

use super::*;
use crate::metrics::Metrics;
use crate::schedules::{KINDS, Shape, generate};
use crate::simulate::{Costs, simulate, simulate_steps, step_period_ns, times};
use crate::verify::{VerifyLimits, verify};

fn late(schedule: &Schedule) -> Schedule {
    let options = LowerOptions { sync: OptimizerSync::Late, ..LowerOptions::default() };
    lower(schedule, &options)
}

/// Every kind in a few shapes that it takes.
fn of_all_kinds() -> impl Iterator<Item = Schedule> {
    let shapes =
        [(1, 1, 2, 2), (2, 1, 4, 4), (2, 2, 6, 3), (4, 1, 8, 8), (4, 2, 8, 8), (4, 2, 14, 7)];
    KINDS.iter().flat_map(move |kind| {
        shapes.into_iter().filter_map(move |(pp, virtual_stages, micro_batches, unit)| {
            let shape = Shape { pp, virtual_stages, micro_batches, unit };
            generate(kind.name, &shape).ok()
        })
    })
}

fn warm_up(actions: &[Action]) -> Vec<Action> {
    actions.iter().take_while(|action| **action != Action::Validate).copied().collect()
}

/// What ranks have begun before they know better can be done again: the warm-ups are programs.
#[test]
fn warm_ups_of_all_kinds_run_alone() {
    let mut kinds = BTreeSet::new();
    for schedule in of_all_kinds() {
        let program = late(&schedule);
        assert_eq!(verify(&program, &VerifyLimits::default()), Ok(()), "{}", schedule.kind);
        let ranks: Vec<_> = program.ranks.iter().map(|rank| warm_up(rank)).collect();
        let ends = |is_send: bool| {
            let end = move |a: &Action| match *a {
                Action::Send { message, stage, micro_batch } if is_send => {
                    Some((message, stage, micro_batch))
                }
                Action::Recv { message, stage, micro_batch } if !is_send => {
                    Some((message, stage - 1, micro_batch))
                }
                _ => None,
            };
            ranks.iter().flatten().filter_map(end).collect::<BTreeSet<_>>()
        };
        assert_eq!(ends(true), ends(false), "{}: what is sent is received", schedule.kind);
        let alone = Schedule { ranks: ranks.clone(), ..program.clone() };
        let costs = Costs::uniform(alone.stages(), 3, 2, 1, 1);
        let timeline = times(&alone, &costs).unwrap();
        for (rank, actions) in timeline.ranks.iter().zip(&ranks) {
            assert_eq!(rank.spans.len(), actions.len(), "{}: a rank waits", schedule.kind);
        }
        // The rank of the first stage begins with forwards, whatever the kind.
        let first = &ranks[schedule.placement[0]];
        assert!(first.iter().any(|a| a.computes().next().is_some()), "{}", schedule.kind);
        kinds.insert(schedule.kind);
    }
    assert!(kinds.len() >= KINDS.len() - 2, "{kinds:?}");
}

#[test]
fn the_rest_of_a_program_is_the_same() {
    for schedule in of_all_kinds() {
        let computes = |program: &Schedule| -> Vec<Vec<Action>> {
            let is_kept = |a: &&Action| !matches!(a, Action::Recv { .. } | Action::Validate);
            let rank = |r: &Vec<Action>| r.iter().filter(is_kept).copied().collect();
            program.ranks.iter().map(rank).collect()
        };
        let program = late(&schedule);
        let with_barrier = lower(&schedule, &LowerOptions::default());
        assert_eq!(computes(&program), computes(&with_barrier), "{}", schedule.kind);
        assert_eq!(late(&program), program);
        assert_eq!(lower(&program, &LowerOptions::default()), with_barrier);
    }
}

#[test]
fn forwards_alone_validate_nothing() {
    let schedule =
        generate("gpipe", &Shape { pp: 2, virtual_stages: 1, micro_batches: 2, unit: 2 });
    let mut schedule = schedule.unwrap();
    let is_forward = |a: &Action| a.computes().all(|t| t.kind == Compute::F);
    schedule.ranks.iter_mut().for_each(|rank| rank.retain(is_forward));
    assert!(!late(&schedule).validates_late());
}

/// (rank, what is done to its list, what the verifier says)
#[test]
fn a_validation_in_the_wrong_place_is_refused() {
    let shape = Shape { pp: 2, virtual_stages: 2, micro_batches: 6, unit: 3 };
    let good = late(&generate("zeropp", &shape).unwrap());
    let at = |rank: usize| good.ranks[rank].iter().position(|a| *a == Action::Validate).unwrap();
    let refused = |rank: usize, change: &dyn Fn(&mut Vec<Action>)| {
        let mut changed = good.clone();
        change(&mut changed.ranks[rank]);
        verify(&changed, &VerifyLimits::default()).unwrap_err().to_string()
    };
    let missing = refused(1, &|actions| {
        actions.remove(at(1));
    });
    assert_eq!(missing, "rank 1: VALID is missing");
    let twice = refused(1, &|actions| actions.insert(at(1), Action::Validate));
    assert!(twice.contains("duplicate of action"), "{twice}");
    let late = refused(0, &|actions| {
        let validate = actions.remove(at(0));
        actions.insert(actions.len() - 1, validate);
    });
    assert!(late.contains("only forwards and what they need can run"), "{late}");
    let first = refused(0, &|actions| {
        let validate = actions.remove(at(0));
        actions.insert(0, validate);
    });
    assert!(first.contains("one is before the rank's validation"), "{first}");
}

/// The parallelogram of Zero Bubble: each rank's end fits its next beginning.
#[test]
fn without_the_barrier_steps_tile_without_a_gap() {
    for (kind, pp, virtual_stages, micro_batches, unit) in
        [("zb-h2", 4, 1, 12, 12), ("zb-v", 4, 2, 8, 8), ("zeropp", 4, 2, 14, 7)]
    {
        let shape = Shape { pp, virtual_stages, micro_batches, unit };
        let made = generate(kind, &shape).unwrap();
        let costs = Costs { step_ns: 2, ..Costs::uniform(shape.stages(), 1, 1, 1, 0) };
        let metrics =
            |program: &Schedule| Metrics::new(program, &simulate(program, &costs).unwrap(), &costs);
        let work = (3 * micro_batches * virtual_stages) as u64;
        let with_barrier = lower(&made, &LowerOptions::default());
        // Those that begin last end last, and all wait for them.
        let barrier_ns = metrics(&with_barrier).makespan_ns + 2;
        assert_eq!(step_period_ns(&with_barrier, &costs), barrier_ns, "{kind}");
        assert!(barrier_ns >= work + 2 + pp as u64 - 1, "{kind}: {barrier_ns}");
        let bubble = 1.0 - work as f64 / barrier_ns as f64;
        assert!((metrics(&with_barrier).bubble_step - bubble).abs() < 1e-12, "{kind}");
        let program = late(&made);
        assert_eq!(step_period_ns(&program, &costs), work + 2, "{kind}");
        let bubble = 1.0 - work as f64 / (work + 2) as f64;
        assert!((metrics(&program).bubble_step - bubble).abs() < 1e-12, "{kind}");
        // A run of several steps shows the same, once its ranks have found their places.
        let run = simulate_steps(&program, &costs, 9).unwrap();
        assert_eq!(crate::report::steps(&run), 9);
        let begin = |step: usize| {
            let step = crate::report::step(&run, step);
            step.ranks.iter().filter_map(|r| r.own_span()).map(|(start, _)| start).min().unwrap()
        };
        assert_eq!(begin(8) - begin(7), work + 2, "{kind}");
        assert!(run.bubble_step().unwrap() < metrics(&with_barrier).bubble_step, "{kind}");
    }
}

/// No rank computes with weights that its validation has not seen, beyond its warm-up.
#[test]
fn a_step_never_takes_longer_and_waits_for_the_norm() {
    for schedule in of_all_kinds() {
        let costs = Costs { step_ns: 5, ..Costs::uniform(schedule.stages(), 7, 6, 4, 2) };
        let program = late(&schedule);
        let with_barrier = lower(&schedule, &LowerOptions::default());
        let [after, before] = [&program, &with_barrier].map(|p| step_period_ns(p, &costs));
        assert!(after <= before, "{}: {after} and {before}", schedule.kind);
        let run = simulate_steps(&program, &costs, 3).unwrap();
        for step in 1..3 {
            let (last, this) =
                (crate::report::step(&run, step - 1), crate::report::step(&run, step));
            let begins = last.ranks.iter().map(|r| r.spans.last().unwrap().start_ns);
            let known = begins.max().unwrap();
            for rank in &this.ranks {
                let mut spans = rank.spans.iter();
                let validate = spans.find(|s| s.action == Action::Validate).unwrap();
                assert!(validate.end_ns >= known, "{}", schedule.kind);
                let after = spans.filter(|s| s.action.computes().next().is_some());
                assert!(after.into_iter().all(|s| s.start_ns >= known), "{}", schedule.kind);
            }
        }
    }
}
