//! Runs that exchange their program for another one between two steps.

mod common;
#[path = "common/saboteur.rs"]
mod saboteur;

use std::path::Path;

use common::captured::{CapturedEvent, capture};
use common::{Run, assert_same_bits, run, tiny};
use saboteur::Fault;
use zeropp::config::{OptimizerKind, Precision, Recompute, Reschedule, Resume};
use zeropp::model::gpt;
use zeropp::{Config, Trainer, failures};
use zeropp_core::meter::MemoryKind;
use zeropp_core::metrics::StepMetrics;

/// A number below `n` that follows from a job, and from which of its choices it is.
fn below(n: u64, job: u64, choice: u64) -> u64 {
    let mut z = (job * 64 + choice + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB) % n
}

/// A random job of so many steps.
fn job(number: u64, steps: u64) -> Config {
    let pick = |n: usize, choice: u64| below(n as u64, number, choice) as usize;
    let (kind, v, unit) = [
        ("zeropp", 2, Some(3)),
        ("zeropp", 2, Some(6)),
        ("zeropp", 1, Some(4)),
        ("zeropp-auto", 2, Some(3)),
        ("gpipe", 1, None),
        ("1f1b", 1, None),
        ("zb-h1", 1, None),
        ("zb-2p", 1, None),
        ("interleaved", 2, None),
        ("zb-v", 2, None),
        ("auto", 2, None),
    ][pick(11, 0)];
    let recompute = [Recompute::None, Recompute::Selective, Recompute::Full][pick(3, 1)];
    Config {
        schedule: kind.into(),
        virtual_stages: Some(v),
        unit,
        pp: [2, 2, 4][pick(3, 2)],
        zero3: [1, 1, 2][pick(3, 3)],
        dp: [1, 1, 2][pick(3, 4)],
        micro_batches: Some([4, 6, 8][pick(3, 5)]),
        layers: 8,
        zero1: pick(2, 6) == 1,
        prefetch: pick(3, 7),
        recompute,
        seed: number,
        steps,
        ..tiny()
    }
}

/// The same job where programs are exchanged at every chance.
fn always(config: Config) -> Config {
    Config { reschedule: Some(Reschedule::Auto), exchanges_always: true, ..config }
}

/// The same where blocks move between stages, too, at every other chance.
fn recutting(config: Config) -> Config {
    Config { reschedule: Some(Reschedule::Recut), exchanges_always: true, ..config }
}

/// A run that exchanges programs at every chance, and how often it did.
fn exchanging(config: Config) -> (Run, Vec<String>) {
    let (run, captured) = capture(|| run(config));
    (run, changes(&captured))
}

/// What was told of orders that changed, and of blocks that moved.
fn changes(captured: &[CapturedEvent]) -> Vec<String> {
    let tells = |text: &&str| text.contains("order changed") || text.contains("moved in");
    captured.iter().map(CapturedEvent::message).filter(tells).map(str::to_owned).collect()
}

/// The same, saved in `folder` and after `step` resumed by another run.
fn resumed(config: Config, folder: &Path, step: u64) -> (Run, Vec<String>) {
    let saves = Config { save: Some(folder.into()), ..config };
    let (first, before) = exchanging(Config { steps: step, ..saves.clone() });
    let (rest, after) = exchanging(Config { resume: Resume::Must, ..saves });
    let steps = first.steps.into_iter().chain(rest.steps).collect();
    (Run { steps, ..rest }, [before, after].concat())
}

/// The same, in which `fault` kills a rank, and all go on from their newest checkpoint.
fn recovered(config: Config, folder: &Path, place: u64) -> (Run, Vec<String>) {
    let config = Config { save: Some(folder.into()), save_every: 1, max_recoveries: 2, ..config };
    let fault = Fault::new(1, place as i64, || panic!("sabotage"));
    let model = fault.hidden_in(gpt::build(config.gpt_shape(256)));
    let trainer = Trainer::builder(config).model(model).build().expect("a good configuration");
    let mut steps = Vec::new();
    let ((summary, weights), captured) = capture(|| {
        trainer.train_to_weights(|s| steps.push(s.clone())).expect("a run that recovers")
    });
    assert_eq!(summary.recoveries, 1, "the rank is killed");
    (Run { steps, summary, weights }, changes(&captured))
}

/// Compares thirty random jobs, each varied so, with what they are without the changes that `how`
/// asks for: every third is resumed and every third loses a rank. How many of them changed
/// anything, and blocks, and how many went on with what was found.
fn compare(vary: fn(Config) -> Config, how: fn(Config) -> Config) -> [usize; 3] {
    let (mut changed, mut moved, mut went_on) = (0, 0, 0);
    for number in 0..30 {
        let config = vary(Config { warmup: Some(2), ..job(number, 18) });
        let dir = tempfile::tempdir().unwrap();
        let step = 8 + below(4, number, 8);
        // Each block's F, B and W is a place: in one of the steps after the seventh.
        let places = 3 * config.layers / config.pp * config.micro_batches.unwrap_or(1);
        let place = 7 * places as u64 + below(3 * places as u64, number, 9);
        // A run's end is a part of its learning rates.
        let whole = Config { decay: zeropp::config::Decay::Constant, ..config.clone() };
        let (expected, (with, changes), end) = match number % 3 {
            0 => (run(config.clone()), exchanging(how(config.clone())), "whole"),
            1 => (run(whole.clone()), resumed(how(whole), dir.path(), step), "resumed"),
            _ => {
                let recovered = recovered(how(config.clone()), dir.path(), place);
                (run(config.clone()), recovered, "killed")
            }
        };
        let what = format!("job {number}: {} pp {}, {end}", config.schedule, config.pp);
        let moves = changes.iter().filter(|text| text.contains("moved in")).count();
        println!("{what}: {} changes, {moves} of blocks", changes.len());
        assert_same_bits(&expected, &with, &what);
        let evaluates = |run: &Run| run.steps.iter().map(|s| s.eval.is_some()).collect::<Vec<_>>();
        assert_eq!(evaluates(&expected), evaluates(&with), "{what}: steps that are evaluated");
        changed += usize::from(!changes.is_empty());
        moved += usize::from(moves > 0);
        went_on += usize::from(end == "resumed" && with.steps[step as usize].program > 0);
    }
    [changed, moved, went_on]
}

#[test]
fn thirty_random_jobs_have_the_bits_that_they_have_without_exchanges() {
    let [changed, _, went_on] = compare(|config| config, always);
    println!("{changed} of 30 jobs exchanged their program; {went_on} of 10 went on so");
    assert!(changed >= 12 && went_on >= 2, "{changed} of 30, {went_on} of 10");
}

#[test]
fn thirty_random_jobs_have_the_bits_that_they_have_without_moving_blocks() {
    let vary = |config: Config| Config {
        optimizer: OptimizerKind::ALL[config.seed as usize % OptimizerKind::ALL.len()],
        ema: config.seed.is_multiple_of(2).then_some(0.9),
        tied: config.seed % 4 == 3,
        precision: if config.seed % 6 == 1 { Precision::Bf16 } else { Precision::Fp32 },
        // Some evaluate before blocks move and after it.
        eval_every: if config.seed.is_multiple_of(3) { 4 } else { 0 },
        eval_steps: 1,
        split: config.seed.is_multiple_of(3).then(|| "90,10".into()),
        // A model that hides a fault says itself what trains.
        lora_rank: if config.seed % 5 == 4 && config.seed % 3 < 2 { 2 } else { 0 },
        ..config
    };
    let [_, moved, went_on] = compare(vary, recutting);
    println!("{moved} of 30 jobs moved blocks; {went_on} of 10 went on so");
    assert!(moved >= 12 && went_on >= 2, "{moved} of 30, {went_on} of 10");
}

/// Before, they were read from the file again, by each rank that got some of them.
#[test]
fn blocks_that_do_not_train_move_without_the_file_that_the_run_began_with() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("base");
    run(Config { save: Some(base.clone()), ..small(4) });
    for [zero3, dp] in [[2, 1], [1, 2]] {
        let from = dir.path().join(format!("from {zero3}"));
        std::fs::create_dir(&from).unwrap();
        for file in std::fs::read_dir(base.join("step-000004")).unwrap() {
            let file = file.unwrap();
            std::fs::copy(file.path(), from.join(file.file_name())).unwrap();
        }
        let (init_from, freeze) = (Some(from.clone()), Some("wte,h.0,h.1,h.2.mlp".into()));
        let tuned = Config { init_from, freeze, zero3, dp, lr: 1e-2, ..small(14) };
        let whole = run(tuned.clone());
        let (with, captured) = capture(|| {
            let trainer = Trainer::new(recutting(tuned)).expect("a good configuration");
            let mut steps = Vec::new();
            let (summary, weights) = trainer
                .train_to_weights(|s| {
                    // Gone before blocks move.
                    let _ = std::fs::remove_dir_all(&from);
                    steps.push(s.clone());
                })
                .expect("a run without the file");
            Run { steps, summary, weights }
        });
        let moves = changes(&captured).iter().filter(|text| text.contains("moved in")).count();
        assert!(moves > 0, "zero3 {zero3}: no block moved");
        assert_same_bits(&whole, &with, "a run whose blocks do not all train");
    }
}

/// A job whose first exchange is after step 4 and stays.
fn small(steps: u64) -> Config {
    Config {
        schedule: "gpipe".into(),
        pp: 2,
        layers: 4,
        unit: None,
        decay: zeropp::config::Decay::Constant,
        steps,
        ..tiny()
    }
}

#[test]
fn a_resumed_run_goes_on_with_the_order_that_was_found_unless_its_mesh_or_schedule_differs() {
    let dir = tempfile::tempdir().unwrap();
    let saves = Config { save: Some(dir.path().into()), keep: 9, ..always(small(9)) };
    let first = run(saves.clone());
    assert!(first.steps[4..7].iter().all(|step| step.program == 1), "{:?}", first.steps);
    let again = Config { resume: Resume::Must, steps: 12, ..saves };
    let (same, captured) = capture(|| run(again.clone()));
    assert!(same.steps[0].program >= 1, "from its first step on");
    assert!(captured.iter().any(|e| e.message().contains("goes on with the order")));
    let other = Config { schedule: "1f1b".into(), resume: Resume::Step(9), ..again.clone() };
    let (other, captured) = capture(|| run(other));
    assert_eq!(other.steps[0].program, 0, "what is asked for now counts");
    assert!(captured.iter().any(|e| e.message().contains("looked for anew, since schedule was")));
    let other = Config { zero3: 2, resume: Resume::Step(9), steps: 11, ..again };
    let (other, captured) = capture(|| run(other));
    assert_eq!(other.steps[0].program, 0, "another mesh has other times");
    assert!(captured.iter().any(|e| e.message().contains("looked for anew, since zero3 was 1")));
}

#[test]
fn a_trace_has_the_memory_of_every_step_and_says_which_order_each_had() {
    let trainer = Trainer::new(always(small(9))).unwrap();
    let (_, timeline) = trainer.train_to_timeline(|_| {}).unwrap();
    assert!(timeline.facts.iter().any(|fact| fact.starts_with("from step 5 on: order 1")));
    for rank in &timeline.ranks {
        let steps: Vec<_> = rank
            .spans
            .split_inclusive(|s| s.action == zeropp::pipeline::ir::Action::OptimizerStep)
            .collect();
        assert_eq!(steps.len(), 8, "those that a trace holds");
        for (i, step) in steps.iter().enumerate() {
            let within = step[0].start_ns..=step[step.len() - 1].end_ns;
            let mut points = rank.memory.iter().filter(|point| within.contains(&point.at_ns));
            assert!(points.any(|point| point.bytes > 0), "step {} has no memory", i + 1);
        }
    }
}

/// Before, the memory of every step was that of the stages that the run had in the end.
#[test]
fn a_trace_has_the_memory_of_the_stages_that_each_step_had() {
    let highest = |config: Config| {
        let (_, timeline) = Trainer::new(config).unwrap().train_to_timeline(|_| {}).unwrap();
        let of = |rank: &zeropp::pipeline::timeline::RankTimeline| {
            let is_end = |action| action == zeropp::pipeline::ir::Action::OptimizerStep;
            let steps = rank.spans.split_inclusive(|s| is_end(s.action)).map(|step| {
                let within = step[0].start_ns..=step[step.len() - 1].end_ns;
                let points = rank.memory.iter().filter(|point| within.contains(&point.at_ns));
                points.map(|point| point.bytes).max().expect("a step has memory")
            });
            steps.collect::<Vec<_>>()
        };
        timeline.ranks.iter().map(of).collect::<Vec<_>>()
    };
    let (whole, cut_anew) = (highest(small(9)), highest(recutting(small(9))));
    for rank in 0..2 {
        assert_eq!(whole[rank][..4], cut_anew[rank][..4], "the planned stages");
        assert_ne!(whole[rank][4..], cut_anew[rank][4..], "those that were found");
    }
}

#[test]
fn a_failed_run_s_records_name_the_order_that_its_ranks_ran() {
    let dir = tempfile::tempdir().unwrap();
    let config = Config { flight_dir: Some(dir.path().into()), ..always(small(14)) };
    // F, B and W of two blocks and six micro-batches are 36 places a step: in the sixth one.
    let fault = Fault::new(1, 190, || panic!("sabotage"));
    let model = fault.hidden_in(gpt::build(config.gpt_shape(256)));
    let trainer = Trainer::builder(config).model(model).build().unwrap();
    trainer.train(|_| {}).expect_err("a rank is killed");
    let run = failures::Run::read(&[dir.path().into()], None).unwrap();
    for record in &run.records {
        let exchanged = record.header.exchanged.as_ref().expect("another order ran");
        assert_eq!((exchanged.number, exchanged.step), (1, 5), "rank {}", record.header.rank);
    }
}

#[test]
fn every_rank_stays_within_the_plan_when_programs_are_exchanged() {
    let mut all = 0;
    for number in 0..12 {
        let config = job(number, 12);
        let planned = zeropp::Trainer::new(config.clone()).unwrap();
        let ranks = &planned.plan().ranks;
        let most = ranks.iter().map(|rank| rank.held.at_once.total()).max().unwrap();
        let peak = |kind| ranks.iter().map(|rank| rank.held.peaks.get(kind)).max().unwrap();
        let (run, changes) = exchanging(always(config));
        let changes = changes.len();
        println!("job {number}: {changes} exchanges");
        for kind in MemoryKind::ALL {
            let within = |step: &StepMetrics| step.peak_bytes.get(kind) <= peak(kind);
            assert!(run.steps.iter().all(within), "job {number}: {kind:?}");
        }
        assert!(run.steps.iter().all(|step| step.at_once_bytes <= most), "job {number}");
        all += changes;
    }
    assert!(all > 0, "no program was exchanged");
}

/// Before, what was predicted was of the stages that the run had in the end alone.
#[test]
fn memory_is_predicted_of_all_stages_that_a_run_had() {
    for steps in [9, 14] {
        let (run, changes) = exchanging(recutting(small(steps)));
        assert!(changes.iter().any(|text| text.contains("moved in")), "{changes:?}");
        let summary = &run.summary;
        for kind in MemoryKind::ALL {
            let [peak, most] = [summary.peak_bytes, summary.predicted_bytes].map(|of| of.get(kind));
            assert!(peak <= most, "{steps} steps: {kind:?} {peak} of {most}");
        }
        let [peak, most] = [summary.at_once_bytes, summary.predicted_at_once_bytes];
        assert!(peak <= most, "{steps} steps: {peak} of {most}");
    }
}

/// Before, a resumed run had them on every mesh with as many, whatever its memory.
#[test]
fn a_resumed_run_has_the_stages_that_were_found_on_the_same_mesh_alone() {
    let dir = tempfile::tempdir().unwrap();
    let saves = Config { save: Some(dir.path().into()), ..recutting(small(9)) };
    let blocks = |config: &Config| Trainer::new(config.clone()).unwrap().plan().blocks.clone();
    let planned = blocks(&saves);
    run(saves.clone());
    let again = Config { resume: Resume::Must, steps: 12, ..saves };
    assert_ne!(blocks(&again), planned);
    let alone =
        Config { pp: 1, virtual_stages: Some(2), schedule: "zeropp".into(), ..again.clone() };
    for other in [Config { zero3: 2, ..again.clone() }, Config { dp: 2, ..again }, alone] {
        assert_eq!(blocks(&other), planned, "pp {} zero3 {}", other.pp, other.zero3);
    }
}
