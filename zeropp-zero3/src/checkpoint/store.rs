//! The folder of a run's checkpoints: which are complete, how one comes to be, which may go.

use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};

use super::error::{Checked, CheckpointError, io};
use super::manifest::{MANIFEST, Manifest};

const LOCK: &str = ".lock";
/// What hidden folders begin with: checkpoints that are being written or removed.
const HIDDEN: &str = ".step-";

/// A folder of checkpoints.
#[derive(Clone, Debug)]
pub struct Store {
    folder: PathBuf,
}

/// Keeps other runs from writing into the folder while it lives.
#[derive(Debug)]
pub struct StoreLock {
    _file: File,
}

impl Store {
    /// The checkpoints in `folder`, which need not be there yet.
    pub fn new(folder: impl Into<PathBuf>) -> Store {
        Store { folder: folder.into() }
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
        let entries = match fs::read_dir(&self.folder) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(|e| {
                self.unusable(format!("cannot be read ({e}); name a folder you may read"))
            })?,
        };
        let mut found = Vec::new();
        for entry in entries {
            let name = entry.map_err(io("read", &self.folder))?.file_name();
            let step = name.to_str().and_then(|n| n.strip_prefix("step-")?.parse().ok());
            // Only the very name that a save gives: not `step-7`, nor `step-+00007`.
            if let Some(step) = step.filter(|s| self.path(*s).ends_with(&name)) {
                found.push((step, self.path(step).join(MANIFEST).is_file()));
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
            None if !self.folder.is_dir() => " (there is no such folder)".into(),
            None => String::new(),
        };
        Err(CheckpointError::NotFound { folder: self.folder.clone(), passed_over })
    }

    /// Checks that no run is saving into the folder; touches nothing.
    ///
    /// # Errors
    /// One is.
    pub fn check_free(&self) -> Checked<()> {
        match File::open(self.folder.join(LOCK)) {
            Ok(file) => self.take(&file),
            // No lock, no run; other errors come up when the folder is used.
            Err(_) => Ok(()),
        }
    }

    fn take(&self, file: &File) -> Checked<()> {
        // File systems that cannot lock are used without.
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            let problem = "another run is saving there; end it, or name another folder".into();
            return Err(self.unusable(problem));
        }
        Ok(())
    }

    fn unusable(&self, problem: String) -> CheckpointError {
        CheckpointError::Folder { folder: self.folder.clone(), problem }
    }

    /// Makes the folder if need be, takes it for this run and removes what an earlier one left
    /// half-written.
    ///
    /// # Errors
    /// Another run is at it; the file system's error.
    pub fn lock(&self) -> Checked<StoreLock> {
        let refused = |e| {
            let problem = format!("cannot be written ({e}); choose a folder you may write to");
            self.unusable(problem)
        };
        fs::create_dir_all(&self.folder).map_err(refused)?;
        let path = self.folder.join(LOCK);
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(refused)?;
        self.take(&file)?;
        self.clean()?;
        Ok(StoreLock { _file: file })
    }

    /// Removes what is half-written or half-removed.
    ///
    /// # Errors
    /// The file system's.
    pub fn clean(&self) -> Checked<()> {
        for entry in fs::read_dir(&self.folder).map_err(io("read", &self.folder))? {
            let entry = entry.map_err(io("read", &self.folder))?;
            if entry.file_name().to_string_lossy().starts_with(HIDDEN) {
                fs::remove_dir_all(entry.path()).map_err(io("remove", &entry.path()))?;
            }
        }
        Ok(())
    }

    /// The folder in which the files of the checkpoint after `step` steps are to be written.
    pub fn staging(&self, step: u64) -> PathBuf {
        self.folder.join(format!("{HIDDEN}{step:06}.tmp"))
    }

    /// Makes the [`staging`](Self::staging) folder; one rank calls it before any writes.
    ///
    /// # Errors
    /// The file system's.
    pub fn begin(&self, step: u64) -> Checked<()> {
        let staging = self.staging(step);
        fs::create_dir(&staging).map_err(io("create", &staging))
    }

    /// Turns the staging folder, whose files are all written and flushed, into the checkpoint:
    /// writes the manifest, flushes, gives the folder its name and flushes that.
    ///
    /// # Errors
    /// The file system's; then there is no such checkpoint, or it is complete.
    pub fn commit(&self, manifest: &Manifest) -> Checked<PathBuf> {
        let staging = self.staging(manifest.step);
        let path = staging.join(MANIFEST);
        let mut file = File::create_new(&path).map_err(io("create", &path))?;
        file.write_all(&manifest.to_bytes()).map_err(io("write", &path))?;
        file.sync_all().map_err(io("write", &path))?;
        sync_folder(&staging)?;

        let named = self.path(manifest.step);
        if named.exists() {
            // Not complete, or the run would not have started: it is in the way.
            self.discard(manifest.step)?;
        }
        fs::rename(&staging, &named).map_err(io("rename", &staging))?;
        sync_folder(&self.folder)?;
        Ok(named)
    }

    /// Removes complete checkpoints but for the newest `keep`, oldest first.
    ///
    /// # Errors
    /// The file system's.
    pub fn retain(&self, keep: usize) -> Checked<()> {
        let steps = self.steps()?;
        let old = steps.len().saturating_sub(keep.max(1));
        steps[..old].iter().try_for_each(|step| self.discard(*step))
    }

    /// Hides the folder first, so that no half-removed one is ever taken for a checkpoint.
    fn discard(&self, step: u64) -> Checked<()> {
        let named = self.path(step);
        let hidden = self.folder.join(format!("{HIDDEN}{step:06}.old"));
        fs::rename(&named, &hidden).map_err(io("rename", &named))?;
        fs::remove_dir_all(&hidden).map_err(io("remove", &hidden))
    }
}

/// Makes names in a folder durable. Windows has no such operation.
fn sync_folder(path: &Path) -> Checked<()> {
    if cfg!(windows) {
        return Ok(());
    }
    File::open(path).and_then(|f| f.sync_all()).map_err(io("flush", path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn save(store: &Store, step: u64) {
        store.begin(step).unwrap();
        let at = store.commit(&Manifest::new(step, step, 256, BTreeMap::new())).unwrap();
        assert_eq!(at, store.path(step));
    }

    #[test]
    fn only_complete_folders_count_and_the_newest_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path().join("a/b"));
        let none = store.newest().unwrap_err().to_string();
        assert!(none.contains("a/b") && none.contains("no such folder"), "{none}");

        let lock = store.lock().unwrap();
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
        store.begin(8).unwrap();
        assert_eq!(store.newest().unwrap(), store.path(7), "a staging folder is no checkpoint");
        store.retain(2).unwrap();
        assert_eq!(store.steps().unwrap(), [2, 7]);
        store.retain(0).unwrap();
        assert_eq!(store.steps().unwrap(), [7], "the newest is never removed");

        drop(lock);
        let _lock = store.lock().unwrap();
        assert!(!store.staging(8).exists(), "what was left half-written is gone");
        assert!(store.folder().join("other").exists(), "what is not ours stays");
        save(&store, 1_234_567);
        assert_eq!(store.newest().unwrap(), store.folder().join("step-1234567"));
    }
}
