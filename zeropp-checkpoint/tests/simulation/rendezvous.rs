//! The board of names and losses that every process of a real job has, from its own sources:
//! their crate needs Burn, and they do not.

#[allow(dead_code)]
#[path = "../../../zeropp-comm/src/rendezvous/board.rs"]
mod board;
#[allow(dead_code, unreachable_pub)]
#[path = "../../../zeropp-comm/src/rendezvous/error.rs"]
mod error;

use error::RendezvousError;

/// The failures that a process has received.
#[derive(Default)]
pub(crate) struct Received(board::Board);

impl Received {
    pub(crate) fn receive(&self, ranks: String, how: &str) {
        let (host, how) = ("node".into(), how.into());
        self.0.end(RendezvousError::Lost { ranks, host, how });
    }

    pub(crate) fn first(&self) -> Option<String> {
        self.0.over().map(|error| error.to_string())
    }
}
