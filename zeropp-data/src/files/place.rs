//! Which file or folder a path leads to, whatever it is called.

use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

/// A file or folder, there or yet to be made. Two paths to the same one, through links of either
/// kind or another spelling, give equal places.
#[derive(Clone, Debug)]
pub struct FilePlace {
    /// Without links, `.` and `..`.
    path: PathBuf,
    id: Option<Id>,
}

/// Device and number of a file on it.
type Id = (u64, u64);

impl FilePlace {
    /// Where `path` leads. What is not there yet is taken to come to lie where the path says.
    ///
    /// # Errors
    /// The system's, where a part of the path that is there cannot be looked at.
    pub fn new(path: &Path) -> io::Result<FilePlace> {
        let path = resolved(&std::path::absolute(path)?)?;
        let id = id(&path);
        Ok(FilePlace { path, id })
    }

    /// The path without links, `.` and `..`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path from `folder` to this, if this lies in it; empty where this is the folder.
    pub fn within(&self, folder: &FilePlace) -> Option<PathBuf> {
        // One that is mounted twice has two paths and one identity.
        let is_it = |dir: &&Path| {
            *dir == folder.path || folder.id.is_some_and(|folder| id(dir) == Some(folder))
        };
        let dir = self.path.ancestors().find(is_it)?;
        self.path.strip_prefix(dir).ok().map(Path::to_path_buf)
    }
}

impl PartialEq for FilePlace {
    fn eq(&self, other: &FilePlace) -> bool {
        self.path == other.path || self.id.is_some_and(|id| other.id == Some(id))
    }
}

/// `path`, absolute, without links; what is not there is kept as it is spelled.
fn resolved(path: &Path) -> io::Result<PathBuf> {
    match path.canonicalize() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        found => return found,
    }
    let (Some(parent), Some(last)) = (path.parent(), path.components().next_back()) else {
        return Ok(path.to_path_buf());
    };
    let mut found = resolved(parent)?;
    match last {
        Component::ParentDir => drop(found.pop()),
        last => found.push(last),
    }
    // A link to what is not there: writing to it would make that.
    match fs::read_link(&found) {
        Ok(target) => resolved(&parent_of(&found).join(target)),
        Err(_) => Ok(found),
    }
}

fn parent_of(path: &Path) -> &Path {
    path.parent().unwrap_or(path)
}

#[cfg(unix)]
fn id(path: &Path) -> Option<Id> {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(path).ok().map(|m| (m.dev(), m.ino()))
}

/// Elsewhere names alone count.
#[cfg(not(unix))]
fn id(_path: &Path) -> Option<Id> {
    None
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn one_file_is_one_place_under_all_its_names() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("a/b")).unwrap();
        fs::write(at("a/file"), "").unwrap();
        fs::hard_link(at("a/file"), at("hard")).unwrap();
        symlink("a/file", at("soft")).unwrap();
        symlink("a", at("folder")).unwrap();
        symlink("a/new", at("dangling")).unwrap();
        let place = |name: &str| FilePlace::new(&at(name)).unwrap();
        for name in ["hard", "soft", "folder/file", "a/b/../file", "./a//file"] {
            assert_eq!(place(name), place("a/file"), "{name}");
        }
        assert_ne!(place("a/b"), place("a/file"));
        for name in ["dangling", "folder/new", "a/none/../new"] {
            assert_eq!(place(name), place("a/new"), "{name}");
        }
        assert_ne!(place("a/new"), place("new"));
    }

    #[test]
    fn containment_is_found_through_links() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("a/b")).unwrap();
        symlink("a/b", at("link")).unwrap();
        let place = |name: &str| FilePlace::new(&at(name)).unwrap();
        let within = |name, folder| place(name).within(&place(folder));
        assert_eq!(within("link/new/file", "a"), Some("b/new/file".into()));
        assert_eq!(within("a", "a"), Some(PathBuf::new()));
        assert_eq!(within("ab", "a"), None);
        assert_eq!(within("a", "a/b"), None);
        assert_eq!(within("none/x", "none"), Some("x".into()));
    }
}
