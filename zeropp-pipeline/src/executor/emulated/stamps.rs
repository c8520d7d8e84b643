//! Times in place of what messages and collectives bring.

use burn::tensor::Tensor;
use zeropp_comm::Communicator;
use zeropp_core::cpu_tensor;

/// Numbers of one time stamp: 16 bits each, so that `f32` holds them exactly.
pub(crate) const STAMP: usize = 4;

/// A time as numbers that add up.
pub(crate) fn encode(time: u64) -> [f32; STAMP] {
    std::array::from_fn(|i| ((time >> (16 * i)) & 0xffff) as f32)
}

/// The latest of the stamps in a buffer.
pub(crate) fn latest(buffer: Tensor<1>) -> u64 {
    let decode = |stamp: &[f32]| {
        let parts = stamp.iter().enumerate().map(|(i, part)| (*part as u64) << (16 * i));
        parts.sum()
    };
    cpu_tensor::into_vec(buffer).chunks(STAMP).map(decode).max().unwrap_or(0)
}

pub(crate) fn tensor(values: Vec<f32>) -> Tensor<1> {
    let len = values.len();
    cpu_tensor::from_vec(values, [len])
}

/// This rank's stamp in its own place of `copies` buffers with a place for every rank, so that the
/// ranks' sum has all stamps.
pub(crate) fn own_place(group: &dyn Communicator, copies: usize, time: u64) -> Tensor<1> {
    let width = STAMP * group.size();
    let mut values = vec![0.0; copies * width];
    for copy in values.chunks_mut(width) {
        copy[STAMP * group.rank()..][..STAMP].copy_from_slice(&encode(time));
    }
    tensor(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_survive_f32_and_sums() {
        for time in [0, 1, 65_535, 65_536, 1_234_567_890_123, u64::MAX] {
            assert_eq!(latest(tensor(encode(time).to_vec())), time);
        }
        let two = [encode(5), encode(1 << 40)].concat();
        assert_eq!(latest(tensor(two)), 1 << 40);
    }
}
