//! The data that ranks pass to each other where an engine is checked against plain loops.

use burn::tensor::{DType, Tensor};
use zeropp_core::cpu_tensor::{from_vec, on_cpu};

use crate::random::Random;

/// The data that `rank` of a group passes in round `round`.
pub(crate) fn input(round: u64, rank: usize, len: usize) -> Vec<f32> {
    Random(round * 1000 + rank as u64 + 1).floats(len)
}

pub(crate) fn tensor(values: &[f32], kind: DType) -> Tensor<1> {
    from_vec(values.to_vec(), [values.len()]).cast(kind)
}

pub(crate) fn floats(t: Tensor<1>) -> Vec<f32> {
    let t = t.cast(DType::F32);
    on_cpu(&t).expect("an f32 tensor on the CPU").as_slice().to_vec()
}

pub(crate) fn bits(t: Tensor<1>) -> Vec<u32> {
    floats(t).into_iter().map(f32::to_bits).collect()
}
