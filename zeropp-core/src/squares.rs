//! Sums of squares of tensors on devices.

use burn::tensor::{DType, Tensor};

/// The sums of the squares of `x: [n]` over blocks of `block` elements, and over those that are
/// left: `[⌈n / block⌉]` in fp32. On a GPU one kernel, which reads x once.
///
/// # Panics
/// Panics if n or `block` is 0.
pub fn block_squares(x: Tensor<1>, block: usize) -> Tensor<1> {
    let n = x.dims()[0];
    assert!(n > 0 && block > 0, "{n} elements in blocks of {block}");
    #[cfg(feature = "cube")]
    if crate::cube::is_on(&x) {
        return crate::cube::block_squares(x, block);
    }
    let whole = n / block * block;
    let of = |first: usize, len: usize, block: usize| {
        let rows = x.clone().narrow(0, first, len).cast(DType::F32).reshape([len / block, block]);
        rows.square().sum_dim(1).reshape([len / block])
    };
    let parts = [(0, whole, block), (whole, n - whole, n - whole)];
    let sums = parts.into_iter().filter(|(_, len, _)| *len > 0);
    Tensor::cat(sums.map(|(first, len, block)| of(first, len, block)).collect(), 0)
}
