//! A run that needs more memory than there is: refused with the way out, or ended with one message
//! and the records of its ranks.

#![cfg(target_os = "linux")]

mod common;

use std::path::Path;
use std::process::Command;

use common::{Outcome, command, zeropp};

/// Half a GiB of attention's scores a block and micro-batch, which take little time to fill.
const GREEDY: &str = "run --pp 2 --layers 8 --hidden 64 --heads 32 --seq 508 --micro-batch-size 16 \
                      --steps 1 --recompute none";
/// Address space of the process, in KiB: enough to start, whatever the machine's number of cores.
const LIMIT_KIB: u64 = 4_000_000;

/// Runs `zeropp` where it cannot have more than [`LIMIT_KIB`] of address space.
fn limited(dir: &Path, line: &str) -> Outcome {
    limited_to(LIMIT_KIB, dir, line)
}

fn limited_to(kib: u64, dir: &Path, line: &str) -> Outcome {
    let plain = command(dir, line);
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(format!("ulimit -v {kib} && exec \"$@\"")).arg("sh");
    shell.arg(plain.get_program()).args(plain.get_args()).current_dir(dir);
    // Address space that allocators set aside is no memory.
    shell.env("MALLOC_ARENA_MAX", "1").env("MIMALLOC_ARENA_RESERVE", "16MiB");
    let output = shell.env("RUST_BACKTRACE", "1").output().unwrap();
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    Outcome { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

/// Before, this was an abort with forty frames and no record.
#[test]
fn an_allocation_that_fails_ends_with_one_message_and_records() {
    let dir = tempfile::tempdir().unwrap();
    let got = limited(dir.path(), &format!("{GREEDY} --rank-memory unchecked"));
    assert_eq!(got.code, Some(1), "{}", got.err);
    let lines: Vec<&str> = got.err.lines().collect();
    assert_eq!(lines.len(), 2, "{}", got.err);
    assert!(lines[0].starts_with("error: out of memory: an allocation of "), "{}", got.err);
    assert!(lines[0].contains("zeropp run --dry-run says what a rank needs"), "{}", got.err);
    assert_eq!(lines[1], "what every rank did last: zeropp why zeropp-failed");
    let why = zeropp(dir.path(), "why zeropp-failed");
    assert!(why.out.contains("2 of 2 ranks left a record"), "{}", why.out);
    assert!(why.out.contains("out of memory: an allocation of "), "{}", why.out);
}

/// Stacks are hardly touched, and all of them count there: before, a thread was refused.
#[test]
fn stacks_count_in_a_limit_on_address_space() {
    let dir = tempfile::tempdir().unwrap();
    let line = "run --dp 120 --layers 1 --hidden 16 --heads 2 --seq 8 --steps 1";
    let got = limited(dir.path(), line);
    assert_eq!(got.code, Some(2), "{}", got.err);
    assert!(got.err.starts_with("error: memory: the 120 ranks on this machine"), "{}", got.err);
    assert!(got.err.contains("the limit of ulimit -v is "), "{}", got.err);
}

#[test]
fn a_limit_that_a_run_would_pass_is_seen_before_it_starts() {
    let dir = tempfile::tempdir().unwrap();
    let got = limited(dir.path(), GREEDY);
    assert_eq!(got.code, Some(2), "{}", got.err);
    assert!(got.err.starts_with("error: memory: the 2 ranks on this machine would need "));
    for part in [
        "the limit of ulimit -v is ",
        "The largest kind is activation: ",
        "--recompute ",
        "--rank-memory unchecked starts the run anyway.",
    ] {
        assert!(got.err.contains(part), "{part} in:\n{}", got.err);
    }
    assert_eq!(got.out, "");
    // The plan is for any machine: it says what would be, and is no failure.
    let plan = limited(dir.path(), &format!("{GREEDY} --dry-run"));
    assert_eq!(plan.code, Some(0), "{}", plan.err);
    assert!(plan.out.contains("(the limit of ulimit -v): a run would be refused"), "{}", plan.out);
}

/// 50 million parameters, which with AdamW take 770 MiB.
const LARGE: &str = "run --model llama --layers 16 --hidden 512 --heads 8 --seq 16 --virtual 16 \
                     --micro-batches 1 --unit 1 --steps 2 --threads 1";
/// A third of what that takes with the process, in KiB.
const THIRD_KIB: u64 = 289 << 10;

/// In memory it takes three times what there is; in a file of the rank it trains, to the same bits.
#[test]
fn a_model_larger_than_memory_trains_with_its_states_in_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let plan = zeropp(dir.path(), &format!("{LARGE} --dry-run"));
    let needed = plan.out.lines().find_map(|line| line.strip_prefix("memory")?.split_once(" MiB"));
    let needed: f64 = needed.expect("a line in MiB").0.trim().parse().unwrap();
    assert!(needed * 1024.0 >= 3.0 * THIRD_KIB as f64, "{}", plan.out);
    let got = limited_to(THIRD_KIB, dir.path(), LARGE);
    assert_eq!(got.code, Some(2), "{}", got.err);
    assert!(got.err.contains("--optimizer adamw:out=DIR"), "{}", got.err);
    let line = format!("{LARGE} --rank-memory unchecked");
    let got = limited_to(THIRD_KIB, dir.path(), &line);
    assert_eq!(got.code, Some(1), "{}", got.err);
    assert!(got.err.starts_with("error: out of memory: "), "{}", got.err);
    let line = format!("{LARGE} --metrics out.jsonl --optimizer adamw:out=states");
    let got = limited_to(THIRD_KIB, dir.path(), &line);
    assert_eq!(got.code, Some(0), "{}", got.err);
    assert!(got.out.contains("states out"), "{}", got.out);
    let whole = zeropp(dir.path(), &format!("{LARGE} --metrics whole.jsonl"));
    assert_eq!(whole.code, Some(0), "{}", whole.err);
    let losses = |file: &str| -> Vec<(f64, f64)> {
        let text = std::fs::read_to_string(dir.path().join(file)).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
        let of =
            |line: serde_json::Value| Some((line["loss"].as_f64()?, line["grad_norm"].as_f64()?));
        lines.filter_map(of).collect()
    };
    let of_file = losses("out.jsonl");
    assert_eq!(of_file.len(), 2);
    assert_eq!(of_file, losses("whole.jsonl"));
}

/// Four samples that 1F1B has on its first rank at once; in slices it has little more than one.
const LONG: &str = "run --model llama --layers 4 --hidden 128 --heads 2 --seq 4096 --pp 4 \
                    --virtual 1 --micro-batches 4 --steps 1 --warmup 0 --threads 1 \
                    --rank-memory unchecked --order sequential --metrics out.jsonl";

/// Between what slices of them take with the process and what whole ones do, in KiB.
const LONG_KIB: u64 = 440 << 10;

#[test]
fn long_samples_train_in_slices_where_whole_ones_end_out_of_memory() {
    let dir = tempfile::tempdir().unwrap();
    let loss = || {
        let text = std::fs::read_to_string(dir.path().join("out.jsonl")).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
        let mut of = lines.filter_map(|line: serde_json::Value| line["loss"].as_f64());
        of.next().expect("of the step")
    };
    let whole = format!("{LONG} --schedule 1f1b:slices=1 --recompute none");
    let got = limited_to(LONG_KIB, dir.path(), &whole);
    assert_eq!(got.code, Some(1), "{}", got.err);
    assert!(got.err.starts_with("error: out of memory: "), "{}", got.err);
    let rounds = "--schedule interleaved-zb:slices=8,slice-cut=tokens --recompute full";
    let got = limited_to(LONG_KIB, dir.path(), &format!("{LONG} {rounds}"));
    assert_eq!(got.code, Some(0), "{}", got.err);
    let in_slices = loss();
    assert_eq!(zeropp(dir.path(), &whole).code, Some(0));
    assert_eq!(in_slices, loss());
}
