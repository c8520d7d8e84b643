//! What a device can do at best: the measured rate of one matrix product.

use std::time::Instant;

use burn::tensor::{DType, Device, Tensor};
use zeropp_core::config::DeviceKind;

/// Measurements of which the best counts.
const TRIES: usize = 6;

/// FLOP/s of an n × n × n product on `device`: on the CPU that is one core's in fp32, whatever is
/// computed in, since it has nothing faster; on a GPU the device's in `dtype`.
pub(crate) fn gemm_flops(kind: DeviceKind, device: &Device, dtype: DType) -> f64 {
    // Large enough to fill the device; several in a row, so that the reading does not count.
    let (n, products, dtype) = match kind {
        DeviceKind::Cpu => (512, 1, DType::F32),
        DeviceKind::Cuda => (8192, 10, dtype),
        DeviceKind::Wgpu => (512, 4, dtype),
    };
    let a = Tensor::<2>::ones([n, n], (device, dtype));
    let measure = || {
        let start = Instant::now();
        let mut last = a.clone();
        for _ in 0..products {
            last = a.clone().matmul(a.clone());
        }
        if kind != DeviceKind::Cpu {
            // A GPU works on behind the calls: the elements are there only when it is done.
            drop(last.slice([0..1, 0..1]).into_data());
        }
        start.elapsed().as_secs_f64()
    };
    let best = (0..TRIES).map(|_| measure()).fold(f64::INFINITY, f64::min);
    2.0 * products as f64 * (n as f64).powi(3) / best
}
