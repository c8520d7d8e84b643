//! What stages and ranks hold, from what their layers say: the one count that a run predicts its
//! memory by and that layouts are compared with.

use std::ops::Range;
use std::sync::Arc;

use zeropp_model::layer::{BackwardPeak, LayerCost, pieces};
use zeropp_model::optimizer::{Cut, Out, Role, Shares, StateRule, UpdateBytes};
use zeropp_model::params::{BLOCK, FlatLayout, ParamSpec};
use zeropp_schedule::memory::{BackwardMoment, LayerwiseBytes, MemoryBytes, StageBytes};

/// The most bytes of one message where blocks move between ranks (ADR 106).
pub const MOVED_BYTES: u64 = 4 << 20;

/// A layer as a prediction sees it.
#[derive(Clone, Debug)]
pub struct LayerSizes {
    /// What it costs a micro-batch.
    pub cost: LayerCost,
    parameters: Arc<[ParamSpec]>,
    role: Role,
    /// Elements of what trains and of what does not, each parameter padded as in a flat buffer.
    padded: [usize; 2],
}

impl LayerSizes {
    /// A layer with these parameters, which have this role in the model.
    pub fn new(parameters: Vec<ParamSpec>, role: Role, cost: LayerCost) -> LayerSizes {
        let of = |trains| {
            let those = parameters.iter().filter(|p| p.trains == trains).cloned().collect();
            FlatLayout::new(those, 1).len
        };
        let padded = [of(true), of(false)];
        LayerSizes { cost, parameters: parameters.into(), role, padded }
    }

    /// Bytes of its parameters in fp32 with what trains of them has beside: a gradient, and what
    /// the optimizer keeps.
    pub(crate) fn fixed(&self, rule: &StateRule) -> u64 {
        let bytes = |p: &ParamSpec| {
            let state = || p.len() + rule.of(p, self.role).words(p.len());
            4 * (p.len() + if p.trains { state() } else { 0 }) as u64
        };
        self.parameters.iter().map(bytes).sum()
    }

    /// The parameters.
    pub fn parameters(&self) -> &[ParamSpec] {
        &self.parameters
    }

    /// Elements of the flat buffer of what trains, cut into `pieces`, padding included.
    pub fn trained(&self, pieces: usize) -> u64 {
        self.padded[0].next_multiple_of(BLOCK * pieces) as u64
    }

    /// Elements of its flat buffers, those of what does not train included.
    pub fn elements(&self, pieces: usize) -> u64 {
        self.buffers(pieces).iter().sum()
    }

    /// Elements of the larger of its flat buffers.
    pub fn largest(&self, pieces: usize) -> u64 {
        let [trained, frozen] = self.buffers(pieces);
        trained.max(frozen)
    }

    /// Elements of the flat buffer of what trains, and of that of what does not.
    fn buffers(&self, pieces: usize) -> [u64; 2] {
        self.padded.map(|n| n.next_multiple_of(BLOCK * pieces) as u64)
    }

    /// Floating-point operations with its matrices, of a forward of so many tokens.
    pub(crate) fn weight_flops(&self, tokens: usize) -> f64 {
        let matrices = self.parameters.iter().filter(|p| p.shape.len() > 1);
        let elements = matrices.map(|p| p.len()).sum::<usize>();
        2.0 * (tokens * (elements - self.cost.idle_elements as usize)) as f64
    }

    /// Floating-point operations of F, B, W and R for so many tokens, those of its cost.
    pub fn flops(&self, tokens: usize, recomputed: bool) -> [f64; 4] {
        self.cost.passes(self.weight_flops(tokens), recomputed)
    }

    /// What the optimizer of each of the ranks that share it takes.
    pub fn shares(&self, run: &RunState, cut: Cut, is_tied_head: bool) -> Shares {
        let watched = run.watched && !is_tied_head;
        Shares::of_layer(&self.parameters, self.role, watched, cut, &run.rule)
    }
}

/// Whether a stage whose moments alone are out is updated while the next step computes with the
/// stages before it: by elements, of which each rank has all that it updates. GPUs have two stages'
/// state in memory meanwhile: `on_host`, of so many stages of a rank, they are to be a few.
pub fn is_behind(run: &RunState, zero1: bool, is_tied: bool, on_host: Option<usize>) -> bool {
    let saves = on_host.is_none_or(|stages| stages > 2);
    run.rule.is_elementwise() && !run.watched && !zero1 && !is_tied && saves
}

/// What a run holds beside what comes and goes with its program.
#[derive(Clone, Debug)]
pub struct RunState {
    /// What the optimizer keeps of each parameter.
    pub rule: StateRule,
    /// Whether updates of layers are looked at, which takes a copy of a layer's parameters.
    pub watched: bool,
    /// Bytes of the buffers of checkpoints that are written while the rank computes.
    pub save: u64,
}

impl RunState {
    /// So many tensors of each parameter, and nothing else.
    pub fn uniform(tensors: usize) -> RunState {
        let rule = StateRule::uniform(tensors);
        RunState { rule, watched: false, save: 0 }
    }
}

/// How a stage is shared and what it keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageForm {
    /// The ranks that share it.
    pub cut: Cut,
    /// Whether its gradient is summed over replicas.
    pub is_summed: bool,
    /// Whether B makes again what is cheap.
    pub selective: bool,
    /// Whether the stage is recomputed as a whole, if only for some micro-batches.
    pub whole: bool,
    /// Bytes of an element of activations and gathered weights.
    pub element_bytes: usize,
    /// Bytes of an element of gathered weights as products read them; 0 where none are kept.
    pub packed_bytes: u64,
    /// Bytes of a micro-batch's hidden states.
    pub message: u64,
    /// Whether its input is tokens.
    pub is_first: bool,
}

impl StageForm {
    /// What a layer keeps from F, or from R, to B.
    fn kept(&self, cost: &LayerCost) -> u64 {
        match self.selective {
            true => cost.activation_bytes_selective,
            false => cost.activation_bytes,
        }
    }
}

/// Bytes of the stage of these layers.
pub fn stage_bytes<'a>(
    layers: impl DoubleEndedIterator<Item = &'a LayerSizes> + Clone,
    form: &StageForm,
) -> StageBytes {
    let StageForm { cut, selective, message, .. } = *form;
    let (pieces, element) = (cut.pieces(), form.element_bytes as u64);
    let costs = || layers.clone().map(|layer| &layer.cost);
    let input = if form.is_first { 0 } else { message };
    let elements: u64 = layers.clone().map(|layer| layer.elements(pieces)).sum();
    let trained: u64 = layers.clone().map(|layer| layer.trained(pieces)).sum();
    let in_forward = layers.clone().filter(|layer| layer.cost.gradients_in_forward);
    let in_forward: u64 = in_forward.map(|layer| layer.trained(pieces)).sum();
    let [shard, trained_shard] = [elements, trained].map(|n| n / cut.zero3 as u64);
    // Without shards a gather of fp32 weights is the parameters themselves, where these are here.
    let (alone, fp32, is_here) = (cut.zero3 == 1, element == 4, !cut.out.has_parameters());
    let own = |layer: &LayerSizes| layer.buffers(pieces).map(|n| n / cut.zero3 as u64);
    let read = layers.clone().flat_map(own).max().unwrap_or(0);
    let adding = layers.clone().map(|layer| cut.out.adding(own(layer)[0] as usize));
    let adding = adding.max().unwrap_or(0);
    let sums_here = cut.out != Out::All;
    let packed = |of: fn(&LayerCost) -> bool| {
        form.packed_bytes * costs().filter(|c| of(c)).map(|c| c.packed_elements).sum::<u64>()
    };
    let [packed_output, packed_redone] = packed_apart(layers.clone(), form);
    let activation = costs().map(|c| form.kept(c)).sum::<u64>().max(input);
    let inside = |by_layer| {
        let BackwardPeak { freed, stashed } = BackwardPeak::of_layers(costs(), selective, by_layer);
        BackwardMoment { kept: activation - freed, stash: stashed }
    };
    let layerwise = form.whole.then(|| layerwise(&layers.clone().collect::<Vec<_>>(), form));
    StageBytes {
        input,
        activation,
        stash: costs().map(|c| c.stash_bytes).sum(),
        context: costs().map(|c| c.context_bytes).sum(),
        // In fp32.
        context_gradient: costs().map(|c| c.context_bytes).sum::<u64>() / element * 4,
        inside: inside(false),
        inside_by_layer: inside(true),
        stash_of_layer: costs().map(|c| c.stash_bytes).max().unwrap_or(0),
        layerwise: layerwise.flatten(),
        workspace: costs().map(|c| c.workspace_bytes).max().unwrap_or(0),
        weights: if alone && fp32 && is_here { 0 } else { elements * element },
        in_layers: layers.clone().nth(1).is_some(),
        packed_forward: packed(|_| true) - packed_output - packed_redone,
        packed_output,
        packed_redone,
        packed_backward: packed(|c| !c.gradients_in_forward),
        packed_in_forward: packed(|c| c.gradients_in_forward),
        gradient: trained * 4,
        gradient_in_forward: in_forward * 4,
        keeps_first_gradient: alone && sums_here,
        gradient_shard: if sums_here { trained_shard * 4 } else { 0 },
        gradient_due: if cut.out == Out::Behind { trained_shard * 4 } else { 0 },
        message,
        gather_input: if alone || (fp32 && is_here) { 0 } else { shard * element },
        gather_read: if fp32 || is_here { 0 } else { read * 4 },
        reduced: if alone { 0 } else { trained_shard * 4 } + adding,
        replica_reduced: if form.is_summed { trained_shard * 4 / cut.owners as u64 } else { 0 },
        // Of a whole head.
        ..StageBytes::default()
    }
}

/// Bytes of the packed weights that R leaves out, as a piece needs no output of its last layer, and
/// that B makes, as R makes the last piece.
fn packed_apart<'a>(
    layers: impl Iterator<Item = &'a LayerSizes> + Clone,
    form: &StageForm,
) -> [u64; 2] {
    let (pieces, costs) = (redone(layers.clone()), || layers.clone().map(|layer| &layer.cost));
    let outputs = |pieces: &[Range<usize>]| -> u64 {
        let last = pieces.iter().filter_map(|piece| costs().nth(piece.end - 1));
        last.map(|cost| cost.packed_output_elements).sum()
    };
    let by_b = match &pieces[..] {
        [earlier @ .., last] if form.whole => {
            let all: u64 = costs().take(last.start).map(|cost| cost.packed_elements).sum();
            all - outputs(earlier)
        }
        _ => 0,
    };
    [outputs(&pieces), by_b].map(|elements| form.packed_bytes * elements)
}

/// The layers of a stage that are made again together.
fn redone<'a>(layers: impl Iterator<Item = &'a LayerSizes>) -> Vec<Range<usize>> {
    pieces(layers.map(|layer| layer.role == Role::Hidden))
}

/// A micro-batch of a stage that is done again piece by piece; none where it is one piece.
fn layerwise(layers: &[&LayerSizes], form: &StageForm) -> Option<LayerwiseBytes> {
    let pieces = redone(layers.iter().copied());
    if pieces.len() < 2 {
        return None;
    }
    let input = |i: usize| if i == 0 && form.is_first { 0 } else { form.message };
    let inputs = (0..pieces.len()).map(input).sum();
    let mut all = LayerwiseBytes { inputs, ..LayerwiseBytes::default() };
    let context = |of: &[&LayerSizes]| of.iter().map(|layer| layer.cost.context_bytes).sum::<u64>();
    let (mut before, mut stash) = (inputs + context(layers), 0);
    for (i, piece) in pieces.iter().enumerate().rev() {
        let costs = || layers[piece.clone()].iter().map(|layer| &layer.cost);
        before -= input(i) + context(&layers[piece.clone()]);
        let made = before + costs().map(|c| form.kept(c)).sum::<u64>().max(input(i));
        let workspace = costs().map(|c| c.workspace_bytes).max().unwrap_or(0);
        // R makes the last one, B the others.
        let begun = if i + 1 == pieces.len() {
            all.redone = made;
            made
        } else {
            made + workspace
        };
        all.most = all.most.max(begun);
        for by_layer in [false, true] {
            let (most, stash) = match by_layer {
                true => (&mut all.inside_by_layer, 0),
                false => (&mut all.inside, stash),
            };
            let peak = BackwardPeak::of_layers(costs(), form.selective, by_layer);
            let at = |kept, stash| BackwardMoment { kept, stash };
            *most = most.or(at(begun, stash)).or(at(made - peak.freed, stash + peak.stashed));
        }
        stash += costs().map(|c| c.stash_bytes).sum::<u64>();
    }
    Some(all)
}

/// What all ranks that share a stage have of it from step to step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StageState {
    /// Elements of its flat buffers, padding included.
    pub elements: u64,
    /// Those of them that train.
    pub trained: u64,
    /// What the optimizer takes of its layers, but for a tied head.
    pub shares: Shares,
    /// The weight that its head shares with the embedding.
    pub tied: Option<Tied>,
    /// What of it is in files.
    pub out: Out,
    /// Elements of those that train which slices of a tied head update.
    pub returned: u64,
    /// Bytes that each of the ranks with it exchanges for a tied head in slices, before the update
    /// and after it; what a rank has to do with slices stands with its embedding, else its slice.
    pub exchanged: Vec<u64>,
    /// Elements of what all of them exchange these parts of, on the same ranks: the embedding's
    /// and the slice's.
    pub tied_rows: u64,
}

/// A weight that embedding and head share and that trains.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tied {
    /// Bytes of a rank's shard of it.
    pub shard: u64,
    /// What the optimizer takes for the head's.
    pub head: Shares,
}

/// The most that a rank keeps of these.
fn most_kept(shares: &Shares) -> u64 {
    shares.each().iter().map(|bytes| bytes.state).max().unwrap_or(0)
}

/// The stages for which something comes in to be updated, and its bytes: of the rank that has most
/// of two of them that follow each other.
fn updates(stages: &[&StageState], mine: &[usize]) -> Vec<(usize, u64)> {
    let each = |stage: usize| stages[stage].shares.each();
    let of = |rank: usize| -> Vec<(usize, u64)> {
        let kept = |stage: usize| each(stage).get(rank).or(each(stage).first());
        let all = mine.iter().map(|s| (*s, kept(*s).map_or(0, |bytes| bytes.state)));
        all.filter(|(_, bytes)| *bytes > 0).collect()
    };
    let ranks = mine.iter().map(|s| each(*s).len()).max().unwrap_or(0);
    (0..ranks).map(of).max_by_key(|updates| most_of_two(updates)).unwrap_or_default()
}

/// The most of two that follow each other, or of one alone.
fn most_of_two(updates: &[(usize, u64)]) -> u64 {
    let two = |i: usize| updates[i..].iter().take(2).map(|(_, bytes)| bytes).sum();
    (0..updates.len()).map(two).max().unwrap_or(0)
}

/// What the embedding of slices takes, which gets its weights last of all.
fn of_slices(stage: &StageState, cut: Cut) -> Shares {
    let (zero3, owners) = (cut.zero3 as u64, cut.owners as u64);
    let all = 4 * stage.returned / zero3;
    let gathering = if cut.zero1 { all / owners + all } else { 0 };
    // What is in a file is read as a whole.
    let read = 4 * stage.tied_rows / zero3 / owners;
    let read = if cut.out.has_parameters() { read } else { 0 };
    let update = |bytes: &u64| gathering.max(*bytes + read);
    Shares::of_exchange(stage.exchanged.iter().map(update))
}

/// What one rank has all the time, and what its optimizer takes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankState {
    /// Parameters of its shards that are in memory. What both layers of a tied weight have is there
    /// once.
    parameters: u64,
    /// Their gradients at the end of a step, as far as they are in memory.
    gradient: u64,
    /// What of that is there until the next step's gathers.
    due: u64,
    /// Of all gradients, what this rank updates.
    owned: u64,
    /// What the optimizer keeps in memory from step to step.
    kept: u64,
    /// What it has on a GPU for updates beside the next step alone, by stage.
    updates: Vec<(usize, u64)>,
    /// What of all that is in a file.
    out: u64,
    /// What of that a checkpoint has of the rank.
    kept_saved: u64,
    /// That with what an update takes.
    at_work: u64,
    /// The same when ranks hold most.
    at_work_at_once: u64,
    /// What is kept of an update to go back: parameters, what the optimizer keeps, the gradient.
    rollback: u64,
    /// What is kept to go back, gradients aside, while the late update that takes most is done.
    rollback_at_work: u64,
    save: u64,
    /// All-gathers of an update that make parameters whole.
    pub gathers: u64,
    /// Bytes that the rank sends for them.
    pub sent: u64,
}

impl RankState {
    /// Of the rank that has the stages `mine` of all `stages`, which lie as `placement` says; the
    /// most of any that share them. With `late` updates are validated after they are done.
    pub fn new(
        stages: &[&StageState],
        mine: &[usize],
        placement: &[usize],
        cut: Cut,
        late: bool,
        save: u64,
    ) -> RankState {
        let (zero3, owners) = (cut.zero3 as u64, cut.owners as u64);
        let last = placement.len() - 1;
        let tied = stages[last].tied.as_ref();
        let tied = tied.filter(|_| mine.contains(&0) || mine.contains(&last));
        let is_parted = placement[0] != placement[last];
        let twice = tied.filter(|_| !is_parted).map_or(0, |tied| tied.shard);
        // A tied gradient on its way to and from another rank.
        let swapped = tied.filter(|_| is_parted).map_or(0, |tied| tied.shard / owners);
        // What is in a file is read and summed beside that.
        let swapped = swapped * if cut.out == Out::All { 4 } else { 2 };
        // One in memory is taken from where gradients are.
        let swapped_at_once = if cut.out == Out::All { swapped } else { swapped / 2 };
        let shard = |of: fn(&StageState) -> u64| {
            mine.iter().map(|s| of(stages[*s])).sum::<u64>() * 4 / zero3 - twice
        };
        let mut shares = Shares::default();
        mine.iter().for_each(|s| shares.add(&stages[*s].shares, 1));
        if let Some(tied) = tied.filter(|_| is_parted && mine.contains(&last)) {
            shares.add(&tied.head, 1);
        }
        mine.iter().for_each(|s| shares.add(&of_slices(stages[*s], cut), 1));
        let each = || shares.each().iter();
        let gradient = shard(|stage| stage.trained);
        let updated = shard(|stage| stage.trained - stage.returned);
        let (owned, state) = (updated / owners, most_kept(&shares));
        let here = |is_out: bool, bytes: u64| if is_out { 0 } else { bytes };
        let [state_out, all_out] = [cut.out.is_any(), cut.out.has_parameters()];
        let is_behind = cut.out == Out::Behind;
        let updates = if is_behind && cut.host { updates(stages, mine) } else { Vec::new() };
        // What the first update takes is there when a step ends.
        let first = updates.first().map_or(0, |(_, bytes)| *bytes);
        let pieces = |b: &UpdateBytes| if updates.is_empty() { b.pieces } else { first };
        let work = |swapped: u64| {
            let of = |b: &UpdateBytes| here(state_out, b.state) + pieces(b) + b.update.max(swapped);
            each().map(of).max().unwrap_or(0)
        };
        // Of updates behind the next step there are at any time, but on GPUs.
        let always = is_behind && updates.is_empty();
        let pieces = each().map(pieces).max().filter(|_| always).unwrap_or(0);
        let (at_work, at_work_at_once) = (work(swapped), work(swapped_at_once));
        let late_at_work = each().map(|b| b.state + b.late).max().unwrap_or(0);
        let (parameters, kept) = (shard(|stage| stage.elements), here(state_out, state) + pieces);
        // Both layers of a tied weight have gradients until these are summed.
        let sums_out = if cut.out == Out::All { gradient + twice } else { 0 };
        RankState {
            parameters: here(all_out, parameters),
            gradient: if cut.out == Out::All { 0 } else { gradient },
            due: if is_behind { gradient } else { 0 },
            owned,
            kept,
            updates,
            out: here(!state_out, state) + here(!all_out, parameters) + sums_out,
            kept_saved: each().map(|b| b.saved).max().unwrap_or(0),
            at_work,
            at_work_at_once,
            rollback: if late { owned + state + owned } else { 0 },
            rollback_at_work: if late { late_at_work.saturating_sub(at_work_at_once) } else { 0 },
            save,
            gathers: each().next().map_or(0, |b| b.gathers),
            sent: each().next().map_or(0, |b| b.sent),
        }
    }

    /// What the optimizer has on a GPU for updates beside the next step alone: bytes of each stage.
    pub fn updates(&self) -> &[(usize, u64)] {
        &self.updates
    }

    /// Bytes that a checkpoint has of the rank.
    pub fn saved(&self) -> u64 {
        self.owned + self.kept_saved
    }

    /// The most that the rank holds, between two steps, to get this state in place of that of
    /// `before`: what it gives away is copied first, and what it gets comes beside it, by messages.
    pub fn moving(&self, before: &RankState) -> u64 {
        let at_rest = |of: &RankState| of.parameters + of.gradient + of.kept;
        // What does not train is in no checkpoint, and moves, too.
        let given = before.saved() + before.parameters.saturating_sub(before.gradient);
        let (then, message) = (at_rest(self), |all: u64| all.min(MOVED_BYTES));
        let arriving = given + message(given) + 2 * then + message(then);
        arriving.max(at_rest(before) + given)
    }

    /// Gradients of an update that is done beside what follows a step.
    pub fn gradient_due(&self) -> u64 {
        self.due
    }

    /// Bytes that the optimizer has in memory between two steps, and while forwards alone run.
    pub fn optimizer_kept(&self) -> u64 {
        self.kept + most_of_two(&self.updates)
    }

    /// The most of each kind, where `peaks` come and go with the program.
    pub fn peaks(&self, peaks: MemoryBytes) -> MemoryBytes {
        self.with(peaks, self.at_work.max(self.kept + peaks.optimizer), self.rollback)
    }

    /// All that is held when it is most: while it computes, while it updates, or in the `warm_up`
    /// of a step whose predecessor's update may have to be taken back.
    pub fn at_once(&self, held: MemoryBytes, warm_up: MemoryBytes) -> MemoryBytes {
        let updating = MemoryBytes { gradient_shard: self.gradient, ..MemoryBytes::default() };
        let moments = [
            self.with(held, self.kept + held.optimizer, 0),
            self.with(updating, self.at_work_at_once, self.rollback_at_work),
            self.with(warm_up, self.kept, self.rollback),
        ];
        moments.into_iter().max_by_key(MemoryBytes::total).expect("three")
    }

    fn with(&self, held: MemoryBytes, optimizer: u64, rollback: u64) -> MemoryBytes {
        let (parameter_shard, save) = (self.parameters, self.save);
        let host_state = self.out;
        MemoryBytes { parameter_shard, optimizer, rollback, save, host_state, ..held }
    }
}
