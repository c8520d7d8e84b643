//! Tells the command which commit it is built from, where that is known.

use std::process::Command;

fn git(words: &[&str]) -> Option<String> {
    let output = Command::new("git").args(words).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

fn main() {
    println!("cargo:rerun-if-env-changed=ZEROPP_COMMIT");
    println!("cargo:rerun-if-changed=build.rs");
    let given = std::env::var("ZEROPP_COMMIT").ok();
    // A packaged crate has no repository of its own; another's commit would be wrong.
    let own = std::path::Path::new("../.git").exists();
    let commit = given.or_else(|| git(&["rev-parse", "--short=12", "HEAD"]).filter(|_| own));
    if let Some(log) = own.then(|| git(&["rev-parse", "--git-path", "logs/HEAD"])).flatten() {
        println!("cargo:rerun-if-changed={log}");
    }
    println!("cargo:rustc-env=ZEROPP_COMMIT={}", commit.unwrap_or_default());
    let target = std::env::var("TARGET").unwrap_or_default();
    println!("cargo:rustc-env=ZEROPP_TARGET={target}");
}
