//! `zeropp schedule`, `check` and `compare` as their users meet them: the papers' numbers, files
//! that read back, messages.

#[path = "../common/mod.rs"]
mod common;
mod compared;
mod numbers;
mod refused;
mod worked_numbers;
mod written;

use std::path::Path;

use common::zeropp;
use serde_json::Value;

/// Output of a command that works.
fn works(dir: &Path, line: &str) -> String {
    let got = zeropp(dir, line);
    assert_eq!((got.code, got.err.as_str()), (Some(0), ""), "{line}: {}", got.out);
    got.out
}

fn fails(dir: &Path, line: &str, message: &str) {
    let got = zeropp(dir, line);
    assert_eq!(got.code, Some(2), "{line}: {}{}", got.out, got.err);
    assert!(got.err.starts_with("error: "), "{line}: {}", got.err);
    assert!(got.err.contains(message), "{line}: {}", got.err);
    assert_eq!(got.err.matches("error: ").count(), 1, "{line}: {}", got.err);
    assert_eq!(got.out, "", "{line}");
}

/// The JSON of `zeropp schedule` with these flags; a note on standard error is allowed.
fn json(flags: &str) -> Value {
    let got = zeropp(Path::new("."), &format!("schedule --format json {flags}"));
    assert_eq!(got.code, Some(0), "{flags}: {}", got.err);
    assert!(got.err.is_empty() || got.err.starts_with("note: "), "{flags}: {}", got.err);
    serde_json::from_str(&got.out).expect("JSON")
}

fn numbers(list: &Value) -> Vec<f64> {
    list.as_array().expect("a list").iter().map(|n| n.as_f64().expect("a number")).collect()
}

fn rate(json: &Value) -> String {
    format!("{:.4}", json["bubble_rate"].as_f64().expect("a number"))
}
