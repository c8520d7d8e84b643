//! How a rank's connections begin: who may come in, and how both ends know each other.
//!
//! ```text
//! called  its nonce
//! caller  magic, its rank, its nonce, proof("caller")
//! called  proof("called")
//! ```
//!
//! A proof is a hash, keyed by the job's secret, of its role, both nonces and both ranks; so is the
//! key of the frames that follow. A caller without a proof takes one of a limited number of seats
//! for a few seconds.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crossbeam_channel::Sender;
use parking_lot::Mutex;

use super::super::engine::{Command, News};
use super::super::wire::Frame;
use super::{FRAME_MAX, HANDSHAKE_TIME, Secret, start};
use crate::patience::Deadline;
use crate::sealed::Opener;
use crate::timed::Timed;

pub(super) const MAGIC: &[u8; 8] = b"zeropp 2";
/// Most connections at the door at once, beside one of every rank.
pub(super) const STRANGERS_MAX: usize = 64;
/// How long a caller tries where the door has no seat left.
const FULL_TIME: Duration = Duration::from_secs(15);
/// A pause before it tries again, and before accepting where the system has no room.
const PAUSE: Duration = Duration::from_millis(50);

type Nonce = [u8; 16];

/// The listening end of a rank.
pub(super) struct Door {
    rank: usize,
    size: usize,
    secret: Secret,
    pub(super) inbox: Sender<Command>,
    pub(super) closed: AtomicBool,
    /// Connections of ranks that were let in.
    pub(super) incoming: Mutex<HashMap<usize, TcpStream>>,
    /// Connections that were not let in yet.
    waiting: AtomicUsize,
    pub(super) address: SocketAddr,
}

impl Door {
    pub(super) fn new(
        (rank, size): (usize, usize),
        secret: Secret,
        inbox: Sender<Command>,
        address: SocketAddr,
    ) -> Door {
        Door {
            rank,
            size,
            secret,
            inbox,
            closed: AtomicBool::new(false),
            incoming: Mutex::default(),
            waiting: AtomicUsize::new(0),
            address,
        }
    }

    /// Takes connections until the owner closes.
    pub(super) fn accept(self: Arc<Self>, listener: &TcpListener) {
        loop {
            let accepted = listener.accept();
            if self.closed.load(Ordering::Acquire) {
                return;
            }
            let Ok((stream, _)) = accepted else {
                // Too many open files, say: a moment later there may be fewer.
                std::thread::sleep(PAUSE);
                continue;
            };
            if self.waiting.fetch_add(1, Ordering::AcqRel) >= self.size + STRANGERS_MAX {
                // It is hung up on without a word; a rank of the job tries again.
                self.waiting.fetch_sub(1, Ordering::AcqRel);
                continue;
            }
            let own = self.clone();
            if start(format!("link to {}", self.rank), move || own.serve(stream)).is_err() {
                self.waiting.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }

    /// Reads one connection to its end.
    fn serve(&self, mut stream: TcpStream) {
        let admitted = self.admit(&stream);
        self.waiting.fetch_sub(1, Ordering::AcqRel);
        let Ok((from, key)) = admitted else { return };
        let told = self.read_frames(from, &mut stream, Opener::new(key, FRAME_MAX));
        self.incoming.lock().remove(&from);
        if !self.closed.load(Ordering::Acquire) {
            // Nothing more of it is believed.
            let _ = stream.shutdown(std::net::Shutdown::Both);
            let why = told.err().map_or("it closed the connection".into(), |e| e.to_string());
            let _ = self.inbox.send(Command::Engine(News::Lost(from, why)));
        }
    }

    /// Lets a rank of this job in, once; its number and the key of its frames.
    fn admit(&self, stream: &TcpStream) -> io::Result<(usize, [u8; 32])> {
        stream.set_nodelay(true)?;
        let mut wire = Timed::new(stream, HANDSHAKE_TIME);
        let mine = nonce()?;
        wire.write_all(&mine)?;
        let magic: [u8; 8] = wire.array()?;
        let from = u32::from_le_bytes(wire.array()?) as usize;
        let words = Words { secret: &self.secret, called: mine, caller: wire.array()? };
        let told: [u8; 32] = wire.array()?;
        let ends = (from, self.rank);
        // The comparison of hashes takes the same time wherever they differ.
        let known = words.proof(b"caller", ends) == told;
        if &magic != MAGIC || !known || from >= self.size {
            return Err(io::Error::other("not of this job"));
        }
        let copy = stream.try_clone()?;
        match self.incoming.lock().entry(from) {
            Entry::Occupied(_) => return Err(io::Error::other("a second connection of one rank")),
            Entry::Vacant(place) => place.insert(copy),
        };
        let welcomed = wire.write_all(words.proof(b"called", ends).as_bytes());
        let welcomed = welcomed.and_then(|()| stream.set_read_timeout(None));
        if let Err(error) = welcomed {
            self.incoming.lock().remove(&from);
            return Err(error);
        }
        Ok((from, *words.proof(b"frames", ends).as_bytes()))
    }

    fn read_frames(
        &self,
        from: usize,
        stream: &mut TcpStream,
        mut opener: Opener,
    ) -> io::Result<()> {
        let mut buffer = vec![0; 16 << 10];
        loop {
            let read = stream.read(&mut buffer)?;
            if read == 0 {
                return Ok(());
            }
            opener.feed(&buffer[..read]);
            let sent =
                |what: &dyn ToString| io::Error::other(format!("it sent {}", what.to_string()));
            while let Some(body) = opener.next().map_err(|e| sent(&e))? {
                let frame = Frame::decode(&body).ok_or_else(|| sent(&"nonsense"))?;
                if self.inbox.send(Command::Engine(News::Frame(from, frame))).is_err() {
                    return Ok(());
                }
            }
        }
    }
}

/// Opens a connection of rank `from` to rank `to`, and proves both ends to each other. Returns the
/// key of its frames.
pub(super) fn enter(
    address: &str,
    secret: &Secret,
    ends: (usize, usize),
) -> io::Result<(TcpStream, [u8; 32])> {
    let deadline = Deadline::after(FULL_TIME);
    loop {
        let stream = reach(address)?;
        stream.set_nodelay(true)?;
        let mut wire = Timed::new(&stream, HANDSHAKE_TIME);
        let theirs: Nonce = match wire.array() {
            Ok(theirs) => theirs,
            // Hung up on: the door has no seat left.
            Err(error) if is_end(&error) && !deadline.is_over() => {
                std::thread::sleep(PAUSE);
                continue;
            }
            Err(error) => return Err(error),
        };
        let words = Words { secret, called: theirs, caller: nonce()? };
        let mut hello = MAGIC.to_vec();
        hello.extend((ends.0 as u32).to_le_bytes());
        hello.extend(words.caller);
        hello.extend(words.proof(b"caller", ends).as_bytes());
        wire.write_all(&hello)?;
        let answer: [u8; 32] = wire.array()?;
        if words.proof(b"called", ends) != answer {
            return Err(io::Error::other("the program that listens there belongs to another job"));
        }
        let key = *words.proof(b"frames", ends).as_bytes();
        return Ok((stream, key));
    }
}

/// Whether the other side has hung up.
fn is_end(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), ConnectionAborted | ConnectionReset | UnexpectedEof)
}

/// A connection to the first address of a host that takes it.
fn reach(address: &str) -> io::Result<TcpStream> {
    let mut last = io::Error::other(format!("{address} has no network address"));
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, HANDSHAKE_TIME) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// The numbers of a handshake, and the secret that proofs need.
pub(super) struct Words<'a> {
    pub(super) secret: &'a Secret,
    pub(super) called: Nonce,
    pub(super) caller: Nonce,
}

impl Words<'_> {
    /// The proof for these numbers and these ends of a connection, which only a holder of the
    /// secret can make.
    pub(super) fn proof(&self, role: &[u8; 6], (from, to): (usize, usize)) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(self.secret);
        hasher.update(role).update(&self.called).update(&self.caller);
        hasher.update(&(from as u32).to_le_bytes()).update(&(to as u32).to_le_bytes());
        hasher.finalize()
    }
}

fn nonce() -> io::Result<Nonce> {
    let mut nonce = [0; 16];
    getrandom::fill(&mut nonce).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(nonce)
}
