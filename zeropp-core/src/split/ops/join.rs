//! Tensors side by side in one, and their sum.

use burn::tensor::Tensor;

use super::fast;
use crate::cpu_tensor;
use crate::split::{OpCx, custom_vjp2, custom_vjp3, vjp};

/// x + y for tensors of one shape: a residual connection. Keeps nothing.
pub fn add<const D: usize>(x: Tensor<D>, y: Tensor<D>) -> Tensor<D> {
    vjp::sum(x, y)
}

/// [`add`] at the end of a layer, whose output may not be wanted.
pub fn add_last<const D: usize>(x: Tensor<D>, y: Tensor<D>, cx: &OpCx) -> Tensor<D> {
    if cx.output_wanted {
        return add(x, y);
    }
    let out = OpCx::stand_in(&x.clone().inner(), x.dims());
    custom_vjp2([x, y], out, |dy| [dy.clone(), dy])
}

/// Concatenates along the last axis: separate projections q, k and v, `[b, s, ..]` each, to the
/// layout of [`grouped_attention`](super::grouped_attention). Keeps nothing.
///
/// # Panics
/// Panics if the tensors differ in b or s.
pub fn join(xs: [Tensor<3>; 3]) -> Tensor<3> {
    let plain = xs.clone().map(Tensor::inner);
    let widths = plain.each_ref().map(|x| x.dims()[2]);
    let out = concatenate(&plain);
    custom_vjp3(xs, out, move |dy: Tensor<3>| {
        let [b, s, _] = dy.dims();
        let starts = [0, widths[0], widths[0] + widths[1]];
        let Some(rows) = fast(&dy) else {
            return [0, 1, 2].map(|i| dy.clone().narrow(2, starts[i], widths[i]));
        };
        let width: usize = widths.iter().sum();
        [0, 1, 2].map(|i| {
            let mut part = Vec::with_capacity(b * s * widths[i]);
            for row in rows.as_slice().chunks_exact(width) {
                part.extend_from_slice(&row[starts[i]..][..widths[i]]);
            }
            cpu_tensor::from_vec(part, [b, s, widths[i]])
        })
    })
}

fn concatenate(xs: &[Tensor<3>; 3]) -> Tensor<3> {
    let dims = xs.each_ref().map(|x| x.dims());
    let [b, s, _] = dims[0];
    assert!(dims.iter().all(|d| d[..2] == [b, s]), "parts of shapes {dims:?}");
    let [Some(x), Some(y), Some(z)] = xs.each_ref().map(fast) else {
        return Tensor::cat(xs.to_vec(), 2);
    };
    let width: usize = dims.iter().map(|d| d[2]).sum();
    let mut out = Vec::with_capacity(b * s * width);
    let rows = x.as_slice().chunks_exact(dims[0][2]).zip(y.as_slice().chunks_exact(dims[1][2]));
    for ((x, y), z) in rows.zip(z.as_slice().chunks_exact(dims[2][2])) {
        out.extend_from_slice(x);
        out.extend_from_slice(y);
        out.extend_from_slice(z);
    }
    cpu_tensor::from_vec(out, [b, s, width])
}
