//! The small messages that ranks send each other beside the data: what they are about to do, what
//! a point-to-point message holds, that they failed, left, or are alive.

use std::ops::Range;

use crate::codec::{get, put, put_all};
use crate::progress::{self, Envelope};
use crate::signature::{Operation, Signature};

/// Longest frame, in bytes.
pub(super) const FRAME_MAX: usize = 16 << 10;
/// Bytes of a run of headers without what is brought.
const RUN_BYTES: usize = 72;
/// Bytes that travel in the frame itself instead of in a transfer of their own.
pub(super) const INLINE_MAX: usize = 1024;

/// The part of a rank's header that it brings to a collective.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct HeaderShare {
    /// Bytes of an exchange; those that fit are in `inline`.
    pub(super) len: usize,
    pub(super) inline: Vec<u8>,
}

/// The header that a rank sends to the others of a group as it joins a collective.
pub(super) type Header = progress::Header<HeaderShare>;

impl Header {
    /// The header that is sent to the places of `below` in the tree: without the bytes for the root
    /// of a gather, of which they need only know whether they fit the headers.
    pub(super) fn as_reported_to(&self, below: &Range<usize>) -> Header {
        let Signature { operation, root, .. } = self.signature;
        let gets = root.is_none_or(|root| below.contains(&root));
        if operation != Operation::Gather || gets {
            return self.clone();
        }
        let len = if self.brought.len > INLINE_MAX { INLINE_MAX + 1 } else { 0 };
        Header { brought: HeaderShare { len, inline: Vec::new() }, ..self.clone() }
    }
}

/// How a message gets to the receiver of its envelope.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Carriage {
    /// In the envelope.
    Inline(Vec<u8>),
    /// In the sender's transfer of this number to this rank.
    Transfer(u32),
}

/// A message beside the data.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum MpiFrame {
    /// Ranks have joined a collective: headers, and at how many places from its own on each holds.
    Headers(Vec<(Header, usize)>),
    Envelope(Envelope, Carriage),
    /// The world's first error as this rank knows it: who saw it, and the error as JSON.
    Failure(usize, Vec<u8>),
    /// The rank has dropped its last communicator: groups, and how many collectives of each it has
    /// called.
    Depart(Vec<(u64, u64)>),
    /// The rank has reported a failure to its user and can be ended.
    Bye,
    /// Asks whether the rank's process still answers, and whether it has called this collective: a
    /// group and a number.
    Ping(u64, u64),
    Pong(bool),
}

impl MpiFrame {
    /// The bytes of this frame.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        match self {
            MpiFrame::Headers(runs) => {
                out.push(0);
                for (header, count) in runs {
                    header.put(&mut out);
                    let HeaderShare { len, inline } = &header.brought;
                    put_all(&mut out, &[*count as u64, *len as u64, inline.len() as u64]);
                    out.extend_from_slice(inline);
                }
            }
            MpiFrame::Envelope(envelope, Carriage::Inline(bytes)) => {
                out.push(1);
                envelope.put(&mut out);
                out.extend_from_slice(bytes);
            }
            MpiFrame::Envelope(envelope, Carriage::Transfer(number)) => {
                out.push(7);
                envelope.put(&mut out);
                put(&mut out, u64::from(*number));
            }
            MpiFrame::Failure(rank, error) => {
                out.push(2);
                put(&mut out, *rank as u64);
                out.extend_from_slice(error);
            }
            MpiFrame::Depart(called) => {
                out.push(3);
                called.iter().for_each(|(group, count)| put_all(&mut out, &[*group, *count]));
            }
            MpiFrame::Bye => out.push(4),
            MpiFrame::Ping(group, sequence) => {
                out.push(5);
                put_all(&mut out, &[*group, *sequence]);
            }
            MpiFrame::Pong(has_called) => out.extend([6, u8::from(*has_called)]),
        }
        debug_assert!(out.len() <= FRAME_MAX);
        out
    }

    /// Reads what [`encode`](Self::encode) wrote; `None` where it did not.
    pub(super) fn decode(bytes: &[u8]) -> Option<MpiFrame> {
        let (kind, mut rest) = bytes.split_first()?;
        let r = &mut rest;
        Some(match kind {
            0 => {
                let mut runs = Vec::new();
                while !r.is_empty() {
                    let mut count = 0;
                    let header = Header::get(r, |r| {
                        count = usize::try_from(get(r)?).ok()?;
                        let len = usize::try_from(get(r)?).ok()?;
                        let brought = usize::try_from(get(r)?).ok()?;
                        let inline = r.split_off(..brought)?.to_vec();
                        Some(HeaderShare { len, inline })
                    })?;
                    runs.push((header, count));
                }
                MpiFrame::Headers(runs)
            }
            1 => MpiFrame::Envelope(Envelope::get(r)?, Carriage::Inline(r.to_vec())),
            2 => MpiFrame::Failure(get(r)? as usize, r.to_vec()),
            3 => {
                let mut called = Vec::new();
                while !r.is_empty() {
                    called.push((get(r)?, get(r)?));
                }
                MpiFrame::Depart(called)
            }
            4 => MpiFrame::Bye,
            5 => MpiFrame::Ping(get(r)?, get(r)?),
            6 => MpiFrame::Pong(*r.first()? != 0),
            7 => MpiFrame::Envelope(
                Envelope::get(r)?,
                Carriage::Transfer(u32::try_from(get(r)?).ok()?),
            ),
            _ => return None,
        })
    }
}

/// Headers in as few frames as hold them; neighbours that say the same are one run.
pub(super) fn in_frames<'a>(headers: impl Iterator<Item = &'a Header>) -> Vec<MpiFrame> {
    let mut frames: Vec<Vec<(Header, usize)>> = Vec::new();
    let mut used = FRAME_MAX;
    for header in headers {
        if let Some((first, count)) = frames.last_mut().and_then(|runs| runs.last_mut())
            && first.place + *count == header.place
            && (first.signature, &first.brought) == (header.signature, &header.brought)
        {
            *count += 1;
            continue;
        }
        let bytes = RUN_BYTES + header.brought.inline.len();
        if used + bytes > FRAME_MAX {
            frames.push(Vec::new());
            used = 1;
        }
        used += bytes;
        frames.last_mut().expect("pushed above").push((header.clone(), 1));
    }
    frames.into_iter().map(MpiFrame::Headers).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::progress::tests::{envelopes, headers};

    fn frames() -> impl Strategy<Value = MpiFrame> {
        let bytes = || proptest::collection::vec(any::<u8>(), 0..INLINE_MAX + 1);
        let share = (any::<u32>(), bytes())
            .prop_map(|(len, inline)| HeaderShare { len: len as usize, inline });
        let carriage = prop_oneof![
            bytes().prop_map(Carriage::Inline),
            any::<u32>().prop_map(Carriage::Transfer)
        ];
        prop_oneof![
            proptest::collection::vec((headers(share), 1usize..9), 0..9)
                .prop_map(MpiFrame::Headers),
            (envelopes(), carriage)
                .prop_map(|(envelope, carriage)| MpiFrame::Envelope(envelope, carriage)),
            (0usize..9, bytes()).prop_map(|(rank, error)| MpiFrame::Failure(rank, error)),
            proptest::collection::vec(any::<(u64, u64)>(), 0..9).prop_map(MpiFrame::Depart),
            Just(MpiFrame::Bye),
            any::<(u64, u64)>().prop_map(|(group, sequence)| MpiFrame::Ping(group, sequence)),
            any::<bool>().prop_map(MpiFrame::Pong),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

        #[test]
        fn frames_survive_the_wire_and_fit_it(frame in frames()) {
            let bytes = frame.encode();
            prop_assert!(bytes.len() <= FRAME_MAX);
            prop_assert_eq!(MpiFrame::decode(&bytes), Some(frame));
        }

        /// However many headers there are, their frames fit, and neighbours that say the same
        /// take no more room than one.
        #[test]
        fn headers_fit_their_frames(
            lens in proptest::collection::vec(0usize..INLINE_MAX + 1, 1..99)
        ) {
            let signature = crate::signature::Signature::bare(crate::Operation::Exchange);
            let header = |(place, len): (usize, &usize)| {
                let brought = HeaderShare { len: *len, inline: vec![place as u8; *len] };
                Header { group: 1, sequence: 2, place, signature, brought }
            };
            let all: Vec<Header> = lens.iter().enumerate().map(header).collect();
            let mut got = Vec::new();
            for frame in in_frames(all.iter()) {
                let bytes = frame.encode();
                prop_assert!(bytes.len() <= FRAME_MAX);
                let frame = MpiFrame::decode(&bytes);
                let Some(MpiFrame::Headers(runs)) = frame else { panic!("unreadable") };
                for (header, count) in runs {
                    let at = |i| Header { place: header.place + i, ..header.clone() };
                    got.extend((0..count).map(at));
                }
            }
            prop_assert_eq!(got, all);
            let same = (0..9999).map(|place| header((place, &0))).collect::<Vec<_>>();
            let [frame] = &in_frames(same.iter())[..] else { panic!("several frames") };
            prop_assert!(frame.encode().len() < 2 * RUN_BYTES);
        }

        #[test]
        fn anything_else_is_refused_or_read_without_a_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..200)
        ) {
            let _ = MpiFrame::decode(&bytes);
        }
    }
}
