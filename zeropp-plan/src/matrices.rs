//! What Muon keeps of a block and takes for its update: a rank owns a piece of the block's flat
//! buffer, pieces have more or less of matrices in them, and matrices are made orthogonal whole.

use zeropp_model::params::{FlatLayout, ParamSpec};

use crate::layout::Moments;

/// Bytes of one block, each of the rank that has most of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct OfBlock {
    /// What is kept from step to step.
    pub(crate) state: u64,
    /// What an update takes for a moment.
    pub(crate) update: u64,
}

impl OfBlock {
    /// Of a block with these parameters, cut over `zero3` ranks and, where replicas share the
    /// optimizer's state, over as many `owners` each.
    pub(crate) fn new(
        parameters: Vec<ParamSpec>,
        moments: Moments,
        zero3: usize,
        owners: usize,
    ) -> OfBlock {
        let layout = FlatLayout::new(parameters, zero3 * owners);
        let (shard, len) = (layout.len / zero3, layout.len / zero3 / owners);
        let ends = layout.params.iter().skip(1).map(|p| p.offset).chain([layout.len]);
        let places: Vec<_> = layout.params.iter().zip(ends).collect();
        let mut most = OfBlock::default();
        for start in (0..layout.len).step_by(len.max(1)) {
            let (mut kept, mut largest) = (0, 0);
            for (place, end) in &places {
                let (from, to) = (place.offset.max(start), (*end).min(start + len));
                let elements = to.saturating_sub(from) as u64;
                match place.spec.shape[..] {
                    [rows, cols] if elements > 0 => {
                        kept += moments.matrix * elements;
                        largest = largest.max(orthogonal_elements(rows, cols));
                    }
                    _ => kept += moments.other * elements,
                }
            }
            // Directions, and the layer's as they are gathered from replicas and from shards.
            let over_replicas = if owners > 1 { shard } else { 0 };
            let over_zero3 = if zero3 > 1 { layout.len } else { 0 };
            let update = (len + over_replicas + over_zero3) as u64 + largest;
            most.state = most.state.max(4 * kept);
            most.update = most.update.max(4 * update);
        }
        most
    }
}

/// Elements that Newton–Schulz takes for a matrix, its result included: twice the matrix, and
/// twice the square of its shorter side.
fn orthogonal_elements(rows: usize, cols: usize) -> u64 {
    let (short, long) = (rows.min(cols) as u64, rows.max(cols) as u64);
    2 * short * (long + short)
}

#[cfg(test)]
mod tests {
    use zeropp_model::params::Init;

    use super::*;

    /// A matrix of 256 × 128 and a vector as long, over two ranks: one has half of the matrix, the
    /// other the rest and the vector.
    #[test]
    fn matrices_and_what_is_beside_them_lie_on_other_ranks() {
        let spec = |name: &str, shape: &[usize]| ParamSpec::new(name, shape, Init::Zeros);
        let parameters = || vec![spec("w", &[256, 128]), spec("b", &[256 * 128])];
        let muon = Moments { matrix: 1, other: 2, whole_matrices: true };
        let one = OfBlock::new(parameters(), muon, 1, 1);
        let (n, orthogonal) = (256 * 128, 2 * 128 * (256 + 128));
        assert_eq!(one, OfBlock { state: 4 * 3 * n, update: 4 * (2 * n + orthogonal) });
        // The second rank keeps most, the first one's update takes most.
        let two = OfBlock::new(parameters(), muon, 2, 1);
        assert_eq!(two, OfBlock { state: 4 * 2 * n, update: 4 * (3 * n + orthogonal) });
        let shared = OfBlock::new(parameters(), muon, 2, 2);
        assert_eq!(shared.state, 4 * n);
        assert_eq!(shared.update, 4 * (n / 2 + n + 2 * n + orthogonal));
    }
}
