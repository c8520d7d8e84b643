//! What Muon keeps of a block and takes for its update: a rank owns a piece of the block's flat
//! buffer, pieces have more or less of matrices in them, and matrices are made orthogonal whole.

use zeropp_model::params::{FlatLayout, ParamSpec};
use zeropp_schedule::costs::Machine;

use crate::layout::Moments;

/// Rounds of Newton–Schulz, each of three products.
const ROUNDS: f64 = 5.0;

/// What one block takes, each of the rank that has most of it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct OfBlock {
    /// What is kept from step to step.
    pub(crate) state: u64,
    /// Bytes that an update takes for a moment.
    pub(crate) update: u64,
    /// Floating-point operations that make its matrices orthogonal.
    flops: f64,
    /// Bytes that come from each replica, and how many there are of them.
    from_replicas: (f64, usize),
    /// Bytes that come from each ZeRO-3 rank, and how many there are of them.
    from_zero3: (f64, usize),
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
            let (mut kept, mut largest, mut flops) = (0, 0, 0.0);
            for (place, end) in &places {
                let (from, to) = (place.offset.max(start), (*end).min(start + len));
                let elements = to.saturating_sub(from) as u64;
                match place.spec.shape[..] {
                    [rows, cols] if elements > 0 => {
                        kept += moments.matrix * elements;
                        largest = largest.max(orthogonal_elements(rows, cols));
                        flops += orthogonal_flops(rows, cols);
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
            most.flops = most.flops.max(flops);
        }
        most.from_replicas = (4.0 * len as f64, owners);
        most.from_zero3 = (4.0 * shard as f64, zero3);
        most
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

/// Elements that Newton–Schulz takes for a matrix, its result included: twice the matrix, and
/// twice the square of its shorter side.
fn orthogonal_elements(rows: usize, cols: usize) -> u64 {
    let (short, long) = (rows.min(cols) as u64, rows.max(cols) as u64);
    2 * short * (long + short)
}

/// Floating-point operations of Newton–Schulz on a matrix: its square over the shorter side, that
/// one's square, and a product with the matrix.
fn orthogonal_flops(rows: usize, cols: usize) -> f64 {
    let (short, long) = (rows.min(cols) as f64, rows.max(cols) as f64);
    ROUNDS * 2.0 * short * short * (2.0 * long + short)
}

#[cfg(test)]
mod tests {
    use zeropp_model::params::Init;

    use super::*;
    use crate::machines;

    /// A matrix of 256 × 128 and a vector as long, over two ranks: one has half of the matrix, the
    /// other the rest and the vector.
    #[test]
    fn matrices_and_what_is_beside_them_lie_on_other_ranks() {
        let spec = |name: &str, shape: &[usize]| ParamSpec::new(name, shape, Init::Zeros);
        let parameters = || vec![spec("w", &[256, 128]), spec("b", &[256 * 128])];
        let muon = Moments { matrix: 1, other: 2, whole_matrices: true };
        let one = OfBlock::new(parameters(), muon, 1, 1);
        let (n, orthogonal) = (256 * 128, 2 * 128 * (256 + 128));
        assert_eq!((one.state, one.update), (4 * 3 * n, 4 * (2 * n + orthogonal)));
        // The second rank keeps most, the first one's update takes most.
        let two = OfBlock::new(parameters(), muon, 2, 1);
        assert_eq!((two.state, two.update), (4 * 2 * n, 4 * (3 * n + orthogonal)));
        let shared = OfBlock::new(parameters(), muon, 2, 2);
        assert_eq!(shared.state, 4 * n);
        assert_eq!(shared.update, 4 * (n / 2 + n + 2 * n + orthogonal));
        // Five rounds of 2·128²·(2·256 + 128), on each rank that has a part of the matrix; and
        // halves of the block over one link, quarters over the other.
        let machine = machines::named("a100").unwrap();
        let products = 5.0 * 2.0 * 128.0 * 128.0 * 640.0 / (312e12 * machine.flops_share);
        let bytes = 4.0 * n as f64;
        for (of, gathers, seconds) in [
            (one, 0.0, 0.0),
            (two, 1.0, bytes / 1e6),
            (shared, 2.0, bytes / 1e6 + bytes / 2.0 / 1e5),
        ] {
            let told = products + gathers * machine.collective_s + seconds;
            assert!((of.seconds(&machine, 1e6, 1e5) / told - 1.0).abs() < 1e-9, "{of:?}");
        }
    }
}
