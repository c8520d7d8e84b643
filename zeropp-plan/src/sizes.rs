//! Sizes whose products no machine holds, found before anything multiplies them: estimated from
//! above in floating point, which does not overflow. Whatever is predicted later fits its whole
//! numbers.

use zeropp_model::layer::LayerCost;
use zeropp_model::params::ParamSpec;

/// Most bytes of all ranks together, an exbibyte: sums of what is below it stay far from 2⁶⁴.
const BYTES_MAX: f64 = (1u64 << 60) as f64;
/// More than a layer keeps of a token for each element of its widest product, in bytes: sixteen
/// elements of four bytes from F to B, as many from B to W.
const KEPT_BYTES: f64 = 128.0;
/// What a parameter takes: weights, gradient, moments, a mean of the weights, what is gathered of
/// weights and gradient, and a direction of its matrix.
const PARAMETER_BYTES: f64 = 32.0;

/// Sizes of a run.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Elements of a token between layers.
    pub hidden: usize,
    /// Attention's heads.
    pub heads: usize,
    /// Parts of the model.
    pub parts: usize,
    /// Token ids.
    pub vocabulary: usize,
    /// Tokens of a sample.
    pub seq: usize,
    /// Samples of a micro-batch.
    pub micro_batch_size: usize,
    /// Micro-batches of a rank and step.
    pub micro_batches: usize,
    /// Ranks that have micro-batches of their own, D·K.
    pub ranks: usize,
}

/// How many elements these parameters have, where that is more than any machine holds.
pub fn too_many_parameters<'a>(all: impl Iterator<Item = &'a ParamSpec>) -> Option<f64> {
    let parameters: f64 = all.map(|p| p.shape.iter().map(|n| real(*n)).product::<f64>()).sum();
    (parameters * PARAMETER_BYTES > BYTES_MAX).then_some(parameters)
}

/// Bytes of a step's activations, where they are more than all machines hold; `blocks` are the
/// parameters of blocks.
pub fn too_many_activations<'a>(
    sizes: &Sizes,
    blocks: impl Iterator<Item = &'a ParamSpec>,
) -> Option<f64> {
    let [samples, seq] = [sizes.micro_batch_size, sizes.seq].map(real);
    // The most elements of a token in any of a block's products: no parameter's last dimension is
    // larger.
    let widest = blocks.filter_map(|p| p.shape.last()).map(|n| real(*n)).fold(0.0, f64::max);
    let of_token = KEPT_BYTES * widest.max(real(sizes.hidden)) + 4.0 * real(sizes.heads) * seq;
    let layers = real(sizes.parts) * of_token + 12.0 * real(sizes.vocabulary);
    let kept = samples * seq * layers * real(sizes.micro_batches) * real(sizes.ranks);
    (kept > BYTES_MAX).then_some(kept)
}

/// Whether a layer says that it keeps more than all machines hold, where every part of the model
/// keeps as much.
pub fn keeps_too_much(sizes: &Sizes, cost: &LayerCost) -> bool {
    let kept = [cost.activation_bytes, cost.activation_bytes_selective, cost.stash_bytes];
    let kept: f64 = kept.iter().map(|bytes| *bytes as f64).sum();
    kept * real(sizes.parts) * real(sizes.micro_batches) > BYTES_MAX
}

/// The setting of a batch that is furthest from what is common, and its value.
pub fn largest(sizes: &Sizes) -> (&'static str, usize) {
    let common = [
        ("micro-batch-size", sizes.micro_batch_size, 1.0),
        ("seq", sizes.seq, 1024.0),
        ("hidden", sizes.hidden, 1024.0),
        ("micro-batches", sizes.micro_batches, 16.0),
    ];
    let beyond = |(_, value, usual): &(_, usize, f64)| real(*value) / usual;
    let by_far = common.iter().max_by(|a, b| beyond(a).total_cmp(&beyond(b)));
    by_far.map(|(field, value, _)| (*field, *value)).expect("four settings")
}

fn real(n: usize) -> f64 {
    n as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use zeropp_model::params::Init;

    #[test]
    fn sizes_that_no_machine_holds_are_found_without_an_overflow() {
        let usual = Sizes {
            hidden: 4096,
            heads: 32,
            parts: 34,
            vocabulary: 128_256,
            seq: 8192,
            micro_batch_size: 1,
            micro_batches: 32,
            ranks: 8,
        };
        let matrix = |n: usize| [ParamSpec::new("w", &[n, n], Init::Zeros)];
        assert_eq!(too_many_parameters(matrix(4096).iter()), None);
        assert!(too_many_parameters(matrix(usize::MAX).iter()).is_some());
        assert_eq!(too_many_activations(&usual, matrix(14_336).iter()), None);
        let long = Sizes { seq: usize::MAX, ..usual };
        assert!(too_many_activations(&long, matrix(14_336).iter()).is_some());
        assert_eq!(largest(&long).0, "seq");
        assert_eq!(largest(&Sizes { micro_batches: 1 << 40, ..usual }), ("micro-batches", 1 << 40));
        let says = |bytes| LayerCost { stash_bytes: bytes, ..LayerCost::default() };
        assert!(!keeps_too_much(&usual, &says(1 << 30)) && keeps_too_much(&usual, &says(u64::MAX)));
    }
}
