//! Memory for the page's program, in 1 KB of code where the standard library's takes 8.
//!
//! Small blocks have powers of two as sizes; one that is given back goes on the list of its size,
//! from which the next one is taken, or else it is cut from a chunk. Chunks and large blocks lie in
//! gaps, of which the first that fits is taken; gaps that touch become one.

use std::alloc::{GlobalAlloc, Layout};
use std::cell::UnsafeCell;
use std::ptr::null_mut;

/// What memory grows by.
const PAGE: usize = 1 << 16;
/// The largest small block, by its exponent.
const SMALL: usize = 14;
/// Large blocks are a multiple of this.
const GRAIN: usize = 1 << 12;
/// Every block lies at a multiple of this; nothing in the program asks for more.
const ALIGN: usize = 16;

/// Free memory for large blocks, which begins with this.
struct Gap {
    size: usize,
    /// The next one in the order of memory.
    next: *mut Gap,
}

struct State {
    /// The first free block of each small size, by its exponent; each begins with the next one.
    small: [*mut u8; SMALL + 1],
    /// What is left of the last chunk.
    chunk: *mut u8,
    left: usize,
    gaps: *mut Gap,
}

struct Blocks(UnsafeCell<State>);

// SAFETY: this target has one thread.
unsafe impl Sync for Blocks {}

#[cfg(target_arch = "wasm32")]
#[global_allocator]
static BLOCKS: Blocks = Blocks::new();

impl Blocks {
    const fn new() -> Self {
        Self(UnsafeCell::new(State {
            small: [null_mut(); SMALL + 1],
            chunk: null_mut(),
            left: 0,
            gaps: null_mut(),
        }))
    }
}

/// The end of memory, which has so many pages more now; none where there are no more.
#[cfg(target_arch = "wasm32")]
fn grown(pages: usize) -> Option<*mut Gap> {
    let end = std::arch::wasm32::memory_grow::<0>(pages);
    (end != usize::MAX).then_some((end * PAGE) as *mut Gap)
}

fn is_small(size: usize) -> bool {
    size <= 1 << SMALL
}

/// The size that a block has which is asked for with this one.
fn rounded(size: usize) -> usize {
    if is_small(size) { size.max(ALIGN).next_power_of_two() } else { size.next_multiple_of(GRAIN) }
}

impl State {
    /// A block of a rounded size, or null.
    unsafe fn take(&mut self, size: usize) -> *mut u8 {
        if !is_small(size) {
            // SAFETY: the caller's.
            return unsafe { self.take_large(size) };
        }
        // SAFETY: a block on a list has in its first bytes the next one, which `give` wrote; a
        // chunk has as many bytes as are said to be left.
        unsafe {
            let first = &mut self.small[size.trailing_zeros() as usize];
            if !first.is_null() {
                let block = *first;
                *first = *block.cast();
                return block;
            }
            if self.left < size {
                self.chunk = self.take_large(PAGE);
                self.left = if self.chunk.is_null() { 0 } else { PAGE };
            }
            if self.chunk.is_null() {
                return null_mut();
            }
            self.left -= size;
            self.chunk.add(self.left)
        }
    }

    /// The end of the first gap that is large enough, or of new memory.
    unsafe fn take_large(&mut self, size: usize) -> *mut u8 {
        loop {
            let mut link = &raw mut self.gaps;
            // SAFETY: gaps are in a list that ends with null, and are as large as they say.
            unsafe {
                while let Some(gap) = (*link).as_mut() {
                    if gap.size >= size {
                        gap.size -= size;
                        let block = (*link).cast::<u8>().add(gap.size);
                        if gap.size == 0 {
                            *link = gap.next;
                        }
                        return block;
                    }
                    link = &raw mut gap.next;
                }
            }
            let pages = size.div_ceil(PAGE);
            let Some(end) = grown(pages) else { return null_mut() };
            // SAFETY: nobody else has what has just been added.
            unsafe { self.give_large(end, pages * PAGE) };
        }
    }

    /// Takes a block of a rounded size back.
    unsafe fn give(&mut self, block: *mut u8, size: usize) {
        // SAFETY: the block is the caller's to give, and has room for a pointer.
        unsafe {
            if !is_small(size) {
                return self.give_large(block.cast(), size);
            }
            let first = &mut self.small[size.trailing_zeros() as usize];
            *block.cast() = *first;
            *first = block;
        }
    }

    unsafe fn give_large(&mut self, block: *mut Gap, size: usize) {
        let mut before = null_mut::<Gap>();
        let mut link = &raw mut self.gaps;
        // SAFETY: as in `take_large`; the block is the caller's to give, and has room for a gap.
        unsafe {
            while !(*link).is_null() && *link < block {
                before = *link;
                link = &raw mut (*before).next;
            }
            block.write(Gap { size, next: *link });
            *link = block;
            for gap in [block, before] {
                let Some(gap) = gap.as_mut() else { continue };
                if (&raw mut *gap).byte_add(gap.size) == gap.next {
                    gap.size += (*gap.next).size;
                    gap.next = (*gap.next).next;
                }
            }
        }
    }
}

// SAFETY: a block comes from a list, a chunk or a gap, which have it no longer then, until it is
// given back; it has the size and the alignment that were asked for.
unsafe impl GlobalAlloc for Blocks {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.align() > ALIGN {
            return null_mut();
        }
        // SAFETY: there is one thread, and nothing that the state does allocates.
        unsafe { (*self.0.get()).take(rounded(layout.size())) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: as above; the caller has the block from `alloc`.
        unsafe { (*self.0.get()).give(block, rounded(layout.size())) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if rounded(size) == rounded(layout.size()) {
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

#[cfg(test)]
fn grown(pages: usize) -> Option<*mut Gap> {
    tests::grown(pages)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Pages that a test's memory may have.
    const MOST: usize = 256;

    thread_local! {
        /// A test's memory and how many of its pages are in use.
        static MEMORY: Cell<(*mut u8, usize)> = const { Cell::new((null_mut(), 0)) };
    }

    pub(super) fn grown(pages: usize) -> Option<*mut Gap> {
        let (mut start, used) = MEMORY.get();
        if start.is_null() {
            let layout = Layout::from_size_align(MOST * PAGE, PAGE).expect("a layout");
            // SAFETY: the layout is not empty. It lives as long as the process.
            start = unsafe { std::alloc::alloc(layout) };
        }
        let fits = used + pages <= MOST;
        MEMORY.set((start, used + if fits { pages } else { 0 }));
        fits.then(|| start.wrapping_add(used * PAGE).cast())
    }

    fn layout(size: usize) -> Layout {
        Layout::from_size_align(size, 8).expect("a layout")
    }

    /// Random blocks of all sizes, resized and given back: nobody's bytes change, and what was
    /// given back is enough for the same again.
    #[test]
    fn blocks_are_apart_and_return() {
        let now = std::time::UNIX_EPOCH.elapsed().expect("a clock past 1970").as_nanos() as u64;
        let replayed = std::env::var("ZEROPP_SEED").ok().and_then(|seed| seed.parse().ok());
        let mut state: u64 = replayed.unwrap_or(now);
        println!("ZEROPP_SEED={state}");
        let mut draw = |below: usize| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize % below
        };
        let blocks = Blocks::new();
        let mut held: Vec<(*mut u8, usize, u8)> = Vec::new();
        for turn in 0..20_000 {
            let most = if draw(4) == 0 { 300_000 } else { 3_000 };
            let size = 1 + draw(most);
            let mark = turn as u8;
            // SAFETY: every block is written and read within its size, and given back once.
            unsafe {
                if held.len() < 30 {
                    let block = blocks.alloc(layout(size));
                    assert!(!block.is_null() && block.addr().is_multiple_of(ALIGN), "turn {turn}");
                    block.write_bytes(mark, size);
                    held.push((block, size, mark));
                    continue;
                }
                let (block, old, mark) = held.swap_remove(draw(30));
                assert!(std::slice::from_raw_parts(block, old).iter().all(|&byte| byte == mark));
                if draw(3) > 0 {
                    blocks.dealloc(block, layout(old));
                    continue;
                }
                let block = blocks.realloc(block, layout(old), size);
                let kept = std::slice::from_raw_parts(block, old.min(size));
                assert!(kept.iter().all(|&byte| byte == mark), "turn {turn}");
                block.write_bytes(mark, size);
                held.push((block, size, mark));
            }
        }
        // SAFETY: as above.
        held.iter().for_each(|&(block, size, _)| unsafe { blocks.dealloc(block, layout(size)) });
        // 30 blocks of 300,000 bytes need 9 of these 16 MiB, and gaps that touch are one.
        let used = MEMORY.get().1;
        assert!(used < MOST, "{used} pages");
        // SAFETY: as above.
        let again = unsafe { blocks.alloc(layout(300_000)) };
        assert_eq!(MEMORY.get().1, used, "what was given back is taken first");
        // SAFETY: as above.
        unsafe {
            blocks.dealloc(again, layout(300_000));
            assert!(blocks.alloc(layout(MOST * PAGE + 1)).is_null(), "more than there is");
        }
    }
}
