//! Obeyed keys of a tokenizer's file, special tokens, decoding behind a prompt, and long texts.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::TextTokenizer;
use crate::chat::rules_tests::fresh_key;

fn fixture() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tokenizer.json");
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn written(dir: &Path, json: &Value) -> PathBuf {
    let path = dir.join("tokenizer.json");
    fs::write(&path, json.to_string()).unwrap();
    path
}

fn opened(json: &Value) -> TextTokenizer {
    TextTokenizer::open(&written(tempfile::tempdir().unwrap().path(), json)).unwrap()
}

fn template(before: bool, behind: bool) -> Value {
    let token = json!({"SpecialToken": {"id": "<|im_start|>", "type_id": 0}});
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    let single = [before.then(|| token.clone()), Some(text.clone()), behind.then_some(token)];
    let single: Vec<Value> = single.into_iter().flatten().collect();
    json!({"type": "TemplateProcessing", "single": single, "pair": [text.clone(), text],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1],
            "tokens": ["<|im_start|>"]}}})
}

/// Words with the blank before them, as SentencePiece has them.
fn of_words() -> Value {
    let vocab = json!({"<s>": 0, "<unk>": 1, "▁one": 2, "▁two": 3, "▁three": 4});
    json!({"version": "1.0", "added_tokens": [{"id": 0, "content": "<s>", "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}},
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}})
}

#[test]
fn keys_that_are_not_known_are_refused_by_name() {
    let mut json = fixture();
    json["post_processor"] = template(true, true);
    json["normalizer"] = json!({"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"String": "x"}, "content": "x"}, {"type": "NFC"}]});
    opened(&json);
    let key = fresh_key();
    for pointer in [
        "",
        "/model",
        "/added_tokens/0",
        "/pre_tokenizer",
        "/decoder",
        "/normalizer",
        "/normalizer/normalizers/0",
        "/normalizer/normalizers/1",
        "/normalizer/normalizers/0/pattern",
        "/post_processor",
        "/post_processor/single/1",
        "/post_processor/single/1/Sequence",
        "/post_processor/special_tokens/<|im_start|>",
    ] {
        let mut json = json.clone();
        let object = json.pointer_mut(pointer).unwrap().as_object_mut().expect(pointer);
        object.insert(key.clone(), json!(true));
        let dir = tempfile::tempdir().unwrap();
        let error = TextTokenizer::open(&written(dir.path(), &json)).err().expect(pointer);
        let error = error.to_string();
        assert!(error.contains(&format!("has the key {key:?}, which is not read")), "{error}");
    }
}

#[test]
fn dropout_is_off_and_said() {
    let plain = opened(&fixture());
    assert_eq!(plain.notes().len(), 0);
    let mut json = fixture();
    json["model"]["dropout"] = json!(0.5);
    let dropped = opened(&json);
    assert!(dropped.notes()[0].contains("its dropout of 0.5 is off"), "{:?}", dropped.notes());
    let text = "conversations about tokens and answers ".repeat(20);
    for _ in 0..5 {
        assert_eq!(dropped.clone().encode(&text).unwrap(), plain.encode(&text).unwrap());
    }
}

#[test]
fn special_tokens_are_those_of_the_post_processor() {
    let plain = opened(&fixture()).encode("a text").unwrap();
    for (before, behind) in [(true, false), (false, true), (true, true), (false, false)] {
        let mut json = fixture();
        json["post_processor"] = template(before, behind);
        let tokenizer = opened(&json);
        let [first, last] = [before, behind].map(|is_there| vec![1; usize::from(is_there)]);
        let expected = [first, plain.clone(), last].concat();
        assert_eq!(tokenizer.encode("a text").unwrap(), expected);
        assert_eq!(tokenizer.without_special_tokens().encode("a text").unwrap(), plain);
    }
}

#[test]
fn text_behind_a_prompt_keeps_its_first_blank() {
    let tokenizer = opened(&of_words());
    let ids = tokenizer.encode("one two three").unwrap();
    assert_eq!(ids, [0, 2, 3, 4]);
    assert_eq!(tokenizer.decode(&ids[3..]).unwrap(), "three");
    assert_eq!(tokenizer.decode_behind(&ids, 3).unwrap(), " three");
    assert_eq!(tokenizer.decode_behind(&ids, 4).unwrap(), "");
    let plain = opened(&fixture());
    let ids = plain.encode("a text of bytes").unwrap();
    for cut in 0..=ids.len() {
        let both = [plain.decode(&ids[..cut]).unwrap(), plain.decode_behind(&ids, cut).unwrap()];
        assert_eq!(both.concat(), "a text of bytes");
    }
}

/// In tests a piece has 1 KiB, and 8 KiB are the most without a cut.
#[test]
fn a_long_text_is_cut_where_its_ids_stay_or_refused() {
    let tokenizer = opened(&fixture());
    let whole = |text: &str| {
        let encoded = tokenizers::Tokenizer::from_bytes(fixture().to_string()).unwrap();
        encoded.encode_fast(text, false).unwrap().get_ids().to_vec()
    };
    let line = "One line, of 12345 signs (and  blanks).\r\n\n\nAnother:\tit's so.\n";
    for text in [line.repeat(400), "words and words ".repeat(2000), "ünï cödé\nwörds ".repeat(900)]
    {
        assert_eq!(tokenizer.encode(&text).unwrap(), whole(&text));
    }
    let error = tokenizer.encode(&"x".repeat(10_000)).unwrap_err().to_string();
    assert!(
        error.contains("8192 bytes are the most without one; cut it into documents"),
        "{error}"
    );
    assert_eq!(tokenizer.encode(&"x".repeat(8000)).unwrap(), whole(&"x".repeat(8000)));
    // A piece of its own would begin with another token.
    let mut json = fixture();
    json["normalizer"] = json!({"type": "Prepend", "prepend": "x"});
    let prepends = opened(&json);
    prepends.encode(&line.repeat(100)).unwrap();
    assert!(prepends.encode(&line.repeat(400)).is_err());
}
