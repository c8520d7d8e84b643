//! Frames on the wire: a length, a body, and a tag that only a holder of the key can make. The tag
//! covers the frame's number too, so none can be changed, left out, repeated or reordered.

const LENGTH_BYTES: usize = 4;
const TAG_BYTES: usize = 32;

/// Why a stream of frames cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FrameError {
    #[error("a frame of {0} bytes; at most {1} work")]
    TooLong(usize, usize),
    #[error("a frame that was changed on its way")]
    Forged,
}

/// Writes the frames of one direction.
pub(crate) struct Sealer {
    key: [u8; 32],
    most: usize,
    number: u64,
}

/// Reads the frames of one direction from bytes as they come.
pub(crate) struct Opener {
    key: [u8; 32],
    most: usize,
    number: u64,
    buffer: Vec<u8>,
}

fn tag(key: &[u8; 32], number: u64, body: &[u8]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new_keyed(key);
    hasher.update(&number.to_le_bytes()).update(body).finalize()
}

impl Sealer {
    /// Frames whose bodies have at most so many bytes.
    pub(crate) fn new(key: [u8; 32], most: usize) -> Sealer {
        Sealer { key, most, number: 0 }
    }

    /// The next frame.
    ///
    /// # Panics
    /// Panics if `body` is longer than a frame may be: senders check what they are given.
    pub(crate) fn seal(&mut self, body: &[u8]) -> Vec<u8> {
        assert!(body.len() <= self.most, "a body of {} bytes", body.len());
        let mut frame = Vec::with_capacity(LENGTH_BYTES + body.len() + TAG_BYTES);
        frame.extend((body.len() as u32).to_le_bytes());
        frame.extend(body);
        frame.extend(tag(&self.key, self.number, body).as_bytes());
        self.number += 1;
        frame
    }
}

impl Opener {
    /// Frames whose bodies have at most so many bytes.
    pub(crate) fn new(key: [u8; 32], most: usize) -> Opener {
        Opener { key, most, number: 0, buffer: Vec::new() }
    }

    /// Takes in what has come.
    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        self.buffer.extend(bytes);
    }

    /// The next whole frame's body, or `None` while it is not all there.
    pub(crate) fn next(&mut self) -> Result<Option<Vec<u8>>, FrameError> {
        let Some(length) = self.buffer.first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        if length > self.most {
            return Err(FrameError::TooLong(length, self.most));
        }
        let end = LENGTH_BYTES + length;
        let Some(found) = self.buffer.get(end..end + TAG_BYTES) else { return Ok(None) };
        let body = &self.buffer[LENGTH_BYTES..end];
        let found = <[u8; TAG_BYTES]>::try_from(found).expect("cut to this length");
        // Hashes compare in constant time.
        if tag(&self.key, self.number, body) != found {
            return Err(FrameError::Forged);
        }
        let body = body.to_vec();
        self.buffer.drain(..end + TAG_BYTES);
        self.number += 1;
        Ok(Some(body))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KEY: [u8; 32] = [7; 32];
    const MOST: usize = 1000;

    /// Feeds `bytes` in pieces of `step` bytes and collects the bodies.
    fn open_all(bytes: &[u8], step: usize) -> (Vec<Vec<u8>>, Option<FrameError>) {
        let mut opener = Opener::new(KEY, MOST);
        let mut bodies = Vec::new();
        for piece in bytes.chunks(step.max(1)) {
            opener.feed(piece);
            loop {
                match opener.next() {
                    Ok(Some(body)) => bodies.push(body),
                    Ok(None) => break,
                    Err(error) => return (bodies, Some(error)),
                }
            }
        }
        (bodies, None)
    }

    fn frames() -> impl Strategy<Value = Vec<Vec<u8>>> {
        prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 1..6)
    }

    fn sealed(bodies: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let mut sealer = Sealer::new(KEY, MOST);
        bodies.iter().map(|body| sealer.seal(body)).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 128,
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        #[test]
        fn sealed_frames_open_in_any_pieces(bodies in frames(), step in 1..100usize) {
            let bytes = sealed(&bodies).concat();
            prop_assert_eq!(open_all(&bytes, step), (bodies, None));
        }

        /// Of a stream with one bit changed, only frames before it open.
        #[test]
        fn a_changed_bit_is_noticed(bodies in frames(), at: prop::sample::Index, bit in 0..8u32) {
            let frames = sealed(&bodies);
            let mut bytes = frames.concat();
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            let mut whole = 0;
            let before = frames.iter().take_while(|f| { whole += f.len(); whole <= at }).count();
            let (opened, _) = open_all(&bytes, 64);
            prop_assert_eq!(opened, &bodies[..before]);
        }

        #[test]
        fn repeated_and_reordered_frames_are_noticed(bodies in frames()) {
            let frames = sealed(&bodies);
            let twice = [&frames[0][..], &frames[0][..]].concat();
            prop_assert_eq!(open_all(&twice, 64).1, Some(FrameError::Forged));
            if let [first, second, ..] = &frames[..] {
                let swapped = [&second[..], &first[..]].concat();
                prop_assert_eq!(open_all(&swapped, 64).1, Some(FrameError::Forged));
            }
        }

        #[test]
        fn random_bytes_open_to_nothing(
            bytes in prop::collection::vec(any::<u8>(), 0..2000), step in 1..64usize,
        ) {
            prop_assert!(open_all(&bytes, step).0.is_empty());
        }
    }

    #[test]
    fn a_length_is_believed_only_within_the_limit() {
        let mut opener = Opener::new(KEY, MOST);
        opener.feed(&u32::MAX.to_le_bytes());
        assert_eq!(opener.next(), Err(FrameError::TooLong(u32::MAX as usize, MOST)));
    }
}
