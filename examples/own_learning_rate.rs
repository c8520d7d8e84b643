//! A learning rate of one's own, as a function of the step: three cycles, each from high to low.
//!
//! `cargo run --release --example own_learning_rate`

use zeropp::{Config, Trainer};

fn main() -> Result<(), zeropp::Error> {
    let config = Config { pp: 2, zero3: 2, layers: 4, steps: 30, ..Config::default() };
    let trainer = Trainer::builder(config)
        .learning_rate(|step| 3e-3 * (1.0 - (step - 1) as f64 % 10.0 / 10.0))
        .build()?;
    let show = |step: &zeropp::StepMetrics| println!("{:2}  lr {:.5}", step.step, step.lr);
    let (summary, weights) = trainer.train_to_weights(show)?;
    assert!(summary.last_loss < summary.first_loss);
    // What was trained, by name, with its shapes.
    for (name, shape) in trainer.shapes().iter().take(3) {
        println!("{name} {shape:?}, begins with {}", weights[name][0]);
    }
    Ok(())
}
