//! The mappings of which blocks consist.
//!
//! The system moves pages from one address to another within one mapping only, so who moves those
//! of a block has to know where its mappings end. Most lie within one, and nothing is noted.

use std::collections::BTreeMap;

/// Of blocks that consist of several mappings the bytes of each, in order, by the block's address.
pub(crate) struct JoinedMappings(BTreeMap<usize, Vec<usize>>);

impl JoinedMappings {
    pub(crate) const fn new() -> Self {
        Self(BTreeMap::new())
    }

    /// Of how many mappings the block at `address` consists.
    pub(crate) fn count(&self, address: usize) -> usize {
        self.0.get(&address).map_or(1, Vec::len)
    }

    /// The most mappings that a block consists of.
    #[cfg(test)]
    pub(crate) fn most(&self) -> usize {
        self.0.values().map(Vec::len).max().unwrap_or(1)
    }

    /// Whether nothing is noted.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Notes the mappings of the block at `address`.
    pub(crate) fn note(&mut self, address: usize, parts: Vec<usize>) {
        if parts.len() > 1 {
            self.0.insert(address, parts);
        }
    }

    /// The mappings of a block of `bytes`, which are not noted any more.
    pub(crate) fn take(&mut self, address: usize, bytes: usize) -> Vec<usize> {
        self.0.remove(&address).unwrap_or_else(|| vec![bytes])
    }

    /// Two blocks where one was: the first `bytes` of it, and the rest.
    pub(crate) fn split(&mut self, address: usize, bytes: usize) {
        let Some(parts) = self.0.remove(&address) else { return };
        let (mut front, mut rest, mut left) = (Vec::new(), Vec::new(), bytes);
        for part in parts {
            let here = part.min(left);
            left -= here;
            front.extend((here > 0).then_some(here));
            rest.extend((here < part).then_some(part - here));
        }
        self.note(address, front);
        self.note(address + bytes, rest);
    }

    /// One block where several lay, each behind the one before it: their addresses and bytes.
    pub(crate) fn merge(&mut self, run: &[(usize, usize)]) {
        let parts = run.iter().flat_map(|&(address, bytes)| self.take(address, bytes)).collect();
        self.note(run[0].0, parts);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_stay_with_the_bytes_that_they_are_of() {
        let mut joined = JoinedMappings::new();
        joined.merge(&[(100, 30), (130, 20), (150, 50)]);
        // Within the second: both sides have a part of it.
        joined.split(100, 40);
        assert_eq!(joined.0[&100], [30, 10]);
        assert_eq!(joined.0[&140], [10, 50]);
        // At an edge: one mapping each.
        joined.split(140, 10);
        assert_eq!((joined.take(140, 10), joined.take(150, 50)), (vec![10], vec![50]));
        joined.merge(&[(100, 40), (140, 10)]);
        assert_eq!(joined.take(100, 50), [30, 10, 10]);
        assert!(joined.0.is_empty(), "what is whole is not noted: {:?}", joined.0);
    }
}
