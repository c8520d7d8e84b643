//! The peak rate of a device: a GPU's by its data sheet where its name is known, else the measured
//! rate of one matrix product.

use std::time::Instant;

use crate::config::{Config, DeviceKind, Precision};
use burn::tensor::{DType, Device, Tensor};
use zeropp_core::device::{self, Devices, Gpu};
use zeropp_core::split::ops::products::{matmul, round_to_tf32, rounds_to_tf32};

/// Measurements that have to come close to the best one.
const CLOSE_TRIES: usize = 3;
/// How close, as a share.
const CLOSE: f64 = 0.03;
/// How long to go on where they do not: others that use the machine give it back for some of that.
const TRY_S: f64 = 0.2;

/// What the ranks of a machine have to compute with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peak {
    /// Cores, or GPUs.
    pub(crate) units: usize,
    /// FLOP/s of each at its best.
    pub(crate) unit_flops: f64,
}

impl Peak {
    /// Looks up or measures the first of this machine's `devices`.
    pub(crate) fn measure(config: &Config, devices: &Devices, compute: DType) -> Peak {
        let units = match config.device {
            DeviceKind::Cpu => std::thread::available_parallelism().map_or(1, |n| n.get()),
            _ => devices.count(),
        };
        round_to_tf32(config.precision == Precision::Tf32);
        let (gpus, tf32) = (device::gpus(config.device), rounds_to_tf32(config.device));
        let sheet = gpus.first().and_then(|gpu| sheet_flops(gpu, compute, tf32));
        let unit_flops =
            sheet.unwrap_or_else(|| gemm_flops(config.device, &devices.of(0), compute));
        Peak { units, unit_flops }
    }
}

/// The best rate that is known of all ranks together, in FLOP/s: what was measured before the first
/// step, or a step that was faster, as happens where others used the machine just then. So no step
/// is above all of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BestRate(f64);

impl BestRate {
    /// What was measured.
    pub(crate) fn new(flops: f64) -> BestRate {
        BestRate(flops)
    }

    /// The share that a step with this rate had, between 0 and 1.
    pub(crate) fn utilisation(&mut self, flops: f64) -> f64 {
        self.0 = self.0.max(flops);
        if self.0 > 0.0 { flops / self.0 } else { 0.0 }
    }
}

/// FLOP/s of a GPU's products by its data sheet, where that is known. Those of fp32 run on tensor
/// cores in TF32 if `tf32`, at half the rate of bf16.
fn sheet_flops(gpu: &Gpu, compute: DType, tf32: bool) -> Option<f64> {
    match compute {
        DType::BF16 => gpu.bf16_flops(),
        _ if tf32 => gpu.bf16_flops().map(|flops| flops / 2.0),
        _ => None,
    }
}

/// FLOP/s of an n × n × n product on `device`: on the CPU that is one core's in fp32, whatever is
/// computed in, since it has nothing faster; on a GPU the device's in `dtype`.
fn gemm_flops(kind: DeviceKind, device: &Device, dtype: DType) -> f64 {
    // Large enough to fill the device; several in a row, so that the reading does not count.
    let (n, products, dtype) = match kind {
        DeviceKind::Cpu => (512, 1, DType::F32),
        DeviceKind::Cuda => (4096, 10, dtype),
        DeviceKind::Wgpu => (512, 4, dtype),
    };
    let a = Tensor::<2>::ones([n, n], (device, dtype));
    let measure = || {
        let start = Instant::now();
        let mut last = a.clone();
        for _ in 0..products {
            last = matmul(a.clone(), a.clone());
        }
        if kind != DeviceKind::Cpu {
            device::wait_for(last);
        }
        start.elapsed().as_secs_f64()
    };
    2.0 * products as f64 * (n as f64).powi(3) / shortest(std::iter::repeat_with(measure))
}

/// The shortest of `times`, in seconds, of which no more are taken than it needs: a few that are as
/// short show that nothing disturbed them. A run begins only after that.
fn shortest(times: impl Iterator<Item = f64>) -> f64 {
    let (mut best, mut close, mut spent) = (f64::INFINITY, 0, 0.0);
    for time in times {
        spent += time;
        if time < (1.0 - CLOSE) * best {
            close = 0;
        }
        best = best.min(time);
        close += usize::from(time <= (1.0 + CLOSE) * best);
        if close == CLOSE_TRIES || spent >= TRY_S {
            break;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run began a fifth of a second later because it measured that long on an idle machine.
    #[test]
    fn measuring_ends_when_a_few_times_are_as_short() {
        let taken = |times: &[f64]| {
            let mut left = times.iter().copied();
            (shortest(left.by_ref()), times.len() - left.len())
        };
        assert_eq!(taken(&[0.009, 0.00301, 0.003, 0.00302, 0.002]), (0.003, 4));
        assert_eq!(taken(&[0.003, 0.003, 0.002, 0.003, 0.002, 0.00201, 0.001]), (0.002, 6));
        // Others compute: the best within the time counts, alone as it is.
        assert_eq!(taken(&[0.05, 0.08, 0.003, 0.06, 0.07, 0.001]), (0.003, 5));
        assert_eq!(taken(&[0.3, 0.1]), (0.3, 1));
    }

    #[test]
    fn the_peak_in_fp32_is_that_of_tf32_where_products_are() {
        let gpu = Gpu { name: "NVIDIA A100-SXM4-80GB".into(), total: 0, free: None };
        assert_eq!(sheet_flops(&gpu, DType::BF16, false), Some(312e12));
        assert_eq!(sheet_flops(&gpu, DType::F32, true), Some(156e12));
        assert_eq!(sheet_flops(&gpu, DType::F32, false), None);
        assert_eq!(sheet_flops(&Gpu { name: "?".into(), ..gpu }, DType::BF16, false), None);
    }

    /// Runs printed 347 % of a peak that was measured while others computed.
    #[test]
    fn no_step_is_above_the_best_that_is_known() {
        let mut best = BestRate::new(100.0);
        assert_eq!(best.utilisation(40.0), 0.4);
        assert_eq!(best.utilisation(347.0), 1.0);
        assert_eq!(best.utilisation(34.7), 0.1);
        assert_eq!(BestRate::new(0.0).utilisation(0.0), 0.0);
    }
}
