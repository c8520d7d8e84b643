//! bf16 on the CPU: matrix products with bf16 factors and fp32 sums, whose bits are the same on
//! every path and so on every CPU.
//!
//! Five paths, one order ([`Isa`]). K is taken in blocks of 32, padded with zeros. In a block each
//! output has two chains of 16 fused multiply-adds from zero, one over even and one over odd k;
//! then `c += even + odd`. That is what `tdpbf16ps` does; the others imitate it. Denormal numbers
//! are zeros, going in and coming out, whatever the thread's floating-point state; a NaN is a NaN.

#[cfg(target_arch = "x86_64")]
mod amx;
pub mod attention;
#[cfg(target_arch = "x86_64")]
mod avx;
pub mod convert;
#[cfg(target_arch = "x86_64")]
mod dots;
mod driver;
mod gemm;
mod isa;
mod left;
mod matrix;
mod packed;
pub mod rows;
mod scalar;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod transpose;

pub use gemm::{add_by_blocks, add_product, product, product_into, product_set};
pub(crate) use gemm::{add_products, set_sum, write_products};
pub use isa::{Isa, Unavailable, available, force, in_use, requested};
pub use matrix::Mat;
pub use packed::{Packed, Right};
