//! One life of the ranks of this process: from the time they meet until all of them have ended. A
//! run has one, and another for each recovery.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Instant;

use parking_lot::Mutex;
use tracing::Span;
use zeropp_comm::Communicator;
use zeropp_core::device::Devices;
use zeropp_pipeline::executor::StatusBoard;

use crate::Error;
use crate::checkpoint::Saver;
use crate::checkpoint::resume::Loader;
use crate::plan::memory::STACK_BYTES;
use crate::plan::peak::Peak;
use crate::recorder::FlightRecorder;
use crate::run::context::ProcessContext;
use crate::run::rank::run_rank;
use crate::run::ranks::Ranks;
use crate::run::request::StepAnswer;
use crate::run::reschedule::Offered;
use crate::run::results::{RankEnd, RankEvent};
use crate::run::shared::{Export, RunShared};
use crate::run::stop::StopRequest;
use crate::trainer::Trainer;
use crate::world::hello::new_name;
use crate::world::{LocalRank, World, cores};

/// The ranks of this process at work.
pub(crate) struct Epoch {
    pub(crate) ranks: Ranks<RankEvent, RankEnd>,
    /// In rank 0's process: what is to follow the step that was reported last.
    pub(crate) answers: Option<Sender<StepAnswer>>,
    pub(crate) saver: Option<Arc<Saver>>,
    pub(crate) copier: Option<Arc<Saver>>,
    pub(crate) peak: Peak,
}

/// The parts that ranks are started with.
pub(crate) struct EpochInputs {
    /// Their world, where it is not to be started with the engine of the settings.
    pub(crate) given: Option<Vec<Arc<dyn Communicator>>>,
    pub(crate) export: Export,
    /// Measured where it is not known.
    pub(crate) peak: Option<Peak>,
    pub(crate) saver: Option<Arc<Saver>>,
    /// The saver of copies in memory.
    pub(crate) copier: Option<Arc<Saver>>,
    pub(crate) loader: Option<Loader>,
}

impl Epoch {
    /// Starts the ranks, within the run's `span`.
    pub(crate) fn start(
        trainer: &Trainer,
        devices: &Devices,
        begin: EpochInputs,
        span: &Span,
    ) -> Result<Epoch, Error> {
        let EpochInputs { given, export, peak, saver, copier, loader } = begin;
        let bp = &trainer.blueprint;
        let status = Arc::new(StatusBoard::new(bp.mesh.world()));
        let peak = peak.unwrap_or_else(|| Peak::measure(&bp.config, devices, bp.compute));
        let world = match given {
            Some(communicators) => World::of(communicators, devices),
            None => {
                let all = cores::of_this_process(&bp.config)?;
                cores::within(all.as_ref(), || World::start(&bp.config, devices, &status))?
            }
        };
        let here: Arc<[usize]> = world.ranks.iter().map(|local| local.rank).collect();
        let (answers, asked) = (here[0] == 0).then(channel).unzip();
        let run: Arc<str> = new_name().into();
        let recorder = Some(FlightRecorder::start(bp, &status, here.iter().copied(), &run));
        let shared = RunShared {
            blueprint: bp.clone(),
            data: trainer.data.clone(),
            status: status.clone(),
            epoch: Instant::now(),
            run,
            roster: Arc::default(),
            peak,
            here: here.clone(),
            host: world.host.clone(),
            export,
            loader: loader.map(Arc::new),
            initial: trainer.initial.clone(),
            evaluation: trainer.evaluation.clone(),
            saver: saver.clone(),
            copier: copier.clone(),
            stopper: trainer.stopper.clone(),
            answers: asked.map(|asked| Arc::new(Mutex::new(asked))),
            recorder: recorder.clone(),
            digests: Arc::default(),
            agreed: Arc::default(),
            offered: Offered::default(),
        };
        let (mesh, span, stack_bytes) = (bp.mesh, span.clone(), STACK_BYTES);
        let context = ProcessContext { here, mesh, status, recorder, span, stack_bytes };
        let work = move |local: LocalRank, report: &mut dyn FnMut(RankEvent)| {
            run_rank(&shared, local.device, local.communicator, report)
        };
        Ok(Epoch { ranks: Ranks::start(world, context, work), answers, saver, copier, peak })
    }

    /// Lets ranks that are ready begin their first step.
    pub(crate) fn let_begin(&self) {
        if let Some(answers) = &self.answers {
            // Where rank 0 has failed, no rank waits any more.
            let _ = answers.send(StepAnswer::Follows(StopRequest::GoOn));
        }
    }
}
