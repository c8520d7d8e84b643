//! A head that is split over pipeline ranks: which blocks of its rows each rank has, and whether
//! that is worth it. Runs and plans ask the same functions, each with its own times.

use std::ops::Range;

use zeropp_model::head::{SliceShape, blocks};
use zeropp_model::layer::BatchShape;
use zeropp_model::optimizer::{Role, Shares};
use zeropp_model::params::ParamSpec;
use zeropp_model::shared_rows::SharedRows;
use zeropp_schedule::head::HeadTree;
use zeropp_schedule::memory::{HeadBytes, StageBytes};
use zeropp_schedule::schedules::Kind;

use crate::bytes::{LayerSizes, StageForm, StageState, stage_bytes};
use crate::worth::is_worth;

/// A head of fewer blocks stays whole: one would be too large a part of it to be dealt out evenly.
const BLOCKS_MIN: usize = 16;

/// Whether `pp` ranks may share a head of so many token ids in a schedule of this kind, of samples
/// that are cut into slices or not.
pub fn can_be(ids: usize, pp: usize, kind: Option<&Kind>, in_slices: bool) -> bool {
    let has_order = kind.is_some_and(|kind| kind.splits_heads(in_slices));
    pp > 1 && has_order && blocks(ids).len() >= BLOCKS_MIN
}

/// Whether slices are worth a try: where what has the whole head does not fit, or ranks that
/// compute so long for a micro-batch, with it, may gain enough. With slices every rank takes the
/// mean at best.
pub fn is_worth_trying(fits: bool, ranks: &[f64]) -> bool {
    let mean = ranks.iter().sum::<f64>() / ranks.len().max(1) as f64;
    !fits || is_worth(ranks.iter().copied().fold(0.0, f64::max), mean)
}

/// As many blocks of a head of so many token ids on each of `pp` ranks.
pub fn even(ids: usize, pp: usize) -> Vec<usize> {
    let blocks = blocks(ids).len();
    let each = blocks.div_ceil(pp.max(1));
    (0..pp).map(|rank| each.min(blocks.saturating_sub(rank * each))).collect()
}

/// Blocks where there is least to do, for ranks that compute so long for a micro-batch without the
/// head, which takes `head` in all.
pub fn poured(ids: usize, ranks: &[f64], head: f64) -> Vec<usize> {
    let blocks = blocks(ids).len();
    let mut poured = vec![0; ranks.len()];
    let mut now = ranks.to_vec();
    for _ in 0..blocks {
        // The last of equals, which is nearer to the root.
        let least = now.iter().copied().fold(f64::INFINITY, f64::min);
        let Some(rank) = now.iter().rposition(|busy| *busy <= least) else { break };
        poured[rank] += 1;
        now[rank] += head / blocks as f64;
    }
    poured
}

/// What is predicted of a run.
#[derive(Clone, Copy, Debug)]
pub struct PredictedStep {
    /// How long a step takes, in any unit.
    pub step: f64,
    /// Whether it fits into memory.
    pub fits: bool,
}

/// The best of some splits, with what a step takes off that of the `whole` head; none where that is
/// as good. What fits goes before what does not, and a run that cannot be with a whole head has any
/// split.
pub fn chosen<T>(
    whole: Option<PredictedStep>,
    splits: impl IntoIterator<Item = (T, PredictedStep)>,
) -> Option<(T, f64)> {
    let (fitting, beyond): (Vec<_>, Vec<_>) = splits.into_iter().partition(|(_, of)| of.fits);
    let fastest = |all: Vec<(T, PredictedStep)>| {
        let (split, of) = all.into_iter().min_by(|a, b| a.1.step.total_cmp(&b.1.step))?;
        Some((split, whole.map_or(0.0, |whole| 1.0 - of.step / whole.step.max(1e-9))))
    };
    let gains = |(_, gain): &(T, f64)| is_worth(1.0, 1.0 - gain);
    match whole {
        None => fastest(fitting).or_else(|| fastest(beyond)),
        Some(whole) if whole.fits => fastest(fitting).filter(gains),
        Some(_) => fastest(fitting).or_else(|| fastest(beyond).filter(gains)),
    }
}

/// A layer that is these rows of a head with this `weight`, which is the embedding's or its own.
pub fn slice_sizes(
    weight: &ParamSpec,
    shape: &SliceShape,
    batch: BatchShape,
    is_tied: bool,
) -> LayerSizes {
    let cost = shape.cost(batch, weight.trains);
    let role = if is_tied { Role::Embedding } else { Role::Head };
    LayerSizes::new(vec![weight.rows(shape.own_rows())], role, cost)
}

/// The blocks of a rank, with its sums of gradients.
pub fn of_rank(messages: &HeadTree, rank: usize) -> (Range<usize>, Vec<Range<usize>>) {
    (messages.blocks_of(rank), messages.own_sums(rank))
}

/// Bytes of a rank's slice, if it has one, for micro-batches of so many tokens.
pub fn slice_bytes(sizes: Option<&LayerSizes>, form: &StageForm, tokens: usize) -> StageBytes {
    let hidden = form.message / (tokens * form.element_bytes).max(1) as u64;
    let head = HeadBytes {
        input: form.message,
        sums: 8 * tokens as u64,
        lse: 8 * tokens as u64,
        gradient: 4 * tokens as u64 * hidden,
    };
    StageBytes { head, ..stage_bytes(sizes.into_iter(), form) }
}

/// What ranks have of a slice from step to step, of which the optimizer takes `shares`.
pub fn slice_state(sizes: &LayerSizes, pieces: usize, shares: Shares) -> StageState {
    StageState {
        elements: sizes.elements(pieces),
        trained: sizes.trained(pieces),
        shares,
        ..StageState::default()
    }
}

/// Notes what ranks exchange of a weight that the embedding has and slices update: of `stages`, and
/// behind `head` of them the slice of each rank. What the optimizer takes of the first of them is
/// without the embedding.
pub fn tie_slices(stages: &mut [&mut StageState], head: usize, embedding: u64, rows: &SharedRows) {
    for rank in 0..rows.slices.len() {
        let stage = if rank == rows.owner { 0 } else { head + rank };
        let bytes = |piece| rows.message_bytes(rank, piece);
        let slice = stages[head + rank].trained;
        stages[stage].tied_rows = slice + if rank == rows.owner { embedding } else { 0 };
        stages[stage].exchanged = (0..rows.pieces).map(bytes).collect();
    }
    stages[0].returned = embedding;
}

#[cfg(test)]
mod tests;
