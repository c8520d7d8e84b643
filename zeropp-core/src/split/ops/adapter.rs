//! The product that an adapter adds to a linear map.

use burn::tensor::Tensor;

use super::{fast, halves, is_tracked};
use crate::cpu_tensor;
use crate::kernels::bf16::convert::{down, up};
use crate::split::{OpCx, custom_vjp2};

/// y + scale·v for `y: [b, s, width]` and `v: [b, s, out]`, which is added to the columns of y from
/// `start` on: what a low-rank adapter (LoRA) adds to a linear map, or to one of several side by
/// side.
///
/// Works in place where the caller holds no other handle to `y`. Keeps nothing.
///
/// # Panics
/// Panics if v does not fit into y.
pub(crate) fn add_scaled(
    y: Tensor<3>,
    v: Tensor<3>,
    scale: f64,
    start: usize,
    cx: &OpCx,
) -> Tensor<3> {
    let ([.., width], [.., out]) = (y.dims(), v.dims());
    assert!(start + out <= width, "columns {start}..{} of {width}", start + out);
    let plain = v.clone().inner();
    if !is_tracked(&y) && !is_tracked(&v) {
        return added(y.inner(), &plain, scale as f32, start);
    }
    let sum = y.clone().inner();
    let sum = if cx.output_wanted { added(sum, &plain, scale as f32, start) } else { sum };
    custom_vjp2([y, v], sum, move |dy: Tensor<3>| {
        let dv = columns(&dy, scale as f32, start..start + out);
        [dy, dv]
    })
}

fn added(y: Tensor<3>, v: &Tensor<3>, scale: f32, start: usize) -> Tensor<3> {
    let ([b, s, width], [.., out]) = (y.dims(), v.dims());
    if let (Some(_), Some(v)) = (fast(&y), fast(v)) {
        let y = cpu_tensor::map_in_place(y, |y| {
            for (y, v) in y.chunks_exact_mut(width).zip(v.as_slice().chunks_exact(out)) {
                y[start..start + out].iter_mut().zip(v).for_each(|(y, v)| *y += scale * v);
            }
        });
        return y.expect("on the CPU");
    }
    if let (Some(_), Some(v)) = (halves(&y), halves(v)) {
        let y = cpu_tensor::map_halves_in_place(y, |y| {
            for (y, v) in y.chunks_exact_mut(width).zip(v.as_slice().chunks_exact(out)) {
                let y = y[start..start + out].iter_mut().zip(v);
                y.for_each(|(y, v)| *y = down(up(*y) + scale * up(*v)));
            }
        });
        return y.expect("on the CPU");
    }
    let sum = y.clone().narrow(2, start, out) + v.clone() * scale;
    if out == width {
        return sum;
    }
    y.slice_assign([0..b, 0..s, start..start + out], sum)
}

/// scale·dY of these columns.
fn columns(dy: &Tensor<3>, scale: f32, range: std::ops::Range<usize>) -> Tensor<3> {
    let [b, s, width] = dy.dims();
    let dims = [b, s, range.len()];
    if let Some(dy) = fast(dy) {
        let rows = dy.as_slice().chunks_exact(width).flat_map(|row| &row[range.clone()]);
        return cpu_tensor::from_vec(rows.map(|x| scale * x).collect(), dims);
    }
    if let Some(dy) = halves(dy) {
        let rows = dy.as_slice().chunks_exact(width).flat_map(|row| &row[range.clone()]);
        return cpu_tensor::from_halves(rows.map(|x| down(scale * up(*x))).collect(), dims);
    }
    dy.clone().narrow(2, range.start, range.len()) * scale
}
