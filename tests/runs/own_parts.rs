//! What a program brings of its own: data, a loss, an optimizer, a learning rate and weights, on
//! any mesh.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::tensor::{DType, Int, Tensor, activation::log_softmax};

use crate::common::{Run, assert_same_bits, run, text_file, tiny};
use zeropp::config::{Decay, OptimizerSync, Order, Precision, Resume};
use zeropp::optimizer::{Elements, Parameter, StateTensor, StepScale, UpdateRule};
use zeropp::pipeline::schedules::{Shape, generate};
use zeropp::{Config, Loss, SampleError, Samples, Summary, Trainer, TrainerBuilder};

fn outcome(builder: TrainerBuilder) -> Run {
    let trainer = builder.build().expect("a good run");
    let mut steps = Vec::new();
    let (summary, weights) = trainer.train_to_weights(|s| steps.push(s.clone())).unwrap();
    Run { steps, summary, weights }
}

fn small() -> Config {
    Config { layers: 4, steps: 6, ..tiny() }
}

/// The tokens of a text, as `order = sequential` reads them.
struct Text(Vec<u8>);

impl Samples for Text {
    fn name(&self) -> &str {
        "a text"
    }
    fn vocabulary(&self) -> usize {
        256
    }
    fn sample(&self, n: u64, tokens: usize) -> Result<Vec<u32>, SampleError> {
        let start = n as usize * (tokens - 1);
        Ok((start..start + tokens).map(|i| u32::from(self.0[i % self.0.len()])).collect())
    }
}

#[test]
fn own_data_is_the_same_as_a_file_of_it_on_any_mesh() {
    let dir = tempfile::tempdir().unwrap();
    let path = text_file(&dir, 5000);
    let text = std::fs::read(&path).unwrap();
    let base = Config { order: Order::Sequential, zero3: 2, ..small() };
    let reference = run(Config { data: Some(path), ..base.clone() });
    for pp in [1, 2] {
        let builder = Trainer::builder(Config { pp, ..base.clone() });
        let ours = outcome(builder.data(Text(text.clone())));
        assert_same_bits(&reference, &ours, &format!("own data, pp {pp}"));
    }
}

/// Samples that are wrong from a number on.
struct Wrong(fn(usize) -> Result<Vec<u32>, SampleError>);

impl Samples for Wrong {
    fn name(&self) -> &str {
        "wrong"
    }
    fn vocabulary(&self) -> usize {
        10
    }
    fn sample(&self, n: u64, tokens: usize) -> Result<Vec<u32>, SampleError> {
        if n < 4 { Ok(vec![0; tokens]) } else { (self.0)(tokens) }
    }
}

#[test]
fn a_sample_that_is_none_ends_the_run_with_its_number() {
    for (samples, problem) in [
        (Wrong(|tokens| Ok(vec![0; tokens - 1])), "wrong: sample 4 has 8 tokens, and 9 were"),
        (Wrong(|tokens| Ok(vec![10; tokens])), "sample 4 has token id 10, which is not below 10"),
        (Wrong(|_| Err("no database".into())), "wrong: sample 4 cannot be had (no database)"),
    ] {
        let trainer = Trainer::builder(small()).data(samples).build().unwrap();
        let error = trainer.train(|_| ()).unwrap_err().to_string();
        assert!(error.contains(problem), "{error}");
    }
}

/// Before, validation data could be named by the settings alone.
#[test]
fn own_samples_are_validated_on_as_a_file_of_them_is() {
    let dir = tempfile::tempdir().unwrap();
    let path = text_file(&dir, 5000);
    let text = std::fs::read(&path).unwrap();
    let base = Config { eval_every: 3, eval_steps: 2, ..small() };
    let base = Config { micro_batches: Some(4), unit: Some(2), ..base };
    let reference = run(Config { eval_data: Some(path), ..base.clone() });
    let losses = |run: &Run| -> Vec<(u64, u64)> {
        run.steps.iter().filter_map(|s| Some((s.step, s.eval?.loss.to_bits()))).collect()
    };
    let own = |config: Config| Trainer::builder(config).eval_data(Text(text.clone()));
    for pp in [1, 2] {
        let ours = outcome(own(Config { pp, ..base.clone() }));
        assert_same_bits(&reference, &ours, &format!("own validation, pp {pp}"));
        assert_eq!(losses(&reference), losses(&ours));
        assert_eq!(losses(&ours).iter().map(|(step, _)| *step).collect::<Vec<_>>(), [3, 6]);
    }
    let refused = |config: Config| own(config).build().err().expect("refused").to_string();
    let no_end = refused(Config { eval_steps: 0, ..base.clone() });
    assert!(no_end.starts_with("eval-steps = 0: a program's own samples have no end"), "{no_end}");
    let dead = Trainer::builder(base).eval_data(Wrong(|_| Err("no database".into())));
    let dead = dead.build().unwrap().train(|_| ()).unwrap_err().to_string();
    assert!(dead.contains("wrong: sample 4 cannot be had (no database)"), "{dead}");
}

/// Before, a loop of a program's own saw figures of the steps alone.
#[test]
fn between_two_steps_a_program_has_weights_evaluates_and_saves_and_no_bit_changes() {
    let dir = tempfile::tempdir().unwrap();
    let text = std::fs::read(text_file(&dir, 5000)).unwrap();
    for (pp, zero3) in [(1, 1), (2, 2)] {
        let base = Config { pp, zero3, unit: Some(2), micro_batches: Some(4), ..small() };
        let undisturbed = run(base.clone());
        let folder = dir.path().join(format!("pp {pp}"));
        let config =
            Config { save: Some(folder.clone()), save_every: 0, eval_steps: 1, ..base.clone() };
        let trainer = Trainer::builder(config).eval_data(Text(text.clone())).build().unwrap();
        let mut steps = trainer.steps().unwrap();
        let none = steps.weights().unwrap_err().to_string();
        assert!(none.contains("no step was seen yet"), "{none}");
        let (mut seen, mut weights) = (Vec::new(), Vec::new());
        while let Some(step) = steps.next() {
            let step = step.unwrap();
            weights.push(steps.weights().unwrap());
            if step.step == 3 {
                let evaluation = steps.evaluate().unwrap();
                assert_eq!(steps.evaluate().unwrap().loss.to_bits(), evaluation.loss.to_bits());
                assert!(evaluation.loss.is_finite() && evaluation.tokens > 0);
                steps.save().unwrap();
            }
            seen.push(step);
        }
        let ended = steps.weights().unwrap_err().to_string();
        assert!(ended.contains("the run has ended"), "{ended}");
        let summary = steps.finish().unwrap();
        let ours = Run { steps: seen, summary, weights: weights.pop().unwrap() };
        assert_same_bits(&undisturbed, &ours, &format!("pp {pp}"));
        assert_ne!(weights[2], weights[3]);
        // The weights of step 3 are those that were saved after it.
        let begun = Config { init_from: Some(folder.join("step-000003")), ..base.clone() };
        let begun = Config { steps: 1, warmup: Some(0), lr: 0.0, weight_decay: 0.0, ..begun };
        assert_eq!(run(begun).weights, weights[2]);
        assert!(folder.join("step-000006").is_dir(), "the last one, as always");
    }
    let trainer = Trainer::new(small()).unwrap();
    let mut steps = trainer.steps().unwrap();
    steps.next().unwrap().unwrap();
    let (save, evaluate) = (steps.save().unwrap_err(), steps.evaluate().unwrap_err());
    assert!(save.to_string().contains("the run saves nowhere"), "{save}");
    assert!(evaluate.to_string().contains("nothing is measured"), "{evaluate}");
}

/// With late updates ranks go on before a step is seen; where text is due they wait for it.
#[test]
fn with_late_updates_weights_are_there_after_steps_that_ranks_wait_after() {
    let config = Config {
        pp: 2,
        optimizer_sync: OptimizerSync::Late,
        sample_every: 3,
        prompt: Some("a".into()),
        ..small()
    };
    let undisturbed = run(config.clone());
    let trainer = Trainer::new(config).unwrap();
    let mut steps = trainer.steps().unwrap();
    let mut losses = Vec::new();
    while let Some(step) = steps.next() {
        let step = step.unwrap();
        match (step.step % 3, steps.weights()) {
            (0, weights) => assert!(weights.unwrap() != undisturbed.weights || step.step == 6),
            (_, Err(error)) => assert!(error.to_string().contains("optimizer-sync = late")),
            (_, Ok(_)) => panic!("ranks are in the next step already"),
        }
        losses.push(step.loss.to_bits());
    }
    let before: Vec<u64> = undisturbed.steps.iter().map(|step| step.loss.to_bits()).collect();
    assert_eq!(losses, before);
}

/// A rank that fails while a program waits for an evaluation comes back to it.
#[test]
fn a_recovery_comes_back_to_what_was_asked_between_two_steps() {
    struct Dies(Text, AtomicBool);
    impl Samples for Dies {
        fn name(&self) -> &str {
            self.0.name()
        }
        fn vocabulary(&self) -> usize {
            256
        }
        fn sample(&self, n: u64, tokens: usize) -> Result<Vec<u32>, SampleError> {
            let dies = n == 7 && !self.1.swap(true, Ordering::SeqCst);
            assert!(!dies, "a rank that fails once");
            self.0.sample(n, tokens)
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let text = std::fs::read(text_file(&dir, 5000)).unwrap();
    let evaluated = |dies: bool| {
        let save = Some(dir.path().join(format!("dies {dies}")));
        let config = Config { save, save_every: 1, eval_steps: 2, max_recoveries: 1, ..small() };
        let data = Dies(Text(text.clone()), AtomicBool::new(!dies));
        let trainer = Trainer::builder(config).eval_data(data).build().unwrap();
        let mut steps = trainer.steps().unwrap();
        let third = steps.by_ref().nth(2).unwrap().unwrap();
        let loss = steps.evaluate().unwrap().loss;
        let weights = steps.weights().unwrap();
        let left: Vec<u64> = steps.by_ref().map(|step| step.unwrap().loss.to_bits()).collect();
        let recoveries = steps.finish().unwrap().recoveries;
        ((third.step, loss.to_bits(), weights, left), recoveries)
    };
    let (undisturbed, none) = evaluated(false);
    let (recovered, one) = evaluated(true);
    assert!(undisturbed == recovered, "to the same bits");
    assert_eq!((none, one, undisturbed.3.len()), (0, 1, 3));
}

/// Before, a schedule that a program had made went through a file.
#[test]
fn a_schedule_of_a_program_s_own_trains_as_one_from_a_file() {
    let shape = Shape { pp: 2, virtual_stages: 1, micro_batches: 4, unit: 4 };
    let own = generate("zb-h1", &shape).unwrap();
    let base = Config { pp: 2, micro_batches: None, unit: None, ..small() };
    let reference = run(Config {
        schedule: "zb-h1".into(),
        virtual_stages: Some(1),
        micro_batches: Some(4),
        ..base.clone()
    });
    let builder = Trainer::builder(base.clone()).schedule(own.clone());
    assert_same_bits(&reference, &outcome(builder), "own schedule");
    let three = Trainer::builder(Config { pp: 3, ..base.clone() }).schedule(own.clone());
    let error = three.build().err().expect("another mesh").to_string();
    assert_eq!(error, "pp = 3: zb-h1.json is for 2 ranks; use 2, or another file");
    let mut broken = own;
    broken.ranks[0].pop();
    let error = Trainer::builder(base).schedule(broken).build().err().expect("no W").to_string();
    assert!(error.starts_with("schedule = zb-h1.json: "), "{error}");
}

struct CrossEntropy;

impl Loss for CrossEntropy {
    fn loss(&self, logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
        let [n, _] = logits.dims();
        -log_softmax(logits, 1).gather(1, targets.reshape([n, 1])).mean()
    }
}

#[test]
fn an_own_loss_of_the_logits_trains_as_the_head_s_own_does() {
    for tied in [false, true] {
        let base = Config { tied, ..small() };
        let reference = run(base.clone());
        let alone = outcome(Trainer::builder(base.clone()).loss(CrossEntropy));
        for (a, b) in reference.steps.iter().zip(&alone.steps) {
            assert!((a.loss - b.loss).abs() < 1e-5 * a.loss, "{} and {}", a.loss, b.loss);
            let norm = (a.grad_norm - b.grad_norm).abs();
            assert!(norm < 1e-4 * a.grad_norm, "{} and {}", a.grad_norm, b.grad_norm);
        }
        let piped = Config { pp: 2, virtual_stages: Some(2), ..base };
        assert_same_bits(&alone, &outcome(Trainer::builder(piped).loss(CrossEntropy)), "pp 2");
    }
}

/// In bf16 the logits are bf16, and so is what a program makes of them unless it casts.
#[test]
fn an_own_loss_in_bf16_trains_as_one_in_fp32_does() {
    struct Half;
    impl Loss for Half {
        fn loss(&self, logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
            let loss = CrossEntropy.loss(logits, targets);
            assert_eq!(loss.dtype(), DType::BF16);
            loss
        }
    }
    let base = Config { precision: Precision::Bf16, ..small() };
    let reference = run(base.clone());
    let alone = outcome(Trainer::builder(base.clone()).loss(Half));
    for (a, b) in reference.steps.iter().zip(&alone.steps) {
        // Three digits are all that bf16 has.
        assert!((a.loss - b.loss).abs() < 0.02 * a.loss, "{} and {}", a.loss, b.loss);
    }
    assert!(alone.steps.last().unwrap().loss < alone.steps[0].loss);
    let piped = Config { pp: 2, virtual_stages: Some(2), ..base };
    assert_same_bits(&alone, &outcome(Trainer::builder(piped).loss(Half)), "pp 2");
}

/// Momentum of an element's own.
#[derive(Clone, Copy)]
struct Heavy;

impl UpdateRule for Heavy {
    fn name(&self) -> &str {
        "heavy"
    }
    fn state(&self, of: &Parameter<'_>) -> Vec<StateTensor> {
        let speed = (of.shape.len() == 2).then(|| StateTensor::per_element("speed"));
        speed.into_iter().collect()
    }
    fn update(&self, _: &Parameter<'_>, elements: Elements<'_, '_>, step: &StepScale) {
        let Elements { parameter, state, gradient } = elements;
        for (i, (p, g)) in parameter.iter_mut().zip(gradient).enumerate() {
            let mut along = g * step.gradient;
            if let [speed] = state {
                speed[i] = 0.9 * speed[i] + along;
                along = speed[i];
            }
            *p -= step.lr as f32 * along;
        }
    }
}

/// Momentum as 8-bit numbers, of which each 64 have a scale.
#[derive(Clone, Copy)]
struct Codes;

impl UpdateRule for Codes {
    fn name(&self) -> &str {
        "codes"
    }
    fn state(&self, _: &Parameter<'_>) -> Vec<StateTensor> {
        vec![StateTensor::per_block("codes", 64, 17)]
    }
    fn update(&self, _: &Parameter<'_>, elements: Elements<'_, '_>, step: &StepScale) {
        let Elements { parameter, state, gradient } = elements;
        let blocks = parameter.chunks_mut(64).zip(gradient.chunks(64));
        for ((p, g), words) in blocks.zip(state[0].chunks_mut(17)) {
            let (scale, codes) = words.split_first_mut().unwrap();
            let bytes = codes.iter().flat_map(|word| word.to_bits().to_le_bytes());
            let before = bytes.map(|code| f32::from(code as i8) * *scale);
            let speed: Vec<f32> = before.zip(g).map(|(v, g)| 0.9 * v + g * step.gradient).collect();
            *scale = speed.iter().fold(0f32, |most, v| most.max(v.abs())) / 127.0;
            let code = |v: &f32| ((v / scale.max(1e-30)).round() as i8).cast_unsigned();
            let bytes: Vec<u8> = speed.iter().map(code).collect();
            for (word, bytes) in codes.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *word = f32::from_bits(u32::from_le_bytes(*bytes));
            }
            p.iter_mut().zip(speed).for_each(|(p, v)| *p -= step.lr as f32 * v);
        }
    }
}

#[test]
fn an_own_optimizer_is_sharded_saved_and_predicted_like_any() {
    sharded_saved_and_predicted(Heavy, "the checkpoint has speed of");
}

#[test]
fn state_in_8_bits_with_a_scale_per_block_is_sharded_saved_and_predicted_like_any() {
    let whole = sharded_saved_and_predicted(Codes, "the checkpoint has codes of");
    // Words of what a rank owns beside their mean: 17 for each 64.
    let bare = Config { ema: None, zero3: 2, dp: 2, ..small() };
    let codes = outcome(Trainer::builder(bare).optimizer(Codes)).summary.peak_bytes.optimizer;
    assert_eq!(codes * 64, (whole.peak_bytes.optimizer - codes) * 17);
}

fn sharded_saved_and_predicted(rule: impl UpdateRule + Copy, has: &str) -> Summary {
    let dir = tempfile::tempdir().unwrap();
    let save = Some(dir.path().join("ckpt"));
    let base = Config { zero3: 2, dp: 2, lr: 0.1, ema: Some(0.9), ..small() };
    let whole = outcome(Trainer::builder(base.clone()).optimizer(rule));
    assert!(whole.summary.last_loss < whole.summary.first_loss);
    let most = whole.summary.predicted_bytes.optimizer;
    assert_eq!(whole.summary.peak_bytes.optimizer, most);
    // Stopped after three steps, and gone on with on another mesh.
    let saving = Config { save, resume: Resume::Newest, ..base };
    let trainer = Trainer::builder(saving.clone()).optimizer(rule).build().unwrap();
    let stop = |step: &zeropp::StepMetrics| match step.step {
        3 => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    };
    trainer.train(stop).unwrap();
    let piped = Config { pp: 2, zero1: true, ..saving.clone() };
    let rest = outcome(Trainer::builder(piped).optimizer(rule));
    let half = Run { steps: whole.steps[3..].to_vec(), ..whole };
    assert_same_bits(&half, &rest, "an own optimizer");
    // It is no other one's.
    let error = Trainer::new(saving).err().expect("another optimizer").to_string();
    assert!(error.contains(has) && error.contains("optimizer adamw keeps"), "{error}");
    half.summary
}

#[test]
fn an_own_learning_rate_is_that_of_each_step() {
    let config = Config { decay: Decay::Constant, warmup: Some(0), ..small() };
    let reference = run(config.clone());
    let ours = outcome(Trainer::builder(small()).learning_rate(move |_| config.lr));
    assert_same_bits(&reference, &ours, "a constant rate");
    let rates: Vec<f64> =
        outcome(Trainer::builder(small()).learning_rate(|step| 1e-3 / step as f64))
            .steps
            .iter()
            .map(|s| s.lr)
            .collect();
    assert_eq!(rates[..3], [1e-3, 5e-4, 1e-3 / 3.0]);
}

#[test]
fn weights_go_out_with_their_shapes_and_in_again() {
    let config = Config { pp: 2, zero3: 2, ..small() };
    let trained = run(config.clone()).weights;
    let still = Config { lr: 0.0, weight_decay: 0.0, steps: 1, warmup: None, ..config };
    let trainer = Trainer::builder(still.clone()).weights(trained.clone()).build().unwrap();
    for (name, shape) in trainer.shapes() {
        assert_eq!(trained[&name].len(), shape.iter().product::<usize>(), "{name}");
    }
    assert_eq!(trainer.shapes().len(), trained.len());
    assert!(trainer.train_to_weights(|_| ()).unwrap().1 == trained);
    let refused = |change: &dyn Fn(&mut zeropp::NamedWeights)| {
        let mut weights = trained.clone();
        change(&mut weights);
        Trainer::builder(still.clone()).weights(weights).build().err().expect("refused").to_string()
    };
    let short = refused(&|w| w.get_mut("wte.weight").unwrap().truncate(7));
    assert!(short.contains("wte.weight [256, 16] has 4096 elements, and of the weights given 7"));
    let none = refused(&|w| drop(w.remove("wte.weight")));
    assert!(none.contains("of the weights given none"), "{none}");
    let more = refused(&|w| drop(w.insert("other".into(), Vec::new())));
    assert!(more.contains("weights are given of other, which it has not"), "{more}");
}
