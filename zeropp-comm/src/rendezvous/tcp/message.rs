//! The messages after the handshake.

use super::super::RendezvousError;
use super::super::board::{KEY_BYTES_MAX, VALUE_BYTES_MAX};

/// One message; a frame's body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum WireMessage {
    /// Client: set this. `id` comes back with the answer.
    Put { id: u32, key: String, value: Vec<u8> },
    /// Server: it is set.
    Stored { id: u32 },
    /// Server: it has another value.
    Taken { id: u32 },
    /// Server: it does not fit.
    Full { id: u32, problem: String },
    /// Client: asks for a value now or, if it is not set, once it is.
    Watch { key: String },
    /// Server: a value that was asked for.
    Value { key: String, value: Vec<u8> },
    /// Server: not set so far.
    Absent { key: String },
    /// Either: still here.
    Beat,
    /// Either: leaving as planned.
    Bye,
    /// Server: a process is gone.
    Lost { ranks: String, host: String, how: String },
    /// Server: these did not come in time.
    Missing { missing: String, after_s: u64, more: String },
}

/// A body that is no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a message that makes no sense")]
pub(super) struct NoMessage;

impl WireMessage {
    pub(super) fn encode(&self) -> Vec<u8> {
        let out = |kind: u8| BodyWriter(vec![kind]);
        match self {
            WireMessage::Put { id, key, value } => out(1).number(*id).text(key).bytes(value),
            WireMessage::Stored { id } => out(2).number(*id),
            WireMessage::Taken { id } => out(3).number(*id),
            WireMessage::Full { id, problem } => out(4).number(*id).text(problem),
            WireMessage::Watch { key } => out(5).text(key),
            WireMessage::Value { key, value } => out(6).text(key).bytes(value),
            WireMessage::Absent { key } => out(7).text(key),
            WireMessage::Beat => out(8),
            WireMessage::Bye => out(9),
            WireMessage::Lost { ranks, host, how } => out(10).text(ranks).text(host).text(how),
            WireMessage::Missing { missing, after_s, more } => {
                out(11).text(missing).number(u32::try_from(*after_s).unwrap_or(u32::MAX)).text(more)
            }
        }
        .0
    }

    pub(super) fn decode(body: &[u8]) -> Result<WireMessage, NoMessage> {
        let (&kind, rest) = body.split_first().ok_or(NoMessage)?;
        let mut f = BodyReader(rest);
        let message = match kind {
            1 => WireMessage::Put { id: f.number()?, key: f.key()?, value: f.value()? },
            2 => WireMessage::Stored { id: f.number()? },
            3 => WireMessage::Taken { id: f.number()? },
            4 => WireMessage::Full { id: f.number()?, problem: f.text()? },
            5 => WireMessage::Watch { key: f.key()? },
            6 => WireMessage::Value { key: f.key()?, value: f.value()? },
            7 => WireMessage::Absent { key: f.key()? },
            8 => WireMessage::Beat,
            9 => WireMessage::Bye,
            10 => WireMessage::Lost { ranks: f.text()?, host: f.text()?, how: f.text()? },
            11 => WireMessage::Missing {
                missing: f.text()?,
                after_s: f.number()?.into(),
                more: f.text()?,
            },
            _ => return Err(NoMessage),
        };
        if f.0.is_empty() { Ok(message) } else { Err(NoMessage) }
    }

    /// The news that ends a rendezvous, as an error at `place`.
    pub(super) fn into_error(self, place: &str) -> Option<RendezvousError> {
        match self {
            WireMessage::Lost { ranks, host, how } => {
                Some(RendezvousError::Lost { ranks, host, how })
            }
            WireMessage::Missing { missing, after_s, more } => {
                Some(RendezvousError::Missing { place: place.into(), missing, after_s, more })
            }
            _ => None,
        }
    }
}

struct BodyWriter(Vec<u8>);

impl BodyWriter {
    fn number(mut self, n: u32) -> Self {
        self.0.extend(n.to_le_bytes());
        self
    }

    fn bytes(self, bytes: &[u8]) -> Self {
        let mut out = self.number(bytes.len() as u32);
        out.0.extend(bytes);
        out
    }

    fn text(self, text: &str) -> Self {
        self.bytes(text.as_bytes())
    }
}

struct BodyReader<'a>(&'a [u8]);

impl<'a> BodyReader<'a> {
    fn number(&mut self) -> Result<u32, NoMessage> {
        let (number, rest) = self.0.split_first_chunk().ok_or(NoMessage)?;
        self.0 = rest;
        Ok(u32::from_le_bytes(*number))
    }

    fn bytes(&mut self, max: usize) -> Result<&'a [u8], NoMessage> {
        let length = self.number()? as usize;
        if length > max {
            return Err(NoMessage);
        }
        let (bytes, rest) = self.0.split_at_checked(length).ok_or(NoMessage)?;
        self.0 = rest;
        Ok(bytes)
    }

    fn text_of(&mut self, max: usize) -> Result<String, NoMessage> {
        let text = std::str::from_utf8(self.bytes(max)?).map_err(|_| NoMessage)?;
        Ok(text.to_string())
    }

    fn text(&mut self) -> Result<String, NoMessage> {
        self.text_of(VALUE_BYTES_MAX)
    }

    fn key(&mut self) -> Result<String, NoMessage> {
        self.text_of(KEY_BYTES_MAX)
    }

    fn value(&mut self) -> Result<Vec<u8>, NoMessage> {
        self.bytes(VALUE_BYTES_MAX).map(<[u8]>::to_vec)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_message() -> impl Strategy<Value = WireMessage> {
        let text = || "[a-z/é0-9]{0,40}";
        let value = || prop::collection::vec(any::<u8>(), 0..300);
        prop_oneof![
            (any::<u32>(), text(), value()).prop_map(|(id, key, value)| WireMessage::Put {
                id,
                key,
                value
            }),
            any::<u32>().prop_map(|id| WireMessage::Stored { id }),
            any::<u32>().prop_map(|id| WireMessage::Taken { id }),
            (any::<u32>(), text()).prop_map(|(id, problem)| WireMessage::Full { id, problem }),
            text().prop_map(|key| WireMessage::Watch { key }),
            (text(), value()).prop_map(|(key, value)| WireMessage::Value { key, value }),
            text().prop_map(|key| WireMessage::Absent { key }),
            Just(WireMessage::Beat),
            Just(WireMessage::Bye),
            (text(), text(), text()).prop_map(|(ranks, host, how)| WireMessage::Lost {
                ranks,
                host,
                how
            }),
            (text(), any::<u32>(), text()).prop_map(|(missing, after_s, more)| {
                WireMessage::Missing { missing, after_s: after_s.into(), more }
            }),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 256,
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        #[test]
        fn messages_read_back(message in any_message()) {
            prop_assert_eq!(WireMessage::decode(&message.encode()), Ok(message));
        }

        #[test]
        fn cut_and_lengthened_messages_are_refused(
            message in any_message(), cut: prop::sample::Index,
        ) {
            let body = message.encode();
            prop_assert_eq!(WireMessage::decode(&body[..cut.index(body.len())]), Err(NoMessage));
            prop_assert_eq!(WireMessage::decode(&[&body[..], &[0]].concat()), Err(NoMessage));
        }

        /// Whatever is read is what its own writing says; nothing is allocated for a length alone.
        #[test]
        fn random_bodies_are_refused_or_read(body in prop::collection::vec(any::<u8>(), 0..400)) {
            if let Ok(message) = WireMessage::decode(&body) {
                prop_assert_eq!(message.encode(), body);
            }
        }
    }

    #[test]
    fn long_names_and_values_are_refused() {
        let put = |key: usize, value: usize| {
            let (key, value) = ("k".repeat(key), vec![0; value]);
            WireMessage::decode(&WireMessage::Put { id: 0, key, value }.encode()).is_ok()
        };
        assert!(put(KEY_BYTES_MAX, VALUE_BYTES_MAX));
        assert!(!put(KEY_BYTES_MAX + 1, 0) && !put(0, VALUE_BYTES_MAX + 1));
    }
}
