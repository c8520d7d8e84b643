//! The rendezvous of ranks that are threads of one process.

use std::time::Duration;

use super::board::Board;
use super::{Rendezvous, RendezvousError};

/// Names and values in this process's memory.
pub struct Local {
    board: Board,
    key: [u8; 32],
}

impl Default for Local {
    /// Nothing under any name, and a key that no other process has.
    ///
    /// # Panics
    /// Panics where the system gives no random numbers.
    fn default() -> Self {
        let mut key = [0; 32];
        getrandom::fill(&mut key).expect("the system gives random numbers");
        Self { board: Board::default(), key }
    }
}

impl Rendezvous for Local {
    fn put(&self, key: &str, value: &[u8]) -> Result<(), RendezvousError> {
        self.board.put(key, value).map(drop)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, RendezvousError> {
        self.board.get(key, timeout)
    }

    fn key(&self) -> [u8; 32] {
        self.key
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_value_is_waited_for_and_set_once() {
        let there = Arc::new(Local::default());
        let here = there.clone();
        let reader = std::thread::spawn(move || here.get("id", Duration::from_secs(10)));
        there.put("id", b"abc").unwrap();
        there.put("id", b"abc").unwrap();
        assert_eq!(reader.join().unwrap().unwrap(), b"abc");
        assert_eq!(there.put("id", b"x"), Err(RendezvousError::Taken { key: "id".into() }));
        let nothing = there.get("other", Duration::ZERO);
        assert_eq!(nothing, Err(RendezvousError::Timeout { key: "other".into(), after_s: 0 }));
    }
}
