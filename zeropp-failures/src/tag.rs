//! Tags of the messages between stages: a record's name the message's maker.

use zeropp_schedule::ir::{HeadMessage, Message};

/// Consumer of a message: kind, consuming stage, micro-batch.
pub type Key = (Message, usize, usize);

/// The tag of a message.
pub fn tag((message, stage, micro_batch): Key) -> u64 {
    let message = (message == Message::Gradient) as u64;
    message << 62 | (stage as u64) << 32 | micro_batch as u64
}

/// The tag of a message of a split head.
pub fn head_tag(message: HeadMessage, micro_batch: usize) -> u64 {
    1 << 63 | (message as u64) << 32 | micro_batch as u64
}

/// The message of a tag; none of a split head's.
pub fn untag(tag: u64) -> Option<Key> {
    let message = match tag >> 62 {
        0 => Message::Activation,
        1 => Message::Gradient,
        _ => return None,
    };
    Some((message, (tag >> 32 & 0x3fff_ffff) as usize, (tag & u64::from(u32::MAX)) as usize))
}

/// The message and micro-batch of a split head's tag; none of another's.
pub fn untag_head(tag: u64) -> Option<(HeadMessage, usize)> {
    let which = (tag >> 63 == 1).then_some((tag >> 32 & 0x7fff_ffff) as usize)?;
    Some((*HeadMessage::ALL.get(which)?, (tag & u64::from(u32::MAX)) as usize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_read_back() {
        for (place, message) in HeadMessage::ALL.into_iter().enumerate() {
            assert_eq!(message as usize, place);
            let tag = head_tag(message, 1000 + place);
            assert_eq!((untag_head(tag), untag(tag)), (Some((message, 1000 + place)), None));
        }
        let key = (Message::Gradient, 7, 9);
        assert_eq!((untag(tag(key)), untag_head(tag(key))), (Some(key), None));
    }
}
