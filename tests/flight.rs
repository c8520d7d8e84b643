//! What a failed run leaves behind, and that its culprit is found: whatever the schedule, wherever
//! and whenever it happens.

mod common;
#[path = "common/saboteur.rs"]
mod saboteur;

use std::path::Path;
use std::time::Duration;

use common::tiny;
use proptest::prelude::*;
use saboteur::Fault;
use zeropp::failures::{Cause, EndKind, Run, Verdict, judge};
use zeropp::model::gpt;
use zeropp::{Config, Error, Trainer};

/// Runs a model with `fault` until it fails, and judges what is left.
fn judged(config: Config, fault: &std::sync::Arc<Fault>, folder: &Path) -> (Run, Verdict) {
    let config = Config { flight_dir: Some(folder.join("failed")), ..config };
    let model = fault.hidden_in(gpt::build(config.gpt_shape(256)));
    let trainer = Trainer::builder(config).model(model).build().unwrap();
    let error = trainer.train(|_| ()).unwrap_err();
    let failed = folder.join("failed");
    let advice = format!("zeropp why {}", failed.display());
    assert!(error.to_string().contains(&advice), "{error}");
    let run = Run::read(&[failed], None).unwrap();
    let verdict = judge(&run);
    // The run's own process has come to the same.
    let Error::Rank { rank, verdict: here, .. } = &error else { panic!("{error}") };
    assert_eq!((&**here, verdict.ranks.first()), (&verdict, Some(rank)), "{error}");
    (run, verdict)
}

/// Schedules, and the stages on each rank that they take.
const SCHEDULES: [(&str, usize); 7] = [
    ("zeropp", 2),
    ("zeropp", 1),
    ("1f1b", 1),
    ("gpipe", 2),
    ("zb-h1", 1),
    ("interleaved-zb", 2),
    ("zb-v", 2),
];

fn layouts() -> impl Strategy<Value = Config> {
    let meshes = prop_oneof![Just((2, 2, 1)), Just((4, 1, 1)), Just((2, 1, 2)), Just((3, 2, 1))];
    (meshes, 0..SCHEDULES.len()).prop_map(|((pp, zero3, dp), schedule)| {
        let (schedule, stages_each) = SCHEDULES[schedule];
        Config {
            pp,
            zero3,
            dp,
            schedule: schedule.into(),
            virtual_stages: Some(stages_each),
            // One a stage, so that a block's number is its stage's.
            layers: pp * stages_each,
            micro_batches: Some(6),
            unit: Some(3),
            steps: 1000,
            timeout_s: 2.0,
            ..tiny()
        }
    })
}

/// The verdict names the fault's rank, step's stage and action.
fn check(found: &Verdict, cause: Cause, rank: usize, fault: &Fault) -> Result<(), TestCaseError> {
    let (block, kind) = fault.happened().expect("the run has failed");
    let stage: usize = block.trim_start_matches("h.").parse().expect("blocks are h.0, h.1, …");
    prop_assert_eq!((found.cause, &found.ranks[..]), (cause, &[rank][..]), "{:#?}", found);
    prop_assert_eq!(found.stage, Some(stage), "{:#?}", found);
    let action = found.action.clone().expect("a rank that computes has an action");
    let letters = action.trim_start_matches(|c: char| c.is_ascii_digit());
    // A whole backward is both, and so is the last B before a reduction, where each layer's W
    // follows its B; a recomputation is a forward of a B.
    let kinds: &[&str] = match kind {
        'F' => &["F", "R"],
        'B' => &["B", "BW"],
        _ => &["W", "BW", "B"],
    };
    let word = letters.trim_end_matches(|c: char| c.is_ascii_digit());
    prop_assert!(kinds.contains(&word), "{kind} in {found:#?}");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 12,
        failure_persistence: None,
        ..Default::default()
    })]

    #[test]
    fn a_panic_anywhere_is_found(config in layouts(), rank in 0usize..6, place in 0i64..300) {
        let rank = rank % config.mesh().world();
        let fault = Fault::new(rank, place, || panic!("sabotage"));
        let folder = tempfile::tempdir().unwrap();
        let (run, found) = judged(config.clone(), &fault, folder.path());
        prop_assert_eq!(run.records.len(), config.mesh().world());
        prop_assert!(run.damaged.is_empty(), "{:?}", run.damaged);
        check(&found, Cause::Panicked, rank, &fault)?;
        let said = found.reasons.iter().any(|reason| reason.contains("sabotage"));
        prop_assert!(said, "{:#?}", found);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 3,
        failure_persistence: None,
        ..Default::default()
    })]

    #[test]
    fn a_stall_anywhere_is_found(config in layouts(), rank in 0usize..6, place in 0i64..300) {
        let rank = rank % config.mesh().world();
        let fault = Fault::new(rank, place, || std::thread::sleep(Duration::from_secs(3600)));
        let folder = tempfile::tempdir().unwrap();
        let (run, found) = judged(config.clone(), &fault, folder.path());
        prop_assert_eq!(run.records.len(), config.mesh().world());
        check(&found, Cause::Stuck, rank, &fault)?;
    }
}

#[test]
fn records_hold_actions_and_operations_up_to_the_end() {
    let config = Config { pp: 2, zero3: 2, layers: 4, virtual_stages: Some(2), ..tiny() };
    let fault = Fault::new(3, 200, || panic!("sabotage"));
    let folder = tempfile::tempdir().unwrap();
    let (run, _) = judged(config, &fault, folder.path());
    for record in &run.records {
        let h = &record.header;
        assert_eq!((h.processes.len(), h.groups.len(), h.engine.as_str()), (4, 4, "threads"));
        assert_eq!(h.placement, [0, 1, 0, 1]);
        assert!(record.entries.is_sorted_by_key(|entry| entry.begin_ns()));
        assert!(record.entries.last().unwrap().begin_ns() <= h.end.at_ns);
        let own = h.rank == 3;
        assert_eq!(h.end.kind == EndKind::Panic, own, "{:?}", h.end);
        let peers = matches!(h.end.kind, EndKind::Peer | EndKind::AtWork);
        assert!(own || peers, "{:?}", h.end);
    }
}

#[test]
fn a_run_that_ends_well_or_wants_none_leaves_no_records() {
    let folder = tempfile::tempdir().unwrap();
    let failed = folder.path().join("failed");
    let config = Config { pp: 2, layers: 4, steps: 2, flight_dir: Some(failed.clone()), ..tiny() };
    Trainer::new(config.clone()).unwrap().train(|_| ()).unwrap();
    assert!(!failed.exists());
    let fault = Fault::new(0, 3, || panic!("sabotage"));
    let config = Config { flight_dir: Default::default(), ..config };
    let model = fault.hidden_in(gpt::build(config.gpt_shape(256)));
    let error = Trainer::builder(config).model(model).build().unwrap().train(|_| ()).unwrap_err();
    assert!(!error.to_string().contains("zeropp why"), "{error}");
}

#[test]
fn records_that_cannot_be_written_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a file");
    let inside = file.join("failed");
    let config = Config { pp: 2, layers: 4, flight_dir: Some(inside.clone()), ..tiny() };
    let fault = Fault::new(1, 3, || panic!("sabotage"));
    let model = fault.hidden_in(gpt::build(config.gpt_shape(256)));
    let trainer = Trainer::builder(config).model(model).build().unwrap();
    // A file that was there before would have been refused.
    std::fs::write(&file, "").unwrap();
    let error = trainer.train(|_| ()).unwrap_err().to_string();
    let reported = format!("could not be written to {}", inside.display());
    assert!(error.contains("sabotage") && error.contains(&reported), "{error}");
}
