//! The side of rank 0: keeps the values, lets clients in, notices who is gone.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::super::board::{Board, KEYS_MAX};
use super::super::member::{self, MEMBERS};
use super::super::{Member, Rendezvous, RendezvousError, Token, ranks_in_words};
use super::link::Link;
use super::message::WireMessage;
use super::{HANDSHAKE_TIME, LEFT_MS_MAX, STORE, TcpOptions, derived, spawn};
use crate::handshake::{self, HandshakeError, Keys};
use crate::patience::{Deadline, Moment, wait};

/// Most connections that may be in their handshake at once.
pub(super) const AT_DOOR_MAX: usize = 256;
/// How long the end waits for clients that have not said goodbye.
const LINGER: Duration = Duration::from_secs(2);
/// The most processes that have come which a line names.
const NAMED_MAX: usize = 8;
/// The most refused processes that a line names.
const REFUSED_MAX: usize = 4;
/// A pause before accepting again, where the system has no room for a connection.
const NO_ROOM_PAUSE: Duration = Duration::from_millis(50);

/// The store of a job, in the process of rank 0.
pub(super) struct Server {
    shared: Arc<ServerShared>,
    accepting: Option<JoinHandle<()>>,
    wake: SocketAddr,
}

struct ServerShared {
    board: Board,
    state: Mutex<ServerState>,
    /// A client has left.
    left: Condvar,
    key: [u8; 32],
    silence: Duration,
    deadline: Deadline,
    closing: AtomicBool,
}

struct ServerState {
    /// All that were let in, by their first rank; rank 0's own process too.
    members: BTreeMap<usize, MemberEntry>,
    /// Who waits for a name.
    watchers: HashMap<String, Vec<usize>>,
    at_door: usize,
    refused: Vec<String>,
}

struct MemberEntry {
    member: Member,
    liveness: MemberLiveness,
}

enum MemberLiveness {
    /// Rank 0's own process.
    Here,
    /// Let in, and about to be connected.
    Entering,
    Connected(Arc<Link>),
    Gone,
}

impl Server {
    /// Listens, and waits until all ranks of the job are here.
    pub(super) fn open(
        listener: TcpListener,
        options: &TcpOptions,
        me: &Member,
    ) -> Result<Server, RendezvousError> {
        let host = Server::listen(listener, options, me)?;
        host.wait_for_all(options)?;
        Ok(host)
    }

    fn listen(
        listener: TcpListener,
        options: &TcpOptions,
        me: &Member,
    ) -> Result<Server, RendezvousError> {
        let unavailable = |e: std::io::Error| RendezvousError::Unavailable {
            place: options.address.to_string(),
            reason: format!("cannot be served ({e})"),
        };
        let mut wake = listener.local_addr().map_err(unavailable)?;
        if wake.ip().is_unspecified() {
            wake.set_ip(match wake.ip() {
                IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
                IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
            });
        }
        let entry = MemberEntry { member: me.clone(), liveness: MemberLiveness::Here };
        let state = ServerState {
            members: [(0, entry)].into(),
            watchers: HashMap::new(),
            at_door: 0,
            refused: Vec::new(),
        };
        let shared = Arc::new(ServerShared {
            board: Board::default(),
            state: Mutex::new(state),
            left: Condvar::new(),
            key: Token::key(options.token.as_ref()),
            silence: options.silence,
            deadline: Deadline::after(options.start_timeout),
            closing: AtomicBool::new(false),
        });
        shared.check_complete();
        let own = shared.clone();
        let accepting = spawn("rendezvous", move || accept_all(&listener, &own));
        let accepting = Some(accepting.map_err(unavailable)?);
        Ok(Server { shared, accepting, wake })
    }

    fn wait_for_all(&self, options: &TcpOptions) -> Result<(), RendezvousError> {
        let begin = Moment::now();
        loop {
            let left = self.shared.deadline.left();
            match self.shared.board.get(MEMBERS, left.min(options.waiting.every)) {
                Err(RendezvousError::Timeout { .. }) if left.is_zero() => break,
                // Where no time is left the error says it all.
                Err(RendezvousError::Timeout { .. }) if left <= options.waiting.every => {}
                Err(RendezvousError::Timeout { .. }) => {
                    options.waiting.tell(&self.shared.waiting(begin.elapsed(), options));
                }
                result => return result.map(drop),
            }
        }
        let news = self.shared.missing(options.start_timeout);
        let error = news.clone().into_error(&options.address.to_string()).expect("it is an error");
        // First: a client that comes just now looks at the board, and would otherwise miss both.
        self.shared.board.end(error.clone());
        self.shared.send_to_all(&news);
        Err(error)
    }
}

impl Rendezvous for Server {
    fn put(&self, key: &str, value: &[u8]) -> Result<(), RendezvousError> {
        self.shared.put(key, value)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, RendezvousError> {
        self.shared.board.get(key, timeout)
    }

    fn key(&self) -> [u8; 32] {
        derived(&self.shared.key)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.shared.board.over().is_none() {
            let deadline = Deadline::after(LINGER);
            let mut state = self.shared.state.lock();
            let connected = |s: &ServerState| s.members.values().any(MemberEntry::is_connected);
            while connected(&state) && !wait(&self.shared.left, &mut state, deadline) {}
        }
        self.shared.closing.store(true, Ordering::SeqCst);
        self.shared.send_to_all(&WireMessage::Bye);
        for link in self.shared.links() {
            link.close();
        }
        // Accepting has no other end. Where it cannot be woken it ends with the process.
        if TcpStream::connect_timeout(&self.wake, Duration::from_secs(1)).is_ok()
            && let Some(thread) = self.accepting.take()
        {
            let _ = thread.join();
        }
    }
}

impl MemberEntry {
    fn is_connected(&self) -> bool {
        matches!(self.liveness, MemberLiveness::Connected(_))
    }

    fn has(&self, rank: usize) -> bool {
        (self.member.first_rank..self.member.first_rank + self.member.ranks).contains(&rank)
    }
}

fn accept_all(listener: &TcpListener, shared: &Arc<ServerShared>) {
    loop {
        let accepted = listener.accept();
        if shared.closing.load(Ordering::SeqCst) {
            return;
        }
        let Ok((stream, from)) = accepted else {
            std::thread::sleep(NO_ROOM_PAUSE);
            continue;
        };
        let mut state = shared.state.lock();
        if state.at_door >= AT_DOOR_MAX {
            drop(state);
            handshake::send_away(&stream);
            continue;
        }
        state.at_door += 1;
        drop(state);
        let own = shared.clone();
        if spawn("rendezvous client", move || own.serve(stream, from.ip())).is_err() {
            shared.state.lock().at_door -= 1;
            std::thread::sleep(NO_ROOM_PAUSE);
        }
    }
}

impl ServerShared {
    /// A connection from its handshake to its end.
    fn serve(self: Arc<Self>, stream: TcpStream, from: IpAddr) {
        let entered = self.let_in(&stream);
        self.state.lock().at_door -= 1;
        let (rank, open, link) = match entered {
            Ok((rank, keys)) => match Link::new(stream, keys.to_caller, self.silence) {
                Ok(link) => (rank, keys.to_listener, Arc::new(link)),
                Err(e) => return self.lose(rank, &format!("its connection broke ({e})")),
            },
            Err(error) => {
                let mut state = self.state.lock();
                if state.refused.len() < REFUSED_MAX {
                    // The help after the first part is for the client.
                    let reason = error.to_string();
                    let reason = reason.split(';').next().unwrap_or_default();
                    state.refused.push(format!("{}: {reason}", from.to_canonical()));
                }
                return;
            }
        };
        let connected = MemberLiveness::Connected(link.clone());
        self.state.lock().members.get_mut(&rank).expect("was let in").liveness = connected;
        self.check_complete();
        if let Some(news) = self.board.over().and_then(news_of) {
            // It came in while the others were being notified; where it is gone, reading says so.
            let _ = link.send(&news);
        }
        let mut said_bye = false;
        let end = link.read_all(open, |message| match message {
            WireMessage::Beat => true,
            WireMessage::Put { id, key, value } => {
                let answer = match self.put(&key, &value) {
                    Ok(()) => WireMessage::Stored { id },
                    Err(RendezvousError::Taken { .. }) => WireMessage::Taken { id },
                    Err(error) => WireMessage::Full { id, problem: error.to_string() },
                };
                link.send(&answer).is_ok()
            }
            WireMessage::Watch { key } => {
                self.watch(rank, &key).is_some_and(|answer| link.send(&answer).is_ok())
            }
            WireMessage::Bye => {
                said_bye = true;
                false
            }
            // The host's own words, or nonsense.
            _ => false,
        });
        link.close();
        if said_bye && self.board.look(MEMBERS).is_some() {
            self.state.lock().members.get_mut(&rank).expect("was let in").liveness =
                MemberLiveness::Gone;
            self.left.notify_all();
        } else {
            let how = if said_bye { "it left before all ranks were here" } else { "it broke off" };
            self.lose(rank, &end.unwrap_or_else(|| how.into()));
        }
    }

    /// The handshake; the first rank of who came, and the keys.
    fn let_in(&self, stream: &TcpStream) -> Result<(usize, Keys), HandshakeError> {
        stream.set_nodelay(true)?;
        let caller = handshake::receive(stream, &self.key, STORE, HANDSHAKE_TIME)?;
        let member: Member = serde_json::from_slice(caller.introduction()).map_err(|e| {
            HandshakeError::Broken(format!("its introduction cannot be read ({e})"))
        })?;
        let rank = member.first_rank;
        if let Err(why) = self.admit(member) {
            caller.refuse(&why)?;
            return Err(why);
        }
        let left = u64::try_from(self.deadline.left().as_millis()).unwrap_or(LEFT_MS_MAX);
        match caller.welcome(&left.to_le_bytes()) {
            Ok(keys) => Ok((rank, keys)),
            Err(error) => {
                self.lose(rank, &error.to_string());
                Err(error)
            }
        }
    }

    /// Gives the caller its place, or says why it cannot have it.
    fn admit(&self, new: Member) -> Result<(), HandshakeError> {
        let refused = |reason| Err(HandshakeError::Refused(reason));
        let mut state = self.state.lock();
        let me = &state.members[&0].member;
        if new.job != me.job {
            return refused(format!(
                "job {:?} uses this place, and this process belongs to job {:?}; use another port \
                 for one of them",
                me.job, new.job
            ));
        }
        if (&new.plan, new.world) != (&me.plan, me.world) {
            return refused(format!(
                "rank 0 was started for {} ({} ranks), this process for {} ({} ranks); use the \
                 same settings on all nodes, or another port if these are two jobs",
                me.plan, me.world, new.plan, new.world
            ));
        }
        let end = new.first_rank.checked_add(new.ranks);
        if new.ranks == 0 || end.is_none_or(|end| end > me.world) {
            let Member { first_rank, ranks, world, .. } = new;
            return refused(format!(
                "{ranks} ranks from {first_rank} on are not among the {world} of the job; use \
                 node-ranks below the number of nodes"
            ));
        }
        let end = new.first_rank + new.ranks;
        let taken = (new.first_rank..end)
            .find_map(|rank| Some((rank, state.members.values().find(|e| e.has(rank))?)));
        if let Some((rank, MemberEntry { member, liveness })) = taken {
            // A process that was started again is faster than the end of those it belonged to:
            // those who take their place will meet here, too.
            if matches!(liveness, MemberLiveness::Gone) || self.board.over().is_some() {
                return Err(HandshakeError::Later(format!(
                    "the meeting before this one, in which rank {rank} was process {} on {}, has \
                     not ended yet",
                    member.pid, member.host
                )));
            }
            return refused(format!(
                "rank {rank} is taken by process {} on {}; give every node a node-rank of its own, \
                 or use another port if these are two jobs",
                member.pid, member.host
            ));
        }
        let first_rank = new.first_rank;
        state
            .members
            .insert(first_rank, MemberEntry { member: new, liveness: MemberLiveness::Entering });
        Ok(())
    }

    /// Once all ranks are here, each receives the list of all.
    fn check_complete(&self) {
        let state = self.state.lock();
        let entered = |e: &&MemberEntry| !matches!(e.liveness, MemberLiveness::Entering);
        let members: Vec<_> =
            state.members.values().filter(entered).map(|e| e.member.clone()).collect();
        drop(state);
        let here: usize = members.iter().map(|m| m.ranks).sum();
        if here == members[0].world && self.board.over().is_none() {
            let list = member::list(&members.iter().collect::<Vec<_>>());
            // Where several threads see that all are here, one list is as good as another.
            let _ = self.put(MEMBERS, &list);
        }
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), RendezvousError> {
        if !self.board.put(key, value)? {
            return Ok(());
        }
        let mut state = self.state.lock();
        let watchers = state.watchers.remove(key).unwrap_or_default();
        let links: Vec<_> = watchers.iter().filter_map(|rank| state.link(*rank)).collect();
        drop(state);
        let news = WireMessage::Value { key: key.into(), value: value.into() };
        for link in links {
            // A client that cannot be reached is noticed where it is read from.
            let _ = link.send(&news);
        }
        Ok(())
    }

    /// The answer to a client that asks for `key`; `None` where it has asked for too many.
    fn watch(&self, rank: usize, key: &str) -> Option<WireMessage> {
        // Held from looking to noting, so that a value set in between is not missed.
        let mut state = self.state.lock();
        if let Some(value) = self.board.look(key) {
            return Some(WireMessage::Value { key: key.into(), value });
        }
        if state.watchers.len() >= KEYS_MAX && !state.watchers.contains_key(key) {
            return None;
        }
        let watchers = state.watchers.entry(key.into()).or_default();
        if !watchers.contains(&rank) {
            watchers.push(rank);
        }
        Some(WireMessage::Absent { key: key.into() })
    }

    /// A process is gone: all others are notified.
    fn lose(&self, rank: usize, how: &str) {
        let mut state = self.state.lock();
        let entry = state.members.get_mut(&rank).expect("was let in");
        entry.liveness = MemberLiveness::Gone;
        let (ranks, host) = (entry.member.ranks_in_words(), entry.member.host.clone());
        drop(state);
        self.left.notify_all();
        if self.closing.load(Ordering::SeqCst) {
            return;
        }
        let error = RendezvousError::Lost { ranks, host, how: how.into() };
        self.board.end(error.clone());
        if let Some(news) = news_of(error) {
            self.send_to_all(&news);
        }
    }

    fn links(&self) -> Vec<Arc<Link>> {
        let state = self.state.lock();
        state.members.keys().filter_map(|rank| state.link(*rank)).collect()
    }

    fn send_to_all(&self, news: &WireMessage) {
        for link in self.links() {
            // As in `put`.
            let _ = link.send(news);
        }
    }

    /// Who is waited for, who has come and who was refused, in a line.
    fn waiting(&self, since: Duration, options: &TcpOptions) -> String {
        let state = self.state.lock();
        let world = state.members[&0].member.world;
        let here = |rank: &usize| state.members.values().any(|entry| entry.has(*rank));
        let missing = ranks_in_words((0..world).filter(|rank| !here(rank)));
        let came = |entry: &MemberEntry| {
            format!("{} on {}", entry.member.ranks_in_words(), entry.member.host)
        };
        let came: Vec<String> = state.members.values().take(NAMED_MAX).map(came).collect();
        let more = state.members.len().saturating_sub(NAMED_MAX);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let refused = match state.refused.is_empty() {
            true => String::new(),
            false => format!("; refused: {}", state.refused.join("; ")),
        };
        format!(
            "waiting for {missing} of {world} at {} ({:.0} of {:.0} s); here: {}{more}{refused}",
            options.address,
            since.as_secs_f64(),
            options.start_timeout.as_secs_f64(),
            came.join(", ")
        )
    }

    /// Who is not here, and why perhaps.
    fn missing(&self, after: Duration) -> WireMessage {
        let state = self.state.lock();
        let world = state.members[&0].member.world;
        let here = |rank: &usize| state.members.values().any(|entry| entry.has(*rank));
        let missing = ranks_in_words((0..world).filter(|rank| !here(rank)));
        let there = state.members.values().take(8).map(|e| e.member.host.as_str());
        let mut hosts: Vec<&str> = there.collect();
        hosts.dedup();
        let mut more = format!(" (of {world}; processes came from {})", hosts.join(", "));
        if !state.refused.is_empty() {
            more.push_str(&format!("; refused: {}", state.refused.join("; ")));
        }
        more.push_str("; start them, see that they reach this place, or raise timeout-s:start");
        WireMessage::Missing { missing, after_s: after.as_secs_f64().round() as u64, more }
    }
}

impl ServerState {
    fn link(&self, rank: usize) -> Option<Arc<Link>> {
        match &self.members.get(&rank)?.liveness {
            MemberLiveness::Connected(link) => Some(link.clone()),
            _ => None,
        }
    }
}

/// The message that reports an error to clients.
fn news_of(error: RendezvousError) -> Option<WireMessage> {
    match error {
        RendezvousError::Lost { ranks, host, how } => Some(WireMessage::Lost { ranks, host, how }),
        RendezvousError::Missing { missing, after_s, more, .. } => {
            Some(WireMessage::Missing { missing, after_s, more })
        }
        _ => None,
    }
}
