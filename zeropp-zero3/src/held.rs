//! What an optimizer takes of one layer, told before there is a rank.

use zeropp_core::layer::Part;
use zeropp_core::params::FlatLayout;

use crate::layer_state::Owned;
use crate::rule::{ParameterGroups, Role};

/// Bytes of an optimizer for one layer, on one of the ranks that share it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerBytes {
    /// What is kept from update to update.
    pub state: u64,
    /// What an update takes beside that, the parameters and the gradient.
    pub update: u64,
    /// What an update takes beside all that, where layers are looked at: a copy of the parameters
    /// that the rank updates. A tied head has none.
    pub watched: u64,
    /// All-gathers of an update that make matrices whole.
    pub gathers: u64,
    /// Bytes that the rank sends for them.
    pub sent: u64,
}

/// Into how many parts ranks cut what an optimizer keeps of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Ranks of a ZeRO-3 group.
    pub zero3: usize,
    /// Replicas that share the optimizer's work, with ZeRO-1, else 1.
    pub owners: usize,
    /// Whether the work is shared so, by one replica even.
    pub zero1: bool,
}

/// What part number `piece` of `part` takes, the head of a tied model if `tied`.
pub fn layer_bytes(
    (part, tied): (&Part, bool),
    cut: Cut,
    piece: usize,
    groups: &ParameterGroups,
) -> LayerBytes {
    let layout = FlatLayout::trained(part.parameters(), cut.zero3 * cut.owners);
    let len = layout.len / (cut.zero3 * cut.owners);
    let owned = Owned { layout: &layout, role: Role::of(part, tied), start: piece * len, len };
    // The rank's own part, and its parameters as they are gathered.
    let gathered = if cut.zero1 { 4 * (len + layout.len / cut.zero3) as u64 } else { 0 };
    let mut gathered_as = (len, 0, 0);
    if owned.has_matrices(groups) {
        for ranks in [cut.owners, cut.zero3].into_iter().filter(|ranks| *ranks > 1) {
            let (elements, gathers, sent) = gathered_as;
            let more = 4 * ((ranks - 1) * elements) as u64;
            gathered_as = (ranks * elements, gathers + 1, sent + more);
        }
    }
    let (_, gathers, sent) = gathered_as;
    LayerBytes {
        gathers,
        sent,
        watched: if tied { 0 } else { 4 * len as u64 },
        state: 4 * owned.state_elements(groups) as u64,
        update: gathered + owned.matrix_bytes(groups, cut.zero3),
    }
}
