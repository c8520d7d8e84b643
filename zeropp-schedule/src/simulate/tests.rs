//! Worked examples, closed forms and lower bounds.

use std::collections::HashMap;

use crate::metrics::Metrics;
use proptest::prelude::*;

use super::*;
use crate::action::ActionKind;
use crate::ir::{Action, HeadMessage, Task};
use crate::lower::{LowerOptions, lower};
use crate::schedules::{Shape, generate, generate_split};

fn shape(pp: usize, virtual_stages: usize, micro_batches: usize, unit: usize) -> Shape {
    Shape { pp, virtual_stages, micro_batches, unit }
}

fn run(kind: &str, shape: Shape, costs: &Costs) -> (Schedule, Timeline, Metrics) {
    let schedule = generate(kind, &shape).unwrap();
    let timeline = simulate(&schedule, costs).unwrap();
    let metrics = Metrics::new(&schedule, &timeline, costs);
    (schedule, timeline, metrics)
}

fn slots(kind: &str, shape: Shape) -> (Schedule, Timeline, Metrics) {
    run(kind, shape, &Costs::uniform(shape.stages(), 1, 1, 1, 0))
}

/// The words, 7 on a line.
fn lines(words: impl Iterator<Item = String>) -> String {
    let words: Vec<_> = words.collect();
    words.chunks(7).map(|line| line.join(" ")).collect::<Vec<_>>().join("\n")
}

/// The rank's actions with their starts, as `0F0@3`.
fn starts(timeline: &Timeline, rank: usize) -> String {
    let spans = &timeline.ranks[rank].spans;
    lines(spans.iter().map(|s| format!("{}@{}", s.action, s.start_ns)))
}

/// Idle slots of one unit and rank (DESIGN.md section 3).
fn zeropp_idle(p: i64, v: i64, u: i64) -> i64 {
    let pos = |n: i64| n.max(0);
    let first = pos(2 * p - 1 - u);
    if v == 1 {
        return first;
    }
    first + (v - 1) * pos(p - u) + pos(p + 1 - 2 * u) + (v - 2) * pos(p - 2 * u)
}

#[test]
fn zeropp_worked_examples() {
    let (_, timeline, metrics) = slots("zeropp", shape(2, 2, 3, 3));
    insta::assert_snapshot!(starts(&timeline, 0), @r"
    0F0@0 0F1@1 0F2@2 2F0@3 2F1@4 2F2@5 2B0@6
    2W0@7 2B1@8 2W1@9 2B2@10 0B0@11 2W2@12 0B1@13
    0W0@14 0B2@15 0W1@16 0W2@17
    ");
    insta::assert_snapshot!(starts(&timeline, 1), @r"
    1F0@1 1F1@2 1F2@3 3F0@4 3B0@5 3F1@6 3B1@7
    3F2@8 3B2@9 1B0@10 3W0@11 1B1@12 3W1@13 1B2@14
    3W2@15 1W0@16 1W1@17 1W2@18
    ");
    assert_eq!(metrics.ends_ns, [18, 19]);
    let (_, timeline, _) = slots("zeropp", shape(4, 2, 7, 7));
    insta::assert_snapshot!(starts(&timeline, 1), @r"
    1F0@1 1F1@2 1F2@3 1F3@4 1F4@5 1F5@6 1F6@7
    5F0@8 5F1@9 5F2@10 5F3@11 5F4@12 5B0@13 5F5@14
    5B1@15 5F6@16 5B2@17 5W0@18 5B3@19 5W1@20 5B4@21
    5W2@22 5B5@23 5W3@24 5B6@25 1B0@26 5W4@27 1B1@28
    5W5@29 1B2@30 5W6@31 1B3@32 1W0@33 1B4@34 1W1@35
    1B5@36 1W2@37 1B6@38 1W3@39 1W4@40 1W5@41 1W6@42
    ");
}

/// The formula is the idle time of rank 0, the longest, in a single unit, and what every further
/// unit adds on each rank (in a single unit the later ranks wait less: they start later).
#[test]
fn zeropp_idle_is_the_closed_form() {
    for p in 1..=8 {
        for v in 1..=4 {
            for u in 1..=2 * p + 1 {
                let idle = zeropp_idle(p as i64, v as i64, u as i64) as u64;
                let unit = (3 * u * v) as u64 + idle;
                let [one, two, three] = [1, 2, 3].map(|n| slots("zeropp", shape(p, v, n * u, u)).2);
                assert_eq!(one.idle_ns[0], idle, "P = {p}, V = {v}, U = {u}");
                assert_eq!(one.own_span_max_ns, unit, "P = {p}, V = {v}, U = {u}");
                for (two, three) in two.ends_ns.iter().zip(&three.ends_ns) {
                    assert_eq!(three - two, unit, "P = {p}, V = {v}, U = {u}");
                }
            }
        }
    }
}

#[test]
fn zeropp_units_tile_without_a_gap() {
    for (p, v) in [(2, 2), (3, 2), (4, 3), (8, 2)] {
        let u = 2 * p - 1;
        let (_, _, metrics) = slots("zeropp", shape(p, v, 4 * u, u));
        assert_eq!(metrics.idle_ns, vec![0; p]);
        assert_eq!(metrics.bubble_rate, 0.0);
    }
}

/// The fixed order with the timings of a 14.6B model (P = 4, V = 2), as DESIGN.md gives them.
#[test]
fn zeropp_with_unequal_times() {
    let costs = Costs::uniform(8, 11347, 11248, 8132, 377);
    let rate = |u| run("zeropp", shape(4, 2, u, u), &costs).2.bubble_rate;
    insta::assert_snapshot!(format!("{:.4} {:.4}", rate(7), rate(8)), @"0.0471 0.0414");
}

/// The 1F1B column of SCHEDULES.md (milliseconds; the papers').
#[test]
fn one_f_one_b_bubble_rates_of_the_papers() {
    for (p, m, f, b, w, c, want) in [
        (8, 24, 18522, 18086, 9337, 601, "0.2431"),
        (8, 32, 18513, 18086, 9331, 626, "0.1985"),
        (8, 24, 29718, 29444, 19927, 527, "0.2347"),
        (16, 48, 11347, 11248, 8132, 377, "0.2552"),
    ] {
        let (_, _, metrics) = run("1f1b", shape(p, 1, m, m), &Costs::uniform(p, f, b, w, c));
        assert_eq!(format!("{:.4}", metrics.bubble_rate), want);
    }
}

#[test]
fn links_gathers_and_reductions_take_their_time() {
    let schedule = lower(
        &generate("zeropp", &shape(2, 1, 2, 2)).unwrap(),
        &LowerOptions { replicas: true, ..Default::default() },
    );
    let stage = StageCosts {
        f_ns: 10,
        b_ns: 10,
        w_ns: 10,
        all_gather_ns: 3,
        reduce_scatter_ns: 5,
        replica_reduce_ns: 7,
        ..Default::default()
    };
    let memory = StageBytes { message: 4, activation: 1, ..Default::default() };
    let link = LinkCosts {
        latency_ns: 2,
        // 4 bytes take 16 ns, more than an F.
        bytes_per_s: Some(250_000_000),
        parallel_max: Some(1),
    };
    let costs = Costs {
        stages: vec![stage; 2],
        memory: vec![memory; 2],
        link,
        step_ns: 100,
        ..Default::default()
    };
    let timeline = simulate(&schedule, &costs).unwrap();
    let text = |rank: usize| {
        let spans = &timeline.ranks[rank].spans;
        let one = |s: &crate::timeline::Span| format!("{}@{}-{}", s.action, s.start_ns, s.end_ns);
        lines(spans.iter().map(one))
    };
    insta::assert_snapshot!(text(0), @r"
    AG0@0-3 0F0@3-13 >A0.0@13-31 <G0.0@13-69 0F1@13-23 >A0.1@29-47 0B0@69-79
    <G0.1@79-89 0W0@79-89 0B1@89-99 FREE0@99-99 0W1@99-109 RS0@109-114 AR0@114-121
    END0@109-114 STEP@121-221
    ");
    insta::assert_snapshot!(text(1), @r"
    AG1@0-3 <A1.0@0-31 1F0@31-41 <A1.1@41-47 1B0@41-51 >G1.0@51-69 1F1@51-61
    1B1@61-71 >G1.1@71-89 FREE1@71-71 1W0@71-81 1W1@81-91 RS1@91-96 AR1@96-103
    END1@91-96 STEP@121-221
    ");
    let memory: Vec<_> = timeline.ranks[1].memory.iter().map(|p| (p.at_ns, p.bytes)).collect();
    assert_eq!(memory, [(31, 1), (51, 1), (71, 0)]);
}

#[test]
fn times_alone_are_those_of_a_simulation() {
    let costs = Costs { step_ns: 9, ..Costs::uniform(8, 50, 60, 40, 3) };
    for kind in ["zeropp", "zb-v", "interleaved", "dualpipe-v"] {
        let made = generate(kind, &shape(4, 2, 8, 8)).unwrap();
        for schedule in [lower(&made, &LowerOptions::default()), made] {
            let mut whole = simulate(&schedule, &costs).unwrap();
            whole.ranks.iter_mut().for_each(|rank| rank.memory.clear());
            assert_eq!(times(&schedule, &costs).unwrap(), whole, "{kind}");
        }
    }
}

#[test]
fn errors_name_the_cost() {
    let schedule = generate("gpipe", &shape(2, 1, 2, 2)).unwrap();
    let message = |costs: &Costs| simulate(&schedule, costs).unwrap_err().to_string();
    let good = Costs::uniform(2, 1, 1, 1, 0);
    assert_eq!(
        message(&Costs::uniform(3, 1, 1, 1, 0)),
        "costs: stages has 3 entries; the schedule needs 2, one for each stage, or for each stage \
         and slice"
    );
    let mut costs = good.clone();
    costs.link.parallel_max = Some(0);
    assert_eq!(
        message(&costs),
        "costs: parallel_max = 0 sends nothing; leave it out or make it at least 1"
    );
    assert_eq!(
        message(&Costs::uniform(2, u64::MAX, 1, 1, 0)),
        "costs: a time of 18446744073709551615 ns or more is too long for this many actions; use \
         smaller times"
    );
    let mut broken = schedule.clone();
    broken.ranks[0].pop();
    let error = simulate(&broken, &good).unwrap_err().to_string();
    assert_eq!(error, "rank 0: 0BW1 is missing");
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        cases: 300,
        ..Default::default()
    })]

    /// GPipe and 1F1B: (m + p − 1)(F + B + W) without message times; (p − 1)(F + B + W) idle.
    #[test]
    fn baselines_meet_their_closed_forms(
        p in 1usize..9, m in 1usize..20, f in 1u64..50, b in 1u64..50, w in 1u64..50,
    ) {
        let costs = Costs::uniform(p, f, b, w, 0);
        let (p64, m64) = (p as u64, m as u64);
        for kind in ["gpipe", "1f1b"] {
            let (_, _, metrics) = run(kind, shape(p, 1, m, m), &costs);
            prop_assert_eq!(metrics.makespan_ns, (m64 + p64 - 1) * (f + b + w), "{}", kind);
            let bubble = (p64 - 1) as f64 / (m64 + p64 - 1) as f64;
            prop_assert!((metrics.bubble_rate - bubble).abs() < 1e-12);
            for rank in 0..p {
                let want = if kind == "gpipe" { m } else { m.min(p - rank) };
                prop_assert_eq!(metrics.peak_activation[rank], want as u64);
            }
        }
        // Breadth-first: (p − 1)(F + B + W) idle whatever V is, in times of one stage.
        if m >= p {
            let v = 1 + m % 3;
            let shape = shape(p, v, m, m);
            let costs = Costs::uniform(shape.stages(), f, b, w, 0);
            let (_, _, metrics) = run("gpipe", shape, &costs);
            prop_assert_eq!(metrics.makespan_ns, (m64 * v as u64 + p64 - 1) * (f + b + w));
        }
    }

    /// No run is faster than its busiest rank or its longest chain, and every action waits for
    /// what it needs.
    #[test]
    fn never_below_the_lower_bounds(
        p in 1usize..6, v in 1usize..4, m in 1usize..12, u in 1usize..8, kind in 0usize..3,
        f in 0u64..50, b in 0u64..50, w in 0u64..50, c in 0u64..20,
        gather in 0u64..30, reduce in 0u64..30, lowered: bool, recompute: bool,
    ) {
        let kind = ["zeropp", "gpipe", "1f1b"][kind];
        let shape = shape(p, if kind == "1f1b" { 1 } else { v }, m, u);
        let mut costs = Costs::uniform(shape.stages(), f, b, w, c);
        for (i, stage) in costs.stages.iter_mut().enumerate() {
            // Uneven stages.
            stage.f_ns += i as u64 % 3;
            (stage.all_gather_ns, stage.reduce_scatter_ns) = (gather, reduce);
        }
        let compute_only = generate(kind, &shape).unwrap();
        let schedule = if lowered {
            lower(&compute_only, &LowerOptions { recompute, ..Default::default() })
        } else {
            compute_only
        };
        let timeline = simulate(&schedule, &costs).unwrap();
        let metrics = Metrics::new(&schedule, &timeline, &costs);
        let chain: u64 = costs.stages.iter().map(|s| s.f_ns + s.b_ns).sum();
        let hops = if p == 1 { 0 } else { 2 * (shape.stages() as u64 - 1) };
        prop_assert!(metrics.makespan_ns >= chain + hops * c);
        for (rank, line) in timeline.ranks.iter().enumerate() {
            prop_assert!(metrics.makespan_ns >= line.busy_ns());
            prop_assert_eq!(line.spans.len(), schedule.ranks[rank].len());
            let mut clock = 0;
            for (span, action) in line.spans.iter().zip(&schedule.ranks[rank]) {
                prop_assert_eq!(&span.action, action);
                prop_assert!(span.end_ns >= span.start_ns);
                if action.computes().next().is_some() {
                    prop_assert!(span.start_ns >= clock);
                    clock = span.end_ns;
                }
                if matches!(action, Action::OptimizerStep) {
                    prop_assert!(span.start_ns >= metrics.makespan_ns);
                }
            }
            let end = line.memory.last().map_or(0, |p| p.bytes);
            prop_assert_eq!(end, 0);
            let peak = line.memory.iter().map(|p| p.bytes).max().unwrap_or(0);
            // What is held for no time at all is no point of the curve.
            if f.min(b).min(w) > 0 {
                prop_assert_eq!(peak, metrics.peak_activation[rank]);
            }
        }
        // Where collectives cost nothing, lowering changes no time.
        if lowered && !recompute && gather == 0 && reduce == 0 {
            let plain = generate(kind, &shape).unwrap();
            let plain = simulate(&plain, &costs).unwrap();
            for (a, b) in plain.ranks.iter().zip(&timeline.ranks) {
                let computes = b.spans.iter().filter(|s| s.action.computes().next().is_some());
                prop_assert_eq!(a.spans.iter().collect::<Vec<_>>(), computes.collect::<Vec<_>>());
            }
        }
    }
}

/// Copies go one after the other at the file's rate, and what waits for them waits as long as that.
#[test]
fn copies_take_their_time_in_a_queue_of_their_own() {
    let shape = Shape { pp: 1, virtual_stages: 2, micro_batches: 4, unit: 4 };
    let compact = generate("zeropp", &shape).unwrap();
    let program = lower(&compact, &LowerOptions { out: 4, ..LowerOptions::default() });
    let run = |file_bytes_per_s| {
        let mut costs = Costs { file_bytes_per_s, ..Costs::uniform(2, 10, 10, 10, 0) };
        costs.memory.iter_mut().for_each(|bytes| bytes.activation = 1000);
        simulate(&program, &costs).unwrap()
    };
    let spans = |timeline: &Timeline, kind: ActionKind| -> Vec<(u64, u64)> {
        let of = timeline.ranks[0].spans.iter().filter(|span| span.action.kind() == kind);
        of.map(|span| (span.start_ns, span.end_ns)).collect()
    };
    let makespan = |timeline: &Timeline| timeline.ranks[0].own_span().unwrap().1;
    // Infinitely fast: as without copies.
    let free = run(None);
    assert_eq!(makespan(&free), 240);
    assert!(spans(&free, ActionKind::Out).iter().all(|(start, end)| start == end));
    // 10 ns each, as long as an F: nothing waits.
    let quick = run(Some(100_000_000_000));
    assert_eq!(makespan(&quick), 240);
    assert_eq!(spans(&quick, ActionKind::Out), [(10, 20), (20, 30), (30, 40), (40, 50)]);
    // 25 ns each: the third F's end waits for the first copy, and the copies for each other.
    let slow = run(Some(40_000_000_000));
    assert_eq!(spans(&slow, ActionKind::Out)[..3], [(10, 35), (35, 60), (60, 85)]);
    assert_eq!(spans(&slow, ActionKind::Gone)[0], (30, 35));
    assert!(makespan(&slow) > 240);
    let ins = spans(&slow, ActionKind::In);
    assert!(ins.windows(2).all(|pair| pair[0].1 <= pair[1].0), "one after the other");
    // The backward that needs a copy begins when that is there.
    let at = |stage, micro_batch| Task { kind: Compute::B, stage, micro_batch };
    for (m, (_, there)) in ins.iter().enumerate() {
        let mut all = slow.ranks[0].spans.iter();
        let backward = all.find(|s| s.action.computes().any(|t| t == at(0, m))).unwrap();
        assert!(backward.start_ns >= *there, "micro-batch {m}");
    }
    let zero = Costs { file_bytes_per_s: Some(0), ..Costs::uniform(2, 1, 1, 1, 0) };
    assert!(simulate(&program, &zero).unwrap_err().to_string().contains("file_bytes_per_s = 0"));
}

/// Where states are out, a gather begins behind the read of a shard, a second unit's sum reads the
/// first one's, and a rank that does so itself computes later by as much.
#[test]
fn states_that_are_out_are_read_before_gathers_and_added_after_reductions() {
    let shape = Shape { pp: 1, virtual_stages: 1, micro_batches: 4, unit: 2 };
    let program = lower(&generate("zeropp", &shape).unwrap(), &LowerOptions::default());
    let run = |copies_apart, states: Option<StateCopies>| {
        let states = states.into_iter().collect();
        let mut costs = Costs { copies_apart, states, ..Costs::uniform(1, 10, 10, 10, 0) };
        costs.stages[0].all_gather_ns = 2;
        costs.stages[0].reduce_scatter_ns = 3;
        simulate(&program, &costs).unwrap()
    };
    let spans = |timeline: &Timeline, kind: ActionKind| -> Vec<(u64, u64)> {
        let of = timeline.ranks[0].spans.iter().filter(|span| span.action.kind() == kind);
        of.map(|span| (span.start_ns, span.end_ns)).collect()
    };
    let here = run(false, None);
    let gathers = spans(&here, ActionKind::AllGather);
    assert_eq!(gathers[0], (0, 2));
    let states = StateCopies { read_ns: 7, add_ns: 4, waits: true, ..StateCopies::default() };
    // Two gathers' reads, a write, and a read and a write.
    let longer = 7 * gathers.len() as u64 + 4 + 2 * 4;
    let itself = run(false, Some(states));
    assert_eq!(itself.end_ns(), here.end_ns() + longer);
    assert_eq!(spans(&itself, ActionKind::AllGather)[0], (7, 9));
    // Beside: of the second unit what lies behind its last W alone.
    let beside = run(true, Some(StateCopies { waits: false, ..states }));
    assert_eq!(spans(&beside, ActionKind::AllGather)[0], (7, 9));
    assert!(beside.end_ns() < itself.end_ns() && beside.end_ns() >= here.end_ns() + 7 + 4);
    let nothing = StateCopies::default();
    assert_eq!(run(true, Some(nothing)), here);
    assert_eq!(run(false, Some(nothing)), here);
}

/// An update that is done behind the next step delays the first gather of a stage, and is hidden
/// behind the forwards of those before it.
#[test]
fn updates_behind_a_step_are_waited_for_by_first_gathers() {
    let shape = Shape { pp: 1, virtual_stages: 3, micro_batches: 4, unit: 2 };
    let program = lower(&generate("zeropp", &shape).unwrap(), &LowerOptions::default());
    let run = |(update_ns, waits), reduce_scatter_ns| {
        let states = vec![StateCopies { update_ns, waits, ..StateCopies::default() }; 3];
        let mut costs = Costs { copies_apart: true, states, ..Costs::uniform(3, 10, 10, 10, 0) };
        costs.stages.iter_mut().for_each(|stage| stage.reduce_scatter_ns = reduce_scatter_ns);
        simulate(&program, &costs).unwrap().end_ns()
    };
    let none = run((0, false), 0);
    // The first stage's comes in beside three W, and what follows them.
    assert_eq!(run((7, false), 0), none);
    // Two forwards take 20 of the 30 that the second and the third stage's take.
    assert_eq!(run((30, false), 0), none + 2 * 10);
    assert_eq!(run((37, false), 0), none + 2 * 17 + 7);
    assert_eq!(run((37, false), 7), run((0, false), 7) + 2 * 17);
    // In a rank's own queue the first forwards wait for the second stage's, too, which is gathered
    // before them, and the others for what goes out of the stage before the last.
    assert_eq!(run((30, true), 0), none + 30 + 10);
}

/// A rank passes the head's input on to others when it has come, but in the middle of no compute.
#[test]
fn messages_that_are_passed_on_leave_between_computes() {
    let shape = shape(8, 2, 16, 8);
    let compact = generate_split("zeropp", &shape, &[8; 8], None).unwrap();
    let program = lower(&compact, &LowerOptions::default());
    let costs = Costs::uniform(program.cells(), 1000, 1100, 700, 130);
    let timeline = simulate(&program, &costs).unwrap();
    let mut has_waited = 0;
    for rank in &timeline.ranks {
        let inside = |at: u64| {
            let computes = rank.spans.iter().filter(|span| span.action.computes().count() > 0);
            computes.filter(move |span| span.start_ns < at && at < span.end_ns).count()
        };
        let mut come = HashMap::new();
        for span in &rank.spans {
            let Action::RecvHead { message: HeadMessage::Input, micro_batch, .. } = span.action
            else {
                continue;
            };
            come.insert(micro_batch, span.end_ns);
        }
        for span in &rank.spans {
            let Action::SendHead { message, micro_batch, .. } = span.action else { continue };
            assert_eq!(inside(span.start_ns), 0, "rank {}: {span:?}", rank.pp);
            if let Some(come) = come.get(&micro_batch).filter(|_| message == HeadMessage::Input) {
                assert!(*come <= span.start_ns, "{span:?}");
                has_waited += inside(*come);
            }
        }
    }
    assert!(has_waited > 10, "{has_waited} have come in the middle of a compute");
}
