//! AdamW on a flat shard, with PyTorch's semantics: decoupled weight decay, bias correction,
//! eps outside the square root.

use burn::tensor::Tensor;
use zeropp_core::cpu_tensor;
use zeropp_core::kernels::adamw::{Scalars, adamw};

/// Hyper-parameters of one run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay, times the learning rate.
    pub weight_decay: f64,
}

/// What changes from step to step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepScale {
    /// Learning rate.
    pub lr: f64,
    /// Number of the update, from 1 (skipped steps do not count).
    pub update: u64,
    /// Factor on the gradient (clipping).
    pub gradient: f32,
}

/// Moments of one shard, f32.
pub struct Moments {
    /// First moment.
    pub m: Tensor<1>,
    /// Second moment.
    pub v: Tensor<1>,
}

/// Elements `start..end` of a shard and whether weight decay applies to them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecayRange {
    /// First element.
    pub start: usize,
    /// One past the last.
    pub end: usize,
    /// Whether to decay.
    pub decay: bool,
}

impl AdamW {
    /// Each scalar is computed in f64 and rounded once, as PyTorch does. 1 − β from an f32 β would
    /// be off by as much as 2⁻²⁵: by 1.3e-5 of itself at β2 = 0.999, and all of the second moment
    /// with it.
    fn scalars(&self, s: &StepScale) -> Scalars {
        let bias = |beta: f64| 1.0 - beta.powi(s.update.min(i32::MAX as u64) as i32);
        Scalars {
            towards1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            towards2: (1.0 - self.beta2) as f32,
            eps: self.eps as f32,
            step_size: (s.lr / bias(self.beta1)) as f32,
            root_bias2: bias(self.beta2).sqrt() as f32,
            keep: (1.0 - s.lr * self.weight_decay) as f32,
            gradient: s.gradient,
        }
    }

    /// Updates `param` and `moments` by `grad`, all `[n]` f32. `ranges` cover the shard.
    pub fn step(
        &self,
        param: Tensor<1>,
        moments: &mut Moments,
        grad: &Tensor<1>,
        ranges: &[DecayRange],
        scale: &StepScale,
    ) -> Tensor<1> {
        let s = self.scalars(scale);
        match cpu_tensor::on_cpu(grad) {
            Some(g) => on_host(param, moments, g.as_slice(), ranges, s),
            None => on_device(param, moments, grad, ranges, s),
        }
    }
}

fn on_host(
    param: Tensor<1>,
    moments: &mut Moments,
    g: &[f32],
    ranges: &[DecayRange],
    s: Scalars,
) -> Tensor<1> {
    let mut m = cpu_tensor::into_vec(std::mem::replace(&mut moments.m, empty(&param)));
    let mut v = cpu_tensor::into_vec(std::mem::replace(&mut moments.v, empty(&param)));
    let mut p = cpu_tensor::into_vec(param);
    for r in ranges {
        let scalars = Scalars { keep: if r.decay { s.keep } else { 1.0 }, ..s };
        let all = r.start..r.end;
        let (p, m, v) = (&mut p[all.clone()], &mut m[all.clone()], &mut v[all.clone()]);
        adamw(p, m, v, &g[all], &scalars);
    }
    let n = p.len();
    moments.m = cpu_tensor::from_vec(m, [n]);
    moments.v = cpu_tensor::from_vec(v, [n]);
    cpu_tensor::from_vec(p, [n])
}

fn empty(like: &Tensor<1>) -> Tensor<1> {
    Tensor::zeros([1], &like.device())
}

fn on_device(
    param: Tensor<1>,
    moments: &mut Moments,
    grad: &Tensor<1>,
    ranges: &[DecayRange],
    s: Scalars,
) -> Tensor<1> {
    let g = grad.clone() * s.gradient;
    let m = moments.m.clone();
    let m = m.clone() + (g.clone() - m) * s.towards1;
    let v = moments.v.clone() * s.beta2 + g.clone() * g * s.towards2;
    let update = m.clone() / (v.clone().sqrt() / s.root_bias2 + s.eps) * s.step_size;
    (moments.m, moments.v) = (m, v);
    let keep: Vec<Tensor<1>> = ranges
        .iter()
        .map(|r| {
            let keep = if r.decay { s.keep } else { 1.0 };
            Tensor::full([r.end - r.start], keep, &param.device())
        })
        .collect();
    param * Tensor::cat(keep, 0) - update
}
