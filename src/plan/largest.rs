//! The largest buffer of a rank, held against what a GPU's allocator gives in one piece.

use zeropp_core::device;
use zeropp_core::files::in_words;

use crate::Error;
use crate::config::ConfigError;
use crate::plan::blueprint::Blueprint;

/// CubeCL gives a tensor at most this part of a GPU's memory.
const PART: u64 = 4;

/// Refuses a run on GPUs with a layer whose buffer is larger than any that there can be.
///
/// # Errors
/// The layer, what it would take, and what there is.
pub(crate) fn check(bp: &Blueprint) -> Result<(), Error> {
    let gpus = device::gpus(bp.config.device).iter();
    gpus.map(|gpu| gpu.total / PART).min().map_or(Ok(()), |most| check_against(bp, most))
}

/// The same of GPUs whose buffers have at most so many bytes.
fn check_against(bp: &Blueprint, most: u64) -> Result<(), Error> {
    let cut = bp.cut();
    // Of a split head each rank has some rows.
    let whole = bp.parts.layers().len() - usize::from(bp.head.is_some());
    let bytes = |i: usize| {
        let layer = &bp.parts.layers()[i];
        let (gradient, weights) = (layer.trained(cut.pieces()), layer.largest(cut.pieces()));
        // The gradient is whole on every rank before it is reduced, and so are gathered weights;
        // what trains and what does not are apart.
        let gathered = bp.compute.size() as u64 * weights;
        (4 * gradient).max(gathered).max(4 * weights / cut.zero3 as u64)
    };
    let Some(largest) = (0..whole).max_by_key(|i| bytes(*i)).filter(|i| bytes(*i) > most) else {
        return Ok(());
    };
    let problem = format!(
        "layer {} takes {} in one buffer on each rank, and of a GPU's memory one buffer may have a \
         quarter, {}",
        bp.model.parts[largest].name(),
        in_words(bytes(largest)),
        in_words(most)
    );
    let help = match largest + 1 == bp.parts.layers().len() {
        true => "split the head with schedule:head-split, or use GPUs with more memory",
        false => "use GPUs with more memory, or smaller layers",
    };
    Err(ConfigError::value("device", bp.config.device, problem, help).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Precision;
    use crate::{Config, Trainer};

    #[test]
    fn a_layer_that_no_buffer_can_hold_is_refused_by_name() {
        let sizes = Config { layers: 4, hidden: 64, seq: 16, heads: 2, ..Config::default() };
        let config = Config { pp: 2, zero3: 2, vocab: Some(2048), ..sizes };
        let trainer = Trainer::new(config).unwrap();
        let said = |most: u64| {
            check_against(&trainer.blueprint, most).err().map(|error| error.to_string())
        };
        // The embedding's and the head's 2048 · 64 numbers in fp32, with vectors beside.
        let largest = 4 * 2048 * 64;
        assert_eq!(said(2 * largest), None);
        let refused = said(largest - 1).unwrap();
        for part in ["device = cpu: layer ", "KiB in one buffer on each rank"] {
            assert!(refused.contains(part), "{refused}");
        }
    }

    /// The fp32 shard of what is frozen is larger than its gathered bf16; what trains is apart.
    #[test]
    fn what_is_frozen_has_a_buffer_of_its_own() {
        let sizes = Config { layers: 4, hidden: 64, seq: 16, heads: 2, ..Config::default() };
        let refuses =
            |vocab: usize, freeze: &str, precision: Precision, zero3: usize, most: u64| {
                let (vocab, freeze) = (Some(vocab), Some(freeze.into()));
                let config = Config { vocab, freeze, precision, zero3, ..sizes.clone() };
                check_against(&Trainer::new(config).unwrap().blueprint, most).is_err()
            };
        let words = 4 * 2048 * 64;
        for (zero3, refused) in [(1, true), (2, false)] {
            let found = refuses(2048, "wte,lm_head", Precision::Bf16, zero3, words - 1);
            assert_eq!(found, refused, "D {zero3}");
        }
        // A block's 4 · 64² and 8 · 64² numbers, and vectors.
        for (most, refused) in [(8, true), (10, false)] {
            let found = refuses(256, "*mlp*", Precision::Fp32, 2, 4 * most * 64 * 64);
            assert_eq!(found, refused, "{most} · 64²");
        }
    }
}
