//! The first words between a client and the host: each proves that it knows the job's token without
//! saying it, and the client says who it is.
//!
//! ```text
//! host   magic, version, host's nonce
//! client  magic, version, client's nonce, proof("client"), length and text of its Member
//! host   0, time left for all to come, proof("host")      or   why not, proof("refusal")
//! ```
//!
//! A proof is a keyed hash of its label and of everything said so far, so none fits another
//! handshake. The keys of the frames that follow come from the same words.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use super::super::Member;
use crate::timed::Timed;

const MAGIC: [u8; 8] = *b"zeropp\r\n";
/// Of everything that is said, here and after.
pub(super) const VERSION: u16 = 3;
const HELLO_BYTES_MAX: usize = 4096;
const REASON_BYTES_MAX: usize = 1024;
/// Largest time left that is believed, in milliseconds: about a year.
const LEFT_MS_MAX: u64 = 1 << 35;

/// How a handshake ends without a connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    /// Nothing, too little or nonsense came.
    #[error("{0}")]
    Broken(String),
    /// Something else than zeropp.
    #[error("what answers there is not zeropp")]
    Foreign,
    /// The other side has no, or another, token.
    #[error("its token differs")]
    Token,
    /// Another zeropp.
    #[error("it speaks version {0} of the rendezvous, this zeropp version {VERSION}")]
    Version(u16),
    /// The host, which knows the token, does not want this client.
    #[error("{0}")]
    Refused(String),
    /// The host, which knows the token, does not want this client now, but another may soon.
    #[error("{0}")]
    Later(String),
    /// The host has too many clients at the door.
    #[error("too many connections are waiting to be let in")]
    Busy,
}

impl From<io::Error> for HandshakeError {
    fn from(error: io::Error) -> Self {
        Self::Broken(match error.kind() {
            io::ErrorKind::UnexpectedEof => "it hung up in the middle of the handshake".into(),
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
                "it was too slow with the handshake".into()
            }
            _ => format!("the connection broke ({error})"),
        })
    }
}

/// The keys of both directions.
pub(super) struct Keys {
    pub(super) to_host: [u8; 32],
    pub(super) to_client: [u8; 32],
}

/// The answers to a client, in the byte that comes first.
mod answer {
    pub(super) const WELCOME: u8 = 0;
    pub(super) const TOKEN: u8 = 1;
    pub(super) const VERSION: u8 = 2;
    pub(super) const REFUSED: u8 = 3;
    pub(super) const BUSY: u8 = 4;
    pub(super) const LATER: u8 = 5;
}

/// Takes a text that its length comes before.
fn read_text(wire: &mut Timed, max: usize) -> Result<Vec<u8>, HandshakeError> {
    let length = u32::from_le_bytes(wire.array()?) as usize;
    if length > max {
        return Err(HandshakeError::Broken(format!("it sent {length} bytes of at most {max}")));
    }
    let mut text = vec![0; length];
    wire.read_exact(&mut text)?;
    Ok(text)
}

/// The words that both sides have sent, and the proofs over them.
struct Words<'a> {
    key: &'a [u8; 32],
    host_nonce: [u8; 32],
    client_nonce: [u8; 32],
}

impl Words<'_> {
    fn proof(&self, label: &str, more: &[&[u8]]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(self.key);
        for part in [label.as_bytes(), &self.host_nonce, &self.client_nonce].iter().chain(more) {
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
        }
        hasher.finalize()
    }

    fn keys(&self) -> Keys {
        Keys {
            to_host: *self.proof("frames to the host", &[]).as_bytes(),
            to_client: *self.proof("frames to the client", &[]).as_bytes(),
        }
    }
}

fn nonce() -> Result<[u8; 32], HandshakeError> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce)
        .map_err(|e| HandshakeError::Broken(format!("the system gives no random numbers ({e})")))?;
    Ok(nonce)
}

/// The client's side: introduces `member` and returns how long all others have left to come.
///
/// # Errors
/// Whatever keeps the host from letting it in, or proves that it is not the job's host.
pub(super) fn greet(
    stream: &TcpStream,
    key: &[u8; 32],
    member: &Member,
    patience: Duration,
) -> Result<(Keys, Duration), HandshakeError> {
    let mut wire = Timed::new(stream, patience);
    let magic = wire.array::<8>()?;
    if magic != MAGIC {
        return Err(HandshakeError::Foreign);
    }
    let version = u16::from_le_bytes(wire.array()?);
    if version != VERSION {
        return Err(HandshakeError::Version(version));
    }
    let words = Words { key, host_nonce: wire.array()?, client_nonce: nonce()? };
    let text = serde_json::to_vec(member).expect("a member is text and numbers");
    let mut hello = MAGIC.to_vec();
    hello.extend(VERSION.to_le_bytes());
    hello.extend(words.client_nonce);
    hello.extend(words.proof("client", &[&text]).as_bytes());
    hello.extend((text.len() as u32).to_le_bytes());
    hello.extend(&text);
    wire.write_all(&hello)?;

    match wire.array::<1>()? {
        [answer::WELCOME] => {}
        [answer::TOKEN] => return Err(HandshakeError::Token),
        [answer::VERSION] => return Err(HandshakeError::Broken("it wants another version".into())),
        [answer::BUSY] => return Err(HandshakeError::Busy),
        [kind @ (answer::REFUSED | answer::LATER)] => {
            let proof = wire.array::<32>()?;
            let reason = read_text(&mut wire, REASON_BYTES_MAX)?;
            if words.proof("refusal", &[&text, &reason]) != proof {
                return Err(HandshakeError::Token);
            }
            let reason = String::from_utf8_lossy(&reason).into_owned();
            return Err(match kind {
                answer::LATER => HandshakeError::Later(reason),
                _ => HandshakeError::Refused(reason),
            });
        }
        _ => return Err(HandshakeError::Foreign),
    }
    let left = wire.array::<8>()?;
    if words.proof("host", &[&text, &left]) != wire.array::<32>()? {
        return Err(HandshakeError::Token);
    }
    let left_ms = u64::from_le_bytes(left).min(LEFT_MS_MAX);
    Ok((words.keys(), Duration::from_millis(left_ms)))
}

/// A client that has proven to know the token and waits for its answer.
pub(super) struct Caller<'a> {
    pub(super) member: Member,
    wire: Timed<'a>,
    words: Words<'a>,
    text: Vec<u8>,
}

/// The host's side, up to the point where it knows who the client is.
///
/// # Errors
/// A client that is too slow, not zeropp, of another version, or without the token. The last two
/// get a reason.
pub(super) fn receive<'a>(
    stream: &'a TcpStream,
    key: &'a [u8; 32],
    patience: Duration,
) -> Result<Caller<'a>, HandshakeError> {
    let mut wire = Timed::new(stream, patience);
    let host_nonce = nonce()?;
    let mut greeting = MAGIC.to_vec();
    greeting.extend(VERSION.to_le_bytes());
    greeting.extend(host_nonce);
    wire.write_all(&greeting)?;

    if wire.array::<8>()? != MAGIC {
        return Err(HandshakeError::Broken("it is not zeropp".into()));
    }
    let version = u16::from_le_bytes(wire.array()?);
    if version != VERSION {
        wire.write_all(&[answer::VERSION])?;
        return Err(HandshakeError::Version(version));
    }
    let words = Words { key, host_nonce, client_nonce: wire.array()? };
    let proof = wire.array::<32>()?;
    let text = read_text(&mut wire, HELLO_BYTES_MAX)?;
    // Hashes compare in constant time.
    if words.proof("client", &[&text]) != proof {
        wire.write_all(&[answer::TOKEN])?;
        return Err(HandshakeError::Token);
    }
    let member = serde_json::from_slice(&text)
        .map_err(|e| HandshakeError::Broken(format!("its introduction cannot be read ({e})")))?;
    Ok(Caller { member, wire, words, text })
}

impl Caller<'_> {
    /// Lets the client in; all others have `left` to come.
    pub(super) fn welcome(mut self, left: Duration) -> Result<Keys, HandshakeError> {
        let left = u64::try_from(left.as_millis()).unwrap_or(LEFT_MS_MAX).to_le_bytes();
        let mut answer = vec![answer::WELCOME];
        answer.extend(left);
        answer.extend(self.words.proof("host", &[&self.text, &left]).as_bytes());
        self.wire.write_all(&answer)?;
        Ok(self.words.keys())
    }

    /// Sends the client away, for good or to come again later.
    pub(super) fn refuse(mut self, why: &HandshakeError) -> Result<(), HandshakeError> {
        let kind = match why {
            HandshakeError::Later(_) => answer::LATER,
            _ => answer::REFUSED,
        };
        let mut reason = why.to_string();
        reason.truncate(reason.floor_char_boundary(REASON_BYTES_MAX));
        let mut answer = vec![kind];
        answer.extend(self.words.proof("refusal", &[&self.text, reason.as_bytes()]).as_bytes());
        answer.extend((reason.len() as u32).to_le_bytes());
        answer.extend(reason.as_bytes());
        Ok(self.wire.write_all(&answer)?)
    }
}

/// Refuses a client for which there is no room, without waiting for it.
pub(super) fn send_away(stream: &TcpStream) {
    let mut words = MAGIC.to_vec();
    words.extend(VERSION.to_le_bytes());
    words.extend([0; 32]);
    words.push(answer::BUSY);
    // The caller may be gone, which needs no answer.
    let _ = stream.set_write_timeout(Some(Duration::from_millis(100)));
    let _ = (&mut &*stream).write_all(&words);
}
