//! The optimizers against PyTorch's: weights after 20 steps with given gradients, whatever the
//! ranks share. `fixtures/make_adamw.py` and `fixtures/make_optimizers.py` wrote the figures.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::{DType, Device, Int, Tensor};
use serde::Deserialize;
use zeropp_comm::groups::Groups;
use zeropp_comm::mesh::Mesh;
use zeropp_comm::threads::{ThreadsOptions, ThreadsWorld};
use zeropp_core::layer::{BatchShape, Embedding, Head, Layer, LayerCost, LayerCx, Part};
use zeropp_core::meter::Meter;
use zeropp_core::optimizer::Out;
use zeropp_core::params::{FlatLayout, Init, ParamSpec};
use zeropp_core::split::{AwayPlace, ParamSlot};
use zeropp_zero3::Tie;
use zeropp_zero3::adafactor::Adafactor;
use zeropp_zero3::adamw::AdamW;
use zeropp_zero3::lion::Lion;
use zeropp_zero3::lr::{Decay, LearningRate};
use zeropp_zero3::muon::Muon;
use zeropp_zero3::optimizer::OptimizerOptions;
use zeropp_zero3::rule::{ParameterGroups, UpdateRule};
use zeropp_zero3::sgd::Sgd;
use zeropp_zero3::stage::ShardOptions;
use zeropp_zero3::state_file::StateFile;
use zeropp_zero3::{Optimizer, ParamExport, ShardedStage, StepOutcome};

/// Gradients that are summed in one step.
const PARTS: usize = 12;
/// Apart by this much of a tensor's largest weight, two results are the same: some ten roundings.
const TOLERANCE: f32 = 1e-6;

#[derive(Deserialize)]
struct Table {
    steps: u64,
    cases: Vec<Case>,
}

fn adamw() -> String {
    "adamw".into()
}

fn rounding() -> f32 {
    TOLERANCE
}

#[derive(Clone, Deserialize)]
struct Case {
    name: String,
    /// Whether updates are done before the norm is known.
    #[serde(default)]
    late: bool,
    /// What of shards, state and gradients is in a file.
    #[serde(skip)]
    out: Out,
    /// Whether whole layers come in from there.
    #[serde(skip)]
    host: bool,
    /// Whether some steps are clipped, some are not, and some are not finite; weights have a mean.
    #[serde(default)]
    harsh: bool,
    #[serde(default = "adamw")]
    optimizer: String,
    #[serde(default)]
    momentum: f64,
    #[serde(default)]
    nesterov: bool,
    #[serde(default = "rounding")]
    tolerance: f32,
    decay: Decay,
    warmup: u64,
    lr: f64,
    min_lr: f64,
    clip: f64,
    beta1: f64,
    beta2: f64,
    eps: f64,
    weight_decay: f64,
    tied: bool,
    learning_rates: Vec<f64>,
    norms: Vec<f64>,
    weights: BTreeMap<String, Vec<f32>>,
}

/// From -128 to 127, as in the script.
fn number(i: usize, salt: usize) -> f32 {
    let mut x = (i as u32).wrapping_mul(2_654_435_761);
    x = x.wrapping_add((salt as u32).wrapping_mul(40_503)).wrapping_add(12_345);
    x ^= x >> 15;
    x = x.wrapping_mul(2_246_822_519);
    x ^= x >> 13;
    (x >> 16 & 0xFF) as f32 - 128.0
}

/// A layer of given parameters, each with the salt of its numbers, that is never run.
struct Given {
    name: &'static str,
    specs: Vec<ParamSpec>,
    salts: Vec<usize>,
}

impl Given {
    fn new(name: &'static str, parameters: &[(&str, &[usize], usize, usize)]) -> Given {
        let spec = |(name, shape, salt, _): &(&str, &[usize], usize, usize)| {
            let n = shape.iter().product();
            let values: Vec<f32> = (0..n).map(|i| number(i, *salt) / 512.0).collect();
            ParamSpec::new(*name, shape, Init::Values(values.into()))
        };
        let specs = parameters.iter().map(spec).collect();
        Given { name, specs, salts: parameters.iter().map(|p| p.3).collect() }
    }

    /// Part `part` of the gradient of parameter `param` in `step`.
    fn gradient(&self, param: usize, step: u64, part: usize) -> Vec<f32> {
        let salt = 1000 * step as usize + 10 * part + self.salts[param];
        let n = self.specs[param].len();
        (0..n).map(|i| number(i, salt) / (1 << (12 + i % 7)) as f32).collect()
    }
}

macro_rules! declared_only {
    ($kind:ident, $run:ident($($arg:ident: $of:ty),+) -> $out:ty) => {
        impl $kind for Given {
            fn name(&self) -> &str {
                self.name
            }
            fn parameters(&self) -> Vec<ParamSpec> {
                self.specs.clone()
            }
            fn $run(&self, $($arg: $of),+) -> $out {
                $(let _ = $arg;)+
                unreachable!("only its parameters are trained")
            }
            fn cost(&self, _: BatchShape) -> LayerCost {
                LayerCost::default()
            }
        }
    };
}
declared_only!(Embedding, forward(ids: Tensor<2, Int>, cx: &LayerCx) -> Tensor<3>);
declared_only!(Layer, forward(x: Tensor<3>, cx: &LayerCx) -> Tensor<3>);
declared_only!(Head, loss(x: Tensor<3>, targets: Tensor<2, Int>, cx: &LayerCx) -> Tensor<1>);

/// Embedding, layer and head.
fn layers(tied: bool) -> [Arc<Given>; 3] {
    // A tied head starts as the embedding and has gradients of its own.
    let (name, start) = if tied { ("wte", 1) } else { ("head", 4) };
    [
        Arc::new(Given::new("wte", &[("wte", &[12, 16], 1, 1)])),
        Arc::new(Given::new("h", &[("matrix", &[16, 24], 2, 2), ("bias", &[24], 3, 3)])),
        Arc::new(Given::new("head", &[(name, &[12, 16], start, 4)])),
    ]
}

/// A mesh, whether the optimizer state is cut between replicas, and units of a step.
type Layout = (Mesh, bool, usize);

/// Trains on one rank and returns its outcomes and its shards of all layers.
fn train(case: &Case, steps: u64, groups: Groups, layout: Layout) -> (Vec<StepOutcome>, Shards) {
    let (mesh, zero1, units) = layout;
    let layers = layers(case.tied);
    let [wte, h, head] = layers.clone();
    let parts = [Part::Embedding(wte), Part::Layer(h), Part::Head(head)];
    let cut = if mesh.pp == 1 { vec![0..3] } else { vec![0..2, 2..3] };
    let mine = groups.coords.pp;
    let device = Device::flex();
    let meter = Meter::new();
    let folder = std::env::temp_dir();
    let file = case.out.is_any().then(|| match case.host {
        true => StateFile::on_host(AwayPlace::file(&folder).unwrap(), case.out, &meter),
        false => StateFile::open(&folder, case.out, &meter).unwrap(),
    });
    let (compute, pack_weights) = (DType::F32, false);
    let options =
        ShardOptions { device, compute, pack_weights, zero1, seed: 0, file, in_order: false };
    let stage = ShardedStage::new(mine, &parts[cut[mine].clone()], &groups, &options, &meter);
    let mut stages = [stage];
    let last = (mesh.pp - 1, cut[mesh.pp - 1].len() - 1);
    let tie = Tie { first: (0, 0), last, ranks: (0, mesh.pp - 1) };
    let options = optimizer_options(case, steps, case.tied.then_some(tie));
    let mut optimizer = Optimizer::new(&mut stages, &groups, options, zero1, &meter);
    optimizer.share_tied(&mut stages);
    let group = groups.coords.dp * mesh.zero3 + groups.coords.zero3;
    let each = PARTS / (mesh.zero3 * mesh.dp * units);
    let mut outcomes = Vec::new();
    for step in 1..=steps {
        for unit in 0..units {
            let mut grads = stages[0].new_grads();
            let first = (group * units + unit) * each;
            for (layer, given) in layers[cut[mine].clone()].iter().enumerate() {
                for param in 0..given.specs.len() {
                    for part in first..first + each {
                        let mut g = given.gradient(param, step, part);
                        if case.harsh {
                            disturb(&mut g, step, part);
                        }
                        let g = Tensor::<1>::from_floats(g.as_slice(), &Device::flex());
                        grads.add(ParamSlot { layer, param }, g);
                    }
                }
            }
            stages[0].start_reduce(grads);
            stages[0].finish_reduce().unwrap();
        }
        stages[0].request_replica_reduce();
        if !case.late {
            outcomes.push(step_read_ahead(case, &mut optimizer, &mut stages, step, &meter));
            continue;
        }
        let early = optimizer.step_early(&mut stages, step).unwrap();
        assert!(early.grad_norm.is_nan() && !early.skipped);
        let kept = [meter.now().rollback, meter.now().parameter_shard, meter.now().optimizer];
        // Parameters and gradient that the rank owns, and what is kept of them.
        let owners = if zero1 { mesh.dp as u64 } else { 1 };
        assert!(kept[0] >= kept[1] / owners + kept[2] && kept[0] > kept[2], "{kept:?}");
        let right = optimizer.was_right().unwrap();
        let outcome = optimizer.settle(&mut stages).unwrap().expect("an update to settle");
        assert_eq!(meter.now().rollback, 0);
        assert_eq!(optimizer.settle(&mut stages).unwrap(), None, "once");
        assert_eq!(meter.now().optimizer, kept[2]);
        let clips = case.clip > 0.0 && outcome.grad_norm + 1e-6 > case.clip;
        assert_eq!((right, outcome.rolled_back), (!outcome.skipped && !clips, !right));
        outcomes.push(StepOutcome { rolled_back: false, ..outcome });
    }
    (outcomes, stages[0].export().unwrap())
}

/// A step of which what is updated first comes in before: without an update it goes out again.
fn step_read_ahead(
    case: &Case,
    optimizer: &mut Optimizer,
    stages: &mut [ShardedStage],
    step: u64,
    meter: &Meter,
) -> StepOutcome {
    optimizer.read_ahead(stages);
    let is_ahead = case.host && case.out == Out::Behind && case.optimizer != "sgd";
    assert!(!is_ahead || meter.now().optimizer > 0, "step {step}");
    let outcome = optimizer.step(stages, step).unwrap();
    assert!(!is_ahead || !outcome.skipped || meter.now().optimizer == 0, "step {step}");
    outcome
}

/// Makes every third step small, and one element of every fourth not finite.
fn disturb(gradient: &mut [f32], step: u64, part: usize) {
    if step.is_multiple_of(3) {
        gradient.iter_mut().for_each(|x| *x /= 4096.0);
    }
    if step % 4 == 1 && part == 5 {
        gradient[7] = if step % 8 == 1 { f32::NAN } else { f32::INFINITY };
    }
}

type Shards = Vec<ParamExport>;

fn optimizer_options(case: &Case, steps: u64, tie: Option<Tie>) -> OptimizerOptions {
    let Case { beta1, beta2, eps, weight_decay, clip, decay, warmup, .. } = *case;
    let (momentum, nesterov) = (case.momentum, case.nesterov);
    let adamw = AdamW { beta1, beta2, eps, weight_decay };
    let rule: Arc<dyn UpdateRule> = match case.optimizer.as_str() {
        "adamw" => Arc::new(adamw),
        "adafactor" => Arc::new(Adafactor { weight_decay }),
        "sgd" => Arc::new(Sgd { momentum, nesterov, weight_decay }),
        "lion" => Arc::new(Lion { beta1, beta2, weight_decay }),
        "muon" => Arc::new(Muon { momentum, nesterov, adamw }),
        other => panic!("{other}"),
    };
    let (peak, min, total) = (case.lr, case.min_lr, steps);
    let rate = LearningRate { peak, min, warmup, total, decay, grows_from: None };
    OptimizerOptions {
        parameters: ParameterGroups { rule, no_decay: None, ema: case.harsh.then_some(0.9) },
        lr: Arc::new(move |step| rate.at(step)),
        clip,
        tie,
        tied_rows: None,
    }
}

/// Outcomes of rank 0, and every parameter whole, as each replica has it.
fn run(case: &Case, steps: u64, layout: Layout) -> (Vec<StepOutcome>, Vec<(String, Vec<f32>)>) {
    let (mesh, zero1, _) = layout;
    let world = ThreadsWorld::new(mesh.world(), ThreadsOptions::default()).communicators();
    let mut results: Vec<_> = std::thread::scope(|scope| {
        let spawn = |c| {
            scope.spawn(move || {
                let groups = Groups::new(c, mesh).unwrap();
                let coords = groups.coords;
                (coords, train(case, steps, groups, layout))
            })
        };
        let ranks: Vec<_> = world.into_iter().map(spawn).collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    });
    results.sort_by_key(|(c, _)| (c.dp, c.pp, c.zero3));
    let outcomes = results[0].1.0.clone();
    let pieces = mesh.zero3 * if zero1 { mesh.dp } else { 1 };
    let mut whole: BTreeMap<(usize, usize, String), Vec<f32>> = BTreeMap::new();
    for (c, (_, shards)) in results {
        for shard in shards {
            let flat = whole.entry((c.dp, c.pp, shard.layer)).or_default();
            flat.extend(shard.values);
        }
    }
    let layers = layers(case.tied);
    let parameters = whole.into_iter().flat_map(|((.., layer), flat)| {
        let given = layers.iter().find(|g| g.name == layer).unwrap();
        let layout = FlatLayout::new(given.specs.clone(), pieces);
        let of = |p: &zeropp_core::params::ParamPlace| {
            (p.spec.name.clone(), flat[p.offset..][..p.spec.len()].to_vec())
        };
        layout.params.iter().map(of).collect::<Vec<_>>()
    });
    (outcomes, parameters.collect())
}

fn check(case: &Case, steps: u64, layout: Layout) {
    let what = format!("{}, {}, zero1 {}, {} units", case.name, layout.0, layout.1, layout.2);
    let (outcomes, weights) = run(case, steps, layout);
    for (i, outcome) in outcomes.iter().enumerate() {
        let close = |ours: f64, theirs: f64, to: f64| (ours - theirs).abs() <= to;
        let (lr, norm) = (case.learning_rates[i], case.norms[i]);
        assert!(close(outcome.lr, lr, 1e-12), "{what}: lr {} and {lr}", outcome.lr);
        let ours = outcome.grad_norm;
        assert!(close(ours, norm, 1e-6 * norm), "{what}: norm {ours} and {norm}");
    }
    let replicas = layout.0.dp;
    assert_eq!(weights.len(), 4 * replicas, "{what}");
    for (name, ours) in weights {
        let theirs = &case.weights[&name];
        assert_eq!(ours.len(), theirs.len(), "{what}: {name}");
        let largest = theirs.iter().fold(0f32, |m, x| m.max(x.abs()));
        let apart = ours.iter().zip(theirs).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
        let relative = apart / largest;
        assert!(relative <= case.tolerance, "{what}: {name} is {relative:e} from PyTorch's");
    }
}

#[test]
fn twenty_steps_of_adamw_are_pytorch_s_on_every_layout() {
    on_every_layout(include_str!("fixtures/adamw.json"), 4);
}

#[test]
fn twenty_steps_of_the_other_optimizers_are_pytorch_s_on_every_layout() {
    on_every_layout(include_str!("fixtures/optimizers.json"), 9);
}

/// Steps that are clipped, steps that are not, and steps that are not finite: an update that is
/// done first and validated later leaves the bits of one that waits for the norm, and so does one
/// of what is in a file.
#[test]
fn updates_that_are_validated_late_or_in_a_file_leave_the_same_bits() {
    for figures in [include_str!("fixtures/adamw.json"), include_str!("fixtures/optimizers.json")] {
        let table: Table = serde_json::from_str(figures).unwrap();
        for case in &table.cases {
            for layout in layouts() {
                let of = |late, out, host| {
                    let case = Case { late, out, host, harsh: true, ..case.clone() };
                    let (outcomes, weights) = run(&case, 20, layout);
                    let bits = |(name, values): (String, Vec<f32>)| {
                        (name, values.into_iter().map(f32::to_bits).collect::<Vec<_>>())
                    };
                    (outcomes, weights.into_iter().map(bits).collect::<Vec<_>>())
                };
                let (barrier, weights) = of(false, Out::Nothing, false);
                let what = format!("{}, {}, zero1 {}", case.name, layout.0, layout.1);
                let skipped = barrier.iter().filter(|outcome| outcome.skipped).count();
                let clipped = |o: &&StepOutcome| !o.skipped && o.grad_norm > case.clip;
                let clipped = barrier.iter().filter(clipped).count();
                assert_eq!(skipped, 5, "{what}");
                assert!(case.clip == 0.0 || (5..15).contains(&clipped), "{what}: {clipped}");
                let is_whole = ["adafactor", "muon"].contains(&case.optimizer.as_str());
                let behind = Out::Moments.updated(!layout.1 && !case.tied && !is_whole);
                for (late, out, host) in [
                    (true, Out::Nothing, false),
                    (false, Out::Moments, false),
                    (false, behind, false),
                    (false, Out::All, false),
                    (false, Out::Moments, true),
                    (false, behind, true),
                ] {
                    let (outcomes, same) = of(late, out, host);
                    assert_eq!(outcomes, barrier, "{what}, out {out:?}, host {host}");
                    assert!(same == weights, "{what}, out {out:?}, host {host}: weights differ");
                }
            }
        }
    }
}

fn on_every_layout(figures: &str, cases: usize) {
    let table: Table = serde_json::from_str(figures).unwrap();
    assert_eq!((table.steps, table.cases.len()), (20, cases));
    for case in &table.cases {
        for layout in layouts() {
            check(case, table.steps, layout);
        }
    }
}

fn layouts() -> [Layout; 8] {
    let mesh = |pp, zero3, dp| Mesh { pp, zero3, dp };
    [
        (mesh(1, 1, 1), false, 1),
        (mesh(1, 1, 1), false, 4),
        (mesh(1, 2, 1), false, 2),
        (mesh(2, 1, 1), false, 3),
        (mesh(1, 1, 2), false, 1),
        (mesh(1, 1, 3), true, 2),
        (mesh(2, 2, 2), true, 3),
        (mesh(2, 2, 2), false, 1),
    ]
}
