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
    let (code, reported) = supervised(at, "", &script);
    assert_eq!(code, Some(0), "{reported}");
    assert!(
        reported.contains("(code 9); recovery 3 of 100: it is started again from step "),
        "{reported}"
    );
    assert_eq!(bits(&at.join("m.jsonl")), bits(&at.join("all.jsonl")));
    for pid in fs::read_to_string(at.join("left")).unwrap().lines() {
        let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        assert!(state.is_empty() || state.contains(") Z "), "what is left is ended: {state}");
    }
}

/// Bytes of all files of ranks in a checkpoint.
fn state(folder: &Path) -> Vec<Vec<u8>> {
    (0..4).map(|r| fs::read(folder.join(format!("rank-{r:05}.safetensors"))).unwrap()).collect()
}

/// A run that is killed once there is a copy, as named, of a step after its only checkpoint, and
/// comes to its end when it is started again. Between its checkpoint and its last step is time to
/// find the copy, also where the machine has much to do.
fn killed_behind_its_checkpoint(copies: &str) -> String {
    format!(
        "line=\"$ZEROPP {SMALL} --steps 900 --metrics m.jsonl --save ckpt\"\n\
         line=\"$line --save-every 450 --resume\"\n\
         [ -e saved ] && exec $line\n\
         $line & pid=$!\n\
         while newest=$(ls -d {copies} 2> left | tail -n 1)\n\
               newest=${{newest##*step-}}; [ \"${{newest:-0}}\" -lt 451 ]; do\n\
             kill -0 $pid || exit 1\n\
             sleep 0.01\n\
         done\n\
         kill -9 $pid; wait $pid\n\
         ls ckpt > saved\n\
         exit 9\n"
    )
}

/// Checks that such a run left less on the disk than there was in memory, and came to the same
/// state by the same steps as one that was not killed.
fn is_as_undisturbed(at: &Path) {
    let whole = zeropp(at, &format!("{SMALL} --steps 900 --metrics all.jsonl --save whole"));
    assert_eq!(whole.code, Some(0), "{}", whole.err);
    let saved = fs::read_to_string(at.join("saved")).unwrap();
    assert_eq!(saved, "step-000450\n", "the disk had less");
    assert_eq!(bits(&at.join("m.jsonl")), bits(&at.join("all.jsonl")));
    let last = |of: &str| state(&at.join(of).join("step-000900"));
    assert!(last("ckpt") == last("whole"), "the state is that of a run that was not killed");
}

#[test]
fn a_killed_run_goes_on_from_memory_behind_its_newest_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    fs::create_dir(at.join("memory")).unwrap();
    let script = killed_behind_its_checkpoint("\"$ZEROPP_COPIES\"/*/step-*");
    let (code, reported) = supervised(at, "--memory memory", &script);
    assert_eq!(code, Some(0), "{reported}");
    let from = reported.split_once("started again from step ").expect("it was").1;
    let (from, rest) = from.split_once(',').expect("the step, and where it is");
    assert!(rest.starts_with(" copied in memory"), "{reported}");
    let from: u64 = from.parse().unwrap();
    assert!((451..900).contains(&from), "{reported}");
    is_as_undisturbed(at);
    assert_eq!(fs::read_dir(at.join("memory")).unwrap().count(), 0, "the memory is given back");
}

#[test]
fn where_there_is_no_memory_for_copies_the_run_goes_on_from_its_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    let (code, reported) = supervised(dir.path(), "--memory none", "[ -z \"$ZEROPP_COPIES\" ]");
    assert_eq!(code, Some(0), "{reported}");
    assert!(reported.contains("memory = none: no copies in memory are kept"), "{reported}");
    let (code, reported) = supervised(dir.path(), "--memory=", "[ -z \"$ZEROPP_COPIES\" ]");
    assert_eq!((code, reported.as_str()), (Some(0), ""));
}

#[test]
fn repeated_immediate_failures_end_with_the_command_s_code() {
    let dir = tempfile::tempdir().unwrap();
    let (code, reported) = supervised(dir.path(), "", "exit 7");
    assert_eq!(code, Some(7), "{reported}");
    assert!(reported.contains("failed 3 times before its first checkpoint"), "{reported}");
    let (code, reported) = supervised(dir.path(), "--max-recoveries 1", "kill -9 $$");
    assert_eq!(code, Some(137), "{reported}");
    assert!(reported.contains("(signal 9); recovery 1 of 1"), "{reported}");
    let (code, reported) = supervised(dir.path(), "", "exit 2");
    assert_eq!((code, reported.as_str()), (Some(2), ""), "wrong input stays wrong");
}

#[test]
fn a_command_that_hangs_is_ended() {
    let dir = tempfile::tempdir().unwrap();
    let script = "echo start >> starts; [ $(wc -l < starts) -gt 1 ] && exit 0; sleep 1000";
    let (code, reported) = supervised(dir.path(), "--hang-s 1", script);
    assert_eq!(code, Some(0), "{reported}");
    assert!(reported.contains("no progress for 1 s"), "{reported}");
}

/// Also where a shell has started the supervisor in the background, which is to ignore SIGQUIT.
#[test]
fn a_command_that_hangs_can_write_its_records() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let script = "echo start >> starts; [ $(wc -l < starts) -gt 1 ] && exit 0\n\
                  trap 'echo > records; exit 9' QUIT; sleep 1000\n";
    fs::write(at.join("run.sh"), script).unwrap();
    let plain = command(at, "supervise --hang-s 1 -- sh run.sh --save ckpt --resume");
    let mut run = Command::new("env");
    run.arg("--ignore-signal=QUIT").arg(plain.get_program()).args(plain.get_args());
    let output = run.current_dir(at).output().unwrap();
    let reported = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{reported}");
    assert!(at.join("records").exists(), "{reported}");
}

/// Whether it can say what it does or not, it does it.
#[test]
fn a_supervisor_that_cannot_write_to_standard_error_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    fs::write(at.join("run.sh"), "echo start >> starts; [ $(wc -l < starts) -gt 1 ]").unwrap();
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut run = command(at, "supervise -- sh run.sh --save ckpt --resume");
    assert_eq!(run.stderr(full).status().unwrap().code(), Some(0));
    assert_eq!(fs::read_to_string(at.join("starts")).unwrap(), "start\nstart\n");
}

/// A signal that a parent wants ignored is ignored by the supervisor, which starts the command
/// again, and by the command, which nobody would start again.
#[test]
fn a_hang_up_that_the_parent_wants_ignored_ends_neither_supervisor_nor_command() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let script = "echo start >> starts\n\
                  [ $(wc -l < starts) -gt 1 ] && exit 0\n\
                  kill -HUP $PPID; kill -HUP $$; echo lived > lived; exit 9\n";
    fs::write(at.join("run.sh"), script).unwrap();
    let plain = command(at, "supervise -- sh run.sh --save ckpt --resume");
    let mut run = Command::new("nohup");
    run.arg(plain.get_program()).args(plain.get_args()).current_dir(at);
    let output = run.output().unwrap();
    let reported = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{reported}");
    assert!(at.join("lived").exists() && reported.contains("(code 9); recovery 1"), "{reported}");
}

/// Its checkpoint is found where it is, which shows in the output.
#[test]
fn paths_with_blanks_are_watched_where_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let script = "echo start >> starts; [ $(wc -l < starts) -gt 1 ] && exit 0\n\
                  mkdir -p 'my folder/step-000007'\n\
                  echo > 'my folder/step-000007/manifest.json'; exit 9\n";
    fs::write(at.join("my run.sh"), script).unwrap();
    fs::write(at.join("my run.toml"), "save = 'my folder'\nresume = true\n").unwrap();
    let in_shell = "sh 'my run.sh' --save 'my folder' --resume";
    let commands: [&[&str]; 3] = [
        &["sh", "my run.sh", "--save", "my folder", "--resume"],
        &["sh", "my run.sh", "my run.toml"],
        &["sh", "-c", in_shell],
    ];
    for line in commands {
        let output = command(at, "supervise --").args(line).output().unwrap();
        let reported = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(0), "{line:?}: {reported}");
        assert!(reported.contains("it is started again from step 7"), "{line:?}: {reported}");
        fs::remove_file(at.join("starts")).unwrap();
    }
}

#[test]
fn a_command_that_would_begin_anew_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (line, part) in [
        ("--resume", "no --save"),
        ("--save ckpt", "no --resume"),
        ("--save ckpt --resume=3", "resume = 3: after each failure"),
        ("--save ckpt --resume=false", "resume = false: after each failure"),
    ] {
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
    let reported = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(143), "{reported}");
    assert!(
        reported.contains("saving and stopping") && !reported.contains("started again"),
        "{reported}"
    );
    let last = bits(&at.join("m.jsonl")).len();
    assert!(at.join(format!("ckpt/step-{last:06}")).exists());
}

/// A run of three replicas, of which one is away for a while: what is reported, and how many
/// replicas each start had.
fn with_a_replica_away(at: &Path, small: &str) -> (String, String) {
    // The first start is killed once it has saved, and so is the one with two, when the third
    // replica is back; without it a start with three ends at once.
    let script = format!(
        "echo $1 >> starts; n=$(wc -l < starts)\n\
         [ $1 -gt $(cat there) ] && exit 9\n\
         line=\"$ZEROPP {small} --dp $1 --global-batch 8 --metrics m.jsonl --save ckpt\"\n\
         line=\"$line --save-every 5 --keep 1000 --resume\"\n\
         [ $n -gt 3 ] && exec $line\n\
         before=$(ls ckpt | grep -c '^step')\n\
         $line & pid=$!\n\
         while [ $(ls ckpt | grep -c '^step') -lt $((before + 2)) ]; do sleep 0.01; done\n\
         kill -9 $pid; wait $pid\n\
         [ $n = 1 ] && echo 2 > there || echo 3 > there\n\
         exit 9\n"
    );
    fs::write(at.join("run.sh"), script).unwrap();
    fs::write(at.join("there"), "3").unwrap();
    let plain = command(at, "");
    let flags = "supervise --replicas 3 --memory= -- sh run.sh {dp} --global-batch 8 --save ckpt \
                 --resume";
    let output = Command::new(plain.get_program())
        .args(flags.split_whitespace())
        .env("ZEROPP", plain.get_program())
        .current_dir(at)
        .output()
        .unwrap();
    let reported = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{reported}");
    (reported, fs::read_to_string(at.join("starts")).unwrap())
}

/// Undisturbed runs, one after the other: so many replicas, until that step.
fn in_turn(at: &Path, small: &str, runs: &[(usize, u64)]) {
    for (replicas, last) in runs {
        let line = format!(
            "{small} --steps {last} --dp {replicas} --global-batch 8 --metrics all.jsonl \
             --save own --resume"
        );
        let got = zeropp(at, &line);
        assert_eq!(got.code, Some(0), "{}", got.err);
    }
}

#[test]
fn without_a_replica_that_does_not_come_back_the_others_share_its_samples_until_it_does() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let small = SMALL.replace("--zero3 2 ", "");
    let (reported, starts) = with_a_replica_away(at, &format!("{small} --steps 300"));
    assert_eq!(starts, "3\n3\n2\n3\n", "{reported}");
    let from: Vec<u64> = reported
        .lines()
        .filter_map(|line| line.split_once("started again from step "))
        .map(|(_, rest)| rest.split_once(',').unwrap().0.parse().unwrap())
        .collect();
    let [first, again, second] = from[..] else { panic!("{reported}") };
    assert!(first == again && second > first, "{reported}");
    assert!(reported.contains(&format!("from step {first}, with 2 of 3 replicas")), "{reported}");
    // The same shapes, one after the other, without a failure.
    in_turn(at, &small, &[(3, first), (2, second), (3, 300)]);
    assert_eq!(bits(&at.join("m.jsonl")), bits(&at.join("all.jsonl")));
    assert_eq!(bits(&at.join("m.jsonl")).len(), 300);
}

/// Two of three replicas are there at first. When the third is, a signal brings it in at the end of
/// the step under way: nothing is done again, and the bits are those of the two shapes in turn.
#[test]
fn a_replica_that_is_back_joins_at_the_end_of_a_step() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let small = SMALL.replace("--zero3 2 ", "");
    let script = format!(
        "echo $1 >> starts\n\
         [ $1 -gt $(cat there) ] && exit 9\n\
         line=\"$ZEROPP {small} --steps 2000 --dp $1 --global-batch 8 --metrics m.jsonl\"\n\
         exec $line --save ckpt --resume\n"
    );
    fs::write(at.join("run.sh"), script).unwrap();
    fs::write(at.join("there"), "2").unwrap();
    let plain = command(at, "");
    let zeropp_path = plain.get_program();
    let flags = "--default-signal supervise --replicas 3 --memory= -- sh run.sh {dp} \
                 --global-batch 8 --save ckpt --resume";
    let (first, rest) = flags.split_once(' ').unwrap();
    let mut run = Command::new("env");
    run.arg(first).arg(zeropp_path).args(rest.split_whitespace()).env("ZEROPP", zeropp_path);
    let child = run.current_dir(at).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let begin = Instant::now();
    let text = || fs::read_to_string(at.join("m.jsonl")).unwrap_or_default();
    while !text().contains("\n{\"step\"") {
        assert!(begin.elapsed() < Duration::from_secs(60), "no step");
        std::thread::sleep(Duration::from_millis(5));
    }
    fs::write(at.join("there"), "3").unwrap();
    let kill = Command::new("kill").args(["-USR2", &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
    let Output { status, stderr, .. } = child.wait_with_output().unwrap();
    let reported = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(0), "{reported}");
    assert_eq!(fs::read_to_string(at.join("starts")).unwrap(), "3\n2\n3\n", "{reported}");
    let joined = reported.split_once("the command is started again from step ").expect("it was").1;
    let (step, with) = joined.split_once(',').unwrap();
    assert!(with.starts_with(" with all 3 replicas"), "{reported}");
    in_turn(at, &small, &[(2, step.parse().unwrap()), (3, 2000)]);
    assert_eq!(bits(&at.join("m.jsonl")), bits(&at.join("all.jsonl")));
    let lines = text().lines().filter(|line| line.starts_with("{\"step\"")).count();
    assert_eq!(lines, 2000, "no step was done twice");
}
