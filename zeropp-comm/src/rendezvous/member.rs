//! Who takes part in a job.

use serde::{Deserialize, Serialize};

use super::error::ranks_in_words;
use super::{Rendezvous, RendezvousError};
use crate::placement::one_name_each;

/// The name under which all members are, once all are here.
pub(super) const MEMBERS: &str = "zeropp/members";

/// One process of a job, as it introduces itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Member {
    /// Which job, so that two jobs that meet at one place notice.
    pub job: String,
    /// The layout that it is going to run, in words: `pp 2 x zero3 4 x dp 1`. The same for all.
    pub plan: String,
    /// Ranks of the job.
    pub world: usize,
    /// Its first world rank.
    pub first_rank: usize,
    /// How many it runs.
    pub ranks: usize,
    /// Its machine.
    pub host: String,
    /// Its number there.
    pub pid: u32,
}

impl Member {
    /// Its ranks in words.
    pub(super) fn ranks_in_words(&self) -> String {
        ranks_in_words(self.first_rank..self.first_rank + self.ranks)
    }
}

/// The members without what they all say, so that the list of a large job stays small.
#[derive(Serialize, Deserialize)]
struct Listed {
    job: String,
    plan: String,
    world: usize,
    members: Vec<(usize, usize, String, u32)>,
}

/// All processes of the job, in the order of their ranks.
///
/// # Errors
/// A timeout where they have not been agreed on, as in a [`Local`](super::Local) of one's own.
pub fn members(rendezvous: &dyn Rendezvous) -> Result<Vec<Member>, RendezvousError> {
    let text = rendezvous.get(MEMBERS, std::time::Duration::ZERO)?;
    let listed: Listed =
        serde_json::from_slice(&text).map_err(|e| RendezvousError::Unavailable {
            place: MEMBERS.into(),
            reason: format!("is not a list of members ({e}); use one build of zeropp everywhere"),
        })?;
    let Listed { job, plan, world, members } = listed;
    let hosts: Vec<String> = members.iter().map(|(.., host, _)| host.clone()).collect();
    let member = |((first_rank, ranks, _, pid), host)| {
        let (job, plan) = (job.clone(), plan.clone());
        Member { job, plan, world, first_rank, ranks, host, pid }
    };
    Ok(members.into_iter().zip(one_name_each(&hosts)).map(member).collect())
}

/// The list that [`members`] reads back. There is at least one.
pub(super) fn list(members: &[&Member]) -> Vec<u8> {
    let first = members.first().expect("rank 0 is always there");
    let listed = Listed {
        job: first.job.clone(),
        plan: first.plan.clone(),
        world: first.world,
        members: members.iter().map(|m| (m.first_rank, m.ranks, m.host.clone(), m.pid)).collect(),
    };
    serde_json::to_vec(&listed).expect("members are text and numbers")
}
