//! A loss of one's own, of the logits: cross-entropy that expects a little of every token (label
//! smoothing).
//!
//! `cargo run --release --example own_loss`

use zeropp::burn::tensor::{Int, Tensor, activation::log_softmax};
use zeropp::{Config, Loss, Trainer};

struct Smoothed {
    /// What is expected of all tokens together.
    share: f32,
}

impl Loss for Smoothed {
    fn loss(&self, logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
        let [n, _] = logits.dims();
        let log = log_softmax(logits, 1);
        let right = log.clone().gather(1, targets.reshape([n, 1])).mean();
        let all = log.mean();
        -(right * (1.0 - self.share) + all * self.share)
    }
}

fn main() -> Result<(), zeropp::Error> {
    let config = Config { pp: 2, zero3: 2, layers: 4, steps: 30, ..Config::default() };
    let trainer = Trainer::builder(config).loss(Smoothed { share: 0.1 }).build()?;
    let summary = trainer.train(|step| println!("step {:2}  loss {:.4}", step.step, step.loss))?;
    assert!(summary.last_loss < summary.first_loss);
    Ok(())
}
