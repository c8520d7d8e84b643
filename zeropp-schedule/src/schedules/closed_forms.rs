//! Every schedule against the closed forms and the printed numbers of its paper.

use super::timing::{Timing, time};
use super::*;
use crate::ir::{Action, Compute};
use crate::ir::{Schedule, Task};
use crate::lower::{LowerOptions, lower};
use crate::simulate::simulate;
use crate::verify::{VerifyLimits, verify};
use proptest::prelude::*;

fn shape(pp: usize, virtual_stages: usize, micro_batches: usize) -> Shape {
    Shape { pp, virtual_stages, micro_batches, unit: micro_batches }
}

pub(super) fn timed(schedule: &Schedule, costs: &OrderCosts) -> Timing {
    time(&schedule.ranks, &schedule.placement, schedule.micro_batches(), costs)
        .unwrap_or_else(|stuck| panic!("{} is stuck at {:?}", schedule.kind, stuck.0))
}

fn made(kind: &str, shape: Shape, costs: &OrderCosts) -> Timing {
    let schedule = generate(kind, &shape).unwrap();
    complete(&schedule);
    timed(&schedule, costs)
}

/// Every F, B and W once per stage and micro-batch on the stage's rank, and the W of a stage in
/// micro-batch order, on which the bits of the gradient depend.
pub(super) fn complete(schedule: &Schedule) {
    let (stages, m) = (schedule.stages(), schedule.micro_batches());
    let mut seen = vec![[false; 3]; stages * m];
    let mut next_w = vec![0; stages];
    for (rank, actions) in schedule.ranks.iter().enumerate() {
        for Task { kind, stage, micro_batch: i } in actions.iter().flat_map(Action::computes) {
            assert_eq!(schedule.placement[stage], rank);
            let rows: &[usize] = match kind {
                Compute::F => &[0],
                Compute::B => &[1],
                Compute::W => &[2],
                Compute::BW => &[1, 2],
                Compute::R => panic!("no recomputation expected"),
            };
            for &row in rows {
                let mark = &mut seen[stage * m + i][row];
                assert!(!*mark, "{} runs {stage}{kind:?}{i} twice", schedule.kind);
                *mark = true;
            }
            if rows.contains(&2) {
                assert_eq!(next_w[stage], i, "{}: W of stage {stage} out of order", schedule.kind);
                next_w[stage] += 1;
            }
        }
    }
    assert!(seen.iter().flatten().all(|s| *s), "{} is not complete", schedule.kind);
}

/// Idle time of each rank from the start of the step to the last end of all.
fn idle(t: &Timing) -> Vec<u64> {
    t.busy.iter().map(|b| t.makespan - b).collect()
}

fn all_idle(t: &Timing, want: u64) {
    assert_eq!(idle(t), vec![want; t.busy.len()]);
}

fn own_idle(t: &Timing) -> Vec<u64> {
    (0..t.busy.len()).map(|r| t.ends[r] - t.starts[r] - t.busy[r]).collect()
}

/// Times with F, B, W in 1..40.
fn times() -> impl Strategy<Value = (u64, u64, u64)> {
    (1u64..40, 1u64..40, 1u64..40)
}

pub(super) fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config(256))]

    #[test]
    fn whole_backwards((f, b, w) in times(), p in 1usize..9, v in 1usize..5, n in 1usize..5) {
        let costs = OrderCosts::uniform(p * v, f, b, w, 0);
        let bubble = (p as u64 - 1) * (f + b + w);
        let one = OrderCosts::uniform(p, f, b, w, 0);
        all_idle(&made("gpipe", shape(p, 1, n * p), &one), bubble);
        let t = made("1f1b", shape(p, 1, n * p), &one);
        all_idle(&t, bubble);
        let peaks: Vec<i64> = (0..p).map(|r| 2 * (p - r).min(n * p) as i64).collect();
        prop_assert_eq!(t.peaks, peaks);

        all_idle(&made("bf-pp", shape(p, v, n * p + n - 1), &costs), bubble);
        let t = made("interleaved", shape(p, v, n * p), &costs);
        all_idle(&t, bubble);
        let peak = (p * v + p - 1).min(n * p * v) as i64;
        prop_assert_eq!(t.peaks[0], 2 * peak);
    }

    #[test]
    fn few_micro_batches_on_one_stage((f, b, w) in times(), p in 1usize..9, less in 0usize..8) {
        let m = p - less.min(p - 1);
        let costs = OrderCosts::uniform(p, f, b, w, 0);
        let t = made("1f1b", shape(p, 1, m), &costs);
        prop_assert_eq!(t.makespan, (m + p - 1) as u64 * (f + b + w));
        // Split, the last rank's m-th gradient comes back without a W on its way, if W is the
        // shortest and B the longest of the three.
        let (w, b) = (w.min(f), b.max(f));
        let costs = OrderCosts::uniform(p, f, b, w, 0);
        for kind in ["zb-h1", "zb-1p"] {
            let t = timed(&generate_with_costs(kind, &shape(p, 1, m), &costs).unwrap(), &costs);
            prop_assert_eq!(t.makespan, (m + p - 1) as u64 * (f + b) + w, "{}", kind);
        }
    }

    #[test]
    fn zero_bubble_by_hand((f, b, w) in times(), c in 0u64..5, p in 1usize..9, more in 0usize..9) {
        let m = 2 * p + more;
        // The closed forms are those of times not too far from each other: a B at least as long as
        // a W and an F, as in transformers.
        let w = w.min(f).min(b);
        let mut costs = OrderCosts::uniform(p, f, b, w, 0);
        costs.mem_f = vec![7; p];
        costs.mem_b = vec![-4; p];
        costs.mem_w = vec![-3; p];
        let t = made("zb-h1", shape(p, 1, m), &costs);
        prop_assert_eq!(t.makespan, m as u64 * (f + b + w) + (p as u64 - 1) * (f + b - w));
        let peaks: Vec<i64> = (0..p as i64).map(|r| (p as i64 - r) * 7 + r * 3).collect();
        prop_assert_eq!(t.peaks, peaks);
        // The form of ZB-H2 has sends that are short beside any action.
        let c = c.min(w / 4);
        costs.send = c;
        let t = made("zb-h2", shape(p, 1, m), &costs);
        let peak = |r: i64| (2 * (p as i64 - r) - 1) * 7 + 2 * r * 3;
        let peaks: Vec<i64> = (0..p as i64).map(peak).collect();
        prop_assert_eq!(&t.peaks, &peaks);
        let span = m as u64 * (f + b + w) + (p as u64 - 1) * (f + b - 2 * w + 2 * c);
        prop_assert_eq!(t.own_span(), span);
    }

    #[test]
    fn zb_v_has_no_bubble(unit in 1u64..9, p in 1usize..10, more in 0usize..9) {
        let costs = OrderCosts::uniform(2 * p, unit, unit, unit, 0);
        let t = made("zb-v", shape(p, 2, 2 * p + more), &costs);
        prop_assert_eq!(own_idle(&t), vec![0; p]);
        prop_assert_eq!(t.peaks, vec![4 * p as i64; p]);
    }

    #[test]
    fn any_number_of_micro_batches_is_complete(
        (f, b, w) in times(), c in 0u64..9, p in 1usize..8, v in 1usize..5, m in 1usize..30,
    ) {
        for kind in KINDS {
            for v in [1, 2, v] {
                let at = Shape { pp: p, virtual_stages: v, micro_batches: m, unit: (m / 2).max(1) };
                if let Ok(schedule) = generate(kind.name, &at) {
                    complete(&schedule);
                    timed(&schedule, &OrderCosts::uniform(p * v, f, b, w, c));
                }
            }
        }
    }

    /// What the verifier, the lowering and the simulator say of every kind with costs.
    #[test]
    fn every_kind_is_verified_and_timed_as_the_simulator_does(
        (f, b, w) in times(), c in 0u64..9, p in 1usize..6, v in 1usize..4, m in 1usize..20,
        unit in 1usize..12,
    ) {
        for kind in KINDS {
            for v in [1, 2, v] {
                let at = Shape { pp: p, virtual_stages: v, micro_batches: m, unit };
                let mut simulated = crate::simulate::Costs::uniform(p * v, f, b, w, c);
                simulated.memory.iter_mut().for_each(|m| (m.activation, m.stash) = (5, 2));
                let costs = OrderCosts::from(&simulated);
                let Ok(schedule) = generate_with_costs(kind.name, &at, &costs) else { continue };
                prop_assert_eq!(&schedule.kind, kind.name);
                complete(&schedule);
                let strict = VerifyLimits { optimizer_step: false, ..VerifyLimits::default() };
                prop_assert_eq!(verify(&schedule, &strict), Ok(()));
                let program = lower(&schedule, &LowerOptions::default());
                prop_assert_eq!(verify(&program, &VerifyLimits::default()), Ok(()));
                let ours = timed(&schedule, &costs);
                let theirs = simulate(&schedule, &simulated).unwrap();
                let spans = theirs.ranks.iter().map(|r| r.own_span().unwrap());
                let own: Vec<(u64, u64)> = ours.starts.into_iter().zip(ours.ends).collect();
                prop_assert_eq!(own, spans.collect::<Vec<_>>(), "{}", kind.name);
            }
        }
    }

    #[test]
    fn dualpipe_v_bubble((f, _, w) in times(), p in 1usize..9, more in 0usize..9) {
        // Without overlap a pair takes F + BW. The paper's form is that of F = B.
        let w = w.min(f);
        let costs = OrderCosts::uniform(2 * p, f, f, w, 0);
        let t = made("dualpipe-v", shape(p, 2, 2 * p + more), &costs);
        let (pair, whole) = (f + f + w, f + w);
        all_idle(&t, (p as u64 - 1) * (pair + whole - 3 * w));
        prop_assert_eq!(t.peaks, vec![2 * (2 * p as i64 + 1); p]);
    }

    #[test]
    fn zb_v_with_uneven_stages(
        p in 1usize..8, m in 1usize..24, c in 0u64..9,
        seed in proptest::collection::vec((1u64..30, 1u64..30, 1u64..30), 14),
    ) {
        let mut costs = OrderCosts::uniform(2 * p, 0, 0, 0, c);
        for (j, (f, b, w)) in seed.into_iter().take(2 * p).enumerate() {
            (costs.f[j], costs.b[j], costs.w[j]) = (f, b, w);
        }
        let schedule = zb_v(&shape(p, 2, m), &costs).unwrap();
        complete(&schedule);
        let t = timed(&schedule, &costs);
        let by_hand = made("zb-v", shape(p, 2, m), &costs);
        prop_assert!(t.own_span() <= by_hand.own_span());
        prop_assert!(t.peaks.iter().all(|peak| *peak <= 4 * p as i64));
    }

    #[test]
    fn automatic_with_uneven_stages(
        p in 1usize..8, m in 1usize..20,
        seed in proptest::collection::vec((1u64..30, 1u64..30, 1u64..30, 1i64..9), 8),
        c in 0u64..9, fold in 1i64..4,
    ) {
        let mut costs = OrderCosts::uniform(p, 0, 0, 0, c);
        for (j, (f, b, w, half)) in seed.into_iter().take(p).enumerate() {
            (costs.f[j], costs.b[j], costs.w[j]) = (f, b, w);
            (costs.mem_f[j], costs.mem_b[j], costs.mem_w[j]) = (2 * half, -half, -half);
        }
        let limit = fold * costs.mem_f.iter().max().unwrap();
        automatic(p, m, &costs.with_limit(limit));
    }
}

#[test]
fn zb_v_of_the_article() {
    let t = made("zb-v", shape(4, 2, 8), &OrderCosts::uniform(8, 1, 1, 1, 0));
    assert_eq!(t.ends, [48, 49, 50, 51]);
    assert_eq!(t.peaks, [16; 4]);
}

/// (cost − m(F + B + W)) / cost, to four decimals.
fn rate(cost: u64, m: usize, total: u64) -> String {
    format!("{:.4}", (cost - m as u64 * total) as f64 / cost as f64)
}

/// The tables of the papers: one row a profile, times in µs, one column a schedule.
#[test]
fn bubble_rates_of_the_papers() {
    let rows = [
        (8, 24, 3, [18522, 18086, 9337, 601], ["0.2431", "0.1055", "0.1585", "0.1083"]),
        (8, 32, 3, [18513, 18086, 9331, 626], ["0.1985", "0.0818", "0.1242", "0.0837"]),
        (8, 24, 4, [29718, 29444, 19927, 527], ["0.2347", "0.0808", "0.1323", "0.0698"]),
        (16, 48, 3, [11347, 11248, 8132, 377], ["0.2552", "0.1104", "0.1397", "0.0672"]),
    ];
    for (p, m, v, times, want) in rows {
        // A twelfth of a µs is an exact unit for a stage and for its chunks.
        let [f, b, w, c] = times.map(|t| 12 * t);
        let whole = OrderCosts::uniform(p, f, b, w, c);
        let v64 = v as u64;
        let chunks = OrderCosts::uniform(p * v, f / v64, b / v64, w / v64, c);
        let total = f + b + w;
        let got = [
            rate(made("1f1b", shape(p, 1, m), &whole).makespan, m, total),
            rate(interleaved_as_printed(&shape(p, v, m), &chunks).unwrap(), m, total),
            rate(made("zb-h1", shape(p, 1, m), &whole).makespan, m, total),
            rate(made("zb-h2", shape(p, 1, m), &whole).own_span(), m, total),
        ];
        assert_eq!(got, want, "p = {p}, m = {m}");
        let real = made("interleaved", shape(p, v, m), &chunks).makespan;
        let printed = interleaved_as_printed(&shape(p, v, m), &chunks).unwrap();
        assert_eq!(real - printed, p as u64 * c);
    }
    let costs = OrderCosts::uniform(32, 14407, 14380, 9676, 1610);
    let schedule = zb_v(&shape(16, 2, 48), &costs).unwrap();
    complete(&schedule);
    let t = timed(&schedule, &costs);
    assert_eq!(t.peaks, [64; 16]);
    assert_eq!(rate(t.own_span(), 48, 2 * costs.total(0)), "0.0697");
}

fn automatic(p: usize, m: usize, costs: &OrderCosts) -> Timing {
    let schedule = zb("zb", &shape(p, 1, m), costs).unwrap();
    complete(&schedule);
    let t = timed(&schedule, costs);
    assert!(t.peaks.iter().all(|peak| Some(*peak) <= costs.mem_limit));
    t
}

#[test]
fn automatic_worked_numbers() {
    let span = |p, m, f, b, w, limit| {
        automatic(p, m, &OrderCosts::uniform(p, f, b, w, 0).with_limit(limit)).own_span()
    };
    assert_eq!([span(4, 12, 5, 6, 4, 10), span(4, 12, 5, 6, 4, 14)], [193, 183]);
    assert_eq!([span(4, 8, 1, 1, 1, 8), span(4, 8, 1, 1, 1, 16)], [27, 24]);
    assert_eq!([span(8, 16, 1, 1, 1, 16), span(8, 16, 1, 1, 1, 32)], [55, 48]);
    let rows = [
        (8, 24, [18522, 18086, 9337, 601], ["0.1585", "0.0433"]),
        (8, 32, [18513, 18086, 9331, 626], ["0.1242", "0.0039"]),
        (8, 24, [29718, 29444, 19927, 527], ["0.1323", "0.0029"]),
        (16, 48, [11347, 11248, 8132, 377], ["0.1397", "0.0066"]),
    ];
    for (p, m, [f, b, w, c], want) in rows {
        let whole = OrderCosts::uniform(p, f, b, w, c);
        let got = [1, 2].map(|fold| {
            let t = automatic(p, m, &whole.clone().with_limit(2 * fold * p as i64));
            rate(t.own_span(), m, f + b + w)
        });
        assert_eq!(got, want, "p = {p}, m = {m}");
    }
}
