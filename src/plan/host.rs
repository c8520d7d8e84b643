//! What ranks on GPUs put out to memory of their host, held against what it has.

use zeropp_comm::mesh::Coords;
use zeropp_core::device::{Room, pinned_bytes};
use zeropp_core::files::in_words;
use zeropp_plan::layout::HOST;
use zeropp_plan::recompute::most_out;

use crate::Error;
use crate::config::ConfigError;
use crate::plan::blueprint::Blueprint;
use crate::plan::memory::ranks_here;

/// Bytes that a rank puts out at most, and in how many parcels at once.
pub(crate) fn out_of(bp: &Blueprint, Coords { pp, dp, .. }: Coords) -> (u64, usize) {
    let held = &bp.plan.ranks[pp].held.peaks;
    (held.host_activation, most_out(&bp.programs.of(dp).ranks[pp]))
}

/// The ranks on this machine, the bytes that they pin together, and what there is; none where they
/// pin nothing.
fn pinned_here(bp: &Blueprint) -> Option<(usize, u64, Option<Room>)> {
    if !bp.config.copies_to_host() {
        return None;
    }
    let here = ranks_here(&bp.config).0.concat();
    let of = |rank: &usize| {
        let (bytes, parcels) = out_of(bp, bp.mesh.coords(*rank));
        if bytes == 0 { 0 } else { pinned_bytes(bytes, parcels) }
    };
    let all: u64 = here.iter().map(of).sum();
    (all > 0).then(|| (here.len(), all, Room::find()))
}

/// Whether that is more than there is, where it is looked at.
pub(crate) fn is_short(bp: &Blueprint) -> bool {
    let is_more =
        |(_, all, room): (usize, u64, Option<Room>)| room.is_some_and(|room| all > room.bytes);
    !bp.config.no_memory_check && pinned_here(bp).is_some_and(is_more)
}

/// Refuses a run whose ranks on this machine would pin more memory than it has.
///
/// # Errors
/// What they would pin, and what there is.
pub(crate) fn check(bp: &Blueprint) -> Result<(), Error> {
    let Some(said) = note(bp).filter(|_| is_short(bp)) else { return Ok(()) };
    let help = "let fewer micro-batches go out with recompute:out-batches, or use fewer ranks a \
                machine";
    Err(ConfigError::value("recompute:out", HOST, said, help).into())
}

/// What is pinned, of how much.
fn note(bp: &Blueprint) -> Option<String> {
    let (ranks, all, room) = pinned_here(bp)?;
    let who = if ranks == 1 { "the rank".into() } else { format!("the {ranks} ranks") };
    let of = room.map(|room| format!(", of {} ({})", in_words(room.bytes), room.source));
    let (of, all) = (of.unwrap_or_default(), in_words(all));
    Some(format!("{who} on this machine would pin {all} of its memory{of}"))
}

/// The same for those who only look.
pub(crate) fn predicted(bp: &Blueprint) -> Option<String> {
    note(bp).map(|said| format!("recompute:out = {HOST}: {said}"))
}
