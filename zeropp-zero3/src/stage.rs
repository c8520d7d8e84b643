//! One stage of the model on one rank: its shards, and the gathers and reductions around them.
//!
//! Every `start_*` returns at once; the matching `finish_*` blocks. The executor calls them as the
//! schedule's AG, free, RS and AR actions say.

use std::collections::VecDeque;
use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};
use zeropp_comm::groups::Groups;
use zeropp_comm::{CommError, CommResult, Pending};
use zeropp_core::cpu_tensor::rounded;
use zeropp_core::layer::Part;
use zeropp_core::meter::{Hold, MemoryKind, Meter};
use zeropp_core::optimizer::Out;
use zeropp_core::params::FlatLayout;
use zeropp_core::split::{Grads, LayerWeights};

use crate::layer_shard::{FlatPiece, LayerShard, ShardFile, flat_pieces, initial_shard};
use crate::layer_state::OwnedRange;
use crate::state_file::StateFile;
use crate::words::Words;

mod reducing;

use reducing::Reducing;

/// Bytes of gathered weights beyond which a layer of its own call costs little, and can be used
/// sooner: what a node's links carry in about as long as a call of NCCL takes.
const CALL_BYTES: usize = 32 << 20;

/// How stages are held.
#[derive(Clone)]
pub struct ShardOptions {
    /// Where tensors live.
    pub device: Device,
    /// Type of gathered weights; shards and gradients are always f32.
    pub compute: DType,
    /// Whether bf16 weights are kept as the CPU's products read them, for as long as they are
    /// gathered.
    pub pack_weights: bool,
    /// Whether optimizer state is cut between replicas too.
    pub zero1: bool,
    /// Seed of the initial values.
    pub seed: u64,
    /// The rank's file for its shards; none where they are in memory.
    pub file: Option<Arc<StateFile>>,
    /// Whether all ranks have to begin what they do together in the order of their programs, so
    /// that no sum over replicas begins as soon as a layer is reduced.
    pub in_order: bool,
}

impl ShardOptions {
    /// What is in the file, with or without other replicas.
    fn out(&self, groups: &Groups) -> Out {
        self.file.as_ref().map_or(Out::Nothing, |file| file.out.beside(groups.replica.size()))
    }

    fn files(&self, groups: &Groups) -> ShardFile {
        let out = self.out(groups);
        ShardFile {
            parameters: self.file.clone().filter(|_| out.has_parameters()),
            gradients: self.file.clone().filter(|_| out == Out::All),
        }
    }
}

/// A gather under way.
struct Gathering {
    /// Of each layer that has not been waited for, the first one first.
    layers: VecDeque<LayerGather>,
    /// Counts the copies of the shards that are sent.
    _input: Option<Hold>,
}

/// A layer's buffers on their way, and room for them.
struct LayerGather {
    parts: Vec<Pending<Tensor<1>>>,
    room: Option<Hold>,
}

/// The shards of one stage.
pub struct ShardedStage {
    index: usize,
    pub(crate) layers: Vec<LayerShard>,
    groups: Groups,
    options: ShardOptions,
    pub(crate) meter: Arc<Meter>,
    gathering: Option<Gathering>,
    gathered_holds: Vec<Hold>,
    /// Whether a unit of this step has a gradient.
    begun: bool,
    reducing: Option<Reducing>,
    replica_wanted: bool,
    /// Holds that count the gradients and their sums over the replicas until these are there.
    replica_holds: Vec<Hold>,
    /// The sums over the replicas that have begun, by layer.
    replica_reducing: Vec<Option<Pending<Tensor<1>>>>,
    /// What a reduction failed with that was finished while the rank computed.
    fault: Option<CommError>,
}

/// One piece of a layer's flat buffer, for checkpoints and tests.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamExport {
    /// Name of the layer.
    pub layer: String,
    /// Whether it is of the buffer of what does not train.
    pub frozen: bool,
    /// Which of the buffer's equal pieces.
    pub shard: usize,
    /// Its elements.
    pub values: Vec<f32>,
}

impl ParamExport {
    fn new(layer: &str, shard: usize, values: &Words) -> Self {
        let values = values.tensor().to_data().try_to_vec::<f32>().expect("shards are f32");
        Self { layer: layer.into(), frozen: false, shard, values }
    }
}

impl ShardedStage {
    /// Shards of `parts` for this rank, with initial values.
    pub fn new(
        index: usize,
        parts: &[Part],
        groups: &Groups,
        options: &ShardOptions,
        meter: &Arc<Meter>,
    ) -> Self {
        let zero3 = &groups.zero3;
        let pieces = zero3.size() * if options.zero1 { groups.replica.size() } else { 1 };
        let ShardOptions { device, seed, .. } = options;
        let files = options.files(groups);
        let layers = parts
            .iter()
            .enumerate()
            .map(|(i, part)| {
                let layout = Arc::new(FlatLayout::trained(part.parameters(), pieces));
                let frozen = Arc::new(FlatLayout::frozen(part.parameters(), pieces));
                let initial = |layout: &FlatLayout| {
                    initial_shard(layout, zero3.size(), zero3.rank(), device, *seed)
                };
                let param = initial(&layout);
                let weights = LayerWeights::new(part.name(), i, layout).with_frozen(frozen.clone());
                let weights = match options.pack_weights {
                    true => weights.keeping_packed(meter),
                    false => weights,
                };
                let (name, role) = (part.name(), part.role(false));
                let mut layer = LayerShard::new(name, role, weights, param, files.clone(), meter);
                if frozen.len > 0 {
                    layer.set_frozen(initial(&frozen), meter);
                }
                layer
            })
            .collect();
        Self {
            index,
            layers,
            groups: groups.clone(),
            options: options.clone(),
            meter: meter.clone(),
            gathering: None,
            gathered_holds: Vec::new(),
            begun: false,
            reducing: None,
            replica_wanted: false,
            replica_holds: Vec::new(),
            replica_reducing: Vec::new(),
            fault: None,
        }
    }

    /// The stage's place in the model, 0..S.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The weight handles of each layer.
    pub fn weights(&self) -> Vec<LayerWeights> {
        self.layers.iter().map(|l| l.weights.clone()).collect()
    }

    /// Zero gradients of the stage's whole weights, metered. Where this rank is alone in its group
    /// a reduction is the buffer itself, so a step's first is the shard's gradient from the start.
    pub fn new_grads(&mut self) -> Grads {
        let layouts = self.layers.iter().map(|l| l.weights.layout().clone()).collect();
        let first = !std::mem::replace(&mut self.begun, true);
        let kind = match first && self.is_alone() && self.sums_here() {
            true => MemoryKind::GradientShard,
            false => MemoryKind::Gradient,
        };
        Grads::counted_as(kind, layouts, &self.options.device, &self.meter)
    }

    /// Whether no other rank shares the stage, so that collectives return their own input.
    fn is_alone(&self) -> bool {
        self.groups.zero3.size() == 1
    }

    /// Whether reduced gradients are in memory.
    fn sums_here(&self) -> bool {
        self.options.out(&self.groups) != Out::All
    }

    /// The rank's file, if it has one.
    pub(crate) fn file(&self) -> Option<&Arc<StateFile>> {
        self.options.file.as_ref()
    }

    /// The first fault of the rank's file, if it has one.
    pub(crate) fn check_file(&self) -> CommResult<()> {
        self.file().map_or(Ok(()), |file| file.check())
    }

    /// Bytes that one rank sends to gather the stage.
    pub fn gather_bytes(&self) -> u64 {
        let peers = self.groups.zero3.size() as u64 - 1;
        let each: u64 = self.layers.iter().map(|l| l.elements() as u64).sum();
        peers * each * self.options.compute.size() as u64
    }

    /// Bytes that one rank sends to reduce the stage's gradients.
    pub fn reduce_bytes(&self) -> u64 {
        let peers = self.groups.zero3.size() as u64 - 1;
        peers * self.trained_bytes()
    }

    /// Bytes of this rank's fp32 parameters that train.
    fn trained_bytes(&self) -> u64 {
        self.layers.iter().map(|l| bytes(&l.param)).sum()
    }

    /// Bytes that one rank sends to sum the stage's shard over the replicas: the reduce-scatter
    /// half and the all-gather half.
    pub fn replica_bytes(&self) -> u64 {
        let k = self.groups.replica.size() as u64;
        self.layers.iter().map(|l| 2 * (k - 1) * bytes(&l.param) / k).sum()
    }

    /// AG: starts gathering the stage's weights, once they are updated. What is in a file is read
    /// meanwhile where nothing else is to be done with it, else now: all ranks begin their
    /// collectives in one order.
    pub fn start_gather(&mut self) {
        self.settle();
        let (dtype, group) = (self.options.compute, &self.groups.zero3);
        let hold = |kind, elements: usize| self.meter.hold(kind, (elements * dtype.size()) as u64);
        let (alone, fp32, is_out) =
            (self.is_alone(), dtype == DType::F32, self.options.out(&self.groups).has_parameters());
        // Until they are here, room for them; a cast of the shard is a copy, and, alone in its
        // group, the result. Alone and not cast, what is gathered is the parameters themselves,
        // where they are in memory.
        let is_copy = !fp32 || is_out;
        let room = |layer: &LayerShard| hold(MemoryKind::Gathered, layer.elements() * group.size());
        let own: usize = self.layers.iter().map(LayerShard::elements).sum();
        let input = (!alone && is_copy).then(|| hold(MemoryKind::Communication, own));
        let rooms: Vec<Option<Hold>> =
            self.layers.iter().map(|layer| (!alone || is_copy).then(|| room(layer))).collect();
        let gather = |param: &Words| {
            if alone && fp32 && is_out {
                return param.start_read(0..param.len()).pending();
            }
            let reads = is_out && !fp32;
            let bytes = if reads { 4 * param.len() as u64 } else { 0 };
            let _read = self.meter.hold(MemoryKind::Communication, bytes);
            let shard = match dtype {
                DType::BF16 => rounded(param.tensor()),
                _ => param.tensor(),
            };
            group.all_gather(shard.cast(dtype))
        };
        let of_layer = |((layer, room), call): ((&LayerShard, Option<Hold>), usize)| {
            group.together(call);
            let parts = buffers(layer).map(gather).collect();
            LayerGather { parts, room }
        };
        let calls = self.gather_calls();
        let layers = self.layers.iter().zip(rooms).zip(calls).map(of_layer).collect();
        self.gathering = Some(Gathering { layers, _input: input });
    }

    /// How many buffers are gathered in one call from each layer on: small layers go together, and
    /// 0 stands for one that an earlier layer's call has.
    fn gather_calls(&self) -> Vec<usize> {
        let mut calls = vec![0; self.layers.len()];
        let (mut first, mut bytes) = (0, 0);
        for (at, layer) in self.layers.iter().enumerate() {
            if bytes >= CALL_BYTES {
                (first, bytes) = (at, 0);
            }
            calls[first] += buffers(layer).count();
            bytes += layer.elements() * self.groups.zero3.size() * self.options.compute.size();
        }
        calls
    }

    /// Waits for the gather under way, if any, and puts the weights in place.
    ///
    /// # Errors
    /// The collective's error.
    pub fn finish_gather(&mut self) -> CommResult<()> {
        if let Some(last) = self.layers.len().checked_sub(1) {
            self.gather_layer(last)?;
        }
        self.gathering = None;
        Ok(())
    }

    /// Waits for a layer of the gather under way, if any, and those before it, and puts its weights
    /// in place. What was sent counts until [`finish_gather`](Self::finish_gather).
    ///
    /// # Errors
    /// The collective's error.
    pub fn gather_layer(&mut self, layer: usize) -> CommResult<()> {
        let Some(gathering) = &mut self.gathering else { return Ok(()) };
        let left = self.layers.len() - layer;
        while gathering.layers.len() >= left {
            let at = self.layers.len() - gathering.layers.len();
            let LayerGather { parts, room } = gathering.layers.pop_front().expect("one is left");
            let parts = parts.into_iter().map(Pending::wait).collect::<CommResult<Vec<_>>>()?;
            drop(room);
            let hold = |part: &Tensor<1>| self.meter.hold_tensor(MemoryKind::Gathered, part);
            self.gathered_holds.extend(parts.iter().map(hold));
            let (layer, mut parts) = (&self.layers[at], parts.into_iter());
            let trained = match layer.trains() {
                true => parts.next().expect("gathered"),
                // No operation reads any of it.
                false => layer.param.tensor(),
            };
            let frozen = layer.frozen.as_ref().map(|_| parts.next().expect("gathered"));
            layer.weights.set_both(trained, frozen);
        }
        self.check_file()
    }

    /// Whether [`finish_gather`](Self::finish_gather) would return at once.
    pub fn is_gathered(&mut self) -> bool {
        let layers = self.gathering.iter_mut().flat_map(|gather| &mut gather.layers);
        layers.flat_map(|layer| &mut layer.parts).all(Pending::is_done)
    }

    /// Drops the gathered weights.
    ///
    /// # Errors
    /// That of a gather still under way, which is waited for: its buffers are in use.
    pub fn free(&mut self) -> CommResult<()> {
        self.finish_gather()?;
        self.layers.iter().for_each(|l| l.weights.free());
        self.gathered_holds.clear();
        Ok(())
    }

    /// Bytes that adding a reduced gradient to a sum in a file takes.
    fn adding_bytes(&self) -> u64 {
        let out = self.options.out(&self.groups);
        self.layers.iter().map(|layer| out.adding(layer.param.len())).max().unwrap_or(0)
    }

    /// Waits for parameters that are being updated.
    pub(crate) fn settle(&mut self) {
        let meter = &self.meter;
        self.layers.iter_mut().for_each(|layer| layer.settle(meter));
    }

    /// Forgets the step's gradients.
    pub(crate) fn clear_grads(&mut self) {
        self.layers.iter_mut().for_each(LayerShard::clear_grad);
        self.begun = false;
    }

    /// This rank's parameters, layer by layer.
    ///
    /// # Errors
    /// A fault of the rank's file, if they are in one.
    pub fn export(&self) -> CommResult<Vec<ParamExport>> {
        let shard = self.groups.zero3.rank();
        let of = |l: &LayerShard| {
            let trained = l.trains().then(|| ParamExport::new(&l.name, shard, &l.param));
            let frozen = l.frozen.as_ref().map(|frozen| {
                let export = ParamExport::new(&l.name, shard, &frozen.param);
                ParamExport { frozen: true, ..export }
            });
            trained.into_iter().chain(frozen).collect::<Vec<_>>()
        };
        let all = self.layers.iter().flat_map(of).collect();
        self.check_file().map(|()| all)
    }

    /// This rank's reduced gradients, layer by layer, as piece number `piece` of the buffer.
    pub(crate) fn export_gradients(&self, piece: usize) -> Vec<ParamExport> {
        let grad = |l: &LayerShard| Some(ParamExport::new(&l.name, piece, l.grad.as_ref()?));
        self.layers.iter().filter_map(grad).collect()
    }

    /// Start and length, within the layer's shard, of what this rank's optimizer updates.
    pub(crate) fn owned_range(&self, layer: usize) -> (usize, usize) {
        let n = self.layers[layer].param.len();
        if !self.options.zero1 {
            return (0, n);
        }
        let part = n / self.groups.replica.size();
        (self.groups.replica.rank() * part, part)
    }

    /// This rank's place among those that share the stage.
    pub(crate) fn zero3_rank(&self) -> usize {
        self.groups.zero3.rank()
    }

    /// Its replica.
    pub(crate) fn replica_rank(&self) -> usize {
        self.groups.replica.rank()
    }

    /// The parameters that train in elements `start..start + len` of the layer's shard, without
    /// padding.
    pub(crate) fn pieces(&self, layer: usize, start: usize, len: usize) -> Vec<FlatPiece<'_>> {
        let l = &self.layers[layer];
        let first = self.groups.zero3.rank() * l.param.len() + start;
        flat_pieces(l.weights.layout(), first, len)
    }

    /// The part of a layer that this rank's optimizer updates.
    pub(crate) fn owned(&self, layer: usize) -> OwnedRange<'_> {
        let l = &self.layers[layer];
        let (offset, len) = self.owned_range(layer);
        let start = self.groups.zero3.rank() * l.param.len() + offset;
        OwnedRange { layout: l.weights.layout(), role: l.role, start, len }
    }
}

/// The gathered tensors of a layer: one buffer of what trains, one of what does not.
fn buffers(layer: &LayerShard) -> impl Iterator<Item = &Words> {
    let trained = layer.trains().then_some(&layer.param);
    trained.into_iter().chain(layer.frozen.as_ref().map(|frozen| &frozen.param))
}

fn bytes(words: &Words) -> u64 {
    4 * words.len() as u64
}
