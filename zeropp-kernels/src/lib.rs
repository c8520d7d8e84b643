//! CPU kernels on slices of `f32`, and of bf16 in [`mod@bf16`]. They share their work among the
//! [`threads`] that the calling thread has installed, and are alone where it has none.
//!
//! Every sum has one order, whatever the threads or the alignment: reductions run over a fixed
//! number of lanes, and only matrix products use a fused multiply-add. The other loops are plain
//! Rust that the compiler vectorises; `simd` lets it do so for the CPU at hand.

pub mod activation;
pub mod adamw;
pub mod attention;
pub mod balance;
pub mod bf16;
pub mod dropout;
mod elementwise;
pub mod experts;
pub mod gate;
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
mod parts;
pub mod reduce;
pub mod rope;
pub mod routing;
pub mod sgd;
pub mod threads;
mod tile;
pub mod tokens;

pub use elementwise::{add, lerp};
pub(crate) use elementwise::{map, map2, update, update_two};
pub use number::Number;
pub(crate) use parts::{GRAIN, collect, each_part, simd};
pub use parts::{cpu_path, zeros};
