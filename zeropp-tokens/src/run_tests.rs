//! Whole runs: what they write, with any number of threads, after a kill, and what they refuse.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use serde_json::{Map, json};
use zeropp_data::choices::{Order, Tokenizer};
use zeropp_data::tokens::{Dataset, Sampler};

use crate::gpt2::byte_characters;
use crate::{TextTokenizer, TokenizeOptions, Tokenized, TokensError, tokenize};

/// GPT-2's form with an id for each byte, one merge, and an end, 257.
fn tokenizer(dir: &Path) -> TextTokenizer {
    let mut ids = Map::new();
    for (byte, character) in byte_characters().iter().enumerate() {
        ids.insert(character.to_string(), json!(byte));
    }
    ids.insert("he".into(), json!(256));
    ids.insert("<|endoftext|>".into(), json!(257));
    fs::write(dir.join("encoder.json"), serde_json::to_string(&ids).unwrap()).unwrap();
    fs::write(dir.join("vocab.bpe"), "#version: 0.2\nh e\n").unwrap();
    TextTokenizer::open(&dir.join("encoder.json")).unwrap()
}

fn options(threads: usize) -> TokenizeOptions {
    TokenizeOptions {
        field: "text".into(),
        end: Some(257),
        threads,
        chat: None,
        skip_bad_lines: false,
    }
}

fn run(dir: &Path, inputs: &[&str], threads: usize) -> Result<Tokenized, TokensError> {
    let inputs: Vec<PathBuf> = inputs.iter().map(|name| dir.join(name)).collect();
    tokenize(&inputs, &tokenizer(dir), &dir.join("out"), &options(threads), |_| ())
}

/// Both files, which are removed.
fn taken(dir: &Path) -> [Vec<u8>; 2] {
    ["out.bin", "out.idx"].map(|name| {
        let bytes = fs::read(dir.join(name)).unwrap();
        fs::remove_file(dir.join(name)).unwrap();
        bytes
    })
}

/// Many documents, of several batches.
fn corpus(dir: &Path) {
    fs::create_dir(dir.join("texts")).unwrap();
    fs::write(dir.join("texts/a.txt"), "hello, Grüße\n").unwrap();
    fs::write(dir.join("texts/b.md"), "").unwrap();
    let line = |i: usize| json!({ "text": format!("the {i}th {}", "he ".repeat(i % 700)) });
    let lines: Vec<String> = (0..3000).map(|i| line(i).to_string()).collect();
    fs::write(dir.join("texts/c.jsonl"), lines.join("\n")).unwrap();
}

#[test]
fn documents_are_written_with_their_boundaries_as_the_reader_reads_them() {
    let dir = tempfile::tempdir().unwrap();
    let lines = "{\"text\": \"he\"}\n\n{\"text\": \"\"}\n{\"text\": \"hi \\u00fc\", \"n\": 1}\n";
    fs::write(dir.path().join("l.jsonl"), lines).unwrap();
    fs::write(dir.path().join("t.txt"), "hehe").unwrap();
    let done = run(dir.path(), &["l.jsonl", "t.txt"], 2).unwrap();
    assert_eq!((done.documents, done.tokens), (3, 2 + 6 + 3));
    let data = Dataset::open(&dir.path().join("out.bin"), Tokenizer::Bytes).unwrap();
    let sampler = Sampler::new(0, Order::Sequential, 10, 1);
    let (ids, _) = sampler.sample(&data, 0, 0).unwrap();
    assert_eq!(ids, [256, 257, 104, 105, 32, 0xc3, 0xbc, 257, 256, 256]);
    assert_eq!(sampler.document_starts(&data, 0, 0), [0, 2, 8]);
}

#[test]
fn any_number_of_threads_writes_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    corpus(dir.path());
    run(dir.path(), &["texts"], 1).unwrap();
    let one = taken(dir.path());
    for threads in [2, 3, 8] {
        run(dir.path(), &["texts"], threads).unwrap();
        assert!(taken(dir.path()) == one, "{threads} threads");
    }
    let left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left.len(), 3, "nothing is left behind: {left:?}");
}

#[test]
fn a_run_that_was_killed_goes_on_to_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    corpus(dir.path());
    run(dir.path(), &["texts"], 2).unwrap();
    let whole = taken(dir.path());
    let (inputs, out) = ([dir.path().join("texts")], dir.path().join("out"));
    let tokenizer = tokenizer(dir.path());
    for kill_at in [1, 3, 5] {
        let mut calls = 0;
        let killed = catch_unwind(AssertUnwindSafe(|| {
            tokenize(&inputs, &tokenizer, &out, &options(2), |_| {
                calls += 1;
                assert!(calls < kill_at, "killed here, as the test wants");
            })
        }));
        assert!(killed.is_err() && !dir.path().join("out.bin").exists());
        // What was written after the last note is not trusted.
        let mut partial = fs::read(dir.path().join("out.bin.partial")).unwrap();
        partial.extend([9; 7]);
        fs::write(dir.path().join("out.bin.partial"), partial).unwrap();
        let mut first = None;
        let done = tokenize(&inputs, &tokenizer, &out, &options(3), |now| {
            first.get_or_insert(now.documents);
        });
        assert_eq!(done.unwrap().documents, 3001);
        assert!(first.unwrap() > 1 || kill_at == 1, "it went on from {first:?}");
        assert!(taken(dir.path()) == whole, "killed at {kill_at}");
    }
    // Killed between its two last steps.
    fs::write(dir.path().join("out.bin"), &whole[0]).unwrap();
    let other = TokenizeOptions { end: None, ..options(1) };
    let error = tokenize(&inputs, &tokenizer, &out, &other, |_| ()).unwrap_err().to_string();
    assert!(error.contains("out.bin: it is there already; name another, or remove it"), "{error}");
}

/// A zstd frame of raw blocks, as the format's description has it.
fn frame(content: &[u8]) -> Vec<u8> {
    let mut out = vec![0x28, 0xb5, 0x2f, 0xfd, 0xa0];
    out.extend((content.len() as u32).to_le_bytes());
    let header = (content.len() as u32) << 3 | 1;
    out.extend(&header.to_le_bytes()[..3]);
    out.extend(content);
    out
}

#[test]
fn all_frames_of_a_compressed_file_are_read_and_damage_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (frame(b"{\"text\": \"he\"}\n{\"te"), frame(b"xt\": \"e\"}\n"));
    let skip = [&0x184d_2a51u32.to_le_bytes()[..], &3u32.to_le_bytes(), &[1, 2, 3]].concat();
    let path = dir.path().join("x.jsonl.zst");
    fs::write(&path, [&a[..], &skip, &b, &frame(b"")].concat()).unwrap();
    let done = run(dir.path(), &["x.jsonl.zst"], 1).unwrap();
    assert_eq!((done.documents, done.tokens), (2, 4));
    taken(dir.path());
    for damaged in [[&a[..], &b[..b.len() - 2]].concat(), [&a[..], b"junk"].concat(), vec![0; 9]] {
        fs::write(&path, damaged).unwrap();
        let error = run(dir.path(), &["x.jsonl.zst"], 1).unwrap_err().to_string();
        assert!(error.contains("x.jsonl.zst: cannot be read ("), "{error}");
        fs::remove_file(dir.path().join("out.progress.json")).ok();
    }
}

#[test]
fn non_text_is_refused_by_file_and_line() {
    let dir = tempfile::tempdir().unwrap();
    let good = "{\"text\": \"x\"}\n";
    for (name, content, message) in [
        ("a.jsonl", format!("{good}{{\"text\": 5}}"), "a.jsonl: line 2: \"text\" is no text"),
        ("b.jsonl", format!("{good}{good}{{}}"), "b.jsonl: line 3 has no field \"text\""),
        ("c.jsonl", format!("{good}{{\"text\": \"x"), "c.jsonl: line 2 is no JSON"),
        ("d.jsonl", "[".repeat(10_000), "d.jsonl: line 1 is no JSON"),
        (
            "e.txt.gz",
            "x".into(),
            "e.txt.gz: it is compressed, which is not read as text; decompress",
        ),
        ("h.jsonl", "{\"text\": null}".into(), "h.jsonl: line 1: \"text\" is null; restore"),
        ("i.jsonl", "{\"text\": NaN}".into(), "i.jsonl: line 1 is no JSON (expected value at col"),
        ("j.jsonl", "{\"text\": \"\\ud83d x\"}".into(), "j.jsonl: line 1 is no JSON ("),
        ("k.jsonl", "{\"messages\": []}".into(), "no field \"text\" but \"messages\"; tokenize it"),
        ("l.json", "[]".into(), "l.json: it is JSON, which is not read as text; write its texts"),
        ("m.csv", "a,b".into(), "m.csv: it is a table"),
        ("n.bin", "ab".into(), "n.bin: it is of an ending that tokens have"),
        #[cfg(not(feature = "parquet"))]
        ("f.parquet", "x".into(), "f.parquet: this build does not read parquet"),
        #[cfg(feature = "parquet")]
        ("f.parquet", "x".into(), "f.parquet: cannot be read ("),
    ] {
        fs::write(dir.path().join(name), content).unwrap();
        let error = run(dir.path(), &[name], 2).unwrap_err().to_string();
        assert!(error.contains(message) && error.contains("; "), "{error}");
        assert!(error.matches(" line ").count() <= 1, "one number of a line: {error}");
    }
    fs::write(dir.path().join("g"), b"ab\xff").unwrap();
    let error = run(dir.path(), &["g"], 1).unwrap_err().to_string();
    assert!(error.contains("g: it is not UTF-8 text (byte 2)"), "{error}");
    fs::create_dir(dir.path().join("none")).unwrap();
    let error = run(dir.path(), &["none"], 1).unwrap_err().to_string();
    assert!(error.contains("none: the folder has no files"), "{error}");
    assert!(run(dir.path(), &["gone"], 1).is_err());
}

#[test]
fn damaged_tokenizers_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let bpe = |vocab: serde_json::Value, merges: serde_json::Value| {
        json!({ "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
            "post_processor": null, "decoder": null, "model": { "type": "BPE", "dropout": null,
            "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "vocab": vocab, "merges": merges } })
        .to_string()
    };
    for (name, content, message) in [
        ("empty", String::new(), "it has 0 ranks"),
        ("cut.json", bpe(json!({ "a": 0 }), json!([]))[..100].into(), "it is no JSON"),
        ("deep.json", "{\"a\":".repeat(100_000), "it is no JSON"),
        ("kind.json", json!({ "model": { "type": "Magic" } }).to_string(), "no tokenizer that is"),
        ("merge.json", bpe(json!({ "a": 0 }), json!([["a", "b"]])), "no tokenizer that is read"),
        ("huge.json", bpe(json!({ "a": 1u64 << 60 }), json!([])), "no tokenizer that is read"),
        ("neg.json", bpe(json!({ "a": -1 }), json!([])), "no tokenizer that is read"),
        ("nan.json", "{\"model\": NaN}".into(), "it is no JSON"),
        ("alone.json", json!({ "a": 0 }).to_string(), "there is no vocab.bpe beside it"),
        ("words.json", json!({ "a": "b" }).to_string(), "neither a tokenizer nor ids"),
        ("ranks.tiktoken", "IQ== 0\nIg== x\n".into(), "line 2 is no token in base64"),
        ("again.tiktoken", "IQ== 0\nIQ== 1\n".into(), "line 2 has a token again"),
        ("short.tiktoken", "IQ== 0\nIg== 1\n".into(), "it has 2 ranks"),
    ] {
        fs::write(at(name), content).unwrap();
        let error = TextTokenizer::open(&at(name)).err().expect(name).to_string();
        assert!(error.contains(name) && error.contains(message), "{error}");
    }
    let error = TextTokenizer::open(dir.path()).err().unwrap().to_string();
    assert!(error.contains("it has no tokenizer.json"), "{error}");
    tokenizer(dir.path());
    fs::write(at("vocab.bpe"), "#version\na b c\n").unwrap();
    let error = TextTokenizer::open(&at("encoder.json")).err().unwrap().to_string();
    assert!(error.contains("vocab.bpe: line 2 is no pair"), "{error}");
    tokenizer(dir.path());
    fs::write(at("tokenizer_config.json"), "{\"eos_token\": \"<gone>\"}").unwrap();
    let error = TextTokenizer::open(&at("encoder.json")).err().unwrap().to_string();
    assert!(error.contains("\"<gone>\" is no token"), "{error}");
    fs::write(at("tokenizer_config.json"), "{\"eos_token\": {\"content\": \"he\"}}").unwrap();
    let found = TextTokenizer::open(&at("encoder.json")).unwrap();
    assert_eq!((found.end(), found.vocabulary(), found.id_of("he")), (Some(256), 258, Some(256)));
}

#[test]
fn lines_that_are_refused_are_left_out_where_that_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let good = "{\"text\": \"he\"}\n";
    let bad =
        ["{\"text\": null}\n", "{\"text\": NaN}\n", "[1]\n", "{\"text\": \"\\ud83d\"}\n", "x\n"];
    let lines = format!("\u{feff}{good}{}{good}", bad.concat());
    fs::write(dir.path().join("l.jsonl"), &lines).unwrap();
    let (inputs, out) = ([dir.path().join("l.jsonl")], dir.path().join("out"));
    let skipping = TokenizeOptions { skip_bad_lines: true, ..options(2) };
    let tokenizer = tokenizer(dir.path());
    let done = tokenize(&inputs, &tokenizer, &out, &skipping, |_| ()).unwrap();
    assert_eq!((done.documents, done.tokens, done.bad_lines), (2, 4, 5));
    taken(dir.path());
    // A byte order mark is of no line.
    fs::write(&inputs[0], format!("\u{feff}{good}")).unwrap();
    assert_eq!(run(dir.path(), &["l.jsonl"], 1).unwrap().tokens, 2);
    taken(dir.path());
    fs::write(dir.path().join("t.txt"), "\u{feff}he").unwrap();
    assert_eq!(run(dir.path(), &["t.txt"], 1).unwrap().tokens, 2);
    taken(dir.path());
    // Where none is left the first says why, and nothing is written.
    fs::write(&inputs[0], bad.concat()).unwrap();
    let error = tokenize(&inputs, &tokenizer, &out, &skipping, |_| ()).unwrap_err().to_string();
    assert!(error.contains("l.jsonl: line "), "{error}");
    assert!(!out.with_extension("bin").exists() && !out.with_extension("bin.partial").exists());
}

#[test]
fn non_text_files_of_a_folder_are_named_and_skipped() {
    let dir = tempfile::tempdir().unwrap();
    let texts = dir.path().join("texts");
    fs::create_dir(&texts).unwrap();
    for (name, content) in [
        ("a.jsonl", &b"{\"text\": \"he\"}"[..]),
        ("b.csv", b"he,he"),
        ("c.json", b"[]"),
        ("d.gz", b"\x1f\x8b"),
        ("e.txt", b"\x89PNG"),
        ("README.md", b"he"),
        ("f.txt", b"he"),
    ] {
        fs::write(texts.join(name), content).unwrap();
    }
    assert_eq!(run(dir.path(), &["texts"], 1).unwrap().documents, 2);
    let named = crate::left_out(std::slice::from_ref(&texts)).unwrap();
    let ends = [
        "b.csv: it is a table and is left out",
        "c.json: it is JSON and is left out",
        "d.gz: it is compressed by gzip and is left out",
        "e.txt: it is a PNG picture and is left out",
        "README.md: it is text about the data and is left out",
    ];
    assert!(ends.iter().all(|end| named.iter().any(|one| one.ends_with(end))), "{named:?}");
    assert_eq!(named.len(), ends.len());
    // Without lines beside it, it is a text as any other.
    fs::remove_file(texts.join("a.jsonl")).unwrap();
    taken(dir.path());
    assert_eq!(run(dir.path(), &["texts"], 1).unwrap().documents, 2);
    fs::remove_file(texts.join("f.txt")).unwrap();
    fs::remove_file(texts.join("README.md")).unwrap();
    let error = run(dir.path(), &["texts"], 1).unwrap_err().to_string();
    assert!(error.contains("b.csv is a table)"), "{error}");
}

/// As `zstd --long=31` writes it, and beyond.
#[test]
fn a_long_window_is_read_and_a_longer_one_named() {
    let dir = tempfile::tempdir().unwrap();
    let content = b"{\"text\": \"he\"}\n";
    let long = |window: u8| {
        let mut out = vec![0x28, 0xb5, 0x2f, 0xfd, 0x00, window];
        let header = (content.len() as u32) << 3 | 1;
        out.extend(&header.to_le_bytes()[..3]);
        out.extend(content);
        fs::write(dir.path().join("x.jsonl.zst"), out).unwrap();
    };
    long(21 << 3);
    assert_eq!(run(dir.path(), &["x.jsonl.zst"], 1).unwrap().tokens, 2);
    taken(dir.path());
    long(22 << 3);
    let error = run(dir.path(), &["x.jsonl.zst"], 1).unwrap_err().to_string();
    assert!(error.contains("a window of 4294967296 bytes"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        cases: 64,
        ..ProptestConfig::default()
    })]

    /// Text that is encoded and decoded is the same text.
    #[test]
    fn text_survives_the_way_there_and_back(text: String) {
        static DIR: std::sync::OnceLock<(tempfile::TempDir, TextTokenizer)> =
            std::sync::OnceLock::new();
        let (_, tokenizer) = DIR.get_or_init(|| {
            let dir = tempfile::tempdir().unwrap();
            let tokenizer = tokenizer(dir.path());
            (dir, tokenizer)
        });
        let ids = tokenizer.encode(&text).unwrap();
        prop_assert_eq!(tokenizer.decode(&ids).unwrap(), text);
    }
}
