//! The communication thread of a rank: it makes all calls to NCCL, and sends and reads all frames.
//!
//! It never waits for the device. What is under way there it looks at now and then, to let go of
//! buffers, to see errors, and to notice what takes too long.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::Receiver;
use zeropp_core::threads::BackgroundThread;

use super::engine::{Body, Command, Join, NcclEvent, Output, Received, Shared, Slot, Wanted};
use super::header_exchange::HeaderExchange;
use super::lane::{Label, LaneError, NcclQueue, NcclWork, PinnedJobs};
use super::library::{Nccl, NcclTransfer, UniqueId};
use super::links::Connections;
use super::mail::{IncomingMessage, Mail, give};
use super::timeout_attribution::{Late, TimeoutAttribution};
use super::turns::NextOperation;
use super::wire::{Header, NcclFrame, Route};
use crate::CommError;
use crate::patience::{Deadline, Moment};
use crate::progress::{Envelope, Group, MailAddress, read_error};
use crate::signature::Signature;

/// Pause while NCCL does something in the background that it reports only when asked.
const STARTING_PAUSE: Duration = Duration::from_micros(100);
/// Pause while operations are on the device; a command or a frame ends any pause.
const FLYING_PAUSE: Duration = Duration::from_millis(1);
/// Pause otherwise.
const IDLE_PAUSE: Duration = Duration::from_millis(200);
/// How long an error that a peer is to blame for is held back for the peer's own word.
const REMOTE_GRACE: Duration = Duration::from_secs(1);
/// How long the end of a world may take on the device.
const END_TIME: Duration = Duration::from_secs(5);

/// The communication thread's side of a group.
pub(super) struct Channel {
    pub(super) group: Arc<Group>,
    /// Collectives that not all ranks have joined, where this rank is the group's first.
    pub(super) exchanges: BTreeMap<u64, HeaderExchange>,
    /// Collectives whose result comes in a frame.
    pub(super) waiting: BTreeMap<u64, (Signature, Arc<Slot>)>,
    /// Collectives that this rank has called.
    pub(super) called: u64,
    /// How many of the next ones, on buffers, are one call of NCCL.
    pub(super) together: usize,
}

impl Channel {
    pub(super) fn new(group: Arc<Group>) -> Channel {
        Channel {
            group,
            exchanges: BTreeMap::new(),
            waiting: BTreeMap::new(),
            called: 0,
            together: 0,
        }
    }
}

/// An error that a peer is to blame for, and may be about to explain better.
pub(super) struct Suspicion {
    pub(super) since: Moment,
    pub(super) error: CommError,
    /// The world rank that cannot be reached.
    pub(super) rank: Option<usize>,
}

/// All state of the communication thread.
pub(super) struct NcclDriver {
    pub(super) shared: Arc<Shared>,
    commands: Receiver<Command>,
    nccl: Arc<Nccl>,
    pub(super) links: Connections,
    /// Of each group by its number.
    pub(super) channels: HashMap<u64, Channel>,
    /// Frames about groups that this rank is not yet a member of, and who sent them.
    pub(super) early: HashMap<u64, Vec<(usize, NcclFrame)>>,
    pub(super) lanes: HashMap<(u64, Route), NcclQueue>,
    pub(super) pinned: PinnedJobs,
    /// Makes room for messages.
    pub(super) rooms: BackgroundThread,
    pub(super) mail: Mail,
    /// Messages that have not been asked for, by group and sender's place: there is no room for
    /// them yet.
    pub(super) announced: HashMap<(u64, usize), VecDeque<Envelope>>,
    /// The operations that this rank is to issue, in the order in which it was called.
    pub(super) turns: VecDeque<NextOperation>,
    pub(super) departed: Vec<bool>,
    pub(super) attribution: Option<TimeoutAttribution>,
    pub(super) suspicion: Option<Suspicion>,
    pub(super) failed_at: Option<Moment>,
    finishing: Option<Moment>,
    finalized: bool,
}

impl NcclDriver {
    pub(super) fn new(
        shared: Arc<Shared>,
        commands: Receiver<Command>,
        nccl: Arc<Nccl>,
        links: Connections,
        rooms: BackgroundThread,
        world: Arc<Group>,
    ) -> NcclDriver {
        let size = shared.size;
        NcclDriver {
            shared,
            commands,
            nccl,
            links,
            channels: HashMap::from([(world.id, Channel::new(world))]),
            early: HashMap::new(),
            lanes: HashMap::new(),
            pinned: HashMap::new(),
            rooms,
            mail: Mail::default(),
            announced: HashMap::new(),
            turns: VecDeque::new(),
            departed: vec![false; size],
            attribution: None,
            suspicion: None,
            failed_at: None,
            finishing: None,
            finalized: false,
        }
    }

    /// Makes sure that rank 0 and every other rank are connected: so a failure is reported to all,
    /// and a rank that is gone is missed.
    ///
    /// # Errors
    /// `Unavailable`, naming the ranks that did not answer in time, or the first failure.
    pub(super) fn greet(&mut self) -> Result<(), CommError> {
        let (me, size) = (self.shared.rank, self.shared.size);
        let timeout = self.shared.engine.start_timeout;
        let deadline = Deadline::after(timeout);
        let mut missing: Vec<usize> = if me == 0 { (1..size).collect() } else { vec![0] };
        let mut later = Vec::new();
        if me != 0 {
            self.links.send(0, &NcclFrame::Hello);
        }
        while !missing.is_empty() && self.suspicion.is_none() {
            match deadline.until(|slice| self.commands.recv_timeout(slice).ok()) {
                Some(Command::Engine(NcclEvent::Frame(from, NcclFrame::Hello))) => {
                    missing.retain(|rank| *rank != from);
                }
                Some(Command::Engine(NcclEvent::Unreachable(rank, why))) => {
                    self.unreachable(rank, &why)
                }
                // Rank 0 greets one after the other: the first are at work already.
                Some(command) => later.push(command),
                None => break,
            }
        }
        if let Some(Suspicion { error, .. }) = self.suspicion.take() {
            return Err(error);
        }
        if !missing.is_empty() {
            let s = timeout.as_secs_f64();
            let reason = format!("ranks {missing:?} did not arrive within {s} s");
            return Err(CommError::Unavailable { engine: "nccl".into(), reason });
        }
        if me == 0 {
            (1..size).for_each(|rank| self.links.send(rank, &NcclFrame::Hello));
        }
        later.into_iter().for_each(|command| self.handle(command));
        Ok(())
    }

    /// Works until the world has ended.
    pub(super) fn run(mut self) {
        while !self.is_over() {
            if let Ok(command) = self.commands.recv_timeout(self.pause()) {
                self.handle(command);
                while let Ok(command) = self.commands.try_recv() {
                    self.handle(command);
                }
            }
            self.advance();
            self.poll_attribution();
            self.watch();
        }
    }

    fn pause(&self) -> Duration {
        if self.suspicion.is_none() && self.lanes.values().any(NcclQueue::is_starting) {
            return STARTING_PAUSE;
        }
        let watched = self.attribution.is_some() || self.suspicion.is_some();
        let ending = self.finishing.is_some();
        if watched || ending || self.lanes.values().any(NcclQueue::is_flying) {
            return FLYING_PAUSE;
        }
        IDLE_PAUSE
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
                let (from, address) = (wanted.sender(), wanted.address);
                match self.mail.want(wanted) {
                    Some((wanted, message)) => self.settle(give(wanted, message)),
                    None => self.turns.push_back(NextOperation::Letter(address)),
                }
                if self.departed[from] {
                    self.lost(from);
                }
            }
            Command::Expired { what, slot } => self.open_attribution(Late::Call(what), Some(slot)),
            Command::Fail => self.spread(),
            Command::Depart => {
                self.departed[self.shared.rank] = true;
                self.report_known(&NcclFrame::Depart);
                self.take_the_rest();
            }
            Command::Finish => self.finishing = Some(Moment::now()),
            Command::Engine(news) => self.receive(news),
        }
    }

    fn receive(&mut self, news: NcclEvent) {
        match news {
            NcclEvent::Together(group, n) => {
                self.channels.get_mut(&group).expect("a member's group").together = n;
            }
            NcclEvent::Pinned(..) if self.failed_at.is_some() => {}
            NcclEvent::Pinned(job, pinned) => drop(self.pinned.insert(job, pinned)),
            NcclEvent::Frame(from, frame) => self.read(from, frame),
            NcclEvent::Lost(from, why) => self.gone(from, why),
            NcclEvent::Unreachable(rank, why) => self.unreachable(rank, &why),
        }
    }

    /// Reads a frame of world rank `from`.
    pub(super) fn read(&mut self, from: usize, frame: NcclFrame) {
        match frame {
            NcclFrame::Hello => {}
            NcclFrame::Failure(rank, json) => self.fail(rank, read_error(rank, &json)),
            NcclFrame::Depart => {
                self.departed[from] = true;
                // It left in good order; whether anything misses it is for `lost` to say.
                self.suspicion.take_if(|suspicion| suspicion.rank == Some(from));
                self.lost(from);
            }
            NcclFrame::Ask(group) => {
                let (called, begun) = self.progress(group);
                self.links.send(from, &NcclFrame::Answer(group, called, begun));
            }
            NcclFrame::Answer(group, called, begun) => self.answer(from, group, called, begun),
            _ if self.failed_at.is_some() => {}
            NcclFrame::Header(Header { group, .. })
            | NcclFrame::Result(group, ..)
            | NcclFrame::Id(group, ..)
            | NcclFrame::Envelope(Envelope { address: MailAddress { group, .. }, .. })
                if !self.channels.contains_key(&group) =>
            {
                self.early.entry(group).or_default().push((from, frame));
            }
            NcclFrame::Header(header) => self.note(header),
            NcclFrame::Result(group, sequence, parts) => self.conclude(group, sequence, parts),
            NcclFrame::Id(group, route, id) => self.start_lane(group, route, UniqueId(*id)),
            NcclFrame::Envelope(envelope) => {
                let MailAddress { group, from: place, .. } = envelope.address;
                self.announced.entry((group, place)).or_default().push_back(envelope);
                if self.departed[self.shared.rank] {
                    self.take_the_rest();
                }
            }
        }
    }

    /// The lane of a route, made where there is none. Whether it was made now; none where the
    /// world has failed over it.
    pub(super) fn lane(&mut self, group: u64, route: Route) -> Option<(&mut NcclQueue, bool)> {
        let key = (group, route);
        let fresh = !self.lanes.contains_key(&key);
        if fresh {
            match NcclQueue::new(self.shared.engine.accelerator.clone()) {
                Ok(lane) => drop(self.lanes.insert(key, lane)),
                Err(text) => {
                    let error = self.shared.device_error("making a queue", text);
                    self.fail(self.shared.rank, error);
                    return None;
                }
            }
        }
        self.lanes.get_mut(&key).map(|lane| (lane, fresh))
    }

    /// Makes up the identity of a new communicator and sends it to the others at its ends.
    pub(super) fn found(&mut self, group: u64, route: Route) {
        let id = match self.nccl.unique_id() {
            Ok(id) => id,
            Err(error) => {
                return self.fail(self.shared.rank, error.in_operation(self.starting(group)));
            }
        };
        let members = &self.channels[&group].group;
        let others: Vec<usize> = match route {
            Route::All => members.others().collect(),
            Route::Pair { to, .. } => vec![members.members[to]],
        };
        for other in others {
            self.links.send(other, &NcclFrame::id(group, route, &id));
        }
        self.start_lane(group, route, id);
    }

    /// Starts this rank's end of a communicator.
    fn start_lane(&mut self, group: u64, route: Route, id: UniqueId) {
        let members = self.channels[&group].group.clone();
        let (size, rank) = match route {
            Route::All => (members.size(), members.place),
            Route::Pair { from, .. } => (2, usize::from(from != members.place)),
        };
        let nccl = self.nccl.clone();
        let Some((lane, _)) = self.lane(group, route) else { return };
        if lane.has_comm() {
            return;
        }
        let messages = matches!(route, Route::Pair { .. });
        if let Err(error) = lane.start(&nccl, id, size, rank, messages) {
            let operation = self.starting(group);
            self.fail(self.shared.rank, error.in_operation(operation));
        }
    }

    fn starting(&self, group: u64) -> String {
        format!("{}: starting a communicator", self.channels[&group].group.name)
    }

    fn send(&mut self, to: usize, envelope: Envelope, body: Body) {
        let Envelope { address, signature } = envelope;
        let MailAddress { group, from, tag } = address;
        let members = self.channels[&group].group.clone();
        if let Body::Own(tensor) = body {
            let issued = Arc::new(Slot::default());
            issued.put(Ok(Output::Buffer(Received::Issued(None))));
            let room = Arc::new(tensor.into());
            let met = self.mail.deliver(address, IncomingMessage { signature, room, issued });
            return self.settle(met.map_or(Ok(()), |(wanted, message)| give(wanted, message)));
        }
        let route = Route::Pair { from, to };
        if let Body::Work { job, count } = body {
            let Some((_, fresh)) = self.lane(group, route) else { return };
            if fresh {
                self.found(group, route);
            }
            let transfer = NcclTransfer::Send { to: 1 };
            let operation = format!("{}: {signature}", members.name);
            let label = Label { operation, sequence: tag };
            let slot = Arc::default();
            self.push(group, route, NcclWork { job, transfer, count, label, slot, more: false });
        }
        self.links.send(members.members[to], &NcclFrame::Envelope(envelope));
    }

    /// Carries all lanes forward.
    fn advance(&mut self) {
        if self.failed_at.is_some() {
            self.lanes.values_mut().for_each(|lane| {
                lane.drain();
            });
            return;
        }
        if let Some(Suspicion { since, error, .. }) = &self.suspicion {
            if since.elapsed() > REMOTE_GRACE {
                let error = error.clone();
                self.fail(self.shared.rank, error);
            }
            return;
        }
        let polled = self.lanes.values_mut().try_for_each(NcclQueue::poll);
        match polled.and_then(|()| self.take_turns()) {
            Ok(()) => {}
            Err(LaneError::Nccl(error, operation)) if error.is_remote() => {
                self.suspect(None, error.in_operation(operation));
            }
            Err(LaneError::Nccl(error, operation)) => {
                self.fail(self.shared.rank, error.in_operation(operation));
            }
            Err(LaneError::Device(text, operation)) => {
                let error = self.shared.device_error(operation, text);
                self.fail(self.shared.rank, error);
            }
        }
    }

    /// Opens an attribution where an operation has been on the device for too long.
    fn watch(&mut self) {
        if self.failed_at.is_some() || self.attribution.is_some() {
            return;
        }
        let timeout = self.shared.timeout.get();
        let late = self.lanes.iter().find_map(|((group, route), lane)| {
            let late = lane.late(timeout)?;
            Some(Late::InProgress { group: *group, route: *route, late })
        });
        if let Some(late) = late {
            self.open_attribution(late, None);
        }
    }

    /// Whether nothing is left to do.
    fn is_over(&mut self) -> bool {
        let Some(since) = self.finishing else { return false };
        let late = since.elapsed() > END_TIME;
        if self.failed_at.is_some() {
            return late || self.lanes.values_mut().all(NcclQueue::drain);
        }
        if !self.lanes.values().all(NcclQueue::is_idle) {
            return late && since.elapsed() > self.shared.timeout.get();
        }
        if !self.finalized {
            self.finalized = true;
            // What fails to end in good order is aborted below.
            self.lanes.values().for_each(|lane| drop(lane.finalize()));
        }
        self.lanes.retain(|_, lane| !lane.destroy());
        late || self.lanes.is_empty()
    }
}
