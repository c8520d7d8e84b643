//! Small values under names, which the processes of a job exchange before they have an engine, and
//! beside it: NCCL's unique ids, and reports that a rank has failed.
//!
//! [`open`] brings all processes of a job together. Where there are several and no MPI, the process
//! of rank 0 keeps the values and the others reach it [over TCP](tcp).

mod address;
mod board;
mod error;
mod local;
mod meet;
mod member;
pub mod tcp;
mod token;
mod waiting;

use std::time::Duration;

pub use address::Address;
pub use error::RendezvousError;
pub(crate) use error::ranks_in_words;
pub use local::Local;
pub use meet::{RendezvousOptions, open};
pub use member::{Member, members};
pub use token::{TOKEN_VARIABLE, Token};
pub use waiting::Waiting;

/// Names and values that all processes of a job see. A name is set once.
pub trait Rendezvous: Send + Sync {
    /// Sets `key`; setting it to the same value again changes nothing.
    ///
    /// # Errors
    /// `Taken` where it has another value; `TooMuch`; `Unavailable`.
    fn put(&self, key: &str, value: &[u8]) -> Result<(), RendezvousError>;

    /// The value of `key`, waited for. A `timeout` of zero only looks; after the first look it
    /// sends nothing, since a value comes by itself once it is set.
    ///
    /// # Errors
    /// `Timeout` where no process sets it in time; at once, however long the timeout, `Lost` where
    /// a process of the job is gone, or `Unavailable`.
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, RendezvousError>;

    /// A key that only the processes of the job can have. It comes from what they knew before they
    /// met, and never travels: what is derived from it and from values here need not travel either.
    fn key(&self) -> [u8; 32];
}
