//! Loops over the elements of slices of one length.

use crate::number::Number;
use crate::parts::{GRAIN, each_part, simd};
use crate::threads::{self, FreshPart};

/// Elements processed at a time where results are collected into a fresh vector: they stay in the
/// first-level cache between being computed and being appended.
const CHUNK: usize = 1024;

/// Calls `f` with every element of `a` and of `b`, to be changed, and of `c`: of parameters, what
/// is kept of them and their gradient, say.
///
/// # Panics
/// Panics if the slices differ in length.
pub(crate) fn update_two(
    a: &mut [f32],
    b: &mut [f32],
    c: &[f32],
    f: impl Fn(&mut f32, &mut f32, f32) + Sync,
) {
    let n = a.len();
    assert_eq!((b.len(), c.len()), (n, n), "slices of one length");
    let piece = threads::piece(n, 64, GRAIN);
    let changed = a.chunks_mut(piece).zip(b.chunks_mut(piece));
    threads::each(changed.zip(c.chunks(piece)), |((a, b), c)| {
        simd(
            #[inline(always)]
            || a.iter_mut().zip(b).zip(c).for_each(|((a, b), c)| f(a, b, *c)),
        );
    });
}

/// Adds `more` to `sum`, element by element.
///
/// # Panics
/// Panics if the slices differ in length.
pub fn add(sum: &mut [f32], more: &[f32]) {
    each_part(sum, [more], |sum, [more]| {
        simd(
            #[inline(always)]
            || update(sum, more, |sum, more| sum + more),
        );
    });
}

/// Moves `mean` towards `x` by the share `towards` of what is between them, element by element.
///
/// # Panics
/// Panics if the slices differ in length.
pub fn lerp(mean: &mut [f32], x: &[f32], towards: f32) {
    each_part(mean, [x], |mean, [x]| {
        simd(
            #[inline(always)]
            || update(mean, x, |mean, x| mean + (x - mean) * towards),
        );
    });
}

/// Writes `f(x)` for every element of `x`.
#[inline(always)]
pub(crate) fn map<E: Number>(out: &mut FreshPart<'_, E>, x: &[E], f: impl Fn(f32) -> f32) {
    let mut buffer = [E::ZERO; CHUNK];
    for part in x.chunks(CHUNK) {
        let buffer = &mut buffer[..part.len()];
        buffer.iter_mut().zip(part).for_each(|(o, x)| *o = E::down(f(x.up())));
        out.extend_from_slice(buffer);
    }
}

/// Writes `f(x, y)` for every pair of elements of two slices of one length.
#[inline(always)]
pub(crate) fn map2<E: Number>(
    out: &mut FreshPart<'_, E>,
    x: &[E],
    y: &[E],
    f: impl Fn(f32, f32) -> f32,
) {
    assert_eq!(x.len(), y.len());
    let mut buffer = [E::ZERO; CHUNK];
    for (x, y) in x.chunks(CHUNK).zip(y.chunks(CHUNK)) {
        let buffer = &mut buffer[..x.len()];
        let pairs = x.iter().zip(y);
        buffer.iter_mut().zip(pairs).for_each(|(o, (x, y))| *o = E::down(f(x.up(), y.up())));
        out.extend_from_slice(buffer);
    }
}

/// Replaces every element `x[i]` by `f(x[i], y[i])`.
#[inline(always)]
pub(crate) fn update<E: Number>(x: &mut [E], y: &[E], f: impl Fn(f32, f32) -> f32) {
    assert_eq!(x.len(), y.len());
    x.iter_mut().zip(y).for_each(|(x, y)| *x = E::down(f(x.up(), y.up())));
}
