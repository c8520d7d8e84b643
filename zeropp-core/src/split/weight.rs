//! Weight handles: what an operation captures instead of a weight.

use std::sync::Arc;

use burn::tensor::Tensor;
use parking_lot::Mutex;

use super::ParamSlot;
use crate::params::FlatLayout;

/// The whole weights of one layer, present between its all-gather and its free.
#[derive(Clone)]
pub struct LayerWeights {
    name: Arc<str>,
    layer: usize,
    layout: Arc<FlatLayout>,
    flat: Arc<Mutex<Option<Tensor<1>>>>,
}

impl LayerWeights {
    /// Weights, not yet gathered, of layer number `layer` of its stage.
    pub fn new(name: &str, layer: usize, layout: Arc<FlatLayout>) -> Self {
        Self { name: name.into(), layer, layout, flat: Arc::default() }
    }

    /// Puts the gathered buffer (`[layout.len]`) in place.
    pub fn set(&self, flat: Tensor<1>) {
        *self.flat.lock() = Some(flat);
    }

    /// Drops the gathered buffer.
    pub fn free(&self) {
        *self.flat.lock() = None;
    }

    /// Whether the weights are gathered now.
    pub fn is_gathered(&self) -> bool {
        self.flat.lock().is_some()
    }

    /// The table of the flat buffer.
    pub fn layout(&self) -> &Arc<FlatLayout> {
        &self.layout
    }

    /// A handle to the parameter called `name`, with or without the layer's name before it.
    ///
    /// # Panics
    /// Panics if the layer has no such parameter or it does not have `D` dimensions: both are
    /// mistakes in the layer's code.
    pub fn weight<const D: usize>(&self, name: &str) -> Weight<D> {
        let Some(param) = self.layout.find(name) else {
            let known: Vec<_> = self.layout.params.iter().map(|p| p.spec.name.as_str()).collect();
            panic!("layer {} has no parameter {name}; it declared {known:?}", self.name);
        };
        let shape = &self.layout.params[param].spec.shape;
        let Ok(shape) = <[usize; D]>::try_from(shape.as_slice()) else {
            panic!(
                "parameter {name} of layer {} has shape {shape:?}, not {D} dimensions",
                self.name
            )
        };
        Weight { weights: self.clone(), param, shape }
    }
}

/// A parameter as an operation sees it: resolved to a view of the gathered buffer when used.
#[derive(Clone)]
pub struct Weight<const D: usize> {
    weights: LayerWeights,
    param: usize,
    shape: [usize; D],
}

impl<const D: usize> Weight<D> {
    /// The weight, a view of the gathered buffer.
    ///
    /// # Panics
    /// Panics if the layer is not gathered: a verified schedule never lets that happen.
    pub fn get(&self) -> Tensor<D> {
        let offset = self.weights.layout.params[self.param].offset;
        let n: usize = self.shape.iter().product();
        let flat = self.weights.flat.lock().clone();
        let flat = flat.unwrap_or_else(|| panic!("weights of {} not gathered", self.weights.name));
        flat.slice([offset..offset + n]).reshape(self.shape)
    }

    /// Dimensions.
    pub fn shape(&self) -> [usize; D] {
        self.shape
    }

    /// Where its gradient goes.
    pub fn slot(&self) -> ParamSlot {
        ParamSlot { layer: self.weights.layer, param: self.param }
    }
}
