//! The calls that saving and resuming make to a file system, so that tests can replace it by one
//! that loses, tears and refuses what real ones may.

use std::ffi::OsString;
use std::fmt::Debug;
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::path::Path;

use zeropp_data::files::{open_output, open_regular};

/// A file system. What is written or renamed is certain to be there after a crash of the machine
/// only once it was flushed: a file by [`WriteFile::sync`], the names in a folder by
/// [`sync_folder`](Disk::sync_folder).
///
/// All errors are the file system's.
#[allow(clippy::missing_errors_doc)]
pub trait Disk: Debug + Send + Sync {
    /// Makes a folder, in one that is there.
    fn create_folder(&self, path: &Path) -> io::Result<()>;
    /// Makes a file that is not there.
    fn create_file(&self, path: &Path) -> io::Result<Box<dyn WriteFile>>;
    /// Opens a file to read.
    fn open(&self, path: &Path) -> io::Result<Box<dyn ReadFile>>;
    /// The entries of a folder.
    fn list(&self, folder: &Path) -> io::Result<Vec<FolderEntry>>;
    /// The kind of entry under a path, links followed; `NotFound` where there is none.
    fn look(&self, path: &Path) -> io::Result<PathKind>;
    /// Whether a name is taken, be it by a link that leads nowhere.
    fn is_taken(&self, path: &Path) -> bool;
    /// Gives another name, which is free.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// Removes a folder with all that is in it.
    fn remove_folder(&self, path: &Path) -> io::Result<()>;
    /// Makes the names in a folder durable.
    fn sync_folder(&self, folder: &Path) -> io::Result<()>;
    /// Takes a file for this process, made where it is to be and is not there; `WouldBlock` where
    /// another process has it.
    fn lock(&self, path: &Path, make: bool) -> io::Result<Box<dyn Lock>>;
}

/// A file that is written.
pub trait WriteFile: Write + Send {
    /// Makes its content durable.
    ///
    /// # Errors
    /// The file system's; what the file has is not known then.
    fn sync(&mut self) -> io::Result<()>;
}

/// A file that is read.
pub trait ReadFile: Read + Seek + Send {}

/// A file that is this process's own for as long as this lives.
pub trait Lock: Debug + Send + Sync {
    /// Writes in it who has it, for others to read.
    ///
    /// # Errors
    /// The file system's.
    fn say(&self, who: &str) -> io::Result<()>;

    /// Whether `path` still leads to it: it may have been removed, and another one be there.
    ///
    /// # Errors
    /// It cannot be looked at.
    fn is_at(&self, path: &Path) -> io::Result<bool>;
}

/// The kind of entry under a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathKind {
    /// A file of so many bytes.
    File(u64),
    /// A folder.
    Folder,
}

/// An entry of a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FolderEntry {
    /// Its name there.
    pub name: OsString,
    /// Whether it is a folder, and not a link to one.
    pub is_folder: bool,
}

/// The machine's own file system.
#[derive(Clone, Copy, Debug)]
pub struct System;

impl WriteFile for File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}

impl ReadFile for File {}

impl Lock for File {
    fn say(&self, who: &str) -> io::Result<()> {
        let mut file = self;
        self.set_len(0)?;
        file.rewind()?;
        file.write_all(who.as_bytes())
    }

    #[cfg(unix)]
    fn is_at(&self, path: &Path) -> io::Result<bool> {
        use std::os::unix::fs::MetadataExt;
        let own = self.metadata()?;
        match fs::metadata(path) {
            Ok(there) => Ok((own.dev(), own.ino()) == (there.dev(), there.ino())),
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                Ok(false)
            }
            Err(e) => Err(e),
        }
    }

    /// Here a file that is open cannot be replaced.
    #[cfg(not(unix))]
    fn is_at(&self, _path: &Path) -> io::Result<bool> {
        Ok(true)
    }
}

impl Disk for System {
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn create_file(&self, path: &Path) -> io::Result<Box<dyn WriteFile>> {
        Ok(Box::new(File::create_new(path)?))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn ReadFile>> {
        Ok(Box::new(open_regular(path)?))
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<FolderEntry>> {
        let entry = |entry: io::Result<fs::DirEntry>| {
            let entry = entry?;
            let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
            Ok(FolderEntry { name: entry.file_name(), is_folder })
        };
        fs::read_dir(folder)?.map(entry).collect()
    }

    fn look(&self, path: &Path) -> io::Result<PathKind> {
        let found = fs::metadata(path)?;
        Ok(if found.is_dir() { PathKind::Folder } else { PathKind::File(found.len()) })
    }

    fn is_taken(&self, path: &Path) -> bool {
        path.symlink_metadata().is_ok()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir_all(path)
    }

    /// Windows has no such operation.
    fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        if cfg!(windows) {
            return Ok(());
        }
        File::open(folder)?.sync_all()
    }

    /// File systems that cannot lock are used without.
    fn lock(&self, path: &Path, make: bool) -> io::Result<Box<dyn Lock>> {
        let file = match make {
            true => lock_file(path)?,
            false => open_regular(path)?,
        };
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => Err(ErrorKind::WouldBlock.into()),
            _ => Ok(Box::new(file)),
        }
    }
}

/// The file of a lock, made where nothing is. It is opened to write, which network file systems
/// want of a lock; a pipe in its place, which would wait for a reader, is refused.
fn lock_file(path: &Path) -> io::Result<File> {
    if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        return open_regular(path);
    }
    open_output(path, File::options().create(true).truncate(false).write(true))
}

/// Whether there is a file.
pub(crate) fn is_file(disk: &dyn Disk, path: &Path) -> bool {
    matches!(disk.look(path), Ok(PathKind::File(_)))
}

/// Makes a folder and those above it that are missing. Their names are durable then: what is
/// flushed in a folder is lost with the folder's own name.
pub(crate) fn create_folders(disk: &dyn Disk, path: &Path) -> io::Result<()> {
    if matches!(disk.look(path), Ok(PathKind::Folder)) {
        return Ok(());
    }
    let above = match path.parent() {
        Some(above) if !above.as_os_str().is_empty() => above,
        _ => Path::new("."),
    };
    if above != path && above != Path::new(".") {
        create_folders(disk, above)?;
    }
    match disk.create_folder(path) {
        Err(e) if e.kind() == ErrorKind::AlreadyExists => {
            // Another process was faster, or something else has the name.
            match disk.look(path)? {
                PathKind::Folder => {}
                PathKind::File(_) => return Err(e),
            }
        }
        made => made?,
    }
    match disk.sync_folder(above) {
        // A folder may be passed through and not read: its names are the administrator's matter.
        Err(e) if e.kind() == ErrorKind::PermissionDenied => Ok(()),
        synced => synced,
    }
}
