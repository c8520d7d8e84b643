//! Weight handles: what an operation captures instead of a weight.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;

use burn::tensor::Tensor;
use parking_lot::Mutex;

use super::ParamSlot;
use crate::kernels::bf16::Packed;
use crate::meter::{Hold, MemoryKind, Meter};
use crate::params::{FlatLayout, ParamPlace};

/// The whole weights of one layer, present between its all-gather and its free.
#[derive(Clone)]
pub struct LayerWeights {
    name: Arc<str>,
    layer: usize,
    /// The parameters that train.
    layout: Arc<FlatLayout>,
    /// Those that do not, in a buffer of their own.
    frozen: Option<Arc<FlatLayout>>,
    gathered: Arc<Mutex<Option<Gathered>>>,
    /// Counts the packed copies that are kept; none where none is.
    keeps_packed: Option<Arc<Meter>>,
}

/// A gathered buffer, and what was made of it since.
struct Gathered {
    flat: Tensor<1>,
    frozen: Option<Tensor<1>>,
    packed: HashMap<(ParameterIndex, Side), Arc<PackedWeight>>,
}

/// Which parameter of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum ParameterIndex {
    Trained(usize),
    Frozen(usize),
}

/// Which products read a weight: those of a forward or those of a backward, which take its
/// transpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Side {
    Forward,
    Backward,
}

/// A bf16 weight as products on the CPU read it, whole or some rows after others.
pub(super) struct PackedWeight {
    parts: Vec<Packed>,
    /// Counts it where it is kept.
    _hold: Option<Hold>,
}

impl Deref for PackedWeight {
    type Target = [Packed];

    fn deref(&self) -> &[Packed] {
        &self.parts
    }
}

impl LayerWeights {
    /// Weights, not yet gathered, of layer number `layer` of its stage.
    pub fn new(name: &str, layer: usize, layout: Arc<FlatLayout>) -> Self {
        Self {
            name: name.into(),
            layer,
            layout,
            frozen: None,
            gathered: Arc::default(),
            keeps_packed: None,
        }
    }

    /// The same, with parameters that do not train beside those of the layout.
    pub fn with_frozen(self, frozen: Arc<FlatLayout>) -> Self {
        Self { frozen: Some(frozen), ..self }
    }

    /// The same, which keep bf16 weights as the CPU's products read them, from the first product
    /// until they are freed: the micro-batches of a unit share a gather (ZeroPP §3.1), and so what
    /// is made of it.
    pub fn keeping_packed(self, meter: &Arc<Meter>) -> Self {
        Self { keeps_packed: Some(meter.clone()), ..self }
    }

    /// Puts the gathered buffer (`[layout.len]`) in place.
    pub fn set(&self, flat: Tensor<1>) {
        self.set_both(flat, None);
    }

    /// Puts the gathered buffers in place: of what trains, and of what does not.
    pub fn set_both(&self, flat: Tensor<1>, frozen: Option<Tensor<1>>) {
        *self.gathered.lock() = Some(Gathered { flat, frozen, packed: HashMap::new() });
    }

    /// Drops the gathered buffer, and what was kept beside it.
    pub fn free(&self) {
        *self.gathered.lock() = None;
    }

    /// Whether the weights are gathered now.
    pub fn is_gathered(&self) -> bool {
        self.gathered.lock().is_some()
    }

    /// The table of the flat buffer of what trains.
    pub fn layout(&self) -> &Arc<FlatLayout> {
        &self.layout
    }

    /// The table of the flat buffer of what does not train, where there is something.
    pub fn frozen_layout(&self) -> Option<&Arc<FlatLayout>> {
        self.frozen.as_ref()
    }

    fn find(&self, name: &str) -> Option<ParameterIndex> {
        let frozen = || self.frozen.as_ref()?.find(name).map(ParameterIndex::Frozen);
        self.layout.find(name).map(ParameterIndex::Trained).or_else(frozen)
    }

    fn at(&self, place: ParameterIndex) -> &ParamPlace {
        match place {
            ParameterIndex::Trained(param) => &self.layout.params[param],
            ParameterIndex::Frozen(param) => {
                &self.frozen.as_ref().expect("found in it").params[param]
            }
        }
    }

    /// A handle to the parameter called `name`, with or without the layer's name before it.
    ///
    /// # Panics
    /// Panics if the layer has no such parameter or it does not have `D` dimensions: both are
    /// mistakes in the layer's code.
    pub fn weight<const D: usize>(&self, name: &str) -> Weight<D> {
        let Some(place) = self.find(name) else {
            let frozen = self.frozen.iter().flat_map(|frozen| &frozen.params);
            let all = self.layout.params.iter().chain(frozen);
            let known: Vec<_> = all.map(|p| p.spec.name.as_str()).collect();
            panic!("layer {} has no parameter {name}; it declared {known:?}", self.name);
        };
        let shape = &self.at(place).spec.shape;
        let Ok(shape) = <[usize; D]>::try_from(shape.as_slice()) else {
            panic!(
                "parameter {name} of layer {} has shape {shape:?}, not {D} dimensions",
                self.name
            )
        };
        Weight { weights: self.clone(), place, shape }
    }
}

/// A parameter as an operation sees it: resolved to a view of the gathered buffer when used.
#[derive(Clone)]
pub struct Weight<const D: usize> {
    weights: LayerWeights,
    place: ParameterIndex,
    shape: [usize; D],
}

impl<const D: usize> Weight<D> {
    /// The weight, a view of the gathered buffer.
    ///
    /// # Panics
    /// Panics if the layer is not gathered: a verified schedule never lets that happen.
    pub fn get(&self) -> Tensor<D> {
        let offset = self.weights.at(self.place).offset;
        let n: usize = self.shape.iter().product();
        let buffer = |gathered: &Gathered| match self.place {
            ParameterIndex::Trained(_) => Some(gathered.flat.clone()),
            ParameterIndex::Frozen(_) => gathered.frozen.clone(),
        };
        let flat = self.weights.gathered.lock().as_ref().and_then(buffer);
        let flat = flat.unwrap_or_else(|| panic!("weights of {} not gathered", self.weights.name));
        let part = offset..offset + n;
        #[cfg(feature = "cube")]
        if crate::cube::is_on(&flat) {
            return crate::cube::view_part(flat, part).reshape(self.shape);
        }
        flat.slice([part]).reshape(self.shape)
    }

    /// Whether what [`packed`](Self::packed) makes is kept.
    pub(super) fn keeps_packed(&self) -> bool {
        self.weights.keeps_packed.is_some()
    }

    /// The weight as the products on one side read it: what `make` packs, or what it packed for an
    /// earlier product since the weights were gathered, where that is kept.
    pub(super) fn packed(
        &self,
        side: Side,
        make: impl FnOnce() -> Vec<Packed>,
    ) -> Arc<PackedWeight> {
        let Some(meter) = &self.weights.keeps_packed else {
            return Arc::new(PackedWeight { parts: make(), _hold: None });
        };
        let key = (self.place, side);
        let kept = |gathered: &Gathered| gathered.packed.get(&key).cloned();
        if let Some(packed) = self.weights.gathered.lock().as_ref().and_then(kept) {
            return packed;
        }
        let parts = make();
        let bytes = parts.iter().map(Packed::bytes).sum::<usize>() as u64;
        let hold = Some(meter.hold(MemoryKind::PackedWeights, bytes));
        let packed = Arc::new(PackedWeight { parts, _hold: hold });
        if let Some(gathered) = self.weights.gathered.lock().as_mut() {
            gathered.packed.insert(key, packed.clone());
        }
        packed
    }

    /// Dimensions.
    pub fn shape(&self) -> [usize; D] {
        self.shape
    }

    /// Whether it trains: else it has no gradient, and there is nothing to keep for one.
    pub fn trains(&self) -> bool {
        matches!(self.place, ParameterIndex::Trained(_))
    }

    /// Place of its layer in the stage.
    pub(crate) fn layer(&self) -> usize {
        self.weights.layer
    }

    /// Where its gradient goes.
    ///
    /// # Panics
    /// Panics for a weight that does not train: an operation asks [`trains`](Self::trains) first.
    pub fn slot(&self) -> ParamSlot {
        let ParameterIndex::Trained(param) = self.place else {
            panic!("{} does not train", self.weights.at(self.place).spec.name)
        };
        ParamSlot { layer: self.weights.layer, param }
    }
}
