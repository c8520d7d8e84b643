//! What the ranks of a place need of its memory: what they hold, what they share, and what comes
//! beside it.

use std::collections::HashSet;

use zeropp_schedule::memory::HeldBytes;

/// What a process takes besides its ranks: the program itself and tables.
const PROCESS_BYTES: u64 = 22 << 20;
/// What each of its ranks takes besides its tensors: threads, and small buffers of theirs.
const RANK_BYTES: u64 = 8 << 20;
/// The part of its tensors that an allocator may keep beside them: the command's on a CPU (ADR 66),
/// on a GPU the pages of the kernels' library, for which it is assumed.
const KEPT: u64 = 16;
/// What a process takes of each CUDA device that it uses: the driver's context and the kernels'
/// code, which is assumed, and 64 MiB for cuBLASLt.
const CONTEXT_BYTES: u64 = 764 << 20;
/// What NCCL takes of a device for each rank: buffers of its channels. Assumed, too.
const NCCL_BYTES: u64 = 1 << 30;

/// What ranks compute on, as far as it takes memory of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hardware {
    /// A CPU, where ranks of one process that share a stage's weights gather them into one buffer.
    Cpu,
    /// A CUDA device, with NCCL between ranks or without.
    Cuda {
        /// Whether NCCL is.
        nccl: bool,
    },
    /// Another device, of which nothing is known.
    Other,
}

/// Pipeline rank and replica of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Seat {
    /// Pipeline rank.
    pub pp: usize,
    /// Replica.
    pub dp: usize,
}

/// Bytes of the ranks of one process, of pipeline ranks that hold `held`.
pub fn of_process(place: Hardware, ranks: &[Seat], held: &[HeldBytes]) -> u64 {
    let mut seen = HashSet::new();
    let mut of_rank = |seat: &Seat| {
        let HeldBytes { peaks, at_once } = &held[seat.pp];
        let is_shared = place == Hardware::Cpu && !seen.insert(*seat);
        let shared = if is_shared { at_once.gathered } else { 0 };
        // Engines keep buffers of results from one collective to the next.
        let results = peaks.communication.saturating_sub(at_once.communication);
        at_once.total() - shared + results
    };
    let tensors = ranks.iter().map(&mut of_rank).sum::<u64>();
    let count = ranks.len() as u64;
    let beside = match place {
        Hardware::Cpu => PROCESS_BYTES + count * RANK_BYTES + tensors / KEPT,
        Hardware::Cuda { nccl } => {
            CONTEXT_BYTES + count * if nccl { NCCL_BYTES } else { 0 } + tensors / KEPT
        }
        Hardware::Other => 0,
    };
    tensors + beside
}

#[cfg(test)]
mod tests {
    use super::*;
    use zeropp_schedule::memory::MemoryBytes;

    #[test]
    fn ranks_of_a_process_share_gathered_weights_on_a_cpu_alone() {
        let bytes = |gathered, communication| MemoryBytes {
            parameter_shard: 100 << 20,
            gathered,
            communication,
            ..MemoryBytes::default()
        };
        let held = [HeldBytes { at_once: bytes(64 << 20, 0), peaks: bytes(64 << 20, 32 << 20) }];
        let two = [Seat { pp: 0, dp: 0 }; 2];
        let tensors = (2 * (100 + 32 + 64)) << 20;
        assert_eq!(of_process(Hardware::Other, &two, &held), tensors);
        let shared = tensors - (64 << 20);
        let beside = PROCESS_BYTES + 2 * RANK_BYTES + shared / KEPT;
        assert_eq!(of_process(Hardware::Cpu, &two, &held), shared + beside);
        let apart = [Seat { pp: 0, dp: 0 }, Seat { pp: 0, dp: 1 }];
        assert!(
            of_process(Hardware::Cpu, &apart, &held) > shared + beside,
            "replicas share nothing"
        );
        let nccl = of_process(Hardware::Cuda { nccl: true }, &two, &held);
        assert_eq!(nccl - of_process(Hardware::Cuda { nccl: false }, &two, &held), 2 * NCCL_BYTES);
    }
}
