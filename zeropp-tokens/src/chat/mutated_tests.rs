//! Templates, conversations and tokenizers that were damaged: each is read or refused.

#[path = "../../../tests/common/mutate.rs"]
mod mutate;

use std::fs;

use mutate::read_or_refused;

use super::rules_tests::{FORGETS, PLAIN, THINKS};
use super::tests::{fixture, template};
use crate::TextTokenizer;

const CONVERSATION: &str = r#"{"messages": [{"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "<think>2</think>2", "weight": 0},
    {"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes"}]}"#;
const MARKS: &str = "{%- for m in messages -%}{{ m['role'] | upper ~ ': ' }}{% if m.role == \
                     'assistant' %}{% generation %}{{ m.content | trim }}{% endgeneration %}\
                     {% else %}{{ '%-12s' | format(m.content) }}{% endif %}{%- endfor -%}";

fn conversation(source: &[u8], line: &[u8]) -> Result<(), String> {
    let text = |bytes| String::from_utf8(bytes).map_err(|e| e.to_string());
    let (source, line) = (text(source.to_vec())?, text(line.to_vec())?);
    let line: minijinja::Value = serde_json::from_str(&line).map_err(|e| e.to_string())?;
    let dir = tempfile::tempdir().unwrap();
    let opened = template(dir.path(), &source).map_err(|e| e.to_string())?;
    let made = opened.conversation(&line)?;
    // What is an answer is a part of the text.
    made.answers.iter().for_each(|range| drop(made.text[range.clone()].to_owned()));
    Ok(())
}

#[test]
fn damaged_templates_are_read_or_refused() {
    let sources = [PLAIN, THINKS, FORGETS, MARKS].map(str::as_bytes);
    read_or_refused("template", &sources, 1000, |source| {
        conversation(source, CONVERSATION.as_bytes())
    });
}

#[test]
fn damaged_conversations_are_read_or_refused() {
    let lines = [CONVERSATION.as_bytes()];
    read_or_refused("conversation", &lines, 1000, |line| conversation(MARKS.as_bytes(), line));
}

#[test]
fn damaged_tokenizers_are_read_or_refused() {
    let file = fs::read(fixture("tokenizer.json")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    read_or_refused("tokenizer", &[&file], 200, |bytes| {
        fs::write(&path, bytes).unwrap();
        TextTokenizer::open(&path).map(drop).map_err(|e| e.to_string())
    });
}

#[test]
fn a_merge_that_is_longer_than_all_entries_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    let text =
        r#"{"model": {"type": "BPE", "vocab": {"aa": 0, "bb": 1}, "merges": [["aa", "bb"]]}}"#;
    fs::write(&path, text).unwrap();
    let error = TextTokenizer::open(&path).map(drop).unwrap_err().to_string();
    assert!(error.contains("tokenizers panicked while it read"), "{error}");
}
