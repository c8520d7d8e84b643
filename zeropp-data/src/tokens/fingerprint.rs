//! A value that distinguishes data without reading all of it.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::bytes::JoinedBytes;

/// Places that are looked at, evenly spread from the first byte to the last.
const SAMPLES: usize = 64;
/// Bytes at each place. Data of up to 4 MiB is compared whole.
const SAMPLE_BYTES: usize = 64 << 10;

/// The size of data and a digest of fixed samples of it. Data that differs only elsewhere has the
/// same one: it is to tell that a folder has grown or a file was replaced, not to prove anything.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint {
    /// Bytes of all tokens, without a header.
    pub bytes: u64,
    /// BLAKE3 digest of the samples, in hexadecimal.
    pub samples_blake3: String,
}

impl Fingerprint {
    /// Of the bytes after `header`.
    pub(super) fn new(data: &JoinedBytes, header: usize) -> Fingerprint {
        let bytes = data.len() - header;
        let mut hasher = blake3::Hasher::new();
        sampled(&mut hasher, bytes, |start, sample| data.read(header + start, sample));
        let samples_blake3 = hasher.finalize().to_hex().to_string();
        Fingerprint { bytes: bytes as u64, samples_blake3 }
    }

    /// Of these data and what says more of them.
    pub(super) fn with(self, more: &[u8]) -> Fingerprint {
        let mut hasher = blake3::Hasher::new();
        hasher.update(self.samples_blake3.as_bytes());
        let read = |start: usize, out: &mut [u8]| out.copy_from_slice(&more[start..][..out.len()]);
        sampled(&mut hasher, more.len(), read);
        Fingerprint { samples_blake3: hasher.finalize().to_hex().to_string(), ..self }
    }

    /// Of several sources with their weights.
    pub(super) fn joined<'a>(
        sources: impl Iterator<Item = (&'a Fingerprint, &'a f64)>,
    ) -> Fingerprint {
        let mut hasher = blake3::Hasher::new();
        let mut bytes = 0;
        for (source, weight) in sources {
            bytes += source.bytes;
            hasher.update(&source.bytes.to_le_bytes());
            hasher.update(source.samples_blake3.as_bytes());
            hasher.update(&weight.to_le_bytes());
        }
        Fingerprint { bytes, samples_blake3: hasher.finalize().to_hex().to_string() }
    }

    /// In words, how this data differs from what it was; nothing where it seems the same.
    pub fn change_since(&self, then: &Fingerprint) -> Option<String> {
        if self.bytes != then.bytes {
            let (now, then) = (self.bytes, then.bytes);
            return Some(format!("the data has {now} bytes (had {then})"));
        }
        let other = "the data has the same size and another content";
        (self.samples_blake3 != then.samples_blake3).then(|| other.into())
    }
}

/// Adds the samples of `bytes` bytes, which `read` has.
fn sampled(hasher: &mut blake3::Hasher, bytes: usize, read: impl Fn(usize, &mut [u8])) {
    let mut sample = vec![0; SAMPLE_BYTES.min(bytes)];
    if bytes <= SAMPLES * SAMPLE_BYTES {
        for start in (0..bytes).step_by(SAMPLE_BYTES) {
            let n = SAMPLE_BYTES.min(bytes - start);
            read(start, &mut sample[..n]);
            hasher.update(&sample[..n]);
        }
        return;
    }
    for i in 0..SAMPLES {
        // The products are far beyond 64 bits for the largest of files.
        let last = (bytes - SAMPLE_BYTES) as u128;
        let start = (last * i as u128 / (SAMPLES - 1) as u128) as usize;
        read(start, &mut sample);
        hasher.update(&sample);
    }
}

/// Its size, and enough of the digest to tell two apart.
impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digest = self.samples_blake3.get(..16).unwrap_or(&self.samples_blake3);
        write!(f, "{} bytes with digest {digest}", self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fingerprint(bytes: Vec<u8>) -> Fingerprint {
        Fingerprint::new(&JoinedBytes::in_memory(bytes), 0)
    }

    #[test]
    fn any_byte_of_small_data_counts() {
        for n in [1, SAMPLE_BYTES, SAMPLE_BYTES + 1, 3 * SAMPLE_BYTES - 5] {
            let whole = fingerprint(vec![1; n]);
            assert_eq!(whole.change_since(&fingerprint(vec![1; n])), None);
            for at in [0, n / 2, n - 1] {
                let mut other = vec![1; n];
                other[at] = 2;
                let change = fingerprint(other).change_since(&whole).unwrap();
                assert_eq!(change, "the data has the same size and another content");
            }
        }
        let grown = fingerprint(vec![1; 8]).change_since(&fingerprint(vec![1; 7]));
        assert_eq!(grown.unwrap(), "the data has 8 bytes (had 7)");
        assert_eq!(fingerprint(Vec::new()).bytes, 0);
    }

    #[test]
    fn both_ends_of_large_data_count_and_a_header_does_not() {
        let n = SAMPLES * SAMPLE_BYTES + 12_345;
        let data = vec![3; n];
        let whole = fingerprint(data.clone());
        for at in [0, n - 1] {
            let mut other = data.clone();
            other[at] = 4;
            assert_ne!(fingerprint(other), whole);
        }
        let behind = JoinedBytes::in_memory([vec![9; 10], data].concat());
        assert_eq!(Fingerprint::new(&behind, 10), whole);
    }
}
