//! The program of a rank's steps, where it is exchanged for a better one (ADR 93).

use std::sync::Arc;
use std::time::Instant;

use tracing::info;
use zeropp_checkpoint::{Checkpoint, Manifest, SavedProgram};
use zeropp_core::files::in_words;
use zeropp_core::metrics::StepMetrics;
use zeropp_failures::ExchangedProgram;

use super::Training;
use crate::checkpoint::resume::Resumed;
use crate::checkpoint::{identity, kept};
use crate::config::Config;
use crate::error::RankError;
use crate::plan::blueprint::Blueprint;
use crate::run::build;
use crate::run::evaluation::Evaluator;
use crate::run::recut::Leaving;
use crate::run::reschedule::{EndedStep, NumberedProgram, RankNote};
use crate::run::results::RankEvent;
use crate::run::saving::Saving;
use crate::run::shared::{Export, RunShared};

impl<R: FnMut(RankEvent)> Training<'_, R> {
    /// Goes on with the program that the run had found where it was `resumed`. All ranks call it.
    pub(super) fn take_up(&mut self, resumed: Option<&Resumed>) -> Result<(), RankError> {
        let trains = !matches!(self.shared.export, Export::Gradients | Export::Evaluation);
        let (Some(rescheduling), Some(resumed)) =
            (&mut self.rescheduling, resumed.filter(|_| trains))
        else {
            return Ok(());
        };
        let world = &*self.groups.world;
        let saved = match world.rank() {
            0 => program_of(resumed, &self.shared.blueprint),
            _ => None,
        };
        let exchanged = rescheduling.go_on(world, resumed.step, saved.as_ref())?;
        self.keep(saved.filter(|_| exchanged.is_some()));
        self.exchange(exchanged, resumed.step + 1);
        Ok(())
    }

    /// On rank 0, works out what all do after a step of which ranks say this.
    pub(super) fn order(&mut self, metrics: &StepMetrics, notes: Vec<RankNote>) {
        let Some(rescheduling) = &mut self.rescheduling else { return };
        let seconds = metrics.step_s - metrics.save_blocked_s;
        let saving = self.saving.iter().chain(&self.copying).any(Saving::is_under_way);
        let ended = EndedStep { step: metrics.step, seconds, saving };
        let (orders, kept) = rescheduling.decide(ended, notes);
        self.orders = orders;
        self.keep(kept);
    }

    /// Runs another program from `step` on.
    pub(super) fn exchange(&mut self, exchanged: Option<NumberedProgram>, step: u64) {
        let Some(NumberedProgram { number, program, cut }) = exchanged else { return };
        let stages = &self.shared.blueprint.stages;
        match cut.filter(|cut| cut.stages != *stages) {
            Some(cut) => self.recut = Some((cut, program.clone())),
            None => self.executor.exchange(&program),
        }
        if let Some(recorder) = &self.shared.recorder {
            let kind = program.kind.clone();
            recorder.exchanged(self.groups.world.rank(), ExchangedProgram { number, kind, step });
        }
    }

    /// Where the run is to be cut into other stages after `step`, moves the state to the ranks that
    /// have its blocks from then on. All ranks call it.
    pub(super) fn recut(&mut self, step: u64) -> Result<(), RankError> {
        let Some((cut, program)) = self.recut.take() else { return Ok(()) };
        let begun = Instant::now();
        // What is being written shares the memory that goes now.
        for saving in self.saving.iter_mut().chain(&mut self.copying) {
            saving.settle(false)?;
        }
        let before = self.shared.blueprint.blocks();
        let shared = RunShared { blueprint: cut.clone(), ..(*self.shared).clone() };
        self.shared = Arc::new(shared);
        let leaving = Leaving::of(&mut self.executor.worker);
        let sampler = self.sampler.clone();
        let (executor, moved) = build::recut(&self.shared, self.bench, sampler, leaving)?;
        self.executor = executor;
        self.executor.exchange(&program);
        let plateau = self.evaluator.as_ref().and_then(Evaluator::plateau);
        self.evaluator = build::evaluator_after(&self.shared, self.bench, plateau);
        if self.groups.world.rank() == 0 {
            let (took, moved) = (begun.elapsed().as_secs_f64() * 1e3, in_words(moved));
            let (before, after) = (listed(&before), listed(&cut.blocks()));
            info!("step {}: blocks {before} → {after}, {moved} moved in {took:.0} ms", step + 1);
        }
        self.tell(RankEvent::Recut(cut));
        Ok(())
    }

    /// Has it saved that a resumed run goes on with this program.
    fn keep(&self, program: Option<SavedProgram>) {
        let Some(program) = program else { return };
        for saver in self.shared.saver.iter().chain(&self.shared.copier) {
            saver.exchanged(program.clone());
        }
    }

    /// Notes which program `step` ran, for a trace.
    pub(super) fn note_program(&mut self, step: u64) {
        let Some(rescheduling) = &self.rescheduling else { return };
        let running = rescheduling.running();
        let is_other =
            self.programs.last().is_none_or(|(_, before)| before.number != running.number);
        if is_other && self.groups.world.rank() == 0 {
            self.programs.push((step, running.clone()));
        }
    }
}

/// The program that a run had found where it is `resumed`, unless its mesh was another one, as then
/// times are others, too, or another schedule is asked for now.
fn program_of(resumed: &Resumed, blueprint: &Blueprint) -> Option<SavedProgram> {
    let config = &blueprint.config;
    // One that is damaged is reported where it is read.
    let checkpoint = Checkpoint::open(&resumed.path).ok()?;
    let manifest = checkpoint.manifest();
    let program = manifest.program.clone()?;
    let other_cut = || {
        let then = program.blocks.as_ref().filter(|then| **then != blueprint.blocks())?;
        Some(format!("stages were {}", listed(then)))
    };
    let was =
        kept::other_mesh(&manifest.settings, config).or_else(|| other_schedule(manifest, config));
    let was = was.or_else(other_cut);
    let Some(was) = was else { return Some(program) };
    info!("a better order is looked for anew, since {was} when one was found");
    None
}

/// Blocks of stages, as the settings have them.
fn listed(blocks: &[usize]) -> String {
    blocks.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

/// The schedule of a checkpoint, in words, where the run is now asked for another one.
fn other_schedule(manifest: &Manifest, config: &Config) -> Option<String> {
    let then = identity::typed(&manifest.settings, "schedule")?;
    (then != config.schedule).then(|| format!("schedule was {then}"))
}
