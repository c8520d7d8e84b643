//! Recomputation changes no bit, keeps less, and its memory is predicted: in runs of any kind.

use std::collections::BTreeMap;

use zeropp::config::{Activation, OptimizerSync, Precision, Recompute};
use zeropp::meter::MemoryKind;
use zeropp::pipeline::schedules::KINDS;
use zeropp::{Config, Trainer};

use crate::common::{Run, assert_same_bits, run, tiny};
use crate::late::by_chance;

/// A number below `of` that looks random.
fn mixed(seed: u64, what: u64, of: usize) -> usize {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ what.wrapping_mul(0xD1B5_4A32_D192_ED03);
    for _ in 0..2 {
        x = (x ^ (x >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x ^= x >> 32;
    }
    (x % of as u64) as usize
}

/// A random run of a random kind on a random mesh, of a random family.
fn random(seed: u64) -> Config {
    let draw = |what: u64, of: usize| mixed(seed, what, of);
    let model = ["gpt", "llama", "qwen3"][draw(0, 3)];
    let (pp, zero3) = ([1, 2, 2, 4][draw(1, 4)], 1 + draw(2, 2));
    let with_adapters = draw(3, 4) == 0;
    Config {
        model: model.into(),
        activation: if model == "gpt" { Activation::Gelu } else { Activation::Swiglu },
        kv_heads: (model != "gpt").then_some(1),
        intermediate: Some([64, 56, 40][draw(4, 3)]),
        pp,
        zero3,
        dp: if pp * zero3 > 2 { 1 } else { 1 + draw(5, 2) },
        schedule: KINDS[draw(6, KINDS.len())].name.into(),
        layers: 8,
        virtual_stages: None,
        unit: None,
        micro_batches: Some(4),
        precision: [Precision::Fp32, Precision::Bf16][draw(7, 2)],
        dropout: [0.0, 0.0, 0.1][draw(8, 3)],
        tied: draw(9, 3) == 0,
        lora_rank: if with_adapters { 4 } else { 0 },
        lora_targets: with_adapters.then(|| "all".into()),
        freeze: (draw(10, 5) == 0).then(|| format!("{}.1", block_name(model))),
        optimizer_sync: [OptimizerSync::Barrier, OptimizerSync::Late][draw(11, 2)],
        prefetch: draw(12, 3),
        seed,
        steps: 3,
        ..tiny()
    }
}

fn block_name(model: &str) -> &'static str {
    if model == "gpt" { "h" } else { "model.layers" }
}

/// Every kind of memory is what was predicted.
fn assert_predicted(config: &Config, run: &Run, what: &str) {
    let summary = &run.summary;
    for kind in MemoryKind::ALL {
        let (measured, predicted) =
            (summary.peak_bytes.get(kind), summary.predicted_bytes.get(kind));
        assert_eq!(measured, predicted, "{what}: {kind:?} measured, then predicted");
    }
    let [measured, predicted] = [summary.at_once_bytes, summary.predicted_at_once_bytes];
    // A pass packs bf16 weights one layer after the other; of what can be taken back the most is
    // predicted.
    let is_packed = config.precision == Precision::Bf16;
    let may_be_less = is_packed || config.optimizer_sync == OptimizerSync::Late;
    let fits = measured == predicted || may_be_less && measured <= predicted;
    assert!(fits, "{what}: {measured} of {predicted} at once");
}

/// Four programs each of runs by chance. `ZEROPP_RECOMPUTE_RUNS` says how many runs there are, and
/// `ZEROPP_RECOMPUTE_SEED` with which seed the first of them is drawn; that of a failure is in its
/// text.
#[test]
fn random_runs_have_the_same_bits_and_the_predicted_memory_whatever_is_recomputed() {
    let (runs, mut seed) = by_chance("RECOMPUTE", 40);
    let (mut done, mut seen) = (0, BTreeMap::<&str, usize>::new());
    while done < runs {
        seed += 1;
        let config = random(seed);
        // Not all kinds go with all meshes, nor all that is drawn with each other.
        if Trainer::new(config.clone()).is_err() {
            continue;
        }
        let what =
            format!("seed {seed}: {} {} on {}", config.model, config.schedule, config.mesh());
        let with_of = |config: &Config, recompute| {
            let config = Config { recompute, ..config.clone() };
            let run = run(config.clone());
            let first = config.recompute_first;
            assert_predicted(&config, &run, &format!("{what}, {recompute} {first:?}"));
            run
        };
        let with = |recompute| with_of(&config, recompute);
        let none = with(Recompute::None);
        let selective = with(Recompute::Selective);
        assert_same_bits(&none, &selective, &format!("{what}, selective"));
        assert_same_bits(&none, &with(Recompute::Full), &format!("{what}, full"));
        let of_some = Config { recompute_first: Some(1), ..config.clone() };
        let of_some = with_of(&of_some, Recompute::Full);
        assert_same_bits(&none, &of_some, &format!("{what}, full for the first of each unit"));
        let kept = |run: &Run| run.summary.peak_bytes.activation;
        // Kinds that keep to a limit have another order where less is kept of each F.
        let is_same_order = KINDS.iter().any(|k| k.name == config.schedule && !k.obeys_limit);
        let saves = kept(&selective) < kept(&none);
        assert!(saves || !is_same_order, "{what}: nothing is saved");
        done += 1;
        for (name, is) in [
            ("bf16", config.precision == Precision::Bf16),
            ("adapters", config.lora_rank > 0),
            ("late", config.optimizer_sync == OptimizerSync::Late),
            ("dropout", config.dropout > 0.0),
            ("tied", config.tied),
        ] {
            *seen.entry(name).or_default() += usize::from(is);
        }
    }
    println!("{done} runs to seed {seed}: {seen:?}");
}

/// From `selective` to `full`, a micro-batch of each unit after the other.
#[test]
fn each_micro_batch_that_is_recomputed_takes_its_part_of_the_activations() {
    for (precision, v) in [(Precision::Fp32, 4), (Precision::Bf16, 2)] {
        let base = Config { virtual_stages: Some(v), pp: 2, zero3: 2, unit: Some(4), ..tiny() };
        let base = Config { precision, micro_batches: Some(8), steps: 2, ..base };
        let of = |recompute, recompute_first| {
            let config = Config { recompute, recompute_first, ..base.clone() };
            let run = run(config.clone());
            assert_predicted(
                &config,
                &run,
                &format!("{precision} {recompute} {recompute_first:?}"),
            );
            run
        };
        let selective = of(Recompute::Selective, None);
        let mut before = selective.summary.peak_bytes.activation;
        for first in 1..5 {
            let some = of(Recompute::Full, Some(first));
            assert_same_bits(&selective, &some, &format!("{precision}, {first} of 4"));
            let kept = some.summary.peak_bytes.activation;
            assert!(kept < before, "{precision}, {first} of 4: {kept} after {before}");
            before = kept;
        }
    }
}

/// The outputs of norms and activation functions are a third of what a block keeps, and more in a
/// GPT.
#[test]
fn selective_recomputation_saves_a_third_of_the_activations() {
    let gpt = Config { hidden: 32, layers: 4, pp: 2, steps: 1, warmup: Some(0), ..tiny() };
    let llama = crate::common::llama(Config { intermediate: Some(112), ..gpt.clone() });
    for config in [gpt, llama] {
        for precision in [Precision::Fp32, Precision::Bf16] {
            let kept = |recompute| {
                let run = run(Config { precision, recompute, ..config.clone() });
                run.summary.peak_bytes.activation as f64
            };
            let (none, selective) = (kept(Recompute::None), kept(Recompute::Selective));
            let saved = 1.0 - selective / none;
            assert!(saved >= 0.3, "{} {precision}: {saved}", config.model);
        }
    }
}
