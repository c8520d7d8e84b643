//! A supervised command is started again when it fails, and comes out as if it had not.
#![cfg(unix)]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::{command, zeropp};

const SMALL: &str = "run --pp 2 --zero3 2 --layers 2 --hidden 16 --heads 2 --seq 8 --unit 3 \
                     --decay constant --warmup 2 --virtual 1";

/// Loss and norm of every step of a metrics file, as written, which is to the bit.
fn bits(path: &Path) -> BTreeMap<u64, (String, String)> {
    let step = |line: &str| {
        let step: serde_json::Value = serde_json::from_str(line).unwrap();
        let figures = (step["loss"].to_string(), step["grad_norm"].to_string());
        (step["step"].as_u64().unwrap(), figures)
    };
    let text = fs::read_to_string(path).unwrap();
    text.lines().filter(|line| !line.starts_with("{\"run\"")).map(step).collect()
}

/// Runs a script as a supervised command; it finds `zeropp` in `$ZEROPP`.
fn supervised(at: &Path, flags: &str, script: &str) -> (Option<i32>, String) {
    fs::write(at.join("run.sh"), script).unwrap();
    let plain = command(at, "");
    let output = Command::new(plain.get_program())
        .args(format!("supervise {flags} -- sh run.sh --save ckpt --resume").split_whitespace())
        .env("ZEROPP", plain.get_program())
        .current_dir(at)
        .output()
        .unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn a_command_that_is_killed_again_and_again_has_the_bits_of_one_that_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let whole = zeropp(at, &format!("{SMALL} --steps 300 --metrics all.jsonl"));
    assert_eq!(whole.code, Some(0), "{}", whole.err);
    // Three times it is killed once it has saved something, and leaves a process behind.
    let script = format!(
        "echo start >> starts\n\
         line=\"$ZEROPP {SMALL} --steps 300 --metrics m.jsonl --save ckpt\"\n\
         line=\"$line --save-every 1 --resume\"\n\
         [ $(wc -l < starts) -gt 3 ] && exec $line\n\
         before=$(ls ckpt)\n\
         $line & pid=$!\n\
         sleep 1000 & echo $! >> left\n\
         while [ \"$(ls ckpt | grep '^step')\" = \"$(echo \"$before\" | grep '^step')\" ]; do\n\
             sleep 0.01\n\
         done\n\
         kill -9 $pid; wait $pid\n\
         exit 9\n"
    );
    let (code, told) = supervised(at, "", &script);
    assert_eq!(code, Some(0), "{told}");
    assert!(told.contains("(code 9); recovery 3 of 100: it is started again from step "), "{told}");
    assert_eq!(bits(&at.join("m.jsonl")), bits(&at.join("all.jsonl")));
    for pid in fs::read_to_string(at.join("left")).unwrap().lines() {
        let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        assert!(state.is_empty() || state.contains(") Z "), "what is left is ended: {state}");
    }
}

#[test]
fn what_fails_again_at_once_is_given_up_with_its_own_code() {
    let dir = tempfile::tempdir().unwrap();
    let (code, told) = supervised(dir.path(), "", "exit 7");
    assert_eq!(code, Some(7), "{told}");
    assert!(told.contains("failed 3 times before its first checkpoint"), "{told}");
    let (code, told) = supervised(dir.path(), "--max-recoveries 1", "kill -9 $$");
    assert_eq!(code, Some(137), "{told}");
    assert!(told.contains("(signal 9); recovery 1 of 1"), "{told}");
    let (code, told) = supervised(dir.path(), "", "exit 2");
    assert_eq!((code, told.as_str()), (Some(2), ""), "wrong input stays wrong");
}

#[test]
fn a_command_that_hangs_is_ended() {
    let dir = tempfile::tempdir().unwrap();
    let script = "echo start >> starts; [ $(wc -l < starts) -gt 1 ] && exit 0; sleep 1000";
    let (code, told) = supervised(dir.path(), "--hang-s 1", script);
    assert_eq!(code, Some(0), "{told}");
    assert!(told.contains("no progress for 1 s"), "{told}");
}

#[test]
fn a_command_that_would_begin_anew_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (line, part) in [("--resume", "no --save"), ("--save ckpt", "no --resume")] {
        let got = zeropp(dir.path(), &format!("supervise -- zeropp {SMALL} {line}"));
        assert_eq!(got.code, Some(2), "{}", got.err);
        assert!(got.err.contains(part), "{}", got.err);
    }
}

#[test]
fn signals_are_passed_on_and_what_is_stopped_stays_so() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let plain = command(at, "");
    let zeropp = plain.get_program().to_str().unwrap();
    let line = format!(
        "--default-signal {zeropp} supervise -- {zeropp} {SMALL} --steps 100000 --metrics m.jsonl \
         --save ckpt --resume"
    );
    let mut run = Command::new("env");
    run.args(line.split_whitespace()).current_dir(at).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = run.spawn().unwrap();
    let begin = Instant::now();
    let text = || fs::read_to_string(at.join("m.jsonl")).unwrap_or_default();
    while !text().contains("\n{\"step\"") {
        assert!(begin.elapsed() < Duration::from_secs(60), "no step");
        std::thread::sleep(Duration::from_millis(5));
    }
    let kill = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
    let Output { status, stderr, .. } = child.wait_with_output().unwrap();
    let told = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(143), "{told}");
    assert!(told.contains("saving and stopping") && !told.contains("started again"), "{told}");
    let last = bits(&at.join("m.jsonl")).len();
    assert!(at.join(format!("ckpt/step-{last:06}")).exists());
}
