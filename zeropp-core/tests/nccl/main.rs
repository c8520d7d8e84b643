//! The NCCL engine without a GPU: on a library, built here from C, that stands in for libnccl.

mod failures;
mod host;
mod library;
mod processes;
mod results;

use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{DType, Tensor};
use host::{Host, Pretend};
use zeropp_core::comm::nccl::{NcclOptions, NcclSearch, NcclWorld};
use zeropp_core::comm::{CommResult, Communicator};
use zeropp_core::host::{from_vec, host as view};
use zeropp_core::rendezvous::{Local, Rendezvous};

type Group = Arc<dyn Communicator>;

/// Settings with the library that stands in for NCCL.
fn options(timeout: Duration) -> NcclOptions {
    let only = Some(Pretend::get().file.clone().into_os_string());
    let search = NcclSearch { only, ..NcclSearch::default() };
    let start_timeout = Duration::from_secs(30);
    NcclOptions { timeout, start_timeout, search, ..NcclOptions::default() }
}

/// A world whose waits are not meant to end by themselves.
fn patient() -> NcclOptions {
    options(Duration::from_secs(60))
}

/// A world whose waits end soon.
fn impatient() -> NcclOptions {
    options(Duration::from_secs(1))
}

/// Runs one rank.
fn rank<T>(
    options: NcclOptions,
    (rank, size): (usize, usize),
    rendezvous: &dyn Rendezvous,
    device: Arc<Host>,
    f: impl FnOnce(Group, &Host) -> T,
) -> CommResult<T> {
    let mut world = NcclWorld::start(options, rank, size, device.clone(), rendezvous)?;
    let result = f(world.communicator(), &device);
    world.finish();
    Ok(result)
}

/// Runs `f` on one thread a rank and returns what each returned, in rank order.
fn on_ranks<T: Send>(
    size: usize,
    options: NcclOptions,
    f: impl Fn(Group, &Host) -> T + Sync,
) -> Vec<T> {
    let rendezvous = Local::default();
    let one = |place| {
        let device = Arc::new(Host::new());
        rank(options.clone(), (place, size), &rendezvous, device, &f).expect("the world starts")
    };
    let one = &one;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..size).map(|place| scope.spawn(move || one(place))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
    })
}

/// Repeatable numbers of many magnitudes, so that the order of a sum shows in its bits.
fn values(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    };
    (0..len)
        .map(|_| (next() as f32 / (1u64 << 31) as f32 - 0.5) * 10f32.powi((next() % 7) as i32 - 3))
        .collect()
}

fn tensor(values: &[f32], kind: DType) -> Tensor<1> {
    from_vec(values.to_vec(), [values.len()]).cast(kind)
}

fn floats(t: Tensor<1>) -> Vec<f32> {
    let t = t.cast(DType::F32);
    view(&t).expect("an f32 tensor on the CPU").as_slice().to_vec()
}

fn bits(t: Tensor<1>) -> Vec<u32> {
    floats(t).into_iter().map(f32::to_bits).collect()
}
