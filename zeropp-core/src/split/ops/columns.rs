//! Sums of columns off the CPU: gradients of biases.

use burn::tensor::{DType, Tensor};

use crate::split::{Grads, ParamSlot};

/// The sums of the columns of `x: [n, h]` in fp32, `[h]`.
pub(super) fn column_sums(x: Tensor<2>) -> Tensor<1> {
    #[cfg(feature = "cube")]
    if super::on_gpu(&x) {
        return crate::cube::column_sums(x);
    }
    let h = x.dims()[1];
    x.cast(DType::F32).sum_dim(0).reshape([h])
}

/// Adds them to the gradient of the parameter of `slot`.
pub(super) fn add_column_sums(grads: &mut Grads, slot: ParamSlot, x: Tensor<2>) {
    #[cfg(feature = "cube")]
    if super::on_gpu(&x) {
        return grads.change(slot, |place| {
            crate::cube::add_column_sums(place.flat, x, place.part.start, place.begun)
        });
    }
    grads.add(slot, column_sums(x));
}
