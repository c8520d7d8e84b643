//! Copies at another machine's supervisor, its buddy: each complete copy of the own run is sent
//! there, and fetched from there where the own memory has none, as after the loss of a machine.
//!
//! What comes is a copy's files as they are in memory, in pieces; the manifest, whose digests are
//! of all of them, among them. It is a copy there once all of it has come and fits.

mod keeper;
mod wire;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use zeropp::rendezvous::tcp::Talk;
use zeropp::rendezvous::{Address, RendezvousError, Token};
use zeropp_checkpoint::Store;

pub(super) use keeper::keep;
use wire::{
    Word, hear, is_gone, mark_of, open_copy, publish_copy, receive_copy, say, send_copy, wrong,
};

/// How long nothing may come or go in a conversation that is under way.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often is looked for a new copy.
const PERIOD: Duration = Duration::from_millis(50);
/// A pause after the buddy could not be reached.
const PAUSE: Duration = Duration::from_secs(2);

/// Who keeps this one's copies.
#[derive(Clone, Debug)]
pub(super) struct Buddy {
    address: Address,
    token: Option<Token>,
}

/// What was sent to a buddy.
#[derive(Debug, Default)]
struct Sent {
    ends: AtomicBool,
    copies: AtomicU64,
    bytes: AtomicU64,
}

/// Sends the copies of a run while it lives.
#[derive(Debug)]
pub(super) struct Sending {
    sent: Arc<Sent>,
    thread: Option<JoinHandle<()>>,
}

impl Buddy {
    pub(super) fn new(address: Address, token: Option<Token>) -> Buddy {
        Buddy { address, token }
    }

    fn call(&self) -> Result<Talk, RendezvousError> {
        Talk::begin(&self.address, self.token.as_ref(), PATIENCE)
    }

    /// Fetches the newest copy of a run into `folder`, whose name is the run's; its step, if the
    /// buddy has one that is newer than what is `saved`.
    ///
    /// # Errors
    /// The buddy is not there, or what it sends is no copy, in words.
    pub(super) fn fetch(&self, folder: &Path, saved: Option<u64>) -> Result<Option<u64>, String> {
        let run = run_of(folder);
        let mut talk = self.call().map_err(|e| e.to_string())?;
        let fetch = || -> io::Result<Option<u64>> {
            say(&mut talk, &Word::Ask { run })?;
            match hear(&mut talk)? {
                Word::Nothing => Ok(None),
                Word::Copy { step, .. } if saved >= Some(step) => Ok(None),
                Word::Copy { step, files, .. } => {
                    let staging = receive_copy(&mut talk, folder, (step, &files), 0)?;
                    publish_copy(folder, &staging, step)?;
                    Ok(Some(step))
                }
                Word::Refused { why } => Err(wrong(why)),
                _ => Err(wrong("it answers something else")),
            }
        };
        fetch().map_err(|e| format!("rendezvous at {}: {e}", self.address))
    }

    /// Tells the buddy that nobody needs the copies of a run any more.
    pub(super) fn forget(&self, folder: &Path) {
        let run = run_of(folder);
        // One that is not there any more keeps nothing.
        let Ok(mut talk) = self.call() else { return };
        let _ = say(&mut talk, &Word::Forget { run }).and_then(|()| hear(&mut talk));
    }

    /// Sends every newest copy in `folder`, whose name is the run's, from now on.
    ///
    /// # Errors
    /// The system grants no thread.
    pub(super) fn send(&self, folder: PathBuf) -> io::Result<Sending> {
        let sent = Arc::new(Sent::default());
        let (buddy, told) = (self.clone(), sent.clone());
        let send = move || buddy.send_all(&folder, &told);
        let thread = Some(zeropp_core::threads::start("buddy", send)?);
        Ok(Sending { sent, thread })
    }

    fn send_all(&self, folder: &Path, sent: &Sent) {
        let (mut last, mut talk, mut is_told) = (None, None, false);
        while !sent.ends.load(Ordering::Relaxed) {
            std::thread::sleep(PERIOD);
            let newest = Store::new(folder).steps().ok().and_then(|steps| steps.last().copied());
            let Some(step) = newest else { continue };
            let mark = mark_of(folder, step);
            if mark.is_none() || mark == last {
                continue;
            }
            match self.send_one(&mut talk, folder, step) {
                Ok(None) => {}
                Ok(Some(bytes)) => {
                    (last, is_told) = (mark, false);
                    sent.copies.fetch_add(1, Ordering::Relaxed);
                    sent.bytes.fetch_add(bytes, Ordering::Relaxed);
                }
                Err(error) => {
                    talk = None;
                    if !std::mem::replace(&mut is_told, true) {
                        super::tell(&format!("the buddy has no copy of step {step} ({error})"));
                    }
                    std::thread::sleep(PAUSE);
                }
            }
        }
    }

    /// Sends a copy; its bytes, or none where it is gone already.
    fn send_one(
        &self,
        talk: &mut Option<Talk>,
        folder: &Path,
        step: u64,
    ) -> io::Result<Option<u64>> {
        let was_open = talk.is_some();
        match self.send_over(talk, folder, step) {
            // The buddy hangs up where nothing was said for a while, as between slow steps.
            Err(error) if was_open && is_gone(&error) => {
                *talk = None;
                self.send_over(talk, folder, step)
            }
            sent => sent,
        }
    }

    fn send_over(
        &self,
        talk: &mut Option<Talk>,
        folder: &Path,
        step: u64,
    ) -> io::Result<Option<u64>> {
        let files = match open_copy(folder, step) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            files => files?,
        };
        let talk = match talk {
            Some(talk) => talk,
            None => talk.insert(self.call().map_err(io::Error::other)?),
        };
        let sent = send_copy(talk, &run_of(folder), step, files);
        if sent.as_ref().is_err_and(|error| !is_gone(error)) {
            return sent.map(Some);
        }
        // One that has hung up has said why before, if it could.
        match (hear(talk), sent) {
            (Ok(Word::Refused { why }), _) => Err(io::Error::other(why)),
            (_, Err(error)) | (Err(error), _) => Err(error),
            (Ok(Word::Done), Ok(bytes)) => Ok(Some(bytes)),
            _ => Err(wrong("it answers something else")),
        }
    }
}

impl Sending {
    /// Copies and bytes that were sent so far.
    pub(super) fn sent(&self) -> (u64, u64) {
        (self.sent.copies.load(Ordering::Relaxed), self.sent.bytes.load(Ordering::Relaxed))
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        self.sent.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The name of a run is that of the folder of its copies.
fn run_of(folder: &Path) -> String {
    folder.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::fs;
    use zeropp_checkpoint::Manifest;

    #[test]
    fn a_step_that_a_run_comes_by_again_replaces_its_copy() {
        let dir = tempfile::tempdir().unwrap();
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let address: Address = port.to_string().parse().unwrap();
        assert!(keep(&address, None, &dir.path().join("kept")).is_ok());
        let buddy = Buddy::new(address, None);
        let folder = |at: &str| dir.path().join(at).join("0123456789abcdef");
        let mut talk = None;
        for updates in [7, 8] {
            let own = folder(&format!("own{updates}"));
            fs::create_dir_all(&own).unwrap();
            let store = Store::new(&own);
            let staging = store.begin(9, "a").unwrap();
            store.prepare(&staging, &Manifest::new(9, updates, 256, BTreeMap::new())).unwrap();
            store.publish(&staging, 9).unwrap();
            assert!(buddy.send_one(&mut talk, &own, 9).unwrap().is_some());
        }
        assert_ne!(mark_of(&folder("own7"), 9), mark_of(&folder("own8"), 9));
        assert_eq!(buddy.fetch(&folder("got"), Some(9)), Ok(None), "the disk has it");
        assert_eq!(buddy.fetch(&folder("got"), Some(8)), Ok(Some(9)));
        assert_eq!(mark_of(&folder("got"), 9), mark_of(&folder("own8"), 9));
        assert_eq!(fs::read_dir(folder("kept")).unwrap().count(), 1, "nothing else is left");
        buddy.forget(&folder("got"));
        assert_eq!(buddy.fetch(&folder("got"), None), Ok(None));
    }
}
