//! What the slices of a sample need of each other on one stage: keys and values of the slices
//! before, and in the backward sums that the slices behind have begun (ADR 91).
//!
//! Operations that need it come in one order in every forward of a layer, so that the layer's place
//! in the stage and the operation's number in the layer name what is of one operation.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::Tensor;
use parking_lot::Mutex;

use super::slot::Saved;
use crate::cpu_tensor;
use crate::meter::{Hold, MemoryKind, Meter};

/// A layer's place in its stage, and the number of one of its operations.
type OperationPlace = (usize, usize);

/// The context of one sample on one stage: from its first slice's F to that slice's B. A clone is a
/// handle to the same.
#[derive(Clone)]
pub struct SampleContext(Arc<Mutex<ContextState>>);

struct ContextState {
    /// Tokens of each slice.
    slices: Arc<[usize]>,
    operations: HashMap<OperationPlace, OperationContext>,
    /// The loss of the slices whose F has been: a sum over their tokens.
    loss: f64,
}

/// What there is of one operation.
enum OperationContext {
    Keys(KeyContext),
    Vectors(VectorContext),
}

/// Of an attention.
struct KeyContext {
    /// Elements of a token's keys and values.
    columns: usize,
    /// Rows that end with keys and values, of each slice from its F to its B: `[1, tokens, width]`.
    rows: Vec<Option<Saved<3>>>,
    /// Their gradients so far, of each slice from the last one's B to its own.
    sums: Vec<Option<HeldSums>>,
}

/// Of an operation with vectors among its weights, whose gradients are sums over tokens.
struct VectorContext {
    elements: usize,
    sums: Option<HeldSums>,
}

/// fp32 sums that are counted.
struct HeldSums {
    sums: Vec<f32>,
    _hold: Hold,
}

impl HeldSums {
    fn zeros(elements: usize, meter: &Arc<Meter>) -> Self {
        let hold = meter.hold(MemoryKind::Activation, 4 * elements as u64);
        Self { sums: vec![0.0; elements], _hold: hold }
    }
}

impl SampleContext {
    /// That of a sample with slices of so many tokens, of which none has been.
    pub fn new(slices: Arc<[usize]>) -> Self {
        Self(Arc::new(Mutex::new(ContextState { slices, operations: HashMap::new(), loss: 0.0 })))
    }

    /// Before the B of the sample's last slice: makes the sums of gradients that slices hand on.
    pub fn begin_backward(&self, meter: &Arc<Meter>) {
        let ContextState { slices, operations, .. } = &mut *self.0.lock();
        let earlier = slices.len() - 1;
        for of in operations.values_mut() {
            match of {
                OperationContext::Keys(keys) => {
                    let zeros = |tokens| HeldSums::zeros(tokens * keys.columns, meter);
                    keys.sums = slices[..earlier].iter().map(|n| Some(zeros(*n))).collect();
                }
                OperationContext::Vectors(vectors) => {
                    vectors.sums = Some(HeldSums::zeros(vectors.elements, meter));
                }
            }
        }
    }

    /// After the B of a slice: drops what its own keys and values were handed.
    pub fn end_backward(&self, slice: usize) {
        for of in self.0.lock().operations.values_mut() {
            if let OperationContext::Keys(keys) = of
                && let Some(sums) = keys.sums.get_mut(slice)
            {
                *sums = None;
            }
        }
    }
}

/// A slice of a sample, as the operations of a layer see it.
#[derive(Clone)]
pub struct SliceCx {
    index: usize,
    tokens: Range<usize>,
    sample_tokens: usize,
    context: SampleContext,
    layer: usize,
    /// Operations of the layer that have asked for a place.
    operations: Arc<AtomicUsize>,
}

impl SliceCx {
    /// Slice number `index` of the sample that `context` is of.
    pub fn new(context: &SampleContext, index: usize) -> Self {
        let slices = context.0.lock().slices.clone();
        let first = slices[..index].iter().sum();
        Self {
            index,
            tokens: first..first + slices[index],
            sample_tokens: slices.iter().sum(),
            context: context.clone(),
            layer: 0,
            operations: Arc::default(),
        }
    }

    /// The same for the forward of the layer at this place of the stage.
    pub fn at_layer(&self, layer: usize) -> Self {
        Self { layer, operations: Arc::default(), ..self.clone() }
    }

    /// The slice's tokens, counted from the sample's first.
    pub fn tokens(&self) -> Range<usize> {
        self.tokens.clone()
    }

    /// Tokens of the whole sample.
    pub fn sample_tokens(&self) -> usize {
        self.sample_tokens
    }

    fn is_last(&self) -> bool {
        self.tokens.end == self.sample_tokens
    }

    fn place(&self) -> OperationPlace {
        (self.layer, self.operations.fetch_add(1, Ordering::Relaxed))
    }

    /// Changes the loss of the sample's slices so far, a sum over their tokens.
    pub(crate) fn with_loss<T>(&self, change: impl FnOnce(&mut f64) -> T) -> T {
        change(&mut self.context.0.lock().loss)
    }

    /// For an attention's forward: what it shares with those of other slices, whose rows end with
    /// so many `columns` of keys and values.
    pub(crate) fn keys(&self, columns: usize) -> SliceKeys {
        let place = self.place();
        let mut state = self.context.0.lock();
        let n = state.slices.len();
        let none = KeyContext { columns, rows: (0..n).map(|_| None).collect(), sums: Vec::new() };
        state.operations.entry(place).or_insert(OperationContext::Keys(none));
        drop(state);
        SliceKeys {
            slice: self.index,
            is_last: self.is_last(),
            place,
            context: self.context.clone(),
        }
    }

    /// For a forward of an operation with vectors among its weights: what hands their gradients
    /// from the B of one slice to that of the one before it. `vectors` has the elements of each,
    /// and whether it trains.
    pub(crate) fn vectors<const N: usize>(&self, vectors: [(usize, bool); N]) -> SliceVectors<N> {
        let place = self.place();
        let elements = vectors.iter().filter(|(_, trains)| *trains).map(|(n, _)| n).sum();
        let none = VectorContext { elements, sums: None };
        let mut state = self.context.0.lock();
        state.operations.entry(place).or_insert(OperationContext::Vectors(none));
        drop(state);
        SliceVectors { vectors, slice: self.index, place, context: self.context.clone() }
    }
}

/// Keys and values of a sample's slices in one attention, and the sums of their gradients.
#[derive(Clone)]
pub(crate) struct SliceKeys {
    slice: usize,
    is_last: bool,
    place: OperationPlace,
    context: SampleContext,
}

impl SliceKeys {
    fn with<T>(&self, f: impl FnOnce(&mut KeyContext) -> T) -> T {
        match self.context.0.lock().operations.get_mut(&self.place) {
            Some(OperationContext::Keys(keys)) => f(keys),
            _ => unreachable!("operations of a layer come in one order"),
        }
    }

    /// The rows of the slices before, the first slice first.
    pub(crate) fn earlier(&self) -> Vec<Tensor<3>> {
        self.with(|keys| {
            let row = |rows: &Option<Saved<3>>| {
                rows.as_ref().expect("slices come in their order, and go in reverse").get()
            };
            keys.rows[..self.slice].iter().map(row).collect()
        })
    }

    /// Keeps the slice's own rows for those behind it, if there are any.
    pub(crate) fn keep(&self, rows: impl FnOnce() -> Saved<3>) {
        if !self.is_last {
            let rows = rows();
            self.with(|keys| keys.rows[self.slice] = Some(rows));
        }
    }

    /// Drops them.
    pub(crate) fn forget(&self) {
        drop(self.with(|keys| keys.rows[self.slice].take()));
    }

    /// What later slices left for this one's keys and values, none for the last slice, and the sums
    /// of the earlier ones, which `f` adds to.
    pub(crate) fn with_sums<T>(&self, f: impl FnOnce(Option<&[f32]>, Vec<&mut [f32]>) -> T) -> T {
        let mut taken = self.with(|keys| std::mem::take(&mut keys.sums));
        let (earlier, own) = taken.split_at_mut(self.slice);
        let own = own.first().and_then(|own| own.as_ref()).map(|own| &own.sums[..]);
        let given = f(own, earlier.iter_mut().map(sums_of).collect());
        self.with(|keys| keys.sums = taken);
        given
    }
}

fn sums_of(earlier: &mut Option<HeldSums>) -> &mut [f32] {
    &mut earlier.as_mut().expect("an earlier slice's B comes later").sums
}

/// Gradients of vectors, which the B of slices hand on.
#[derive(Clone)]
pub(crate) struct SliceVectors<const N: usize> {
    vectors: [(usize, bool); N],
    slice: usize,
    place: OperationPlace,
    context: SampleContext,
}

impl<const N: usize> SliceVectors<N> {
    fn with<T>(&self, f: impl FnOnce(&mut [f32]) -> T) -> T {
        match self.context.0.lock().operations.get_mut(&self.place) {
            Some(OperationContext::Vectors(VectorContext { sums: Some(held), .. })) => {
                f(&mut held.sums)
            }
            _ => unreachable!("made before the sample's first B"),
        }
    }

    /// The sums of the slices behind, one vector after the other; zeros of one that does not train.
    pub(crate) fn begun(&self) -> Vec<f32> {
        self.with(|held| {
            let mut all = Vec::new();
            let mut at = 0;
            for (n, trains) in self.vectors {
                match trains {
                    true => {
                        all.extend_from_slice(&held[at..at + n]);
                        at += n;
                    }
                    false => all.resize(all.len() + n, 0.0),
                }
            }
            all
        })
    }

    /// Hands the sums with this slice's part on; gives them back from the first slice, of the
    /// whole sample then.
    pub(crate) fn hand_on(&self, sums: [Tensor<1>; N]) -> Option<[Tensor<1>; N]> {
        if self.slice == 0 {
            return Some(sums);
        }
        self.with(|held| {
            let mut at = 0;
            for ((n, _), sums) in self.vectors.iter().zip(&sums).filter(|((_, trains), _)| *trains)
            {
                let sums = cpu_tensor::on_cpu(sums).expect("slices are for the CPU");
                held[at..at + n].copy_from_slice(sums.as_slice());
                at += n;
            }
        });
        None
    }
}
