//! Results, failures and load of the threads engine, and of the hybrid engine with another threads
//! engine in the place of the one between processes: the same tests for both.

#![expect(clippy::duplicate_mod, reason = "the same tests run on both engines")]

mod hybrid;
mod layouts;
mod paused;
#[path = "../../../zeropp-core/tests/common/random.rs"]
mod random;
mod threads;

use std::sync::Arc;
use std::time::Duration;

use burn::tensor::Tensor;
use random::Random;
use zeropp_comm::Communicator;
use zeropp_comm::hybrid::HybridWorld;
use zeropp_comm::threads::{ThreadsOptions, ThreadsWorld};
use zeropp_core::cpu_tensor::{from_vec, on_cpu};

type Rank = Arc<dyn Communicator>;

/// The communicators of a world of `size` ranks, `each` of them in a process.
fn mixed_world(size: usize, each: usize, options: ThreadsOptions) -> Vec<Rank> {
    // No operation of the outer engine is waited for without an end that the mixed one sets.
    let patient = ThreadsOptions { timeout: Duration::from_secs(600), ..options.clone() };
    let processes = ThreadsWorld::new(size / each, patient).communicators();
    let ranks = processes
        .into_iter()
        .map(|process| HybridWorld::new(process, each, options.clone()).unwrap())
        .flat_map(HybridWorld::communicators);
    ranks
        .enumerate()
        .inspect(|(i, (rank, _))| assert_eq!(i, rank))
        .map(|(_, rank)| rank.1)
        .collect()
}

/// Runs `f` on one thread a rank and returns what each returned, in rank order; each thread owns
/// its communicator.
fn on_communicators<T: Send>(ranks: Vec<Rank>, f: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    let f = &f;
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || f(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
    })
}

/// A world whose waits end soon.
fn impatient() -> ThreadsOptions {
    ThreadsOptions { timeout: Duration::from_millis(100), ..ThreadsOptions::default() }
}

fn tensor(values: Vec<f32>) -> Tensor<1> {
    let len = values.len();
    from_vec(values, [len])
}

fn bits(t: &Tensor<1>) -> Vec<u32> {
    let host = on_cpu(t).expect("an f32 tensor on the CPU");
    host.as_slice().iter().map(|x| x.to_bits()).collect()
}

impl Random {
    /// Lets other threads run, for a while that differs from call to call.
    fn stall(&mut self) {
        for _ in 0..self.below(8) {
            std::thread::yield_now();
        }
    }
}
