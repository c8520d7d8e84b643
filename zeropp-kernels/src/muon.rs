//! Muon's update of a matrix: a running mean of its gradients, with singular values near one.
//!
//! Keller Jordan's rule (<https://kellerjordan.github.io/posts/muon/>) as `torch.optim.Muon` has
//! it, in fp32 throughout.

use super::gemm::{MatMut, MatRef, StoreMode, gemm, product};
use super::{GRAIN, each_part, simd, threads, update, update_two};

/// Steps of the iteration.
pub const STEPS: usize = 5;
/// Coefficients of its polynomial ax + bx³ + cx⁵.
pub const COEFFICIENTS: [f32; 3] = [3.4445, -4.775, 2.0315];
/// Least norm that is divided by.
pub const EPS: f32 = 1e-7;
/// Elements whose squares are summed in a row; a constant, so that no thread shows in a sum.
const BLOCK: usize = 128;

/// Moves the mean gradient `m` towards the gradient `g` and writes what is to be made orthogonal
/// into `out`: the mean, or with `nesterov` what it would be if the gradient came again.
///
/// `momentum` is what stays of the mean; `gradient` a factor on the gradient (clipping).
///
/// # Panics
/// Panics if the slices differ in length.
pub fn direction(
    out: &mut [f32],
    m: &mut [f32],
    g: &[f32],
    gradient: f32,
    momentum: f64,
    nesterov: bool,
) {
    let towards = (1.0 - momentum) as f32;
    // As PyTorch's lerp, from the nearer end.
    let (stay, near_mean) = (momentum as f32, momentum >= 0.5);
    update_two(
        out,
        m,
        g,
        #[inline(always)]
        |out, m, g| {
            let g = g * gradient;
            *m += (g - *m) * towards;
            *out = match (nesterov, near_mean) {
                (false, _) => *m,
                (true, true) => *m - (*m - g) * towards,
                (true, false) => g + (*m - g) * stay,
            };
        },
    );
}

/// Elements of memory that [`orthogonal`] takes, its result included.
pub fn orthogonal_elements([rows, cols]: [usize; 2]) -> usize {
    let (short, long) = (rows.min(cols), rows.max(cols));
    2 * short * (long + short)
}

/// Floating-point operations of [`orthogonal`]: in each step the matrix's square over its shorter
/// side, that one's square, and a product with the matrix.
pub fn orthogonal_flops([rows, cols]: [usize; 2]) -> u64 {
    let (short, long) = (rows.min(cols) as u64, rows.max(cols) as u64);
    2 * STEPS as u64 * short * short * (2 * long + short)
}

/// The matrix `x` of `rows × cols`, row-major, with singular values near one: five steps of the
/// Newton–Schulz iteration. The bits depend on nothing but the elements.
///
/// # Panics
/// Panics if `x` has another number of elements.
pub fn orthogonal(x: &[f32], [rows, cols]: [usize; 2]) -> Vec<f32> {
    assert_eq!(x.len(), rows * cols, "elements of the matrix");
    let (short, long) = (rows.min(cols), rows.max(cols));
    let mut x = if rows > cols { transposed(x, rows, cols) } else { x.to_vec() };
    let norm = norm(&x).max(EPS);
    let piece = threads::piece(x.len(), 64, GRAIN);
    threads::each(x.chunks_mut(piece), |x| x.iter_mut().for_each(|x| *x /= norm));
    let [a, b, c] = COEFFICIENTS;
    for _ in 0..STEPS {
        let matrix = MatRef::new(&x, short, long);
        let gram = product(1.0, matrix, matrix.t());
        let mut polynomial = scaled(&gram, b);
        let of_gram = MatRef::new(&gram, short, short);
        gemm(MatMut::new(&mut polynomial, short, short), StoreMode::Add, c, of_gram, of_gram);
        drop(gram);
        let mut next = scaled(&x, a);
        let factor = MatRef::new(&polynomial, short, short);
        gemm(MatMut::new(&mut next, short, long), StoreMode::Add, 1.0, factor, matrix);
        x = next;
    }
    if rows > cols { transposed(&x, cols, rows) } else { x }
}

/// Makes a step of `step` along `direction`, after parameters are multiplied by `keep`.
///
/// # Panics
/// Panics if the slices differ in length.
pub fn apply(p: &mut [f32], direction: &[f32], keep: f32, step: f32) {
    each_part(p, [direction], |p, [direction]| {
        simd(
            #[inline(always)]
            || update(p, direction, |p, d| p * keep - step * d),
        );
    });
}

fn scaled(x: &[f32], by: f32) -> Vec<f32> {
    super::collect(x.len(), |range, out| out.extend(x[range].iter().map(|x| x * by)))
}

fn transposed(x: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    let piece = threads::piece(cols, 1, GRAIN.div_ceil(rows.max(1)));
    threads::each(out.chunks_mut(piece * rows).enumerate(), |(i, out)| {
        for (j, row) in out.chunks_mut(rows).enumerate() {
            let col = i * piece + j;
            row.iter_mut().zip(x[col..].iter().step_by(cols)).for_each(|(o, x)| *o = *x);
        }
    });
    out
}

/// The root of the sum of squares, added in f64 in the order of the elements.
fn norm(x: &[f32]) -> f32 {
    let block = |block: &[f32]| block.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
    x.chunks(BLOCK).map(block).sum::<f64>().sqrt() as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(n: usize) -> Vec<f32> {
        let hash = |i: usize| (i as u32).wrapping_mul(2_654_435_761).rotate_left(13);
        (0..n).map(|i| hash(i) as f32 / u32::MAX as f32 - 0.5).collect()
    }

    /// Its rows, or columns where there are fewer, are nearly orthogonal and of length near one.
    #[test]
    fn singular_values_come_near_one() {
        for shape in [[8, 8], [16, 48], [48, 16], [1, 7]] {
            let [rows, cols] = shape;
            let x = orthogonal(&matrix(rows * cols), shape);
            let m = MatRef::new(&x, rows, cols);
            let short = rows.min(cols);
            let gram = if rows <= cols { product(1.0, m, m.t()) } else { product(1.0, m.t(), m) };
            // All eigenvalues of the Gram matrix lie within 0.45 to 1.5: their mean, too.
            let trace: f32 = (0..short).map(|i| gram[i * short + i]).sum();
            assert!((0.45..1.5).contains(&(trace / short as f32)), "{shape:?}: {trace}");
        }
    }

    #[test]
    fn a_transposed_matrix_gives_the_transposed_result_to_the_bit() {
        let x = matrix(12 * 20);
        let there = orthogonal(&x, [12, 20]);
        let back = transposed(&orthogonal(&transposed(&x, 12, 20), [20, 12]), 20, 12);
        assert_eq!(there, back);
    }

    #[test]
    fn no_gradient_makes_no_step() {
        assert_eq!(orthogonal(&[0.0; 12], [3, 4]), [0.0; 12]);
    }
}
