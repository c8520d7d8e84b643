//! The files of a folder, as data has them.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::regular::check_regular;

/// A folder or file that could not be looked at.
#[derive(Debug)]
pub struct WalkError {
    /// The folder or file.
    pub path: PathBuf,
    /// Why.
    pub source: io::Error,
}

/// All files below `folder`, files and folders of one folder sorted by name together. Names that
/// begin with a dot are left out; links are followed.
///
/// # Errors
/// The first folder that cannot be read, link that leads nowhere or back to a folder that it is in,
/// or entry that is neither file nor folder.
pub fn files_below(folder: &Path) -> Result<Vec<PathBuf>, WalkError> {
    let mut files = Vec::new();
    collect(folder, &mut Vec::new(), &mut files)?;
    Ok(files)
}

/// Whether a file or folder of this name is left out.
pub fn is_hidden(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(b".")
}

/// Adds the files below `folder`, which is in the folders `around`.
fn collect(
    folder: &Path,
    around: &mut Vec<PathBuf>,
    files: &mut Vec<PathBuf>,
) -> Result<(), WalkError> {
    let failed = |path: &Path| {
        let path = path.to_path_buf();
        move |source| WalkError { path, source }
    };
    let wrong = |problem: &str| io::Error::new(io::ErrorKind::InvalidInput, problem.to_owned());
    let this = fs::canonicalize(folder).map_err(failed(folder))?;
    if around.contains(&this) {
        let problem = "it is a link back to a folder that it is in";
        return Err(failed(folder)(wrong(problem)));
    }
    around.push(this);
    let entries = fs::read_dir(folder).map_err(failed(folder))?;
    let mut entries = entries.collect::<Result<Vec<_>, _>>().map_err(failed(folder))?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let path = entry.path();
        if is_hidden(&entry.file_name()) {
            continue;
        }
        let metadata = fs::metadata(&path).map_err(|error| {
            let leads_nowhere = error.kind() == io::ErrorKind::NotFound && path.is_symlink();
            let error =
                if leads_nowhere { wrong("it is a link that leads nowhere") } else { error };
            failed(&path)(error)
        })?;
        if metadata.is_dir() {
            collect(&path, around, files)?;
        } else {
            check_regular(&metadata).map_err(failed(&path))?;
            files.push(path);
        }
    }
    around.pop();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(unix)]
    fn links_are_followed_or_named() {
        use std::os::unix::fs::symlink;
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("data")).unwrap();
        fs::create_dir_all(at("other/deep")).unwrap();
        fs::write(at("other/deep/b.txt"), "b").unwrap();
        fs::write(at("data/a.txt"), "a").unwrap();
        symlink(at("other"), at("data/linked")).unwrap();
        symlink(at("data/a.txt"), at("data/z.txt")).unwrap();
        let found = files_below(&at("data")).unwrap();
        assert_eq!(found, ["data/a.txt", "data/linked/deep/b.txt", "data/z.txt"].map(at));
        for (target, name, problem) in [
            (at("gone"), "data/dead", "it is a link that leads nowhere"),
            (at("data"), "other/back", "it is a link back to a folder that it is in"),
        ] {
            symlink(target, at(name)).unwrap();
            let error = files_below(&at("data")).unwrap_err();
            assert_eq!(error.source.to_string(), problem);
            assert!(error.path.ends_with(name.split('/').next_back().unwrap()), "{error:?}");
            fs::remove_file(at(name)).unwrap();
        }
    }
}
