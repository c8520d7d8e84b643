//! A loss mask beside a file of ids: which tokens are scored when they are predicted.
//!
//! `NAME.mask` beside `NAME.bin`: 8 bytes of magic `ZPPMASK1`, u64 number of tokens (little
//! endian), then a bit a token, the lowest bit of a byte first; 1 where the token is scored. Bits
//! behind the last token are 0.

use std::path::{Path, PathBuf};

use super::DataError;
use crate::files::{Mapped, is_named, open_regular};

/// The first bytes of every loss mask.
pub const LOSS_MASK_MAGIC: &[u8; 8] = b"ZPPMASK1";
/// Where the bits begin.
const BITS: usize = 16;

/// A loss mask that fits its file of ids.
#[derive(Debug)]
pub(super) struct LossMask {
    map: Mapped,
}

/// Where the loss mask of a file of ids is, if anything has its name.
pub(super) fn beside(bin: &Path) -> Option<PathBuf> {
    let path = bin.with_extension("mask");
    is_named(&path).then_some(path)
}

impl LossMask {
    /// Opens the mask of a file of so many tokens.
    pub(super) fn open(path: &Path, tokens: usize) -> Result<LossMask, DataError> {
        let malformed = |problem| Err(DataError::Malformed { path: path.into(), problem });
        let map = match open_regular(path).and_then(|file| Mapped::new(&file)) {
            Ok(map) => map,
            Err(e) => {
                let help = "restore it, or remove it to score all tokens";
                return malformed(format!("the loss mask cannot be read ({e}); {help}"));
            }
        };
        if map.len() < BITS || !map.starts_with(LOSS_MASK_MAGIC) {
            let help = "restore it, or remove it to score all tokens";
            return malformed(format!("it is not a loss mask, which the .mask must be; {help}"));
        }
        let said = u64::from_le_bytes(map[8..BITS].try_into().expect("eight bytes"));
        if said != tokens as u64 {
            return malformed(format!(
                "it is a mask of {said} tokens, and the file beside it has {tokens}; make both anew"
            ));
        }
        let (there, needed) = (map.len() - BITS, tokens.div_ceil(8));
        if there != needed {
            return malformed(format!(
                "{tokens} tokens take {needed} bytes of bits, and it has {there}; was it truncated?"
            ));
        }
        Ok(LossMask { map })
    }

    /// Whether token `at` is scored when it is predicted.
    pub(super) fn is_scored(&self, at: usize) -> bool {
        self.map[BITS + at / 8] >> (at % 8) & 1 == 1
    }

    /// The first token that is scored of those from `at` to before `end`.
    pub(super) fn next(&self, mut at: usize, end: usize) -> Option<usize> {
        while at < end {
            if at.is_multiple_of(8) && self.map[BITS + at / 8] == 0 {
                at += 8;
            } else if self.is_scored(at) {
                return Some(at);
            } else {
                at += 1;
            }
        }
        None
    }

    /// The bytes, for a fingerprint.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.map
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_read_and_damage_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.mask");
        let whole = |tokens: u64, bits: &[u8]| {
            [LOSS_MASK_MAGIC.as_slice(), &tokens.to_le_bytes(), bits].concat()
        };
        std::fs::write(&path, whole(10, &[0b1000_0101, 0b10])).unwrap();
        let mask = LossMask::open(&path, 10).unwrap();
        let scored: Vec<usize> = (0..10).filter(|at| mask.is_scored(*at)).collect();
        assert_eq!(scored, [0, 2, 7, 9]);
        let next = |at| mask.next(at, 10);
        assert_eq!([0, 1, 3, 8].map(next), [Some(0), Some(2), Some(7), Some(9)]);
        assert_eq!((next(10), mask.next(8, 9)), (None, None));
        for (bytes, message) in [
            (b"ZPPMASK".to_vec(), "not a loss mask"),
            (whole(u64::MAX, &[1, 2]), "a mask of 18446744073709551615 tokens"),
            (whole(9, &[1, 2]), "a mask of 9 tokens, and the file beside it has 10"),
            (whole(10, &[1]), "take 2 bytes of bits, and it has 1; was it truncated?"),
            (whole(10, &[1, 2, 3]), "take 2 bytes of bits, and it has 3"),
        ] {
            std::fs::write(&path, bytes).unwrap();
            let error = LossMask::open(&path, 10).unwrap_err().to_string();
            assert!(error.contains("x.mask") && error.contains(message), "{error}");
        }
    }
}
