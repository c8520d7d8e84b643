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

/// The most tensors that are kept of a layer: two of a rule, and a mean.
const KEPT: usize = 3;

/// What a rank puts out at most.
pub(crate) struct Pinned {
    /// The setting that says so.
    pub(crate) field: &'static str,
    pub(crate) bytes: u64,
    /// In so many parcels at once.
    pub(crate) parcels: usize,
    /// What would take less.
    pub(crate) help: &'static str,
}

impl Pinned {
    fn all(&self) -> u64 {
        if self.bytes == 0 { 0 } else { pinned_bytes(self.bytes, self.parcels) }
    }
}

/// The activations of a rank that are out.
pub(crate) fn activations(bp: &Blueprint, Coords { pp, dp, .. }: Coords) -> Pinned {
    Pinned {
        field: "recompute:out",
        bytes: bp.plan.ranks[pp].held.peaks.host_activation,
        parcels: most_out(&bp.programs.of(dp).ranks[pp]),
        help: "let less go out with recompute:out-batches",
    }
}

/// Its states.
pub(crate) fn states(bp: &Blueprint, Coords { pp, .. }: Coords) -> Pinned {
    let rank = &bp.plan.ranks[pp];
    let layers: usize = rank.stages.iter().map(|(_, layers)| layers.len()).sum();
    Pinned {
        field: "optimizer:out",
        bytes: rank.held.peaks.host_state,
        parcels: KEPT * layers,
        help: "use more ranks, or leave it out",
    }
}

/// The ranks on this machine, the bytes that they pin together, and what there is; none where they
/// pin nothing.
fn pinned_here(bp: &Blueprint) -> Option<(usize, u64, Option<Room>)> {
    let here = ranks_here(&bp.config).0.concat();
    let of = |rank: &usize| {
        let at = bp.mesh.coords(*rank);
        let activations = bp.config.copies_to_host().then(|| activations(bp, at).all());
        let states = bp.config.states_on_host().then(|| states(bp, at).all());
        activations.unwrap_or(0) + states.unwrap_or(0)
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
    let help = match bp.config.copies_to_host() {
        true => "let less go out with recompute:out-batches, or use fewer ranks a machine",
        false => "leave it out, or use fewer ranks a machine",
    };
    Err(ConfigError::value(field(bp), HOST, said, help).into())
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
    note(bp).map(|said| format!("{} = {HOST}: {said}", field(bp)))
}

/// The setting that puts out, where there are two that of which less can go.
fn field(bp: &Blueprint) -> &'static str {
    if bp.config.copies_to_host() { "recompute:out" } else { "optimizer:out" }
}
