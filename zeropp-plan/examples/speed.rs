//! How long a plan takes: `cargo run --release -p zeropp-plan --example speed`; with a number, that
//! row alone.

use std::time::Instant;

use zeropp_plan::bytes::RunState;
use zeropp_plan::layout::{ComputeSettings, Fixed, Job};
use zeropp_plan::model::ModelSizes;
use zeropp_plan::plan::LayoutPlan;
use zeropp_plan::{PlanError, machines};

/// Model, GPUs and samples of a step.
const JOBS: [(&str, usize, usize); 6] = [
    ("14.6b", 32, 192),
    ("28.3b", 64, 192),
    ("175b", 64, 512),
    ("175b", 64, 1536),
    ("175b", 1024, 1536),
    ("175b", 10_240, 10_240),
];

fn main() -> Result<(), PlanError> {
    println!("model   GPUs   batch  seconds  ranked  pruned  simulated  best step");
    let row = std::env::args().nth(1).and_then(|n| n.parse::<usize>().ok());
    let rows = JOBS.into_iter().enumerate().filter(|(i, _)| row.is_none_or(|n| n == i + 1));
    for (_, (name, gpus, global_batch)) in rows {
        let machine = machines::named("a100")?;
        let job = Job {
            model: ModelSizes::of_a_paper(name).expect("a paper's model"),
            memory: (0.95 * machine.memory_bytes) as u64,
            machine,
            gpus,
            global_batch,
            compute: ComputeSettings::GPU,
            state: RunState::uniform(2),
            fixed: Fixed::default(),
        };
        let start = Instant::now();
        let plan = LayoutPlan::new(&job, "")?;
        println!(
            "{name:6} {gpus:>5} {global_batch:>7} {:>8.2} {:>7} {:>7} {:>10} {:>9.4} s  {}",
            start.elapsed().as_secs_f64(),
            plan.ranked,
            plan.pruned,
            plan.simulated,
            plan.layouts[0].planned.step_s,
            plan.layouts[0].planned.layout
        );
    }
    Ok(())
}
