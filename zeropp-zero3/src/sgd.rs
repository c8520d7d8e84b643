//! Stochastic gradient descent on a flat shard, with PyTorch's semantics: weight decay is a part of
//! the gradient, and the velocity sums gradients.

use burn::tensor::Tensor;
use zeropp_core::kernels::sgd::{SgdScalars, sgd, sgd_with_momentum};

use crate::rule::{DeviceElements, Elements, Parameter, StateTensor, StepScale, UpdateRule};

/// Hyper-parameters of one run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// The share of the velocity that stays with each update; 0 keeps none.
    pub momentum: f64,
    /// Whether a step looks ahead along the velocity.
    pub nesterov: bool,
    /// Weight decay, added to the gradient.
    pub weight_decay: f64,
}

impl Sgd {
    fn scalars(&self, of_decay: bool, step: &StepScale) -> SgdScalars {
        SgdScalars {
            gradient: step.gradient,
            decay: if of_decay { self.weight_decay as f32 } else { 0.0 },
            momentum: self.momentum as f32,
            nesterov: self.nesterov,
            lr: step.lr as f32,
        }
    }
}

impl UpdateRule for Sgd {
    fn name(&self) -> &str {
        "sgd"
    }

    fn state(&self, _: &Parameter<'_>) -> Vec<StateTensor> {
        let velocity = (self.momentum > 0.0).then(|| StateTensor::per_element("momentum_buffer"));
        velocity.into_iter().collect()
    }

    fn update(&self, of: &Parameter<'_>, elements: Elements<'_, '_>, step: &StepScale) {
        let s = self.scalars(of.decay, step);
        match elements.state {
            [m] => sgd_with_momentum(elements.parameter, m, elements.gradient, &s),
            _ => sgd(elements.parameter, elements.gradient, &s),
        }
    }

    fn update_on_device(
        &self,
        elements: DeviceElements<'_>,
        step: &StepScale,
    ) -> (Tensor<1>, Vec<Tensor<1>>) {
        let s = self.scalars(true, step);
        let decay = elements.by_decay(s.decay, 0.0);
        let DeviceElements { parameter, state, gradient, .. } = elements;
        let g = gradient * s.gradient + parameter.clone() * decay;
        let Some(m) = state.into_iter().next() else {
            return (parameter - g * s.lr, Vec::new());
        };
        let m = m * s.momentum + g.clone();
        let along = if s.nesterov { g + m.clone() * s.momentum } else { m.clone() };
        (parameter - along * s.lr, vec![m])
    }
}
