//! Waiting for ranks that take long for a good reason: writing or reading a checkpoint, or the
//! program's own work between two steps. No operation between ranks waits longer than `timeout-s`,
//! so while one of them is at it, all meet again and again and report that they are alive.

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use crate::config::Config;
use tracing::warn;
use zeropp_comm::patience::Deadline;
use zeropp_comm::{CommError, CommResult, Communicator};
use zeropp_core::threads::start_scoped;
use zeropp_zero3::checkpoint::CheckpointError;

use crate::error::RankError;

/// Longest time from one sign of life to the next.
const PERIOD_MAX: Duration = Duration::from_secs(5);
/// First byte of a rank's message.
const NOT_YET: u8 = 0;
const DONE: u8 = 1;

/// How long ranks wait for each other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// Time from one sign of life to the next; well below an operation's timeout.
    pub(crate) period: Duration,
    /// How long reading or writing may take, if it is on its way all the while.
    pub(crate) limit: Duration,
}

impl Patience {
    pub(crate) fn new(config: &Config) -> Patience {
        Patience {
            period: Duration::from_secs_f64(config.timeout_s / 4.0).min(PERIOD_MAX),
            limit: Duration::from_secs_f64(config.save_timeout_s),
        }
    }

    /// Every rank does its `work`, then all get all results, in rank order. Ranks that are done
    /// wait for the others however long an operation's timeout is, but not beyond the limit; `what`
    /// is done is for its message. All ranks call it.
    ///
    /// # Errors
    /// The work's own error, with which the world ends; the world's first error.
    pub(crate) fn exchange(
        self,
        world: &dyn Communicator,
        what: &str,
        work: impl FnOnce() -> Result<Vec<u8>, CheckpointError>,
    ) -> Result<Vec<Vec<u8>>, RankError> {
        if world.size() == 1 {
            return Ok(vec![work()?]);
        }
        // The work stays on the rank's own thread, where its tensors are.
        let (done, result) = channel();
        let name = std::thread::current().name().unwrap_or("rank").to_owned();
        std::thread::scope(|scope| {
            let meet = move || self.meet_until_done(world, what, &result);
            let meeting = match start_scoped(scope, &name, meet) {
                Ok(meeting) => meeting,
                Err(refused) => {
                    warn!("{what}: no thread tells the other ranks meanwhile ({refused})");
                    return self.meet_after(world, what, work);
                }
            };
            match work() {
                Ok(bytes) => {
                    let _ = done.send(bytes);
                    Ok(meeting.join().expect("meeting does not panic")?)
                }
                Err(error) => {
                    // Ranks that are waiting in a meeting are notified at once.
                    world.abort(&error.to_string());
                    drop(done);
                    Err(error.into())
                }
            }
        })
    }

    /// As [`exchange`](Self::exchange) on one thread: the others wait for the work no longer than
    /// for any operation.
    fn meet_after(
        self,
        world: &dyn Communicator,
        what: &str,
        work: impl FnOnce() -> Result<Vec<u8>, CheckpointError>,
    ) -> Result<Vec<Vec<u8>>, RankError> {
        let (done, result) = channel();
        // The other end is right here.
        let _ = done.send(work().inspect_err(|error| world.abort(&error.to_string()))?);
        Ok(self.meet_until_done(world, what, &result)?)
    }

    /// The ranks meet until each has a `result`, which another thread of it sends; then all get
    /// all. All ranks call it.
    ///
    /// # Errors
    /// A result that never comes; the world's first error.
    pub(crate) fn meet_until_done(
        self,
        world: &dyn Communicator,
        what: &str,
        result: &Receiver<Vec<u8>>,
    ) -> CommResult<Vec<Vec<u8>>> {
        let limit = Deadline::after(self.limit);
        let mut message = vec![NOT_YET];
        loop {
            if message[0] == NOT_YET {
                match received(result, self.period) {
                    Some(Ok(bytes)) => message = [vec![DONE], bytes].concat(),
                    None if !limit.is_over() => {}
                    end => {
                        let limit_s = self.limit.as_secs_f64();
                        let reason = match end {
                            None => format!("{what} takes longer than timeout-s:save = {limit_s}"),
                            Some(_) => format!("{what} has failed"),
                        };
                        world.abort(&reason);
                        return Err(CommError::Aborted { rank: world.rank(), reason });
                    }
                }
            }
            let all = world.exchange(message.clone()).wait()?;
            if all.iter().all(|message| message.first() == Some(&DONE)) {
                return Ok(all.iter().map(|message| message[1..].to_vec()).collect());
            }
        }
    }

    /// Every rank gets what rank 0's `answer` gives, which is asked, with the time to wait, until
    /// it has one. All ranks call it.
    ///
    /// # Errors
    /// The world's first error.
    pub(crate) fn follow_rank_0(
        self,
        world: &dyn Communicator,
        mut answer: impl FnMut(Duration) -> Option<Vec<u8>>,
    ) -> CommResult<Vec<u8>> {
        loop {
            let message = match world.rank() {
                0 => answer(self.period).map_or(vec![NOT_YET], |a| [&[DONE], &a[..]].concat()),
                _ => Vec::new(),
            };
            let all = world.exchange(message).wait()?;
            if let [DONE, answer @ ..] = &all[0][..] {
                return Ok(answer.to_vec());
            }
        }
    }
}

/// The item that comes from `channel` within so much running time, or that none will come.
pub(crate) fn received<T>(
    channel: &Receiver<T>,
    time: Duration,
) -> Option<Result<T, RecvTimeoutError>> {
    Deadline::after(time).until(|slice| match channel.recv_timeout(slice) {
        Err(RecvTimeoutError::Timeout) => None,
        got => Some(got),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Instant;

    use zeropp_comm::threads::{ThreadsOptions, ThreadsWorld};

    use super::*;

    /// Runs `f` on each of three ranks whose operations time out after 200 ms.
    fn on_ranks<R: Send>(f: impl Fn(&dyn Communicator) -> R + Sync) -> Vec<R> {
        let timeout = Duration::from_millis(200);
        let options = ThreadsOptions { timeout, ..ThreadsOptions::default() };
        let ranks = ThreadsWorld::new(3, options).communicators();
        std::thread::scope(|scope| {
            let run = |world: Arc<dyn Communicator>| scope.spawn(|| f(&*{ world }));
            let threads: Vec<_> = ranks.into_iter().map(run).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    const PATIENCE: Patience =
        Patience { period: Duration::from_millis(50), limit: Duration::from_secs(20) };

    fn slow(rank: usize) -> Vec<u8> {
        std::thread::sleep(Duration::from_millis(if rank == 1 { 700 } else { 0 }));
        vec![rank as u8; rank]
    }

    #[test]
    fn a_slow_rank_is_waited_for_beyond_the_timeout() {
        let all = on_ranks(|world| PATIENCE.exchange(world, "work", || Ok(slow(world.rank()))));
        for got in all {
            assert_eq!(got.unwrap(), [vec![], vec![1], vec![2, 2]]);
        }
        let all = on_ranks(|world| {
            let begin = Instant::now();
            let answer = |wait| {
                std::thread::sleep(wait);
                (begin.elapsed() > Duration::from_millis(500)).then_some(vec![7, 8])
            };
            PATIENCE.follow_rank_0(world, answer)
        });
        assert!(all.into_iter().all(|got| got == Ok(vec![7, 8])));
    }

    #[test]
    fn ranks_without_a_thread_to_meet_on_do_their_work_first() {
        let all =
            on_ranks(|world| PATIENCE.meet_after(world, "work", || Ok(vec![world.rank() as u8])));
        assert!(all.into_iter().all(|got| got.unwrap() == [[0], [1], [2]]));
        let all = on_ranks(|world| {
            let folder = "a".into();
            let failed = CheckpointError::Folder { folder, problem: "is full".into() };
            PATIENCE.meet_after(world, "work", || {
                if world.rank() == 1 { Err(failed) } else { Ok(vec![]) }
            })
        });
        assert!(all.iter().all(|got| format!("{:?}", got.as_ref().err()).contains("is full")));
    }

    #[test]
    fn work_that_never_ends_ends_the_others() {
        let patience = Patience { limit: Duration::from_millis(300), ..PATIENCE };
        let begin = Instant::now();
        let all = on_ranks(|world| {
            let work = || {
                std::thread::sleep(Duration::from_secs(if world.rank() == 2 { 2 } else { 0 }));
                Ok(Vec::new())
            };
            let got = patience.exchange(world, "writing", work);
            (format!("{:?}", got.err()), begin.elapsed())
        });
        for (error, took) in &all[..2] {
            assert!(error.contains("writing takes longer than timeout-s:save = 0.3"), "{error}");
            assert!(*took < Duration::from_secs(2), "{took:?}");
        }
    }

    #[test]
    fn work_that_fails_ends_all_with_its_words() {
        let all = on_ranks(|world| {
            let folder = "a/b".into();
            let failed = || CheckpointError::Folder { folder, problem: "is full".into() };
            PATIENCE.exchange(world, "writing", || match world.rank() {
                2 => Err(failed()),
                rank => Ok(slow(rank)),
            })
        });
        assert!(all.iter().all(|got| format!("{:?}", got.as_ref().err()).contains("is full")));
    }
}
