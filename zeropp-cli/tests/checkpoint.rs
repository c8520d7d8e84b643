//! Saving, being killed and resuming, as the command's users meet it.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::Outcome;

fn command(dir: &Path, line: &str) -> Command {
    common::command(dir, &format!("run {line}"))
}

fn zeropp(dir: &Path, line: &str) -> Outcome {
    common::zeropp(dir, &format!("run {line}"))
}

/// A folder with small.toml: 2 x 2 ranks whose step is a matter of milliseconds.
fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let small =
        "layers = 2\nhidden = 16\nheads = 2\nseq = 8\nzero3 = 2\npp = 2\nvirtual = 1\nunit = 3\n";
    fs::write(dir.path().join("small.toml"), small).unwrap();
    dir
}

/// Loss and norm of every step of a metrics file, as written, which is to the bit.
fn bits(path: &Path) -> BTreeMap<u64, (String, String)> {
    let text = fs::read_to_string(path).unwrap();
    let mut steps = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with("{\"run\"")) {
        let step: serde_json::Value = serde_json::from_str(line).unwrap();
        let figures = (step["loss"].to_string(), step["grad_norm"].to_string());
        let again = steps.insert(step["step"].as_u64().unwrap(), figures);
        assert!(again.is_none(), "a step comes once: {line}");
    }
    steps
}

#[test]
fn a_resumed_command_says_so_and_goes_on() {
    let dir = folder();
    let at = dir.path();
    let all = zeropp(at, "small.toml --steps 6 --metrics all.jsonl");
    assert_eq!(all.code, Some(0), "{}", all.err);

    let line = "small.toml --steps 6 --metrics m.jsonl --save ckpt --save-every 4";
    let first = zeropp(at, line);
    assert_eq!((first.code, first.err.as_str()), (Some(0), ""));
    assert!(first.out.contains("\ncheckpoint ckpt/step-000006\n"), "{}", first.out);
    let again = zeropp(at, line);
    assert_eq!(again.code, Some(2));
    assert!(again.err.contains("save = ckpt: there is a checkpoint of step 6"), "{}", again.err);

    fs::remove_dir_all(at.join("ckpt/step-000006")).unwrap();
    let resumed = zeropp(at, &format!("{line} --resume --pp 1 --lr 0.003"));
    assert_eq!((resumed.code, resumed.err.as_str()), (Some(0), ""));
    for part in ["resuming from ckpt/step-000004: 4 of 6 steps are done\n", "step 5/6", "2 steps"] {
        assert!(resumed.out.contains(part), "{part} is not in:\n{}", resumed.out);
    }
    assert!(!resumed.out.contains("step 4/6"), "{}", resumed.out);
    assert_eq!(bits(&at.join("m.jsonl")), bits(&at.join("all.jsonl")));

    let done = zeropp(at, &format!("{line} --resume"));
    assert_eq!((done.code, done.err.as_str()), (Some(0), ""));
    assert!(done.out.contains("6 of 6 steps are done; nothing is left to do"), "{}", done.out);
    assert_eq!(bits(&at.join("m.jsonl")).len(), 6, "the metrics are as they were");
}

/// Before, a resume without the model's flags was refused with the shape of a tensor.
#[test]
fn a_resumed_run_takes_its_model_tokens_and_split_from_the_checkpoint() {
    let dir = folder();
    let at = dir.path();
    let ids: Vec<u8> = (0..3000u16).flat_map(|i| (i * 37 % 300).to_le_bytes()).collect();
    fs::write(at.join("ids.bin"), ids).unwrap();
    let model = "--model llama --layers 3 --hidden 32 --heads 2 --kv-heads 1 --seq 16 --seed 5 \
                 --vocab 320 --tokenizer u16 --split 9,1 --micro-batches 4 --unit 1";
    let rest = "--data ids.bin --eval-every 4 --eval-steps 1 --steps 4";
    let all = zeropp(at, &format!("{model} {rest} --metrics all.jsonl"));
    assert_eq!(all.code, Some(0), "{}", all.err);
    let first = format!("{model} {rest} --metrics m.jsonl --save ckpt --save-every 2");
    assert_eq!(zeropp(at, &first).code, Some(0));
    fs::remove_dir_all(at.join("ckpt/step-000004")).unwrap();
    let resumed = zeropp(at, &format!("{rest} --metrics m.jsonl --save ckpt --resume --pp 2"));
    assert_eq!(resumed.code, Some(0), "{}", resumed.err);
    assert_eq!(bits(&at.join("m.jsonl")), bits(&at.join("all.jsonl")));
    let validation = |out: &str| {
        let at = out.find("validation loss").expect("measured");
        out[at..].split("  ").next().unwrap().to_owned()
    };
    assert_eq!(validation(&resumed.out), validation(&all.out));
    // What the checkpoint's unit costs on more ranks stands in the line of the resume.
    let cost = "2 of 4 steps are done; pp = 2 (was 1) keeps the unit, so that no bit changes: \
                unit = 1: a rank idles";
    assert!(resumed.out.contains(cost), "{}", resumed.out);
    for (flags, said) in [
        ("--layers 4", "layers = 4: was 3; leave layers out, or use 3"),
        ("--model gpt", "model = gpt: was llama; leave model out, or use llama"),
        ("--heads 4", "heads = 4: was 2; leave heads out, or use 2"),
        ("--tokenizer u32", "tokenizer = u32: was u16; leave tokenizer out, or use u16"),
    ] {
        let got = zeropp(at, &format!("{rest} --save ckpt --resume {flags}"));
        assert_eq!(got.code, Some(2), "{flags}: {}{}", got.out, got.err);
        assert!(got.err.contains(said), "{said} is not in: {}", got.err);
    }
    // The checkpoint's split gives way to data for validation that is named.
    let named = "--data ids.bin --eval-data ids.bin --eval-every 5 --eval-steps 1 --steps 5";
    let named = zeropp(at, &format!("{named} --save ckpt --resume"));
    assert_eq!(named.code, Some(0), "{}", named.err);
}

/// The weights below adapters are not in their checkpoint, which says where they were.
#[test]
fn a_resumed_run_of_adapters_finds_the_weights_that_they_stand_on() {
    let dir = folder();
    let at = dir.path();
    let all = |line: &str| {
        let got = zeropp(at, line);
        assert_eq!(got.code, Some(0), "{line}: {}", got.err);
    };
    all("small.toml --steps 2 --save base");
    let first = "--init-from base --lora-rank 2 --steps 4 --micro-batches 2 --unit 1";
    all(&format!("{first} --metrics all.jsonl"));
    all(&format!("{first} --metrics m.jsonl --save ckpt --save-every 2"));
    fs::remove_dir_all(at.join("ckpt/step-000004")).unwrap();
    all("--steps 4 --metrics m.jsonl --save ckpt --resume");
    assert_eq!(bits(&at.join("m.jsonl")), bits(&at.join("all.jsonl")));
}

#[test]
fn impossible_resumes_exit_with_code_2() {
    let dir = folder();
    let at = dir.path();
    let line = "small.toml --steps 2 --save ckpt";
    let expect = |flags: &str, message: &str| {
        let got = zeropp(at, &format!("{line} --resume=must {flags}"));
        assert_eq!(got.code, Some(2), "{message}: {}{}", got.out, got.err);
        assert!(got.err.contains(message), "{message:?} is not in: {}", got.err);
        assert_eq!((got.err.matches("error: ").count(), got.out.as_str()), (1, ""));
    };
    expect("", "save = ckpt: no complete checkpoint to resume from (there is no such folder)");
    assert_eq!(zeropp(at, line).code, Some(0));
    // The setting comes first, and the checkpoint's name after it.
    expect(
        "--hidden 32",
        "error: hidden = 32: was 16; leave hidden out, or use 16 (checkpoint ckpt/step-000002)",
    );
    let fewer = zeropp(at, "small.toml --steps 1 --save ckpt --resume");
    assert!(
        fewer.err.contains("error: steps = 1: 2 are done already; use more steps"),
        "{}",
        fewer.err
    );
    for file in ["manifest.json", "rank-00000.safetensors", "rank-00003.safetensors"] {
        let path = at.join("ckpt/step-000002").join(file);
        let good = fs::read(&path).unwrap();
        for (damage, message) in [
            (good[..good.len() / 2].to_vec(), "is damaged"),
            ([&good[..good.len() - 2], b"??"].concat(), "is damaged"),
            (Vec::new(), "is damaged"),
        ] {
            fs::write(&path, damage).unwrap();
            expect("", message);
            expect("", file);
        }
        fs::remove_file(&path).unwrap();
        expect("", file);
        fs::write(&path, good).unwrap();
    }
    assert_eq!(zeropp(at, &format!("{line} --resume")).code, Some(0));
}

/// Weights to begin with are held against their digests by the ranks that read them: as bad input,
/// on all of them, and never another step's in silence.
#[test]
fn damaged_weights_begin_no_run_and_no_command() {
    let dir = folder();
    let at = dir.path();
    assert_eq!(zeropp(at, "small.toml --steps 4 --save-every 2 --save ckpt").code, Some(0));
    let step = at.join("ckpt/step-000004");
    let expect = |file: &str, lines: &[&str]| {
        for line in lines {
            let got = common::zeropp(at, line);
            assert_eq!(got.code, Some(2), "{line}: {}{}", got.out, got.err);
            let (damaged, errors) = (format!("{file} is damaged"), got.err.matches("error: "));
            assert!(got.err.contains(&damaged) && errors.count() == 1, "{line}: {}", got.err);
            assert_eq!(got.err.matches("restore it").count(), 1, "{line}: {}", got.err);
        }
    };
    fs::write(at.join("text"), "some words to measure a loss on ".repeat(20)).unwrap();
    let lines = [
        "run small.toml --init-from ckpt",
        "run small.toml --init-from ckpt --zero3 1",
        "eval ckpt --data text",
        "generate ckpt --prompt a",
        "export ckpt -o folder",
    ];
    let file = step.join("rank-00000.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, &bytes).unwrap();
    expect("rank-00000.safetensors", &lines);
    assert!(!at.join("folder").exists());
    fs::remove_file(step.join("manifest.json")).unwrap();
    expect("manifest.json", &lines);
    expect("manifest.json", &["inspect ckpt"]);
}

#[test]
fn a_killed_run_goes_on_with_the_same_bits() {
    // Its own number, for a campaign that takes longer.
    let kills = std::env::var("ZEROPP_KILLS").map_or(50, |n| n.parse().expect("a number"));
    let dir = folder();
    let at = dir.path();
    let steps: u64 = 30 * kills;
    let all = zeropp(at, &format!("small.toml --steps {steps} --metrics all.jsonl"));
    assert_eq!(all.code, Some(0), "{}", all.err);

    let line = format!("small.toml --steps {steps} --metrics m.jsonl --save ckpt --save-every 1");
    let complete = || {
        let entries = fs::read_dir(at.join("ckpt")).into_iter().flatten();
        let names = entries.map(|e| e.unwrap().file_name().into_string().unwrap());
        names.filter(|n| n.starts_with("step-")).max()
    };
    let mut state = 7u64;
    let mut seen = Vec::new();
    for _ in 0..kills {
        let before = complete();
        let resume = if before.is_some() { "--resume" } else { "" };
        let mut child = command(at, &format!("{line} {resume}"))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // Once it has saved something, a random moment.
        while complete() == before {
            if let Some(status) = child.try_wait().unwrap() {
                panic!(
                    "{status}: {}",
                    String::from_utf8_lossy(&child.wait_with_output().unwrap().stderr)
                );
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        std::thread::sleep(Duration::from_micros((state >> 33) % 20_000));
        child.kill().unwrap();
        child.wait().unwrap();
        seen.push(complete().unwrap());
    }
    assert!(seen.windows(2).all(|w| w[0] < w[1]), "each run goes on: {seen:?}");
    assert!(*seen.last().unwrap() < format!("step-{steps:06}"), "killed before the end: {seen:?}");

    let line = line.replace("--save-every 1", "--save-every 0");
    let rest = zeropp(at, &format!("{line} --resume --pp 1"));
    assert_eq!((rest.code, rest.err.as_str()), (Some(0), ""));
    assert_eq!(bits(&at.join("m.jsonl")), bits(&at.join("all.jsonl")));
    let mut left: Vec<_> = fs::read_dir(at.join("ckpt"))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    assert_eq!(left.len(), 3, "the lock and the newest two: {left:?}");
}
