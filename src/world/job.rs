//! The processes of a run: which one this is, and how they come together.

use std::sync::Arc;
use std::time::Duration;

use zeropp_comm::launch::{ProcessJob, RankProcesses};
use zeropp_comm::rendezvous::{
    self, Rendezvous, RendezvousOptions, TOKEN_VARIABLE, Token, Waiting,
};

use crate::config::{ConfigError, EngineKind};
use crate::{Config, Error};

/// How often rank 0 reports which processes it waits for.
const REPORT_EVERY: Duration = Duration::from_secs(5);

impl Config {
    /// The ranks of the job that this process runs, and where it meets the others.
    ///
    /// # Errors
    /// Settings or variables of the launcher that are incomplete or contradict each other.
    pub fn job(&self) -> Result<ProcessJob, Error> {
        Ok(ProcessJob::find(&self.launch_options()?)?)
    }

    /// Gives every rank of engine nccl a process of its own: where this one was launched for
    /// several, it stays the first of them and starts the others, with its own program and
    /// arguments. Between ranks of one process CUDA's frees would wait for each other (ADR 94).
    ///
    /// # Errors
    /// As [`job`](Self::job); a process that cannot be started.
    pub fn start_rank_processes(&self) -> Result<RankProcesses, Error> {
        self.validate_launch()?;
        let job = self.job()?;
        if self.engine != EngineKind::Nccl || job.ranks == 1 {
            return Ok(RankProcesses::default());
        }
        let cannot = |e| {
            let problem = format!("its ranks' processes cannot be started ({e})");
            let help = "start a process for each rank, with torchrun or srun";
            ConfigError::value("engine", self.engine, problem, help).into()
        };
        RankProcesses::start(job.ranks).map_err(cannot)
    }

    /// Whether this process has rank 0, and so speaks for the run: it alone prints, and writes what
    /// is written once. Where all ranks are threads, each process does that for its own run.
    ///
    /// # Errors
    /// As [`job`](Self::job), where ranks may be in several processes.
    pub fn has_rank_0(&self) -> Result<bool, Error> {
        Ok(self.engine == EngineKind::Threads || self.job()?.has_rank_0())
    }

    /// Brings all processes of `job` together, with the job's token and the run's timeouts.
    ///
    /// # Errors
    /// A token that cannot be used; whatever [`rendezvous::open`] says.
    pub fn meet(&self, job: &ProcessJob) -> Result<Arc<dyn Rendezvous>, Error> {
        let variable = std::env::var(TOKEN_VARIABLE).ok();
        let options = RendezvousOptions {
            address: job.meeting.clone(),
            token: Token::find(self.token_file.as_deref(), variable)?,
            start_timeout: Duration::from_secs_f64(self.start_timeout_s),
            silence: Duration::from_secs_f64(self.timeout_s),
            waiting: Waiting::new(REPORT_EVERY, |line| tracing::info!("{line}")),
        };
        let met = rendezvous::open(&options, &job.member(self.mesh()))?;
        RankProcesses::have_met();
        Ok(met)
    }
}
