//! What a supervisor does about copies of its run's state: in its memory, and at its buddy.

use std::io;
use std::path::{Path, PathBuf};

use clap::ArgMatches;
use zeropp::Config;
use zeropp::rendezvous::{Address, TOKEN_VARIABLE, Token};
use zeropp_core::files::in_words;
use zeropp_core::threads::REFUSED_HELP;

use super::buddy::{self, Buddy, Sending};
use super::memory::Memory;
use super::progress::Watched;
use super::tell;
use crate::Failure;

/// Where others' copies are in the memory.
const KEPT: &str = "kept";

/// The copies of a run.
pub(super) struct Copies {
    memory: Option<Memory>,
    /// Who else has them, with the folder that they are sent from.
    buddy: Option<(Buddy, PathBuf, Sending)>,
}

impl Copies {
    /// As the flags say. Where a machine was lost, what the buddy has of the run that is `watched`
    /// is in the memory afterwards.
    ///
    /// # Errors
    /// A token that cannot be used; a place that cannot be served; no thread.
    pub(super) fn of(matches: &ArgMatches, watched: Option<&Watched>) -> Result<Copies, Failure> {
        let address = |name: &str| matches.get_one::<Address>(name).cloned();
        let (listen, buddy) = (address("listen"), address("buddy"));
        let file = matches.get_one::<PathBuf>("token-file").map(PathBuf::as_path);
        let token = Token::find(file, std::env::var(TOKEN_VARIABLE).ok());
        let token = token.map_err(Failure::bad_input)?;
        let memory = matches.get_one::<String>("memory").expect("it has a default");
        let memory = take_memory(Path::new(memory));
        let Some(memory) = memory else {
            return match listen.or(buddy) {
                Some(_) => Err(Failure::bad_input(
                    "supervise: listen and buddy need memory for copies; name a folder with \
                     --memory",
                )),
                None => Ok(Copies { memory: None, buddy: None }),
            };
        };
        if let Some(listen) = &listen {
            let kept = memory.folder().join(KEPT);
            buddy::keep(listen, token.as_ref(), &kept)?;
        }
        let folder = watched.map(Watched::save).and_then(|save| {
            let (save, copies) = (Some(save.into()), Some(memory.folder().into()));
            Config { save, copies, ..Config::default() }.copies_folder()
        });
        let buddy = buddy.zip(folder).map(|(address, folder)| {
            let buddy = Buddy::new(address, token);
            fetch(&buddy, &folder, watched.and_then(Watched::newest));
            let sending = buddy.send(folder.clone()).map_err(no_thread)?;
            Ok::<_, Failure>((buddy, folder, sending))
        });
        Ok(Copies { memory: Some(memory), buddy: buddy.transpose()? })
    }

    /// The folder that the run is told.
    pub(super) fn folder(&self) -> Option<&Path> {
        self.memory.as_ref().map(Memory::folder)
    }

    /// Step of the newest complete copy here.
    pub(super) fn newest(&self) -> Option<u64> {
        self.memory.as_ref()?.newest()
    }

    /// The run was stopped, and has `saved` a checkpoint after this step. Who has stopped it may
    /// want to go on from an earlier one, or begin anew: the buddy's copy would undo that. Where
    /// the disk has less than the copies it stays.
    pub(super) fn stop(self, saved: Option<u64>) {
        if saved.is_some() && saved >= self.newest() {
            self.forget();
        }
    }

    /// The run has ended well: nobody needs its copies any more.
    pub(super) fn forget(self) {
        let Some((buddy, folder, sending)) = self.buddy else { return };
        let (copies, bytes) = sending.sent();
        // What is on its way has come before it is forgotten.
        drop(sending);
        buddy.forget(&folder);
        tell(&format!("{copies} copies were sent to the buddy, {}", in_words(bytes)));
    }
}

/// The system grants no thread, without which copies are neither sent nor kept.
pub(super) fn no_thread(error: io::Error) -> Failure {
    Failure::failed_run(format!("supervise: no thread can be started ({error}); {REFUSED_HELP}"))
}

fn fetch(buddy: &Buddy, folder: &Path, saved: Option<u64>) {
    match buddy.fetch(folder, saved) {
        Ok(Some(step)) => tell(&format!(
            "the buddy had a copy of step {step}, which the command goes on from; to begin without \
             it, leave --buddy out or name another folder with --save"
        )),
        Ok(None) => {}
        Err(error) => tell(&format!(
            "nothing was fetched from the buddy ({error}); the command goes on from its newest \
             checkpoint"
        )),
    }
}

/// The memory for copies, unless there is to be none, or can be none, which is told.
fn take_memory(parent: &Path) -> Option<Memory> {
    if parent.as_os_str().is_empty() {
        return None;
    }
    let told = |e| {
        let parent = parent.display();
        tell(&format!(
            "memory = {parent}: no copies in memory are kept, as it cannot be written ({e}); after \
             a failure the command goes on from its newest checkpoint"
        ));
    };
    Memory::take(parent).map_err(told).ok()
}
