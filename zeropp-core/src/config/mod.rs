//! What a run is told: a TOML file and flags that override it, the defaults that follow from
//! other settings, and the checks that end bad input before any rank starts.

mod choice;
mod error;
mod file;
mod options;
mod outputs;
mod validate;

pub use choice::{
    Activation, Decay, DeviceKind, EngineKind, ModelKind, Order, Precision, Recompute, Tokenizer,
};
pub use error::ConfigError;
pub use options::{Config, OPTIONS, OptionInfo, OptionKind};
pub use toml::{Table, Value};

use crate::mesh::Mesh;

/// Schedules with one stage on each rank.
const ONE_STAGE: [&str; 6] = ["gpipe", "1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p"];
/// Schedules that cut a step into units.
const IN_UNITS: [&str; 2] = ["zeropp", "zeropp-auto"];

/// The settings that follow from others where they are not given.
impl Config {
    /// Sizes of the mesh.
    pub fn mesh(&self) -> Mesh {
        Mesh { pp: self.pp, zero3: self.zero3, dp: self.dp }
    }

    /// Stages on each pipeline rank (V): 2 where the schedule and the layers allow it, else 1.
    pub fn virtual_stages(&self) -> usize {
        let one = ONE_STAGE.contains(&self.schedule.as_str());
        let fits = self.layers >= self.pp.saturating_mul(2);
        self.virtual_stages.unwrap_or(if fits && !one { 2 } else { 1 })
    }

    /// Micro-batches of each rank in a step (B): two units.
    pub fn micro_batches(&self) -> usize {
        self.micro_batches.unwrap_or_else(|| self.given_unit().saturating_mul(2))
    }

    /// Micro-batches in a unit (U): 2P−1; the whole step for schedules that reduce once a step.
    pub fn unit(&self) -> usize {
        let in_units = IN_UNITS.contains(&self.schedule.as_str());
        if in_units { self.given_unit() } else { self.micro_batches() }
    }

    fn given_unit(&self) -> usize {
        self.unit.unwrap_or_else(|| self.pp.saturating_mul(2).saturating_sub(1))
    }

    /// Steps in which the learning rate rises: a tenth of all, at most 100.
    pub fn warmup(&self) -> u64 {
        self.warmup.unwrap_or((self.steps / 10).min(100))
    }

    /// Learning rate at the last step: a tenth of the largest.
    pub fn min_lr(&self) -> f64 {
        self.min_lr.unwrap_or(self.lr / 10.0)
    }

    /// Samples of one step over all ranks. Ranks of a ZeRO-3 group and replicas train on samples
    /// of their own.
    pub fn samples_per_step(&self) -> usize {
        self.micro_batches()
            .saturating_mul(self.micro_batch_size)
            .saturating_mul(self.zero3)
            .saturating_mul(self.dp)
    }

    /// Tokens of one step over all ranks.
    pub fn tokens_per_step(&self) -> usize {
        self.samples_per_step().saturating_mul(self.seq)
    }

    /// The same run with every setting that follows from others written out.
    pub fn resolved(&self) -> Config {
        Config {
            unit: Some(self.unit()),
            virtual_stages: Some(self.virtual_stages()),
            micro_batches: Some(self.micro_batches()),
            warmup: Some(self.warmup()),
            min_lr: Some(self.min_lr()),
            ..self.clone()
        }
    }
}

#[cfg(test)]
mod tests;
