//! Which GPU each rank of a process has.

use std::ops::Range;

/// The GPUs of a process's ranks, in order: `ranks` of them, after those of other processes of the
/// machine that have `before` ranks, where the process sees `visible` GPUs. A launcher may show
/// each process the GPUs of its own only; then they count from 0.
///
/// # Errors
/// The fault: NCCL takes one rank a GPU.
pub fn gpus_for(ranks: usize, before: usize, visible: usize) -> Result<Range<usize>, String> {
    if ranks == visible {
        return Ok(0..visible);
    }
    if before + ranks <= visible {
        return Ok(before..before + ranks);
    }
    let other = if before > 0 { format!(" after {before} of other processes") } else { "".into() };
    Err(format!("{ranks} ranks of this process{other} need a GPU each, but CUDA shows {visible}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_has_a_gpu_of_its_own_or_an_error_says_so() {
        // One process for all; one a GPU that sees all; one a GPU that sees its own.
        assert_eq!(gpus_for(4, 0, 8), Ok(0..4));
        assert_eq!(gpus_for(1, 3, 8), Ok(3..4));
        assert_eq!(gpus_for(1, 3, 1), Ok(0..1));
        assert_eq!(gpus_for(4, 4, 8), Ok(4..8));
        let text = gpus_for(2, 1, 1).unwrap_err();
        assert!(text.starts_with("2 ranks of this process after 1 of other processes need a GPU"));
        assert!(
            gpus_for(3, 0, 2).unwrap_err().contains("process need a GPU each, but CUDA shows 2")
        );
    }
}
