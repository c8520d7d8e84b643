//! Where in a step a value that is not finite appeared first.

use std::cmp::Reverse;

use serde::{Deserialize, Serialize};

/// The kind of a value that was not finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Value {
    /// The output of a stage's F: activations, or the loss.
    Output,
    /// The gradient of a layer's weights.
    Gradient,
}

/// Where a value was not finite.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotFinite {
    /// The kind of value.
    pub value: Value,
    /// Micro-batch of the rank.
    pub micro_batch: usize,
    /// Stage, 0..S.
    pub stage: usize,
    /// The layer's place in the stage.
    pub layer: usize,
    /// The layer's name; empty for an output, which is its stage's.
    pub name: String,
}

impl NotFinite {
    /// Orders values of one kind as they appear: micro-batch by micro-batch, outputs along the
    /// stages, gradients against them.
    pub fn order(&self) -> impl Ord + use<> {
        let along = if self.value == Value::Output { self.stage } else { 0 };
        (self.value, self.micro_batch, along, Reverse((self.stage, self.layer)))
    }
}

/// Keeps the first of each kind that one rank sees.
#[derive(Default)]
pub(super) struct NotFiniteSearch(Vec<NotFinite>);

impl NotFiniteSearch {
    pub(super) fn note(
        &mut self,
        value: Value,
        micro_batch: usize,
        stage: usize,
        layer: usize,
        name: String,
    ) {
        let new = NotFinite { value, micro_batch, stage, layer, name };
        match self.0.iter_mut().find(|old| old.value == value) {
            Some(old) if new.order() < old.order() => *old = new,
            Some(_) => {}
            None => self.0.push(new),
        }
    }

    pub(super) fn found(self) -> Vec<NotFinite> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_appear_along_the_stages_and_gradients_against_them() {
        let mut search = NotFiniteSearch::default();
        for value in [Value::Gradient, Value::Output] {
            for (micro_batch, stage, layer) in
                [(1, 1, 0), (0, 1, 0), (0, 2, 1), (0, 2, 0), (1, 3, 0)]
            {
                search.note(value, micro_batch, stage, layer, String::new());
            }
        }
        let found = search.found();
        let at = |value| {
            let one = found.iter().find(|one| one.value == value).unwrap();
            (one.micro_batch, one.stage, one.layer)
        };
        assert_eq!((at(Value::Output), at(Value::Gradient)), ((0, 1, 0), (0, 2, 1)));
    }
}
