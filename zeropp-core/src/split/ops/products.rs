//! Products by tensor operations, and sums of them: the paths of GPUs.

use std::cell::Cell;

use burn::tensor::{DType, Tensor};

#[cfg(feature = "cube")]
use super::on_gpu;
use crate::choice::DeviceKind;
#[cfg(feature = "cube")]
use crate::cube;
use crate::split::{Grads, ParamSlot};

thread_local! {
    static CUBECL: Cell<bool> = const { Cell::new(false) };
}

/// Makes CubeCL compute the products of this thread, also where there is a library. To measure one
/// beside the other.
pub fn force_cubecl(on: bool) {
    CUBECL.set(on);
}

/// The version of the library that makes products on NVIDIA GPUs, or why there is none.
fn library_version() -> Result<String, &'static str> {
    #[cfg(feature = "cuda")]
    {
        crate::blas::version()
    }
    #[cfg(not(feature = "cuda"))]
    {
        Err("this build has no cuda")
    }
}

/// What makes the products of matrices on devices of this kind, in words; where there is a choice.
pub fn made_by(kind: DeviceKind) -> Option<String> {
    if kind != DeviceKind::Cuda {
        return None;
    }
    Some(match library_version() {
        Ok(version) => format!("cuBLASLt {version}"),
        Err(why) => format!("CubeCL, in fp32 of factors in TF32 where a GPU has it, as {why}"),
    })
}

/// Whether products of fp32 on devices of this kind are of factors rounded to TF32, where a GPU has
/// that.
pub fn rounds_to_tf32(kind: DeviceKind) -> bool {
    kind == DeviceKind::Cuda && library_version().is_err()
}

/// Whether a library makes the product of these factors.
#[cfg(feature = "cube")]
fn by_library<const D: usize>(x: &Tensor<D>, y: &Tensor<D>) -> bool {
    let batches = x.dims()[..D - 2] == y.dims()[..D - 2];
    batches && on_gpu(x) && !CUBECL.get() && cube::has_library(&x.device())
}

/// x·y in their type, for `x: [.., i, k]`, `y: [.., k, j]`.
pub fn matmul<const D: usize>(x: Tensor<D>, y: Tensor<D>) -> Tensor<D> {
    #[cfg(feature = "cube")]
    if by_library(&x, &y) {
        let dtype = x.dtype();
        return cube::product(x, y, dtype, true);
    }
    x.matmul(y)
}

/// x·y + bias in their type, for `x: [i, k]`, `y: [k, j]`, `bias: [j]`; a library rounds once.
pub fn affine(x: Tensor<2>, y: Tensor<2>, bias: Tensor<1>) -> Tensor<2> {
    #[cfg(feature = "cube")]
    if by_library(&x, &y) {
        return cube::affine(x, y, bias);
    }
    matmul(x, y) + bias.unsqueeze()
}

/// x·y for `x: [.., i, k]`, `y: [.., k, j]`, with an fp32 result that was not rounded in between.
pub fn matmul_f32<const D: usize>(x: Tensor<D>, y: Tensor<D>) -> Tensor<D> {
    if x.dtype() == DType::F32 {
        return matmul(x, y);
    }
    #[cfg(feature = "cube")]
    if on_gpu(&x) {
        let library = by_library(&x, &y);
        return cube::product(x, y, DType::F32, library);
    }
    x.cast(DType::F32).matmul(y.cast(DType::F32))
}

/// fp32 `sum: [i·j]` with the elements of x·y added, row after row, for `x: [i, k]`, `y: [k, j]`;
/// in place where a library makes the product and nothing else holds `sum`.
pub fn add_product(sum: Tensor<1>, x: Tensor<2>, y: Tensor<2>) -> Tensor<1> {
    #[cfg(feature = "cube")]
    if by_library(&x, &y) {
        return cube::add_product(sum, x, y);
    }
    let n = sum.dims();
    sum + matmul_f32(x, y).reshape(n)
}

/// Adds x·y to the gradient of the parameter of `slot`.
pub(super) fn add_gradient(grads: &mut Grads, slot: ParamSlot, x: Tensor<2>, y: Tensor<2>) {
    #[cfg(feature = "cube")]
    if by_library(&x, &y) {
        return grads.change(slot, |sum| match sum {
            Some(sum) => cube::add_product(sum, x, y),
            None => matmul_f32(x, y).flatten(0, 1),
        });
    }
    grads.add(slot, matmul_f32(x, y));
}

/// `sum: [n, s, d]` with `part: [n, r, d]` added to its first r rows, in place where nothing else
/// holds `sum`.
pub(super) fn add_first_rows(sum: Tensor<3>, part: Tensor<3>) -> Tensor<3> {
    #[cfg(feature = "cube")]
    if on_gpu(&sum) {
        return cube::add_first_rows(sum, part);
    }
    let [n, rows, d] = part.dims();
    let first = sum.clone().narrow(1, 0, rows) + part;
    sum.slice_assign([0..n, 0..rows, 0..d], first)
}
