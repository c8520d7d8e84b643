//! Checks of a call's arguments that hold for every engine.

use burn::tensor::DType;

use super::signature::{Operation, Signature};

/// A collective on buffers that no group of `size` ranks could carry out.
pub(super) fn collective(call: &Signature, size: usize) -> Result<(), String> {
    match (call.operation, call.buffer, call.root) {
        (Operation::ReduceScatter, Some((dtype, len)), _) => {
            sum(dtype).and_then(|()| parts(len, size))
        }
        (Operation::AllReduce, Some((dtype, _)), _) => sum(dtype),
        (Operation::Broadcast, _, Some(root)) => rank("root", root, size),
        _ => Ok(()),
    }
}

/// A rank that the group does not have.
pub(super) fn rank(what: &str, rank: usize, size: usize) -> Result<(), String> {
    let problem = || format!("{what} {rank}; the group has ranks 0 to {}", size - 1);
    if rank < size { Ok(()) } else { Err(problem()) }
}

/// Elements that cannot be added up.
fn sum(dtype: DType) -> Result<(), String> {
    let problem = || format!("elements of {}; sums take f32, bf16 or f16", dtype.name());
    let ok = matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
    if ok { Ok(()) } else { Err(problem()) }
}

/// A buffer that the ranks cannot share equally.
fn parts(len: usize, size: usize) -> Result<(), String> {
    let problem = || {
        let padded = len.next_multiple_of(size);
        format!("{len} elements, which {size} ranks cannot share equally; pad to {padded}")
    };
    if len.is_multiple_of(size) { Ok(()) } else { Err(problem()) }
}
