//! Waits inside of a forward for layers that are still being gathered.

use std::sync::Arc;
use std::time::{Duration, Instant};

use zeropp_comm::CommResult;

use super::status::StatusBoard;

/// The waits of an F for the layers of its stage, which are still being gathered.
pub struct LayerWaits {
    status: Arc<StatusBoard>,
    rank: usize,
    /// Whether a layer was here already.
    begun: bool,
    waited: Duration,
    end: Instant,
}

impl LayerWaits {
    /// Those of a stage on `rank`.
    pub(super) fn new(status: &Arc<StatusBoard>, rank: usize) -> LayerWaits {
        let (status, end) = (status.clone(), Instant::now());
        LayerWaits { status, rank, begun: false, waited: Duration::ZERO, end }
    }

    /// Nanoseconds that were waited, and when the last layer was here.
    pub(super) fn ended(&self) -> (u64, Instant) {
        (self.waited.as_nanos() as u64, self.end)
    }

    /// Waits for the next layer as `wait` does. The rank counts as computing from then on, until it
    /// waits again: a wait for others must not be taken for a slow computation.
    ///
    /// # Errors
    /// That of `wait`.
    pub fn wait(&mut self, wait: impl FnOnce() -> CommResult<()>) -> CommResult<()> {
        if self.begun {
            self.status.set_computing(self.rank, false);
        }
        let begin = Instant::now();
        wait()?;
        self.end = Instant::now();
        let waited = self.end - begin;
        self.waited += waited;
        match std::mem::replace(&mut self.begun, true) {
            false => self.status.set_computing(self.rank, true),
            true => self.status.go_on(self.rank, waited),
        }
        Ok(())
    }
}
