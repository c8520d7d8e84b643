//! One rank: builds its stages, runs the steps, reports each of them.

use std::sync::Arc;

use burn::tensor::Device;
use zeropp_comm::Communicator;
use zeropp_comm::groups::Groups;
use zeropp_core::kernels::threads::Threads;
use zeropp_core::meter::Meter;
use zeropp_core::split::ops::products::round_to_tf32;

use crate::config::Precision;
use crate::error::RankError;
use crate::run::agreement::agree;
use crate::run::build::{self, Bench};
use crate::run::processes;
use crate::run::results::{RankEnd, RankEvent};
use crate::run::shared::{Export, RunShared};
use crate::run::tokens::Scored;
use crate::run::training::Training;

/// Runs all steps on one rank, which computes on `device`; `report` receives its events on a
/// process's first rank.
pub(crate) fn run_rank(
    shared: &RunShared,
    device: Device,
    world: Arc<dyn Communicator>,
    report: impl FnMut(RankEvent),
) -> Result<RankEnd, RankError> {
    // First of all: what follows is done together only where the settings say the same.
    let shared = &RunShared { blueprint: agree(shared, &*world)?, ..shared.clone() };
    let (roster, copies) = processes::meet(shared, &*world)?;
    let copier = shared.copier.clone().filter(|_| copies);
    let shared = Arc::new(RunShared { copier, ..shared.clone() });
    let threads = processes::threads(&shared, &roster, world.rank())?;
    let _in_use = threads.install();
    let groups = Groups::new(world, shared.blueprint.mesh)?;
    round_to_tf32(shared.blueprint.config.precision == Precision::Tf32);
    let bench = Bench { device, groups, meter: Meter::new(), scored: Scored::default() };
    let starting = processes::starting_threads(&shared, &roster);
    let mut built = {
        let _in_use = starting.as_ref().map(Threads::install);
        build::begun(&shared, &bench)?
    };
    drop(starting);
    if shared.export == Export::Gradients {
        built.executor.worker.capture_gradients();
    }
    let resumed = built.resumed.take();
    let evaluator = build::evaluator(&shared, &bench, resumed.as_ref())?;
    let mut training = Training::new(shared, &bench, built, evaluator, &roster, report)?;
    training.run(resumed)?;
    training.finish()
}
