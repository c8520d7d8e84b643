//! Peak memory by kind, predicted by walking each rank's program.
//!
//! The model counts what a rank with a device of its own would hold:
//! * *activation*: what F keeps for B. Where an R follows, F keeps the stage input only, and R
//!   turns it into the whole; in a stage of several layers F keeps the input of each, and R and B
//!   make one whole after the other, the last first;
//! * of samples in slices, *activation* has what slices need of each other, too: where a stage
//!   recomputes, keys and values of a slice from F to R, which makes them again (of forwards alone,
//!   to the sample's last F); the gradients of a slice's keys and values from the sample's first B,
//!   that of its last slice, to the B of the slice itself; those of vectors, to the first slice's;
//! * *workspace*: what a forward (or R, or the B of a split head's slice) takes beside that and
//!   gives back at its end counts as activation meanwhile;
//! * *host activation*: what F has kept, from its copy out to the R or backward that takes what was
//!   copied in; it is no *activation* from the end of the one copy to the beginning of the other;
//! * *weight stash*: what B keeps for W; a whole backward is B, then W. Between its beginning and
//!   its end B may hold more than at either. Where B and W run layer by layer, there is one
//!   layer's at a time;
//! * *gathered*: a stage's weights from AG to FREE; where a rank's shards are in a file, those of
//!   fp32 that no other rank shares, too, which else are the parameters;
//! * *packed weights*: copies of gathered weights as products read them, those of forwards from
//!   the first F or R after the AG (of products that R leaves out, F alone; of layers that B makes
//!   again, that B), those of backwards from the first B (of a head that makes its gradients in F,
//!   from that F), both to the FREE;
//! * *gradient*: a stage's whole gradient from the first W of a unit (that part of it which F
//!   makes, from the first F, or R where the stage recomputes) until its RS retires: where the
//!   program says so, else when the rank begins its next RS, or at the optimizer step. Where no
//!   other rank shares the stage, the first unit's is what the others are added to, and is counted
//!   as that;
//! * *gradient shard*: a rank's share of the sum over the units, from when the first unit's RS
//!   retires (where no other rank shares the stage, from the first W, as above) to the optimizer
//!   step, or, where updates are done behind the next step, to the stage's first AG there;
//! * *optimizer*: of what a device has on its host, that of the stage whose update is next, which
//!   is at the stage's first AG (of the first stage, from the last backward of the step before),
//!   and of the one before it until that, or the rank's first W;
//! * *communication*: a message from the posting of its receive to the action that takes it; what
//!   a stage hands to another one of the same rank until that one takes it; what a split head has
//!   to send on; the copy of the shard that a gather of another precision sends, until the
//!   gathered weights are used or freed, or, where an F waits for each of a stage's layers, until
//!   that ends; what a reduction gives, from its RS, or the first of what runs layer by layer
//!   before it, until it retires; and what a reduction over replicas gives, until the optimizer.
//!
//! The paper's own count (ZeroPP §3.4) leaves out the prefetched stage, the last stage's gradient
//! and the stash.

pub use kind::{HeldBytes, MemoryBytes, MemoryKind};
pub use over_time::{KindPoint, over_time};
pub use stage::{BackwardMoment, HeadBytes, LayerwiseBytes, StageBytes};

mod copies;
mod gradients;
mod head;
mod kind;
mod over_time;
mod packed;
mod places;
mod slices;
mod stage;
mod updates;

use std::borrow::Cow;

use head::HeadLedger;
use packed::Packed;
use places::MicroBatchSlots;
use updates::Updates;

use crate::ir::{self, Action, Compute, LayerRun, Message, Schedule, Task};

/// The peak of every rank by kind.
///
/// `schedule` is one that [`verify`](crate::verify::verify) accepts, lowered or compute-only
/// (nothing is gathered, received or reduced then), and `stages` has an entry for each stage, or
/// for each stage and slice ([`Schedule::cost_entries`]).
///
/// # Panics
/// Panics if `stages` has fewer entries than the schedule has stages.
pub fn predict(schedule: &Schedule, stages: &[StageBytes]) -> Vec<MemoryBytes> {
    walked(schedule, stages, |ledger| ledger.peak)
}

/// What every rank holds when the sum of all kinds is at its largest: the kinds have their peaks at
/// different times, so this is what the rank needs, and no more than the sum of its peaks.
///
/// `schedule` and `stages` are those of [`predict`].
///
/// # Panics
/// Panics as [`predict`] does.
pub fn predict_at_once(schedule: &Schedule, stages: &[StageBytes]) -> Vec<MemoryBytes> {
    walked(schedule, stages, |ledger| ledger.at_once)
}

/// As [`predict_at_once`], of each rank's warm-up alone: while it may have to go back to what was
/// before the last update. Nothing where updates are not validated late.
///
/// # Panics
/// Panics as [`predict`] does.
pub fn predict_warm_up(schedule: &Schedule, stages: &[StageBytes]) -> Vec<MemoryBytes> {
    let walk = |(rank, actions): (usize, &Vec<Action>)| {
        let end = actions.iter().position(|action| *action == Action::Validate).unwrap_or(0);
        let mut ledger = Ledger::of(schedule, rank, stages);
        actions[..end].iter().for_each(|a| ledger.run(a));
        ledger.at_once
    };
    schedule.ranks.iter().enumerate().map(walk).collect()
}

/// What [`predict`] and [`predict_at_once`] say, of each rank.
///
/// # Panics
/// Panics as [`predict`] does.
pub fn predict_both(schedule: &Schedule, stages: &[StageBytes]) -> Vec<HeldBytes> {
    walked(schedule, stages, |ledger| HeldBytes { peaks: ledger.peak, at_once: ledger.at_once })
}

fn walked<T>(schedule: &Schedule, stages: &[StageBytes], of: fn(&Ledger) -> T) -> Vec<T> {
    let walk = |(rank, actions): (usize, &Vec<Action>)| {
        let mut ledger = Ledger::of(schedule, rank, stages);
        actions.iter().for_each(|a| ledger.run(a));
        of(&ledger)
    };
    schedule.ranks.iter().enumerate().map(walk).collect()
}

/// What one rank holds while it goes through its program.
pub struct Ledger<'a> {
    stages: Cow<'a, [StageBytes]>,
    /// Slices of a sample, each of which has an entry of every stage.
    slices: usize,
    /// Stages without a split head.
    own: usize,
    /// What there is of a split head's messages.
    head: Option<HeadLedger>,
    /// Where each stage and micro-batch of this rank is in the lists below.
    places: MicroBatchSlots,
    /// Which of them recompute.
    recomputed: Vec<bool>,
    /// Which of them are out of the rank's memory, or on their way.
    out: Vec<bool>,
    /// No backward follows: F keeps nothing.
    forward_only: bool,
    /// Activations received or handed over and not yet taken, by their consumers.
    activations: Vec<bool>,
    /// The same for gradients.
    gradients: Vec<bool>,
    /// Stages whose gradient buffer is being added to.
    open: Vec<bool>,
    /// Bytes of each stage's gradient that the unit at hand takes.
    taken: Vec<u64>,
    /// Stages of which a unit of this step has been added to.
    begun: Vec<bool>,
    /// The unit of every stage and micro-batch whose F makes a part of the gradient; empty where
    /// none does.
    units: Vec<Option<usize>>,
    /// By stage and unit, of what F has made a part, and the bytes that it took, until the unit's
    /// first W. There are no more units than micro-batches.
    ahead: Vec<Option<u64>>,
    /// Stages whose share of the sum there is.
    summed: Vec<bool>,
    /// Stage whose RS is on its way, bytes of its gradient, and of what comes out of it.
    reducing: Option<(usize, u64, u64)>,
    /// Which stages and micro-batches have a W or a backward that begins a run layer by layer.
    runs: Vec<Option<LayerRun>>,
    /// The reduction that such a run has begun, as `reducing` has it, and the stage of the sum.
    running: Option<(usize, u64, u64)>,
    summing: Option<usize>,
    /// Stages whose update of the step before is due.
    due: Vec<bool>,
    updates: Updates,
    /// Computes that are no W and still to come in the program.
    backwards_left: usize,
    /// Stages whose gather has not been waited for.
    gathering: Vec<bool>,
    /// Which F wait for each layer of their stage as they come to it.
    by_layer: Vec<bool>,
    /// What there is of each gathered stage packed. None where the stage is not gathered.
    packed: Vec<Option<Packed>>,
    /// Bytes of sums over replicas.
    replica_reduced: u64,
    now: MemoryBytes,
    peak: MemoryBytes,
    /// What was held when the sum over all kinds was largest.
    at_once: MemoryBytes,
    /// Largest sum of activation and weight stash.
    kept_peak: u64,
}

impl<'a> Ledger<'a> {
    /// An empty ledger for the rank with this program, of whole samples.
    pub fn new(program: &[Action], stages: &'a [StageBytes]) -> Ledger<'a> {
        Ledger::with(program, Cow::Borrowed(stages), 1, None)
    }

    /// One for `rank` of `schedule`; `stages` has an entry for each stage and, where the head is
    /// split, for each rank's slice, and of each for all slices of a sample.
    pub fn of(schedule: &Schedule, rank: usize, stages: &'a [StageBytes]) -> Ledger<'a> {
        let program = &schedule.ranks[rank];
        let slices = schedule.slices_per_sample();
        let Some(wide) = schedule.wide_stage() else {
            return Ledger::with(program, Cow::Borrowed(stages), slices, None);
        };
        let mut own = stages[..wide * slices].to_vec();
        let slice = schedule.cost_entry(rank, wide, 0);
        own.extend_from_slice(&stages[slice..slice + slices]);
        Ledger::with(program, Cow::Owned(own), slices, HeadLedger::new(schedule, rank))
    }

    fn with(
        program: &[Action],
        stages: Cow<'a, [StageBytes]>,
        slices: usize,
        head: Option<HeadLedger>,
    ) -> Ledger<'a> {
        let of_stage: Vec<StageBytes> = stages.iter().step_by(slices).copied().collect();
        let places = MicroBatchSlots::new(program, of_stage.len());
        let mut recomputed = vec![false; places.len()];
        let (mut forward_only, mut backwards_left) = (true, 0);
        for Task { kind, stage, micro_batch } in program.iter().flat_map(Action::computes) {
            forward_only &= kind == Compute::F;
            backwards_left += usize::from(kind != Compute::W);
            if kind == Compute::R {
                recomputed[places.of(stage, micro_batch)] = true;
            }
        }
        let units = places::units(program, &of_stage, &places);
        let have_layers = |stage: usize| head.is_none() && of_stage[stage].in_layers;
        let runs = places::runs(program, &places, have_layers);
        let by_layer = match head {
            // What others have sent is passed on while a rank waits, between computes.
            Some(_) => vec![false; places.len()],
            None => places::layerwise_forwards(program, &of_stage, &places),
        };
        let count = of_stage.len();
        let due = if forward_only { vec![false; count] } else { ir::gathered(program, count) };
        let gradient_due = of_stage.iter().zip(&due).filter(|(_, due)| **due);
        let gradient_shard = gradient_due.map(|(bytes, _)| bytes.gradient_due).sum();
        let update = of_stage.iter().map(|bytes| bytes.update).enumerate();
        let updates = Updates::new(update.filter(|(stage, _)| due[*stage]));
        let optimizer = updates.coming();
        let now = MemoryBytes { gradient_shard, optimizer, ..MemoryBytes::default() };
        Ledger {
            own: count - usize::from(head.is_some()),
            slices,
            head,
            ahead: vec![None; units.len()],
            units,
            recomputed,
            out: vec![false; places.len()],
            forward_only,
            activations: vec![false; places.len()],
            gradients: vec![false; places.len()],
            places,
            open: vec![false; count],
            taken: vec![0; count],
            begun: vec![false; count],
            summed: vec![false; count],
            reducing: None,
            runs,
            running: None,
            summing: None,
            due,
            updates,
            backwards_left,
            gathering: vec![false; count],
            by_layer,
            packed: vec![None; count],
            stages,
            replica_reduced: 0,
            now,
            peak: MemoryBytes::default(),
            at_once: MemoryBytes::default(),
            kept_peak: 0,
        }
    }

    /// A whole action.
    pub fn run(&mut self, action: &Action) {
        for compute in action.computes() {
            self.start(compute);
            self.end(compute);
        }
        match *action {
            Action::AllGather { stage } => {
                if std::mem::take(&mut self.due[stage]) {
                    self.update_to(stage);
                    self.now.gradient_shard -= self.of_stage(stage).gradient_due;
                }
                self.now.gathered += self.of_stage(stage).weights;
                self.now.communication += self.of_stage(stage).gather_input;
                self.gathering[stage] = true;
                self.packed[stage] = Some(Packed::default());
                let read = self.of_stage(stage).gather_read;
                self.now.communication += read;
                self.mark();
                self.now.communication -= read;
            }
            Action::Free { stage } => {
                self.gathered(stage);
                self.now.gathered -= self.of_stage(stage).weights;
                let packed = self.packed[stage].take().unwrap_or_default();
                self.now.packed_weights -= packed.bytes(&self.of_stage(stage));
            }
            Action::Recv { message, stage, micro_batch } => {
                self.arrive(message, stage, micro_batch);
            }
            Action::SendHead { micro_batch, .. } | Action::RecvHead { micro_batch, .. } => {
                self.of_head(micro_batch, |head, sizes| head.message(action, sizes));
            }
            Action::ReduceScatter { stage } => {
                self.retire();
                self.reducing = self.running.take().or_else(|| Some(self.reduce(stage)));
                self.open[stage] = false;
            }
            Action::ReplicaReduce { stage } => {
                if self.summing.take() != Some(stage) {
                    self.sum(stage);
                }
            }
            Action::Retire { .. } => self.retire(),
            Action::Out { stage, micro_batch } => self.copy_out(stage, micro_batch),
            Action::Gone { stage, micro_batch } => {
                self.now.activation -= self.kept(stage, micro_batch);
            }
            Action::In { stage, micro_batch } => {
                self.now.activation += self.kept(stage, micro_batch);
            }
            Action::OptimizerStep => {
                self.retire();
                self.now.communication -= std::mem::take(&mut self.replica_reduced);
                self.now.gradient_shard = 0;
                self.summed.fill(false);
                self.begun.fill(false);
                self.ahead.fill(None);
            }
            Action::Compute { .. }
            | Action::Overlap { .. }
            | Action::Send { .. }
            | Action::Validate => {}
        }
        self.mark();
    }

    /// The start of a compute action: what it allocates, and the message it takes.
    pub fn start(&mut self, Task { kind, stage, micro_batch }: Task) {
        let bytes = self.bytes(stage, micro_batch);
        let place = self.places.of(stage, micro_batch);
        let by_layer = kind == Compute::F && self.by_layer[place];
        if kind != Compute::W && !by_layer {
            self.gathered(stage);
        }
        let takes = match kind {
            Compute::F => Some(Message::Activation),
            Compute::B | Compute::BW => Some(Message::Gradient),
            Compute::W | Compute::R => None,
        };
        if !matches!(kind, Compute::F | Compute::W) {
            self.copied_in(stage, micro_batch);
        }
        if let Some(message) = takes
            && std::mem::take(&mut self.received(message)[place])
        {
            self.now.communication -= self.message_bytes(message, stage, micro_batch);
        }
        match kind {
            Compute::F if self.forward_only || self.recomputed[place] => {
                let layerwise = bytes.layerwise.filter(|_| !self.forward_only);
                let kept = layerwise.map_or(self.input(stage, bytes), |layers| layers.inputs);
                self.now.activation += kept + bytes.context + self.workspace(stage, bytes);
            }
            Compute::F => {
                self.now.activation += bytes.activation + self.workspace(stage, bytes);
                self.forward_gradient(stage, micro_batch);
            }
            Compute::R => {
                let (kept, made) = match bytes.layerwise {
                    Some(layers) => (layers.inputs, layers.redone),
                    None => (bytes.input, bytes.activation),
                };
                let before = kept + bytes.context;
                self.now.activation = self.now.activation + made + bytes.workspace - before;
                self.forward_gradient(stage, micro_batch);
            }
            Compute::B | Compute::W | Compute::BW => {}
        }
        self.pack(kind, stage, self.recomputed[place]);
        self.of_head(micro_batch, |head, _| head.start(kind, stage, micro_batch));
        if self.is_slice_b(kind, stage) {
            self.now.activation += bytes.workspace;
        }
        let is_backward = matches!(kind, Compute::B | Compute::BW);
        if is_backward {
            self.context_gradients(stage, micro_batch);
        }
        if kind == Compute::W {
            self.open(stage, micro_batch);
        }
        let begins = |run: &LayerRun| if run.backward { is_backward } else { kind == Compute::W };
        if let Some(LayerRun { sums, .. }) = self.runs[place].filter(begins) {
            self.running = Some(self.reduce(stage));
            self.summing = Some(stage).filter(|_| sums);
            if sums {
                self.sum(stage);
            }
        }
        if is_backward {
            self.mark_inside(bytes, place);
        }
        self.mark();
    }

    /// Whether it is the B of a slice of a head, which takes a workspace in place of the F.
    fn is_slice_b(&self, kind: Compute, stage: usize) -> bool {
        kind == Compute::B && self.head.is_some() && stage == self.own
    }

    /// What the F of a stage has that keeps nothing but its input: a slice of a head all logits.
    fn input(&self, stage: usize, bytes: StageBytes) -> u64 {
        let is_slice = self.head.is_some() && stage == self.own;
        if is_slice { bytes.activation } else { bytes.input }
    }

    /// What the F of a stage takes beside what it keeps.
    fn workspace(&self, stage: usize, bytes: StageBytes) -> u64 {
        if self.head.is_some() && stage == self.own { 0 } else { bytes.workspace }
    }

    /// The end of a compute action: B turns activation into stash, W drops the stash.
    pub fn end(&mut self, Task { kind, stage, micro_batch }: Task) {
        let bytes = self.bytes(stage, micro_batch);
        if kind == Compute::F {
            self.gathered(stage);
        }
        if matches!(kind, Compute::F | Compute::R) {
            self.now.activation -= self.workspace(stage, bytes);
            if self.forward_only {
                self.now.activation -= self.input(stage, bytes);
                let whole = micro_batch % self.slices + 1 == self.slices;
                let context =
                    if whole { self.sum_to(stage, self.slices, |s| s.context) } else { 0 };
                self.now.activation -= context;
            }
        }
        if self.is_slice_b(kind, stage) {
            self.now.activation -= bytes.workspace;
        }
        self.of_head(micro_batch, |head, sizes| head.end(kind, stage, micro_batch, sizes));
        let place = self.places.of(stage, micro_batch);
        let by_layer = self.is_backward_by_layer(place);
        let stash = if by_layer { 0 } else { bytes.stash };
        if matches!(kind, Compute::B | Compute::BW) {
            let layers = bytes.layerwise.filter(|_| self.recomputed[place]);
            self.now.activation -= layers.map_or(bytes.activation, |layers| layers.redone);
            self.now.weight_stash += stash;
            self.mark();
            if micro_batch % self.slices + 1 < self.slices {
                self.now.activation -= bytes.context_gradient;
            }
        }
        if kind == Compute::BW {
            // Its W comes after its B.
            self.open(stage, micro_batch);
            self.mark();
        }
        if matches!(kind, Compute::W | Compute::BW) {
            self.now.weight_stash -= stash;
        }
        let gives = kind.gives(stage, self.own);
        if let Some(message) = gives
            && let Some(consumer) = message.consumer(stage, self.own)
            && self.places.has(consumer)
        {
            self.arrive(message, consumer, micro_batch);
            self.mark();
        }
        self.backwards_left -= usize::from(kind != Compute::W);
        if self.backwards_left == 0 && kind != Compute::W {
            self.backwards_end();
        }
    }

    /// Whether each layer's B is followed by its W.
    fn is_backward_by_layer(&self, place: usize) -> bool {
        self.runs[place].is_some_and(|run| run.backward)
    }

    /// A change of what there is of a split head's messages.
    fn of_head(&mut self, micro_batch: usize, change: impl FnOnce(&mut HeadLedger, &HeadBytes)) {
        let sizes = self.head.as_ref().map(|_| self.bytes(self.own, micro_batch).head);
        let (Some(head), Some(sizes)) = (&mut self.head, sizes) else { return };
        let before = head.held;
        change(head, &sizes);
        self.now.communication = self.now.communication + head.held - before;
        self.mark();
    }

    /// What is held now.
    pub fn now(&self) -> MemoryBytes {
        self.now
    }

    /// The largest so far, by kind.
    pub fn peak(&self) -> MemoryBytes {
        self.peak
    }

    /// What was held when the sum over all kinds was the largest so far.
    pub fn at_once(&self) -> MemoryBytes {
        self.at_once
    }

    /// The largest sum of activations and weight stash so far: what the Zero Bubble papers call
    /// activation memory.
    pub(crate) fn kept_peak(&self) -> u64 {
        self.kept_peak
    }

    fn arrive(&mut self, message: Message, stage: usize, micro_batch: usize) {
        let place = self.places.of(stage, micro_batch);
        self.received(message)[place] = true;
        self.now.communication += self.message_bytes(message, stage, micro_batch);
    }

    fn received(&mut self, message: Message) -> &mut [bool] {
        match message {
            Message::Activation => &mut self.activations,
            Message::Gradient => &mut self.gradients,
        }
    }

    /// The gather of a stage, if one is under way, has been waited for.
    fn gathered(&mut self, stage: usize) {
        if std::mem::take(&mut self.gathering[stage]) {
            self.now.communication -= self.of_stage(stage).gather_input;
        }
    }

    fn message_bytes(&self, message: Message, consumer: usize, micro_batch: usize) -> u64 {
        let boundary = if message == Message::Activation { consumer - 1 } else { consumer };
        self.bytes(boundary, micro_batch).message
    }

    /// The moment of a B when it holds the most. The peaks of kinds are elsewhere: at its beginning
    /// that of activations, at its end that of what it keeps.
    fn mark_inside(&mut self, stage: StageBytes, place: usize) {
        let mut inside = self.now;
        let layerwise = stage.layerwise.filter(|_| self.recomputed[place]);
        let by_layer = self.is_backward_by_layer(place);
        let (begun, moments) = match layerwise {
            Some(layers) => (layers.redone, [layers.inside, layers.inside_by_layer]),
            None => (stage.activation, [stage.inside, stage.inside_by_layer]),
        };
        let others = inside.activation - begun;
        if let Some(layers) = layerwise {
            self.peak.activation = self.peak.activation.max(others + layers.most);
        }
        if by_layer {
            let most = inside.weight_stash + stage.stash_of_layer;
            self.peak.weight_stash = self.peak.weight_stash.max(most);
        }
        let moment = moments[usize::from(by_layer)];
        inside.activation = others + moment.kept;
        inside.weight_stash += moment.stash;
        if inside.total() > self.at_once.total() {
            self.at_once = inside;
        }
    }

    fn mark(&mut self) {
        self.peak = self.peak.max(&self.now);
        if self.now.total() > self.at_once.total() {
            self.at_once = self.now;
        }
        self.kept_peak = self.kept_peak.max(self.now.activation + self.now.weight_stash);
    }
}

#[cfg(test)]
mod tests;
