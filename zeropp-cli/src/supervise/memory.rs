//! Where a supervisor keeps the copies of its run's state: a folder on a file system in memory. It
//! is the supervisor's own, so it outlives the run's processes, and goes with the supervisor.

use std::fs::{self, DirBuilder, File};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::path::{Path, PathBuf, absolute};

use zeropp_checkpoint::Store;
use zeropp_core::files::open_regular;

/// File systems in memory have this place on Linux.
pub(super) const DEFAULT: &str = "/dev/shm";
/// The folders of all supervisors begin with this.
const NAME: &str = "zeropp-copies-";
/// The file in it that a supervisor has locked while it lives.
const OWNER: &str = ".owner";

/// A folder for copies.
#[derive(Debug)]
pub(super) struct CopyFolder {
    folder: PathBuf,
    _owner: File,
}

impl CopyFolder {
    /// Makes a folder in `parent`, and removes those of supervisors that are gone.
    ///
    /// # Errors
    /// It cannot be made.
    pub(super) fn take(parent: &Path) -> io::Result<CopyFolder> {
        // The command may have another working directory.
        let parent = &absolute(parent)?;
        // In containers that share their memory processes have equal numbers.
        let random = RandomState::new().build_hasher().finish();
        let name = format!("{NAME}{}-{random:016x}", std::process::id());
        // It has its name once it is locked: what has the name and no lock is left behind.
        let hidden = parent.join(format!(".{name}"));
        let folder = parent.join(name);
        let mut builder = DirBuilder::new();
        // The state of a model is for its owner alone.
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(&hidden)?;
        let owner = File::create_new(hidden.join(OWNER))?;
        owner.try_lock().map_err(io::Error::from)?;
        fs::rename(&hidden, &folder)?;
        remove_left(parent, &folder);
        Ok(CopyFolder { folder, _owner: owner })
    }

    /// The folder.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Step of the newest complete copy, of whatever run.
    pub(super) fn newest(&self) -> Option<u64> {
        let runs = fs::read_dir(&self.folder).ok()?.flatten();
        runs.filter_map(|run| Some(zeropp::saved(&run.path()).ok()??.newest?.step)).max()
    }
}

impl Drop for CopyFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// A supervisor that was killed leaves its folder; a run of its may still be at work there. Only
/// folders of the user to whom this one's `own` belongs are looked into.
fn remove_left(parent: &Path, own: &Path) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    let user = user_of(own);
    let is_one = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(NAME))
            && user.is_some()
            && user_of(path) == user
    };
    for folder in entries.flatten().map(|entry| entry.path()).filter(is_one) {
        // What is no file is not waited for.
        let owner = open_regular(&folder.join(OWNER));
        let is_left = owner.is_ok_and(|owner| owner.try_lock().is_ok());
        if is_left && !is_in_use(&folder) {
            let _ = fs::remove_dir_all(&folder);
        }
    }
}

/// To whom a folder belongs; none where it is no folder.
fn user_of(path: &Path) -> Option<u32> {
    let meta = fs::symlink_metadata(path).ok().filter(fs::Metadata::is_dir)?;
    Some(uid(&meta))
}

#[cfg(unix)]
fn uid(meta: &fs::Metadata) -> u32 {
    std::os::unix::fs::MetadataExt::uid(meta)
}

#[cfg(not(unix))]
fn uid(_: &fs::Metadata) -> u32 {
    0
}

/// Whether a run holds its folder, which it does before its first copy, too.
fn is_in_use(folder: &Path) -> bool {
    let runs = fs::read_dir(folder).into_iter().flatten().flatten();
    runs.map(|run| Store::new(run.path())).any(|run| run.check_free().is_err())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_goes_with_its_supervisor_also_where_that_was_killed() {
        let dir = tempfile::tempdir().unwrap();
        let left = dir.path().join(format!("{NAME}1"));
        fs::create_dir(&left).unwrap();
        fs::write(left.join(OWNER), "").unwrap();
        // A run is at work below one before its first copy; what is no file is not waited for.
        let used = dir.path().join(format!("{NAME}3"));
        fs::create_dir(&used).unwrap();
        fs::write(used.join(OWNER), "").unwrap();
        let run = Store::new(used.join("run")).lock().unwrap();
        let odd = dir.path().join(format!("{NAME}4"));
        fs::create_dir(&odd).unwrap();
        let made = std::process::Command::new("mkfifo").arg(odd.join(OWNER)).status();
        assert!(made.is_ok_and(|made| made.success()));
        // Somebody else's, and one that is being made.
        fs::create_dir(dir.path().join("other")).unwrap();
        fs::create_dir(dir.path().join(format!("{NAME}2"))).unwrap();
        let memory = CopyFolder::take(dir.path()).unwrap();
        assert!(!left.exists() && used.exists() && odd.exists());
        drop(run);
        let folder = memory.folder().to_path_buf();
        remove_left(dir.path(), &folder);
        assert!(folder.exists() && !used.exists(), "one that is in use stays");
        assert_eq!(memory.newest(), None);
        drop(memory);
        assert!(!folder.exists() && dir.path().join("other").exists());
        assert!(dir.path().join(format!("{NAME}2")).exists());
        assert!(CopyFolder::take(&dir.path().join("none")).is_err());
    }
}
