//! The command's allocator: mimalloc, and an end that can be understood where it has no more.
//!
//! Without this an allocation that fails aborts the process somewhere inside of a tensor library,
//! and nothing is left of what the ranks did. The library installs no allocator.

use std::alloc::{GlobalAlloc, Layout};

use mimalloc::MiMalloc;

/// mimalloc, which ends the process where memory is out. Ranks are threads that allocate and free
/// tensors of all sizes at once, which it is good at.
pub(crate) struct Allocator;

fn some(memory: *mut u8, bytes: usize) -> *mut u8 {
    if memory.is_null() {
        zeropp::end_out_of_memory(bytes);
    }
    memory
}

// SAFETY: every method hands its arguments on to an allocator that keeps the contract, and returns
// what that returns.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller promises.
        some(unsafe { MiMalloc.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller promises.
        some(unsafe { MiMalloc.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { MiMalloc.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as the caller promises.
        some(unsafe { MiMalloc.realloc(memory, layout, size) }, size)
    }
}
