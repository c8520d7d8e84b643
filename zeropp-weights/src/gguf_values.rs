//! GGUF's bytes as numbers, text and key-values, each within the file.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use crate::error::{Checked, damaged};

/// The longest text that is read.
const TEXT_BYTES_MAX: u64 = 1 << 24;
/// The longest name of a key or a tensor: they stand in messages.
const NAME_BYTES_MAX: u64 = 1 << 10;
/// How deep arrays of arrays go.
const DEPTH_MAX: usize = 4;
/// Arrays of up to this many numbers are kept.
const KEPT_MAX: usize = 1 << 12;

/// The value of a key.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufValue {
    /// Whole numbers of any width.
    Whole(i128),
    /// Floating-point numbers of either width.
    Number(f64),
    /// True or false.
    Truth(bool),
    /// Text.
    Text(String),
    /// The numbers of an array, if they are few; its length.
    Array(Vec<GgufValue>, u64),
}

impl GgufValue {
    /// A whole number below 2³².
    pub(crate) fn count(&self) -> Option<u32> {
        match self {
            GgufValue::Whole(n) => u32::try_from(*n).ok(),
            _ => None,
        }
    }
}

impl fmt::Display for GgufValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GgufValue::Whole(n) => n.fmt(f),
            GgufValue::Number(x) => x.fmt(f),
            GgufValue::Truth(on) => on.fmt(f),
            GgufValue::Text(text) => write!(f, "{text:?}"),
            GgufValue::Array(_, n) => write!(f, "{n} values"),
        }
    }
}

/// Key-values by name.
pub type GgufValues = BTreeMap<String, GgufValue>;

/// Reads the bytes of a file from its start.
pub(crate) struct Cursor<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(path: &'a Path, bytes: &'a [u8]) -> Self {
        Self { path, bytes, at: 0 }
    }

    pub(crate) fn at(&self) -> usize {
        self.at
    }

    pub(crate) fn damaged(&self, problem: impl Into<String>) -> crate::WeightsError {
        damaged(self.path, problem)
    }

    pub(crate) fn take(&mut self, n: u64, what: &str) -> Checked<&'a [u8]> {
        let left = self.bytes.len() - self.at;
        let n = usize::try_from(n).ok().filter(|n| *n <= left).ok_or_else(|| {
            let at = self.at;
            self.damaged(format!("{what} at byte {at} claims {n} bytes, and {left} are left"))
        })?;
        let taken = &self.bytes[self.at..self.at + n];
        self.at += n;
        Ok(taken)
    }

    pub(crate) fn u32(&mut self, what: &str) -> Checked<u32> {
        Ok(u32::from_le_bytes(self.take(4, what)?.try_into().expect("four bytes")))
    }

    pub(crate) fn u64(&mut self, what: &str) -> Checked<u64> {
        Ok(u64::from_le_bytes(self.take(8, what)?.try_into().expect("eight bytes")))
    }

    pub(crate) fn text(&mut self, what: &str) -> Checked<String> {
        self.text_of(what, TEXT_BYTES_MAX)
    }

    /// The name of a key or a tensor.
    pub(crate) fn name(&mut self, what: &str) -> Checked<String> {
        self.text_of(what, NAME_BYTES_MAX)
    }

    fn text_of(&mut self, what: &str, most: u64) -> Checked<String> {
        let (at, n) = (self.at, self.u64(what)?);
        if n > most {
            let problem = format!("{what} at byte {at} claims {n} bytes, more than {most}");
            return Err(self.damaged(problem));
        }
        let bytes = self.take(n, what)?;
        // Vocabularies have pieces of letters.
        Ok(String::from_utf8_lossy(bytes).into_owned())
    }

    /// Key-values, so many as the header says.
    pub(crate) fn values(&mut self, count: u64) -> Checked<GgufValues> {
        let mut values = GgufValues::new();
        for _ in 0..count {
            let key = self.name("a key")?;
            let kind = self.u32("the type of a value")?;
            let value = self.value(kind, &key, 0)?;
            if values.insert(key.clone(), value).is_some() {
                return Err(self.damaged(format!("the key {key} is there twice")));
            }
        }
        Ok(values)
    }

    fn value(&mut self, kind: u32, key: &str, depth: usize) -> Checked<GgufValue> {
        let Some(width) = width(kind) else {
            return match kind {
                8 => Ok(GgufValue::Text(self.text(key)?)),
                9 => self.array(key, depth),
                _ => Err(self.damaged(format!("the key {key} has the unknown type {kind}"))),
            };
        };
        Ok(number(kind, self.take(width, key)?))
    }

    fn array(&mut self, key: &str, depth: usize) -> Checked<GgufValue> {
        if depth == DEPTH_MAX {
            return Err(self.damaged(format!("the arrays of {key} are nested too deep")));
        }
        let (kind, count) = (self.u32(key)?, self.u64(key)?);
        let mut kept = Vec::new();
        if let Some(width) = width(kind) {
            let bytes = count.saturating_mul(width);
            let bytes = self.take(bytes, key)?;
            if bytes.len() / width as usize <= KEPT_MAX {
                kept.extend(bytes.chunks_exact(width as usize).map(|raw| number(kind, raw)));
            }
        } else {
            for _ in 0..count {
                // Each takes some bytes, so a number without end ends with the file.
                self.value(kind, key, depth + 1)?;
            }
        }
        Ok(GgufValue::Array(kept, count))
    }
}

/// Bytes of a number of this type; none where it is text, an array or unknown.
fn width(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

fn number(kind: u32, raw: &[u8]) -> GgufValue {
    let mut eight = [0; 8];
    eight[..raw.len()].copy_from_slice(raw);
    let bits = u64::from_le_bytes(eight);
    match kind {
        1 => GgufValue::Whole(i128::from(bits as u8 as i8)),
        3 => GgufValue::Whole(i128::from(bits as u16 as i16)),
        5 => GgufValue::Whole(i128::from(bits as u32 as i32)),
        11 => GgufValue::Whole(i128::from(bits as i64)),
        6 => GgufValue::Number(f64::from(f32::from_bits(bits as u32))),
        12 => GgufValue::Number(f64::from_bits(bits)),
        7 => GgufValue::Truth(bits != 0),
        _ => GgufValue::Whole(i128::from(bits)),
    }
}
