//! How fast the disk is that ranks put activations or states out to.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Instant;

use zeropp_core::files::{nameless, room_in};

use super::together::together;
use crate::Error;
use crate::config::{Config, ConfigError};

/// Bytes of the files of all ranks, and the fewest of one.
const ALL_BYTES: usize = 256 << 20;
const BYTES_MIN: usize = 16 << 20;
/// Bytes that are written or read at once, as pieces of an update are.
const BLOCK: usize = 512 << 10;

/// The disk's rates, of one rank's file while all ranks have one.
#[derive(Clone, Debug, PartialEq)]
pub struct FileRate {
    /// The folder.
    pub folder: PathBuf,
    /// Bytes in a second that were written, until the disk had them.
    pub written: f64,
    /// Bytes in a second that were read, after the system was asked to forget what it has of them.
    pub read: f64,
    /// Whether the folder is in memory.
    pub is_memory: bool,
}

impl FileRate {
    /// Bytes in a second where as much is read as written: a rank's copies are one queue.
    pub fn bytes_per_s(&self) -> f64 {
        2.0 / (1.0 / self.written + 1.0 / self.read)
    }
}

/// Measures the folder that `config` names for what ranks put out; none where it names none.
///
/// # Errors
/// A folder where files cannot be written or read, or threads that are refused.
pub(super) fn measure(config: &Config, ranks: usize) -> Result<Option<FileRate>, Error> {
    let states = config.states_folder().map(|folder| ("optimizer:out", folder));
    let activations = config.out_folder().map(|folder| ("recompute:out", folder));
    let Some((field, folder)) = states.or(activations) else { return Ok(None) };
    let failed = |e: io::Error| -> Error {
        let help = "name a folder that may be written to, with room for 256 MiB";
        ConfigError::value(field, folder.display(), format!("{e}"), help).into()
    };
    let blocks = (ALL_BYTES / ranks).max(BYTES_MIN) / BLOCK;
    let times = together(ranks, |_, ready| {
        let file = nameless(folder);
        ready();
        seconds(&file?, blocks)
    })?;
    let times = times.into_iter().collect::<io::Result<Vec<_>>>().map_err(failed)?;
    let slowest = |way: usize| times.iter().map(|both| both[way]).fold(f64::MIN_POSITIVE, f64::max);
    let rate = |way: usize| (blocks * BLOCK) as f64 / slowest(way);
    let is_memory = room_in(folder).is_ok_and(|room| room.is_memory);
    Ok(Some(FileRate { folder: folder.to_owned(), written: rate(0), read: rate(1), is_memory }))
}

/// Seconds in which so many blocks are written, and read.
fn seconds(file: &File, blocks: usize) -> io::Result<[f64; 2]> {
    let mut block = vec![0u8; BLOCK];
    let mut word = 1u64;
    let begun = Instant::now();
    for i in 0..blocks {
        // Nothing that a disk could write in short.
        for bytes in block.chunks_exact_mut(8) {
            word = word.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            bytes.copy_from_slice(&(word ^ (word >> 29)).to_le_bytes());
        }
        file.write_all_at(&block, (i * BLOCK) as u64)?;
    }
    file.sync_data()?;
    let written = begun.elapsed().as_secs_f64();
    forget(file);
    let begun = Instant::now();
    for i in 0..blocks {
        file.read_exact_at(&mut block, (i * BLOCK) as u64)?;
    }
    Ok([written, begun.elapsed().as_secs_f64()])
}

/// Asks the system to forget what memory has of a file, so that it is read from the disk.
#[cfg(target_os = "linux")]
fn forget(file: &File) {
    // What it does not forget is read faster than the disk is.
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
}

#[cfg(not(target_os = "linux"))]
fn forget(_: &File) {}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_folder_that_is_named_is_measured_and_left_empty() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("new");
        let named = Config { optimizer_out: Some(folder.clone()), ..Config::default() };
        let rate = measure(&named, 2).unwrap().expect("it is named");
        assert!(rate.written > 1e5 && rate.read > 1e5, "{rate:?}");
        let both = rate.bytes_per_s();
        assert!(rate.written.min(rate.read) <= both && both <= rate.written.max(rate.read));
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
        assert_eq!(measure(&Config::default(), 2).unwrap(), None);
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let named = Config { recompute_out: Some(file), ..Config::default() };
        let said = measure(&named, 1).unwrap_err().to_string();
        assert!(said.contains("recompute:out = "), "{said}");
    }
}
