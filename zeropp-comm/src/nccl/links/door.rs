//! How a rank's connections begin: a caller names both ranks in its handshake ([`handshake`]), and
//! is let in once. A caller without a proof takes one of a limited number of seats for a few
//! seconds.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io::{self, Read};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crossbeam_channel::Sender;
use parking_lot::Mutex;

use super::super::engine::{Command, NcclEvent};
use super::super::wire::{FRAME_MAX, NcclFrame};
use super::{HANDSHAKE_TIME, start};
use crate::handshake::{self, HandshakeError, Secret};
use crate::patience::Deadline;
use crate::sealed::Opener;

/// What such a connection is for, as its handshake has it.
pub(super) const LINKS: &str = "links";
/// Most connections at the door at once, beside one of every rank.
pub(super) const STRANGERS_MAX: usize = 64;
/// How long a caller tries where the door has no seat left.
const FULL_TIME: Duration = Duration::from_secs(15);
/// A pause before it tries again, and before accepting where the system has no room.
const PAUSE: Duration = Duration::from_millis(50);

/// The listening end of a rank.
pub(super) struct LinkListener {
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

impl LinkListener {
    pub(super) fn new(
        rank: usize,
        size: usize,
        secret: Secret,
        inbox: Sender<Command>,
        address: SocketAddr,
    ) -> LinkListener {
        LinkListener {
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
                // A rank of the job tries again.
                self.waiting.fetch_sub(1, Ordering::AcqRel);
                handshake::send_away(&stream);
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
        let reported = self.read_frames(from, &mut stream, Opener::new(key, FRAME_MAX));
        self.incoming.lock().remove(&from);
        if !self.closed.load(Ordering::Acquire) {
            // Nothing more of it is believed.
            let _ = stream.shutdown(std::net::Shutdown::Both);
            let why = reported.err().map_or("it closed the connection".into(), |e| e.to_string());
            let _ = self.inbox.send(Command::Engine(NcclEvent::Lost(from, why)));
        }
    }

    /// Lets a rank of this job in, once; its number and the key of its frames.
    fn admit(&self, stream: &TcpStream) -> Result<(usize, [u8; 32]), HandshakeError> {
        stream.set_nodelay(true)?;
        let caller = handshake::receive(stream, &self.secret, LINKS, HANDSHAKE_TIME)?;
        let copy = stream.try_clone()?;
        let from = (0..self.size)
            .find(|from| caller.introduction() == introduction(*from, self.rank))
            .filter(|from| self.let_in(*from, copy));
        let Some(from) = from else {
            let why = HandshakeError::Refused("a rank that has no place here".into());
            caller.refuse(&why)?;
            return Err(why);
        };
        let welcomed = caller.welcome(&[]);
        let welcomed = welcomed.and_then(|keys| {
            stream.set_read_timeout(None)?;
            Ok((from, keys.to_listener))
        });
        if welcomed.is_err() {
            self.incoming.lock().remove(&from);
        }
        welcomed
    }

    /// Notes the connection of a rank; it has one at most.
    fn let_in(&self, from: usize, stream: TcpStream) -> bool {
        match self.incoming.lock().entry(from) {
            Entry::Occupied(_) => false,
            Entry::Vacant(place) => {
                place.insert(stream);
                true
            }
        }
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
                let frame = NcclFrame::decode(&body).ok_or_else(|| sent(&"nonsense"))?;
                if self.inbox.send(Command::Engine(NcclEvent::Frame(from, frame))).is_err() {
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
    from: usize,
    to: usize,
) -> io::Result<(TcpStream, [u8; 32])> {
    let deadline = Deadline::after(FULL_TIME);
    loop {
        let stream = reach(address)?;
        stream.set_nodelay(true)?;
        let words = introduction(from, to);
        match handshake::call(&stream, secret, LINKS, words, HANDSHAKE_TIME) {
            Ok((keys, _)) => return Ok((stream, keys.to_listener)),
            // The door has no seat left.
            Err(HandshakeError::Busy | HandshakeError::HungUp) if !deadline.is_over() => {
                std::thread::sleep(PAUSE);
            }
            Err(HandshakeError::Token | HandshakeError::Foreign) => {
                let problem = "the program that listens there belongs to another job";
                return Err(io::Error::other(problem));
            }
            Err(error) => return Err(io::Error::other(error)),
        }
    }
}

/// The words of rank `from` that calls rank `to`.
pub(super) fn introduction(from: usize, to: usize) -> Vec<u8> {
    [from, to].map(|rank| (rank as u32).to_le_bytes()).concat()
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
