//! How the command speaks: what goes where and in which form, and what it says of itself.

mod common;

use common::{command, zeropp};

const SMALL: &str = "--layers 4 --hidden 16 --heads 2 --seq 8 --steps 3";
const DIVERGING: &str = "run --layers 4 --hidden 16 --heads 2 --seq 8 --steps 8 --lr 1e30 --clip 0 \
                         --warmup 0";

#[test]
fn as_json_a_run_is_lines_on_standard_error() {
    let dir = tempfile::tempdir().unwrap();
    let got = zeropp(dir.path(), &format!("run {SMALL} --save c --log-format json"));
    assert_eq!((got.code, got.out.as_str()), (Some(0), ""), "{}", got.err);
    let lines: Vec<serde_json::Value> =
        got.err.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    let messages: Vec<&str> = lines.iter().map(|l| l["message"].as_str().unwrap()).collect();
    let progress = ["run begins", "step", "step", "step", "checkpoint saved", "run ends"];
    assert!(progress.iter().all(|m| messages.contains(m)), "{messages:?}");
    let last = lines.iter().rfind(|line| line["message"] == "step").unwrap();
    assert!(last["step"] == 3 && last["loss"].as_f64().unwrap() > 0.0, "{last}");
    assert!(lines.iter().all(|line| line["timestamp"].is_string() && line["level"] == "INFO"));

    // Again: the folder has a checkpoint, and that is an error, as an object too.
    let got = zeropp(dir.path(), &format!("run {SMALL} --save c --log-format json"));
    let line: serde_json::Value = serde_json::from_str(got.err.trim()).expect(&got.err);
    assert_eq!((got.code, &line["level"], &line["code"]), (Some(2), &"ERROR".into(), &2.into()));
}

#[test]
fn verbosity_takes_away_steps_and_adds_what_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let usual = zeropp(dir.path(), &format!("run {SMALL}"));
    assert!(usual.out.contains("step 3/3") && usual.err.is_empty(), "{}{}", usual.out, usual.err);
    for quieter in ["--verbosity warn", "--verbosity off", "-q"] {
        let got = zeropp(dir.path(), &format!("run {SMALL} {quieter}"));
        assert!(!got.out.contains("step 3/3") && got.err.is_empty(), "{quieter}: {}", got.out);
        assert_eq!(got.code, Some(0));
    }
    let got = zeropp(dir.path(), DIVERGING);
    assert_eq!(got.err.matches("warning: step ").count(), 1, "{}", got.err);
    assert_eq!(zeropp(dir.path(), &format!("{DIVERGING} --verbosity error")).err, "");
    // A word of another program is none here, and must not silence all that is not of its name.
    for wrong in ["loud=very", "warning", "critical", "info,verbose"] {
        let got = zeropp(dir.path(), &format!("run {SMALL} --verbosity {wrong}"));
        assert_eq!(got.code, Some(2));
        let message = format!("verbosity = {wrong}: does not work; use off");
        assert!(got.err.contains(&message), "{}", got.err);
    }
}

/// Output that does not reach a full disk is an error where it was all that there was to do.
#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let onto_full = |line: &str| {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let got = command(dir.path(), line).stdout(full).output().unwrap();
        (got.status.code(), String::from_utf8(got.stderr).unwrap())
    };
    let lines =
        ["schedule --format csv", "run --print-config", "completions bash", "run --metrics -"];
    for line in lines {
        let (code, error) = onto_full(&format!("{line} {}", small_of(line)));
        assert_eq!(code, Some(1), "{line}: {error}");
        assert!(error.contains("error: standard output cannot be written (No space"), "{error}");
    }
    let (code, error) = onto_full(&format!("run {SMALL}"));
    assert!(code == Some(0) && error.starts_with("warning: standard output"), "{code:?} {error}");
    let got = zeropp(dir.path(), &format!("run {SMALL} --log-file /dev/full"));
    assert!(got.code == Some(0) && got.err.contains("log-file = /dev/full: is incomplete"));
}

/// Settings that keep a run small.
#[cfg(target_os = "linux")]
fn small_of(line: &str) -> &'static str {
    if line.starts_with("run") { SMALL } else { "" }
}

#[test]
fn no_colour_reaches_a_pipe() {
    let dir = tempfile::tempdir().unwrap();
    let got = command(dir.path(), "run --pp 0").env("CLICOLOR", "1").output().unwrap();
    assert!(!got.stderr.contains(&0x1b), "{}", String::from_utf8_lossy(&got.stderr));
}

#[test]
fn it_completes_itself_and_has_pages() {
    let dir = tempfile::tempdir().unwrap();
    for (shell, part) in
        [("bash", "--micro-batches"), ("zsh", "#compdef zeropp"), ("fish", "zero3")]
    {
        let got = zeropp(dir.path(), &format!("completions {shell}"));
        assert!(got.code == Some(0) && got.out.contains(part), "{shell}: {}", got.out);
    }
    let got = zeropp(dir.path(), "man pages");
    assert_eq!(got.code, Some(0), "{}", got.err);
    let page = std::fs::read_to_string(dir.path().join("pages/zeropp-run.1")).unwrap();
    for setting in zeropp::config::OPTIONS {
        let flag = setting.key.replace('-', "\\-");
        let is_there = page.contains(&format!("\\-\\-{flag}\\fR"));
        assert_eq!(is_there, setting.is_setting(), "--{}", setting.key);
    }
    let got = zeropp(dir.path(), "version");
    assert!(got.out.contains("engines   threads"), "{}", got.out);
}
