//! The one who keeps copies for others.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use zeropp::rendezvous::tcp::{Door, Talk};
use zeropp::rendezvous::{Address, Token};
use zeropp_checkpoint::Store;
use zeropp_core::threads::start;

use super::super::copies::no_thread;
use super::super::tell;
use super::wire::{
    Word, hear, is_run, open_copy, publish_copy, receive_copy, say, send_copy, wrong,
};
use super::{PATIENCE, PERIOD};
use crate::Failure;

/// Most callers at a time that have not yet shown that they know the token.
const WAITING_MAX: usize = 32;

/// Who keeps copies for others, in this folder.
struct Keeper {
    door: Door,
    folder: PathBuf,
    /// Callers that have not yet shown that they know the token.
    waiting: AtomicUsize,
    /// Numbers of what has been asked for, in order.
    numbers: AtomicU64,
    /// The number of the newest copy of each run. It is held while a copy is published or opened,
    /// and never while the network is waited for.
    newest: Mutex<HashMap<String, u64>>,
}

/// Keeps copies for whoever comes to `address` and knows the token, below `folder`, for as long as
/// the process lives.
///
/// # Errors
/// The place cannot be served; the system grants no thread.
pub(in super::super) fn keep(
    address: &Address,
    token: Option<&Token>,
    folder: &Path,
) -> Result<(), Failure> {
    let door = Door::open(address, token).map_err(Failure::bad_input)?;
    let folder = folder.to_path_buf();
    let (waiting, numbers, newest) = Default::default();
    let keeper = Arc::new(Keeper { door, folder, waiting, numbers, newest });
    start("keeper", move || keeper.listen()).map(drop).map_err(no_thread)
}

impl Keeper {
    fn listen(self: Arc<Self>) {
        let mut is_told = false;
        loop {
            let stream = match self.door.accept() {
                Ok(stream) => stream,
                Err(error) => {
                    // Such as too many open files: it passes.
                    if !std::mem::replace(&mut is_told, true) {
                        tell(&format!("a caller was not let in ({error})"));
                    }
                    std::thread::sleep(PERIOD);
                    continue;
                }
            };
            // Who comes is let in by a thread of its own: it may be slow, or not belong here.
            if self.waiting.fetch_add(1, Ordering::Relaxed) >= WAITING_MAX {
                self.waiting.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            let keeper = self.clone();
            let talk = move || keeper.serve(stream);
            if start("buddy's", talk).is_err() {
                self.waiting.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    fn serve(&self, stream: TcpStream) {
        let talk = self.door.let_in(stream, PATIENCE);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        let Ok(mut talk) = talk else { return };
        while let Ok(word) = hear(&mut talk) {
            let answer = match self.answer(&mut talk, word) {
                Ok(Some(answer)) => answer,
                Ok(None) => continue,
                Err(error) => Word::Refused { why: error.to_string() },
            };
            let goes_on = !matches!(answer, Word::Refused { .. });
            // After a refusal nobody knows what the next frame is.
            if say(&mut talk, &answer).is_err() || !goes_on {
                return;
            }
        }
    }

    /// Does what was asked for; nothing is left to say where it has been said.
    fn answer(&self, talk: &mut Talk, word: Word) -> io::Result<Option<Word>> {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed) + 1;
        let newest = || self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        let folder = |run: &str| match is_run(run) {
            true => Ok(self.folder.join(run)),
            false => Err(wrong("it is no name of a run")),
        };
        match word {
            Word::Copy { run, step, files } => {
                let folder = folder(&run)?;
                let staging = receive_copy(talk, &folder, (step, &files), number)?;
                let mut newest = newest();
                let newest = newest.entry(run).or_default();
                // What came later over another connection is not undone, and no ended run's copy
                // comes back.
                if *newest > number {
                    let _ = fs::remove_dir_all(&staging);
                    return Err(io::Error::other("a newer one has come"));
                }
                *newest = number;
                publish_copy(&folder, &staging, step)?;
                Ok(Some(Word::Done))
            }
            Word::Ask { run } => {
                let folder = folder(&run)?;
                let held = newest();
                let steps = Store::new(&folder).steps().map_err(io::Error::other)?;
                let Some(step) = steps.last() else { return Ok(Some(Word::Nothing)) };
                let files = open_copy(&folder, *step)?;
                drop(held);
                send_copy(talk, &run, *step, files)?;
                Ok(None)
            }
            Word::Forget { run } => {
                let folder = folder(&run)?;
                newest().insert(run, number);
                let _ = fs::remove_dir_all(folder);
                Ok(Some(Word::Done))
            }
            _ => Err(wrong("nobody asked")),
        }
    }
}
