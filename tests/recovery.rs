//! Ranks that fail meet again and go on: the run has the bits of an undisturbed one, and a fault
//! that comes back ends it by name.

mod common;
#[path = "common/saboteur.rs"]
mod saboteur;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{Run, assert_same_bits, run, tiny};
use saboteur::{Fault, with_places};
use zeropp::config::{OnLoss, OptimizerSync, OutStates, Resume};
use zeropp::layer::Model;
use zeropp::model::gpt;
use zeropp::{Config, Error, Trainer};

fn small() -> Config {
    Config { layers: 4, pp: 2, zero3: 2, virtual_stages: Some(2), ..tiny() }
}

fn model(config: &Config) -> Model {
    gpt::build(config.gpt_shape(256))
}

/// Trains `config` with a model that has `faults`.
fn with_faults(config: Config, faults: &[Arc<Fault>]) -> Run {
    let whole = model(&config);
    let model = faults.iter().fold(whole, |model, fault| fault.hidden_in(model));
    let trainer = Trainer::builder(config).model(model).build().unwrap();
    let mut steps = Vec::new();
    let (summary, weights) =
        trainer.train_to_weights(|s| steps.push(s.clone())).expect("a run that recovers");
    Run { steps, summary, weights }
}

fn panics() {
    panic!("sabotage")
}

#[test]
fn ranks_that_panic_meet_again_and_the_bits_are_those_of_an_undisturbed_run() {
    let whole = run(small());
    // The first of them in the first step; the last near the end.
    for places in [vec![(1, 0)], vec![(0, 40)], vec![(3, 200), (2, 330)]] {
        let dir = tempfile::tempdir().unwrap();
        let faults: Vec<_> =
            places.iter().map(|(rank, place)| Fault::new(*rank, *place, panics)).collect();
        let config = Config {
            save: Some(dir.path().join("ckpt")),
            save_every: 1,
            max_recoveries: 4,
            flight_dir: Some(dir.path().join("failed")),
            metrics: Some(dir.path().join("m.jsonl")),
            ..small()
        };
        let rest = with_faults(config, &faults);
        assert_same_bits(&whole, &rest, &format!("{places:?}"));
        let numbers: Vec<u64> = rest.steps.iter().map(|s| s.step).collect();
        assert_eq!(numbers, (1..=20).collect::<Vec<_>>(), "each step is told once: {places:?}");
        let n = places.len();
        assert_eq!((rest.summary.recoveries, rest.summary.steps), (n as u64, 20));
        let each = rest.summary.recovery_s / n as f64;
        println!("{places:?}: {:.0} ms, {} steps redone", 1e3 * each, rest.summary.steps_redone);
        // A second on a machine of its own; this one may be shared.
        assert!(each < 5.0, "{each} s");
        let records = std::fs::read_dir(dir.path().join("failed")).unwrap().count();
        assert_eq!(records, 4 * n, "every rank has left its record of each failure");
        let lines = std::fs::read_to_string(dir.path().join("m.jsonl")).unwrap();
        assert_eq!(lines.lines().filter(|line| line.starts_with("{\"step\"")).count(), 20);
    }
}

/// A rank that fails in the middle of a sample leaves keys and values of its first slices behind.
#[test]
fn ranks_with_samples_in_slices_recover_with_the_bits_of_whole_samples() {
    let long = Config { seq: 1024, micro_batches: Some(2), unit: Some(1), steps: 4, ..small() };
    let whole = run(Config { slices: 1.into(), ..long.clone() });
    for place in [3, 45] {
        let dir = tempfile::tempdir().unwrap();
        let save = Some(dir.path().join("ckpt"));
        let config =
            Config { save, save_every: 1, max_recoveries: 2, slices: 4.into(), ..long.clone() };
        let rest = with_faults(config, &[Fault::new(2, place, panics)]);
        assert_same_bits(&whole, &rest, &format!("place {place}"));
        assert_eq!(rest.summary.recoveries, 1, "place {place}");
    }
}

/// What was in a failed rank's file is the checkpoint's again.
#[test]
fn ranks_with_their_states_in_a_file_recover_with_the_bits_of_memory() {
    let short = Config { steps: 6, ..small() };
    let whole = run(short.clone());
    let [moments, all] = [OutStates::Moments, OutStates::All];
    for (place, optimizer_out_states) in [(0, moments), (60, all), (60, moments), (100, all)] {
        let dir = tempfile::tempdir().unwrap();
        let (save, states) = (Some(dir.path().join("ckpt")), Some(dir.path().join("states")));
        let config = Config { save, save_every: 2, optimizer_out: states, ..short.clone() };
        let config = Config { optimizer_out_states, ..config };
        let config = Config { max_recoveries: 2, ..config };
        let rest = with_faults(config, &[Fault::new(3, place, panics)]);
        assert_same_bits(&whole, &rest, &format!("place {place}"));
        assert_eq!(rest.summary.recoveries, 1, "place {place}");
    }
}

/// Ranks are at different steps when one fails, and some of the steps are yet to be reported.
#[test]
fn ranks_that_do_not_wait_for_each_other_recover_too() {
    let clipped = Config { clip: 0.5, ..small() };
    let whole = run(clipped.clone());
    for place in [0, 130, 333] {
        let dir = tempfile::tempdir().unwrap();
        let config = Config {
            save: Some(dir.path().join("ckpt")),
            save_every: 4,
            max_recoveries: 2,
            optimizer_sync: OptimizerSync::Late,
            ..clipped.clone()
        };
        let rest = with_faults(config, &[Fault::new(2, place, panics)]);
        assert_same_bits(&whole, &rest, &format!("place {place}"));
        let numbers: Vec<u64> = rest.steps.iter().map(|s| s.step).collect();
        assert_eq!(numbers, (1..=20).collect::<Vec<_>>(), "each step is told once: {place}");
        assert_eq!(rest.summary.recoveries, 1, "{place}");
        assert!(rest.summary.rollbacks > 5, "{}", rest.summary.rollbacks);
    }
}

/// A run with copies in memory, of which the checkpoints are few.
fn copying(dir: &Path) -> Config {
    Config {
        save: Some(dir.join("ckpt")),
        save_every: 3,
        copies: Some(dir.join("memory")),
        metrics: Some(dir.join("m.jsonl")),
        ..small()
    }
}

/// The complete states in a folder, of checkpoints or of one run's copies, in order.
fn states(folder: &Path) -> Vec<PathBuf> {
    let name = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().into_owned();
    let entries = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path());
    let mut all: Vec<_> = entries.filter(|path| name(path).starts_with("step-")).collect();
    all.sort();
    all
}

/// The complete copies in a folder of all runs' copies.
fn copies(folder: &Path) -> Vec<PathBuf> {
    let runs = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path());
    runs.flat_map(|run| states(&run)).collect()
}

/// What `list` has of a run that has failed, once the thread that completes a state has ended:
/// when a look at it a little later shows the same, which is as it has to be.
fn at_rest(list: impl Fn() -> Vec<PathBuf>, complete: fn(&[PathBuf]) -> bool) -> Vec<PathBuf> {
    let begin = Instant::now();
    loop {
        let all = list();
        std::thread::sleep(Duration::from_millis(100));
        if complete(&all) && all == list() {
            return all;
        }
        assert!(begin.elapsed() < Duration::from_secs(60), "{all:?}");
    }
}

#[test]
fn ranks_go_on_from_a_copy_that_is_newer_than_all_checkpoints() {
    let whole = run(small());
    let dir = tempfile::tempdir().unwrap();
    let config = Config { max_recoveries: 1, save_every: 0, ..copying(dir.path()) };
    let rest = with_faults(config, &[Fault::new(3, 330, panics)]);
    assert_same_bits(&whole, &rest, "from memory");
    let summary = &rest.summary;
    // There is no checkpoint, and the fault is near the end.
    assert!(summary.recoveries == 1 && summary.steps_redone < 8, "{summary:?}");
    assert!(summary.copies > 4 && summary.copy_bytes > 0, "{summary:?}");
    let (predicted, measured) = (summary.predicted_copy_bytes, summary.copy_bytes);
    // A file has names beside the state; and a tied head's is counted, which the embedding's has.
    let near = measured.abs_diff(predicted) * 5 < measured;
    assert!(near, "{measured} bytes, {predicted} predicted");
    let (predicted, measured) = (summary.predicted_bytes.save, summary.peak_bytes.save);
    assert!(0 < measured && measured <= predicted, "{measured} bytes, {predicted} predicted");
    assert_eq!(copies(&dir.path().join("memory")), Vec::<PathBuf>::new(), "they have gone");
}

/// Steps of a run that has failed: of its newest states, and the one it went on from.
#[derive(Debug)]
struct StartedAgain {
    copy: u64,
    checkpoint: u64,
    from: u64,
}

/// Runs one that fails and starts it again, as a supervisor does, with `harm` done to its copies
/// between; holds the rest against an undisturbed run.
fn started_again(save_every: u64, harm: impl Fn(&Path)) -> StartedAgain {
    let dir = tempfile::tempdir().unwrap();
    let config = Config { save_every, ..copying(dir.path()) };
    let memory = dir.path().join("memory");
    // On a slow disk no copy may be complete by then.
    let act = move || {
        let begin = Instant::now();
        while copies(&memory).is_empty() && begin.elapsed() < Duration::from_secs(30) {
            std::thread::sleep(Duration::from_millis(5));
        }
        panics();
    };
    let faulty = Fault::new(3, 330, act).hidden_in(model(&config));
    let failed = Trainer::builder(config.clone()).model(faulty).build().unwrap().train(|_| ());
    assert!(failed.unwrap_err().to_string().contains("sabotage"));
    let step = |states: &[PathBuf]| {
        let newest = states.last().map(|path| path.to_string_lossy().into_owned());
        newest.map_or(0, |path| path.rsplit_once('-').unwrap().1.parse::<u64>().unwrap())
    };
    let saved = match save_every {
        0 => Vec::new(),
        _ => at_rest(|| states(&dir.path().join("ckpt")), |all| !all.is_empty()),
    };
    let copied = at_rest(|| copies(&dir.path().join("memory")), |all| all.len() == 1);
    copied.iter().for_each(|copy| harm(copy));
    let rest = run(Config { resume: Resume::Newest, ..config });
    let mut whole = run(small());
    let from = rest.steps[0].step - 1;
    whole.steps.drain(..from as usize);
    assert_same_bits(&whole, &rest, &format!("after step {from}"));
    StartedAgain { copy: step(&copied), checkpoint: step(&saved), from }
}

/// A checkpoint is newer where the copy of its step was not complete.
#[test]
fn a_run_that_is_started_again_goes_on_from_its_newest_state() {
    let run = started_again(3, |_| ());
    assert!(run.copy >= 5 && run.from == run.copy.max(run.checkpoint), "{run:?}");
}

/// The copies are beside the checkpoints: one that cannot be read costs the steps since the newest
/// checkpoint, and never the run.
#[test]
fn a_copy_that_is_damaged_costs_no_more_than_the_steps_since_the_newest_checkpoint() {
    let flips = |copy: &Path| {
        let file = copy.join("rank-00001.safetensors");
        let mut bytes = std::fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(file, bytes).unwrap();
    };
    let cuts = |copy: &Path| std::fs::write(copy.join("rank-00002.safetensors"), "").unwrap();
    let loses = |copy: &Path| std::fs::remove_file(copy.join("manifest.json")).unwrap();
    let harms: [fn(&Path); 3] = [flips, cuts, loses];
    for harm in harms {
        let run = started_again(3, harm);
        assert!(run.from > 0 && run.from == run.checkpoint, "{run:?}");
        let run = started_again(0, harm);
        assert!(run.copy > 0 && run.from == 0, "begun anew, as there is no checkpoint: {run:?}");
    }
}

#[test]
fn without_a_checkpoint_the_ranks_begin_anew_and_a_stall_is_a_failure_too() {
    let whole = run(small());
    let stalls = || std::thread::sleep(Duration::from_secs(20));
    for act in [panics, stalls] {
        let fault = Fault::new(2, 100, act);
        let config = Config { max_recoveries: 1, timeout_s: 0.7, ..small() };
        let begin = Instant::now();
        let rest = with_faults(config, &[fault]);
        assert_same_bits(&whole, &rest, "begun anew");
        assert_eq!(rest.summary.recoveries, 1);
        assert!(rest.summary.steps_redone > 0);
        assert!(begin.elapsed() < Duration::from_secs(19), "nobody waits for who is left behind");
    }
}

#[test]
fn a_fault_that_comes_back_at_the_same_step_ends_the_run_by_name() {
    let armed = Arc::new(AtomicBool::new(false));
    let config = Config { max_recoveries: 9, ..small() };
    let fires = armed.clone();
    let model = with_places(model(&config), move |block, kind| {
        if (block, kind) == ("h.3", 'F') && fires.load(Ordering::Relaxed) {
            panic!("sabotage");
        }
    });
    let mut seen = Vec::new();
    let trained = Trainer::builder(config).model(model).build().unwrap().train(|s| {
        seen.push(s.step);
        armed.fetch_or(s.step == 4, Ordering::Relaxed);
    });
    let error = trained.unwrap_err();
    assert!(matches!(error, Error::Rank { .. }));
    let text = error.to_string();
    for part in ["panicked: sabotage", "stage 3, action 3F", "step 1 has failed 3 times"] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
    assert_eq!(seen, [1, 2, 3, 4]);
}

#[test]
fn there_are_no_more_recoveries_than_allowed() {
    for max_recoveries in [0, 1] {
        let faults = [Fault::new(0, 60, panics), Fault::new(3, 300, panics)];
        let config = Config { max_recoveries, ..small() };
        let model = faults.iter().fold(model(&config), |model, fault| fault.hidden_in(model));
        let error =
            Trainer::builder(config).model(model).build().unwrap().train(|_| ()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("panicked: sabotage"), "{text}");
        assert_eq!(text.contains("max-recoveries = 1"), max_recoveries == 1, "{text}");
    }
}

/// Three replicas of two ranks that share eight samples a step, and go on without who fails.
fn shrinking(dir: &Path) -> Config {
    Config {
        zero3: 1,
        dp: 3,
        micro_batches: None,
        global_batch: Some("8".into()),
        save: Some(dir.join("ckpt")),
        save_every: 4,
        max_recoveries: 4,
        on_loss: OnLoss::Shrink,
        ..small()
    }
}

/// The rest of a run, in the shape of `config`, from a copy of the checkpoint of `step`.
fn rest_from(dir: &Path, step: u64, config: Config) -> Run {
    let (from, to) = (dir.join(format!("ckpt/step-{step:06}")), dir.join("again"));
    let into = to.join(from.file_name().unwrap());
    std::fs::create_dir_all(&into).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, into.join(path.file_name().unwrap())).unwrap();
    }
    let alone = Config { max_recoveries: 0, on_loss: OnLoss::Restart, ..config };
    run(Config { save: Some(to), save_every: 0, resume: Resume::Must, ..alone })
}

/// Trains `config` with a model that has `faults`; the checkpoints that are due are all there.
fn shrinks(config: Config, faults: &[Arc<Fault>]) -> Run {
    let whole = model(&config);
    let model = faults.iter().fold(whole, |model, fault| fault.hidden_in(model));
    let trainer = Trainer::builder(config.clone()).model(model).build().unwrap();
    let folder = config.save.as_ref().unwrap();
    let mut steps = Vec::new();
    let trained = trainer.train_to_weights(|step| {
        let due = (step.step - 1) / config.save_every * config.save_every;
        if due > 0 {
            common::await_checkpoint(folder, due);
        }
        steps.push(step.clone());
    });
    let (summary, weights) = trained.expect("a run that recovers");
    let numbers: Vec<u64> = steps.iter().map(|s| s.step).collect();
    assert_eq!(numbers, (1..=config.steps).collect::<Vec<_>>(), "each step is told once");
    Run { steps, summary, weights }
}

#[test]
fn a_run_goes_on_without_the_replica_that_failed_as_one_started_so_from_the_checkpoint() {
    // In the last replica and in the first, which has rank 0; without and with shared state.
    for (rank, zero1, kind) in [(5, false, "zeropp"), (0, true, "zeropp"), (3, true, "1f1b")] {
        let dir = tempfile::tempdir().unwrap();
        let (unit, v) = if kind == "zeropp" { (small().unit, 2) } else { (None, 1) };
        let config = Config {
            zero1,
            unit,
            virtual_stages: Some(v),
            schedule: kind.into(),
            keep: 100,
            ..shrinking(dir.path())
        };
        // A rank passes two blocks in F, B and W of each micro-batch: that is in step 10 or so.
        let run = shrinks(config.clone(), &[Fault::new(rank, 170, panics)]);
        let (summary, redone) = (&run.summary, run.summary.steps_redone);
        assert_eq!((summary.recoveries, summary.lost_replicas), (1, 1), "{summary:?}");
        assert!(summary.steps == 20 && redone <= 5, "{summary:?}");
        let other = run.steps.iter().position(|s| s.comm_bytes != run.steps[0].comm_bytes);
        let reported = other.expect("other programs") as u64;
        let from = reported - redone;
        assert!(from >= 4 && from.is_multiple_of(4), "a checkpoint's step: {from}");
        let fewer = Config { dp: 2, ..config };
        let mut rest = rest_from(dir.path(), from, fewer);
        assert_eq!(rest.steps[0].step, from + 1);
        // Steps that were reported before are not reported again: those after them have the bits.
        rest.steps.drain(..redone as usize);
        let after = Run { steps: run.steps[reported as usize..].to_vec(), ..run };
        assert_same_bits(&after, &rest, &format!("rank {rank}, {kind}"));
        let tokens: Vec<u64> = after.steps.iter().map(|s| s.tokens).collect();
        assert!(tokens.iter().all(|n| *n == 8 * 8), "{tokens:?}");
    }
}

#[test]
fn replicas_are_lost_one_after_the_other_and_the_last_is_started_again() {
    let dir = tempfile::tempdir().unwrap();
    let config = Config { steps: 40, ..shrinking(dir.path()) };
    // A rank's number is that among the ranks that are left.
    let places = [(4, 60), (2, 200), (1, 460), (0, 700)];
    let faults = places.map(|(rank, place)| Fault::new(rank, place, panics));
    let run = shrinks(config, &faults);
    let summary = &run.summary;
    assert_eq!((summary.recoveries, summary.lost_replicas), (4, 2), "{summary:?}");
    let save = None;
    let alone = Config { dp: 1, save, save_every: 0, ..shrinking(dir.path()) };
    let steady = common::run(Config { steps: 40, ..alone });
    for (x, y) in run.steps.iter().zip(&steady.steps) {
        assert!((x.loss - y.loss).abs() <= 1e-5 * x.loss, "{x:?} {y:?}");
    }
}

/// Whom the others waited for is lost, and not who said so first.
#[test]
fn a_replica_that_stalls_is_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let stalls = || std::thread::sleep(Duration::from_secs(20));
    let config = Config { timeout_s: 1.0, ..shrinking(dir.path()) };
    let faulty = Fault::new(2, 100, stalls).hidden_in(model(&config));
    let trainer = Trainer::builder(config).model(faulty).build().unwrap();
    let summary = trainer.train(|_| ()).unwrap();
    assert_eq!((summary.lost_replicas, summary.steps), (1, 20));
}

#[test]
fn layouts_that_cannot_shrink_are_refused_before_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |config: Config, part: &str| {
        let trainer = Trainer::new(config);
        let text = match trainer {
            Err(error) => error.to_string(),
            Ok(trainer) => trainer.train(|_| ()).unwrap_err().to_string(),
        };
        assert!(text.contains(part), "{text}");
    };
    let never = Config { max_recoveries: 0, ..shrinking(dir.path()) };
    refused(never, "max-recoveries:on-loss = shrink: max-recoveries is 0");
}
