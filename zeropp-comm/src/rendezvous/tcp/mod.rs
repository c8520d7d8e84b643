//! The rendezvous of processes that no MPI joins: values in the process of rank 0, which the others
//! reach over TCP.
//!
//! It serves this machine alone unless the processes share a [`Token`]; then both sides prove to
//! each other that they know it, and every frame carries a tag made with a key that only they can
//! have. Values are not encrypted. A name is set once, so a client keeps the values that it
//! received, and the host sends a value to each client that has asked for it as soon as it is set:
//! no client polls. Both sides send signs of life; a process that breaks off, or is silent for as
//! long as an operation may take, ends the waiting of all others with `Lost`.
//!
//! Names, values, frames, connections and the time to get in have limits, and a refused client gets
//! the reason.

mod client;
mod link;
mod message;
mod server;
mod talk;

#[cfg(test)]
mod hostile;
#[cfg(test)]
mod tests;

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

pub use talk::{PIECE_BYTES, Talk, TalkListener};

use super::board::{KEY_BYTES_MAX, VALUE_BYTES_MAX};
use super::{Address, Member, Rendezvous, RendezvousError, Token, Waiting};

/// Longest body of a frame: a name and a value, with their lengths.
const BODY_BYTES_MAX: usize = KEY_BYTES_MAX + VALUE_BYTES_MAX + 64;
/// What connections to the store are for, as their handshake has it.
const STORE: &str = "rendezvous";
/// Largest time left that is believed, in milliseconds: about a year.
const LEFT_MS_MAX: u64 = 1 << 35;
/// How long a handshake may take.
const HANDSHAKE_TIME: Duration = Duration::from_secs(5);
/// Threads here hold a frame's worth of bytes on the heap and little on the stack.
const STACK_BYTES: usize = 256 << 10;

/// Where and how to meet.
#[derive(Clone, Debug)]
pub struct TcpOptions {
    /// Where rank 0 is.
    pub address: Address,
    /// The job's secret. Without one the address has to be this machine's own (loopback).
    pub token: Option<Token>,
    /// How long all ranks together may take to come.
    pub start_timeout: Duration,
    /// How long a process may be silent before it counts as lost.
    pub silence: Duration,
    /// Receives, on rank 0, lines about the processes that are still missing.
    pub waiting: Waiting,
}

/// Joins the job, and returns once all its ranks are there. Rank 0's process serves the others.
///
/// # Errors
/// `Refused` by rank 0, with its reason; `Missing` ranks, by number; `Unavailable` where the place
/// cannot be served or reached; `Lost` where a process comes and goes again.
pub fn open(options: &TcpOptions, me: &Member) -> Result<Arc<dyn Rendezvous>, RendezvousError> {
    if me.first_rank > 0 {
        return Ok(Arc::new(client::Client::open(options, me)?));
    }
    let listener = listen(options)?;
    Ok(Arc::new(server::Server::open(listener, options, me)?))
}

/// Takes the port. A number is served as it is, where this machine has it; a name may stand for
/// another address here than elsewhere (Debian's own name is 127.0.1.1), so for names all
/// addresses are served, which takes a token.
fn listen(options: &TcpOptions) -> Result<TcpListener, RendezvousError> {
    let port = options.address.port();
    let unavailable = |e: io::Error| {
        let reason = match e.kind() {
            io::ErrorKind::AddrInUse => format!(
                "port {port} is in use on this machine, perhaps by another job; choose another \
                 port for this one, or end that one"
            ),
            _ => format!("cannot be served ({e}); use an address of rank 0's machine"),
        };
        RendezvousError::Unavailable { place: options.address.to_string(), reason }
    };
    let addresses = match options.address.resolve() {
        Ok(addresses) => addresses,
        // Known to the others only, perhaps.
        Err(_) if options.token.is_some() => Vec::new(),
        Err(e) => return Err(unavailable(e)),
    };
    check_token(options, &addresses)?;
    if options.token.is_none() || options.address.is_plain() {
        match TcpListener::bind(&addresses[..]) {
            // A number that stands for this machine outside, as behind a router.
            Err(e) if e.kind() == io::ErrorKind::AddrNotAvailable && options.token.is_some() => {}
            result => return result.map_err(unavailable),
        }
    }
    let everywhere = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port));
    match everywhere {
        // No IPv6 here.
        Err(e) if e.kind() != io::ErrorKind::AddrInUse => {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).map_err(unavailable)
        }
        result => result.map_err(unavailable),
    }
}

/// Without a token nothing but loopback is served or trusted.
fn check_token(options: &TcpOptions, addresses: &[SocketAddr]) -> Result<(), RendezvousError> {
    let outside = addresses.iter().find(|a| !a.ip().to_canonical().is_loopback());
    match (outside, &options.token) {
        (Some(outside), None) => Err(RendezvousError::Unavailable {
            place: options.address.to_string(),
            reason: format!(
                "{} is beyond this machine, and there is no token; set ZEROPP_TOKEN or \
                 rendezvous:token-file on all nodes to the output of `openssl rand -hex 32`, or \
                 meet at 127.0.0.1",
                outside.ip()
            ),
        }),
        _ => Ok(()),
    }
}

/// The key that the job's processes have for other purposes than the rendezvous itself.
fn derived(key: &[u8; 32]) -> [u8; 32] {
    *blake3::keyed_hash(key, b"beside the rendezvous").as_bytes()
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    let thread = || std::thread::Builder::new().name(name.into()).stack_size(STACK_BYTES);
    zeropp_core::threads::start_as(thread, body)
}
