//! Large blocks of memory: pages of their own, kept when they are freed, up to what a run needs.
//!
//! A step allocates what the step before it freed. Given back to the system in between, that
//! returns as page faults, up to a tenth of a step; kept by an allocator that cuts and joins its
//! regions at every turn, the process grows to a third above what ever lived at once, and what is
//! predicted of its memory is no longer true. So blocks are kept whole, for allocations of their
//! own length (those of a training step are of few lengths, which return), as long as what lives
//! and what is kept stay within a sixteenth and 8 MiB above the most that has lived at once. Only
//! where that is reached, kept blocks become one of another length: neighbours where they lie, or
//! pages from several places (docs/adr/0066-large-blocks-are-kept-whole.md).

use std::alloc::Layout;
use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::joined::JoinedMappings;

/// Bytes above which an allocation is a block. Up to it are small tensors and all that is not one;
/// the lists of free blocks, which are allocated while they are locked, stay there, too.
const SMALL: usize = 32 << 10;
const _: () = assert!((MANY + 1).is_power_of_two() && (MANY + 1) * size_of::<FreeBlock>() <= SMALL);

/// Mappings that a block consists of at most, for the same reason: as a list of them grows, it
/// takes room for twice as many.
const PARTS: usize = 1024;
const _: () = assert!(2 * PARTS * size_of::<usize>() <= SMALL);

/// Blocks are multiples of a sixteenth of their length, rounded to a power of two between these,
/// and of whole pages: lengths that are nearly the same share their blocks, and little is lost.
const GRAINS: [usize; 2] = [4 << 10, 64 << 10];

/// Bytes of a page where there are no smaller ones.
static PAGE: AtomicUsize = AtomicUsize::new(0);

/// Bytes that may be kept above the largest sum in use, a part of it and so many: lengths that take
/// turns fit there, those of small models too.
const SLACK: usize = 16;
const SLACK_BYTES: usize = 8 << 20;

/// Neighbours that become one block at most.
const RUN: usize = 16;

/// Bytes of a huge page.
const HUGE: usize = 2 << 20;

/// Bytes that are mapped at once, from a huge page's beginning on. New blocks of half of it or less
/// lie there one behind the other: each in a mapping of its own, most would have no huge page.
const REGION: usize = 8 * HUGE;

/// Blocks that are kept at most: the system has a limit on mappings, and the list is searched.
const MANY: usize = 2047;

/// Large blocks of memory, for any thread.
pub(crate) struct Blocks(Mutex<KeptBlocks>);

/// The blocks that are kept, and how much there is of them.
struct KeptBlocks {
    /// Blocks that are not in use, longest kept first.
    free: Vec<FreeBlock>,
    /// Bytes of `free`.
    free_bytes: usize,
    /// Bytes in use.
    live: usize,
    /// The most bytes that were in use at once.
    most: usize,
    /// What is left of the newest region.
    region: FreeBlock,
    joined: JoinedMappings,
}

/// Pages that are not in use, one after the other.
struct FreeBlock {
    /// Its first byte, as an address: what is there belongs to this block alone.
    address: usize,
    bytes: usize,
}

thread_local! {
    /// Whether this thread has the lock.
    static IS_HELD: Cell<bool> = const { Cell::new(false) };
}

/// The lock.
struct BlocksGuard<'a>(MutexGuard<'a, KeptBlocks>);

impl Deref for BlocksGuard<'_> {
    type Target = KeptBlocks;

    fn deref(&self) -> &KeptBlocks {
        &self.0
    }
}

impl DerefMut for BlocksGuard<'_> {
    fn deref_mut(&mut self) -> &mut KeptBlocks {
        &mut self.0
    }
}

impl Drop for BlocksGuard<'_> {
    fn drop(&mut self) {
        IS_HELD.set(false);
    }
}

/// Whether a layout is that of a block. What asks for more than a page's alignment is not.
pub(crate) fn is_block(layout: Layout) -> bool {
    layout.size() > SMALL && layout.align() <= 4096
}

/// Bytes of the mapping for `size` bytes.
fn rounded(size: usize) -> usize {
    rounded_to(page(), size)
}

fn rounded_to(page: usize, size: usize) -> usize {
    let grain = (size / 16).next_power_of_two().clamp(GRAINS[0], GRAINS[1]);
    size.next_multiple_of(grain.max(page))
}

/// Bytes of a page: the system maps and unmaps whole ones, 64 KiB each on some machines.
fn page() -> usize {
    match PAGE.load(Ordering::Relaxed) {
        0 => {
            // SAFETY: asks for a number.
            let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
            let page = usize::try_from(page).unwrap_or(0).max(GRAINS[0]);
            PAGE.store(page, Ordering::Relaxed);
            page
        }
        page => page,
    }
}

impl Blocks {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(KeptBlocks {
            free: Vec::new(),
            free_bytes: 0,
            live: 0,
            most: 0,
            region: FreeBlock { address: 0, bytes: 0 },
            joined: JoinedMappings::new(),
        }))
    }

    fn lock(&self) -> BlocksGuard<'_> {
        // Nothing in here panics; if it did, the counts would still be whole.
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        IS_HELD.set(true);
        BlocksGuard(kept)
    }

    /// Memory for `size` bytes, of which each is zero if `zeroed`; null where there is no more.
    pub(crate) fn alloc(&self, size: usize, zeroed: bool) -> *mut u8 {
        let bytes = rounded(size);
        // Let go before the bytes are zeroed, which may take a while.
        let (kept, new) = {
            let mut lock = self.lock();
            let kept = lock.take(bytes);
            (kept, if kept.is_none() { lock.cut_region(bytes) } else { None })
        };
        if let Some(address) = new {
            return ptr::with_exposed_provenance_mut(address);
        }
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

    /// Gives all kept blocks back to the system; whether there were any. None where this thread is
    /// at work on them: its lists are small memory, which may have run out meanwhile.
    pub(crate) fn give_back(&self) -> bool {
        if IS_HELD.get() {
            return false;
        }
        let mut kept = self.lock();
        let many = kept.free.len();
        kept.give_back(many);
        many > 0
    }

    /// Takes back what [`Blocks::alloc`] gave for `size` bytes.
    ///
    /// # Safety
    ///
    /// `memory` came from `alloc` with this size, and is not used any more.
    pub(crate) unsafe fn free(&self, memory: *mut u8, size: usize) {
        let block = FreeBlock { address: memory.expose_provenance(), bytes: rounded(size) };
        self.lock().keep(block);
    }

    /// Whether a block for `old` bytes serves for `new` ones as it is.
    pub(crate) fn serves(old: usize, new: usize) -> bool {
        new > SMALL && rounded(old) == rounded(new)
    }
}

impl KeptBlocks {
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
        if self.live + self.free_bytes <= self.limit() {
            return None;
        }
        let made = self.cut(bytes).or_else(|| self.join(bytes));
        self.shrink();
        made
    }

    /// New bytes of a region, all zero, where a block is small enough for it.
    fn cut_region(&mut self, bytes: usize) -> Option<usize> {
        if bytes > REGION / 2 {
            return None;
        }
        if self.region.bytes < bytes {
            let mapped = map(REGION + HUGE);
            if mapped.is_null() {
                return None;
            }
            let start = mapped.expose_provenance();
            let (first, end) = (start.next_multiple_of(HUGE), start + REGION + HUGE);
            let of = |from: usize, to: usize| FreeBlock { address: from, bytes: to - from };
            let old = std::mem::replace(&mut self.region, of(first, first + REGION));
            let rests = [old, of(start, first), of(first + REGION, end)];
            rests.into_iter().filter(|rest| rest.bytes > 0).for_each(FreeBlock::give_back);
        }
        let FreeBlock { address, bytes: left } = self.region;
        self.region = FreeBlock { address: address + bytes, bytes: left - bytes };
        Some(address)
    }

    /// The first bytes of a kept block, or of some that lie one behind the other.
    fn cut(&mut self, bytes: usize) -> Option<usize> {
        let run = self.neighbours(bytes)?;
        let (first, sum) = (run[0].0, run.iter().map(|&(_, bytes)| bytes).sum::<usize>());
        if run.iter().map(|&(address, _)| self.joined.count(address)).sum::<usize>() > PARTS {
            return None;
        }
        if let [_, _, ..] = run[..] {
            self.joined.merge(&run);
            self.free.retain(|block| !(first..first + sum).contains(&block.address));
            self.free.push(FreeBlock { address: first, bytes: sum });
        }
        let i = self.free.iter().rposition(|block| block.address == first)?;
        Some(self.front(i, bytes).address)
    }

    /// Kept blocks that lie one behind the other and have together the least that is enough: their
    /// addresses and bytes.
    fn neighbours(&self, bytes: usize) -> Option<Vec<(usize, usize)>> {
        let mut all: Vec<_> = self.free.iter().map(|block| (block.address, block.bytes)).collect();
        all.sort_unstable();
        let runs = (0..all.len()).filter_map(|from| {
            let mut sum = 0;
            let behind = all[from..].iter().take(RUN).take_while(|&&(address, more)| {
                let goes_on = sum < bytes && address == all[from].0 + sum;
                sum += if goes_on { more } else { 0 };
                goes_on
            });
            let count = behind.count();
            (sum >= bytes).then_some((sum, count, from))
        });
        let (_, count, from) = runs.min()?;
        Some(all[from..from + count].to_vec())
    }

    /// The first `most` bytes of a kept block, or all of it, which is not kept any more.
    fn front(&mut self, i: usize, most: usize) -> FreeBlock {
        let &FreeBlock { address, bytes } = &self.free[i];
        let taken = bytes.min(most);
        if taken < bytes {
            self.free[i] = FreeBlock { address: address + taken, bytes: bytes - taken };
            self.joined.split(address, taken);
        } else {
            self.free.remove(i);
        }
        self.free_bytes -= taken;
        FreeBlock { address, bytes: taken }
    }

    /// A block at a new address that has the pages of kept ones, those of the nearest length first,
    /// and new ones where they are not enough.
    #[cfg(target_os = "linux")]
    fn join(&mut self, bytes: usize) -> Option<usize> {
        let to = map(bytes);
        if to.is_null() {
            return None;
        }
        let to = FreeBlock { address: to.expose_provenance(), bytes };
        let (mut done, mut parts) = (0, Vec::new());
        while done < bytes {
            let rest = bytes - done;
            let nearest = self.free.iter().enumerate().min_by_key(|(_, b)| b.bytes.abs_diff(rest));
            // Of too many parts, or none, the rest is the new pages that are there.
            let fits = |b: &FreeBlock| parts.len() + self.joined.count(b.address) < PARTS;
            let Some((nearest, _)) = nearest.filter(|(_, block)| fits(block)) else {
                parts.push(rest);
                break;
            };
            let mut from = self.front(nearest, rest);
            for part in self.joined.take(from.address, from.bytes) {
                if !from.hand_over(part, to.address + done) {
                    // The system has no room for more mappings: with less of them it may.
                    from.give_back();
                    to.give_back();
                    return None;
                }
                parts.push(part);
                done += part;
            }
        }
        self.joined.note(to.address, parts);
        Some(to.address)
    }

    #[cfg(not(target_os = "linux"))]
    fn join(&mut self, _: usize) -> Option<usize> {
        None
    }

    fn keep(&mut self, block: FreeBlock) {
        self.live -= block.bytes;
        self.free_bytes += block.bytes;
        self.free.push(block);
        self.shrink();
    }

    /// Gives back what has to go.
    fn shrink(&mut self) {
        let over = self.over();
        self.give_back(over);
    }

    /// Gives back so many of the blocks that were kept longest.
    fn give_back(&mut self, many: usize) {
        for block in self.free.drain(..many) {
            self.free_bytes -= block.bytes;
            self.joined.take(block.address, block.bytes);
            block.give_back();
        }
    }

    /// Bytes that may be in use and kept together.
    fn limit(&self) -> usize {
        self.most + self.most / SLACK + SLACK_BYTES
    }

    /// How many of the blocks that were kept longest have to go, for all to be within the limit.
    fn over(&self) -> usize {
        let limit = self.limit();
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

impl FreeBlock {
    fn give_back(self) {
        // SAFETY: these pages are not in use: they were in the list of free ones, or are new.
        unsafe { libc::munmap(ptr::with_exposed_provenance_mut(self.address), self.bytes) };
    }

    /// Moves its first `part` bytes, which lie within one mapping, to another address; whether the
    /// system did.
    #[cfg(target_os = "linux")]
    fn hand_over(&mut self, part: usize, to: usize) -> bool {
        let [from, to] = [self.address, to].map(ptr::with_exposed_provenance_mut);
        let how = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: these pages are not in use, as in `give_back`, nor those of the block that comes.
        let moved = unsafe { libc::mremap(from, part, part, how, to) } != libc::MAP_FAILED;
        if moved {
            self.address += part;
            self.bytes -= part;
        }
        moved
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

    /// The sums of the lists: bytes in use, kept, and the most that was in use.
    fn counts(blocks: &Blocks) -> (usize, usize, usize) {
        let kept = blocks.lock();
        let sum: usize = kept.free.iter().map(|block| block.bytes).sum();
        assert_eq!(sum, kept.free_bytes, "the sum of what is kept is that of its blocks");
        (kept.live, kept.free_bytes, kept.most)
    }

    /// Small memory may run out while the lists are at work, and then asks for these blocks.
    #[test]
    fn who_is_at_work_on_the_blocks_gives_none_back() {
        let blocks = Blocks::new();
        let held = blocks.lock();
        assert!(!blocks.give_back(), "and does not wait for itself");
        drop(held);
        let memory = blocks.alloc(SMALL + 1, false);
        // SAFETY: it is of this length, and has no other owner.
        unsafe { blocks.free(memory, SMALL + 1) };
        assert!(blocks.give_back());
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

    #[test]
    fn new_blocks_lie_one_behind_the_other_from_a_huge_page_on() {
        let blocks = Blocks::new();
        let size = 256 << 10;
        let of_region = REGION / size;
        let all: Vec<*mut u8> = (0..of_region + 1).map(|_| blocks.alloc(size, false)).collect();
        assert!(all[0].addr().is_multiple_of(HUGE) && all[of_region].addr().is_multiple_of(HUGE));
        assert!(all[..of_region].windows(2).all(|two| two[1].addr() == two[0].addr() + size));
        for memory in all {
            // SAFETY: the block has so many bytes, is new, and is used by this test alone.
            unsafe {
                let bytes = std::slice::from_raw_parts(memory, size);
                assert!(bytes.iter().all(|&byte| byte == 0));
                blocks.free(memory, size);
            }
        }
    }

    /// Random allocations of many lengths: no block's bytes change, and what is kept stays within
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
                // SAFETY: the block has so many bytes and has no other owner.
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

    /// Blocks are whole pages of whatever length, so that no page is of two blocks.
    #[test]
    fn blocks_are_whole_pages() {
        for page in [4 << 10, 16 << 10, 64 << 10] {
            for size in (SMALL + 1..2 * MIB).step_by(4097) {
                let bytes = rounded_to(page, size);
                assert!(bytes >= size && bytes.is_multiple_of(page), "{size} on {page}: {bytes}");
            }
        }
        assert!(page().is_power_of_two() && page() >= GRAINS[0]);
    }

    /// Many small blocks become a few large ones, and those larger ones: lists of their parts stay
    /// short, since one that is a block itself would wait for the lock that is held.
    #[test]
    #[cfg(target_os = "linux")]
    fn lists_of_parts_are_no_blocks() {
        let blocks = Blocks::new();
        // SAFETY: each block is freed once, with its size.
        let free = |memory, size| unsafe { blocks.free(memory, size) };
        let mut large = Vec::new();
        for _ in 0..3 {
            let small: Vec<_> = (0..2000).map(|_| blocks.alloc(36 << 10, false)).collect();
            small.into_iter().for_each(|memory| free(memory, 36 << 10));
            large.push(blocks.alloc(70 * MIB, false));
            assert!((2..=PARTS).contains(&blocks.lock().joined.most()));
        }
        large.into_iter().for_each(|memory| free(memory, 70 * MIB));
        let largest = marked(&blocks, 210, 5);
        assert!(blocks.lock().joined.most() <= PARTS);
        assert_eq!(marks(largest, 210), [5; 210]);
        free(largest, 210 * MIB);
        assert!(blocks.give_back());
    }

    /// A block of so many MiB, all of this mark.
    fn marked(blocks: &Blocks, mib: usize, mark: u8) -> *mut u8 {
        let memory = blocks.alloc(mib * MIB, false);
        // SAFETY: the block has so many bytes, and is used by one test alone.
        unsafe { memory.write_bytes(mark, mib * MIB) };
        memory
    }

    /// The mark of each MiB of a block.
    fn marks(memory: *mut u8, mib: usize) -> Vec<u8> {
        // SAFETY: as in `marked`; what a block held before is what its pages hold.
        let bytes = unsafe { std::slice::from_raw_parts(memory, mib * MIB) };
        bytes.chunks(MIB).map(|of| of.iter().fold(of[0], |a, &b| a.max(b))).collect()
    }

    #[test]
    fn neighbours_become_one_block_where_they_lie() {
        let blocks = Blocks::new();
        let whole = marked(&blocks, 100, 1);
        // SAFETY: each block is freed once, with its size.
        let free = |memory, mib| unsafe { blocks.free(memory, mib * MIB) };
        free(whole, 100);
        // The first has new pages, as there is room for them; the others are cut.
        let (beside, front, middle) =
            (marked(&blocks, 14, 2), marked(&blocks, 30, 3), marked(&blocks, 18, 4));
        assert_eq!((front, middle), (whole, whole.wrapping_add(30 * MIB)));
        assert_eq!(counts(&blocks), (62 * MIB, 52 * MIB, 100 * MIB));
        free(middle, 18);
        free(front, 30);
        let both = blocks.alloc(45 * MIB, false);
        assert_eq!(both, whole, "of all that is kept, these two are the least that is enough");
        assert_eq!(marks(both, 45), [vec![3; 30], vec![4; 15]].concat());
        free(both, 45);
        free(beside, 14);
        assert_eq!(counts(&blocks), (0, 114 * MIB, 100 * MIB));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn pages_from_several_places_become_one_block() {
        let blocks = Blocks::new();
        // SAFETY: each block is freed once, with its size.
        let free = |memory, mib| unsafe { blocks.free(memory, mib * MIB) };
        let whole = marked(&blocks, 100, 9);
        free(whole, 100);
        let beside = marked(&blocks, 14, 8);
        let parts = [40, 8, 40].map(|mib| marked(&blocks, mib, mib as u8));
        free(parts[0], 40);
        free(parts[2], 40);
        // 12 are left behind the third.
        let joined = blocks.alloc(70 * MIB, false);
        let found = marks(joined, 70);
        assert!(found.iter().all(|mark| [40, 9].contains(mark)), "{found:?}");
        assert_eq!(counts(&blocks), (92 * MIB, 22 * MIB, 102 * MIB));
        free(joined, 70);
        // What was joined can be cut, and its parts be moved again, by one mapping at a time.
        let front = marked(&blocks, 45, 7);
        assert_eq!(front, joined);
        let again = blocks.alloc(40 * MIB, false);
        assert_eq!(marks(again, 40).len(), 40);
        assert_eq!(marks(front, 45), [7; 45]);
        assert_eq!(marks(parts[1], 8), [8; 8]);
        for (memory, mib) in [(front, 45), (again, 40), (parts[1], 8), (beside, 14)] {
            free(memory, mib);
        }
        assert!(blocks.give_back());
        assert_eq!(counts(&blocks).1, 0);
        let rest = &blocks.lock().joined;
        assert!(rest.is_empty(), "nothing is noted of blocks that are gone");
    }
}
