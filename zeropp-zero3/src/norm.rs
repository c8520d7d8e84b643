//! Sum of squares of a rank's gradient shards, in a way that no layout can change on the CPU.
//!
//! Each 128-element block is summed in f64 in element order; shards end at blocks, so the block
//! sums are the same however the buffer is cut. Block sums are added without rounding. A GPU sums
//! larger blocks in f32, so there a layout differs in rounding.

use burn::tensor::{DType, Tensor};
use parking_lot::Mutex;
use zeropp_core::cpu_tensor;
use zeropp_core::kernels::threads;
use zeropp_core::params::BLOCK;
use zeropp_core::squares::block_squares;

use crate::exact::ExactSum;

/// Largest block that a GPU sums: few enough sums travel, and each is exact to f32.
const DEVICE_BLOCK: usize = 64 * BLOCK;
/// Elements that are worth a thread.
const PIECE_MIN: usize = 256 * BLOCK;

/// Adds the squares of `shards` (whole blocks, f32) to `sum`. What is on a device is read from it
/// once.
pub(crate) fn add_squares<'a>(sum: &mut ExactSum, shards: impl IntoIterator<Item = &'a Tensor<1>>) {
    let mut on_device = Vec::new();
    for shard in shards {
        match cpu_tensor::on_cpu(shard) {
            Some(h) => add_host_squares(sum, h.as_slice()),
            // Rank 0 reads and adds the sums, which takes longer than to make them.
            None => on_device.push(block_squares(shard.clone(), DEVICE_BLOCK)),
        }
    }
    if on_device.is_empty() {
        return;
    }
    let squares = Tensor::cat(on_device, 0).into_data().try_to_vec::<f32>();
    squares.expect("sums are f32").into_iter().for_each(|s| sum.add(f64::from(s)));
}

/// Adds the squares of an output `[b, s, h]`, a row of h in blocks of [`BLOCK`] at a time, so that
/// it does not show with which others a sample was computed. On a device, where a row is summed in
/// f32, the sums are read.
pub(crate) fn add_row_squares(sum: &mut ExactSum, x: &Tensor<3>) {
    let [samples, seq, hidden] = x.dims();
    let x = x.clone().inner().cast(DType::F32);
    if let Some(h) = cpu_tensor::on_cpu(&x) {
        let rows = h.as_slice().chunks(hidden);
        return rows.flat_map(|row| row.chunks(BLOCK)).for_each(|b| sum.add(host_squares(b)));
    }
    let rows = x.square().sum_dim(2).reshape([samples * seq]);
    let squares = rows.into_data().try_to_vec::<f32>().expect("sums are f32");
    squares.into_iter().for_each(|s| sum.add(f64::from(s)));
}

/// Adds the squares of a shard's blocks. The sum is exact: whichever thread adds a block, and when,
/// does not show.
pub(crate) fn add_host_squares(sum: &mut ExactSum, shard: &[f32]) {
    let piece = threads::piece(shard.len(), BLOCK, PIECE_MIN);
    let sum = Mutex::new(sum);
    threads::each(shard.chunks(piece), |part| {
        let mut own = ExactSum::default();
        part.chunks(BLOCK).for_each(|block| own.add(host_squares(block)));
        sum.lock().merge(&own);
    });
}

/// Sum of squares of one block, in eight running sums that are added in order at the end.
fn host_squares(block: &[f32]) -> f64 {
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
        add_squares(&mut whole, [&cpu_tensor::from_vec(x.clone(), [x.len()])]);
        let mut parts = ExactSum::default();
        for part in [&x[BLOCK * 3..], &x[..BLOCK], &x[BLOCK..BLOCK * 3]] {
            add_squares(&mut parts, [&cpu_tensor::from_vec(part.to_vec(), [part.len()])]);
        }
        assert_eq!(whole, parts);
        let plain: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum();
        assert!((whole.value() - plain).abs() < 1e-12 * plain);
    }

    #[test]
    fn a_device_sums_to_f32_whatever_the_length() {
        for blocks in [1, 3, 64, 192, 100] {
            let x: Vec<f32> = (0..BLOCK * blocks).map(|i| (i as f32 * 0.37).sin() * 1e-3).collect();
            let plain: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum();
            let sums = block_squares(cpu_tensor::from_vec(x, [BLOCK * blocks]), DEVICE_BLOCK);
            assert_eq!(sums.dims()[0], (BLOCK * blocks).div_ceil(DEVICE_BLOCK));
            let sum: f64 = sums.into_data().iter::<f64>().sum();
            assert!((sum - plain).abs() < 1e-6 * plain, "{blocks} blocks: {sum} and {plain}");
        }
    }
}
