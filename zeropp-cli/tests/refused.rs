//! What the system refuses while a run saves: a thread, memory, a file, a write, a flush, a name.
//! Whatever it is, and whenever: no panic, nothing that waits for ever, and no silence; and the run
//! goes on from what it has saved to the same bits.
//!
//! A small run counts its calls (`refused/shim.c`, preloaded). Then each is refused in a run of its
//! own: some of them here, and all with `ZEROPP_REFUSE_ALL=1`, as ci/full does.

#![cfg(target_os = "linux")]

mod common;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::command;

/// Saves after each of four steps, on two ranks with a helper each.
const RUN: &str = "run --pp 2 --layers 2 --hidden 16 --heads 2 --seq 8 --steps 4 --threads 2 \
                   --save ckpt --save-every 1 --keep 9 --metrics steps.jsonl --timeout-s 8 \
                   --save-timeout-s 8 --resume";
/// How long such a run may take where ranks wait for each other as long as they may.
const LIMIT: Duration = Duration::from_secs(90);
/// How many calls of each kind are refused here.
const SAMPLES: usize = 7;

/// The library that refuses, built from its source; none where there is no compiler.
fn shim(dir: &Path) -> Option<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/refused/shim.c");
    let library = dir.join("shim.so");
    let mut compiler = Command::new("gcc");
    compiler.args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"]);
    let built = compiler.arg(&library).arg(&source).arg("-ldl").status();
    match built {
        Ok(status) => assert!(status.success(), "the shim is built"),
        Err(_) => return None,
    }
    Some(library)
}

/// How a run ended: its exit code, and what it said to standard error.
struct Ended {
    code: Option<i32>,
    err: String,
}

/// Runs in `dir`, with one more variable if there is one. A run that takes too long is killed, and
/// has no code.
fn run(dir: &Path, shim: &Path, variable: Option<(&str, &str)>) -> Ended {
    let said = dir.join("said");
    let mut process = command(dir, RUN);
    process.stdout(Stdio::null()).stderr(File::create(&said).unwrap());
    if let Some((name, value)) = variable {
        process.env("LD_PRELOAD", shim).env(name, value);
    }
    let mut child = process.spawn().unwrap();
    let begin = Instant::now();
    let code = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status.code(),
            None if begin.elapsed() > LIMIT => {
                child.kill().unwrap();
                break None;
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let _ = child.wait();
    Ended { code, err: fs::read_to_string(said).unwrap() }
}

/// The files of the last checkpoint, by name.
fn last(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let folder = dir.join("ckpt/step-000004");
    let files = fs::read_dir(&folder).into_iter().flatten().map(|entry| entry.unwrap().path());
    let files = files.filter(|path| path.extension().is_some_and(|end| end == "safetensors"));
    let name = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
    files.map(|path| (name(&path), fs::read(&path).unwrap())).collect()
}

/// One run in which `call` is refused, and the one that goes on from it; what is wrong with them.
fn refused(shim: &Path, call: &str, whole: &BTreeMap<String, Vec<u8>>) -> Result<(), String> {
    let dir = tempfile::tempdir().unwrap();
    let Ended { code, err } = run(dir.path(), shim, Some(("ZEROPP_REFUSE", call)));
    let wrong = |what: &str| Err(format!("{call}: {what} (code {code:?})\n{err}"));
    let Some(code) = code else { return wrong("it does not end") };
    if err.contains("panicked") || code == 101 {
        return wrong("it panics");
    }
    match code {
        0 if last(dir.path()) != *whole => return wrong("it ends well without its checkpoint"),
        0 => {}
        1 | 2 if err.matches("error: ").count() == 1 => {}
        _ => return wrong("it does not say in one message why"),
    }
    let again = run(dir.path(), shim, None);
    if again.code != Some(0) || last(dir.path()) != *whole {
        let Ended { code, err } = again;
        return wrong(&format!("the run that goes on ends with {code:?} or other bits: {err}"));
    }
    Ok(())
}

#[test]
fn whatever_the_system_refuses_a_run_says_so_and_goes_on_from_it_to_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let Some(shim) = shim(dir.path()) else {
        eprintln!("skipped: there is no gcc");
        return;
    };
    let counts = dir.path().join("counts");
    let variable = Some(("ZEROPP_COUNTS", counts.to_str().unwrap()));
    let Ended { code, err } = run(dir.path(), &shim, variable);
    assert_eq!(code, Some(0), "{err}");
    let whole = last(dir.path());
    assert_eq!(whole.len(), 2, "a file of each rank");

    let all = std::env::var_os("ZEROPP_REFUSE_ALL").is_some();
    let mut calls = Vec::new();
    for line in fs::read_to_string(counts).unwrap().lines() {
        let (kind, count) = line.split_once(' ').unwrap();
        let count: usize = count.parse().unwrap();
        assert!(count > 0, "{kind}: the shim does not see it");
        let samples = if all { count } else { SAMPLES.min(count) };
        calls.extend((0..samples).map(|i| format!("{kind}:{}", 1 + i * count / samples)));
        if kind == "thread" {
            // Where no thread is to be had any more, asking again does not help.
            calls.extend(
                (1..=count).step_by(if all { 1 } else { 4 }).map(|n| format!("{kind}:{n}+")),
            );
        }
    }
    let wrong = calls.iter().filter_map(|call| refused(&shim, call, &whole).err());
    let wrong: Vec<String> = wrong.collect();
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), calls.len(), wrong.join("\n\n"));
}
