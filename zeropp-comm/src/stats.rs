//! Operations and bytes counted by a communicator.

use std::sync::atomic::{AtomicU64, Ordering};

use zeropp_failures::Operation;

/// Calls of one kind, and the bytes they make a rank send.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpCount {
    /// Calls.
    pub ops: u64,
    /// Bytes that this rank sends in the algorithm that moves the least (a ring), whatever the
    /// engine really does: threads pass a pointer where a network would carry the bytes.
    pub bytes: u64,
}

/// Operations and bytes of one rank on one communicator since it was made. Sub-groups count for
/// themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommStats {
    /// `(size - 1)` times the shard's bytes each.
    pub all_gather: OpCount,
    /// `(size - 1)` times the result's bytes each.
    pub reduce_scatter: OpCount,
    /// `2 (size - 1) / size` times the buffer's bytes each.
    pub all_reduce: OpCount,
    /// `(size - 1)` times the buffer's bytes each on the root, nothing on the others.
    pub broadcast: OpCount,
    /// `(size - 1)` times the rank's own bytes each.
    pub exchange: OpCount,
    /// The rank's own bytes each, nothing on the root.
    pub gather: OpCount,
    /// The buffer's bytes each.
    pub send: OpCount,
    /// Result buffers that the engine allocated for this group so far: it stops growing once
    /// the pool holds as many as are alive at one time. 0 for engines without a pool.
    pub fresh_buffers: u64,
    /// Largest bytes so far of messages that this rank had been sent and not asked for. An engine
    /// that moves a message only once it is asked for has none. Small ones that MPI itself keeps
    /// (up to its eager limit, some KiB each) are not counted.
    pub early_bytes: u64,
    /// Bytes of result buffers that the group keeps for later and that are not in use now. Where
    /// ranks of a process share a pool, the first of them in the group has all of it.
    pub idle_bytes: u64,
}

impl CommStats {
    /// Bytes over all operations.
    pub fn bytes(&self) -> u64 {
        let kinds = [
            self.all_gather,
            self.reduce_scatter,
            self.all_reduce,
            self.broadcast,
            self.exchange,
            self.gather,
            self.send,
        ];
        kinds.iter().map(|count| count.bytes).sum()
    }
}

/// Memory that an engine holds for a group: the fields of [`CommStats`] that are no traffic.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HeldMemory {
    pub(crate) fresh_buffers: u64,
    pub(crate) early_bytes: u64,
    pub(crate) idle_bytes: u64,
}

/// The counters behind [`CommStats`], one set a rank and communicator.
#[derive(Debug, Default)]
pub(crate) struct Traffic([(AtomicU64, AtomicU64); 7]);

impl Traffic {
    /// Counts one call. `bytes` is what this rank passes in (for a broadcast: 0 off the root,
    /// for a gather: 0 on it).
    pub(crate) fn record(&self, operation: Operation, size: usize, bytes: usize) {
        let Some(place) = Self::place(operation) else { return };
        let (size, bytes) = (size as u64, bytes as u64);
        let sent = match operation {
            Operation::ReduceScatter => (size - 1) * (bytes / size),
            Operation::AllReduce => 2 * (size - 1) * bytes / size,
            Operation::Send | Operation::Gather => bytes,
            _ => (size - 1) * bytes,
        };
        let (ops, total) = &self.0[place];
        ops.fetch_add(1, Ordering::Relaxed);
        total.fetch_add(sent, Ordering::Relaxed);
    }

    /// The counts so far, beside what is held.
    pub(crate) fn snapshot(&self, held: HeldMemory) -> CommStats {
        let HeldMemory { fresh_buffers, early_bytes, idle_bytes } = held;
        let get = |operation| {
            let place = Self::place(operation).expect("a counted operation");
            let (ops, bytes) = &self.0[place];
            OpCount { ops: ops.load(Ordering::Relaxed), bytes: bytes.load(Ordering::Relaxed) }
        };
        CommStats {
            all_gather: get(Operation::AllGather),
            reduce_scatter: get(Operation::ReduceScatter),
            all_reduce: get(Operation::AllReduce),
            broadcast: get(Operation::Broadcast),
            exchange: get(Operation::Exchange),
            gather: get(Operation::Gather),
            send: get(Operation::Send),
            fresh_buffers,
            early_bytes,
            idle_bytes,
        }
    }

    fn place(operation: Operation) -> Option<usize> {
        match operation {
            Operation::AllGather => Some(0),
            Operation::ReduceScatter => Some(1),
            Operation::AllReduce => Some(2),
            Operation::Broadcast => Some(3),
            Operation::Exchange => Some(4),
            Operation::Send => Some(5),
            Operation::Gather => Some(6),
            Operation::Barrier | Operation::Split | Operation::Recv => None,
        }
    }
}
