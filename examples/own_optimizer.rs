//! An optimizer of one's own: RMSprop. It names what it keeps of an element, and updates whichever
//! elements a rank has; shards, checkpoints and predicted memory follow from that.
//!
//! `cargo run --release --example own_optimizer`

use zeropp::optimizer::{Elements, Parameter, StateTensor, StepScale, UpdateRule};
use zeropp::{Config, Trainer};

struct RmsProp {
    /// What stays of the mean squared gradient.
    alpha: f32,
}

impl UpdateRule for RmsProp {
    fn name(&self) -> &str {
        "rmsprop"
    }

    fn state(&self, _: &Parameter<'_>) -> Vec<StateTensor> {
        vec![StateTensor::per_element("square_avg")]
    }

    fn update(&self, _: &Parameter<'_>, elements: Elements<'_, '_>, step: &StepScale) {
        let Elements { parameter, state, gradient } = elements;
        let each = parameter.iter_mut().zip(state[0].iter_mut()).zip(gradient);
        for ((p, square), g) in each {
            let g = g * step.gradient;
            *square = self.alpha * *square + (1.0 - self.alpha) * g * g;
            *p -= step.lr as f32 * g / (square.sqrt() + 1e-8);
        }
    }
}

fn main() -> Result<(), zeropp::Error> {
    let config = Config { pp: 2, zero3: 2, layers: 4, steps: 30, lr: 1e-3, ..Config::default() };
    let trainer = Trainer::builder(config).optimizer(RmsProp { alpha: 0.99 }).build()?;
    println!("optimizer: {} bytes a rank", trainer.plan().ranks[0].held.peaks.optimizer);
    let summary = trainer.train(|step| println!("step {:2}  loss {:.4}", step.step, step.loss))?;
    assert!(summary.last_loss < summary.first_loss);
    Ok(())
}
