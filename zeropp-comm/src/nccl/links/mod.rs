//! Connections between ranks for the frames beside NCCL: one for each direction in which a rank
//! has something to say, opened when it first does.
//!
//! Both ends prove that they know a secret of the job, each over fresh numbers of the other, so
//! that neither a stranger nor a recording gets in (`door`). The secret comes from the job's token
//! and never travels. Every frame is numbered and carries a tag that only a holder of the secret
//! can make: one that was changed, repeated, left out or reordered ends the connection. A
//! connection that ends without a frame of leaving means that its rank is gone.

mod addresses;
mod door;
#[cfg(test)]
mod hostile;

use std::collections::HashMap;
use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};

use super::NcclOptions;
use super::engine::{Command, NcclEvent};
use super::wire::{FRAME_MAX, NcclFrame};
use crate::CommError;
use crate::handshake::Secret;
use crate::rendezvous::Rendezvous;
use crate::sealed::Sealer;
use door::LinkListener;

/// How long a connection may take to open and to prove itself, all together.
const HANDSHAKE_TIME: Duration = Duration::from_secs(5);
/// How long a frame may take to leave: only a rank that has stopped reading lets it wait.
const WRITE_TIME: Duration = Duration::from_secs(5);
/// How long the last frames get to leave.
const LAST_WORDS_TIME: Duration = Duration::from_secs(2);

/// This rank's connections.
pub(super) struct Connections {
    ends: Arc<DialOptions>,
    /// Frames for the thread that writes to a world rank.
    outgoing: HashMap<usize, Sender<Vec<u8>>>,
    /// Nothing comes here; it ends with the last thread that writes.
    writing: (Sender<()>, Receiver<()>),
    door: Arc<LinkListener>,
}

/// The rank, addresses and secret that opening a connection takes.
struct DialOptions {
    rank: usize,
    /// Where each world rank listens: a host and a port.
    addresses: Vec<String>,
    secret: Secret,
}

impl Connections {
    /// Publishes where this rank listens, and waits until all others have.
    ///
    /// # Errors
    /// `Unavailable`, naming the ranks that did not come in time or what the rendezvous said.
    pub(super) fn open(
        options: &NcclOptions,
        rank: usize,
        size: usize,
        rendezvous: &dyn Rendezvous,
        inbox: Sender<Command>,
    ) -> Result<Connections, CommError> {
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
        let host = &options.host;
        let published = match host.contains(':') {
            true => format!("[{host}]:{}", address.port()),
            false => format!("{host}:{}", address.port()),
        };
        let (secret, addresses) =
            addresses::exchange(rank, size, &published, rendezvous, options.start_timeout)?;
        let door = Arc::new(LinkListener::new(rank, size, secret, inbox, address));
        let accepting = door.clone();
        start(format!("links {rank}"), move || accepting.accept(&listener))
            .map_err(|e| unavailable(format!("no thread can be started ({e})")))?;
        let ends = Arc::new(DialOptions { rank, addresses, secret });
        Ok(Connections { ends, outgoing: HashMap::new(), writing: bounded(0), door })
    }

    /// Sends a frame to world rank `to`. Returns at once; where the rank cannot be reached, or does
    /// not read for a while, the inbox is notified.
    pub(super) fn send(&mut self, to: usize, frame: &NcclFrame) {
        let link = self.outgoing.entry(to).or_insert_with(|| {
            let (link, frames) = unbounded();
            let (ends, inbox) = (self.ends.clone(), self.door.inbox.clone());
            let writing = self.writing.0.clone();
            let body = move || {
                if let Err(error) = ends.write(to, &frames) {
                    let _ =
                        inbox.send(Command::Engine(NcclEvent::Unreachable(to, error.to_string())));
                }
                drop(writing);
            };
            if let Err(error) = start(format!("to rank {to}"), body) {
                let why = format!("no thread can be started ({error})");
                let _ = self.door.inbox.send(Command::Engine(NcclEvent::Unreachable(to, why)));
            }
            link
        });
        // Where the thread has ended, the inbox has the reason.
        let _ = link.send(frame.encode());
    }

    /// World ranks that this one sends to or receives from.
    pub(super) fn known(&self) -> Vec<usize> {
        let mut ranks: Vec<usize> = self.outgoing.keys().copied().collect();
        ranks.extend(self.door.incoming.lock().keys());
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }
}

impl DialOptions {
    /// Opens a connection and writes what comes, until nothing can come any more.
    fn write(&self, to: usize, frames: &Receiver<Vec<u8>>) -> io::Result<()> {
        let (mut stream, key) = door::enter(&self.addresses[to], &self.secret, self.rank, to)?;
        stream.set_write_timeout(Some(WRITE_TIME))?;
        let mut sealer = Sealer::new(key, FRAME_MAX);
        frames.iter().try_for_each(|body| stream.write_all(&sealer.seal(&body)))
    }
}

impl Drop for Connections {
    fn drop(&mut self) {
        self.door.closed.store(true, Ordering::Release);
        // The last words are on their way: a process must not end before they have left.
        self.outgoing.clear();
        drop(std::mem::replace(&mut self.writing.0, bounded(0).0));
        let _ = self.writing.1.recv_timeout(LAST_WORDS_TIME);
        // Wakes the thread that accepts.
        let mut own = self.door.address;
        if own.ip().is_unspecified() {
            let v4 = own.is_ipv4();
            own.set_ip(if v4 { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() });
        }
        let _ = TcpStream::connect_timeout(&own, HANDSHAKE_TIME);
        for stream in self.door.incoming.lock().values() {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
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
