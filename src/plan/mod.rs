//! What a run is going to be, before any rank starts: stages, programs, memory and bubble.

pub(crate) mod blueprint;
pub(crate) mod changes;
pub(crate) mod copies;
pub(crate) mod costs_file;
pub(crate) mod cut;
pub(crate) mod evaluation;
pub(crate) mod fits;
pub(crate) mod head;
pub(crate) mod hints;
pub(crate) mod limit;
pub(crate) mod mask_check;
pub(crate) mod memory;
pub(crate) mod model_check;
pub(crate) mod needs;
pub(crate) mod peak;
pub(crate) mod program;
pub(crate) mod recompute;
pub(crate) mod recut;
pub(crate) mod replicas;
pub(crate) mod reschedule;
pub(crate) mod schedule_file;
pub(crate) mod sizes;
pub(crate) mod slice_number;
pub(crate) mod slices;
pub(crate) mod split;
pub(crate) mod times;
