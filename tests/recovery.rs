//! Ranks that fail meet again and go on: the run has the bits of an undisturbed one, and a fault
//! that comes back ends it by name.

mod common;
#[path = "common/saboteur.rs"]
mod saboteur;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{Run, assert_same_bits, run, tiny};
use saboteur::{Fault, with_places};
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
    let trainer = Trainer::with_model(config, model).unwrap();
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
    let trained = Trainer::with_model(config, model).unwrap().train(|s| {
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
        let error = Trainer::with_model(config, model).unwrap().train(|_| ()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("panicked: sabotage"), "{text}");
        assert_eq!(text.contains("max-recoveries = 1"), max_recoveries == 1, "{text}");
    }
}
