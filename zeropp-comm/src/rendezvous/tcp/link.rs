//! One connection after its handshake: messages out from any thread, in on one.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use parking_lot::Mutex;

use super::BODY_BYTES_MAX;
use super::message::WireMessage;
use crate::patience::{Moment, SLICE};
use crate::sealed::{Opener, Sealer};

/// How long a write may take before the other side counts as stuck.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest pause between two signs of life.
const BEAT_MAX: Duration = Duration::from_secs(5);
const BEAT_MIN: Duration = Duration::from_millis(20);

/// A connection.
pub(super) struct Link {
    stream: TcpStream,
    out: Mutex<Sealer>,
    silence: Duration,
}

impl Link {
    /// Takes over `stream`. Once nothing came for `silence`, the other side counts as lost.
    pub(super) fn new(stream: TcpStream, seal: [u8; 32], silence: Duration) -> io::Result<Link> {
        stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
        Ok(Link { stream, out: Mutex::new(Sealer::new(seal, BODY_BYTES_MAX)), silence })
    }

    /// Sends a message; where that fails the connection is closed, since a part may be on its way.
    pub(super) fn send(&self, message: &WireMessage) -> io::Result<()> {
        let mut out = self.out.lock();
        let frame = out.seal(&message.encode());
        let sent = (&self.stream).write_all(&frame);
        if sent.is_err() {
            self.close();
        }
        sent
    }

    /// Ends both directions; a blocked reader is woken.
    pub(super) fn close(&self) {
        // It may be closed already.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Says that nothing more will be sent.
    pub(super) fn close_writing(&self) {
        // As above.
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Hands all messages to `take` until it says stop, and sends signs of life meanwhile. Returns
    /// why there are no more: `None` where `take` stopped it.
    pub(super) fn read_all(
        &self,
        open: [u8; 32],
        mut take: impl FnMut(WireMessage) -> bool,
    ) -> Option<String> {
        let mut opener = Opener::new(open, BODY_BYTES_MAX);
        let mut buffer = vec![0; 16 << 10];
        let beat = (self.silence / 4).clamp(BEAT_MIN, BEAT_MAX);
        let (mut received, mut said) = (Moment::now(), Moment::now());
        if let Err(e) = self.stream.set_read_timeout(Some(beat.min(SLICE))) {
            return Some(format!("its connection cannot be used ({e})"));
        }
        loop {
            match (&self.stream).read(&mut buffer) {
                Ok(0) => return Some("its connection closed".into()),
                Ok(n) => {
                    received = Moment::now();
                    opener.feed(&buffer[..n]);
                }
                Err(e) if waiting(&e) => {}
                Err(e) => return Some(format!("its connection broke ({e})")),
            }
            loop {
                let message = match opener.next() {
                    Ok(None) => break,
                    Ok(Some(body)) => WireMessage::decode(&body).map_err(|e| e.to_string()),
                    Err(e) => Err(e.to_string()),
                };
                match message.map(&mut take) {
                    Ok(true) => {}
                    Ok(false) => return None,
                    Err(e) => return Some(format!("it sent {e}")),
                }
            }
            if received.elapsed() > self.silence {
                return Some(format!("nothing came from it for {:?}", self.silence));
            }
            if said.elapsed() >= beat {
                said = Moment::now();
                if self.send(&WireMessage::Beat).is_err() {
                    return Some("nothing can be sent to it".into());
                }
            }
        }
    }
}

fn waiting(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), Interrupted | TimedOut | WouldBlock)
}
