//! Products of matrices: cuBLASLt's on NVIDIA GPUs where it is found, else CubeCL's.

use burn::backend::fusion::custom::TensorSpec;
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, backend_extension};
use burn::tensor::{DType, Device, Shape, Slice, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::matmul::{MatmulStrategy, matmul};
use burn_cubecl::kernel::{into_contiguous, slice};
use burn_cubecl::ops::numeric::add;
use burn_cubecl::tensor::CubeTensor;

use super::columns;
use super::part::{self, to_change};
#[cfg(feature = "cuda")]
use super::part::{columns_of, part_of};
#[cfg(feature = "cuda")]
use super::rows::empty;
#[cfg(feature = "cuda")]
use crate::blas;

/// What makes a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Maker {
    CubeCl,
    /// cuBLASLt, of fp32 factors rounded to TF32 if so wanted.
    Library {
        tf32: bool,
    },
}

/// Where a product goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlaceOfProduct {
    /// The first column, or the first element of a flat buffer.
    pub(crate) start: usize,
    /// Whether it is added to what is there.
    pub(crate) add: bool,
    /// As in [`Maker::Library`].
    pub(crate) tf32: bool,
    /// Of a flat buffer: where the sums of y's columns go, too, and whether there are some.
    pub(crate) sums: Option<(usize, bool)>,
}

#[backend_extension(Cube, Fusion)]
trait Products: Backend {
    #[fusion(meta = product_of)]
    fn product(
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        dtype: DType,
        by: Maker,
    ) -> FloatTensor<Self>;

    #[fusion(meta = affine_of)]
    fn affine(
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        tf32: bool,
    ) -> FloatTensor<Self>;

    #[fusion(dtype = sum, shape = sum)]
    fn add_product(
        sum: FloatTensor<Self>,
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        place: PlaceOfProduct,
    ) -> FloatTensor<Self>;

    #[fusion(dtype = out, shape = out)]
    fn product_to_columns(
        out: FloatTensor<Self>,
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        place: PlaceOfProduct,
    ) -> FloatTensor<Self>;
}

impl Products for CubeBackend {
    fn product(
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        dtype: DType,
        by: Maker,
    ) -> FloatTensor<Self> {
        #[cfg(feature = "cuda")]
        if let Maker::Library { tf32 } = by
            && let Some(product) = blas::product(&x, &y, None, dtype, tf32)
        {
            return product;
        }
        #[cfg(not(feature = "cuda"))]
        assert_eq!(by, Maker::CubeCl, "there is a library for CUDA only");
        matmul(x, y, None, MatmulStrategy::default(), dtype).expect("shapes were checked")
    }

    fn affine(
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        tf32: bool,
    ) -> FloatTensor<Self> {
        let (bias, dtype) = (into_contiguous(bias), x.dtype);
        #[cfg(feature = "cuda")]
        if let Some(sum) = blas::product(&x, &y, Some(&bias), dtype, tf32) {
            return sum;
        }
        let row = Shape::new([1, bias.meta.shape()[0]]);
        let bias = CubeTensor::new_contiguous(bias.client, bias.device, row, bias.handle, dtype);
        add(Self::product(x, y, dtype, Maker::Library { tf32 }), bias)
    }

    fn add_product(
        sum: FloatTensor<Self>,
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        place: PlaceOfProduct,
    ) -> FloatTensor<Self> {
        let PlaceOfProduct { start, add, tf32, sums } = place;
        #[cfg(not(feature = "cuda"))]
        let _ = tf32;
        let sum = to_change(sum);
        #[cfg(feature = "cuda")]
        let row = sums.map(|_| empty(&sum, Shape::new([y.meta.shape()[1]]), DType::F32));
        #[cfg(feature = "cuda")]
        let by_library = |beside| {
            let elements = x.meta.shape()[0] * y.meta.shape()[1];
            let part = part_of(&sum, start..start + elements);
            blas::product_to(&part, &x, &y, blas::How { add, tf32, beside })
        };
        if let Some((start, begun)) = sums {
            // The library sums columns that it reads anyway, where its heuristics have a way.
            #[cfg(feature = "cuda")]
            if let Some(row) = &row
                && by_library(Some((blas::Beside::ColumnSums, row)))
            {
                part::add_to(&sum, row.clone(), start, begun);
                return sum;
            }
            columns::to_place(y.clone(), columns::Place { sums: &sum, start, add: begun });
        }
        #[cfg(feature = "cuda")]
        if by_library(None) {
            return sum;
        }
        let product = Self::product(x, y, DType::F32, Maker::CubeCl);
        part::add_to(&sum, product, start, add);
        sum
    }

    fn product_to_columns(
        out: FloatTensor<Self>,
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        place: PlaceOfProduct,
    ) -> FloatTensor<Self> {
        let PlaceOfProduct { start, add, tf32, .. } = place;
        #[cfg(not(feature = "cuda"))]
        let _ = tf32;
        let out = to_change(out);
        #[cfg(feature = "cuda")]
        let columns = columns_of(&out, start, y.meta.shape()[1]);
        #[cfg(feature = "cuda")]
        if blas::product_to(&columns, &x, &y, blas::How { add, tf32, beside: None }) {
            return out;
        }
        let at = [0..x.meta.shape()[0], start..start + y.meta.shape()[1]];
        let mut product = Self::product(x, y, out.dtype, Maker::CubeCl);
        if add {
            product = self::add(slice(out.clone(), &at), product);
        }
        Self::float_slice_assign(out, &at.map(Slice::from), product)
    }
}

fn product_of(x: &TensorSpec, y: &TensorSpec, dtype: &DType, _by: &Maker) -> TensorSpec {
    let (mut shape, last) = (x.shape.clone(), x.shape.num_dims() - 1);
    shape[last] = y.shape[last];
    TensorSpec::new(shape, *dtype)
}

fn affine_of(x: &TensorSpec, y: &TensorSpec, _bias: &TensorSpec, _tf32: &bool) -> TensorSpec {
    product_of(x, y, &x.dtype, &Maker::CubeCl)
}

/// Whether a library makes the products of tensors on `device`.
#[cfg(feature = "cuda")]
pub(crate) fn has_library(device: &Device) -> bool {
    blas::serves(device)
}

/// Whether a library makes the products of tensors on `device`.
#[cfg(not(feature = "cuda"))]
pub(crate) fn has_library(_device: &Device) -> bool {
    false
}

/// x·y in `dtype` for `x: [.., i, k]`, `y: [.., k, j]` of one type, with fp32 sums; by the library
/// if so wanted and if it can.
pub(crate) fn product<const D: usize>(
    x: Tensor<D>,
    y: Tensor<D>,
    dtype: DType,
    by: Maker,
) -> Tensor<D> {
    let (xs, ys) = (x.dims(), y.dims());
    let fits = xs[..D - 2] == ys[..D - 2] && xs[D - 1] == ys[D - 2] && x.dtype() == y.dtype();
    assert!(fits, "factors {xs:?} of {:?} and {ys:?} of {:?}", x.dtype(), y.dtype());
    let (x, y) = (x.into_dispatch(), y.into_dispatch());
    Tensor::from_dispatch(<Dispatch as Products>::product(x, y, dtype, by))
}

/// x·y + bias for `x: [i, k]`, `y: [k, j]`, `bias: [j]` of one type, with fp32 sums of products; by
/// the library if it can.
pub(crate) fn affine(x: Tensor<2>, y: Tensor<2>, bias: Tensor<1>, tf32: bool) -> Tensor<2> {
    let ([_, k], [rows, j]) = (x.dims(), y.dims());
    let fits = k == rows && bias.dims() == [j];
    let types = x.dtype() == y.dtype() && x.dtype() == bias.dtype();
    assert!(fits && types, "{:?}, {:?} and {:?}", x.dims(), y.dims(), bias.dims());
    let (x, y, bias) = (x.into_dispatch(), y.into_dispatch(), bias.into_dispatch());
    Tensor::from_dispatch(<Dispatch as Products>::affine(x, y, bias, tf32))
}

/// fp32 `sum` with the elements of x·y from `place` on, row after row, or added to what is there,
/// for `x: [i, k]`, `y: [k, j]` of one type, by the library if it can; and so the sums of y's
/// columns, if wanted. In place where nothing else holds `sum`.
pub(crate) fn add_product(
    sum: Tensor<1>,
    x: Tensor<2>,
    y: Tensor<2>,
    place: PlaceOfProduct,
) -> Tensor<1> {
    let start = place.start;
    let ([n], [i, k], [rows, j]) = (sum.dims(), x.dims(), y.dims());
    let sums_fit = place.sums.is_none_or(|(start, _)| start + j <= n);
    let fits = k == rows && start + i * j <= n && sums_fit;
    let types = x.dtype() == y.dtype() && sum.dtype() == DType::F32;
    assert!(fits && types, "{:?}·{:?} in {n} elements from {start}", x.dims(), y.dims());
    let (sum, x, y) = (sum.into_dispatch(), x.into_dispatch(), y.into_dispatch());
    Tensor::from_dispatch(<Dispatch as Products>::add_product(sum, x, y, place))
}

/// `out: [i, w]` with x·y in the columns of `place`, or added to them, for `x: [i, k]`, `y: [k, j]`
/// of its type, by the library if it can; in place where nothing else holds `out`. What is added to
/// was rounded to that type.
pub(crate) fn product_to_columns(
    out: Tensor<2>,
    x: Tensor<2>,
    y: Tensor<2>,
    place: PlaceOfProduct,
) -> Tensor<2> {
    let start = place.start;
    let ([n, width], [i, k], [rows, j]) = (out.dims(), x.dims(), y.dims());
    let fits = n == i && k == rows && start + j <= width;
    let types = x.dtype() == y.dtype() && x.dtype() == out.dtype();
    assert!(fits && types, "{:?}·{:?} in {:?} from {start}", x.dims(), y.dims(), out.dims());
    let (out, x, y) = (out.into_dispatch(), x.into_dispatch(), y.into_dispatch());
    Tensor::from_dispatch(<Dispatch as Products>::product_to_columns(out, x, y, place))
}
