//! Pages of a host's pinned memory, in which blocks lie that are out of a GPU's memory.

/// Least and most bytes of a page: what is out is a list of these, so that no room is lost between
/// blocks of different lengths. A copy of the most takes longer than to ask for it.
const PAGE_MIN: u64 = 4 << 10;
const PAGE_MAX: u64 = 1 << 20;
/// Pages of all that is out, about.
const PAGES: u64 = 4096;

/// Bytes of a page where so many are out at most.
pub(super) fn page_bytes(out: u64) -> u64 {
    (out / PAGES).next_power_of_two().clamp(PAGE_MIN, PAGE_MAX)
}

/// Bytes that a rank pins for `out` bytes in `parcels` that are out at once: of each the last page
/// is not full.
pub fn pinned_bytes(out: u64, parcels: usize) -> u64 {
    (out + parcels as u64 * page_bytes(out)).next_multiple_of(page_bytes(out))
}

/// Bytes that follow each other in pinned memory.
#[cfg(any(feature = "cuda", test))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) address: usize,
    pub(super) bytes: u64,
}

/// Address in one, address in the other, and bytes of each piece in which blocks lie one behind the
/// other in `runs`.
#[cfg(any(feature = "cuda", test))]
pub(super) fn pieces(
    blocks: impl Iterator<Item = Run>,
    runs: &[Run],
) -> Vec<(usize, usize, usize)> {
    let mut pieces = Vec::new();
    let (mut runs, mut run) = (runs.iter(), Run { address: 0, bytes: 0 });
    for mut block in blocks {
        while block.bytes > 0 {
            if run.bytes == 0 {
                run = *runs.next().expect("a parcel has pages for all of its bytes");
                continue;
            }
            let bytes = block.bytes.min(run.bytes);
            pieces.push((block.address, run.address, bytes as usize));
            for side in [&mut block, &mut run] {
                *side = Run { address: side.address + bytes as usize, bytes: side.bytes - bytes };
            }
        }
    }
    pieces
}

/// Where the first `bytes` of these pages are: those of neighbours follow each other.
#[cfg(any(feature = "cuda", test))]
pub(super) fn runs(pages: &[usize], size: u64, bytes: u64) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    let mut left = bytes;
    for page in pages {
        let here = left.min(size);
        left -= here;
        match runs.last_mut().filter(|run| run.address + run.bytes as usize == *page) {
            Some(run) => run.bytes += here,
            None => runs.push(Run { address: *page, bytes: here }),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_pages_are_one_run_and_blocks_lie_behind_each_other() {
        let run = |address, bytes| Run { address, bytes };
        let all = runs(&[100, 110, 130, 140], 10, 37);
        assert_eq!(all, [run(100, 20), run(130, 17)]);
        let blocks = [run(1000, 15), run(2000, 0), run(3000, 22)];
        let expected = [(1000, 100, 15), (3000, 115, 5), (3005, 130, 17)];
        assert_eq!(pieces(blocks.into_iter(), &all), expected);
        assert_eq!(runs(&[], 10, 0), []);
    }

    #[test]
    fn parcels_of_any_lengths_have_room() {
        for out in [0, 1, 4096, 5_000_000, 3 << 30, 40 << 30] {
            let page = page_bytes(out);
            assert!(page.is_power_of_two() && (PAGE_MIN..=PAGE_MAX).contains(&page));
            let third = (out / 3).div_ceil(page) + 2 * (out - out / 3).div_ceil(2 * page);
            assert!(third * page <= pinned_bytes(out, 3), "{out}");
            assert!(pinned_bytes(out, 3) <= out + 4 * page);
        }
    }
}
