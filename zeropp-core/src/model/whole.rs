//! A whole model in one memory, for looking at what it says: no ranks, no gradients.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::{DType, Device, Int, Tensor};

use crate::cpu_tensor;
use crate::layer::{LayerCx, Model, Part};
use crate::meter::Meter;
use crate::params::FlatLayout;
use crate::split::{LayerWeights, OpCx, WQueue};

/// Why a model could not be evaluated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EvaluationError {
    /// A parameter has no weights.
    #[error("the weights have no {name}; the model's parameters are named so")]
    Missing {
        /// The parameter.
        name: String,
    },
    /// A parameter's weights are not as many as it has.
    #[error("{name} has {found} elements, but its shape is {shape:?}")]
    Size {
        /// The parameter.
        name: String,
        /// Elements that were given.
        found: usize,
        /// Its shape in the model.
        shape: Vec<usize>,
    },
    /// The model's head has no logits.
    #[error("the head {name} does not give logits")]
    NoLogits {
        /// The head.
        name: String,
    },
}

/// The logits `[b, s, V]` of `model` for `ids: [b, s]`, in fp32 on the CPU, from weights by
/// parameter name, each in row-major order.
///
/// # Errors
/// Weights that are missing or of another size, and a head without logits.
///
/// # Panics
/// Panics if an id is not below the model's vocabulary, or a sample is longer than it can take.
pub fn logits(
    model: &Model,
    weights: &BTreeMap<String, Vec<f32>>,
    ids: Tensor<2, Int>,
) -> Result<Tensor<3>, EvaluationError> {
    let mut x = None;
    for part in &model.parts {
        let cx = context(part, weights)?;
        let input = || x.clone().expect("an embedding comes first");
        x = Some(match part {
            Part::Embedding(embedding) => embedding.forward(ids.clone(), &cx),
            Part::Layer(layer) => layer.forward(input(), &cx),
            Part::Head(head) => {
                let name = head.name().to_owned();
                return head.logits(input(), &cx).ok_or(EvaluationError::NoLogits { name });
            }
        });
    }
    Err(EvaluationError::NoLogits { name: "that the model lacks".into() })
}

/// A part's weights, and operations that keep nothing.
fn context(part: &Part, weights: &BTreeMap<String, Vec<f32>>) -> Result<LayerCx, EvaluationError> {
    let layout = Arc::new(FlatLayout::new(part.parameters(), 1));
    let mut flat = vec![0.0; layout.len];
    for place in &layout.params {
        let (name, shape) = (&place.spec.name, &place.spec.shape);
        let Some(values) = weights.get(name) else {
            return Err(EvaluationError::Missing { name: name.clone() });
        };
        if values.len() != place.spec.len() {
            let (name, found) = (name.clone(), values.len());
            return Err(EvaluationError::Size { name, found, shape: shape.clone() });
        }
        flat[place.offset..][..values.len()].copy_from_slice(values);
    }
    let gathered = LayerWeights::new(part.name(), 0, layout.clone());
    gathered.set(cpu_tensor::from_vec(flat, [layout.len]));
    let op = OpCx {
        queue: WQueue::default(),
        meter: Meter::new(),
        token: Tensor::zeros([1], (&Device::flex(), DType::F32)),
        recompute_attention: false,
        forward_grads: None,
    };
    Ok(LayerCx { weights: gathered, op })
}
