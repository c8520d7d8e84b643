//! One stage of the model on one rank: its shards, and the gathers and reductions around them.
//!
//! Every `start_*` returns at once; the matching `finish_*` blocks. The executor calls them as the
//! schedule's AG, free, RS and AR actions say.

use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};
use zeropp_comm::groups::Groups;
use zeropp_comm::{CommResult, Pending};
use zeropp_core::layer::Part;
use zeropp_core::meter::{Hold, MemoryKind, Meter};
use zeropp_core::params::{FlatLayout, ParamSpec};
use zeropp_core::rng::initialise;
use zeropp_core::split::{Grads, LayerWeights};

use crate::adamw::DecayRange;

/// How stages are held.
#[derive(Clone)]
pub struct ShardOptions {
    /// Where tensors live.
    pub device: Device,
    /// Type of gathered weights; shards and gradients are always f32.
    pub compute: DType,
    /// Whether optimizer state is cut between replicas too.
    pub zero1: bool,
    /// Seed of the initial values.
    pub seed: u64,
}

/// One layer's part on this rank.
pub struct LayerShard {
    name: String,
    weights: LayerWeights,
    /// The fp32 parameters this rank owns, `[len / D]`.
    pub(crate) param: Tensor<1>,
    /// The reduced gradient of the units so far; after a ZeRO-1 reduction only this replica's part.
    pub(crate) grad: Option<Tensor<1>>,
    _param_hold: Hold,
}

struct Reduction {
    parts: Vec<Pending<Tensor<1>>>,
    hold: Hold,
}

/// The shards of one stage.
pub struct ShardedStage {
    index: usize,
    pub(crate) layers: Vec<LayerShard>,
    groups: Groups,
    options: ShardOptions,
    meter: Arc<Meter>,
    gathering: Option<Vec<Pending<Tensor<1>>>>,
    gathered_hold: Option<Hold>,
    /// Whether a unit of this step has a gradient.
    begun: bool,
    /// The reduced gradients of all layers.
    grad_hold: Option<Hold>,
    reducing: Option<Reduction>,
    replica_wanted: bool,
    replica_reducing: Option<Vec<Pending<Tensor<1>>>>,
}

/// One piece of a layer's flat buffer, for checkpoints and tests.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamExport {
    /// Name of the layer.
    pub layer: String,
    /// Which of the buffer's equal pieces.
    pub shard: usize,
    /// Its elements.
    pub values: Vec<f32>,
}

/// The part of a parameter that lies in a range of a layer's shard.
pub(crate) struct FlatPiece<'a> {
    /// The parameter.
    pub(crate) spec: &'a ParamSpec,
    /// First element of the piece, within the parameter.
    pub(crate) offset: usize,
    /// Number of elements.
    pub(crate) len: usize,
    /// Where the piece begins, within the range.
    pub(crate) at: usize,
}

impl ParamExport {
    fn new(layer: &str, shard: usize, values: &Tensor<1>) -> Self {
        let values = values.to_data().try_to_vec::<f32>().expect("shards are f32");
        Self { layer: layer.into(), shard, values }
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
        let pieces = groups.zero3.size() * if options.zero1 { groups.replica.size() } else { 1 };
        let layers = parts
            .iter()
            .enumerate()
            .map(|(i, part)| {
                let layout = Arc::new(FlatLayout::new(part.parameters(), pieces));
                let shard = groups.zero3.rank();
                let param = initial_shard(&layout, groups.zero3.size(), shard, options);
                let hold = meter.hold(MemoryKind::ParameterShard, bytes(&param));
                LayerShard {
                    name: part.name().to_string(),
                    weights: LayerWeights::new(part.name(), i, layout),
                    param,
                    grad: None,
                    _param_hold: hold,
                }
            })
            .collect();
        Self {
            index,
            layers,
            groups: groups.clone(),
            options: options.clone(),
            meter: meter.clone(),
            gathering: None,
            gathered_hold: None,
            begun: false,
            grad_hold: None,
            reducing: None,
            replica_wanted: false,
            replica_reducing: None,
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
        let kind = match first && self.is_alone() {
            true => MemoryKind::GradientShard,
            false => MemoryKind::Gradient,
        };
        Grads::counted_as(kind, layouts, &self.options.device, &self.meter)
    }

    /// Whether no other rank shares the stage, so that collectives return their own input.
    fn is_alone(&self) -> bool {
        self.groups.zero3.size() == 1
    }

    /// Bytes that one rank sends to gather the stage.
    pub fn gather_bytes(&self) -> u64 {
        let peers = self.groups.zero3.size() as u64 - 1;
        let each: u64 = self.layers.iter().map(|l| l.param.dims()[0] as u64).sum();
        peers * each * self.options.compute.size() as u64
    }

    /// Bytes that one rank sends to reduce the stage's gradients.
    pub fn reduce_bytes(&self) -> u64 {
        let peers = self.groups.zero3.size() as u64 - 1;
        peers * self.shard_bytes()
    }

    /// Bytes of this rank's fp32 parameters.
    fn shard_bytes(&self) -> u64 {
        self.layers.iter().map(|l| bytes(&l.param)).sum()
    }

    /// Bytes that one rank sends to sum the stage's shard over the replicas: the reduce-scatter
    /// half and the all-gather half.
    pub fn replica_bytes(&self) -> u64 {
        let k = self.groups.replica.size() as u64;
        self.layers.iter().map(|l| 2 * (k - 1) * bytes(&l.param) / k).sum()
    }

    /// AG: starts gathering the stage's weights.
    pub fn start_gather(&mut self) {
        let dtype = self.options.compute;
        let size = self.groups.zero3.size();
        let whole: usize = self.layers.iter().map(|l| l.weights.layout().len).sum();
        // Alone in its group and not cast, a gathered weight is the parameter itself.
        let bytes = (whole * dtype.size()) as u64;
        self.gathered_hold = (!self.is_alone() || dtype != DType::F32)
            .then(|| self.meter.hold(MemoryKind::Gathered, bytes));
        let group = &self.groups.zero3;
        self.gathering = Some(
            self.layers
                .iter()
                .map(|l| {
                    let shard = l.param.clone().cast(dtype);
                    debug_assert_eq!(shard.dims()[0] * size, l.weights.layout().len);
                    group.all_gather(shard)
                })
                .collect(),
        );
    }

    /// Waits for the gather under way, if any, and puts the weights in place.
    ///
    /// # Errors
    /// The collective's error.
    pub fn finish_gather(&mut self) -> CommResult<()> {
        let Some(parts) = self.gathering.take() else { return Ok(()) };
        for (layer, part) in self.layers.iter().zip(parts) {
            layer.weights.set(part.wait()?);
        }
        Ok(())
    }

    /// Whether [`finish_gather`](Self::finish_gather) would return at once.
    pub fn is_gathered(&mut self) -> bool {
        self.gathering.iter_mut().flatten().all(Pending::is_done)
    }

    /// Drops the gathered weights.
    ///
    /// # Errors
    /// That of a gather still under way, which is waited for: its buffers are in use.
    pub fn free(&mut self) -> CommResult<()> {
        self.finish_gather()?;
        self.layers.iter().for_each(|l| l.weights.free());
        self.gathered_hold = None;
        Ok(())
    }

    /// RS: starts reducing a unit's gradients into this rank's shard.
    pub fn start_reduce(&mut self, grads: Grads) {
        let (flat, hold) = grads.into_flat();
        let group = &self.groups.zero3;
        let parts = flat.into_iter().map(|g| group.reduce_scatter(g)).collect();
        self.reducing = Some(Reduction { parts, hold });
    }

    /// Whether [`finish_reduce`](Self::finish_reduce) would return at once.
    pub fn is_reduced(&mut self) -> bool {
        self.reducing.iter_mut().flat_map(|r| &mut r.parts).all(Pending::is_done)
    }

    /// Whether the sum over the replicas that was asked for is done.
    pub fn is_replica_reduced(&mut self) -> bool {
        let started = !self.replica_wanted;
        started && self.replica_reducing.iter_mut().flatten().all(Pending::is_done)
    }

    /// Whether a reduction is under way.
    pub fn is_reducing(&self) -> bool {
        self.reducing.is_some()
    }

    /// Waits for the reduction under way, adds it to the shard's gradient in unit order and starts
    /// the replica reduction where one was asked for.
    ///
    /// # Errors
    /// The collective's error.
    pub fn finish_reduce(&mut self) -> CommResult<()> {
        if let Some(reduction) = self.reducing.take() {
            let (alone, shard) = (self.is_alone(), self.shard_bytes());
            for (layer, part) in self.layers.iter_mut().zip(reduction.parts) {
                let part = part.wait()?;
                layer.grad = Some(match layer.grad.take() {
                    Some(sum) => sum + part,
                    None => part,
                });
            }
            let (meter, held) = (&self.meter, reduction.hold);
            self.grad_hold.get_or_insert_with(|| match alone {
                true => held,
                false => meter.hold(MemoryKind::GradientShard, shard),
            });
        }
        if std::mem::take(&mut self.replica_wanted) {
            self.start_replica_reduce();
        }
        Ok(())
    }

    /// AR: sums the shard's gradient over the replicas as soon as the last unit is reduced.
    pub fn request_replica_reduce(&mut self) {
        if self.groups.replica.size() == 1 {
            return;
        }
        if self.is_reducing() {
            self.replica_wanted = true;
        } else {
            self.start_replica_reduce();
        }
    }

    fn start_replica_reduce(&mut self) {
        let group = &self.groups.replica;
        let zero1 = self.options.zero1;
        let pending = self
            .layers
            .iter_mut()
            .map(|l| {
                let grad = l.grad.take().expect("reduced before the replicas are");
                if zero1 { group.reduce_scatter(grad) } else { group.all_reduce(grad) }
            })
            .collect();
        self.replica_reducing = Some(pending);
    }

    /// Waits for everything under way before the optimizer step.
    ///
    /// # Errors
    /// The collective's error.
    pub fn finish_replica_reduce(&mut self) -> CommResult<()> {
        self.finish_reduce()?;
        let Some(parts) = self.replica_reducing.take() else { return Ok(()) };
        for (layer, part) in self.layers.iter_mut().zip(parts) {
            layer.grad = Some(part.wait()?);
        }
        Ok(())
    }

    /// Forgets the step's gradients.
    pub fn clear_grads(&mut self) {
        self.layers.iter_mut().for_each(|layer| layer.grad = None);
        (self.grad_hold, self.begun) = (None, false);
    }

    /// This rank's parameters, layer by layer.
    pub fn export(&self) -> Vec<ParamExport> {
        let shard = self.groups.zero3.rank();
        self.layers.iter().map(|l| ParamExport::new(&l.name, shard, &l.param)).collect()
    }

    /// This rank's reduced gradients, layer by layer, as piece number `piece` of the buffer.
    pub(crate) fn export_gradients(&self, piece: usize) -> Vec<ParamExport> {
        let grad = |l: &LayerShard| Some(ParamExport::new(&l.name, piece, l.grad.as_ref()?));
        self.layers.iter().filter_map(grad).collect()
    }

    /// Start and length, within the layer's shard, of what this rank's optimizer updates.
    pub(crate) fn owned_range(&self, layer: usize) -> (usize, usize) {
        let n = self.layers[layer].param.dims()[0];
        if !self.options.zero1 {
            return (0, n);
        }
        let part = n / self.groups.replica.size();
        (self.groups.replica.rank() * part, part)
    }

    /// The parameters in elements `start..start + len` of the layer's shard, without padding.
    pub(crate) fn pieces(&self, layer: usize, start: usize, len: usize) -> Vec<FlatPiece<'_>> {
        let l = &self.layers[layer];
        let first = self.groups.zero3.rank() * l.param.dims()[0] + start;
        flat_pieces(l.weights.layout(), first, len)
    }

    /// Where weight decay applies in the owned range, relative to its start.
    pub(crate) fn decay_ranges(&self, layer: usize) -> Vec<DecayRange> {
        let l = &self.layers[layer];
        let (offset, len) = self.owned_range(layer);
        let start = self.groups.zero3.rank() * l.param.dims()[0] + offset;
        decay_ranges(l.weights.layout(), start, len)
    }
}

fn bytes(t: &Tensor<1>) -> u64 {
    (t.dims()[0] * t.dtype().size()) as u64
}

/// The initial values of shard number `shard` of `of`: each parameter from its own generator, at
/// each element's place in the parameter.
fn initial_shard(
    layout: &FlatLayout,
    of: usize,
    shard: usize,
    options: &ShardOptions,
) -> Tensor<1> {
    let n = layout.len / of;
    let start = shard * n;
    let mut values = vec![0f32; n];
    for place in &layout.params {
        let first = place.offset.max(start);
        let last = (place.offset + place.spec.len()).min(start + n);
        if first < last {
            let out = &mut values[first - start..last - start];
            initialise(options.seed, &place.spec, first - place.offset, out);
        }
    }
    Tensor::from_data(burn::tensor::TensorData::new(values, [n]), &options.device)
}

fn flat_pieces(layout: &FlatLayout, first: usize, len: usize) -> Vec<FlatPiece<'_>> {
    layout
        .params
        .iter()
        .filter_map(|place| {
            let a = place.offset.max(first);
            let b = (place.offset + place.spec.len()).min(first + len);
            (a < b).then(|| FlatPiece {
                spec: &place.spec,
                offset: a - place.offset,
                len: b - a,
                at: a - first,
            })
        })
        .collect()
}

fn decay_ranges(layout: &FlatLayout, start: usize, len: usize) -> Vec<DecayRange> {
    let end = start + len;
    let mut ranges: Vec<DecayRange> = Vec::new();
    let ends = layout.params.iter().skip(1).map(|p| p.offset).chain([layout.len]);
    for (place, next) in layout.params.iter().zip(ends) {
        let (a, b) = (place.offset.max(start), next.min(end));
        if a < b {
            ranges.push(DecayRange { start: a - start, end: b - start, decay: place.spec.decay });
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use zeropp_core::params::{BLOCK, Init, ParamSpec};

    fn layout(parts: usize) -> FlatLayout {
        let specs = vec![
            ParamSpec::new("a.weight", &[10, 20], Init::Normal(0.02)),
            ParamSpec::new("a.bias", &[20], Init::Ones),
        ];
        FlatLayout::new(specs, parts)
    }

    #[test]
    fn decay_ranges_cover_every_shard() {
        for parts in [1, 2, 3, 4] {
            let layout = layout(parts);
            assert_eq!(layout.len % (BLOCK * parts), 0);
            let n = layout.len / parts;
            let mut decayed = 0;
            for shard in 0..parts {
                let ranges = decay_ranges(&layout, shard * n, n);
                let covered: usize = ranges.iter().map(|r| r.end - r.start).sum();
                assert_eq!(covered, n);
                decayed +=
                    ranges.iter().filter(|r| r.decay).map(|r| r.end - r.start).sum::<usize>();
            }
            assert_eq!(decayed, 256, "the matrix and its padding");
        }
    }

    #[test]
    fn initial_values_do_not_depend_on_the_cut() {
        let options =
            ShardOptions { device: Device::flex(), compute: DType::F32, zero1: false, seed: 7 };
        let whole =
            initial_shard(&layout(1), 1, 0, &options).into_data().try_to_vec::<f32>().unwrap();
        let cut: Vec<f32> = (0..2)
            .flat_map(|s| {
                initial_shard(&layout(2), 2, s, &options).into_data().try_to_vec::<f32>().unwrap()
            })
            .collect();
        assert_eq!(whole[..276], cut[..276]);
        assert!(whole[..200].iter().any(|x| *x != 0.0));
        assert!(whole[256..276].iter().all(|x| *x == 1.0));
    }
}
