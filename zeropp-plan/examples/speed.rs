//! How long a plan takes, in seconds of processors where the system says so:
//! `cargo run --release -p zeropp-plan --example speed`; with numbers, those rows alone; with
//! `presets`, every preset on 8, 64 and 128 GPUs and CPU ranks, its best step.

use std::time::Instant;

use zeropp_model::presets::{PRESETS, Preset};
use zeropp_plan::bytes::RunState;
use zeropp_plan::layout::{ComputeSettings, Fixed, HeadSplit, Job};
use zeropp_plan::model::ModelSizes;
use zeropp_plan::plan::LayoutPlan;
use zeropp_plan::{PlanError, machines};

/// Model, machine, tokens of a sample (0: its own), GPUs (CPU ranks where negative), samples of a
/// step.
type Row = (&'static str, &'static str, usize, isize, usize);

const ROWS: [Row; 14] = [
    ("14.6b", "a100", 0, 32, 192),
    ("28.3b", "a100", 0, 64, 192),
    ("175b", "a100", 0, 64, 512),
    ("175b", "a100", 0, 64, 1536),
    ("175b", "a100", 0, 1024, 1536),
    ("175b", "a100", 0, 10_240, 10_240),
    ("llama3-8b", "h100", 8192, 64, 256),
    ("llama3-8b", "h100", 8192, -64, 256),
    ("llama3-70b", "h100", 8192, 64, 256),
    ("llama3-70b", "h100", 1 << 17, 128, 64),
    ("llama3-70b", "h100", 1 << 17, -128, 64),
    ("llama2-70b", "h100", 4096, -128, 512),
    ("llama3-70b", "h100", 8192, -128, 512),
    ("qwen3-8b", "h100", 8192, -8, 32),
];

fn job(&(name, machine, seq, gpus, global_batch): &Row) -> Result<Job, PlanError> {
    let machine = machines::named(machine)?;
    let preset = |preset: &Preset| ModelSizes {
        name: name.into(),
        decoder: preset.decoder,
        seq: preset.decoder.context.min(8192),
    };
    let model = Preset::find(name).map(preset).or_else(|| ModelSizes::of_a_paper(name));
    let mut model = model.expect("a known model");
    model.seq = if seq == 0 { model.seq } else { seq };
    let cpu = ComputeSettings { on_gpu: false, element_bytes: 4, ..ComputeSettings::GPU };
    let (compute, head) = match gpus < 0 {
        true => (cpu, HeadSplit::Auto),
        false => (ComputeSettings::GPU, HeadSplit::Told),
    };
    Ok(Job {
        model,
        memory: (machine.memory_bytes - machine.reserve_bytes) as u64,
        machine,
        gpus: gpus.unsigned_abs(),
        global_batch,
        compute,
        state: RunState::uniform(2),
        fixed: Fixed { head, ..Fixed::default() },
    })
}

/// Seconds that this process has computed, on Linux; else how long it runs.
fn now(start: Instant) -> f64 {
    let of_system = || {
        let text = std::fs::read_to_string("/proc/self/stat").ok()?;
        let ticks: f64 = text.rsplit(')').next()?.split_whitespace().nth(11)?.parse().ok()?;
        Some(ticks / 100.0)
    };
    of_system().unwrap_or_else(|| start.elapsed().as_secs_f64())
}

fn main() -> Result<(), PlanError> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let mut rows: Vec<Row> = ROWS.into();
    if words.iter().any(|word| word == "presets") {
        let of = |preset: &Preset| [8isize, 64, 128].map(|n| [n, -n].map(|n| (preset.name, n)));
        let all = PRESETS.iter().flat_map(of).flatten();
        rows = all.map(|(name, n)| (name, "h100", 0, n, 4 * n.unsigned_abs())).collect();
    } else if !words.is_empty() {
        let numbers = words.iter().filter_map(|word| word.parse::<usize>().ok());
        rows = numbers.filter_map(|n| ROWS.get(n.checked_sub(1)?).copied()).collect();
    }
    println!("model  tokens  GPUs  batch  seconds  ranked  pruned  simulated  best step");
    let start = Instant::now();
    for row in rows {
        let (job, before) = (job(&row)?, now(start));
        let plan = LayoutPlan::new(&job, "");
        let took = now(start) - before;
        let head = format!("{} {} {} {} {took:.2}", row.0, job.model.seq, row.3, job.global_batch);
        match plan {
            Ok(plan) => println!(
                "{head} {} {} {} {:.5} s {} x{:?}",
                plan.ranked,
                plan.pruned,
                plan.simulated,
                plan.layouts.iter().map(|r| r.planned.step_s).fold(f64::INFINITY, f64::min),
                plan.layouts[0].planned.layout,
                plan.larger_batches
                    .iter()
                    .map(|l| l.tokens_per_s.unwrap_or(0.0).round())
                    .collect::<Vec<_>>(),
            ),
            Err(e) => println!("{head} {e}"),
        }
    }
    Ok(())
}
