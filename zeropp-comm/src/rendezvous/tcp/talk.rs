//! A conversation of two processes of which neither has rank 0, as two supervisors are: each proves
//! to the other that it knows the token, as at the rendezvous, and every frame carries a tag.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use super::super::{Address, RendezvousError, Token, Waiting};
use super::client::dial;
use super::{HANDSHAKE_TIME, TcpOptions, listen};
use crate::handshake::{self, HandshakeError, Keys};
use crate::sealed::{Opener, Sealer};

/// What such a connection is for, as its handshake has it.
const TALK: &str = "talk";
/// Longest body of a frame.
pub const PIECE_BYTES: usize = 1 << 20;

/// Where others are listened to.
#[derive(Debug)]
pub struct TalkListener {
    listener: TcpListener,
    token: Option<Token>,
}

/// One conversation.
pub struct Talk {
    stream: TcpStream,
    out: Sealer,
    opener: Opener,
    buffer: Vec<u8>,
}

impl TalkListener {
    /// Takes the port. Without a token the address has to be this machine's own.
    ///
    /// # Errors
    /// `Unavailable`: it cannot be served, or needs a token.
    pub fn open(address: &Address, token: Option<&Token>) -> Result<TalkListener, RendezvousError> {
        let listener = listen(&options(address, token))?;
        Ok(TalkListener { listener, token: token.cloned() })
    }

    /// The next caller at the door.
    ///
    /// # Errors
    /// The system's.
    pub fn accept(&self) -> io::Result<TcpStream> {
        Ok(self.listener.accept()?.0)
    }

    /// Lets it in, if it knows the token. Nothing may take longer than `patience` to come or go.
    ///
    /// # Errors
    /// It does not, or is too slow, in words.
    pub fn let_in(&self, stream: TcpStream, patience: Duration) -> io::Result<Talk> {
        let key = key(self.token.as_ref());
        let caller = handshake::receive(&stream, &key, TALK, HANDSHAKE_TIME);
        let keys = caller.and_then(|caller| caller.welcome(&[]));
        let Keys { to_listener, to_caller } = keys.map_err(io::Error::other)?;
        Talk::over(stream, to_caller, to_listener, patience)
    }
}

impl Talk {
    /// Calls the one who listens at `address`, who has to know the token as well.
    ///
    /// # Errors
    /// `Unavailable`: it is not there, or needs a token; `Refused`: it has another token, or is no
    /// zeropp.
    pub fn begin(
        address: &Address,
        token: Option<&Token>,
        patience: Duration,
    ) -> Result<Talk, RendezvousError> {
        let place = address.to_string();
        let unavailable = |reason: String| {
            let place = address.to_string();
            RendezvousError::Unavailable { place, reason }
        };
        let stream = dial(&options(address, token))?.map_err(unavailable)?;
        let key = key(token);
        let greeted = handshake::call(&stream, &key, TALK, Vec::new(), HANDSHAKE_TIME);
        let refused = |e: HandshakeError| RendezvousError::Refused { place, reason: e.to_string() };
        let (Keys { to_listener, to_caller }, _) = greeted.map_err(refused)?;
        Talk::over(stream, to_listener, to_caller, patience).map_err(|e| unavailable(e.to_string()))
    }

    fn over(
        stream: TcpStream,
        seal: [u8; 32],
        open: [u8; 32],
        patience: Duration,
    ) -> io::Result<Talk> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(patience))?;
        stream.set_write_timeout(Some(patience))?;
        Ok(Talk {
            stream,
            out: Sealer::new(seal, PIECE_BYTES),
            opener: Opener::new(open, PIECE_BYTES),
            buffer: vec![0; 64 << 10],
        })
    }

    /// Sends a frame of at most [`PIECE_BYTES`].
    ///
    /// # Errors
    /// The connection's.
    pub fn send(&mut self, body: &[u8]) -> io::Result<()> {
        let frame = self.out.seal(body);
        self.stream.write_all(&frame)
    }

    /// The next frame.
    ///
    /// # Errors
    /// The connection's; of kind `InvalidData` where a frame is not what was sent.
    pub fn receive(&mut self) -> io::Result<Vec<u8>> {
        loop {
            let next = self.opener.next();
            if let Some(body) = next.map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))? {
                return Ok(body);
            }
            match self.stream.read(&mut self.buffer) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => self.opener.feed(&self.buffer[..n]),
                // The process was paused: the other side may have been, too.
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }
}

/// A key of their own, so that neither is taken for a process that comes to a rendezvous.
fn key(token: Option<&Token>) -> [u8; 32] {
    *blake3::keyed_hash(&Token::key(token), b"between supervisors").as_bytes()
}

fn options(address: &Address, token: Option<&Token>) -> TcpOptions {
    TcpOptions {
        address: address.clone(),
        token: token.cloned(),
        start_timeout: Duration::ZERO,
        silence: Duration::ZERO,
        waiting: Waiting::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{TOKEN, free};
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// The answer that a caller with one token gets from a door with another.
    fn called(of_door: Option<&str>, of_caller: Option<&str>) -> Result<Vec<u8>, String> {
        let [of_door, of_caller] = [of_door, of_caller].map(|t| t.map(|t| Token::new(t).unwrap()));
        let address = free("127.0.0.1");
        let door = TalkListener::open(&address, of_door.as_ref()).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut talk = door.let_in(door.accept().unwrap(), PATIENCE)?;
                let received = talk.receive()?;
                talk.send(&received.repeat(2))
            });
            let talk = Talk::begin(&address, of_caller.as_ref(), PATIENCE);
            let mut talk = talk.map_err(|e| e.to_string())?;
            talk.send(&vec![7; PIECE_BYTES / 2]).map_err(|e| e.to_string())?;
            talk.receive().map_err(|e| e.to_string())
        })
    }

    #[test]
    fn only_those_who_know_the_token_talk() {
        assert_eq!(called(Some(TOKEN), Some(TOKEN)), Ok(vec![7; PIECE_BYTES]));
        assert_eq!(called(None, None), Ok(vec![7; PIECE_BYTES]), "on one machine");
        for (door, caller) in [(Some(TOKEN), None), (Some(TOKEN), Some("another secret text"))] {
            let error = called(door, caller).unwrap_err();
            assert!(error.contains("its token differs"), "{error}");
        }
        let outside = "192.0.2.1:9".parse().unwrap();
        let error = TalkListener::open(&outside, None).unwrap_err().to_string();
        assert!(error.contains("there is no token"), "{error}");
    }
}
