//! Lion on a flat shard (Chen et al. 2023, algorithm 2): each weight moves by the learning rate, in
//! the direction of a mean gradient's sign. One moment in place of AdamW's two.

use burn::tensor::Tensor;
use zeropp_core::kernels::lion::{LionScalars, lion};

use crate::rule::{DeviceElements, Elements, Parameter, StateTensor, StepScale, UpdateRule};

/// Hyper-parameters of one run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lion {
    /// The mean's share of what gives the direction.
    pub beta1: f64,
    /// The share of the mean that stays with each update.
    pub beta2: f64,
    /// Decoupled weight decay, times the learning rate.
    pub weight_decay: f64,
}

impl Lion {
    fn scalars(&self, decays: bool, step: &StepScale) -> LionScalars {
        LionScalars {
            gradient: step.gradient,
            beta1: self.beta1 as f32,
            towards1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            towards2: (1.0 - self.beta2) as f32,
            lr: step.lr as f32,
            keep: if decays { (1.0 - step.lr * self.weight_decay) as f32 } else { 1.0 },
        }
    }
}

impl UpdateRule for Lion {
    fn name(&self) -> &str {
        "lion"
    }

    fn state(&self, _: &Parameter<'_>) -> Vec<StateTensor> {
        vec![StateTensor::per_element("exp_avg")]
    }

    fn update(&self, of: &Parameter<'_>, elements: Elements<'_, '_>, step: &StepScale) {
        let [m] = elements.state else { unreachable!("one moment is kept") };
        lion(elements.parameter, m, elements.gradient, &self.scalars(of.decay, step));
    }

    fn update_on_device(
        &self,
        elements: DeviceElements<'_>,
        step: &StepScale,
    ) -> (Tensor<1>, Vec<Tensor<1>>) {
        let s = self.scalars(true, step);
        let keep = elements.by_decay(s.keep, 1.0);
        let DeviceElements { parameter, state, gradient, .. } = elements;
        let m = state.into_iter().next().expect("one moment is kept");
        let g = gradient * s.gradient;
        let direction = m.clone() * s.beta1 + g.clone() * s.towards1;
        let m = m * s.beta2 + g * s.towards2;
        (parameter * keep - direction.sign() * s.lr, vec![m])
    }
}
