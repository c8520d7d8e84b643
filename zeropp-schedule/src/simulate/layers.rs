//! What a stage's layers have of its time.

use super::Costs;

/// What a layer and those before it have of their stage, in any units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerShare {
    /// Of W.
    pub w: u64,
    /// Of reductions and of sums over the replicas: bytes of their gradients.
    pub gradient: u64,
}

impl LayerShare {
    /// Those of a stage's layers, in their order, which have these by themselves.
    pub fn of_stage(layers: impl IntoIterator<Item = LayerShare>) -> Vec<LayerShare> {
        let add = |sum: &mut LayerShare, layer: LayerShare| {
            sum.w = sum.w.saturating_add(layer.w);
            sum.gradient = sum.gradient.saturating_add(layer.gradient);
            Some(*sum)
        };
        layers.into_iter().scan(LayerShare::default(), add).collect()
    }
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

    /// Those of all layers sum to the whole.
    fn share(&self, cell: usize, layer: usize, ns: u64, of: fn(&LayerShare) -> u64) -> u64 {
        let shares = self.layers.get(cell).map_or(&[][..], Vec::as_slice);
        let whole = shares.last().map_or(0, of);
        if whole == 0 {
            return if layer == 0 { ns } else { 0 };
        }
        let until = |share: &LayerShare| {
            (u128::from(ns) * u128::from(of(share)) / u128::from(whole)) as u64
        };
        let before = layer.checked_sub(1).map_or(0, |before| until(&shares[before]));
        until(&shares[layer]) - before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_layers_sum_to_the_whole() {
        let share = |(w, gradient): (u64, u64)| LayerShare { w, gradient };
        let layers = LayerShare::of_stage([(3, 9), (3, 9), (1, 0)].map(share));
        let costs = Costs { layers: vec![layers, Vec::new()], ..Costs::default() };
        assert_eq!([0, 1, 7].map(|cell| costs.layers_of(cell)), [3, 1, 1]);
        assert_eq!([0, 1, 2].map(|layer| costs.w_of_layer(0, layer, 100)), [42, 43, 15]);
        assert_eq!([0, 1, 2].map(|layer| costs.reduction_of_layer(0, layer, 9)), [4, 5, 0]);
        assert_eq!(costs.w_of_layer(1, 0, 5), 5);
    }
}
