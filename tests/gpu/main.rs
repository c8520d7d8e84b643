//! Training on a GPU: wgpu's default adapter, which may be a software one, or CUDA. Only in builds
//! that have one; without a device these tests fail. `ZEROPP_TEST_DEVICE` is `cuda` or `wgpu`;
//! where a build has both, wgpu is the default.
#![cfg(any(feature = "cuda", feature = "wgpu"))]

#[path = "../common/mod.rs"]
mod common;
mod copies;
mod hand_over;
mod kernels;
mod products;
mod recovery;
mod states;
mod training;

use zeropp::Config;
use zeropp::config::DeviceKind;
use zeropp_core::device::is_built;

/// The device under test.
fn kind() -> DeviceKind {
    let named = std::env::var("ZEROPP_TEST_DEVICE").ok();
    let kind = match named.as_deref() {
        Some("cuda") => DeviceKind::Cuda,
        Some("wgpu") => DeviceKind::Wgpu,
        Some(other) => panic!("ZEROPP_TEST_DEVICE = {other}: use cuda or wgpu"),
        None if is_built(DeviceKind::Wgpu) => DeviceKind::Wgpu,
        None => DeviceKind::Cuda,
    };
    assert!(is_built(kind), "this build has no {kind}");
    kind
}

/// The device under test of the rank with this number, found as a run finds it.
fn device(rank: usize) -> burn::tensor::Device {
    let config = Config { device: kind(), ..Config::default() };
    config.devices().unwrap_or_else(|e| panic!("{e}")).of(rank)
}
