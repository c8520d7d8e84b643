//! Sum of squares of a gradient shard, in a way that no layout can change.
//!
//! Each 128-element block is summed in f64 in element order; shards end at blocks, so the block
//! sums are the same however the buffer is cut. Block sums are added without rounding.

use burn::tensor::Tensor;
use zeropp_core::host;
use zeropp_core::params::BLOCK;

use crate::exact::ExactSum;

/// Adds the squares of `shard` (whole blocks, f32) to `sum`.
pub fn add_squares(sum: &mut ExactSum, shard: &Tensor<1>) {
    if let Some(h) = host::host(shard) {
        for block in h.as_slice().chunks(BLOCK) {
            sum.add(block_squares(block));
        }
        return;
    }
    // Off the CPU the block sums are taken on the device and only they travel.
    let blocks = shard.dims()[0] / BLOCK;
    let squares = shard.clone().reshape([blocks, BLOCK]).powi_scalar(2).sum_dim(1);
    let squares = squares.into_data().convert::<f32>();
    for s in squares.as_slice::<f32>().expect("converted to f32") {
        sum.add(f64::from(*s));
    }
}

/// Sum of squares of one block, in eight running sums that are added in order at the end.
fn block_squares(block: &[f32]) -> f64 {
    let mut lanes = [0f64; 8];
    for chunk in block.chunks(8) {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            let x = f64::from(*x);
            *lane += x * x;
        }
    }
    lanes.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cutting_at_blocks_changes_nothing() {
        let x: Vec<f32> = (0..BLOCK * 7).map(|i| (i as f32 * 0.37).sin() * 1e-3).collect();
        let mut whole = ExactSum::default();
        add_squares(&mut whole, &host::from_vec(x.clone(), [x.len()]));
        let mut parts = ExactSum::default();
        for part in [&x[BLOCK * 3..], &x[..BLOCK], &x[BLOCK..BLOCK * 3]] {
            add_squares(&mut parts, &host::from_vec(part.to_vec(), [part.len()]));
        }
        assert_eq!(whole, parts);
        let plain: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum();
        assert!((whole.value() - plain).abs() < 1e-12 * plain);
    }
}
