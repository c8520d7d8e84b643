//! Megatron's index of a file of ids: `.idx` beside `.bin`, little endian.
//!
//! 9 bytes of magic, u64 version 1, u8 type of an id, u64 sequences, u64 length of the last array;
//! i32 lengths of the sequences, i64 first bytes of them in the `.bin`, i64 first sequences of the
//! documents and the number of sequences, and where there are modes an i8 of each sequence.

use std::path::{Path, PathBuf};

use super::DataError;
use crate::choices::Tokenizer;
use crate::files::{Mapped, is_named, open_regular};

const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
/// Where the first array begins.
const ARRAYS: usize = 34;

/// An index that fits its file of ids.
#[derive(Debug)]
pub(super) struct MegatronIndex {
    map: Mapped,
    sequences: usize,
    documents: usize,
    /// The form of an id.
    pub(super) tokenizer: Tokenizer,
}

/// The file of ids and the index that `path` means, if it means such a pair: the one, the other or
/// their name without an ending.
pub(super) fn pair(path: &Path) -> Option<(PathBuf, PathBuf)> {
    let ends = path.extension().and_then(|e| e.to_str());
    let (bin, index) = match ends {
        Some("bin") => (path.to_path_buf(), path.with_extension("idx")),
        Some("idx") => (path.with_extension("bin"), path.to_path_buf()),
        _ if path.exists() => return None,
        _ => {
            let with =
                |end: &str| PathBuf::from([path.as_os_str(), end.as_ref()].join("".as_ref()));
            (with(".bin"), with(".idx"))
        }
    };
    is_named(&index).then_some((bin, index))
}

impl MegatronIndex {
    /// Opens the index and holds it against `bin_bytes`, the size of its file of ids. Looks at
    /// every number in it once.
    pub(super) fn open(path: &Path, bin_bytes: usize) -> Result<MegatronIndex, DataError> {
        let malformed = |problem| DataError::Malformed { path: path.into(), problem };
        let opened = open_regular(path).and_then(|file| Mapped::new(&file));
        let map = opened.map_err(|e| {
            let help = "restore it, or remove it to read the .bin without it";
            malformed(format!("the index cannot be read ({e}); {help}"))
        })?;
        let index = MegatronIndex::header(map).map_err(malformed)?;
        index.check(bin_bytes).map_err(malformed)?;
        Ok(index)
    }

    fn header(map: Mapped) -> Result<MegatronIndex, String> {
        if map.len() < ARRAYS || !map.starts_with(MAGIC) {
            return Err("it is not a Megatron index, which the .idx beside a .bin must be".into());
        }
        let number = |at: usize| u64::from_le_bytes(map[at..at + 8].try_into().expect("eight"));
        let (version, sequences, documents) = (number(9), number(18), number(26));
        if version != 1 {
            return Err(format!("its version is {version}; version 1 is read"));
        }
        let tokenizer = match map[17] {
            1 => Tokenizer::Bytes,
            4 => Tokenizer::U32,
            8 => Tokenizer::U16,
            kind => {
                let known = "u8 (1), i32 (4) and u16 (8) are read";
                return Err(format!("its ids have the type {kind}; {known}"));
            }
        };
        // 12 bytes a sequence and 8 a boundary, at least, and at most a mode a sequence.
        let least = sequences.checked_mul(12).zip(documents.checked_mul(8));
        let least = least.and_then(|(a, b)| a.checked_add(b)?.checked_add(ARRAYS as u64));
        let there = map.len() as u64;
        let fits = |least| there == least || there.checked_sub(least) == Some(sequences);
        if !least.is_some_and(fits) {
            return Err(format!(
                "its header says {sequences} sequences and {documents} boundaries of documents, \
                 which {there} bytes cannot be; was it truncated?"
            ));
        }
        let (sequences, documents) = (sequences as usize, documents as usize);
        Ok(MegatronIndex { map, sequences, documents, tokenizer })
    }

    /// Sequences follow each other without a gap and fill the file; documents go up.
    fn check(&self, bin_bytes: usize) -> Result<(), String> {
        let width = super::ids::token_bytes(self.tokenizer) as i64;
        let mut end = 0i64;
        for i in 0..self.sequences {
            let (length, pointer) = (self.length(i), self.pointer(i));
            if pointer != end || length < 0 {
                return Err(format!(
                    "sequence {i} has {length} ids from byte {pointer} on, and {end} is next"
                ));
            }
            // Of 32-bit lengths less than 2³² fit a file.
            end += i64::from(length) * width;
        }
        if end != bin_bytes as i64 {
            let cut = "was one of the two truncated?";
            return Err(format!("its ids take {end} bytes, and the .bin has {bin_bytes}; {cut}"));
        }
        let mut last = 0;
        for i in 0..self.documents {
            let first = self.boundary(i);
            let is_first = i == 0 && first != 0;
            if first < last || first > self.sequences as i64 || is_first {
                return Err(format!("document {i} begins with sequence {first}, after {last}"));
            }
            last = first;
        }
        Ok(())
    }

    /// The bytes, for a fingerprint.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.map
    }

    fn length(&self, i: usize) -> i32 {
        i32::from_le_bytes(self.map[ARRAYS + 4 * i..][..4].try_into().expect("four bytes"))
    }

    fn long(&self, at: usize) -> i64 {
        i64::from_le_bytes(self.map[at..at + 8].try_into().expect("eight bytes"))
    }

    fn pointer(&self, i: usize) -> i64 {
        self.long(ARRAYS + 4 * self.sequences + 8 * i)
    }

    fn boundary(&self, i: usize) -> i64 {
        self.long(ARRAYS + 12 * self.sequences + 8 * i)
    }

    /// Number of documents: the last boundary is their end.
    pub(super) fn documents(&self) -> usize {
        self.documents.saturating_sub(1)
    }

    /// The first token of document `i`, from the beginning of the file.
    pub(super) fn start(&self, i: usize) -> usize {
        let width = super::ids::token_bytes(self.tokenizer);
        match self.boundary(i) as usize {
            end if end == self.sequences => {
                let last = self.sequences.checked_sub(1);
                last.map_or(0, |l| self.pointer(l) as usize / width + self.length(l) as usize)
            }
            first => self.pointer(first) as usize / width,
        }
    }

    /// How many documents begin before token `at`.
    pub(super) fn before(&self, at: usize) -> usize {
        let (mut low, mut high) = (0, self.documents());
        while low < high {
            let middle = low.midpoint(high);
            match self.start(middle) < at {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        low
    }
}
