//! Updates that are done before the norm is known and validated in the next step: the bits of runs
//! that wait, whatever is clipped or not finite, what is counted and what is held.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::time::{SystemTime, UNIX_EPOCH};

use burn::tensor::{Int, Tensor, activation::log_softmax};
use zeropp::config::{
    Decay, OptimizerKind, OptimizerSync, Order, Precision, Recompute, Resume, Tokenizer,
};
use zeropp::pipeline::ir::Action;
use zeropp::pipeline::schedules::KINDS;
use zeropp::{Config, Loss, SampleError, Samples, StepMetrics, Trainer, TrainerBuilder};

use crate::common::{Run, assert_same_bits, tiny};

/// The token that makes a step's gradient not finite.
const POISON: u32 = 255;

/// Random tokens; one sample of `rare` has the poison.
#[derive(Clone, Copy)]
struct Poisoned {
    seed: u64,
    rare: u64,
}

/// A number of (a, b) that looks random.
pub(crate) fn mixed(a: u64, b: u64) -> u64 {
    let mut x = a.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ b.wrapping_mul(0xD1B5_4A32_D192_ED03);
    for _ in 0..2 {
        x = (x ^ (x >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x ^= x >> 32;
    }
    x
}

impl Samples for Poisoned {
    fn name(&self) -> &str {
        "poisoned"
    }
    fn vocabulary(&self) -> usize {
        256
    }
    fn sample(&self, n: u64, tokens: usize) -> Result<Vec<u32>, SampleError> {
        let token = |i: usize| (mixed(self.seed ^ n, i as u64) % 64) as u32;
        let mut sample: Vec<u32> = (0..tokens).map(token).collect();
        if mixed(self.seed, n).is_multiple_of(self.rare) {
            sample[1] = POISON;
        }
        Ok(sample)
    }
}

/// Cross entropy, which is infinite where a target is the poison.
struct Brittle;

impl Loss for Brittle {
    fn loss(&self, logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
        let [n, _] = logits.dims();
        let poisoned = targets.clone().equal_elem(POISON as i32).float().max();
        let loss = -log_softmax(logits, 1).gather(1, targets.reshape([n, 1])).mean();
        loss / (poisoned * -1.0 + 1.0)
    }
}

/// How a run is made not finite: by its loss, or by the weights of the poison, where the head's own
/// loss is kept, whose forwards begin its gradient.
fn builder(config: &Config, samples: Poisoned) -> TrainerBuilder {
    let own = Trainer::builder(config.clone()).data(samples);
    if config.tied {
        return own.loss(Brittle);
    }
    let plain =
        Config { lr: 0.0, weight_decay: 0.0, warmup: Some(0), save: None, ..config.clone() };
    let still = Config { steps: 1, ..plain };
    let clean = Poisoned { rare: u64::MAX, ..samples };
    let trainer = Trainer::builder(still).data(clean).build().expect("a good run");
    let (_, mut weights) = trainer.train_to_weights(|_| {}).unwrap();
    let table = weights.get_mut("wte.weight").expect("an embedding");
    let width = table.len() / 256;
    table[POISON as usize * width..][..width].fill(f32::INFINITY);
    own.weights(weights)
}

fn outcome(builder: TrainerBuilder) -> Run {
    let trainer = builder.build().expect("a good run");
    let mut steps = Vec::new();
    let (summary, weights) = trainer.train_to_weights(|s| steps.push(s.clone())).unwrap();
    Run { steps, summary, weights }
}

fn late(config: &Config) -> Config {
    Config { optimizer_sync: OptimizerSync::Late, ..config.clone() }
}

/// A random run of a random kind on a random mesh.
pub(crate) fn random(seed: u64, steps: u64) -> Config {
    let draw = |what: u64, of: usize| (mixed(seed, what) % of as u64) as usize;
    let pick = |what: u64, of: &[usize]| of[draw(what, of.len())];
    let optimizers = OptimizerKind::ALL;
    let recompute = [Recompute::None, Recompute::Selective, Recompute::Full][draw(1, 3)];
    let (pp, zero3) = (pick(2, &[1, 2, 2, 4]), pick(3, &[1, 2]));
    let tied = draw(9, 3) == 0;
    // The loss that poisons a tied model computes in fp32.
    let is_bf16 = draw(10, 4) == 0 && !tied;
    Config {
        pp,
        zero3,
        dp: if pp * zero3 > 4 { 1 } else { pick(4, &[1, 2]) },
        zero1: draw(5, 2) == 1,
        schedule: KINDS[draw(6, KINDS.len())].name.into(),
        layers: 8,
        virtual_stages: None,
        unit: None,
        micro_batches: Some(8),
        optimizer: optimizers[draw(7, optimizers.len())],
        ema: (draw(8, 2) == 1).then_some(0.9),
        tied,
        recompute,
        precision: if is_bf16 { Precision::Bf16 } else { Precision::Fp32 },
        prefetch: draw(11, 3),
        max_skipped: [0, 40][draw(12, 2)],
        order: Order::Sequential,
        // As with NCCL.
        one_order_always: draw(13, 2) == 1,
        seed,
        steps,
        ..tiny()
    }
}

/// Steps whose update waits for the norm, and is not what it is without.
fn wrong(steps: &[StepMetrics], clip: f64) -> usize {
    let clips = |s: &&StepMetrics| s.skipped || clip / (s.grad_norm + 1e-6) < 1.0 - 1e-9;
    steps.iter().filter(clips).count()
}

/// How many runs of a test are drawn by chance, else so many, and the number before the first
/// one's seed, else the time's: the variables `ZEROPP_…_RUNS` and `ZEROPP_…_SEED`.
pub(crate) fn by_chance(test: &str, runs: u64) -> (u64, u64) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let of = |what: &str| given(&format!("ZEROPP_{test}_{what}"));
    (of("RUNS").unwrap_or(runs), of("SEED").unwrap_or(now << 16))
}

fn given(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect("a number"))
}

/// `ZEROPP_LATE_RUNS` and `ZEROPP_LATE_STEPS` say how many runs there are, of how many steps, and
/// `ZEROPP_LATE_SEED` with which seed the first of them is drawn; that of a failure is in its text.
#[test]
fn random_runs_have_the_bits_of_those_that_wait() {
    let (runs, mut seed) = by_chance("LATE", 3);
    let steps = given("ZEROPP_LATE_STEPS").unwrap_or(12);
    let (mut done, mut rolled_back, mut skipped, mut kinds) = (0, 0, 0, BTreeSet::new());
    while done < runs {
        seed += 1;
        let config = random(seed, steps);
        // Not all kinds go with all meshes.
        if Trainer::new(config.clone()).is_err() {
            continue;
        }
        let what = format!("seed {seed}: {} on {}", config.schedule, config.mesh());
        let rare = 5 * config.samples_per_step() as u64;
        let samples = Poisoned { seed, rare };
        let probe = Config { clip: 0.0, ..config.clone() };
        let clean = Trainer::builder(probe).data(Poisoned { rare: u64::MAX, ..samples });
        let mut norms: Vec<f64> = outcome(clean).steps.iter().map(|s| s.grad_norm).collect();
        norms.sort_by(f64::total_cmp);
        let config = Config { clip: norms[norms.len() / 2], ..config };
        let barrier = outcome(builder(&config, samples));
        let same = outcome(builder(&late(&config), samples));
        assert_same_bits(&barrier, &same, &what);
        let is_skipped = |run: &Run| run.steps.iter().map(|s| s.skipped).collect::<Vec<_>>();
        assert_eq!(is_skipped(&barrier), is_skipped(&same), "{what}");
        assert_eq!(barrier.summary.rollbacks, 0, "{what}");
        let wrong = wrong(&barrier.steps, config.clip) as u64;
        assert_eq!(same.summary.rollbacks, wrong, "{what}");
        (done, rolled_back) = (done + 1, rolled_back + wrong);
        skipped += barrier.steps.iter().filter(|s| s.skipped).count();
        kinds.insert(config.schedule);
    }
    println!(
        "{runs} runs of {steps} steps, {} kinds: {rolled_back} updates taken back, {skipped} of \
         them of steps that were not finite",
        kinds.len()
    );
    assert!(rolled_back > runs, "few updates were wrong");
}

/// A run of which about half of the steps are clipped, and some are not finite.
fn often_wrong() -> (Config, Poisoned) {
    let config = Config {
        pp: 2,
        zero3: 2,
        dp: 2,
        zero1: true,
        layers: 4,
        virtual_stages: Some(2),
        schedule: "zb-v".into(),
        clip: 0.9,
        order: Order::Sequential,
        ..tiny()
    };
    let rare = 5 * config.samples_per_step() as u64;
    (config, Poisoned { seed: 3, rare })
}

/// What is done again is no part of a step: its trace is the program, whatever was taken back.
#[test]
fn the_trace_is_the_program_and_what_is_done_again_is_counted_apart() {
    let (config, samples) = often_wrong();
    let config = late(&Config { steps: 8, trace_steps: None, ..config });
    let trainer = builder(&config, samples).build().unwrap();
    let program = trainer.schedule().clone();
    assert!(program.validates_late());
    let mut steps = Vec::new();
    let (summary, timeline) = trainer.train_to_timeline(|s| steps.push(s.clone())).unwrap();
    assert!((2..8).contains(&summary.rollbacks), "{}", summary.rollbacks);
    assert!(summary.redone_s > 0.0);
    for rank in &timeline.ranks {
        let actions: Vec<Action> = rank.spans.iter().map(|span| span.action).collect();
        let whole = program.ranks[rank.pp].repeat(8);
        assert!(actions == whole, "rank {} of the pipeline", rank.pp);
    }
    // The work is done again in the step after the one whose update was wrong.
    for pair in steps.windows(2) {
        assert_eq!(pair[1].redone_s > 0.0, pair[0].rolled_back, "step {}", pair[1].step);
        assert_eq!(pair[0].all_gathers, pair[1].all_gathers);
    }
}

#[test]
fn rollback_memory_is_predicted() {
    for (pp, zero3, dp, zero1, tied) in [
        (1, 1, 1, false, false),
        (1, 1, 1, false, true),
        (2, 1, 1, false, false),
        (2, 2, 2, false, true),
        (2, 2, 2, true, false),
        (4, 1, 2, true, true),
    ] {
        for optimizer in [OptimizerKind::Adamw, OptimizerKind::Adamw8bit, OptimizerKind::Muon] {
            let (config, samples) = often_wrong();
            let mesh = Config { pp, zero3, dp, zero1, tied, layers: 8, optimizer, ..config };
            let config = late(&Config { steps: 5, ema: Some(0.9), ..mesh });
            let what = format!("{} {zero1} {tied} {optimizer}", config.mesh());
            let summary = outcome(builder(&config, samples)).summary;
            let (measured, predicted) = (summary.peak_bytes, summary.predicted_bytes);
            assert!(measured.rollback > 0, "{what}");
            assert_eq!(measured.rollback, predicted.rollback, "{what}");
            assert_eq!(measured.optimizer, predicted.optimizer, "{what}");
            let at_once = (summary.at_once_bytes, summary.predicted_at_once_bytes);
            assert!(at_once.0 <= at_once.1, "{what}: {at_once:?}");
        }
    }
}

/// Where all stand still, nothing has begun: checkpoints and validation losses are those of runs
/// that wait, and either goes on from the other's.
#[test]
fn saves_evaluations_and_resumed_runs_are_the_same() {
    let (config, samples) = often_wrong();
    let dir = tempfile::tempdir().unwrap();
    let text = crate::common::text_file(&dir, 4000);
    let config = Config {
        steps: 12,
        eval_every: 5,
        eval_data: Some(text),
        tokenizer: Tokenizer::Bytes,
        // No step's rate depends on where the run ends.
        decay: Decay::Constant,
        ..config
    };
    let data = |config: &Config| Trainer::builder(config.clone()).data(samples).loss(Brittle);
    let barrier = outcome(data(&config));
    let same = outcome(data(&late(&config)));
    assert_same_bits(&barrier, &same, "with evaluations");
    let losses = |run: &Run| run.steps.iter().map(|s| s.eval.map(|e| e.loss)).collect::<Vec<_>>();
    assert_eq!(losses(&barrier), losses(&same));
    assert_eq!(losses(&same).iter().flatten().count(), 3, "after 5, 10 and 12");
    for (name, first, second) in
        [("a", late(&config), config.clone()), ("b", config.clone(), late(&config))]
    {
        let save = Some(dir.path().join(name));
        let first = Config { save: save.clone(), save_every: 3, steps: 7, ..first };
        outcome(data(&first));
        let second = Config { save, save_every: 3, resume: Resume::Newest, ..second };
        let rest = outcome(data(&second));
        assert_eq!(rest.steps[0].step, 8);
        let half = Run {
            steps: barrier.steps[7..].to_vec(),
            weights: barrier.weights.clone(),
            summary: barrier.summary.clone(),
        };
        assert_same_bits(&half, &rest, name);
    }
}

/// A program that wants no more steps ends all ranks after one of the next, and sees all of them.
#[test]
fn a_stop_ends_all_ranks_after_one_step() {
    let (config, samples) = often_wrong();
    let trainer = builder(&late(&Config { steps: 400, ..config }), samples).build().unwrap();
    let mut seen = Vec::new();
    let summary = trainer
        .train(|step: &StepMetrics| {
            seen.push(step.step);
            if step.step == 4 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
        .unwrap();
    let stopped = summary.stopped.expect("stopped").step;
    assert!((4..=8).contains(&stopped), "{stopped}");
    assert_eq!(summary.steps, stopped);
    assert_eq!(seen, (1..=stopped).collect::<Vec<_>>());
}

/// A slow program is not run away from.
#[test]
fn ranks_wait_for_a_program_that_does_not_answer() {
    let (config, samples) = often_wrong();
    let trainer = builder(&late(&Config { steps: 30, timeout_s: 1.0, ..config }), samples);
    let trainer = trainer.build().unwrap();
    let begin = std::time::Instant::now();
    let mut steps = trainer.steps().unwrap();
    let first = steps.next().unwrap().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(2500));
    let fifth = steps.by_ref().nth(3).unwrap().unwrap();
    assert_eq!((first.step, fifth.step), (1, 5));
    // Of the steps that were reported when it slept, at most a few were begun then.
    let slept = |s: &StepMetrics| s.step_s > 2.0;
    let rest: Vec<StepMetrics> = steps.map(|step| step.unwrap()).collect();
    assert_eq!(rest.len(), 25);
    assert!(!rest[3..].iter().any(slept), "step_s of later steps");
    assert!(begin.elapsed().as_secs_f64() > 2.5);
}
