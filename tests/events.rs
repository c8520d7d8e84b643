//! What a run tells an embedding program through `tracing`.

mod common;

use common::captured::{CapturedEvent, capture};
use common::tiny;
use tracing::Level;
use zeropp::{Config, RUN_EVENTS, Trainer};

fn progress(captured: &[CapturedEvent]) -> Vec<&CapturedEvent> {
    captured.iter().filter(|event| event.target == RUN_EVENTS).collect()
}

#[test]
fn a_run_reports_its_beginning_its_steps_its_checkpoints_and_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let config = Config {
        pp: 2,
        zero3: 2,
        steps: 3,
        layers: 4,
        save: Some(dir.path().join("c")),
        save_every: 2,
        ..tiny()
    };
    let (summary, captured) = capture(|| Trainer::new(config).unwrap().train(|_| ()).unwrap());
    let reported = progress(&captured);
    let messages: Vec<&str> = reported.iter().map(|event| event.message()).collect();
    let step = "step";
    let saved = "checkpoint saved";
    let mut sorted = messages.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, [saved, saved, "run begins", "run ends", step, step, step]);
    assert_eq!((messages[0], *messages.last().unwrap()), ("run begins", "run ends"));
    assert!(reported.iter().all(|event| event.level == Level::INFO && event.spans[0] == "run"));
    let save = reported.iter().find(|event| event.message() == saved).unwrap();
    assert_eq!((save.field("step"), &save.spans[..]), ("2", &["run", "rank", "checkpoint"][..]));
    let last = reported.iter().rfind(|event| event.message() == step).unwrap();
    assert_eq!(last.field("loss"), format!("{:?}", summary.last_loss));
    assert_eq!((reported[0].field("pp"), reported[0].field("resumed_step")), ("2", ""));
}

#[test]
fn gradients_that_are_not_finite_are_reported_once_with_a_remedy() {
    let config = Config { steps: 6, layers: 2, lr: 1e30, warmup: Some(0), clip: 0.0, ..tiny() };
    let (_, captured) = capture(|| Trainer::new(config).unwrap().train(|_| ()).unwrap());
    let warnings: Vec<&CapturedEvent> =
        captured.iter().filter(|e| e.level == Level::WARN).collect();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].message().contains("a smaller lr"), "{warnings:?}");
}

/// Tests beside one that captures came to an event first, and nothing was captured.
#[test]
fn events_reach_a_subscriber_installed_after_another_thread_spoke() {
    let speak = || tracing::warn!("said");
    let (_, captured) = capture(|| {
        std::thread::spawn(speak).join().unwrap();
        speak();
    });
    let captured: Vec<&str> = captured.iter().map(|event| event.message()).collect();
    assert_eq!(captured, ["said"]);
}
