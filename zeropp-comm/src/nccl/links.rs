//! Connections between ranks for the frames beside NCCL: one for each direction in which a rank
//! has something to say, opened when it first does.
//!
//! Both ends prove that they know a secret that the ranks share through the rendezvous, each over
//! fresh numbers of the other, so that neither a stranger nor a recording gets in. A connection
//! that ends without a word of leaving tells that its rank is gone.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use parking_lot::Mutex;

use super::NcclOptions;
use super::engine::{Command, News};
use super::wire::Frame;
use crate::CommError;
use crate::rendezvous::{Rendezvous, RendezvousError};

/// Longest frame, in bytes: an exchange's result is the largest.
pub(super) const FRAME_MAX: usize = 256 << 20;
/// How long a connection may take to open and to prove itself.
const HANDSHAKE_TIME: Duration = Duration::from_secs(5);
/// How long a frame may take to leave: only a rank that has stopped reading lets it wait.
const WRITE_TIME: Duration = Duration::from_secs(5);
/// How long the last frames get to leave.
const LAST_WORDS_TIME: Duration = Duration::from_secs(2);
const MAGIC: &[u8; 8] = b"zeropp 1";

type Secret = [u8; 32];
type Nonce = [u8; 16];

/// This rank's connections.
pub(super) struct Links {
    ends: Arc<Ends>,
    /// Frames for the thread that writes to a world rank.
    outgoing: HashMap<usize, Sender<Vec<u8>>>,
    /// Nothing comes here; it ends with the last thread that writes.
    writing: (Sender<()>, Receiver<()>),
    listening: Arc<Listening>,
}

/// What it takes to open a connection.
struct Ends {
    rank: usize,
    /// Where each world rank listens: a host and a port.
    addresses: Vec<String>,
    secret: Secret,
}

/// What the listening threads share with the owner.
struct Listening {
    rank: usize,
    size: usize,
    secret: Secret,
    inbox: Sender<Command>,
    closed: AtomicBool,
    incoming: Mutex<HashMap<usize, TcpStream>>,
    address: SocketAddr,
}

impl Links {
    /// Publishes where this rank listens, and waits until all others have.
    ///
    /// # Errors
    /// `Unavailable`, naming the ranks that did not come in time or what the rendezvous said.
    pub(super) fn open(
        options: &NcclOptions,
        (rank, size): (usize, usize),
        rendezvous: &dyn Rendezvous,
        inbox: Sender<Command>,
    ) -> Result<Links, CommError> {
        let listen = || -> io::Result<(TcpListener, SocketAddr)> {
            let listener = match options.host.parse::<IpAddr>() {
                Ok(own) => TcpListener::bind((own, 0))?,
                // A name may stand for another address here than elsewhere.
                Err(_) => TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0))
                    .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)))?,
            };
            let address = listener.local_addr()?;
            Ok((listener, address))
        };
        let (listener, address) = listen().map_err(|error| {
            unavailable(format!("rank {rank} cannot listen on {}: {error}", options.host))
        })?;
        let lost = |error: RendezvousError| unavailable(error.to_string());
        if rank == 0 {
            let fresh = random::<32>().map_err(|e| unavailable(format!("/dev/urandom: {e}")))?;
            rendezvous.put("nccl/secret", &fresh).map_err(lost)?;
        }
        let host = &options.host;
        let published = match host.contains(':') {
            true => format!("[{host}]:{}", address.port()),
            false => format!("{host}:{}", address.port()),
        };
        let key = format!("nccl/address/{rank}");
        rendezvous.put(&key, published.as_bytes()).map_err(lost)?;
        let found = gather(rendezvous, size, options.start_timeout)?;
        let (secret, addresses) = found;
        let listening = Arc::new(Listening {
            rank,
            size,
            secret,
            inbox,
            closed: AtomicBool::new(false),
            incoming: Mutex::default(),
            address,
        });
        let accepting = listening.clone();
        start(format!("links {rank}"), move || accepting.accept(listener))
            .map_err(|e| unavailable(format!("no thread can be started ({e})")))?;
        let ends = Arc::new(Ends { rank, addresses, secret });
        Ok(Links { ends, outgoing: HashMap::new(), writing: bounded(0), listening })
    }

    /// Sends a frame to world rank `to`. Returns at once; where the rank cannot be reached, or does
    /// not read for a while, the inbox hears of it.
    pub(super) fn send(&mut self, to: usize, frame: &Frame) {
        let body = frame.encode();
        let mut bytes = (body.len() as u32).to_le_bytes().to_vec();
        bytes.extend(body);
        let link = self.outgoing.entry(to).or_insert_with(|| {
            let (link, frames) = unbounded();
            let (ends, inbox) = (self.ends.clone(), self.listening.inbox.clone());
            let writing = self.writing.0.clone();
            let body = move || {
                if let Err(error) = ends.write(to, &frames) {
                    let _ = inbox.send(Command::Engine(News::Unreachable(to, error.to_string())));
                }
                drop(writing);
            };
            if let Err(error) = start(format!("to rank {to}"), body) {
                let why = format!("no thread can be started ({error})");
                let _ = self.listening.inbox.send(Command::Engine(News::Unreachable(to, why)));
            }
            link
        });
        // Where the thread has ended, the inbox has been told why.
        let _ = link.send(bytes);
    }

    /// World ranks that this one talks to or hears.
    pub(super) fn known(&self) -> Vec<usize> {
        let mut ranks: Vec<usize> = self.outgoing.keys().copied().collect();
        ranks.extend(self.listening.incoming.lock().keys());
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }
}

impl Ends {
    /// Opens a connection and writes what comes, until nothing can come any more.
    fn write(&self, to: usize, frames: &Receiver<Vec<u8>>) -> io::Result<()> {
        let mut stream = self.connect(to)?;
        frames.iter().try_for_each(|bytes| stream.write_all(&bytes))
    }

    fn connect(&self, to: usize) -> io::Result<TcpStream> {
        let mut stream = reach(&self.addresses[to])?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(HANDSHAKE_TIME))?;
        stream.set_write_timeout(Some(WRITE_TIME))?;
        let theirs: Nonce = read(&mut stream)?;
        let mine: Nonce = random()?;
        let mut hello = MAGIC.to_vec();
        hello.extend((self.rank as u32).to_le_bytes());
        hello.extend(mine);
        hello.extend(proof(&self.secret, b"caller", (&theirs, &mine), (self.rank, to)).as_bytes());
        stream.write_all(&hello)?;
        let answer: [u8; 32] = read(&mut stream)?;
        // The comparison of hashes takes the same time wherever they differ.
        if proof(&self.secret, b"called", (&theirs, &mine), (self.rank, to)) != answer {
            return Err(io::Error::other("who listens there is not of this job"));
        }
        Ok(stream)
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        self.listening.closed.store(true, Ordering::Release);
        // The last words are on their way: a process must not end before they have left.
        self.outgoing.clear();
        drop(std::mem::replace(&mut self.writing.0, bounded(0).0));
        let _ = self.writing.1.recv_timeout(LAST_WORDS_TIME);
        // Wakes the thread that accepts.
        let mut own = self.listening.address;
        if own.ip().is_unspecified() {
            let v4 = own.is_ipv4();
            own.set_ip(if v4 { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() });
        }
        let _ = TcpStream::connect_timeout(&own, HANDSHAKE_TIME);
        for stream in self.listening.incoming.lock().values() {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

impl Listening {
    fn accept(self: Arc<Self>, listener: TcpListener) {
        loop {
            let accepted = listener.accept();
            if self.closed.load(Ordering::Acquire) {
                return;
            }
            let Ok((stream, _)) = accepted else {
                // Too many open files, say: a moment later there may be fewer.
                std::thread::sleep(Duration::from_millis(50));
                continue;
            };
            let own = self.clone();
            // A system without threads left fails elsewhere, with a better message.
            let _ = start(format!("link to {}", self.rank), move || own.serve(stream));
        }
    }

    /// Reads one connection to its end.
    fn serve(&self, mut stream: TcpStream) {
        let Ok(from) = self.admit(&mut stream) else { return };
        let told = self.read_frames(from, &mut stream);
        self.incoming.lock().remove(&from);
        if !self.closed.load(Ordering::Acquire) {
            let why = told.err().map_or("it closed the connection".into(), |e| e.to_string());
            let _ = self.inbox.send(Command::Engine(News::Lost(from, why)));
        }
    }

    /// Lets a rank of this job in, once.
    fn admit(&self, stream: &mut TcpStream) -> io::Result<usize> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(HANDSHAKE_TIME))?;
        stream.set_write_timeout(Some(HANDSHAKE_TIME))?;
        let mine: Nonce = random()?;
        stream.write_all(&mine)?;
        let magic: [u8; 8] = read(stream)?;
        let from = u32::from_le_bytes(read(stream)?) as usize;
        let theirs: Nonce = read(stream)?;
        let told: [u8; 32] = read(stream)?;
        let ends = (from, self.rank);
        let known = proof(&self.secret, b"caller", (&mine, &theirs), ends) == told;
        if &magic != MAGIC || !known || from >= self.size {
            return Err(io::Error::other("not of this job"));
        }
        let copy = stream.try_clone()?;
        match self.incoming.lock().entry(from) {
            Entry::Occupied(_) => return Err(io::Error::other("a second connection of one rank")),
            Entry::Vacant(place) => place.insert(copy),
        };
        stream.write_all(proof(&self.secret, b"called", (&mine, &theirs), ends).as_bytes())?;
        stream.set_read_timeout(None)?;
        Ok(from)
    }

    fn read_frames(&self, from: usize, stream: &mut TcpStream) -> io::Result<()> {
        loop {
            let mut len = [0; 4];
            match stream.read_exact(&mut len) {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
                Err(e) => return Err(e),
            }
            let len = u32::from_le_bytes(len) as usize;
            if len > FRAME_MAX {
                return Err(io::Error::other(format!("it sent a frame of {len} bytes")));
            }
            let mut body = vec![0; len];
            stream.read_exact(&mut body)?;
            let frame = Frame::decode(&body).ok_or_else(|| io::Error::other("it sent nonsense"))?;
            if self.inbox.send(Command::Engine(News::Frame(from, frame))).is_err() {
                return Ok(());
            }
        }
    }
}

/// A connection to the first address of a host that takes it.
fn reach(address: &str) -> io::Result<TcpStream> {
    let mut last = io::Error::other(format!("{address} stands for no address"));
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, HANDSHAKE_TIME) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// The secret and where every rank listens.
fn gather(
    rendezvous: &dyn Rendezvous,
    size: usize,
    timeout: Duration,
) -> Result<(Secret, Vec<String>), CommError> {
    let deadline = Instant::now() + timeout;
    let get = |key: &str| rendezvous.get(key, deadline.saturating_duration_since(Instant::now()));
    let mut addresses = Vec::new();
    let mut missing = Vec::new();
    for rank in 0..size {
        match get(&format!("nccl/address/{rank}")) {
            Ok(bytes) => addresses.push(String::from_utf8_lossy(&bytes).into_owned()),
            Err(RendezvousError::Timeout { .. }) => missing.push(rank),
            Err(error) => return Err(unavailable(error.to_string())),
        }
    }
    if !missing.is_empty() {
        let s = timeout.as_secs_f64();
        return Err(unavailable(format!("ranks {missing:?} were not there after {s} s")));
    }
    let secret = get("nccl/secret").map_err(|error| unavailable(error.to_string()))?;
    let secret = Secret::try_from(secret)
        .map_err(|other| unavailable(format!("nccl/secret has {} bytes, not 32", other.len())))?;
    Ok((secret, addresses))
}

/// What only who knows the secret can say about these numbers and these ends of a connection.
fn proof(
    secret: &Secret,
    role: &[u8; 6],
    (listener, caller): (&Nonce, &Nonce),
    (from, to): (usize, usize),
) -> blake3::Hash {
    let mut said = role.to_vec();
    said.extend(listener);
    said.extend(caller);
    said.extend((from as u32).to_le_bytes());
    said.extend((to as u32).to_le_bytes());
    blake3::keyed_hash(secret, &said)
}

fn read<const N: usize>(stream: &mut TcpStream) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Starts a thread with a small stack: there may be one for every rank.
fn start(name: String, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new().name(name).stack_size(256 << 10).spawn(body).map(drop)
}

/// Where other machines reach this one on their way to `peer`; loopback if that is this machine.
///
/// # Errors
/// The system's words where no way leads there.
pub fn address_towards(peer: SocketAddr) -> io::Result<IpAddr> {
    let any: IpAddr = match peer {
        SocketAddr::V4(_) => [0; 4].into(),
        SocketAddr::V6(_) => [0; 16].into(),
    };
    // A datagram socket sends nothing when it connects; it only looks up the way.
    let socket = std::net::UdpSocket::bind((any, 0))?;
    socket.connect(peer)?;
    Ok(socket.local_addr()?.ip())
}

fn unavailable(reason: String) -> CommError {
    CommError::Unavailable { engine: "nccl".into(), reason }
}
