//! Trains the built-in GPT on built-in text: 2 pipeline ranks, 2 shards, V = 2.
//!
//! `cargo run --release --example train_gpt [TEXT FILE]`

use zeropp::{Config, Trainer};

fn main() -> Result<(), zeropp::Error> {
    let config = Config {
        pp: 2,
        zero3: 2,
        virtual_stages: Some(2),
        unit: Some(3),
        micro_batches: Some(6),
        micro_batch_size: 4,
        steps: 50,
        data: std::env::args_os().nth(1).map(Into::into),
        ..Config::default()
    };
    let trainer = Trainer::new(config)?;
    let plan = trainer.plan();
    println!("{} parameters, predicted bubble {:.1} %", plan.parameters, 100.0 * plan.bubble);
    let summary = trainer.train(|s| {
        println!("step {:3}  loss {:.4}  {:.0} tokens/s", s.step, s.loss, s.tokens_per_s);
    })?;
    println!(
        "loss {:.3} -> {:.3}, {} all-gathers and {} reduce-scatters a rank and unit",
        summary.first_loss,
        summary.last_loss,
        summary.all_gathers_per_unit,
        summary.reduce_scatters_per_unit
    );
    Ok(())
}
