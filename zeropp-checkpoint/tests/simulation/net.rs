//! Connections between the processes of a meeting: sealed frames, as real ones have, and what may
//! happen to them on the way.

use std::collections::HashMap;

use zeropp_schedule::ir::Message;

use crate::plan::{Bug, Fault};
use crate::rank::MessageKey;
use crate::sealed::{Opener, Sealer};

const BODY_BYTES_MAX: usize = 64;

struct Link {
    seal: Sealer,
    open: Opener,
    /// A frame that the next one overtakes.
    held: Option<Vec<u8>>,
}

/// All connections, by both processes.
pub(crate) struct Net {
    links: HashMap<(usize, usize), Link>,
    key: [u8; 32],
    bug: Bug,
    /// The fault of the next frame.
    pub(crate) next: Option<Fault>,
}

fn body((message, stage, micro_batch): MessageKey, value: u64) -> Vec<u8> {
    let kind = u64::from(message == Message::Gradient);
    [kind, stage as u64, micro_batch as u64, value].iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn read(body: &[u8]) -> (MessageKey, u64) {
    let x: Vec<u64> =
        body.chunks(8).map(|b| u64::from_le_bytes(b.try_into().expect("eight"))).collect();
    let message = if x[0] == 1 { Message::Gradient } else { Message::Activation };
    ((message, x[1] as usize, x[2] as usize), x[3])
}

impl Net {
    /// Of a meeting of its own: what was sealed for another opens here never.
    pub(crate) fn new(meeting: u64, bug: Bug) -> Net {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&meeting.to_le_bytes());
        Net { links: HashMap::new(), key, bug, next: None }
    }

    /// Sends a message; those that come out at the other end, in order, or what is wrong there.
    pub(crate) fn send(
        &mut self,
        between: (usize, usize),
        key: MessageKey,
        value: u64,
    ) -> Result<Vec<(MessageKey, u64)>, String> {
        let fresh = || Link {
            seal: Sealer::new(self.key, BODY_BYTES_MAX),
            open: Opener::new(self.key, BODY_BYTES_MAX),
            held: None,
        };
        let link = self.links.entry(between).or_insert_with(fresh);
        let plain = body(key, value);
        // Without the seal a frame is its body.
        let frame = match self.bug {
            Bug::Echo => plain,
            _ => link.seal.seal(&plain),
        };
        let frames = match (self.next.take(), link.held.take()) {
            (Some(Fault::Cut), _) => return Err("its connection closed".into()),
            (Some(Fault::Twice), held) => [Some(frame.clone()), Some(frame), held].into(),
            (Some(Fault::Swapped), None) => {
                link.held = Some(frame);
                return Ok(Vec::new());
            }
            (_, held) => [Some(frame), held].into_iter().collect::<Vec<_>>(),
        };
        Self::arrive(link, frames.into_iter().flatten(), self.bug)
    }

    /// Delivers a frame that nothing has overtaken.
    pub(crate) fn flush(&mut self) -> Result<Vec<(usize, MessageKey, u64)>, String> {
        let mut all = Vec::new();
        for ((_, to), link) in &mut self.links {
            let held = link.held.take();
            let came = Self::arrive(link, held.into_iter(), self.bug)?;
            all.extend(came.into_iter().map(|(key, value)| (*to, key, value)));
        }
        Ok(all)
    }

    fn arrive(
        link: &mut Link,
        frames: impl Iterator<Item = Vec<u8>>,
        bug: Bug,
    ) -> Result<Vec<(MessageKey, u64)>, String> {
        let mut came = Vec::new();
        for frame in frames {
            if bug == Bug::Echo {
                came.push(read(&frame));
                continue;
            }
            link.open.feed(&frame);
            while let Some(body) = link.open.next().map_err(|e| format!("it sent {e}"))? {
                came.push(read(&body));
            }
        }
        Ok(came)
    }
}
