//! The processes of a job, from the settings and the launcher together.

use zeropp_core::choice;
use zeropp_core::field_error::FieldError;

use crate::rendezvous::{Address, Member};
use zeropp_failures::mesh::Mesh;

use super::part::{self, RankPart};
use super::{Launch, LaunchError};

choice! {
    /// How ranks talk to each other.
    EngineKind {
        /// Ranks are threads of this process.
        Threads = "threads",
        /// Ranks are processes started by an MPI launcher.
        Mpi = "mpi",
        /// GPU ranks over NCCL.
        Nccl = "nccl",
    }
}

/// The settings' part of a job's processes.
#[derive(Clone, Debug)]
pub struct LaunchOptions {
    /// Sizes of the mesh.
    pub mesh: Mesh,
    /// How ranks talk to each other.
    pub engine: EngineKind,
    /// Processes of the job, where no launcher says it; 1 says nothing.
    pub nodes: usize,
    /// Which of them this process is.
    pub node_rank: Option<usize>,
    /// Where the processes meet.
    pub rendezvous: Option<Address>,
    /// Which of its ranks this process has, where it has started processes for the others.
    pub part: Option<RankPart>,
}

/// The ranks of a job that this process runs, and where it meets the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessJob {
    /// This process among those of the job, from 0.
    pub process: usize,
    /// Processes of the job.
    pub processes: usize,
    /// The first world rank of this process.
    pub first_rank: usize,
    /// Ranks of this process, one after the other.
    pub ranks: usize,
    /// Ranks of the job.
    pub world: usize,
    /// This process's place among those of its machine, and how many these are, as far as the
    /// launcher tells: else it is the only one.
    pub local: (usize, usize),
    /// Which job this is, as its launcher calls it; may be empty.
    pub id: String,
    /// Who said all this: `torchrun`, `the settings`.
    pub source: &'static str,
    /// Where the processes meet, if they need to.
    pub meeting: Option<Address>,
}

/// Settings and launcher that do not make one clear job.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// A setting that cannot be.
    #[error(transparent)]
    Setting(#[from] FieldError),
    /// An environment that does not say one clear thing.
    #[error(transparent)]
    Launch(#[from] LaunchError),
}

/// Where jobs of a launcher have their name.
const IDS: [(&str, &str); 3] = [
    ("torchrun", "TORCHELASTIC_RUN_ID"),
    ("Open MPI", "PMIX_NAMESPACE"),
    ("Slurm", "SLURM_JOB_ID"),
];
/// Longest name of a job, in bytes.
const ID_BYTES_MAX: usize = 200;

impl ProcessJob {
    /// Whether this process has rank 0, and so speaks for the run.
    pub fn has_rank_0(&self) -> bool {
        self.first_rank == 0
    }

    /// What tells this job from others: what its launcher calls it, or where its processes meet;
    /// empty where neither is known.
    pub fn name(&self) -> String {
        let place = || self.meeting.as_ref().map(ToString::to_string).unwrap_or_default();
        if self.id.is_empty() { place() } else { self.id.clone() }
    }

    /// How this process introduces itself to the others, who must have the same mesh.
    pub fn member(&self, mesh: Mesh) -> Member {
        Member {
            job: self.id.clone(),
            plan: mesh.to_string(),
            world: self.world,
            first_rank: self.first_rank,
            ranks: self.ranks,
            host: super::host_name(),
            pid: std::process::id(),
        }
    }

    /// Reads this process's environment beside the settings.
    ///
    /// # Errors
    /// Settings or variables that are incomplete or contradict each other, by name.
    pub fn find(options: &LaunchOptions) -> Result<ProcessJob, JobError> {
        Self::from_vars(options, |name| std::env::var(name).ok())
    }

    /// The same from any set of variables.
    ///
    /// # Errors
    /// As [`find`](Self::find).
    pub fn from_vars(
        options: &LaunchOptions,
        get: impl Fn(&str) -> Option<String>,
    ) -> Result<ProcessJob, JobError> {
        let launch = Launch::from_vars(&get)?;
        let (process, processes, source) = processes(options, launch.as_ref())?;
        let world = options.mesh.world();
        if !world.is_multiple_of(processes) {
            let problem = format!(
                "{} is {world} ranks, which {processes} processes cannot share evenly ({source})",
                options.mesh
            );
            let help = "start as many processes as ranks, or a number that divides them";
            return Err(value(options, problem, help));
        }
        let ranks = world / processes;
        let launched = ProcessJob {
            process,
            processes,
            first_rank: process * ranks,
            ranks,
            world,
            local: launch.as_ref().and_then(Launch::local).unwrap_or((0, 1)),
            id: job_id(source, &get)?,
            source,
            meeting: meeting(options, launch.as_ref(), processes, &get)?,
        };
        match options.part.clone() {
            Some(part) => Ok(launched.divided(part)?),
            None => Ok(launched),
        }
    }

    /// The job of the process that has one `part` of this one's ranks.
    ///
    /// # Errors
    /// This job has no such rank.
    fn divided(self, part: RankPart) -> Result<ProcessJob, FieldError> {
        let (ranks, place) = (self.ranks, part.place);
        if place >= ranks {
            let problem = format!("the launched process has ranks 0 to {}", ranks - 1);
            return Err(FieldError::new(part::VARIABLE, part, problem, "unset it"));
        }
        Ok(ProcessJob {
            process: self.process * ranks + place,
            processes: self.processes * ranks,
            first_rank: self.first_rank + place,
            ranks: 1,
            local: (self.local.0 * ranks + place, self.local.1 * ranks),
            meeting: self.meeting.or(Some(part.meeting).filter(|_| ranks > 1)),
            ..self
        })
    }
}

/// An error about the engine, which decides what the rest means.
fn value(options: &LaunchOptions, problem: String, help: &str) -> JobError {
    FieldError::new("engine", options.engine, problem, help).into()
}

/// Which of how many processes this is, and who says so.
fn processes(
    options: &LaunchOptions,
    launch: Option<&Launch>,
) -> Result<(usize, usize, &'static str), JobError> {
    let alone = (0, 1, "this process");
    let Some(launch) = launch else {
        return Ok(match options.node_rank {
            Some(node) if options.nodes > 1 => (node, options.nodes, "the settings"),
            None if options.nodes > 1 => {
                let problem = format!("no launcher says which of the {} this is", options.nodes);
                let help = "give each its node-rank, from 0";
                return Err(FieldError::new("nodes", options.nodes, problem, help).into());
            }
            _ => alone,
        });
    };
    let (process, processes) = (launch.rank, launch.world);
    if options.nodes == 1 {
        if options.engine == EngineKind::Threads && processes > 1 {
            let problem = format!(
                "{} started {processes} processes, and each would run all ranks by itself",
                launch.source
            );
            return Err(value(options, problem, "use engine mpi or nccl, or start one process"));
        }
        return Ok((process, processes, launch.source));
    }
    let node = options.node_rank.unwrap_or(process);
    if (node, options.nodes) != (process, processes) {
        return Err(LaunchError::Contradiction {
            first: "the configuration",
            first_says: format!("node-rank = {node}, nodes = {}", options.nodes),
            second: launch.source,
            second_says: format!("process {process} of {processes}"),
        }
        .into());
    }
    Ok((process, processes, launch.source))
}

fn job_id(source: &str, get: impl Fn(&str) -> Option<String>) -> Result<String, JobError> {
    let of_launcher = IDS.iter().find(|(name, _)| *name == source).map(|(_, variable)| *variable);
    for variable in ["ZEROPP_JOB_ID"].into_iter().chain(of_launcher) {
        let Some(id) = get(variable) else { continue };
        if id.len() > ID_BYTES_MAX {
            let problem = format!("is longer than {ID_BYTES_MAX} bytes");
            return Err(FieldError::new(variable, id, problem, "use a shorter one").into());
        }
        return Ok(id);
    }
    Ok(String::new())
}

/// Where the processes meet. MPI's find each other by themselves.
fn meeting(
    options: &LaunchOptions,
    launch: Option<&Launch>,
    processes: usize,
    get: impl Fn(&str) -> Option<String>,
) -> Result<Option<Address>, JobError> {
    if options.engine == EngineKind::Mpi || processes == 1 {
        return Ok(None);
    }
    if let Some(address) = options.rendezvous.clone() {
        return Ok(Some(address));
    }
    if let Some(launch) = launch.filter(|launch| launch.source == "torchrun") {
        return Ok(Some(beside_torchrun(launch, get)?));
    }
    let problem = format!("{processes} processes need a rendezvous address");
    let help = "set rendezvous to rank 0's host and a free port, such as node0:29400";
    Err(value(options, problem, help))
}

/// torchrun's agent serves a store of its own at MASTER_PORT, so the next port is taken.
fn beside_torchrun(
    launch: &Launch,
    get: impl Fn(&str) -> Option<String>,
) -> Result<Address, JobError> {
    let (Some(host), Some(port)) = (get("MASTER_ADDR"), get("MASTER_PORT")) else {
        return Err(
            LaunchError::Missing { set: "RANK", missing: "MASTER_ADDR and MASTER_PORT" }.into()
        );
    };
    let Some(port) = port.trim().parse::<u16>().ok().and_then(|port| port.checked_add(1)) else {
        let problem = "zeropp listens on MASTER_PORT + 1, which is out of range";
        return Err(FieldError::new("MASTER_PORT", port, problem, "use 1 to 65534").into());
    };
    // All on this machine: a name would stand for the network, which takes a token.
    if launch.local_world == Some(launch.world) {
        return Ok(Address::new("127.0.0.1", port));
    }
    Ok(Address::new(host.trim(), port))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Options from lines such as `pp = 2`.
    fn options(settings: &str) -> LaunchOptions {
        let mut options = LaunchOptions {
            mesh: Mesh { pp: 1, zero3: 1, dp: 1 },
            engine: EngineKind::Threads,
            nodes: 1,
            node_rank: None,
            rendezvous: None,
            part: None,
        };
        for line in settings.lines() {
            let (key, value) = line.split_once(" = ").unwrap();
            let text = value.trim_matches('\'');
            let number = || text.parse().unwrap();
            match key {
                "pp" => options.mesh.pp = number(),
                "zero3" => options.mesh.zero3 = number(),
                "nodes" => options.nodes = number(),
                "node-rank" => options.node_rank = Some(number()),
                "rendezvous" => options.rendezvous = Some(text.parse().unwrap()),
                "part" => options.part = Some(text.parse().unwrap()),
                "engine" => {
                    let named = |e: &&EngineKind| e.name() == text;
                    options.engine = *EngineKind::ALL.iter().find(named).unwrap();
                }
                _ => panic!("{line}"),
            }
        }
        options
    }

    fn job(settings: &str, vars: &str) -> Result<ProcessJob, String> {
        let vars: Vec<(&str, &str)> =
            vars.split_whitespace().map(|v| v.split_once('=').unwrap()).collect();
        ProcessJob::from_vars(&options(settings), |name| {
            vars.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string())
        })
        .map_err(|e| e.to_string())
    }

    const MESH: &str = "pp = 2\nzero3 = 4\nengine = 'nccl'\n";
    const TORCHRUN: &str =
        "RANK=1 WORLD_SIZE=4 MASTER_ADDR=node0 MASTER_PORT=29500 TORCHELASTIC_RUN_ID=a7 ";

    #[test]
    fn one_process_has_all_ranks() {
        let alone = job("pp = 2\nzero3 = 4", "").unwrap();
        assert_eq!((alone.process, alone.processes), (0, 1));
        assert_eq!((alone.first_rank, alone.ranks, alone.world), (0, 8, 8));
        assert_eq!(alone.meeting, None);
    }

    #[test]
    fn settings_start_a_node_each() {
        let plain = format!("{MESH}nodes = 2\nnode-rank = 1\nrendezvous = '[fd00::1]:29400'");
        let job = job(&plain, "ZEROPP_JOB_ID=mine").unwrap();
        assert_eq!((job.process, job.first_rank, job.ranks), (1, 4, 4));
        assert_eq!(job.meeting, Some(Address::new("fd00::1", 29400)));
        assert_eq!((job.id.as_str(), job.source), ("mine", "the settings"));
    }

    #[test]
    fn launchers_start_processes() {
        let torchrun = job(MESH, &format!("{TORCHRUN}LOCAL_RANK=1 LOCAL_WORLD_SIZE=2")).unwrap();
        assert_eq!((torchrun.first_rank, torchrun.ranks), (2, 2));
        assert_eq!(torchrun.meeting, Some(Address::new("node0", 29501)));
        assert_eq!((torchrun.id.as_str(), torchrun.local), ("a7", (1, 2)));
        let one_machine = job(MESH, &format!("{TORCHRUN}LOCAL_WORLD_SIZE=4")).unwrap();
        assert_eq!(one_machine.meeting, Some(Address::new("127.0.0.1", 29501)));
        let given = job(&format!("{MESH}rendezvous = 'a:1'"), TORCHRUN).unwrap();
        assert_eq!(given.meeting, Some(Address::new("a", 1)));
        // One node per process, by Slurm and by the settings alike.
        let slurm = "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_JOB_ID=77";
        let nodes = format!("{MESH}nodes = 2\nrendezvous = 'a:1'");
        let slurm = job(&nodes, slurm).unwrap();
        assert_eq!((slurm.process, slurm.ranks, slurm.id.as_str()), (1, 4, "77"));
        let mpi =
            job(&MESH.replace("nccl", "mpi"), "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2");
        assert_eq!(mpi.unwrap().meeting, None);
    }

    #[test]
    fn a_launched_process_s_ranks_may_have_processes_of_their_own() {
        let part = "part = '3@127.0.0.1:400'\n";
        let alone = job(&format!("{MESH}{part}"), "").unwrap();
        assert_eq!((alone.process, alone.processes), (3, 8));
        assert_eq!((alone.first_rank, alone.ranks, alone.world), (3, 1, 8));
        assert_eq!(alone.meeting, Some(Address::new("127.0.0.1", 400)));
        let nodes = format!("{MESH}{part}nodes = 2\nnode-rank = 1\nrendezvous = 'a:1'");
        let node = job(&nodes, "").unwrap();
        assert_eq!((node.process, node.processes, node.first_rank, node.ranks), (7, 8, 7, 1));
        assert_eq!(node.local, (3, 4), "the launcher's one process of the node");
        assert_eq!(node.meeting, Some(Address::new("a", 1)));
        let torchrun = format!("{TORCHRUN}LOCAL_RANK=1 LOCAL_WORLD_SIZE=2");
        let second = job(&format!("{MESH}part = '1@127.0.0.1:400'"), &torchrun).unwrap();
        assert_eq!((second.process, second.processes, second.first_rank), (3, 8, 3));
        assert_eq!((second.ranks, second.local), (1, (3, 4)));
        let error = job(&format!("{MESH}part = '8@127.0.0.1:400'"), "").unwrap_err();
        assert_eq!(
            error,
            "ZEROPP_PART = 8@127.0.0.1:400: the launched process has ranks 0 to 7; unset it"
        );
    }

    #[test]
    fn ambiguous_job_sizes_are_refused_by_name() {
        let rendezvous = "rendezvous = 'a:1'\n";
        for (toml, vars, message) in [
            (
                "pp = 2".to_string(),
                "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2",
                "engine = threads: Open MPI started 2 processes, and each would run all ranks by \
                 itself; use engine mpi or nccl, or start one process",
            ),
            (
                format!("{MESH}nodes = 2\n{rendezvous}"),
                "",
                "nodes = 2: no launcher says which of the 2 this is; give each its node-rank",
            ),
            (
                format!("{MESH}nodes = 2\nnode-rank = 0\n{rendezvous}"),
                "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2",
                "the configuration says node-rank = 0, nodes = 2, but Slurm says process 1 of 2",
            ),
            (
                format!("{MESH}nodes = 2\n{rendezvous}"),
                TORCHRUN,
                "the configuration says node-rank = 1, nodes = 2, but torchrun says process 1 of 4",
            ),
            (
                MESH.into(),
                "PMI_RANK=0 PMI_SIZE=2",
                "engine = nccl: 2 processes need a rendezvous address; set rendezvous",
            ),
            (
                format!("{MESH}{rendezvous}"),
                "PMI_RANK=0 PMI_SIZE=3",
                "pp 2 x zero3 4 x dp 1 is 8 ranks, which 3 processes cannot share evenly (PMI)",
            ),
            (
                MESH.into(),
                "RANK=1 WORLD_SIZE=2",
                "RANK is set but MASTER_ADDR and MASTER_PORT is not",
            ),
            (
                MESH.into(),
                "RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=65535",
                "MASTER_PORT = 65535: zeropp listens on MASTER_PORT + 1, which is out of range; \
                 use 1 to 65534",
            ),
        ] {
            let error = job(&toml, vars).expect_err(message);
            assert!(error.contains(message), "{error}\nis not\n{message}");
        }
        let long = format!("ZEROPP_JOB_ID={}", "x".repeat(201));
        assert!(job(MESH, &long).unwrap_err().contains("is longer than 200 bytes"));
    }
}
