//! What two buddies say to each other, and how a copy goes from one to the other.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use zeropp::rendezvous::tcp::{PIECE_BYTES, Talk};
use zeropp_checkpoint::part::is_name;
use zeropp_checkpoint::{Checkpoint, MANIFEST, Store};
use zeropp_core::files::in_words;

/// Most files of a copy: one a rank, and the manifest.
const FILES_MAX: usize = 1 << 20;
/// A manifest has its digest within these.
const MARK_BYTES: u64 = 96;
/// What tells the saves of this program from others'.
const RUN: &str = "buddy";

/// What is said before files.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Word {
    /// A copy of a run follows.
    Copy { run: String, step: u64, files: Vec<(String, u64)> },
    /// For the newest copy of a run.
    Ask { run: String },
    /// There is none.
    Nothing,
    /// Nobody needs the copies of a run any more: they may go.
    Forget { run: String },
    /// It is done.
    Done,
    /// It could not be done.
    Refused { why: String },
}

pub(super) fn say(talk: &mut Talk, word: &Word) -> io::Result<()> {
    talk.send(&serde_json::to_vec(word).expect("plain data"))
}

pub(super) fn hear(talk: &mut Talk) -> io::Result<Word> {
    serde_json::from_slice(&talk.receive()?).map_err(wrong)
}

pub(super) fn wrong(problem: impl ToString) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem.to_string())
}

/// Names come from another machine: they are no paths.
pub(super) fn is_run(name: &str) -> bool {
    name.len() == 16 && name.bytes().all(|b| b.is_ascii_hexdigit())
}

fn is_file(name: &str) -> bool {
    name == MANIFEST || is_name(name)
}

/// The files of a copy with their sizes, open, so that it may go meanwhile.
pub(super) type Opened = Vec<(String, u64, File)>;

pub(super) fn open_copy(folder: &Path, step: u64) -> io::Result<Opened> {
    let path = Store::new(folder).path(step);
    let open = |entry: io::Result<fs::DirEntry>| {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let file = File::open(path.join(&name))?;
        let bytes = file.metadata()?.len();
        Ok((name, bytes, file))
    };
    fs::read_dir(&path)?.map(open).collect()
}

/// Sends the copy of `step` of a run.
pub(super) fn send_copy(talk: &mut Talk, run: &str, step: u64, files: Opened) -> io::Result<u64> {
    let listed = files.iter().map(|(name, bytes, _)| (name.clone(), *bytes)).collect();
    say(talk, &Word::Copy { run: run.into(), step, files: listed })?;
    let mut piece = vec![0; PIECE_BYTES];
    let mut sent = 0;
    for (_, bytes, mut file) in files {
        let mut left = bytes;
        while left > 0 {
            let n = left.min(PIECE_BYTES as u64) as usize;
            file.read_exact(&mut piece[..n])?;
            talk.send(&piece[..n])?;
            left -= n as u64;
        }
        sent += bytes;
    }
    Ok(sent)
}

/// Takes in the files of a copy that was announced, below a run's `folder`, and checks that they
/// fit; where they are. It is no copy before it is published. No other one has its `number`.
pub(super) fn receive_copy(
    talk: &mut Talk,
    folder: &Path,
    (step, files): (u64, &[(String, u64)]),
    number: u64,
) -> io::Result<PathBuf> {
    let good = files.len() <= FILES_MAX && files.iter().all(|(name, _)| is_file(name));
    if !good {
        return Err(wrong("it has files that no copy has"));
    }
    fs::create_dir_all(folder)?;
    let bytes = files.iter().fold(0, |sum: u64, (_, bytes)| sum.saturating_add(*bytes));
    if let Some(free) = free_bytes(folder).filter(|free| *free < bytes) {
        let (bytes, free) = (in_words(bytes), in_words(free));
        return Err(io::Error::other(format!("it takes {bytes}, and {free} are free there")));
    }
    let staging = Store::new(folder).begin(step, &format!("{RUN}-{number}"));
    let staging = staging.map_err(io::Error::other)?;
    let taken = take_files(talk, &staging, files).and_then(|()| {
        let checkpoint = Checkpoint::open(&staging).map_err(wrong)?;
        checkpoint.check_sizes().map_err(wrong)?;
        match checkpoint.manifest().step == step {
            true => Ok(()),
            false => Err(wrong("its manifest is of another step")),
        }
    });
    if let Err(error) = taken {
        let _ = fs::remove_dir_all(&staging);
        return Err(error);
    }
    Ok(staging)
}

/// Makes what was received the copy of a run, and the only one.
pub(super) fn publish_copy(folder: &Path, staging: &Path, step: u64) -> io::Result<()> {
    let store = Store::new(folder);
    // A run that has gone back comes by the same steps again, with another state: the copy of this
    // step that is here may be of what it has given up.
    if store.path(step).exists() {
        store.discard(step).map_err(io::Error::other)?;
    }
    store.publish(staging, step).map_err(io::Error::other)?;
    // It has lower steps than before, too.
    drop(store.retain_only(step));
    Ok(())
}

#[cfg(target_os = "linux")]
fn free_bytes(folder: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(folder).ok()?;
    Some(stat.f_bavail.saturating_mul(stat.f_frsize))
}

#[cfg(not(target_os = "linux"))]
fn free_bytes(_: &Path) -> Option<u64> {
    None
}

/// What tells a copy from another one of the same step: how its manifest begins, which is with the
/// digest of all the rest.
pub(super) fn mark_of(folder: &Path, step: u64) -> Option<Vec<u8>> {
    let manifest = File::open(Store::new(folder).path(step).join(MANIFEST)).ok()?;
    let mut mark = Vec::new();
    manifest.take(MARK_BYTES).read_to_end(&mut mark).ok()?;
    Some(mark)
}

/// Whether the other side has hung up.
pub(super) fn is_gone(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof)
}

fn take_files(talk: &mut Talk, staging: &Path, files: &[(String, u64)]) -> io::Result<()> {
    for (name, bytes) in files {
        let mut file = File::create_new(staging.join(name))?;
        let mut left = *bytes;
        while left > 0 {
            let piece = talk.receive()?;
            left = left
                .checked_sub(piece.len() as u64)
                .filter(|_| !piece.is_empty())
                .ok_or_else(|| wrong("a piece that was not announced"))?;
            file.write_all(&piece)?;
        }
    }
    Ok(())
}
