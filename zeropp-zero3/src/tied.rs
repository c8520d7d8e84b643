//! A tied weight whose head is one layer. Each of its two stages makes a gradient of its own, and
//! both are added up in one order on every mesh. Where embedding and head are on one rank, that has
//! the parameters once, and keeps what the optimizer keeps of them once (ADR 48).

use std::sync::Arc;

use burn::tensor::Tensor;
use zeropp_comm::groups::Groups;
use zeropp_comm::{CommResult, Communicator};
use zeropp_core::meter::{Hold, MemoryKind, Meter};
use zeropp_core::{cpu_tensor, device};

use crate::layer_shard::LayerShard;
use crate::stage::ShardedStage;
use crate::state_file::StatePlace;
use crate::words::{Words, each_piece};

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

impl Tie {
    /// Whether one rank has both.
    pub(crate) fn is_on_one_rank(&self) -> bool {
        self.ranks.0 == self.ranks.1
    }
}

/// Gives up the head's parameters and gradient among `stages` where this rank has both layers, so
/// that the embedding's are its alone; until [`share`] there are no parameters of the head.
pub(crate) fn release(stages: &mut [ShardedStage], tie: Option<Tie>) {
    if let Some((_, (stage, layer))) = places(stages, tie) {
        stages[stage].layers[layer].release();
    }
}

/// Makes the head's parameters those of the embedding where this rank has both layers.
pub(crate) fn share(stages: &mut [ShardedStage], tie: Option<Tie>) {
    let Some(((s, l), (stage, layer))) = places(stages, tie) else { return };
    let param = stages[s].layers[l].param.clone();
    let meter = stages[stage].meter.clone();
    stages[stage].layers[layer].share_param(param, &meter);
}

/// Where in `stages` embedding and head are: the stage's place in them, and the layer's in it.
fn places(stages: &[ShardedStage], tie: Option<Tie>) -> Option<((usize, usize), (usize, usize))> {
    let tie = tie.filter(Tie::is_on_one_rank)?;
    let stage = |at: (usize, usize)| stages.iter().position(|s| s.index() == at.0);
    Some(((stage(tie.first)?, tie.first.1), (stage(tie.last)?, tie.last.1)))
}

/// Embedding's plus head's gradient, on both. Same ZeRO-3 place, so shards match. Returns bytes
/// that this rank sent.
pub(crate) fn sum_gradients(
    stages: &mut [ShardedStage],
    tie: Option<Tie>,
    groups: &Groups,
    meter: &Arc<Meter>,
) -> CommResult<u64> {
    let Some(tie) = tie else { return Ok(0) };
    let me = groups.pipeline.rank();
    let first = (me == tie.ranks.0).then(|| take_grad(stages, tie.first)).flatten();
    let last = (me == tie.ranks.1).then(|| take_grad(stages, tie.last)).flatten();
    let (sum, _held) = match (first, last) {
        (Some(Words::Out(a)), Some(b)) => {
            add_in_file(&a, &b);
            set_gradients(stages, tie, |layer, _| layer.share_grad(Words::Out(a.clone())));
            return Ok(0);
        }
        (Some(a), Some(b)) => (cpu_tensor::add_in_place(a.into_tensor(), b.into_tensor()), None),
        (Some(a), None) => {
            let (a, held) = in_memory(a, meter);
            (a.clone() + swapped(groups, tie.ranks.1, &a, meter)?, held)
        }
        (None, Some(b)) => {
            let (b, held) = in_memory(b, meter);
            (swapped(groups, tie.ranks.0, &b, meter)? + b, held)
        }
        (None, None) => return Ok(0),
    };
    set_gradients(stages, tie, |layer, meter| layer.set_grad(sum.clone(), meter));
    Ok(if tie.is_on_one_rank() { 0 } else { bytes(&sum) })
}

/// A tied gradient in memory; what counts it, and the sum that it becomes a part of, where it was
/// not.
fn in_memory(grad: Words, meter: &Arc<Meter>) -> (Tensor<1>, Option<Hold>) {
    let bytes = 2 * 4 * grad.len() as u64;
    let held = grad.out().map(|_| meter.hold(MemoryKind::Optimizer, bytes));
    (grad.into_tensor(), held)
}

/// The gradient of pipeline rank `peer`, which gets a copy of this one.
fn swapped(
    groups: &Groups,
    peer: usize,
    mine: &Tensor<1>,
    meter: &Arc<Meter>,
) -> CommResult<Tensor<1>> {
    let copy = device::copy(mine);
    let _both_ways = meter.hold(MemoryKind::Optimizer, 2 * bytes(mine));
    swap(&*groups.pipeline, peer, copy)
}

/// Calls `set` with both layers of a tied weight, as far as they are of this rank.
fn set_gradients(
    stages: &mut [ShardedStage],
    tie: Tie,
    set: impl Fn(&mut LayerShard, &Arc<Meter>),
) {
    for at in [tie.first, tie.last] {
        if let Some(stage) = stages.iter_mut().find(|s| s.index() == at.0) {
            let meter = stage.meter.clone();
            set(&mut stage.layers[at.1], &meter);
        }
    }
}

/// Adds `more` to a sum in a file.
fn add_in_file(sum: &Arc<StatePlace>, more: &Words) {
    let before = Words::Out(sum.clone());
    each_piece(&[(&before, 0), (more, 0)], sum.words(), |piece, values| {
        let [sum_of, more] = <[Tensor<1>; 2]>::try_from(values).expect("two");
        let values = cpu_tensor::into_vec(cpu_tensor::add_in_place(sum_of, more));
        sum.file().write(vec![(sum.part(piece), values)]);
    });
    sum.file().settle();
}

fn bytes(t: &Tensor<1>) -> u64 {
    (t.dims()[0] * t.dtype().size()) as u64
}

fn take_grad(stages: &mut [ShardedStage], at: (usize, usize)) -> Option<Words> {
    stages.iter_mut().find(|s| s.index() == at.0)?.layers[at.1].take_grad()
}

/// Tag of the tied gradient's exchange; the executor's tags stay below it.
const TIED_TAG: u64 = u64::MAX;

fn swap(group: &dyn Communicator, peer: usize, mine: Tensor<1>) -> CommResult<Tensor<1>> {
    let (len, dtype, here) = (mine.dims()[0], mine.dtype(), mine.device());
    // Both come to the two messages in one order, as NCCL asks (ADR 31).
    if group.rank() < peer {
        let sent = group.send(peer, TIED_TAG, mine);
        let theirs = group.recv(peer, TIED_TAG, len, dtype).wait()?;
        sent.wait()?;
        return Ok(device::on(&here, theirs));
    }
    let theirs = group.recv(peer, TIED_TAG, len, dtype).wait()?;
    group.send(peer, TIED_TAG, mine).wait()?;
    Ok(device::on(&here, theirs))
}
