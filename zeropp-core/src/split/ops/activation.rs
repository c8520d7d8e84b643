//! Activation functions. They keep their inputs only. Off the CPU they compute in fp32, whatever
//! the type of their inputs; fusion makes one kernel of that.

use burn::tensor::{DType, Tensor, activation, bf16 as Half};

use super::{fast, halves, is_fast, is_tracked};
use crate::cpu_tensor;
use crate::kernels::activation as kernels;
use crate::split::{OpCx, custom_vjp, custom_vjp2};

/// 2·√(2/π).
const TANH_SCALE: f64 = 1.595_769_121_605_730_8;
const TANH_CUBE: f64 = 0.044_715;
/// 1/√(2π).
const DENSITY: f64 = 0.398_942_280_401_432_7;

/// The paths of one function and of its derivative.
#[derive(Clone, Copy)]
struct Function<const D: usize> {
    host: fn(&[f32]) -> Vec<f32>,
    host_backward: fn(&mut [f32], &[f32]),
    halves: fn(&[Half]) -> Vec<Half>,
    halves_backward: fn(&mut [Half], &[Half]),
    tensor: fn(Tensor<D>) -> Tensor<D>,
    tensor_slope: fn(Tensor<D>) -> Tensor<D>,
}

impl<const D: usize> Function<D> {
    /// Of a plain tensor.
    fn forward(&self, x: &Tensor<D>) -> Tensor<D> {
        match (fast(x), halves(x)) {
            (Some(v), _) => cpu_tensor::from_vec((self.host)(v.as_slice()), x.dims()),
            (_, Some(v)) => cpu_tensor::from_halves((self.halves)(v.as_slice()), x.dims()),
            _ => (self.tensor)(x.clone().cast(DType::F32)).cast(x.dtype()),
        }
    }
}

fn apply<const D: usize>(x: Tensor<D>, f: Function<D>, cx: &OpCx) -> Tensor<D> {
    let out = f.forward(&x.clone().inner());
    if !is_tracked(&x) {
        return out;
    }
    let saved = cx.keep(&x);
    let again = saved.clone();
    let out = custom_vjp(x, out, move |dy| {
        let x = saved.take();
        match (fast(&x), halves(&x)) {
            (Some(x), _) => cpu_tensor::map_in_place(dy, |dy| (f.host_backward)(dy, x.as_slice()))
                .expect("gradients live where the values do"),
            (_, Some(x)) => cpu_tensor::map_halves_in_place(dy, |dy| {
                (f.halves_backward)(dy, x.as_slice());
            })
            .expect("gradients live where the values do"),
            _ => {
                let dtype = x.dtype();
                (dy.cast(DType::F32) * (f.tensor_slope)(x.cast(DType::F32))).cast(dtype)
            }
        }
    });
    cx.offer(out, move || f.forward(&again.take()))
}

/// x·Φ(x), the GELU with the error function. Keeps F→B: x. B can make the output again.
pub fn gelu<const D: usize>(x: Tensor<D>, cx: &OpCx) -> Tensor<D> {
    let f = Function {
        host: kernels::gelu,
        host_backward: kernels::gelu_backward,
        halves: kernels::gelu,
        halves_backward: kernels::gelu_backward,
        tensor: activation::gelu,
        tensor_slope: |x| {
            let cdf = ((x.clone() / core::f64::consts::SQRT_2).erf() + 1.0) * 0.5;
            let bell = (x.clone().square() * -0.5).exp();
            cdf + x * bell * DENSITY
        },
    };
    apply(x, f, cx)
}

/// 1/(1 + e⁻ˣ). Not Burn's, which takes the exponential of a logarithm: on a GPU that is more work
/// than reading and writing x.
pub(super) fn sigmoid<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    (x.neg().exp() + 1.0).recip()
}

fn tanh_gate<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    // Not by a power, which on a GPU costs more than reading and writing x.
    let cube = x.clone().square() * x.clone();
    sigmoid((x + cube * TANH_CUBE) * TANH_SCALE)
}

/// GELU in its tanh approximation (`gelu_new` of GPT-2). Keeps F→B: x. B can make the output again.
pub fn gelu_tanh<const D: usize>(x: Tensor<D>, cx: &OpCx) -> Tensor<D> {
    let f = Function {
        host: kernels::gelu_tanh,
        host_backward: kernels::gelu_tanh_backward,
        halves: kernels::gelu_tanh,
        halves_backward: kernels::gelu_tanh_backward,
        tensor: |x| x.clone() * tanh_gate(x),
        tensor_slope: |x| {
            let s = tanh_gate(x.clone());
            let slope = (x.clone().square() * (3.0 * TANH_CUBE) + 1.0) * TANH_SCALE;
            s.clone() + x * s.clone() * (-s + 1.0) * slope
        },
    };
    apply(x, f, cx)
}

/// x·sigmoid(x). Keeps F→B: x. B can make the output again.
pub fn silu<const D: usize>(x: Tensor<D>, cx: &OpCx) -> Tensor<D> {
    let f = Function {
        host: kernels::silu,
        host_backward: kernels::silu_backward,
        halves: kernels::silu,
        halves_backward: kernels::silu_backward,
        tensor: |x| x.clone() * sigmoid(x),
        tensor_slope: |x| silu_slope(x.clone(), sigmoid(x)),
    };
    apply(x, f, cx)
}

/// The derivative of x·s for s = sigmoid(x).
fn silu_slope<const D: usize>(x: Tensor<D>, s: Tensor<D>) -> Tensor<D> {
    s.clone() + x * s.clone() * (-s + 1.0)
}

/// silu(gate)·up for two tensors of one shape. Keeps F→B: gate and up. B can make the output again.
pub fn swiglu<const D: usize>(gate: Tensor<D>, up: Tensor<D>, cx: &OpCx) -> Tensor<D> {
    let out = swiglu_forward(&gate.clone().inner(), &up.clone().inner());
    if !is_tracked(&gate) && !is_tracked(&up) {
        return out;
    }
    let (g, u) = (cx.keep(&gate), cx.keep(&up));
    let again = (g.clone(), u.clone());
    let out = custom_vjp2([gate, up], out, move |dy| {
        let (g, u) = (g.take(), u.take());
        if let (Some(gs), Some(us)) = (halves(&g), halves(&u)) {
            let mut dgate = Vec::new();
            let dup = cpu_tensor::map_halves_in_place(dy, |dy| {
                dgate = kernels::swiglu_backward(dy, gs.as_slice(), us.as_slice());
            });
            let dup = dup.expect("gradients live where the values do");
            return [cpu_tensor::from_halves(dgate, g.dims()), dup];
        }
        if !is_fast(&g) {
            let dtype = g.dtype();
            let [dy, g, u] = [dy, g, u].map(|t| t.cast(DType::F32));
            let s = sigmoid(g.clone());
            let dup = dy.clone() * g.clone() * s.clone();
            return [dy * u * silu_slope(g, s), dup].map(|t| t.cast(dtype));
        }
        let dims = g.dims();
        let (g, u) = (fast(&g).expect("checked"), fast(&u).expect("as the gate"));
        let mut dgate = Vec::new();
        let dup = cpu_tensor::map_in_place(dy, |dy| {
            dgate = kernels::swiglu_backward(dy, g.as_slice(), u.as_slice());
        });
        [cpu_tensor::from_vec(dgate, dims), dup.expect("gradients live where the values do")]
    });
    cx.offer(out, move || swiglu_forward(&again.0.take(), &again.1.take()))
}

fn swiglu_forward<const D: usize>(g: &Tensor<D>, u: &Tensor<D>) -> Tensor<D> {
    match (fast(g), fast(u)) {
        (Some(gs), Some(us)) => {
            cpu_tensor::from_vec(kernels::swiglu(gs.as_slice(), us.as_slice()), g.dims())
        }
        _ if halves(g).is_some() => {
            let [gs, us] = [g, u].map(|t| halves(t).expect("both of one type"));
            cpu_tensor::from_halves(kernels::swiglu(gs.as_slice(), us.as_slice()), g.dims())
        }
        _ => {
            let [gs, us] = [g, u].map(|t| t.clone().cast(DType::F32));
            (gs.clone() * sigmoid(gs) * us).cast(u.dtype())
        }
    }
}
