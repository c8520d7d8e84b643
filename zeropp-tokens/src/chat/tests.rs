//! Conversations as transformers writes them (`fixtures/make_chat.py`), to the id and to the token
//! that is scored.

use std::collections::BTreeMap;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::json;
use zeropp_data::choices::{Order, Tokenizer};
use zeropp_data::tokens::{Dataset, Hidden, Sampler};

use crate::{ChatTemplate, TextTokenizer, TokenizeOptions, Tokenized, TokensError, tokenize};

/// A conversation and what transformers makes of it.
#[derive(Deserialize)]
struct Case {
    template: String,
    /// Keeps the order of keys, which templates write.
    line: minijinja::Value,
    text: String,
    ids: Vec<u32>,
    mask: Vec<u8>,
}

pub(super) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

pub(super) fn template(dir: &Path, source: &str) -> Result<ChatTemplate, TokensError> {
    let path = dir.join("template.jinja");
    fs::write(&path, source).unwrap();
    ChatTemplate::open(&fixture("tokenizer.json"), Some(&path), None)
}

/// Tokenizes these lines into `out` in `dir`.
pub(super) fn run(
    dir: &Path,
    chat: ChatTemplate,
    lines: &[String],
) -> Result<Tokenized, TokensError> {
    run_by(&fixture("tokenizer.json"), dir, chat, lines)
}

fn run_by(
    tokenizer: &Path,
    dir: &Path,
    chat: ChatTemplate,
    lines: &[String],
) -> Result<Tokenized, TokensError> {
    let input = dir.join("chats.jsonl");
    fs::write(&input, lines.join("\n")).unwrap();
    let tokenizer = TextTokenizer::open(tokenizer).unwrap();
    let (field, chat) = ("text".into(), Some(chat));
    let options = TokenizeOptions { field, end: None, threads: 3, chat, skip_bad_lines: false };
    tokenize(&[input], &tokenizer, &dir.join("out"), &options, |_| ())
}

#[test]
fn conversations_are_transformers_to_the_scored_token() {
    let cases: Vec<Case> =
        serde_json::from_str(&fs::read_to_string(fixture("chat.json")).unwrap()).unwrap();
    let mut by_template: BTreeMap<&str, Vec<&Case>> = BTreeMap::new();
    cases.iter().for_each(|case| by_template.entry(&case.template).or_default().push(case));
    assert_eq!((cases.len(), by_template.len()), (12, 3));
    for (source, cases) in by_template {
        let dir = tempfile::tempdir().unwrap();
        let chat = template(dir.path(), source).unwrap();
        for case in &cases {
            let made = chat.conversation(&case.line).unwrap();
            assert_eq!(made.text, case.text);
        }
        let json = |case: &&Case| serde_json::to_string(&case.line).unwrap();
        let lines: Vec<String> = cases.iter().map(json).collect();
        let done = run(dir.path(), chat, &lines).unwrap();
        let ids: Vec<u32> = cases.iter().flat_map(|case| case.ids.clone()).collect();
        let mask: Vec<u8> = cases.iter().flat_map(|case| case.mask.clone()).collect();
        let answers = mask.iter().map(|one| u64::from(*one)).sum::<u64>();
        assert!(answers > 20);
        assert_eq!(
            (done.documents, done.tokens, done.answers),
            (cases.len() as u64, ids.len() as u64, answers)
        );
        let raw = fs::read(dir.path().join("out.bin")).unwrap();
        let written: Vec<u32> =
            raw.chunks_exact(2).map(|id| u32::from(u16::from_le_bytes([id[0], id[1]]))).collect();
        assert_eq!(written, ids);
        // As a run reads it: a target is scored where its token is of an answer.
        let data = Dataset::open(&dir.path().join("out.bin"), Tokenizer::Bytes).unwrap();
        let sampler = Sampler::new(0, Order::Sequential, ids.len() - 1, 1)
            .hiding(Hidden { by_loss_mask: true, ..Hidden::default() });
        let sample = sampler.masked(&data, 0, 0).unwrap();
        let scored: Vec<u8> = sample.scored.unwrap().into_iter().map(u8::from).collect();
        assert_eq!(scored, mask[1..]);
        let mut left: Vec<_> =
            fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["chats.jsonl", "out.bin", "out.idx", "out.mask", "template.jinja"]);
    }
}

/// The fixture's tokenizer with a field of its file replaced.
fn changed(dir: &Path, field: &str, value: serde_json::Value) -> PathBuf {
    let text = fs::read_to_string(fixture("tokenizer.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    json[field] = value;
    let path = dir.join("tokenizer.json");
    fs::write(&path, json.to_string()).unwrap();
    path
}

/// A tokenizer that trims its places has none for blanks: they are of the answer all the same.
#[test]
fn blanks_of_an_answer_are_scored() {
    let plain = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}\
                 {% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}";
    let messages = [
        json!({"role": "user", "content": "?"}),
        json!({"role": "assistant", "content": "a\n    b   c  "}),
    ];
    let lines = [json!({ "messages": messages }).to_string()];
    let marked = |trims: bool| {
        let dir = tempfile::tempdir().unwrap();
        let places = json!({"type": "ByteLevel", "add_prefix_space": false,
                            "trim_offsets": trims, "use_regex": true});
        let tokenizer = changed(dir.path(), "post_processor", places);
        let chat = template(dir.path(), plain).unwrap();
        run_by(&tokenizer, dir.path(), chat, &lines).unwrap();
        fs::read(dir.path().join("out.mask")).unwrap()
    };
    assert_eq!(marked(true), marked(false));
}

/// A file's padding and truncation for batches of one length have no effect here.
#[test]
fn documents_are_whole_whatever_a_tokenizers_file_asks_for() {
    let dir = tempfile::tempdir().unwrap();
    let text = "one two three ".repeat(20);
    let ids = |path: &Path| TextTokenizer::open(path).unwrap().encode(&text).unwrap();
    let whole = ids(&fixture("tokenizer.json"));
    let cut = json!({"direction": "Right", "max_length": 8, "strategy": "LongestFirst",
                     "stride": 0});
    let padded = json!({"strategy": {"Fixed": 4096}, "direction": "Right",
                        "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0,
                        "pad_token": "!"});
    for (field, value) in [("truncation", cut), ("padding", padded)] {
        assert_eq!(ids(&changed(dir.path(), field, value)), whole, "{field}");
    }
}

#[test]
fn the_template_of_a_tokenizer_is_found() {
    let found = ChatTemplate::open(&fixture("tokenizer.json"), None, None).unwrap();
    assert!(found.source().contains("generation"));
    let dir = tempfile::tempdir().unwrap();
    let error = ChatTemplate::open(&dir.path().join("tokenizer.json"), None, None).unwrap_err();
    assert!(error.to_string().contains("no chat template"), "{error}");
    let error = template(dir.path(), "{% if %}").unwrap_err().to_string();
    assert!(error.contains("template.jinja: its chat template is refused"), "{error}");
}

#[test]
fn non_conversations_are_refused_by_line() {
    let plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}\
                 {% if add_generation_prompt %}<assistant>{% endif %}";
    // Writes an earlier answer as another text.
    let forgets = "{% for m in messages %}<{{ m.role }}>{% if loop.last %}{{ m.content }}\
                   {% else %}..{% endif %}{% endfor %}\
                   {% if add_generation_prompt %}<assistant>{% endif %}";
    let refuses = "{{ raise_exception('not today') }}";
    let chat = |turns: &[(&str, &str)]| {
        let message = |(role, content): &(&str, &str)| json!({ "role": role, "content": content });
        let messages: Vec<_> = turns.iter().map(message).collect();
        json!({ "messages": messages }).to_string()
    };
    let good = chat(&[("user", "a"), ("assistant", "b")]);
    let two = chat(&[("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]);
    for (source, line, message) in [
        (plain, "{\"text\": \"x\"}".to_owned(), "it has neither messages, nor"),
        (plain, "{\"messages\": []}".to_owned(), "there are no messages"),
        (plain, "{\"messages\": [{\"content\": \"x\"}]}".to_owned(), "message 0 has no role"),
        (plain, "{\"messages\"".to_owned(), "it is no JSON"),
        (plain, chat(&[("user", "\u{fdd0}")]), "no characters"),
        (forgets, two, "mark answers in the template with {% generation %}"),
        (refuses, good.clone(), "not today"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let chat = template(dir.path(), source).unwrap();
        let lines = if source == plain { vec![good.clone(), line] } else { vec![line] };
        let error = run(dir.path(), chat, &lines).unwrap_err().to_string();
        let place = format!("chats.jsonl: line {}", lines.len());
        assert!(error.contains(&place) && error.contains(message), "{error}");
    }
    // An old mask is never taken for one of new ids.
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("out.mask"), "old").unwrap();
    let error = run(dir.path(), template(dir.path(), plain).unwrap(), &[good]).unwrap_err();
    assert!(error.to_string().contains("out.mask: it is there already"), "{error}");
}

#[test]
fn a_run_that_was_killed_goes_on_to_the_same_mask() {
    let dir = tempfile::tempdir().unwrap();
    let source = "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }}\
                  {% endgeneration %}{% endfor %}";
    let input = dir.path().join("chats.jsonl");
    let line = |n: usize| {
        let content = "ab ".repeat(n % 700 + 1);
        json!({ "messages": [{ "role": "user", "content": content }] }).to_string()
    };
    fs::write(&input, (0..3000).map(line).collect::<Vec<_>>().join("\n")).unwrap();
    let tokenizer = TextTokenizer::open(&fixture("tokenizer.json")).unwrap();
    let chat = Some(template(dir.path(), source).unwrap());
    let (out, inputs) = (dir.path().join("out"), [input]);
    // A token behind each conversation is not scored.
    let field = "text".into();
    let options = TokenizeOptions { field, end: Some(0), threads: 2, chat, skip_bad_lines: false };
    let taken = || {
        [".bin", ".idx", ".mask"].map(|end| {
            let path = PathBuf::from(format!("{}{end}", out.display()));
            let bytes = fs::read(&path).unwrap();
            fs::remove_file(path).unwrap();
            bytes
        })
    };
    let done = tokenize(&inputs, &tokenizer, &out, &options, |_| ()).unwrap();
    assert!(done.answers > 0 && done.answers < done.tokens - done.documents);
    let whole = taken();
    for kill_at in [1, 2, 3] {
        let mut calls = 0;
        let killed = catch_unwind(AssertUnwindSafe(|| {
            tokenize(&inputs, &tokenizer, &out, &options, |_| {
                calls += 1;
                assert!(calls < kill_at, "killed here, as the test wants");
            })
        }));
        assert!(killed.is_err() && !dir.path().join("out.mask").exists());
        // What was written after the last note is not trusted.
        let mut partial = fs::read(dir.path().join("out.mask.partial")).unwrap();
        partial.extend([1; 7]);
        fs::write(dir.path().join("out.mask.partial"), partial).unwrap();
        let again = tokenize(&inputs, &tokenizer, &out, &options, |_| ()).unwrap();
        assert_eq!((again.tokens, again.answers), (done.tokens, done.answers));
        assert!(taken() == whole, "killed at {kill_at}");
    }
    // Killed when the mask had its name and the ids had not; then other settings are run.
    let killed = catch_unwind(AssertUnwindSafe(|| {
        tokenize(&inputs, &tokenizer, &out, &options, |_| panic!("killed here"))
    }));
    assert!(killed.is_err());
    fs::write(dir.path().join("out.mask"), &whole[2]).unwrap();
    let other = TokenizeOptions { field: "messages".into(), chat: None, ..options };
    fs::write(&inputs[0], "{\"messages\": \"ab\"}").unwrap();
    tokenize(&inputs, &tokenizer, &out, &other, |_| ()).unwrap();
    assert!(dir.path().join("out.bin").exists() && !dir.path().join("out.mask").exists());
    assert!(!dir.path().join("out.mask.partial").exists());
}
