//! A head that is split over pipeline ranks changes no bit, and takes the messages and the memory
//! that are predicted.

use std::path::Path;

use crate::common::{Run, assert_same_bits, llama, run, run_saving_all, text_file, tiny};
use zeropp::config::{
    Bytes, OptimizerKind, OptimizerSync, OutStates, Precision, Recompute, Reschedule, Resume,
};
use zeropp::meter::MemoryKind;
use zeropp::pipeline::head::HeadTree;
use zeropp::pipeline::ir::{Action, HeadMessage};
use zeropp::{Config, StepMetrics, Trainer};

/// Rows of the head: eight blocks, of which the last one is short.
const IDS: usize = 1000;
const BLOCKS: usize = 8;

fn small() -> Config {
    Config { vocab: Some(IDS), layers: 4, steps: 20, ..tiny() }
}

fn tied(config: Config) -> Config {
    Config { tied: true, ..config }
}

/// The same with slices of so many blocks, one for each pipeline rank.
fn split(config: Config, blocks: &[usize]) -> Config {
    let text: Vec<String> = blocks.iter().map(usize::to_string).collect();
    Config { pp: blocks.len(), head_split: Some(text.join(",")), ..config }
}

/// Blocks of `pp` ranks at random, also none on some.
fn random_blocks(pp: usize, numbers: &mut impl FnMut(usize) -> usize) -> Vec<usize> {
    let mut cuts: Vec<usize> = (1..pp).map(|_| numbers(BLOCKS + 1)).collect();
    cuts.sort_unstable();
    let ends = cuts.iter().copied().chain([BLOCKS]);
    let starts = [0].into_iter().chain(cuts.iter().copied());
    starts.zip(ends).map(|(start, end)| end - start).collect()
}

fn numbers() -> impl FnMut(usize) -> usize {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let seed = std::env::var("SPLIT_SEED").ok().and_then(|seed| seed.parse().ok());
    let mut state: u64 = seed.unwrap_or(now.as_nanos() as u64);
    println!("SPLIT_SEED={state}");
    move |n| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % n
    }
}

fn check(reference: &Run, config: Config) {
    let what = format!(
        "{} pp {} virtual {:?} zero3 {} dp {} {} slices {:?} recompute {}",
        config.model,
        config.pp,
        config.virtual_stages,
        config.zero3,
        config.dp,
        config.schedule,
        config.head_split,
        config.recompute
    );
    assert_same_bits(reference, &run(config), &what);
}

#[test]
fn any_slices_on_any_layout_have_the_bits_of_the_whole_head() {
    let mut numbers = numbers();
    for base in [small(), llama(small()), tied(small()), tied(llama(small()))] {
        let reference = run(base.clone());
        for (pp, v) in [(1, 1), (2, 1), (2, 2), (3, 1), (4, 1)] {
            let base = Config { virtual_stages: Some(v), ..base.clone() };
            let blocks = random_blocks(pp, &mut numbers);
            check(&reference, split(base, &blocks));
        }
    }
    for base in [small(), tied(small())] {
        let reference = run(base.clone());
        for blocks in [[4, 4], [0, 8], [8, 0], [3, 5]] {
            check(&reference, split(base.clone(), &blocks));
        }
    }
}

#[test]
fn shards_and_replicas_of_slices_have_the_bits_of_the_whole_head() {
    for (zero3, dp, zero1, tied) in [
        (2, 1, false, false),
        (1, 2, false, false),
        (2, 2, true, false),
        (3, 1, false, true),
        (1, 1, true, true),
        (1, 3, true, true),
        (2, 2, false, true),
        (2, 2, true, true),
    ] {
        let base = Config { zero3, dp, zero1, tied, ..small() };
        let reference = run(base.clone());
        let gradients = |config: Config| Trainer::new(config).unwrap().first_gradients().unwrap().1;
        let slices = split(base.clone(), &[3, 5]);
        assert!(gradients(base) == gradients(slices.clone()), "gradients of the first step");
        check(&reference, slices);
    }
}

#[test]
fn other_kinds_bf16_dropout_and_recomputation_have_the_bits_of_the_whole_head() {
    let bf16 = Config { precision: Precision::Bf16, ..small() };
    let dropout = Config { dropout: 0.1, ..small() };
    for base in [tied(bf16.clone()), bf16, dropout] {
        check(&run(base.clone()), split(base, &[2, 6]));
    }
    for base in [small(), tied(small())] {
        let base = Config { virtual_stages: Some(2), ..base };
        let reference = run(base.clone());
        for recompute in [Recompute::Selective, Recompute::Full] {
            check(&reference, split(Config { recompute, ..base.clone() }, &[4, 4]));
        }
    }
    let base = Config { unit: Some(6), ..tied(small()) };
    let reference = run(base.clone());
    for schedule in ["1f1b", "zb-h1"] {
        let base = Config { schedule: schedule.into(), unit: None, ..base.clone() };
        check(&reference, split(base, &[3, 4, 1]));
    }
}

/// These states are in a file of each rank, and with all gradients, where there is one replica.
fn in_file(config: Config, optimizer_out_states: OutStates) -> Config {
    let optimizer_out = Some(std::env::temp_dir().join("zeropp-split-head"));
    Config { optimizer_out, optimizer_out_states, ..config }
}

#[test]
fn slices_whose_states_are_in_files_have_the_bits_of_the_whole_head() {
    for base in [small(), tied(small())] {
        for (zero3, dp, zero1, blocks) in [
            (1, 1, false, &[3, 5][..]),
            (2, 1, false, &[2, 4, 2]),
            (1, 2, false, &[0, 8]),
            (2, 2, true, &[8, 0]),
        ] {
            let base = Config { zero3, dp, zero1, clip: 0.05, ..base.clone() };
            let reference = run(base.clone());
            for states in [OutStates::Moments, OutStates::All] {
                check(&reference, split(in_file(base.clone(), states), blocks));
            }
        }
    }
}

/// Clipping makes most of the early updates wrong, so that steps are begun twice.
#[test]
fn updates_of_slices_that_are_validated_late_have_the_bits_of_the_whole_head() {
    let base = Config { clip: 0.05, ..small() };
    for (zero3, tied, blocks) in
        [(1, false, &[3, 5][..]), (2, false, &[2, 4, 2]), (1, true, &[3, 5]), (2, true, &[2, 4, 2])]
    {
        let base = Config { zero3, tied, ..base.clone() };
        let late = Config { optimizer_sync: OptimizerSync::Late, ..base.clone() };
        let late = run(split(late, blocks));
        assert_same_bits(&run(base), &late, &format!("late, {blocks:?}"));
        assert!(late.summary.rollbacks > 0, "no update was taken back");
    }
}

/// Also where nothing of the head trains, as with adapters of the blocks.
#[test]
fn slices_that_do_not_train_have_the_bits_of_the_whole_head() {
    for base in [
        Config { freeze: Some("lm_head".into()), ..small() },
        Config { lora_rank: 2, zero3: 2, ..llama(small()) },
        Config { freeze: Some("wte".into()), ..tied(small()) },
        Config { lora_rank: 2, zero3: 2, ..tied(llama(small())) },
    ] {
        check(&run(base.clone()), split(base, &[5, 3]));
    }
}

/// Peaks of every kind, and the bytes of all messages of a step.
#[test]
fn memory_and_messages_of_slices_are_predicted() {
    let [moments, all] = [OutStates::Moments, OutStates::All];
    for (base, blocks) in [
        (small(), vec![4, 4]),
        (small(), vec![3, 2, 3]),
        (Config { virtual_stages: Some(2), ..small() }, vec![8, 0]),
        (Config { virtual_stages: Some(2), zero3: 2, ..small() }, vec![1, 7]),
        (Config { precision: Precision::Bf16, ..small() }, vec![4, 4]),
        (Config { freeze: Some("lm_head".into()), ..small() }, vec![4, 4]),
        (uneven(small()), vec![5, 3]),
        (tied(small()), vec![4, 4]),
        (tied(small()), vec![0, 8]),
        (tied(small()), vec![3, 2, 3]),
        (Config { virtual_stages: Some(2), zero3: 2, ..tied(small()) }, vec![1, 7]),
        (Config { zero3: 3, log_layers: 1, ..tied(small()) }, vec![4, 4]),
        (Config { dp: 2, zero3: 2, zero1: true, ..tied(small()) }, vec![4, 4]),
        (Config { dp: 2, zero1: true, ema: Some(0.9), ..tied(small()) }, vec![1, 1, 6]),
        (Config { optimizer_sync: OptimizerSync::Late, zero3: 2, ..tied(small()) }, vec![4, 4]),
        (Config { precision: Precision::Bf16, ..tied(small()) }, vec![5, 3]),
        (Config { optimizer: OptimizerKind::Sgd, zero3: 2, ..tied(small()) }, vec![5, 3]),
        (Config { freeze: Some("wte".into()), ..tied(small()) }, vec![4, 4]),
        (in_file(small(), moments), vec![3, 5]),
        (in_file(tied(small()), all), vec![3, 5]),
        (in_file(tied(small()), moments), vec![0, 8]),
        (Config { zero3: 3, log_layers: 1, ..in_file(tied(small()), all) }, vec![2, 1, 5]),
        (Config { dp: 2, zero3: 2, ..in_file(tied(small()), all) }, vec![4, 4]),
        (
            Config { dp: 2, zero1: true, ema: Some(0.9), ..in_file(tied(small()), all) },
            vec![1, 1, 6],
        ),
    ] {
        let config = Config { steps: 2, ..split(base, &blocks) };
        let trainer = Trainer::new(config.clone()).unwrap();
        let messages = message_bytes(&config, trainer.schedule());
        let run = run(config.clone());
        let what = format!("{blocks:?} {:?} {}", config.virtual_stages, config.precision);
        for kind in MemoryKind::ALL {
            let measured = run.summary.peak_bytes.get(kind);
            let predicted = run.summary.predicted_bytes.get(kind);
            assert_eq!(measured, predicted, "{what}: {kind:?} measured, then predicted");
        }
        let [measured, predicted] =
            [run.summary.at_once_bytes, run.summary.predicted_at_once_bytes];
        // Of gradients in memory a replica updates its part, and all are predicted.
        match config.zero1 && config.optimizer_out.is_some() {
            true => assert!(measured <= predicted, "{what}: {measured} of {predicted}"),
            false => assert_eq!(measured, predicted, "{what}: at once"),
        }
        // With shards and replicas there are gathers and reductions beside.
        if config.mesh().world() == config.pp {
            // A tied weight's rows, both ways, but for those of the rank with the embedding.
            let trains = config.tied && config.freeze.is_none();
            let rows = if trains { IDS - IDS.min(blocks[0] * 128) } else { 0 };
            let rows = 2 * 4 * (rows * config.hidden) as u64;
            assert_eq!(run.steps[1].comm_bytes, messages + rows, "{what}");
        }
    }
}

/// Bytes that all ranks send in a step.
fn message_bytes(config: &Config, schedule: &zeropp::pipeline::ir::Schedule) -> u64 {
    let head = HeadTree::of(schedule).expect("a split head");
    let tokens = (config.micro_batch_size * config.seq) as u64;
    let element = if config.precision == Precision::Bf16 { 2 } else { 4 };
    let hidden = tokens * config.hidden as u64;
    let bytes = |(rank, action): (usize, &Action)| match *action {
        Action::Send { .. } => hidden * element,
        Action::SendHead { message, peer, .. } => {
            let edge = &head.edges[head.edge(message, rank, peer).unwrap()];
            match message {
                HeadMessage::Input => hidden * element,
                HeadMessage::Sums => tokens * (8 * edge.tensors + 4),
                HeadMessage::Lse => tokens * 8,
                HeadMessage::Gradient => hidden * 4 * edge.tensors,
            }
        }
        _ => 0,
    };
    let ranks = schedule.ranks.iter().enumerate();
    ranks.flat_map(|(rank, actions)| actions.iter().map(move |a| (rank, a))).map(bytes).sum()
}

#[test]
fn a_checkpoint_of_slices_goes_on_with_a_whole_head_and_back() {
    let dir = tempfile::tempdir().unwrap();
    let base = Config { zero3: 2, steps: 6, save_every: 3, ..small() };
    let lora = Config { lora_rank: 2, ..base.clone() };
    let layouts = [base.clone(), split(base.clone(), &[3, 5]), split(base.clone(), &[2, 4, 2])];
    let next = |i: usize| &layouts[(i + 1) % layouts.len()];
    let mut pairs: Vec<_> = layouts.iter().enumerate().map(|(i, first)| (first, next(i))).collect();
    let frozen = [split(lora.clone(), &[3, 5]), lora];
    pairs.extend([(&frozen[0], &frozen[1]), (&frozen[1], &frozen[0])]);
    let base = Config { ema: Some(0.9), dp: 2, zero1: true, ..tied(base) };
    let whole = Config { pp: 2, ..base.clone() };
    let tied = [whole, split(base.clone(), &[3, 5]), split(base.clone(), &[0, 4, 4]), base];
    pairs.extend((0..tied.len()).map(|i| (&tied[i], &tied[(i + 1) % tied.len()])));
    for (i, (first, then)) in pairs.into_iter().enumerate() {
        let [saved, copy] = ["saved", "copy"].map(|name| dir.path().join(format!("{name}{i}")));
        let whole = run_saving_all(Config { save: Some(saved.clone()), ..first.clone() });
        let half = Run { steps: whole.steps[3..].to_vec(), ..whole };
        std::fs::create_dir_all(copy.join("step-000003")).unwrap();
        for file in std::fs::read_dir(saved.join("step-000003")).unwrap() {
            let file = file.unwrap();
            std::fs::copy(file.path(), copy.join("step-000003").join(file.file_name())).unwrap();
        }
        let rest = run(Config { save: Some(copy), resume: Resume::Newest, ..then.clone() });
        assert_same_bits(&half, &rest, &format!("{:?} to {:?}", first.head_split, then.head_split));
    }
}

/// The weight has 16,000 elements, and 4,096 or more have moments in 8 bits, also where a slice has
/// fewer.
#[test]
fn an_optimizer_s_rule_sees_the_whole_weight_of_a_split_head() {
    let base = Config { optimizer: OptimizerKind::Adamw8bit, ..small() };
    check(&run(base.clone()), split(base, &[1, 7]));
    let whole = [OptimizerKind::Adafactor];
    for optimizer in OptimizerKind::ALL.iter().filter(|of| !whole.contains(of)) {
        let base = Config { optimizer: *optimizer, zero3: 2, clip: 0.05, ..tied(small()) };
        check(&run(base.clone()), split(base, &[3, 5]));
    }
}

/// A trace has what each rank did of the head, and is read again.
#[test]
fn a_trace_of_slices_can_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace.json");
    run(Config { trace: Some(trace.clone()), ..split(small(), &[3, 5]) });
    let text = std::fs::read_to_string(&trace).unwrap();
    if let Err(e) = zeropp::pipeline::draw::chrome_read::read(&text) {
        panic!("{e}");
    }
}

#[test]
fn a_validation_loss_of_slices_has_the_bits_of_the_whole_head() {
    let dir = tempfile::tempdir().unwrap();
    let text = text_file(&dir, 4000);
    let validated = |data: &Path| Config {
        data: Some(data.into()),
        split: Some("9,1".into()),
        eval_every: 2,
        eval_steps: 2,
        ..small()
    };
    let losses = |run: &Run| -> Vec<(u64, u64)> {
        let of = |s: &StepMetrics| Some((s.step, s.eval?.loss.to_bits()));
        run.steps.iter().filter_map(of).collect()
    };
    let reference = run(validated(&text));
    assert!(!losses(&reference).is_empty());
    for blocks in [vec![5, 3], vec![8, 0], vec![2, 3, 3]] {
        let run = run(split(validated(&text), &blocks));
        assert_eq!(losses(&run), losses(&reference), "{blocks:?}");
        assert_same_bits(&reference, &run, &format!("{blocks:?}"));
    }
}

/// A head that takes as long as three layers.
fn large() -> Config {
    let split = Config { vocab: Some(4000), hidden: 64, seq: 64, steps: 3, ..small() };
    Config { pp: 2, ..split }
}

fn notes(config: &Config) -> Vec<String> {
    let notes = Trainer::new(config.clone()).unwrap().plan().notes.clone();
    notes.into_iter().filter(|note| note.starts_with("head-split = auto: ")).collect()
}

#[test]
fn a_large_head_is_split_by_default_and_no_bit_depends_on_it() {
    for large in [large(), tied(large())] {
        let whole = Config { head_split: Some("off".into()), ..large.clone() };
        assert_eq!(notes(&whole), [""; 0]);
        let said = notes(&large);
        assert!(said.len() == 1 && said[0].contains("ranks have "), "{said:?}");
        let auto = Config { head_split: Some("auto".into()), ..large.clone() };
        assert_eq!(notes(&auto), said);
        assert!(!Trainer::new(large.clone()).unwrap().schedule().head_blocks.is_empty());
        check(&run(whole), large);
    }
}

/// It stays whole without a word where it is small, and with one where this run cannot split it.
#[test]
fn a_head_that_is_small_or_cannot_be_split_stays_whole() {
    for small in [
        Config { hidden: 16, seq: 8, ..large() },
        Config { vocab: Some(1920), ..large() },
        Config { layers: 16, vocab: Some(2100), ..large() },
        Config { schedule: "zb-v".into(), unit: None, virtual_stages: None, ..large() },
        Config { pp: 1, ..large() },
    ] {
        assert_eq!(notes(&small), [""; 0], "{} ids of {}", small.vocab.unwrap(), small.hidden);
        assert!(Trainer::new(small).unwrap().schedule().head_blocks.is_empty());
    }
    let config = Config { optimizer: OptimizerKind::Adafactor, ..large() };
    let said = notes(&config);
    assert!(said.len() == 1 && said[0].contains("stays whole"), "{said:?}");
    assert!(said[0].contains("adafactor updates the head's weight as a whole"), "{said:?}");
    assert!(Trainer::new(config).unwrap().schedule().head_blocks.is_empty());
}

/// A run with slices writes what they take as a head's times, and any run reads them.
#[test]
fn costs_of_a_run_with_slices_are_for_any_slices() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("costs.json");
    let first = split(large(), &[10, 22]);
    run(Config { save_costs: Some(file.clone()), steps: 4, ..first.clone() });
    let table = zeropp::read_costs(&file).unwrap();
    let head = table.head_times().unwrap().expect("that of a split head");
    assert!(head.iter().all(|ns| *ns > 0), "{head:?}");
    for config in [first, split(large(), &[16, 16])] {
        let config = Config { costs: Some(file.clone()), ..config };
        let trainer = Trainer::new(config).unwrap();
        assert!(trainer.plan().costs.starts_with("measured: "), "{}", trainer.plan().costs);
        assert!(!trainer.schedule().head_blocks.is_empty());
    }
    let whole = Config { costs: Some(file), head_split: Some("off".into()), ..large() };
    assert!(Trainer::new(whole).unwrap().plan().bubble > 0.0);
}

/// Each names the field, the value, what is wrong and what would work.
#[test]
fn settings_that_slices_do_not_go_with_are_refused_before_a_rank_starts() {
    let base = || split(small(), &[4, 4]);
    for (config, beginning) in [
        (
            split(small(), &[4, 5]),
            "schedule:head-split = 4,5: has 9 blocks, and a head of 1000 ids has 8",
        ),
        (
            Config { head_split: Some(format!("{},4", usize::MAX)), ..base() },
            "schedule:head-split = 18446744073709551615,4: has 18446744073709551615 blocks",
        ),
        (
            Config { pp: 3, ..base() },
            "schedule:head-split = 4,4: is for 2 ranks; give a number for each",
        ),
        (
            Config { head_split: Some("x".into()), ..small() },
            "schedule:head-split = x: is no list of numbers; give a number for each",
        ),
        (
            Config { optimizer: OptimizerKind::Adafactor, ..tied(base()) },
            "schedule:head-split = 4,4: adafactor updates the head's weight as a whole",
        ),
        (
            Config { schedule: "gpipe".into(), unit: None, ..base() },
            "schedule gpipe: its head is always whole",
        ),
    ] {
        let error = Trainer::new(config).err().expect("refused").to_string();
        assert!(error.starts_with(beginning), "{error}");
    }
    // Memory is held against its limit when the run starts; until then there is a plan.
    assert!(Trainer::new(Config { rank_memory: Some(1e-5), ..base() }).is_ok());
}

/// Replicas that are dealt different numbers of micro-batches.
fn uneven(config: Config) -> Config {
    let global_batch = Some("11".into());
    Config { dp: 2, micro_batches: None, global_batch, steps: 6, ..config }
}

#[test]
fn slices_of_an_uneven_batch_have_the_bits_of_the_whole_head() {
    let reference = run(uneven(Config { pp: 2, head_split: Some("off".into()), ..small() }));
    check(&reference, uneven(split(small(), &[3, 5])));
    for zero1 in [false, true] {
        let blocks = [2, 3, 3];
        check(
            &reference,
            Config { zero1, virtual_stages: Some(1), ..uneven(split(small(), &blocks)) },
        );
    }
}

/// A run exchanges the order of its stages and slices at every chance.
#[test]
fn orders_of_slices_are_exchanged_and_no_bit_depends_on_it() {
    for (blocks, schedule, unit) in [(&[5, 3][..], "zeropp", 3), (&[2, 3, 3], "zb-h1", 6)] {
        let config = Config { micro_batches: Some(6), unit: Some(unit), steps: 30, ..small() };
        let reference = run(config.clone());
        let of = Config {
            reschedule: Some(Reschedule::Auto),
            exchanges_always: true,
            mem_limit: Some(Bytes(1 << 30)),
            schedule: schedule.into(),
            unit: (schedule == "zeropp").then_some(unit),
            virtual_stages: Some(1),
            ..split(config, blocks)
        };
        let run = run(of);
        assert_same_bits(&reference, &run, &format!("{blocks:?} {schedule}"));
        assert!(run.steps.iter().any(|step| step.program > 0), "{schedule}: none was exchanged");
    }
}

/// With a whole head a rank has more blocks, and so keeps more, than with a split one.
#[test]
fn a_limit_on_memory_that_only_a_split_head_meets_is_met() {
    let config = Config { layers: 12, steps: 2, ..large() };
    let limited = |head_split: Option<&str>, bytes: u64| Config {
        mem_limit: Some(Bytes(bytes)),
        head_split: head_split.map(str::to_owned),
        ..config.clone()
    };
    let meets =
        |head_split: Option<&str>, bytes: u64| Trainer::new(limited(head_split, bytes)).is_ok();
    let least = |head_split: &str| {
        let (mut below, mut meets_it) = (0, 1 << 30);
        while below + 1 < meets_it {
            let middle = (below + meets_it) / 2;
            match meets(Some(head_split), middle) {
                true => meets_it = middle,
                false => below = middle,
            }
        }
        meets_it
    };
    let said = notes(&config);
    let blocks = said[0].split(' ').nth(5).unwrap();
    let (whole, split) = (least("off"), least(blocks));
    assert!(split < whole, "{split} with {blocks}, {whole} with a whole one");
    assert!(!meets(Some("off"), split));
    let auto = limited(None, split);
    let said = notes(&auto);
    assert!(
        said.len() == 1 && said[0].contains("with a whole one, schedule:mem-limit = "),
        "{said:?}"
    );
    check(&run(Config { head_split: Some("off".into()), ..config }), auto);
}
