//! Writing files that matter: a reader finds the old file or the new one, and never a part.

use std::ffi::OsString;
use std::fs::{self, File, Metadata};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::open_output;

/// Writes a file by `write`: beside its place, flushed to disk, and then given its name, so that
/// whatever goes wrong leaves what was there. A link stays one, and what it leads to is written; a
/// file keeps its permissions. What is no regular file (a device, a FIFO that is read), or lies in
/// a folder where nothing new may be written, is written where it is. Who writes in small pieces
/// buffers.
///
/// # Errors
/// The system's, or those of `write`.
pub fn write_whole(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    let found = fs::metadata(path).ok();
    if found.as_ref().is_some_and(|found| !found.is_file()) {
        return write(&mut open_output(path, File::options().write(true))?);
    }
    // Where nothing is, there is no link either, but for one that leads nowhere.
    let place = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    let aside = beside(&place);
    let mut file = match File::create_new(&aside) {
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied && found.is_some() => {
            return write(&mut File::create(path)?);
        }
        file => file?,
    };
    let named = write(&mut file)
        .and_then(|()| keep_permissions(&file, found.as_ref()))
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::rename(&aside, &place));
    if named.is_err() {
        // What cannot be removed has no name that anyone looks for.
        let _ = fs::remove_file(&aside);
    }
    named
}

fn keep_permissions(file: &File, found: Option<&Metadata>) -> io::Result<()> {
    found.map_or(Ok(()), |found| file.set_permissions(found.permissions()))
}

/// The name under which `path` is written: of its folder, and of this process and thread alone.
fn beside(path: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}-{:?}.tmp", std::process::id(), std::thread::current().id()));
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = entries.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_failed_write_leaves_the_old_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("page.html");
        write_whole(&path, |out| out.write_all(b"old")).unwrap();
        let broken = |out: &mut dyn Write| {
            out.write_all(&vec![b'n'; 1 << 20])?;
            Err(io::Error::other("the disk is full"))
        };
        let error = write_whole(&path, broken).unwrap_err();
        assert_eq!(error.to_string(), "the disk is full");
        assert_eq!(fs::read(&path).unwrap(), b"old");
        write_whole(&path, |out| out.write_all(b"new")).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(names(dir.path()), ["page.html"], "nothing is left beside it");
        let missing = dir.path().join("none/page.html");
        assert_eq!(write_whole(&missing, |_| Ok(())).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    #[cfg(unix)]
    fn links_permissions_and_devices_stay_what_they_are() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        fs::write(&file, "old").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        symlink("file", &link).unwrap();
        write_whole(&link, |out| out.write_all(b"new")).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&file).unwrap(), b"new");
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o640);
        let null = Path::new("/dev/null");
        write_whole(null, |out| out.write_all(b"gone")).unwrap();
        assert!(!fs::metadata(null).unwrap().is_file());
        assert_eq!(names(dir.path()), ["file", "link"]);
    }
}
