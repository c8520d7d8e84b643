//! The validation loss: the same bits on any mesh, equal to a stock forward of the same samples,
//! and nothing to the training.

use std::path::Path;

use crate::common::stock::{leaves, loss};
use crate::common::{assert_same_bits, run, text_file, tiny};
use zeropp::config::{Order, Precision, Recompute, Resume};
use zeropp::data::{Dataset, Sampler};
use zeropp::{Config, Evaluation, StepMetrics, Trainer};
use zeropp_zero3::checkpoint::{Checkpoint, Store};

/// A small run that keeps a tenth of its text to validate on.
fn validated(data: &Path) -> Config {
    Config {
        data: Some(data.into()),
        split: Some("9,1".into()),
        eval_every: 4,
        eval_steps: 2,
        steps: 10,
        ..tiny()
    }
}

fn losses(steps: &[StepMetrics]) -> Vec<(u64, u64)> {
    steps.iter().filter_map(|s| Some((s.step, s.eval?.loss.to_bits()))).collect()
}

fn evaluated(config: Config) -> Evaluation {
    Trainer::new(config).unwrap().evaluate().unwrap()
}

#[test]
fn training_has_the_same_bits_with_and_without() {
    let dir = tempfile::tempdir().unwrap();
    let text = text_file(&dir, 4000);
    for (pp, v, zero3, recompute) in
        [(1, 1, 1, Recompute::None), (2, 2, 2, Recompute::Full), (4, 1, 1, Recompute::Selective)]
    {
        let with = Config { pp, virtual_stages: Some(v), zero3, recompute, ..validated(&text) };
        let without = run(Config { eval_every: 0, ..with.clone() });
        let with = run(with);
        let what = format!("pp {pp} virtual {v} zero3 {zero3}");
        assert_same_bits(&with, &without, &what);
        let steps: Vec<u64> = losses(&with.steps).iter().map(|(step, _)| *step).collect();
        assert_eq!(steps, [4, 8, 10], "every four steps and at the end");
        assert!(without.steps.iter().all(|s| s.eval.is_none()));
        // What it takes is given back, and is no part of a step's figures.
        for (a, b) in with.steps.iter().zip(&without.steps) {
            assert_eq!(a.peak_bytes, b.peak_bytes, "{what}, step {}", a.step);
            assert_eq!(a.all_gathers, b.all_gathers, "{what}, step {}", a.step);
        }
        let last = with.summary.last_eval.unwrap();
        assert_eq!((last.0, last.1.loss.to_bits()), losses(&with.steps)[2]);
        assert!(with.summary.best_eval.unwrap().1.loss <= last.1.loss);
        assert!(last.1.loss < 5.3, "it has learned: {}", last.1.loss);
    }
}

/// The rule: the mean over micro-batches in the order of their samples. So nothing but the size of
/// a micro-batch and the number of samples shows.
#[test]
fn the_same_weights_have_the_same_loss_on_any_mesh() {
    let dir = tempfile::tempdir().unwrap();
    let text = text_file(&dir, 4000);
    for precision in [Precision::Fp32, Precision::Bf16] {
        let base = Config {
            micro_batches: Some(12),
            unit: Some(3),
            micro_batch_size: 2,
            precision,
            ..validated(&text)
        };
        let one = evaluated(base.clone());
        let perplexity = one.loss.exp();
        assert_eq!((one.perplexity, one.tokens), (perplexity, 2 * 12 * 2 * 8));
        assert_eq!(one.bits_per_byte, Some(one.loss / std::f64::consts::LN_2));
        let meshes = [
            (2, 1, 1, 1, 12, "zeropp"),
            (2, 2, 2, 1, 6, "zeropp"),
            (4, 2, 1, 3, 4, "zeropp"),
            (1, 2, 3, 2, 2, "zeropp"),
            (2, 2, 2, 2, 3, "zb-v"),
            (4, 1, 1, 1, 12, "1f1b"),
        ];
        for (pp, v, zero3, dp, micro_batches, schedule) in meshes {
            let config = Config {
                pp,
                virtual_stages: Some(v),
                zero3,
                dp,
                micro_batches: Some(micro_batches),
                unit: (schedule == "zeropp").then_some(micro_batches.min(3)),
                schedule: schedule.into(),
                ..base.clone()
            };
            let units = if schedule == "zeropp" { micro_batches.div_ceil(3) } else { 1 };
            let other = evaluated(config);
            let what = format!("{precision}, pp {pp} v {v} zero3 {zero3} dp {dp} {schedule}");
            assert_eq!(other.loss.to_bits(), one.loss.to_bits(), "{what}");
            assert_eq!(other.tokens, one.tokens, "{what}");
            // V gathers a rank, unit and batch.
            let gathers = pp * zero3 * dp * v * units * 2;
            assert_eq!(other.all_gathers, gathers as u64, "{what}");
        }
    }
}

#[test]
fn it_is_the_loss_of_a_stock_forward_of_the_same_samples() {
    let dir = tempfile::tempdir().unwrap();
    let text = text_file(&dir, 4010);
    let bytes = std::fs::read(&text).unwrap()[..4010].to_vec();
    std::fs::write(&text, &bytes).unwrap();
    let base = Config {
        layers: 4,
        hidden: 32,
        heads: 4,
        seq: 16,
        micro_batch_size: 2,
        tied: true,
        ..validated(&text)
    };
    let kept = Dataset::from_bytes(bytes[bytes.len() * 9 / 10..].to_vec());
    let sampler = Sampler::new(0, Order::Sequential, base.seq, 1);
    // All of it: 25 samples, of which the last has a micro-batch of two for itself.
    let all = kept.samples(base.seq);
    assert_eq!((all, kept.len()), (25, 25 * base.seq + 1));
    for (eval_steps, samples) in [(0, all), (1, 12), (1000, all)] {
        let (mut ids, mut targets) = (Vec::new(), Vec::new());
        for i in 0..samples {
            let (x, y) = sampler.sample(&kept, i as u64, 0).unwrap();
            assert_eq!(x[0], u32::from(bytes[bytes.len() * 9 / 10 + i * base.seq]));
            ids.extend(x.into_iter().map(|t| t as i32));
            targets.extend(y.into_iter().map(|t| t as i32));
        }
        let stock = loss(&base, &leaves(&base, 256), samples, (ids, targets));
        let stock = f64::from(stock.inner().into_scalar::<f32>());
        for (pp, v, zero3, dp, b) in [(1, 1, 1, 1, 6), (2, 2, 1, 1, 6), (2, 1, 3, 2, 1)] {
            let config = Config {
                pp,
                virtual_stages: Some(v),
                zero3,
                dp,
                micro_batches: Some(b),
                unit: Some(b.min(3)),
                eval_steps,
                ..base.clone()
            };
            let ours = evaluated(config);
            let apart = (ours.loss - stock).abs() / stock;
            println!("{samples} samples, pp {pp} zero3 {zero3} dp {dp}: {apart:.1e} apart");
            assert!(apart <= 2e-6, "{} against {stock}", ours.loss);
            assert_eq!(ours.tokens as usize, samples * base.seq);
        }
    }
}

/// Before, what filled no micro-batch was left out, and so was the tail shorter than a sample.
#[test]
fn every_token_is_scored_whatever_the_size_of_a_micro_batch() {
    let dir = tempfile::tempdir().unwrap();
    let text = text_file(&dir, 4000);
    let kept = dir.path().join("kept");
    // Nine samples of 8 tokens and a tail of 5.
    std::fs::write(&kept, (0..78u32).map(|i| (i * 7919 % 251) as u8).collect::<Vec<_>>()).unwrap();
    let of = |micro_batch_size, pp, eval_steps| {
        let base = validated(&text);
        let eval_data = Some(kept.clone());
        evaluated(Config { split: None, eval_data, micro_batch_size, pp, eval_steps, ..base })
    };
    let one = of(1, 1, 0);
    assert_eq!((one.tokens, one.scored_tokens), (77, None));
    for (size, pp) in [(2, 1), (3, 2), (4, 1), (16, 2)] {
        let other = of(size, pp, 0);
        assert_eq!((other.tokens, other.scored_tokens), (77, None), "{size}");
        let apart = (other.loss - one.loss).abs() / one.loss;
        assert!(apart <= 1e-6, "{size}: {} and {}", other.loss, one.loss);
        assert_eq!(of(size, 3 - pp, 0).loss.to_bits(), other.loss.to_bits(), "on any mesh");
    }
    // The tail counts as much as it has tokens.
    let whole = of(1, 1, 1);
    assert!(whole.tokens < 77 && whole.loss.to_bits() != one.loss.to_bits());
}

/// Before, a wish to save or to end waited for the end of a validation, however long.
#[test]
fn a_request_to_save_or_to_end_does_not_wait_for_a_validation() {
    let dir = tempfile::tempdir().unwrap();
    let text = text_file(&dir, 4000);
    let large = dir.path().join("large");
    std::fs::write(&large, vec![b'x'; 4_000_000]).unwrap();
    let saved = dir.path().join("saved");
    let config = Config {
        pp: 2,
        split: None,
        eval_data: Some(large),
        eval_every: 2,
        eval_steps: 0,
        save: Some(saved.clone()),
        ..validated(&text)
    };
    let trainer = Trainer::new(config).unwrap();
    let mut seen = Vec::new();
    let summary = trainer.train(|step: &StepMetrics| {
        seen.push((step.step, step.eval.is_some()));
        let (stopper, at) = (trainer.stopper(), step.step);
        // Once the next validation, which would take minutes, is under way.
        std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(500));
            match at {
                1 => stopper.save(),
                3 => stopper.stop(),
                _ => {}
            }
        });
    });
    let stopped = summary.unwrap().stopped.unwrap();
    assert_eq!((stopped.step, stopped.no_lower), (4, None));
    assert_eq!(seen, [(1, false), (2, false), (3, false), (4, false)]);
    assert_eq!(Store::new(&saved).steps().unwrap(), [2, 4], "saved without waiting");
}

#[test]
fn a_resumed_run_measures_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let text = text_file(&dir, 4000);
    let config = |steps: u64, resume, folder: &str, pp| Config {
        save: Some(dir.path().join(folder)),
        steps,
        lr: 3e-3,
        min_lr: Some(3e-3),
        resume,
        pp,
        virtual_stages: Some(2),
        ..validated(&text)
    };
    let whole = run(config(12, Resume::No, "whole", 1));
    let first = run(config(8, Resume::No, "parts", 1));
    let second = run(config(12, Resume::Must, "parts", 2));
    let parts: Vec<_> = losses(&first.steps).into_iter().chain(losses(&second.steps)).collect();
    assert_eq!(parts, losses(&whole.steps));
    assert_eq!(parts.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [4, 8, 12]);
}

/// Validated on what training moves away from, the first loss is the lowest.
#[test]
fn the_best_checkpoint_stays() {
    let dir = tempfile::tempdir().unwrap();
    let text = text_file(&dir, 4000);
    let other = dir.path().join("other");
    std::fs::write(&other, (0..2000u32).map(|i| (i * 7919 % 251) as u8).collect::<Vec<_>>())
        .unwrap();
    let folder = dir.path().join("saved");
    let config = |steps, resume| Config {
        split: None,
        eval_data: Some(other.clone()),
        eval_every: 3,
        keep_best: true,
        keep: 1,
        save: Some(folder.clone()),
        save_every: 2,
        lr: 1e-2,
        min_lr: Some(1e-2),
        steps,
        resume,
        pp: 2,
        ..validated(&text)
    };
    let first = run(config(10, Resume::No));
    let best: Vec<u64> =
        first.steps.iter().filter(|s| s.eval.is_some_and(|e| e.best)).map(|s| s.step).collect();
    assert_eq!(best, [3], "{:?}", first.steps.iter().map(|s| s.eval).collect::<Vec<_>>());
    let steps = || Store::new(&folder).steps().unwrap();
    assert_eq!(steps(), [3, 10], "saved out of turn, and kept");
    let checkpoint = Checkpoint::open(&Store::new(&folder).path(3)).unwrap();
    let kept = checkpoint.manifest().validation_loss().unwrap();
    assert_eq!(kept.to_bits(), first.steps[2].eval.unwrap().loss.to_bits());
    // A run that goes on knows it.
    let second = run(config(15, Resume::Must));
    assert!(second.steps.iter().all(|s| s.eval.is_none_or(|e| !e.best)));
    assert_eq!(steps(), [3, 15]);
}

/// Training on one text makes another one worse from some step on: the run ends there, whether it
/// was stopped on the way or not.
#[test]
fn a_run_ends_when_its_validation_loss_falls_no_more() {
    let dir = tempfile::tempdir().unwrap();
    let text = text_file(&dir, 4000);
    let other = dir.path().join("other");
    std::fs::write(&other, (0..2000u32).map(|i| (i * 7919 % 251) as u8).collect::<Vec<_>>())
        .unwrap();
    let config = |patience, folder: &str, resume| Config {
        split: None,
        eval_data: Some(other.clone()),
        eval_every: 3,
        patience,
        save: Some(dir.path().join(folder)),
        save_every: 1,
        lr: 1e-2,
        min_lr: Some(1e-2),
        steps: 40,
        warmup: Some(2),
        resume,
        pp: 2,
        ..validated(&text)
    };
    let whole = run(config(2, "a", Resume::No));
    let evals = losses(&whole.steps);
    let lowest = |upto: usize| evals[..upto].iter().map(|e| f64::from_bits(e.1)).reduce(f64::min);
    let end = (3..=evals.len()).find(|n| lowest(*n) == lowest(n - 2)).expect("it rises");
    let stopped = whole.summary.stopped.unwrap();
    assert_eq!((stopped.step, stopped.signal, stopped.no_lower), (evals[end - 1].0, None, Some(2)));
    assert!(stopped.step < 40 && end == evals.len(), "{evals:?}");
    assert!(whole.summary.checkpoint.unwrap().ends_with(format!("step-{:06}", stopped.step)));

    // Stopped between two evaluations, one of which was no lower.
    let trainer = Trainer::new(config(2, "b", Resume::No)).unwrap();
    let until = stopped.step - 2;
    let flow = |step: &StepMetrics| match step.step == until {
        true => std::ops::ControlFlow::Break(()),
        false => std::ops::ControlFlow::Continue(()),
    };
    let first = trainer.train(flow).unwrap();
    assert_eq!(first.stopped.map(|s| (s.step, s.no_lower)), Some((until, None)));
    let rest = run(config(2, "b", Resume::Must));
    assert_eq!(rest.summary.stopped, Some(stopped), "it goes on counting");
    assert_eq!(losses(&rest.steps), evals[end - 1..]);
    // It has ended, however often it is started again.
    let again = run(config(2, "b", Resume::Must));
    assert_eq!((again.summary.stopped, again.steps.len()), (Some(stopped), 0));
    // It may be told to go on.
    let on = run(Config { steps: stopped.step + 1, ..config(9, "b", Resume::Must) });
    assert_eq!((on.summary.stopped, on.steps.len()), (None, 1));
    let on = run(Config { steps: stopped.step + 4, ..config(0, "b", Resume::Must) });
    assert_eq!((on.summary.stopped, on.steps.len()), (None, 3));
}

#[test]
fn impossible_evaluations_are_refused_before_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let text = text_file(&dir, 4000);
    let short = dir.path().join("short");
    std::fs::write(&short, "0123456789").unwrap();
    let refused = |config: Config, parts: &[&str]| {
        let error = Trainer::new(config).err().unwrap();
        assert!(error.is_bad_input());
        let text = error.to_string();
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    };
    let base = validated(&text);
    let none = Config { split: None, ..base.clone() };
    refused(none.clone(), &["eval-every = 4: there is no data", "eval-data", "split"]);
    refused(Config { split: Some("1,0".into()), ..base.clone() }, &["eval-every = 4"]);
    let given = Config { eval_data: Some(text.clone()), ..base.clone() };
    refused(given.clone(), &["eval-data = ", "split also keeps data", "leave one"]);
    refused(Config { eval_every: 0, split: None, ..given }, &["eval-data = ", "eval-every is 0"]);
    let waits = Config { patience: 3, eval_every: 0, ..base.clone() };
    refused(waits, &["eval-every:patience = 3: eval-every is 0", "set eval-every"]);
    refused(Config { keep_best: true, ..base.clone() }, &["keep:best = true: save has no folder"]);
    let never = Config { keep_best: true, eval_every: 0, ..base.clone() };
    refused(never, &["keep:best = true: eval-every is 0"]);
    let short = Config { eval_data: Some(short), ..none.clone() };
    refused(Config { seq: 64, ..short }, &["eval-data = ", "10 tokens are too short"]);
    let nowhere = Config { eval_data: Some(dir.path().join("none")), ..none };
    refused(nowhere, &["eval-data = ", "cannot be read"]);
    let forward = Config { schedule: "forward".into(), ..base };
    refused(forward, &["schedule = forward: only runs forwards and does not train"]);
}
