//! How the micro-batches of a step are dealt out to the replicas.

/// How many micro-batches of a step the ranks of each replica have. Where the batch does not divide
/// evenly, the first replicas have a few more than the others, so that there are two numbers at
/// most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deal {
    /// Replicas.
    replicas: usize,
    /// Micro-batches of each rank of the first ones, of which there is at least one.
    pub most: usize,
    /// How many these are.
    full: usize,
    /// Micro-batches of each rank of the others.
    fewer: usize,
}

impl Deal {
    /// As many for each of `replicas`.
    pub fn even(each: usize, replicas: usize) -> Deal {
        Deal { replicas, most: each, full: replicas, fewer: each }
    }

    /// `all` micro-batches for `replicas`, `at_a_time` together; each gets some.
    pub fn of(all: usize, replicas: usize, at_a_time: usize) -> Deal {
        let times = all / at_a_time;
        let (fewer, full) = (times / replicas * at_a_time, times % replicas);
        match full {
            0 => Deal::even(fewer, replicas),
            _ => Deal { replicas, most: fewer + at_a_time, full, fewer },
        }
    }

    /// The micro-batches of replicas that have fewer than the first; none where all have as many.
    pub fn fewer(&self) -> Option<usize> {
        (self.fewer != self.most).then_some(self.fewer)
    }

    /// How many micro-batches went to a replica at a time, where they do not divide evenly.
    pub fn dealt_by(&self) -> Option<usize> {
        self.fewer().map(|fewer| self.most - fewer)
    }

    /// Micro-batches of each rank of a replica.
    pub(crate) fn of_replica(&self, replica: usize) -> usize {
        if replica < self.full { self.most } else { self.fewer }
    }

    /// Those of each replica.
    pub fn to_vec(self) -> Vec<usize> {
        (0..self.replicas).map(|replica| self.of_replica(replica)).collect()
    }

    /// Micro-batches of a step on one ZeRO-3 place of all replicas.
    pub fn all(&self) -> usize {
        self.before(self.replicas)
    }

    /// Those of the replicas before this one.
    fn before(&self, replica: usize) -> usize {
        let full = replica.min(self.full);
        let full_ones = self.most.saturating_mul(full);
        full_ones.saturating_add(self.fewer.saturating_mul(replica - full))
    }

    /// The number, among those of the whole step, of the first micro-batch of the rank with this
    /// place among the `zero3` ranks of its ZeRO-3 group: replicas, then places, have consecutive
    /// ones.
    pub fn first(&self, replica: usize, place: usize, zero3: usize) -> usize {
        self.before(replica) * zero3 + place * self.of_replica(replica)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_micro_batch_has_one_place_and_the_first_replicas_have_what_is_over() {
        assert_eq!(Deal::of(8, 3, 1).to_vec(), [3, 3, 2]);
        assert_eq!(Deal::of(9, 3, 1), Deal::even(3, 3));
        assert_eq!(Deal::of(10, 4, 2).to_vec(), [4, 2, 2, 2]);
        assert_eq!(Deal::of(8, 3, 1).fewer(), Some(2));
        assert_eq!(Deal::even(3, 3).fewer(), None);
        for (all, replicas, zero3) in [(8, 3, 1), (7, 2, 3), (11, 4, 2), (12, 4, 2), (5, 5, 1)] {
            let deal = Deal::of(all, replicas, 1);
            let places = (0..replicas).flat_map(|k| (0..zero3).map(move |place| (k, place)));
            let mine = |(k, place)| {
                let first = deal.first(k, place, zero3);
                first..first + deal.of_replica(k)
            };
            let numbers: Vec<usize> = places.flat_map(mine).collect();
            assert_eq!(numbers, (0..all * zero3).collect::<Vec<_>>(), "{deal:?}");
            assert_eq!(deal.all(), all);
        }
    }
}
