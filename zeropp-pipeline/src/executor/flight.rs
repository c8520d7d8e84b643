//! What is under way within a step, between ranks and between the computes of one.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::Range;

use burn::tensor::Tensor;
use zeropp_comm::Pending;
use zeropp_core::cpu_tensor::add_in_place;
use zeropp_core::meter::Hold;
use zeropp_failures::tag::Key;
use zeropp_zero3::StepOutcome;

use super::record::Redone;
use crate::head::halves;
use crate::timeline::Span;

pub(crate) struct IncomingTensor {
    pub(crate) tensor: Pending<Tensor<1>>,
    pub(crate) span: usize,
    pub(crate) _hold: Option<Hold>,
}

/// What goes on beside the computes: an operation of several ranks, of a stage, or a copy, of a
/// stage and micro-batch.
#[derive(Clone, Copy)]
pub(crate) enum RunningOperation {
    Gather(usize),
    Reduce(usize),
    ReplicaReduce(usize),
    Copy(usize, usize),
}

/// Computes of a stage that have run layer by layer.
pub(crate) struct RunByLayer {
    /// When each of those ends that are still to be told, as if it had run by itself.
    pub(crate) ends: VecDeque<u64>,
    /// When the first of them began, and the first layer's reduction.
    pub(crate) start: u64,
    pub(crate) reduced_from: u64,
    /// Whether the sum over the replicas was asked for.
    pub(crate) sums: bool,
}

impl RunByLayer {
    /// When the next one began and ended, if any is still to be told.
    pub(crate) fn told(&mut self) -> Option<(u64, u64)> {
        let end = self.ends.pop_front()?;
        Some((std::mem::replace(&mut self.start, end), end))
    }
}

/// The data that is under way within a step.
#[derive(Default)]
pub(crate) struct Flight {
    pub(crate) spans: Vec<Span>,
    pub(crate) arriving: HashMap<Key, IncomingTensor>,
    /// Produced here: for a stage that lives here too (counted until it is taken), or about to be
    /// sent.
    pub(crate) local: HashMap<Key, (Tensor<1>, Option<Hold>)>,
    pub(crate) sends: Vec<Pending<()>>,
    pub(crate) gathers: HashMap<usize, usize>,
    /// F that wait for each layer of their stage as they come to it: stages and micro-batches.
    pub(crate) by_layer: HashSet<(usize, usize)>,
    pub(crate) reduces: Vec<(usize, usize)>,
    /// What has run layer by layer, with the reduction behind it.
    pub(crate) run: Option<RunByLayer>,
    /// The spans of copies that were not waited for.
    pub(crate) copies: HashMap<(usize, usize), usize>,
    /// What was not yet seen to be done, with its span.
    pub(crate) running: Vec<(RunningOperation, usize)>,
    pub(crate) head: HeadFlight,
    pub(crate) sent_bytes: u64,
    pub(crate) outcome: Option<StepOutcome>,
    pub(crate) validated: Option<StepOutcome>,
    pub(crate) redone: Option<Redone>,
}

impl Flight {
    /// Something was waited for. Where it was seen to be done before, it ended then.
    pub(crate) fn end_running(&mut self, span: usize, now: u64) {
        if let Some(at) = self.running.iter().position(|(_, running)| *running == span) {
            self.running.swap_remove(at);
            self.spans[span].end_ns = now;
        }
    }
}

/// A message, by its place among those of a micro-batch, and the micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct OfHead {
    pub(crate) edge: usize,
    pub(crate) micro_batch: usize,
}

/// What there is of a split head's messages on one rank within a step.
#[derive(Default)]
pub(crate) struct HeadFlight {
    pub(crate) arriving: HashMap<OfHead, IncomingTensor>,
    /// What has arrived, with how many have still to take it. Sums of gradients are in `gradients`.
    pub(crate) there: HashMap<OfHead, (Option<Tensor<1>>, usize)>,
    /// What counts messages to this rank, with the sends and computes of the program after which
    /// they are no longer counted.
    pub(crate) holds: HashMap<OfHead, (Hold, usize)>,
    /// By micro-batch: the input that this rank's last stage has made.
    pub(crate) inputs: HashMap<usize, (Tensor<1>, usize)>,
    /// What counts it until F of the slice takes it.
    pub(crate) input_holds: HashMap<usize, Hold>,
    /// The sums of the rank's own blocks.
    pub(crate) sums: HashMap<usize, Tensor<1>>,
    /// The totals over all blocks, on the root.
    pub(crate) totals: HashMap<usize, (Tensor<1>, usize)>,
    /// Sums of gradients, by micro-batch and the blocks that they are over.
    pub(crate) gradients: HashMap<(usize, usize, usize), Tensor<1>>,
    /// What counts the rank's own ones, with the takers that are left.
    pub(crate) own: HashMap<usize, (Vec<Hold>, usize)>,
    /// Sends that wait for what they pass on, with their spans.
    pub(crate) waiting: Vec<(OfHead, usize)>,
    /// Micro-batches whose totals the root has not made yet.
    pub(crate) due: Vec<usize>,
}

impl HeadFlight {
    /// One of those that take these messages has come.
    pub(crate) fn release(&mut self, edges: &[usize], micro_batch: usize) {
        for at in edges {
            let of = OfHead { edge: *at, micro_batch };
            if let Some((_, left)) = self.holds.get_mut(&of) {
                *left = left.saturating_sub(1);
                if *left == 0 {
                    self.holds.remove(&of);
                }
            }
        }
    }

    /// One of those that take the rank's own sums of gradients has come.
    pub(crate) fn release_own(&mut self, micro_batch: usize) {
        if let Some((_, left)) = self.own.get_mut(&micro_batch) {
            *left -= 1;
            if *left == 0 {
                self.own.remove(&micro_batch);
            }
        }
    }

    /// What has arrived, for one of those that take it.
    pub(crate) fn take(&mut self, of: OfHead) -> Option<Tensor<1>> {
        let (tensor, left) = self.there.get_mut(&of).expect("it has arrived");
        let tensor = tensor.clone();
        *left = left.saturating_sub(1);
        if *left == 0 {
            self.there.remove(&of);
        }
        tensor
    }

    /// The input that the last stage has made, for one of those that take it.
    pub(crate) fn take_input(&mut self, micro_batch: usize) -> Tensor<1> {
        take_one(&mut self.inputs, micro_batch).expect("the stage before has made it")
    }

    /// The sum of gradients over these blocks, of those that are there.
    pub(crate) fn sum_of(&mut self, micro_batch: usize, blocks: Range<usize>) -> Tensor<1> {
        if let Some(sum) = self.gradients.remove(&(micro_batch, blocks.start, blocks.end)) {
            return sum;
        }
        let halves = halves(&blocks).expect("a block's own is there");
        let [left, right] = halves.map(|half| self.sum_of(micro_batch, half));
        add_in_place(left, right)
    }
}

/// A tensor for one of those that take it; with the last one it is gone.
pub(crate) fn take_one(
    from: &mut HashMap<usize, (Tensor<1>, usize)>,
    micro_batch: usize,
) -> Option<Tensor<1>> {
    let (tensor, left) = from.get_mut(&micro_batch)?;
    *left -= 1;
    if *left > 0 {
        return Some(tensor.clone());
    }
    from.remove(&micro_batch).map(|(tensor, _)| tensor)
}
