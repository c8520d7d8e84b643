//! A communicator that remembers its last operations, around one of any engine.
//!
//! The record says what a rank asked for and when it had it, not when the engine was done. It is
//! read after a failure, to find the rank that did not do its part.

use std::collections::HashMap;
use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use parking_lot::Mutex;
use zeropp_failures::flight::{Ring, now_ns};
use zeropp_failures::{CommError, CommResult, GroupRecord, OpRecord, Operation, Outcome};

use crate::communicator::{AllBytes, Communicator};
use crate::patience::Deadline;
use crate::pending::{InFlight, Pending, PendingState};
use crate::stats::CommStats;

/// The last operations of one rank on all its communicators.
#[derive(Default)]
pub struct OpLog(Mutex<Log>);

#[derive(Default)]
struct Log {
    ring: Ring<OpRecord>,
    groups: Vec<GroupRecord>,
    /// Messages so far by group, peer, tag and whether they were sent.
    messages: HashMap<(usize, usize, u64, bool), u64>,
}

impl OpLog {
    /// The groups, and the operations from the oldest to the newest.
    pub fn snapshot(&self) -> (Vec<GroupRecord>, Vec<OpRecord>) {
        let log = self.0.lock();
        (log.groups.clone(), log.ring.iter().cloned().collect())
    }

    fn begin(&self, group: usize, call: Call) -> u64 {
        let log = &mut *self.0.lock();
        let number = match (call.tag, call.peer) {
            (Some(tag), Some(peer)) => {
                let key = (group, peer, tag, call.operation == Operation::Send);
                log.messages.entry(key).or_default()
            }
            _ => &mut log.groups[group].collectives,
        };
        *number += 1;
        let Call { operation, tag, peer, buffer } = call;
        log.ring.push(OpRecord {
            group,
            operation,
            number: *number - 1,
            tag,
            peer,
            buffer,
            issued_ns: now_ns(),
            waited_ns: None,
            ended_ns: None,
            outcome: Outcome::UnderWay,
        })
    }

    fn wait(&self, entry: u64) {
        if let Some(record) = self.0.lock().ring.get_mut(entry) {
            record.waited_ns = Some(now_ns());
        }
    }

    fn end(&self, entry: u64, outcome: Outcome) {
        if let Some(record) = self.0.lock().ring.get_mut(entry) {
            record.ended_ns = Some(now_ns());
            record.outcome = outcome;
        }
    }
}

/// The identity of an operation.
struct Call {
    operation: Operation,
    tag: Option<u64>,
    peer: Option<usize>,
    buffer: Option<(&'static str, usize)>,
}

impl Call {
    fn bare(operation: Operation) -> Call {
        Call { operation, tag: None, peer: None, buffer: None }
    }

    fn on(operation: Operation, buffer: &Tensor<1>) -> Call {
        Call { buffer: Some((buffer.dtype().name(), buffer.dims()[0])), ..Call::bare(operation) }
    }
}

fn outcome<T>(result: &CommResult<T>) -> Outcome {
    if result.is_ok() { Outcome::Done } else { Outcome::Failed }
}

/// One rank's end of a group, with a memory.
pub struct RecordedCommunicator {
    inner: Arc<dyn Communicator>,
    log: Arc<OpLog>,
    group: usize,
    members: Vec<usize>,
}

impl RecordedCommunicator {
    /// Records in `log` what goes through `world`, the communicator of all ranks, and through the
    /// groups that are split off it.
    pub fn new(world: Arc<dyn Communicator>, log: Arc<OpLog>) -> RecordedCommunicator {
        let members = (0..world.size()).collect();
        Self::group(world, log, members)
    }

    fn group(
        inner: Arc<dyn Communicator>,
        log: Arc<OpLog>,
        members: Vec<usize>,
    ) -> RecordedCommunicator {
        let groups = &mut log.0.lock().groups;
        let name = inner.name().to_owned();
        groups.push(GroupRecord { name, members: members.clone(), collectives: 0 });
        let group = groups.len() - 1;
        RecordedCommunicator { inner, log: log.clone(), group, members }
    }

    /// World rank at `place`; of a place that the group lacks, which the engine refuses, itself.
    fn world_rank(&self, place: usize) -> usize {
        self.members.get(place).copied().unwrap_or(place)
    }

    fn tracked<T: 'static>(&self, call: Call, make: impl FnOnce() -> Pending<T>) -> Pending<T> {
        let entry = self.log.begin(self.group, call);
        let Pending(state) = make();
        match state {
            PendingState::Ready(result) => {
                self.log.end(entry, outcome(&result));
                Pending::ready(result)
            }
            PendingState::InFlight(op) => {
                let log = self.log.clone();
                Pending::in_flight(Box::new(Tracked { op: Some(op), log, entry }))
            }
        }
    }

    fn blocking<T>(&self, call: Call, run: impl FnOnce() -> CommResult<T>) -> CommResult<T> {
        let entry = self.log.begin(self.group, call);
        self.log.wait(entry);
        let result = run();
        self.log.end(entry, outcome(&result));
        result
    }

    /// World ranks of the sub-group that `color` makes, in its order.
    fn members_of(&self, color: usize, key: usize) -> CommResult<Vec<usize>> {
        let split_request = [color as u64, key as u64].map(u64::to_le_bytes).concat();
        let split_requests = self.exchange(split_request).wait()?;
        let number = |bytes: &[u8]| bytes.try_into().map(u64::from_le_bytes);
        let mut members = Vec::new();
        for (place, split_request) in split_requests.iter().enumerate() {
            let wrong = |_| CommError::Invalid {
                group: self.name().into(),
                rank: self.world_rank(place),
                operation: Operation::Split.to_string(),
                problem: "a color and key of another length; do all ranks run one program?".into(),
            };
            let (theirs, key) = split_request.split_at(8.min(split_request.len()));
            let (theirs, key) = (number(theirs).map_err(wrong)?, number(key).map_err(wrong)?);
            if theirs == color as u64 {
                members.push((key, place));
            }
        }
        members.sort_unstable();
        Ok(members.into_iter().map(|(_, place)| self.world_rank(place)).collect())
    }
}

impl Communicator for RecordedCommunicator {
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
        let call = Call::on(Operation::AllGather, &shard);
        self.tracked(call, || self.inner.all_gather(shard))
    }

    fn reduce_scatter(&self, full: Tensor<1>) -> Pending<Tensor<1>> {
        let call = Call::on(Operation::ReduceScatter, &full);
        self.tracked(call, || self.inner.reduce_scatter(full))
    }

    fn all_reduce(&self, buffer: Tensor<1>) -> Pending<Tensor<1>> {
        let call = Call::on(Operation::AllReduce, &buffer);
        self.tracked(call, || self.inner.all_reduce(buffer))
    }

    fn broadcast(&self, root: usize, buffer: Tensor<1>) -> Pending<Tensor<1>> {
        let peer = Some(self.world_rank(root));
        let call = Call { peer, ..Call::on(Operation::Broadcast, &buffer) };
        self.tracked(call, || self.inner.broadcast(root, buffer))
    }

    fn together(&self, n: usize) {
        self.inner.together(n);
    }

    fn exchange(&self, bytes: Vec<u8>) -> Pending<AllBytes> {
        let call = Call {
            buffer: Some((DType::U8.name(), bytes.len())),
            ..Call::bare(Operation::Exchange)
        };
        self.tracked(call, || self.inner.exchange(bytes))
    }

    fn gather(&self, root: usize, bytes: Vec<u8>) -> Pending<AllBytes> {
        let (peer, buffer) = (Some(self.world_rank(root)), Some((DType::U8.name(), bytes.len())));
        let call = Call { peer, buffer, ..Call::bare(Operation::Gather) };
        self.tracked(call, || self.inner.gather(root, bytes))
    }

    fn send(&self, to: usize, tag: u64, buffer: Tensor<1>) -> Pending<()> {
        let peer = Some(self.world_rank(to));
        let call = Call { tag: Some(tag), peer, ..Call::on(Operation::Send, &buffer) };
        self.tracked(call, || self.inner.send(to, tag, buffer))
    }

    fn recv(&self, from: usize, tag: u64, len: usize, dtype: DType) -> Pending<Tensor<1>> {
        let (peer, buffer) = (Some(self.world_rank(from)), Some((dtype.name(), len)));
        let call = Call { operation: Operation::Recv, tag: Some(tag), peer, buffer };
        self.tracked(call, || self.inner.recv(from, tag, len, dtype))
    }

    fn keeps_order(&self) -> bool {
        self.inner.keeps_order()
    }

    fn barrier(&self) -> CommResult<()> {
        self.blocking(Call::bare(Operation::Barrier), || self.inner.barrier())
    }

    /// Also exchanges the ranks' split_requests, so that every rank knows who is in its sub-group.
    fn split(&self, name: &str, color: usize, key: usize) -> CommResult<Arc<dyn Communicator>> {
        let members = self.members_of(color, key)?;
        let call = Call::bare(Operation::Split);
        let inner = self.blocking(call, || self.inner.split(name, color, key))?;
        Ok(Arc::new(Self::group(inner, self.log.clone(), members)))
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn failure(&self) -> Option<CommError> {
        self.inner.failure()
    }

    fn past_first_step(&self) {
        self.inner.past_first_step();
    }

    fn stats(&self) -> CommStats {
        self.inner.stats()
    }
}

/// An operation under way whose end is noted.
struct Tracked<T> {
    /// None once it has been waited for.
    op: Option<Box<dyn InFlight<T>>>,
    log: Arc<OpLog>,
    entry: u64,
}

impl<T> InFlight<T> for Tracked<T> {
    fn is_done(&mut self) -> bool {
        self.op.as_mut().is_none_or(|op| op.is_done())
    }

    fn wait_until(&mut self, deadline: Deadline) -> bool {
        self.op.as_mut().is_none_or(|op| op.wait_until(deadline))
    }

    fn missing(&mut self) -> Vec<usize> {
        self.op.as_mut().map(|op| op.missing()).unwrap_or_default()
    }

    fn wait(mut self: Box<Self>) -> CommResult<T> {
        let op = self.op.take().expect("waited for once");
        self.log.wait(self.entry);
        let result = op.wait();
        self.log.end(self.entry, outcome(&result));
        result
    }
}

impl<T> Drop for Tracked<T> {
    fn drop(&mut self) {
        if self.op.is_some() {
            self.log.end(self.entry, Outcome::Detached);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use burn::tensor::Device;

    use super::*;
    use crate::threads::{ThreadsOptions, ThreadsWorld};

    /// Runs `rank` on every rank of a recorded world; returns what the ranks' logs hold.
    fn recorded(
        size: usize,
        rank: impl Fn(&dyn Communicator) + Sync,
    ) -> Vec<(Vec<GroupRecord>, Vec<OpRecord>)> {
        let timeout = Duration::from_secs(1);
        let options = ThreadsOptions { timeout, ..ThreadsOptions::default() };
        let worlds = ThreadsWorld::new(size, options).communicators();
        let logs: Vec<Arc<OpLog>> = (0..size).map(|_| Arc::default()).collect();
        std::thread::scope(|scope| {
            for (world, log) in worlds.into_iter().zip(&logs) {
                let world = RecordedCommunicator::new(world, log.clone());
                scope.spawn(|| {
                    let world = world;
                    rank(&world);
                });
            }
        });
        logs.iter().map(|log| log.snapshot()).collect()
    }

    fn tensor(len: usize) -> Tensor<1> {
        Tensor::zeros([len], &Device::flex())
    }

    #[test]
    fn operations_are_numbered_as_the_engine_does_and_end() {
        let logs = recorded(4, |world| {
            let rank = world.rank();
            // Ranks 3, 1 and 2, 0 in this order.
            let pair = world.split("pair", rank % 2, 3 - rank).unwrap();
            let _ = pair.all_gather(tensor(3)).wait().unwrap();
            if pair.rank() == 0 {
                pair.send(1, 7, tensor(5)).wait().unwrap();
                pair.send(1, 7, tensor(5)).wait().unwrap();
            } else {
                let first = pair.recv(0, 7, 5, DType::F32);
                let second = pair.recv(0, 7, 5, DType::F32);
                second.wait().unwrap();
                drop(first);
            }
            world.barrier().unwrap();
        });
        let (groups, ops) = &logs[1];
        assert_eq!((groups[0].name.as_str(), groups[0].collectives), ("world", 3));
        assert_eq!((groups[1].name.as_str(), groups[1].collectives), ("pair", 1));
        assert_eq!(groups[1].members, [3, 1]);
        let reported: Vec<_> =
            ops.iter().map(|o| (o.operation, o.group, o.number, o.peer)).collect();
        let expected = [
            (Operation::Exchange, 0, 0, None),
            (Operation::Split, 0, 1, None),
            (Operation::AllGather, 1, 0, None),
            (Operation::Recv, 1, 0, Some(3)),
            (Operation::Recv, 1, 1, Some(3)),
            (Operation::Barrier, 0, 2, None),
        ];
        assert_eq!(reported, expected);
        assert_eq!(ops[2].buffer, Some(("f32", 3)));
        for op in ops {
            assert!(op.issued_ns <= op.ended_ns.unwrap(), "{op:?}");
            // The first receive is let go, unless its message was there at once.
            assert!(op.outcome != Outcome::Failed && op.outcome != Outcome::UnderWay, "{op:?}");
        }
    }

    #[test]
    fn a_failed_operation_says_so_and_has_the_engines_number() {
        let logs = recorded(2, |world| {
            world.barrier().unwrap();
            let first = world.exchange(vec![1]).wait();
            assert_eq!(*first.unwrap(), [[1], [1]]);
            if world.rank() == 0 {
                let error = world.all_reduce(tensor(2)).wait().unwrap_err();
                let CommError::Timeout { sequence, .. } = error else { panic!("{error}") };
                assert_eq!(sequence, 2);
            } else {
                std::thread::sleep(Duration::from_millis(1500));
            }
        });
        let last = logs[0].1.last().unwrap();
        assert_eq!((last.operation, last.number), (Operation::AllReduce, 2));
        assert_eq!(last.outcome, Outcome::Failed);
        assert!(last.ended_ns.unwrap() - last.waited_ns.unwrap() > 900_000_000);
        assert_eq!(logs[1].0[0].collectives, 2);
    }
}
