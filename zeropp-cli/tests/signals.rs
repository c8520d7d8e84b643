//! A real run that gets signals: it stops well, loses nothing, and goes on to the same bits.
#![cfg(unix)]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::command;

const SMALL: &str =
    "run --pp 2 --zero3 2 --layers 4 --hidden 16 --heads 2 --seq 8 --decay constant --warmup 2";

/// Starts `zeropp`, which no signal may find deaf: tests that run in the background may have been
/// told to ignore some.
fn start(dir: &Path, line: &str) -> Child {
    let plain = command(dir, line);
    let mut run = Command::new("env");
    run.arg("--default-signal").arg(plain.get_program()).args(plain.get_args());
    run.current_dir(dir).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Lines of steps.
fn lines(path: &Path) -> usize {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().filter(|line| line.starts_with("{\"step\"")).count()
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn kill(child: &Child, signal: &str) {
    let kill = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
}

fn end(child: Child) -> (Option<i32>, String, String, Option<i32>) {
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code(), text(stdout), text(stderr), status.signal())
}

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

fn checkpoints(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir.join("ckpt")).into_iter().flatten();
    let names = entries.map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.filter(|name| name.starts_with("step-")).collect();
    names.sort();
    names
}

#[test]
fn a_run_that_is_stopped_again_and_again_has_the_bits_of_one_that_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    // One command for the whole job, however often it is started.
    let line = format!("{SMALL} --steps 100000 --metrics m.jsonl --save ckpt --resume");
    let mut last = 0;
    for (signal, code) in [("-TERM", 143), ("-INT", 130), ("-HUP", 129), ("-TERM", 143)] {
        let child = start(at, &line);
        wait_until("no step", || lines(&at.join("m.jsonl")) > last + 3);
        kill(&child, signal);
        let (got, out, err, _) = end(child);
        assert_eq!(got, Some(code), "{signal}: {out}{err}");
        assert!(err.starts_with("SIG") && err.contains("saving and stopping after this step"));
        let stopped = out.lines().last().unwrap();
        assert!(stopped.starts_with("stopped after step "), "{out}");
        assert!(stopped.contains(&format!("to go on: zeropp {line}")), "{out}");
        last = lines(&at.join("m.jsonl"));
        assert_eq!(checkpoints(at).last(), Some(&format!("step-{last:06}")), "{out}");
        assert!(!at.join("zeropp-failed").exists(), "a wish is no failure");
    }
    let whole = start(at, &format!("{SMALL} --steps {last} --metrics whole.jsonl"));
    let (code, _, err, _) = end(whole);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    assert_eq!(bits(&at.join("m.jsonl")), bits(&at.join("whole.jsonl")));
}

#[test]
fn usr1_saves_and_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let child = start(at, &format!("{SMALL} --steps 100000 --metrics m.jsonl --save ckpt -q"));
    wait_until("no step", || lines(&at.join("m.jsonl")) > 2);
    kill(&child, "-USR1");
    wait_until("not saved", || !checkpoints(at).is_empty());
    let saved = lines(&at.join("m.jsonl"));
    wait_until("it does not go on", || lines(&at.join("m.jsonl")) > saved + 2);
    kill(&child, "-INT");
    let (code, out, err, _) = end(child);
    assert_eq!(code, Some(130));
    assert!(err.starts_with("SIGUSR1: saving after this step\n"), "{err}");
    assert!(!out.contains("step 2/"), "quiet: {out}");
    assert_eq!(checkpoints(at).len(), 2);
}

#[test]
fn a_second_signal_ends_it_at_once_and_without_a_folder_nothing_is_claimed() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    // A step of many seconds.
    let long =
        "run --layers 8 --hidden 512 --heads 8 --seq 512 --micro-batches 64 --steps 9 --pp 2";
    let child = start(at, long);
    let mut looked = 0;
    wait_until("not begun", || {
        looked += 1;
        looked > 1000
    });
    kill(&child, "-TERM");
    std::thread::sleep(Duration::from_millis(800));
    let begin = Instant::now();
    kill(&child, "-TERM");
    let (_, _, err, signal) = end(child);
    assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
    assert_eq!(signal, Some(15), "{err}");
    assert!(!at.join("zeropp-failed").exists(), "a wish is no failure: {err}");

    let child = start(at, &format!("{SMALL} --steps 100000 --metrics m.jsonl"));
    wait_until("no step", || lines(&at.join("m.jsonl")) > 2);
    kill(&child, "-INT");
    let (code, out, err, _) = end(child);
    assert_eq!(
        (code, err.contains("SIGINT: stopping after this step")),
        (Some(130), true),
        "{err}"
    );
    assert!(out.contains("nothing is saved (save names a folder)"), "{out}");
}

#[test]
fn a_run_that_is_stopped_late_is_recorded_only_until_it_has_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    // A step takes longer than a launcher that kills might wait.
    let line = "run --layers 8 --hidden 256 --heads 8 --seq 256 --micro-batches 24 --pp 2 \
                --steps 99 --metrics m.jsonl";
    let mut child = start(at, line);
    wait_until("no step", || lines(&at.join("m.jsonl")) > 0);
    kill(&child, "-TERM");
    // A wish that comes before the ranks agree on how step 1 ended stops the run with that step.
    wait_until("no record", || {
        let reported = at.join("zeropp-failed").exists() || lines(&at.join("m.jsonl")) > 1;
        reported || child.try_wait().unwrap().is_some()
    });
    let (code, _, err, _) = end(child);
    assert_eq!(code, Some(143), "{err}");
    assert!(!at.join("zeropp-failed").exists(), "withdrawn");
}

/// Starts `zeropp` where no file may grow beyond 32 KiB, as on a disk that is full.
#[cfg(target_os = "linux")]
fn start_in_little_room(dir: &Path, line: &str) -> Child {
    let plain = command(dir, line);
    let mut run = Command::new("env");
    // A soft limit, which another process may raise; in bytes, in place of blocks of any shell.
    run.args(["--default-signal", "prlimit", "--fsize=32768:"]);
    run.arg(plain.get_program()).args(plain.get_args());
    run.current_dir(dir).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

/// The line of standard error in which `part` is, and those before it; a run that does not say so
/// comes to its end.
#[cfg(target_os = "linux")]
fn read_until(err: &mut impl std::io::BufRead, part: &str) -> String {
    let mut text = String::new();
    while !text.contains(part) {
        let bytes = err.read_line(&mut text).unwrap();
        assert!(bytes > 0, "{part:?} is not in:\n{text}");
    }
    text
}

#[test]
#[cfg(target_os = "linux")]
fn metrics_that_a_full_disk_held_up_are_all_written_once_there_is_room() {
    for name in ["m.jsonl", "m.csv"] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        let line = format!("{SMALL} --steps 50000 --metrics {name} -q");
        let mut child = start_in_little_room(dir.path(), &line);
        let mut err = std::io::BufReader::new(child.stderr.take().unwrap());
        read_until(&mut err, &format!("warning: metrics = {name}: cannot be written (File too"));
        // While a step is tried again a part of it may be there.
        let text = || fs::read_to_string(&path).unwrap();
        wait_until("no whole line", || text().ends_with('\n') && text().len() > 16384);
        let mut more = Command::new("prlimit");
        more.args(["--fsize=unlimited:", "--pid"]);
        assert!(more.arg(child.id().to_string()).status().unwrap().success());
        read_until(&mut err, &format!("metrics = {name}: is written again"));
        kill(&child, "-INT");
        let reported = std::io::read_to_string(err).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(130), "{reported}");
        assert!(!reported.contains("incomplete"), "{reported}");
        let text = text();
        let number = |line: &str| match name {
            "m.csv" => line.split(',').next().unwrap().parse::<u64>().unwrap(),
            _ => serde_json::from_str::<serde_json::Value>(line).unwrap()["step"].as_u64().unwrap(),
        };
        let steps: Vec<u64> = text.lines().skip(1).map(number).collect();
        assert!(steps.iter().copied().eq(1..=steps.len() as u64), "{steps:?}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_run_that_is_stopped_while_its_disk_is_full_says_so_with_the_code_of_the_signal() {
    let dir = tempfile::tempdir().unwrap();
    let line = format!("{SMALL} --steps 50000 --metrics m.jsonl -q");
    let mut child = start_in_little_room(dir.path(), &line);
    let mut err = std::io::BufReader::new(child.stderr.take().unwrap());
    read_until(&mut err, "cannot be written (File too");
    kill(&child, "-TERM");
    let reported = std::io::read_to_string(err).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(143), "{reported}");
    let is_so = |line: &str| {
        line.starts_with("error: the run was stopped after step ")
            && line.contains(", but the metrics file m.jsonl is incomplete: File too large")
    };
    assert!(reported.lines().any(is_so) && !reported.contains("finished"), "{reported}");
    let text = fs::read_to_string(dir.path().join("m.jsonl")).unwrap();
    assert!(text.ends_with('\n'), "{text}");
}
