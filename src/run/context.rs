//! The context of the ranks' threads: what each of them needs, whatever it does.

use std::sync::Arc;

use tracing::Span;
use zeropp_comm::mesh::Mesh;
use zeropp_pipeline::executor::StatusBoard;

use crate::recorder::FlightRecorder;

/// The state that the ranks of a process share, whatever they do.
pub(crate) struct ProcessContext {
    /// World ranks of this process.
    pub(crate) here: Arc<[usize]>,
    pub(crate) mesh: Mesh,
    /// The current action of each rank.
    pub(crate) status: Arc<StatusBoard>,
    pub(crate) recorder: Option<Arc<FlightRecorder>>,
    /// The span of the ranks' events.
    pub(crate) span: Span,
    /// Stack of a rank's thread.
    pub(crate) stack_bytes: usize,
}
