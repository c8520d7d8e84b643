//! tiktoken's files of ranks: a line of base64 and a number for each token. Which pattern splits
//! text before, and which tokens are special, the file does not say: its size does.

use std::collections::HashMap;
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::error::{Checked, wrong};
use crate::gpt2::{bpe, byte_characters};

/// An encoding that is known by the number of its ranks.
struct KnownEncoding {
    ranks: usize,
    pattern: &'static str,
    special: &'static [(&'static str, u64)],
}

const GPT2: &str = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const CL100K: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
const O200K: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

const KNOWN: [KnownEncoding; 5] = [
    KnownEncoding { ranks: 50_256, pattern: GPT2, special: &[("<|endoftext|>", 50_256)] },
    KnownEncoding { ranks: 50_280, pattern: GPT2, special: &[("<|endoftext|>", 50_256)] },
    KnownEncoding {
        ranks: 100_256,
        pattern: CL100K,
        special: &[
            ("<|endoftext|>", 100_257),
            ("<|fim_prefix|>", 100_258),
            ("<|fim_middle|>", 100_259),
            ("<|fim_suffix|>", 100_260),
            ("<|endofprompt|>", 100_276),
        ],
    },
    KnownEncoding {
        ranks: 128_000,
        pattern: CL100K,
        special: &[
            ("<|begin_of_text|>", 128_000),
            ("<|end_of_text|>", 128_001),
            ("<|start_header_id|>", 128_006),
            ("<|end_header_id|>", 128_007),
            ("<|eot_id|>", 128_009),
        ],
    },
    KnownEncoding {
        ranks: 199_998,
        pattern: O200K,
        special: &[("<|endoftext|>", 199_999), ("<|endofprompt|>", 200_018)],
    },
];

/// The tokenizer as a `tokenizer.json`.
pub(crate) fn to_json(path: &Path, text: &str) -> Checked<String> {
    let mut ranks: HashMap<Vec<u8>, u64> = HashMap::new();
    for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.is_empty()) {
        let pair = line.split_once(' ');
        let parsed = pair.and_then(|(token, rank)| Some((base64(token)?, rank.parse().ok()?)));
        let Some((token, rank)) = parsed.filter(|(token, _)| !token.is_empty()) else {
            let problem = format!("line {} is no token in base64 and its rank", i + 1);
            return Err(wrong(path, problem, "name a tokenizer.json, or a file of tiktoken's"));
        };
        if ranks.insert(token, rank).is_some() {
            return Err(wrong(path, format!("line {} has a token again", i + 1), "get it again"));
        }
    }
    let Some(known) = KNOWN.iter().find(|known| known.ranks == ranks.len()) else {
        let problem =
            format!("it has {} ranks, and how such text is split is not known", ranks.len());
        return Err(wrong(path, problem, "use the tokenizer.json of the model"));
    };
    let mut order: Vec<(&Vec<u8>, u64)> =
        ranks.iter().map(|(token, rank)| (token, *rank)).collect();
    order.sort_unstable_by_key(|(_, rank)| *rank);
    let characters = byte_characters();
    let spelled = |bytes: &[u8]| bytes.iter().map(|b| characters[*b as usize]).collect::<String>();
    let (mut vocabulary, mut merges) = (Map::new(), Vec::new());
    for (token, rank) in order {
        vocabulary.insert(spelled(token), json!(rank));
        if token.len() > 1
            && let Some((a, b)) = parents(&ranks, token, rank)
        {
            merges.push(json!([spelled(a), spelled(b)]));
        }
    }
    let split = json!({ "type": "Split", "pattern": { "Regex": known.pattern },
        "behavior": "Isolated", "invert": false });
    let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
        "use_regex": false });
    let pre_tokenizer = json!({ "type": "Sequence", "pretokenizers": [split, bytes] });
    let special: Vec<(String, u64)> =
        known.special.iter().map(|(token, id)| ((*token).to_owned(), *id)).collect();
    Ok(bpe(Value::Object(vocabulary), merges, &special, pre_tokenizer, true))
}

/// The two tokens that merge into `token` last: its bytes merged by all ranks below its own.
fn parents<'a>(
    ranks: &HashMap<Vec<u8>, u64>,
    token: &'a [u8],
    rank: u64,
) -> Option<(&'a [u8], &'a [u8])> {
    let mut ends: Vec<usize> = (0..=token.len()).collect();
    while ends.len() > 3 {
        let merged = |i: usize| ranks.get(&token[ends[i]..ends[i + 2]]).copied();
        let best = (0..ends.len() - 2).filter_map(|i| Some((merged(i)?, i))).min()?;
        if best.0 >= rank {
            return None;
        }
        ends.remove(best.1 + 1);
    }
    Some(token.split_at(ends[1]))
}

/// Standard base64 with padding.
fn base64(text: &str) -> Option<Vec<u8>> {
    let value = |c: u8| match c {
        b'A'..=b'Z' => Some(c - b'A'),
        b'a'..=b'z' => Some(c - b'a' + 26),
        b'0'..=b'9' => Some(c - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let digits = text.trim_end_matches('=').as_bytes();
    if !text.len().is_multiple_of(4) || text.len() - digits.len() > 2 {
        return None;
    }
    let mut out = Vec::with_capacity(digits.len() * 3 / 4);
    for chunk in digits.chunks(4) {
        let mut bits = 0u32;
        for digit in chunk {
            bits = bits << 6 | u32::from(value(*digit)?);
        }
        bits <<= 6 * (4 - chunk.len()) as u32;
        out.extend(&bits.to_be_bytes()[1..chunk.len()]);
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_read_and_nothing_else() {
        for (text, bytes) in [("IQ==", "!"), ("", ""), ("aGVs", "hel"), ("aGU=", "he")] {
            assert_eq!(base64(text), Some(bytes.into()));
        }
        for text in ["a", "a===", "====", "I!==", "aGVsb"] {
            assert_eq!(base64(text), None, "{text}");
        }
    }

    #[test]
    fn the_last_merge_of_a_token_is_found() {
        let ranks: HashMap<Vec<u8>, u64> = ["a", "b", "c", "ab", "bc", "abc"]
            .into_iter()
            .enumerate()
            .map(|(i, token)| (token.as_bytes().to_vec(), i as u64))
            .collect();
        assert_eq!(parents(&ranks, b"abc", 5), Some((&b"ab"[..], &b"c"[..])));
        assert_eq!(parents(&ranks, b"ab", 3), Some((&b"a"[..], &b"b"[..])));
        assert_eq!(parents(&ranks, b"abc", 3), None, "no rank below its own leads to it");
    }
}
