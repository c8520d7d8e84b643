//! CPU kernels on slices of `f32`, and of bf16 in [`mod@bf16`]. They share their work among the
//! [`threads`] that the calling thread has installed, and are alone where it has none.
//!
//! Every sum has one order, whatever the threads or the alignment: reductions run over a fixed
//! number of lanes, and only matrix products use a fused multiply-add. The other loops are plain
//! Rust that the compiler vectorises; `simd` lets it do so for the CPU at hand.

pub mod activation;
pub mod adamw;
pub mod attention;
pub mod bf16;
pub mod dropout;
pub mod experts;
pub mod gemm;
pub mod head;
pub mod head_norm;
pub mod lion;
pub mod loss;
mod mat_mut;
pub mod math;
pub mod muon;
pub mod norm;
mod number;
pub mod reduce;
pub mod rope;
pub mod routing;
pub mod sgd;
pub mod threads;
mod tile;

use std::ops::Range;

pub use self::number::Number;
use self::threads::{Fresh, FreshPart};

/// Runs `f` compiled for the widest vector instructions of this CPU.
///
/// Everything `f` calls must be inlined into it to profit.
#[inline]
pub(crate) fn simd<R>(f: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(f)
}

/// The name of the vector instructions that these kernels use on this CPU.
pub fn cpu_path() -> &'static str {
    let path = format!("{:?}", pulp::Arch::new());
    match path.split(['(', ' ']).next() {
        Some("V4") => "AVX-512",
        Some("V3") => "AVX2",
        Some("Neon" | "NeonFcma") => "NEON",
        _ => "scalar",
    }
}

/// Elements processed at a time where results are collected into a fresh vector: they stay in the
/// first-level cache between being computed and being appended.
const CHUNK: usize = 1024;

/// Elements of a cheap loop that are worth a thread.
pub(crate) const GRAIN: usize = 1 << 14;

/// Calls `f` with parts of `y` and as many elements of each of `xs`, all of one length.
pub(crate) fn each_part<T: Send, U: Sync, const N: usize>(
    y: &mut [T],
    xs: [&[U]; N],
    f: impl Fn(&mut [T], [&[U]; N]) + Sync,
) {
    assert!(xs.iter().all(|x| x.len() == y.len()), "slices of one length");
    let piece = threads::piece(y.len(), 64, GRAIN);
    threads::each(y.chunks_mut(piece).enumerate(), |(i, y)| {
        let from = i * piece;
        let xs = xs.map(|x| &x[from..from + y.len()]);
        f(y, xs);
    });
}

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

/// A vector of `len` elements of which `f` writes parts, each from its first element on.
pub(crate) fn collect<T: Copy + Send>(
    len: usize,
    f: impl Fn(Range<usize>, &mut FreshPart<'_, T>) + Sync,
) -> Vec<T> {
    let mut out = Fresh::new(len);
    let piece = threads::piece(len, 64, GRAIN);
    threads::each(out.parts(piece).enumerate(), |(i, mut part)| {
        f(i * piece..i * piece + part.len(), &mut part);
    });
    out.done()
}

/// Zeros, written by all threads.
pub fn zeros(len: usize) -> Vec<f32> {
    collect(len, |_, out| out.extend(std::iter::repeat_n(0.0, out.len())))
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
