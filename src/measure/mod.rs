//! This machine's work in a second, measured: products by shape, one layer at the model's sizes,
//! the optimizer, and what passes between ranks. From these numbers the times of any layout follow.

mod file;
mod layer;
mod links;
mod products;
mod together;

use zeropp_core::device::{self, Room};

use crate::Error;
use crate::config::{Config, DeviceKind};

pub use file::FileRate;
pub use layer::LayerRates;
pub use links::{LinkFit, LinkTimes};
pub use products::Product;

/// The results. All rates are those of one rank while all ranks do the same.
#[derive(Clone, Debug)]
pub struct Measured {
    /// Ranks that worked at the same time.
    pub ranks: usize,
    /// Of them, those that computed at once, no more than there are cores for; none on GPUs.
    pub at_once: Option<usize>,
    /// Bytes of memory that each of them can have; none where the system does not tell.
    pub memory_bytes: Option<u64>,
    /// Products by shape.
    pub products: Vec<Product>,
    /// One layer, and the optimizer.
    pub layer: LayerRates,
    /// Inside a process; none where a rank is alone.
    pub inside: Option<LinkTimes>,
    /// Between processes; none where there is one.
    pub between: Option<LinkTimes>,
    /// The folder that the settings name for what ranks put out; none where they name none.
    pub file: Option<FileRate>,
}

/// Measures with the ranks that `config` names, all at once, in well under a minute for models of
/// whose blocks a rank computes one in a tenth of a second. Device, precision, model, samples and
/// engine are those of `config`; nothing is read or written but in the folder that it names for
/// what ranks put out. Where a launcher started several processes, all of them call it, and every
/// one gets the numbers.
///
/// # Errors
/// Settings that do not work, too little memory, or a device or an engine that does not start.
pub fn measure(config: &Config) -> Result<Measured, Error> {
    config.validate()?;
    let ranks = config.mesh().world();
    let devices = config.devices()?;
    let (inside, between) = links::measure(config, &devices)?;
    let at_once = ranks.min(match config.device {
        DeviceKind::Cpu => {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            (cores / config.threads_of(ranks, cores)).max(1)
        }
        _ => devices.count(),
    });
    let products = products::measure(config, &devices, at_once)?;
    let layer = layer::measure(config, at_once)?;
    let memory_bytes = match config.device {
        DeviceKind::Cpu => Room::find().map(|room| room.bytes / ranks as u64),
        gpu => device::gpus(gpu).iter().map(|gpu| gpu.total).min(),
    };
    let at_once = (config.device == DeviceKind::Cpu).then_some(at_once);
    let file = file::measure(config, config.job()?.ranks.min(ranks))?;
    Ok(Measured { ranks, at_once, memory_bytes, products, layer, inside, between, file })
}

/// The settings of a run of `config`'s model that is measured: nothing read or written, whatever
/// else `config` asks for.
fn bare(config: &Config) -> Config {
    Config {
        model: config.model.clone(),
        hidden: config.hidden,
        heads: config.heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        intermediate: config.intermediate,
        experts: config.experts,
        experts_per_token: config.experts_per_token,
        seq: config.seq,
        tied: config.tied,
        vocab: config.vocab,
        vocab_multiple: config.vocab_multiple,
        activation: config.activation,
        micro_batch_size: config.micro_batch_size,
        precision: config.precision,
        device: config.device,
        threads: config.threads,
        no_memory_check: config.no_memory_check,
        timeout_s: config.timeout_s,
        ..Config::default()
    }
}

/// The middle one.
fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(0.0)
}
