//! Sums and maxima in a fixed order.

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

/// Adds every row of `x: [rows, sums.len()]` to `sums`, first row first.
pub fn add_rows(sums: &mut [f32], x: &[f32]) {
    super::simd(
        #[inline(always)]
        || {
            for row in x.chunks_exact(sums.len()) {
                sums.iter_mut().zip(row).for_each(|(s, x)| *s += *x);
            }
        },
    );
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
