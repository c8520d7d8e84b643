//! Tags of the messages between stages: a record's name the message's maker.

use zeropp_schedule::ir::Message;

/// Consumer of a message: kind, consuming stage, micro-batch.
pub type Key = (Message, usize, usize);

/// The tag of a message.
pub fn tag((message, stage, micro_batch): Key) -> u64 {
    let message = (message == Message::Gradient) as u64;
    message << 62 | (stage as u64) << 32 | micro_batch as u64
}

/// The message of a tag.
pub fn untag(tag: u64) -> Key {
    let message = if tag >> 62 == 0 { Message::Activation } else { Message::Gradient };
    (message, (tag >> 32 & 0x3fff_ffff) as usize, (tag & u64::from(u32::MAX)) as usize)
}
