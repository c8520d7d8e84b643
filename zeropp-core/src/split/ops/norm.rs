//! Normalisations of the last dimension. Weight gradients are so small that B reduces them: W only
//! adds two vectors.

use burn::tensor::{DType, Tensor};

use super::{VectorSums, fast, halves, link, row_vector, rows, wants_gradient};
use crate::cpu_tensor;
use crate::kernels::bf16::convert::widen;
use crate::kernels::bf16::rows as half_rows;
use crate::kernels::norm;
use crate::split::{OpCx, Weight};

/// (x − mean)/√(var + eps)·γ + β over the last dimension h of `x`; `gamma`, `beta`: `[h]`.
///
/// Keeps F→B: x, and mean and 1/√(var + eps) of each row in fp32 (8 bytes a row). Keeps B→W: dγ and
/// dβ (8·h bytes). B can make the output again.
pub fn layer_norm<const D: usize>(
    x: Tensor<D>,
    gamma: &Weight<1>,
    beta: &Weight<1>,
    eps: f64,
    cx: &OpCx,
) -> Tensor<D> {
    let xi = x.clone().inner();
    let (out, means, rstds) = layer_norm_forward(&xi, gamma.get(), beta.get(), eps);
    let sums = VectorSums::new([gamma, beta], cx);
    if !wants_gradient(&x, cx) {
        return out;
    }
    let saved = (cx.keep(&x), cx.save(means), cx.save(rstds));
    let again = (saved.0.clone(), gamma.clone(), beta.clone());
    let gamma = gamma.clone();
    let out = link(x, out, cx, move |dy| {
        let (x, rows) = (saved.0.take(), [saved.1.take(), saved.2.take()]);
        let (dx, of_weights) = layer_norm_backward(dy, x, gamma.get(), rows, sums.begun());
        sums.queue(of_weights);
        dx
    });
    cx.offer(out, move || {
        let (x, gamma, beta) = again;
        layer_norm_forward(&x.take(), gamma.get(), beta.get(), eps).0
    })
}

fn layer_norm_forward<const D: usize>(
    x: &Tensor<D>,
    gamma: Tensor<1>,
    beta: Tensor<1>,
    eps: f64,
) -> (Tensor<D>, Tensor<1>, Tensor<1>) {
    let n = rows(x.clone()).dims()[0];
    if let (Some(x_host), Some(g), Some(b)) = (fast(x), fast(&gamma), fast(&beta)) {
        let (y, means, rstds) =
            norm::layer_norm(x_host.as_slice(), g.as_slice(), b.as_slice(), eps as f32);
        return (
            cpu_tensor::from_vec(y, x.dims()),
            cpu_tensor::from_vec(means, [n]),
            cpu_tensor::from_vec(rstds, [n]),
        );
    }
    if let (Some(x_host), Some(g), Some(b)) = (halves(x), halves(&gamma), halves(&beta)) {
        let [g, b] = [g, b].map(|v| widen(v.as_slice()));
        let normed = half_rows::layer_norm(x_host.as_slice(), &g, &b, eps as f32);
        let [means, rstds] = [normed.means, normed.inverses].map(|v| cpu_tensor::from_vec(v, [n]));
        return (cpu_tensor::from_halves(normed.out, x.dims()), means, rstds);
    }
    #[cfg(feature = "cube")]
    if super::on_gpu(x) {
        let [gamma, beta] = [gamma, beta].map(|weight| for_kernel(weight, x.dtype()));
        let (y, means, rstds) = crate::cube::layer_norm(rows(x.clone()), gamma, beta, eps);
        return (y.reshape(x.dims()), means, rstds);
    }
    let x2 = rows(x.clone()).cast(DType::F32);
    let mean = x2.clone().mean_dim(1);
    let centered = x2 - mean.clone();
    let rstd = (centered.clone().square().mean_dim(1) + eps).sqrt().recip();
    let y = centered * rstd.clone() * row_vector(gamma) + row_vector(beta);
    (y.cast(x.dtype()).reshape(x.dims()), mean.reshape([n]), rstd.reshape([n]))
}

/// The gradients of x, and of gamma and beta, to which the kernels add from `sums` on.
fn layer_norm_backward<const D: usize>(
    dy: Tensor<D>,
    x: Tensor<D>,
    gamma: Tensor<1>,
    [means, rstds]: [Tensor<1>; 2],
    mut sums: Vec<f32>,
) -> (Tensor<D>, [Tensor<1>; 2]) {
    let dims = x.dims();
    let h = dims[D - 1];
    let host_inputs = (fast(&x), fast(&gamma), fast(&means), fast(&rstds));
    if let (Some(x), Some(g), Some(m), Some(r)) = host_inputs {
        let [x, g, m, r] = [&x, &g, &m, &r].map(|t| t.as_slice());
        let dx = cpu_tensor::map_in_place(dy, |dy| {
            norm::layer_norm_backward(dy, x, g, m, r, &mut sums);
        });
        let dx = dx.expect("gradients live where the values do");
        let dbeta = sums.split_off(h);
        return (dx, [sums, dbeta].map(|sums| cpu_tensor::from_vec(sums, [h])));
    }
    if let (Some(x), Some(g)) = (halves(&x), halves(&gamma)) {
        let g = widen(g.as_slice());
        let [m, r] = [&means, &rstds].map(|v| fast(v).expect("made by the forward"));
        let dx = cpu_tensor::map_halves_in_place(dy, |dy| {
            let (m, r) = (m.as_slice(), r.as_slice());
            half_rows::layer_norm_backward(dy, x.as_slice(), &g, m, r, &mut sums);
        });
        let dx = dx.expect("gradients live where the values do");
        let dbeta = sums.split_off(h);
        return (dx, [sums, dbeta].map(|sums| cpu_tensor::from_vec(sums, [h])));
    }
    let dtype = dy.dtype();
    let n = means.dims()[0];
    #[cfg(feature = "cube")]
    if super::on_gpu(&dy) {
        let (dy, x, gamma) = (rows(dy), rows(x), for_kernel(gamma, dtype));
        let (dx, sums) = crate::cube::layer_norm_backward(dy, x, gamma, means, rstds);
        let dbeta = sums.clone().narrow(0, h, h);
        return (dx.reshape(dims), [sums.narrow(0, 0, h), dbeta]);
    }
    let rstd = rstds.reshape([n, 1]);
    let hat = (rows(x).cast(DType::F32) - means.reshape([n, 1])) * rstd.clone();
    let dy = rows(dy).cast(DType::F32);
    let dgamma = (dy.clone() * hat.clone()).sum_dim(0).reshape([h]);
    let dbeta = dy.clone().sum_dim(0).reshape([h]);
    let dhat = dy * row_vector(gamma);
    let c1 = dhat.clone().mean_dim(1);
    let c2 = (dhat.clone() * hat.clone()).mean_dim(1);
    (((dhat - c1 - hat * c2) * rstd).cast(dtype).reshape(dims), [dgamma, dbeta])
}

/// x/√(mean(x²) + eps)·γ over the last dimension h of `x`; `gamma: [h]`.
///
/// Keeps F→B: x, and 1/√(mean(x²) + eps) of each row in fp32 (4 bytes a row). Keeps B→W: dγ (4·h
/// bytes). B can make the output again.
pub fn rms_norm<const D: usize>(x: Tensor<D>, gamma: &Weight<1>, eps: f64, cx: &OpCx) -> Tensor<D> {
    let xi = x.clone().inner();
    let (out, rrms) = rms_norm_forward(&xi, gamma.get(), eps);
    let sums = VectorSums::new([gamma], cx);
    if !wants_gradient(&x, cx) {
        return out;
    }
    let saved = (cx.keep(&x), cx.save(rrms));
    let again = (saved.0.clone(), gamma.clone());
    let gamma = gamma.clone();
    let out = link(x, out, cx, move |dy| {
        let (x, rrms) = (saved.0.take(), saved.1.take());
        let (dx, dgamma) = rms_norm_backward(dy, x, gamma.get(), rrms, sums.begun());
        sums.queue([dgamma]);
        dx
    });
    cx.offer(out, move || rms_norm_forward(&again.0.take(), again.1.get(), eps).0)
}

fn rms_norm_forward<const D: usize>(
    x: &Tensor<D>,
    gamma: Tensor<1>,
    eps: f64,
) -> (Tensor<D>, Tensor<1>) {
    let n = rows(x.clone()).dims()[0];
    if let (Some(x_host), Some(g)) = (fast(x), fast(&gamma)) {
        let (y, rrms) = norm::rms_norm(x_host.as_slice(), g.as_slice(), eps as f32);
        return (cpu_tensor::from_vec(y, x.dims()), cpu_tensor::from_vec(rrms, [n]));
    }
    if let (Some(x_host), Some(g)) = (halves(x), halves(&gamma)) {
        let normed = half_rows::rms_norm(x_host.as_slice(), &widen(g.as_slice()), eps as f32);
        let rrms = cpu_tensor::from_vec(normed.inverses, [n]);
        return (cpu_tensor::from_halves(normed.out, x.dims()), rrms);
    }
    #[cfg(feature = "cube")]
    if super::on_gpu(x) {
        let gamma = for_kernel(gamma, x.dtype());
        let (y, rrms) = crate::cube::rms_norm(rows(x.clone()), gamma, eps);
        return (y.reshape(x.dims()), rrms);
    }
    let x2 = rows(x.clone()).cast(DType::F32);
    let rrms = (x2.clone().square().mean_dim(1) + eps).sqrt().recip();
    let y = x2 * rrms.clone() * row_vector(gamma);
    (y.cast(x.dtype()).reshape(x.dims()), rrms.reshape([n]))
}

/// The gradients of x, and of gamma, to which the kernels add from `dgamma` on.
fn rms_norm_backward<const D: usize>(
    dy: Tensor<D>,
    x: Tensor<D>,
    gamma: Tensor<1>,
    rrms: Tensor<1>,
    mut dgamma: Vec<f32>,
) -> (Tensor<D>, Tensor<1>) {
    let dims = x.dims();
    let h = dims[D - 1];
    if let (Some(x), Some(g), Some(r)) = (fast(&x), fast(&gamma), fast(&rrms)) {
        let [x, g, r] = [&x, &g, &r].map(|t| t.as_slice());
        let dx = cpu_tensor::map_in_place(dy, |dy| {
            norm::rms_norm_backward(dy, x, g, r, &mut dgamma);
        });
        let dx = dx.expect("gradients live where the values do");
        return (dx, cpu_tensor::from_vec(dgamma, [h]));
    }
    if let (Some(x), Some(g), Some(r)) = (halves(&x), halves(&gamma), fast(&rrms)) {
        let g = widen(g.as_slice());
        let dx = cpu_tensor::map_halves_in_place(dy, |dy| {
            half_rows::rms_norm_backward(dy, x.as_slice(), &g, r.as_slice(), &mut dgamma);
        });
        let dx = dx.expect("gradients live where the values do");
        return (dx, cpu_tensor::from_vec(dgamma, [h]));
    }
    let dtype = dy.dtype();
    let n = rrms.dims()[0];
    #[cfg(feature = "cube")]
    if super::on_gpu(&dy) {
        let (dy, x, gamma) = (rows(dy), rows(x), for_kernel(gamma, dtype));
        let (dx, dgamma) = crate::cube::rms_norm_backward(dy, x, gamma, rrms);
        return (dx.reshape(dims), dgamma);
    }
    let rrms = rrms.reshape([n, 1]);
    let hat = rows(x).cast(DType::F32) * rrms.clone();
    let dy = rows(dy).cast(DType::F32);
    let dgamma = (dy.clone() * hat.clone()).sum_dim(0).reshape([h]);
    let dhat = dy * row_vector(gamma);
    let c = (dhat.clone() * hat.clone()).mean_dim(1);
    (((dhat - hat * c) * rrms).cast(dtype).reshape(dims), dgamma)
}

/// A weight as the kernels for rows of type `dtype` read it: of that type, or fp32.
#[cfg(feature = "cube")]
pub(super) fn for_kernel(weight: Tensor<1>, dtype: DType) -> Tensor<1> {
    if weight.dtype() == dtype { weight } else { weight.cast(DType::F32) }
}
