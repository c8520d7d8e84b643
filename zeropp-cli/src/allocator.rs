//! The command's allocator: mimalloc, and an end that can be understood where it has no more.
//!
//! Without this an allocation that fails aborts the process somewhere inside of a tensor library,
//! and nothing is left of what the ranks did. The library installs no allocator.

use std::alloc::{GlobalAlloc, Layout};
use std::ffi::{c_int, c_long};
use std::io::Write;

use mimalloc::MiMalloc;

/// mimalloc, which ends the process where memory is out. Ranks are threads that allocate and free
/// tensors of all sizes at once, which it is good at.
pub(crate) struct Allocator;

/// `mi_option_purge_delay` of mimalloc's header: milliseconds after which pages that nobody uses go
/// back to the system; −1 keeps them.
const PURGE_DELAY: c_int = 15;

unsafe extern "C" {
    /// Sets an option unless the environment does (`MIMALLOC_PURGE_DELAY`).
    fn mi_option_set_default(option: c_int, value: c_long);
}

/// Keeps what is freed for what is allocated next. A step allocates what the step before it freed;
/// given back to the system in between, that returns as page faults, up to a tenth of a step.
pub(crate) fn keep_pages() {
    // SAFETY: the declaration is that of mimalloc's header, and any option takes any number.
    unsafe { mi_option_set_default(PURGE_DELAY, -1) }
}

fn some(memory: *mut u8, bytes: usize) -> *mut u8 {
    if memory.is_null() {
        zeropp::end_out_of_memory(bytes, say);
    }
    memory
}

/// Writes to standard error, without allocating anything.
fn say(text: &str) {
    // What cannot be told cannot be helped.
    let _ = std::io::stderr().write_all(text.as_bytes());
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

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" {
        fn mi_option_get(option: c_int) -> c_long;
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
