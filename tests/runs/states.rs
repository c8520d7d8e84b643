//! Optimizer state, and parameters and gradients, in a file of each rank: the bits of a run that
//! has them in memory, the memory that is predicted, and checkpoints of one read by the other.

use crate::common::{Run, assert_same_bits, llama, run, tiny};
use crate::slices::{assert_memory, described};
use zeropp::config::{Decay, OptimizerKind, OutStates, Precision, Recompute, Resume};
use zeropp::{Config, Trainer};

/// Where the files are, which lose their names at once.
fn folder() -> std::path::PathBuf {
    std::env::temp_dir().join("zeropp-states")
}

fn small() -> Config {
    Config { layers: 6, virtual_stages: Some(3), steps: 3, clip: 0.5, ..tiny() }
}

fn out(config: &Config, optimizer_out_states: OutStates) -> Config {
    Config { optimizer_out: Some(folder()), optimizer_out_states, ..config.clone() }
}

fn all_out(config: &Config) -> Config {
    out(config, OutStates::All)
}

/// The bits of `reference`, and the predicted memory, whatever is out. Returns bytes that ranks
/// hold with moments out, and with all.
fn check_both(reference: &Run, config: &Config) -> [u64; 2] {
    [OutStates::Moments, OutStates::All].map(|states| {
        let run = check(reference, out(config, states));
        run.summary.peak_bytes.total() - run.summary.peak_bytes.host_state
    })
}

/// The bits of `reference`, and the predicted memory.
fn check(reference: &Run, config: Config) -> Run {
    let states = config.optimizer_out_states;
    let what = format!("{} zero1 {} {states} out", described(&config), config.zero1);
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
    let all = reference.summary.peak_bytes;
    let [moments, held] = check_both(&reference, &layout(1, 1, 6));
    // A few stages stay of all.
    assert!(held < all.total() / 2, "{held} of {}", all.total());
    assert!(held < moments && moments < all.total() - all.optimizer / 2, "{moments}");
    check_both(&reference, &layout(2, 1, 3));
    for (zero3, dp, zero1) in [(2, 1, false), (1, 2, false), (1, 2, true), (2, 2, true)] {
        let config = Config { dp, zero1, steps: 2, micro_batches: Some(3), ..layout(2, zero3, 2) };
        check_both(&run(config.clone()), &config);
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
        check_both(&run(config.clone()), &config);
    }
}

#[test]
fn all_optimizers_update_pieces_to_the_same_bits() {
    for optimizer in OptimizerKind::ALL.iter().copied() {
        // A head of more elements than a piece has.
        let base = Config { vocab: Some(9000), steps: 2, layers: 2, ..small() };
        let base = Config { optimizer, virtual_stages: Some(2), ema: Some(0.9), ..base };
        check_both(&run(base.clone()), &base);
    }
}

/// Out, in memory on another mesh, out again: one run's bits.
#[test]
fn checkpoints_are_alike_whether_states_are_in_a_file_or_not() {
    let dir = tempfile::tempdir().unwrap();
    let base = Config {
        ema: Some(0.9),
        decay: Decay::Constant,
        steps: 8,
        save: Some(dir.path().into()),
        save_every: 2,
        ..small()
    };
    let whole = run(Config { save: None, save_every: 0, ..base.clone() });
    let meshes = [
        all_out(&Config { virtual_stages: Some(6), ..base.clone() }),
        Config { pp: 2, zero3: 1, ..base.clone() },
        out(&Config { pp: 1, zero1: true, ..base.clone() }, OutStates::Moments),
        all_out(&base),
    ];
    let mut parts = Vec::new();
    for (part, config) in meshes.into_iter().enumerate() {
        let steps = 2 * (part as u64 + 1);
        parts.push(run(Config { resume: Resume::Newest, steps, ..config }));
    }
    let last = parts.pop().expect("four");
    let steps = parts.into_iter().flat_map(|part| part.steps).chain(last.steps.clone()).collect();
    assert_same_bits(&whole, &Run { steps, ..last }, "after two changes");
}

/// 400 billion parameters, whose states take 6 TB.
#[test]
fn a_disk_without_room_is_named_before_a_rank_starts() {
    let large = Config { hidden: 16_384, heads: 128, layers: 126, ..small() };
    let large = Config { no_memory_check: true, ..all_out(&large) };
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
    let optimizer_out = Some(dir.path().join("states"));
    let config = Config { optimizer_out, pp: 2, ..all_out(&small()) };
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

/// Moments alone are out where that is enough; a run says what it has out beside.
#[test]
fn a_run_puts_out_no_more_than_its_memory_asks_for() {
    let base = Config { virtual_stages: Some(6), pp: 1, ..small() };
    let most = |config: &Config| {
        let trainer = Trainer::new(config.clone()).unwrap();
        let plan = trainer.plan();
        let most = plan.ranks.iter().map(|rank| rank.held.at_once.total()).max().unwrap();
        (most, plan.notes.join("; "))
    };
    let [(moments, _), (all, _)] =
        [OutStates::Moments, OutStates::All].map(|states| most(&out(&base, states)));
    assert!(all < moments, "{all} and {moments}");
    let within = |bytes: u64| {
        let rank_memory = Some(bytes as f64 / (1u64 << 30) as f64);
        most(&Config { rank_memory, recompute: Recompute::None, ..out(&base, OutStates::Auto) })
    };
    let (held, said) = within(moments);
    assert!(held == moments && !said.contains("out-states"), "{held}: {said}");
    let (held, said) = within(moments - 1);
    assert!(held == all && said.contains("optimizer:out-states = auto: all, as "), "{said}");
}
