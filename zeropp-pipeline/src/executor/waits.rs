//! Waits inside of a forward for layers that are still being gathered.

use std::sync::Arc;
use std::time::{Duration, Instant};

use zeropp_comm::CommResult;

use super::status::StatusBoard;

/// The waits of an F for the layers of its stage, which are still being gathered.
pub struct LayerWaits {
    status: Arc<StatusBoard>,
    rank: usize,
    /// Layers that were not waited for yet.
    left: usize,
    waited: Duration,
    end: Instant,
}

impl LayerWaits {
    /// Those of a stage of so many layers on `rank`.
    pub(super) fn new(status: &Arc<StatusBoard>, rank: usize, layers: usize) -> LayerWaits {
        let (status, end) = (status.clone(), Instant::now());
        LayerWaits { status, rank, left: layers, waited: Duration::ZERO, end }
    }

    /// Nanoseconds that were waited, and when the last layer was here.
    pub(super) fn ended(&self) -> (u64, Instant) {
        (self.waited.as_nanos() as u64, self.end)
    }

    /// Waits for the next layer as `wait` does. The rank counts as computing once all are here: a
    /// wait for others must not be taken for a slow computation.
    ///
    /// # Errors
    /// That of `wait`.
    pub fn wait(&mut self, wait: impl FnOnce() -> CommResult<()>) -> CommResult<()> {
        let begin = Instant::now();
        wait()?;
        self.end = Instant::now();
        self.waited += self.end - begin;
        self.left = self.left.saturating_sub(1);
        if self.left == 0 {
            self.status.set_computing(self.rank, true);
        }
        Ok(())
    }
}
