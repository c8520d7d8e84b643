//! Muon on shards: the matrices of blocks move along their mean gradient made orthogonal, all else
//! goes by AdamW (<https://kellerjordan.github.io/posts/muon/>, `torch.optim.Muon`).
//!
//! A step of a matrix is scaled by 0.2·√(its larger side), which gives it the size of AdamW's
//! (Liu et al. 2025, `match_rms_adamw`), so that one learning rate and one weight decay serve both.

use burn::tensor::Tensor;
use zeropp_core::kernels::muon::{self, COEFFICIENTS, EPS, STEPS};

use crate::adamw::AdamW;
use crate::rule::{DeviceElements, Elements, MatrixRule, Parameter, Role, StepScale, UpdateRule};

/// The root mean square of AdamW's steps, about.
const ADAMW_RMS: f64 = 0.2;

/// Hyper-parameters of one run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Muon {
    /// The share of the mean gradient that stays with each update.
    pub momentum: f64,
    /// Whether the direction is what the mean would be if the gradient came again.
    pub nesterov: bool,
    /// The rule of all parameters but the matrices of blocks; its weight decay is theirs, too.
    pub adamw: AdamW,
}

impl Muon {
    /// The factor on a parameter and the size of the step along a direction.
    fn scalars(&self, of: &Parameter<'_>, step: &StepScale) -> (f32, f32) {
        let decay = if of.decay { step.lr * self.adamw.weight_decay } else { 0.0 };
        let larger = of.shape.iter().max().copied().unwrap_or(1);
        ((1.0 - decay) as f32, (step.lr * ADAMW_RMS * (larger as f64).sqrt()) as f32)
    }
}

impl UpdateRule for Muon {
    fn name(&self) -> &str {
        "muon"
    }

    fn moments(&self, of: &Parameter<'_>) -> &[&'static str] {
        match self.matrix(of) {
            Some(_) => &["momentum_buffer"],
            None => self.adamw.moments(of),
        }
    }

    fn update(&self, of: &Parameter<'_>, elements: Elements<'_, '_>, step: &StepScale) {
        self.adamw.update(of, elements, step);
    }

    fn update_on_device(
        &self,
        elements: DeviceElements<'_>,
        step: &StepScale,
    ) -> (Tensor<1>, Vec<Tensor<1>>) {
        self.adamw.update_on_device(elements, step)
    }

    fn matrix(&self, of: &Parameter<'_>) -> Option<&dyn MatrixRule> {
        (of.role == Role::Hidden && of.shape.len() == 2).then_some(self)
    }
}

impl MatrixRule for Muon {
    fn direction(&self, elements: Elements<'_, '_>, out: &mut [f32], step: &StepScale) {
        let [m] = elements.moments else { unreachable!("one moment is kept of a matrix") };
        let gradient = elements.gradient;
        muon::direction(out, m, gradient, step.gradient, self.momentum, self.nesterov);
    }

    fn transform(&self, direction: &[f32], shape: [usize; 2]) -> Vec<f32> {
        muon::orthogonal(direction, shape)
    }

    fn transform_elements(&self, shape: [usize; 2]) -> usize {
        muon::orthogonal_elements(shape)
    }

    fn apply(
        &self,
        of: &Parameter<'_>,
        parameter: &mut [f32],
        direction: &[f32],
        step: &StepScale,
    ) {
        let (keep, size) = self.scalars(of, step);
        muon::apply(parameter, direction, keep, size);
    }

    fn direction_on_device(
        &self,
        moments: Vec<Tensor<1>>,
        gradient: Tensor<1>,
        step: &StepScale,
    ) -> (Tensor<1>, Vec<Tensor<1>>) {
        let towards = (1.0 - self.momentum) as f32;
        let m = moments.into_iter().next().expect("one moment is kept of a matrix");
        let g = gradient * step.gradient;
        let m = m.clone() + (g.clone() - m) * towards;
        let direction = match self.nesterov {
            true => g.clone() + (m.clone() - g) * self.momentum as f32,
            false => m.clone(),
        };
        (direction, vec![m])
    }

    fn transform_on_device(&self, direction: Tensor<2>) -> Tensor<2> {
        let [rows, cols] = direction.dims();
        let x = if rows > cols { direction.transpose() } else { direction };
        let norm = x.clone().square().sum().sqrt().clamp_min(EPS);
        let mut x = x / norm.reshape([1, 1]);
        let [a, b, c] = COEFFICIENTS;
        for _ in 0..STEPS {
            let gram = x.clone().matmul(x.clone().transpose());
            let polynomial = gram.clone() * b + gram.clone().matmul(gram) * c;
            x = x.clone() * a + polynomial.matmul(x);
        }
        if rows > cols { x.transpose() } else { x }
    }

    fn apply_on_device(
        &self,
        of: &Parameter<'_>,
        parameter: Tensor<1>,
        direction: Tensor<1>,
        step: &StepScale,
    ) -> Tensor<1> {
        let (keep, size) = self.scalars(of, step);
        parameter * keep - direction * size
    }
}
