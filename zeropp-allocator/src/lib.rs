//! An allocator for training on CPUs: large blocks are kept whole for the next step, what is small
//! is mimalloc's, and where no memory is left a function of the program's ends the process.
//!
//! A step allocates what the step before it freed (docs/adr/0066-large-blocks-are-kept-whole.md).

use std::alloc::{GlobalAlloc, Layout};
use std::ffi::{c_int, c_long};

use mimalloc::MiMalloc;

use blocks::{Blocks, is_block};

mod blocks;
mod joined;

static BLOCKS: Blocks = Blocks::new();

/// mimalloc for what is small and whole blocks for what is larger than 32 KiB. Ranks are threads
/// that allocate and free tensors of all sizes at once.
///
/// ```
/// use zeropp_allocator::Allocator;
///
/// #[global_allocator]
/// static ALLOCATOR: Allocator = Allocator::new(|_| std::process::abort());
/// # assert_eq!(vec![1u8; 1 << 20].len(), 1 << 20);
/// ```
pub struct Allocator {
    out_of_memory: fn(usize) -> !,
}

impl Allocator {
    /// `out_of_memory` is called with the bytes of an allocation that cannot be made; it must not
    /// allocate. An allocation that fails would abort the process without a word otherwise.
    pub const fn new(out_of_memory: fn(usize) -> !) -> Self {
        Self { out_of_memory }
    }

    /// A block from `alloc`, tried again without the kept large blocks where there is none.
    fn some(&self, alloc: impl Fn() -> *mut u8, bytes: usize) -> *mut u8 {
        let mut memory = alloc();
        if memory.is_null() && BLOCKS.give_back() {
            memory = alloc();
        }
        if memory.is_null() {
            (self.out_of_memory)(bytes);
        }
        memory
    }
}

/// `mi_option_purge_delay` of mimalloc's header: milliseconds after which pages that are not in use
/// go back to the system; −1 keeps them.
const PURGE_DELAY: c_int = 15;

unsafe extern "C" {
    /// Sets an option unless the environment does (`MIMALLOC_PURGE_DELAY`).
    fn mi_option_set_default(option: c_int, value: c_long);
}

/// Keeps what is freed for what is allocated next. A step allocates what the step before it freed;
/// given back to the system in between, that returns as page faults, up to a tenth of a step.
pub fn keep_pages() {
    // SAFETY: the declaration is that of mimalloc's header, and any option takes any number.
    unsafe { mi_option_set_default(PURGE_DELAY, -1) }
}

// SAFETY: every method hands its arguments on to an allocator that keeps the contract, and returns
// what that returns.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_block(layout) {
            return self.some(|| BLOCKS.alloc(layout.size(), false), layout.size());
        }
        // SAFETY: as the caller promises.
        self.some(|| unsafe { MiMalloc.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if is_block(layout) {
            return self.some(|| BLOCKS.alloc(layout.size(), true), layout.size());
        }
        // SAFETY: as the caller promises.
        self.some(|| unsafe { MiMalloc.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises; the same layout went to the same half.
        unsafe {
            if is_block(layout) {
                BLOCKS.free(memory, layout.size());
            } else {
                MiMalloc.dealloc(memory, layout);
            }
        }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller promises that such a layout is valid.
        let new = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        if !is_block(layout) && !is_block(new) {
            // SAFETY: as the caller promises.
            return self.some(|| unsafe { MiMalloc.realloc(memory, layout, size) }, size);
        }
        if is_block(layout) && Blocks::serves(layout.size(), size) {
            return memory;
        }
        // SAFETY: as the caller promises; both have the bytes that are copied.
        unsafe {
            let moved = self.alloc(new);
            moved.copy_from_nonoverlapping(memory, layout.size().min(size));
            self.dealloc(memory, layout);
            moved
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[global_allocator]
    static ALLOCATOR: Allocator = Allocator::new(|_| std::process::abort());

    unsafe extern "C" {
        fn mi_option_get(option: c_int) -> c_long;
    }

    /// A vector that grows and shrinks is moved from one half of the allocator to the other and
    /// within each.
    #[test]
    fn resized_blocks_keep_their_bytes() {
        let mut bytes: Vec<u8> = Vec::new();
        for size in [100, 70_000, 200_000, 1 << 20, (1 << 20) + 7, 3 << 20, 9 << 20] {
            bytes.reserve_exact(size - bytes.len());
            let from = bytes.len();
            bytes.extend((from..size).map(|i| (i % 251) as u8));
        }
        for size in [9 << 20, 5 << 20, (1 << 20) + 1, 70_000, 65_536, 3] {
            bytes.truncate(size);
            bytes.shrink_to_fit();
            assert!(bytes.iter().enumerate().all(|(i, &byte)| byte == (i % 251) as u8), "{size}");
        }
    }

    /// A second is mimalloc's own delay: the number of the option is the one that this file takes
    /// it to be.
    #[test]
    fn pages_are_kept() {
        // SAFETY: the declaration is that of mimalloc's header.
        let delay = || unsafe { mi_option_get(PURGE_DELAY) };
        if std::env::var_os("MIMALLOC_PURGE_DELAY").is_none() {
            assert_eq!(delay(), 1000);
            keep_pages();
            assert_eq!(delay(), -1);
        }
    }
}
