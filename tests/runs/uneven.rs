//! A batch that does not divide evenly between the replicas: no sample is lost or read twice, each
//! counts as much as the others, and the bits follow from the shape alone.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use zeropp::config::{Activation, OptimizerSync, Precision, Recompute, Resume};
use zeropp::pipeline::costs::Table;
use zeropp::pipeline::schedules::{KINDS, StagesPerRank};
use zeropp::pipeline::simulate::Costs;
use zeropp::{Config, Trainer, emulate};
use zeropp::{SampleError, Samples};

use crate::common::{Run, assert_same_bits, run, run_saving_all, text_file, tiny};
use crate::oracle;

/// `replicas` that share `samples` a step, in micro-batches of one.
fn dealt(samples: usize, replicas: usize) -> Config {
    Config { dp: replicas, global_batch: Some(samples.to_string()), micro_batches: None, ..tiny() }
}

#[test]
fn gradients_are_those_of_the_whole_batch_in_one_graph() {
    let small = |samples, replicas| Config {
        layers: 4,
        hidden: 32,
        heads: 4,
        seq: 16,
        ..dealt(samples, replicas)
    };
    oracle::check(small(8, 3));
    oracle::check(Config { pp: 2, virtual_stages: Some(2), ..small(5, 2) });
    oracle::check(Config { zero3: 2, micro_batch_size: 2, tied: true, ..small(20, 2) });
    oracle::check(Config { zero1: true, zero3: 2, activation: Activation::Gelu, ..small(14, 3) });
    // Masks are a sample's own, whichever replica has it.
    oracle::check(Config { pp: 2, dropout: 0.3, ..small(7, 3) });
}

/// One that does not agree with the order would be a run with another batch.
#[test]
fn the_loss_differs_from_an_even_run_s_in_rounding_only() {
    for base in [tiny(), Config { precision: Precision::Bf16, ..tiny() }] {
        let of = |config: Config| Config { steps: 20, precision: base.precision, ..config };
        let one = run(of(Config { unit: None, ..dealt(12, 1) }));
        for (replicas, zero3, unit) in [(5, 1, 3), (8, 1, 1), (4, 2, 2), (5, 2, 1)] {
            let config = Config { zero3, unit: Some(unit), ..dealt(12, replicas) };
            let other = run(of(config));
            for (x, y) in one.steps.iter().zip(&other.steps) {
                assert_eq!(y.tokens, 12 * 8);
                let relative = (x.loss - y.loss).abs() / x.loss;
                let limit = if base.precision == Precision::Bf16 { 2e-2 } else { 1e-5 };
                assert!(relative <= limit, "{replicas} x {zero3}: step {}: {relative:e}", x.step);
            }
        }
    }
}

/// Every kind that can run the two numbers of micro-batches, to the bits of `zeropp` with units as
/// long as a step.
#[test]
fn no_bit_depends_on_the_schedule() {
    let base = Config { steps: 4, unit: Some(9), ..dealt(17, 2) };
    let reference = run(base.clone());
    let mut ran = 0;
    for kind in KINDS {
        let v = match kind.stages {
            StagesPerRank::Any(v) | StagesPerRank::Exactly(v) | StagesPerRank::MultipleOf(v) => v,
        };
        let config = Config {
            pp: 2,
            virtual_stages: Some(v),
            schedule: kind.name.into(),
            unit: if matches!(kind.name, "zeropp" | "zeropp-auto") { Some(9) } else { None },
            ..base.clone()
        };
        match Trainer::new(config.clone()) {
            Ok(_) => assert_same_bits(&reference, &run(config), kind.name),
            Err(refused) => {
                let text = refused.to_string();
                println!("{}: {text}", kind.name);
                let says = text.contains("gives the replicas 9, 8 micro-batches a rank");
                assert!(says && text.contains("use 16 or 18 samples"), "{}: {text}", kind.name);
                continue;
            }
        }
        ran += 1;
    }
    assert!(ran >= KINDS.len() - 3, "{ran}");
}

#[test]
fn no_bit_depends_on_what_else_is_layout() {
    let base = Config { steps: 6, ..dealt(11, 3) };
    let reference = run(base.clone());
    let others = [
        Config { pp: 2, virtual_stages: Some(2), ..base.clone() },
        Config { pp: 4, prefetch: 2, recompute: Recompute::Full, ..base.clone() },
        Config { zero1: true, ..base.clone() },
        Config { zero1: true, pp: 2, optimizer_sync: OptimizerSync::Late, ..base.clone() },
        Config { pp: 2, threads: Some(2), ..base.clone() },
    ];
    for config in others {
        let what = format!("pp {} zero1 {} {}", config.pp, config.zero1, config.optimizer_sync);
        assert_same_bits(&reference, &run(config), &what);
    }
    // Twice the same, with ZeRO-3 groups.
    let sharded = Config { zero3: 2, steps: 6, ..dealt(22, 3) };
    let piped = Config { pp: 2, zero1: true, ..sharded.clone() };
    assert_same_bits(&run(sharded), &run(piped), "zero3 2");
}

/// Samples that know which of the threads of ranks has read them.
struct Known(Arc<Mutex<BTreeMap<u64, Vec<String>>>>);

impl Samples for Known {
    fn name(&self) -> &str {
        "known"
    }
    fn vocabulary(&self) -> usize {
        50
    }
    fn sample(&self, n: u64, tokens: usize) -> Result<Vec<u32>, SampleError> {
        let thread = std::thread::current();
        if let Some(name) = thread.name().filter(|name| name.starts_with("rank ")) {
            let mut all = self.0.lock();
            let readers = all.entry(n).or_default();
            if !readers.iter().any(|reader| reader == name) {
                readers.push(name.to_owned());
            }
        }
        Ok((0..tokens as u64).map(|i| ((n * 7 + i * (1 + n % 5)) % 50) as u32).collect())
    }
}

/// Also over a resume on fewer replicas, which keeps the batch without a setting.
#[test]
fn every_sample_is_read_by_one_rank_and_none_is_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let save = Some(dir.path().join("ckpt"));
    let read = Arc::new(Mutex::new(BTreeMap::new()));
    let trained = |config: Config| {
        let data = Known(read.clone());
        let trainer = Trainer::builder(config).data(data).build().unwrap();
        let per_step = trainer.plan().micro_batches.clone();
        trainer.train(|_| ()).unwrap();
        per_step
    };
    let base = Config { resume: Resume::Newest, save, zero3: 2, ..dealt(16, 3) };
    assert_eq!(trained(Config { steps: 3, ..base.clone() }), [3, 3, 2]);
    let fewer = Config { dp: 1, global_batch: None, steps: 5, ..base.clone() };
    assert_eq!(trained(fewer), [8]);
    assert_eq!(trained(Config { dp: 5, steps: 7, ..base }), [2, 2, 2, 1, 1]);
    let read = read.lock();
    assert_eq!(read.keys().copied().collect::<Vec<_>>(), (0..7 * 16).collect::<Vec<_>>());
    assert!(read.values().all(|readers| readers.len() == 1), "{read:?}");
}

/// The losses of a run that goes on in another shape are those of one that had the same batch all
/// along, but for rounding; and those of a run in that shape from the same checkpoint, to the bit.
#[test]
fn a_run_goes_on_with_fewer_and_with_more_replicas() {
    let dir = tempfile::tempdir().unwrap();
    let whole = run(Config { steps: 12, ..dealt(8, 3) });
    let begun = |folder: &str| {
        let save = Some(dir.path().join(folder));
        let config = Config { steps: 6, save, save_every: 6, ..dealt(8, 3) };
        // The rate is that of the whole run.
        let (warmup, lr) = (config.warmup, config.lr);
        run_saving_all(Config { warmup, lr, min_lr: Some(lr), ..config })
    };
    let _ = whole;
    for replicas in [2, 1, 4, 8] {
        let (a, b) = (format!("a{replicas}"), format!("b{replicas}"));
        begun(&a);
        begun(&b);
        let go_on = |folder: &str, config: Config| {
            let save = Some(dir.path().join(folder));
            let lr = config.lr;
            run(Config { steps: 12, save, resume: Resume::Must, min_lr: Some(lr), ..config })
        };
        let open = Config { dp: replicas, global_batch: None, unit: None, ..dealt(8, 1) };
        let reported = go_on(&a, Config { unit: None, ..dealt(8, replicas) });
        assert_same_bits(&reported, &go_on(&b, open), &format!("{replicas} replicas"));
        let steady = run(Config { steps: 12, min_lr: Some(tiny().lr), ..dealt(8, 3) });
        for (x, y) in steady.steps[6..].iter().zip(&reported.steps) {
            assert_eq!(x.step, y.step);
            assert!((x.loss - y.loss).abs() <= 1e-5 * x.loss, "{replicas}: {x:?} {y:?}");
        }
    }
}

#[test]
fn a_validation_loss_has_the_bits_of_any_mesh() {
    let dir = tempfile::tempdir().unwrap();
    let text = text_file(&dir, 4000);
    let base = Config {
        data: Some(text),
        split: Some("90,10".into()),
        eval_every: 3,
        eval_steps: 2,
        steps: 1,
        warmup: Some(0),
        lr: 0.0,
        min_lr: Some(0.0),
        ..dealt(12, 1)
    };
    let loss = |config: Config| {
        let run: Run = run(config);
        run.steps[0].eval.expect("after the last step")
    };
    let one = loss(base.clone());
    for (replicas, pp, zero3) in [(5, 2, 1), (4, 1, 2), (8, 2, 1)] {
        let zero3s = Config { dp: replicas, pp, zero3, ..base.clone() };
        let other = loss(zero3s);
        assert_eq!((other.loss.to_bits(), other.tokens), (one.loss.to_bits(), one.tokens));
    }
}

#[test]
fn the_deal_is_planned_and_counted() {
    let config = Config { pp: 2, virtual_stages: Some(2), steps: 2, ..dealt(8, 3) };
    let trainer = Trainer::new(config).unwrap();
    let plan = trainer.plan();
    assert_eq!((plan.micro_batches.as_slice(), plan.units.as_slice()), (&[3, 3, 2][..], &[3][..]));
    assert!(plan.notes.iter().any(|note| note.contains("have 3, 3, 2 micro-batches a rank")));
    let mut seen = Vec::new();
    let summary = trainer.train(|step| seen.push(step.clone())).unwrap();
    assert_eq!((seen[0].tokens, seen[0].all_gathers), (64, 3 * 2 * plan.all_gathers_per_rank));
    assert_eq!(summary.reduce_scatters_per_unit, 2.0, "of each of two stages once");
    // A third of a replica's micro-batch is missing, on top of the schedule's own bubble.
    let even = Trainer::new(Config { dp: 2, ..trainer_config(6, 2) }).unwrap();
    let missing = 1.0 / 9.0;
    let expected = 1.0 - (1.0 - even.plan().bubble) * (1.0 - missing);
    assert!((plan.bubble - expected).abs() < 0.01, "{} and {expected}", plan.bubble);
}

fn trainer_config(samples: usize, replicas: usize) -> Config {
    Config { pp: 2, virtual_stages: Some(2), ..dealt(samples, replicas) }
}

#[test]
fn uneven_batches_that_cannot_be_dealt_are_refused() {
    let refused = |config: Config, parts: &[&str]| {
        let text = Trainer::new(config).err().expect("refused").to_string();
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    };
    refused(dealt(2, 3), &["global-batch = 2: is less than 3 samples", "of dp 3; use 3 or more"]);
    let sharded = Config { zero3: 2, ..dealt(9, 2) };
    refused(sharded, &["is not a multiple of 2 samples", "use 8 or 10"]);
    let dual = Config {
        pp: 2,
        virtual_stages: Some(2),
        schedule: "dualpipe-v".into(),
        unit: None,
        ..dealt(7, 2)
    };
    refused(dual, &["gives the replicas 4, 3 micro-batches a rank: ", "use 6 or 8 samples"]);
    // Rounds of P = 2 micro-batches, of which there are five.
    let rounds = Config {
        pp: 2,
        virtual_stages: Some(2),
        schedule: "interleaved".into(),
        unit: None,
        ..dealt(10, 4)
    };
    assert_eq!(Trainer::new(rounds).unwrap().plan().micro_batches, [4, 2, 2, 2]);
}

/// In emulation as in a run: those with fewer micro-batches are done earlier and wait.
#[test]
fn an_emulated_run_deals_as_unevenly_and_is_predicted() {
    let config = Config {
        pp: 2,
        steps: 3,
        warmup: Some(0),
        virtual_stages: Some(1),
        schedule: "1f1b".into(),
        unit: None,
        ..dealt(7, 2)
    };
    let costs = Costs::uniform(2, 2_000_000, 2_000_000, 2_000_000, 0);
    let report = emulate(&config, &Table::from(&costs), |_| ()).unwrap();
    assert_eq!(report.simulated.ranks.len(), 4);
    let computes = |rank: usize| {
        let spans = report.measured.ranks[rank].spans.iter();
        spans.filter(|span| span.action.computes().next().is_some()).count()
    };
    assert_eq!([0, 1, 2, 3].map(computes), [8, 8, 6, 6]);
    // 1F1B of 4: (4 + 1) · 6 ms, of which the second replica computes 18 on each rank.
    assert_eq!(report.simulated_makespan_ns, 30_000_000);
    let expected = 1.0 - (24.0 + 18.0) / 60.0;
    assert!((report.simulated_bubble - expected).abs() < 1e-9, "{}", report.simulated_bubble);
    let measured = report.median().makespan_ns as f64 / 30e6;
    assert!(measured >= 0.99, "{measured}");
}

/// Before, another kind dealt the batch otherwise, and the last bits of sums changed.
#[test]
fn a_resumed_run_keeps_the_deal_of_its_checkpoint_on_any_kind_that_can() {
    let dir = tempfile::tempdir().unwrap();
    let of = |schedule: &str, steps, folder: &str, resume| Config {
        layers: 6,
        pp: 3,
        schedule: schedule.into(),
        virtual_stages: Some(if schedule == "gpipe" { 1 } else { 2 }),
        unit: None,
        steps,
        lr: 3e-3,
        min_lr: Some(3e-3),
        decay: zeropp::config::Decay::Constant,
        save: Some(dir.path().join(folder)),
        save_every: 2,
        keep: 9,
        resume,
        ..dealt(15, 2)
    };
    let dealt = |config: Config| Trainer::new(config).unwrap().plan().micro_batches.clone();
    let whole = run_saving_all(of("interleaved", 4, "whole", Resume::No));
    run_saving_all(of("interleaved", 2, "parts", Resume::No));
    let rest = of("gpipe", 4, "parts", Resume::Must);
    assert_eq!(
        dealt(Config { resume: Resume::No, save: None, save_every: 0, ..rest.clone() }),
        [8, 7]
    );
    assert_eq!(dealt(rest.clone()), [9, 6], "as it was saved");
    let rest = run(rest);
    let Run { summary, weights, .. } = whole;
    let half = Run { steps: whole.steps[2..].to_vec(), summary, weights };
    assert_same_bits(&half, &rest, "on another kind");

    run_saving_all(of("gpipe", 2, "other", Resume::No));
    let error = Trainer::new(of("interleaved", 4, "other", Resume::Must)).err().unwrap();
    assert!(error.is_bad_input());
    let error = error.to_string();
    let kept = "gives the replicas 8, 7 micro-batches a rank, as the checkpoint was dealt";
    assert!(error.contains(kept), "{error}");
}
