//! LLaMA's blocks beside GPT's in one run: FLOP of training in a second of one core, with as many
//! FLOP a token. The seconds are those of the process's CPU, which hardly see what else a machine
//! does.
//!
//!     cargo bench --bench families -- [ROUNDS]

use rustix::time::{ClockId, clock_gettime};
use zeropp::{Config, Trainer};

/// One rank, blocks of about the same FLOP: twelve matrices of h² each.
fn config(model: &str) -> Config {
    let sized = match model {
        "gpt" => Config::default(),
        // Three matrices of 8/3 h in place of two of 4h; keys and values shared by pairs of heads
        // leave room for more of them.
        "llama" => {
            Config { intermediate: Some(1024), ..Config::for_model("llama").expect("known") }
        }
        _ => Config {
            kv_heads: Some(2),
            intermediate: Some(1216),
            ..Config::for_model(model).expect("known")
        },
    };
    Config {
        layers: 6,
        hidden: 384,
        heads: 6,
        seq: 256,
        micro_batch_size: 2,
        micro_batches: Some(4),
        unit: Some(4),
        virtual_stages: Some(1),
        steps: 4,
        threads: Some(1),
        ..sized
    }
}

/// Seconds of CPU that this process has taken.
fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// GFLOP in a second of CPU, of the steps after the first, and GFLOP a token.
fn speed(model: &str) -> (f64, f64) {
    let trainer = Trainer::new(config(model)).expect("a good configuration");
    let flops = trainer.plan().flops_per_token / 1e9;
    let (mut start, mut tokens) = (0.0, 0);
    let on_step = |step: &zeropp::StepMetrics| match step.step {
        1 => start = cpu_seconds(),
        _ => tokens += step.tokens,
    };
    trainer.train(on_step).expect("a run that ends well");
    (tokens as f64 * flops / (cpu_seconds() - start), flops)
}

fn median(mut v: Vec<f64>) -> f64 {
    v.sort_by(f64::total_cmp);
    v[v.len() / 2]
}

fn main() {
    let rounds = std::env::args().filter_map(|a| a.parse().ok()).next().unwrap_or(5);
    let models = ["llama", "qwen2", "qwen3"];
    let mut ratios = models.map(|_| Vec::new());
    for round in 1..=rounds {
        let (gpt, flops) = speed("gpt");
        println!("round {round}: gpt {gpt:.1} GFLOP/s at {flops:.4} GFLOP a token");
        for (model, ratios) in models.iter().zip(&mut ratios) {
            let (own, flops) = speed(model);
            println!("  {model} {own:.1} GFLOP/s at {flops:.4}: {:.3} of gpt", own / gpt);
            ratios.push(own / gpt);
        }
    }
    println!("\nmedians over {rounds} rounds, of gpt's FLOP a second");
    for (model, ratios) in models.iter().zip(ratios) {
        println!("{model:6} {:.3}", median(ratios));
    }
}
