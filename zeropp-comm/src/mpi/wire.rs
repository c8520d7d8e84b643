//! The small messages that ranks send each other beside the data: what they are about to do, what
//! a point-to-point message holds, that they failed, left, or are alive.

use crate::codec::{get, put};
use crate::progress::{self, Envelope};

/// Longest frame, in bytes.
pub(super) const FRAME_MAX: usize = 2048;
/// Bytes that travel in the frame itself instead of in a transfer of their own.
pub(super) const INLINE_MAX: usize = 1024;

/// What a rank brings to a collective in its header.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Share {
    /// Bytes of an exchange; those that fit are in `inline`.
    pub(super) len: usize,
    pub(super) inline: Vec<u8>,
}

/// What a rank tells the others of a group as it joins a collective.
pub(super) type Header = progress::Header<Share>;

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
pub(super) enum Frame {
    Header(Header),
    Envelope(Envelope, Carriage),
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
            Frame::Header(header) => {
                out.push(0);
                header.put(&mut out);
                put(&mut out, header.brought.len as u64);
                out.extend_from_slice(&header.brought.inline);
            }
            Frame::Envelope(envelope, Carriage::Inline(bytes)) => {
                out.push(1);
                envelope.put(&mut out);
                out.extend_from_slice(bytes);
            }
            Frame::Envelope(envelope, Carriage::Transfer(number)) => {
                out.push(7);
                envelope.put(&mut out);
                put(&mut out, u64::from(*number));
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
            0 => Frame::Header(Header::get(r, |r| {
                Some(Share { len: get(r)? as usize, inline: r.to_vec() })
            })?),
            1 => Frame::Envelope(Envelope::get(r)?, Carriage::Inline(r.to_vec())),
            2 => Frame::Failure(get(r)? as usize, r.to_vec()),
            3 => Frame::Depart,
            4 => Frame::Bye,
            5 => Frame::Ping,
            6 => Frame::Pong,
            7 => {
                Frame::Envelope(Envelope::get(r)?, Carriage::Transfer(u32::try_from(get(r)?).ok()?))
            }
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::progress::tests::{envelopes, headers};

    fn frames() -> impl Strategy<Value = Frame> {
        let bytes = || proptest::collection::vec(any::<u8>(), 0..INLINE_MAX + 1);
        let share =
            (any::<u32>(), bytes()).prop_map(|(len, inline)| Share { len: len as usize, inline });
        let carriage = prop_oneof![
            bytes().prop_map(Carriage::Inline),
            any::<u32>().prop_map(Carriage::Transfer)
        ];
        prop_oneof![
            headers(share).prop_map(Frame::Header),
            (envelopes(), carriage)
                .prop_map(|(envelope, carriage)| Frame::Envelope(envelope, carriage)),
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
