//! Result buffers that are used again and again.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::tensor::Tensor;
use parking_lot::Mutex;

use zeropp_core::cpu_tensor::CpuBuffer;

/// A length that no request has asked for during this many requests loses its free buffers.
const IDLE_REQUESTS: u64 = 4096;

/// The result buffers of one group, by length. A buffer is free again when the ranks have
/// dropped every tensor that shares it.
#[derive(Default)]
pub(super) struct Buffers {
    shelves: Mutex<Shelves>,
    fresh: AtomicU64,
}

#[derive(Default)]
struct Shelves {
    by_len: HashMap<usize, Shelf>,
    requests: u64,
}

#[derive(Default)]
struct Shelf {
    buffers: Vec<CpuBuffer>,
    last_request: u64,
}

impl Buffers {
    /// A tensor of `len` elements, all of which `fill` must write: it finds old values in them.
    pub(super) fn make(&self, len: usize, fill: impl FnOnce(&mut [f32])) -> Tensor<1> {
        let mut buffer = self.lend(len);
        fill(buffer.as_mut_slice().expect("a free buffer has one owner"));
        let tensor = buffer.tensor();
        self.give_back(buffer);
        tensor
    }

    /// A buffer of `len` elements, with old values in it, that nothing else can see.
    pub(super) fn lend(&self, len: usize) -> CpuBuffer {
        self.take(len).unwrap_or_else(|| {
            self.fresh.fetch_add(1, Ordering::Relaxed);
            CpuBuffer::zeros(len)
        })
    }

    /// Puts a buffer on its shelf, to be lent again once no tensor shares it.
    pub(super) fn give_back(&self, buffer: CpuBuffer) {
        let len = buffer.len();
        self.shelves.lock().by_len.entry(len).or_default().buffers.push(buffer);
    }

    /// Buffers that had to be allocated so far.
    pub(super) fn fresh(&self) -> u64 {
        self.fresh.load(Ordering::Relaxed)
    }

    /// Bytes of the buffers that are not in use.
    pub(super) fn idle_bytes(&self) -> u64 {
        let shelves = self.shelves.lock();
        let buffers = shelves.by_len.values().flat_map(|shelf| &shelf.buffers);
        buffers.filter(|b| b.is_free()).map(|b| (b.len() * size_of::<f32>()) as u64).sum()
    }

    /// Takes a free buffer off its shelf.
    fn take(&self, len: usize) -> Option<CpuBuffer> {
        let mut shelves = self.shelves.lock();
        shelves.requests += 1;
        let now = shelves.requests;
        let shelf = shelves.by_len.entry(len).or_default();
        shelf.last_request = now;
        let free = shelf.buffers.iter().position(CpuBuffer::is_free);
        let found = free.map(|i| shelf.buffers.swap_remove(i));
        if found.is_none() {
            shelves.forget_idle();
        }
        found
    }
}

impl Shelves {
    fn forget_idle(&mut self) {
        let oldest = self.requests.saturating_sub(IDLE_REQUESTS);
        self.by_len.retain(|_, shelf| {
            if shelf.last_request < oldest {
                shelf.buffers.retain(|buffer| !buffer.is_free());
            }
            !shelf.buffers.is_empty() || shelf.last_request >= oldest
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_used_again_only_after_its_last_view() {
        let buffers = Buffers::default();
        let first = buffers.make(8, |out| out.fill(1.0));
        let view = first.clone().slice(2..4);
        drop(first);
        let second = buffers.make(8, |out| out.fill(2.0));
        assert_eq!(buffers.fresh(), 2);
        assert_eq!(view.to_data().try_to_vec::<f32>().unwrap(), [1.0, 1.0]);
        drop(view);
        let third = buffers.make(8, |out| out.fill(3.0));
        assert_eq!(buffers.fresh(), 2);
        assert_eq!(second.to_data().try_to_vec::<f32>().unwrap(), [2.0; 8]);
        assert_eq!(third.to_data().try_to_vec::<f32>().unwrap(), [3.0; 8]);
    }

    #[test]
    fn lengths_out_of_use_are_forgotten() {
        let buffers = Buffers::default();
        drop(buffers.make(5, |_| ()));
        for _ in 0..=IDLE_REQUESTS {
            drop(buffers.make(8, |_| ()));
        }
        assert!(buffers.shelves.lock().by_len.contains_key(&5));
        drop(buffers.make(9, |_| ()));
        assert!(!buffers.shelves.lock().by_len.contains_key(&5));
        drop(buffers.make(5, |_| ()));
        assert_eq!(buffers.fresh(), 4);
    }
}
