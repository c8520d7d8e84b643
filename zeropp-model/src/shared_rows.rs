//! A weight that one rank has as a whole and several by rows, as an embedding and the slices of a
//! head that is tied to it: which shards have the same elements.

use std::ops::Range;

use crate::params::BLOCK;

/// A weight, of which one pipeline rank has all rows and ranks have slices, each in as many shards.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SharedRows {
    /// The pipeline rank that has all of it.
    pub owner: usize,
    /// Its elements.
    pub elements: usize,
    /// Those of the slice of each pipeline rank, which together are all of them.
    pub slices: Vec<Range<usize>>,
    /// Equal shards of the whole, and of each slice; whole blocks of a flat buffer.
    pub pieces: usize,
}

/// Elements that a shard of the whole and one of a slice have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommonPart {
    /// The pipeline rank of the other shard.
    pub rank: usize,
    /// Which of the shards there.
    pub piece: usize,
    /// The elements, within the weight.
    pub elements: Range<usize>,
}

impl SharedRows {
    /// A weight of so many rows and columns, of which pipeline ranks have the rows of `slices`.
    pub fn new(
        owner: usize,
        [rows, columns]: [usize; 2],
        slices: impl IntoIterator<Item = Range<usize>>,
        pieces: usize,
    ) -> SharedRows {
        let elements = |rows: Range<usize>| rows.start * columns..rows.end * columns;
        let slices = slices.into_iter().map(elements).collect();
        SharedRows { owner, elements: rows * columns, slices, pieces }
    }

    /// The elements of shard `piece` of the whole, without padding.
    pub fn of_whole(&self, piece: usize) -> Range<usize> {
        self.shard(&(0..self.elements), piece)
    }

    /// The elements of shard `piece` of the slice of `rank`, within the weight, without padding.
    pub fn of_slice(&self, rank: usize, piece: usize) -> Range<usize> {
        self.shard(&self.slices[rank], piece)
    }

    fn shard(&self, of: &Range<usize>, piece: usize) -> Range<usize> {
        let len = of.len().next_multiple_of(BLOCK * self.pieces) / self.pieces;
        of.end.min(of.start + piece * len)..of.end.min(of.start + (piece + 1) * len)
    }

    /// The parts of shard `piece` of the whole that shards of slices have.
    pub fn slices_of(&self, piece: usize) -> Vec<CommonPart> {
        let whole = self.of_whole(piece);
        let of_rank = |rank| (0..self.pieces).map(move |piece| (rank, piece));
        let all = (0..self.slices.len()).flat_map(of_rank);
        all.filter_map(|(rank, piece)| part(&whole, self.of_slice(rank, piece), rank, piece))
            .collect()
    }

    /// The parts of shard `piece` of the slice of `rank` that shards of the whole have.
    pub fn wholes_of(&self, rank: usize, piece: usize) -> Vec<CommonPart> {
        let slice = self.of_slice(rank, piece);
        let all = (0..self.pieces).map(|piece| (self.owner, piece));
        all.filter_map(|(rank, piece)| part(&slice, self.of_whole(piece), rank, piece)).collect()
    }

    /// fp32 bytes that the ranks with shard `piece` of `rank` exchange with others for all their
    /// elements once.
    pub fn message_bytes(&self, rank: usize, piece: usize) -> u64 {
        let is_elsewhere = |part: &CommonPart| (part.rank, part.piece) != (rank, piece);
        let whole = if rank == self.owner { self.slices_of(piece) } else { Vec::new() };
        let all = whole.into_iter().chain(self.wholes_of(rank, piece));
        all.filter(is_elsewhere).map(|part| 4 * part.elements.len() as u64).sum()
    }
}

fn part(one: &Range<usize>, other: Range<usize>, rank: usize, piece: usize) -> Option<CommonPart> {
    let elements = one.start.max(other.start)..one.end.min(other.end);
    (!elements.is_empty()).then_some(CommonPart { rank, piece, elements })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared(slices: &[usize], pieces: usize) -> SharedRows {
        let mut end = 0;
        let slice = |n: &usize| {
            let start = end;
            end += n;
            start..end
        };
        let slices: Vec<_> = slices.iter().map(slice).collect();
        SharedRows { owner: 0, elements: end, slices, pieces }
    }

    #[test]
    fn each_element_is_exchanged_once_and_both_sides_say_the_same() {
        for slices in [&[1000][..], &[640, 360], &[0, 1000], &[384, 0, 512, 104], &[128; 5]] {
            for pieces in [1, 2, 3, 4, 8] {
                let shared = shared(slices, pieces);
                let mut seen = vec![0; shared.elements];
                for piece in 0..pieces {
                    for of in shared.slices_of(piece) {
                        of.elements.clone().for_each(|i| seen[i] += 1);
                        let back = CommonPart { rank: 0, piece, elements: of.elements.clone() };
                        assert!(shared.wholes_of(of.rank, of.piece).contains(&back), "{of:?}");
                    }
                }
                assert!(seen.iter().all(|n| *n == 1), "{slices:?} in {pieces}");
            }
        }
    }

    /// What a rank has of both does not leave it.
    #[test]
    fn bytes_of_messages_are_those_of_other_ranks() {
        let alone = shared(&[640, 384], 1);
        let bytes = |shared: &SharedRows, rank, piece| shared.message_bytes(rank, piece) / 4;
        assert_eq!([bytes(&alone, 0, 0), bytes(&alone, 1, 0)], [384, 384]);
        // 512 each of the whole, of the first slice 384 and 256, of the second 256 and 128.
        let two = shared(&[640, 384], 2);
        assert_eq!(
            [two.of_whole(1), two.of_slice(0, 1), two.of_slice(1, 0)],
            [512..1024, 384..640, 640..896]
        );
        assert_eq!([bytes(&two, 0, 0), bytes(&two, 1, 0)], [128, 256]);
        assert_eq!([bytes(&two, 0, 1), bytes(&two, 1, 1)], [384 + 128, 128]);
    }
}
