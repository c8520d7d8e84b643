//! Opening files to write, which never waits: a pipe without a reader is refused.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::Path;

/// Opens `path` to write with these `options`. A FIFO that another process reads is written to; one
/// without a reader is refused at once, where opening it would wait until one comes.
///
/// # Errors
/// The system's; [`io::ErrorKind::InvalidInput`] for a FIFO without a reader.
pub fn open_output(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
        options.custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32);
        let file = options.open(path).map_err(|e| {
            let is_fifo = || fs::metadata(path).is_ok_and(|found| found.file_type().is_fifo());
            if e.raw_os_error() != Some(rustix::io::Errno::NXIO.raw_os_error()) || !is_fifo() {
                return e;
            }
            let problem = "it is a pipe (FIFO) that nobody reads; start its reader first";
            io::Error::new(io::ErrorKind::InvalidInput, problem)
        })?;
        // Only opening is not to wait: a slow reader of a pipe is waited for.
        let flags = rustix::fs::fcntl_getfl(&file)?;
        rustix::fs::fcntl_setfl(&file, flags - rustix::fs::OFlags::NONBLOCK)?;
        Ok(file)
    }
    #[cfg(not(unix))]
    options.open(path)
}

/// Whether there is something that is no regular file, such as a pipe or a device.
pub(super) fn is_special(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| !found.is_file())
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use std::io::Read;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::files::{open_kept, write_whole};

    fn fifo(folder: &Path) -> std::path::PathBuf {
        let path = folder.join("fifo");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        path
    }

    #[test]
    fn a_pipe_without_a_reader_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = fifo(dir.path());
        let begin = Instant::now();
        let opened = open_output(&path, OpenOptions::new().write(true)).map(drop);
        let kept = open_kept(&path, |_| Ok(0)).map(drop);
        let whole = write_whole(&path, |out| out.write_all(b"text"));
        for refused in [opened, kept, whole] {
            let error = refused.unwrap_err().to_string();
            assert_eq!(error, "it is a pipe (FIFO) that nobody reads; start its reader first");
        }
        assert!(begin.elapsed() < Duration::from_secs(1));
    }

    #[test]
    fn a_pipe_that_is_read_gets_all_of_it_however_slow_its_reader() {
        let dir = tempfile::tempdir().unwrap();
        let path = fifo(dir.path());
        // Opened to read and write, so that it does not wait for who writes.
        let mut reader = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let text = vec![b'x'; 1 << 20];
        let sent = text.clone();
        let writer = std::thread::spawn(move || write_whole(&path, |out| out.write_all(&sent)));
        std::thread::sleep(Duration::from_millis(100));
        let mut got = vec![0; text.len()];
        reader.read_exact(&mut got).unwrap();
        writer.join().unwrap().unwrap();
        assert!(got == text);
    }
}
