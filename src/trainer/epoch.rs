//! One life of the ranks of this process: from the time they meet until all of them have ended. A
//! run has one, and another for each recovery.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::Span;
use zeropp_comm::Communicator;
use zeropp_core::metrics::Stopped;
use zeropp_pipeline::executor::StatusBoard;

use crate::Error;
use crate::checkpoint::Saver;
use crate::checkpoint::resume::Loader;
use crate::plan::peak::Peak;
use crate::recorder::FlightRecorder;
use crate::run::diagnose::Diverged;
use crate::run::rank::{Export, RankEnd, RankResult, Shared};
use crate::run::spawn::{Failure, Message, spawn_rank};
use crate::run::stop::Wish;
use crate::trainer::Trainer;
use crate::world::World;

/// After one rank has failed, how long the others get to stop before they are left behind.
const GRACE: Duration = Duration::from_secs(3);

/// The ranks of this process at work.
pub(crate) struct Epoch {
    pub(crate) messages: Receiver<Message>,
    /// In rank 0's process: what is to follow the step that was last told of.
    pub(crate) answers: Option<Sender<Wish>>,
    pub(crate) here: Arc<[usize]>,
    pub(crate) status: Arc<StatusBoard>,
    pub(crate) saver: Option<Arc<Saver>>,
    pub(crate) recorder: Option<Arc<FlightRecorder>>,
    pub(crate) peak: Peak,
    /// Ends the engine, after the ranks.
    _world: World,
}

impl Epoch {
    /// Starts the ranks over a given world, or over one with the engine of the settings. `peak` is
    /// measured where it is not known.
    pub(crate) fn start(
        trainer: &Trainer,
        given: Option<Vec<Arc<dyn Communicator>>>,
        (export, peak): (Export, Option<Peak>),
        (saver, loader): (Option<Arc<Saver>>, Option<Loader>),
        span: &Span,
    ) -> Result<Epoch, Error> {
        let bp = &trainer.blueprint;
        let status = Arc::new(StatusBoard::new(bp.mesh.world()));
        let devices = match &given {
            Some(_) => bp.config.devices()?,
            None => trainer.devices()?,
        };
        let peak = peak.unwrap_or_else(|| Peak::measure(&bp.config, &devices, bp.compute));
        let mut world = match given {
            Some(communicators) => World::of(communicators, &devices),
            None => World::start(&bp.config, &devices, &status)?,
        };
        let here: Arc<[usize]> = world.ranks.iter().map(|local| local.rank).collect();
        let (answers, asked) = (here[0] == 0).then(channel).unzip();
        let recorder = FlightRecorder::start(bp, &status, here.iter().copied());
        let shared = Shared {
            blueprint: bp.clone(),
            data: trainer.data.clone(),
            status: status.clone(),
            epoch: Instant::now(),
            roster: Arc::default(),
            peak,
            here: here.clone(),
            host: world.host.clone(),
            export,
            loader: loader.map(Arc::new),
            initial: trainer.initial.clone(),
            evaluation: trainer.evaluation.clone(),
            saver: saver.clone(),
            stopper: trainer.stopper.clone(),
            answers: asked.map(|asked| Arc::new(Mutex::new(asked))),
            recorder: recorder.clone(),
            span: span.clone(),
            digests: Arc::default(),
            agreed: Arc::default(),
        };
        let messages = spawn_all(&mut world, &shared);
        Ok(Epoch { messages, answers, here, status, saver, recorder, peak, _world: world })
    }
}

/// Starts the ranks of this process; each tells how it goes on.
fn spawn_all(world: &mut World, shared: &Shared) -> Receiver<Message> {
    let (tx, messages) = channel();
    for mut local in world.ranks.drain(..) {
        if let Some(recorder) = &shared.recorder {
            local.communicator = recorder.wrap(local.rank, local.communicator);
        }
        spawn_rank(local, shared.clone(), shared.here.clone(), tx.clone());
    }
    messages
}

/// How the ranks of this process ended.
#[derive(Default)]
pub(crate) struct Ends {
    pub(crate) left: usize,
    pub(crate) results: BTreeMap<usize, Vec<RankResult>>,
    pub(crate) failures: Vec<(usize, Failure)>,
    pub(crate) stopped: Option<Stopped>,
    pub(crate) diverged: Option<Diverged>,
    pub(crate) saved: Option<u64>,
    /// When the first rank failed.
    pub(crate) failed_at: Option<Instant>,
}

impl Ends {
    /// `left` ranks, none of which has ended.
    pub(crate) fn of(left: usize) -> Ends {
        Ends { left, ..Ends::default() }
    }

    /// Until when the others may take after a failure.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.failed_at.map(|at| at + GRACE)
    }

    pub(crate) fn note(&mut self, rank: usize, end: Result<RankEnd, Failure>) {
        self.left -= 1;
        match end {
            Ok(RankEnd { results, stopped, diverged, saved }) => {
                self.results.insert(rank, results);
                self.stopped = stopped.or(self.stopped);
                self.diverged = diverged.or(self.diverged.take());
                self.saved = saved.or(self.saved);
            }
            Err(failure) => {
                self.failures.push((rank, failure));
                self.failed_at.get_or_insert_with(Instant::now);
            }
        }
    }
}
