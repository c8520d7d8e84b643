//! Whose turn it is among several sources: a function of the sample's number alone.

/// Turns are given out by the thousandth of a hundredth, or more finely where a source would get
/// none.
const PERIOD: usize = 10_000;

/// A row of turns that repeats: as many of each source as its weight says.
#[derive(Clone, Debug)]
pub(super) struct SourceTurns {
    /// Source of each turn, and how many turns it had before in the row.
    row: Vec<(usize, u64)>,
    /// Turns of each source in the row.
    each: Vec<u64>,
}

impl SourceTurns {
    /// Turns for sources of these weights, positive and finite.
    pub(super) fn new(weights: &[f64]) -> SourceTurns {
        let each = apportioned(weights);
        let period: u64 = each.iter().sum();
        let mut had = vec![0u64; each.len()];
        // Each turn goes to the source that is furthest behind its share, the first of equals.
        let row = (1..=period).map(|turn| {
            let behind = |s: &usize| {
                let due = i128::from(turn) * i128::from(each[*s]);
                due - i128::from(had[*s]) * i128::from(period)
            };
            let next = (0..each.len()).rev().max_by_key(behind).expect("there are sources");
            had[next] += 1;
            (next, had[next] - 1)
        });
        let row = row.collect();
        SourceTurns { row, each }
    }

    /// How many of the first `n` samples of a run are those of `source`.
    pub(super) fn before(&self, n: u128, source: usize) -> u128 {
        let period = self.row.len() as u128;
        let row = &self.row[..(n % period) as usize];
        let begun = row.iter().filter(|(of, _)| *of == source).count() as u128;
        n / period * u128::from(self.each[source]) + begun
    }

    /// The source of sample `n` of a run, and which of that source's own samples it is.
    pub(super) fn of(&self, n: u128) -> (usize, u128) {
        let period = self.row.len() as u128;
        let (source, before) = self.row[(n % period) as usize];
        (source, n / period * u128::from(self.each[source]) + u128::from(before))
    }
}

/// Whole numbers of turns by the largest remainder, at least one each, in lowest terms.
fn apportioned(weights: &[f64]) -> Vec<u64> {
    let total: f64 = weights.iter().sum();
    let period = PERIOD.max(weights.len()) as f64;
    let shares: Vec<f64> = weights.iter().map(|w| w / total * period).collect();
    let mut each: Vec<u64> = shares.iter().map(|share| share.floor() as u64).collect();
    let left = (period as u64).saturating_sub(each.iter().sum());
    let mut order: Vec<usize> = (0..weights.len()).collect();
    let rest = |i: usize| shares[i] - shares[i].floor();
    order.sort_by(|a, b| rest(*b).total_cmp(&rest(*a)).then(a.cmp(b)));
    for i in order.iter().cycle().take(left as usize) {
        each[*i] += 1;
    }
    each.iter_mut().for_each(|n| *n = (*n).max(1));
    let divisor = each.iter().copied().fold(0, gcd);
    each.iter().map(|n| n / divisor).collect()
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn weights_become_whole_turns() {
        assert_eq!(apportioned(&[0.7, 0.3]), [7, 3]);
        assert_eq!(apportioned(&[2.0, 1.0, 1.0]), [2, 1, 1]);
        assert_eq!(apportioned(&[5.0]), [1]);
        let thirds = apportioned(&[1.0, 1.0, 1.0]);
        assert_eq!(thirds.iter().sum::<u64>(), 10_000);
        assert!(thirds.iter().all(|n| [3333, 3334].contains(n)));
        assert_eq!(apportioned(&[1.0, 1e-9]), [10_000, 1], "none is left out");
        let turns = SourceTurns::new(&[0.7, 0.3]);
        let sources: Vec<usize> = (0..10).map(|n| turns.of(n).0).collect();
        assert_eq!(sources, [0, 1, 0, 0, 0, 1, 0, 0, 1, 0], "spread, not in two blocks");
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        /// Each source's samples are 0, 1, 2 … in their order, near its share at any time.
        #[test]
        fn every_sample_of_a_source_comes_once_and_in_time(
            weights in prop::collection::vec(1u32..100, 1..6), from in 0u64..50_000,
        ) {
            let weights: Vec<f64> = weights.into_iter().map(f64::from).collect();
            let turns = SourceTurns::new(&weights);
            let total: f64 = weights.iter().sum();
            let mut next: Vec<Option<u128>> = vec![None; weights.len()];
            for n in u128::from(from)..u128::from(from) + 2000 {
                let (source, i) = turns.of(n);
                prop_assert!(next[source].is_none_or(|next| next == i));
                next[source] = Some(i + 1);
                prop_assert_eq!((turns.before(n, source), turns.before(n + 1, source)), (i, i + 1));
                let share = (n + 1) as f64 * weights[source] / total;
                // Half a turn of at least 20 in the row from rounding, and one from each source.
                let near = weights.len() as f64 + share * 0.03;
                prop_assert!((i as f64 + 1.0 - share).abs() < near, "{i} of {share}");
            }
        }
    }
}
