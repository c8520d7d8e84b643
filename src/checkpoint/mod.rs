//! Saving a run: how its ranks write checkpoints together, behind the steps (ADR 34).

pub(crate) mod adapter;
pub(crate) mod before;
pub(crate) mod begun;
pub(crate) mod copies;
pub(crate) mod described;
pub(crate) mod export;
pub(crate) mod export_error;
pub(crate) mod identity;
pub(crate) mod initial;
pub(crate) mod kept;
pub(crate) mod located;
pub(crate) mod merged;
pub(crate) mod patience;
pub(crate) mod resume;
pub(crate) mod saved;
pub(crate) mod saved_cut;
pub(crate) mod settings;
pub(crate) mod writer;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::config::Resume;
use parking_lot::Mutex;
use tracing::warn;
use zeropp_checkpoint::complete::{About, Completion};
use zeropp_checkpoint::places::{COPIES, StateLocation};
use zeropp_checkpoint::resume::check_unchanged;
use zeropp_checkpoint::under_way::{Save, SaveOutcome, SaveTotals, UnderWay, WriterReport};
use zeropp_checkpoint::{SavedProgram, WrittenState};
use zeropp_comm::Communicator;
use zeropp_core::data::{Dataset, Sampler};
use zeropp_core::metrics::Evaluation;
use zeropp_core::threads::{BackgroundThread, REFUSED_HELP};
use zeropp_zero3::checkpoint::{Checkpoint, CheckpointError, Plateau, Store, StoreLock};
use zeropp_zero3::optimizer::LearningRateFn;

use crate::Error;
use crate::checkpoint::patience::Patience;
use crate::checkpoint::resume::Resumed;
use crate::checkpoint::settings::settings;
use crate::error::RankError;
use crate::plan::blueprint::Blueprint;
use crate::world::hello::Roster;

/// How long a file may take to show up on other hosts.
const SHARED_TIME: Duration = Duration::from_secs(4);
/// The prefix of the file that ranks look for on other hosts.
const PROBE: &str = ".probe-";

/// The system grants no thread for what is saved in a folder.
pub(crate) fn no_thread(folder: &Path, error: &std::io::Error) -> CheckpointError {
    let problem =
        format!("the thread that writes there cannot be started ({error}); {REFUSED_HELP}");
    CheckpointError::Folder { folder: folder.to_path_buf(), problem }
}

/// The saves of a process in one folder, the run's checkpoints or its copies in memory: what stands
/// in their manifests, which of them stay, and that all processes see the folder. Each rank's own
/// part is a [`Saving`](crate::run::saving::Saving).
pub(crate) struct Saver {
    store: Store,
    /// Completes saves: the folder may be slow. In rank 0's process.
    completer: Option<Arc<BackgroundThread>>,
    /// Whether they are copies: beside the checkpoints, and nothing that a run must have.
    pub(crate) is_copier: bool,
    pub(crate) every: u64,
    pub(crate) last: u64,
    keep: usize,
    pub(crate) patience: Patience,
    /// The warnings that were given already.
    reported: Mutex<BTreeSet<String>>,
    about: About,
    /// Ranks of the run.
    world: usize,
    /// Distinguishes this run's half-written saves from others'; the same in all processes.
    run: OnceLock<String>,
    /// In rank 0's process.
    pub(crate) under_way: UnderWay,
    totals: Mutex<SaveTotals>,
    evaluated: Mutex<Evaluated>,
    /// Knows how much of the data was taken after a step.
    sampler: Mutex<Sampler>,
    /// The program with which a resumed run goes on, where it is not the planned one.
    program: Mutex<Option<SavedProgram>>,
    rate: LearningRateFn,
}

/// The validation losses that rank 0's process knows.
#[derive(Clone, Copy, Default)]
struct Evaluated {
    /// The last one: its step and the loss.
    last: Option<(u64, f64)>,
    /// Step of the checkpoint with the lowest one, which is never removed.
    best: Option<u64>,
    /// How they have gone so far.
    plateau: Option<Plateau>,
}

impl Saver {
    /// The saver of a run, if it saves, and in rank 0's process the lock to hold for as long as it
    /// lasts. `seen` is the newest checkpoint that was there when the run was set up.
    pub(crate) fn start(
        bp: &Blueprint,
        data: &Dataset,
        seen: Option<u64>,
    ) -> Result<Option<(Saver, Option<StoreLock>)>, Error> {
        let config = &bp.config;
        let Some(folder) = &config.save else { return Ok(None) };
        let mut saver = Saver::of(bp, data, Store::new(folder), false);
        let lock = match config.has_rank_0()? {
            false => None,
            true => {
                saver.start_completer()?;
                let (lock, left) = saver.store.lock()?;
                lock.say(&before::this_run());
                saver.tell(left);
                check_unchanged(&saver.store, config.resume != Resume::No, seen)?;
                Some(lock)
            }
        };
        Ok(Some((saver, lock)))
    }

    /// The saver of the run's copies in memory, if it makes any, and in rank 0's process the lock
    /// that goes with it. `place` is where the run goes on.
    pub(crate) fn of_copies(
        bp: &Blueprint,
        data: &Dataset,
        place: Option<StateLocation>,
    ) -> Result<Option<(Saver, Option<StoreLock>)>, Error> {
        let Some(places) = copies::places(&bp.config) else { return Ok(None) };
        let Some(store) = places.copies.clone() else { return Ok(None) };
        let mut saver = Saver::of(bp, data, store, true);
        if !bp.config.has_rank_0()? {
            return Ok(Some((saver, None)));
        }
        match saver.start_completer().and_then(|()| saver.store.lock()) {
            Ok((lock, _)) => {
                places.drop_copies_after(place);
                Ok(Some((saver, Some(lock))))
            }
            Err(error) => {
                copies::without(&error.to_string());
                Ok(None)
            }
        }
    }

    fn of(bp: &Blueprint, data: &Dataset, store: Store, is_copier: bool) -> Saver {
        let config = &bp.config;
        let (every, last, keep) = match is_copier {
            // What the last step left is saved, and needs no copy.
            true => (config.copy_every, 0, COPIES),
            false => (config.save_every, config.steps, config.keep),
        };
        let mut kept = settings(config);
        if bp.own.data.is_none() {
            identity::add_tokens(data, &mut kept);
        }
        Saver {
            store,
            completer: None,
            is_copier,
            every,
            last,
            keep,
            patience: Patience::new(config),
            reported: Mutex::default(),
            about: About {
                settings: kept,
                vocabulary: bp.model.vocabulary,
                data: Some(data.fingerprint().clone()),
                base: bp.base.clone(),
                ..About::default()
            },
            world: bp.mesh.world(),
            run: OnceLock::new(),
            under_way: UnderWay::default(),
            totals: Mutex::default(),
            evaluated: Mutex::default(),
            sampler: Mutex::new(config.sampler()),
            program: Mutex::default(),
            rate: bp.own.rate(config),
        }
    }

    fn start_completer(&mut self) -> Result<(), CheckpointError> {
        let worker = BackgroundThread::start("saver").map_err(|e| no_thread(self.folder(), &e))?;
        self.completer = Some(Arc::new(worker));
        Ok(())
    }

    /// The saver of the ranks that come after those of `before`, with the same lock.
    pub(crate) fn new(bp: &Blueprint, data: &Dataset, before: &Saver) -> Saver {
        let mut saver = Saver::of(bp, data, before.store.clone(), before.is_copier);
        saver.completer.clone_from(&before.completer);
        *saver.reported.lock() = before.reported.lock().clone();
        *saver.totals.lock() = before.totals();
        *saver.evaluated.lock() = *before.evaluated.lock();
        saver
    }

    /// The totals of saving so far.
    pub(crate) fn totals(&self) -> SaveTotals {
        *self.totals.lock()
    }

    /// Completes no checkpoint any more, whatever ranks that were left behind do, and removes what
    /// is half-written.
    pub(crate) fn close(&self) {
        self.under_way.close();
        self.clean();
    }

    /// Warns of what could not be removed, each once.
    pub(crate) fn tell(&self, problems: Vec<CheckpointError>) {
        for problem in problems.iter().map(ToString::to_string) {
            if self.reported.lock().insert(problem.clone()) {
                warn!("{problem}; it does no harm, and can be removed by hand");
            }
        }
    }

    /// Where the checkpoint after `step` is, or will be.
    pub(crate) fn path(&self, step: u64) -> PathBuf {
        self.store.path(step)
    }

    /// The folder of the checkpoints.
    pub(crate) fn folder(&self) -> &Path {
        self.store.folder()
    }

    /// Takes the run's name from `roster`, and checks that all ranks see in the folder what rank 0
    /// writes there. All ranks call it.
    pub(crate) fn meet(&self, world: &dyn Communicator, roster: &Roster) -> Result<(), RankError> {
        let Some(rank) = self.find_blind(world, roster)? else { return Ok(()) };
        let host = &roster.processes[rank].host;
        let problem = format!(
            "rank {rank} on {host} does not see what rank 0 writes there; name a folder that all \
             hosts share"
        );
        Err(CheckpointError::Folder { folder: self.folder().to_path_buf(), problem }.into())
    }

    /// Takes the run's name from `roster`, and looks for a rank that does not see in the folder
    /// what rank 0 writes there. All ranks call it.
    pub(crate) fn find_blind(
        &self,
        world: &dyn Communicator,
        roster: &Roster,
    ) -> Result<Option<usize>, RankError> {
        let run = self.run.get_or_init(|| roster.run().to_owned());
        if roster.hellos.len() == 1 {
            return Ok(None);
        }
        let probe = self.folder().join(format!("{PROBE}{run}"));
        if world.rank() == 0 {
            std::fs::write(&probe, run).map_err(|source| {
                let path = probe.clone();
                CheckpointError::Io { action: "write", path, source }
            })?;
        }
        let sees = || std::fs::read(&probe).is_ok_and(|text| text == run.as_bytes());
        // A network file system may show a new file a little later.
        let deadline = Instant::now() + SHARED_TIME;
        while !sees() && Instant::now() < deadline {
            std::thread::sleep(SHARED_TIME / 20);
        }
        let blind = if sees() { Vec::new() } else { vec![1] };
        let blind = world.exchange(blind).wait()?;
        if world.rank() == 0 {
            let _ = std::fs::remove_file(&probe);
        }
        Ok(blind.iter().position(|blind| !blind.is_empty()))
    }

    /// How validation losses have gone in the run that is `resumed`, on all ranks. Where the best
    /// checkpoint is kept, the lowest is that of all checkpoints that are there, and its own will
    /// not be removed. All ranks call it.
    pub(crate) fn plateau(
        &self,
        world: &dyn Communicator,
        resumed: Option<&Resumed>,
        keeps_best: bool,
    ) -> Result<Option<Plateau>, RankError> {
        let mut found: Option<(u64, f64)> = None;
        let mut plateau = None;
        if world.rank() == 0 {
            // One that is damaged is reported where it is read.
            let opened = resumed.and_then(|resumed| Checkpoint::open(&resumed.path).ok());
            plateau = opened.and_then(|checkpoint| checkpoint.manifest().plateau());
            for step in self.store.steps()?.into_iter().filter(|_| keeps_best) {
                let Ok(checkpoint) = Checkpoint::open(&self.store.path(step)) else { continue };
                let loss = checkpoint.manifest().validation_loss();
                if let Some(loss) = loss.filter(|loss| found.is_none_or(|(_, low)| *loss < low)) {
                    found = Some((step, loss));
                }
            }
            if let Some((_, lowest)) = found
                && plateau.is_none_or(|p: Plateau| lowest < p.lowest)
            {
                plateau = Some(Plateau { lowest, since: plateau.map_or(0, |p| p.since) });
            }
            let mut evaluated = self.evaluated.lock();
            (evaluated.best, evaluated.plateau) = (found.map(|(step, _)| step), plateau);
        }
        let bytes = |p: Plateau| [p.lowest.to_le_bytes(), p.since.to_le_bytes()].concat();
        let all = world.exchange(plateau.map(bytes).unwrap_or_default()).wait()?;
        let Some((lowest, since)) = all[0].split_at_checked(8) else { return Ok(None) };
        let lowest = lowest.try_into().map(f64::from_le_bytes);
        let since = since.try_into().map(u64::from_le_bytes);
        Ok(lowest.ok().zip(since.ok()).map(|(lowest, since)| Plateau { lowest, since }))
    }

    /// The validation loss after `step`; that of the checkpoint after it, if there will be one.
    pub(crate) fn evaluated(&self, step: u64, evaluation: &Evaluation, plateau: Option<Plateau>) {
        let mut evaluated = self.evaluated.lock();
        evaluated.plateau = plateau;
        evaluated.last = Some((step, evaluation.loss));
        if evaluation.best {
            evaluated.best = Some(step);
        }
    }

    /// The run goes on, and takes its samples from here. Each rank says the same.
    pub(crate) fn goes_on(&self, sampler: Sampler) {
        *self.sampler.lock() = sampler;
    }

    /// A resumed run is to go on with this program. Rank 0 says so.
    pub(crate) fn exchanged(&self, program: SavedProgram) {
        *self.program.lock() = Some(program);
    }

    /// How validation losses had gone where the run goes on.
    pub(crate) fn begin_plateau(&self, plateau: Option<Plateau>) {
        self.evaluated.lock().plateau = plateau;
    }

    /// The save of the state after `step`, with what is known of validation losses.
    pub(crate) fn save_of(&self, step: u64, updates: u64, rotates: bool) -> Save {
        let Evaluated { last, best, plateau } = *self.evaluated.lock();
        let loss = last.filter(|(last, _)| *last == step).map(|(_, loss)| loss);
        Save { step, updates, rotates, loss, best, plateau }
    }

    /// Removes what a failed run left half-written; the folder may be what failed.
    pub(crate) fn clean(&self) {
        self.tell(self.store.clean());
    }

    /// The checkpoints.
    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// A name that distinguishes this run's half-written saves from others'.
    pub(crate) fn run(&self) -> &str {
        self.run.get().expect("the ranks have met")
    }

    /// Notes what a rank's writer has said, in rank 0's process. With the last one, another thread
    /// completes the checkpoint: its folder may be slow.
    pub(crate) fn note(self: &Arc<Self>, report: WriterReport) {
        let Some((save, reports)) = self.under_way.note(report, self.world) else { return };
        let saver = self.clone();
        let work = move || saver.under_way.end(saver.complete(save, reports));
        match &self.completer {
            Some(completer) => completer.give(work),
            None => work(),
        }
    }

    /// Completes a checkpoint whose parts are written, or removes what there is of it.
    fn complete(&self, save: Save, reports: Vec<WriterReport>) -> SaveOutcome {
        let cpu_s: f64 = reports.iter().map(|report| report.cpu_s).sum();
        let written = reports.iter().filter_map(|report| report.written.as_ref().ok()?.as_ref());
        let bytes: u64 = written.map(WrittenState::bytes).sum();
        let completion = Completion { store: &self.store, run: self.run(), keep: self.keep, save };
        let about = About {
            position: Some(self.sampler.lock().position(save.step)),
            learning_rate: Some((self.rate)(save.step)),
            program: self.program.lock().clone(),
            ..self.about.clone()
        };
        let outcome = completion.finish(&about, reports, &self.under_way);
        let mut totals = self.totals.lock();
        totals.saves += u64::from(outcome.result.is_ok());
        totals.cpu_s += cpu_s;
        totals.bytes = totals.bytes.max(bytes);
        outcome
    }

    /// Whether there is a complete checkpoint, of whatever step.
    pub(crate) fn has_any(&self) -> bool {
        self.store.newest().is_ok()
    }
}
