//! The rule of biases that keep experts in balance, beside that of all other parameters
//! (DeepSeek-V3, arXiv 2412.19437, §2.1.2).

use std::sync::Arc;

use crate::rule::{
    Elements, Parameter, StateTensor, StepScale, UpdateRule, WholeParameter, WholeUpdate,
};

/// A rule for all parameters but the biases of a choice of experts, each of which moves by one step
/// towards the choice of experts that have too few tokens. Their sums over the batch say how many
/// more choices than the mean an expert has, in whole numbers, so that no mesh shows.
pub struct Balanced {
    /// That of all other parameters.
    pub rule: Arc<dyn UpdateRule>,
    /// The size of a bias's step.
    pub rate: f32,
    /// Whether a parameter, by its name, is such a bias.
    pub is_bias: fn(&str) -> bool,
}

impl Balanced {
    fn is_bias(&self, of: &Parameter<'_>) -> bool {
        (self.is_bias)(of.name)
    }
}

impl UpdateRule for Balanced {
    fn name(&self) -> &str {
        self.rule.name()
    }

    fn state(&self, of: &Parameter<'_>) -> Vec<StateTensor> {
        if self.is_bias(of) { Vec::new() } else { self.rule.state(of) }
    }

    fn whole(&self, of: &Parameter<'_>) -> Option<WholeUpdate> {
        if self.is_bias(of) { None } else { self.rule.whole(of) }
    }

    fn has_gradient(&self, of: &Parameter<'_>) -> bool {
        !self.is_bias(of)
    }

    fn update(&self, of: &Parameter<'_>, elements: Elements<'_, '_>, step: &StepScale) {
        if !self.is_bias(of) {
            return self.rule.update(of, elements, step);
        }
        for (bias, excess) in elements.parameter.iter_mut().zip(elements.gradient) {
            if *excess != 0.0 {
                *bias -= self.rate * excess.signum();
            }
        }
    }

    fn direction(
        &self,
        of: &Parameter<'_>,
        elements: Elements<'_, '_>,
        out: &mut [f32],
        step: &StepScale,
    ) {
        self.rule.direction(of, elements, out, step);
    }

    fn transform(
        &self,
        of: &Parameter<'_>,
        whole: WholeParameter<'_, '_>,
        step: &StepScale,
    ) -> Vec<f32> {
        self.rule.transform(of, whole, step)
    }

    fn apply(
        &self,
        of: &Parameter<'_>,
        parameter: &mut [f32],
        direction: &[f32],
        step: &StepScale,
    ) {
        self.rule.apply(of, parameter, direction, step);
    }
}
