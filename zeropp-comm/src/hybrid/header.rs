//! The frame that a process sends to the others of a group once all its ranks have joined a
//! collective, and how messages between processes are distinguished.

use crate::signature::Signature;

/// A process's part of a collective.
pub(super) struct ProcessHeader {
    /// The call of all its ranks, which is the same.
    pub(super) signature: Signature,
    /// Small data of each of its ranks, in the group's order.
    pub(super) data: Vec<Vec<u8>>,
}

impl ProcessHeader {
    pub(super) fn encode(&self) -> Vec<u8> {
        let signature = serde_json::to_vec(&self.signature).expect("plain data");
        let mut bytes = Vec::with_capacity(signature.len() + 8 + 8 * self.data.len());
        for piece in std::iter::once(&signature).chain(&self.data) {
            bytes.extend((piece.len() as u64).to_le_bytes());
            bytes.extend_from_slice(piece);
        }
        bytes
    }

    /// Reads what [`encode`](Self::encode) wrote; `None` where it did not.
    pub(super) fn decode(mut bytes: &[u8]) -> Option<ProcessHeader> {
        let mut pieces = Vec::new();
        while !bytes.is_empty() {
            let (len, rest) = bytes.split_first_chunk::<8>()?;
            let (piece, rest) = rest.split_at_checked(u64::from_le_bytes(*len).try_into().ok()?)?;
            pieces.push(piece.to_vec());
            bytes = rest;
        }
        let (signature, data) = pieces.split_first()?;
        Some(ProcessHeader {
            signature: serde_json::from_slice(signature).ok()?,
            data: data.to_vec(),
        })
    }
}

/// The purpose of a message between two processes of a group. Its tag is a hash of the purpose: the
/// outer engine's tags have no room for all of it.
#[derive(Clone, Copy)]
pub(super) enum Purpose {
    /// A rank's message to another, by places in the group, with the ranks' own tag.
    Mail { from: usize, to: usize, tag: u64 },
    /// Data of a collective in one of its rounds.
    Data { sequence: u64, round: u64 },
    /// Which ranks of the sender have joined a collective that takes long.
    Note { sequence: u64 },
}

impl Purpose {
    pub(super) fn tag(self) -> u64 {
        let words = match self {
            Purpose::Mail { from, to, tag } => [1, from as u64, to as u64, tag],
            Purpose::Data { sequence, round } => [2, sequence, round, 0],
            Purpose::Note { sequence } => [3, sequence, 0, 0],
        };
        // The finalizer of SplitMix64 after each word: every bit depends on all before it.
        words.into_iter().fold(0x9e37_79b9_7f4a_7c15, |hash: u64, word| {
            let mut z = (hash ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use burn::tensor::DType;
    use proptest::prelude::*;

    use super::*;
    use zeropp_failures::Operation;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

        #[test]
        fn headers_are_read_back(
            data in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..9), 0..5),
            len in any::<u32>(),
        ) {
            let signature = Signature::with(Operation::AllGather, DType::BF16, len as usize);
            let header = ProcessHeader { signature, data };
            let bytes = header.encode();
            let read = ProcessHeader::decode(&bytes).unwrap();
            prop_assert_eq!(read.signature, signature);
            prop_assert_eq!(read.data, header.data);
            for cut in 0..bytes.len() {
                if let Some(part) = ProcessHeader::decode(&bytes[..cut]) {
                    prop_assert!(part.data.len() < read_len(&bytes));
                }
            }
        }

        #[test]
        fn other_bytes_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..99)) {
            prop_assert!(ProcessHeader::decode(&bytes).is_none());
        }
    }

    fn read_len(bytes: &[u8]) -> usize {
        ProcessHeader::decode(bytes).unwrap().data.len()
    }

    #[test]
    fn tags_differ() {
        let mut tags = HashSet::new();
        let mut count = 0;
        for (a, b) in (0..40).flat_map(|a| (0..40).map(move |b| (a, b))) {
            for tag in [0, 1, 1 << 62, 5 << 32, u64::MAX] {
                tags.insert(Purpose::Mail { from: a, to: b, tag }.tag());
            }
            tags.insert(Purpose::Data { sequence: a as u64, round: b as u64 }.tag());
            count += 6;
        }
        assert_eq!(tags.len(), count);
    }
}
