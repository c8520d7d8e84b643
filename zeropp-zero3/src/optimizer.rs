//! The optimizer step of one rank: tied gradients, the global norm, the verdict all ranks share,
//! and the update of what the rank owns.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Tensor;
use zeropp_comm::groups::Groups;
use zeropp_comm::{AllBytes, CommResult, Pending};
use zeropp_core::meter::{Hold, MemoryKind, Meter};
use zeropp_core::optimizer::Out;
use zeropp_core::params::FlatLayout;

use crate::ahead::KeptRead;
use crate::exact::ExactSum;
use crate::layer_state::{LayerState, OwnedRange, elements};
use crate::layer_sums::LayerSums;
use crate::norm::add_squares;
use crate::returning::{Returning, Updated};
use crate::rollback::{LayerBefore, UpdateInput};
use crate::rule::{ParameterGroups, Role, StepScale};
use crate::sharers::UpdateGroup;
use crate::stage::{ParamExport, ShardedStage};
use crate::state_file::StateFile;
use crate::tied::{self, Tie};
use crate::tied_rows::{RowExchange, TiedRows};
use crate::under_way::UnderWay;
use crate::words::{each_piece, own_copy};

/// The learning rate of each step, counted from 1.
pub type LearningRateFn = Arc<dyn Fn(u64) -> f64 + Send + Sync>;

/// Options for the use of reduced gradients.
#[derive(Clone)]
pub struct OptimizerOptions {
    /// How parameters are updated.
    pub parameters: ParameterGroups,
    /// Learning rate over the steps.
    pub lr: LearningRateFn,
    /// Largest global norm; 0 does not clip.
    pub clip: f64,
    /// The weight shared by embedding and head.
    pub tie: Option<Tie>,
    /// The same where ranks share the head.
    pub tied_rows: Option<TiedRows>,
}

/// The outcome of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepOutcome {
    /// Global norm of the gradient before clipping; infinite where an element was not finite.
    pub grad_norm: f64,
    /// Learning rate used.
    pub lr: f64,
    /// Whether no rank changed anything because the norm was not finite.
    pub skipped: bool,
    /// Whether it was done before the norm was known, and taken back.
    pub rolled_back: bool,
    /// All-gathers of this rank that made parameters whole.
    pub gathers: u64,
    /// Bytes that this rank sent for them, and for a tied weight.
    pub sent_bytes: u64,
}

/// Optimizer state of one rank.
pub struct Optimizer {
    pub(crate) options: OptimizerOptions,
    pub(crate) groups: Groups,
    pub(crate) zero1: bool,
    /// The state of each layer of each stage, in the order of the stages.
    pub(crate) state: Vec<Vec<LayerState>>,
    pub(crate) updates: u64,
    captured: Option<Vec<ParamExport>>,
    /// Set while a step's layers are looked at: what is found of each, by stage and layer.
    pub(crate) watched: Option<HashMap<(usize, usize), LayerSums>>,
    pub(crate) meter: Arc<Meter>,
    /// Where parameters and state are, if not in memory.
    pub(crate) file: Option<Arc<StateFile>>,
    /// An update of it beside the next step.
    pub(crate) under_way: Option<Arc<UnderWay>>,
    /// What the next one takes first, on its way into a device's memory.
    pub(crate) first: Option<Vec<KeptRead>>,
    /// Counts the pieces of updates beside the next step, which CPUs have at any time.
    _pieces: Option<Hold>,
    pub(crate) held_back: Option<Box<dyn FnOnce() -> CommResult<()> + Send>>,
    /// The update that is done and not validated.
    pub(crate) early: Option<Early>,
    holds: Vec<Hold>,
}

/// An update that may prove wrong.
pub(crate) struct Early {
    /// All ranks' parts of the norm, until they are read.
    pub(crate) norm: Option<Pending<AllBytes>>,
    /// Its outcome; without a norm until that is read.
    pub(crate) outcome: StepOutcome,
    /// Number of the update.
    pub(crate) update: u64,
    /// The layers that it changed.
    pub(crate) before: Vec<LayerBefore>,
    /// Bytes that this rank sent to sum its gradients.
    pub(crate) summed_bytes: u64,
}

/// The place in its layer of the elements that a rank updates; found from the parameters, before
/// they are taken.
#[derive(Clone)]
pub(crate) struct ShardRange {
    pub(crate) layer: usize,
    role: Role,
    /// Elements of the rank's shard.
    pub(crate) shard: usize,
    /// The updated ones among them.
    pub(crate) range: Range<usize>,
    /// The first of those, within the layer's buffer.
    first: usize,
}

impl ShardRange {
    /// The place of some of the updated elements.
    pub(crate) fn part(&self, of: &Range<usize>) -> ShardRange {
        let range = self.range.start + of.start..self.range.start + of.end;
        ShardRange { range, first: self.first + of.start, ..*self }
    }

    /// The elements, in the layer's buffer.
    pub(crate) fn owned<'a>(&self, layout: &'a FlatLayout) -> OwnedRange<'a> {
        OwnedRange { layout, role: self.role, start: self.first, len: self.range.len() }
    }
}

impl Optimizer {
    /// Moments of zero for `stages`, and means that are their weights. A tied weight of which this
    /// rank has both layers is then the embedding's alone, until [`share_tied`](Self::share_tied).
    pub fn new(
        stages: &mut [ShardedStage],
        groups: &Groups,
        options: OptimizerOptions,
        zero1: bool,
        meter: &Arc<Meter>,
    ) -> Self {
        let mut optimizer = Self {
            options,
            groups: groups.clone(),
            zero1,
            state: Vec::new(),
            updates: 0,
            captured: None,
            watched: None,
            file: stages.iter().find_map(|stage| stage.file().cloned()),
            under_way: None,
            first: None,
            _pieces: None,
            held_back: None,
            early: None,
            meter: meter.clone(),
            holds: Vec::new(),
        };
        tied::release(stages, optimizer.options.tie);
        optimizer.restart(stages);
        if optimizer.file.as_ref().is_some_and(|file| file.out == Out::Behind) {
            let bytes = optimizer.piece_bytes(stages);
            optimizer._pieces = Some(meter.hold(MemoryKind::Optimizer, bytes));
        }
        optimizer
    }

    /// Begins anew with the weights that `stages` have.
    pub fn restart(&mut self, stages: &[ShardedStage]) {
        self.forget();
        for stage in stages {
            let state = (0..stage.layers.len()).map(|layer| self.fresh(stage, layer)).collect();
            self.state.push(state);
        }
        self.hold_state();
    }

    /// Makes the parameters of a tied head those of the embedding, where this rank has both: to be
    /// called when `stages` have the weights that they begin with.
    pub fn share_tied(&self, stages: &mut [ShardedStage]) {
        tied::share(stages, self.options.tie);
    }

    /// Whether the layer of a stage, of this rank, has the embedding's parameters and nothing that
    /// is kept of them.
    pub(crate) fn is_shared(&self, at: (usize, usize)) -> bool {
        self.options.tie.is_some_and(|tie| tie.is_on_one_rank() && tie.last == at)
    }

    /// Whether the layer of a stage is an embedding that slices of the head update.
    pub(crate) fn is_returned(&self, at: (usize, usize)) -> bool {
        self.options.tied_rows.as_ref().is_some_and(|tied| tied.embedding == at)
    }

    /// Gives up all that is kept.
    pub fn forget(&mut self) {
        self.wait_for_update();
        self.put_back();
        self.holds.clear();
        self.state.clear();
    }

    /// The initial state of a layer that begins with the weights that `stage` has.
    pub(crate) fn fresh(&self, stage: &ShardedStage, layer: usize) -> LayerState {
        let at = (stage.index(), layer);
        if self.is_shared(at) || self.is_returned(at) {
            return LayerState::none();
        }
        let (owned, parameters) = (self.owned(stage, layer), &self.options.parameters);
        let (param, start) = (&stage.layers[layer].param, stage.owned_range(layer).0);
        LayerState::new(owned, parameters, param, start, self.file.as_ref())
    }

    /// The part of a layer that this rank updates.
    pub(crate) fn owned<'a>(&self, stage: &'a ShardedStage, layer: usize) -> OwnedRange<'a> {
        let owned = stage.owned(layer);
        let OptimizerOptions { tie, tied_rows, .. } = &self.options;
        let is_slice = tied_rows.as_ref().is_some_and(|tied| tied.slices == stage.index());
        if is_slice || tie.is_some_and(|tie| tie.last == (stage.index(), layer)) {
            OwnedRange { role: Role::Embedding, ..owned }
        } else {
            owned
        }
    }

    /// Counts the state as it is now.
    pub(crate) fn hold_state(&mut self) {
        // An update may have moved it, and what it was before is gone.
        self.holds.clear();
        let tensors = self.state.iter().flatten().flat_map(LayerState::tensors);
        let hold = |t| self.meter.hold_tensor(MemoryKind::Optimizer, t);
        self.holds = tensors.map(hold).collect();
    }

    /// From the next step on keeps a copy of the reduced gradients, before clipping.
    pub fn capture_gradients(&mut self) {
        self.captured = Some(Vec::new());
    }

    /// The gradients of the last step, if they were captured: pieces of every layer's flat buffer
    /// in buffer order, K·D of them with ZeRO-1, else D.
    pub fn captured(&self) -> &[ParamExport] {
        self.captured.as_deref().unwrap_or_default()
    }

    /// In the next step looks at every layer's gradient and update. That takes a copy of what this
    /// rank updates of a layer, one layer at a time.
    pub fn watch_layers(&mut self) {
        self.watched = Some(HashMap::new());
    }

    /// The sums over this rank's part of the layers, by stage and layer; ends their collection.
    /// Where several ranks hold the same part, one of them reports it: the first replica, where
    /// they do not share the optimizer's work, and the embedding for a tied head, but where that is
    /// in slices, which report it.
    pub fn take_watched(&mut self) -> HashMap<(usize, usize), LayerSums> {
        self.watched.take().unwrap_or_default()
    }

    /// Whether this rank speaks for what it has of a layer, by stage and layer.
    fn speaks_for(&self, at: (usize, usize)) -> bool {
        let is_copy = self.options.tie.is_some_and(|tie| tie.last == at) || self.is_returned(at);
        (self.zero1 || self.groups.replica.rank() == 0) && !is_copy
    }

    /// Holds the next update back until `wait` returns: parameters and moments are being read.
    /// All ranks say so at the same step, and `wait` may meet the others. It may be held back more
    /// than once; the waits follow each other then.
    pub fn hold_back(&mut self, wait: impl FnOnce() -> CommResult<()> + Send + 'static) {
        let before = self.held_back.take();
        self.held_back = Some(Box::new(move || {
            before.map_or(Ok(()), |before| before())?;
            wait()
        }));
    }

    /// Updates done so far; steps that were skipped do not count.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Places in `stages` of the layers whose owned range this rank is to save: all, but the
    /// embedding speaks for a tied head, slices of one for the embedding, and without ZeRO-1 the
    /// first replica for the others.
    pub(crate) fn layers_to_save(&self, stages: &[ShardedStage]) -> Vec<(usize, usize)> {
        let all = stages.iter().enumerate();
        all.flat_map(|(s, stage)| (0..stage.layers.len()).map(move |l| (s, l)))
            .filter(|(s, l)| stages[*s].layers[*l].trains())
            .filter(|(s, l)| self.speaks_for((stages[*s].index(), *l)))
            .collect()
    }

    /// Finishes the reductions of `stages`, agrees on norm and verdict with the whole world and
    /// updates. `step` counts from 1.
    ///
    /// # Errors
    /// A collective's error.
    pub fn step(&mut self, stages: &mut [ShardedStage], step: u64) -> CommResult<StepOutcome> {
        stages.iter_mut().try_for_each(ShardedStage::finish_replica_reduce)?;
        self.wait_for_update();
        stages.iter_mut().for_each(ShardedStage::settle);
        let pieces = if self._pieces.is_some() { 0 } else { self.piece_bytes(stages) };
        let _pieces = self.meter.hold(MemoryKind::Optimizer, pieces);
        let sent_bytes = self.sum_gradients(stages)?;
        self.watch_gradients(stages);
        let grad_norm = norm_of(self.start_norm(stages)?)?;
        let lr = (self.options.lr)(step);
        let skipped = !grad_norm.is_finite();
        let mut outcome =
            StepOutcome { grad_norm, lr, skipped, sent_bytes, ..StepOutcome::default() };
        if !skipped {
            // All ranks know by now that there is an update.
            self.wait_for_readers()?;
            self.updates += 1;
            let scale = StepScale { lr, update: self.updates, gradient: self.factor(grad_norm) };
            self.update(stages, &scale, &mut outcome, None)?;
        }
        self.put_back();
        stages.iter_mut().for_each(ShardedStage::clear_grads);
        Ok(outcome)
    }

    /// Makes the gradients of `stages`, which are reduced, those of the whole model. Returns bytes
    /// that this rank sent.
    pub(crate) fn sum_gradients(&mut self, stages: &mut [ShardedStage]) -> CommResult<u64> {
        let sent = match self.row_exchange() {
            Some(exchange) => exchange.sum_gradients(stages)?,
            None => tied::sum_gradients(stages, self.options.tie, &self.groups, &self.meter)?,
        };
        if self.captured.is_some() {
            let owners = if self.zero1 { self.groups.replica.size() } else { 1 };
            let part = if self.zero1 { self.groups.replica.rank() } else { 0 };
            let piece = self.groups.zero3.rank() * owners + part;
            self.captured = Some(stages.iter().flat_map(|s| s.export_gradients(piece)).collect());
        }
        Ok(sent)
    }

    fn row_exchange(&self) -> Option<RowExchange<'_>> {
        let tied = self.options.tied_rows.as_ref()?;
        Some(RowExchange { tied, groups: &self.groups, zero1: self.zero1, meter: &self.meter })
    }

    /// Puts all parameters in their places once those of all layers are updated.
    pub(crate) fn return_parameters(
        &self,
        stages: &mut [ShardedStage],
        outcome: &mut StepOutcome,
    ) -> CommResult<()> {
        self.share_tied(stages);
        if let Some(exchange) = self.row_exchange() {
            outcome.sent_bytes += exchange.return_parameters(stages)?;
        }
        Ok(())
    }

    /// Returns once no save reads parameters and moments any more.
    pub(crate) fn wait_for_readers(&mut self) -> CommResult<()> {
        self.held_back.take().map_or(Ok(()), |wait| wait())
    }

    /// The factor of the gradient, for a finite norm.
    pub(crate) fn factor(&self, grad_norm: f64) -> f32 {
        let clip = self.options.clip;
        if clip > 0.0 { (clip / (grad_norm + 1e-6)).min(1.0) as f32 } else { 1.0 }
    }

    /// This rank's part of the norm, on its way to all others.
    pub(crate) fn start_norm(&self, stages: &[ShardedStage]) -> CommResult<Pending<AllBytes>> {
        let mut sum = ExactSum::default();
        self.gradients(stages, |_, grad| add_squares(&mut sum, [grad]));
        self.file.as_ref().map_or(Ok(()), |file| file.check())?;
        Ok(self.groups.world.exchange(sum.to_bytes()))
    }

    /// Calls `of` with the gradients that this rank speaks for, by stage and layer; with those in a
    /// file a piece at a time.
    fn gradients(&self, stages: &[ShardedStage], mut of: impl FnMut((usize, usize), &Tensor<1>)) {
        for stage in stages {
            for (i, layer) in stage.layers.iter().enumerate() {
                let at = (stage.index(), i);
                let Some(grad) = layer.grad.as_ref().filter(|_| self.speaks_for(at)) else {
                    continue;
                };
                let parts = self.owned(stage, i).gradients(&self.options.parameters);
                let parts = parts.unwrap_or_else(|| vec![0..grad.len()]);
                let mut within = |place: Range<usize>, piece: &Tensor<1>| {
                    for part in &parts {
                        let (from, to) = (part.start.max(place.start), part.end.min(place.end));
                        if from < to {
                            of(at, &elements(piece, from - place.start..to - place.start));
                        }
                    }
                };
                match grad.here() {
                    Some(grad) => within(0..grad.dims()[0], grad),
                    None => each_piece(&[(grad, 0)], grad.len(), |piece, values| {
                        within(piece, &values[0]);
                    }),
                }
            }
        }
    }

    pub(crate) fn watch_gradients(&mut self, stages: &[ShardedStage]) {
        let Some(mut watched) = self.watched.take() else { return };
        self.gradients(stages, |at, grad| watched.entry(at).or_default().add_gradient(grad));
        self.watched = Some(watched);
    }

    /// Updates `stages`; `kept` gets what it takes to go back.
    pub(crate) fn update(
        &mut self,
        stages: &mut [ShardedStage],
        scale: &StepScale,
        outcome: &mut StepOutcome,
        mut kept: Option<&mut Vec<LayerBefore>>,
    ) -> CommResult<()> {
        if let Some(file) = self.file.clone() {
            // Where layers are looked at nothing is.
            if file.out == Out::Behind && self.watched.is_none() {
                return self.start_behind(stages, scale, &file);
            }
            return self.update_in_file(stages, scale, outcome, &file);
        }
        let moving = self.move_state();
        let mut state = std::mem::take(&mut self.state);
        tied::release(stages, self.options.tie);
        let mut returning = Returning::default();
        for (s, state) in state.iter_mut().enumerate() {
            for (i, state) in state.iter_mut().enumerate() {
                let stage = &mut stages[s];
                let Some(grad) = stage.layers[i].take_grad() else { continue };
                let place = self.place(stage, i);
                let whole = stage.layers[i].take_param().into_tensor();
                let param = if self.zero1 { whole.slice([place.range.clone()]) } else { whole };
                let mut input = UpdateInput { param, grad: grad.into_tensor() };
                if let Some(kept) = &mut kept {
                    if self.zero1 {
                        // Kept as a part of them, all parameters would be.
                        input.param = own_copy(&input.param);
                    }
                    kept.push(LayerBefore::new((s, i), &input, state, &self.meter));
                }
                let param = self.update_layer(stage, &place, input, state, Some(scale), outcome)?;
                returning.next(stages, &self.meter, (s, i), param)?;
            }
        }
        returning.finish(stages, &self.meter)?;
        self.state = state;
        self.return_parameters(stages, outcome)?;
        drop(moving);
        self.hold_state();
        Ok(())
    }

    /// Counts the state as a whole: while it is updated it moves, and where it was, parameters may
    /// come to lie.
    pub(crate) fn move_state(&mut self) -> Hold {
        self.holds.clear();
        let tensors = self.state.iter().flatten().flat_map(LayerState::tensors);
        let bytes = tensors.map(|t| 4 * t.dims()[0] as u64).sum();
        self.meter.hold(MemoryKind::Optimizer, bytes)
    }

    pub(crate) fn place(&self, stage: &ShardedStage, layer: usize) -> ShardRange {
        let (start, len) = stage.owned_range(layer);
        let OwnedRange { role, start: first, .. } = self.owned(stage, layer);
        let shard = stage.layers[layer].param.len();
        ShardRange { layer, role, shard, range: start..start + len, first }
    }

    /// Updates this rank's part of a layer from `input`, by nothing without a `scale`.
    pub(crate) fn update_layer(
        &mut self,
        stage: &mut ShardedStage,
        place: &ShardRange,
        input: UpdateInput,
        state: &mut LayerState,
        scale: Option<&StepScale>,
        outcome: &mut StepOutcome,
    ) -> CommResult<Updated> {
        let UpdateInput { param: own, grad } = input;
        let at = (stage.index(), place.layer);
        let layer = &mut stage.layers[place.layer];
        let layout = layer.weights.layout().clone();
        let (len, owned) = (place.range.len(), place.owned(&layout));
        // What it takes beside the parameters that it replaces.
        let zero3 = self.groups.zero3.size();
        let [computing, returning] =
            owned.update_bytes(&self.options.parameters, zero3, self.zero1);
        let own = match scale {
            Some(scale) => {
                let watches = self.watched.is_some() && self.speaks_for(at);
                let before = watches.then(|| {
                    let hold = self.meter.hold(MemoryKind::Optimizer, 4 * len as u64);
                    (own_copy(&own), hold)
                });
                let _computing = self.meter.hold(MemoryKind::Optimizer, computing);
                let parameters = &self.options.parameters;
                let (groups, zero1) = (&self.groups, self.zero1);
                let mut sharers = UpdateGroup { groups, zero1, gathers: 0, sent_bytes: 0 };
                let own = state.update(owned, own, &grad, parameters, scale, &mut sharers)?;
                outcome.gathers += sharers.gathers;
                outcome.sent_bytes += sharers.sent_bytes;
                if let (Some((before, _hold)), Some(watched)) = (before, &mut self.watched) {
                    watched.entry(at).or_default().add_update(before, &own);
                }
                own
            }
            None => own,
        };
        let _returning = self.meter.hold(MemoryKind::Optimizer, returning);
        Ok(match self.zero1 {
            true => Updated::Gathered(self.groups.replica.all_gather(own), place.shard),
            false => Updated::Here(own),
        })
    }
}

/// Nobody waits for the rest of an update then.
impl Drop for Optimizer {
    fn drop(&mut self) {
        self.under_way.iter().for_each(|update| update.let_on(usize::MAX));
    }
}

/// The norm of which these are all ranks' parts.
pub(crate) fn norm_of(parts: Pending<AllBytes>) -> CommResult<f64> {
    let mut total = ExactSum::default();
    for bytes in parts.wait()?.iter() {
        total.add_bytes(bytes).expect("every rank sends a sum");
    }
    Ok(total.value().sqrt())
}
