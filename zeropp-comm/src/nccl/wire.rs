//! The small messages that ranks send each other beside NCCL: what they join, what a message holds,
//! how a communicator is found, that they failed, left, or how far they are.

use super::library::UniqueId;
use crate::codec::{get, put, put_all};
use crate::progress::{self, Envelope};

/// Longest frame, in bytes: an exchange's result is the largest.
pub(super) const FRAME_MAX: usize = 256 << 20;

/// The header that a rank sends to the first rank of a group as it joins a collective, with the
/// bytes that it brings to an exchange or a split.
pub(super) type Header = progress::Header<Vec<u8>>;

/// Which of a group's communicators: that of all ranks, or one that carries messages from one
/// place to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Route {
    All,
    Pair { from: usize, to: usize },
}

/// A message beside the data.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum NcclFrame {
    Header(Header),
    /// The bytes that all ranks brought, in the group's order; of group and sequence.
    Result(u64, u64, Vec<Vec<u8>>),
    /// The identity of a group's communicator.
    Id(u64, Route, Box<[u8; 128]>),
    Envelope(Envelope),
    /// The world's first error as this rank knows it: who saw it, and the error as JSON.
    Failure(usize, Vec<u8>),
    /// Says who this is; nothing else.
    Hello,
    /// The rank has dropped its last communicator.
    Depart,
    /// Asks how far the rank is in a group.
    Ask(u64),
    /// So many collectives of a group have been called, and so many begun on the device.
    Answer(u64, u64, u64),
}

impl NcclFrame {
    /// The identity of a communicator as a frame.
    pub(super) fn id(group: u64, route: Route, id: &UniqueId) -> NcclFrame {
        NcclFrame::Id(group, route, Box::new(id.0))
    }

    /// The bytes of this frame.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        match self {
            NcclFrame::Header(header) => {
                out.push(0);
                header.put(&mut out);
                out.extend_from_slice(&header.brought);
            }
            NcclFrame::Result(group, sequence, parts) => {
                out.push(1);
                put_all(&mut out, &[*group, *sequence, parts.len() as u64]);
                for part in parts {
                    put(&mut out, part.len() as u64);
                    out.extend_from_slice(part);
                }
            }
            NcclFrame::Id(group, route, id) => {
                out.push(2);
                let (from, to) = match route {
                    Route::All => (u64::MAX, 0),
                    Route::Pair { from, to } => (*from as u64, *to as u64),
                };
                put_all(&mut out, &[*group, from, to]);
                out.extend_from_slice(&id[..]);
            }
            NcclFrame::Envelope(envelope) => {
                out.push(3);
                envelope.put(&mut out);
            }
            NcclFrame::Failure(rank, error) => {
                out.push(4);
                put(&mut out, *rank as u64);
                out.extend_from_slice(error);
            }
            NcclFrame::Hello => out.push(5),
            NcclFrame::Depart => out.push(6),
            NcclFrame::Ask(group) => {
                out.push(7);
                put(&mut out, *group);
            }
            NcclFrame::Answer(group, called, begun) => {
                out.push(8);
                put_all(&mut out, &[*group, *called, *begun]);
            }
        }
        out
    }

    /// Reads what [`encode`](Self::encode) wrote; `None` where it did not.
    pub(super) fn decode(bytes: &[u8]) -> Option<NcclFrame> {
        let (kind, mut rest) = bytes.split_first()?;
        let r = &mut rest;
        let frame = match kind {
            0 => NcclFrame::Header(Header::get(r, |r| Some(std::mem::take(r).to_vec()))?),
            1 => {
                let (group, sequence, count) = (get(r)?, get(r)?, get(r)?);
                let parts = (0..count).map(|_| {
                    let len = usize::try_from(get(r)?).ok()?;
                    let (part, tail) = r.split_at_checked(len)?;
                    *r = tail;
                    Some(part.to_vec())
                });
                NcclFrame::Result(group, sequence, parts.collect::<Option<_>>()?)
            }
            2 => {
                let (group, from, to) = (get(r)?, get(r)?, get(r)? as usize);
                let route = match from {
                    u64::MAX => Route::All,
                    from => Route::Pair { from: from as usize, to },
                };
                let (id, tail) = r.split_first_chunk::<128>()?;
                *r = tail;
                NcclFrame::Id(group, route, Box::new(*id))
            }
            3 => NcclFrame::Envelope(Envelope::get(r)?),
            4 => NcclFrame::Failure(get(r)? as usize, std::mem::take(r).to_vec()),
            5 => NcclFrame::Hello,
            6 => NcclFrame::Depart,
            7 => NcclFrame::Ask(get(r)?),
            8 => NcclFrame::Answer(get(r)?, get(r)?, get(r)?),
            _ => return None,
        };
        r.is_empty().then_some(frame)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::progress::tests::{envelopes, headers};

    fn frames() -> impl Strategy<Value = NcclFrame> {
        let bytes = || proptest::collection::vec(any::<u8>(), 0..300);
        let parts = proptest::collection::vec(bytes(), 0..5);
        let route = prop_oneof![
            Just(Route::All),
            (0usize..9, 0usize..9).prop_map(|(from, to)| Route::Pair { from, to })
        ];
        prop_oneof![
            headers(bytes()).prop_map(NcclFrame::Header),
            (any::<[u64; 2]>(), parts).prop_map(|([g, s], parts)| NcclFrame::Result(g, s, parts)),
            (any::<u64>(), route, any::<u8>()).prop_map(|(group, route, byte)| NcclFrame::Id(
                group,
                route,
                Box::new([byte; 128])
            )),
            envelopes().prop_map(NcclFrame::Envelope),
            (0usize..9, bytes()).prop_map(|(rank, error)| NcclFrame::Failure(rank, error)),
            Just(NcclFrame::Hello),
            Just(NcclFrame::Depart),
            any::<u64>().prop_map(NcclFrame::Ask),
            any::<[u64; 3]>().prop_map(|[g, called, begun]| NcclFrame::Answer(g, called, begun)),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

        #[test]
        fn frames_survive_the_wire(frame in frames()) {
            prop_assert_eq!(NcclFrame::decode(&frame.encode()), Some(frame));
        }

        #[test]
        fn anything_else_is_refused_or_read_without_a_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..200)
        ) {
            let _ = NcclFrame::decode(&bytes);
        }
    }
}
