//! CubeCL takes its settings once a process, so this is a process of its own.
#![cfg(feature = "cuda")]

use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
use zeropp_core::choice::{DeviceKind, Precision};
use zeropp_core::device::Devices;

#[test]
fn a_program_that_gave_cuda_several_streams_before_is_refused() {
    let mut config = CubeClRuntimeConfig::default();
    config.streaming.max_streams = 4;
    CubeClRuntimeConfig::set(config);
    let error = Devices::find(DeviceKind::Cuda, Precision::Fp32).unwrap_err().to_string();
    let wanted = "device = cuda: CubeCL was used before zeropp, with up to 4 streams a GPU";
    assert!(error.starts_with(wanted) && error.contains("`max_streams = 1`"), "{error}");
}
