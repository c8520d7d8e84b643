//! What a device can do at best: the measured rate of one matrix product.

use std::time::Instant;

use crate::config::{Config, DeviceKind};
use burn::tensor::{DType, Device, Tensor};
use zeropp_core::device::Devices;

/// Measurements of which the best counts.
const TRIES: usize = 6;

/// What the ranks of a machine have to compute with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peak {
    /// Cores, or GPUs.
    pub(crate) units: usize,
    /// FLOP/s of each at its best.
    pub(crate) unit_flops: f64,
}

impl Peak {
    /// Measures the first of this machine's `devices`.
    pub(crate) fn measure(config: &Config, devices: &Devices, compute: DType) -> Peak {
        let units = match config.device {
            DeviceKind::Cpu => std::thread::available_parallelism().map_or(1, |n| n.get()),
            _ => devices.count(),
        };
        Peak { units, unit_flops: gemm_flops(config.device, &devices.of(0), compute) }
    }

    /// FLOP/s of `ranks` ranks, none of which uses more than one unit.
    pub(crate) fn of(&self, ranks: usize) -> f64 {
        self.unit_flops * ranks.min(self.units) as f64
    }
}

/// FLOP/s of an n × n × n product on `device`: on the CPU that is one core's in fp32, whatever is
/// computed in, since it has nothing faster; on a GPU the device's in `dtype`.
fn gemm_flops(kind: DeviceKind, device: &Device, dtype: DType) -> f64 {
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
