//! The time that an update of a block takes which looks at whole parameters: a rank owns a piece of
//! the block's flat buffer, pieces have more or less of each, and each is changed whole.

use zeropp_model::optimizer::{Cut, Owned, Role, StateRule};
use zeropp_model::params::{FlatLayout, ParamSpec};
use zeropp_schedule::costs::Machine;

use crate::bytes::LayerSizes;

/// What one block takes, of the rank that has most of it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct OfBlock {
    /// Floating-point operations on its whole parameters.
    flops: f64,
    /// Bytes that come from each replica, and how many there are of them.
    from_replicas: (f64, usize),
    /// Bytes that come from each ZeRO-3 rank, and how many there are of them.
    from_zero3: (f64, usize),
}

impl OfBlock {
    /// Of such a block, cut so; none where `rule` updates no parameter of it as a whole.
    pub(crate) fn new(block: &LayerSizes, rule: &StateRule, cut: Cut) -> Option<OfBlock> {
        let whole = |p: &ParamSpec| rule.of(p, Role::Hidden).whole;
        if !block.parameters().iter().any(|p| whole(p).is_some()) {
            return None;
        }
        let layout = FlatLayout::trained(block.parameters().to_vec(), cut.pieces());
        let (shard, len) = (layout.len / cut.zero3, layout.len / cut.pieces());
        let of_piece = |piece: usize| -> f64 {
            let owned = Owned { layout: &layout, start: piece * len, len };
            let specs = owned.segments().map(|(param, _)| &layout.params[param].spec);
            specs.filter_map(whole).map(|whole| whole.flops as f64).sum()
        };
        Some(OfBlock {
            flops: (0..cut.pieces()).map(of_piece).fold(0.0, f64::max),
            from_replicas: (4.0 * len as f64, cut.owners),
            from_zero3: (4.0 * shard as f64, cut.zero3),
        })
    }

    /// Seconds of a step: two all-gathers at most, at these bytes in a second inside a ZeRO-3 group
    /// and between replicas, and the products.
    pub(crate) fn seconds(&self, machine: &Machine, zero3: f64, replica: f64) -> f64 {
        let gather = |(bytes, ranks): (f64, usize), rate: f64| match ranks {
            0 | 1 => 0.0,
            _ => machine.collective_s + bytes * (ranks - 1) as f64 / rate,
        };
        // Those of weight gradients are alike.
        let w = machine.block_flops_per_s.map(|rates| rates[2]);
        let rate = w.unwrap_or(machine.flops_per_s * machine.flops_share);
        let gathers = gather(self.from_replicas, replica);
        gathers + gather(self.from_zero3, zero3) + self.flops / rate
    }
}

#[cfg(test)]
mod tests {
    use zeropp_model::layer::LayerCost;
    use zeropp_model::optimizer::{Kept, Out, WholeUpdate};
    use zeropp_model::params::Init;

    use super::*;
    use crate::machines;

    /// Five rounds of 2·128²·(2·256 + 128), on each rank that has a part of the matrix; and halves
    /// of the block over one link, quarters over the other.
    #[test]
    fn gathers_and_products_take_their_time() {
        let spec = |name: &str, shape: &[usize]| ParamSpec::new(name, shape, Init::Zeros);
        let parameters = vec![spec("w", &[256, 128]), spec("b", &[256 * 128])];
        let block = LayerSizes::new(parameters, Role::Hidden, LayerCost::default());
        let flops = 5 * 2 * 128 * 128 * 640;
        let muon = StateRule::new(move |p, _| Kept {
            whole: (p.shape.len() == 2).then_some(WholeUpdate { elements: 1, flops, rms: false }),
            ..Kept::tensors(1)
        });
        let of = |zero3, owners| {
            OfBlock::new(
                &block,
                &muon,
                Cut { zero3, owners, zero1: owners > 1, out: Out::Nothing, host: false },
            )
            .unwrap()
        };
        let machine = machines::named("a100").unwrap();
        let products = flops as f64 / (312e12 * machine.flops_share);
        let bytes = 4.0 * (256 * 128) as f64;
        for (of, gathers, seconds) in [
            (of(1, 1), 0.0, 0.0),
            (of(2, 1), 1.0, bytes / 1e6),
            (of(2, 2), 2.0, bytes / 1e6 + bytes / 2.0 / 1e5),
        ] {
            let expected = products + gathers * machine.collective_s + seconds;
            assert!((of.seconds(&machine, 1e6, 1e5) / expected - 1.0).abs() < 1e-9, "{of:?}");
        }
        let cut = Cut { zero3: 2, owners: 1, zero1: false, out: Out::Nothing, host: false };
        assert_eq!(OfBlock::new(&block, &StateRule::uniform(2), cut), None);
    }
}
