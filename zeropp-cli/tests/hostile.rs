//! Files from others: what is in them does not command a terminal, and damaged ones end with exit
//! code 2 and a short message.

mod common;
#[path = "../../tests/common/mutate.rs"]
mod mutate;

use std::fs;
use std::path::Path;

use common::{Outcome, zeropp};
use mutate::{MESSAGE_MAX, Random, count, mutated};

/// A title for the terminal's window, a cleared screen, a turn of direction, a forged line: as JSON
/// and TOML write it.
const BAD: &str = "A\\u001b]0;pwned\\u0007B\\u001b[2JC\\u009b2JD\\u202eE\\nerror: forged";

fn is_control(c: char) -> bool {
    let turns = matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    turns || c.is_control() && !matches!(c, '\n' | '\t')
}

/// Runs a command, and looks for control characters in all that it says.
fn run(dir: &Path, line: &str) -> Outcome {
    let outcome = zeropp(dir, line);
    for said in [&outcome.out, &outcome.err] {
        let bad = said.chars().find(|c| is_control(*c));
        assert_eq!(bad, None, "{line}: {}", said.escape_debug());
    }
    outcome
}

/// The same of a command whose settings are its own: a name in a file begins no line, either.
fn run_without_forged_lines(dir: &Path, line: &str) -> Outcome {
    let outcome = run(dir, line);
    for said in [&outcome.out, &outcome.err] {
        assert!(!said.lines().any(|l| l.starts_with("error: forged")), "{line}: {said}");
    }
    outcome
}

fn made(dir: &Path, line: &str, file: &str) -> String {
    let outcome = zeropp(dir, &format!("{line} -o {file}"));
    assert_eq!(outcome.code, Some(0), "{line}: {}", outcome.err);
    fs::read_to_string(dir.join(file)).unwrap()
}

const MACHINE: &str = "source = 'SOURCE'\nflops_per_s = 312e12\nmemory_bytes = 80e9\n\
                       memory_bytes_per_s = 1.6e12\nper_node = 8\nzero3_bytes_per_s = 240e9\n";
const COSTS: &str =
    "{\"t_f\": 3, \"t_b\": 2, \"t_w\": 1, \"t_comm\": 1, \"measured\": \"MEASURED\"}";
const PLAN: &str = "plan --gpus 4 --global-batch 8 --layers 4 --hidden 64 --heads 4 --seq 32 \
                    --vocab 300 --cpu --machine m.toml";

#[test]
fn text_of_a_file_does_not_command_the_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let write = |name: &str, text: &str| fs::write(dir.join(name), text).unwrap();
    let schedule = made(dir, "schedule --kind 1f1b --pp 2 --lower", "plain.json");
    let trace = made(dir, "schedule --kind 1f1b --pp 2 --lower --format chrome", "trace.json");
    assert!(schedule.contains("\"1f1b\"") && trace.contains("1f1b"));
    write("s.json", &schedule.replace("\"1f1b\"", &format!("\"{BAD}\"")));
    write("t.json", &trace.replace("1f1b", BAD));
    write("c.json", &COSTS.replace("MEASURED", BAD));
    write("m.toml", &MACHINE.replace("'SOURCE'", &format!("\"{BAD}\"")));
    write("r.jsonl", &format!("{{\"run\": \"{BAD}\", \"name\": \"{BAD}\"}}\n{{\"{BAD}\"\n"));
    fs::create_dir(dir.join("model")).unwrap();
    write("model/config.json", &format!("{{\"model_type\": \"{BAD}\", \"{BAD}\": 1}}"));
    for (i, line) in ["schedule", "model", "run-name", "freeze", "data", "emulate", "prompt"]
        .map(|key| format!("{key} = \"{BAD}\""))
        .into_iter()
        .chain([format!("\"{BAD}\" = 1"), format!("split = [\"{BAD}\"]")])
        .enumerate()
    {
        write(&format!("{i}.toml"), &line);
        run(dir, &format!("run {i}.toml --dry-run"));
        run(dir, &format!("run {i}.toml --print-config"));
    }
    for line in [
        "schedule --kind 1f1b --pp 2 --costs c.json",
        "schedule --all --pp 2 --costs c.json",
        "schedule --kind 1f1b --pp 2 --costs c.json --format json",
        "schedule --kind 1f1b --pp 2 --costs c.json --format svg",
        "schedule --kind 1f1b --pp 2 --costs t.json",
        "run --pp 2 --costs c.json --dry-run",
        "run --pp 2 --virtual 1 --costs t.json --dry-run",
        "check s.json",
        "run --pp 2 --schedule s.json --dry-run",
        "compare t.json trace.json",
        "compare s.json plain.json",
        PLAN,
        "plot r.jsonl",
        "inspect model",
        "run --model ./model/ --dry-run",
    ] {
        run_without_forged_lines(dir, line);
    }
    run_without_forged_lines(dir, &format!("{PLAN} --against r.jsonl"));
    let said = run(dir, "schedule --kind 1f1b --pp 2 --costs c.json").err;
    assert!(said.contains("A\\u001b]0;pwned\\u0007B"), "it is spelled: {said}");
}

#[test]
fn damaged_files_end_with_exit_code_2_and_a_short_message() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let schedule = made(dir, "schedule --kind 1f1b --pp 2 --lower", "plain.json");
    let table = made(dir, "schedule --kind 1f1b --pp 2", "plain.csv");
    let settings =
        "pp = 2\nunit = 3\nlr = 3e-4\nsplit = [9, 1]\nlayers = 4\nseq = 32\ntied = true\n";
    let mut random = Random::for_kind("files of a command");
    for (file, input, line) in [
        ("c.json", COSTS, "schedule --kind zb-1p --pp 2 --costs c.json"),
        ("m.toml", MACHINE, PLAN),
        ("s.json", &schedule, "check s.json"),
        ("s.csv", &table, "check s.csv"),
        ("r.toml", settings, "run r.toml --print-config"),
    ] {
        for _ in 0..count(12) {
            let bytes = mutated(input.as_bytes(), &mut random);
            fs::write(dir.join(file), &bytes).unwrap();
            let outcome = run(dir, line);
            let shown = bytes.escape_ascii();
            assert!(matches!(outcome.code, Some(0 | 2)), "{line}: {outcome:?} on {shown}");
            assert!(outcome.err.len() <= MESSAGE_MAX, "{line}: {outcome:?} on {shown}");
        }
    }
}

#[test]
fn a_value_beyond_a_limit_is_refused_at_once_with_the_field_and_the_limit() {
    let dir = tempfile::tempdir().unwrap();
    for (line, said) in [
        ("generate m --prompt a --max-tokens 16777217", "max-tokens = 16777217: does not work; "),
        (
            "schedule --kind auto --pp 2 --micro-batches 4 --evaluations 99999999999999",
            "evaluations = 99999999999999: the search would take more than three hours; use at",
        ),
        (
            "schedule --kind 1f1b --pp 1024 --micro-batches 40000",
            "micro-batches = 40000: with pp = 1024 and virtual = 1 schedule 1f1b has more than",
        ),
        (
            "run --pp 1024 --layers 2048 --micro-batches 40000 --dry-run",
            "micro-batches = 40000: with pp = 1024 and virtual = 2 schedule zeropp has more than",
        ),
        ("run --bf16", "--bf16: zeropp has no flag of this name; use `--precision bf16`"),
        (
            "plan --gpus 4 --global-batch 1.5",
            "global-batch = 1.5: expected samples or tokens of a step over all ranks; use a number",
        ),
    ] {
        let outcome = run(dir.path(), line);
        assert_eq!(outcome.code, Some(2), "{line}: {outcome:?}");
        assert!(outcome.err.contains(&format!("error: {said}")), "{line}: {}", outcome.err);
    }
}

#[test]
fn a_batch_in_tokens_is_taken_by_a_plan_as_by_a_run() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("m.toml"), MACHINE).unwrap();
    // 4 GPUs, samples of 32 tokens: the nearest multiple of 4 samples to 1000 tokens is 32.
    let [tokens, samples] = ["1k tokens", "32"].map(|batch| {
        let line = PLAN.replace("--global-batch 8", "");
        let mut command = common::command(dir.path(), &line);
        let output = command.args(["--global-batch", batch]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{batch}: {output:?}");
        text
    });
    assert_eq!(tokens, samples);
}
