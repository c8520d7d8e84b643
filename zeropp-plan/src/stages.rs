//! A model cut into stages: what each takes and keeps.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use zeropp_model::decoder::Decoder;
use zeropp_model::head::SliceShape;
use zeropp_model::optimizer::{Cut, Out, Shares};
use zeropp_model::parts::DecoderPart;
use zeropp_model::shared_rows::SharedRows;
use zeropp_schedule::costs::Machine;
use zeropp_schedule::head::HeadTree;
use zeropp_schedule::memory::StageBytes;
use zeropp_schedule::simulate::{Costs, LayerShare, LinkCosts, StageCosts, StateCopies};

use crate::bytes::{StageForm, StageState};
use crate::cut::GroupTimes;
use crate::layout::{CopyRate, Job, Layout, Recompute};
use crate::links::{Links, Sent};
use crate::matrices::OfBlock;
use crate::parts::Parts;
use crate::recut::Recut;
use crate::split::{of_rank, slice_bytes, slice_sizes, slice_state, tie_slices};
use crate::work::{LayerWork, of_parts};

use slices::OfSlices;

/// A model's layers with their costs for one size of micro-batch, from which stages of any number
/// follow.
#[derive(Clone, Debug)]
pub struct ModelCosts {
    layers: Vec<LayerWork>,
    /// Of each layer the first one that is like it.
    alike: Vec<usize>,
    parts: Parts,
    samples: usize,
    /// What optimizers take of each layer, by how it is cut; blocks are alike.
    shares: HashMap<Cut, Arc<[Shares]>>,
    of_slices: OfSlices,
}

impl ModelCosts {
    /// The model of `job` with micro-batches of `samples`.
    pub fn new(job: &Job, samples: usize) -> ModelCosts {
        let parts = job.model.decoder.parts();
        let batch = job.batch(samples);
        let layer = |part: &DecoderPart| LayerWork::new(part, batch, &job.compute);
        let layers = of_parts(&parts, layer);
        let first = |i: usize| (0..i).find(|j| parts[*j].is_like(&parts[i]));
        let alike = (0..parts.len()).map(|i| first(i).unwrap_or(i)).collect();
        let sizes = layers.iter().map(|layer| (layer.sizes.clone(), layer.is_block())).collect();
        let parts = Parts::new(sizes, job.model.decoder.tied, batch.tokens());
        let of_slices = OfSlices::default();
        ModelCosts { layers, alike, parts, samples, shares: HashMap::new(), of_slices }
    }

    /// What the optimizer takes of each layer.
    fn shares(&mut self, job: &Job, cut: Cut) -> Arc<[Shares]> {
        let (layers, alike, parts) = (&self.layers, &self.alike, &self.parts);
        let made = || {
            let mut all: Vec<Shares> = Vec::new();
            for (i, layer) in layers.iter().enumerate() {
                let new = || layer.sizes.shares(&job.state, cut, parts.is_tied_head(i));
                all.push(if alike[i] < i { all[alike[i]].clone() } else { new() });
            }
            all.into()
        };
        self.shares.entry(cut).or_insert_with(made).clone()
    }

    /// The number of blocks of each of `stages` with which the longest stage is shortest, the head
    /// in the last or in none; none where there are fewer blocks than stages.
    pub fn cut(&self, stages: usize, machine: &Machine, has_head: bool) -> Option<Vec<usize>> {
        let groups = self.parts.groups();
        let times = self.times(machine, 0);
        let times = if has_head { times } else { times.without_tail() };
        let cut = groups.balanced(&times, stages, None).ok()?;
        Some(groups.sizes(&cut?))
    }

    /// What each group takes, of stages of which the first `recomputing` are done again.
    fn times(&self, machine: &Machine, recomputing: usize) -> GroupTimes {
        let groups = self.parts.groups();
        let seconds: Vec<_> = self.layers.iter().map(|layer| layer.seconds(machine)).collect();
        let step = |i: usize| seconds[i][..3].iter().sum::<f64>();
        let kept = groups.sums(step);
        let recomputed = groups.sums(|i| seconds[i].iter().sum::<f64>());
        GroupTimes { recomputed, kept, recomputing, tail: self.parts.tail_of(step) }
    }

    /// Cuts for `layout` beside `first` that are worth a simulation, each with the share of the
    /// busiest rank's work that is left.
    pub(crate) fn recuts(
        &self,
        layout: &Layout,
        machine: &Machine,
        first: &[usize],
    ) -> Vec<(Vec<usize>, f64)> {
        let times = self.times(machine, layout.recomputed_of_all());
        let (groups, placement) = (self.parts.groups(), layout.placement());
        Recut { groups, times: &times, placement: &placement }.candidates(first)
    }

    /// The blocks of each stage of a run of `layout` without a given cut, the head in the last or
    /// in none: it goes by FLOP, and by what full recomputation does again.
    pub(crate) fn cut_of_run(&self, layout: &Layout, has_head: bool) -> Option<Vec<usize>> {
        let times = self.parts.times_by_flop(layout.recomputed_of_all());
        let times = if has_head { times } else { times.without_tail() };
        let groups = self.parts.groups();
        let cut = groups.balanced(&times, layout.stages(), None).ok()?;
        Some(groups.sizes(&cut?))
    }

    /// The stages of `layout`, cut into so many blocks each.
    pub fn stages(&mut self, job: &Job, layout: &Layout, blocks: &[usize]) -> Vec<Stage> {
        let links = Links::new(&job.machine, layout);
        let (cut, shares) = (job.cut(layout), self.shares(job, job.cut(layout)));
        let block = self.layers.iter().find(|layer| layer.is_block());
        let matrices = block.and_then(|block| OfBlock::new(&block.sizes, &job.state.rule, cut));
        let matrices =
            matrices.map_or(0, |of| ns(of.seconds(&job.machine, links.zero3, links.replica)));
        let stage = |s: usize, range: Range<usize>| {
            let state = self.parts.stage_state(range.clone(), cut, |part| shares[part].clone());
            let kept = shares[range.clone()].iter().map(|of| of.state_of_all(cut.pieces())).sum();
            let blocks = self.layers[range.clone()].iter().filter(|layer| layer.is_block());
            let matrices_ns = blocks.count() as u64 * matrices;
            let stage = self.stage(job, layout, &links, s, range);
            Stage { state, kept, matrices_ns, ..stage }
        };
        let ranges = self.parts.groups().stages(blocks.iter().copied());
        // Most are like the one before: thousands of layouts are cut before one is simulated.
        let likeness = |s: usize| (&self.alike[ranges[s].clone()], self.form(job, layout, s));
        let mut stages: Vec<Stage> = Vec::with_capacity(ranges.len());
        for (s, range) in ranges.iter().enumerate() {
            let before = s.checked_sub(1).filter(|before| likeness(*before) == likeness(s));
            let made = before.map_or_else(|| stage(s, range.clone()), |at| stages[at].clone());
            stages.push(made);
        }
        if layout.slices > 1 {
            self.cut_samples(job, layout, &ranges, &mut stages);
        }
        stages
    }

    /// The same with a head of which each rank has so many blocks of rows, where there are any:
    /// the stages, the last one without it, and behind them the slice of each rank.
    pub fn with_head(
        &mut self,
        job: &Job,
        layout: &Layout,
        blocks: &[usize],
        head_blocks: &[usize],
    ) -> Vec<Stage> {
        let mut stages = self.stages(job, layout, blocks);
        let Some(before) = stages.len().checked_sub(1).filter(|_| !head_blocks.is_empty()) else {
            return stages;
        };
        let links = Links::new(&job.machine, layout);
        let (cut, shares) = (job.cut(layout), self.shares(job, job.cut(layout)));
        let head = self.layers.len() - 1;
        let ranges = self.parts.groups().stages(blocks.iter().copied());
        let range = ranges[before].start..head;
        let is_tied = self.parts.trains_tied();
        // Slices keep what the optimizer has of an embedding's weight that is theirs.
        let share = |part: usize| match part == 0 && is_tied {
            true => Shares::default(),
            false => shares[part].clone(),
        };
        let without = |stages: &mut [Stage], stage: usize, parts: Range<usize>, less: usize| {
            stages[stage].state = self.parts.stage_state(parts, cut, share);
            stages[stage].kept -= shares[less].state_of_all(cut.pieces());
        };
        without(&mut stages, before, range.clone(), head);
        if is_tied {
            let first = if before == 0 { range.clone() } else { ranges[0].clone() };
            without(&mut stages, 0, first, 0);
        }
        let Stage { costs, again_ns, layers, bytes, .. } =
            self.stage(job, layout, &links, before, range.clone());
        stages[before] = Stage { costs, again_ns, layers, bytes, ..stages[before].clone() };
        let placement = layout.placement();
        let messages = HeadTree::of_slices(head_blocks, placement[before]);
        let messages = messages.expect("there are ranks");
        for (rank, head_blocks) in head_blocks.iter().copied().enumerate() {
            let slice = self.slice(job, layout, &links, &messages, rank);
            stages.push(Stage { head_blocks, ..slice });
        }
        if is_tied {
            let rows = self.shared_rows(job, &messages, layout, placement[0]);
            let embedding = self.parts.layers()[0].trained(cut.pieces());
            let mut states: Vec<_> = stages.iter_mut().map(|stage| &mut stage.state).collect();
            tie_slices(&mut states, before + 1, embedding, &rows);
        }
        let ranges: Vec<_> = ranges[..before].iter().cloned().chain([range]).collect();
        let by_flop = self.parts.estimates(&ranges, |_| false);
        for (stage, by_flop) in stages.iter_mut().zip(by_flop) {
            stage.by_flop = by_flop;
        }
        if layout.slices > 1 {
            self.cut_samples(job, layout, &ranges, &mut stages);
            self.cut_head(job, layout, &messages, &mut stages[before + 1..]);
        }
        stages
    }

    /// A tied weight, of which the rank `owner` has all and every rank its slice.
    fn shared_rows(
        &self,
        job: &Job,
        messages: &HeadTree,
        layout: &Layout,
        owner: usize,
    ) -> SharedRows {
        let decoder = &job.model.decoder;
        let rows = (0..layout.pp).map(|rank| slice_shape(decoder, messages, rank).own_rows());
        SharedRows::new(owner, [decoder.rows(), decoder.hidden], rows, layout.cut().pieces())
    }

    /// Seconds that the head's F, B and W take.
    pub(crate) fn head_s(&self, machine: &Machine) -> f64 {
        self.layers.last().map_or(0.0, |head| head.seconds(machine)[..3].iter().sum())
    }

    /// A rank's slice of the head: F, B and W take as long as one another, each a product of all
    /// tokens with its rows. F makes logits, B their gradient in place of them and the sum over
    /// its blocks; the sums that come from other ranks are added to that.
    fn slice(
        &self,
        job: &Job,
        layout: &Layout,
        links: &Links,
        messages: &HeadTree,
        rank: usize,
    ) -> Stage {
        let (decoder, machine) = (&job.model.decoder, &job.machine);
        let head = self.layers.last().expect("a model has a head");
        let (batch, form) = (job.batch(self.samples), self.form(job, layout, layout.stages()));
        let tokens = batch.tokens();
        let Some(weight) = head.sizes.parameters().last().filter(|_| messages.has(rank)) else {
            return Stage { bytes: slice_bytes(None, &form, tokens), ..Stage::default() };
        };
        let shape = slice_shape(decoder, messages, rank);
        let sizes = slice_sizes(weight, &shape, batch, decoder.tied);
        let bytes = slice_bytes(Some(&sizes), &form, tokens);
        let cut = job.cut(layout);
        let shares = sizes.shares(&job.state, cut, false);
        let kept = shares.state_of_all(cut.pieces());
        let state = slice_state(&sizes, cut.pieces(), shares);
        let rate = machine.head_flops_per_s.unwrap_or(machine.flops_per_s * machine.flops_share);
        let product = sizes.cost.forward_flops / rate;
        let share = shape.own_rows().len() as f64 / shape.rows as f64;
        let passes = share * head.traffic / machine.memory_bytes_per_s;
        let received = messages.gradients_to(rank);
        let adding = (received * 3 * bytes.head.gradient) as f64 / machine.memory_bytes_per_s;
        let costs = times(&[], machine, &bytes, state.elements, links, layout);
        let costs = StageCosts {
            f_ns: ns(product + passes),
            b_ns: ns(product + passes + adding),
            w_ns: ns(product),
            r_ns: 0,
            ..costs
        };
        let by_flop = self.parts.estimate(sizes.flops(tokens, false));
        Stage { costs, bytes, state, kept, by_flop, ..Stage::default() }
    }

    fn form(&self, job: &Job, layout: &Layout, stage: usize) -> StageForm {
        let batch = job.batch(self.samples);
        // A stage that is recomputed as a whole has all that it keeps from R to B.
        let whole = stage < layout.recomputed();
        let in_part = whole && layout.redone.is_some();
        let again = layout.recompute != Recompute::None && stage < layout.stages();
        StageForm {
            cut: job.cut(layout),
            is_summed: layout.dp > 1,
            selective: again && (!whole || in_part),
            whole,
            element_bytes: batch.element_bytes,
            packed_bytes: layout.packed_bytes(job.compute.packing),
            message: (batch.tokens() * job.model.decoder.hidden * batch.element_bytes) as u64,
            is_first: stage == 0,
        }
    }

    fn stage(
        &self,
        job: &Job,
        layout: &Layout,
        links: &Links,
        stage: usize,
        range: Range<usize>,
    ) -> Stage {
        let layers = &self.layers[range.clone()];
        let form = self.form(job, layout, stage);
        let bytes = self.parts.stage_bytes(range, &form);
        let pieces = layout.cut().pieces();
        let elements = layers.iter().map(|layer| layer.sizes.elements(pieces)).sum();
        let mut costs = times(layers, &job.machine, &bytes, elements, links, layout);
        let again_ns = match form.selective {
            true => ns(layers.iter().map(|layer| layer.again_s(job)).sum()),
            false => 0,
        };
        costs.b_ns += again_ns;
        let share = |layer: &LayerWork| {
            let [f, _, w, _] = layer.seconds(&job.machine).map(ns);
            let (weights, gradient) = (layer.sizes.elements(pieces), layer.sizes.trained(pieces));
            LayerShare { f, w, weights, gradient }
        };
        let layers = LayerShare::of_stage(layers.iter().map(share));
        Stage { costs, again_ns, layers, bytes, ..Stage::default() }
    }
}

/// What a rank has of a model's head.
fn slice_shape(decoder: &Decoder, messages: &HeadTree, rank: usize) -> SliceShape {
    let (rows, hidden) = (decoder.rows(), decoder.hidden);
    let (blocks, sums) = of_rank(messages, rank);
    SliceShape { ids: decoder.vocabulary, rows, hidden, blocks, sums }
}

/// One stage, or a rank's slice of the head.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stage {
    /// What everything takes.
    pub costs: StageCosts,
    /// What of its B makes again what F did not keep, ns.
    pub again_ns: u64,
    /// What its layers have of that.
    pub layers: Vec<LayerShare>,
    /// What it keeps.
    pub bytes: StageBytes,
    /// What ranks have of it from step to step.
    pub state: StageState,
    /// Bytes that the optimizer keeps of it, on all ranks that share it together.
    pub kept: u64,
    /// What an update takes to gather matrices and to make them orthogonal, ns.
    pub matrices_ns: u64,
    /// Blocks of the head's rows, of a slice of it.
    pub head_blocks: usize,
    /// Where the head is split, what a run makes its order for: times by operations.
    pub by_flop: StageCosts,
    /// Its slices of a sample; none where samples are whole.
    pub slices: Vec<StageSlice>,
}

/// What a stage has for one slice of a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageSlice {
    /// Tokens.
    pub tokens: u64,
    /// What everything takes.
    pub costs: StageCosts,
    /// What it keeps.
    pub bytes: StageBytes,
    /// As of the stage.
    pub by_flop: StageCosts,
}

/// Times of each stage; where samples are cut, of each stage and slice.
pub fn times_of(stages: &[Stage]) -> Vec<StageCosts> {
    stages.iter().flat_map(|s| one_or_all(s, s.costs, |slice| slice.costs)).collect()
}

/// The times by operations, of the same.
pub(crate) fn times_by_flop(stages: &[Stage]) -> Vec<StageCosts> {
    stages.iter().flat_map(|s| one_or_all(s, s.by_flop, |slice| slice.by_flop)).collect()
}

/// Bytes of each stage; where samples are cut, of each stage and slice.
pub fn bytes_of(stages: &[Stage]) -> Vec<StageBytes> {
    stages.iter().flat_map(|s| one_or_all(s, s.bytes, |slice| slice.bytes)).collect()
}

fn one_or_all<T: Copy>(stage: &Stage, whole: T, of: fn(&StageSlice) -> T) -> Vec<T> {
    match stage.slices.is_empty() {
        true => vec![whole],
        false => stage.slices.iter().map(of).collect(),
    }
}

impl Stage {
    /// What a rank sends of it.
    pub fn sent(&self, layout: &Layout) -> Sent {
        let bytes = [self.bytes.weights, self.bytes.gradient, 4 * self.state.elements];
        Sent::new(layout, bytes)
    }
}

fn times(
    layers: &[LayerWork],
    machine: &Machine,
    bytes: &StageBytes,
    elements: u64,
    links: &Links,
    layout: &Layout,
) -> StageCosts {
    let mut sum = [0.0; 4];
    // A block whose output the norm before the head needs makes it again.
    let rate = machine.flops_per_s * machine.flops_share;
    for pair in layers.windows(2).filter(|pair| pair[0].is_block() && !pair[1].is_block()) {
        sum[3] += pair[0].sizes.cost.output_flops / rate;
    }
    for layer in layers {
        for (sum, s) in sum.iter_mut().zip(layer.seconds(machine)) {
            *sum += s;
        }
    }
    let collective = |sent: f64, ranks: usize, rate: f64| match ranks > 1 {
        true => ns(machine.collective_s + sent / rate),
        false => 0,
    };
    let sent = Sent::new(layout, [bytes.weights, bytes.gradient, 4 * elements]);
    let sums = if layout.zero1 { links.replica_reduce } else { links.replica };
    StageCosts {
        f_ns: ns(sum[0]).max(1),
        b_ns: ns(sum[1]).max(1),
        w_ns: ns(sum[2]),
        r_ns: ns(sum[3]).max(1),
        all_gather_ns: collective(sent.gather, layout.zero3, links.zero3),
        reduce_scatter_ns: collective(sent.reduce, layout.zero3, links.reduce),
        replica_reduce_ns: collective(sent.replicas, layout.dp, sums),
    }
}

fn ns(seconds: f64) -> u64 {
    (seconds * 1e9) as u64
}

/// Everything that the simulator takes for these stages.
pub fn simulator(job: &Job, layout: &Layout, stages: &[Stage]) -> Costs {
    let (copies, states) = (copies(job, layout), state_copies(job, layout, stages));
    Costs {
        stages: times_of(stages),
        memory: bytes_of(stages),
        layers: stages.iter().map(|stage| stage.layers.clone()).collect(),
        link: link(job, layout),
        file_bytes_per_s: copies.bytes_per_s.map(|rate| rate as u64),
        copies_apart: copies.apart || job.rate(job.fixed.states.as_ref()).apart,
        states,
        overlap_ns: None,
        step_ns: step_ns(job, layout, stages),
    }
}

/// How fast copies of activations are, where there are some.
pub(crate) fn copies(job: &Job, layout: &Layout) -> CopyRate {
    job.rate(job.fixed.out.as_ref().filter(|_| layout.out > 0))
}

/// What is copied of states that are out, as a run on CPUs copies them: a gather reads the rank's
/// shard at its beginning, a reduction adds to what is out.
pub(crate) fn state_copies(job: &Job, layout: &Layout, stages: &[Stage]) -> Vec<StateCopies> {
    let CopyRate { bytes_per_s: Some(rate), apart } = job.rate(job.fixed.states.as_ref()) else {
        return Vec::new();
    };
    let takes = |elements: u64| ns(4.0 * elements as f64 / layout.zero3 as f64 / rate);
    // Alone and in fp32 a gather is the read; else ranks on CPUs read before they gather. An update
    // is the rank's own, or waited for.
    let out = job.cut(layout).out;
    let reads_first = layout.zero3 > 1 || job.compute.element_bytes < 4;
    let waits = out == Out::Behind || reads_first && !apart;
    let of = |s: &Stage| {
        let of = |is_out: bool, elements| if is_out { takes(elements) } else { 0 };
        let read_ns = of(out.has_parameters(), s.state.elements);
        let add_ns = of(out == Out::All, s.state.trained);
        let update_ns = of(out == Out::Behind, s.kept / 4);
        let states = StateCopies { read_ns, add_ns, update_ns, waits };
        vec![states; s.slices.len().max(1)]
    };
    stages.iter().flat_map(of).collect()
}

/// What a message takes.
pub(crate) fn link(job: &Job, layout: &Layout) -> LinkCosts {
    LinkCosts {
        latency_ns: ns(job.machine.message_s),
        bytes_per_s: Some(Links::new(&job.machine, layout).message.max(1.0) as u64),
        parallel_max: Some(2),
    }
}

/// What a step's end takes, the update before all.
pub(crate) fn step_ns(job: &Job, layout: &Layout, stages: &[Stage]) -> u64 {
    let links = Links::new(&job.machine, layout);
    let owners = if layout.zero1 { layout.dp } else { 1 };
    // Parameter, gradient and what is kept are read, all but the gradient written.
    let moved = |s: &Stage| 12 * (s.state.elements - s.state.returned) + 2 * s.kept;
    let shared = layout.zero3 as f64;
    let most = most_of_ranks(layout, stages, |s| moved(s) as f64) / shared;
    let matrices = most_of_ranks(layout, stages, |s| s.matrices_ns as f64) as u64;
    let update = most / owners as f64 / job.machine.update_bytes_per_s;
    let (norm, streamed) = streamed_s(job, layout, stages);
    let update = update.max(streamed) + norm;
    // With ZeRO-1 a layer is gathered from the replicas while the next one is updated, which on
    // devices that compute and send at once hides the faster of the two.
    let gather = if layout.zero1 { gathered_s(layout, &links, stages) } else { 0.0 };
    let update = match job.machine.ranks_at_once {
        Some(_) => update + gather,
        None => update.max(gather),
    };
    let exchange = exchange_s(job, layout, &links, stages);
    ns(update + exchange + job.machine.step_end_s) + matrices
}

/// Seconds of the copies of an update whose states are out: before the norm, which reads all
/// gradients there are out, and beside the update, which has one piece, reads the next one and
/// writes the one before; of an update behind the next step none are there.
fn streamed_s(job: &Job, layout: &Layout, stages: &[Stage]) -> (f64, f64) {
    let CopyRate { bytes_per_s: Some(rate), apart } = job.rate(job.fixed.states.as_ref()) else {
        return (0.0, 0.0);
    };
    let (d, owners) = (layout.zero3 as f64, layout.cut().owners as f64);
    let out = job.cut(layout).out;
    if out == Out::Behind {
        return (0.0, 0.0);
    }
    let gradient = if out == Out::All { 4.0 } else { 0.0 };
    let parameter = if out.has_parameters() { 4.0 } else { 0.0 };
    let gradients = most_of_ranks(layout, stages, |s| gradient * s.state.trained as f64);
    let [states, shards] = [
        most_of_ranks(layout, stages, |s| parameter * s.state.trained as f64 + s.kept as f64)
            / owners,
        most_of_ranks(layout, stages, |s| parameter * s.state.trained as f64),
    ];
    // With ZeRO-1 what is written is the whole shard, of which the rank has updated a part.
    let (read, written) = (states + gradients, states + shards - shards / owners);
    let both = if apart { read.max(written) } else { read + written };
    (gradients / d / rate, both / d / rate)
}

/// Seconds in which the rank with the embedding exchanges a tied head's gradient with the rank that
/// has that head, both ways at once, or gives slices its own and gets their weights.
pub(crate) fn exchange_s(job: &Job, layout: &Layout, links: &Links, stages: &[Stage]) -> f64 {
    let placement = layout.placement();
    let is_parted = placement[0] != placement[layout.stages() - 1];
    let whole = stages[layout.stages() - 1].state.tied.as_ref().filter(|_| is_parted);
    let whole = whole.map_or(0, |tied| tied.shard / layout.cut().owners as u64);
    let slices = stages[0].state.exchanged.iter().copied().max().unwrap_or(0);
    let of = |times: f64, bytes: u64| match bytes {
        0 => 0.0,
        bytes => times * (job.machine.message_s + bytes as f64 / links.message.max(1.0)),
    };
    of(1.0, whole) + of(2.0, slices)
}

/// Seconds of the gathers of updated parameters over replicas, of the rank that has most of them.
fn gathered_s(layout: &Layout, links: &Links, stages: &[Stage]) -> f64 {
    most_of_ranks(layout, stages, |s| s.sent(layout).update) / links.replica
}

/// The most that a rank has of what `of` says of each of its stages, which lie as the layout's kind
/// of schedule places them.
fn most_of_ranks(layout: &Layout, stages: &[Stage], of: impl Fn(&Stage) -> f64) -> f64 {
    let mut ranks = vec![0.0; layout.pp];
    for (rank, stage) in layout.placement().into_iter().chain(0..layout.pp).zip(stages) {
        ranks[rank] += of(stage);
    }
    ranks.into_iter().fold(0.0, f64::max)
}

mod slices;

#[cfg(test)]
mod slice_tests;
