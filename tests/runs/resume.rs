//! Which checkpoint a run goes on from, and that none is lost or in the way.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use tracing::span::{Attributes, Id};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

use crate::common::captured::{capture, warnings};
use crate::common::{Run, assert_same_bits, await_checkpoint, run, run_saving_all, tiny};
use zeropp::config::{Decay, Resume};
use zeropp::data::Position;
use zeropp::{Config, Trainer};

/// What a run ends with that must not take a step.
fn refusal(config: Config) -> String {
    let trained =
        Trainer::new(config).and_then(|t| t.train(|_| -> () { panic!("a step was taken") }));
    let error = trained.expect_err("not a run that can start");
    assert!(error.is_bad_input(), "{error}");
    error.to_string()
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> =
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Runs to the end; what it warned of comes with it.
fn run_with_warnings(config: Config) -> (Run, Vec<String>) {
    warnings(|| run(config))
}

/// The part of a run after `step`.
fn after(whole: &Run, step: usize) -> Run {
    let (summary, weights) = (whole.summary.clone(), whole.weights.clone());
    Run { steps: whole.steps[step..].to_vec(), summary, weights }
}

#[test]
fn plain_resume_begins_where_nothing_was_saved_and_never_over_damage() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("a");
    let base = Config { layers: 2, steps: 4, save: Some(folder.clone()), ..tiny() };
    let config = Config { resume: Resume::Newest, ..base.clone() };
    let trainer = Trainer::new(config.clone()).unwrap();
    assert!(trainer.resumed().is_none());
    assert_eq!(trainer.train(|_| ()).unwrap().steps, 4);
    assert_eq!(Trainer::new(config.clone()).unwrap().resumed().unwrap().step, 4);

    // What looks like a checkpoint and is none says that something was lost.
    fs::remove_file(folder.join("step-000004/manifest.json")).unwrap();
    assert!(refusal(config).contains("step-000004 has no manifest.json"));
    let must = Config { resume: Resume::Must, save: Some(dir.path().join("b")), ..base };
    assert!(refusal(must).contains("no complete checkpoint to resume from"));
}

/// A run of 9 steps, saved after every third; the newest checkpoint has a wrong byte in its data.
fn with_damaged_newest(dir: &Path) -> (Config, PathBuf) {
    let folder = dir.join("ckpt");
    let config = Config {
        layers: 4,
        pp: 2,
        zero3: 2,
        steps: 9,
        decay: Decay::Constant,
        save: Some(folder.clone()),
        save_every: 3,
        keep: 9,
        ..tiny()
    };
    run_saving_all(config.clone());
    let file = folder.join("step-000009/rank-00003.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let at = bytes.len() - 5;
    bytes[at] ^= 4;
    fs::write(&file, bytes).unwrap();
    (Config { resume: Resume::Newest, steps: 12, ..config }, folder)
}

#[test]
fn a_damaged_newest_checkpoint_offers_the_one_before_and_takes_it_if_told() {
    let dir = tempfile::tempdir().unwrap();
    let (config, folder) = with_damaged_newest(dir.path());
    let error = refusal(config.clone());
    for part in ["step-000009/rank-00003", "is damaged", "resume = 6", "true:fallback"] {
        assert!(error.contains(part), "{part} is not in: {error}");
    }
    assert!(folder.join("step-000009").exists(), "a refused run touches nothing");
    let (save_every, keep) = (0, tiny().keep);
    let whole = run(Config { save: None, save_every, keep, resume: Resume::No, ..config });

    for damage in ["a byte", "a cut file", "no manifest"] {
        let dir = tempfile::tempdir().unwrap();
        let (config, folder) = with_damaged_newest(dir.path());
        let newest = folder.join("step-000009");
        match damage {
            "a cut file" => fs::write(newest.join("rank-00000.safetensors"), "").unwrap(),
            // Before, it was passed over without a word, and replaced by the next save.
            "no manifest" => {
                fs::remove_file(newest.join("manifest.json")).unwrap();
                let error = refusal(config.clone());
                assert!(error.contains("resume = 6"), "{error}");
            }
            _ => {}
        }
        let (rest, reported) = run_with_warnings(Config { resume_fallback: true, ..config });
        let reported = reported.join("\n");
        for part in ["is damaged", "going on from step 6", "step-000009.aside-1"] {
            assert!(reported.contains(part), "{part} is not in: {reported}");
        }
        assert_same_bits(&after(&whole, 6), &rest, "from the checkpoint before");
    }
}

#[test]
fn resume_may_name_a_step_and_loses_no_newer_one() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("ckpt");
    let config =
        Config { layers: 2, steps: 9, save: Some(folder.clone()), save_every: 3, ..tiny() };
    let whole = run_saving_all(Config { keep: 9, ..config.clone() });
    let error = refusal(Config { resume: Resume::Step(4), ..config.clone() });
    assert!(error.contains("resume = 4: ") && error.contains("use one of 3, 6, 9"), "{error}");
    let rest = run_saving_all(Config { resume: Resume::Step(3), ..config });
    assert_same_bits(&after(&whole, 3), &rest, "from step 3");
    let kept = ["step-000006", "step-000006.aside-1", "step-000009", "step-000009.aside-1"];
    assert_eq!(names(&folder)[1..], kept, "newer ones are set aside, and count for nothing");
}

#[cfg(target_os = "linux")]
#[test]
fn an_old_checkpoint_that_cannot_be_removed_is_reported_once_and_ends_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("ckpt");
    let config = Config {
        layers: 2,
        steps: 6,
        save: Some(folder.clone()),
        save_every: 1,
        keep: 1,
        ..tiny()
    };
    let trainer = Trainer::new(config.clone()).unwrap();
    let mut stuck = None;
    let (done, reported) = warnings(|| {
        trainer.train(|s| {
            // Saving goes on behind the steps.
            if s.step > 1 {
                await_checkpoint(&folder, s.step - 1);
            }
            if s.step == 2 {
                stuck = Some(Stuck::new(&folder, "step-000001"));
            }
        })
    });
    assert_eq!(done.unwrap().steps, 6);
    assert_eq!(reported.len(), 1, "{reported:?}");
    assert!(
        reported[0].contains("cannot remove") && reported[0].contains("step-000001"),
        "{reported:?}"
    );
    // What is left is in no later run's way, which tries again and tells of it.
    let (rest, reported) = run_with_warnings(Config { steps: 8, resume: Resume::Newest, ..config });
    assert_eq!((rest.steps.len(), reported.len()), (2, 1), "{reported:?}");
}

/// A checkpoint with something in it that cannot be removed.
#[cfg(target_os = "linux")]
struct Stuck(PathBuf);

#[cfg(target_os = "linux")]
impl Stuck {
    fn new(folder: &Path, name: &str) -> Stuck {
        use std::os::unix::fs::PermissionsExt;
        let inside = folder.join(name).join("held");
        fs::create_dir(&inside).unwrap();
        fs::write(inside.join("file"), "").unwrap();
        fs::set_permissions(&inside, fs::Permissions::from_mode(0o500)).unwrap();
        // Permissions do not hold root back.
        let _ = Command::new("chattr").arg("+i").arg(inside.join("file")).output();
        Stuck(folder.to_path_buf())
    }
}

#[cfg(target_os = "linux")]
impl Drop for Stuck {
    fn drop(&mut self) {
        let _ = Command::new("chattr").args(["-R", "-i"]).arg(&self.0).output();
        let _ = Command::new("chmod").args(["-R", "u+w"]).arg(&self.0).output();
    }
}

/// Does something once, when the thread of a rank begins.
struct AtRanks(Box<dyn Fn() + Send + Sync>);

impl<S: tracing::Subscriber> Layer<S> for AtRanks {
    fn on_new_span(&self, span: &Attributes<'_>, _: &Id, _: Context<'_, S>) {
        if span.metadata().name() == "rank" {
            (self.0)();
        }
    }
}

/// A file that turns out to be of another kind only once the ranks are there ends them before their
/// first step.
#[test]
fn ranks_that_are_not_let_begin_train_nothing_and_save_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, metrics) = (dir.path().join("ckpt"), dir.path().join("m.csv"));
    let config = |steps, pp| Config {
        layers: 2,
        pp,
        steps,
        decay: Decay::Constant,
        save: Some(folder.clone()),
        save_every: 1,
        keep: 2,
        metrics: Some(metrics.clone()),
        flight_dir: Some(dir.path().join("failed")),
        resume: Resume::Newest,
        ..tiny()
    };
    run_saving_all(config(2, 1));
    let (before, rows) = (names(&folder), fs::read(&metrics).unwrap());
    for pp in [1, 2] {
        fs::write(&metrics, &rows).unwrap();
        let trainer = Trainer::new(config(9, pp)).unwrap();
        let path = metrics.clone();
        let spoil = AtRanks(Box::new(move || fs::write(&path, "a,b\n1,2\n").unwrap()));
        let begin = Instant::now();
        let start = || {
            let all = tracing_subscriber::registry().with(spoil);
            tracing::subscriber::with_default(all, || trainer.steps().map(drop))
        };
        let error = capture(start).0.expect_err("other columns");
        assert!(error.is_bad_input() && error.to_string().contains("other columns"), "{error}");
        assert!(begin.elapsed() < Duration::from_secs(30), "no rank waits for another");
        assert_eq!(names(&folder), before, "P = {pp}");
        assert!(!dir.path().join("failed").exists(), "no rank has failed");
    }
    fs::write(&metrics, &rows).unwrap();
    assert_eq!(Trainer::new(config(3, 2)).unwrap().train(|_| ()).unwrap().steps, 1);
}

/// Before, the place was worked out as steps times today's batch: some samples came twice.
#[test]
fn a_resumed_run_with_another_batch_reads_on_where_the_checkpoint_ended() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    fs::write(&data, (0..8 * 48 + 1).map(|i| (i % 251) as u8).collect::<Vec<u8>>()).unwrap();
    let folder = dir.path().join("ckpt");
    let of = |steps, batch: usize, (seq, zero3), resume| Config {
        layers: 2,
        data: Some(data.clone()),
        order: zeropp::config::Order::Epochs,
        steps,
        seq,
        zero3,
        global_batch: Some(batch.to_string()),
        micro_batches: None,
        unit: None,
        save: Some(folder.clone()),
        keep: 9,
        resume,
        // Without learned positions, any length of samples will do.
        model: "llama".into(),
        activation: zeropp::config::Activation::Swiglu,
        ..tiny()
    };
    let position = |step| {
        let checkpoint = zeropp_zero3::checkpoint::Store::new(&folder).open(step).unwrap();
        checkpoint.manifest().position.clone().unwrap()
    };
    run(of(3, 8, (8, 1), Resume::No));
    assert_eq!(position(3), Position::after(24, 8));
    run(of(5, 4, (8, 2), Resume::Must));
    assert_eq!(position(5), Position::after(32, 8));
    // 16 of the epoch's 48 samples are left, and are cut into others of 6 tokens, and those of 4.
    run(of(6, 4, (6, 2), Resume::Must));
    assert_eq!(position(6), Position::after(32, 8).and(4, 6));
    run(of(7, 4, (4, 1), Resume::Must));
    assert_eq!(position(7), Position::after(32, 8).and(4, 6).and(4, 4));
}

#[test]
fn a_resumed_run_says_in_numbers_what_becomes_of_the_learning_rate() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("ckpt");
    let of = |steps, resume| Config {
        layers: 2,
        steps,
        lr: 1e-3,
        min_lr: Some(1e-4),
        warmup: Some(2),
        decay: Decay::Linear,
        save: Some(folder.clone()),
        resume,
        ..tiny()
    };
    run(of(4, Resume::No));
    let changed = |steps| {
        let trainer = Trainer::new(of(steps, Resume::Must)).unwrap();
        trainer.resumed().unwrap().changed.clone()
    };
    assert_eq!(changed(4), [""; 0]);
    let said = changed(8);
    let rate = "learning rate at step 4: 1.00e-4 -> 7.00e-4, since steps = 8 (was 4)";
    assert_eq!(said, ["steps = 8 (was 4)", rate]);
}
