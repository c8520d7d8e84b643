//! The ranks of this process at work, each on a thread of its own, as the thread that has started
//! them sees them. What a rank does, a training step or an emulated one, is the caller's.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use zeropp_comm::Communicator;

use crate::Error;
use crate::error::RankError;
use crate::run::context::ProcessContext;
use crate::run::failed::{self, RankFailure};
use crate::run::spawn::{RankMessage, spawn_rank};
use crate::world::{LocalRank, World};

/// After one rank has failed, how long the others get to stop before they are left behind.
const GRACE: Duration = Duration::from_secs(3);

/// Ranks that report `N` as they go on, and `R` at their end.
pub(crate) struct Ranks<N, R> {
    pub(crate) context: Arc<ProcessContext>,
    messages: Receiver<RankMessage<N, R>>,
    /// How many have not ended.
    left: usize,
    results: BTreeMap<usize, R>,
    failures: BTreeMap<usize, RankFailure>,
    /// When the first one failed.
    failed_at: Option<Instant>,
    /// The world, as long as a rank takes part.
    joined: Weak<dyn Communicator>,
    /// Ends the engine, after the ranks.
    _world: World,
}

impl<N: Send + 'static, R: Send + 'static> Ranks<N, R> {
    /// Starts the ranks of `world`, each of which does `work` and reports as it goes on.
    pub(crate) fn start(
        mut world: World,
        context: ProcessContext,
        work: impl Fn(LocalRank, &mut dyn FnMut(N)) -> Result<R, RankError> + Send + Sync + 'static,
    ) -> Ranks<N, R> {
        let (tx, messages) = channel();
        let (context, work) = (Arc::new(context), Arc::new(work));
        let joined = Arc::downgrade(&world.ranks[0].communicator);
        let left = world.ranks.len();
        for mut local in world.ranks.drain(..) {
            if let Some(recorder) = &context.recorder {
                local.communicator = recorder.wrap(local.rank, local.communicator);
            }
            spawn_rank(local, context.clone(), tx.clone(), work.clone());
        }
        Ranks {
            context,
            messages,
            left,
            results: BTreeMap::new(),
            failures: BTreeMap::new(),
            failed_at: None,
            joined,
            _world: world,
        }
    }
}

impl<N, R> Ranks<N, R> {
    /// The next event of a rank, or none once all have ended. After a failure the others have a
    /// while to stop.
    pub(crate) fn next_news(&mut self) -> Option<N> {
        while self.left > 0 {
            let message = match self.failed_at {
                None => self.messages.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(at) => {
                    let left = (at + GRACE).saturating_duration_since(Instant::now());
                    self.messages.recv_timeout(left)
                }
            };
            match message {
                Ok(RankMessage::News(news)) => return Some(news),
                Ok(RankMessage::Done(rank, end)) => {
                    self.left -= 1;
                    match end {
                        Ok(result) => drop(self.results.insert(rank, result)),
                        Err(failure) => {
                            self.failures.insert(rank, failure);
                            self.failed_at.get_or_insert_with(Instant::now);
                        }
                    }
                }
                Err(_) => break,
            }
        }
        None
    }

    /// When the first rank failed, if one has.
    pub(crate) fn failed_at(&self) -> Option<Instant> {
        self.failed_at
    }

    /// The results of all ranks, in their order, once all have ended. Once.
    ///
    /// # Errors
    /// Ranks have failed: who broke the run, and how.
    pub(crate) fn end(&mut self) -> Result<Vec<R>, Error> {
        match std::mem::take(&mut self.failures) {
            none if none.is_empty() => {
                Ok(std::mem::take(&mut self.results).into_values().collect())
            }
            failures => Err(failed::error_of(failures, &self.context)),
        }
    }
}

impl<N, R> Drop for Ranks<N, R> {
    /// Ranks whose events have no receiver any more end, too.
    fn drop(&mut self) {
        let is_left = self.left > 0 && self.failed_at.is_none();
        if let Some(world) = self.joined.upgrade().filter(|_| is_left) {
            world.abort("the program that started the ranks has stopped listening");
        }
    }
}
