//! Cuts a model's list of parts into stages of nearly equal cost.

use std::ops::Range;

use zeropp_core::layer::{BatchShape, Part};

/// A model with fewer blocks than stages.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{stages} stages need as many layers, the model has {blocks}; lower pp or virtual, \
     or raise layers to {stages}"
)]
pub struct TooFewLayers {
    /// Stages asked for.
    pub stages: usize,
    /// Layers a stage may begin at.
    pub blocks: usize,
}

/// The parts of each stage. Parts that are no block stay with the block before them, or the first.
///
/// Minimises the largest forward cost of a stage, then the sum of squares.
///
/// # Errors
/// [`TooFewLayers`] where a stage would have no block.
pub fn partition(
    parts: &[Part],
    stages: usize,
    batch: BatchShape,
) -> Result<Vec<Range<usize>>, TooFewLayers> {
    let starts: Vec<usize> = (0..parts.len()).filter(|i| parts[*i].is_block()).collect();
    let blocks = starts.len();
    if blocks < stages || stages == 0 {
        return Err(TooFewLayers { stages, blocks });
    }
    // Part index where block group g begins; the first group takes what leads it.
    let begin = |g: usize| match g {
        0 => 0,
        g if g == blocks => parts.len(),
        g => starts[g],
    };
    let costs: Vec<f64> = (0..blocks)
        .map(|g| (begin(g)..begin(g + 1)).map(|i| parts[i].cost(batch).forward_flops).sum())
        .collect();
    let cuts = balance(&costs, stages);
    Ok(cuts.windows(2).map(|w| begin(w[0])..begin(w[1])).collect())
}

/// Cut points `0 = c0 < c1 < … < cS = n` of the best contiguous split.
fn balance(costs: &[f64], stages: usize) -> Vec<usize> {
    let n = costs.len();
    let mut prefix = vec![0.0];
    for c in costs {
        prefix.push(prefix[prefix.len() - 1] + c);
    }
    // best[k][i]: (largest, sum of squares, last cut) for the first i groups in k stages.
    let none = (f64::INFINITY, f64::INFINITY, 0);
    let mut best = vec![vec![none; n + 1]; stages + 1];
    best[0][0] = (0.0, 0.0, 0);
    for k in 1..=stages {
        for i in k..=n {
            for j in (k - 1)..i {
                let (largest, squares, _) = best[k - 1][j];
                let c = prefix[i] - prefix[j];
                let candidate = (largest.max(c), squares + c * c, j);
                if (candidate.0, candidate.1) < (best[k][i].0, best[k][i].1) {
                    best[k][i] = candidate;
                }
            }
        }
    }
    let mut cuts = vec![n];
    for k in (1..=stages).rev() {
        cuts.push(best[k][cuts[cuts.len() - 1]].2);
    }
    cuts.reverse();
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_costs_split_evenly() {
        assert_eq!(balance(&[1.0; 8], 4), [0, 2, 4, 6, 8]);
        let cuts = balance(&[1.0; 7], 3);
        let sizes: Vec<usize> = cuts.windows(2).map(|w| w[1] - w[0]).collect();
        assert_eq!(sizes.iter().max(), Some(&3));
        assert_eq!(sizes.iter().min(), Some(&2));
    }

    #[test]
    fn a_heavy_end_gets_fewer_neighbours() {
        assert_eq!(balance(&[1.0, 1.0, 1.0, 3.0], 2), [0, 3, 4]);
    }
}
