//! Sums and maxima in a fixed order.

use super::{GRAIN, threads, tokens};

/// Partial sums kept in parallel; four 16-lane registers hide the latency of addition.
const LANES: usize = 64;

/// Folds partial results, a power of two of them, in a fixed tree.
#[inline(always)]
pub(crate) fn fold<const N: usize>(mut lanes: [f32; N], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut half = N / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = f(lanes[i], lanes[i + half]);
        }
        half /= 2;
    }
    lanes[0]
}

/// Sum of `f(x)` over `x`.
#[inline(always)]
pub fn sum(x: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let mut chunks = x.chunks_exact(LANES);
    for chunk in &mut chunks {
        for i in 0..LANES {
            lanes[i] += f(chunk[i]);
        }
    }
    for (lane, x) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane += f(*x);
    }
    fold(lanes, |a, b| a + b)
}

/// Sum of `f(x, y)` over pairs of two slices of one length.
#[inline(always)]
pub(crate) fn sum2(x: &[f32], y: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
    assert_eq!(x.len(), y.len());
    let mut lanes = [0.0; LANES];
    let (mut xs, mut ys) = (x.chunks_exact(LANES), y.chunks_exact(LANES));
    for (x, y) in (&mut xs).zip(&mut ys) {
        for i in 0..LANES {
            lanes[i] += f(x[i], y[i]);
        }
    }
    for ((lane, x), y) in lanes.iter_mut().zip(xs.remainder()).zip(ys.remainder()) {
        *lane += f(*x, *y);
    }
    fold(lanes, |a, b| a + b)
}

/// Largest element, −∞ of none. NaNs are skipped; they show up in the sums that follow.
#[inline(always)]
pub fn max(x: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let mut chunks = x.chunks_exact(LANES);
    for chunk in &mut chunks {
        for i in 0..LANES {
            lanes[i] = larger(lanes[i], chunk[i]);
        }
    }
    for (lane, x) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane = larger(*lane, *x);
    }
    fold(lanes, larger)
}

/// Adds every row of `x: [rows, sums.len()]` to `sums`, as [`add_columns`] does.
pub fn add_rows(sums: &mut [f32], x: &[f32]) {
    let width = sums.len();
    add_columns(sums, x, width, 0);
}

/// Adds the columns from `column` on of every row of `x: [rows, width]` to `sums`: from the last
/// block of the grid of tokens to the first, and in each its first row first.
pub fn add_columns(sums: &mut [f32], x: &[f32], width: usize, column: usize) {
    columns_apart(sums, x.len() / width.max(1), |from, sums| {
        let from = column + from;
        super::simd(
            #[inline(always)]
            || {
                for row in rows_by_block(x, width.max(1)) {
                    let row = &row[from..from + sums.len()];
                    sums.iter_mut().zip(row).for_each(|(s, x)| *s += *x);
                }
            },
        );
    });
}

/// The rows of `x: [rows, width]`, from the last block of the grid to the first, and in each its
/// first row first.
#[inline(always)]
pub(crate) fn rows_by_block<T>(x: &[T], width: usize) -> impl Iterator<Item = &[T]> {
    let blocks = tokens::blocks(x.len() / width).rev();
    blocks.flat_map(
        #[inline(always)]
        move |rows| x[rows.start * width..rows.end * width].chunks_exact(width),
    )
}

/// Calls `f` with parts of `sums` and their first columns, for sums over so many rows.
pub(crate) fn columns_apart(sums: &mut [f32], rows: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    let piece = threads::piece(sums.len(), 64, GRAIN.div_ceil(rows.max(1)));
    threads::each(sums.chunks_mut(piece).enumerate(), |(i, sums)| f(i * piece, sums));
}

/// Rows of a block, of which the grid of tokens has a whole number: sums over rows that are made
/// beside other results are those of its rows first, and then of the blocks, from the last to the
/// first, so that threads share the blocks and no bit depends on who had which.
pub(crate) const BLOCK: usize = 32;
const _: () = assert!(tokens::GRID.is_multiple_of(BLOCK));

/// Adds sums of columns over blocks of rows to `sums`, the last block first. `f` adds those of one
/// block to zeros. There is an item for each block, and `elements` in all of them.
pub(crate) fn sum_blocks<T: Send>(
    sums: &mut [f32],
    items: impl ExactSizeIterator<Item = T> + Send,
    elements: usize,
    f: impl Fn(T, &mut [f32]) + Sync,
) {
    let width = sums.len();
    let mut of_blocks = vec![0.0; items.len() * width];
    let items = items.zip(of_blocks.chunks_mut(width.max(1)));
    if elements < 2 * GRAIN {
        items.for_each(|(item, sums)| f(item, sums));
    } else {
        threads::each(items, |(item, sums)| f(item, sums));
    }
    for block in of_blocks.chunks_exact(width.max(1)).rev() {
        sums.iter_mut().zip(block).for_each(|(sum, x)| *sum += *x);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_cover_every_length() {
        for n in 0..200_u16 {
            let x: Vec<f32> = (0..n).map(f32::from).collect();
            let want = f32::from(n) * (f32::from(n) - 1.0) / 2.0;
            assert_eq!(sum(&x, |x| x), want);
            assert_eq!(sum2(&x, &x, |x, y| x + y), 2.0 * want);
            assert_eq!(max(&x), if n == 0 { f32::NEG_INFINITY } else { f32::from(n) - 1.0 });
        }
        let mut sums = vec![1.0, 2.0];
        add_rows(&mut sums, &[1.0, 10.0, 2.0, 20.0]);
        assert_eq!(sums, [4.0, 32.0]);
    }
}
