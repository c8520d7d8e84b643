//! Bytes alive on one rank, by kind, and their peaks: counted as a separate device would hold
//! them, whatever the ranks of this process share.

use std::collections::HashMap;
use std::sync::Arc;

use burn::tensor::Tensor;
use parking_lot::Mutex;
pub use zeropp_schedule::memory::{HeldBytes, MemoryBytes, MemoryKind};

use crate::cpu_tensor;

/// A buffer that is held under one kind or several.
struct Buffer {
    bytes: u64,
    /// The kind that it counts as: of those it is held under the one that was first.
    counted: MemoryKind,
    /// Holders by kind, as in [`MemoryKind::ALL`].
    holders: [usize; MemoryKind::ALL.len()],
}

#[derive(Default)]
struct MeterState {
    now: MemoryBytes,
    peak: MemoryBytes,
    at_once: MemoryBytes,
    /// Buffers held through `hold_tensor`, by their storage.
    buffers: HashMap<usize, Buffer>,
}

/// Counts the bytes of one rank.
#[derive(Default)]
pub struct Meter(Mutex<MeterState>);

impl Meter {
    /// A meter with nothing alive.
    pub fn new() -> Arc<Meter> {
        Arc::default()
    }

    /// Counts `bytes` of `kind` until the returned guard is dropped: for memory that is no tensor,
    /// or not yet.
    pub fn hold(self: &Arc<Self>, kind: MemoryKind, bytes: u64) -> Hold {
        self.0.lock().add(kind, bytes);
        Hold { meter: self.clone(), kind, held: MeterEntry::Bytes(bytes) }
    }

    /// Counts the buffer behind `t` until the guard is dropped: all of it, of which `t` may be a
    /// part. What is held more than once counts once: two layers that keep the same input, or
    /// weights that need no gathering and so are the parameters themselves.
    pub fn hold_tensor<const D: usize>(self: &Arc<Self>, kind: MemoryKind, t: &Tensor<D>) -> Hold {
        let Some((storage, bytes)) = storage(t) else {
            return self.hold(kind, (t.shape().num_elements() * t.dtype().size()) as u64);
        };
        let mut state = self.0.lock();
        let new = Buffer { bytes, counted: kind, holders: [0; MemoryKind::ALL.len()] };
        let buffer = state.buffers.entry(storage).or_insert(new);
        let first = buffer.holders.iter().all(|n| *n == 0);
        buffer.holders[kind as usize] += 1;
        if first {
            state.add(kind, bytes);
        }
        Hold { meter: self.clone(), kind, held: MeterEntry::Storage(storage) }
    }

    /// Bytes alive now.
    pub fn now(&self) -> MemoryBytes {
        self.0.lock().now
    }

    /// Largest bytes by kind since the last [`reset_peak`](Self::reset_peak).
    pub fn peak(&self) -> MemoryBytes {
        self.0.lock().peak
    }

    /// The bytes by kind that were alive when the sum of all kinds was largest since the last
    /// [`reset_peak`](Self::reset_peak).
    pub fn at_once(&self) -> MemoryBytes {
        self.0.lock().at_once
    }

    /// Starts a new peak measurement from what is alive now.
    pub fn reset_peak(&self) {
        let mut s = self.0.lock();
        (s.peak, s.at_once) = (s.now, s.now);
    }
}

/// A number that identifies the storage of `t`, and its bytes.
fn storage<const D: usize>(t: &Tensor<D>) -> Option<(usize, u64)> {
    let of_cpu = cpu_tensor::storage(t);
    // Numbers of tensors are small, addresses are not: no two of them are equal.
    #[cfg(feature = "cube")]
    let of_cpu = of_cpu.or_else(|| {
        let bytes = (t.shape().num_elements() * t.dtype().size()) as u64;
        Some((crate::cube::tensor_id(t)?, bytes))
    });
    of_cpu
}

impl MeterState {
    fn add(&mut self, kind: MemoryKind, bytes: u64) {
        *self.now.get_mut(kind) += bytes;
        let now = self.now.get(kind);
        let peak = self.peak.get_mut(kind);
        *peak = now.max(*peak);
        if self.now.total() > self.at_once.total() {
            self.at_once = self.now;
        }
    }

    /// One holder of a buffer less; what others hold it as, it counts as from now on.
    fn release(&mut self, storage: usize, kind: MemoryKind) {
        let buffer = self.buffers.get_mut(&storage).expect("registered by hold_tensor");
        buffer.holders[kind as usize] -= 1;
        let (bytes, counted) = (buffer.bytes, buffer.counted);
        if buffer.holders[counted as usize] > 0 {
            return;
        }
        let other = MemoryKind::ALL.into_iter().find(|kind| buffer.holders[*kind as usize] > 0);
        *self.now.get_mut(counted) -= bytes;
        match other {
            Some(other) => {
                buffer.counted = other;
                self.add(other, bytes);
            }
            None => drop(self.buffers.remove(&storage)),
        }
    }
}

/// Memory counted by a [`Meter`] for as long as this lives.
pub struct Hold {
    meter: Arc<Meter>,
    kind: MemoryKind,
    held: MeterEntry,
}

enum MeterEntry {
    Bytes(u64),
    Storage(usize),
}

impl Hold {
    /// Counts `bytes` more.
    ///
    /// # Panics
    /// Panics if it holds a tensor, which does not grow.
    pub(crate) fn grow(&mut self, bytes: u64) {
        let MeterEntry::Bytes(held) = &mut self.held else { panic!("a tensor does not grow") };
        *held += bytes;
        self.meter.0.lock().add(self.kind, bytes);
    }

    /// Leaves `bytes` of what it counts to another guard.
    ///
    /// # Panics
    /// Panics if it holds a tensor, or less.
    pub(crate) fn split_off(&mut self, bytes: u64) -> Hold {
        let MeterEntry::Bytes(held) = &mut self.held else { panic!("a tensor is one") };
        assert!(bytes <= *held, "{bytes} of {held} bytes");
        *held -= bytes;
        Hold { meter: self.meter.clone(), kind: self.kind, held: MeterEntry::Bytes(bytes) }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut state = self.meter.0.lock();
        match self.held {
            MeterEntry::Bytes(bytes) => *state.now.get_mut(self.kind) -= bytes,
            MeterEntry::Storage(storage) => state.release(storage, self.kind),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu_tensor::from_vec;

    #[test]
    fn shared_memory_counts_once_under_its_first_kind() {
        let meter = Meter::new();
        let t = from_vec(vec![0.0; 256], [256]);
        let parameter = meter.hold_tensor(MemoryKind::ParameterShard, &t);
        let gathered = meter.hold_tensor(MemoryKind::Gathered, &t.clone().slice(0..100));
        assert_eq!((meter.now().total(), meter.now().parameter_shard), (1024, 1024));
        drop(gathered);
        assert_eq!(meter.peak().gathered, 0);
        let stash = meter.hold_tensor(MemoryKind::WeightStash, &t);
        drop(parameter);
        assert_eq!((meter.now().weight_stash, meter.now().total()), (1024, 1024));
        drop(stash);
        assert_eq!(meter.now().total(), 0);
        assert_eq!(meter.at_once().total(), 1024);
    }

    #[test]
    fn a_part_of_a_buffer_keeps_all_of_it() {
        let meter = Meter::new();
        let part = from_vec(vec![0.0; 256], [256]).slice(8..16);
        let held = meter.hold_tensor(MemoryKind::Activation, &part);
        assert_eq!(meter.now().activation, 1024);
        drop(held);
        let copy = from_vec(vec![0.0; 8], [8]);
        let _held = meter.hold_tensor(MemoryKind::Activation, &copy);
        assert_eq!(meter.now().activation, 32);
    }

    #[test]
    fn kinds_peak_at_different_times() {
        let meter = Meter::new();
        let activation = meter.hold(MemoryKind::Activation, 10);
        drop(activation);
        let _stash = meter.hold(MemoryKind::WeightStash, 7);
        assert_eq!((meter.peak().total(), meter.at_once().total()), (17, 10));
        meter.reset_peak();
        assert_eq!((meter.peak().total(), meter.at_once().weight_stash), (7, 7));
    }
}
