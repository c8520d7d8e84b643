//! The side of all other processes: one connection to rank 0's.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, bounded};
use parking_lot::{Condvar, Mutex};

use super::super::board::{Board, check_size};
use super::super::member::MEMBERS;
use super::super::{Member, Rendezvous, RendezvousError, Token};
use super::link::Link;
use super::message::WireMessage;
use super::{HANDSHAKE_TIME, LEFT_MS_MAX, STORE, TcpOptions, check_token, derived, spawn};
use crate::handshake::{self, HandshakeError, Keys, Secret};
use crate::patience::{Deadline, wait};

/// A pause before the host is tried again.
const RETRY_PAUSE: Duration = Duration::from_millis(200);
/// Longest time one attempt to connect may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that the host may need beyond its own patience to report which processes are missing.
const NEWS_TIME: Duration = Duration::from_secs(5);
/// How long leaving waits until the host knows of it.
const LEAVE_TIME: Duration = Duration::from_secs(1);

/// A connection to the store of the job.
pub(super) struct Client {
    shared: Arc<ClientShared>,
    ended: Receiver<()>,
}

struct ClientShared {
    link: Link,
    /// The host's values that this process has received.
    board: Board,
    talk: Mutex<ClientState>,
    changed: Condvar,
    silence: Duration,
    place: String,
    key: [u8; 32],
}

#[derive(Default)]
struct ClientState {
    /// Names that were asked for, and whether the host has answered.
    asked: HashMap<String, bool>,
    /// The values that were put, and the host's answers.
    puts: HashMap<u32, Option<WireMessage>>,
    next_id: u32,
    down: bool,
}

impl Client {
    /// Joins the job, and waits until all its ranks are there.
    pub(super) fn open(options: &TcpOptions, me: &Member) -> Result<Client, RendezvousError> {
        let (stream, keys, left) = connect(options, me)?;
        let place = options.address.to_string();
        let broken = |e: io::Error| RendezvousError::Unavailable {
            place: options.address.to_string(),
            reason: format!("the connection cannot be used ({e})"),
        };
        let link = Link::new(stream, keys.to_listener, options.silence).map_err(broken)?;
        let shared = Arc::new(ClientShared {
            link,
            board: Board::default(),
            talk: Mutex::new(ClientState::default()),
            changed: Condvar::new(),
            silence: options.silence,
            place,
            key: derived(&Token::key(options.token.as_ref())),
        });
        let (end, ended) = bounded(0);
        let own = shared.clone();
        let read = move || {
            own.listen(keys.to_caller);
            drop::<crossbeam_channel::Sender<()>>(end);
        };
        spawn("rendezvous", read).map_err(broken)?;
        let client = Client { shared, ended };
        match client.get(MEMBERS, left + NEWS_TIME) {
            Ok(_) => Ok(client),
            Err(RendezvousError::Timeout { after_s, .. }) => Err(RendezvousError::Unavailable {
                place: client.shared.place.clone(),
                reason: format!(
                    "rank 0 did not confirm within {after_s} s that all processes had arrived"
                ),
            }),
            Err(error) => Err(error),
        }
    }
}

/// Finds the host, which may not have started yet, and introduces `me`.
fn connect(
    options: &TcpOptions,
    me: &Member,
) -> Result<(TcpStream, Keys, Duration), RendezvousError> {
    let place = options.address.to_string();
    let key = Token::key(options.token.as_ref());
    let deadline = Deadline::after(options.start_timeout);
    let refused = |reason: &dyn ToString, help: &str| {
        let reason = format!("{}{help}", reason.to_string());
        Err(RendezvousError::Refused { place: place.clone(), reason })
    };
    loop {
        let problem = match dial(options)? {
            Ok(stream) => match greet(&stream, &key, me) {
                Ok((keys, left)) => return Ok((stream, keys, left)),
                Err(HandshakeError::Refused(reason)) => return refused(&reason, ""),
                Err(e @ HandshakeError::Token) => {
                    return refused(
                        &e,
                        "; use rank 0's ZEROPP_TOKEN or rendezvous:token-file on all nodes",
                    );
                }
                Err(e @ HandshakeError::Version(_)) => {
                    return refused(&e, "; use the same build on all nodes");
                }
                Err(e @ HandshakeError::Foreign) => {
                    return refused(&e, "; another program has this port, so use another one");
                }
                Err(e) => e.to_string(),
            },
            Err(problem) => problem,
        };
        if deadline.is_over() {
            let after_s = options.start_timeout.as_secs_f64().round();
            let reason = format!(
                "rank 0 cannot be reached within {after_s} s: {problem}; is its process started, \
                 on the machine of this name, and may this one connect to the port?"
            );
            return Err(RendezvousError::Unavailable { place, reason });
        }
        std::thread::sleep(RETRY_PAUSE);
    }
}

/// One attempt at every address of the host. What fails for now is the inner error.
pub(super) fn dial(options: &TcpOptions) -> Result<Result<TcpStream, String>, RendezvousError> {
    let addresses = match options.address.resolve() {
        Ok(addresses) => addresses,
        Err(e) => return Ok(Err(format!("the host is not found ({e})"))),
    };
    check_token(options, &addresses)?;
    let mut problem = String::new();
    for address in addresses {
        match dial_one(&address) {
            Ok(stream) => return Ok(Ok(stream)),
            Err(e) => problem = format!("{address}: {e}"),
        }
    }
    Ok(Err(problem))
}

fn dial_one(address: &SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(address, CONNECT_TIMEOUT)?;
    // A port of our own may have been given to this very socket: then nothing listens there.
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    stream.set_nodelay(true)?;
    Ok(stream)
}

impl ClientShared {
    /// Reads until the connection ends.
    fn listen(&self, open: [u8; 32]) {
        let mut over = None;
        let end = self.link.read_all(open, |message| {
            match message {
                WireMessage::Beat => return true,
                WireMessage::Value { key, value } => {
                    // Names are set once, so there is no other value to be in its way.
                    let _ = self.board.put(&key, &value);
                    self.talk.lock().asked.insert(key, true);
                }
                WireMessage::Absent { key } => {
                    self.talk.lock().asked.insert(key, true);
                }
                WireMessage::Stored { id }
                | WireMessage::Taken { id }
                | WireMessage::Full { id, .. } => {
                    let mut talk = self.talk.lock();
                    if let Some(answer) = talk.puts.get_mut(&id) {
                        *answer = Some(message);
                    }
                }
                WireMessage::Bye => {
                    over = Some("the process of rank 0 has ended");
                    return false;
                }
                news @ (WireMessage::Lost { .. } | WireMessage::Missing { .. }) => {
                    self.board.end(news.into_error(&self.place).expect("these two are errors"));
                }
                _ => return false,
            }
            self.changed.notify_all();
            true
        });
        self.link.close();
        self.board.end(match over {
            Some(reason) => self.unavailable(reason),
            None => RendezvousError::Lost {
                ranks: "rank 0".into(),
                host: self.place.clone(),
                how: end.unwrap_or_else(|| "it sent nonsense".into()),
            },
        });
        self.talk.lock().down = true;
        self.changed.notify_all();
    }

    fn unavailable(&self, reason: &str) -> RendezvousError {
        RendezvousError::Unavailable { place: self.place.clone(), reason: reason.into() }
    }

    /// Why nothing is to be had from the host.
    fn why_down(&self) -> RendezvousError {
        self.board.over().unwrap_or_else(|| self.unavailable("the connection is down"))
    }
}

impl Rendezvous for Client {
    fn put(&self, key: &str, value: &[u8]) -> Result<(), RendezvousError> {
        check_size(key, value)?;
        let shared = &self.shared;
        let mut talk = shared.talk.lock();
        let id = talk.next_id;
        talk.next_id = id.wrapping_add(1);
        talk.puts.insert(id, None);
        drop(talk);
        let message = WireMessage::Put { id, key: key.into(), value: value.into() };
        let sent = shared.link.send(&message);
        let deadline = Deadline::after(shared.silence);
        let mut talk = shared.talk.lock();
        while sent.is_ok() && talk.puts[&id].is_none() && !talk.down {
            if wait(&shared.changed, &mut talk, deadline) {
                break;
            }
        }
        let answer = talk.puts.remove(&id).expect("inserted above");
        drop(talk);
        match answer {
            Some(WireMessage::Stored { .. }) => shared.board.put(key, value).map(drop),
            Some(WireMessage::Taken { .. }) => Err(RendezvousError::Taken { key: key.into() }),
            Some(WireMessage::Full { problem, .. }) => {
                Err(RendezvousError::TooMuch { key: key.into(), problem })
            }
            _ => Err(shared.why_down()),
        }
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, RendezvousError> {
        let shared = &self.shared;
        if let Some(value) = shared.board.look(key) {
            return Ok(value);
        }
        check_size(key, b"")?;
        let first = !shared.talk.lock().asked.contains_key(key);
        if first {
            shared.talk.lock().asked.entry(key.into()).or_insert(false);
            // Where it cannot be sent the reader ends, and with it the waiting below.
            let _ = shared.link.send(&WireMessage::Watch { key: key.into() });
        }
        if timeout.is_zero() {
            let deadline = Deadline::after(shared.silence);
            let mut talk = shared.talk.lock();
            while !talk.asked[key] && !talk.down {
                if wait(&shared.changed, &mut talk, deadline) {
                    break;
                }
            }
        }
        shared.board.get(key, timeout)
    }

    fn key(&self) -> [u8; 32] {
        self.shared.key
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // Where the host is gone no goodbye can be sent.
        if self.shared.link.send(&WireMessage::Bye).is_ok() {
            // Closing at once could overtake the goodbye: the host hangs up when it has read it.
            self.shared.link.close_writing();
            let _ = self.ended.recv_timeout(LEAVE_TIME);
        }
        self.shared.link.close();
    }
}

/// Introduces this process; the keys, and how long all others have left to come.
pub(super) fn greet(
    stream: &TcpStream,
    key: &Secret,
    me: &Member,
) -> Result<(Keys, Duration), HandshakeError> {
    let introduction = serde_json::to_vec(me).expect("a member is text and numbers");
    let (keys, left) = handshake::call(stream, key, STORE, introduction, HANDSHAKE_TIME)?;
    let nonsense = |_| HandshakeError::Broken("its welcome cannot be read".into());
    let left_ms = <[u8; 8]>::try_from(left).map(u64::from_le_bytes).map_err(nonsense)?;
    Ok((keys, Duration::from_millis(left_ms.min(LEFT_MS_MAX))))
}
