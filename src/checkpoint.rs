//! Saving and resuming a run: what is to be found before it starts, and how its ranks write
//! together.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::config::{Config, Table};
use zeropp_comm::Communicator;
use zeropp_comm::groups::Groups;
use zeropp_core::data::{Dataset, Fingerprint};
use zeropp_core::layer::Part;
use zeropp_zero3::checkpoint::{
    Checkpoint, CheckpointError, Manifest, Store, StoreLock, WrittenState, write_state,
};
use zeropp_zero3::{Optimizer, ShardedStage};

use crate::Error;
use crate::blueprint::Blueprint;
use crate::rank::RankError;
use crate::world::is_follower;

/// How long a file may take to show up on other hosts.
const SHARED_TIME: Duration = Duration::from_secs(4);

/// Settings that say where and how a run is done or watched, never what it computes.
const NOT_THE_RUN: [&str; 10] = [
    "metrics",
    "trace",
    "flight-dir",
    "save",
    "save-every",
    "keep",
    "resume",
    "timeout-s",
    "emulate",
    "place",
];
/// Settings that must be as they were, since no tensor's shape would tell a difference and the
/// model or the data would silently be another.
const FIXED: [&str; 5] = ["model", "heads", "activation", "tokenizer", "seed"];
/// Settings that change what follows, and may be changed on purpose.
const TOLD: [&str; 15] = [
    "unit",
    "steps",
    "lr",
    "min-lr",
    "decay",
    "warmup",
    "weight-decay",
    "beta1",
    "beta2",
    "eps",
    "clip",
    "seq",
    "data",
    "order",
    "precision",
];

/// Where a resumed run goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resumed {
    /// The checkpoint.
    pub path: PathBuf,
    /// Steps it has behind it; the run goes on with the next.
    pub step: u64,
    /// Settings that change what follows and differ from the checkpoint's, and whether the data
    /// does, in words.
    pub changed: Vec<String>,
}

/// A checked checkpoint to go on from.
pub(crate) struct Resume {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) told: Resumed,
}

/// The checkpoint that the run is to go on from, if it is to; reads and checks all of it. A run
/// that begins anew must not save among another's checkpoints.
pub(crate) fn find(bp: &Blueprint, data: &Dataset) -> Result<Option<Resume>, Error> {
    let Some(folder) = &bp.config.save else { return Ok(None) };
    let store = Store::new(folder);
    // Rank 0's process answers for all: it may have begun to save by the time others look.
    let follows = is_follower(&bp.config)?;
    if !follows {
        store.check_free()?;
    }
    if !bp.config.resume {
        if !follows {
            check_unused(&store, None)?;
        }
        return Ok(None);
    }
    let checkpoint = Checkpoint::open(&store.newest()?)?;
    let parameters: Vec<_> = bp.model.parts.iter().flat_map(Part::parameters).collect();
    checkpoint.check_model(parameters.iter().map(|p| (p.name.as_str(), p.shape.as_slice())))?;
    let mut changed = compare(bp, &checkpoint)?;
    // Checkpoints of earlier versions do not know their data.
    let then = checkpoint.manifest().data.as_ref();
    changed.extend(then.and_then(|then| data.fingerprint().change_since(then)));
    let told = Resumed {
        path: checkpoint.path().to_path_buf(),
        step: checkpoint.manifest().step,
        changed,
    };
    Ok(Some(Resume { checkpoint, told }))
}

/// No complete checkpoint may be newer than the one that the run goes on from.
fn check_unused(store: &Store, resumed: Option<u64>) -> Result<(), CheckpointError> {
    let Some(newest) = store.steps()?.last().copied() else { return Ok(()) };
    let problem = match resumed {
        None => format!(
            "there is a checkpoint of step {newest}; go on from it with resume, or name another folder"
        ),
        Some(step) if newest > step => format!(
            "a checkpoint of step {newest} has come since this run was set to go on from step {step}; resume again"
        ),
        Some(_) => return Ok(()),
    };
    Err(CheckpointError::Folder { folder: store.folder().to_path_buf(), problem })
}

/// Refuses settings that cannot change, and tells those that do.
fn compare(bp: &Blueprint, checkpoint: &Checkpoint) -> Result<Vec<String>, CheckpointError> {
    let manifest = checkpoint.manifest();
    let mismatch =
        |problem| Err(CheckpointError::Mismatch { path: checkpoint.path().to_path_buf(), problem });
    let now = settings(&bp.config);
    // A setting that one side does not know is no difference.
    let pair = |key: &str| Some((now.get(key)?, manifest.settings.get(key)?));
    for key in FIXED {
        if let Some((now, then)) = pair(key).filter(|(now, then)| now != then) {
            return mismatch(format!("{key} = {now}, but it was saved with {then}; use that"));
        }
    }
    if manifest.vocabulary != bp.model.vocabulary {
        let (now, then) = (bp.model.vocabulary, manifest.vocabulary);
        return mismatch(format!("the vocabulary is {now} now and was {then}; use the same data"));
    }
    if manifest.step > bp.config.steps {
        let (total, step) = (bp.config.steps, manifest.step);
        return mismatch(format!("steps = {total}, but it has {step} behind it; use more steps"));
    }
    let mut changed: Vec<String> = TOLD
        .iter()
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

/// The settings that make a run what it is, each as in a TOML file.
fn settings(config: &Config) -> BTreeMap<String, String> {
    // Paths may be no text; the one that is kept is for people to read.
    let data = config.data.as_ref().map(|path| path.to_string_lossy().into_owned().into());
    let config =
        Config { data, save: None, metrics: None, trace: None, emulate: None, ..config.resolved() };
    let text = config.to_toml().expect("a checked configuration");
    let table: Table = text.parse().expect("what was just written");
    let kept = table.into_iter().filter(|(key, _)| !NOT_THE_RUN.contains(&key.as_str()));
    kept.map(|(key, value)| (key, value.to_string())).collect()
}

fn samples_per_step(settings: &BTreeMap<String, String>) -> Option<usize> {
    let factors = ["micro-batches", "micro-batch-size", "zero3", "dp"];
    factors.iter().map(|key| settings.get(*key)?.parse::<usize>().ok()).product()
}

/// Writes the run's checkpoints.
pub(crate) struct Saver {
    store: Store,
    every: u64,
    last: u64,
    keep: usize,
    data: Fingerprint,
}

impl Saver {
    /// The saver of a run, if it saves, and in rank 0's process the lock to hold for as long as it
    /// lasts.
    pub(crate) fn start(
        bp: &Blueprint,
        data: &Dataset,
        resumed: Option<u64>,
    ) -> Result<Option<(Saver, Option<StoreLock>)>, Error> {
        let config = &bp.config;
        let Some(folder) = &config.save else { return Ok(None) };
        let store = Store::new(folder);
        let lock = match is_follower(config)? {
            true => None,
            false => {
                let lock = store.lock()?;
                check_unused(&store, resumed)?;
                Some(lock)
            }
        };
        let (every, last, keep) = (config.save_every, config.steps, config.keep);
        let data = data.fingerprint();
        Ok(Some((Saver { store, every, last, keep, data }, lock)))
    }

    /// The folder of the checkpoints.
    pub(crate) fn folder(&self) -> &Path {
        self.store.folder()
    }

    /// Checks that all ranks, of which this one is on `host`, see in the folder what rank 0 writes
    /// there. All ranks call it.
    pub(crate) fn check_shared(
        &self,
        world: &dyn Communicator,
        host: &str,
    ) -> Result<(), RankError> {
        let stamp = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_nanos());
        let written = match world.rank() {
            0 => {
                let name = format!(".probe-{}-{}", std::process::id(), stamp());
                std::fs::write(self.folder().join(&name), &name).map_err(|source| {
                    let path = self.folder().join(&name);
                    CheckpointError::Io { action: "write", path, source }
                })?;
                name
            }
            _ => String::new(),
        };
        let names = world.exchange(written.into_bytes()).wait()?;
        let probe = self.folder().join(String::from_utf8_lossy(&names[0]).as_ref());
        let sees = || std::fs::read(&probe).is_ok_and(|text| text == names[0]);
        // A network file system may show a new file a little later.
        let deadline = Instant::now() + SHARED_TIME;
        while !sees() && Instant::now() < deadline {
            std::thread::sleep(SHARED_TIME / 20);
        }
        let blind = if sees() { String::new() } else { host.to_owned() };
        let blind = world.exchange(blind.into_bytes()).wait()?;
        if world.rank() == 0 {
            let _ = std::fs::remove_file(&probe);
        }
        let Some(rank) = blind.iter().position(|host| !host.is_empty()) else { return Ok(()) };
        let host = String::from_utf8_lossy(&blind[rank]);
        let problem = format!(
            "rank {rank} on {host} does not see what rank 0 writes there; name a folder that all \
             hosts share"
        );
        Err(CheckpointError::Folder { folder: self.folder().to_path_buf(), problem }.into())
    }

    /// Whether a checkpoint is to follow step `step`.
    pub(crate) fn is_due(&self, step: u64) -> bool {
        step == self.last || (self.every > 0 && step.is_multiple_of(self.every))
    }

    /// Removes what a failed run left half-written; the folder may be what failed.
    pub(crate) fn clean(&self) {
        let _ = self.store.clean();
    }

    /// Writes the checkpoint after `step`. All ranks call it; rank 0 makes the folder, completes it
    /// and removes old ones. On return it is durable.
    pub(crate) fn save(
        &self,
        step: u64,
        bp: &Blueprint,
        groups: &Groups,
        stages: &[ShardedStage],
        optimizer: &Optimizer,
    ) -> Result<(), RankError> {
        let world = &groups.world;
        let rank = world.rank();
        if rank == 0 {
            self.store.begin(step)?;
        }
        world.barrier()?;
        let file = format!("rank-{rank:05}.safetensors");
        let mine = write_state(&self.store.staging(step), &file, stages, optimizer)?;
        let bytes = serde_json::to_vec(&mine).expect("names and numbers");
        let all = world.exchange(bytes).wait()?;
        if rank == 0 {
            let (updates, vocabulary) = (optimizer.updates(), bp.model.vocabulary);
            let mut manifest = Manifest::new(step, updates, vocabulary, settings(&bp.config));
            manifest.data = Some(self.data.clone());
            for bytes in all {
                let written: Option<WrittenState> =
                    serde_json::from_slice(&bytes).expect("written by every rank");
                written.into_iter().for_each(|w| w.enter(&mut manifest));
            }
            manifest.sort_pieces();
            self.store.commit(&manifest)?;
            self.store.retain(self.keep)?;
        }
        Ok(world.barrier()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::OPTIONS;

    #[test]
    fn the_lists_name_settings() {
        for key in NOT_THE_RUN.iter().chain(&FIXED).chain(&TOLD) {
            assert!(OPTIONS.iter().any(|o| o.key == *key), "{key}");
        }
    }

    #[test]
    fn settings_are_kept_as_text_and_give_the_batch() {
        let config = Config { pp: 2, zero3: 3, dp: 2, lr: 0.1, ..Config::default() };
        let kept = settings(&config);
        assert_eq!((kept["lr"].as_str(), kept["seed"].as_str()), ("0.1", "0"));
        assert!(!kept.contains_key("save-every"));
        assert_eq!(samples_per_step(&kept), Some(config.samples_per_step()));
    }
}
