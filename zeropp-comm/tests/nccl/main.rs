//! The NCCL engine without a GPU: on a library, built here from C, that stands in for libnccl.

mod failures;
mod host;
mod library;
#[path = "../common/passed.rs"]
mod passed;
mod processes;
#[path = "../../../zeropp-core/tests/common/random.rs"]
mod random;
mod results;

use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{DType, Tensor};
use host::{Host, Pretend};
use passed::{bits, floats, input, tensor};
use zeropp_comm::nccl::{NcclOptions, NcclWorld};
use zeropp_comm::rendezvous::{Local, Rendezvous};
use zeropp_comm::{CommResult, Communicator};
use zeropp_core::device::LibrarySearch;

type Group = Arc<dyn Communicator>;

/// Settings with the library that stands in for NCCL.
fn options(timeout: Duration) -> NcclOptions {
    let only = Some(Pretend::get().file.clone().into_os_string());
    let search = LibrarySearch { only, ..LibrarySearch::default() };
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
