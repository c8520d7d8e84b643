//! Opening and reading files that are to be read to their end: regular ones, of a bounded size.

use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::path::Path;

/// Opens a regular file. A FIFO, a device, a socket or a folder in its place is refused at once:
/// to open a FIFO would be to wait for a writer, and a device may never end.
///
/// # Errors
/// The system's; [`io::ErrorKind::InvalidInput`] for what is no regular file.
pub fn open_regular(path: &Path) -> io::Result<File> {
    // Asked before it is opened, since opening alone makes some devices act.
    check_regular(&fs::metadata(path)?)?;
    let mut options = File::options();
    options.read(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        // Should it have become a FIFO by now, opening it does not wait.
        options.custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32);
    }
    let file = options.open(path)?;
    check_regular(&file.metadata()?)?;
    Ok(file)
}

/// Whether anything has this name, be it a link to nothing.
pub fn is_named(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

/// Reads a text file of at most `bytes_max` bytes.
///
/// # Errors
/// As [`open_regular`]; a larger file, whose message names the limit; what is not UTF-8.
pub fn read_text(path: &Path, bytes_max: u64) -> io::Result<String> {
    let file = open_regular(path)?;
    let too_large =
        || invalid(format!("it has more than {bytes_max} bytes, the most that are read"));
    let bytes = file.metadata()?.len();
    if bytes > bytes_max {
        return Err(too_large());
    }
    // It may grow, or be one of the system's files, which say 0.
    let mut text = Vec::with_capacity(bytes as usize);
    file.take(bytes_max.saturating_add(1)).read_to_end(&mut text)?;
    if text.len() as u64 > bytes_max {
        return Err(too_large());
    }
    String::from_utf8(text).map_err(|e| {
        invalid(format!("it is not UTF-8 text (byte {})", e.utf8_error().valid_up_to()))
    })
}

fn invalid(problem: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, problem)
}

pub(super) fn check_regular(metadata: &Metadata) -> io::Result<()> {
    if metadata.is_file() {
        return Ok(());
    }
    Err(invalid(format!("it is {}, not a regular file", kind(metadata))))
}

fn kind(metadata: &Metadata) -> &'static str {
    if metadata.is_dir() {
        return "a folder";
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        let kind = metadata.file_type();
        if kind.is_fifo() {
            return "a pipe (FIFO)";
        }
        if kind.is_socket() {
            return "a socket";
        }
    }
    "a device"
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn text_has_a_limit_that_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("text");
        fs::write(&path, "12345").unwrap();
        assert_eq!(read_text(&path, 5).unwrap(), "12345");
        let error = read_text(&path, 4).unwrap_err().to_string();
        assert_eq!(error, "it has more than 4 bytes, the most that are read");
        fs::write(&path, b"ab\xff").unwrap();
        let error = read_text(&path, 9).unwrap_err().to_string();
        assert_eq!(error, "it is not UTF-8 text (byte 2)");
        assert!(read_text(&dir.path().join("none"), 9).is_err());
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_systems_files_that_say_0_bytes_are_read_up_to_the_limit() {
        let path = Path::new("/proc/self/status");
        assert!(read_text(path, 1 << 20).unwrap().contains("VmRSS"));
        let error = read_text(path, 10).unwrap_err().to_string();
        assert_eq!(error, "it has more than 10 bytes, the most that are read");
    }

    /// Before, each of these hung for ever or read until memory was gone.
    #[test]
    #[cfg(unix)]
    fn irregular_files_are_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        let socket = dir.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        for (path, kind) in [
            (fifo.as_path(), "a pipe (FIFO)"),
            (Path::new("/dev/zero"), "a device"),
            (dir.path(), "a folder"),
            (&socket, "a socket"),
        ] {
            let start = Instant::now();
            let error = read_text(path, 100).unwrap_err().to_string();
            assert_eq!(error, format!("it is {kind}, not a regular file"));
            assert!(start.elapsed() < Duration::from_secs(1), "{kind}");
        }
    }
}
