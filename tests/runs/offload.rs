//! Activations that are copied out of memory and in again before their backward: the bits of a run
//! that keeps them, the memory that is predicted, and as much out as was asked for.

use std::collections::BTreeSet;

use crate::common::{Run, assert_same_bits, llama, run, tiny};
use crate::late::{by_chance, mixed, random};
use crate::slices::{assert_memory, described};
use zeropp::config::{OptimizerSync, OutUnits, PackWeights, Precision, Recompute, Tokenizer};
use zeropp::pipeline::timeline::Lane;
use zeropp::{Config, Trainer, emulate, read_costs};

/// Where the files are, which lose their names at once.
fn folder() -> std::path::PathBuf {
    std::env::temp_dir().join("zeropp-offload")
}

fn small() -> Config {
    Config {
        layers: 8,
        micro_batches: Some(8),
        unit: Some(4),
        steps: 3,
        recompute: Recompute::None,
        ..tiny()
    }
}

fn out(config: &Config) -> Config {
    Config { recompute_out: Some(folder()), ..config.clone() }
}

fn layout(config: &Config, pp: usize, v: usize) -> Config {
    Config { pp, virtual_stages: Some(v), ..config.clone() }
}

/// The bits of `reference`, and the predicted memory; the most that a rank had out at once.
fn check(reference: &Run, config: Config) -> u64 {
    let (batches, units) = (config.recompute_out_batches, config.recompute_out_units);
    let what = format!("{} out-batches {batches:?} out-units {units}", described(&config));
    let run = run(config);
    assert_same_bits(reference, &run, &what);
    assert_memory(&run, &what);
    run.summary.peak_bytes.host_activation
}

#[test]
fn copies_out_and_in_change_no_bit_and_memory_is_as_predicted() {
    let reference = run(small());
    for (pp, v) in [(1, 2), (1, 8), (2, 2), (2, 4), (4, 2)] {
        let out = check(&reference, out(&layout(&small(), pp, v)));
        assert!(out > 0, "pp {pp} virtual {v}: nothing was out");
    }
}

/// Nothing of the first unit goes out: R makes it again where it makes some of a unit, else it
/// stays.
#[test]
fn a_first_unit_may_leave_the_link_to_others() {
    let reference = run(small());
    let base = layout(&small(), 2, 4);
    for (recompute, recompute_first) in [(Recompute::None, None), (Recompute::Full, Some(1))] {
        let [all, later] = [OutUnits::All, OutUnits::Later].map(|recompute_out_units| {
            let recompute_out_batches = Some(2);
            let config = Config { recompute, recompute_first, recompute_out_units, ..out(&base) };
            check(&reference, Config { recompute_out_batches, ..config })
        });
        assert!(later > 0 && later <= all, "{recompute}: {later} and {all} bytes out");
    }
}

#[test]
fn less_is_held_the_more_is_out() {
    let base = layout(&Config { unit: Some(8), ..small() }, 1, 8);
    let kept = run(base.clone());
    let mut held = vec![kept.summary.peak_bytes.activation];
    let mut before = 0;
    for first in [1, 2, 4, 8] {
        let config = Config { recompute_out_batches: Some(first), ..out(&base) };
        let run = run(config);
        assert_same_bits(&kept, &run, &first.to_string());
        assert_memory(&run, &first.to_string());
        let out = run.summary.peak_bytes.host_activation;
        assert!(out > before, "{first}: {out} bytes out");
        before = out;
        held.push(run.summary.peak_bytes.activation);
    }
    assert!(held.is_sorted_by(|more, less| more > less), "{held:?}");
    assert!(held[4] < held[0] / 5, "two copies and what has no time to go out: {held:?}");
}

#[test]
fn all_kinds_have_the_bits_of_kept_activations() {
    let base = Config { unit: Some(8), steps: 2, ..small() };
    let reference = run(base.clone());
    let (mut gone, mut kinds) = (BTreeSet::new(), 0);
    for kind in zeropp::pipeline::schedules::KINDS.iter().filter(|kind| kind.name != "forward") {
        for pp in [1, 2] {
            let (schedule, virtual_stages) = (kind.name.to_string(), None);
            let config = Config { schedule, virtual_stages, pp, ..base.clone() };
            if Trainer::new(config.clone()).is_err() {
                continue;
            }
            kinds += 1;
            if check(&reference, out(&config)) > 0 {
                gone.insert(kind.name);
            }
        }
    }
    assert!(kinds > 20 && gone.len() > 8, "{kinds} runs; out in {gone:?}");
}

#[test]
fn recomputation_takes_what_has_come_in() {
    for (model, precision) in [("gpt", Precision::Fp32), ("llama", Precision::Bf16)] {
        // A stage's packed weights are predicted from its first B on, and made layer by layer.
        let pack_weights = PackWeights::Off;
        let base = Config { precision, pack_weights, ..layout(&small(), 1, 4) };
        let base = if model == "llama" { llama(base) } else { base };
        let reference = run(base.clone());
        let mut held = Vec::new();
        for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
            held.push(check(&reference, Config { recompute, ..out(&base) }));
        }
        assert!(held.is_sorted_by(|more, less| more > less) && held[2] > 0, "{held:?}");
        let (recompute, recompute_first) = (Recompute::Full, Some(2));
        check(&reference, Config { recompute, recompute_first, ..out(&base) });
    }
}

#[test]
fn other_runs_have_the_bits_of_kept_activations() {
    let base = layout(&small(), 2, 2);
    let bf16 = Precision::Bf16;
    for config in [
        Config { precision: bf16, ..base.clone() },
        llama(Config { precision: bf16, dropout: 0.1, ..base.clone() }),
        Config { dropout: 0.2, zero3: 2, ..base.clone() },
        Config { tied: true, dp: 2, ..base.clone() },
        Config { lora_rank: 2, ..llama(base.clone()) },
        Config { freeze: Some("h.0,wte".into()), ..base.clone() },
        Config { micro_batch_size: 2, zero1: true, dp: 2, ..base.clone() },
        Config { global_batch: Some("14".into()), micro_batches: None, dp: 2, ..base.clone() },
        Config { eval_every: 1, eval_steps: 2, split: Some("90,10".into()), ..base.clone() },
        Config {
            tokenizer: Tokenizer::Bytes,
            layers: 5,
            stages: Some("2,1,1,1".into()),
            virtual_stages: None,
            ..base.clone()
        },
    ] {
        let reference = run(config.clone());
        assert!(check(&reference, out(&config)) > 0, "nothing was out");
    }
}

/// An update that is taken back drops forwards whose copies are under way.
#[test]
fn forwards_that_are_dropped_forget_their_copies() {
    for pp in [1, 2] {
        let base = layout(&Config { unit: Some(8), steps: 6, ..small() }, pp, 4);
        let late = Config { optimizer_sync: OptimizerSync::Late, ..base };
        let reference = run(Config { clip: 1e-3, ..late.clone() });
        assert!(reference.summary.rollbacks > 0, "no update was taken back");
        assert!(check(&reference, out(&Config { clip: 1e-3, ..late })) > 0);
    }
}

/// Kinds, meshes, recomputation, precisions, updates and models by chance. `ZEROPP_OFFLOAD_RUNS`
/// says how many, `ZEROPP_OFFLOAD_SEED` with which seed the first is drawn; that of a failure is in
/// its text.
#[test]
fn random_runs_have_the_bits_of_kept_activations() {
    let (runs, mut seed) = by_chance("OFFLOAD", 40);
    let (mut done, mut gone, mut kinds) = (0, 0, BTreeSet::new());
    while done < runs {
        seed += 1;
        let draw = |what: u64, of: usize| (mixed(seed, what) % of as u64) as usize;
        let syncs = OptimizerSync::ALL;
        let config = Config {
            optimizer_sync: syncs[draw(20, syncs.len())],
            dropout: [0.0, 0.0, 0.1][draw(21, 3)],
            max_skipped: 10,
            pack_weights: PackWeights::Off,
            ..random(seed, 2)
        };
        let config = if draw(23, 3) == 0 && !config.tied { llama(config) } else { config };
        let config =
            if draw(24, 4) == 0 { Config { micro_batch_size: 2, ..config } } else { config };
        let recompute_out_batches = [None, Some(1 + draw(22, 8))][draw(25, 2)];
        let in_units = config.micro_batches() > config.unit();
        let recompute_out_units =
            [OutUnits::All, OutUnits::Later][draw(26, 1 + usize::from(in_units))];
        let copied = Config { recompute_out_batches, recompute_out_units, ..out(&config) };
        // Not all kinds go with all meshes.
        if Trainer::new(config.clone()).is_err() {
            continue;
        }
        println!("seed {seed}");
        let kept = run(config.clone());
        let copied = run(copied);
        assert_same_bits(&kept, &copied, &seed.to_string());
        let summary = &copied.summary;
        assert_eq!(summary.peak_bytes, summary.predicted_bytes, "seed {seed}, {config:?}");
        // Within a B the sum of all kinds is predicted to a little more than it is, without copies
        // too.
        let [predicted, measured] = [summary.predicted_at_once_bytes, summary.at_once_bytes];
        assert!(predicted >= measured, "seed {seed}: {measured} of {predicted}, {config:?}");
        let out = summary.peak_bytes.host_activation;
        (done, gone) = (done + 1, gone + usize::from(out > 0));
        kinds.insert(config.schedule);
    }
    println!("{runs} runs, {} kinds, {gone} with something out", kinds.len());
}

/// A real executor waits for copies as the simulator says, and no longer than the machine is late.
#[test]
fn emulated_copies_take_their_time() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("costs.json");
    // A copy takes one and a half times as long as an F.
    let text = "{\"t_f\": 6000, \"t_b\": 6000, \"t_w\": 5000, \"t_comm\": 100, \
                \"mem_f\": 9000000, \"mem_b\": -4000000, \"mem_w\": -5000000, \
                \"file_bytes_per_s\": 1000000000}";
    std::fs::write(&file, text).unwrap();
    let table = read_costs(&file).unwrap();
    let base =
        Config { steps: 3, warmup: Some(0), recompute: Recompute::None, ..layout(&small(), 2, 3) };
    let emulated = |config: &Config| emulate(config, &table, |_| ()).unwrap();
    let (kept, copied) = (emulated(&base), emulated(&out(&base)));
    assert!(copied.simulated_makespan_ns > kept.simulated_makespan_ns, "the file is slow");
    for (rank, measured) in copied.measured.ranks.iter().enumerate() {
        let simulated = &copied.simulated.ranks[rank];
        assert!(measured.spans.iter().any(|span| span.lane == Lane::Copy));
        for (m, s) in measured.spans.iter().zip(&simulated.spans) {
            assert_eq!(m.action, s.action);
            if s.lane == Lane::Compute {
                assert!(m.end_ns >= s.end_ns, "{}: {} < {}", m.action, m.end_ns, s.end_ns);
            }
        }
    }
    let quickest = copied.steps.iter().map(|step| step.makespan_ns).min().unwrap();
    let simulated = copied.simulated_makespan_ns;
    println!(
        "{quickest} ns emulated, {simulated} simulated: {}",
        quickest as f64 / simulated as f64
    );
    assert!(quickest >= simulated, "{quickest} {simulated}");
}

/// With a folder `auto` copies out before it computes stages again, as much as it takes.
#[test]
fn runs_that_do_not_fit_copy_activations_out_where_there_is_a_folder() {
    let base = Config {
        recompute: Recompute::Auto,
        hidden: 32,
        seq: 64,
        unit: Some(8),
        ..layout(&small(), 1, 8)
    };
    let gib = |bytes: u64| Some(bytes as f64 / (1u64 << 30) as f64);
    let plan = |config: &Config| Trainer::new(config.clone()).unwrap().plan().clone();
    let needs = |config: &Config| plan(config).ranks[0].held.at_once.total();
    let all = out(&base);
    let told = |config: &Config| {
        let notes = plan(config).notes;
        notes.into_iter().find(|note| note.starts_with("recompute = auto"))
    };
    assert_eq!(told(&all), None, "nothing is short");
    let selective = needs(&Config { recompute: Recompute::Selective, ..base.clone() });
    let least = needs(&Config { recompute: Recompute::Selective, ..all.clone() });
    assert!(least < selective * 2 / 3, "{least} of {selective}");
    let bounded = |bytes| Config { rank_memory: gib(bytes), ..all.clone() };
    let kept = told(&bounded(selective)).unwrap();
    assert!(kept.contains("auto: selective, as"), "{kept}");
    let some = bounded((selective + least) / 2);
    let said = told(&some).unwrap();
    assert!(said.contains("auto: selective:out=") && said.contains("out-batches="), "{said}");
    assert!(needs(&some) <= (selective + least) / 2);
    let reference = run(base.clone());
    assert!(check(&reference, some) > 0);
    let fullest = bounded(least - 1);
    let said = told(&fullest).unwrap();
    assert!(said.contains("auto: full:"), "{said}");
}
