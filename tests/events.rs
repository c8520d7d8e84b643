//! What a run tells an embedding program through `tracing`.

mod common;

use common::heard::{Heard, hear};
use common::tiny;
use tracing::Level;
use zeropp::{Config, RUN_EVENTS, Trainer};

fn progress(heard: &[Heard]) -> Vec<&Heard> {
    heard.iter().filter(|event| event.target == RUN_EVENTS).collect()
}

#[test]
fn a_run_tells_its_beginning_its_steps_its_checkpoints_and_its_end() {
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
    let (summary, heard) = hear(|| Trainer::new(config).unwrap().train(|_| ()).unwrap());
    let told = progress(&heard);
    let messages: Vec<&str> = told.iter().map(|event| event.message()).collect();
    let step = "step";
    let saved = "checkpoint saved";
    let mut sorted = messages.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, [saved, saved, "run begins", "run ends", step, step, step]);
    assert_eq!((messages[0], *messages.last().unwrap()), ("run begins", "run ends"));
    assert!(told.iter().all(|event| event.level == Level::INFO && event.spans[0] == "run"));
    let save = told.iter().find(|event| event.message() == saved).unwrap();
    assert_eq!((save.field("step"), &save.spans[..]), ("2", &["run", "rank", "checkpoint"][..]));
    let last = told.iter().rfind(|event| event.message() == step).unwrap();
    assert_eq!(last.field("loss"), format!("{:?}", summary.last_loss));
    assert_eq!((told[0].field("pp"), told[0].field("resumed_step")), ("2", ""));
}

#[test]
fn gradients_that_are_not_finite_are_told_once_with_a_remedy() {
    let config = Config { steps: 6, layers: 2, lr: 1e30, warmup: Some(0), clip: 0.0, ..tiny() };
    let (_, heard) = hear(|| Trainer::new(config).unwrap().train(|_| ()).unwrap());
    let warnings: Vec<&Heard> = heard.iter().filter(|e| e.level == Level::WARN).collect();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].message().contains("a smaller lr"), "{warnings:?}");
}

/// Tests beside one that hears came to an event first, and nothing was heard.
#[test]
fn events_reach_a_subscriber_installed_after_another_thread_spoke() {
    let speak = || tracing::warn!("said");
    let (_, heard) = hear(|| {
        std::thread::spawn(speak).join().unwrap();
        speak();
    });
    let heard: Vec<&str> = heard.iter().map(|event| event.message()).collect();
    assert_eq!(heard, ["said"]);
}
