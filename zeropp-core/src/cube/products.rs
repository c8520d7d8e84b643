//! Products of matrices: cuBLASLt's on NVIDIA GPUs where it is found, else CubeCL's.

use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, backend_extension};
use burn::tensor::{DType, Device, Shape, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::kernel::matmul::{MatmulStrategy, matmul};
use burn_cubecl::ops::numeric::add;
use burn_cubecl::tensor::CubeTensor;

#[cfg(feature = "cuda")]
use crate::blas;

#[backend_extension(Cube, Fusion)]
trait Products: Backend {
    #[fusion(meta = product_of)]
    fn product(
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        dtype: DType,
        library: bool,
    ) -> FloatTensor<Self>;

    #[fusion(meta = affine_of)]
    fn affine(
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        bias: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    #[fusion(dtype = sum, shape = sum)]
    fn add_product(
        sum: FloatTensor<Self>,
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
    ) -> FloatTensor<Self>;
}

impl Products for CubeBackend {
    fn product(
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        dtype: DType,
        library: bool,
    ) -> FloatTensor<Self> {
        #[cfg(feature = "cuda")]
        if library && let Some(product) = blas::product(&x, &y, None, dtype) {
            return product;
        }
        #[cfg(not(feature = "cuda"))]
        assert!(!library, "there is one for CUDA only");
        matmul(x, y, None, MatmulStrategy::default(), dtype).expect("shapes were checked")
    }

    fn affine(
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        bias: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let (bias, dtype) = (into_contiguous(bias), x.dtype);
        #[cfg(feature = "cuda")]
        if let Some(sum) = blas::product(&x, &y, Some(&bias), dtype) {
            return sum;
        }
        let row = Shape::new([1, bias.meta.shape()[0]]);
        let bias = CubeTensor::new_contiguous(bias.client, bias.device, row, bias.handle, dtype);
        add(Self::product(x, y, dtype, true), bias)
    }

    fn add_product(
        sum: FloatTensor<Self>,
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let sum = into_contiguous(sum);
        let sum = if sum.can_mut() { sum } else { sum.copy() };
        #[cfg(feature = "cuda")]
        if blas::add_product(&sum, &x, &y) {
            return sum;
        }
        let product = Self::product(x, y, DType::F32, false);
        add(sum, flat(product))
    }
}

/// The elements in one row.
fn flat(t: CubeTensor) -> CubeTensor {
    let t = into_contiguous(t);
    let shape = Shape::new([t.meta.shape().num_elements()]);
    CubeTensor::new_contiguous(t.client, t.device, shape, t.handle, t.dtype)
}

fn product_of(x: &TensorSpec, y: &TensorSpec, dtype: &DType, _library: &bool) -> TensorSpec {
    let (mut shape, last) = (x.shape.clone(), x.shape.num_dims() - 1);
    shape[last] = y.shape[last];
    TensorSpec::new(shape, *dtype)
}

fn affine_of(x: &TensorSpec, y: &TensorSpec, _bias: &TensorSpec) -> TensorSpec {
    product_of(x, y, &x.dtype, &true)
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
    library: bool,
) -> Tensor<D> {
    let (xs, ys) = (x.dims(), y.dims());
    let fits = xs[..D - 2] == ys[..D - 2] && xs[D - 1] == ys[D - 2] && x.dtype() == y.dtype();
    assert!(fits, "factors {xs:?} of {:?} and {ys:?} of {:?}", x.dtype(), y.dtype());
    let (x, y) = (x.into_dispatch(), y.into_dispatch());
    Tensor::from_dispatch(<Dispatch as Products>::product(x, y, dtype, library))
}

/// x·y + bias for `x: [i, k]`, `y: [k, j]`, `bias: [j]` of one type, with fp32 sums of products; by
/// the library if it can.
pub(crate) fn affine(x: Tensor<2>, y: Tensor<2>, bias: Tensor<1>) -> Tensor<2> {
    let ([_, k], [rows, j]) = (x.dims(), y.dims());
    let fits = k == rows && bias.dims() == [j];
    let types = x.dtype() == y.dtype() && x.dtype() == bias.dtype();
    assert!(fits && types, "{:?}, {:?} and {:?}", x.dims(), y.dims(), bias.dims());
    let (x, y, bias) = (x.into_dispatch(), y.into_dispatch(), bias.into_dispatch());
    Tensor::from_dispatch(<Dispatch as Products>::affine(x, y, bias))
}

/// fp32 `sum: [i·j]` with the elements of x·y added, row after row, for `x: [i, k]`, `y: [k, j]` of
/// one type, by the library if it can; in place where nothing else holds `sum`.
pub(crate) fn add_product(sum: Tensor<1>, x: Tensor<2>, y: Tensor<2>) -> Tensor<1> {
    let ([n], [i, k], [rows, j]) = (sum.dims(), x.dims(), y.dims());
    let fits = k == rows && n == i * j && x.dtype() == y.dtype() && sum.dtype() == DType::F32;
    assert!(fits, "{:?} and {:?} added to {n} elements", x.dims(), y.dims());
    let (sum, x, y) = (sum.into_dispatch(), x.into_dispatch(), y.into_dispatch());
    Tensor::from_dispatch(<Dispatch as Products>::add_product(sum, x, y))
}
