//! The threads of this process's ranks: how they are started, and which of several failures is the
//! cause of the others.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use tracing::{debug_span, dispatcher};
use zeropp_comm::CommError;
use zeropp_pipeline::executor::StatusBoard;
use zeropp_pipeline::flight::EndKind;

use crate::Error;
use crate::error::RankError;
use crate::recorder;
use crate::run::rank::{News, RankEnd, Shared, run_rank};
use crate::run::trace;
use crate::world::LocalRank;

/// Stack of a rank's thread: a graph of many layers is walked recursively when it is dropped.
const STACK_BYTES: usize = 32 << 20;

/// What the threads of ranks tell the trainer.
pub(crate) enum Message {
    /// From the first rank of this process.
    News(News),
    /// From each, with its number, last of all.
    Done(usize, Result<RankEnd, Failure>),
}

/// Why a rank failed.
pub(crate) enum Failure {
    Rank(RankError),
    Panic(String),
}

/// Starts a rank on a thread of its own, which tells `tx` how it goes on and, last, how it ended.
pub(crate) fn spawn_rank(
    LocalRank { rank, device, communicator: world }: LocalRank,
    shared: Shared,
    here: Arc<[usize]>,
    tx: Sender<Message>,
) {
    let (told, aborted) = (tx.clone(), world.clone());
    // Whoever listens here listens to the ranks, too.
    let listener = dispatcher::get_default(Clone::clone);
    let body = move || {
        let _listener = dispatcher::set_default(&listener);
        let _in_rank = debug_span!(parent: &shared.span, "rank", rank).entered();
        if let Some(recorder) = &shared.recorder {
            recorder::this_thread_is(rank, recorder);
        }
        let steps = tx.clone();
        let run = AssertUnwindSafe(|| {
            run_rank(&shared, device, world.clone(), |news| {
                // The trainer may have given up already; then nobody listens.
                let _ = steps.send(Message::News(news));
            })
        });
        let result = match std::panic::catch_unwind(run) {
            Ok(Ok(result)) => Ok(result),
            // Bad input: all ranks end with the same words, and none has begun.
            Ok(Err(e)) if e.is_bad_input() => Err(Failure::Rank(e)),
            Ok(Err(e)) => {
                if let Some(recorder) = &shared.recorder {
                    recorder.end_with(rank, &e);
                }
                world.abort(&explain(&e, &here, &shared.status));
                Err(Failure::Rank(e))
            }
            Err(panic) => {
                let what = trace::panic_text(&*panic);
                let place = shared.status.describe(rank);
                let text = format!("panicked: {what} ({place})");
                if let Some(recorder) = &shared.recorder {
                    recorder.end(rank, EndKind::Panic, &text, None);
                }
                world.abort(&text);
                Err(Failure::Panic(text))
            }
        };
        let is_bad_input = matches!(&result, Err(Failure::Rank(e)) if e.is_bad_input());
        if let (Err(_), Some(recorder), false) = (&result, &shared.recorder, is_bad_input) {
            // What cannot be written now, the trainer tells of when it tries again.
            let _ = recorder.write(rank);
        }
        let _ = tx.send(Message::Done(rank, result));
    };
    let named = std::thread::Builder::new().name(format!("rank {rank}"));
    if let Err(e) = named.stack_size(STACK_BYTES).spawn(body) {
        let mib = STACK_BYTES >> 20;
        let text = format!(
            "its thread with a stack of {mib} MiB cannot be started ({e}); raise ulimit -v or -u"
        );
        aborted.abort(&text);
        // The trainer waits for this.
        let _ = told.send(Message::Done(rank, Err(Failure::Panic(text))));
    }
}

/// The error in words, with what the ranks of this process behind it were last seen doing.
fn explain(error: &RankError, here: &[usize], status: &StatusBoard) -> String {
    let text = error.to_string();
    let Some(source) = error.between_ranks() else { return text };
    let (missing, after_s) = match source {
        CommError::Timeout { missing, after_s, .. } => (missing.as_slice(), *after_s),
        CommError::PeerLost { rank, .. } => (std::slice::from_ref(rank), 0.0),
        _ => (Default::default(), 0.0),
    };
    // Who is missing may itself wait for another: the one that computes all the while is the cause.
    let mut seen = match after_s > 0.0 {
        true => status.stalled(Duration::from_secs_f64(after_s / 2.0)),
        false => Vec::new(),
    };
    if seen.is_empty() {
        let missing = missing.iter().filter(|rank| here.contains(rank));
        seen = missing.map(|rank| status.describe(*rank)).collect();
    }
    if seen.is_empty() { text } else { format!("{text}; last seen: {}", seen.join("; ")) }
}

/// The failure that caused the others: a panic, else an error of a rank's own, else an echo.
pub(crate) fn culprit(
    failures: Vec<(usize, Failure)>,
    here: &[usize],
    status: &StatusBoard,
) -> Option<Error> {
    let weight = |f: &Failure| match f {
        Failure::Panic(_) => 0,
        Failure::Rank(e) if e.between_ranks().is_some_and(CommError::is_echo) => 2,
        Failure::Rank(_) => 1,
    };
    let (rank, failure) = failures.into_iter().min_by_key(|(rank, f)| (weight(f), *rank))?;
    let message = match failure {
        Failure::Panic(text) => text,
        Failure::Rank(RankError::Resume(e)) => return Some(e.into()),
        Failure::Rank(RankError::Program(text)) => return Some(Error::Program(text)),
        Failure::Rank(e) => explain(&e, here, status),
    };
    Some(Error::Rank { rank, message })
}
