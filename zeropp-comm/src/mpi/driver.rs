//! The communication thread: it makes all calls to MPI and carries all operations forward.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::DType;
use crossbeam_channel::{Receiver, RecvTimeoutError};

use super::channel::MpiChannel;
use super::collective::{CollectiveProgress, InProgress, MpiCollective, SplitError, Turn, split};
use super::comms::GroupComms;
use super::engine::{Command, Join, Output, Shared, Wanted, WhoIsMissing};
use super::mail::{MpiMail, data_tag};
use super::payload::Payload;
use super::sys::{self, Comm, MpiError, Transfer, TransferMemory};
use super::timeout::MpiTimeout;
use super::wire::{Carriage, FRAME_MAX, Header, MpiFrame};
use crate::CommError;
use crate::patience::Moment;
use crate::progress::{Envelope, read_error};
use zeropp_failures::Operation;

/// Polls without a pause after something has happened, then a pause each.
const EAGER_POLLS: u32 = 100;
/// Shortest pause between polls; a command ends any.
const PAUSE_MIN: Duration = Duration::from_micros(30);
/// Longest pause while MPI has data to move.
const MOVING_PAUSE: Duration = Duration::from_micros(100);
/// Longest pause while others are waited for, or nothing is under way.
const WAITING_PAUSE: Duration = Duration::from_millis(1);
/// A pause is this part of the time since something happened: so waiting takes no core, and no
/// wait becomes longer by more than this part, or by the longest pause.
const PAUSE_PART: u32 = 16;
/// How long a failed world waits for the other ranks to report to their users.
const BYE_GRACE: Duration = Duration::from_secs(2);
/// How long a rank gets to report a failure to its user once it has ended its world.
pub(super) const REPORT_TIME: Duration = Duration::from_millis(500);
/// How long the ranks of a failed world may go on before the job is ended.
const FAILED_GRACE: Duration = Duration::from_secs(10);

/// All state of the communication thread.
pub(super) struct MpiDriver {
    pub(super) shared: Arc<Shared>,
    commands: Receiver<Command>,
    control: Comm,
    data: Comm,
    inbox: Option<Transfer>,
    outbox: Vec<Transfer>,
    /// Of each group by its number.
    pub(super) channels: HashMap<u64, MpiChannel>,
    /// Headers for groups that this rank is not yet a member of.
    pub(super) early: HashMap<u64, Vec<Header>>,
    pub(super) mail: MpiMail,
    pub(super) departed: Vec<bool>,
    /// Collectives of a group that a world rank had called before it left.
    called_by: HashMap<(usize, u64), u64>,
    byes: Vec<bool>,
    pub(super) attribution: Option<MpiTimeout>,
    pub(super) failed_at: Option<Moment>,
    finishing: Option<Moment>,
}

impl MpiDriver {
    /// Takes over two communicators of all processes and the world's channel.
    pub(super) fn new(
        shared: Arc<Shared>,
        commands: Receiver<Command>,
        control: Comm,
        data: Comm,
        world: MpiChannel,
    ) -> MpiDriver {
        let size = shared.size;
        MpiDriver {
            commands,
            control,
            data,
            inbox: None,
            outbox: Vec::new(),
            channels: HashMap::from([(world.comms.group.id, world)]),
            early: HashMap::new(),
            mail: MpiMail::new(size, shared.engine.device.clone()),
            departed: vec![false; size],
            called_by: HashMap::new(),
            byes: vec![false; size],
            attribution: None,
            failed_at: None,
            finishing: None,
            shared,
        }
    }

    /// Works until the world has ended in good order; ends the job where it has failed.
    pub(super) fn run(mut self) {
        let (mut idle, mut moved_at) = (0u32, Moment::now());
        loop {
            let mut moved = false;
            while let Ok(command) = self.commands.try_recv() {
                self.handle(command);
                moved = true;
            }
            moved |= self.poll();
            if self.is_over() {
                return;
            }
            idle = if moved { 0 } else { idle.saturating_add(1) };
            if idle <= EAGER_POLLS {
                moved_at = Moment::now();
                std::thread::yield_now();
                continue;
            }
            let longest = if self.is_moving() { MOVING_PAUSE } else { WAITING_PAUSE };
            let pause = (moved_at.elapsed() / PAUSE_PART).clamp(PAUSE_MIN, longest);
            match self.commands.recv_timeout(pause) {
                Ok(command) => {
                    self.handle(command);
                    idle = 0;
                }
                Err(RecvTimeoutError::Timeout) => {}
                // The communicators and the world are gone; no request can come any more.
                Err(RecvTimeoutError::Disconnected) => std::thread::sleep(pause),
            }
        }
    }

    /// Whether MPI has data to move, which it does while it is asked.
    fn is_moving(&self) -> bool {
        let moving = |exchange: &MpiCollective| {
            exchange.in_progress.as_ref().is_some_and(InProgress::is_moving)
        };
        let in_channel = |channel: &MpiChannel| channel.exchanges.values().any(moving);
        !self.outbox.is_empty() || self.mail.is_moving() || self.channels.values().any(in_channel)
    }

    fn handle(&mut self, command: Command) {
        match command {
            Command::Join(Join { slot, .. }) | Command::Receive(Wanted { slot, .. })
                if self.failed_at.is_some() =>
            {
                slot.fail(self.error());
            }
            Command::Join(join) => self.join(join),
            Command::Send { .. } if self.failed_at.is_some() => {}
            Command::Send { to, envelope, payload } => self.send(to, envelope, payload),
            Command::Receive(wanted) => {
                let from = wanted.sender();
                let result = self.mail.want(self.data, wanted);
                self.settle(result);
                if self.departed[from] {
                    self.lost(from);
                }
            }
            Command::Expired { what, slot } => self.open_attribution(what, slot, None),
            Command::Engine(WhoIsMissing { what, slot, answer }) => {
                self.open_attribution(what, slot, Some(answer));
            }
            Command::Fail => self.spread(),
            Command::Depart => {
                self.departed[self.shared.rank] = true;
                let called = self.channels.values().map(|c| (c.comms.group.id, c.called)).collect();
                self.notify_all(&MpiFrame::Depart(called));
            }
            Command::Finish => {
                self.finishing = Some(Moment::now());
                if self.failed_at.is_some() {
                    self.notify_all(&MpiFrame::Bye);
                }
            }
        }
    }

    pub(super) fn error(&self) -> CommError {
        self.shared.error().expect("the world has failed")
    }

    /// Fails the world where `result` is an error.
    pub(super) fn settle(&mut self, result: Result<(), CommError>) {
        if let Err(error) = result {
            self.fail(self.shared.rank, error);
        }
    }

    /// Fails the world with what world rank `rank` saw, unless it has failed before.
    pub(super) fn fail(&mut self, rank: usize, error: CommError) {
        self.shared.set_failure(rank, error);
        self.spread();
    }

    /// Ends every operation here with the world's first error, and reports it to the other ranks.
    fn spread(&mut self) {
        if self.failed_at.is_some() {
            return;
        }
        self.failed_at = Some(Moment::now());
        let error = self.error();
        for channel in self.channels.values_mut() {
            for (_, exchange) in std::mem::take(&mut channel.exchanges) {
                if let Some(in_progress) = exchange.in_progress {
                    in_progress.slot.fail(error.clone());
                }
            }
        }
        self.mail.fail(&error);
        self.attribution = None;
        let (rank, error) = self.shared.failure().expect("the world has failed");
        let frame = MpiFrame::Failure(*rank, failure_json(*rank, error));
        self.notify_all(&frame);
        if self.finishing.is_some() {
            self.notify_all(&MpiFrame::Bye);
        }
    }

    fn notify_all(&mut self, frame: &MpiFrame) {
        let me = self.shared.rank;
        self.tell((0..self.shared.size).filter(|rank| *rank != me), frame);
    }

    /// Sends a frame to these world ranks.
    pub(super) fn tell(&mut self, ranks: impl Iterator<Item = usize>, frame: &MpiFrame) {
        let bytes = frame.encode();
        for rank in ranks {
            let memory = TransferMemory::Bytes(bytes.clone());
            match Transfer::send(self.control, rank, 0, memory, DType::U8) {
                Ok(transfer) => self.outbox.push(transfer),
                // A failed world may have lost the rank; there is no other rank to report to.
                Err(_) if self.failed_at.is_some() => {}
                Err(error) => self.fail(self.shared.rank, error.in_operation("a header".into())),
            }
        }
    }

    fn send(&mut self, to: usize, envelope: Envelope, payload: Payload) {
        let to = self.channels[&envelope.address.group].comms.group.members[to];
        if payload.is_small() {
            let inline = Carriage::Inline(payload.bytes().to_vec());
            return self.tell(std::iter::once(to), &MpiFrame::Envelope(envelope, inline));
        }
        let number = self.mail.next_number(to);
        let frame = MpiFrame::Envelope(envelope, Carriage::Transfer(number));
        self.tell(std::iter::once(to), &frame);
        let (memory, kind) = payload.into_memory();
        match Transfer::send(self.data, to, data_tag(number), memory, kind) {
            Ok(transfer) => self.outbox.push(transfer),
            Err(error) => {
                self.fail(self.shared.rank, error.in_operation(envelope.signature.to_string()));
            }
        }
    }

    /// Looks after everything under way once. Whether anything happened.
    fn poll(&mut self) -> bool {
        let mut moved = self.read_frames();
        moved |= self.poll_outbox();
        let ids: Vec<u64> = self.channels.keys().copied().collect();
        for id in ids {
            moved |= self.poll_channel(id);
        }
        match self.mail.poll() {
            Ok(arrived) => moved |= arrived,
            Err(error) => self.fail(self.shared.rank, error),
        }
        self.poll_attribution();
        moved
    }

    fn read_frames(&mut self) -> bool {
        let mut moved = false;
        loop {
            if self.inbox.is_none() {
                let room = TransferMemory::Bytes(vec![0; FRAME_MAX]);
                match Transfer::receive(self.control, None, 0, room, DType::U8) {
                    Ok(inbox) => self.inbox = Some(inbox),
                    Err(error) => return self.lost_control(error),
                }
            }
            match self.inbox.as_mut().expect("posted above").test() {
                Ok(false) => return moved,
                Ok(true) => {}
                Err(error) => return self.lost_control(error),
            }
            let inbox = self.inbox.take().expect("posted above");
            let (from, len) = inbox.received();
            let (_, Some(TransferMemory::Bytes(bytes))) = inbox.into_memory() else {
                unreachable!("a frame is received into bytes")
            };
            if let Some(frame) = MpiFrame::decode(&bytes[..len]) {
                self.receive(from, frame);
            }
            moved = true;
        }
    }

    fn lost_control(&mut self, error: MpiError) -> bool {
        self.inbox = None;
        if self.failed_at.is_none() {
            self.fail(self.shared.rank, error.in_operation("receiving headers".into()));
        }
        false
    }

    fn receive(&mut self, from: usize, frame: MpiFrame) {
        match frame {
            MpiFrame::Failure(rank, json) => self.fail(rank, read_error(rank, &json)),
            MpiFrame::Bye => self.byes[from] = true,
            MpiFrame::Ping(group, sequence) => {
                let channel = self.channels.get(&group);
                let has_called = channel.is_some_and(|channel| channel.called > sequence);
                self.tell(std::iter::once(from), &MpiFrame::Pong(has_called));
            }
            MpiFrame::Pong(has_called) => {
                if let Some(attribution) = &mut self.attribution {
                    attribution.answered[from] = true;
                    attribution.called[from] = has_called;
                }
            }
            MpiFrame::Depart(called) => {
                self.departed[from] = true;
                let called = called.into_iter().map(|(group, count)| ((from, group), count));
                self.called_by.extend(called);
                self.lost(from);
            }
            _ if self.failed_at.is_some() => {}
            MpiFrame::Headers(runs) => {
                for (header, count) in runs {
                    let at = |i| Header { place: header.place + i, ..header.clone() };
                    (0..count).map(at).for_each(|header| self.note(header));
                }
            }
            MpiFrame::Envelope(envelope, carriage) => {
                let result = self.mail.deliver(self.data, envelope, carriage);
                self.settle(result);
            }
        }
    }

    /// Fails the world if something waits for world rank `rank`, which has departed.
    pub(super) fn lost(&mut self, rank: usize) {
        let stuck = self.channels.values().find_map(|channel| {
            let group = &channel.comms.group;
            let place = group.members.iter().position(|member| *member == rank)?;
            // What it had called before it left is on its way through the tree.
            let called = self.called_by.get(&(rank, group.id)).copied().unwrap_or(0);
            let waits = |(sequence, exchange): &(&u64, &MpiCollective)| {
                **sequence >= called && exchange.headers[place].is_none()
            };
            let all_in_progress =
                channel.exchanges.iter().filter(waits).filter_map(|(_, m)| m.in_progress.as_ref());
            // An operation that only this thread still knows has no waiter.
            let in_progress =
                all_in_progress.into_iter().find(|f| Arc::strong_count(&f.slot) > 1)?;
            Some((group.name.clone(), in_progress.signature.to_string()))
        });
        let stuck = stuck.or_else(|| {
            Some((self.mail.waits_for(rank)?.name.clone(), Operation::Recv.to_string()))
        });
        if let (Some((group, operation)), None) = (stuck, self.failed_at) {
            self.fail(self.shared.rank, CommError::PeerLost { group, rank, operation });
        }
    }

    fn poll_outbox(&mut self) -> bool {
        let before = self.outbox.len();
        let mut trouble = None;
        self.outbox.retain_mut(|transfer| match transfer.test() {
            Ok(done) => !done,
            Err(error) => {
                trouble = Some(error);
                false
            }
        });
        if let (Some(error), None) = (trouble, self.failed_at) {
            self.fail(self.shared.rank, error.in_operation("send".into()));
        }
        self.outbox.len() != before
    }

    /// Carries the collectives of one group forward.
    fn poll_channel(&mut self, id: u64) -> bool {
        let mut done: Vec<u64> = Vec::new();
        let mut made: Option<GroupComms> = None;
        let mut failure: Option<CommError> = None;
        let channel = self.channels.get_mut(&id).expect("a known group");
        let (comms, mut exchanges) = (&channel.comms, std::mem::take(&mut channel.exchanges));
        let mut turn = Turn { first: true, late: true };
        for (sequence, MpiCollective { headers, in_progress, .. }) in &mut exchanges {
            let Some(in_progress) = in_progress else { break };
            let signature = in_progress.signature;
            let operation = || format!("{}: {signature}", comms.group.name);
            match in_progress.advance(comms, headers, turn) {
                Ok(CollectiveProgress::Waiting) => {}
                Ok(CollectiveProgress::Done(output)) => {
                    in_progress.slot.put(Ok(output));
                    done.push(*sequence);
                }
                Ok(CollectiveProgress::Split) => match split(comms, headers) {
                    Ok(new) => {
                        in_progress.slot.put(Ok(Output::Group(new.group.clone())));
                        made = Some(new);
                        done.push(*sequence);
                    }
                    Err(SplitError::Mpi(e)) => failure = Some(e.in_operation(operation())),
                    Err(SplitError::Comm(e)) => failure = Some(e),
                },
                Err(error) => failure = Some(error.in_operation(operation())),
            }
            if failure.is_some() || made.is_some() {
                break;
            }
            let done = done.last() == Some(sequence);
            turn.first &= done || !in_progress.may_post();
            turn.late &= done || !in_progress.may_be_late();
        }
        done.iter().for_each(|sequence| drop(exchanges.remove(sequence)));
        channel.exchanges = exchanges;
        if let Some(new) = made {
            let id = new.group.id;
            self.channels.insert(id, MpiChannel::new(new));
            self.early.remove(&id).into_iter().flatten().for_each(|header| self.note(header));
        }
        if let Some(error) = failure {
            self.fail(self.shared.rank, error);
        }
        !done.is_empty()
    }

    /// Whether MPI has been ended in good order. Ends the job where the world has failed.
    fn is_over(&mut self) -> bool {
        let Some(since) = self.finishing else {
            if self.failed_at.is_some_and(|at| at.elapsed() > FAILED_GRACE) {
                tracing::error!("{}; ending the job", self.error());
                sys::end_job();
            }
            return false;
        };
        let me = self.shared.rank;
        if self.failed_at.is_some() {
            let all = (0..self.shared.size).all(|r| r == me || self.byes[r]);
            let waited = since.elapsed();
            if waited > BYE_GRACE || all && waited > 2 * REPORT_TIME {
                sys::end_job();
            }
            return false;
        }
        if !self.departed.iter().all(|departed| *departed) {
            if since.elapsed() > self.shared.timeout.get() {
                let departed = &self.departed;
                let here: Vec<usize> = (0..departed.len()).filter(|r| !departed[*r]).collect();
                tracing::error!("rank {me}: ranks {here:?} did not end in time; ending the job");
                sys::end_job();
            }
            return false;
        }
        self.outbox.is_empty() && self.end()
    }

    fn end(&mut self) -> bool {
        if let Some(mut inbox) = self.inbox.take() {
            let _ = inbox.cancel();
        }
        if let Err(error) = sys::finalize() {
            tracing::error!("{}", error.in_operation("ending".into()));
            std::process::exit(1);
        }
        true
    }
}

/// The error as other ranks read it; one with a text that no frame can hold is cut.
fn failure_json(rank: usize, error: &CommError) -> Vec<u8> {
    let json = serde_json::to_vec(error).expect("plain data");
    if json.len() + 16 <= FRAME_MAX {
        return json;
    }
    let mut reason = error.to_string();
    if let CommError::Aborted { reason: own, .. } = error {
        reason.clone_from(own);
    }
    let cut = (0..=FRAME_MAX / 4).rev().find(|i| reason.is_char_boundary(*i)).unwrap_or(0);
    reason.truncate(cut);
    serde_json::to_vec(&CommError::Aborted { rank, reason }).expect("plain data")
}
