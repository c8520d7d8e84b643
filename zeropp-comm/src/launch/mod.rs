//! Which rank this process is, as its launcher says in the environment.
//!
//! Looked at in this order: zeropp's own variables, torchrun's, those of Open MPI's `mpirun`, of
//! PMI (MPICH, Intel MPI), and Slurm's `srun`. The first that is set decides; another one that
//! says something else is an error that names both. A [`ProcessJob`] is that and the settings
//! together.

mod host_name;
mod job;
mod orphan;
mod part;

use std::fmt;

pub use host_name::host_name;
pub use job::{EngineKind, JobError, LaunchOptions, ProcessJob};
pub use orphan::end_with_this_process;
pub use part::{RankPart, RankProcesses};

/// A rank, as the environment describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// World rank, from 0.
    pub rank: usize,
    /// Number of ranks.
    pub world: usize,
    /// Rank among those of this machine, where the launcher says it.
    pub local_rank: Option<usize>,
    /// Ranks on this machine, where the launcher says it.
    pub local_world: Option<usize>,
    /// Who said so: `torchrun`, say.
    pub source: &'static str,
}

impl Launch {
    /// The place of the process among those of this machine, and how many these are.
    fn local(&self) -> Option<(usize, usize)> {
        Some((self.local_rank?, self.local_world?))
    }
}

/// An environment that does not say one clear thing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// Half of what is needed.
    #[error("{set} is set but {missing} is not; set both or neither")]
    Missing {
        /// The variable that is set.
        set: &'static str,
        /// The one that is not.
        missing: &'static str,
    },
    /// Not a number.
    #[error("{variable} = {value}: expected a whole number from 0")]
    Number {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
    },
    /// A rank that the world does not have.
    #[error("{rank_variable} = {rank} with {world_variable} = {world}: use ranks below the size")]
    Beyond {
        /// The variable of the rank.
        rank_variable: &'static str,
        /// Its value.
        rank: usize,
        /// The variable of the size.
        world_variable: &'static str,
        /// Its value.
        world: usize,
    },
    /// Two sources that differ.
    #[error("{first} says {first_says}, but {second} says {second_says}; unset one of them")]
    Contradiction {
        /// The source that comes first in the order.
        first: &'static str,
        /// Its variables and their values.
        first_says: String,
        /// The other source.
        second: &'static str,
        /// Its variables and their values.
        second_says: String,
    },
}

/// The variables of one launcher.
struct LauncherVariables {
    name: &'static str,
    rank: &'static str,
    world: &'static str,
    local_rank: &'static str,
    local_world: &'static str,
}

const SOURCES: [LauncherVariables; 5] = [
    LauncherVariables {
        name: "zeropp's environment",
        rank: "ZEROPP_RANK",
        world: "ZEROPP_WORLD_SIZE",
        local_rank: "ZEROPP_LOCAL_RANK",
        local_world: "ZEROPP_LOCAL_WORLD_SIZE",
    },
    LauncherVariables {
        name: "torchrun",
        rank: "RANK",
        world: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        local_world: "LOCAL_WORLD_SIZE",
    },
    LauncherVariables {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        world: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_world: "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    LauncherVariables {
        name: "PMI",
        rank: "PMI_RANK",
        world: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        local_world: "MPI_LOCALNRANKS",
    },
    SLURM,
];

const SLURM: LauncherVariables = LauncherVariables {
    name: "Slurm",
    rank: "SLURM_PROCID",
    // SLURM_NTASKS is the job's: a batch script, which is no task, has it too, as process 0.
    world: "SLURM_STEP_NUM_TASKS",
    local_rank: "SLURM_LOCALID",
    local_world: "SLURM_NTASKS_PER_NODE",
};

impl Launch {
    /// Reads this process's environment; `None` where no launcher has left anything.
    ///
    /// # Errors
    /// Variables that are incomplete, no numbers, or contradict each other, by name.
    pub fn from_env() -> Result<Option<Launch>, LaunchError> {
        Self::from_vars(|name| std::env::var(name).ok())
    }

    /// The same from any set of variables.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn from_vars(get: impl Fn(&str) -> Option<String>) -> Result<Option<Launch>, LaunchError> {
        let mut chosen: Option<(&LauncherVariables, Launch)> = None;
        for source in &SOURCES {
            // Beside another launcher, Slurm numbers that launcher's daemons, not the ranks.
            if source.name == SLURM.name && chosen.is_some() {
                break;
            }
            let Some(launch) = source.read(&get)? else { continue };
            match &chosen {
                None => chosen = Some((source, launch)),
                Some((_, first)) if (first.rank, first.world) == (launch.rank, launch.world) => {}
                Some((first, said)) => {
                    return Err(LaunchError::Contradiction {
                        first: first.name,
                        first_says: first.says(said),
                        second: source.name,
                        second_says: source.says(&launch),
                    });
                }
            }
        }
        Ok(chosen.map(|(_, launch)| launch))
    }

    /// Compares with what the engine itself found.
    ///
    /// # Errors
    /// A contradiction, naming both.
    pub fn check(
        &self,
        engine: &'static str,
        rank: usize,
        world: usize,
    ) -> Result<(), LaunchError> {
        if (self.rank, self.world) == (rank, world) {
            return Ok(());
        }
        Err(LaunchError::Contradiction {
            first: self.source,
            first_says: self.to_string(),
            second: engine,
            second_says: format!("rank {rank} of {world}"),
        })
    }
}

impl fmt::Display for Launch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.world)
    }
}

impl LauncherVariables {
    fn read(&self, get: impl Fn(&str) -> Option<String>) -> Result<Option<Launch>, LaunchError> {
        let number = |variable: &'static str| {
            let Some(value) = get(variable) else { return Ok(None) };
            let parsed = value.trim().parse::<usize>();
            parsed.map(Some).map_err(|_| LaunchError::Number { variable, value })
        };
        let (rank, world) = match (get(self.rank), get(self.world)) {
            (None, None) => return Ok(None),
            (Some(_), Some(_)) => (number(self.rank)?, number(self.world)?),
            // Others use WORLD_SIZE for what they like.
            (None, Some(_)) => return Ok(None),
            (Some(_), None) if self.name == SLURM.name => return Ok(None),
            (Some(_), None) => {
                return Err(LaunchError::Missing { set: self.rank, missing: self.world });
            }
        };
        let (rank, world) = (rank.unwrap_or(0), world.unwrap_or(0));
        if rank >= world {
            let (rank_variable, world_variable) = (self.rank, self.world);
            return Err(LaunchError::Beyond { rank_variable, rank, world_variable, world });
        }
        let (local_rank, local_world) = (number(self.local_rank)?, number(self.local_world)?);
        Ok(Some(Launch { rank, world, local_rank, local_world, source: self.name }))
    }

    fn says(&self, launch: &Launch) -> String {
        format!("{} = {}, {} = {}", self.rank, launch.rank, self.world, launch.world)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads `A=1 B=2`.
    fn launch(vars: &str) -> Result<Option<Launch>, LaunchError> {
        let vars: Vec<(&str, &str)> =
            vars.split_whitespace().map(|v| v.split_once('=').unwrap()).collect();
        Launch::from_vars(|name| {
            vars.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string())
        })
    }

    #[test]
    fn every_launcher_is_understood() {
        for (vars, source, local) in [
            ("ZEROPP_RANK=1 ZEROPP_WORLD_SIZE=4", "zeropp's environment", (None, None)),
            ("RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2", "torchrun", (Some(1), Some(2))),
            (
                "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0 \
                 OMPI_COMM_WORLD_LOCAL_SIZE=1",
                "Open MPI",
                (Some(0), Some(1)),
            ),
            ("PMI_RANK=1 PMI_SIZE=4", "PMI", (None, None)),
            ("SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=0", "Slurm", (Some(0), None)),
        ] {
            let found = launch(vars).unwrap().expect(vars);
            assert_eq!((found.rank, found.world, found.source), (1, 4, source), "{vars}");
            assert_eq!((found.local_rank, found.local_world), local, "{vars}");
        }
        assert_eq!(launch("PATH=/bin"), Ok(None));
    }

    #[test]
    fn the_first_source_decides_and_others_may_agree() {
        let found = launch("RANK=2 WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4");
        assert_eq!(found.unwrap().unwrap().source, "torchrun");
        let nested =
            "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4";
        assert_eq!(launch(nested).unwrap().unwrap().rank, 3);
        let batch_script = "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0";
        assert_eq!(launch(batch_script), Ok(None));
    }

    #[test]
    fn launcher_contradictions_are_refused_by_name() {
        for (vars, message) in [
            ("RANK=1", "RANK is set but WORLD_SIZE is not; set both or neither"),
            ("RANK=x WORLD_SIZE=4", "RANK = x: expected a whole number from 0"),
            ("PMI_RANK=-1 PMI_SIZE=2", "PMI_RANK = -1: expected a whole number from 0"),
            (
                "ZEROPP_RANK=4 ZEROPP_WORLD_SIZE=4",
                "ZEROPP_RANK = 4 with ZEROPP_WORLD_SIZE = 4: use ranks below the size",
            ),
            (
                "RANK=1 WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4",
                "torchrun says RANK = 1, WORLD_SIZE = 4, but Open MPI says \
                 OMPI_COMM_WORLD_RANK = 2, OMPI_COMM_WORLD_SIZE = 4; unset one of them",
            ),
        ] {
            assert_eq!(launch(vars).expect_err(vars).to_string(), message);
        }
    }

    #[test]
    fn the_engine_may_know_better() {
        let found = launch("RANK=1 WORLD_SIZE=4").unwrap().unwrap();
        assert_eq!(found.check("MPI", 1, 4), Ok(()));
        assert_eq!(
            found.check("MPI", 0, 1).unwrap_err().to_string(),
            "torchrun says rank 1 of 4, but MPI says rank 0 of 1; unset one of them"
        );
    }
}
