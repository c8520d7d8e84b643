//! What is wrong with the arguments of a call, whatever the engine.

use burn::tensor::DType;

/// A rank that the group does not have.
pub(super) fn rank(what: &str, rank: usize, size: usize) -> Result<(), String> {
    let problem = || format!("{what} {rank}; the group has ranks 0 to {}", size - 1);
    if rank < size { Ok(()) } else { Err(problem()) }
}

/// Elements that cannot be added up.
pub(super) fn sum(dtype: DType) -> Result<(), String> {
    let problem = || format!("elements of {}; sums take f32, bf16 or f16", dtype.name());
    let ok = matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
    if ok { Ok(()) } else { Err(problem()) }
}

/// A buffer that the ranks cannot share equally.
pub(super) fn parts(len: usize, size: usize) -> Result<(), String> {
    let problem = || {
        let padded = len.next_multiple_of(size);
        format!("{len} elements, which {size} ranks cannot share equally; pad to {padded}")
    };
    if len.is_multiple_of(size) { Ok(()) } else { Err(problem()) }
}
