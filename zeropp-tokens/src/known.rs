//! Which keys of a `tokenizer.json` are obeyed, or known to change nothing here (`version`,
//! `truncation`, `padding`). The crate that reads it passes over most others without a word, so
//! they are refused here.

use serde_json::{Map, Value};

/// Keys of the file itself.
const FILE: &[&str] = &[
    "version",
    "truncation",
    "padding",
    "added_tokens",
    "normalizer",
    "pre_tokenizer",
    "post_processor",
    "decoder",
    "model",
];
const ADDED_TOKEN: &[&str] =
    &["id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"];
const MODEL: &[&str] = &[
    "type",
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
    "vocab",
    "merges",
    "unk_id",
    "max_input_chars_per_word",
];
/// Keys of every other part, by its type. A type that is not here is refused when it is read.
const PARTS: &[(&str, &[&str])] = &[
    ("BertNormalizer", &["clean_text", "handle_chinese_chars", "strip_accents", "lowercase"]),
    ("Strip", &["strip_left", "strip_right", "content", "start", "stop"]),
    ("Precompiled", &["precompiled_charsmap"]),
    ("Replace", &["pattern", "content"]),
    ("Prepend", &["prepend"]),
    ("ByteLevel", &["add_prefix_space", "trim_offsets", "use_regex"]),
    ("CharDelimiterSplit", &["delimiter"]),
    ("Metaspace", &["replacement", "prepend_scheme", "split", "add_prefix_space", "str_rep"]),
    ("Split", &["pattern", "behavior", "invert"]),
    ("Punctuation", &["behavior"]),
    ("Digits", &["individual_digits"]),
    ("FixedLength", &["length"]),
    ("RobertaProcessing", &["sep", "cls", "trim_offsets", "add_prefix_space"]),
    ("BertProcessing", &["sep", "cls"]),
    ("TemplateProcessing", &["single", "pair", "special_tokens"]),
    ("BPEDecoder", &["suffix"]),
    ("WordPiece", &["prefix", "cleanup"]),
    ("CTC", &["pad_token", "word_delimiter_token", "cleanup"]),
    ("Sequence", &["normalizers", "pretokenizers", "processors", "decoders"]),
];
/// Types that have no keys of their own.
const BARE: &[&str] = &[
    "StripAccents",
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Lowercase",
    "Nmt",
    "BertPreTokenizer",
    "Whitespace",
    "WhitespaceSplit",
    "UnicodeScripts",
    "Fuse",
    "ByteFallback",
];

/// The first key that is not known, with where it stands.
pub(crate) fn unknown_key(json: &Map<String, Value>) -> Option<String> {
    let parts = ["normalizer", "pre_tokenizer", "post_processor", "decoder"];
    let added = json.get("added_tokens").and_then(Value::as_array).into_iter().flatten();
    let added = added.filter_map(Value::as_object);
    other(json, FILE, "the file")
        .or_else(|| added.filter_map(|one| other(one, ADDED_TOKEN, "an added token")).next())
        .or_else(|| other(json.get("model")?.as_object()?, MODEL, "model"))
        .or_else(|| parts.iter().find_map(|name| in_part(json.get(*name)?, name)))
}

fn other(object: &Map<String, Value>, known: &[&str], place: &str) -> Option<String> {
    let key = object.keys().find(|key| !known.contains(&key.as_str()))?;
    Some(format!("{place} has the key {key:?}"))
}

fn in_part(value: &Value, place: &str) -> Option<String> {
    let object = value.as_object()?;
    let kind = object.get("type")?.as_str()?;
    let own = PARTS.iter().find(|(name, _)| *name == kind).map(|(_, keys)| *keys);
    let own = own.or(BARE.contains(&kind).then_some(&[]))?;
    let known: Vec<&str> = own.iter().copied().chain(["type"]).collect();
    let place = format!("{place} ({kind})");
    let pattern = || other(object.get("pattern")?.as_object()?, &["String", "Regex"], &place);
    let inside = || {
        let lists = ["normalizers", "pretokenizers", "processors", "decoders"];
        let lists = lists.iter().filter_map(|name| object.get(*name)?.as_array());
        lists.flatten().find_map(|part| in_part(part, &place))
    };
    other(object, &known, &place)
        .or_else(pattern)
        .or_else(|| in_template(object, &place))
        .or_else(inside)
}

/// The pieces of a template for special tokens.
fn in_template(object: &Map<String, Value>, place: &str) -> Option<String> {
    let pieces = ["single", "pair"].into_iter().filter_map(|name| object.get(name)?.as_array());
    let piece = |piece: &Value| {
        let piece = piece.as_object()?;
        other(piece, &["SpecialToken", "Sequence"], place).or_else(|| {
            let inner = piece.values().filter_map(Value::as_object);
            inner.filter_map(|one| other(one, &["id", "type_id"], place)).next()
        })
    };
    let special = || {
        let tokens = object.get("special_tokens")?.as_object()?.values();
        let mut tokens = tokens.filter_map(Value::as_object);
        tokens.find_map(|token| other(token, &["id", "ids", "tokens"], place))
    };
    pieces.flatten().find_map(piece).or_else(special)
}
