//! Messages that take the time of given links.

use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use parking_lot::Mutex;
use zeropp_comm::{AllBytes, CommResult, CommStats, Communicator, InFlight, Pending};
use zeropp_failures::tag::{untag, untag_head};

use super::clock::EmulatedClock;
use super::stamps::{STAMP, encode, latest, tensor};
use crate::head::HeadTree;
use crate::ir::Message;
use crate::simulate::Costs;

/// Links of a rank that are distinguished.
const LINKS_MAX: usize = 1 << 12;

/// The pipeline's communicator, with messages that take the time of a given link.
pub struct EmulatedLinks {
    inner: Arc<dyn Communicator>,
    costs: Arc<Costs>,
    clock: Arc<EmulatedClock>,
    head: Option<HeadTree>,
    /// Slices of a sample, each with messages of its own size.
    slices: usize,
    /// When each of this rank's links is free; empty without a limit.
    links: Mutex<Vec<u64>>,
}

impl EmulatedLinks {
    /// Wraps `inner`, whose messages are those of an executor with an emulated worker, and of a
    /// `head` that is split, or samples in so many `slices`.
    pub fn new(
        inner: Arc<dyn Communicator>,
        costs: Arc<Costs>,
        clock: Arc<EmulatedClock>,
        head: Option<HeadTree>,
        slices: usize,
    ) -> Self {
        // More links than messages that are ever under way at once make no difference.
        let links = vec![0; costs.link.parallel_max.map_or(0, |n| n.min(LINKS_MAX))];
        Self { inner, costs, clock, head, slices, links: Mutex::new(links) }
    }

    /// The bytes of a message to a rank.
    fn bytes(&self, to: usize, tag: u64) -> u64 {
        let memory = &self.costs.memory;
        if let Some((message, consumer, micro_batch)) = untag(tag) {
            // A gradient has the size of the activation that crosses the same boundary.
            let boundary = if message == Message::Activation { consumer - 1 } else { consumer };
            return memory[boundary * self.slices + micro_batch % self.slices].message;
        }
        let (head, me) = (self.head.as_ref().expect("a message of one"), self.inner.rank());
        let (message, micro_batch) = untag_head(tag).expect("of a stage or of a head");
        let edge = &head.edges[head.edge(message, me, to).expect("a message of its tree")];
        let entry = (head.stage + me) * self.slices + micro_batch % self.slices;
        memory[entry].head.of(message).saturating_mul(edge.tensors)
    }

    /// When a message that is sent now is at its receiver.
    fn arrival(&self, to: usize, tag: u64) -> u64 {
        let link = &self.costs.link;
        let transfer = link.transfer_ns(self.bytes(to, tag)) as u64;
        let now = self.clock.now();
        let start = match self.links.lock().iter_mut().min() {
            Some(free) => {
                let start = now.max(*free);
                *free = start + transfer;
                start
            }
            None => now,
        };
        start + transfer + link.latency_ns
    }
}

impl Communicator for EmulatedLinks {
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn rank(&self) -> usize {
        self.inner.rank()
    }
    fn size(&self) -> usize {
        self.inner.size()
    }
    fn all_gather(&self, shard: Tensor<1>) -> Pending<Tensor<1>> {
        self.inner.all_gather(shard)
    }
    fn reduce_scatter(&self, full: Tensor<1>) -> Pending<Tensor<1>> {
        self.inner.reduce_scatter(full)
    }
    fn all_reduce(&self, buffer: Tensor<1>) -> Pending<Tensor<1>> {
        self.inner.all_reduce(buffer)
    }
    fn broadcast(&self, root: usize, buffer: Tensor<1>) -> Pending<Tensor<1>> {
        self.inner.broadcast(root, buffer)
    }
    fn exchange(&self, bytes: Vec<u8>) -> Pending<AllBytes> {
        self.inner.exchange(bytes)
    }
    fn gather(&self, root: usize, bytes: Vec<u8>) -> Pending<AllBytes> {
        self.inner.gather(root, bytes)
    }
    /// Sends the time of arrival in place of `buffer`.
    fn send(&self, to: usize, tag: u64, buffer: Tensor<1>) -> Pending<()> {
        let stamps = buffer.dims()[0] / STAMP;
        self.inner.send(to, tag, tensor(encode(self.arrival(to, tag)).repeat(stamps)))
    }
    fn recv(&self, from: usize, tag: u64, len: usize, dtype: DType) -> Pending<Tensor<1>> {
        let message = self.inner.recv(from, tag, len, dtype);
        let message = Some(message);
        Pending::in_flight(Box::new(Travelling { message, sent: None, clock: self.clock.clone() }))
    }
    fn keeps_order(&self) -> bool {
        self.inner.keeps_order()
    }
    fn barrier(&self) -> CommResult<()> {
        self.inner.barrier()
    }
    fn split(&self, name: &str, color: usize, key: usize) -> CommResult<Arc<dyn Communicator>> {
        self.inner.split(name, color, key)
    }
    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }
    fn stats(&self) -> CommStats {
        self.inner.stats()
    }
}

/// A message on an emulated link.
struct Travelling {
    /// Until it was sent.
    message: Option<Pending<Tensor<1>>>,
    sent: Option<CommResult<Tensor<1>>>,
    clock: Arc<EmulatedClock>,
}

impl InFlight<Tensor<1>> for Travelling {
    /// Whether it is there by the rank's time.
    fn is_done(&mut self) -> bool {
        if let Some(mut message) = self.message.take() {
            match message.is_done() {
                true => self.sent = Some(message.wait()),
                false => self.message = Some(message),
            }
        }
        match &self.sent {
            Some(Ok(message)) => self.clock.has_come(latest(message.clone())),
            Some(Err(_)) => true,
            None => false,
        }
    }

    fn wait(mut self: Box<Self>) -> CommResult<Tensor<1>> {
        let message = match (self.sent.take(), self.message.take()) {
            (Some(sent), _) => sent?,
            (None, Some(message)) => self.clock.blocked(message)?,
            (None, None) => unreachable!("a message is on its way or was sent"),
        };
        self.clock.wait_until(latest(message.clone()));
        Ok(message)
    }
}
