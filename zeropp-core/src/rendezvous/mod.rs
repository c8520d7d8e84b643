//! What the processes of a job tell each other before they have an engine, and beside it: small
//! values under names. NCCL's unique ids and the word that a rank has failed go this way.

mod local;

use std::time::Duration;

pub use local::Local;

/// What goes wrong at a rendezvous.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RendezvousError {
    /// Nobody set a value in time.
    #[error("nothing under {key} after {after_s} s")]
    Timeout {
        /// The name that was asked for.
        key: String,
        /// Seconds waited, rounded.
        after_s: u64,
    },
    /// Two processes set different values.
    #[error("{key} is set already, to another value; is another job using this rendezvous?")]
    Taken {
        /// The name.
        key: String,
    },
    /// The others cannot be reached, or refuse this process.
    #[error("rendezvous at {place}: {reason}")]
    Unavailable {
        /// Address.
        place: String,
        /// What happened, and what would work.
        reason: String,
    },
}

/// Names and values that all processes of a job see. A name is set once.
pub trait Rendezvous: Send + Sync {
    /// Sets `key`; setting it to the same value again changes nothing.
    ///
    /// # Errors
    /// `Taken` where it has another value; `Unavailable`.
    fn put(&self, key: &str, value: &[u8]) -> Result<(), RendezvousError>;

    /// The value of `key`, waited for. A `timeout` of zero only looks.
    ///
    /// # Errors
    /// `Timeout` where nobody sets it in time; `Unavailable`.
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, RendezvousError>;
}
