//! The frames of all engines about collectives, messages and failures.

use super::MailAddress;
use crate::CommError;
use crate::codec::{get, get_signature, put_all, put_signature};
use crate::signature::Signature;

/// The header that a rank sends to others of a group as it joins a collective.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Header<B> {
    pub(crate) group: u64,
    pub(crate) sequence: u64,
    /// Place in the group of who says so.
    pub(crate) place: usize,
    pub(crate) signature: Signature,
    /// The data that goes along in the frame.
    pub(crate) brought: B,
}

impl<B> Header<B> {
    /// Appends all but what is brought.
    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        put_all(out, &[self.group, self.sequence, self.place as u64]);
        put_signature(out, &self.signature);
    }

    /// Takes off what [`put`](Self::put) appended, and then what is brought.
    pub(crate) fn get(
        rest: &mut &[u8],
        brought: impl FnOnce(&mut &[u8]) -> Option<B>,
    ) -> Option<Self> {
        let (group, sequence, place) = (get(rest)?, get(rest)?, get(rest)? as usize);
        let signature = get_signature(rest)?;
        Some(Header { group, sequence, place, signature, brought: brought(rest)? })
    }
}

/// The announcement of a message to its receiver.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Envelope {
    pub(crate) address: MailAddress,
    /// Type and length.
    pub(crate) signature: Signature,
}

impl Envelope {
    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        put_all(out, &[self.address.group, self.address.from as u64, self.address.tag]);
        put_signature(out, &self.signature);
    }

    /// Takes off what [`put`](Self::put) appended.
    pub(crate) fn get(rest: &mut &[u8]) -> Option<Self> {
        let (group, from, tag) = (get(rest)?, get(rest)? as usize, get(rest)?);
        Some(Envelope {
            address: MailAddress { group, from, tag },
            signature: get_signature(rest)?,
        })
    }
}

/// The world's first error as `rank`, which saw it, has reported it.
pub(crate) fn read_error(rank: usize, json: &[u8]) -> CommError {
    serde_json::from_slice(json)
        .unwrap_or_else(|_| CommError::Aborted { rank, reason: "no reason could be read".into() })
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::codec::tests::signatures;

    /// Any header with this along.
    pub(crate) fn headers<B: std::fmt::Debug>(
        brought: impl Strategy<Value = B>,
    ) -> impl Strategy<Value = Header<B>> {
        (any::<[u64; 2]>(), 0usize..9, signatures(), brought).prop_map(
            |([group, sequence], place, signature, brought)| Header {
                group,
                sequence,
                place,
                signature,
                brought,
            },
        )
    }

    /// Any envelope.
    pub(crate) fn envelopes() -> impl Strategy<Value = Envelope> {
        (any::<[u64; 2]>(), 0usize..9, signatures()).prop_map(|([group, tag], from, signature)| {
            Envelope { address: MailAddress { group, from, tag }, signature }
        })
    }
}
