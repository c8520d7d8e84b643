//! Parameters, optimizer state and gradients in a file of each rank: the bits of a run that has
//! them in memory, the memory that is predicted, and checkpoints of one read by the other.

use crate::common::{Run, assert_same_bits, llama, run, tiny};
use crate::slices::{assert_memory, described};
use zeropp::config::{Decay, OptimizerKind, Precision, Recompute, Resume};
use zeropp::{Config, Trainer};

/// Where the files are, which lose their names at once.
fn folder() -> std::path::PathBuf {
    std::env::temp_dir().join("zeropp-states")
}

fn small() -> Config {
    Config { layers: 6, virtual_stages: Some(3), steps: 3, clip: 0.5, ..tiny() }
}

fn out(config: &Config) -> Config {
    Config { optimizer_out: Some(folder()), ..config.clone() }
}

/// The bits of `reference`, and the predicted memory.
fn check(reference: &Run, config: Config) -> Run {
    let what = format!("{} zero1 {}", described(&config), config.zero1);
    let zero1 = config.zero1;
    let run = run(config);
    assert_same_bits(reference, &run, &what);
    let summary = &run.summary;
    if zero1 {
        // Of gradients a replica updates its part, and all are predicted.
        assert_eq!(summary.peak_bytes, summary.predicted_bytes, "{what}");
        let [predicted, measured] = [summary.predicted_at_once_bytes, summary.at_once_bytes];
        assert!(predicted >= measured, "{what}: {measured} of {predicted}");
    } else {
        assert_memory(&run, &what);
    }
    assert!(run.summary.peak_bytes.host_state > 0, "{what}: nothing was out");
    run
}

#[test]
fn states_in_a_file_change_no_bit_on_any_mesh_and_memory_is_as_predicted() {
    let base = Config { steps: 20, ..small() };
    let reference = run(base.clone());
    let layout = |pp, zero3, v| Config { pp, zero3, virtual_stages: Some(v), ..base.clone() };
    let of_memory = |run: &Run| run.summary.peak_bytes.total();
    let held = of_memory(&check(&reference, out(&layout(1, 1, 6))));
    assert!(held < of_memory(&reference) * 2 / 3, "{held} of {}", of_memory(&reference));
    check(&reference, out(&layout(2, 1, 3)));
    for (zero3, dp, zero1) in [(2, 1, false), (1, 2, false), (1, 2, true), (2, 2, true)] {
        let config = Config { dp, zero1, steps: 2, micro_batches: Some(3), ..layout(2, zero3, 2) };
        check(&run(config.clone()), out(&config));
    }
}

#[test]
fn other_runs_have_the_bits_of_states_in_memory() {
    let base = Config { steps: 2, ..small() };
    let bf16 = Precision::Bf16;
    let part = Config { pp: 2, zero3: 2, virtual_stages: Some(2), ..base.clone() };
    for config in [
        Config { precision: bf16, ema: Some(0.9), ..base.clone() },
        llama(Config { precision: bf16, log_layers: 1, ..part.clone() }),
        Config { tied: true, log_layers: 1, ..base.clone() },
        Config { tied: true, zero1: true, dp: 2, ema: Some(0.5), ..part.clone() },
        Config { tied: true, pp: 2, schedule: "interleaved".into(), ..base.clone() },
        Config { lora_rank: 2, ..llama(base.clone()) },
        Config { freeze: Some("h.0,wte".into()), precision: bf16, ..part.clone() },
        Config { eval_every: 1, eval_steps: 2, split: Some("90,10".into()), ..base.clone() },
        Config { model: "mixtral".into(), ..llama(base.clone()) },
        Config { seq: 512, layers: 2, virtual_stages: Some(2), slices: 2.into(), ..base.clone() },
        Config { recompute: Recompute::Full, recompute_out: Some(folder()), ..base.clone() },
    ] {
        check(&run(config.clone()), out(&config));
    }
}

#[test]
fn all_optimizers_update_pieces_to_the_same_bits() {
    for optimizer in OptimizerKind::ALL.iter().copied() {
        // A head of more elements than a piece has.
        let base = Config { vocab: Some(9000), steps: 2, layers: 2, ..small() };
        let base = Config { optimizer, virtual_stages: Some(2), ema: Some(0.9), ..base };
        check(&run(base.clone()), out(&base));
    }
}

/// Out, in memory on another mesh, out again: one run's bits.
#[test]
fn checkpoints_are_alike_whether_states_are_in_a_file_or_not() {
    let dir = tempfile::tempdir().unwrap();
    let base = Config {
        ema: Some(0.9),
        decay: Decay::Constant,
        steps: 6,
        save: Some(dir.path().into()),
        save_every: 2,
        ..small()
    };
    let whole = run(Config { save: None, save_every: 0, ..base.clone() });
    let meshes = [
        out(&Config { virtual_stages: Some(6), ..base.clone() }),
        Config { pp: 2, zero3: 1, ..base.clone() },
        out(&Config { pp: 1, zero1: true, ..base.clone() }),
    ];
    let mut parts = Vec::new();
    for (part, config) in meshes.into_iter().enumerate() {
        let steps = 2 * (part as u64 + 1);
        parts.push(run(Config { resume: Resume::Newest, steps, ..config }));
    }
    let last = parts.pop().expect("three");
    let steps = parts.into_iter().flat_map(|part| part.steps).chain(last.steps.clone()).collect();
    assert_same_bits(&whole, &Run { steps, ..last }, "after two changes");
}

/// 400 billion parameters, whose states take 6 TB.
#[test]
fn a_disk_without_room_is_named_before_a_rank_starts() {
    let large = Config { hidden: 16_384, heads: 128, layers: 126, ..small() };
    let large = Config { no_memory_check: true, ..out(&large) };
    let error = Trainer::new(large).unwrap().train(|_| ()).unwrap_err();
    assert!(error.is_bad_input(), "{error}");
    let said = error.to_string();
    assert!(said.contains("optimizer:out = ") && said.contains("its disk has room for"), "{said}");
}

/// Before, they were zeros, and nobody was told.
#[test]
#[cfg(target_os = "linux")]
fn weights_that_cannot_be_read_back_are_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let config = Config { optimizer_out: Some(dir.path().join("states")), pp: 2, ..small() };
    let trainer = Trainer::new(config).unwrap();
    let mut steps = trainer.steps().unwrap();
    steps.next().expect("a step").expect("that ends well");
    assert!(!steps.weights().expect("all can be read").is_empty());
    // Ranks' files have no names any more.
    let mut cut = 0;
    for open in std::fs::read_dir("/proc/self/fd").unwrap() {
        let path = open.unwrap().path();
        if std::fs::read_link(&path).is_ok_and(|file| file.starts_with(dir.path())) {
            std::fs::File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
            cut += 1;
        }
    }
    assert_eq!(cut, 2, "a file of each rank");
    let said = steps.weights().unwrap_err().to_string();
    assert!(said.contains("optimizer:out"), "{said}");
}
