//! Time that ranks save that update without waiting for the global norm of each step, simulated.
//!
//! `cargo run --release -p zeropp-schedule --example late_updates`, with the times of the Zero
//! Bubble papers' profiles at P 8 and 16; `-- 2000` gives the optimizer 2,000 us besides, which
//! every rank takes in either case. A stage of a kind with two on a rank has half a rank's work.

use zeropp_schedule::lower::{LowerOptions, OptimizerSync, lower};
use zeropp_schedule::metrics::Metrics;
use zeropp_schedule::schedules::{Kind, Limits, Objective, OrderCosts, Shape};
use zeropp_schedule::simulate::{self, simulate, step_period_ns};
use zeropp_search::generate_with_costs;

/// Pipeline ranks, micro-batches, and a rank's F, B, W and a message in ns.
const PROFILES: [(usize, usize, [u64; 4]); 4] = [
    (8, 24, [18_522_000, 18_086_000, 9_337_000, 601_000]),
    (8, 32, [18_513_000, 18_086_000, 9_331_000, 626_000]),
    (8, 24, [29_718_000, 29_444_000, 19_927_000, 527_000]),
    (16, 48, [11_347_000, 11_248_000, 8_132_000, 377_000]),
];
const KINDS: [&str; 7] = ["1f1b", "zb-h1", "zb-h2", "zb-2p", "zb-v", "zeropp", "auto"];
/// Whole orders that the search of kind auto times.
const EVALUATIONS: u64 = 300;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let step_us: u64 = match std::env::args().nth(1) {
        Some(text) => text.parse()?,
        None => 0,
    };
    println!("kind    P   V  B   bubble  bubble_step  late     steps/s");
    for (pp, micro_batches, times) in PROFILES {
        for kind in KINDS {
            let known = Kind::find(kind).ok_or("a kind")?;
            let virtual_stages = known.stages.default_number();
            // ZeroPP's units without a bubble of their own.
            let unit = if kind == "zeropp" { 2 * pp - 1 } else { micro_batches };
            let micro_batches =
                if kind == "zeropp" { micro_batches / unit * unit } else { micro_batches };
            let shape = Shape { pp, virtual_stages, micro_batches: micro_batches.max(unit), unit };
            row(kind, &shape, times, step_us * 1000)?;
        }
    }
    Ok(())
}

fn row(
    kind: &str,
    shape: &Shape,
    [f, b, w, c]: [u64; 4],
    step_ns: u64,
) -> Result<(), Box<dyn std::error::Error>> {
    let v = shape.virtual_stages as u64;
    let stages = shape.stages();
    let one = |ns: u64| vec![ns / v; stages];
    let costs = OrderCosts {
        f: one(f),
        b: one(b),
        w: one(w),
        send: c,
        head: [c; 4],
        gather: vec![0; stages],
        reduce: vec![0; stages],
        mem_f: vec![2; stages],
        mem_b: vec![-1; stages],
        mem_w: vec![-1; stages],
        mem_limit: (kind == "auto").then_some((4 * shape.pp as u64 * v) as i64),
        limits: Limits { evaluations: Some(EVALUATIONS), ..Limits::default() },
        objective: Objective::OwnSpan,
    };
    let made = generate_with_costs(kind, shape, &costs)?;
    let costs =
        simulate::Costs { step_ns, ..simulate::Costs::uniform(stages, f / v, b / v, w / v, c) };
    let [barrier, late] = [OptimizerSync::Barrier, OptimizerSync::Late].map(|sync| {
        let program = lower(&made, &LowerOptions { sync, ..LowerOptions::default() });
        let timeline = simulate(&program, &costs)?;
        let metrics = Metrics::new(&program, &timeline, &costs);
        Ok::<_, simulate::SimulateError>((
            metrics,
            timeline.bubble(),
            step_period_ns(&program, &costs),
        ))
    });
    let ((before, bubble, before_ns), (after, _, after_ns)) = (barrier?, late?);
    println!(
        "{kind:7} {:2}  {:2} {:3}  {:5.2} %      {:5.2} %  {:5.2} %  {:+5.2} %",
        shape.pp,
        v,
        shape.micro_batches,
        100.0 * bubble,
        100.0 * before.bubble_step,
        100.0 * after.bubble_step,
        100.0 * (before_ns as f64 / after_ns as f64 - 1.0),
    );
    Ok(())
}
