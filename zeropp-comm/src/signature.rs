//! The signature of a rank's operation: compared between ranks, counted, and named in errors.

use std::fmt;

use burn::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};
pub(crate) use zeropp_failures::Operation;

/// The facts of one operation that all ranks of a group must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Signature {
    pub(crate) operation: Operation,
    /// Element type and number of elements that this rank passes; `None` where ranks may differ.
    pub(crate) buffer: Option<(DType, usize)>,
    /// Rank of the group that broadcasts, or that gathers.
    pub(crate) root: Option<usize>,
}

impl Signature {
    /// An operation whose arguments may differ between ranks.
    pub(crate) fn bare(operation: Operation) -> Self {
        Self { operation, buffer: None, root: None }
    }

    /// Bytes of all to `root`.
    pub(crate) fn gather(root: usize) -> Self {
        Self { root: Some(root), ..Self::bare(Operation::Gather) }
    }

    /// An operation on a buffer of one type and length.
    pub(crate) fn of(operation: Operation, buffer: &Tensor<1>) -> Self {
        Self::with(operation, buffer.dtype(), buffer.dims()[0])
    }

    /// An operation on `len` elements of `dtype`.
    pub(crate) fn with(operation: Operation, dtype: DType, len: usize) -> Self {
        Self { operation, buffer: Some((dtype, len)), root: None }
    }
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.operation)?;
        if let Some((dtype, len)) = self.buffer {
            write!(f, " of {len} {}", dtype.name())?;
        }
        if let Some(root) = self.root {
            let way = if self.operation == Operation::Gather { "to" } else { "from" };
            write!(f, " {way} root {root}")?;
        }
        Ok(())
    }
}

/// Bytes of a buffer's elements.
pub(crate) fn bytes_of(buffer: &Tensor<1>) -> usize {
    buffer.dims()[0] * buffer.dtype().size()
}
