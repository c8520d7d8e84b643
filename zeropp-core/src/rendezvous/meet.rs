//! From settings and launcher to a rendezvous at which all ranks are.

use std::sync::Arc;
use std::time::Duration;

use crate::config::{Config, ConfigError};
use crate::launch::{Job, host_name};

use super::member::{self, MEMBERS};
use super::{Address, Local, Member, Rendezvous, RendezvousError, TOKEN_VARIABLE, Token, tcp};

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
}

/// Why the processes of a job did not meet.
#[derive(Debug, thiserror::Error)]
pub enum MeetError {
    /// A setting that cannot be.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// What happened at the rendezvous.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
}

/// Brings all processes of `job` together, with the token and the timeouts of `config`. Returns
/// once all ranks are here; [`members`](super::members) then says who they are.
///
/// # Errors
/// A token that cannot be used; whatever [`open`] says.
pub fn meet(config: &Config, job: &Job) -> Result<Arc<dyn Rendezvous>, MeetError> {
    let variable = std::env::var(TOKEN_VARIABLE).ok();
    let options = RendezvousOptions {
        address: job.meeting.clone(),
        token: Token::find(config.token_file.as_deref(), variable)?,
        start_timeout: Duration::from_secs_f64(config.start_timeout_s),
        silence: Duration::from_secs_f64(config.timeout_s),
    };
    Ok(open(&options, &me(config, job))?)
}

/// How this process introduces itself to the others of `job`.
pub fn me(config: &Config, job: &Job) -> Member {
    Member {
        job: job.id.clone(),
        plan: config.mesh().to_string(),
        world: job.world,
        first_rank: job.first_rank,
        ranks: job.ranks,
        host: host_name(),
        pid: std::process::id(),
    }
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
    };
    tcp::open(&options, me)
}
