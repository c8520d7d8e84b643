//! GPT-2's own files: `encoder.json`, an id for each token, and `vocab.bpe`, the merges in order.

use std::path::Path;

use serde_json::{Map, Value, json};
use zeropp_data::files::read_text;

use crate::error::{Checked, unreadable, wrong};

/// The longest file of a tokenizer that is read.
pub(crate) const BYTES_MAX: u64 = 512 << 20;
/// The token that ends a document.
const END: &str = "<|endoftext|>";

/// The tokenizer as a `tokenizer.json`.
pub(crate) fn to_json(path: &Path, vocabulary: &Map<String, Value>) -> Checked<String> {
    let help = "name a tokenizer.json, or an encoder.json with vocab.bpe beside it";
    if !vocabulary.values().all(Value::is_u64) {
        return Err(wrong(path, "it is neither a tokenizer nor ids of tokens", help));
    }
    let names = ["vocab.bpe", "merges.txt"].map(|name| path.with_file_name(name));
    let Some(merges_path) = names.into_iter().find(|path| path.is_file()) else {
        return Err(wrong(path, "there is no vocab.bpe beside it", help));
    };
    let text = read_text(&merges_path, BYTES_MAX).map_err(unreadable(&merges_path))?;
    let mut merges = Vec::new();
    for (i, line) in text.lines().enumerate() {
        if line.is_empty() || i == 0 && line.starts_with("#version") {
            continue;
        }
        let pair = line.split_once(' ').filter(|(_, b)| !b.contains(' '));
        let Some((a, b)) = pair else {
            let problem = format!("line {} is no pair of tokens", i + 1);
            return Err(wrong(&merges_path, problem, "restore it"));
        };
        merges.push(json!([a, b]));
    }
    let end = vocabulary.get(END).and_then(Value::as_u64);
    let special: Vec<(String, u64)> = end.map(|id| (END.into(), id)).into_iter().collect();
    let split = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
        "use_regex": true });
    Ok(bpe(vocabulary.clone().into(), merges, &special, split, false))
}

/// A byte-level BPE as `tokenizer.json` has it.
pub(crate) fn bpe(
    vocabulary: Value,
    merges: Vec<Value>,
    special: &[(String, u64)],
    pre_tokenizer: Value,
    ignore_merges: bool,
) -> String {
    let added = |(token, id): &(String, u64)| {
        json!({ "id": id, "content": token, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true })
    };
    let added: Vec<Value> = special.iter().map(added).collect();
    let decoder = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
        "use_regex": true });
    let model = json!({ "type": "BPE", "dropout": null, "unk_token": null,
        "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
        "byte_fallback": false, "ignore_merges": ignore_merges, "vocab": vocabulary,
        "merges": merges });
    json!({ "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": null, "pre_tokenizer": pre_tokenizer, "post_processor": null,
        "decoder": decoder, "model": model })
    .to_string()
}

/// The character that stands for each byte in byte-level tokens: itself where it can be seen.
pub(crate) fn byte_characters() -> [char; 256] {
    let mut characters = ['\0'; 256];
    let mut beyond = 0x100;
    for byte in 0..=255u8 {
        let seen = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
        characters[byte as usize] = if seen {
            char::from(byte)
        } else {
            beyond += 1;
            char::from_u32(beyond - 1).expect("small")
        };
    }
    characters
}
