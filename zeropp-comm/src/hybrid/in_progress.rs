//! One collective between processes, from the moment all ranks of this process have joined it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use burn::tensor::{DType, Device, Tensor, TensorData};
use parking_lot::Mutex;

use super::group::HybridGroup;
use super::header::{ProcessHeader, Purpose};
use super::plan::{Arrived, CollectivePlan};
use crate::patience::Deadline;
use crate::signature::{Operation, bytes_of};
use crate::threads::barrier::{RankBarrier, RankInput, RankOutput};
use crate::threads::collective::fail_with_panic;
use crate::{AllBytes, CommError, CommResult, Pending, kernels};

/// How long a note about missing ranks may take: it was sent long before it is asked for.
const NOTE_TIME: Duration = Duration::from_millis(200);

/// A collective under way.
pub(super) struct HybridInProgress {
    group: Arc<HybridGroup>,
    barrier: Arc<RankBarrier>,
    /// The buffers of this process's ranks.
    inputs: Mutex<Vec<Tensor<1>>>,
    /// Bytes of all of them.
    bytes: usize,
    stage: Mutex<HybridPhase>,
    /// The ranks that had not joined when that was asked for first.
    missing: OnceLock<Vec<usize>>,
}

/// How far it got.
enum HybridPhase {
    /// Not all processes have joined.
    Headers(Pending<AllBytes>),
    /// Buffers are on their way.
    Messages(Messages),
    /// Someone copies or sums.
    Working,
    /// The ranks have their results, or the world has failed.
    Over,
}

/// One round of messages between this process and the others.
struct Messages {
    round: u64,
    sent: Vec<Pending<()>>,
    coming: Vec<(usize, Pending<Tensor<1>>)>,
}

impl HybridInProgress {
    /// Announces to the other processes that all ranks of this one have joined, with `inputs`, and
    /// hands the rest to the driver. Called by the rank that joined last: ranks join the next
    /// collective after this one, so every process calls the outer group in the same order.
    pub(super) fn start(
        group: &Arc<HybridGroup>,
        barrier: &Arc<RankBarrier>,
        inputs: Vec<RankInput>,
    ) {
        let mut tensors = Vec::new();
        let mut data = Vec::new();
        for input in inputs {
            match input {
                RankInput::Buffer(tensor) => tensors.push(tensor),
                RankInput::Bytes(bytes) => data.push(bytes),
                RankInput::Split(..) | RankInput::Nothing => {}
            }
        }
        if CollectivePlan::new(group, &barrier.signature).is_some_and(|plan| plan.is_small()) {
            data = tensors.iter().map(to_bytes).collect();
        }
        let header = ProcessHeader { signature: barrier.signature, data };
        let headers = match (barrier.signature.operation, barrier.signature.root) {
            (Operation::Gather, Some(root)) => {
                group.outer.gather(group.homes[root].0, header.encode())
            }
            _ => group.outer.exchange(header.encode()),
        };
        let in_progress = Arc::new(HybridInProgress {
            group: group.clone(),
            barrier: barrier.clone(),
            bytes: tensors.iter().map(bytes_of).sum(),
            inputs: Mutex::new(tensors),
            stage: Mutex::new(HybridPhase::Headers(headers)),
            missing: OnceLock::new(),
        });
        group.start(barrier.sequence, in_progress.clone());
        group.engine.drive(in_progress);
    }

    /// Whether nothing is left to do.
    pub(super) fn is_over(&self) -> bool {
        self.stage.try_lock().is_some_and(|stage| matches!(*stage, HybridPhase::Over))
    }

    /// Takes the next step if it is time; whether it was. Copies and sums go to the workers.
    pub(super) fn poll(self: &Arc<Self>) -> bool {
        // The thread that holds the lock is looking for missing ranks, and that ends the world.
        let Some(mut stage) = self.stage.try_lock() else { return false };
        let world = &self.group.engine.world;
        if world.error(self.group.local.members[0]).is_some() {
            *stage = HybridPhase::Over;
            self.group.finish(self.barrier.sequence);
            return true;
        }
        let ready = match &mut *stage {
            HybridPhase::Headers(all) => all.is_done(),
            HybridPhase::Messages(messages) => messages.are_done(),
            HybridPhase::Working | HybridPhase::Over => false,
        };
        if !ready {
            return false;
        }
        let reached = std::mem::replace(&mut *stage, HybridPhase::Working);
        drop(stage);
        let in_progress = self.clone();
        let work = move || in_progress.work(reached);
        match self.bytes <= world.options.inline_bytes {
            true => work(),
            false => world.workers.submit(Box::new(work)),
        }
        true
    }

    /// World ranks that have not joined, as far as that can be found out. None where the outer
    /// operation is done or does not say.
    pub(super) fn missing(&self) -> Vec<usize> {
        let mut stage = self.stage.lock();
        // Notes can be read once.
        self.missing.get_or_init(|| self.find_missing(&mut stage)).clone()
    }

    fn find_missing(&self, stage: &mut HybridPhase) -> Vec<usize> {
        let processes = match stage {
            HybridPhase::Headers(all) => all.missing(),
            HybridPhase::Messages(messages) => {
                messages.coming.iter_mut().flat_map(|(_, message)| message.missing()).collect()
            }
            HybridPhase::Working | HybridPhase::Over => Vec::new(),
        };
        let mut ranks: Vec<usize> =
            processes.into_iter().flat_map(|process| self.missing_of(process)).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// Ranks of a process that has not joined: those of the group that it has not noted as here,
    /// or all of a process that is none of the group's.
    fn missing_of(&self, process: usize) -> Vec<usize> {
        let group = &self.group;
        let of =
            |home: &usize| group.ranks_at(*home).any(|r| group.engine.process_of(r) == process);
        let Some(home) = (0..group.places.len()).find(of) else {
            return group.engine.ranks_of(process).collect();
        };
        let (tag, len) =
            (Purpose::Note { sequence: self.barrier.sequence }.tag(), group.places[home].len());
        let mut note = group.outer.recv(home, tag, len, DType::F32);
        let note = note.wait_until(Deadline::after(NOTE_TIME)).then(|| note.wait().ok()).flatten();
        let here = note.map_or(vec![0.0; len], zeropp_core::cpu_tensor::into_vec);
        group.ranks_at(home).zip(here).filter(|(_, here)| *here == 0.0).map(|(r, _)| r).collect()
    }

    /// Carries it from the stage it has reached to the next. A panic fails the world, so that no
    /// rank waits for a result that will not come.
    fn work(self: Arc<Self>, reached: HybridPhase) {
        let next = match catch_unwind(AssertUnwindSafe(|| self.advance(reached))) {
            Ok(Ok(next)) => next,
            Ok(Err(_)) => HybridPhase::Over,
            Err(panic) => {
                fail_with_panic(&self.group.local, &self.barrier, 0, &*panic);
                HybridPhase::Over
            }
        };
        if matches!(next, HybridPhase::Over) {
            self.group.finish(self.barrier.sequence);
        }
        *self.stage.lock() = next;
    }

    /// The next stage. Where that is an error, the world has failed with it.
    fn advance(&self, reached: HybridPhase) -> CommResult<HybridPhase> {
        match reached {
            HybridPhase::Headers(all) => {
                let all = self.outer(all.wait())?;
                let headers = self.group.check(&self.barrier, &all)?;
                self.after_headers(headers)
            }
            HybridPhase::Messages(messages) => {
                let round = messages.round;
                let arrived = self.outer(messages.finish(self.group.places.len()))?;
                self.after_messages(round, &arrived)
            }
            HybridPhase::Working | HybridPhase::Over => unreachable!("nothing to take further"),
        }
    }

    fn after_headers(&self, headers: Vec<ProcessHeader>) -> CommResult<HybridPhase> {
        let group = &self.group;
        let Some(plan) = CollectivePlan::new(group, &self.barrier.signature) else {
            let mut outputs: Vec<RankOutput> = match self.barrier.signature.operation {
                Operation::Exchange | Operation::Gather => self.bytes_of(headers),
                _ => group.local.members.iter().map(|_| RankOutput::Nothing).collect(),
            };
            return Ok(self.deliver(outputs.drain(..)));
        };
        if !plan.is_small() {
            return self.send_inputs(&plan);
        }
        let inputs = std::mem::take(&mut *self.inputs.lock());
        let device = inputs[0].device();
        let buffer = |&(home, index): &(usize, usize)| match home == group.here() {
            true => inputs[index].clone(),
            false => from_bytes(&headers[home].data[index], plan.kind, &device),
        };
        let buffers: Vec<Tensor<1>> = group.homes.iter().map(buffer).collect();
        let results = plan.small_results(&buffers);
        drop((inputs, buffers));
        Ok(self.deliver(results.into_iter().map(RankOutput::Buffer)))
    }

    /// The bytes that an exchange gives every rank of this process, or a gather its root.
    fn bytes_of(&self, mut headers: Vec<ProcessHeader>) -> Vec<RankOutput> {
        let (group, root) = (&self.group, self.barrier.signature.root);
        let by_place = |&(home, index): &(usize, usize)| {
            // In a gather other processes than the root's have no headers.
            headers.get_mut(home).map(|header| std::mem::take(&mut header.data[index]))
        };
        let all: AllBytes = group.homes.iter().filter_map(by_place).collect();
        let output = |place: &usize| match root.is_none_or(|root| root == *place) {
            true => RankOutput::Bytes(all.clone()),
            false => RankOutput::Bytes(AllBytes::default()),
        };
        group.places[group.here()].iter().map(output).collect()
    }

    /// Sends every other process what it needs, from copies: once a rank has its result, its own
    /// buffer must be unshared, whether the messages have left or not.
    fn send_inputs(&self, plan: &CollectivePlan) -> CommResult<HybridPhase> {
        let inputs = self.inputs.lock();
        let pool = &self.group.local.buffers;
        let copy = |pieces: Vec<Tensor<1>>| {
            pieces.first()?;
            kernels::all_gather(pool, &pieces).into_iter().next()
        };
        let same = matches!(self.barrier.signature.operation, Operation::AllGather);
        let once = same.then(|| copy(plan.outgoing(&inputs, self.group.here()))).flatten();
        let message = |to| once.clone().or_else(|| copy(plan.outgoing(&inputs, to)));
        self.exchange_messages(plan, 0, message, |from| plan.incoming(from))
    }

    /// Starts a round of messages: what goes to each other process, and how long theirs are.
    fn exchange_messages(
        &self,
        plan: &CollectivePlan,
        round: u64,
        message: impl Fn(usize) -> Option<Tensor<1>>,
        incoming: impl Fn(usize) -> usize,
    ) -> CommResult<HybridPhase> {
        let (group, sequence) = (&self.group, self.barrier.sequence);
        let tag = Purpose::Data { sequence, round }.tag();
        let mut messages = Messages { round, sent: Vec::new(), coming: Vec::new() };
        for from in group.others().filter(|from| incoming(*from) > 0) {
            let coming = group.outer.recv(from, tag, incoming(from), plan.kind);
            messages.coming.push((from, coming));
        }
        for to in group.others() {
            messages.sent.extend(message(to).map(|message| group.outer.send(to, tag, message)));
        }
        Ok(HybridPhase::Messages(messages))
    }

    fn after_messages(&self, round: u64, arrived: &Arrived) -> CommResult<HybridPhase> {
        let group = &self.group;
        let plan =
            CollectivePlan::new(group, &self.barrier.signature).expect("only buffers are sent");
        let inputs = std::mem::take(&mut *self.inputs.lock());
        let results = plan.results_of_round(round, &inputs, arrived);
        drop(inputs);
        if self.barrier.signature.operation != Operation::AllReduce {
            return Ok(self.deliver(results.into_iter().map(RankOutput::Buffer)));
        }
        if round == 1 {
            let whole = results.into_iter().next().expect("one sum");
            let outputs = group.local.members.iter().map(|_| RankOutput::Buffer(whole.clone()));
            return Ok(self.deliver(outputs));
        }
        // The part that was summed here takes the inputs' place until the others have come.
        let own = results.into_iter().next().expect("one sum");
        let sends = own.dims()[0] > 0;
        *self.inputs.lock() = vec![own.clone()];
        let message = |_| sends.then(|| own.clone());
        self.exchange_messages(&plan, 1, message, |from| plan.cut(from).len())
    }

    /// Gives every rank of this process its result.
    fn deliver(&self, outputs: impl IntoIterator<Item = RankOutput>) -> HybridPhase {
        self.group.finish(self.barrier.sequence);
        self.barrier.slots.put(outputs);
        self.group.local.finish(&self.barrier);
        HybridPhase::Over
    }

    /// Fails the world where the outer engine did.
    fn outer<T>(&self, result: CommResult<T>) -> CommResult<T> {
        result.map_err(|mut error| {
            // The ranks have called something else than what it is made of.
            if let CommError::PeerLost { operation, .. } = &mut error {
                *operation = self.barrier.signature.to_string();
            }
            self.group.engine.fail_with_outer(self.group.local.members[0], error)
        })
    }
}

impl HybridGroup {
    /// The processes' headers of a collective. Fails the world where they do not agree.
    pub(super) fn check(
        &self,
        barrier: &RankBarrier,
        all: &[Vec<u8>],
    ) -> CommResult<Vec<ProcessHeader>> {
        let decode = |bytes: &Vec<u8>| ProcessHeader::decode(bytes).expect("written by encode");
        let headers: Vec<ProcessHeader> = all.iter().map(decode).collect();
        let mine = barrier.signature;
        let Some(other) = (0..headers.len()).find(|home| headers[*home].signature != mine) else {
            return Ok(headers);
        };
        let error = CommError::Mismatch {
            group: self.local.name.clone(),
            sequence: barrier.sequence,
            rank: self.local.members[0],
            mine: mine.to_string(),
            peer: self.ranks_at(other).next().expect("a process with members"),
            theirs: headers[other].signature.to_string(),
        };
        Err(self.fail(0, error))
    }
}

impl Messages {
    fn are_done(&mut self) -> bool {
        self.coming.iter_mut().all(|(_, message)| message.is_done())
            && self.sent.iter_mut().all(Pending::is_done)
    }

    /// The data that has arrived, by the place of the process it is from.
    fn finish(self, processes: usize) -> CommResult<Arrived> {
        self.sent.into_iter().try_for_each(Pending::wait)?;
        let mut arrived: Arrived = vec![None; processes];
        for (from, message) in self.coming {
            arrived[from] = Some(message.wait()?);
        }
        Ok(arrived)
    }
}

impl CollectivePlan<'_> {
    /// As [`results`](Plan::results); in an all-reduce's second round the whole sum, with the
    /// part from here as the only input.
    fn results_of_round(
        &self,
        round: u64,
        inputs: &[Tensor<1>],
        arrived: &Arrived,
    ) -> Vec<Tensor<1>> {
        match round {
            0 => self.results(inputs, arrived),
            _ => vec![self.joined(&inputs[0], arrived)],
        }
    }
}

fn to_bytes(tensor: &Tensor<1>) -> Vec<u8> {
    tensor.to_data().into_bytes().to_vec()
}

fn from_bytes(bytes: &[u8], kind: DType, device: &Device) -> Tensor<1> {
    let len = bytes.len() / kind.size();
    let data = TensorData::from_bytes_vec(bytes.to_vec(), [len], kind);
    Tensor::from_data(data, (device, kind))
}
