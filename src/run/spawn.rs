//! The threads of this process's ranks: how they are started, and what each does as it fails.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use tracing::{debug_span, dispatcher};
use zeropp_comm::Communicator;
use zeropp_comm::flight::now_ns;
use zeropp_core::threads::start_as;

use crate::error::RankError;
use crate::recorder;
use crate::run::context::ProcessContext;
use crate::run::failed::{self, RankFailure};
use crate::run::trace;
use crate::world::LocalRank;

/// A message from the thread of a rank to the one that has started it.
pub(crate) enum RankMessage<N, R> {
    /// While a rank is at work.
    News(N),
    /// From each, with its number, last of all.
    Done(usize, Result<R, RankFailure>),
}

/// Starts a rank on a thread of its own, which does `work`, sends `tx` its events and, last, how it
/// ended.
pub(crate) fn spawn_rank<N, R, W>(
    local: LocalRank,
    context: Arc<ProcessContext>,
    tx: Sender<RankMessage<N, R>>,
    work: Arc<W>,
) where
    N: Send + 'static,
    R: Send + 'static,
    W: Fn(LocalRank, &mut dyn FnMut(N)) -> Result<R, RankError> + Send + Sync + 'static,
{
    let (rank, world, reported) = (local.rank, local.communicator.clone(), tx.clone());
    let (aborted, shared, stack_bytes) = (world.clone(), context.clone(), context.stack_bytes);
    // A subscriber of this thread also receives the ranks' events.
    let listener = dispatcher::get_default(Clone::clone);
    let body = move || {
        let _listener = dispatcher::set_default(&listener);
        let _in_rank = debug_span!(parent: &context.span, "rank", rank).entered();
        if let Some(recorder) = &context.recorder {
            recorder::this_thread_is(rank, recorder);
        }
        let steps = tx.clone();
        let run = AssertUnwindSafe(|| {
            work(local, &mut |news| {
                // The thread that started the rank may have given up already; then nothing receives
                // this.
                let _ = steps.send(RankMessage::News(news));
            })
        });
        let result = match std::panic::catch_unwind(run) {
            Ok(result) => result,
            Err(panic) => {
                let (text, place) = (trace::panic_text(&*panic), context.status.describe(rank));
                Err(RankError::Panic { text, place })
            }
        };
        let result = result.map_err(|error| end_others(rank, error, &context, &*world));
        // Who receives this ends the engine, which the rank has left by then: else the others
        // would miss it.
        drop(world);
        let _ = tx.send(RankMessage::Done(rank, result));
    };
    let named = || std::thread::Builder::new().name(format!("rank {rank}")).stack_size(stack_bytes);
    if let Err(source) = start_as(named, body) {
        let error = RankError::NotStarted { stack_mib: stack_bytes >> 20, source };
        let failure = end_others(rank, error, &shared, &*aborted);
        // Who started the rank waits for this.
        let _ = reported.send(RankMessage::Done(rank, Err(failure)));
    }
}

/// Ends the world of a rank that failed, and writes what it did last.
fn end_others(
    rank: usize,
    error: RankError,
    context: &ProcessContext,
    world: &dyn Communicator,
) -> RankFailure {
    let failure = RankFailure { error, at_ns: now_ns() };
    // Bad input: all ranks end with the same words, and none has begun.
    if failure.error.is_bad_input() {
        return failure;
    }
    // No rank has failed where the program wants no first step; the others need to be notified.
    let recorder = context.recorder.as_ref();
    let recorder = recorder.filter(|_| !matches!(failure.error, RankError::NotBegun));
    if let Some(recorder) = recorder {
        recorder.end_as(rank, failure.end(rank));
    }
    world.abort(&failed::reason(rank, &failure, context));
    if let Some(recorder) = recorder {
        // Where it cannot be written now, the trainer reports that when it tries again.
        let _ = recorder.write(rank);
    }
    failure
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::mpsc::channel;

    use tracing::Span;
    use zeropp_core::device::Devices;
    use zeropp_failures::{Cause, Run, judge};
    use zeropp_pipeline::executor::StatusBoard;

    use super::*;
    use crate::Error;
    use crate::config::Config;
    use crate::recorder::FlightRecorder;
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
        let recorder = FlightRecorder::start(&bp, &status, 0..4, &"one-run".into());
        let (tx, rx) = channel();
        let work = Arc::new(|local: LocalRank, _: &mut dyn FnMut(())| {
            Ok::<(), RankError>(local.communicator.barrier()?)
        });
        let mut last = None;
        for mut local in world.ranks.drain(..) {
            local.communicator = recorder.wrap(local.rank, local.communicator);
            let context = ProcessContext {
                here: Arc::new([0, 1, 2, 3]),
                mesh: bp.mesh,
                status: status.clone(),
                recorder: Some(recorder.clone()),
                span: Span::none(),
                stack_bytes: if local.rank == 2 { TOO_LARGE } else { 1 << 20 },
            };
            let context = last.insert(Arc::new(context)).clone();
            spawn_rank(local, context, tx.clone(), work.clone());
        }
        let ends = rx.iter().take(4).map(|message| match message {
            RankMessage::Done(rank, Err(failure)) => (rank, failure),
            _ => panic!("no rank ends well"),
        });
        let failures: BTreeMap<_, _> = ends.collect();
        let run = Run::read(&[dir.path().into()], None).unwrap();
        assert_eq!((run.name.as_str(), run.records.len(), run.others.len()), ("one-run", 4, 0));
        let verdict = judge(&run);
        assert_eq!((verdict.cause, &verdict.ranks[..]), (Cause::Failed, &[2][..]), "{verdict:?}");
        assert!(verdict.reasons[0].contains("cannot be started"), "{verdict:?}");
        let error = failed::error_of(failures, &last.unwrap());
        assert!(matches!(error, Error::Rank { rank: 2, seen_by: 2, .. }), "{error}");
    }

    /// The engine ends then, and tells the other ranks that this one has left.
    #[test]
    fn a_rank_that_says_how_it_ended_has_left_the_world() {
        let config = Config::default();
        let bp = Trainer::new(config.clone()).unwrap().blueprint;
        let devices = Devices::find(config.device, config.precision).unwrap();
        for round in 0..500 {
            let mut world = World::threads(bp.mesh, world::options(&config), &devices);
            let local = world.ranks.remove(0);
            let joined = Arc::downgrade(&local.communicator);
            let context = ProcessContext {
                here: Arc::new([0]),
                mesh: bp.mesh,
                status: Arc::new(StatusBoard::new(1)),
                recorder: None,
                span: Span::none(),
                stack_bytes: 1 << 20,
            };
            let (tx, rx) = channel();
            let work = |_: LocalRank, _: &mut dyn FnMut(())| Ok::<(), RankError>(());
            spawn_rank(local, Arc::new(context), tx, Arc::new(work));
            assert!(matches!(rx.recv(), Ok(RankMessage::Done(0, Ok(())))));
            assert_eq!(joined.strong_count(), 0, "round {round}");
        }
    }
}
