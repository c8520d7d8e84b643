//! How a connection begins: each side proves that it knows a secret of the job without saying it,
//! and the caller says who it is. The rendezvous and the links beside NCCL begin so.
//!
//! ```text
//! listener  magic, version, listener's nonce
//! caller    magic, version, caller's nonce, proof("caller"), length and text of its introduction
//! listener  kind of the answer, proof("welcome" or "refusal"), length and text of the answer
//! ```
//!
//! A proof is a hash, keyed by the secret, of its label, of what the connection is for and of
//! everything said so far, so none fits another handshake. The keys of the frames that follow come
//! from the same words. A caller that the listener does not believe gets one byte, without a proof.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::timed::Timed;

const MAGIC: [u8; 8] = *b"zeropp\r\n";
/// Of everything that is said, here and after.
pub(crate) const VERSION: u16 = 4;
/// Longest text that a side sends of itself, in bytes: an introduction is read before the proof.
const TEXT_BYTES_MAX: usize = 4096;
/// Longest reason of a refusal.
const REASON_BYTES_MAX: usize = 1024;

/// The secret of a job, or of something in it.
pub(crate) type Secret = [u8; 32];
type Nonce = [u8; 32];

/// Why a handshake ends without a connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HandshakeError {
    /// Nothing, too little or nonsense came.
    #[error("{0}")]
    Broken(String),
    /// The other side is gone.
    #[error("it hung up in the middle of the handshake")]
    HungUp,
    /// Something else than zeropp.
    #[error("what answers there is not zeropp")]
    Foreign,
    /// The other side has no, or another, token.
    #[error("its token differs")]
    Token,
    /// Another zeropp.
    #[error("it speaks version {0} of the handshake, this zeropp version {VERSION}")]
    Version(u16),
    /// The listener, which knows the token, does not want this caller.
    #[error("{0}")]
    Refused(String),
    /// The listener, which knows the token, does not want this caller now, but another may soon.
    #[error("{0}")]
    Later(String),
    /// The listener has too many callers at the door.
    #[error("too many connections are waiting to be let in")]
    Busy,
}

impl From<io::Error> for HandshakeError {
    fn from(error: io::Error) -> Self {
        use io::ErrorKind::{
            BrokenPipe, ConnectionAborted, ConnectionReset, TimedOut, UnexpectedEof, WouldBlock,
        };
        match error.kind() {
            UnexpectedEof | ConnectionReset | ConnectionAborted | BrokenPipe => Self::HungUp,
            TimedOut | WouldBlock => Self::Broken("it was too slow with the handshake".into()),
            _ => Self::Broken(format!("the connection broke ({error})")),
        }
    }
}

/// The keys of both directions.
pub(crate) struct Keys {
    pub(crate) to_listener: [u8; 32],
    pub(crate) to_caller: [u8; 32],
}

/// The answers to a caller, in the byte that comes first.
mod answer {
    pub(super) const WELCOME: u8 = 0;
    pub(super) const TOKEN: u8 = 1;
    pub(super) const VERSION: u8 = 2;
    pub(super) const REFUSED: u8 = 3;
    pub(super) const BUSY: u8 = 4;
    pub(super) const LATER: u8 = 5;
}

/// Takes a text that its length comes before.
fn read_text(wire: &mut Timed) -> Result<Vec<u8>, HandshakeError> {
    let length = u32::from_le_bytes(wire.array()?) as usize;
    if length > TEXT_BYTES_MAX {
        let problem = format!("it sent {length} bytes of at most {TEXT_BYTES_MAX}");
        return Err(HandshakeError::Broken(problem));
    }
    let mut text = vec![0; length];
    wire.read_exact(&mut text)?;
    Ok(text)
}

/// What both sides have said: the proofs are made of it.
struct Transcript<'a> {
    secret: &'a Secret,
    /// What the connection is for.
    purpose: &'static str,
    listener: Nonce,
    caller: Nonce,
    introduction: Vec<u8>,
}

impl Transcript<'_> {
    fn proof(&self, label: &str, answer: &[u8]) -> blake3::Hash {
        let said = [&self.listener[..], &self.caller, &self.introduction, answer];
        let mut hasher = blake3::Hasher::new_keyed(self.secret);
        for part in [label.as_bytes(), self.purpose.as_bytes()].into_iter().chain(said) {
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
        }
        hasher.finalize()
    }

    fn keys(&self) -> Keys {
        Keys {
            to_listener: *self.proof("frames to the listener", &[]).as_bytes(),
            to_caller: *self.proof("frames to the caller", &[]).as_bytes(),
        }
    }

    /// The caller's words.
    fn hello(&self) -> Vec<u8> {
        let mut hello = MAGIC.to_vec();
        hello.extend(VERSION.to_le_bytes());
        hello.extend(self.caller);
        hello.extend(self.proof("caller", &[]).as_bytes());
        hello.extend((self.introduction.len() as u32).to_le_bytes());
        hello.extend(&self.introduction);
        hello
    }

    /// The listener's answer to a caller that it believes.
    fn answer(&self, kind: u8, label: &str, text: &[u8]) -> Vec<u8> {
        let mut answer = vec![kind];
        answer.extend(self.proof(label, text).as_bytes());
        answer.extend((text.len() as u32).to_le_bytes());
        answer.extend(text);
        answer
    }
}

fn nonce() -> Result<Nonce, HandshakeError> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce)
        .map_err(|e| HandshakeError::Broken(format!("the system gives no random numbers ({e})")))?;
    Ok(nonce)
}

/// The caller's side: introduces itself and returns the text of the welcome.
///
/// # Errors
/// Whatever keeps the listener from letting it in, or proves that it is not the job's.
pub(crate) fn call(
    stream: &TcpStream,
    secret: &Secret,
    purpose: &'static str,
    introduction: Vec<u8>,
    patience: Duration,
) -> Result<(Keys, Vec<u8>), HandshakeError> {
    let mut wire = Timed::new(stream, patience);
    if wire.array::<8>()? != MAGIC {
        return Err(HandshakeError::Foreign);
    }
    let version = u16::from_le_bytes(wire.array()?);
    if version != VERSION {
        return Err(HandshakeError::Version(version));
    }
    let (listener, caller) = (wire.array()?, nonce()?);
    let said = Transcript { secret, purpose, listener, caller, introduction };
    wire.write_all(&said.hello())?;

    let [kind] = wire.array()?;
    let label = match kind {
        answer::WELCOME => "welcome",
        answer::REFUSED | answer::LATER => "refusal",
        answer::TOKEN => return Err(HandshakeError::Token),
        answer::VERSION => return Err(HandshakeError::Broken("it wants another version".into())),
        answer::BUSY => return Err(HandshakeError::Busy),
        _ => return Err(HandshakeError::Foreign),
    };
    let proof = wire.array::<32>()?;
    let text = read_text(&mut wire)?;
    // Hashes compare in constant time.
    if said.proof(label, &text) != proof {
        return Err(HandshakeError::Token);
    }
    let reason = || String::from_utf8_lossy(&text).into_owned();
    match kind {
        answer::REFUSED => Err(HandshakeError::Refused(reason())),
        answer::LATER => Err(HandshakeError::Later(reason())),
        _ => Ok((said.keys(), text)),
    }
}

/// A caller that has proven to know the secret and waits for its answer.
pub(crate) struct Caller<'a> {
    wire: Timed<'a>,
    said: Transcript<'a>,
}

/// The listener's side, up to the point where it knows who the caller is.
///
/// # Errors
/// A caller that is too slow, not zeropp, of another version, or without the secret. The last two
/// get a reason.
pub(crate) fn receive<'a>(
    stream: &'a TcpStream,
    secret: &'a Secret,
    purpose: &'static str,
    patience: Duration,
) -> Result<Caller<'a>, HandshakeError> {
    let mut wire = Timed::new(stream, patience);
    let listener = nonce()?;
    wire.write_all(&greeting(&listener))?;

    if wire.array::<8>()? != MAGIC {
        return Err(HandshakeError::Broken("it is not zeropp".into()));
    }
    let version = u16::from_le_bytes(wire.array()?);
    if version != VERSION {
        wire.write_all(&[answer::VERSION])?;
        return Err(HandshakeError::Version(version));
    }
    let caller = wire.array()?;
    let proof = wire.array::<32>()?;
    let introduction = read_text(&mut wire)?;
    let said = Transcript { secret, purpose, listener, caller, introduction };
    if said.proof("caller", &[]) != proof {
        wire.write_all(&[answer::TOKEN])?;
        return Err(HandshakeError::Token);
    }
    Ok(Caller { wire, said })
}

impl Caller<'_> {
    /// What it says of itself.
    pub(crate) fn introduction(&self) -> &[u8] {
        &self.said.introduction
    }

    /// Lets the caller in, with a `text` for it.
    pub(crate) fn welcome(mut self, text: &[u8]) -> Result<Keys, HandshakeError> {
        self.wire.write_all(&self.said.answer(answer::WELCOME, "welcome", text))?;
        Ok(self.said.keys())
    }

    /// Sends the caller away, for good or to come again later.
    pub(crate) fn refuse(mut self, why: &HandshakeError) -> Result<(), HandshakeError> {
        let kind = match why {
            HandshakeError::Later(_) => answer::LATER,
            _ => answer::REFUSED,
        };
        let mut reason = why.to_string();
        reason.truncate(reason.floor_char_boundary(REASON_BYTES_MAX));
        Ok(self.wire.write_all(&self.said.answer(kind, "refusal", reason.as_bytes()))?)
    }
}

fn greeting(nonce: &Nonce) -> Vec<u8> {
    [&MAGIC[..], &VERSION.to_le_bytes(), nonce].concat()
}

/// Refuses a caller for which there is no room, without waiting for it.
pub(crate) fn send_away(stream: &TcpStream) {
    let mut words = greeting(&[0; 32]);
    words.push(answer::BUSY);
    // The caller may be gone, which needs no answer.
    let _ = stream.set_write_timeout(Some(Duration::from_millis(100)));
    let _ = (&mut &*stream).write_all(&words);
}
