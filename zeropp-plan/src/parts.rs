//! A model as a list of parts: all that a prediction needs of it. A run makes them of the layers
//! that it trains, a plan of a description, and both predict by them.

use std::ops::Range;
use std::sync::Arc;

use zeropp_model::optimizer::{Cut, Shares};
use zeropp_schedule::costs::BlockTimes;
use zeropp_schedule::memory::StageBytes;
use zeropp_schedule::simulate::{LayerShare, StageCosts};

use crate::bytes::{LayerSizes, StageForm, StageState, Tied, stage_bytes};
use crate::cut::{BlockGroups, GroupTimes};

/// A block's mean estimated F, in ns: estimates are proportions, not times, and alike for every cut
/// of a model.
const BLOCK_NS: f64 = 1e6;

/// The parts of a model, from its embedding to its head.
#[derive(Clone, Debug)]
pub struct Parts {
    layers: Arc<[LayerSizes]>,
    groups: BlockGroups,
    is_tied: bool,
    /// Tokens of a micro-batch, as the layers' costs are for.
    tokens: usize,
}

impl Parts {
    /// These layers, each with whether a stage may begin at it, whose costs are of micro-batches of
    /// so many tokens; `is_tied` is whether the first and the last share their weight.
    pub fn new(layers: Vec<(LayerSizes, bool)>, is_tied: bool, tokens: usize) -> Parts {
        let groups = BlockGroups::new(layers.iter().map(|(_, is_block)| *is_block));
        let layers = layers.into_iter().map(|(layer, _)| layer).collect();
        Parts { layers, groups, is_tied, tokens }
    }

    /// The layers.
    pub fn layers(&self) -> &[LayerSizes] {
        &self.layers
    }

    /// Where stages may begin.
    pub fn groups(&self) -> &BlockGroups {
        &self.groups
    }

    /// Whether embedding and head share a weight that trains, so that its gradients are summed.
    pub fn trains_tied(&self) -> bool {
        let trains = |layer: &LayerSizes| layer.parameters().iter().any(|p| p.trains);
        self.is_tied && self.layers.first().is_some_and(trains)
    }

    /// Whether this part is a head that shares the embedding's weight.
    pub fn is_tied_head(&self, part: usize) -> bool {
        self.is_tied && part + 1 == self.layers.len()
    }

    /// Parameters of some parts.
    pub fn parameters(&self, parts: Range<usize>) -> u64 {
        let layers = self.layers[parts].iter().flat_map(LayerSizes::parameters);
        layers.map(|p| p.len() as u64).sum()
    }

    /// Floating-point operations of a part's F, B, W and R for a micro-batch.
    pub fn flops(&self, part: usize, recomputed: bool) -> BlockTimes {
        self.layers[part].flops(self.tokens, recomputed)
    }

    /// Operations of each group's F, B, W and R.
    pub(crate) fn group_flops(&self, recomputed: bool) -> Vec<BlockTimes> {
        let all: Vec<_> = (0..self.layers.len()).map(|i| self.flops(i, recomputed)).collect();
        let [f, b, w, r] = std::array::from_fn(|kind| self.groups.sums(|i| all[i][kind]));
        (0..self.groups.len()).map(|g| [f[g], b[g], w[g], r[g]]).collect()
    }

    /// What a run cuts by where no file of costs says otherwise: operations, those of R among them
    /// for the first `recomputing` stages.
    pub(crate) fn times_by_flop(&self, recomputing: usize) -> GroupTimes {
        let kept = self.group_flops(false).iter().map(step).collect();
        let recomputed = self.group_flops(true).iter().map(whole).collect();
        GroupTimes {
            kept,
            recomputed,
            recomputing,
            tail: self.tail_of(|i| step(&self.flops(i, false))),
        }
    }

    /// The sum over the parts after the last block.
    pub(crate) fn tail_of(&self, of_part: impl Fn(usize) -> f64) -> f64 {
        let tail = self.groups.tail().unwrap_or(self.layers.len());
        (tail..self.layers.len()).map(of_part).sum()
    }

    /// Times in proportion to operations, for stages of these parts, of which some are recomputed.
    pub fn estimates(
        &self,
        stages: &[Range<usize>],
        recomputed: impl Fn(usize) -> bool,
    ) -> Vec<StageCosts> {
        let stage = |(stage, range): (usize, &Range<usize>)| {
            let parts = range.clone().map(|part| self.flops(part, recomputed(stage)));
            let add = |sum: [f64; 4], part: [f64; 4]| std::array::from_fn(|i| sum[i] + part[i]);
            parts.fold([0.0; 4], add)
        };
        stages.iter().enumerate().map(|one| self.estimate(stage(one))).collect()
    }

    /// What the parts of each of these stages have of its times, by operations and elements, of
    /// buffers that so many ranks share.
    pub fn layer_shares(&self, stages: &[Range<usize>], pieces: usize) -> Vec<Vec<LayerShare>> {
        let share = |part: usize| {
            let ([f, _, w, _], layer) = (self.flops(part, false), &self.layers[part]);
            let (weights, gradient) = (layer.elements(pieces), layer.trained(pieces));
            LayerShare { f: f as u64, w: w as u64, weights, gradient }
        };
        stages.iter().map(|stage| LayerShare::of_stage(stage.clone().map(share))).collect()
    }

    /// A time in proportion to the operations of F, B, W and R.
    pub fn estimate(&self, [f, b, w, r]: BlockTimes) -> StageCosts {
        let whole: f64 = (0..self.layers.len()).map(|part| self.flops(part, false)[0]).sum();
        let block = (whole / self.groups.len().max(1) as f64).max(1.0);
        let ns = |flops: f64| (flops / block * BLOCK_NS) as u64;
        StageCosts {
            f_ns: ns(f).max(1),
            b_ns: ns(b).max(1),
            w_ns: ns(w),
            r_ns: ns(r).max(1),
            ..StageCosts::default()
        }
    }

    /// Tokens of a micro-batch.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Bytes of the stage of these parts.
    pub fn stage_bytes(&self, parts: Range<usize>, form: &StageForm) -> StageBytes {
        stage_bytes(self.layers[parts].iter(), form)
    }

    /// What ranks have of the stage of these parts from step to step; `shares` says what the
    /// optimizer takes of a part ([`LayerSizes::shares`]).
    pub fn stage_state(
        &self,
        parts: Range<usize>,
        cut: Cut,
        shares: impl Fn(usize) -> Shares,
    ) -> StageState {
        let (pieces, head) = (cut.pieces(), self.layers.len() - 1);
        let has_tied_head = self.trains_tied() && parts.contains(&head);
        let mut all = Shares::default();
        for part in parts.clone().filter(|part| !has_tied_head || *part != head) {
            all.add(&shares(part), 1);
        }
        let layers = &self.layers[parts];
        StageState {
            elements: layers.iter().map(|layer| layer.elements(pieces)).sum(),
            trained: layers.iter().map(|layer| layer.trained(pieces)).sum(),
            shares: all,
            out: cut.out,
            tied: has_tied_head.then(|| Tied {
                shard: self.layers[0].trained(pieces) / cut.zero3 as u64 * 4,
                head: shares(head),
            }),
            ..StageState::default()
        }
    }
}

/// F, B and W together.
pub(crate) fn step(of: &BlockTimes) -> f64 {
    of[0] + of[1] + of[2]
}

/// F, B, W and R together.
pub(crate) fn whole(of: &BlockTimes) -> f64 {
    step(of) + of[3]
}

#[cfg(test)]
mod tests {
    use zeropp_model::layer::LayerCost;
    use zeropp_model::optimizer::Role;
    use zeropp_model::params::{Init, ParamSpec};

    use super::*;

    /// A layer with a matrix of 2 x 3 and one bias, and `attention` FLOP beside them.
    fn plain(attention: f64, stash_bytes: u64) -> (LayerSizes, bool) {
        let parameters =
            vec![ParamSpec::new("w", &[2, 3], Init::Zeros), ParamSpec::new("b", &[3], Init::Zeros)];
        let forward_flops = 12.0 * 10.0 + attention;
        let cost = LayerCost { forward_flops, stash_bytes, ..LayerCost::default() };
        (LayerSizes::new(parameters, Role::Hidden, cost), true)
    }

    #[test]
    fn w_does_what_multiplies_by_weights_and_b_the_rest_of_twice_a_forward() {
        let parts = Parts::new(vec![plain(0.0, 8), plain(120.0, 8), plain(0.0, 0)], false, 10);
        let times = parts.estimates(&[0..1, 1..2, 2..3, 0..2], |_| false);
        let of = |i: usize| [times[i].f_ns, times[i].b_ns, times[i].w_ns, times[i].r_ns];
        // 120 FLOP of weights, and as many of attention; a block has 160 on average.
        let one = 750_000;
        assert_eq!(of(0), [one, one, one, one]);
        assert_eq!(of(1), [2 * one, 3 * one, one, 2 * one], "attention has no W");
        assert_eq!(of(2), [one, 2 * one, 0, one], "all of its backward is B");
        assert_eq!(of(3), [3 * one, 4 * one, 2 * one, 3 * one]);
        // Cuts of one model are in one unit, so that their steps can be compared.
        let alone = parts.estimates(&[2..3], |_| false);
        assert_eq!(alone[0], times[2]);
    }
}
