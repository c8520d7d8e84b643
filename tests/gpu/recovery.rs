//! A rank that fails on a device: all ranks meet again and continue from the last checkpoint.

#[path = "../common/saboteur.rs"]
mod saboteur;

use saboteur::Fault;
use zeropp::model::gpt;
use zeropp::{Config, Trainer};

use crate::training::{same_curve, small, steps};

#[test]
fn a_run_on_devices_continues_from_a_checkpoint_after_a_rank_has_failed() {
    let folder = tempfile::tempdir().unwrap();
    let undisturbed = Config { pp: 2, zero3: 2, micro_batches: Some(2), unit: Some(2), ..small() };
    let config = Config {
        save: Some(folder.path().join("ckpt")),
        save_every: 1,
        max_recoveries: 1,
        flight_dir: Some(folder.path().join("failed")),
        ..undisturbed.clone()
    };
    // F, B and W of two blocks and two micro-batches are 12 places a step: in the third step.
    let fault = Fault::new(3, 30, || panic!("sabotage"));
    let model = fault.hidden_in(gpt::build(config.gpt_shape(256)));
    let trainer = Trainer::builder(config).model(model).build().unwrap();
    let mut reported = Vec::new();
    let summary = trainer.train(|step| reported.push(step.clone())).unwrap();
    assert_eq!(summary.recoveries, 1);
    assert!(fault.happened().is_some());
    let numbers: Vec<u64> = reported.iter().map(|step| step.step).collect();
    assert_eq!(numbers, [1, 2, 3, 4]);
    same_curve(&reported, &steps(undisturbed), 1e-5, "after a failure");
}
