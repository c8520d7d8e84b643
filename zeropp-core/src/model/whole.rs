//! A whole model in one memory, for looking at what it says and for writing text: no ranks, no
//! gradients.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use crate::cpu_tensor;
use crate::layer::{Head, LayerCx, Model, Part};
use crate::meter::Meter;
use crate::params::FlatLayout;
use crate::past::Past;
use crate::split::{LayerWeights, Masks, OpCx, WQueue};

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
    let whole = Whole::new(model, |name, shape, out| {
        let Some(values) = weights.get(name) else {
            return Err(EvaluationError::Missing { name: name.into() });
        };
        if values.len() != out.len() {
            let (name, found, shape) = (name.into(), values.len(), shape.to_vec());
            return Err(EvaluationError::Size { name, found, shape });
        }
        out.copy_from_slice(values);
        Ok(())
    })?;
    whole.logits(ids)
}

/// A model with its weights, in fp32 on the CPU, and what it has seen of a text.
pub struct Whole {
    parts: Vec<(Part, LayerCx)>,
    /// The keys and values of the text so far that each part keeps.
    pasts: Vec<Past>,
    /// The text so far, for models with a part that keeps nothing; `None` where all do.
    text: Option<Vec<u32>>,
}

impl Whole {
    /// `model` with the weights that `fill` writes, given a parameter's name and shape.
    ///
    /// # Errors
    /// The first of `fill`.
    pub fn new<E>(
        model: &Model,
        mut fill: impl FnMut(&str, &[usize], &mut [f32]) -> Result<(), E>,
    ) -> Result<Whole, E> {
        let with_weights = |part: &Part| Ok((part.clone(), context(part, &mut fill)?));
        let parts = model.parts.iter().map(with_weights).collect::<Result<Vec<_>, E>>()?;
        let pasts = vec![Past::default(); parts.len()];
        Ok(Whole { parts, pasts, text: None })
    }

    /// The logits `[b, s, V]` for `ids: [b, s]`; the text so far plays no part.
    ///
    /// # Errors
    /// A head without logits.
    ///
    /// # Panics
    /// As [`logits`](crate::model::logits).
    pub fn logits(&self, ids: Tensor<2, Int>) -> Result<Tensor<3>, EvaluationError> {
        let mut x = None;
        for (part, cx) in &self.parts {
            let input = || x.clone().expect("an embedding comes first");
            x = Some(match part {
                Part::Embedding(embedding) => embedding.forward(ids.clone(), cx),
                Part::Layer(layer) => layer.forward(input(), cx),
                Part::Head(head) => return logits_of(&**head, input(), cx),
                Part::Slice(_) => unreachable!("no part of a model"),
            });
        }
        Err(EvaluationError::NoLogits { name: "that the model lacks".into() })
    }

    /// Adds `ids` to the text; the logits of what follows it, one a token id.
    ///
    /// # Errors
    /// A head without logits.
    ///
    /// # Panics
    /// As [`logits`](crate::model::logits); also where `ids` is empty.
    pub fn extend(&mut self, ids: &[u32]) -> Result<Vec<f32>, EvaluationError> {
        assert!(!ids.is_empty(), "nothing to go on from");
        if self.text.is_none() {
            if let Some(logits) = self.extended(ids) {
                return logits.map(last);
            }
            // A part has found that it cannot, at the first tokens already.
            self.text = Some(Vec::new());
        }
        let text = self.text.as_mut().expect("made above");
        text.extend(ids);
        let text = tensor(text);
        self.logits(text).map(last)
    }

    /// Forgets the text.
    pub fn restart(&mut self) {
        self.pasts.fill(Past::default());
        self.text = self.text.take().map(|_| Vec::new());
    }

    fn extended(&mut self, ids: &[u32]) -> Option<Result<Tensor<3>, EvaluationError>> {
        let mut x = None;
        for ((part, cx), past) in self.parts.iter().zip(&mut self.pasts) {
            let input = |x: Option<Tensor<3>>| x.expect("an embedding comes first");
            match part {
                Part::Embedding(embedding) => x = Some(embedding.forward(tensor(ids), cx)),
                Part::Layer(layer) => x = Some(layer.extend(input(x), cx, past)?),
                Part::Head(head) => {
                    let last = input(x).narrow(1, ids.len() - 1, 1);
                    return Some(logits_of(&**head, last, cx));
                }
                Part::Slice(_) => unreachable!("no part of a model"),
            }
        }
        Some(Err(EvaluationError::NoLogits { name: "that the model lacks".into() }))
    }
}

fn logits_of(head: &dyn Head, x: Tensor<3>, cx: &LayerCx) -> Result<Tensor<3>, EvaluationError> {
    let name = head.name().to_owned();
    head.logits(x, cx).ok_or(EvaluationError::NoLogits { name })
}

/// One text as `[1, n]`.
fn tensor(ids: &[u32]) -> Tensor<2, Int> {
    let ids: Vec<i64> = ids.iter().map(|id| i64::from(*id)).collect();
    let shape = [1, ids.len()];
    Tensor::from_data(TensorData::new(ids, shape), &Device::flex())
}

/// The logits of the last token.
fn last(logits: Tensor<3>) -> Vec<f32> {
    let [_, n, _] = logits.dims();
    let last = logits.narrow(1, n - 1, 1);
    last.into_data().try_to_vec().expect("fp32, as the weights")
}

/// A part's weights, and operations that keep nothing.
fn context<E>(
    part: &Part,
    fill: &mut impl FnMut(&str, &[usize], &mut [f32]) -> Result<(), E>,
) -> Result<LayerCx, E> {
    let layout = Arc::new(FlatLayout::new(part.parameters(), 1));
    let mut flat = vec![0.0; layout.len];
    for place in &layout.params {
        let (name, shape) = (&place.spec.name, &place.spec.shape);
        fill(name, shape, &mut flat[place.offset..][..place.spec.len()])?;
    }
    let gathered = LayerWeights::new(part.name(), 0, layout.clone());
    gathered.set(cpu_tensor::from_vec(flat, [layout.len]));
    let op = OpCx {
        queue: WQueue::default(),
        meter: Meter::new(),
        token: Tensor::zeros([1], (&Device::flex(), DType::F32)),
        makers: None,
        vault: None,
        output_wanted: true,
        forward_grads: None,
        masks: Masks::default(),
        routers: None,
        slice: None,
    };
    Ok(LayerCx { weights: gathered, op, output_wanted: true })
}
