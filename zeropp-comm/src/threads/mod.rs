//! The threads engine: every rank is a thread of this process.
//!
//! The ranks of a group meet in a rendezvous keyed by the operation's
//! number in the group; the last to arrive owns all inputs and hands them to a few worker
//! threads, which copy and sum while the ranks compute. An all-gather makes one buffer, shared by
//! all ranks and used again once they have dropped it; a send hands over the tensor itself.
//! Waiting ranks sleep on a condition variable of their own. Tensors of other devices take the
//! same way, with the device's own concatenation, slices and sums.
//!
//! A rank is gone when it drops its last communicator: operations that wait for it then fail with
//! [`PeerLost`](super::CommError::PeerLost). A runner that wants a panic's text to be the first
//! error keeps a communicator until it has called [`abort`](super::Communicator::abort).

pub(super) mod barrier;
pub(super) mod collective;
pub(super) mod communicator;
pub(super) mod group;
mod mail;
pub(super) mod result_slots;
mod workers;
pub(super) mod world;

use std::sync::Arc;
use std::time::Duration;

use super::Communicator;
use communicator::ThreadsCommunicator;
use group::ThreadsGroup;
use world::{Liveness, ThreadsState};

/// Settings of the threads engine.
#[derive(Clone, Debug, PartialEq)]
pub struct ThreadsOptions {
    /// How long one operation may be waited for before the world fails.
    pub timeout: Duration,
    /// The same until the ranks have their first step behind them
    /// ([`past_first_step`](Communicator::past_first_step)). `None`: no other time.
    pub first_timeout: Option<Duration>,
    /// Threads that copy and sum. `None`: one a rank, up to the available cores. With 0 the rank
    /// that arrives last does the work.
    pub workers: Option<usize>,
    /// Operations on at most this many bytes (inputs of all ranks together) are done by the rank
    /// that arrives last: waking a worker takes longer.
    pub inline_bytes: usize,
}

impl Default for ThreadsOptions {
    fn default() -> Self {
        let timeout = Duration::from_secs(300);
        Self { timeout, first_timeout: None, workers: None, inline_bytes: 64 << 10 }
    }
}

/// Ranks that are threads of this process.
pub struct ThreadsWorld(Vec<Arc<dyn Communicator>>);

impl ThreadsWorld {
    /// A world of `world_size` ranks.
    ///
    /// # Panics
    /// Panics if `world_size` is 0.
    pub fn new(world_size: usize, options: ThreadsOptions) -> Self {
        assert!(world_size > 0, "world_size must be at least 1");
        let world = Arc::new(ThreadsState::new(0, world_size, options));
        let group = ThreadsGroup::new(world.clone(), "world".into(), (0..world_size).collect());
        let communicator = |rank| {
            let liveness = Arc::new(Liveness { world: world.clone(), rank });
            let end = ThreadsCommunicator::new(group.clone(), rank, liveness);
            Arc::new(end) as Arc<dyn Communicator>
        };
        Self((0..world_size).map(communicator).collect())
    }

    /// The `world` communicator of every rank, in rank order.
    pub fn communicators(self) -> Vec<Arc<dyn Communicator>> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;
    use zeropp_core::cpu_tensor::from_vec;

    use super::*;
    use crate::CommResult;

    /// A rank that took part in an operation and left at once is not lost, however the threads run.
    #[test]
    fn ranks_that_leave_after_their_last_operation_are_not_missed() {
        let last = |world: Arc<dyn Communicator>| -> CommResult<()> {
            match world.rank() {
                0 => world.recv(2, 7, 1, DType::F32).wait().map(drop)?,
                2 => world.send(0, 7, from_vec(vec![1.0], [1])).wait()?,
                _ => {}
            }
            world.exchange(vec![1]).wait().map(drop)
        };
        for round in 0..3000 {
            let ranks = ThreadsWorld::new(3, ThreadsOptions::default()).communicators();
            std::thread::scope(|scope| {
                let threads: Vec<_> =
                    ranks.into_iter().map(|world| scope.spawn(move || last(world))).collect();
                for thread in threads {
                    assert_eq!(thread.join().unwrap(), Ok(()), "round {round}");
                }
            });
        }
    }
}
