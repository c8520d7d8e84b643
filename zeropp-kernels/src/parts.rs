//! Work on slices in parts, one for each thread, compiled for the CPU at hand.

use std::ops::Range;

use crate::threads::{self, Fresh, FreshPart};

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
