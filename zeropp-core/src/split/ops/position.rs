//! Rotary position embedding.

use burn::tensor::{DType, Tensor};

use super::is_fast;
use crate::cpu_tensor;
use crate::kernels::rope::{self as kernels, Turned};
use crate::split::custom_vjp;

/// Turns the first `heads` heads of `d` elements in the last axis of `x: [b, s, width]` by their
/// position's angles (rotate-half layout, as Hugging Face's LLaMA); the rest passes unchanged.
/// Position p turns pair i by p·base^(−2i/d).
///
/// Works in place where the caller holds no other handle to `x`. Keeps nothing.
///
/// # Panics
/// Panics if `d` is odd or the heads do not fit into the width.
pub fn rope(x: Tensor<3>, heads: usize, d: usize, base: f64) -> Tensor<3> {
    let [_, s, width] = x.dims();
    assert!(d.is_multiple_of(2) && d > 0, "rotary embedding of heads of {d} elements");
    assert!(heads * d <= width, "{heads} heads of {d} elements do not fit into {width}");
    let t = Turned { width, heads, d };
    let angles = kernels::angles(s, d, base);
    if !x.is_tracked() {
        return turn(x.inner(), t, &angles, false);
    }
    let out = turn(x.clone().inner(), t, &angles, false);
    custom_vjp(x, out, move |dy| turn(dy, t, &angles, true))
}

fn turn(x: Tensor<3>, t: Turned, (cos, sin): &(Vec<f32>, Vec<f32>), back: bool) -> Tensor<3> {
    if is_fast(&x) {
        return cpu_tensor::map_in_place(x, |x| kernels::rope(x, t, (cos, sin), back))
            .expect("checked by is_fast");
    }
    let ([b, s, width], half, turned) = (x.dims(), t.d / 2, t.heads * t.d);
    let device = x.device();
    let angles = |v: &[f32]| {
        let v = cpu_tensor::from_vec(v.to_vec(), [1, s, 1, half]);
        Tensor::<4>::from_data(v.into_data(), (&device, DType::F32))
    };
    let (cos, sin) = (angles(cos), angles(sin));
    let sin = if back { sin.neg() } else { sin };
    let heads = x.clone().narrow(2, 0, turned).cast(DType::F32).reshape([b, s, t.heads, t.d]);
    let (low, high) = (heads.clone().narrow(3, 0, half), heads.narrow(3, half, half));
    let new_low = low.clone() * cos.clone() - high.clone() * sin.clone();
    let new_high = high * cos + low * sin;
    let heads = Tensor::cat(vec![new_low, new_high], 3).reshape([b, s, turned]).cast(x.dtype());
    if turned == width {
        return heads;
    }
    Tensor::cat(vec![heads, x.narrow(2, turned, width - turned)], 2)
}
