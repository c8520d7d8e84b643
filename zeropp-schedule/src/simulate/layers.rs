//! What a stage's layers have of its time.

use super::Costs;

/// A layer's share of its stage, in any units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerShare {
    /// Of W.
    pub w: u64,
    /// Of reductions and of sums over the replicas: bytes of its gradient.
    pub gradient: u64,
}

impl Costs {
    /// Layers of the stage that has the costs at `cell`, 1 or more.
    pub fn layers_of(&self, cell: usize) -> usize {
        self.layers.get(cell).map_or(1, |layers| layers.len().max(1))
    }

    /// What a layer has of a W of its stage that takes `ns`.
    pub fn w_of_layer(&self, cell: usize, layer: usize, ns: u64) -> u64 {
        self.share(cell, layer, ns, |share| share.w)
    }

    /// What a layer has of a reduction of its stage, or of a sum over the replicas, that takes
    /// `ns`.
    pub fn reduction_of_layer(&self, cell: usize, layer: usize, ns: u64) -> u64 {
        self.share(cell, layer, ns, |share| share.gradient)
    }

    /// Shares of all layers sum to the whole.
    fn share(&self, cell: usize, layer: usize, ns: u64, of: fn(&LayerShare) -> u64) -> u64 {
        let shares = self.layers.get(cell).map_or(&[][..], Vec::as_slice);
        let sum = |shares: &[LayerShare]| shares.iter().map(|one| u128::from(of(one))).sum();
        let whole: u128 = sum(shares);
        if whole == 0 {
            return if layer == 0 { ns } else { 0 };
        }
        let until = |layer: usize| (u128::from(ns) * sum(&shares[..layer]) / whole) as u64;
        until(layer + 1) - until(layer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_layers_sum_to_the_whole() {
        let share = |(w, gradient): (u64, u64)| LayerShare { w, gradient };
        let layers = vec![[(3, 9), (3, 9), (1, 0)].map(share).to_vec(), Vec::new()];
        let costs = Costs { layers, ..Costs::default() };
        assert_eq!([0, 1, 7].map(|cell| costs.layers_of(cell)), [3, 1, 1]);
        assert_eq!([0, 1, 2].map(|layer| costs.w_of_layer(0, layer, 100)), [42, 43, 15]);
        assert_eq!([0, 1, 2].map(|layer| costs.reduction_of_layer(0, layer, 9)), [4, 5, 0]);
        assert_eq!(costs.w_of_layer(1, 0, 5), 5);
    }
}
