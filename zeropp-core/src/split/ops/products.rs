//! Products by tensor operations, and sums of them: the paths of GPUs.

use std::cell::Cell;

use burn::tensor::{DType, Tensor};

use super::columns::add_column_sums;
#[cfg(feature = "cube")]
use super::on_gpu;
use crate::choice::DeviceKind;
#[cfg(feature = "cube")]
use crate::cube::{self, Maker, PlaceOfProduct};
#[cfg(feature = "cube")]
use crate::split::GradientPlace;
use crate::split::{Grads, ParamSlot};

thread_local! {
    static CUBECL: Cell<bool> = const { Cell::new(false) };
    static TF32: Cell<bool> = const { Cell::new(false) };
}

/// Makes CubeCL compute the products of this thread, also where there is a library. To measure one
/// beside the other.
pub fn force_cubecl(on: bool) {
    CUBECL.set(on);
}

/// Whether products of fp32 that this thread asks for on NVIDIA GPUs are of factors rounded to TF32
/// from now on.
pub fn round_to_tf32(on: bool) {
    TF32.set(on);
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
        Err(why) => format!(
            "CubeCL, as {why}; it is slower than plans expect, and fp32's factors are rounded to \
             TF32 where a GPU has that"
        ),
    })
}

/// Whether products of fp32 that this thread asks for on devices of this kind are of factors
/// rounded to TF32, where a GPU has that: where it is so wanted, and where no library makes them.
pub fn rounds_to_tf32(kind: DeviceKind) -> bool {
    kind == DeviceKind::Cuda && (TF32.get() || library_version().is_err())
}

/// How the product of these factors is made.
#[cfg(feature = "cube")]
fn maker<const D: usize>(x: &Tensor<D>, y: &Tensor<D>) -> Maker {
    match by_library(x, y) {
        true => Maker::Library { tf32: TF32.get() },
        false => Maker::CubeCl,
    }
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
        let by = maker(&x, &y);
        return cube::product(x, y, dtype, by);
    }
    x.matmul(y)
}

/// x·y + bias in their type, for `x: [i, k]`, `y: [k, j]`, `bias: [j]`; a library rounds once.
pub fn affine(x: Tensor<2>, y: Tensor<2>, bias: Tensor<1>) -> Tensor<2> {
    #[cfg(feature = "cube")]
    if by_library(&x, &y) {
        return cube::affine(x, y, bias, TF32.get());
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
        let by = maker(&x, &y);
        return cube::product(x, y, DType::F32, by);
    }
    x.cast(DType::F32).matmul(y.cast(DType::F32))
}

/// Where a product goes.
#[cfg(feature = "cube")]
fn place(start: usize, add: bool) -> PlaceOfProduct {
    PlaceOfProduct { start, add, tf32: TF32.get(), sums: None }
}

/// The columns of `x: [n, h]` from `start` on, `[n, columns]`: a factor of a product.
pub(super) fn columns_of(x: &Tensor<2>, start: usize, columns: usize) -> Tensor<2> {
    #[cfg(feature = "cube")]
    if on_gpu(x) {
        return cube::view_columns(x.clone(), start..start + columns);
    }
    x.clone().narrow(1, start, columns)
}

/// x·y of all `ys` side by side, `[i, Σ j]` for `x: [i, k]`, `y: [k, j]`. A library writes each to
/// its columns; else the factors are put side by side first.
pub(super) fn products_side_by_side(x: Tensor<2>, ys: Vec<Tensor<2>>) -> Tensor<2> {
    #[cfg(feature = "cube")]
    if by_library(&x, &ys[0]) {
        let width = ys.iter().map(|y| y.dims()[1]).sum();
        let mut out = Tensor::empty([x.dims()[0], width], (&x.device(), x.dtype()));
        let mut start = 0;
        for y in ys {
            let columns = y.dims()[1];
            out = cube::product_to_columns(out, x.clone(), y, place(start, false));
            start += columns;
        }
        return out;
    }
    matmul(x, Tensor::cat(ys, 1))
}

/// Σ x·yᵀ, `[i, k]`, for the columns of `xs: [i, Σ j]` side by side and `ys: [k, j]`. A library
/// adds one product after the other, each sum in their type; else the factors are put side by side
/// first.
pub(super) fn sum_of_products(xs: Tensor<2>, ys: Vec<Tensor<2>>) -> Tensor<2> {
    #[cfg(feature = "cube")]
    if by_library(&xs, &ys[0]) {
        let (mut sum, mut start) = (None, 0);
        for y in ys {
            let columns = y.dims()[1];
            let (x, y) = (columns_of(&xs, start, columns), y.transpose());
            sum = Some(match sum {
                Some(sum) => cube::product_to_columns(sum, x, y, place(0, true)),
                None => matmul(x, y),
            });
            start += columns;
        }
        return sum.expect("a factor");
    }
    matmul(xs, Tensor::cat(ys, 1).transpose())
}

/// fp32 `sum: [i·j]` with the elements of x·y added, row after row, for `x: [i, k]`, `y: [k, j]`;
/// in place where a library makes the product and nothing else holds `sum`.
pub fn add_product(sum: Tensor<1>, x: Tensor<2>, y: Tensor<2>) -> Tensor<1> {
    #[cfg(feature = "cube")]
    if by_library(&x, &y) {
        return cube::add_product(sum, x, y, place(0, true));
    }
    let n = sum.dims();
    sum + matmul_f32(x, y).reshape(n)
}

/// Adds x·y to the gradient of the parameter of `slot`, and the sums of y's columns to that of
/// `bias`, a parameter of the same layer.
pub(super) fn add_gradient(
    grads: &mut Grads,
    slot: ParamSlot,
    bias: Option<ParamSlot>,
    x: Tensor<2>,
    y: Tensor<2>,
) {
    assert!(bias.is_none_or(|bias| bias.layer == slot.layer), "{bias:?} beside {slot:?}");
    #[cfg(feature = "cube")]
    if by_library(&x, &y) {
        let sums = bias.map(|bias| grads.begin(bias));
        return grads.change(slot, |GradientPlace { flat, part, begun }| {
            assert_eq!(part.len(), x.dims()[0] * y.dims()[1], "the gradient of {slot:?}");
            let place = PlaceOfProduct { sums, ..place(part.start, begun) };
            cube::add_product(flat, x, y, place)
        });
    }
    if let Some(bias) = bias {
        add_column_sums(grads, bias, y.clone());
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
