//! What a rank holds of a split head's messages: from the posting of a receive, or from the compute
//! that makes it, until the compute that takes it, or the send that passes it on.

use super::HeadBytes;
use crate::head::{Edge, End, HeadTree};
use crate::ir::{Action, Compute, HeadMessage, Schedule};
use crate::verify::is_program;

/// The messages that one rank has.
#[derive(Debug)]
pub(super) struct HeadLedger {
    head: HeadTree,
    rank: usize,
    micro_batches: usize,
    /// Bytes of each message to this rank that there is, by edge and micro-batch.
    there: Vec<u64>,
    /// The sends and computes of this rank that have not taken it yet.
    takers: Vec<usize>,
    /// By micro-batch: the input that the last stage has made, and the rank's own sums of
    /// gradients.
    own: [Vec<u64>; 2],
    /// How many sums of gradients the rank makes of its own blocks.
    own_sums: u64,
    /// Sends of gradients that are left, by micro-batch.
    sends: Vec<usize>,
    /// All bytes.
    pub(super) held: u64,
}

impl HeadLedger {
    pub(super) fn new(schedule: &Schedule, rank: usize) -> Option<HeadLedger> {
        let head = HeadTree::of(schedule)?;
        let micro_batches = schedule.micro_batches();
        let is_sent = |e: &&Edge| e.from == rank && e.message == HeadMessage::Gradient;
        let sends = match is_program(schedule) {
            true => head.edges.iter().filter(is_sent).count(),
            false => 0,
        };
        let takers = (0..head.edges.len()).map(|edge| head.takers(edge));
        let takers = takers.flat_map(|n| std::iter::repeat_n(n, micro_batches)).collect();
        Some(HeadLedger {
            there: vec![0; head.edges.len() * micro_batches],
            takers,
            own: [(); 2].map(|()| vec![0; micro_batches]),
            own_sums: head.own_sums(rank).len() as u64,
            sends: vec![sends; micro_batches],
            head,
            rank,
            micro_batches,
            held: 0,
        })
    }

    fn put(&mut self, edge: usize, micro_batch: usize, bytes: u64) {
        self.there[edge * self.micro_batches + micro_batch] = bytes;
        self.held += bytes;
    }

    /// One of those that take these messages: with the last one they are gone.
    fn take(&mut self, edges: &[usize], micro_batch: usize) {
        for edge in edges {
            let at = edge * self.micro_batches + micro_batch;
            self.takers[at] = self.takers[at].saturating_sub(1);
            if self.takers[at] == 0 {
                self.held -= std::mem::take(&mut self.there[at]);
            }
        }
    }

    fn put_own(&mut self, which: usize, micro_batch: usize, bytes: u64) {
        self.own[which][micro_batch] = bytes;
        self.held += bytes;
    }

    fn take_own(&mut self, which: usize, micro_batch: usize) {
        self.held -= std::mem::take(&mut self.own[which][micro_batch]);
    }

    /// A send or a receive. What is passed on is gone with the last send or compute that takes it.
    pub(super) fn message(&mut self, action: &Action, sizes: &HeadBytes) {
        let Some(Ok(end)) = self.head.end(self.rank, action) else { return };
        let End { edge, is_send, micro_batch } = end;
        let Edge { message, tensors, ref needs, .. } = self.head.edges[edge];
        if !is_send {
            // A validation loss takes its sums at once.
            let is_last = message == HeadMessage::Sums && self.rank == self.head.root;
            if is_last && !self.head.trains() {
                return;
            }
            return self.put(edge, micro_batch, sizes.message(message, tensors));
        }
        let needs = needs.clone();
        self.take(&needs, micro_batch);
        if message == HeadMessage::Gradient {
            self.sends[micro_batch] -= 1;
            if self.sends[micro_batch] == 0 {
                self.take_own(GRADIENT, micro_batch);
            }
        }
    }

    /// The start of a compute takes what has come for it. F keeps the input as its own.
    pub(super) fn start(&mut self, kind: Compute, stage: usize, micro_batch: usize) {
        let needs = self.head.needs(self.rank, kind, stage).to_vec();
        self.take(&needs, micro_batch);
        match self.head.takes_here(self.rank, kind, stage) {
            Some(Compute::F) => self.take_own(INPUT, micro_batch),
            Some(_) => self.take_own(GRADIENT, micro_batch),
            None => {}
        }
    }

    /// The end of a compute leaves what other slices, or the stage before, take. Where the rank of
    /// the last stage has no blocks, its input is counted until it has been sent, which is at once.
    pub(super) fn end(
        &mut self,
        kind: Compute,
        stage: usize,
        micro_batch: usize,
        sizes: &HeadBytes,
    ) {
        let is_slice = stage == self.head.stage;
        let has_blocks = self.head.has(self.rank);
        if kind == Compute::F && stage + 1 == self.head.stage && has_blocks {
            self.put_own(INPUT, micro_batch, sizes.input);
        }
        let is_kept = self.rank == self.head.root || self.sends[micro_batch] > 0;
        if kind == Compute::B && is_slice && is_kept {
            self.put_own(GRADIENT, micro_batch, sizes.gradient * self.own_sums);
        }
    }
}

const INPUT: usize = 0;
const GRADIENT: usize = 1;
