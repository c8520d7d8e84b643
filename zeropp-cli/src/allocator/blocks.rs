//! Large blocks of memory: pages of their own, kept when they are freed, up to what a run needs.
//!
//! A step allocates what the step before it freed. Given back to the system in between, that
//! returns as page faults, up to a tenth of a step; kept by an allocator that cuts and joins its
//! regions, the process grows to a third above what ever lived at once, and what is predicted of
//! its memory is no longer true. So blocks are kept whole, for allocations of their own length
//! (those of a training step are of few lengths, which return), and only as long as what lives and
//! what is kept stay within a sixteenth and 32 MiB above the most that has lived at once. A block
//! that has to go hands its pages to the one it makes room for
//! (docs/adr/0066-large-blocks-are-kept-whole.md).

use std::alloc::Layout;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Bytes above which an allocation is a block. Up to it are small tensors and all that is not one;
/// the list of free blocks, which is allocated while it is locked, stays there, too.
const SMALL: usize = 64 << 10;
const _: () = assert!((MANY + 1).is_power_of_two() && (MANY + 1) * size_of::<Block>() <= SMALL);

/// Blocks are multiples of a sixteenth of their length, rounded to a power of two between these:
/// lengths that are nearly the same share their blocks, and little is lost.
const GRAINS: [usize; 2] = [4 << 10, 64 << 10];

/// What may be kept above the largest sum in use, a part of it and so many bytes: lengths that take
/// turns fit there, those of small models too.
const SLACK: usize = 16;
const SLACK_BYTES: usize = 32 << 20;

/// Blocks that are kept at most: the system has a limit on mappings, and the list is searched.
const MANY: usize = 4095;

/// Large blocks of memory, for any thread.
pub(super) struct Blocks(Mutex<Kept>);

/// What is kept and how much there is.
struct Kept {
    /// Blocks that nobody uses, longest kept first.
    free: Vec<Block>,
    /// Bytes of `free`.
    free_bytes: usize,
    /// Bytes in use.
    live: usize,
    /// The most bytes that were in use at once.
    most: usize,
}

/// A mapping that nobody uses.
struct Block {
    /// Its first byte, as an address: what is there belongs to this block alone.
    address: usize,
    bytes: usize,
}

/// Whether a layout is that of a block. What asks for more than a page's alignment is not.
pub(super) fn is_block(layout: Layout) -> bool {
    layout.size() > SMALL && layout.align() <= 4096
}

/// Bytes of the mapping for `size` bytes.
fn rounded(size: usize) -> usize {
    let grain = (size / 16).next_power_of_two().clamp(GRAINS[0], GRAINS[1]);
    size.next_multiple_of(grain)
}

impl Blocks {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(Kept { free: Vec::new(), free_bytes: 0, live: 0, most: 0 }))
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        // Nothing in here panics; if it did, the counts would still be whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory for `size` bytes, of which each is zero if `zeroed`; null where there is no more.
    pub(super) fn alloc(&self, size: usize, zeroed: bool) -> *mut u8 {
        let bytes = rounded(size);
        // Let go before the bytes are zeroed, which may take a while.
        let kept = self.lock().take(bytes);
        if let Some(address) = kept {
            let memory = ptr::with_exposed_provenance_mut::<u8>(address);
            if zeroed {
                // SAFETY: the block has `bytes >= size` bytes and left the list of free ones.
                unsafe { memory.write_bytes(0, size) }
            }
            return memory;
        }
        let memory = map(bytes);
        if memory.is_null() {
            self.lock().live -= bytes;
        }
        memory
    }

    /// Gives all kept blocks back to the system; whether there were any.
    pub(super) fn give_back(&self) -> bool {
        let mut kept = self.lock();
        kept.free_bytes = 0;
        let blocks = kept.free.drain(..);
        let some = blocks.len() > 0;
        blocks.for_each(Block::give_back);
        some
    }

    /// Takes back what [`Blocks::alloc`] gave for `size` bytes.
    ///
    /// # Safety
    ///
    /// `memory` came from `alloc` with this size, and nobody uses it any more.
    pub(super) unsafe fn free(&self, memory: *mut u8, size: usize) {
        let block = Block { address: memory.expose_provenance(), bytes: rounded(size) };
        self.lock().keep(block);
    }

    /// Whether a block for `old` bytes serves for `new` ones as it is.
    pub(super) fn serves(old: usize, new: usize) -> bool {
        new > SMALL && rounded(old) == rounded(new)
    }
}

impl Kept {
    /// The address of a kept block of this length, if there is one or one that has to go can be
    /// made one. The bytes count as used either way, and others make room for them.
    fn take(&mut self, bytes: usize) -> Option<usize> {
        self.live += bytes;
        self.most = self.most.max(self.live);
        // The newest is the likeliest to be in a cache.
        if let Some(i) = self.free.iter().rposition(|block| block.bytes == bytes) {
            self.free_bytes -= bytes;
            return Some(self.free.remove(i).address);
        }
        if self.over() == 0 {
            return None;
        }
        // The one of the nearest length: what it has more, pages are lost of, and what it has less,
        // there have to be new ones for.
        let nearest = self.free.iter().enumerate().min_by_key(|(_, b)| b.bytes.abs_diff(bytes));
        let (chosen, _) = nearest?;
        let block = self.free.remove(chosen);
        self.free_bytes -= block.bytes;
        self.shrink();
        block.resized(bytes)
    }

    fn keep(&mut self, block: Block) {
        self.live -= block.bytes;
        self.free_bytes += block.bytes;
        self.free.push(block);
        self.shrink();
    }

    /// Gives back what has to go.
    fn shrink(&mut self) {
        let over = self.over();
        for block in self.free.drain(..over) {
            self.free_bytes -= block.bytes;
            block.give_back();
        }
    }

    /// How many of the blocks that were kept longest have to go, for all to be within the limit.
    fn over(&self) -> usize {
        let limit = self.most + self.most / SLACK + SLACK_BYTES;
        let mut sum = self.live + self.free_bytes;
        let many = self.free.len().saturating_sub(MANY);
        let large = self.free.iter().take_while(|block| {
            let over = sum > limit;
            sum -= block.bytes;
            over
        });
        large.count().max(many)
    }
}

impl Block {
    fn give_back(self) {
        // SAFETY: the mapping is whole and nobody uses it: it was in the list of free ones.
        unsafe { libc::munmap(ptr::with_exposed_provenance_mut(self.address), self.bytes) };
    }

    /// The address of a block of `bytes` that has this one's pages, as far as they reach; nothing
    /// where the system has no room or no way.
    #[cfg(target_os = "linux")]
    fn resized(self, bytes: usize) -> Option<usize> {
        let old = ptr::with_exposed_provenance_mut(self.address);
        // SAFETY: as in `give_back`; what comes is a mapping of its own.
        let new = unsafe { libc::mremap(old, self.bytes, bytes, libc::MREMAP_MAYMOVE) };
        if new == libc::MAP_FAILED {
            self.give_back();
            return None;
        }
        Some(new.expose_provenance())
    }

    #[cfg(not(target_os = "linux"))]
    fn resized(self, _: usize) -> Option<usize> {
        self.give_back();
        None
    }
}

/// A mapping of so many bytes, all zero; null where the system has none.
fn map(bytes: usize) -> *mut u8 {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let kind = libc::MAP_PRIVATE | libc::MAP_ANON;
    // SAFETY: a new mapping at an address of the system's choice touches nothing that exists.
    let memory = unsafe { libc::mmap(ptr::null_mut(), bytes, access, kind, -1, 0) };
    if memory == libc::MAP_FAILED {
        return ptr::null_mut();
    }
    // Fewer faults where the system has huge pages to give; it is no error where it has none.
    #[cfg(target_os = "linux")]
    // SAFETY: advice about the mapping that was just made.
    unsafe {
        libc::madvise(memory, bytes, libc::MADV_HUGEPAGE)
    };
    memory.cast()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    /// What the lists say: bytes in use, kept, and the most that was in use.
    fn counts(blocks: &Blocks) -> (usize, usize, usize) {
        let kept = blocks.lock();
        let sum: usize = kept.free.iter().map(|block| block.bytes).sum();
        assert_eq!(sum, kept.free_bytes, "the sum of what is kept is that of its blocks");
        (kept.live, kept.free_bytes, kept.most)
    }

    #[test]
    fn a_block_returns_for_its_own_length_and_zeroed_where_that_is_asked() {
        let blocks = Blocks::new();
        let first = blocks.alloc(3 * MIB, false);
        // SAFETY: the block has so many bytes, and is used by this test alone.
        unsafe {
            first.write_bytes(7, 3 * MIB);
            blocks.free(first, 3 * MIB);
        }
        assert_eq!(counts(&blocks), (0, 3 * MIB, 3 * MIB));
        // Nearly as long, and longer than what was written first.
        let again = blocks.alloc(3 * MIB - 5, true);
        assert_eq!(again, first);
        // SAFETY: as above.
        let bytes = unsafe { std::slice::from_raw_parts(again, 3 * MIB - 5) };
        assert!(bytes.iter().all(|&byte| byte == 0));
        // SAFETY: as above.
        unsafe { blocks.free(again, 3 * MIB - 5) };
    }

    /// Random allocations of many lengths: nobody's bytes change, and what is kept stays within
    /// the limit after each of them.
    #[test]
    fn blocks_are_apart_and_what_is_kept_is_bounded() {
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
        for turn in 0..2000 {
            if held.len() > 12 || (!held.is_empty() && draw(2) == 0) {
                let (memory, size, mark) = held.swap_remove(draw(held.len()));
                // SAFETY: the block has so many bytes and is in nobody else's hands.
                unsafe {
                    let bytes = std::slice::from_raw_parts(memory, size);
                    assert!(bytes.iter().step_by(4093).all(|&byte| byte == mark));
                    blocks.free(memory, size);
                }
            } else {
                let size = SMALL + 1 + draw(3 * MIB);
                let memory = blocks.alloc(size, draw(4) == 0);
                assert!(!memory.is_null());
                // SAFETY: as above.
                unsafe { memory.write_bytes(turn as u8, size) };
                held.push((memory, size, turn as u8));
            }
            let (live, kept, most) = counts(&blocks);
            assert_eq!(live, held.iter().map(|&(_, size, _)| rounded(size)).sum::<usize>());
            let limit = most + most / SLACK + SLACK_BYTES;
            assert!(live + kept <= limit, "{live} + {kept} of {most}");
        }
        for (memory, size, _) in held {
            // SAFETY: as above.
            unsafe { blocks.free(memory, size) };
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn what_has_to_go_hands_its_pages_to_the_nearest_length() {
        let blocks = Blocks::new();
        let of = |mib: usize, mark: u8| {
            let memory = blocks.alloc(mib * MIB, false);
            // SAFETY: the block has so many bytes, and is used by this test alone.
            unsafe { memory.write_bytes(mark, mib * MIB) };
            memory
        };
        let (longer, nearer) = (of(100, 8), of(64, 9));
        // SAFETY: as above.
        unsafe {
            blocks.free(longer, 100 * MIB);
            blocks.free(nearer, 64 * MIB);
        }
        let shorter = blocks.alloc(60 * MIB, false);
        // SAFETY: as above; what a block held before is what its pages hold.
        let bytes = unsafe { std::slice::from_raw_parts(shorter, 60 * MIB) };
        assert!(bytes.iter().all(|&byte| byte == 9), "the pages are those of the nearer block");
        assert_eq!(counts(&blocks), (60 * MIB, 100 * MIB, 164 * MIB));
        // SAFETY: as above.
        unsafe { blocks.free(shorter, 60 * MIB) };
    }
}
