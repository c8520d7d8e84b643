//! The rules of starting a job as several processes.

use super::{Config, ConfigError, EngineKind};
use zeropp_comm::rendezvous::Address;

impl Config {
    /// Where the processes meet, if the settings say so.
    ///
    /// # Errors
    /// A text that is no `HOST:PORT`.
    pub fn rendezvous(&self) -> Result<Option<Address>, ConfigError> {
        let Some(text) = &self.rendezvous else { return Ok(None) };
        let wrong = |problem: String| {
            let (problem, help) = problem.split_once("; ").unwrap_or((&problem, ""));
            ConfigError::value("rendezvous", text, problem, help)
        };
        text.parse().map(Some).map_err(wrong)
    }

    /// Checks mesh, timeouts and the settings of the launch alone: what a look at a job's
    /// processes needs, whatever they are going to do.
    ///
    /// # Errors
    /// The first rule that is broken, with the setting, its value and what would work.
    pub(crate) fn validate_launch(&self) -> Result<(), ConfigError> {
        self.check_mesh()?;
        super::validate::seconds("timeout-s", self.timeout_s)?;
        self.check_launch()
    }

    pub(super) fn check_launch(&self) -> Result<(), ConfigError> {
        super::validate::seconds("start-timeout-s", self.start_timeout_s)?;
        let wrong = |field: &str, value: &dyn ToString, problem: &str, help: &str| {
            Err(ConfigError::value(field, value.to_string(), problem, help))
        };
        let nodes = self.nodes;
        if nodes == 0 {
            return wrong("nodes", &nodes, "at least 1 is needed", "use 1 or more");
        }
        if let Some(node) = self.node_rank.filter(|node| *node >= nodes) {
            let last = nodes - 1;
            let range = if last == 0 { "0".to_string() } else { format!("0 to {last}") };
            let help = format!("use {range}, or say how many with nodes");
            return wrong("node-rank", &node, &nodes_in_words(nodes), &help);
        }
        self.rendezvous()?;
        match (self.engine, &self.rendezvous) {
            (EngineKind::Mpi, _) if nodes > 1 => {
                let help = "leave it out and use mpirun or srun";
                wrong("nodes", &nodes, "MPI's launcher starts the processes", help)
            }
            (EngineKind::Mpi, Some(place)) => {
                let problem = "processes of engine mpi find each other without it";
                wrong("rendezvous", place, problem, "leave it out")
            }
            (EngineKind::Threads, Some(place)) if nodes == 1 => {
                let problem = "engine threads has all ranks in one process, which meets no other";
                wrong("rendezvous", place, problem, "leave it out, or use engine nccl")
            }
            (EngineKind::Threads, _) if nodes > 1 => {
                let problem = "engine threads has all ranks in one process";
                let help = "use engine nccl, or leave it out and use engine mpi with a launcher \
                            such as mpirun or srun";
                wrong("nodes", &nodes, problem, help)
            }
            (_, None) if nodes > 1 => {
                let problem = format!("{nodes} nodes have to meet");
                let help = "name node 0 and a free port there, such as node0:29400";
                wrong("rendezvous", &"(none)", &problem, help)
            }
            _ if !self.mesh().world().is_multiple_of(nodes) => {
                let mesh = self.mesh();
                let ranks = mesh.world();
                let problem =
                    format!("{mesh} is {ranks} ranks, which {nodes} nodes cannot share evenly");
                wrong("nodes", &nodes, &problem, "use a number that divides them")
            }
            _ => Ok(()),
        }
    }
}

fn nodes_in_words(nodes: usize) -> String {
    if nodes == 1 { "there is 1 node".into() } else { format!("there are {nodes} nodes") }
}
