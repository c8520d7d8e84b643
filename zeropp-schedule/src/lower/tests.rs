//! Lowered programs, action for action, and their counts.

use std::collections::HashSet;

use proptest::prelude::*;

use super::*;
use crate::memory::{StageBytes, predict_both};
use crate::schedules::{Shape, generate};
use crate::simulate::{Costs, simulate};
use crate::timeline::Span;
use crate::verify::{VerifyLimits, verify};

fn schedule(
    kind: &str,
    pp: usize,
    virtual_stages: usize,
    micro_batches: usize,
    unit: usize,
) -> Schedule {
    generate(kind, &Shape { pp, virtual_stages, micro_batches, unit }).unwrap()
}

/// Actions in order, 14 on a line.
fn text(actions: &[Action]) -> String {
    let words: Vec<_> = actions.iter().map(|a| a.to_string()).collect();
    words.chunks(14).map(|line| line.join(" ")).collect::<Vec<_>>().join("\n")
}

fn count(actions: &[Action], of: fn(&Action) -> bool) -> usize {
    actions.iter().filter(|a| of(a)).count()
}

#[test]
fn zeropp_program() {
    let lowered = lower(
        &schedule("zeropp", 2, 2, 3, 3),
        &LowerOptions { replicas: true, recompute: true, ..Default::default() },
    );
    insta::assert_snapshot!(text(&lowered.ranks[0]), @r"
    AG0 AG2 0F0 >A0.0 0F1 >A0.1 <A2.0 0F2 >A0.2 FREE0 AG0 <A2.1 2F0 >A2.0
    <A2.2 2F1 >A2.1 <G2.0 2F2 >A2.2 2B0 >G2.0 <G2.1 2W0 2B1 >G2.1 <G2.2 2W1
    2B2 >G2.2 FREE2 <G0.0 0R0 0B0 2W2 RS2 AR2 <G0.1 0R1 0B1 END2 0W0
    <G0.2 0R2 0B2 FREE0 0W1 0W2 RS0 AR0 END0 STEP
    ");
    insta::assert_snapshot!(text(&lowered.ranks[1]), @r"
    AG1 AG3 <A1.0 <A1.1 1F0 >A1.0 <A1.2 1F1 >A1.1 <A3.0 1F2 >A1.2 FREE1 AG1
    3F0 <A3.1 3B0 >G3.0 3F1 <A3.2 3B1 >G3.1 3F2 3B2 >G3.2 FREE3 <G1.0 1R0
    1B0 >G1.0 3W0 <G1.1 1R1 1B1 >G1.1 3W1 <G1.2 1R2 1B2 >G1.2 FREE1 3W2
    RS3 AR3 END3 1W0 1W1 1W2 RS1 AR1 END1 STEP
    ");
}

/// And none of the stage with the head, whose gradients are summed in micro-batch order.
#[test]
fn only_the_first_micro_batches_of_each_unit_are_recomputed_where_so_many_are_asked_for() {
    let redone = |program: &Schedule| -> HashSet<(usize, usize)> {
        let computes = program.ranks.iter().flatten().flat_map(Action::computes);
        computes.filter(|t| t.kind == Compute::R).map(|t| (t.stage, t.micro_batch)).collect()
    };
    for (kind, v) in [("zeropp", 1), ("zeropp", 3), ("1f1b", 1), ("bf-pp", 2), ("zb-v", 2)] {
        let schedule = schedule(kind, 2, v, 8, 3);
        let first_of_unit =
            |i: usize| schedule.units.iter().take(schedule.unit_of(i)).sum::<usize>();
        let whole = LowerOptions { recompute: true, ..Default::default() };
        for first in 0..4 {
            let options = LowerOptions { redone: Some(first), ..whole };
            let program = lower(&schedule, &options);
            assert_eq!(verify(&program, &VerifyLimits::default()), Ok(()), "{kind}");
            let mut wanted = redone(&lower(&schedule, &whole));
            wanted.retain(|(s, i)| s + 1 < schedule.stages() && i - first_of_unit(*i) < first);
            assert_eq!(redone(&program), wanted, "{kind}, {first}");
        }
    }
}

#[test]
fn prefetch_zero_gathers_right_before_use() {
    let options = LowerOptions { prefetch: 0, ..Default::default() };
    let lowered = lower(&schedule("zeropp", 1, 2, 2, 1), &options);
    insta::assert_snapshot!(text(&lowered.ranks[0]), @r"
    AG0 0F0 FREE0 AG1 1F0 1B0 FREE1 AG0 0B0 FREE0 1W0 RS1 END1 0W0
    RS0 AG0 0F1 FREE0 AG1 1F1 1B1 FREE1 AG0 0B1 FREE0 END0 1W1 RS1
    END1 0W1 RS0 END0 STEP
    ");
}

#[test]
fn a_stage_used_on_both_sides_of_a_unit_boundary_is_gathered_after_its_free() {
    let lowered = lower(&schedule("zeropp", 1, 1, 2, 1), &LowerOptions::default());
    insta::assert_snapshot!(
        text(&lowered.ranks[0]),
        @r"
    AG0 0F0 0B0 FREE0 AG0 0W0 RS0 0F1 0B1 FREE0 END0 0W1 RS0 END0
    STEP
    "
    );
}

#[test]
fn look_ahead_keeps_stages_that_alternate() {
    // Two stages of one rank that take turns with every micro-batch.
    let c = |k, s, i| Action::compute(k, s, i);
    let program = (0..3)
        .flat_map(|i| {
            use Compute::*;
            [c(F, 0, i), c(F, 1, i), c(BW, 1, i), c(BW, 0, i)]
        })
        .collect();
    let alternating = Schedule {
        kind: "file".into(),
        placement: vec![0, 0],
        units: vec![2, 1],
        ranks: vec![program],
        ..Schedule::default()
    };
    insta::assert_snapshot!(text(&lower(&alternating, &LowerOptions::default()).ranks[0]), @r"
    AG0 AG1 0F0 1F0 1BW0 0BW0 0F1 1F1 1BW1 FREE1 RS1 0BW1 FREE0 END1
    RS0 AG0 AG1 0F2 1F2 1BW2 FREE1 END0 RS1 0BW2 FREE0 END1 RS0 END0
    STEP
    ");
    let none = LowerOptions { prefetch: 0, ..Default::default() };
    let lowered = lower(&alternating, &none);
    insta::assert_snapshot!(text(&lowered.ranks[0]), @r"
    AG0 0F0 FREE0 AG1 1F0 1BW0 FREE1 AG0 0BW0 0F1 FREE0 AG1 1F1 1BW1
    FREE1 RS1 AG0 0BW1 FREE0 END1 RS0 AG0 0F2 FREE0 AG1 1F2 1BW2 FREE1
    END0 RS1 AG0 0BW2 FREE0 END1 RS0 END0 STEP
    ");
}

#[test]
fn receives_of_one_peer_are_posted_in_the_order_of_its_sends() {
    // Rank 0 runs stage 1's consumer late, so that a later message is wanted first.
    let c = |k, s, i| Action::compute(k, s, i);
    use Compute::*;
    let crossed = Schedule {
        kind: "file".into(),
        placement: vec![0, 1],
        units: vec![3],
        ranks: vec![
            vec![c(F, 0, 0), c(F, 0, 1), c(F, 0, 2), c(BW, 0, 0), c(BW, 0, 1), c(BW, 0, 2)],
            vec![c(F, 1, 2), c(F, 1, 1), c(F, 1, 0), c(BW, 1, 0), c(BW, 1, 1), c(BW, 1, 2)],
        ],
        ..Schedule::default()
    };
    insta::assert_snapshot!(text(&lower(&crossed, &LowerOptions::default()).ranks[1]), @r"
    AG1 <A1.0 <A1.1 <A1.2 1F2 1F1 1F0 1BW0 >G1.0 1BW1 >G1.1 1BW2 >G1.2 FREE1
    RS1 END1 STEP
    ");
}

/// The most gradients that the rank has at once: from the first W of each to the end of its
/// reduction.
fn gradients_at_once(program: &[Action]) -> usize {
    let (mut held, mut most) = (HashSet::new(), 0);
    for action in program {
        for task in action.computes().filter(|t| matches!(t.kind, Compute::W | Compute::BW)) {
            held.insert(task.stage);
        }
        most = most.max(held.len());
        if let Action::Retire { stage } = action {
            assert!(held.remove(stage));
        }
    }
    assert!(held.is_empty(), "every reduction ends");
    most
}

#[test]
fn weight_gradients_in_order_take_one_buffer_and_others_two() {
    for (kind, v, most) in [("zeropp", 3, 1), ("zeropp", 1, 1), ("bf-pp", 3, 2), ("zb-v", 2, 2)] {
        let lowered = lower(&schedule(kind, 2, v, 12, 6), &LowerOptions::default());
        for program in &lowered.ranks {
            assert_eq!(gradients_at_once(program), most, "{kind}");
            let ends = count(program, |a| matches!(a, Action::Retire { .. }));
            assert_eq!(ends, count(program, |a| matches!(a, Action::ReduceScatter { .. })));
        }
    }
}

/// A program of before, which leaves ends of reductions out, means the same as one that has them
/// right before the next reduction and before the step.
#[test]
fn a_program_without_ends_of_reductions_ends_them_at_the_next_one() {
    let stage = StageBytes { gradient: 8, gradient_shard: 4, reduced: 4, ..Default::default() };
    for kind in ["bf-pp", "1f1b", "zb-v"] {
        let v = if kind == "zb-v" { 2 } else { 1 };
        let lowered = lower(&schedule(kind, 2, v, 6, 3), &LowerOptions::default());
        let mut before = lowered.clone();
        for rank in &mut before.ranks {
            rank.retain(|action| !matches!(action, Action::Retire { .. }));
        }
        verify(&before, &VerifyLimits::default()).unwrap();
        let stages = vec![stage; lowered.stages()];
        assert_eq!(predict_both(&before, &stages), predict_both(&lowered, &stages), "{kind}");
        let mut costs = Costs::uniform(lowered.stages(), 5, 5, 4, 1);
        costs.stages.iter_mut().for_each(|stage| stage.reduce_scatter_ns = 70);
        let times = |program: &Schedule| {
            let ranks = simulate(program, &costs).unwrap().ranks;
            let kept = |span: &Span| !matches!(span.action, Action::Retire { .. });
            let spans = ranks.into_iter().map(|rank| rank.spans.into_iter().filter(kept).collect());
            spans.collect::<Vec<Vec<Span>>>()
        };
        assert_eq!(times(&before), times(&lowered), "{kind}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        cases: 200,
        ..Default::default()
    })]

    /// The contract: 2V − 1 gathers and V reductions per rank and unit, for any B and prefetch, and
    /// never more than 1 + prefetch stages resident.
    #[test]
    fn zeropp_gathers_2v_minus_1_times(
        pp in 1usize..6, v in 1usize..5, b in 1usize..20, u in 1usize..9,
        prefetch in 0usize..4, recompute: bool,
    ) {
        let schedule = schedule("zeropp", pp, v, b, u);
        let options = LowerOptions { prefetch, recompute, ..Default::default() };
        let lowered = lower(&schedule, &options);
        let units = b.div_ceil(u);
        for program in &lowered.ranks {
            let gathers = count(program, |a| matches!(a, Action::AllGather { .. }));
            prop_assert_eq!(gathers, units * (2 * v - 1));
            let reductions = count(program, |a| matches!(a, Action::ReduceScatter { .. }));
            prop_assert_eq!(reductions, units * v);
            let mut resident = HashSet::new();
            for action in program {
                match action {
                    Action::AllGather { stage } => prop_assert!(resident.insert(*stage)),
                    Action::Free { stage } => prop_assert!(resident.remove(stage)),
                    _ => {}
                }
                prop_assert!(resident.len() <= 1 + prefetch);
            }
            prop_assert!(resident.is_empty());
            let recomputed = count(program, |a| {
                matches!(a, Action::Compute { kind: Compute::R, .. })
            });
            prop_assert_eq!(recomputed, if recompute { (v - 1).max(1) * b } else { 0 });
        }
        prop_assert_eq!(&lower(&lowered, &options), &lowered);
    }

    /// Schedules with one unit reduce once, and gather at most 2V − 1 times.
    #[test]
    fn baselines_gather_per_visit(pp in 1usize..6, b in 1usize..20, v in 1usize..4) {
        for (kind, v) in [("gpipe", v), ("1f1b", 1)] {
            let lowered = lower(&schedule(kind, pp, v, b, b), &LowerOptions::default());
            for program in &lowered.ranks {
                prop_assert_eq!(
                    count(program, |a| matches!(a, Action::AllGather { .. })), 2 * v - 1);
                prop_assert_eq!(
                    count(program, |a| matches!(a, Action::ReduceScatter { .. })), v);
            }
        }
    }
}
