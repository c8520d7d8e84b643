//! A rank that panics or stalls ends the whole run, named, within the timeout.

mod common;
#[path = "common/saboteur.rs"]
mod saboteur;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::tiny;
use saboteur::with_places;
use zeropp::model::gpt;
use zeropp::{Config, Error, RankError, Trainer};

/// A run of 2 × 2 ranks whose block `h.3` (stage 3, on pipeline rank 1) misbehaves in its
/// `after`-th forward.
fn sabotaged(after: usize, act: fn()) -> (Error, Duration) {
    let config =
        Config { layers: 4, pp: 2, zero3: 2, virtual_stages: Some(2), timeout_s: 2.0, ..tiny() };
    let calls = AtomicUsize::new(0);
    let model = with_places(gpt::build(config.gpt_shape(256)), move |block, kind| {
        if (block, kind) == ("h.3", 'F') && calls.fetch_add(1, Ordering::Relaxed) == after {
            act();
        }
    });
    let start = Instant::now();
    let error = Trainer::builder(config).model(model).build().unwrap().train(|_| ()).unwrap_err();
    (error, start.elapsed())
}

#[test]
fn a_panic_ends_the_run_with_rank_stage_and_action() {
    for after in [0, 1, 7, 30] {
        let (error, _) = sabotaged(after, || panic!("sabotage"));
        assert!(!error.is_bad_input());
        let text = error.to_string();
        for part in ["panicked: sabotage", "stage 3", "action 3F", "step "] {
            assert!(text.contains(part), "{part} not in: {text}");
        }
        assert!(text.contains("rank 2") || text.contains("rank 3"), "{text}");
    }
}

#[test]
fn a_stalled_rank_is_named_within_the_timeout() {
    for after in [0, 9] {
        let (error, took) = sabotaged(after, || std::thread::sleep(Duration::from_secs(3600)));
        let text = error.to_string();
        // Whichever times out first, the message names the rank behind it.
        for part in
            ["timed out after 2 s", "was computing for", "stage 3, action 3F", "raise timeout-s"]
        {
            assert!(text.contains(part), "{part} not in: {text}");
        }
        // As the judge of the records says, whom `zeropp why` asks, too.
        let Error::Rank { rank, failure, verdict, .. } = &error else { panic!("{error}") };
        assert!(verdict.ranks.contains(rank) && [2, 3].contains(rank), "{verdict:?}");
        assert!(matches!(**failure, RankError::Step(_) | RankError::Comm(_)), "{failure:?}");
        // Timeout, then the grace of the stalled thread; generous for a busy machine.
        assert!(took < Duration::from_secs(20), "{took:?}");
    }
}

#[test]
fn a_bad_model_is_refused_before_a_rank_starts() {
    let config = tiny();
    let mut model = gpt::build(config.gpt_shape(256));
    let twice = model.parts[2].clone();
    model.parts[3] = twice;
    let error = Trainer::builder(config.clone()).model(model).build().err().unwrap();
    assert!(error.is_bad_input());
    assert!(error.to_string().contains("h.0."), "{error}");

    let small = gpt::build(config.gpt_shape(100));
    let error = Trainer::builder(config).model(small).build().err().unwrap();
    assert!(error.to_string().contains("vocabulary = 100"), "{error}");
}

#[test]
fn not_finite_gradients_skip_the_step_on_every_rank() {
    // A learning rate that blows the weights up makes later steps not finite.
    let config = Config {
        lr: 1e30,
        warmup: Some(0),
        weight_decay: 0.0,
        clip: 0.0,
        zero3: 2,
        pp: 2,
        steps: 4,
        ..tiny()
    };
    let mut steps = Vec::new();
    Trainer::new(config).unwrap().train(|s| steps.push(s.clone())).unwrap();
    assert!(!steps[0].skipped);
    assert!(steps[1..].iter().all(|s| s.skipped && !s.grad_norm.is_finite()), "{steps:?}");
}
