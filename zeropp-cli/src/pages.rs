//! Memory in pages of 2 MiB, of which ranks of small models waste most.

use zeropp::config::EngineKind;
use zeropp::{Config, Plan};

/// From how many ranks on it matters.
const RANKS_MIN: usize = 16;
/// A rank that holds less than this is small.
const RANK_BYTES_MAX: u64 = 16 << 20;

/// Has the system back this process's memory with small pages, where that is better. A rank's
/// thread takes a little memory of each of many sizes; in pages of 2 MiB all of these together are
/// 5 MiB of a rank that needs half of one. Large tensors are faster in large pages.
pub(crate) fn suit(config: &Config, plan: &Plan) {
    let largest = plan.ranks.iter().map(|rank| rank.held.peaks.total()).max().unwrap_or(0);
    let together = config.engine == EngineKind::Threads && config.mesh().world() >= RANKS_MIN;
    if together && largest < RANK_BYTES_MAX {
        use_small_pages();
    }
}

#[cfg(target_os = "linux")]
fn use_small_pages() {
    // A system that does not know the call has no such pages either.
    let _ = rustix::thread::disable_transparent_huge_pages(true);
}

#[cfg(not(target_os = "linux"))]
fn use_small_pages() {}
