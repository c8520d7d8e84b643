//! Whether layers keep as much as their costs say: memory is predicted from that.

use zeropp_core::files::in_words;
use zeropp_core::layer::{LayerCost, Part};
use zeropp_core::meter::{MemoryBytes, MemoryKind};
use zeropp_core::metrics::{RankPlan, StepMetrics};

use crate::plan::blueprint::Blueprint;

/// Most layers that are named.
const NAMED: usize = 4;

/// Notes on the costs of a model's layers after a run's first step: that a rank has
/// kept more than they say, and which layers say nothing at all.
pub(crate) fn remark(bp: &Blueprint, step: &StepMetrics) -> Option<String> {
    let most = |of: fn(&MemoryBytes, MemoryKind) -> u64, kind| {
        bp.plan.ranks.iter().map(|rank: &RankPlan| of(&rank.held.peaks, kind)).max().unwrap_or(0)
    };
    let beyond = [MemoryKind::Activation, MemoryKind::WeightStash].into_iter().filter_map(|kind| {
        let (said, kept) = (most(MemoryBytes::get, kind), step.peak_bytes.get(kind));
        let name = kind.name();
        (kept > said).then(|| format!("{name} {} and not {}", in_words(kept), in_words(said)))
    });
    let beyond: Vec<String> = beyond.collect();
    if beyond.is_empty() {
        return None;
    }
    let is_silent = |part: &&Part| part.cost(bp.batch) == LayerCost::default();
    let silent: Vec<&str> = bp.model.parts.iter().filter(is_silent).map(Part::name).collect();
    let silent = match silent.len() {
        0 => String::new(),
        n => {
            let more = if n > NAMED { " and others" } else { "" };
            let names = silent[..n.min(NAMED)].join(", ");
            format!(": the cost of {names}{more} is all zero")
        }
    };
    Some(format!(
        "step {}: a rank has kept more than the costs of its layers say ({}){silent}; fill in \
         Layer::cost (zeropp::check::layer holds it against the meter), since memory is predicted \
         and stages are cut by it",
        step.step,
        beyond.join(", ")
    ))
}
