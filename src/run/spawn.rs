//! The threads of this process's ranks: how they are started, and which of several failures is the
//! cause of the others.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use tracing::{Span, debug_span, dispatcher};
use zeropp_comm::{CommError, Communicator};
use zeropp_core::threads::{REFUSED_HELP, start_as};
use zeropp_pipeline::executor::{ExecutorError, StatusBoard, StepError};
use zeropp_pipeline::flight::EndKind;

use crate::Error;
use crate::error::RankError;
use crate::recorder::{self, FlightRecorder};
use crate::run::trace;
use crate::world::LocalRank;

/// A message from the thread of a rank to the one that has started it.
pub(crate) enum Message<N, R> {
    /// While a rank is at work.
    News(N),
    /// From each, with its number, last of all.
    Done(usize, Result<R, Failure>),
}

/// Why a rank failed.
pub(crate) enum Failure {
    Rank(RankError),
    Panic(String),
}

/// A rank that failed, and why.
pub(crate) struct RankFailure {
    pub(crate) rank: usize,
    pub(crate) failure: Failure,
}

/// The state that the ranks of a process share, whatever they do.
pub(crate) struct Around {
    /// World ranks of this process.
    pub(crate) here: Arc<[usize]>,
    /// The current action of each rank.
    pub(crate) status: Arc<StatusBoard>,
    pub(crate) recorder: Option<Arc<FlightRecorder>>,
    /// The span of the ranks' events.
    pub(crate) span: Span,
    /// Stack of a rank's thread.
    pub(crate) stack_bytes: usize,
}

/// Starts a rank on a thread of its own, which does `work`, sends `tx` its events and, last, how it
/// ended.
pub(crate) fn spawn_rank<N, R, W>(
    local: LocalRank,
    around: Arc<Around>,
    tx: Sender<Message<N, R>>,
    work: Arc<W>,
) where
    N: Send + 'static,
    R: Send + 'static,
    W: Fn(LocalRank, &mut dyn FnMut(N)) -> Result<R, RankError> + Send + Sync + 'static,
{
    let (rank, world, told) = (local.rank, local.communicator.clone(), tx.clone());
    let (aborted, shared, stack_bytes) = (world.clone(), around.clone(), around.stack_bytes);
    // A subscriber of this thread also receives the ranks' events.
    let listener = dispatcher::get_default(Clone::clone);
    let body = move || {
        let _listener = dispatcher::set_default(&listener);
        let _in_rank = debug_span!(parent: &around.span, "rank", rank).entered();
        if let Some(recorder) = &around.recorder {
            recorder::this_thread_is(rank, recorder);
        }
        let steps = tx.clone();
        let run = AssertUnwindSafe(|| {
            work(local, &mut |news| {
                // The thread that started the rank may have given up already; then nothing receives
                // this.
                let _ = steps.send(Message::News(news));
            })
        });
        let result = match std::panic::catch_unwind(run) {
            Ok(result) => result.map_err(Failure::Rank),
            Err(panic) => {
                let (what, place) = (trace::panic_text(&*panic), around.status.describe(rank));
                Err(Failure::Panic(format!("panicked: {what} ({place})")))
            }
        };
        if let Err(failure) = &result {
            end_others(rank, failure, &around, &*world);
        }
        let _ = tx.send(Message::Done(rank, result));
    };
    let named = || std::thread::Builder::new().name(format!("rank {rank}")).stack_size(stack_bytes);
    if let Err(e) = start_as(named, body) {
        let mib = stack_bytes >> 20;
        let text =
            format!("its thread with a stack of {mib} MiB cannot be started ({e}); {REFUSED_HELP}");
        if let Some(recorder) = &shared.recorder {
            recorder.end(rank, EndKind::Error, &text, None);
            // Where it cannot be written now, the trainer reports that when it tries again.
            let _ = recorder.write(rank);
        }
        aborted.abort(&text);
        // Who started the rank waits for this.
        let _ = told.send(Message::Done(rank, Err(Failure::Panic(text))));
    }
}

/// Ends the world of a rank that failed, and writes what it did last.
fn end_others(rank: usize, failure: &Failure, around: &Around, world: &dyn Communicator) {
    let recorder = around.recorder.as_ref();
    match failure {
        // Bad input: all ranks end with the same words, and none has begun.
        Failure::Rank(e) if e.is_bad_input() => return,
        // No rank has failed; the others need to be notified.
        Failure::Rank(e @ RankError::NotBegun) => return world.abort(&e.to_string()),
        Failure::Rank(e) => {
            if let Some(recorder) = recorder {
                recorder.end_with(rank, e);
            }
            world.abort(&explain(e, around));
        }
        Failure::Panic(text) => {
            if let Some(recorder) = recorder {
                recorder.end(rank, EndKind::Panic, text, None);
            }
            world.abort(text);
        }
    }
    if let Some(recorder) = recorder {
        // Where it cannot be written now, the trainer reports that when it tries again.
        let _ = recorder.write(rank);
    }
}

/// Advice where nothing is wrong but the time.
const MORE_TIME: &str = "raise timeout-s if a step takes that long";

/// The error in words, with what the ranks of this process behind it were last seen doing.
fn explain(error: &RankError, around: &Around) -> String {
    let (here, status) = (&around.here, &around.status);
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
    let seen = match seen.is_empty() {
        true => String::new(),
        false => format!("; last seen: {}", seen.join("; ")),
    };
    let help = if after_s > 0.0 { format!("; {MORE_TIME}") } else { String::new() };
    format!("{text}{seen}{help}")
}

/// By what the failure that caused the others comes before them: a panic, else an error of a rank's
/// own, else an echo.
fn order(failed: &RankFailure) -> (u8, usize) {
    let weight = match &failed.failure {
        Failure::Panic(_) => 0,
        Failure::Rank(e) if e.between_ranks().is_some_and(CommError::is_echo) => 2,
        Failure::Rank(_) => 1,
    };
    (weight, failed.rank)
}

/// The rank that is lost, of those that failed and those that they missed: the one that others
/// waited for in vain, else the one whose failure caused the others.
pub(crate) fn lost(failures: &[RankFailure]) -> Option<usize> {
    let first = failures.iter().min_by_key(|failed| order(failed))?;
    let missing = match &first.failure {
        Failure::Rank(e) => match e.between_ranks() {
            Some(CommError::Timeout { missing, .. }) => missing.first().copied(),
            Some(CommError::PeerLost { rank, .. }) => Some(*rank),
            _ => None,
        },
        Failure::Panic(_) => None,
    };
    Some(missing.unwrap_or(first.rank))
}

/// The failure that caused the others.
pub(crate) fn culprit(failures: Vec<RankFailure>, around: &Around) -> Option<Error> {
    let RankFailure { rank, failure } = failures.into_iter().min_by_key(order)?;
    let message = match failure {
        Failure::Panic(text) => text,
        Failure::Rank(RankError::Resume(e)) => return Some(e.into()),
        Failure::Rank(RankError::Program(text)) => return Some(Error::Program(text)),
        Failure::Rank(RankError::Step(ExecutorError { source: StepError::Data(e), .. })) => {
            return Some(e.into());
        }
        Failure::Rank(RankError::Step(ExecutorError {
            source: e @ StepError::Shape { .. },
            ..
        })) => {
            return Some(Error::Model(e.to_string()));
        }
        Failure::Rank(e) => explain(&e, around),
    };
    Some(Error::Rank { rank, message })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use zeropp_core::device::Devices;
    use zeropp_pipeline::flight::{Cause, Run, judge};

    use super::*;
    use crate::config::Config;
    use crate::trainer::Trainer;
    use crate::world::{self, World};

    /// No system has room for such a stack.
    const TOO_LARGE: usize = usize::MAX / 4;

    /// All records of the process's ranks are one run's, and `why` names the right one of them.
    #[test]
    fn a_rank_whose_thread_cannot_be_started_is_the_one_to_blame() {
        let dir = tempfile::tempdir().unwrap();
        let (pp, zero3, steps) = (2, 2, 1);
        let flight_dir = Some(dir.path().into());
        let config = Config { pp, zero3, steps, flight_dir, ..Config::default() };
        let bp = Trainer::new(config.clone()).unwrap().blueprint;
        let devices = Devices::find(config.device, config.precision).unwrap();
        let mut world = World::threads(bp.mesh, world::options(&config), &devices);
        let status = Arc::new(StatusBoard::new(4));
        let recorder = FlightRecorder::start(&bp, &status, 0..4, &"one-run".into()).unwrap();
        let (tx, rx) = channel();
        let work = Arc::new(|local: LocalRank, _: &mut dyn FnMut(())| {
            Ok::<(), RankError>(local.communicator.barrier()?)
        });
        for mut local in world.ranks.drain(..) {
            local.communicator = recorder.wrap(local.rank, local.communicator);
            let around = Around {
                here: Arc::new([0, 1, 2, 3]),
                status: status.clone(),
                recorder: Some(recorder.clone()),
                span: Span::none(),
                stack_bytes: if local.rank == 2 { TOO_LARGE } else { 1 << 20 },
            };
            spawn_rank(local, Arc::new(around), tx.clone(), work.clone());
        }
        let ends = rx.iter().take(4).map(|message| match message {
            Message::Done(rank, Err(failure)) => RankFailure { rank, failure },
            _ => panic!("no rank ends well"),
        });
        let failures: Vec<_> = ends.collect();
        let run = Run::read(&[dir.path().into()], None).unwrap();
        assert_eq!((run.name.as_str(), run.records.len(), run.others.len()), ("one-run", 4, 0));
        let verdict = judge(&run);
        assert_eq!((verdict.cause, &verdict.ranks[..]), (Cause::Failed, &[2][..]), "{verdict:?}");
        assert!(verdict.reasons[0].contains("cannot be started"), "{verdict:?}");
        assert_eq!(lost(&failures), Some(2));
    }

    fn failed(rank: usize, error: CommError) -> RankFailure {
        RankFailure { rank, failure: Failure::Rank(error.into()) }
    }

    /// The rank that was waited for in vain, and not the one that reported it first; a panic before
    /// all.
    #[test]
    fn the_rank_that_is_lost_is_found_among_the_failures() {
        let timeout = |missing: usize| CommError::Timeout {
            group: "world".into(),
            operation: "exchange".into(),
            sequence: 1,
            after_s: 1.0,
            missing: vec![missing],
        };
        let echo = |rank: usize| CommError::Aborted { rank, reason: "it failed".into() };
        assert_eq!(lost(&[]), None);
        assert_eq!(lost(&[failed(0, echo(5)), failed(5, timeout(2)), failed(3, echo(5))]), Some(2));
        let panic = RankFailure { rank: 4, failure: Failure::Panic("panicked".into()) };
        assert_eq!(lost(&[failed(0, timeout(4)), panic]), Some(4));
        assert_eq!(lost(&[failed(1, echo(1))]), Some(1));
    }
}
