//! How long schedules take to make, prove and simulate, and what the judge proves.
//!
//! `cargo bench --bench schedules`

use std::time::{Duration, Instant};

use zeropp_pipeline::ir::Schedule;
use zeropp_pipeline::lower::{LowerOptions, lower};
use zeropp_pipeline::schedules::{KINDS, OrderCosts, Shape, zeropp_auto};
use zeropp_pipeline::simulate;
use zeropp_pipeline::verify::{VerifyLimits, verify};
use zeropp_search::judge::judge;
use zeropp_search::{generate, generate_with_costs};

/// The times of a 14.6B model's stage, µs: F, B, W, send.
const PROFILE: (u64, u64, u64, u64) = (11347, 11248, 8132, 377);

fn milliseconds<T>(run: impl FnOnce() -> T) -> (T, f64) {
    let start = Instant::now();
    let result = run();
    (result, start.elapsed().as_secs_f64() * 1e3)
}

/// A million compute actions from the generator to a timeline.
fn a_million_actions() {
    println!("a million compute actions, ms");
    let shapes =
        [("zeropp", 32, 4, 2600, 64), ("1f1b", 32, 1, 15_700, 1), ("zeropp", 8, 2, 21_000, 15)];
    for (kind, pp, virtual_stages, micro_batches, unit) in shapes {
        let shape = Shape { pp, virtual_stages, micro_batches, unit };
        let (f, b, w, c) = PROFILE;
        let costs = simulate::Costs::uniform(shape.stages(), f, b, w, c);
        let (compact, made) = milliseconds(|| generate(kind, &shape).expect("a good shape"));
        let (lowered, low) = milliseconds(|| lower(&compact, &LowerOptions::default()));
        println!("{kind}, P {pp}, V {virtual_stages}: generate {made:.0}, lower {low:.0}");
        for (form, schedule) in [("compute only", &compact), ("lowered", &lowered)] {
            let actions: usize = schedule.ranks.iter().map(Vec::len).sum();
            let limits = VerifyLimits::default();
            let (_, proof) = milliseconds(|| verify(schedule, &limits).expect("a good schedule"));
            let (_, run) =
                milliseconds(|| simulate::simulate(schedule, &costs).expect("a good schedule"));
            println!(
                "  {form:<12} {actions:>8} actions: verify {proof:.0}, simulate with proof {run:.0}"
            );
        }
    }
}

/// Every kind at P = 32 and 256 micro-batches.
fn generators() {
    println!("\ngenerators, P 32, 256 micro-batches, ms");
    for kind in KINDS {
        let made = [1, 2].into_iter().find_map(|virtual_stages| {
            let shape = Shape { pp: 32, virtual_stages, micro_batches: 256, unit: 64 };
            let (f, b, w, c) = PROFILE;
            let costs = OrderCosts::uniform(shape.stages(), f, b, w, c);
            let (made, ms) = milliseconds(|| generate_with_costs(kind.name, &shape, &costs));
            made.ok().map(|s: Schedule| (virtual_stages, s.ranks.iter().map(Vec::len).sum(), ms))
        });
        let (v, actions, ms): (usize, usize, f64) = made.expect("V of 1 or 2 fits");
        println!("  {:<15} V {v} {actions:>6} actions {ms:>8.1}", kind.name);
    }
    // The search is the slowest of them, and more virtual stages are more actions to try.
    for virtual_stages in [2, 4] {
        let shape = Shape { pp: 32, virtual_stages, micro_batches: 256, unit: 64 };
        let (f, b, w, c) = PROFILE;
        let costs = OrderCosts::uniform(shape.stages(), f, b, w, c);
        let (made, ms) = milliseconds(|| zeropp_auto(&shape, &costs).expect("room for a unit"));
        let actions: usize = made.ranks.iter().map(Vec::len).sum();
        println!("  {:<15} V {virtual_stages} {actions:>6} actions {ms:>8.1}", made.kind);
    }
}

/// Random costs at P = 4 and 8 micro-batches: how many optima are proven, how far the heuristic is.
fn the_judge() {
    println!("\njudge, P 4, 8 micro-batches, random costs and limits of p, 1.5p and 2p");
    let mut state = 7u64;
    let mut draw = |low: u64, high: u64| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        low + (state >> 33) % (high - low + 1)
    };
    let (mut proven, mut equal, mut worst, mut longest) = (0, 0, 1.0f64, 0.0f64);
    let cases = 60;
    for case in 0..cases {
        let (f, b, w, c) = (draw(5, 20), draw(5, 20), draw(3, 20), draw(0, 3));
        let shape = Shape { pp: 4, virtual_stages: 1, micro_batches: 8, unit: 8 };
        let limit = [8, 12, 16][case % 3];
        let costs = OrderCosts::uniform(4, f, b, w, c).with_limit(limit);
        let deadline = Instant::now() + Duration::from_secs(60);
        let expired = || Instant::now() >= deadline;
        let (verdict, ms) = milliseconds(|| judge(&shape, &costs, &expired));
        let verdict = verdict.expect("a limit that fits");
        proven += verdict.optimal as usize;
        equal += (verdict.own_span == verdict.heuristic) as usize;
        worst = worst.max(verdict.heuristic as f64 / verdict.own_span as f64);
        longest = longest.max(ms);
    }
    println!("  {proven} of {cases} proven optimal, {equal} by the heuristic already;");
    println!("  heuristic at worst {worst:.3} times the optimum, longest proof {longest:.1} ms");
}

fn main() {
    a_million_actions();
    generators();
    the_judge();
}
