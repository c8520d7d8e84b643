//! The folder of a run's checkpoints: which are complete, how one comes to be, which may go.

use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use serde::{Deserialize, Serialize};

use crate::disk::{self, Disk, FolderEntry, Lock, PathKind, System, is_file};
use crate::error::{Checked, CheckpointError, io};
use crate::manifest::{MANIFEST, Manifest};
use crate::open::Checkpoint;

const LOCK: &str = ".lock";
/// Most that is read of what a lock says.
const HOLDER_BYTES_MAX: u64 = 4096;
/// The prefix of hidden folders: checkpoints that are being written or removed.
const HIDDEN: &str = ".step-";

/// A folder of checkpoints.
#[derive(Clone, Debug)]
pub struct Store {
    disk: Arc<dyn Disk>,
    folder: PathBuf,
    /// The lock of this process; of all clones.
    held: Arc<Mutex<Option<Weak<dyn Lock>>>>,
}

/// Keeps other runs from writing into the folder while it lives.
#[derive(Debug)]
pub struct StoreLock {
    file: Arc<dyn Lock>,
}

/// Who has a folder, as its lock says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Holder {
    /// The process.
    pub pid: u32,
    /// Its machine.
    pub host: String,
    /// Since when, in seconds since 1970.
    pub since: f64,
}

impl StoreLock {
    /// Says who has the folder. Where that cannot be written, others only see that it is taken.
    pub fn say(&self, holder: &Holder) {
        let text = serde_json::to_string(holder).expect("text and numbers");
        let _ = self.file.say(&text);
    }
}

/// The checkpoint that `path` is, or the newest in it; none where it is neither.
///
/// # Errors
/// A checkpoint that is damaged; the newest one also where it has lost its manifest.
pub fn checkpoint_at(path: &Path) -> Checked<Option<Checkpoint>> {
    if path.join(MANIFEST).is_file() {
        return Checkpoint::open(path).map(Some);
    }
    if !path.is_dir() {
        return Ok(None);
    }
    let store = Store::new(path);
    store.named_steps()?.last().map(|step| store.open(*step)).transpose()
}

impl Store {
    /// The checkpoints in `folder`, which need not be there yet.
    pub fn new(folder: impl Into<PathBuf>) -> Store {
        Self::on(Arc::new(System), folder)
    }

    /// The same on a file system of one's own.
    pub fn on(disk: Arc<dyn Disk>, folder: impl Into<PathBuf>) -> Store {
        Store { disk, folder: folder.into(), held: Arc::default() }
    }

    /// The file system.
    pub fn disk(&self) -> &dyn Disk {
        &*self.disk
    }

    /// The checkpoint after `step` steps, of which nothing but the manifest is read.
    ///
    /// # Errors
    /// A manifest that is missing, cannot be read or is not what was written, or that is of another
    /// step than the folder's name.
    pub fn open(&self, step: u64) -> Checked<Checkpoint> {
        let path = self.path(step);
        let checkpoint = Checkpoint::open_on(self.disk.clone(), &path)?;
        match checkpoint.manifest().step {
            of if of == step => Ok(checkpoint),
            of => {
                let problem = format!("its manifest is of step {of}");
                let help = "give the folder the name of its step".into();
                Err(CheckpointError::Damaged { path, problem, help })
            }
        }
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Where the checkpoint after `step` steps is or will be.
    pub fn path(&self, step: u64) -> PathBuf {
        self.folder.join(format!("step-{step:06}"))
    }

    /// Steps of all folders named like a checkpoint, in order, and whether each is complete.
    fn named(&self) -> Checked<Vec<(u64, bool)>> {
        let entries = match self.disk.list(&self.folder) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(|e| {
                self.unusable(format!("cannot be read ({e}); name a folder you may read"))
            })?,
        };
        let mut found = Vec::new();
        for FolderEntry { name, .. } in entries {
            let step = name.to_str().and_then(|n| n.strip_prefix("step-")?.parse().ok());
            // Only the very name that a save gives: not `step-7`, nor `step-+00007`.
            if let Some(step) = step.filter(|s| self.path(*s).ends_with(&name)) {
                found.push((step, is_file(&*self.disk, &self.path(step).join(MANIFEST))));
            }
        }
        found.sort_unstable();
        Ok(found)
    }

    /// Steps of all complete checkpoints, in order.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn steps(&self) -> Checked<Vec<u64>> {
        Ok(self.named()?.into_iter().filter_map(|(step, whole)| whole.then_some(step)).collect())
    }

    /// Steps of all folders named like a checkpoint, in order: of those, too, that have lost their
    /// manifest, since a save gives a folder its name when it is whole.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub(crate) fn named_steps(&self) -> Checked<Vec<u64>> {
        Ok(self.named()?.into_iter().map(|(step, _)| step).collect())
    }

    /// Names of the folders of saves that were begun and neither completed nor cleaned up.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn half_written(&self) -> Checked<Vec<String>> {
        let entries = match self.disk.list(&self.folder) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(io("read", &self.folder))?,
        };
        let names = entries.into_iter().filter_map(|entry| entry.name.into_string().ok());
        let mut names: Vec<_> =
            names.filter(|name| name.starts_with(HIDDEN) && name.ends_with(".tmp")).collect();
        names.sort();
        Ok(names)
    }

    /// The newest complete checkpoint's folder.
    ///
    /// # Errors
    /// There is none, or the folder cannot be read.
    pub fn newest(&self) -> Checked<PathBuf> {
        let named = self.named()?;
        if let Some((step, _)) = named.iter().rev().find(|(_, whole)| *whole) {
            return Ok(self.path(*step));
        }
        let passed_over = match named.last() {
            Some((step, _)) => format!(" (step-{step:06} has no {MANIFEST})"),
            None if !matches!(self.disk.look(&self.folder), Ok(PathKind::Folder)) => {
                " (there is no such folder)".into()
            }
            None => String::new(),
        };
        Err(CheckpointError::NotFound { folder: self.folder.clone(), passed_over })
    }

    /// Checks that no run is saving into the folder; touches nothing.
    ///
    /// # Errors
    /// One is.
    pub fn check_free(&self) -> Checked<()> {
        match self.disk.lock(&self.folder.join(LOCK), false) {
            Err(e) if e.kind() == ErrorKind::WouldBlock => Err(self.taken()),
            // No lock, no run; other errors come up when the folder is used.
            _ => Ok(()),
        }
    }

    /// Who has the folder, or had it last, where that has been written.
    pub fn holder(&self) -> Option<Holder> {
        let mut text = String::new();
        let file = self.disk.open(&self.folder.join(LOCK)).ok()?;
        file.take(HOLDER_BYTES_MAX).read_to_string(&mut text).ok()?;
        serde_json::from_str(&text).ok()
    }

    fn taken(&self) -> CheckpointError {
        self.unusable("another run is saving there; end it, or name another folder".into())
    }

    fn unusable(&self, problem: String) -> CheckpointError {
        CheckpointError::Folder { folder: self.folder.clone(), problem }
    }

    /// Makes the folder if need be, takes it for this run and removes what an earlier one left
    /// half-written; returns what of that could not be removed, too.
    ///
    /// # Errors
    /// Another run is at it; the folder cannot be written.
    pub fn lock(&self) -> Checked<(StoreLock, Vec<CheckpointError>)> {
        let refused = |e: std::io::Error| match e.kind() {
            ErrorKind::WouldBlock => self.taken(),
            ErrorKind::InvalidInput => self.unusable(format!(
                "{LOCK} in it cannot be locked ({e}); remove it, or name another folder"
            )),
            _ => {
                self.unusable(format!("cannot be written ({e}); choose a folder you may write to"))
            }
        };
        disk::create_folders(&*self.disk, &self.folder).map_err(refused)?;
        let path = self.folder.join(LOCK);
        let file: Arc<dyn Lock> = self.disk.lock(&path, true).map_err(refused)?.into();
        // A file system that cannot tell one file from another is used without.
        if file.is_at(&path).unwrap_or(false) {
            *self.held.lock() = Some(Arc::downgrade(&file));
        }
        Ok((StoreLock { file }, self.clean()))
    }

    /// The folder must be the one that this process has locked, if it has: where someone removed
    /// it, another run may have begun in one of the same name, and what is there is that run's.
    ///
    /// # Errors
    /// It is another folder, or none.
    pub(crate) fn check_held(&self) -> Checked<()> {
        let Some(held) = self.held.lock().as_ref().and_then(Weak::upgrade) else { return Ok(()) };
        match held.is_at(&self.folder.join(LOCK)) {
            Ok(false) => Err(CheckpointError::Replaced { folder: self.folder.clone() }),
            // A folder that cannot be looked at now gives an error where it is written.
            Ok(true) | Err(_) => Ok(()),
        }
    }

    /// Removes what is half-written or half-removed. It does no harm, so the errors of what cannot
    /// be removed are returned, to be reported.
    pub fn clean(&self) -> Vec<CheckpointError> {
        if self.check_held().is_err() {
            return Vec::new();
        }
        let entries = match self.disk.list(&self.folder).map_err(io("read", &self.folder)) {
            Ok(entries) => entries,
            Err(problem) => return vec![problem],
        };
        let hidden = entries.into_iter().filter(|e| e.name.to_string_lossy().starts_with(HIDDEN));
        let remove = |FolderEntry { name, is_folder }: FolderEntry| {
            let path = self.folder.join(name);
            let removed = match is_folder {
                true => self.disk.remove_folder(&path),
                false => self.disk.remove_file(&path),
            };
            removed.map_err(io("remove", &path)).err()
        };
        hidden.filter_map(remove).collect()
    }

    /// Makes the folder in which the files of the checkpoint after `step` steps are to be written,
    /// if no other rank has yet. All ranks of a save give the same `run`, and no other save does.
    ///
    /// # Errors
    /// The file system's.
    pub fn begin(&self, step: u64, run: &str) -> Checked<PathBuf> {
        let staging = self.staging(step, run);
        match self.disk.create_folder(&staging) {
            Err(e) if e.kind() != ErrorKind::AlreadyExists => Err(io("create", &staging)(e)),
            _ => Ok(staging),
        }
    }

    fn staging(&self, step: u64, run: &str) -> PathBuf {
        self.folder.join(format!("{HIDDEN}{step:06}.{run}.tmp"))
    }

    /// Gives up what [`begin`](Self::begin) has begun. What cannot be removed is hidden, and the
    /// next run tries again.
    pub(crate) fn give_up(&self, step: u64, run: &str) {
        let _ = self.disk.remove_folder(&self.staging(step, run));
    }

    /// A hidden path that nothing has: an earlier one may be there still, if it cannot be removed.
    fn unused(&self, step: u64, ending: &str) -> PathBuf {
        let path = |n: u32| {
            let number = if n == 0 { String::new() } else { format!("{n}.") };
            self.folder.join(format!("{HIDDEN}{step:06}.{number}{ending}"))
        };
        let free = |path: &PathBuf| !self.disk.is_taken(path);
        (0..).map(path).find(free).expect("there are more numbers than folders")
    }

    /// Makes the staging folder whole, whose files are all written and flushed: writes the manifest
    /// and flushes. It is no checkpoint before it is [published](Self::publish).
    ///
    /// # Errors
    /// The file system's.
    pub fn prepare(&self, staging: &Path, manifest: &Manifest) -> Checked<()> {
        let path = staging.join(MANIFEST);
        let mut file = self.disk.create_file(&path).map_err(io("create", &path))?;
        file.write_all(&manifest.to_bytes()).map_err(io("write", &path))?;
        file.sync().map_err(io("write", &path))?;
        self.sync(staging)
    }

    /// Turns the staging folder, which is prepared, into the checkpoint of `step`: gives it its
    /// name and flushes that.
    ///
    /// # Errors
    /// The file system's; then there is no such checkpoint, or it is complete.
    pub fn publish(&self, staging: &Path, step: u64) -> Checked<PathBuf> {
        self.check_held()?;
        let named = self.path(step);
        if is_file(&*self.disk, &named.join(MANIFEST)) {
            // The state of this step is there already, and it may be all there is: nothing takes
            // its name away, not even for a moment.
            let _ = self.disk.remove_folder(staging);
            return Ok(named);
        }
        if self.disk.is_taken(&named) {
            // Not complete: it is in the way.
            let hidden = self.hide(step)?;
            // Where it cannot be removed now, the next run tries again.
            let _ = self.disk.remove_folder(&hidden);
        }
        self.disk.rename(staging, &named).map_err(io("rename", staging))?;
        self.sync(&self.folder)?;
        Ok(named)
    }

    fn sync(&self, folder: &Path) -> Checked<()> {
        self.disk.sync_folder(folder).map_err(io("flush", folder))
    }

    /// Removes complete checkpoints but for the newest `keep` and the one of step `best`, oldest
    /// first. Returns the errors of those that could not be removed: an old checkpoint too many
    /// does no harm.
    pub fn retain(&self, keep: usize, best: Option<u64>) -> Vec<CheckpointError> {
        let steps = match self.steps() {
            Ok(steps) => steps,
            Err(problem) => return vec![problem],
        };
        let old = steps.len().saturating_sub(keep.max(1));
        let old = steps[..old].iter().filter(|step| best != Some(**step));
        old.filter_map(|step| self.discard(*step).err()).collect()
    }

    /// Removes the complete checkpoint of `step`.
    ///
    /// # Errors
    /// The file system's; there is none.
    pub fn discard(&self, step: u64) -> Checked<()> {
        self.check_held()?;
        // Hidden first, and that for good, so that no half-removed one is ever taken for a
        // checkpoint.
        let hidden = self.hide(step)?;
        self.sync(&self.folder)?;
        self.disk.remove_folder(&hidden).map_err(io("remove", &hidden))
    }

    /// Gives the folder of `step` a name that no checkpoint has.
    fn hide(&self, step: u64) -> Checked<PathBuf> {
        let (named, hidden) = (self.path(step), self.unused(step, "old"));
        self.disk.rename(&named, &hidden).map_err(io("rename", &named))?;
        Ok(hidden)
    }

    /// Renames the complete checkpoints after `step`, so that a run that goes on from `step` is not
    /// taken for older than they are. Returns their new paths.
    ///
    /// # Errors
    /// The file system's.
    pub fn set_aside(&self, step: u64) -> Checked<Vec<PathBuf>> {
        self.check_held()?;
        let newer = self.named_steps()?.into_iter().filter(|newer| *newer > step);
        let newer: Vec<u64> = newer.collect();
        let aside = |newer: &u64| {
            let named = self.path(*newer);
            let path = |n: u32| named.with_extension(format!("aside-{n}"));
            let free = |path: &PathBuf| !self.disk.is_taken(path);
            let path = (1..).map(path).find(free).expect("there are more numbers than folders");
            self.disk.rename(&named, &path).map_err(io("rename", &named))?;
            Ok(path)
        };
        let aside = newer.iter().map(aside).collect::<Checked<Vec<PathBuf>>>()?;
        if !aside.is_empty() {
            // They would be back after a crash, and be taken for the newest.
            self.sync(&self.folder)?;
        }
        Ok(aside)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::fs;

    fn save(store: &Store, step: u64) {
        let staging = store.begin(step, "a").unwrap();
        store.prepare(&staging, &Manifest::new(step, step, 256, BTreeMap::new())).unwrap();
        let at = store.publish(&staging, step).unwrap();
        assert_eq!(at, store.path(step));
    }

    #[test]
    fn only_complete_folders_count_and_the_newest_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path().join("a/b"));
        let none = store.newest().unwrap_err().to_string();
        assert!(none.contains("a/b") && none.contains("no such folder"), "{none}");

        let (lock, problems) = store.lock().unwrap();
        assert!(problems.is_empty());
        assert!(store.newest().unwrap_err().to_string().contains("to resume from;"));
        assert!(store.lock().unwrap_err().to_string().contains("another run is saving there"));
        for name in ["step-000007", "step-8", "step-00000x", "step-", "other"] {
            fs::create_dir(store.folder().join(name)).unwrap();
        }
        fs::write(store.folder().join("step-8").join(MANIFEST), "").unwrap();
        let none = store.newest().unwrap_err().to_string();
        assert!(none.contains("step-000007 has no manifest.json"), "{none}");

        for step in [1, 2, 7] {
            save(&store, step);
        }
        assert_eq!(store.steps().unwrap(), [1, 2, 7]);
        let staging = store.begin(8, "a").unwrap();
        assert_eq!(store.newest().unwrap(), store.path(7), "a staging folder is no checkpoint");
        assert!(store.retain(2, None).is_empty());
        assert_eq!(store.steps().unwrap(), [2, 7]);
        assert!(store.retain(0, None).is_empty());
        assert_eq!(store.steps().unwrap(), [7], "the newest is never removed");

        drop(lock);
        let _lock = store.lock().unwrap();
        assert!(!staging.exists(), "what was left half-written is gone");
        assert!(store.folder().join("other").exists(), "what is not ours stays");
        save(&store, 1_234_567);
        assert_eq!(store.newest().unwrap(), store.folder().join("step-1234567"));
    }

    #[test]
    fn the_best_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        [1, 2, 3, 4].iter().for_each(|step| save(&store, *step));
        assert!(store.retain(1, Some(2)).is_empty());
        assert_eq!(store.steps().unwrap(), [2, 4]);
        assert!(store.retain(1, Some(4)).is_empty());
        assert_eq!(store.steps().unwrap(), [4], "it is among the newest");
    }

    #[test]
    fn undeletable_folders_are_reported_and_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        // Neither is a folder that a save has left, and one of them is in its place.
        fs::write(dir.path().join(".step-notes"), "").unwrap();
        let stuck = dir.path().join(".step-000001.old");
        let (lock, problems) = store.lock().unwrap();
        assert!(problems.is_empty(), "a stray file is removed as well: {problems:?}");
        fs::create_dir_all(stuck.join("not empty")).unwrap();
        fs::create_dir(dir.path().join(".step-000003.tmp")).unwrap();
        for step in 1..=3 {
            save(&store, step);
        }
        assert!(store.retain(1, None).is_empty());
        assert_eq!(store.steps().unwrap(), [3]);
        assert!(stuck.exists());
        // A checkpoint whose folder is gone from under it.
        drop(lock);
        fs::remove_dir_all(dir.path()).unwrap();
        assert_eq!(store.clean().len(), 1);
        assert!(store.retain(1, None).is_empty(), "no folder, no checkpoints");
    }

    #[test]
    fn newer_checkpoints_are_set_aside_and_none_is_lost() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        for _ in 0..2 {
            [5, 10, 15].iter().for_each(|step| save(&store, *step));
            let aside = store.set_aside(5).unwrap();
            assert_eq!(aside.len(), 2);
            assert!(aside.iter().all(|path| path.join(MANIFEST).exists()));
            assert_eq!(store.steps().unwrap(), [5]);
        }
        assert!(dir.path().join("step-000010.aside-2").exists());
        // What is left of one that was damaged is not replaced by the next save either.
        fs::create_dir(store.path(20)).unwrap();
        assert_eq!(store.set_aside(5).unwrap(), [dir.path().join("step-000020.aside-1")]);
    }

    #[test]
    fn a_lock_says_who_has_the_folder() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        let (lock, _) = store.lock().unwrap();
        assert_eq!(store.holder(), None);
        let of = |pid| Holder { pid, host: "n1.rack-a".into(), since: 1.5e9 };
        for holder in [of(123456), of(7)] {
            lock.say(&holder);
            assert_eq!(store.holder(), Some(holder));
        }
        std::fs::write(dir.path().join(LOCK), "[".repeat(1 << 20)).unwrap();
        assert_eq!(store.holder(), None, "whatever it says");
    }
}
