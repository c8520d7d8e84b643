//! Rows that are scaled by a gate of their own.

use burn::tensor::{DType, Tensor};

use super::activation::sigmoid;
use super::{fast, halves, is_tracked};
use crate::cpu_tensor;
use crate::kernels::gate;
use crate::split::{OpCx, custom_vjp2};

/// y·σ(z) for `y: [b, s, h]` and a gate of each row, `z: [b, s, 1]`.
///
/// Keeps F→B: y and z.
pub fn gated(y: Tensor<3>, z: Tensor<3>, cx: &OpCx) -> Tensor<3> {
    let (yi, zi) = (y.clone().inner(), z.clone().inner());
    let out = match cx.output_wanted {
        true => scaled(&yi, &zi),
        false => OpCx::stand_in(&yi, yi.dims()),
    };
    if !is_tracked(&y) && !is_tracked(&z) {
        return out;
    }
    let (yi, zi) = (cx.save(yi), cx.save(zi));
    custom_vjp2([y, z], out, move |dy| {
        let (y, z) = (yi.take(), zi.take());
        let dz = gradient(&dy, &y, &z);
        [scaled(&dy, &z), dz]
    })
}

/// Each row times its gate.
fn scaled(y: &Tensor<3>, z: &Tensor<3>) -> Tensor<3> {
    if let (Some(ys), Some(zs)) = (fast(y), fast(z)) {
        return cpu_tensor::from_vec(gate::scaled(ys.as_slice(), zs.as_slice()), y.dims());
    }
    if let (Some(ys), Some(zs)) = (halves(y), halves(z)) {
        return cpu_tensor::from_halves(gate::scaled(ys.as_slice(), zs.as_slice()), y.dims());
    }
    let [wide, gates] = [y, z].map(|t| t.clone().cast(DType::F32));
    (wide * sigmoid(gates)).cast(y.dtype())
}

/// The gradient of the gates.
fn gradient(dy: &Tensor<3>, y: &Tensor<3>, z: &Tensor<3>) -> Tensor<3> {
    if let (Some(dys), Some(ys), Some(zs)) = (fast(dy), fast(y), fast(z)) {
        let dz = gate::gradient(dys.as_slice(), ys.as_slice(), zs.as_slice());
        return cpu_tensor::from_vec(dz, z.dims());
    }
    if let (Some(dys), Some(ys), Some(zs)) = (halves(dy), halves(y), halves(z)) {
        let dz = gate::gradient(dys.as_slice(), ys.as_slice(), zs.as_slice());
        return cpu_tensor::from_halves(dz, z.dims());
    }
    let dtype = z.dtype();
    let [dy, y, z] = [dy, y, z].map(|t| t.clone().cast(DType::F32));
    let gate = sigmoid(z);
    ((dy * y).sum_dim(2) * gate.clone() * (-gate + 1.0)).cast(dtype)
}
