//! Going on from a checkpoint: which one, whether it fits the run, and reading it by all ranks.

use std::path::PathBuf;

use crate::config::{ConfigError, OPTIONS, OnResume, OptionInfo, Resume};
use parking_lot::Mutex;
use std::sync::Arc;
use tracing::warn;
use zeropp_checkpoint::places::{StateLocation, StateStores};
use zeropp_checkpoint::resume::{self as choices, CheckFailure, Choice, NoCandidate};
use zeropp_comm::Communicator;
use zeropp_core::data::{Dataset, Fingerprint, Position};
use zeropp_core::layer::Part;
use zeropp_core::params::ParamSpec;
use zeropp_pipeline::schedules::unit_note;
use zeropp_zero3::checkpoint::{Base, Checkpoint, CheckpointError, Manifest, Store, read_state};
use zeropp_zero3::{Optimizer, ShardedStage};

use crate::Error;
use crate::checkpoint::kept::{Kept, RATE, rate_then, samples_per_step};
use crate::checkpoint::patience::Patience;
use crate::checkpoint::settings::settings;
use crate::checkpoint::{before, copies, identity};
use crate::error::RankError;
use crate::plan::blueprint::Blueprint;
use crate::plan::program::shape;

/// Rates that are no further apart than this, as a share, are the same.
const SAME_RATE: f64 = 1e-6;

/// Where a resumed run goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resumed {
    /// The checkpoint.
    pub path: PathBuf,
    /// Steps it has behind it; the run goes on with the next.
    pub step: u64,
    /// The data that was taken in them.
    pub position: Position,
    /// Settings that change what follows and differ from the checkpoint's, and whether the
    /// data does, in words.
    pub changed: Vec<String>,
    /// The price of keeping the checkpoint's unit on another number of pipeline ranks, in words,
    /// where another unit would idle less.
    pub kept_unit: Option<String>,
}

/// The state that was found in the folder of checkpoints when the run was set up.
#[derive(Clone, Debug, Default)]
pub(crate) struct FoundState {
    /// The checkpoint to go on from, whose files have not been read yet.
    pub(crate) resumed: Option<Resumed>,
    /// Step of the newest checkpoint, whether the run goes on from it or not.
    pub(crate) newest: Option<u64>,
    /// Where that one is.
    pub(crate) place: Option<StateLocation>,
    /// Newer ones that are damaged and were passed over, in words.
    pub(crate) passed_over: Vec<String>,
}

/// Looks for the checkpoint that the run is to go on from, if it is to, and checks all that can be
/// seen without reading its tensors. A run that begins anew must not save among another's
/// checkpoints.
pub(crate) fn find(bp: &Blueprint, data: &Dataset) -> Result<FoundState, Error> {
    let Some(places) = copies::places(&bp.config) else { return Ok(FoundState::default()) };
    let store = &places.checkpoints;
    // Rank 0's process answers for all: it may have begun to save by the time others look.
    let follows = !bp.config.has_rank_0()?;
    if !follows {
        before::await_end(store, &bp.config)?;
    }
    if bp.config.resume == Resume::No {
        if !follows {
            choices::check_unchanged(store, false, None)?;
        }
        return Ok(FoundState::default());
    }
    let mut found = FoundState { newest: store.steps()?.last().copied(), ..FoundState::default() };
    let open = |place: StateLocation| {
        let (checkpoint, resumed) = open(bp, data.fingerprint(), places.store(place), place.step)?;
        if !follows {
            checkpoint.check_sizes()?;
        }
        Ok(resumed)
    };
    let copy = match bp.config.resume {
        Resume::Step(_) => None,
        _ => places
            .newest_copy()
            .filter(|copy| *copy > StateLocation::on_disk(found.newest.unwrap_or(0))),
    };
    if let Some(copy) = copy {
        // With no checkpoint to fall back on, ranks that have read a part could not begin anew.
        let whole = |resumed: Resumed| match found.newest {
            Some(_) => Ok(resumed),
            None => places.store(copy).open(copy.step)?.check_whole().map(|()| resumed),
        };
        match open(copy).and_then(whole) {
            Ok(resumed) => {
                (found.resumed, found.place) = (Some(resumed), Some(copy));
                return Ok(found);
            }
            Err(error) => found.passed_over.push(format!("{error}; this copy is not used")),
        }
    }
    let steps = candidates(store, bp.config.resume)?;
    let on_disk = |step| open(StateLocation::on_disk(step));
    let (resumed, passed_over) = choices::first_usable(&steps, bp.config.resume_fallback, on_disk)?;
    found.place = resumed.as_ref().map(|resumed| StateLocation::on_disk(resumed.step));
    found.resumed = resumed;
    found.passed_over.extend(passed_over);
    Ok(found)
}

/// Steps of the checkpoints that the run may go on from, the wanted one last; none where it begins.
pub(crate) fn candidates(store: &Store, resume: Resume) -> Result<Vec<u64>, Error> {
    let choice = match resume {
        Resume::Step(wanted) => Choice::Step(wanted),
        Resume::Newest => Choice::Newest,
        Resume::No | Resume::Must => Choice::Must,
    };
    match (choices::candidates(store, choice), choice) {
        (Ok(steps), _) => Ok(steps),
        (Err(NoCandidate::NoSuchStep(there)), Choice::Step(wanted)) => {
            let there: Vec<_> = there.iter().map(u64::to_string).collect();
            let folder = store.folder().display();
            let problem = format!("{folder} has no complete checkpoint of that step");
            let help = match there.is_empty() {
                true => "it has none at all".into(),
                false => format!("use one of {}", there.join(", ")),
            };
            Err(ConfigError::value("resume", wanted, problem, help).into())
        }
        (Err(NoCandidate::NoSuchStep(_)), _) => unreachable!("no step was asked for"),
        (Err(NoCandidate::Checkpoint(error)), _) => Err(error.into()),
    }
}

/// Opens the checkpoint of `step` and holds it against the run; reads no tensor.
fn open(
    bp: &Blueprint,
    data: &Fingerprint,
    store: &Store,
    step: u64,
) -> Result<(Checkpoint, Resumed), CheckpointError> {
    let checkpoint = store.open(step)?;
    // What does not train is its base's.
    let parameters = bp.model.parts.iter().flat_map(Part::parameters).filter(|p| p.trains);
    let parameters: Vec<_> = parameters.collect();
    let shapes = parameters.iter().map(|p| (p.name.as_str(), p.shape.as_slice()));
    // A setting says more than a tensor's shape.
    checkpoint
        .check_model(shapes)
        .map_err(|error| check_settings(bp, &checkpoint, makes_shapes).err().unwrap_or(error))?;
    let groups = bp.own.parameters(&bp.config);
    let last = bp.model.parts.len() - 1;
    let kept = bp.model.parts.iter().enumerate().flat_map(|(i, part)| {
        let role = part.role(bp.model.is_tied() && i == last);
        let of = |p: ParamSpec| (p.name.clone(), groups.state(&groups.parameter(&p, role)));
        part.parameters().into_iter().map(of).collect::<Vec<_>>()
    });
    checkpoint.check_kept(groups.rule.name(), kept)?;
    check_base(bp, &checkpoint)?;
    let path = checkpoint.path().to_path_buf();
    let mut changed = compare(bp, &checkpoint)?;
    // Checkpoints of earlier versions do not know their data.
    let manifest = checkpoint.manifest();
    let then = manifest.data.as_ref();
    changed.extend(then.and_then(|then| data.change_since(then)));
    let position = position(bp, manifest);
    let kept_unit = kept_unit(bp, manifest);
    Ok((checkpoint, Resumed { path, step, position, changed, kept_unit }))
}

/// Whether a setting makes the shapes of parameters; `seq` makes those of learned positions.
fn makes_shapes(option: &OptionInfo) -> bool {
    is_fixed(option)
        || option.of_model && (option.on_resume == OnResume::Kept || option.key == "seq")
}

fn is_fixed(option: &OptionInfo) -> bool {
    option.on_resume == OnResume::Fixed
}

/// The price of a checkpoint's unit on another number of pipeline ranks, where another unit
/// would idle less.
fn kept_unit(bp: &Blueprint, manifest: &Manifest) -> Option<String> {
    let then = |key: &str| manifest.settings.get(key)?.parse::<usize>().ok();
    let (pp, was, unit) = (bp.mesh.pp, then("pp")?, bp.config.unit());
    if pp == was || then("unit") != Some(unit) || !bp.config.in_units() {
        return None;
    }
    let note = unit_note(&shape(&bp.config))?;
    Some(format!("pp = {pp} (was {was}) keeps the unit, so that no bit changes: {note}"))
}

/// The data that a checkpoint has taken. Those of earlier versions do not say it: they took as many
/// samples in each step as their settings say.
fn position(bp: &Blueprint, manifest: &Manifest) -> Position {
    let settings = &manifest.settings;
    let then = || {
        let seq = identity::typed(settings, "seq").and_then(|text| text.parse().ok());
        let each = samples_per_step(settings).unwrap_or(bp.config.samples_per_step());
        let samples = manifest.step.saturating_mul(each as u64);
        Position::after(samples, seq.unwrap_or(bp.config.seq))
    };
    manifest.position.clone().unwrap_or_else(then)
}

/// The learning rate that the last step would have now, in words, where it is another, and for
/// which of the settings that are `changed`.
fn rate_change(bp: &Blueprint, manifest: &Manifest, changed: &[String]) -> Option<String> {
    let then = manifest.learning_rate().or_else(|| rate_then(manifest))?;
    let (step, now) = (manifest.step, bp.own.rate(&bp.config)(manifest.step));
    if (now - then).abs() <= SAME_RATE * then.abs().max(now.abs()) {
        return None;
    }
    let of_rate = |text: &&String| RATE.iter().any(|key| text.starts_with(&format!("{key} = ")));
    let why: Vec<&str> = changed.iter().filter(of_rate).map(String::as_str).collect();
    let why = if why.is_empty() { "another schedule".into() } else { why.join(" and ") };
    Some(format!("learning rate at step {step}: {then:.2e} -> {now:.2e}, since {why}"))
}

/// Checks that the weights which do not train are those of before.
fn check_base(bp: &Blueprint, checkpoint: &Checkpoint) -> Result<(), CheckpointError> {
    let (now, then) = (bp.base.as_ref(), checkpoint.manifest().base.as_ref());
    let of = |base: &Base| base.path.clone().unwrap_or_else(|| base.fingerprint.clone());
    match (now, then) {
        (Some(now), Some(then)) if now.fingerprint != then.fingerprint => {
            let problem = format!(
                "the frozen weights were those of {}, and these of {} are others; name the former \
                 with init-from",
                of(then),
                of(now)
            );
            Err(CheckpointError::Mismatch { path: checkpoint.path().to_path_buf(), problem })
        }
        _ => Ok(()),
    }
}

/// A setting of the run and of a checkpoint, where both know it.
fn pair<'a>(now: &'a Kept, checkpoint: &'a Checkpoint, key: &str) -> Option<(&'a str, &'a str)> {
    let then = identity::typed(&checkpoint.manifest().settings, key)?;
    Some((now.get(key)?.as_str(), then))
}

/// Refuses the first of the settings `of` a kind that is not the checkpoint's.
fn check_settings(
    bp: &Blueprint,
    checkpoint: &Checkpoint,
    of: fn(&OptionInfo) -> bool,
) -> Result<(), CheckpointError> {
    let now = settings(&bp.config);
    let is_moved = identity::is_same_model(&now, &checkpoint.manifest().settings);
    let is_same = |key: &str, (now, then): (&str, &str)| now == then || key == "model" && is_moved;
    for key in OPTIONS.iter().filter(|option| of(option)).map(|option| option.key) {
        let both = pair(&now, checkpoint, key).filter(|both| !is_same(key, *both));
        if let Some((now, then)) = both {
            let path = checkpoint.path().to_path_buf();
            let problem = format!("{key} = {now}: was {then}; leave {key} out, or use {then}");
            return Err(CheckpointError::Mismatch { path, problem });
        }
    }
    Ok(())
}

/// Refuses settings that cannot change, and reports those that do.
fn compare(bp: &Blueprint, checkpoint: &Checkpoint) -> Result<Vec<String>, CheckpointError> {
    let manifest = checkpoint.manifest();
    let mismatch =
        |problem| Err(CheckpointError::Mismatch { path: checkpoint.path().to_path_buf(), problem });
    check_settings(bp, checkpoint, is_fixed)?;
    let now = settings(&bp.config);
    // A setting that one side does not know is no difference.
    let pair = |key: &str| pair(&now, checkpoint, key);
    if pair(identity::MODEL_DIGEST).is_some_and(|(now, then)| now != then) {
        let model = &bp.config.model;
        return mismatch(format!(
            "model = {model}: it describes another model than the one that was saved; restore it"
        ));
    }
    if manifest.vocabulary != bp.model.vocabulary {
        let (now, then) = (bp.model.vocabulary, manifest.vocabulary);
        let help = format!("use the same data, or vocab = {then}");
        return mismatch(format!("the vocabulary is {now} now and was {then}; {help}"));
    }
    if manifest.step > bp.config.steps {
        let (total, step) = (bp.config.steps, manifest.step);
        return mismatch(format!("steps = {total}: {step} are done already; use more steps"));
    }
    let reported = OPTIONS.iter().filter(|option| option.on_resume == OnResume::Reported);
    let mut changed: Vec<String> = reported
        .map(|option| option.key)
        .filter_map(|key| pair(key).map(|(now, then)| (key, now, then)))
        .filter(|(_, now, then)| now != then)
        .map(|(key, now, then)| format!("{key} = {now} (was {then})"))
        .collect();
    let (now, then) = (bp.config.samples_per_step(), samples_per_step(&manifest.settings));
    if let Some(then) = then.filter(|then| *then != now) {
        changed.push(format!("{now} samples a step (were {then})"));
    }
    changed.extend(rate_change(bp, manifest, &changed));
    Ok(changed)
}

/// Reads the checkpoint that the run goes on from, for the ranks of this process.
pub(crate) struct Loader {
    places: StateStores,
    blueprint: Arc<Blueprint>,
    data: Fingerprint,
    /// Where this process would go on; rank 0's counts.
    first: Option<StateLocation>,
    patience: Patience,
    /// The one that is being read, opened once for all ranks here.
    open: Mutex<Option<Arc<Opened>>>,
}

/// A checkpoint or copy, where it is and what of it the run goes on from.
struct Opened {
    place: StateLocation,
    checkpoint: Checkpoint,
    resumed: Resumed,
}

impl Loader {
    /// A loader for a run that goes on from where `found` says; none where it does not.
    pub(crate) fn new(bp: &Arc<Blueprint>, data: &Dataset, found: &FoundState) -> Option<Loader> {
        (bp.config.resume != Resume::No).then(|| Self::of(bp, data, found.place)).flatten()
    }

    /// A loader for ranks that go on from the state at `place`, which this run has written or gone
    /// on from before.
    pub(crate) fn again(
        bp: &Arc<Blueprint>,
        data: &Dataset,
        place: StateLocation,
    ) -> Option<Loader> {
        Self::of(bp, data, Some(place))
    }

    fn of(bp: &Arc<Blueprint>, data: &Dataset, first: Option<StateLocation>) -> Option<Loader> {
        Some(Loader {
            places: copies::places(&bp.config)?,
            blueprint: bp.clone(),
            data: data.fingerprint().clone(),
            first,
            patience: Patience::new(&bp.config),
            open: Mutex::default(),
        })
    }

    /// The step that this process would go on from.
    pub(crate) fn first(&self) -> Option<u64> {
        self.first.map(|place| place.step)
    }

    /// Brings `stages` and `optimizer` to where the run goes on, or leaves them where it begins
    /// anew. Each process reads and checks what its ranks need; where one of them finds damage, all
    /// take the checkpoint before it, if they may. All ranks call it.
    ///
    /// # Errors
    /// [`RankError::Resume`], the same on all ranks, where there is nothing to go on from; the
    /// world's first error.
    pub(crate) fn load(
        &self,
        world: &dyn Communicator,
        stages: &mut [ShardedStage],
        optimizer: &mut Optimizer,
    ) -> Result<Option<Resumed>, RankError> {
        let is_first = world.rank() == 0;
        let mut next = from_rank_0(world, self.first)?;
        while let Some(place) = next {
            let mut resumed = None;
            let verdicts = self.patience.exchange(world, "reading the checkpoint", || {
                let read = self.open(place).and_then(|open| {
                    resumed = Some(open.resumed.clone());
                    read_state(&open.checkpoint, stages, optimizer)
                });
                let path = self.places.store(place).path(place.step);
                let verdict = read.err().map(|e| CheckFailure::of(e, path));
                Ok(serde_json::to_vec(&verdict).expect("text"))
            })?;
            let read = |bytes: &Vec<u8>| serde_json::from_slice(bytes).expect("written above");
            let Some(verdict) =
                verdicts.iter().find_map(|bytes| -> Option<CheckFailure> { read(bytes) })
            else {
                if is_first {
                    self.set_newer_aside(place)?;
                }
                return Ok(resumed);
            };
            let may = self.blueprint.config.resume_fallback;
            let older = self.patience.exchange(world, "checking older checkpoints", || {
                let older = if is_first { self.older(place, may)? } else { None };
                Ok(serde_json::to_vec(&older).expect("plain data"))
            })?;
            let older = serde_json::from_slice(&older[0]).expect("written by rank 0");
            let (older, reported) =
                verdict.fall_back(place, older, may).map_err(RankError::Resume)?;
            if is_first {
                warn!("{reported}");
            }
            next = Some(older);
        }
        Ok(None)
    }

    /// The state before the one at `place`: the next one where the ranks go on from it, which they
    /// read themselves; where they may not, one that is whole, as it is named to the user.
    fn older(
        &self,
        place: StateLocation,
        may: bool,
    ) -> Result<Option<StateLocation>, CheckpointError> {
        let mut older = self.places.before(place)?;
        if may || place.in_memory {
            return Ok(older);
        }
        let is_whole = |place: StateLocation| {
            let opened = self.places.store(place).open(place.step);
            opened.and_then(|checkpoint| checkpoint.check_whole()).is_ok()
        };
        while let Some(damaged) = older.filter(|place| !is_whole(*place)) {
            older = self.places.before(damaged)?;
        }
        Ok(older)
    }

    fn open(&self, place: StateLocation) -> Result<Arc<Opened>, CheckpointError> {
        let mut open = self.open.lock();
        if let Some(open) = open.as_ref().filter(|open| open.place == place) {
            return Ok(open.clone());
        }
        let store = self.places.store(place);
        let (checkpoint, resumed) = self::open(&self.blueprint, &self.data, store, place.step)?;
        let new = Arc::new(Opened { place, checkpoint, resumed });
        *open = Some(new.clone());
        Ok(new)
    }

    /// Sets aside states that are newer than `place`, so that they are not taken for the run's own.
    fn set_newer_aside(&self, place: StateLocation) -> Result<(), CheckpointError> {
        self.places.drop_copies_after(Some(place));
        let step = place.step;
        for path in self.places.checkpoints.set_aside(step)? {
            let path = path.display();
            warn!("going on from step {step}; what was newer is now {path}");
        }
        Ok(())
    }
}

/// Rank 0's `place`, on all ranks.
fn from_rank_0(
    world: &dyn Communicator,
    place: Option<StateLocation>,
) -> Result<Option<StateLocation>, RankError> {
    let bytes = serde_json::to_vec(&place).expect("plain data");
    let all = world.exchange(bytes).wait()?;
    Ok(serde_json::from_slice(&all[0]).expect("written by rank 0"))
}
