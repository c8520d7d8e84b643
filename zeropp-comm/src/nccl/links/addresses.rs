//! Where the ranks listen, and the secret of their connections.
//!
//! Rank 0 reads every rank's address and sets all of them as one value, so that all ranks together
//! read as many values as there are ranks, and a rank other than rank 0 one.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Secret, unavailable};
use crate::CommError;
use crate::patience::Deadline;
use crate::rendezvous::{Rendezvous, RendezvousError};

const ROLL: &str = "nccl/ranks";
/// How long the others wait beyond rank 0's patience for its word.
const NEWS_TIME: Duration = Duration::from_secs(1);

/// The addresses and the salt that rank 0 sends to all others.
#[derive(Serialize, Deserialize)]
struct Roll {
    /// Fresh for every run: from it and the rendezvous' key the secret is made.
    salt: [u8; 32],
    /// Where each rank listens: a host and a port.
    addresses: Vec<String>,
}

/// Announces where this rank listens, and waits until all others have; returns the secret of the
/// ranks and their addresses.
///
/// # Errors
/// `Unavailable`, naming the ranks that did not come in time or what the rendezvous said.
pub(super) fn exchange(
    rank: usize,
    size: usize,
    own: &str,
    rendezvous: &dyn Rendezvous,
    timeout: Duration,
) -> Result<(Secret, Vec<String>), CommError> {
    let deadline = Deadline::after(timeout);
    let failed = |error: RendezvousError| match error {
        RendezvousError::Timeout { .. } => {
            let there = |rank: &usize| rendezvous.get(&address_of(*rank), Duration::ZERO).is_ok();
            let missing: Vec<usize> = (0..size).filter(|rank| !there(rank)).collect();
            let s = timeout.as_secs_f64();
            unavailable(format!("ranks {missing:?} did not arrive within {s} s"))
        }
        error => unavailable(error.to_string()),
    };
    rendezvous.put(&address_of(rank), own.as_bytes()).map_err(failed)?;
    let roll = match rank {
        0 => {
            let roll = call(size, rendezvous, deadline).map_err(failed)?;
            let mut salt = [0; 32];
            getrandom::fill(&mut salt)
                .map_err(|e| unavailable(format!("the system gives no random numbers ({e})")))?;
            let roll = Roll { salt, addresses: roll };
            let bytes = serde_json::to_vec(&roll).expect("text and numbers");
            rendezvous.put(ROLL, &bytes).map_err(failed)?;
            roll
        }
        _ => {
            let left = deadline.left() + NEWS_TIME;
            let bytes = rendezvous.get(ROLL, left).map_err(failed)?;
            let read = serde_json::from_slice(&bytes).ok();
            read.filter(|roll: &Roll| roll.addresses.len() == size).ok_or_else(|| {
                unavailable(format!("{ROLL} is not for {size} ranks; do all run the same program?"))
            })?
        }
    };
    let secret = blake3::keyed_hash(&rendezvous.key(), &roll.salt);
    Ok((*secret.as_bytes(), roll.addresses))
}

/// All addresses, as they come.
fn call(
    size: usize,
    rendezvous: &dyn Rendezvous,
    deadline: Deadline,
) -> Result<Vec<String>, RendezvousError> {
    let address = |rank| {
        let left = deadline.left();
        let bytes = rendezvous.get(&address_of(rank), left)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    (0..size).map(address).collect()
}

fn address_of(rank: usize) -> String {
    format!("nccl/address/{rank}")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::rendezvous::Local;

    /// A rendezvous that counts what is read, and keeps what is set.
    struct Counted {
        inner: Local,
        reads: AtomicUsize,
        received: parking_lot::Mutex<Vec<Vec<u8>>>,
    }

    impl Rendezvous for Counted {
        fn put(&self, key: &str, value: &[u8]) -> Result<(), RendezvousError> {
            self.received.lock().push(value.to_vec());
            self.inner.put(key, value)
        }
        fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, RendezvousError> {
            self.reads.fetch_add(1, Ordering::Relaxed);
            self.inner.get(key, timeout)
        }
        fn key(&self) -> [u8; 32] {
            self.inner.key()
        }
    }

    #[test]
    fn all_ranks_together_read_two_values_a_rank_and_the_secret_does_not_travel() {
        let size = 64;
        let inner = Local::default();
        let met = Counted { inner, reads: AtomicUsize::new(0), received: Default::default() };
        let one = |rank| {
            exchange(rank, size, &format!("h:{rank}"), &met, Duration::from_secs(30)).unwrap()
        };
        let all: Vec<_> = std::thread::scope(|scope| {
            let one = &one;
            let ranks: Vec<_> = (0..size).map(|rank| scope.spawn(move || one(rank))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert!(met.reads.load(Ordering::Relaxed) < 2 * size, "{:?}", met.reads);
        assert!(all.iter().all(|got| *got == all[0]));
        assert_eq!(all[0].1[size - 1], "h:63");
        let (secret, received) = (all[0].0, met.received.lock());
        assert!(received.iter().all(|value| !value.windows(32).any(|w| w == secret)));
        // All processes receive the salt; without the key it is worth nothing.
        let roll = received.iter().find_map(|value| serde_json::from_slice::<Roll>(value).ok());
        assert_ne!(*blake3::keyed_hash(&[0; 32], &roll.unwrap().salt).as_bytes(), secret);
    }
}
