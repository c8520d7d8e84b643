//! How long a schedule of about a million actions takes from generation to a timeline, by hand:
//! `cargo run --release -p zeropp-pipeline --example simulate_speed`.

use std::time::Instant;

use zeropp_pipeline::lower::{LowerOptions, lower};
use zeropp_pipeline::memory::predict;
use zeropp_pipeline::schedules::{Shape, generate};
use zeropp_pipeline::simulate::{Costs, Metrics, simulate};
use zeropp_pipeline::verify::{VerifyLimits, verify};

fn timed<T>(what: &str, actions: usize, run: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = run();
    println!("  {what:<10} {:>7.1} ms, {actions} actions", start.elapsed().as_secs_f64() * 1e3);
    result
}

fn main() {
    for (kind, pp, virtual_stages, micro_batches, unit) in
        [("zeropp", 32, 4, 2600, 64), ("1f1b", 32, 1, 15_700, 1), ("zeropp", 8, 2, 21_000, 15)]
    {
        println!("{kind}, P {pp}, V {virtual_stages}, B {micro_batches}, U {unit}");
        let shape = Shape { pp, virtual_stages, micro_batches, unit };
        let costs = Costs::uniform(shape.stages(), 11347, 11248, 8132, 377);
        let actions = 3 * shape.stages() * micro_batches;
        let schedule = timed("generate", actions, || generate(kind, &shape).expect("good shape"));
        let count = |s: &zeropp_pipeline::ir::Schedule| s.ranks.iter().map(Vec::len).sum();
        let lowered = timed("lower", actions, || lower(&schedule, &LowerOptions::default()));
        for (form, schedule) in [("compute", &schedule), ("lowered", &lowered)] {
            println!(" {form}");
            let n: usize = count(schedule);
            timed("verify", n, || verify(schedule, &VerifyLimits::default()).expect("good"));
            let timeline = timed("simulate", n, || simulate(schedule, &costs).expect("good"));
            let metrics = timed("metrics", n, || Metrics::new(schedule, &timeline, &costs.memory));
            timed("memory", n, || predict(schedule, &costs.memory));
            println!("  bubble rate {:.4}", metrics.bubble_rate);
        }
    }
}
