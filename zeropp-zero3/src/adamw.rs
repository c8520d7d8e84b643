//! AdamW on a flat shard, with PyTorch's semantics: decoupled weight decay, bias correction,
//! eps outside the square root.

use burn::tensor::Tensor;
use zeropp_core::adamw::{AdamWElements, adamw as on_device};
use zeropp_core::kernels::adamw::{AdamWScalars, adamw};

use crate::rule::{DeviceElements, Elements, Parameter, StateTensor, StepScale, UpdateRule};

/// The state of each element: the mean gradient and the mean squared gradient.
const MOMENTS: [&str; 2] = ["exp_avg", "exp_avg_sq"];

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

impl AdamW {
    /// Each scalar is computed in f64 and rounded once, as PyTorch does. 1 − β from an f32 β would
    /// be off by as much as 2⁻²⁵: by 1.3e-5 of itself at β2 = 0.999, and all of the second moment
    /// with it.
    fn scalars(&self, s: &StepScale) -> AdamWScalars {
        let bias = |beta: f64| 1.0 - beta.powi(s.update.min(i32::MAX as u64) as i32);
        AdamWScalars {
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
}

impl UpdateRule for AdamW {
    fn name(&self) -> &str {
        "adamw"
    }

    fn state(&self, _: &Parameter<'_>) -> Vec<StateTensor> {
        MOMENTS.map(StateTensor::per_element).to_vec()
    }

    fn update(&self, of: &Parameter<'_>, elements: Elements<'_, '_>, step: &StepScale) {
        let s = self.scalars(step);
        let scalars = AdamWScalars { keep: if of.decay { s.keep } else { 1.0 }, ..s };
        let Elements { parameter, state, gradient } = elements;
        let [m, v] = state else { unreachable!("two moments are kept") };
        adamw(parameter, m, v, gradient, &scalars);
    }

    fn update_on_device(
        &self,
        elements: DeviceElements<'_>,
        step: &StepScale,
    ) -> (Tensor<1>, Vec<Tensor<1>>) {
        let parts: Vec<_> =
            elements.parts.iter().map(|(of, range)| (range.clone(), of.decay)).collect();
        let DeviceElements { parameter, state, gradient, .. } = elements;
        let Ok([mean, square]) = <[Tensor<1>; 2]>::try_from(state) else {
            unreachable!("two moments are kept")
        };
        let elements = AdamWElements { parameter, mean, square, gradient };
        let [parameter, mean, square] = on_device(elements, &parts, &self.scalars(step));
        (parameter, vec![mean, square])
    }
}
