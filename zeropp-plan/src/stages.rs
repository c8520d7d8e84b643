//! A model cut into stages: what each takes and keeps.

use std::ops::Range;

use zeropp_model::layer::{BackwardPeak, BatchShape, LayerCost};
use zeropp_model::params::{BLOCK, FlatLayout, ParamSpec};
use zeropp_model::parts::{DecoderPart, PartKind};
use zeropp_schedule::costs::Machine;
use zeropp_schedule::memory::StageBytes;
use zeropp_schedule::simulate::{Costs, LinkCosts, StageCosts};

use crate::layout::{Job, Layout, Recompute};
use crate::matrices::OfBlock;

/// Where each kind of traffic goes, and how fast.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Links {
    /// Whether a ZeRO-3 group lies inside a node.
    pub zero3_inside: bool,
    /// Whether all messages stay inside a node.
    pub messages_inside: bool,
    /// Whether all ranks are in one node.
    pub replicas_inside: bool,
    /// Bytes in a second of a gather.
    pub zero3: f64,
    /// Of a reduce-scatter.
    pub reduce: f64,
    /// Of a message.
    pub message: f64,
    /// Of a sum over replicas, or of a gather from them.
    pub replica: f64,
    /// Of a reduce-scatter over replicas.
    pub replica_reduce: f64,
}

impl Links {
    /// Of `layout` with ranks placed as zeropp places them: the ranks of a ZeRO-3 group are
    /// neighbours, then those of a pipeline, then replicas.
    pub fn new(machine: &Machine, layout: &Layout) -> Links {
        let node = machine.per_node;
        let zero3_inside = layout.zero3 <= node && node.is_multiple_of(layout.zero3);
        let messages_inside = layout.zero3 * layout.pp <= node;
        let replicas_inside = layout.zero3 * layout.pp * layout.dp <= node;
        let inside = machine.zero3_bytes_per_s;
        // A group over whole nodes uses the cards of all its ranks.
        let rails = layout.zero3.min(node) as f64;
        let over_nodes = (machine.replica_bytes_per_s * rails).min(inside);
        Links {
            zero3_inside,
            messages_inside,
            replicas_inside,
            zero3: if zero3_inside { inside } else { over_nodes },
            reduce: if zero3_inside { machine.reduce_bytes_per_s } else { over_nodes },
            message: if messages_inside { inside } else { machine.bytes_per_s },
            replica: if replicas_inside { inside } else { machine.replica_bytes_per_s },
            replica_reduce: match replicas_inside {
                true => machine.reduce_bytes_per_s,
                false => machine.replica_bytes_per_s,
            },
        }
    }
}

/// A model's layers with their costs for one size of micro-batch, from which stages of any number
/// follow.
#[derive(Clone, Debug)]
pub struct Model {
    layers: Vec<Layer>,
    /// First and last part of each block, the embedding with the first, the head with the last.
    blocks: Vec<Range<usize>>,
    /// Parameters of a block, which are alike.
    of_block: Vec<ParamSpec>,
    samples: usize,
}

impl Model {
    /// The model of `job` with micro-batches of `samples`.
    pub fn new(job: &Job, samples: usize) -> Model {
        let parts = job.model.decoder.parts();
        let inner = (0..parts.len()).filter(|i| parts[*i].is_block());
        let mut blocks: Vec<Range<usize>> = inner.map(|i| i..i + 1).collect();
        if let Some(first) = blocks.first_mut() {
            first.start = 0;
        }
        if let Some(last) = blocks.last_mut() {
            last.end = parts.len();
        }
        let layer = |part: &DecoderPart| Layer::new(part, job.batch(samples), job.compute.dropout);
        let layers = parts.iter().map(layer).collect();
        let of_block = parts.iter().find(|part| part.is_block());
        let of_block = of_block.map(|part| part.parameters()).unwrap_or_default();
        Model { layers, blocks, of_block, samples }
    }

    /// Seconds of F, B, W and R of a block with what belongs to it.
    fn block_seconds(&self, block: usize, machine: &Machine) -> [f64; 4] {
        let mut sum = [0.0; 4];
        for layer in &self.layers[self.blocks[block].clone()] {
            for (sum, s) in sum.iter_mut().zip(layer.seconds(machine)) {
                *sum += s;
            }
        }
        sum
    }

    /// The number of blocks of each of `stages` with which the longest stage is shortest; none
    /// where there are fewer blocks than stages.
    pub fn cut(&self, stages: usize, machine: &Machine) -> Option<Vec<usize>> {
        let n = self.blocks.len();
        if stages == 0 || stages > n {
            return None;
        }
        let times: Vec<f64> =
            (0..n).map(|i| self.block_seconds(i, machine)[..3].iter().sum()).collect();
        // Blocks are alike but for the first and the last: a longest stage has n of the inner
        // ones, and one of the ends.
        let (mut low, mut high) = (0.0, times.iter().sum::<f64>());
        for _ in 0..60 {
            let middle = 0.5 * (low + high);
            match stages_within(&times, middle, stages) {
                Some(_) => high = middle,
                None => low = middle,
            }
        }
        stages_within(&times, high * (1.0 + 1e-12), stages)
    }

    fn ranges(&self, cut: &[usize]) -> Vec<Range<usize>> {
        let mut first = 0;
        let range = |n: &usize| {
            let blocks = first..first + n;
            first += n;
            self.blocks[blocks.start].start..self.blocks[blocks.end - 1].end
        };
        cut.iter().map(range).collect()
    }

    /// The stages of `layout`, cut into so many blocks each.
    pub fn stages(&self, job: &Job, layout: &Layout, cut: &[usize]) -> Vec<Stage> {
        let links = Links::new(&job.machine, layout);
        let owners = if layout.zero1 { layout.dp } else { 1 };
        let of_block = job
            .moments
            .whole_matrices
            .then(|| OfBlock::new(self.of_block.clone(), job.moments, layout.zero3, owners));
        let matrices =
            of_block.map_or(0, |of| ns(of.seconds(&job.machine, links.zero3, links.replica)));
        let ranges = self.ranges(cut);
        let with_optimizer = |(s, range): (usize, &Range<usize>)| {
            let mut stage = self.stage(job, layout, &links, (s, range.clone()));
            self.optimizer(job, layout, of_block, &self.layers[range.clone()], &mut stage);
            let blocks = self.layers[range.clone()].iter();
            let blocks = blocks.filter(|layer| matches!(layer.kind, PartKind::Block(_))).count();
            stage.matrices_ns = blocks as u64 * matrices;
            stage
        };
        ranges.iter().enumerate().map(with_optimizer).collect()
    }

    /// What the optimizer keeps of a stage and takes for it; `of_block` where that is Muon's.
    fn optimizer(
        &self,
        job: &Job,
        layout: &Layout,
        of_block: Option<OfBlock>,
        layers: &[Layer],
        stage: &mut Stage,
    ) {
        let owners = if layout.zero1 { layout.dp } else { 1 };
        let pieces = layout.zero3 * owners;
        for layer in layers {
            let flat = layer.flat_elements(pieces);
            let state = job.moments.bytes(flat, layer.matrices as u64);
            let muon = of_block.filter(|_| matches!(layer.kind, PartKind::Block(_)));
            // A rank's own part, and its parameters as they are gathered.
            let shard = flat / layout.zero3 as u64 * 4;
            let gathered = if layout.zero1 { shard + shard / owners as u64 } else { 0 };
            stage.state += state;
            stage.state_most += muon.map_or(state / pieces as u64, |of_block| of_block.state);
            let update = gathered + muon.map_or(0, |of_block| of_block.update);
            stage.update = stage.update.max(update);
        }
    }

    fn stage(
        &self,
        job: &Job,
        layout: &Layout,
        links: &Links,
        (stage, range): (usize, Range<usize>),
    ) -> Stage {
        let (d, k) = (layout.zero3 as u64, layout.dp as u64);
        let owners = if layout.zero1 { k } else { 1 };
        let layers = &self.layers[range];
        let flat = |layer: &Layer| layer.flat_elements((d * owners) as usize);
        let elements: u64 = layers.iter().map(flat).sum();
        let in_forward = layers.iter().filter(|l| l.cost.gradients_in_forward);
        let in_forward: u64 = in_forward.map(flat).sum();
        let batch = job.batch(self.samples);
        let message = (batch.tokens() * job.model.decoder.hidden * batch.element_bytes) as u64;
        let input = if stage == 0 { 0 } else { message };
        // A stage that is recomputed as a whole has attention's scores from R to B.
        let whole = layout.recompute == Recompute::Full && layout.recomputes(stage);
        let costs = || layers.iter().map(|layer| &layer.cost);
        let kept = |c: &LayerCost| match layout.recompute {
            Recompute::None => c.activation_bytes,
            _ if whole => c.activation_bytes,
            _ => c.activation_bytes_selective,
        };
        let selective = layout.recompute != Recompute::None && !whole;
        let backward = BackwardPeak::of_layers(costs(), selective);
        let (alone, fp32) = (d == 1, batch.element_bytes == 4);
        let each = job.compute.packing.bytes(layout);
        let packed = |of: &dyn Fn(&LayerCost) -> bool| {
            each * costs().filter(|c| of(c)).map(|c| c.packed_elements).sum::<u64>()
        };
        let (shard, element) = (elements / d, batch.element_bytes as u64);
        let bytes = StageBytes {
            input,
            activation: costs().map(kept).sum::<u64>().max(input),
            stash: costs().map(|c| c.stash_bytes).sum(),
            backward_freed: backward.freed,
            backward_stash: backward.stashed,
            workspace: costs().map(|c| c.workspace_bytes).max().unwrap_or(0),
            weights: if alone && fp32 { 0 } else { elements * element },
            gradient: elements * 4,
            gradient_in_forward: in_forward * 4,
            keeps_first_gradient: alone,
            gradient_shard: shard * 4,
            message,
            gather_input: if alone || fp32 { 0 } else { shard * element },
            reduced: if alone { 0 } else { shard * 4 },
            replica_reduced: if k > 1 { shard * 4 / owners } else { 0 },
            packed_forward: packed(&|_| true),
            packed_backward: packed(&|c| !c.gradients_in_forward),
            packed_in_forward: packed(&|c| c.gradients_in_forward),
        };
        let mut costs = times(layers, &job.machine, (&bytes, elements), links, layout);
        if selective && job.compute.keeps_probabilities {
            let machine = &job.machine;
            let rate = machine.block_flops_per_s.map(|rates| rates[1]);
            let rate = rate.unwrap_or(machine.flops_per_s * machine.flops_share);
            costs.b_ns += ns(layers.iter().map(|layer| layer.again).sum::<f64>() / rate);
        }
        Stage { costs, bytes, elements, ..Stage::default() }
    }
}

/// Cuts into exactly `stages` pieces of at most `most` each, every one of a block or more.
fn stages_within(times: &[f64], most: f64, stages: usize) -> Option<Vec<usize>> {
    let mut cut = Vec::with_capacity(stages);
    let mut next = 0;
    for stage in 0..stages {
        let behind = stages - stage - 1;
        // Leave one for each stage behind; spread what is left evenly.
        let available = times.len() - next - behind;
        let even = (times.len() - next).div_ceil(stages - stage);
        let (mut sum, mut n) = (0.0, 0);
        while n < available && sum + times[next + n] <= most {
            sum += times[next + n];
            n += 1;
        }
        // No more than needed, where the rest fits behind: equal stages where they can be.
        while n > even && fits(&times[next + n - 1..], most, behind) {
            n -= 1;
        }
        if n == 0 {
            return None;
        }
        cut.push(n);
        next += n;
    }
    (next == times.len()).then_some(cut)
}

/// Whether `times` can be cut into `stages` pieces of at most `most`.
fn fits(times: &[f64], most: f64, stages: usize) -> bool {
    let (mut used, mut sum) = (1, 0.0);
    for t in times {
        if sum + t > most {
            used += 1;
            sum = 0.0;
        }
        sum += t;
    }
    used <= stages && times.iter().all(|t| *t <= most)
}

/// One stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stage {
    /// What everything takes.
    pub costs: StageCosts,
    /// What it keeps.
    pub bytes: StageBytes,
    /// Elements of its flat buffers.
    pub elements: u64,
    /// Bytes that the optimizer keeps of it, on all ranks that share it together.
    pub state: u64,
    /// Of that, what the rank that keeps most keeps.
    pub state_most: u64,
    /// Bytes that the update of one of its layers takes for a moment, of the one that takes most.
    pub update: u64,
    /// What an update takes to gather matrices and to make them orthogonal, ns.
    pub matrices_ns: u64,
}

/// A layer with what a micro-batch costs in it.
#[derive(Clone, Debug)]
struct Layer {
    /// Elements of its parameters, each padded as in a flat buffer.
    padded: usize,
    /// Elements of a block's matrices.
    matrices: usize,
    kind: PartKind,
    cost: LayerCost,
    /// Floating-point operations of F, B, W and R.
    flops: [f64; 4],
    /// What B does besides where attention's probabilities are computed again, in as many.
    again: f64,
    /// Bytes that a pass over activations moves in a forward.
    traffic: f64,
}

impl Layer {
    fn new(part: &DecoderPart, batch: BatchShape, dropout: bool) -> Layer {
        let (parameters, cost) = (part.parameters(), part.cost(batch));
        let matrices = parameters.iter().filter(|p| p.shape.len() > 1);
        let elements: usize = matrices.map(|p| p.len()).sum();
        let of_weights = 2.0 * (batch.tokens() * elements) as f64;
        let mut flops = cost.passes(of_weights, false);
        // One of attention's two products, and as long for exponentials: what was measured for
        // samples of 128 and of 512 tokens (ADR 57).
        let again = if part.is_block() { (cost.forward_flops - of_weights).max(0.0) } else { 0.0 };
        if dropout {
            flops[1] += again;
        }
        let d = &part.decoder;
        let of = |elements: usize| (elements * batch.element_bytes) as f64;
        let traffic = match part.kind {
            // Everything kept is written once and read once; the causal half of scores, too.
            PartKind::Block(index) => {
                let seen = d.window_of(index).map_or(batch.seq, |window| window.min(batch.seq));
                let scores = batch.tokens() * d.heads * seen;
                2.0 * cost.activation_bytes_selective as f64 + of(scores)
            }
            PartKind::Head => 2.0 * of(batch.tokens() * d.rows()),
            _ => 2.0 * of(batch.tokens() * d.hidden),
        };
        let kind = part.kind;
        let matrices = if part.is_block() { elements } else { 0 };
        let padded = FlatLayout::new(parameters, 1).len;
        Layer { matrices, padded, kind, cost, flops, again, traffic }
    }

    /// Elements of the flat buffer that can be cut into `pieces`, padding included.
    fn flat_elements(&self, pieces: usize) -> u64 {
        self.padded.next_multiple_of(BLOCK * pieces) as u64
    }

    /// Seconds of F, B, W and R: by what layers were measured to do, else products at the
    /// machine's rate, passes over what is kept, and in a block the gaps between its kernels; a
    /// head that makes its gradients in F has all of it there.
    fn seconds(&self, machine: &Machine) -> [f64; 4] {
        let measured = match self.kind {
            PartKind::Block(_) => machine.block_flops_per_s.map(|rates| (rates, machine.block_s)),
            PartKind::Head => machine.head_flops_per_s.map(|rate| ([rate; 4], [0.0; 4])),
            _ => None,
        };
        if let Some((rates, beside)) = measured {
            return std::array::from_fn(|i| self.flops[i] / rates[i] + beside[i]);
        }
        let passes = match self.cost.gradients_in_forward {
            true => [2.0, 0.0, 0.0, 2.0],
            false => [1.0, 1.5, 0.0, 1.0],
        };
        let stash = [0.0, 0.0, self.cost.stash_bytes as f64, 0.0];
        // W is a few large products.
        let gaps = match self.kind {
            PartKind::Block(_) => [1.0, 2.0, 0.0, 1.0],
            _ => [0.0; 4],
        };
        std::array::from_fn(|i| {
            let bytes = passes[i] * self.traffic + stash[i];
            let rate = machine.flops_per_s * machine.flops_share;
            let moved = bytes / machine.memory_bytes_per_s;
            self.flops[i] / rate + moved + gaps[i] * machine.layer_s
        })
    }
}

fn times(
    layers: &[Layer],
    machine: &Machine,
    (bytes, elements): (&StageBytes, u64),
    links: &Links,
    layout: &Layout,
) -> StageCosts {
    let mut sum = [0.0; 4];
    for layer in layers {
        for (sum, s) in sum.iter_mut().zip(layer.seconds(machine)) {
            *sum += s;
        }
    }
    let (d, k) = (layout.zero3 as f64, layout.dp as f64);
    let collective = |bytes: f64, ranks: f64, rate: f64| match ranks > 1.0 {
        true => machine.collective_s + bytes * (ranks - 1.0) / ranks / rate,
        false => 0.0,
    };
    let gradient = bytes.gradient as f64;
    // Replicas that share the optimizer have a part each of the sum, and gather what they made of
    // it at the end of the step.
    let shard = elements as f64 * 4.0 / d;
    let (replicas, sums) = match layout.zero1 {
        true => (shard, links.replica_reduce),
        false => (2.0 * shard, links.replica),
    };
    StageCosts {
        f_ns: ns(sum[0]).max(1),
        b_ns: ns(sum[1]).max(1),
        w_ns: ns(sum[2]),
        r_ns: ns(sum[3]).max(1),
        all_gather_ns: ns(collective(bytes.weights as f64, d, links.zero3)),
        reduce_scatter_ns: ns(collective(gradient, d, links.reduce)),
        replica_reduce_ns: ns(collective(replicas, k, sums)),
    }
}

fn ns(seconds: f64) -> u64 {
    (seconds * 1e9) as u64
}

/// Everything that the simulator takes for these stages.
pub fn simulator(job: &Job, layout: &Layout, stages: &[Stage]) -> Costs {
    let links = Links::new(&job.machine, layout);
    let owners = if layout.zero1 { layout.dp } else { 1 };
    // Parameter, gradient and what is kept are read, all but the gradient written.
    let moved = |s: &Stage| 12 * s.elements + 2 * s.state;
    let of_rank = |p| stages.iter().skip(p).step_by(layout.pp).map(moved).sum::<u64>();
    let most = (0..layout.pp).map(of_rank).max().unwrap_or(0) as f64 / layout.zero3 as f64;
    let matrices = |p| stages.iter().skip(p).step_by(layout.pp).map(|s| s.matrices_ns).sum();
    let matrices: u64 = (0..layout.pp).map(matrices).max().unwrap_or(0);
    let update = most / owners as f64 / job.machine.update_bytes_per_s;
    // With ZeRO-1 a layer is gathered from the replicas while the next one is updated, which on
    // devices that compute and send at once hides the faster of the two.
    let gather = if layout.zero1 { gathered_s(layout, &links, stages) } else { 0.0 };
    let update = match job.machine.ranks_at_once {
        Some(_) => update + gather,
        None => update.max(gather),
    };
    Costs {
        stages: stages.iter().map(|s| s.costs).collect(),
        memory: stages.iter().map(|s| s.bytes).collect(),
        link: LinkCosts {
            latency_ns: ns(job.machine.message_s),
            bytes_per_s: Some(links.message.max(1.0) as u64),
            parallel_max: Some(2),
        },
        overlap_ns: None,
        step_ns: ns(update + job.machine.step_end_s) + matrices,
    }
}

/// Seconds of the gathers of updated parameters over replicas, of the rank that has most of them.
fn gathered_s(layout: &Layout, links: &Links, stages: &[Stage]) -> f64 {
    let elements = |p| stages.iter().skip(p).step_by(layout.pp).map(|s| s.elements).sum::<u64>();
    let most = (0..layout.pp).map(elements).max().unwrap_or(0);
    let k = layout.dp as f64;
    let bytes = 4.0 * most as f64 / layout.zero3 as f64 * (k - 1.0) / k;
    bytes / links.replica
}
