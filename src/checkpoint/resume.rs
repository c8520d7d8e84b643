//! Going on from a checkpoint: which one, whether it fits the run, and reading it by all ranks.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::config::{Config, ConfigError, OPTIONS, OnResume, Resume};
use parking_lot::Mutex;
use std::sync::Arc;
use tracing::warn;
use zeropp_checkpoint::places::{Place, Places};
use zeropp_checkpoint::resume::{self as choices, Choice, NoCandidate, Verdict};
use zeropp_comm::Communicator;
use zeropp_core::data::{Dataset, Fingerprint};
use zeropp_core::layer::Part;
use zeropp_core::params::ParamSpec;
use zeropp_zero3::checkpoint::{Base, Checkpoint, CheckpointError, Store, read_state};
use zeropp_zero3::{Optimizer, ShardedStage};

use crate::Error;
use crate::checkpoint::copies;
use crate::checkpoint::patience::Patience;
use crate::checkpoint::{identity, settings};
use crate::error::RankError;
use crate::plan::blueprint::Blueprint;

/// Where a resumed run goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resumed {
    /// The checkpoint.
    pub path: PathBuf,
    /// Steps it has behind it; the run goes on with the next.
    pub step: u64,
    /// Settings that change what follows and differ from the checkpoint's, and whether the
    /// data does, in words.
    pub changed: Vec<String>,
}

/// What was found in the folder of checkpoints when the run was set up.
#[derive(Clone, Debug, Default)]
pub(crate) struct Found {
    /// The checkpoint to go on from, whose files have not been read yet.
    pub(crate) resumed: Option<Resumed>,
    /// Step of the newest checkpoint, whether the run goes on from it or not.
    pub(crate) newest: Option<u64>,
    /// Where that one is.
    pub(crate) place: Option<Place>,
    /// Newer ones that are damaged and were passed over, in words.
    pub(crate) passed_over: Vec<String>,
}

/// Looks for the checkpoint that the run is to go on from, if it is to, and checks all that can be
/// seen without reading its tensors. A run that begins anew must not save among another's
/// checkpoints.
pub(crate) fn find(bp: &Blueprint, data: &Dataset) -> Result<Found, Error> {
    let Some(places) = copies::places(&bp.config) else { return Ok(Found::default()) };
    let store = &places.checkpoints;
    // Rank 0's process answers for all: it may have begun to save by the time others look.
    let follows = !bp.config.has_rank_0()?;
    if !follows {
        store.check_free()?;
    }
    if bp.config.resume == Resume::No {
        if !follows {
            choices::check_unchanged(store, false, None)?;
        }
        return Ok(Found::default());
    }
    let mut found = Found { newest: store.steps()?.last().copied(), ..Found::default() };
    let open = |place: Place| {
        let (checkpoint, resumed) = open(bp, data.fingerprint(), places.store(place), place.step)?;
        if !follows {
            checkpoint.check_sizes()?;
        }
        Ok(resumed)
    };
    let copy = match bp.config.resume {
        Resume::Step(_) => None,
        _ => places.newest_copy().filter(|copy| *copy > Place::on_disk(found.newest.unwrap_or(0))),
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
    let on_disk = |step| open(Place::on_disk(step));
    let (resumed, passed_over) = choices::first_usable(&steps, bp.config.resume_fallback, on_disk)?;
    found.place = resumed.as_ref().map(|resumed| Place::on_disk(resumed.step));
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
    checkpoint.check_model(parameters.iter().map(|p| (p.name.as_str(), p.shape.as_slice())))?;
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
    let then = checkpoint.manifest().data.as_ref();
    changed.extend(then.and_then(|then| data.change_since(then)));
    Ok((checkpoint, Resumed { path, step, changed }))
}

/// What does not train must be what it was.
fn check_base(bp: &Blueprint, checkpoint: &Checkpoint) -> Result<(), CheckpointError> {
    let (now, then) = (bp.base.as_ref(), checkpoint.manifest().base.as_ref());
    let of = |base: &Base| base.path.clone().unwrap_or_else(|| base.fingerprint.clone());
    match (now, then) {
        (Some(now), Some(then)) if now.fingerprint != then.fingerprint => {
            let problem = format!(
                "its frozen weights were those of {}, and these of {} are others; name the former \
                 with init-from",
                of(then),
                of(now)
            );
            Err(CheckpointError::Mismatch { path: checkpoint.path().to_path_buf(), problem })
        }
        _ => Ok(()),
    }
}

/// Refuses settings that cannot change, and tells those that do.
fn compare(bp: &Blueprint, checkpoint: &Checkpoint) -> Result<Vec<String>, CheckpointError> {
    let manifest = checkpoint.manifest();
    let mismatch =
        |problem| Err(CheckpointError::Mismatch { path: checkpoint.path().to_path_buf(), problem });
    let now = settings(&bp.config);
    // A setting that one side does not know is no difference.
    let pair =
        |key: &str| Some((now.get(key)?.as_str(), identity::typed(&manifest.settings, key)?));
    let is_moved = identity::is_same_model(&now, &manifest.settings);
    let keys = |role| OPTIONS.iter().filter(move |o| o.on_resume == role).map(|option| option.key);
    for key in keys(OnResume::Fixed) {
        let is_same = |now: &str, then: &str| now == then || key == "model" && is_moved;
        if let Some((now, then)) = pair(key).filter(|(now, then)| !is_same(now, then)) {
            return mismatch(format!("{key} = {now}, but it was saved with {then}; use that"));
        }
    }
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
        return mismatch(format!("steps = {total}, but it has {step} behind it; use more steps"));
    }
    let mut changed: Vec<String> = keys(OnResume::Told)
        .filter_map(|key| pair(key).map(|(now, then)| (key, now, then)))
        .filter(|(_, now, then)| now != then)
        .map(|(key, now, then)| format!("{key} = {now} (was {then})"))
        .collect();
    let (now, then) = (bp.config.samples_per_step(), samples_per_step(&manifest.settings));
    if let Some(then) = then.filter(|then| *then != now) {
        changed.push(format!("{now} samples a step (were {then})"));
    }
    Ok(changed)
}

/// Samples of a step of a run with these settings, as a checkpoint keeps them.
pub(crate) fn samples_per_step(settings: &BTreeMap<String, String>) -> Option<usize> {
    let factor = |key: &str| settings.get(key)?.parse::<usize>().ok();
    let config = Config {
        micro_batches: Some(factor("micro-batches")?),
        micro_batch_size: factor("micro-batch-size")?,
        zero3: factor("zero3")?,
        dp: factor("dp")?,
        global_batch: settings.get("global-batch").cloned(),
        ..Config::default()
    };
    Some(config.samples_per_step())
}

/// Reads the checkpoint that the run goes on from, for the ranks of this process.
pub(crate) struct Loader {
    places: Places,
    blueprint: Arc<Blueprint>,
    data: Fingerprint,
    /// Where this process would go on; rank 0's counts.
    first: Option<Place>,
    patience: Patience,
    /// The one that is being read, opened once for all ranks here.
    open: Mutex<Option<Arc<Opened>>>,
}

/// A checkpoint or copy, where it is and what of it the run goes on from.
struct Opened {
    place: Place,
    checkpoint: Checkpoint,
    resumed: Resumed,
}

impl Loader {
    /// A loader for a run that goes on from where `found` says; none where it does not.
    pub(crate) fn new(bp: &Arc<Blueprint>, data: &Dataset, found: &Found) -> Option<Loader> {
        (bp.config.resume != Resume::No).then(|| Self::of(bp, data, found.place)).flatten()
    }

    /// A loader for ranks that go on from the state at `place`, which this run has written or gone
    /// on from before.
    pub(crate) fn again(bp: &Arc<Blueprint>, data: &Dataset, place: Place) -> Option<Loader> {
        Self::of(bp, data, Some(place))
    }

    fn of(bp: &Arc<Blueprint>, data: &Dataset, first: Option<Place>) -> Option<Loader> {
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
                let verdict = read.err().map(|e| Verdict::of(e, path));
                Ok(serde_json::to_vec(&verdict).expect("text"))
            })?;
            let read = |bytes: &Vec<u8>| serde_json::from_slice(bytes).expect("written above");
            let Some(verdict) =
                verdicts.iter().find_map(|bytes| -> Option<Verdict> { read(bytes) })
            else {
                if is_first {
                    self.set_newer_aside(place)?;
                }
                return Ok(resumed);
            };
            let before = || self.places.before(place);
            let older = from_rank_0(world, if is_first { before()? } else { None })?;
            let may = self.blueprint.config.resume_fallback;
            let (older, told) = verdict.fall_back(place, older, may).map_err(RankError::Resume)?;
            if is_first {
                warn!("{told}");
            }
            next = Some(older);
        }
        Ok(None)
    }

    fn open(&self, place: Place) -> Result<Arc<Opened>, CheckpointError> {
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

    /// What is newer than where the run goes on must not be taken for its future.
    fn set_newer_aside(&self, place: Place) -> Result<(), CheckpointError> {
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
fn from_rank_0(world: &dyn Communicator, place: Option<Place>) -> Result<Option<Place>, RankError> {
    let bytes = serde_json::to_vec(&place).expect("plain data");
    let all = world.exchange(bytes).wait()?;
    Ok(serde_json::from_slice(&all[0]).expect("written by rank 0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_settings_give_the_batch() {
        let config = Config { pp: 2, zero3: 3, dp: 2, ..Config::default() };
        assert_eq!(samples_per_step(&settings(&config)), Some(config.samples_per_step()));
        // Where it does not divide evenly, micro-batches are only the most of a rank.
        let uneven = Config { global_batch: Some("21".into()), ..config };
        assert_eq!(uneven.resolved().micro_batches, Some(4));
        assert_eq!(samples_per_step(&settings(&uneven)), Some(21));
    }
}
