//! A split head's messages between ranks: what each is made of, and when it goes.
//!
//! A send never holds its rank up. What it passes on may not have arrived when the program comes to
//! it: then it waits here, and goes as soon as that has arrived, also while the rank waits for
//! something else. So whatever a rank waits for while a send is held back, it looks at both. Where
//! an engine wants one order of all that ranks do together, a send waits: its program has what it
//! passes on before it (ADR 31).

use std::time::Duration;

use burn::tensor::Tensor;
use zeropp_comm::CommResult;
use zeropp_comm::patience::Deadline;
use zeropp_core::meter::MemoryKind;
use zeropp_core::split::ops::join_sums;
use zeropp_failures::tag::head_tag;

use super::flight::{Flight, IncomingTensor, OfHead, take_one};
use super::{Executor, StepError, Worker};
use crate::head::{Edge, HeadTree};
use crate::ir::{Action, Compute, HeadMessage};

/// Between two looks at what has arrived.
const PAUSE: Duration = Duration::from_micros(100);
/// After so long, of the time in which the process runs, without an arrival a rank waits for one
/// thing alone, whose own time limit then ends the run.
const LOOKING_MAX: Duration = Duration::from_secs(300);

impl<W: Worker> Executor<W> {
    fn head(&self) -> &HeadTree {
        self.head.as_deref().expect("a program with such actions has a split head")
    }

    /// This rank's part in it: its number, whether it is the root, whether it has blocks.
    fn part(&self) -> (usize, bool, bool) {
        let me = self.pipeline.rank();
        (me, self.head().root == me, self.head().has(me))
    }

    /// Messages of a kind that this rank sends of a micro-batch.
    fn sends_of(&self, message: HeadMessage) -> usize {
        let me = self.pipeline.rank();
        self.head().edges.iter().filter(|e| e.from == me && e.message == message).count()
    }

    /// A send or a receive of the program.
    pub(super) fn head_message(
        &mut self,
        f: &mut Flight,
        action: Action,
        span: usize,
    ) -> Result<(), StepError> {
        let me = self.pipeline.rank();
        let edge = |message, from, to| self.head().edge(message, from, to).expect("verified");
        match action {
            Action::SendHead { message, micro_batch, peer, .. } => {
                let of = OfHead { edge: edge(message, me, peer), micro_batch };
                self.send_head(f, of, span)
            }
            Action::RecvHead { message, micro_batch, peer, .. } => {
                let of = OfHead { edge: edge(message, peer, me), micro_batch };
                self.receive_head(f, of, span);
                Ok(())
            }
            _ => unreachable!("no message of a split head"),
        }
    }

    /// Posts the receive of a message.
    fn receive_head(&mut self, f: &mut Flight, of: OfHead, span: usize) {
        let (head, me) = (self.head(), self.pipeline.rank());
        let OfHead { edge: at, micro_batch } = of;
        let (message, peer) = (head.edges[at].message, head.edges[at].from);
        let (tensors, takers) = (head.edges[at].tensors as usize, head.takers(at));
        let (len, dtype) = self.worker.head_message(message, micro_batch, tensors);
        let tensor = self.pipeline.recv(peer, head_tag(message, micro_batch), len, dtype);
        // The root of a validation loss takes its sums at once.
        if takers > 0 && (self.trains || message == HeadMessage::Input || self.head().root != me) {
            let bytes = (len * dtype.size()) as u64;
            let hold = self.meter.hold(MemoryKind::Communication, bytes);
            f.head.holds.insert(of, (hold, takers));
        }
        f.head.arriving.insert(of, IncomingTensor { tensor, span, _hold: None });
    }

    /// Sends a message, now or when what it passes on has arrived.
    fn send_head(&mut self, f: &mut Flight, of: OfHead, span: usize) -> Result<(), StepError> {
        let edge = &self.head().edges[of.edge];
        f.head.release(&edge.needs, of.micro_batch);
        if edge.message == HeadMessage::Gradient {
            f.head.release_own(of.micro_batch);
        }
        if self.pipeline.keeps_order() {
            // What comes next in the order waits for this message, so it is not put aside.
            let needs = edge.needs.clone();
            self.take_in_all(f, &needs, of.micro_batch)?;
        }
        f.head.waiting.push((of, span));
        self.pass_on(f)
    }

    /// Waits for those of these messages that were not taken in.
    fn take_in_all(&self, f: &mut Flight, edges: &[usize], micro_batch: usize) -> CommResult<()> {
        let ofs = edges.iter().map(|edge| OfHead { edge: *edge, micro_batch });
        for of in ofs {
            if f.head.arriving.contains_key(&of) {
                self.take_in(f, of)?;
            }
        }
        Ok(())
    }

    /// Takes in what has arrived, and sends what has waited for it.
    pub(super) fn pass_on(&mut self, f: &mut Flight) -> Result<(), StepError> {
        // One after the other, as the loss of a sample's slices is a sum.
        while let Some(micro_batch) = f.head.due.first().copied() {
            if !self.make_totals(f, micro_batch)? {
                break;
            }
            f.head.due.remove(0);
        }
        for (of, span) in std::mem::take(&mut f.head.waiting) {
            match self.try_send(f, of)? {
                true => f.spans[span].end_ns = self.now(),
                false => f.head.waiting.push((of, span)),
            }
        }
        Ok(())
    }

    /// Passes on what arrives until `is_done` says that what the rank waits for is there, or
    /// nothing is left to pass on.
    pub(super) fn pass_on_until(
        &mut self,
        f: &mut Flight,
        mut is_done: impl FnMut(&mut Self, &mut Flight) -> bool,
    ) -> Result<(), StepError> {
        let left = |f: &Flight| [f.head.waiting.len(), f.head.due.len(), f.head.arriving.len()];
        let (mut before, mut until) = (left(f), Deadline::after(LOOKING_MAX));
        while !f.head.waiting.is_empty() && !is_done(self, f) && !until.is_over() {
            self.pass_on(f)?;
            let now = left(f);
            if now != before {
                (before, until) = (now, Deadline::after(LOOKING_MAX));
            }
            self.worker.look_again_after(PAUSE);
        }
        self.worker.found();
        Ok(())
    }

    /// Sends all that is left to pass on, and makes the totals that are left.
    pub(super) fn pass_on_all(&mut self, f: &mut Flight) -> Result<(), StepError> {
        self.pass_on_until(f, |_, _| false)?;
        while let Some(micro_batch) = f.head.due.first().copied() {
            let sums = self.head().sums_to(self.pipeline.rank());
            self.wait_for_head(f, &sums, micro_batch)?;
        }
        for (of, _) in f.head.waiting.clone() {
            // Looked at for long enough: their own time limit ends the run.
            let needs = self.head().edges[of.edge].needs.clone();
            self.wait_for_head(f, &needs, of.micro_batch)?;
        }
        self.pass_on(f)
    }

    /// Whether all of these messages are there.
    fn have_arrived(
        &self,
        f: &mut Flight,
        edges: &[usize],
        micro_batch: usize,
    ) -> CommResult<bool> {
        for at in edges {
            let of = OfHead { edge: *at, micro_batch };
            if f.head.there.contains_key(&of) {
                continue;
            }
            let arrived = |one: &mut IncomingTensor| one.tensor.is_done();
            if !f.head.arriving.get_mut(&of).is_some_and(arrived) {
                return Ok(false);
            }
            self.take_in(f, of)?;
        }
        Ok(true)
    }

    /// Waits for a message and files it: sums of gradients by the blocks that they are over.
    fn take_in(&self, f: &mut Flight, of: OfHead) -> CommResult<()> {
        let one = f.head.arriving.remove(&of).expect("a verified program posts every receive");
        let tensor = self.worker.arrived(one.tensor.wait()?);
        f.spans[one.span].end_ns = self.now();
        let (edge, takers) = (&self.head().edges[of.edge], self.head().takers(of.edge));
        if edge.message != HeadMessage::Gradient {
            f.head.there.insert(of, (Some(tensor), takers));
            return Ok(());
        }
        let len = tensor.dims()[0] / edge.sums.len();
        for (i, sum) in edge.sums.iter().enumerate() {
            // Alone it can be added to where it is.
            let part = match edge.sums.len() {
                1 => tensor.clone(),
                _ => tensor.clone().slice([i * len..(i + 1) * len]),
            };
            f.head.gradients.insert((of.micro_batch, sum.start, sum.end), part);
        }
        f.head.there.insert(of, (None, takers));
        Ok(())
    }

    /// Waits for these messages, and passes on what arrives meanwhile.
    fn wait_for_head(
        &mut self,
        f: &mut Flight,
        edges: &[usize],
        micro_batch: usize,
    ) -> Result<(), StepError> {
        self.pass_on(f)?;
        for at in edges {
            let of = OfHead { edge: *at, micro_batch };
            let arrived = |f: &mut Flight| {
                let one = f.head.arriving.get_mut(&of);
                one.is_none_or(|one| one.tensor.is_done())
            };
            self.pass_on_until(f, |_, f| arrived(f))?;
            // The root's sums may have been taken meanwhile.
            if f.head.arriving.contains_key(&of) {
                self.take_in(f, of)?;
            }
        }
        self.pass_on(f)
    }

    /// Sends a message if all that it passes on is there.
    fn try_send(&mut self, f: &mut Flight, of: OfHead) -> CommResult<bool> {
        let (edge, micro_batch) = (self.head().edges[of.edge].clone(), of.micro_batch);
        let (_, is_root, _) = self.part();
        if edge.message == HeadMessage::Lse && is_root {
            let Some(totals) = take_one(&mut f.head.totals, micro_batch) else { return Ok(false) };
            self.post(f, &edge, micro_batch, totals);
            return Ok(true);
        }
        if !self.have_arrived(f, &edge.needs, micro_batch)? {
            return Ok(false);
        }
        let tensor = match edge.message {
            HeadMessage::Input | HeadMessage::Lse => match edge.needs.first() {
                Some(before) => {
                    f.head.take(OfHead { edge: *before, micro_batch }).expect("no gradient")
                }
                None => f.head.take_input(micro_batch),
            },
            HeadMessage::Sums => self.joined(f, &edge.needs, micro_batch),
            HeadMessage::Gradient => {
                let sums = edge.sums.iter();
                let mut sums: Vec<_> =
                    sums.map(|sum| f.head.sum_of(micro_batch, sum.clone())).collect();
                for before in &edge.needs {
                    f.head.take(OfHead { edge: *before, micro_batch });
                }
                if sums.len() == 1 { sums.remove(0) } else { Tensor::cat(sums, 0) }
            }
        };
        self.post(f, &edge, micro_batch, tensor);
        Ok(true)
    }

    fn post(&self, f: &mut Flight, edge: &Edge, micro_batch: usize, tensor: Tensor<1>) {
        f.sent_bytes += (tensor.dims()[0] * tensor.dtype().size()) as u64;
        let tag = head_tag(edge.message, micro_batch);
        f.sends.push(self.pipeline.send(edge.to, tag, tensor));
    }

    /// The sums of these messages and of the rank's own blocks, first blocks first.
    fn joined(&self, f: &mut Flight, edges: &[usize], micro_batch: usize) -> Tensor<1> {
        let head = self.head();
        let mut edges = edges.to_vec();
        edges.sort_by_key(|at| head.blocks_of(head.edges[*at].from).start);
        let take =
            |at: &usize| f.head.take(OfHead { edge: *at, micro_batch }).expect("no gradient");
        let mut parts: Vec<_> = edges.iter().map(take).collect();
        parts.extend(f.head.sums.remove(&micro_batch));
        join_sums(&parts, self.worker.head_tokens(micro_batch))
    }

    /// Makes the totals of a micro-batch, and its loss, if all sums are there.
    fn make_totals(&mut self, f: &mut Flight, micro_batch: usize) -> Result<bool, StepError> {
        let (me, _, has_blocks) = self.part();
        let edges = self.head().sums_to(me);
        let own_is_missing = has_blocks && !f.head.sums.contains_key(&micro_batch);
        if own_is_missing || !self.have_arrived(f, &edges, micro_batch)? {
            return Ok(false);
        }
        let sums = self.joined(f, &edges, micro_batch);
        for edge in edges {
            f.head.there.remove(&OfHead { edge, micro_batch });
        }
        let totals = self.worker.head_totals(micro_batch, sums)?;
        let takers = self.sends_of(HeadMessage::Lse) + usize::from(has_blocks);
        if self.trains {
            f.head.totals.insert(micro_batch, (totals, takers));
        }
        Ok(true)
    }

    /// The last stage has made the head's input.
    pub(super) fn head_input(&mut self, f: &mut Flight, micro_batch: usize, x: Tensor<1>) {
        let (_, _, has_blocks) = self.part();
        if has_blocks {
            let hold = self.meter.hold_tensor(MemoryKind::Communication, &x);
            f.head.input_holds.insert(micro_batch, hold);
        }
        let takers = self.sends_of(HeadMessage::Input) + usize::from(has_blocks);
        f.head.inputs.insert(micro_batch, (x, takers));
        f.head.due.push(micro_batch);
    }

    /// What F of this rank's slice takes.
    pub(super) fn slice_input(
        &mut self,
        f: &mut Flight,
        micro_batch: usize,
    ) -> Result<Tensor<1>, StepError> {
        let (me, is_root, _) = self.part();
        if is_root {
            f.head.input_holds.remove(&micro_batch);
            return Ok(f.head.take_input(micro_batch));
        }
        let needs = self.head().needs(me, Compute::F, self.head().stage).to_vec();
        self.received(f, &needs, micro_batch)
    }

    /// The one message that a compute of this rank's slice needs, when it is there.
    fn received(
        &mut self,
        f: &mut Flight,
        needs: &[usize],
        micro_batch: usize,
    ) -> Result<Tensor<1>, StepError> {
        self.wait_for_head(f, needs, micro_batch)?;
        f.head.release(needs, micro_batch);
        Ok(f.head.take(OfHead { edge: needs[0], micro_batch }).expect("no gradient"))
    }

    /// F of this rank's slice has made the sums of its blocks.
    pub(super) fn slice_output(
        &mut self,
        f: &mut Flight,
        micro_batch: usize,
        sums: Tensor<1>,
    ) -> Result<(), StepError> {
        f.head.sums.insert(micro_batch, sums);
        self.pass_on(f)
    }

    /// What B of this rank's slice takes: the totals over all blocks.
    pub(super) fn slice_totals(
        &mut self,
        f: &mut Flight,
        micro_batch: usize,
    ) -> Result<Tensor<1>, StepError> {
        let (me, is_root, _) = self.part();
        let needs = self.head().needs(me, Compute::B, self.head().stage).to_vec();
        if !is_root {
            return self.received(f, &needs, micro_batch);
        }
        while f.head.due.contains(&micro_batch) {
            let first = f.head.due[0];
            self.wait_for_head(f, &needs, first)?;
        }
        f.head.release(&needs, micro_batch);
        Ok(take_one(&mut f.head.totals, micro_batch).expect("made with the last of the sums"))
    }

    /// B of this rank's slice has made its sums of gradients.
    pub(super) fn slice_gradients(
        &mut self,
        f: &mut Flight,
        micro_batch: usize,
        sums: Vec<Tensor<1>>,
    ) -> Result<(), StepError> {
        let (me, is_root, _) = self.part();
        let takers = self.sends_of(HeadMessage::Gradient) + usize::from(is_root);
        let hold = |sum: &Tensor<1>| self.meter.hold_tensor(MemoryKind::Communication, sum);
        f.head.own.insert(micro_batch, (sums.iter().map(hold).collect(), takers));
        for (blocks, sum) in self.head().own_sums(me).into_iter().zip(sums) {
            f.head.gradients.insert((micro_batch, blocks.start, blocks.end), sum);
        }
        self.pass_on(f)
    }

    /// The gradient that the last stage takes from the head.
    pub(super) fn head_gradient(
        &mut self,
        f: &mut Flight,
        micro_batch: usize,
    ) -> Result<Tensor<1>, StepError> {
        let (me, _, _) = self.part();
        let needs = self.head().needs(me, Compute::B, self.head().stage - 1).to_vec();
        self.wait_for_head(f, &needs, micro_batch)?;
        f.head.release(&needs, micro_batch);
        f.head.release_own(micro_batch);
        let sum = f.head.sum_of(micro_batch, 0..self.head().blocks());
        for edge in needs {
            f.head.take(OfHead { edge, micro_batch });
        }
        Ok(self.worker.head_gradient(sum))
    }
}
