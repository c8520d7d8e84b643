//! Whatever a machine, its users and its other programs do to a run: signals, limits, files that
//! are cut or replaced, pipes in their place, a supervisor that is killed. Each has a word and a
//! code.

#![cfg(target_os = "linux")]

mod common;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::{command, zeropp};

/// A run that goes on until it is stopped.
const LONG: &str = "run --pp 2 --layers 2 --hidden 16 --heads 2 --seq 8 --steps 1000000 \
                    --metrics m.jsonl";

/// Starts `zeropp` with signals as they are at first, behind the words of `before`.
fn start(dir: &Path, before: &str, line: &str) -> Child {
    let plain = command(dir, line);
    let mut run = Command::new("env");
    run.arg("--default-signal").args(before.split_whitespace());
    run.arg(plain.get_program()).args(plain.get_args());
    run.current_dir(dir).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn steps(dir: &Path) -> usize {
    fs::read_to_string(dir.join("m.jsonl")).unwrap_or_default().lines().count()
}

fn kill(signal: &str, process: u32) {
    let sent = Command::new("kill").args([signal, &process.to_string()]).status().unwrap();
    assert!(sent.success());
}

fn end(child: Child) -> (Option<i32>, String) {
    let Output { status, stderr, .. } = child.wait_with_output().unwrap();
    (status.code(), String::from_utf8(stderr).unwrap())
}

/// The checkpoints of a folder.
fn saved(dir: &Path, folder: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir.join(folder)).into_iter().flatten();
    let paths = entries.map(|entry| entry.unwrap().path());
    let mut paths: Vec<_> = paths
        .filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with("step-"))
        .collect();
    paths.sort();
    paths
}

fn fifo(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

#[test]
fn usr2_and_a_limit_on_cpu_time_save_and_stop() {
    for (signal, number) in [("USR2", 12), ("XCPU", 24)] {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path();
        let child = start(at, "", &format!("{LONG} --save ckpt"));
        wait_until("no step", || steps(at) > 2);
        kill(&format!("-{signal}"), child.id());
        let (code, err) = end(child);
        assert_eq!(code, Some(128 + number), "{err}");
        assert!(
            err.contains(&format!("SIG{signal}: saving and stopping after this step")),
            "{err}"
        );
        assert_eq!(saved(at, "ckpt").len(), 1);
    }
}

#[test]
fn a_file_beyond_the_largest_size_is_an_error_that_names_it() {
    let dir = tempfile::tempdir().unwrap();
    let line = "schedule --pp 4 --micro-batches 64 --kind zb-h1 --format html -o page.html";
    let (code, err) = end(start(dir.path(), "prlimit --fsize=4096", line));
    assert_eq!(code, Some(2), "{err}");
    assert!(err.contains("page.html: cannot be written (File too large"), "{err}");
}

#[test]
fn data_that_is_cut_while_it_is_read_ends_the_run_with_its_name_and_records() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    fs::write(at.join("text"), vec![b'x'; 4 << 20]).unwrap();
    let child = start(at, "", &format!("{LONG} --data text"));
    wait_until("no step", || steps(at) > 2);
    File::options().write(true).open(at.join("text")).unwrap().set_len(0).unwrap();
    let (code, err) = end(child);
    assert_eq!(code, Some(1), "{err}");
    assert_eq!(err.matches("error: ").count(), 1, "{err}");
    assert!(err.contains("a file that is being read was cut"), "{err}");
    assert!(err.contains("/text, which is shorter now"), "{err}");
    let why = zeropp(at, "why zeropp-failed");
    assert!(why.out.contains("2 of 2 ranks left a record"), "{}", why.out);
}

/// Before, it went on without supervision, and in the way of the next one.
#[test]
fn a_run_whose_supervisor_is_killed_saves_and_stops() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let run = command(at, "").get_program().to_str().unwrap().to_owned();
    let line = format!("supervise --memory= -- {run} {LONG} --save ckpt --resume");
    let mut child = start(at, "", &line);
    wait_until("no step", || steps(at) > 2);
    kill("-KILL", child.id());
    child.wait().unwrap();
    wait_until("it is not saved", || saved(at, "ckpt").len() == 1);
    let free = format!("{LONG} --save ckpt --resume --steps 1");
    wait_until("it does not end", || !zeropp(at, &free).err.contains("another run is saving"));
}

#[test]
fn a_run_whose_folder_was_replaced_ends_with_an_error_and_leaves_the_other_s_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let first = start(at, "", &format!("{LONG} --save ckpt --save-every 50 --keep 1"));
    wait_until("nothing is saved", || !saved(at, "ckpt").is_empty());
    fs::rename(at.join("ckpt"), at.join("moved")).unwrap();
    let other = "run --layers 2 --hidden 16 --heads 2 --seq 8 --steps 3 --save ckpt \
                 --save-every 1 --keep 9";
    let second = zeropp(at, other);
    assert_eq!(second.code, Some(0), "{}", second.err);
    let (code, err) = end(first);
    assert_eq!(code, Some(1), "{err}");
    assert!(err.contains("save = ckpt: the folder was removed or replaced"), "{err}");
    let last = saved(at, "ckpt").pop().unwrap();
    assert!(last.ends_with("step-000003"), "{}", last.display());
}

#[test]
fn where_all_checkpoints_are_damaged_none_is_advised() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let line = "run --layers 2 --hidden 16 --heads 2 --seq 8 --save ckpt --save-every 1 --keep 9";
    assert_eq!(zeropp(at, &format!("{line} --steps 3")).code, Some(0));
    let go_on = format!("{line} --steps 4 --resume");
    let all = saved(at, "ckpt");
    for (i, path) in all.iter().rev().enumerate() {
        let file = path.join("rank-00000.safetensors");
        let mut bytes = fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&file, bytes).unwrap();
        let got = zeropp(at, &go_on);
        assert_eq!(got.code, Some(2), "{}", got.err);
        let advice = match all.len() - i {
            1 => "there is no older checkpoint that is whole".into(),
            whole => format!("go on from step {}", whole - 1),
        };
        assert!(got.err.contains(&advice), "{advice} in: {}", got.err);
    }
}

#[test]
fn pipes_in_the_place_of_files_are_refused_by_name_and_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    fs::create_dir(at.join("ckpt")).unwrap();
    for name in ["ckpt/.lock", "trace.json", "log", "m.csv", "page.html"] {
        fifo(&at.join(name));
    }
    let small = "run --layers 2 --hidden 16 --heads 2 --seq 8 --steps 1";
    for (line, name) in [
        (&*format!("{small} --save ckpt"), ".lock"),
        (&format!("{small} --trace trace.json"), "trace.json"),
        (&format!("{small} --log-file log"), "log"),
        (&format!("{small} --metrics m.csv"), "m.csv"),
        ("schedule --pp 2 --format html -o page.html", "page.html"),
    ] {
        let begin = Instant::now();
        let got = zeropp(at, line);
        assert!(matches!(got.code, Some(1 | 2)), "{line}: {:?}", got.code);
        assert!(got.err.contains(name) && got.err.contains("a pipe (FIFO)"), "{line}: {}", got.err);
        assert!(begin.elapsed() < Duration::from_secs(20), "{line}");
    }
}
