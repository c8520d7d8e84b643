//! What a core can do at best: the measured rate of one matrix product.

use std::time::Instant;

use burn::tensor::{Device, Tensor};

/// FLOP/s of a 512 × 512 × 512 product in f32 on one core, the best of a few.
pub(crate) fn gemm_flops() -> f64 {
    const N: usize = 512;
    let a = Tensor::<2>::ones([N, N], &Device::flex());
    let best = (0..6)
        .map(|_| {
            let start = Instant::now();
            let _ = a.clone().matmul(a.clone());
            start.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min);
    2.0 * (N as f64).powi(3) / best
}
