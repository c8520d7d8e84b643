//! The command as its users meet it: exit codes, messages, files.

mod common;

use std::path::PathBuf;
use std::process::Command;

use common::zeropp;

fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = dir.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    dir
}

/// Sizes that make a step a matter of milliseconds.
const SMALL: &str = "--layers 4 --hidden 16 --heads 2 --seq 8 --steps 3";

/// Files that a run cannot use.
fn bad_files() -> tempfile::TempDir {
    folder(&[
        ("empty.txt", ""),
        ("short.txt", "too short"),
        ("empty/.hidden", "x"),
        ("key.toml", "pp = 2\nlayer = 4\n"),
        ("type.toml", "pp = 'two'\n"),
        ("text.toml", "this is no TOML"),
        ("bad.toml", "heads = 5\n"),
        ("two.csv", "0F0,0B0\n1F0,1B0\n"),
        ("stuck.json", "{\"kind\": \"mine\"}"),
        ("costs.toml", "t_f = [1, 2]\nt_b = 1\nt_w = 1\n"),
    ])
}

/// Runs that end with code 2 and one message, each with a part of it.
fn refused(cases: &[(&str, &str)]) {
    let dir = bad_files();
    for (line, message) in cases {
        let got = zeropp(dir.path(), &format!("run {line}"));
        assert_eq!(got.code, Some(2), "{line}: {}{}", got.out, got.err);
        assert!(got.err.starts_with("error: "), "{line}: {}", got.err);
        assert!(got.err.contains(message), "{line}: {}", got.err);
        assert_eq!(got.err.matches("error: ").count(), 1, "{line}: {}", got.err);
        assert_eq!(got.out, "", "{line}");
    }
}

#[test]
fn a_bad_setting_ends_with_code_2_and_one_message() {
    refused(&[
        ("--heads 5", "heads = 5: does not divide hidden = 64; use 4 or 8"),
        ("--pp 4 --virtual 4", "layers = 8: pp 4 x virtual 4 makes 16 stages"),
        ("--unit 0", "unit = 0: at least 1 is needed"),
        ("--micro-batches 0", "micro-batches = 0: at least 1 is needed"),
        ("--pp 0", "pp = 0: at least 1 is needed"),
        ("--zero3 1000000", "zero3 = 1000000: is too large; use 1 to 131072"),
        ("--zero3 4096 --dp 4096", "16777216 ranks"),
        ("--lr -1", "lr = -1: is out of range"),
        ("--lr nan", "lr = NaN: is out of range"),
        ("--precision fp16", "precision = fp16: does not work; use "),
        #[cfg(not(feature = "cuda"))]
        ("--device cuda", "device = cuda: is not in this build; use cpu, or build zeropp with"),
        #[cfg(not(feature = "mpi"))]
        ("--engine mpi", "engine = mpi: is not in this build; use threads"),
        ("--schedule 1f1b --virtual 2", "virtual = 2: schedule 1f1b cannot have that many"),
        ("--schedule v-min --virtual 4", "virtual = 4: schedule v-min cannot have that many"),
        ("--pp x", "pp = x: does not work; use a whole number"),
        (
            "--recompute half",
            "recompute = half: does not work; use one of auto, none, selective, full",
        ),
        ("--stepz 3", "unexpected argument '--stepz'"),
        ("--zero1=2", "zero1 = 2: does not work; use true or false"),
    ]);
}

#[test]
fn a_bad_file_ends_with_code_2_and_one_message() {
    refused(&[
        ("--metrics none/m.jsonl", "metrics = none/m.jsonl: cannot be written"),
        ("--trace none/t.json", "trace = none/t.json: cannot be written"),
        ("--metrics short.txt --data short.txt", "would overwrite it"),
        ("--metrics costs.toml --emulate costs.toml", "file of `emulate` too and would overwrite"),
        ("--schedule two.csv --pp 2 --trace two.csv", "file of `schedule` too and would overwrite"),
        ("bad.toml --heads 4 --metrics bad.toml", "file of the configuration too and would over"),
        ("--data empty --save empty/here", "lies in the folder of `data`"),
        ("--data /dev/zero", "it is a device, not a regular file"),
        ("/dev/zero", "cannot read the configuration /dev/zero: it is a device, not a regular"),
        ("--emulate empty", "emulate = empty: a file of costs ends in .toml or .json"),
        ("--save-costs m.txt", "save-costs = m.txt: costs are written as JSON"),
        ("--mem-limit 5apples", "use bytes, such as 25769803776, 24GiB"),
        (
            "--save-costs c.json --emulate costs.toml",
            "an emulated run takes its costs from the file",
        ),
        ("key.toml", "key.toml: line 2: unknown key `layer`; did you mean `layers`?"),
        ("type.toml", "expected a whole number"),
        ("text.toml", "text.toml: TOML parse error at line 1"),
        ("bad.toml", "heads = 5: does not divide"),
        ("bad.toml --heads 7", "heads = 7: does not divide"),
        ("none.toml", "cannot read the configuration none.toml"),
        // From here on the trainer speaks.
        ("--data none.txt", "data = none.txt: cannot be read"),
        ("--data empty.txt", "data = empty.txt: 0 tokens are too short"),
        ("--data short.txt", "data = short.txt: 9 tokens are too short, since seq = 64 needs 65"),
        ("--data empty", "data = empty: the folder has no files"),
        ("--schedule zig-zag", "zig-zag"),
        ("--schedule none.csv", "schedule = none.csv: No such file"),
        ("--emulate none.toml", "emulate = none.toml: No such file"),
        ("--emulate costs.toml --pp 2", "emulate = costs.toml: t_f: found [1,2]; one number"),
        ("--costs none.toml", "costs = none.toml: No such file"),
        ("--costs costs.toml --pp 2", "costs = costs.toml: t_f: found [1,2]; one number"),
        ("--metrics costs.toml --costs costs.toml", "file of `costs` too and would overwrite"),
        ("--schedule two.csv", "pp = 1: two.csv is for 2 ranks; use 2"),
        ("--schedule stuck.json --pp 2", "schedule = stuck.json: "),
    ]);
}

#[test]
fn an_emulated_run_shows_measured_beside_simulated() {
    let dir = folder(&[("costs.toml", "t_f = 300\nt_b = 300\nt_w = 200\nt_comm = 20\n")]);
    let line = "run --pp 2 --zero3 2 --unit 3 --steps 2 --emulate costs.toml --trace trace.json";
    let got = zeropp(dir.path(), line);
    assert_eq!((got.code, got.err.as_str()), (Some(0), ""), "{}", got.out);
    for part in ["step 2/2  makespan ", "zeropp, 4 ranks as threads, 2 steps", " ms simulated: +"] {
        assert!(got.out.contains(part), "{part} is not in:\n{}", got.out);
    }
    let trace = std::fs::read_to_string(dir.path().join("trace.json")).unwrap();
    assert!(trace.contains("emulated"), "{trace}");
}

#[test]
fn without_a_command_the_manual_is_shown() {
    let dir = folder(&[]);
    assert_eq!(zeropp(dir.path(), "").code, Some(2));
    let help = zeropp(dir.path(), "run --help");
    assert_eq!((help.code, help.err.as_str()), (Some(0), ""));
    for part in
        ["Mesh:", "Schedule:", "Training:", "Examples:", "--micro-batches <B>", "Exit codes:"]
    {
        assert!(help.out.contains(part), "{part} is not in:\n{}", help.out);
    }
}

#[test]
fn a_printed_configuration_is_the_same_run() {
    let dir = folder(&[("run.toml", "pp = 2\nlr = 0.5\n")]);
    let flags = "--pp 4 --zero3 8 --unit 8 --data none.txt --recompute full --zero1";
    let first = zeropp(dir.path(), &format!("run run.toml {flags} --print-config"));
    assert_eq!((first.code, first.err.as_str()), (Some(0), ""));
    for line in [
        "# Mesh",
        "pp = 4",
        "lr = 0.5",
        "# virtual = 2",
        "# micro-batches = 16",
        "zero1 = true",
        "recompute = \"full\"",
        "data = \"none.txt\"",
        "# min-lr = 0.05",
    ] {
        assert!(first.out.lines().any(|l| l == line), "{line} is not in:\n{}", first.out);
    }
    std::fs::write(dir.path().join("printed.toml"), &first.out).unwrap();
    let second = zeropp(dir.path(), "run printed.toml --print-config");
    assert_eq!(second.out, first.out);
    // Before, the derived min-lr of 0.05 stood in the file and refused this.
    let smaller = zeropp(dir.path(), "run printed.toml --lr 2e-4 --print-config");
    assert_eq!(smaller.code, Some(0), "{}", smaller.err);
    assert!(smaller.out.contains("\nlr = 0.0002\n# min-lr = 0.00002\n"), "{}", smaller.out);
}

/// The last checkpoint's data is compared with the data of the run that goes on from it.
#[test]
fn a_resumed_run_says_that_its_data_has_changed() {
    let text = "some text to train on, long enough for a sample\n";
    let dir = folder(&[("data.txt", text)]);
    let line = "run --layers 4 --hidden 16 --heads 2 --seq 8 --data data.txt --save ckpt";
    let first = zeropp(dir.path(), &format!("{line} --steps 1"));
    assert_eq!((first.code, first.err.as_str()), (Some(0), ""));
    let changed = |content: String, steps: u64| {
        std::fs::write(dir.path().join("data.txt"), content).unwrap();
        let got = zeropp(dir.path(), &format!("{line} --steps {steps} --resume"));
        assert_eq!((got.code, got.err.as_str()), (Some(0), ""));
        let resuming = got.out.lines().find(|line| line.starts_with("resuming")).unwrap();
        resuming.to_string()
    };
    assert!(!changed(text.into(), 2).contains("the data"));
    let other = changed(text.to_uppercase(), 3);
    assert!(other.contains("the data has the same size and another content"), "{other}");
    let grown = changed(text.repeat(2), 4);
    assert!(grown.contains("the data has 96 bytes (had 48)"), "{grown}");
}

#[test]
fn metrics_go_to_standard_output_alone() {
    let dir = folder(&[]);
    let got = zeropp(dir.path(), &format!("run {SMALL} --metrics -"));
    assert_eq!(got.code, Some(0), "{}", got.err);
    let steps: Vec<Option<u64>> = got
        .out
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["step"].as_u64())
        .collect();
    assert!(got.out.starts_with("{\"run\":{\"name\":"), "{}", got.out);
    assert_eq!(steps, [None, Some(1), Some(2), Some(3)], "the run, its steps and nothing else");
    assert!(got.err.contains("step 3/3"), "what is for people goes elsewhere: {}", got.err);
    assert!(!dir.path().join("-").exists());
    let printed = zeropp(dir.path(), &format!("run {SMALL} --metrics - --print-config"));
    assert!(printed.out.contains("metrics = \"-\""), "{}", printed.out);
}

/// A full disk does not end a run, and is reported at once and at its end.
#[test]
#[cfg(target_os = "linux")]
fn metrics_that_cannot_be_written_are_reported_after_the_summary() {
    let dir = folder(&[]);
    let got = zeropp(dir.path(), &format!("run {SMALL} --metrics /dev/full"));
    assert_eq!(got.code, Some(1), "{}", got.out);
    assert!(got.out.contains("step 3/3") && got.out.contains("3 steps"), "{}", got.out);
    let reported: Vec<&str> = got.err.lines().collect();
    let expected = [
        "warning: metrics = /dev/full: cannot be written (No space",
        "error: training finished, but the metrics file /dev/full is incomplete: No space",
    ];
    assert!(
        reported.len() == 2 && reported.iter().zip(expected).all(|(t, e)| t.starts_with(e)),
        "{reported:?}"
    );
}

/// No code but that of the command's own end, whether the reason can be written or not.
#[test]
#[cfg(target_os = "linux")]
fn a_closed_standard_error_changes_no_exit_code() {
    let dir = folder(&[]);
    for (line, code) in [
        ("run --pp 0".to_owned(), 2),
        (format!("run {SMALL} --metrics /dev/full"), 1),
        (format!("run {SMALL} --metrics -"), 0),
        // What it goes on from is a warning.
        (format!("run {SMALL} --save ckpt --save-every 1 --keep 3"), 0),
        (format!("run {SMALL} --save ckpt --resume=1"), 0),
        // With a note.
        ("schedule --kind zeropp --pp 4 --micro-batches 8 --unit 4".to_owned(), 0),
    ] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_zeropp"));
        command.args(line.split_whitespace()).current_dir(dir.path()).stderr(full);
        assert_eq!(command.output().unwrap().status.code(), Some(code), "{line}");
    }
}

#[test]
fn empty_paths_make_nothing() {
    let dir = folder(&[]);
    for flag in ["--save", "--metrics", "--trace", "--data"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_zeropp"));
        let output = command.args(["run", flag, ""]).current_dir(dir.path()).output().unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{err}");
        let expected = format!("error: {} = \"\": the path is empty", &flag[2..]);
        assert!(err.starts_with(&expected), "{err}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "not even a lock");
}

#[test]
fn a_file_that_saves_can_be_told_not_to() {
    let dir = folder(&[("sub/c.toml", "save = 'ckpt'\nsave-every = 1\nresume = true\n")]);
    let got = zeropp(dir.path(), &format!("run sub/c.toml {SMALL} --no-save"));
    assert_eq!((got.code, got.err.as_str()), (Some(0), ""));
    assert!(!dir.path().join("sub/ckpt").exists() && !dir.path().join("ckpt").exists());
    // Paths of a file count from its folder.
    let toml = "save = 'ckpt'\nmetrics = 'm.jsonl'\n";
    std::fs::write(dir.path().join("sub/c.toml"), toml).unwrap();
    let got = zeropp(dir.path(), &format!("run sub/c.toml {SMALL}"));
    assert_eq!((got.code, got.err.as_str()), (Some(0), ""));
    assert!(dir.path().join("sub/ckpt/step-000003").is_dir());
    assert_eq!(json_lines(dir.path().join("sub/m.jsonl")).len(), 3);
}

/// Text from a file is printed, but does not command the terminal.
#[test]
fn foreign_control_characters_are_escaped() {
    let json = r#"{"\u001b[2Jmine\nerror: forged": 1}"#;
    let toml = "pp = '\u{9b}31m'\n";
    let trace = r#"{"displayTimeUnit":"ms","otherData":{"title":"\u001b]0;x\u0007",
        "placement":[0],"ranks":[[0,0]]},"traceEvents":[]}"#;
    let dir = folder(&[
        ("c.toml", toml),
        ("key.toml", "\"a\\u001Bb\" = 1\n"),
        ("bad.json", json),
        ("bad.csv", "0F0,\u{1b}[31m\n"),
        ("trace.json", trace),
        ("ok.csv", "0F0,0B0\n"),
    ]);
    for line in [
        "run c.toml",
        "run key.toml",
        "run --schedule bad.json",
        "check bad.json",
        "check bad.csv",
        "compare trace.json trace.json",
        "compare ok.csv trace.json",
    ] {
        let got = zeropp(dir.path(), line);
        let text = got.out + &got.err;
        let bad = text.chars().find(|c| c.is_control() && *c != '\n');
        assert_eq!(bad, None, "{line}: {text:?}");
        assert!(!text.contains("\nerror: forged"), "{line}: {text}");
        assert!(text.contains("\\u00") || text.contains("\\u{"), "{line} shows it: {text}");
    }
}

#[test]
fn a_dry_run_shows_the_plan_and_writes_nothing() {
    let dir = folder(&[]);
    let got = zeropp(dir.path(), "run --pp 4 --zero3 8 --unit 8 --dry-run --metrics m --trace t");
    assert_eq!((got.code, got.err.as_str()), (Some(0), ""));
    for part in [
        "pp 4 x zero3 8 x dp 1 = 32 ranks (threads)",
        "zeropp, 2 stages a rank, a step's micro-batches in units of 8 + 8",
        "3 all-gathers and 2 reduce-scatters",
        "bubble",
        "gathered weights",
        "stage 7",
    ] {
        assert!(got.out.contains(part), "{part} is not in:\n{}", got.out);
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// The lines of steps, behind the one of the run.
fn json_lines(path: PathBuf) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(path).unwrap();
    let mut lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
    let first: serde_json::Value = lines.next().unwrap();
    assert!(first["run"]["settings"]["pp"].is_string(), "{first}");
    lines.collect()
}

#[test]
fn a_run_reports_every_step_and_ends_with_a_summary() {
    let dir = folder(&[("a.txt", &"To train or not to train. ".repeat(9))]);
    let line = format!("run {SMALL} --pp 2 --unit 3 --data a.txt --metrics m.jsonl --trace t.json");
    let got = zeropp(dir.path(), &line);
    assert_eq!((got.code, got.err.as_str()), (Some(0), ""), "{}", got.out);
    for part in ["step 1/3  loss ", "step 3/3  loss ", "3 steps in ", "tokens/s", "Peak memory"] {
        assert!(got.out.contains(part), "{part} is not in:\n{}", got.out);
    }
    assert!(
        got.out.contains("3 all-gathers and 2 reduce-scatters per rank and unit"),
        "{}",
        got.out
    );
    assert!(!got.out.contains('\u{1b}'), "no terminal, no escape sequences");

    let steps = json_lines(dir.path().join("m.jsonl"));
    assert_eq!(steps.iter().map(|s| s["step"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 3]);
    for step in &steps {
        // 2 ranks, 2 units of 3: 6 micro-batches of 8 tokens; 2V−1 and V per rank and unit.
        assert_eq!((step["tokens"].as_u64(), step["all_gathers"].as_u64()), (Some(48), Some(12)));
        assert_eq!(step["reduce_scatters"].as_u64(), Some(8));
        assert!(step["loss"].as_f64().unwrap() < 8.0 && step["peak_bytes"]["activation"].is_u64());
    }
    let trace = std::fs::read_to_string(dir.path().join("t.json")).unwrap();
    assert!(serde_json::from_str::<serde_json::Value>(&trace).is_ok(), "the trace is JSON");

    let again = zeropp(dir.path(), &line);
    assert_eq!(again.code, Some(0));
    let bits = |steps: &[serde_json::Value]| {
        steps
            .iter()
            .map(|s| (s["loss"].to_string(), s["grad_norm"].to_string()))
            .collect::<Vec<_>>()
    };
    let second = json_lines(dir.path().join("m.jsonl"));
    assert_eq!(bits(&second), bits(&steps), "the same command, the same bits, a new file");
}

#[test]
fn a_reader_that_goes_away_does_not_end_a_run() {
    let dir = folder(&[]);
    let mut child = Command::new(env!("CARGO_BIN_EXE_zeropp"))
        .args(format!("run {SMALL} --metrics m.jsonl").split_whitespace())
        .current_dir(dir.path())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    assert!(child.wait().unwrap().success());
    assert_eq!(json_lines(dir.path().join("m.jsonl")).len(), 3);
}
