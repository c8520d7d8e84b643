//! The state that an optimizer keeps of a parameter, as shards, files and predictions see it: named
//! tensors of words.

use serde::{Deserialize, Serialize};

/// The name of the moving average of the weights (EMA), which is kept whatever the optimizer.
pub const EMA: &str = "ema";

/// A tensor that an optimizer keeps of a parameter from update to update: zero at first, of words
/// of four bytes. A word is an `f32`, or any four bytes that the optimizer makes of its bits, such
/// as four 8-bit numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Spelled", into = "Spelled")]
pub struct StateTensor {
    /// Its name, unique among those of the parameter.
    pub name: String,
    extent: Extent,
}

/// The words that a tensor has for a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
enum Extent {
    /// So many for each block of so many elements, in row-major order.
    Block { of: usize, words: usize },
    /// So many of the parameter as a whole.
    Whole { words: usize },
}

/// How a manifest has it: a name where there is a word for each element.
#[derive(Clone, Serialize, Deserialize)]
#[serde(untagged)]
enum Spelled {
    Each(String),
    Other { name: String, extent: Extent },
}

const EACH: Extent = Extent::Block { of: 1, words: 1 };

impl StateTensor {
    /// Largest block of elements that may have words of its own: shards of parameters end at its
    /// multiples.
    pub const BLOCK: usize = 128;

    /// A word for each element.
    pub fn per_element(name: &str) -> StateTensor {
        StateTensor { name: name.into(), extent: EACH }
    }

    /// `words` for each block of `of` elements, the parameter's last one whole or not: 8-bit
    /// numbers and a scale for each block of 64, say, are 17 words for 64.
    ///
    /// # Panics
    /// Panics if `of` does not divide [`BLOCK`](Self::BLOCK).
    pub fn per_block(name: &str, of: usize, words: usize) -> StateTensor {
        assert!(
            of > 0 && Self::BLOCK.is_multiple_of(of),
            "blocks of {of} elements do not end at 128"
        );
        StateTensor { name: name.into(), extent: Extent::Block { of, words } }
    }

    /// So many `words` of the parameter as a whole, such as a number for each row. Each rank with a
    /// part of the parameter keeps all of them.
    pub fn whole(name: &str, words: usize) -> StateTensor {
        StateTensor { name: name.into(), extent: Extent::Whole { words } }
    }

    /// Whether it is of the parameter as a whole.
    pub fn is_whole(&self) -> bool {
        matches!(self.extent, Extent::Whole { .. })
    }

    /// Words for `elements` elements of the parameter that begin at a block.
    pub fn words(&self, elements: usize) -> usize {
        match self.extent {
            Extent::Block { of, words } => elements.div_ceil(of.max(1)).saturating_mul(words),
            Extent::Whole { words } => words,
        }
    }

    /// The words of it that elements `offset..offset + elements` have, from which one on and how
    /// many, where a block begins at the first of them.
    pub fn span(&self, offset: usize, elements: usize) -> (usize, usize) {
        let start = if self.is_whole() { 0 } else { self.words(offset) };
        (start, self.words(elements))
    }

    /// The words that a file has of it for the piece that begins at element `offset`: those of a
    /// whole parameter are with its first piece.
    pub fn words_in_piece(&self, offset: usize, elements: usize) -> usize {
        if self.is_whole() && offset > 0 { 0 } else { self.words(elements) }
    }

    /// Whether a file may say so.
    pub(crate) fn is_possible(&self) -> bool {
        let named = !self.name.is_empty() && !self.name.contains('/') && self.name != "parameter";
        let blocks = |of: usize| of > 0 && Self::BLOCK.is_multiple_of(of);
        named && !matches!(self.extent, Extent::Block { of, .. } if !blocks(of))
    }
}

impl From<Spelled> for StateTensor {
    fn from(spelled: Spelled) -> StateTensor {
        match spelled {
            Spelled::Each(name) => StateTensor { name, extent: EACH },
            Spelled::Other { name, extent } => StateTensor { name, extent },
        }
    }
}

impl From<StateTensor> for Spelled {
    fn from(StateTensor { name, extent }: StateTensor) -> Spelled {
        match extent {
            EACH => Spelled::Each(name),
            extent => Spelled::Other { name, extent },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_of_any_extent_reads_back_and_one_per_element_is_a_name() {
        let tensors = [
            StateTensor::per_element("exp_avg"),
            StateTensor::per_block("codes", 64, 17),
            StateTensor::whole("row_var", 5),
        ];
        let text = serde_json::to_string(&tensors).unwrap();
        assert!(text.starts_with(r#"["exp_avg",{"name":"codes","extent":{"block":"#), "{text}");
        let read: Vec<StateTensor> = serde_json::from_str(&text).unwrap();
        assert_eq!(read, tensors);
        let words = |i: usize, offset| tensors[i].words_in_piece(offset, 130);
        assert_eq!([words(0, 128), words(1, 128), words(2, 128)], [130, 3 * 17, 0]);
        assert_eq!(words(2, 0), 5);
    }
}
