//! Lines about the processes that a rendezvous waits for.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Receives a line at intervals: which processes have come to a rendezvous, were refused, or are
/// missing.
#[derive(Clone)]
pub struct Waiting {
    pub(super) every: Duration,
    tell: Arc<dyn Fn(&str) + Send + Sync>,
}

impl Waiting {
    /// Calls `tell` with a line once per `every`.
    pub fn new(every: Duration, tell: impl Fn(&str) + Send + Sync + 'static) -> Waiting {
        Waiting { every, tell: Arc::new(tell) }
    }

    pub(super) fn tell(&self, line: &str) {
        (self.tell)(line);
    }
}

/// Reports to nothing.
impl Default for Waiting {
    fn default() -> Waiting {
        Waiting::new(Duration::MAX, |_| ())
    }
}

impl fmt::Debug for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waiting").field("every", &self.every).finish_non_exhaustive()
    }
}
