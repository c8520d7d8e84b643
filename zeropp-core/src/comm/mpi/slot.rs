//! What a rank's thread gets from the communication thread.

use burn::tensor::Tensor;

use super::group::Joined;

/// What an operation gives its rank.
pub(super) enum Output {
    /// A flat buffer.
    Buffer(Tensor<1>),
    /// Everyone's small data.
    Bytes(Vec<Vec<u8>>),
    /// A new sub-group.
    Group(Joined),
    /// That all are here.
    Nothing,
}

/// The place for one result.
pub(super) type Slot = crate::comm::slot::Slot<Output>;
