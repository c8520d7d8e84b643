//! Samples that are cut into slices: the bits of whole samples, whatever the number of slices, the
//! layout and the order, and the memory that is predicted.

use std::path::Path;

use crate::common::{Run, assert_same_bits, llama, run, run_saving_all, text_file, tiny};
use crate::masks::masked;
use zeropp::config::{
    OptimizerKind, OptimizerSync, Precision, Recompute, Reschedule, Resume, SliceCount, SliceCut,
    Tokenizer,
};
use zeropp::meter::MemoryKind;
use zeropp::{Config, Trainer};

/// Samples of 864 tokens: up to four slices, of which the last one has 96.
fn small() -> Config {
    Config {
        layers: 4,
        hidden: 16,
        seq: 864,
        micro_batches: Some(2),
        unit: Some(1),
        steps: 2,
        ..tiny()
    }
}

fn layout(config: &Config, pp: usize, v: usize) -> Config {
    Config { pp, virtual_stages: Some(v), ..config.clone() }
}

fn of_kind(config: &Config, schedule: &str) -> Config {
    Config { schedule: schedule.into(), unit: None, ..config.clone() }
}

fn sliced(config: &Config, slices: usize) -> Config {
    Config { slices: slices.into(), ..config.clone() }
}

/// Peaks of every kind, and of all together, are as predicted.
pub(crate) fn assert_memory(run: &Run, what: &str) {
    let summary = &run.summary;
    for kind in MemoryKind::ALL {
        let (measured, predicted) =
            (summary.peak_bytes.get(kind), summary.predicted_bytes.get(kind));
        assert_eq!(measured, predicted, "{what}: {kind:?} measured, then predicted");
    }
    let [measured, predicted] = [summary.at_once_bytes, summary.predicted_at_once_bytes];
    assert_eq!(measured, predicted, "{what}: at once");
}

/// A configuration's layout, for failures.
pub(crate) fn described(config: &Config) -> String {
    let Config { model, optimizer, precision, schedule, pp, zero3, dp, .. } = config;
    let v = config.virtual_stages;
    format!(
        "{model} {optimizer} {precision} {schedule} pp {pp} virtual {v:?} zero3 {zero3} dp {dp} \
         recompute {}",
        config.recompute
    )
}

/// The bits of `reference`, and the predicted memory.
fn check(reference: &Run, config: Config) {
    let what = format!("{} slices {}", described(&config), config.slices);
    let run = run(config);
    assert_same_bits(reference, &run, &what);
    assert_memory(&run, &what);
}

#[test]
fn twenty_steps_have_the_bits_of_whole_samples() {
    let base = Config { steps: 20, ..small() };
    let reference = run(base.clone());
    assert!(reference.summary.last_loss < reference.summary.first_loss);
    check(&reference, sliced(&base, 2));
    check(&reference, sliced(&layout(&base, 2, 2), 4));
    check(&reference, sliced(&of_kind(&layout(&base, 4, 1), "interleaved-zb"), 4));
}

#[test]
fn layouts_orders_and_cuts_have_the_bits_of_whole_samples() {
    let reference = run(small());
    for slices in [2, 4] {
        for (pp, v) in [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1)] {
            check(&reference, sliced(&layout(&small(), pp, v), slices));
        }
        for (pp, v) in [(1, 2), (2, 1), (2, 2)] {
            let rounds = of_kind(&layout(&small(), pp, v), "interleaved-zb");
            check(&reference, sliced(&rounds, slices));
        }
        let tokens = Config { slice_cut: SliceCut::Tokens, ..layout(&small(), 2, 2) };
        check(&reference, sliced(&tokens, slices));
    }
    // One unit, as 1F1B has it.
    let base = Config { micro_batches: Some(3), unit: Some(3), ..small() };
    let reference = run(base.clone());
    for (pp, slices) in [(1, 2), (2, 2), (4, 4)] {
        check(&reference, sliced(&of_kind(&layout(&base, pp, 1), "1f1b"), slices));
        check(&reference, sliced(&layout(&base, pp, 1), slices));
    }
}

/// More slices than stages, and an optimizer that takes matrices whole.
#[test]
fn eight_slices_and_muon_have_the_bits_of_whole_samples() {
    let long = Config { seq: 2048, micro_batches: Some(1), ..small() };
    let reference = run(long.clone());
    check(&reference, sliced(&layout(&long, 2, 2), 8));
    check(&reference, sliced(&of_kind(&layout(&long, 4, 1), "interleaved-zb"), 8));
    let muon = Config { optimizer: OptimizerKind::Muon, zero3: 2, ..small() };
    let reference = run(muon.clone());
    check(&reference, sliced(&layout(&muon, 2, 2), 4));
    check(&reference, sliced(&of_kind(&layout(&muon, 4, 1), "interleaved-zb"), 2));
}

/// A run chooses slices where a step is predicted to be shorter, with the bits of whole samples;
/// what they cannot do, and short samples, stay whole without a word.
#[test]
fn slices_are_chosen_where_they_pay() {
    let long = Config { seq: 4096, micro_batches: Some(1), steps: 1, warmup: Some(0), ..small() };
    let auto = |config: Config| Config { slices: SliceCount::Auto, ..config };
    assert_eq!(Config::default().slices, SliceCount::Auto);
    let note = |config: Config| {
        let trainer = Trainer::new(config).unwrap();
        let mut notes = trainer.plan().notes.clone().into_iter();
        notes.find(|note| note.starts_with("slices = auto"))
    };
    let alone = auto(layout(&long, 2, 2));
    let said = note(alone.clone()).expect("one sample leaves ranks idle");
    assert!(said.starts_with("slices = auto: samples are cut into 2 slices"), "{said}");
    let reference = run(sliced(&long, 1));
    check(&reference, alone.clone());
    for whole in [
        Config { micro_batches: Some(16), unit: Some(16), ..alone.clone() },
        Config { pp: 1, ..alone.clone() },
        Config { seq: 2048, ..alone.clone() },
        Config { save_costs: Some("costs.json".into()), ..alone.clone() },
        Config { schedule: "gpipe".into(), unit: None, ..alone.clone() },
        // Of two samples it would have two units in place of one.
        Config { micro_batches: Some(2), ..of_kind(&layout(&alone, 4, 1), "interleaved-zb") },
        sliced(&alone, 1),
    ] {
        assert_eq!(note(whole), None);
    }
}

/// The head in slices of rows, of samples in slices of tokens: the root adds up their losses, and
/// rows sum over tokens as the whole head does.
#[test]
fn a_split_head_beside_slices_has_the_bits_of_neither() {
    let split = |config: Config, blocks: &str| Config { head_split: Some(blocks.into()), ..config };
    let base = Config { vocab: Some(1000), head_split: Some("off".into()), ..small() };
    let reference = run(base.clone());
    for (blocks, v, n) in
        [("3,5", 2, 1), ("3,5", 2, 2), ("8,0", 1, 4), ("2,3,3", 1, 4), ("0,4,2,2", 1, 2)]
    {
        let pp = blocks.split(',').count();
        let config = split(layout(&base, pp, v), blocks);
        check(&reference, sliced(&config, n));
        check(&reference, Config { zero3: 2, micro_batches: Some(1), ..sliced(&config, n) });
        if n >= pp {
            check(&reference, sliced(&of_kind(&config, "interleaved-zb"), n));
        }
    }
    let one_unit = Config { micro_batches: Some(3), unit: Some(3), ..base.clone() };
    let reference = run(one_unit.clone());
    for (blocks, n) in [("5,3", 2), ("2,2,1,3", 4)] {
        let pp = blocks.split(',').count();
        check(&reference, sliced(&split(of_kind(&layout(&one_unit, pp, 1), "1f1b"), blocks), n));
    }
    for base in [
        Config { tied: true, ..base.clone() },
        Config { precision: Precision::Bf16, recompute: Recompute::Full, ..base.clone() },
        Config { optimizer_sync: OptimizerSync::Late, clip: 0.05, ..base.clone() },
    ] {
        let reference = run(base.clone());
        check(&reference, sliced(&split(layout(&base, 2, 2), "3,5"), 4));
    }
}

/// By default too, where both pay.
#[test]
fn a_large_head_is_split_beside_slices_where_it_pays() {
    let base = Config { vocab: Some(4000), micro_batches: Some(8), unit: Some(8), ..small() };
    let reference = run(Config { head_split: Some("off".into()), ..base.clone() });
    let config = sliced(&layout(&base, 2, 1), 2);
    let schedule = Trainer::new(config.clone()).unwrap().schedule().clone();
    assert!(!schedule.head_blocks.is_empty() && schedule.sample_slices.len() == 2);
    check(&reference, config);
}

#[test]
fn recomputation_of_slices_changes_nothing_and_is_predicted() {
    let reference = run(small());
    for (pp, v) in [(1, 1), (1, 2), (2, 2), (2, 1), (4, 1)] {
        for recompute in [Recompute::Selective, Recompute::Full] {
            for slices in [2, 4] {
                let base = Config { recompute, ..layout(&small(), pp, v) };
                check(&reference, sliced(&base, slices));
            }
        }
    }
    let rounds = Config { recompute: Recompute::Full, ..layout(&small(), 2, 2) };
    check(&reference, sliced(&of_kind(&rounds, "interleaved-zb"), 4));
}

/// A tiny Mistral whose window is shorter than its samples, and no multiple of blocks.
const SLIDING: &str = r#"{"model_type": "mistral", "hidden_size": 16, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24, "vocab_size": 256,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "hidden_act": "silu", "sliding_window": 300, "tie_word_embeddings": false}"#;

fn sliding(dir: &Path) -> Config {
    let (model, toml) = (dir.join("config.json"), dir.join("run.toml"));
    std::fs::write(&model, SLIDING).unwrap();
    let text = format!("model = {:?}\nlayers = 4\nseq = 864", model.to_str().unwrap());
    std::fs::write(&toml, text).unwrap();
    let loaded = Config::load(&toml).unwrap();
    let Config { micro_batches, unit, steps, lr, warmup, virtual_stages, .. } = small();
    Config { micro_batches, unit, steps, lr, warmup, virtual_stages, ..loaded }
}

#[test]
fn families_dropout_windows_and_bf16_have_the_bits_of_whole_samples() {
    let dir = tempfile::tempdir().unwrap();
    let bf16 = |config: Config| Config { precision: Precision::Bf16, ..config };
    let dropped = |config: Config| Config { dropout: 0.2, ..config };
    let windowed = sliding(dir.path());
    let bases = [
        llama(small()),
        bf16(small()),
        bf16(llama(small())),
        dropped(small()),
        dropped(bf16(llama(small()))),
        windowed.clone(),
        bf16(windowed.clone()),
        dropped(windowed),
        Config { model: "qwen3".into(), ..llama(small()) },
        Config { tied: true, ..small() },
    ];
    for base in bases {
        let reference = run(base.clone());
        check(&reference, sliced(&base, 2));
        let full = Config { recompute: Recompute::Full, ..layout(&base, 2, 2) };
        check(&reference, sliced(&full, 4));
        let selective = Config { recompute: Recompute::Selective, ..base };
        check(&reference, sliced(&selective, 4));
    }
}

/// Vectors that train beside frozen matrices, and adapters.
#[test]
fn frozen_weights_and_adapters_have_the_bits_of_whole_samples() {
    let bases = [
        Config {
            freeze: Some("h.*.attn.c_attn.weight,h.*.mlp.c_fc.weight,h.*.ln_1".into()),
            ..small()
        },
        Config { lora_rank: 4, lora_targets: Some("all".into()), ..llama(small()) },
    ];
    for base in bases {
        let reference = run(base.clone());
        check(&reference, sliced(&base, 4));
        check(&reference, sliced(&layout(&base, 2, 2), 2));
    }
}

#[test]
fn shards_replicas_and_threads_have_the_bits_of_whole_samples() {
    for (zero3, dp, zero1) in [(2, 1, false), (1, 2, false), (2, 2, true)] {
        let base = Config { zero3, dp, zero1, ..small() };
        let reference = run(base.clone());
        check(&reference, sliced(&layout(&base, 2, 2), 4));
        let gradients = |config: Config| Trainer::new(config).unwrap().first_gradients().unwrap().1;
        assert!(gradients(base.clone()) == gradients(sliced(&base, 2)), "of the first step");
    }
    let reference = run(small());
    check(&reference, sliced(&Config { threads: Some(2), ..small() }, 4));
    // Replicas with other numbers of samples.
    let uneven = Config { dp: 2, global_batch: Some("3".into()), micro_batches: None, ..small() };
    let reference = run(uneven.clone());
    check(&reference, sliced(&layout(&uneven, 2, 1), 2));
}

#[test]
fn updates_that_are_validated_late_have_the_bits_of_whole_samples() {
    let base = Config { steps: 4, clip: 0.1, ..small() };
    let reference = run(base.clone());
    for (pp, v) in [(2, 1), (2, 2)] {
        let late = Config { optimizer_sync: OptimizerSync::Late, ..layout(&base, pp, v) };
        let what = format!("late, pp {pp} virtual {v}");
        assert_same_bits(&reference, &run(sliced(&late, 4)), &what);
    }
}

#[test]
fn masks_and_validation_losses_of_slices_are_those_of_whole_samples() {
    let dir = tempfile::tempdir().unwrap();
    let ids: Vec<u16> = (0..4000u32).map(|i| (i * i % 251) as u16).collect();
    let data = Some(masked(dir.path(), &ids, |i| i % 3 == 0 || i % 1000 < 100));
    let scored = Config { data, tokenizer: Tokenizer::U16, vocab: Some(256), ..small() };
    let reference = run(scored.clone());
    assert!(reference.steps[0].scored_tokens.unwrap() < 2 * 864);
    check(&reference, sliced(&layout(&scored, 2, 2), 4));
    let split = Config { head_split: Some("1,1".into()), ..layout(&scored, 2, 2) };
    check(&reference, sliced(&split, 4));
    let text = Some(text_file(&dir, 12_000));
    let split = Some("7,3".into());
    let evaluated =
        Config { data: text, split, eval_every: 1, eval_steps: 1, ..layout(&small(), 2, 2) };
    let losses = |run: &Run| -> Vec<u64> {
        run.steps.iter().map(|step| step.eval.unwrap().loss.to_bits()).collect()
    };
    for recompute in [Recompute::None, Recompute::Full] {
        let base = Config { recompute, ..evaluated.clone() };
        let whole = run(base.clone());
        // The head of 256 ids has two blocks.
        for head_split in [None, Some("1,1".to_string())] {
            let cut = run(Config { head_split, ..sliced(&base, 4) });
            assert_same_bits(&whole, &cut, "evaluated");
            assert_eq!(losses(&whole), losses(&cut));
        }
    }
}

/// Checkpoints do not know of slices.
#[test]
fn a_run_of_slices_goes_on_with_whole_samples_and_back() {
    let dir = tempfile::tempdir().unwrap();
    let base = Config { steps: 4, ..small() };
    let reference = run(base.clone());
    for (name, first, then) in [("a", 4, 1), ("b", 1, 4), ("c", 2, 4)] {
        let save = Some(dir.path().join(name));
        let base = Config { save, save_every: 2, keep: 9, ..base.clone() };
        let whole = run_saving_all(sliced(&layout(&base, 2, 1), first));
        assert_same_bits(&reference, &whole, name);
        let rounds = of_kind(&layout(&base, 1, 2), "interleaved-zb");
        let base = if then > 1 { rounds } else { Config { unit: None, ..base } };
        let on = Config { resume: Resume::Step(2), ..sliced(&base, then) };
        let rest = run(on);
        let half = Run { steps: reference.steps[2..].to_vec(), ..run_of(&reference) };
        assert_same_bits(&half, &rest, &format!("{first} to {then} slices"));
    }
}

fn run_of(run: &Run) -> Run {
    Run { steps: Vec::new(), summary: run.summary.clone(), weights: run.weights.clone() }
}

/// With long samples in 16 slices the fullest rank has little more than a sample's share; of 1F1B
/// the first rank has four samples.
#[test]
fn samples_of_16k_tokens_hold_less_in_slices_with_the_same_bits() {
    let (seq, micro_batches) = (16_384, Some(4));
    let base = Config { seq, micro_batches, steps: 1, warmup: Some(0), ..small() };
    let base = llama(Config { heads: 1, ..base });
    // In rounds of a sample a unit has one, and bits follow from units.
    let whole = run(sliced(&base, 1));
    let first = Trainer::new(sliced(&of_kind(&layout(&base, 4, 1), "1f1b"), 1)).unwrap();
    let most =
        first.plan().ranks.iter().map(|rank| rank.held.at_once.total()).max().unwrap() as f64;
    let rounds = of_kind(&layout(&base, 4, 1), "interleaved-zb");
    let cut = Config { slice_cut: SliceCut::Tokens, ..sliced(&rounds, 16) };
    let cut = run(Config { recompute: Recompute::Selective, ..cut });
    assert_same_bits(&whole, &cut, "16k tokens");
    assert_memory(&cut, "16k tokens");
    let held = cut.summary.at_once_bytes as f64;
    assert!(held < 0.5 * most, "{held} of {most}");
}

#[test]
fn runs_that_slices_cannot_have_yet_are_refused_by_name() {
    let refused = |config: Config| Trainer::new(config).err().expect("refused").to_string();
    let base = sliced(&small(), 4);
    let cases = [
        (sliced(&small(), 0), "schedule:slices = 0: at least 1 is needed"),
        (sliced(&small(), 5), "schedule:slices = 5: a sample of 864 tokens has 4 blocks"),
        (Config { seq: 500, ..base.clone() }, "schedule:slices = 4: cuts samples of seq = 500"),
        (
            Config { seq: 800, ..base.clone() },
            "schedule:slices = 4: cuts samples of seq = 800 tokens into slices of [256, 256, 256, \
             32]; the last one has to have 96 or more",
        ),
        (
            Config { micro_batch_size: 2, ..base.clone() },
            "schedule:slices = 4: runs cannot do it with micro-batch-size = 2 yet; use 1, or",
        ),
        (
            Config { reschedule: Some(Reschedule::Auto), pp: 2, ..base.clone() },
            "schedule:slices = 4: runs cannot do it with reschedule = auto yet",
        ),
        (
            Config { slice_cut: SliceCut::Tokens, ..sliced(&small(), 1) },
            "schedule:slice-cut = tokens: samples are whole, as slices is 1; leave it out",
        ),
        (
            Config { model: "mixtral".into(), ..llama(base.clone()) },
            "schedule:slices = 4: model.layers.0 of this model computes on whole samples alone",
        ),
        (
            Config { lora_rank: 2, ..base.clone() },
            "schedule:slices = 4: h.0.attn.c_attn.lora_A.weight has a side of 2, and products of \
             fewer than 3 columns have bits of their own",
        ),
        (
            Config { vocab: Some(258), ..base.clone() },
            "schedule:slices = 4: the head of 258 token ids ends in a block of 2, and products",
        ),
    ];
    for (config, message) in cases {
        let text = refused(config);
        assert!(text.starts_with(message), "{text}");
    }
    let zb_v = refused(Config { pp: 2, virtual_stages: None, ..of_kind(&base, "zb-v") });
    assert!(zb_v.contains("schedule zb-v has whole samples only"), "{zb_v}");
}

/// Documents of any length, which slices cut, with learned and with rotary positions.
#[test]
fn documents_have_the_bits_of_whole_samples() {
    let dir = tempfile::tempdir().unwrap();
    let text = Some(text_file(&dir, 12_000));
    let apart = |base: Config| Config {
        data: text.clone(),
        document_mask: true,
        document_end: Some(usize::from(b'e')),
        ..base
    };
    let far = |base: Config| Config { document_end: Some(usize::from(b'\n')), ..apart(base) };
    let bf16 = |config: Config| Config { precision: Precision::Bf16, ..config };
    let dropped = |config: Config| Config { dropout: 0.2, ..config };
    let bases = [
        apart(small()),
        far(llama(small())),
        bf16(far(small())),
        far(dropped(bf16(llama(small())))),
        dropped(far(sliding(dir.path()))),
    ];
    for base in bases {
        let reference = run(base.clone());
        check(&reference, sliced(&base, 2));
        let full = Config { recompute: Recompute::Full, ..layout(&base, 2, 2) };
        check(&reference, sliced(&full, 4));
        let rounds = of_kind(&layout(&base, 2, 1), "interleaved-zb");
        check(&reference, sliced(&rounds, 4));
    }
}
