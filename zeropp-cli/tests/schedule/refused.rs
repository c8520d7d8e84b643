//! Commands that end with a message: unsound schedules, files that would be lost, bad input.

use super::{fails, works, zeropp};

#[test]
fn a_bad_schedule_is_reported_with_row_column_and_action() {
    let dir = tempfile::tempdir().unwrap();
    let file = |text: &str| std::fs::write(dir.path().join("s.csv"), text).unwrap();
    for (text, message) in [
        ("0F0,0F0,0B0\n", "s.csv: row 1, column 2 (0F0 of rank 0): duplicate of row 1, column 1"),
        ("0F0,0B0\n1B0,1F0\n", "s.csv: row 2, column 1 (1B0 of rank 1): no 1F0 before it"),
        ("0F0,0I0\n1F0,1I0,1W0\n", "rank 0: 0W0 is missing"),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
            "deadlock: row 1, column 2 (0B0 of rank 0) waits for 1B0; row 2, column 2 (1F1",
        ),
        ("0F0,0B0x\n", "row 1, column 2"),
        ("0F0,0Q0\n", "unknown kind"),
        ("0F0,1B0\n", "rank 0: 0B0 is missing"),
        ("", "s.csv: row 1"),
        ("0F0,0F1,0B1,0B0\n", "must run in micro-batch order"),
    ] {
        file(text);
        let got = zeropp(dir.path(), "check s.csv");
        assert_eq!(got.code, Some(2), "{text}: {}", got.out);
        assert!(got.err.starts_with("error: s.csv: "), "{text}: {}", got.err);
        assert!(got.err.contains(message), "{text}: {}", got.err);
    }
    assert!(works(dir.path(), "check --any-w-order s.csv").contains("1 rank, 1 stage, 2 micro-b"));
    file("0F0,0F1,0B0,0B1\n");
    works(dir.path(), "check --activations-max 2 s.csv");
    fails(dir.path(), "check --activations-max 1 s.csv", "row 1, column 2 (0F1 of rank 0)");
    for (line, message) in [
        ("check none.csv", "none.csv: "),
        ("check s.txt", "ends in .csv or .json"),
        ("check", "required"),
        ("compare s.csv none.json", "none.json: "),
        ("compare s.csv s.csv -o none/page.html", "none/page.html: cannot be written"),
    ] {
        fails(dir.path(), line, message);
    }
}

#[test]
fn a_run_refuses_a_split_head_of_another_number_of_blocks() {
    let dir = tempfile::tempdir().unwrap();
    works(dir.path(), "schedule --pp 2 --unit 4 --head-split 2,2 -o split.csv");
    works(dir.path(), "check split.csv");
    let problem = "schedule = split.csv: its head is split: has 4 blocks, and a head of ";
    fails(dir.path(), "run --schedule split.csv --pp 2 --layers 4 --steps 1", problem);
}

#[test]
fn a_run_takes_a_schedule_of_slices_of_its_own_samples_alone() {
    let dir = tempfile::tempdir().unwrap();
    let sliced = "schedule --kind interleaved-zb --pp 2 --micro-batches 3 --slices 4 \
                  --slice-pairs 0.5,0.6";
    for out in ["sliced.csv", "sliced.json", "sliced.svg"] {
        works(dir.path(), &format!("{sliced} -o {out}"));
    }
    works(dir.path(), "check sliced.csv");
    works(dir.path(), "check sliced.json");
    works(dir.path(), "compare sliced.json sliced.json");
    let problem = "sample_slices = 4 slices: costs of slices are none of stages";
    fails(dir.path(), "schedule --kind zb-h1 --pp 2 --costs sliced.json", problem);
    let run = "run --schedule sliced.csv --pp 2 --layers 4 --steps 1";
    let problem = "schedule:slices = 4: cuts samples of seq = 64 tokens, which have fewer than 512";
    fails(dir.path(), run, problem);
    let problem = "schedule = sliced.csv: its slices have 32768 tokens in all, and seq is 1024";
    fails(dir.path(), &format!("{run} --seq 1024"), problem);
    let short = "schedule --kind interleaved-zb --pp 2 --micro-batches 2 --slices 2";
    works(dir.path(), &format!("{short} --sample-tokens 640 -o sliced.csv"));
    works(dir.path(), &format!("{run} --seq 640"));
    let split = format!("{short} --head-split 1,1 --sample-tokens 640 -o both.csv");
    works(dir.path(), &split);
    for (line, message) in [
        ("--kind zb-v --slices 4", "slices = 4: schedule zb-v has whole samples only; use zeropp"),
        ("--kind auto --slices 4", "slices = 4: schedule auto has whole samples only"),
        ("--slices 9 --sample-tokens 2048", "slices = 9: a sample of 2048 tokens has 8 blocks"),
        ("--slices 2 --slice-pairs 1.5", "slice-pairs = 1.5: does not work; use F or F,B, each"),
        ("--slices 2 --slice-pairs 0.5,0.6,0.7", "slice-pairs = 0.5,0.6,0.7: does not work; use F"),
        // As many as would take all memory.
        (
            "--slices 100000000 --sample-tokens 1099511627776",
            "slices = 100000000: of 2 samples on 4 stages that is more than 33554432 actions; use \
             at most 1398101",
        ),
        ("--slices 4 --micro-batches 100000000", "more than 33554432 actions"),
        ("--slice-cut tokens", "required"),
    ] {
        fails(dir.path(), &format!("schedule --pp 2 {line}"), message);
    }
}

/// It would compare samples with micro-batches.
#[test]
fn a_schedule_of_samples_in_slices_has_no_note_about_its_unit() {
    let dir = tempfile::tempdir().unwrap();
    for (slices, is_noted) in [("", true), ("--slices 1", true), ("--slices 4", false)] {
        let line = format!("schedule --pp 4 --micro-batches 9 --unit 8 {slices} -o s.json");
        let got = zeropp(dir.path(), &line);
        assert_eq!(got.code, Some(0), "{}", got.err);
        assert_eq!(got.err.contains("unit = 8: "), is_noted, "{slices}: {}", got.err);
    }
}

#[test]
fn check_lists_every_error_also_as_json() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    file("s.csv", "0F0,,0F1,0I1,0W1,0W0,0I0\n1I0,1F0,1W0,1F1,1I1,1W1\n");
    let got = zeropp(dir.path(), "check s.csv");
    let expected = "error: s.csv: 2 errors\n  \
                    row 1, column 6 (0W0 of rank 0): no 0I0 before it\n  \
                    row 2, column 1 (1I0 of rank 1): no 1F0 before it\n";
    assert_eq!(got.code, Some(2));
    assert_eq!(got.err, expected);

    let got = zeropp(dir.path(), "check --format json s.csv");
    let json: serde_json::Value = serde_json::from_str(&got.out).unwrap();
    let second = &json["errors"][1];
    assert_eq!((got.code, json["sound"].as_bool()), (Some(2), Some(false)));
    assert_eq!((second["row"].as_u64(), second["column"].as_u64()), (Some(2), Some(1)));
    assert_eq!((second["action"].as_str(), second["rank"].as_u64()), (Some("1I0"), Some(1)));
    assert_eq!(second["problem"], "no 1F0 before it");

    file("cells.csv", "0F0,0Q0\nx,1F0\n");
    let got = zeropp(dir.path(), "check cells.csv");
    for part in ["2 errors", "row 1, column 2: ", "row 2, column 1: "] {
        assert!(got.err.contains(part), "{part} is not in: {}", got.err);
    }
    // JSON in its own rows and columns.
    works(dir.path(), "schedule --kind 1f1b --pp 2 --micro-batches 2 -o s.json");
    let text = std::fs::read_to_string(dir.path().join("s.json")).unwrap();
    let sound = works(dir.path(), "check --format json s.json");
    let json: serde_json::Value = serde_json::from_str(&sound).unwrap();
    assert_eq!((json["sound"].as_bool(), json["errors"].as_array()), (Some(true), Some(&vec![])));
    file("s.json", &text.replace("\"1F1\"", "\"1F0\""));
    let got = zeropp(dir.path(), "check s.json");
    let row = text.lines().position(|line| line.contains("\"1F1\"")).unwrap();
    let column = text.lines().nth(row).unwrap().find("\"1F1\"").unwrap() + 1;
    let place = format!("row {}, column {column} (1F0 of rank 1): duplicate of row ", row + 1);
    assert!(got.err.contains(&place), "{place} is not in: {}", got.err);
}

/// Before, the place of these stood only in the sentence, where no editor finds it.
#[test]
fn errors_of_a_file_have_their_row_and_column() {
    let dir = tempfile::tempdir().unwrap();
    let cases = [
        ("0F0,0SEND_F1,0B0\n1F0,1B0\n", [1, 2], "micro-batch 1 of 1"),
        ("0F0,0B0\n0F0,1F0,1B0\n", [2, 1], "stage 0 is computed here and in row 1"),
    ];
    for (text, [row, column], problem) in cases {
        std::fs::write(dir.path().join("s.csv"), text).unwrap();
        let got = zeropp(dir.path(), "check s.csv --format json");
        let value: serde_json::Value = serde_json::from_str(&got.out).unwrap();
        let error = &value["errors"][0];
        assert_eq!((error["row"].as_u64(), error["column"].as_u64()), (Some(row), Some(column)));
        assert!(error["problem"].as_str().is_some_and(|p| p.contains(problem)), "{error}");
    }
}

/// Nothing that is compared may be overwritten by the page.
#[test]
fn a_comparison_does_not_overwrite_what_it_compares() {
    let dir = tempfile::tempdir().unwrap();
    let text = "0F0,0B0\n";
    std::fs::write(dir.path().join("s.csv"), text).unwrap();
    std::fs::hard_link(dir.path().join("s.csv"), dir.path().join("page.html")).unwrap();
    for out in ["s.csv", "./s.csv", "page.html"] {
        let line = format!("compare s.csv s.csv -o {out}");
        fails(dir.path(), &line, "is the file s.csv and would overwrite it; choose another");
        assert_eq!(std::fs::read_to_string(dir.path().join("s.csv")).unwrap(), text);
    }
}

/// Before, these replaced the file that was read, with exit code 0.
#[test]
fn no_command_writes_over_what_it_reads() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let files =
        [("costs.json", "{}"), ("m.jsonl", "{\"step\":1,\"loss\":2.0}\n"), ("run.toml", "")];
    for (name, text) in files {
        std::fs::write(at(name), text).unwrap();
        std::fs::hard_link(at(name), at(&format!("same-{name}"))).unwrap();
    }
    for (line, input) in [
        ("schedule --pp 2 --micro-batches 4 --costs costs.json -o same-costs.json", "costs.json"),
        ("plot m.jsonl -o ./same-m.jsonl", "m.jsonl"),
        ("plan run.toml --gpus 2 --global-batch 4 -o same-run.toml", "run.toml"),
        ("plan --gpus 2 --global-batch 4 --against m.jsonl -o m.jsonl", "m.jsonl"),
        ("plan --gpus 2 --global-batch 4 --machine costs.json -o costs.json", "costs.json"),
    ] {
        let message = format!("is the file {input} and would overwrite it; choose another");
        fails(dir.path(), line, &message);
    }
    for (name, text) in files {
        assert_eq!(std::fs::read_to_string(at(name)).unwrap(), text);
    }
}

/// Before, each of these waited for a writer for ever, or read without an end.
#[test]
#[cfg(unix)]
fn irregular_files_are_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    fails(
        dir.path(),
        "plot fifo",
        "fifo: cannot be read (it is a pipe (FIFO), not a regular file)",
    );
    fails(dir.path(), "plot /dev/zero", "it is a device, not a regular file");
    fails(dir.path(), "why fifo", "name its folder of checkpoints or its file of metrics");
}

#[test]
fn bad_input_ends_with_code_2_and_one_message() {
    let dir = tempfile::tempdir().unwrap();
    for (flags, message) in [
        ("--kind zig-zag", "kind = zig-zag: does not work; use zeropp, "),
        ("--pp 0", "pp = 0: does not work; use a whole number of at least 1"),
        ("--pp -1", "pp = -1: does not work"),
        ("--pp 100000", "pp = 100000: times virtual = 2 that is more than 65536 stages"),
        ("--pp 4000 --micro-batches 1000000", "more than 33554432 actions"),
        ("--kind 1f1b --virtual 2", "virtual = 2 does not work; it must be 1"),
        ("--kind zb-v --virtual 3", "virtual = 3 does not work"),
        ("--kind dualpipe-v --micro-batches 6", "micro-batches = 6 does not work"),
        ("--t-f -1", "t-f = -1: does not work; use a time of 0 to 1e9 us"),
        ("--t-f 1,x", "t-f = 1,x: does not work; use a time"),
        ("--t-f 1,2,3", "t-f = 3 numbers: there are 8 stages; give one number for all, or 8"),
        ("--t-comm 1,2", "t-comm = 1,2: does not work"),
        ("--t-w 1e9 --micro-batches 1000000", "t-w = 1000000000: too long for 8 stages"),
        ("--mem-f -1", "mem-f = -1 (stage 0): an F takes memory"),
        (
            "--mem-f 2 --mem-b -1 --mem-w -2",
            "mem-w = -2 (stage 0): mem-f + mem-b + mem-w must be 0",
        ),
        ("--mem-f 2 --mem-b -3", "mem-w = 1 (stage 0): a W frees memory"),
        ("--mem-input 3", "mem-input = 3 (stage 0): a part of mem-f; use 0 to 2"),
        ("--mem-f 1.5", "mem-f = 1.5: does not work; use a whole number"),
        ("--mem-limit 3x", "mem-limit = 3x: does not work; use a whole number, or 1p, 2p"),
        ("--kind gpipe --mem-limit 1p", "mem-limit = 8: gpipe needs 32 on rank"),
        ("--kind zb-2p --mem-limit 1", "mem_limit = 1 does not work; it must hold"),
        ("--kind zeropp-auto --virtual 2 --mem-limit 3", "mem_limit = 3"),
        (
            "--pp 2 --lower --simulate-steps 1000000",
            "simulate-steps = 1000000: with 186 actions a step that is more than 4194304 actions",
        ),
        ("--max-gathers 3", "max-gathers = 3: schedule zeropp has no such setting; use kind auto"),
        ("--kind zb-v --evaluations 9", "evaluations = 9: schedule zb-v has no such setting"),
        ("--prefetch 1", "--lower"),
        ("--recompute full", "--lower"),
        ("--format png", "format = png: does not work; use ascii, "),
        ("-o a.png", "out = a.png: the name does not say what to write"),
        ("-o none/a.json", "out = none/a.json: cannot be written"),
        ("--all --kind 1f1b", "cannot be used with"),
        ("--all --t-f 1,2,3", "t-f = 3 numbers"),
        ("--width 0", "width = 0: does not work"),
    ] {
        fails(dir.path(), &format!("schedule {flags}"), message);
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing was written");
}
