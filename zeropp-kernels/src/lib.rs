//! CPU kernels on slices of `f32`, and of bf16 in [`mod@bf16`], one thread each: a rank is one
//! thread, so nothing here spawns.
//!
//! Every sum has one order, whatever the thread or the alignment: reductions run over a fixed
//! number of lanes, and only matrix products use a fused multiply-add. The other loops are plain
//! Rust that the compiler vectorises; `simd` lets it do so for the CPU at hand.

pub mod activation;
pub mod adamw;
pub mod attention;
pub mod bf16;
pub mod gemm;
pub mod head_norm;
pub mod loss;
pub mod math;
pub mod norm;
pub mod reduce;
pub mod rope;
mod tile;

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

/// The vector of `f(x)` for every element of `x`.
#[inline(always)]
pub(crate) fn map(x: &[f32], f: impl Fn(f32) -> f32) -> Vec<f32> {
    let mut out = Vec::with_capacity(x.len());
    let mut buffer = [0.0; CHUNK];
    for part in x.chunks(CHUNK) {
        let buffer = &mut buffer[..part.len()];
        buffer.iter_mut().zip(part).for_each(|(o, x)| *o = f(*x));
        out.extend_from_slice(buffer);
    }
    out
}

/// The vector of `f(x, y)` for every pair of elements of two slices of one length.
#[inline(always)]
pub(crate) fn map2(x: &[f32], y: &[f32], f: impl Fn(f32, f32) -> f32) -> Vec<f32> {
    assert_eq!(x.len(), y.len());
    let mut out = Vec::with_capacity(x.len());
    let mut buffer = [0.0; CHUNK];
    for (x, y) in x.chunks(CHUNK).zip(y.chunks(CHUNK)) {
        let buffer = &mut buffer[..x.len()];
        buffer.iter_mut().zip(x).zip(y).for_each(|((o, x), y)| *o = f(*x, *y));
        out.extend_from_slice(buffer);
    }
    out
}

/// Replaces every element `x[i]` by `f(x[i], y[i])`.
#[inline(always)]
pub(crate) fn update(x: &mut [f32], y: &[f32], f: impl Fn(f32, f32) -> f32) {
    assert_eq!(x.len(), y.len());
    x.iter_mut().zip(y).for_each(|(x, y)| *x = f(*x, *y));
}
