//! How the headers of a collective go round: up a binary tree of the group's places and down again,
//! so that a rank sends three frames at most however many ranks there are.
//!
//! A subtree is a range of places, headed by the first of them. A head sends its subtree's headers
//! up once it has all of them; the first place, which then has everyone's, sends each child what is
//! not from there, and so on down.

use std::ops::Range;

/// Where a place is in the tree.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TreePosition {
    pub(super) parent: Option<usize>,
    /// The places that report to this one from below, and its own.
    pub(super) subtree: Range<usize>,
    /// The subtrees below; each is headed by its first place.
    pub(super) children: Vec<Range<usize>>,
}

impl TreePosition {
    /// The position of `place` among `size`.
    pub(super) fn of(place: usize, size: usize) -> TreePosition {
        let (mut parent, mut subtree) = (None, 0..size);
        loop {
            let children = below(&subtree);
            if subtree.start == place {
                return TreePosition { parent, subtree, children };
            }
            parent = Some(subtree.start);
            let next = children.into_iter().find(|child| child.contains(&place));
            subtree = next.expect("a place of the group");
        }
    }
}

/// The two halves of all but the first place.
fn below(subtree: &Range<usize>) -> Vec<Range<usize>> {
    let (first, end) = (subtree.start + 1, subtree.end);
    let middle = first + (end - first).div_ceil(2);
    [first..middle, middle..end].into_iter().filter(|half| !half.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_place_hears_of_all_with_three_frames_a_rank_and_few_hops() {
        for size in 1..200 {
            let all: Vec<TreePosition> =
                (0..size).map(|place| TreePosition::of(place, size)).collect();
            for (place, position) in all.iter().enumerate() {
                let sent = usize::from(position.parent.is_some()) + position.children.len();
                assert!(sent <= 3, "{place} of {size}");
                let heads = position.children.iter().map(|child| child.start);
                heads.for_each(|head| assert_eq!(all[head].parent, Some(place)));
                let below: usize = position.children.iter().map(Range::len).sum();
                assert_eq!(below + 1, position.subtree.len());
                let mut hops = 0;
                let mut at = place;
                while let Some(parent) = all[at].parent {
                    assert!(all[parent].subtree.contains(&place));
                    (at, hops) = (parent, hops + 1);
                }
                assert_eq!(at, 0);
                assert!(1 << hops <= size, "{hops} hops of {size}");
            }
        }
    }
}
