//! From settings and launcher to a rendezvous at which all ranks are.

use std::sync::Arc;
use std::time::Duration;

use super::member::{self, MEMBERS};
use super::{Address, Local, Member, Rendezvous, RendezvousError, Token, Waiting, tcp};

/// Where and how to meet.
#[derive(Clone, Debug)]
pub struct RendezvousOptions {
    /// Where rank 0 is. Not needed where one process has all ranks.
    pub address: Option<Address>,
    /// The job's secret.
    pub token: Option<Token>,
    /// How long all ranks together may take to come.
    pub start_timeout: Duration,
    /// How long a process may be silent before it counts as lost.
    pub silence: Duration,
    /// Receives, on rank 0, lines about the processes that are still missing.
    pub waiting: Waiting,
}

/// Brings `me` together with all others of its job: within this process where it has all ranks,
/// else [over TCP](tcp).
///
/// # Errors
/// Several processes without an address; as [`tcp::open`].
pub fn open(
    options: &RendezvousOptions,
    me: &Member,
) -> Result<Arc<dyn Rendezvous>, RendezvousError> {
    if me.ranks == me.world {
        let local = Local::default();
        local.put(MEMBERS, &member::list(&[me]))?;
        return Ok(Arc::new(local));
    }
    let Some(address) = options.address.clone() else {
        return Err(RendezvousError::Unavailable {
            place: "no address".into(),
            reason: format!(
                "this process has {} of {} ranks; name rank 0's machine with rendezvous",
                me.ranks, me.world
            ),
        });
    };
    let options = tcp::TcpOptions {
        address,
        token: options.token.clone(),
        start_timeout: options.start_timeout,
        silence: options.silence,
        waiting: options.waiting.clone(),
    };
    tcp::open(&options, me)
}
