//! A run ended by SIGQUIT, and what `zeropp why` makes of its records.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{command, zeropp};

const RUN: &str = "run --pp 2 --zero3 2 --layers 4 --hidden 16 --heads 2 --seq 8 --steps 1000000 \
                   --metrics m.jsonl";

/// Starts a run in `dir` and waits for its first step.
fn begun(dir: &Path, mut run: Command) -> Child {
    run.stdout(Stdio::null()).stderr(Stdio::piped());
    let child = run.spawn().unwrap();
    let text = || std::fs::read_to_string(dir.join("m.jsonl")).unwrap_or_default();
    let start = Instant::now();
    while !text().contains("\n{\"step\"") && start.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(10));
    }
    child
}

fn kill(child: &Child, signal: &str) {
    let kill = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
}

/// Starts a run in `dir`, ends it with `signal` after its first step; returns what it wrote to
/// standard error and its exit code.
fn ended_with(dir: &Path, signal: &str) -> (String, Option<i32>) {
    line_ended_with(dir, RUN, signal)
}

fn line_ended_with(dir: &Path, line: &str, signal: &str) -> (String, Option<i32>) {
    // A test that is started in the background may have been set to ignore signals.
    let mut run = Command::new("env");
    let plain = command(dir, line);
    run.arg("--default-signal").arg(plain.get_program()).args(plain.get_args()).current_dir(dir);
    let child = begun(dir, run);
    kill(&child, signal);
    let output = child.wait_with_output().unwrap();
    (String::from_utf8(output.stderr).unwrap(), output.status.code())
}

fn records(dir: &Path) -> Vec<PathBuf> {
    let folder = std::fs::read_dir(dir.join("zeropp-failed")).unwrap();
    let mut files: Vec<_> = folder.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn sigquit_leaves_a_record_of_every_rank() {
    let dir = tempfile::tempdir().unwrap();
    let (err, code) = ended_with(dir.path(), "-QUIT");
    assert_eq!(code, Some(131));
    assert_eq!(err, "SIGQUIT: what every rank did last: zeropp why zeropp-failed\n");
    assert_eq!(records(dir.path()).len(), 4);

    let got = zeropp(dir.path(), "why zeropp-failed --last 3");
    assert_eq!((got.code, got.err.as_str()), (Some(0), ""));
    for part in ["4 of 4 ranks left a record", "ended from outside, with SIGQUIT", "0,1,0"] {
        assert!(got.out.contains(part), "{part} is not in:\n{}", got.out);
    }
    assert_eq!(got.out.lines().filter(|line| line.starts_with("   -")).count(), 3, "{}", got.out);

    let got = zeropp(dir.path(), "why zeropp-failed --json");
    let json: serde_json::Value = serde_json::from_str(&got.out).unwrap();
    assert_eq!(json["verdict"]["cause"], "stopped");
    assert_eq!(json["ends"][2]["end"]["kind"]["signal"], 3);
    assert_eq!(
        (json["missing"].to_string(), json["damaged"].to_string()),
        ("[]".into(), "[]".into())
    );
}

#[test]
fn signals_ignored_by_the_parent_stay_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let mut run = Command::new("nohup");
    run.arg(env!("CARGO_BIN_EXE_zeropp")).args(RUN.split_whitespace()).current_dir(dir.path());
    let mut child = begun(dir.path(), run);
    kill(&child, "-HUP");
    std::thread::sleep(Duration::from_millis(300));
    assert!(child.try_wait().unwrap().is_none(), "a hang-up ended it in spite of nohup");
    kill(&child, "-TERM");
    assert_eq!(child.wait().unwrap().code(), Some(143));
}

#[test]
fn missing_and_damaged_records_are_reported_and_judged() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(ended_with(dir.path(), "-QUIT").1, Some(131));
    let files = records(dir.path());
    let whole = std::fs::read(&files[0]).unwrap();
    // Within a line: a file that ends with one is only short.
    let half = whole.len() / 2;
    let end = half + whole[half..].iter().position(|byte| *byte == b'\n').unwrap();
    std::fs::write(&files[0], &whole[..end - 1]).unwrap();
    std::fs::write(&files[1], "not a record").unwrap();
    std::fs::remove_file(&files[2]).unwrap();
    let got = zeropp(dir.path(), "why zeropp-failed");
    assert_eq!(got.code, Some(0), "{}", got.err);
    for part in [
        "2 of 4 ranks left a record",
        "rank0000.jsonl: line ",
        "rank0001.jsonl: line 1 cannot be read",
        "no record",
        // The process left records, so it is not one that was killed.
        "ended from outside, with SIGQUIT",
    ] {
        assert!(got.out.contains(part), "{part} is not in:\n{}", got.out);
    }
    for file in [&files[0], &files[3]] {
        std::fs::write(file, "").unwrap();
    }
    let got = zeropp(dir.path(), "why zeropp-failed");
    assert_eq!((got.code, got.err.as_str()), (Some(1), "error: no record can be read\n"));
}

#[test]
fn folders_without_records_are_bad_input() {
    let dir = tempfile::tempdir().unwrap();
    let cases = [
        ("why", "required"),
        ("why none", "none: cannot be read"),
        ("why .", "no records of a failed run"),
        ("run --flight-dir Cargo.toml", "flight-dir = Cargo.toml: is a file; name a folder"),
    ];
    std::fs::write(dir.path().join("Cargo.toml"), "").unwrap();
    for (line, text) in cases {
        let got = zeropp(dir.path(), line);
        assert_eq!((got.code, got.out.as_str()), (Some(2), ""), "{line}");
        assert!(got.err.contains(text), "{text} is not in: {}", got.err);
    }
    assert_eq!(ended_with(dir.path(), "-QUIT").1, Some(131));
    let got = zeropp(dir.path(), "why zeropp-failed --run 7");
    assert_eq!(got.code, Some(2));
    assert!(got.err.contains("run = 7: not in zeropp-failed, which has "), "{}", got.err);
}

#[test]
fn a_lone_process_that_was_killed_is_explained_by_its_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let line = format!("{RUN} --save ckpt --save-every 5");
    let mut child = begun(at, command(at, &line));
    // Any step: the first ones are soon gone.
    let is_step = |entry: std::fs::DirEntry| {
        entry.file_name().to_str().is_some_and(|name| name.starts_with("step-"))
    };
    let entries = || std::fs::read_dir(at.join("ckpt")).into_iter().flatten().flatten();
    let begin = Instant::now();
    while !entries().any(is_step) {
        assert!(begin.elapsed() < Duration::from_secs(60), "it saves nothing");
        std::thread::sleep(Duration::from_millis(5));
    }
    let got = zeropp(at, "why ckpt");
    assert!(got.out.contains("a run is saving here and has not ended"), "{}", got.out);
    child.kill().unwrap();
    child.wait().unwrap();
    let got = zeropp(at, "why zeropp-failed");
    assert_eq!(got.code, Some(2));
    for part in
        ["SIGKILL", "memory ran out", "name its folder of checkpoints or its file of metrics"]
    {
        assert!(got.err.contains(part), "{part} is not in: {}", got.err);
    }
    std::fs::create_dir(at.join("ckpt/.step-099999.tmp")).unwrap();
    let got = zeropp(at, "why zeropp-failed ckpt");
    assert_eq!((got.code, got.err.as_str()), (Some(0), ""));
    for part in [
        "of 1000000 is saved, ",
        ".step-099999.tmp: it ended while it was saving",
        "SIGKILL",
        "--resume",
    ] {
        assert!(got.out.contains(part), "{part} is not in:\n{}", got.out);
    }
}

#[test]
fn a_lone_process_that_was_killed_is_explained_by_its_metrics() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let mut child = begun(at, command(at, RUN));
    child.kill().unwrap();
    child.wait().unwrap();
    let metrics = at.join("m.jsonl");
    let whole = std::fs::read_to_string(&metrics).unwrap();
    let mut lines = whole.lines().filter(|line| line.ends_with('}'));
    let last: serde_json::Value = serde_json::from_str(lines.next_back().unwrap()).unwrap();
    // The kill came in the middle of a line.
    std::fs::write(&metrics, format!("{whole}\n{{\"step\": 99999")).unwrap();
    let got = zeropp(at, "why zeropp-failed m.jsonl");
    assert_eq!((got.code, got.err.as_str()), (Some(0), ""));
    for part in [
        "no rank left a record",
        &format!("step {} is the last in m.jsonl, with a loss of {}", last["step"], last["loss"]),
        " ago",
        "SIGKILL",
        "most often memory ran out",
        "nothing was saved to go on from",
    ] {
        assert!(got.out.contains(part), "{part} is not in:\n{}", got.out);
    }
}

/// SIGTERM leaves neither records nor a reason to look for them.
#[test]
fn a_run_that_was_stopped_and_has_saved_was_not_killed() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let plain = command(at, &format!("{RUN} --save ckpt"));
    let mut run = Command::new("env");
    run.arg("--default-signal").arg(plain.get_program()).args(plain.get_args()).current_dir(at);
    let child = begun(at, run);
    kill(&child, "-TERM");
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(143));
    let got = zeropp(at, "why ckpt m.jsonl");
    assert_eq!((got.code, got.err.as_str()), (Some(0), ""));
    for part in ["it was stopped there, as with SIGTERM, or ended there", "--resume"] {
        assert!(got.out.contains(part), "{part} is not in:\n{}", got.out);
    }
    assert!(!got.out.contains("memory ran out"), "{}", got.out);
    // Its metrics alone show what was done, and not what was saved.
    let got = zeropp(at, "why ckpt");
    assert_eq!(got.code, Some(1), "{}", got.out);
    let expected = "error: whether it was stopped or killed cannot be told without its metrics";
    assert!(got.err.starts_with(expected) && !got.out.contains("SIGKILL"), "{}", got.err);
    // A step more than was saved, as a kill leaves behind.
    let text = std::fs::read_to_string(at.join("m.jsonl")).unwrap();
    std::fs::write(at.join("more.jsonl"), format!("{text}{{\"step\":999999,\"loss\":1}}\n"))
        .unwrap();
    let got = zeropp(at, "why ckpt more.jsonl");
    assert!(got.code == Some(0) && got.out.contains("SIGKILL"), "{}{}", got.out, got.err);
}

#[test]
fn metrics_of_either_form_are_read_and_tell_where_a_run_is_done() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let line = RUN.replace("--steps 1000000", "--steps 3");
    for (name, ends) in [("m.jsonl", true), ("m.csv", false)] {
        let got = zeropp(at, &line.replace("m.jsonl", name));
        assert_eq!(got.code, Some(0), "{}", got.err);
        let got = zeropp(at, &format!("why {name}"));
        assert_eq!((got.code, got.err.as_str()), (Some(0), ""));
        let last = format!("step 3 is the last in {name}, with a loss of 5.");
        assert!(got.out.contains(&last), "{}", got.out);
        assert_eq!(got.out.contains("the run is done"), ends, "{}", got.out);
        assert_eq!(got.out.contains("SIGKILL"), !ends, "{}", got.out);
    }
    // The kill came in the middle of a row.
    let rows = std::fs::read_to_string(at.join("m.csv")).unwrap();
    std::fs::write(at.join("m.csv"), &rows[..rows.len() - 2]).unwrap();
    let got = zeropp(at, "why m.csv");
    assert!(got.out.contains("step 2 is the last in m.csv"), "{}", got.out);
}

/// Where all tokens are one, all go to the same experts: two of eight have four times the mean.
#[test]
fn a_run_of_unbalanced_experts_is_explained_by_its_records_and_by_its_metrics() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    std::fs::write(at.join("same.txt"), "a".repeat(5000)).unwrap();
    let line = format!(
        "{RUN} --model qwen3-moe --experts 8:per-token=2 --data same.txt \
                        --balance none"
    );
    assert_eq!(line_ended_with(at, &line, "-QUIT").1, Some(131));
    let unbalanced = "experts are unbalanced: the fullest expert had 4.00 times the mean of its \
                      layer (model.layers.0), 24 experts without a token";
    let got = zeropp(at, "why zeropp-failed");
    assert_eq!((got.code, got.err.as_str()), (Some(0), ""));
    assert!(got.out.contains(&format!(": {unbalanced}")), "{}", got.out);
    assert!(got.out.contains("ended from outside, with SIGQUIT"), "{}", got.out);
    let got = zeropp(at, "why zeropp-failed --json");
    let json: serde_json::Value = serde_json::from_str(&got.out).unwrap();
    assert_eq!(json["experts"]["fullest"].as_f64(), Some(4.0), "{json}");
    assert!(json["experts"]["slower"].as_f64().is_some_and(|slower| slower > 0.0), "{json}");
    for name in ["m.jsonl", "m.csv"] {
        let line = line.replace("1000000", "3").replace("m.jsonl", name);
        assert_eq!(zeropp(at, &line).code, Some(0));
        let got = zeropp(at, &format!("why {name}"));
        assert_eq!(got.code, Some(0), "{}", got.err);
        assert!(got.out.contains(&format!("  - {unbalanced}")), "{}", got.out);
    }
}

#[test]
fn an_unknown_token_id_ends_the_run_without_a_panic() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let ids = (0..5000u32).flat_map(|i| (if i == 40 { 300 } else { i % 200 }).to_le_bytes());
    std::fs::write(at.join("ids.bin"), ids.collect::<Vec<u8>>()).unwrap();
    let line = RUN.replace(" --metrics m.jsonl", " --data ids.bin --tokenizer u32 --vocab 200");
    let got = zeropp(at, &format!("{line} --order sequential"));
    assert_eq!(got.code, Some(2), "bad input, though found in the run: {}", got.err);
    let place = "data = ids.bin: token id 300 at byte 160 is not below vocab = 200";
    assert!(got.err.contains(place) && !got.err.contains("panicked"), "{}", got.err);
    let got = zeropp(at, "why zeropp-failed");
    assert_eq!(got.code, Some(0), "{}", got.err);
    assert!(
        got.out.contains(place) && got.out.contains("4 of 4 ranks left a record"),
        "{}",
        got.out
    );
}
