//! A resumed run goes on with the same bits on any layout, and nothing damaged is resumed from.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::common::{Run, assert_same_bits, run, run_saving_all, tiny};
use zeropp::config::Resume;
use zeropp::model::gpt;
use zeropp::{Config, Error, Trainer};
use zeropp_checkpoint::{Holder, Store};

/// A run of 20 steps that has saved after 10 and 20, and its folder.
struct SavedRun {
    dir: tempfile::TempDir,
    whole: Run,
}

impl SavedRun {
    fn new(config: Config) -> SavedRun {
        let dir = tempfile::tempdir().unwrap();
        let save = Some(dir.path().join("ckpt"));
        let whole = run_saving_all(Config { save, save_every: 10, ..config });
        SavedRun { dir, whole }
    }

    fn folder(&self) -> PathBuf {
        self.dir.path().join("ckpt")
    }

    /// What `config` makes of steps 11 to 20, from a copy of the checkpoint of step 10.
    fn rest(&self, config: Config) -> Run {
        let copy = self.dir.path().join("copy");
        let _ = fs::remove_dir_all(&copy);
        copy_folder(&self.folder().join("step-000010"), &copy.join("step-000010"));
        let rest = run(Config { save: Some(copy.clone()), resume: Resume::Newest, ..config });
        assert_eq!(rest.steps.first().map(|s| s.step), Some(11));
        assert!(copy.join("step-000020/manifest.json").exists());
        rest
    }

    /// The second half of the whole run, to compare with.
    fn half(&self) -> Run {
        Run {
            steps: self.whole.steps[10..].to_vec(),
            summary: self.whole.summary.clone(),
            weights: self.whole.weights.clone(),
        }
    }
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> =
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// What a run ends with that must not take a step.
fn refusal(config: Config) -> String {
    let trained =
        Trainer::new(config).and_then(|t| t.train(|_| -> () { panic!("a step was taken") }));
    let error = trained.expect_err("not a run that can start");
    assert!(error.is_bad_input(), "{error}");
    error.to_string()
}

#[test]
fn the_second_half_has_the_bits_of_an_uninterrupted_run_on_any_pipeline() {
    let base = Config { pp: 2, virtual_stages: Some(2), zero3: 2, ..tiny() };
    let saved = SavedRun::new(base.clone());
    assert_same_bits(&run(base.clone()), &saved.whole, "saving changes nothing");
    for (pp, v) in [(2, 2), (1, 1), (4, 1), (2, 4)] {
        let config = Config { pp, virtual_stages: Some(v), ..base.clone() };
        assert_same_bits(&saved.half(), &saved.rest(config), &format!("pp {pp} virtual {v}"));
    }
}

#[test]
fn a_cut_of_sums_that_is_left_open_is_the_checkpoint_s() {
    let open = Config { pp: 2, micro_batches: None, unit: None, ..tiny() };
    let saved = SavedRun::new(open.clone());
    assert_eq!((open.micro_batches(), open.unit()), (6, 3));
    for pp in [1, 4] {
        let config = Config { pp, ..open.clone() };
        assert_ne!((config.micro_batches(), config.unit()), (6, 3), "its own defaults are others");
        assert_same_bits(&saved.half(), &saved.rest(config), &format!("pp {pp}"));
    }
    let reported = Config { unit: Some(2), ..open };
    let copy = Config { save: Some(saved.folder()), resume: true.into(), steps: 21, ..reported };
    let trainer = Trainer::new(copy).unwrap();
    assert_eq!(trainer.plan().units, [2, 2, 2]);
    let changed = trainer.resumed().unwrap().changed.join("; ");
    assert!(changed.contains("unit = 2 (was 3)"), "{changed}");
}

#[test]
fn zero1_may_be_turned_on_and_off() {
    let base = Config { dp: 2, zero3: 2, pp: 2, tied: true, ..tiny() };
    for zero1 in [false, true] {
        let saved = SavedRun::new(Config { zero1, ..base.clone() });
        let files = names(&saved.folder().join("step-000020")).len();
        assert_eq!(files, if zero1 { 9 } else { 5 }, "a file for each rank that owns state");
        for resumed in [false, true] {
            let rest = saved.rest(Config { zero1: resumed, ..base.clone() });
            assert_same_bits(&saved.half(), &rest, &format!("zero1 {zero1}, then {resumed}"));
        }
        let rest = saved.rest(Config { zero1: !zero1, pp: 1, ..base.clone() });
        assert_same_bits(&saved.half(), &rest, "and another pipeline");
    }
}

#[test]
fn other_shards_and_replicas_differ_in_rounding_only() {
    let base = Config { zero3: 2, pp: 2, micro_batches: Some(6), ..tiny() };
    let saved = SavedRun::new(base.clone());
    let others = [
        Config { zero3: 1, micro_batches: Some(12), ..base.clone() },
        Config { zero3: 3, micro_batches: Some(4), unit: Some(2), ..base.clone() },
        Config { zero3: 1, dp: 2, zero1: true, ..base.clone() },
        Config { zero3: 2, dp: 3, pp: 1, micro_batches: Some(2), zero1: true, ..base.clone() },
    ];
    for config in others {
        let what = format!("{:?}", (config.pp, config.zero3, config.dp));
        let rest = saved.rest(config);
        assert_eq!(rest.steps.len(), 10);
        for (x, y) in saved.half().steps.iter().zip(&rest.steps) {
            assert_eq!((x.step, x.lr), (y.step, y.lr), "{what}");
            let relative = (x.loss - y.loss).abs() / x.loss;
            assert!(relative <= 1e-5, "{what}: step {}: {relative:e}", x.step);
        }
    }
}

#[test]
fn the_newest_are_kept_and_the_last_step_is_always_saved() {
    let dir = tempfile::tempdir().unwrap();
    let small = Config { layers: 2, steps: 7, ..tiny() };
    for (save_every, keep, kept) in [
        (3, 2, vec!["step-000006", "step-000007"]),
        (0, 2, vec!["step-000007"]),
        (7, 1, vec!["step-000007"]),
        (2, 9, vec!["step-000002", "step-000004", "step-000006", "step-000007"]),
    ] {
        let folder = dir.path().join(format!("{save_every}"));
        let config = Config { save: Some(folder.clone()), save_every, keep, ..small.clone() };
        run_saving_all(config);
        let found: Vec<_> = names(&folder).into_iter().filter(|n| n != ".lock").collect();
        assert_eq!(found, kept, "every {save_every}, keep {keep}");
    }
}

#[test]
fn a_finished_run_has_nothing_left_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let config = Config { layers: 2, save: Some(dir.path().into()), steps: 3, ..tiny() };
    let whole = run(config.clone());
    let again = Config { resume: Resume::Newest, ..config };
    let trainer = Trainer::new(again.clone()).unwrap();
    let resumed = trainer.resumed().unwrap();
    assert_eq!((resumed.step, resumed.changed.len()), (3, 0));
    let (summary, weights) =
        trainer.train_to_weights(|_| -> () { panic!("no step is left") }).unwrap();
    assert_eq!((summary.steps, weights), (0, whole.weights));

    let error = refusal(Config { steps: 2, warmup: Some(1), ..again.clone() });
    assert!(error.contains("steps = 2: 3 are done already; use more steps"), "{error}");
    let longer = Config { steps: 5, lr: 1e-3, micro_batches: Some(3), ..again };
    let trainer = Trainer::new(longer).unwrap();
    let changed = trainer.resumed().unwrap().changed.join("; ");
    for part in ["steps = 5 (was 3)", "lr = 0.001 (was 0.003)", "3 samples a step (were 6)"] {
        assert!(changed.contains(part), "{part} is not in: {changed}");
    }
    assert_eq!(trainer.train(|_| ()).unwrap().steps, 2);
}

#[test]
fn skipped_updates_are_not_counted_after_a_resume_either() {
    let dir = tempfile::tempdir().unwrap();
    let config = Config {
        layers: 2,
        lr: 1e30,
        warmup: Some(0),
        weight_decay: 0.0,
        clip: 0.0,
        steps: 4,
        save: Some(dir.path().into()),
        ..tiny()
    };
    run(config);
    let text = fs::read_to_string(dir.path().join("step-000004/manifest.json")).unwrap();
    assert!(text.contains("\"step\": 4,\n  \"updates\": 1,"), "{text}");
}

#[test]
fn folders_in_use_or_without_a_checkpoint_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("a");
    let config = Config { layers: 2, save: Some(folder.clone()), steps: 2, ..tiny() };
    let resume = Config { resume: Resume::Must, ..config.clone() };
    let named = |error: String, parts: &[&str]| {
        for part in parts.iter().chain(&[folder.to_str().unwrap()]) {
            assert!(error.contains(part), "{part} is not in: {error}");
        }
    };
    named(refusal(resume.clone()), &["no complete checkpoint", "no such folder"]);
    assert!(!folder.exists(), "a refused run leaves nothing behind");
    fs::create_dir_all(folder.join("step-000009")).unwrap();
    fs::write(folder.join("step-000009/rank-00000.safetensors"), "half").unwrap();
    named(refusal(resume.clone()), &["no complete checkpoint", "step-000009 has no manifest"]);

    run(config.clone());
    named(refusal(resume.clone()), &["step-000009", "is damaged", "resume = 2"]);
    let trainer = Trainer::new(Config { resume_fallback: true, ..resume }).unwrap();
    assert_eq!(trainer.resumed().unwrap().step, 2, "the newest complete one");
    let error = refusal(config.clone());
    named(error, &["there is a checkpoint of step 2; go on from it with resume"]);
    fs::write(dir.path().join("file"), "").unwrap();
    let error = refusal(Config { save: Some(dir.path().join("file")), ..config.clone() });
    assert!(error.contains("is a file; name a folder"), "{error}");
    let inside = dir.path().join("file/inside");
    let error = refusal(Config { save: Some(inside), ..config.clone() });
    assert!(error.starts_with("save = ") && error.contains("file is a file; name a"), "{error}");
    let nowhere = Config { save: Some("/proc/none/here".into()), ..config };
    let error = Trainer::new(nowhere).unwrap().train(|_| ()).unwrap_err();
    assert!(error.is_bad_input() && error.to_string().contains("choose a folder"), "{error}");
}

#[test]
fn a_folder_has_one_run_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let config = Config { layers: 2, save: Some(dir.path().into()), steps: 2, ..tiny() };
    let (first, second) =
        (Trainer::new(config.clone()).unwrap(), Trainer::new(config.clone()).unwrap());
    let mut refused = None;
    let attempt = || (second.train(|_| ()), Trainer::new(config.clone()).err());
    first.train(|_| refused = refused.take().or_else(|| Some(attempt()))).unwrap();
    let (late, early) = refused.unwrap();
    assert!(early.unwrap().to_string().contains("another run is saving there"));
    let error = late.unwrap_err();
    assert!(error.is_bad_input() && error.to_string().contains("another run"), "{error}");
    let error = second.train(|_| ()).unwrap_err();
    assert!(error.to_string().contains("there is a checkpoint of step 2"), "{error}");
}

/// A job that is started again at once waits for the one before, which still saves.
#[test]
fn a_run_that_goes_on_waits_for_the_one_before_it() {
    let saved = SavedRun::new(Config { layers: 2, steps: 20, ..tiny() });
    let config = Config { layers: 2, save: Some(saved.folder()), resume: Resume::Newest, ..tiny() };
    let config = Config { steps: 21, ..config };
    let (lock, _) = Store::new(saved.folder()).lock().unwrap();
    lock.say(&Holder { pid: 4711, host: "n1.rack-a".into(), since: 1.0 });
    let hasty = Config { start_timeout_s: 0.3, ..config.clone() };
    let error = Trainer::new(hasty).err().unwrap();
    // It is no wrong input: a supervisor starts it again.
    assert!(!error.is_bad_input(), "{error}");
    let text = error.to_string();
    assert!(text.contains("process 4711 on n1.rack-a, for ") && text.contains("0.3 s"), "{text}");
    let begin = Instant::now();
    let end = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(1));
        drop(lock);
    });
    let trainer = Trainer::new(config).unwrap();
    assert!(begin.elapsed() >= Duration::from_secs(1));
    assert_eq!(trainer.resumed().unwrap().step, 20);
    end.join().unwrap();
}

#[test]
fn another_model_is_refused_with_the_setting_or_else_the_parameter_and_both_shapes() {
    let saved = SavedRun::new(Config { layers: 2, steps: 20, ..tiny() });
    let same = Config { layers: 2, save: Some(saved.folder()), resume: Resume::Newest, ..tiny() };
    let cases = [
        (
            Config { hidden: 32, ..same.clone() },
            vec!["hidden = 32: was 16; leave hidden out, or use 16"],
        ),
        (Config { layers: 3, ..same.clone() }, vec!["layers = 3: was 2"]),
        (Config { layers: 1, ..same.clone() }, vec!["layers = 1: was 2"]),
        (Config { tied: true, ..same.clone() }, vec!["tied = true: was false"]),
        (Config { seq: 16, ..same.clone() }, vec!["seq = 16: was 8"]),
        (Config { heads: 4, ..same.clone() }, vec!["heads = 4: was 2; leave heads out"]),
        (Config { seed: 12, ..same.clone() }, vec!["seed = 12: was 11; leave seed out, or use 11"]),
    ];
    for (config, parts) in cases {
        let error = refusal(config);
        for part in parts.into_iter().chain(["step-000020"]) {
            assert!(error.contains(part), "{part} is not in: {error}");
        }
    }
    let model = gpt::build(same.gpt_shape(300));
    let error = Trainer::builder(same).model(model).build().err().unwrap().to_string();
    assert!(error.contains("[300, 16]") && error.contains("[256, 16]"), "{error}");
}

#[test]
fn damage_to_any_file_is_found_before_a_rank_starts() {
    let config = Config { layers: 2, zero3: 2, ..tiny() };
    let saved = SavedRun::new(config.clone());
    let resume = Config { save: Some(saved.folder()), resume: Resume::Newest, ..config };
    let newest = saved.folder().join("step-000020");
    let files = names(&newest);
    assert_eq!(files, ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]);
    let expect = |what: String, file: &str| {
        let error = refusal(resume.clone());
        assert!(error.contains(file) && error.contains("step-000020"), "{what}: {error}");
    };
    for file in &files {
        let path = newest.join(file);
        let good = fs::read(&path).unwrap();
        let n = good.len();
        // Start, header and its length, first and last data, and places in between.
        let spots = [0, 1, 7, 8, 9, 20, 100, n / 3, n / 2, n - 100, n - 2, n - 1];
        for at in spots {
            let mut bad = good.clone();
            bad[at] ^= 1 << (at % 8);
            fs::write(&path, bad).unwrap();
            expect(format!("{file}: byte {at}"), file);
        }
        for len in [0, 1, 8, n / 2, n - 1] {
            fs::write(&path, &good[..len]).unwrap();
            expect(format!("{file}: cut to {len}"), file);
        }
        fs::write(&path, [good.as_slice(), &[0]].concat()).unwrap();
        expect(format!("{file}: a byte more"), file);
        if file != "manifest.json" {
            fs::remove_file(&path).unwrap();
            expect(format!("{file}: missing"), file);
            fs::create_dir(&path).unwrap();
            expect(format!("{file}: a folder"), file);
            fs::remove_dir(&path).unwrap();
        }
        fs::write(&path, &good).unwrap();
    }
    for garbage in ["", "{}", "null", "{\"digest\": 1}", "\u{fffd}"] {
        let good = fs::read(newest.join("manifest.json")).unwrap();
        fs::write(newest.join("manifest.json"), garbage).unwrap();
        expect(format!("garbage {garbage}"), "manifest.json");
        fs::write(newest.join("manifest.json"), good).unwrap();
    }
    Trainer::new(resume.clone()).unwrap().train(|_| ()).unwrap();
    // Under another step's name it would leave out the steps between.
    let renamed = saved.folder().join("step-000030");
    fs::rename(&newest, &renamed).unwrap();
    let error = refusal(Config { steps: 40, ..resume.clone() });
    assert!(error.contains("step-000030") && error.contains("is of step 20"), "{error}");
    fs::rename(&renamed, &newest).unwrap();
    fs::remove_file(newest.join("manifest.json")).unwrap();
    assert!(refusal(resume.clone()).contains("resume = 10"), "it had one when it got its name");
    let older = Trainer::new(Config { resume_fallback: true, ..resume }).unwrap();
    assert_eq!(older.resumed().unwrap().step, 10);
}

#[test]
fn a_checkpoint_that_cannot_be_written_ends_the_run_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("gone");
    let config = Config {
        layers: 2,
        zero3: 2,
        steps: 100_000,
        save: Some(folder.clone()),
        save_every: 1,
        ..tiny()
    };
    let error = Trainer::new(config).unwrap().train(|s| {
        if s.step == 1 {
            // The ranks may be adding to it; in the end it is gone.
            while folder.exists() {
                let _ = fs::remove_dir_all(&folder);
            }
        }
    });
    let error = error.unwrap_err();
    assert!(matches!(error, Error::Rank { .. }), "{error}");
    assert!(error.to_string().contains(folder.to_str().unwrap()), "{error}");
    assert!(!error.is_bad_input());
}
