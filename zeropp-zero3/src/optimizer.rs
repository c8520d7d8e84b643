//! The optimizer step of one rank: tied gradients, the global norm, the verdict all ranks share,
//! and the update of what the rank owns.

use std::collections::HashMap;
use std::sync::Arc;

use burn::tensor::Tensor;
use zeropp_comm::groups::Groups;
use zeropp_comm::{CommResult, Communicator};
use zeropp_core::meter::{Hold, MemoryKind, Meter};
use zeropp_core::{cpu_tensor, device};

use crate::exact::ExactSum;
use crate::layer_shard::own_copy;
use crate::layer_state::{LayerState, Owned};
use crate::layer_sums::LayerSums;
use crate::norm::add_squares;
use crate::rule::{ParameterGroups, Role, StepScale};
use crate::stage::{ParamExport, ShardedStage};

/// A weight that two stages hold: the embedding's and the head's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tie {
    /// Stage and layer of the embedding.
    pub first: (usize, usize),
    /// Stage and layer of the head.
    pub last: (usize, usize),
    /// Pipeline ranks of the two.
    pub ranks: (usize, usize),
}

/// The learning rate of each step, counted from 1.
pub type Rate = Arc<dyn Fn(u64) -> f64 + Send + Sync>;

/// What to do with reduced gradients.
#[derive(Clone)]
pub struct OptimizerOptions {
    /// How parameters are updated.
    pub parameters: ParameterGroups,
    /// Learning rate over the steps.
    pub lr: Rate,
    /// Largest global norm; 0 does not clip.
    pub clip: f64,
    /// The weight shared by embedding and head.
    pub tie: Option<Tie>,
}

/// What a step did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepOutcome {
    /// Global norm of the gradient before clipping; infinite where an element was not finite.
    pub grad_norm: f64,
    /// Learning rate used.
    pub lr: f64,
    /// Whether no rank changed anything because the norm was not finite.
    pub skipped: bool,
    /// All-gathers of this rank that made matrices whole.
    pub gathers: u64,
    /// Bytes that this rank sent for them.
    pub sent_bytes: u64,
}

/// Optimizer state of one rank.
pub struct Optimizer {
    options: OptimizerOptions,
    groups: Groups,
    zero1: bool,
    /// What is kept of each layer of each stage, in the order of the stages.
    pub(crate) state: Vec<Vec<LayerState>>,
    pub(crate) updates: u64,
    captured: Option<Vec<ParamExport>>,
    /// Set while a step's layers are looked at: what is found of each, by stage and layer.
    watched: Option<HashMap<(usize, usize), LayerSums>>,
    pub(crate) meter: Arc<Meter>,
    held_back: Option<Box<dyn FnOnce() -> CommResult<()> + Send>>,
    holds: Vec<Hold>,
}

impl Optimizer {
    /// Moments of zero for `stages`, and means that are their weights.
    pub fn new(
        stages: &[ShardedStage],
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
            held_back: None,
            meter: meter.clone(),
            holds: Vec::new(),
        };
        optimizer.restart(stages);
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

    /// Gives up all that is kept.
    pub(crate) fn forget(&mut self) {
        self.holds.clear();
        self.state.clear();
    }

    /// What is kept of a layer that begins with the weights that `stage` has.
    pub(crate) fn fresh(&self, stage: &ShardedStage, layer: usize) -> LayerState {
        let (start, len) = stage.owned_range(layer);
        let param = stage.layers[layer].param.clone();
        // There are no empty slices.
        let param = if len > 0 { param.slice([start..start + len]) } else { param };
        LayerState::new(self.owned(stage, layer), &self.options.parameters, &param)
    }

    /// What this rank updates of a layer.
    fn owned<'a>(&self, stage: &'a ShardedStage, layer: usize) -> Owned<'a> {
        let owned = stage.owned(layer);
        let is_tied = self.options.tie.is_some_and(|tie| tie.last == (stage.index(), layer));
        if is_tied { Owned { role: Role::Embedding, ..owned } } else { owned }
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

    /// What was found of this rank's part of the layers, by stage and layer; ends the look at them.
    /// What several ranks hold alike one of them speaks for: the first replica, where they do not
    /// share the optimizer's work, and the embedding for a tied head.
    pub fn take_watched(&mut self) -> HashMap<(usize, usize), LayerSums> {
        self.watched.take().unwrap_or_default()
    }

    /// Whether this rank speaks for what it has of a layer, by stage and layer.
    fn speaks_for(&self, at: (usize, usize)) -> bool {
        let is_copy = self.options.tie.is_some_and(|tie| tie.last == at);
        (self.zero1 || self.groups.coords.dp == 0) && !is_copy
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
    /// embedding speaks for a tied head, and without ZeRO-1 the first replica for the others.
    pub(crate) fn layers_to_save(&self, stages: &[ShardedStage]) -> Vec<(usize, usize)> {
        if !self.zero1 && self.groups.coords.dp != 0 {
            return Vec::new();
        }
        let all = stages.iter().enumerate();
        all.flat_map(|(s, stage)| (0..stage.layers.len()).map(move |l| (s, l)))
            .filter(|(s, l)| stages[*s].layers[*l].trains())
            .filter(|(s, l)| self.options.tie.is_none_or(|t| t.last != (stages[*s].index(), *l)))
            .collect()
    }

    /// Finishes the reductions of `stages`, agrees on norm and verdict with the whole world and
    /// updates. `step` counts from 1.
    ///
    /// # Errors
    /// A collective's error.
    pub fn step(&mut self, stages: &mut [ShardedStage], step: u64) -> CommResult<StepOutcome> {
        for stage in stages.iter_mut() {
            stage.finish_replica_reduce()?;
        }
        self.sum_tied(stages)?;
        if self.captured.is_some() {
            let owners = if self.zero1 { self.groups.replica.size() } else { 1 };
            let part = if self.zero1 { self.groups.replica.rank() } else { 0 };
            let piece = self.groups.zero3.rank() * owners + part;
            self.captured = Some(stages.iter().flat_map(|s| s.export_gradients(piece)).collect());
        }
        self.watch_gradients(stages);
        let grad_norm = self.global_norm(stages)?;
        let lr = (self.options.lr)(step);
        let skipped = !grad_norm.is_finite();
        let mut outcome = StepOutcome { grad_norm, lr, skipped, ..StepOutcome::default() };
        if !skipped {
            // All ranks know by now that there is an update.
            if let Some(wait) = self.held_back.take() {
                wait()?;
            }
            self.updates += 1;
            let clip = self.options.clip;
            let gradient =
                if clip > 0.0 { (clip / (grad_norm + 1e-6)).min(1.0) as f32 } else { 1.0 };
            let scale = StepScale { lr, update: self.updates, gradient };
            // Meanwhile the moments move, and where they were, parameters may come to lie.
            self.holds.clear();
            let tensors = self.state.iter().flatten().flat_map(LayerState::tensors);
            let bytes = tensors.map(|t| 4 * t.dims()[0] as u64).sum();
            let moving = self.meter.hold(MemoryKind::Optimizer, bytes);
            self.update(stages, &scale, &mut outcome)?;
            drop(moving);
            self.hold_state();
        }
        stages.iter_mut().for_each(ShardedStage::clear_grads);
        Ok(outcome)
    }

    /// Embedding's plus head's gradient, on both. Same ZeRO-3 place, so shards match.
    fn sum_tied(&self, stages: &mut [ShardedStage]) -> CommResult<()> {
        let Some(tie) = self.options.tie else { return Ok(()) };
        let me = self.groups.pipeline.rank();
        let first = (me == tie.ranks.0).then(|| grad_of(stages, tie.first)).flatten();
        let last = (me == tie.ranks.1).then(|| grad_of(stages, tie.last)).flatten();
        let sum = match (first, last) {
            (Some(a), Some(b)) => cpu_tensor::sum(&a, &b),
            (Some(a), None) => a.clone() + self.swapped(tie.ranks.1, &a)?,
            (None, Some(b)) => self.swapped(tie.ranks.0, &b)? + b,
            (None, None) => return Ok(()),
        };
        for at in [tie.first, tie.last] {
            if let Some(stage) = stages.iter_mut().find(|s| s.index() == at.0) {
                stage.layers[at.1].set_grad(sum.clone(), &self.meter);
            }
        }
        Ok(())
    }

    /// The tied gradient of pipeline rank `peer`, which gets a copy of this one.
    fn swapped(&self, peer: usize, mine: &Tensor<1>) -> CommResult<Tensor<1>> {
        let copy = device::copy(mine);
        let bytes = 2 * (mine.dims()[0] * mine.dtype().size()) as u64;
        let _both_ways = self.meter.hold(MemoryKind::Optimizer, bytes);
        swap(&*self.groups.pipeline, peer, copy)
    }

    fn global_norm(&self, stages: &[ShardedStage]) -> CommResult<f64> {
        let mut sum = ExactSum::default();
        add_squares(&mut sum, self.gradients(stages).map(|(_, grad)| grad));
        let mut total = ExactSum::default();
        for bytes in self.groups.world.exchange(sum.to_bytes()).wait()?.iter() {
            total.add_bytes(bytes).expect("every rank sends a sum");
        }
        Ok(total.value().sqrt())
    }

    /// The gradients that this rank speaks for, by stage and layer.
    fn gradients<'a>(
        &self,
        stages: &'a [ShardedStage],
    ) -> impl Iterator<Item = ((usize, usize), &'a Tensor<1>)> {
        let layers = stages.iter().flat_map(|s| {
            let index = s.index();
            s.layers.iter().enumerate().map(move |(i, layer)| ((index, i), layer))
        });
        let spoken_for = layers.filter(|(at, _)| self.speaks_for(*at));
        spoken_for.filter_map(|(at, layer)| Some((at, layer.grad.as_ref()?)))
    }

    fn watch_gradients(&mut self, stages: &[ShardedStage]) {
        let Some(mut watched) = self.watched.take() else { return };
        for (at, grad) in self.gradients(stages) {
            watched.entry(at).or_default().add_gradient(grad);
        }
        self.watched = Some(watched);
    }

    fn update(
        &mut self,
        stages: &mut [ShardedStage],
        scale: &StepScale,
        outcome: &mut StepOutcome,
    ) -> CommResult<()> {
        let mut state = std::mem::take(&mut self.state);
        for (stage, state) in stages.iter_mut().zip(&mut state) {
            for (i, state) in state.iter_mut().enumerate() {
                // Told by the parameters, which are about to be taken.
                let (start, len) = stage.owned_range(i);
                let layout = stage.layers[i].weights.layout().clone();
                let Owned { role, start: first, .. } = self.owned(stage, i);
                let owned = Owned { layout: &layout, role, start: first, len };
                let Some(grad) = stage.layers[i].take_grad() else { continue };
                let none = Tensor::zeros([1], &grad.device());
                let whole = std::mem::replace(&mut stage.layers[i].param, none);
                let n = whole.dims()[0];
                // What it takes beside the parameters that it replaces.
                let bytes = if self.zero1 { 4 * (len + n) as u64 } else { 0 };
                let _meanwhile = self.meter.hold(MemoryKind::Optimizer, bytes);
                let zero3 = self.groups.zero3.size();
                let bytes = owned.matrix_bytes(&self.options.parameters, zero3);
                let _matrices = self.meter.hold(MemoryKind::Optimizer, bytes);
                let own = if self.zero1 { whole.slice([start..start + len]) } else { whole };
                let at = (stage.index(), i);
                let watches = self.watched.is_some() && self.speaks_for(at);
                let before = watches.then(|| {
                    let hold = self.meter.hold(MemoryKind::Optimizer, 4 * len as u64);
                    (own_copy(&own), hold)
                });
                let given = (&self.options.parameters, scale);
                let gather = |part| self.gathered(part, outcome);
                let own = state.update(owned, (own, &grad), given, gather)?;
                if let (Some((before, _hold)), Some(watched)) = (before, &mut self.watched) {
                    watched.entry(at).or_default().add_update(before, &own);
                }
                let param = match self.zero1 {
                    // Gathered memory is shared, and parameters are written in place.
                    true => device::copy(&self.groups.replica.all_gather(own).wait()?),
                    false => own,
                };
                stage.layers[i].set_param(param, &self.meter);
            }
        }
        self.state = state;
        Ok(())
    }

    /// A layer's whole buffer, from what each of the ranks that share it owns of it.
    fn gathered(&self, part: Tensor<1>, outcome: &mut StepOutcome) -> CommResult<Tensor<1>> {
        let mut whole = part;
        let replica = self.zero1.then_some(&self.groups.replica);
        let groups = replica.into_iter().chain([&self.groups.zero3]);
        for group in groups.filter(|group| group.size() > 1) {
            outcome.gathers += 1;
            outcome.sent_bytes += 4 * ((group.size() - 1) * whole.dims()[0]) as u64;
            whole = group.all_gather(whole).wait()?;
        }
        Ok(whole)
    }
}

fn grad_of(stages: &[ShardedStage], at: (usize, usize)) -> Option<Tensor<1>> {
    stages.iter().find(|s| s.index() == at.0)?.layers[at.1].grad.clone()
}

/// Tag of the tied gradient's exchange; the executor's tags stay below it.
const TIED_TAG: u64 = u64::MAX;

fn swap(group: &dyn Communicator, peer: usize, mine: Tensor<1>) -> CommResult<Tensor<1>> {
    let (len, dtype) = (mine.dims()[0], mine.dtype());
    // Both come to the two messages in one order, as NCCL asks (ADR 31).
    if group.rank() < peer {
        let sent = group.send(peer, TIED_TAG, mine);
        let theirs = group.recv(peer, TIED_TAG, len, dtype).wait()?;
        sent.wait()?;
        return Ok(theirs);
    }
    let theirs = group.recv(peer, TIED_TAG, len, dtype).wait()?;
    group.send(peer, TIED_TAG, mine).wait()?;
    Ok(theirs)
}
