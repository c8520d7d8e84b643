//! Memory for the page's program, in 1 KB of code where the standard library's takes 8.
//!
//! Blocks have powers of two as sizes. One that is given back goes on the list of its size, from
//! which the next one of that size is taken; all others are cut from the end of the memory. So
//! memory is at most what blocks of each size took at their peaks, which pictures repeat.

use std::alloc::{GlobalAlloc, Layout};
use std::arch::wasm32::memory_grow;
use std::cell::UnsafeCell;
use std::ptr::null_mut;

const PAGE: usize = 1 << 16;
/// Every block lies at a multiple of this; nothing in the program asks for more.
const ALIGN: usize = 16;

struct State {
    /// The first free block of each size, by its exponent; each block begins with the next one.
    free: [*mut u8; usize::BITS as usize],
    /// What was never used: from here to the memory's end.
    unused: usize,
    end: usize,
}

struct Blocks(UnsafeCell<State>);

// SAFETY: this target has one thread.
unsafe impl Sync for Blocks {}

#[global_allocator]
static BLOCKS: Blocks =
    Blocks(UnsafeCell::new(State { free: [null_mut(); 32], unused: 0, end: 0 }));

fn exponent(size: usize) -> usize {
    size.max(ALIGN).next_power_of_two().trailing_zeros() as usize
}

impl State {
    /// A block that was never used, or null.
    fn cut(&mut self, size: usize) -> *mut u8 {
        let missing = size.saturating_sub(self.end - self.unused).div_ceil(PAGE);
        if missing > 0 {
            let before = memory_grow::<0>(missing);
            if before == usize::MAX {
                return null_mut();
            }
            if self.end == 0 {
                (self.unused, self.end) = (before * PAGE, before * PAGE);
            }
            self.end += missing * PAGE;
        }
        self.unused += size;
        (self.unused - size) as *mut u8
    }
}

// SAFETY: a block is on a list, or was cut once, before it is given; it has the size and the
// alignment that were asked for, and is on a list again only when it was given back.
unsafe impl GlobalAlloc for Blocks {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.align() > ALIGN {
            return null_mut();
        }
        let exponent = exponent(layout.size());
        // SAFETY: there is one thread, and nothing below allocates; a block on a list has in its
        // first bytes the next one, which `dealloc` wrote.
        unsafe {
            let state = &mut *self.0.get();
            let block = state.free[exponent];
            if block.is_null() {
                return state.cut(1 << exponent);
            }
            state.free[exponent] = *block.cast();
            block
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: as above; the block is the caller's to give, and has room for a pointer.
        unsafe {
            let state = &mut *self.0.get();
            let first = &mut state.free[exponent(layout.size())];
            *block.cast() = *first;
            *first = block;
        }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if exponent(size) == exponent(layout.size()) {
            return block;
        }
        // SAFETY: the caller has a block of this layout, and the new one is at least as large as
        // what is copied.
        unsafe {
            let wider = self.alloc(Layout::from_size_align_unchecked(size, layout.align()));
            if !wider.is_null() {
                wider.copy_from_nonoverlapping(block, size.min(layout.size()));
                self.dealloc(block, layout);
            }
            wider
        }
    }
}
