//! Which rank runs where, as the processes of a job agree on it: did the launcher start what was
//! meant?

use crate::config::{Config, ConfigError, EngineKind};
use zeropp_comm::launch::ProcessJob;
use zeropp_comm::mesh::Mesh;
use zeropp_comm::placement;
use zeropp_comm::rendezvous::{self, Member};

use crate::Error;

/// A job as it was started.
#[derive(Clone, Debug)]
pub struct Launched {
    /// Its mesh.
    pub mesh: Mesh,
    /// Its processes, in the order of their ranks.
    pub members: Vec<Member>,
    /// Which of them this process is.
    pub process: usize,
    /// Where the processes have their numbers from: `torchrun`, `the settings`.
    pub source: &'static str,
    /// Over what they met: `MPI`, an address, or `itself` where there is one process.
    pub place: String,
}

impl Launched {
    /// The process that runs `rank`.
    ///
    /// # Panics
    /// Panics where the mesh has no such rank.
    pub fn member(&self, rank: usize) -> &Member {
        let runs = |m: &&Member| (m.first_rank..m.first_rank + m.ranks).contains(&rank);
        self.members.iter().find(runs).expect("all ranks of the mesh are here")
    }

    /// The note where ranks that share weights are on several machines: which, where, and what
    /// would work.
    pub fn spread(&self) -> Option<String> {
        let hosts: Vec<_> = self.members.iter().map(|member| member.host.clone()).collect();
        placement::warning(&hosts, self.members[0].ranks, self.mesh)
    }
}

/// Brings the processes of the job together as a run would, and lets each tell where it is. Uses
/// the mesh, the engine and the settings of the launch; starts no rank. Over MPI a process can call
/// it once, and not train afterwards.
///
/// # Errors
/// Settings or an environment that do not fit together; ranks that do not come, by number.
pub fn launched(config: &Config) -> Result<Launched, Error> {
    config.validate_launch()?;
    let job = config.job()?;
    if config.engine == EngineKind::Mpi {
        return over_mpi(config, &job);
    }
    let met = config.meet(&job)?;
    let place = job.meeting.as_ref().map_or_else(|| "itself".into(), ToString::to_string);
    Ok(reported(config, &job, rendezvous::members(&*met)?, place))
}

fn reported(config: &Config, job: &ProcessJob, members: Vec<Member>, place: String) -> Launched {
    let (process, source) = (job.process, job.source);
    Launched { mesh: config.mesh(), members, process, source, place }
}

#[cfg(feature = "mpi")]
fn over_mpi(config: &Config, job: &ProcessJob) -> Result<Launched, Error> {
    use zeropp_comm::launch::Launch;
    use zeropp_comm::mpi::MpiWorld;

    let mut process = MpiWorld::start(crate::world::mpi::options(config, job.ranks), None)?;
    let launched = (process.launched_rank(), process.size());
    match Launch::from_env()? {
        Some(launch) => launch.check("MPI", launched.0, launched.1)?,
        None if launched.1 > 1 => {
            let problem = format!("MPI has {} processes, no launcher says so", launched.1);
            return Err(ConfigError::value("engine", "mpi", problem, "start with mpirun").into());
        }
        None => {}
    }
    // MPI numbers the processes anew where that keeps groups on a machine.
    let job = ProcessJob {
        process: process.rank(),
        first_rank: process.rank() * job.ranks,
        ..job.clone()
    };
    let me = serde_json::to_vec(&job.member(config.mesh())).expect("text and numbers");
    let all = process.communicator().exchange(me).wait()?;
    process.finish();
    let members = all.iter().map(|member| serde_json::from_slice(member));
    let members = members.collect::<Result<Vec<Member>, _>>().map_err(|e| {
        let problem = format!("what a process said of itself cannot be read ({e})");
        ConfigError::value("engine", "mpi", problem, "use the same build on all nodes")
    })?;
    let first = &members[0];
    if let Some(other) = members.iter().find(|m| (&m.plan, m.world) != (&first.plan, first.world)) {
        let (rank, plan) = (other.first_rank, &other.plan);
        let problem = format!("rank 0 was started for {}, rank {rank} for {plan}", first.plan);
        let help = "use the same settings on all nodes";
        return Err(ConfigError::value("engine", "mpi", problem, help).into());
    }
    Ok(reported(config, &job, members, "MPI".into()))
}

#[cfg(not(feature = "mpi"))]
fn over_mpi(_config: &Config, _job: &ProcessJob) -> Result<Launched, Error> {
    let (problem, help) = ("is not in this build", "build zeropp with --features mpi");
    Err(ConfigError::value("engine", "mpi", problem, help).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(hosts: &[(usize, &str)], mesh: Mesh) -> Launched {
        let mut first_rank = 0;
        let member = |(ranks, host): &(usize, &str)| {
            first_rank += ranks;
            Member {
                job: String::new(),
                plan: mesh.to_string(),
                world: mesh.world(),
                first_rank: first_rank - ranks,
                ranks: *ranks,
                host: host.to_string(),
                pid: 1,
            }
        };
        let members = hosts.iter().map(member).collect();
        Launched { mesh, members, process: 0, source: "the settings", place: "itself".into() }
    }

    #[test]
    fn ranks_are_found_and_spread_groups_reported() {
        let mesh = Mesh { pp: 2, zero3: 2, dp: 1 };
        assert_eq!(job(&[(2, "a"), (2, "b")], mesh).spread(), None);
        let round_robin = job(&[(1, "b"), (1, "a"), (1, "b"), (1, "a")], mesh);
        let reported = round_robin.spread().unwrap();
        let begins = "ZeRO-3 group 0 spans hosts a and b (and 1 more group spans hosts)";
        assert!(reported.starts_with(begins), "{reported}");
        assert_eq!(round_robin.member(3).host, "a");
    }

    #[test]
    fn one_process_is_where_it_is() {
        let config = Config { pp: 2, zero3: 2, ..Config::default() };
        let found = launched(&config).unwrap();
        assert_eq!((found.members.len(), found.members[0].ranks), (1, 4));
        assert_eq!(found.member(3).pid, std::process::id());
        assert_eq!(found.place, "itself");
    }
}
