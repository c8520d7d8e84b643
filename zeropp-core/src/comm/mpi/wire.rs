//! The small messages that ranks send each other beside the data: what they are about to do, what
//! a point-to-point message holds, that they failed, left, or are alive.

use crate::comm::codec::{get, get_signature, put, put_signature};
use crate::comm::signature::Signature;

/// Longest frame, in bytes.
pub(super) const FRAME_MAX: usize = 2048;
/// Bytes that travel in the frame itself instead of in a transfer of their own.
pub(super) const INLINE_MAX: usize = 1024;

/// What a rank tells the others of a group as it joins a collective.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Header {
    pub(super) group: u64,
    pub(super) sequence: u64,
    /// Place in the group of who says so.
    pub(super) place: usize,
    pub(super) signature: Signature,
    /// Bytes of an exchange; those that fit are in `inline`.
    pub(super) len: usize,
    pub(super) inline: Vec<u8>,
}

/// What a rank tells the receiver of a message.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Letter {
    pub(super) group: u64,
    /// Sender's place in the group.
    pub(super) from: usize,
    pub(super) tag: u64,
    /// Type and length of the message.
    pub(super) signature: Signature,
    /// Which of the sender's transfers to this rank holds the message, where `inline` does not.
    pub(super) number: u32,
    pub(super) inline: Option<Vec<u8>>,
}

/// A message beside the data.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Frame {
    Header(Header),
    Letter(Letter),
    /// The world's first error as this rank knows it: who saw it, and the error as JSON.
    Failure(usize, Vec<u8>),
    /// The rank has dropped its last communicator.
    Depart,
    /// The rank has told its user about a failure and can be ended.
    Bye,
    /// Asks whether the rank's process still answers.
    Ping,
    Pong,
}

impl Frame {
    /// The bytes of this frame.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        match self {
            Frame::Header(h) => {
                out.push(0);
                [h.group, h.sequence, h.place as u64].iter().for_each(|n| put(&mut out, *n));
                put_signature(&mut out, &h.signature);
                put(&mut out, h.len as u64);
                out.extend_from_slice(&h.inline);
            }
            Frame::Letter(l) => {
                out.push(1);
                let numbers = [l.group, l.from as u64, l.tag, u64::from(l.number)];
                numbers.iter().for_each(|n| put(&mut out, *n));
                put_signature(&mut out, &l.signature);
                out.push(l.inline.is_some() as u8);
                out.extend_from_slice(l.inline.as_deref().unwrap_or_default());
            }
            Frame::Failure(rank, error) => {
                out.push(2);
                put(&mut out, *rank as u64);
                out.extend_from_slice(error);
            }
            Frame::Depart => out.push(3),
            Frame::Bye => out.push(4),
            Frame::Ping => out.push(5),
            Frame::Pong => out.push(6),
        }
        debug_assert!(out.len() <= FRAME_MAX);
        out
    }

    /// Reads what [`encode`](Self::encode) wrote; `None` where it did not.
    pub(super) fn decode(bytes: &[u8]) -> Option<Frame> {
        let (kind, mut rest) = bytes.split_first()?;
        let r = &mut rest;
        Some(match kind {
            0 => Frame::Header(Header {
                group: get(r)?,
                sequence: get(r)?,
                place: get(r)? as usize,
                signature: get_signature(r)?,
                len: get(r)? as usize,
                inline: r.to_vec(),
            }),
            1 => {
                let (group, from, tag) = (get(r)?, get(r)? as usize, get(r)?);
                let number = u32::try_from(get(r)?).ok()?;
                let signature = get_signature(r)?;
                let (inline, rest) = r.split_first()?;
                let inline = (*inline == 1).then(|| rest.to_vec());
                Frame::Letter(Letter { group, from, tag, signature, number, inline })
            }
            2 => Frame::Failure(get(r)? as usize, r.to_vec()),
            3 => Frame::Depart,
            4 => Frame::Bye,
            5 => Frame::Ping,
            6 => Frame::Pong,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::comm::codec::tests::signatures;

    fn frames() -> impl Strategy<Value = Frame> {
        let bytes = || proptest::collection::vec(any::<u8>(), 0..INLINE_MAX + 1);
        let header = (any::<[u64; 2]>(), 0usize..9, signatures(), any::<u32>(), bytes());
        let letter = (any::<[u64; 2]>(), 0usize..9, signatures(), any::<u32>());
        prop_oneof![
            header.prop_map(|([group, sequence], place, signature, len, inline)| {
                let len = len as usize;
                Frame::Header(Header { group, sequence, place, signature, len, inline })
            }),
            (letter, proptest::option::of(bytes())).prop_map(|(l, inline)| {
                let ([group, tag], from, signature, number) = l;
                Frame::Letter(Letter { group, from, tag, signature, number, inline })
            }),
            (0usize..9, bytes()).prop_map(|(rank, error)| Frame::Failure(rank, error)),
            Just(Frame::Depart),
            Just(Frame::Bye),
            Just(Frame::Ping),
            Just(Frame::Pong),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

        #[test]
        fn frames_survive_the_wire_and_fit_it(frame in frames()) {
            let bytes = frame.encode();
            prop_assert!(bytes.len() <= FRAME_MAX);
            prop_assert_eq!(Frame::decode(&bytes), Some(frame));
        }

        #[test]
        fn anything_else_is_refused_or_read_without_a_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..200)
        ) {
            let _ = Frame::decode(&bytes);
        }
    }
}
