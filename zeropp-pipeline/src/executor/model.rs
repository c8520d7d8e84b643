//! The real worker: layers on Burn tensors with a split backward, weights in shards.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};
use parking_lot::Mutex;
use zeropp_comm::CommResult;
use zeropp_core::data::DataError;
use zeropp_core::kernels::balance::RouterLosses;
use zeropp_core::layer::{LayerCx, Part, pieces};
use zeropp_core::meter::Meter;
use zeropp_core::split::ops::{SliceLogits, SplitHead};
use zeropp_core::split::{
    ForwardGrads, Grads, LayerWeights, Makers, OpCx, RecordedBy, RouterCx, RouterSums,
    SampleContext, Saved, StageRouters, WQueue, begin_layer, is_finite,
};
use zeropp_zero3::{LayerSums, Optimizer, ParamExport, ShardedStage};

mod context;
mod copies;
mod pieces;
mod slice;
mod worker;

use super::error::StepError;
use super::graph::{Graph, StageOutput};
use super::not_finite::{NotFinite, NotFiniteSearch, Value};
use super::tokens::TokenSource;
use super::waits::LayerWaits;

/// The facts that a worker needs besides its stages.
#[derive(Clone)]
pub struct WorkerOptions {
    /// Where tensors live.
    pub device: Device,
    /// Samples, tokens a sample and hidden size: `[b, s, h]`.
    pub dims: [usize; 3],
    /// Tokens of each slice of a sample, a micro-batch each; empty where samples are whole.
    pub sample_slices: Arc<[usize]>,
    /// Type of activations and messages.
    pub compute: DType,
    /// Factor on every micro-batch's loss gradient: one over the micro-batches of the step, or over
    /// its samples where these are cut into slices.
    pub loss_scale: f32,
    /// Micro-batches of each unit: what is summed before a reduction.
    pub units: Vec<usize>,
    /// Stages and micro-batches whose F keeps only its layers' inputs, to be redone by R and, from
    /// layer to layer, B: those that the program has an R for.
    pub redone: HashSet<(usize, usize)>,
    /// The losses that routers of experts add.
    pub routers: RouterLosses,
    /// Stages whose B makes again what is cheap (selective recomputation).
    pub selective: Vec<usize>,
    /// The head, where it is split over ranks, and its stage.
    pub head: Option<(SplitHead, usize)>,
}

struct WorkerStage {
    parts: Vec<Part>,
    /// What is whole at a time where the stage is redone.
    pieces: Vec<Range<usize>>,
    recorded_by: RecordedBy,
    weights: Vec<LayerWeights>,
    shards: usize,
    /// Gradients by unit. There is more than one where forwards of the last stage run ahead of the
    /// reduction of the unit before theirs.
    grads: BTreeMap<usize, Arc<Mutex<Grads>>>,
}

impl WorkerStage {
    /// The stage of these layers and of the worker's shards number `shards`.
    fn new(parts: Vec<Part>, weights: Vec<LayerWeights>, shards: usize) -> Self {
        let split = parts.iter().all(Part::is_split);
        let recorded_by = if split { RecordedBy::Tape } else { RecordedBy::Burn };
        let pieces = pieces(parts.iter().map(Part::is_block));
        Self { parts, pieces, recorded_by, weights, shards, grads: BTreeMap::new() }
    }
}

/// Runs the stages of one rank.
pub struct ModelWorker {
    options: WorkerOptions,
    tokens: TokenSource,
    meter: Arc<Meter>,
    step: u64,
    stages: HashMap<usize, WorkerStage>,
    sharded: Vec<ShardedStage>,
    optimizer: Optimizer,
    /// Inputs of the pieces of stages that are still to be redone; the first is the stage's.
    inputs: HashMap<(usize, usize), Vec<Option<Saved<3>>>>,
    graphs: HashMap<(usize, usize), Graph>,
    queues: HashMap<(usize, usize), WQueue>,
    /// Of samples in slices, what these need of each other, by stage and sample.
    contexts: HashMap<(usize, usize), SampleContext>,
    /// What F of this rank's slice of a head keeps, by micro-batch.
    slices: HashMap<usize, SliceLogits>,
    losses: Vec<(usize, Tensor<1>)>,
    /// Of a split head: the sum over the tokens of the sample's slices so far.
    loss_of_sample: f64,
    /// The figures of the step's routers, by stage.
    routers: BTreeMap<usize, StageRouters>,
    offload: copies::Offload,
    /// Set while an F waits for each layer as it comes to it.
    waits: Option<LayerWaits>,
    /// Set while forwards alone are run: their tokens, and the batch.
    evaluated: Option<(TokenSource, u64)>,
    /// Set while a step is run again to find what was not finite first.
    search: Option<NotFiniteSearch>,
    /// Set while a step's layers are looked at: their outputs, by stage and layer.
    watched: Option<Mutex<HashMap<(usize, usize), LayerSums>>>,
}

impl ModelWorker {
    /// A worker of the given stages; `parts[i]` are the layers of `sharded[i]`.
    pub fn new(
        options: WorkerOptions,
        tokens: TokenSource,
        parts: Vec<Vec<Part>>,
        sharded: Vec<ShardedStage>,
        optimizer: Optimizer,
        meter: Arc<Meter>,
    ) -> Self {
        let routers = sharded.iter().map(|s| (s.index(), Arc::default())).collect();
        let stages = parts
            .into_iter()
            .zip(&sharded)
            .enumerate()
            .map(|(i, (parts, shard))| (shard.index(), WorkerStage::new(parts, shard.weights(), i)))
            .collect();
        Self {
            options,
            tokens,
            meter,
            step: 0,
            stages,
            sharded,
            optimizer,
            inputs: HashMap::new(),
            graphs: HashMap::new(),
            queues: HashMap::new(),
            contexts: HashMap::new(),
            slices: HashMap::new(),
            losses: Vec::new(),
            loss_of_sample: 0.0,
            offload: copies::Offload::default(),
            waits: None,
            routers,
            evaluated: None,
            search: None,
            watched: None,
        }
    }

    /// The losses of the step's micro-batches, or of its samples where these are cut into slices,
    /// where this rank has the last stage; clears them.
    pub fn take_losses(&mut self) -> Vec<(usize, f32)> {
        let (micro_batches, losses): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.losses).into_iter().unzip();
        if losses.is_empty() {
            return Vec::new();
        }
        // Together: every reading waits for the device.
        let values =
            Tensor::cat(losses, 0).into_data().try_to_vec::<f32>().expect("losses are f32");
        let mut losses: Vec<(usize, f32)> = micro_batches.into_iter().zip(values).collect();
        losses.sort_by_key(|(m, _)| *m);
        losses
    }

    /// The sums of the step's figures of routers, by stage and layer; clears them.
    pub fn take_routers(&mut self) -> BTreeMap<(usize, usize), RouterSums> {
        let mut sums = BTreeMap::<_, RouterSums>::new();
        for (stage, figures) in &self.routers {
            for ((layer, _), figures) in std::mem::take(&mut *figures.lock()) {
                sums.entry((*stage, layer)).or_default().add(&figures);
            }
        }
        sums
    }

    /// From now on forwards take the tokens of `batch` from `tokens`, and keep nothing; with none,
    /// they are training's again.
    pub fn evaluate(&mut self, tokens: Option<(TokenSource, u64)>) {
        self.evaluated = tokens;
    }

    /// Where the tokens of the step are, or of the batch that is evaluated, and its number.
    fn source(&self) -> (&TokenSource, u64) {
        match &self.evaluated {
            Some((tokens, batch)) => (tokens, *batch),
            None => (&self.tokens, self.step),
        }
    }

    fn has_head(&self, stage: usize) -> bool {
        matches!(self.stages[&stage].parts.last(), Some(Part::Head(_)))
    }

    /// Keeps the reduced gradients of every step from now on.
    pub fn capture_gradients(&mut self) {
        self.optimizer.capture_gradients();
    }

    /// The gradients of the last step, if they are kept.
    pub fn captured(&self) -> &[ParamExport] {
        self.optimizer.captured()
    }

    /// In the next step looks for the first outputs and gradients that are not finite. That reads
    /// all of them, so it is for running a step again that has gone wrong.
    pub fn search_not_finite(&mut self) {
        self.search = Some(NotFiniteSearch::default());
    }

    /// The values that the search has found on this rank, the first ones first; ends it.
    pub fn take_not_finite(&mut self) -> Vec<NotFinite> {
        self.search.take().map(NotFiniteSearch::found).unwrap_or_default()
    }

    /// In the next step looks at what each layer gives, at its gradient and at its update.
    pub fn watch_layers(&mut self) {
        self.watched = Some(Mutex::default());
        self.optimizer.watch_layers();
    }

    /// The sums over this rank's part of the layers, by stage and layer; ends their collection.
    pub fn take_watched(&mut self) -> BTreeMap<(usize, usize), LayerSums> {
        let outputs = self.watched.take().map(Mutex::into_inner).unwrap_or_default();
        let mut found = BTreeMap::new();
        for (at, sums) in outputs.into_iter().chain(self.optimizer.take_watched()) {
            found.entry(at).or_insert_with(LayerSums::default).merge(&sums);
        }
        found
    }

    /// Holds the next update back until `wait` returns ([`Optimizer::hold_back`]).
    pub fn hold_update_back(&mut self, wait: impl FnOnce() -> CommResult<()> + Send + 'static) {
        self.optimizer.hold_back(wait);
    }

    /// The rank's shards.
    pub fn sharded(&self) -> &[ShardedStage] {
        &self.sharded
    }

    /// Gives up all state, of a rank that runs no step any more.
    pub fn forget(&mut self) {
        self.optimizer.forget();
        self.sharded.clear();
    }

    /// The rank's optimizer.
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    fn shard(&mut self, stage: usize) -> &mut ShardedStage {
        let at = self.stages[&stage].shards;
        &mut self.sharded[at]
    }

    /// Waits for a layer's weights, if they are still being gathered.
    fn have_layer(&mut self, stage: usize, layer: usize) -> CommResult<()> {
        let at = self.stages[&stage].shards;
        match &mut self.waits {
            Some(waits) => waits.wait(|| self.sharded[at].gather_layer(layer)),
            None => Ok(()),
        }
    }

    /// Runs the layers `range` of the stage. Tracked if `leaf` or token are.
    fn run_layers(
        &mut self,
        stage: usize,
        micro_batch: usize,
        range: Range<usize>,
        x: Option<Tensor<3>>,
        op: &OpCx,
        output_wanted: bool,
    ) -> Result<StageOutput, StepError> {
        let mut x = x;
        for i in range.clone() {
            self.have_layer(stage, i)?;
            begin_layer();
            let (this, (source, step)) = (&self.stages[&stage], self.source());
            let (part, weights) = (&this.parts[i], this.weights[i].clone());
            let output_wanted = output_wanted || i + 1 < range.end;
            let slice = op.slice.as_ref().map(|slice| slice.at_layer(i));
            let op = OpCx { slice, queue: op.queue.of_layer(i), ..op.clone() };
            let cx = LayerCx { weights, op, output_wanted };
            let hidden = |x: Option<Tensor<3>>| x.expect("every stage but the first has an input");
            match part {
                Part::Embedding(e) => {
                    let (ids, _) = (source.tokens)(step, micro_batch)?;
                    x = Some(e.forward(ids, &cx));
                }
                Part::Layer(layer) => x = Some(layer.forward(hidden(x), &cx)),
                Part::Head(head) => {
                    let (_, targets) = (source.tokens)(step, micro_batch)?;
                    let loss = head.loss(hidden(x), targets, &cx);
                    check_shape(part.name(), loss.dims(), [1])?;
                    return Ok(StageOutput::Loss(loss));
                }
                Part::Slice(_) => unreachable!("its computes are of another kind"),
            }
            if let Some(y) = &x {
                check_shape(part.name(), y.dims(), self.dims(micro_batch))?;
            }
            if let (Some(watched), Some(y)) = (&self.watched, &x) {
                watched.lock().entry((stage, i)).or_default().add_output(y);
            }
        }
        Ok(StageOutput::Hidden(x.expect("a stage has at least one layer")))
    }

    /// The gradients that a micro-batch of a stage is added to.
    fn grads(&mut self, stage: usize, micro_batch: usize) -> Arc<Mutex<Grads>> {
        let mut end = 0;
        let is_in = |size: &usize| {
            end += size;
            micro_batch < end
        };
        let unit = self.options.units.iter().position(is_in).expect("units cover the step");
        if let Some(grads) = self.stages[&stage].grads.get(&unit) {
            return grads.clone();
        }
        let grads = Arc::new(Mutex::new(self.shard(stage).new_grads()));
        let this = self.stages.get_mut(&stage).expect("a stage of this rank");
        this.grads.insert(unit, grads.clone());
        grads
    }

    /// Notes the last layer whose gradient is not finite after a W, while that is searched for.
    fn look_for_not_finite(&mut self, stage: usize, micro_batch: usize, grads: &Grads) {
        if let Some(search) = &mut self.search
            && let Some(layer) = grads.last_not_finite()
        {
            let name = self.stages[&stage].parts[layer].name().to_owned();
            search.note(Value::Gradient, micro_batch, stage, layer, name);
        }
    }

    /// Where the head of a stage adds what it makes in F.
    fn forward_grads(&mut self, stage: usize, micro_batch: usize) -> Option<ForwardGrads> {
        self.has_head(stage).then(|| ForwardGrads {
            grads: self.grads(stage, micro_batch),
            loss_scale: self.options.loss_scale,
        })
    }

    fn op_cx(
        &self,
        stage: usize,
        micro_batch: usize,
        queue: WQueue,
        forward_grads: Option<ForwardGrads>,
        token: Tensor<1>,
    ) -> Result<OpCx, DataError> {
        let (source, step) = self.source();
        let is_slice = self.options.head.as_ref().is_some_and(|(_, of)| *of == stage);
        let masks = source.masks(step, micro_batch, is_slice || self.has_head(stage))?;
        Ok(OpCx {
            queue,
            meter: self.meter.clone(),
            token,
            makers: self.options.selective.contains(&stage).then(Makers::default),
            vault: self.vault((stage, micro_batch)).cloned(),
            output_wanted: true,
            forward_grads,
            masks,
            routers: Some(RouterCx {
                losses: self.options.routers,
                loss_scale: self.options.loss_scale,
                micro_batch,
                figures: self.routers[&stage].clone(),
            }),
            slice: self.slice_cx(stage, micro_batch),
        })
    }

    /// The context of a forward that keeps nothing.
    fn untracked(&self, stage: usize, micro_batch: usize) -> Result<OpCx, DataError> {
        let token = Tensor::<1>::zeros([1], self.gradients_on());
        self.op_cx(stage, micro_batch, WQueue::default(), None, token)
    }

    /// Where gradients of activations live, and their type.
    fn gradients_on(&self) -> (&Device, DType) {
        (&self.options.device, self.options.compute)
    }

    fn deliver(
        &mut self,
        stage: usize,
        micro_batch: usize,
        output: StageOutput,
    ) -> Option<Tensor<1>> {
        if let Some(search) = &mut self.search {
            let finite = match &output {
                StageOutput::Hidden(y) => is_finite(y),
                StageOutput::Loss(loss) => is_finite(loss),
            };
            if !finite {
                search.note(Value::Output, micro_batch, stage, 0, String::new());
            }
        }
        match output {
            StageOutput::Hidden(y) => Some(flat(y)),
            StageOutput::Loss(loss) => {
                if let Some(sample) = self.ends_sample(micro_batch) {
                    self.losses.push((sample, loss));
                }
                None
            }
        }
    }
}

/// Refuses what a layer gives that the next one, or another rank, would take for something else.
fn check_shape<const D: usize>(
    layer: &str,
    found: [usize; D],
    expected: [usize; D],
) -> Result<(), StepError> {
    if found == expected {
        return Ok(());
    }
    let (layer, found, expected) = (layer.to_owned(), found.to_vec(), expected.to_vec());
    Err(StepError::Shape { layer, found, expected })
}

fn flat(x: Tensor<3>) -> Tensor<1> {
    let n = x.shape().num_elements();
    x.reshape([n])
}
