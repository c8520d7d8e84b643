//! The trainer: checks everything, starts the ranks, watches over them.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use crate::config::Config;
use zeropp_comm::{CommError, Communicator};
use zeropp_core::data::{Dataset, Sampler};
use zeropp_core::device::Devices;
use zeropp_core::layer::Model;
use zeropp_core::meter::MemoryBytes;
use zeropp_core::metrics::{Plan, StepMetrics, Summary};
use zeropp_core::model::gpt;
use zeropp_core::params::FlatLayout;
use zeropp_pipeline::executor::StatusBoard;
use zeropp_pipeline::flight::EndKind;
use zeropp_pipeline::ir::Schedule;
use zeropp_pipeline::timeline::{RankTimeline, Timeline};
use zeropp_zero3::ParamExport;
use zeropp_zero3::checkpoint::Store;

use crate::Error;
use crate::blueprint::Blueprint;
use crate::checkpoint::{self, Resume, Resumed, Saver};
use crate::flight::{self, FlightRecorder};
use crate::peak::Peak;
use crate::rank::{Export, RankError, RankResult, Shared, StageTimes, run_rank};
use crate::world::{LocalRank, World};
use crate::{saved_cut, trace};

/// After one rank has failed, how long the others get to stop before they are left behind.
const GRACE: Duration = Duration::from_secs(3);
/// Stack of a rank's thread: a graph of many layers is walked recursively when it is dropped.
const STACK_BYTES: usize = 32 << 20;

/// A checked run, ready to start.
pub struct Trainer {
    blueprint: Arc<Blueprint>,
    data: Arc<(Dataset, Sampler)>,
    resume: Option<Arc<Resume>>,
}

/// Final weights by parameter name, each in row-major order.
pub type Weights = BTreeMap<String, Vec<f32>>;

enum Message {
    Step(StepMetrics, StageTimes),
    Done(usize, Result<Vec<RankResult>, Failure>),
}

enum Failure {
    Rank(RankError),
    Panic(String),
}

impl Trainer {
    /// Checks `config` with the built-in model it names. Reads the data and the checkpoint to
    /// resume from; starts nothing.
    ///
    /// # Errors
    /// Whatever is wrong with the settings, the data, the schedule or the checkpoint, naming field
    /// and value.
    pub fn new(config: Config) -> Result<Trainer, Error> {
        config.validate()?;
        let dataset = config.dataset()?;
        let model = gpt::build(config.gpt_shape(dataset.vocabulary()));
        Self::build(config, model, dataset)
    }

    /// Checks `config` with a model of your own; the model settings of `config` that it does not
    /// use (`heads`, say) are ignored, `hidden` and `layers` must say what the model has.
    ///
    /// # Errors
    /// As [`new`](Self::new); also a model whose parameter names are not unique.
    pub fn with_model(config: Config, model: Model) -> Result<Trainer, Error> {
        config.validate()?;
        let dataset = config.dataset()?;
        if model.vocabulary < dataset.vocabulary() {
            return Err(Error::Model(format!(
                "vocabulary = {} is smaller than the data's; it must be at least {}",
                model.vocabulary,
                dataset.vocabulary()
            )));
        }
        Self::build(config, model, dataset)
    }

    fn build(config: Config, model: Model, dataset: Dataset) -> Result<Trainer, Error> {
        let config = saved_cut::take_over(config);
        let blueprint = Arc::new(Blueprint::new(&config, model)?);
        let sampler = blueprint.config.sampler();
        let resume = checkpoint::find(&blueprint)?.map(Arc::new);
        Ok(Trainer { blueprint, data: Arc::new((dataset, sampler)), resume })
    }

    /// The checkpoint that the run goes on from, if it is a resumed one. Where its step is the
    /// last, nothing is left to do and training ends at once.
    pub fn resumed(&self) -> Option<&Resumed> {
        self.resume.as_ref().map(|r| &r.told)
    }

    /// Where the state after the last step is, or will be once the run is done, if it saves.
    pub fn last_checkpoint(&self) -> Option<PathBuf> {
        let config = &self.blueprint.config;
        Some(Store::new(config.save.as_ref()?).path(config.steps))
    }

    /// What is known before the run: mesh, schedule, predicted memory and bubble.
    pub fn plan(&self) -> &Plan {
        &self.blueprint.plan
    }

    /// Looks for the device that the settings name, for what it needs to compute, and whether there
    /// are enough of them for this process's ranks; training does so too, before any rank starts.
    /// The plan takes no device.
    ///
    /// # Errors
    /// What is missing, and where it was looked for.
    pub fn check_device(&self) -> Result<(), Error> {
        self.devices().map(drop)
    }

    fn devices(&self) -> Result<Devices, Error> {
        let config = &self.blueprint.config;
        let devices = config.devices()?;
        World::check(config, &devices)?;
        Ok(devices)
    }

    /// The lowered schedule that the ranks will run.
    pub fn schedule(&self) -> &Schedule {
        &self.blueprint.schedule
    }

    /// Trains; `on_step` sees every step as soon as it is complete. Where the ranks are in several
    /// processes, each process trains its own, `on_step` is called in rank 0's process alone, which
    /// also writes the trace, and the summary is every process's.
    ///
    /// # Errors
    /// The first rank that failed, with what it was doing. Before any starts: a folder of
    /// checkpoints that cannot be written, or that another run uses.
    pub fn train(&self, mut on_step: impl FnMut(&StepMetrics)) -> Result<Summary, Error> {
        self.run(on_rank_0(&mut on_step), Export::Nothing).map(|(summary, _)| summary)
    }

    /// Trains over communicators of your own: those of all ranks of the mesh that this process
    /// runs, in the order of their ranks. The setting `engine` is not looked at.
    ///
    /// # Errors
    /// As [`train`](Self::train); a rank fails where its communicator's world is not the mesh's.
    pub fn train_over(
        &self,
        communicators: Vec<Arc<dyn Communicator>>,
        mut on_step: impl FnMut(&StepMetrics),
    ) -> Result<Summary, Error> {
        let on_step = on_rank_0(&mut on_step);
        Ok(self.run_over(Some(communicators), on_step, Export::Nothing)?.0)
    }

    /// Trains and returns the final weights as well, whole, for models that fit in one memory. Of
    /// several processes rank 0's has them; the others return none.
    ///
    /// # Errors
    /// As [`train`](Self::train).
    pub fn train_to_weights(
        &self,
        mut on_step: impl FnMut(&StepMetrics),
    ) -> Result<(Summary, Weights), Error> {
        let (summary, results) = self.run(on_rank_0(&mut on_step), Export::Weights)?;
        Ok((summary, self.assemble(results, self.blueprint.mesh.zero3)))
    }

    /// Runs one step and returns its figures and the whole batch's gradients, before clipping, by
    /// parameter name: for checking a model against another implementation. Of several processes
    /// rank 0's has the gradients.
    ///
    /// # Errors
    /// As [`train`](Self::train).
    pub fn first_gradients(&self) -> Result<(StepMetrics, Weights), Error> {
        let mut metrics = StepMetrics::default();
        let (_, results) = self.run(|m, _| metrics = m.clone(), Export::Gradients)?;
        let owners = if self.blueprint.config.zero1 { self.blueprint.mesh.dp } else { 1 };
        Ok((metrics, self.assemble(results, self.blueprint.mesh.zero3 * owners)))
    }

    /// Trains and returns what every rank did when, in the first few steps: one span an action.
    /// Of several processes rank 0's has all ranks, with times by its clock; the title says how
    /// far the others' may be from it. The others return a timeline without ranks.
    ///
    /// # Errors
    /// As [`train`](Self::train).
    pub fn train_to_timeline(
        &self,
        mut on_step: impl FnMut(&StepMetrics),
    ) -> Result<(Summary, Timeline), Error> {
        let (summary, results) = self.run(on_rank_0(&mut on_step), Export::Timeline)?;
        Ok((summary, self.timeline(&results)))
    }

    /// Runs this process's ranks; `on_step` also hears whether rank 0 is one of them.
    fn run(
        &self,
        on_step: impl FnMut(&StepMetrics, bool),
        export: Export,
    ) -> Result<(Summary, Vec<RankResult>), Error> {
        self.run_over(None, on_step, export)
    }

    /// Runs over a given world, or over one that is started with the engine of the settings.
    fn run_over(
        &self,
        given: Option<Vec<Arc<dyn Communicator>>>,
        mut on_step: impl FnMut(&StepMetrics, bool),
        export: Export,
    ) -> Result<(Summary, Vec<RankResult>), Error> {
        let bp = &self.blueprint;
        let saver = match export {
            Export::Gradients => None,
            _ => Saver::start(bp, self.resumed().map(|r| r.step))?,
        };
        let (saver, lock) = saver.map(|(saver, lock)| (Arc::new(saver), lock)).unzip();
        let status = Arc::new(StatusBoard::new(bp.mesh.world()));
        let devices = match &given {
            Some(_) => bp.config.devices()?,
            None => self.devices()?,
        };
        let peak = Peak::measure(&bp.config, &devices, bp.compute);
        let mut world = match given {
            Some(communicators) => World::of(communicators, &devices),
            None => World::start(&bp.config, &devices, &status)?,
        };
        let here: Arc<[usize]> = world.ranks.iter().map(|local| local.rank).collect();
        let mut shared = Shared {
            blueprint: bp.clone(),
            data: self.data.clone(),
            status,
            epoch: Instant::now(),
            clock: Arc::default(),
            peak,
            here: here.clone(),
            host: world.host.clone(),
            export,
            resume: self.resume.clone(),
            saver: saver.clone(),
            recorder: None,
        };
        let (tx, rx) = channel();
        let recorder = FlightRecorder::start(bp, &shared.status, here.iter().copied());
        shared.recorder = recorder.clone();
        for mut local in world.ranks.drain(..) {
            if let Some(recorder) = &recorder {
                local.communicator = recorder.wrap(local.rank, local.communicator);
            }
            spawn_rank(local, shared.clone(), here.clone(), tx.clone());
        }
        drop(tx);
        let start = Instant::now();
        let mut steps = Vec::new();
        let mut times = StageTimes::default();
        let results = watch(&rx, &here, &shared.status, |metrics, step_times| {
            on_step(&metrics, here[0] == 0);
            // The first step warms caches and pools up; it counts only where it is the only one.
            if steps.len() == 1 {
                times = StageTimes::default();
            }
            times.merge(&step_times);
            steps.push(metrics);
        });
        if let (Err(_), Some(saver), Some(Some(_))) = (&results, &saver, &lock) {
            saver.clean();
        }
        let results = results.map_err(|error| match &recorder {
            Some(recorder) => {
                let found = recorder.write_all(EndKind::AtWork, "the run failed meanwhile");
                // A rank of another process that is stuck writes a moment later, if it may live on.
                recorder.await_neighbours(Instant::now() + flight::LINGER);
                error.with_advice(&found)
            }
            None => error,
        })?;
        let summary = self.summary(&steps, &times, start.elapsed().as_secs_f64());
        if let Some(path) = bp.config.trace.as_ref().filter(|_| here[0] == 0) {
            trace::write(path, &self.timeline(&results))?;
        }
        Ok((summary, results))
    }

    fn summary(&self, steps: &[StepMetrics], times: &StageTimes, total_s: f64) -> Summary {
        let plan = &self.blueprint.plan;
        let settled = if steps.len() > 1 { &steps[1..] } else { steps };
        let median = |f: fn(&StepMetrics) -> f64| {
            let mut v: Vec<f64> = settled.iter().map(f).collect();
            v.sort_by(f64::total_cmp);
            v.get(v.len() / 2).copied().unwrap_or(0.0)
        };
        let per_unit = |f: fn(&StepMetrics) -> u64| {
            let units = plan.units.len() * self.blueprint.mesh.world() * steps.len();
            steps.iter().map(f).sum::<u64>() as f64 / units.max(1) as f64
        };
        let peak = |m: MemoryBytes, other: &MemoryBytes| m.max(other);
        Summary {
            steps: steps.len() as u64,
            first_loss: steps.first().map_or(f64::NAN, |s| s.loss),
            last_loss: steps.last().map_or(f64::NAN, |s| s.loss),
            tokens_per_s: median(|s| s.tokens_per_s),
            flops_util: median(|s| s.flops_util),
            bubble: median(|s| s.bubble),
            bubble_own_span: median(|s| s.bubble_own_span),
            bubble_step: median(|s| s.bubble_step),
            predicted_bubble: plan.bubble,
            timed_bubble: self.blueprint.timed_bubble(times.costs(self.blueprint.stages.len())),
            all_gathers_per_unit: per_unit(|s| s.all_gathers),
            reduce_scatters_per_unit: per_unit(|s| s.reduce_scatters),
            peak_bytes: steps.iter().map(|s| &s.peak_bytes).fold(MemoryBytes::default(), peak),
            predicted_bytes: plan
                .ranks
                .iter()
                .map(|r| &r.memory)
                .fold(MemoryBytes::default(), peak),
            total_s,
        }
    }

    fn timeline(&self, results: &[RankResult]) -> Timeline {
        let bp = &self.blueprint;
        let ranks = results
            .iter()
            .enumerate()
            .map(|(rank, r)| {
                let c = bp.mesh.coords(rank);
                RankTimeline {
                    name: r.name.clone(),
                    pp: c.pp,
                    group: c.dp * bp.mesh.zero3 + c.zero3,
                    spans: r.spans.clone(),
                    ..RankTimeline::default()
                }
            })
            .collect();
        Timeline {
            title: match results.iter().map(|r| r.clock_error_ns).max() {
                None | Some(0) => format!("{} · {}", bp.schedule.kind, bp.mesh),
                Some(ns) => {
                    let us = ns.div_ceil(1000);
                    format!("{} · {} · clocks within {us} µs", bp.schedule.kind, bp.mesh)
                }
            },
            placement: bp.schedule.placement.clone(),
            ranks,
        }
    }

    /// Puts the pieces of all ranks together and cuts the buffers into parameters.
    fn assemble(&self, results: Vec<RankResult>, pieces: usize) -> Weights {
        let bp = &self.blueprint;
        let mut found: BTreeMap<(String, usize), Vec<f32>> = BTreeMap::new();
        for ParamExport { layer, shard, values } in results.into_iter().flat_map(|r| r.exported) {
            found.insert((layer, shard), values);
        }
        let mut weights = Weights::new();
        if found.is_empty() {
            return weights;
        }
        for part in &bp.model.parts {
            let layout = FlatLayout::new(part.parameters(), bp.layout_pieces());
            let flat: Vec<f32> = (0..pieces)
                .flat_map(|i| found.remove(&(part.name().to_string(), i)).expect("every piece"))
                .collect();
            for place in &layout.params {
                let values = flat[place.offset..][..place.spec.len()].to_vec();
                weights.insert(place.spec.name.clone(), values);
            }
        }
        weights
    }
}

/// For a run that only rank 0's process shows.
fn on_rank_0(on_step: &mut impl FnMut(&StepMetrics)) -> impl FnMut(&StepMetrics, bool) {
    |metrics, is_rank_0| {
        if is_rank_0 {
            on_step(metrics);
        }
    }
}

fn spawn_rank(
    LocalRank { rank, device, communicator: world }: LocalRank,
    shared: Shared,
    here: Arc<[usize]>,
    tx: Sender<Message>,
) {
    let body = move || {
        if let Some(recorder) = &shared.recorder {
            flight::this_thread_is(rank, recorder);
        }
        let steps = tx.clone();
        let run = AssertUnwindSafe(|| {
            run_rank(&shared, device, world.clone(), |metrics, times| {
                // The trainer may have given up already; then nobody listens.
                let _ = steps.send(Message::Step(metrics, times));
            })
        });
        let result = match std::panic::catch_unwind(run) {
            Ok(Ok(result)) => Ok(result),
            Ok(Err(e)) => {
                if let Some(recorder) = &shared.recorder {
                    recorder.end_with(rank, &e);
                }
                world.abort(&explain(&e, &here, &shared.status));
                Err(Failure::Rank(e))
            }
            Err(panic) => {
                let what = trace::panic_text(&*panic);
                let place = shared.status.describe(rank);
                let text = format!("panicked: {what} ({place})");
                if let Some(recorder) = &shared.recorder {
                    recorder.end(rank, EndKind::Panic, &text, None);
                }
                world.abort(&text);
                Err(Failure::Panic(text))
            }
        };
        if let (Err(_), Some(recorder)) = (&result, &shared.recorder) {
            // What cannot be written now, the trainer tells of when it tries again.
            let _ = recorder.write(rank);
        }
        let _ = tx.send(Message::Done(rank, result));
    };
    std::thread::Builder::new()
        .name(format!("rank {rank}"))
        .stack_size(STACK_BYTES)
        .spawn(body)
        .expect("the system can start a thread");
}

/// The error in words, with what the ranks of this process behind it were last seen doing.
fn explain(error: &RankError, here: &[usize], status: &StatusBoard) -> String {
    let (text, source) = match error {
        RankError::Checkpoint(e) => return e.to_string(),
        RankError::Comm(e) => (e.to_string(), e),
        RankError::Step(e) => (e.to_string(), &e.source),
    };
    let (missing, after_s) = match source {
        CommError::Timeout { missing, after_s, .. } => (missing.as_slice(), *after_s),
        CommError::PeerLost { rank, .. } => (std::slice::from_ref(rank), 0.0),
        _ => (Default::default(), 0.0),
    };
    // Who is missing may itself wait for another: the one that computes all the while is the cause.
    let mut seen = match after_s > 0.0 {
        true => status.stalled(Duration::from_secs_f64(after_s / 2.0)),
        false => Vec::new(),
    };
    if seen.is_empty() {
        let missing = missing.iter().filter(|rank| here.contains(rank));
        seen = missing.map(|rank| status.describe(*rank)).collect();
    }
    if seen.is_empty() { text } else { format!("{text}; last seen: {}", seen.join("; ")) }
}

/// Collects the results of the ranks `here`, in rank order. After a failure the others have [`GRACE`] to stop.
fn watch(
    rx: &Receiver<Message>,
    here: &[usize],
    status: &StatusBoard,
    mut on_step: impl FnMut(StepMetrics, StageTimes),
) -> Result<Vec<RankResult>, Error> {
    let mut results: BTreeMap<usize, Vec<RankResult>> = BTreeMap::new();
    let mut failures: Vec<(usize, Failure)> = Vec::new();
    let mut left = here.len();
    let mut deadline: Option<Instant> = None;
    while left > 0 {
        let message = match deadline {
            None => rx.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(at) => rx.recv_timeout(at.saturating_duration_since(Instant::now())),
        };
        match message {
            Ok(Message::Step(metrics, times)) => on_step(metrics, times),
            Ok(Message::Done(rank, Ok(result))) => {
                results.insert(rank, result);
                left -= 1;
            }
            Ok(Message::Done(rank, Err(failure))) => {
                failures.push((rank, failure));
                left -= 1;
                deadline.get_or_insert_with(|| Instant::now() + GRACE);
            }
            Err(_) => break,
        }
    }
    match culprit(failures, here, status) {
        Some(error) => Err(error),
        None => Ok(results.into_values().flatten().collect()),
    }
}

/// The failure that caused the others: a panic, else an error of a rank's own, else an echo.
fn culprit(failures: Vec<(usize, Failure)>, here: &[usize], status: &StatusBoard) -> Option<Error> {
    let weight = |f: &Failure| match f {
        Failure::Panic(_) => 0,
        Failure::Rank(
            RankError::Comm(CommError::Aborted { .. })
            | RankError::Step(zeropp_pipeline::executor::ExecutorError {
                source: CommError::Aborted { .. },
                ..
            }),
        ) => 2,
        Failure::Rank(_) => 1,
    };
    let (rank, failure) = failures.into_iter().min_by_key(|(rank, f)| (weight(f), *rank))?;
    let message = match failure {
        Failure::Panic(text) => text,
        Failure::Rank(e) => explain(&e, here, status),
    };
    Some(Error::Rank { rank, message })
}
