//! The files of a folder, as data has them.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A folder or file that could not be looked at.
#[derive(Debug)]
pub struct WalkError {
    /// The folder or file.
    pub path: PathBuf,
    /// Why.
    pub source: io::Error,
}

/// All files below `folder`, files and folders of one folder sorted by name together. Names that
/// begin with a dot are left out. Links to files count, links to folders do not: they could lead
/// back up.
///
/// # Errors
/// The first folder that cannot be read.
pub fn files_below(folder: &Path) -> Result<Vec<PathBuf>, WalkError> {
    let mut files = Vec::new();
    collect(folder, &mut files)?;
    Ok(files)
}

/// Whether a file or folder of this name is left out.
pub fn is_hidden(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(b".")
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), WalkError> {
    let failed = |path: &Path| {
        let path = path.to_path_buf();
        move |source| WalkError { path, source }
    };
    let entries = fs::read_dir(folder).map_err(failed(folder))?;
    let mut entries = entries.collect::<Result<Vec<_>, _>>().map_err(failed(folder))?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let path = entry.path();
        if is_hidden(&entry.file_name()) {
            continue;
        }
        if entry.file_type().map_err(failed(&path))?.is_dir() {
            collect(&path, files)?;
        } else if path.is_file() {
            files.push(path);
        }
    }
    Ok(())
}
