//! Gradients against an independent single-device graph: stock Burn operations, stock autodiff,
//! every weight tracked, the whole batch at once.

use std::collections::BTreeMap;

use crate::common::tiny;
use burn::tensor::{Device, Int, Tensor, TensorData, activation, module};
use zeropp::config::{Activation, Recompute};

use zeropp::model::gpt;
use zeropp::params::Init;
use zeropp::rng::Rng;
use zeropp::{Config, Trainer, Weights};

/// A tracked leaf per parameter, with the values that zeropp starts from.
struct Leaves {
    one: BTreeMap<String, Tensor<1>>,
    two: BTreeMap<String, Tensor<2>>,
}

fn leaves(config: &Config, vocabulary: usize) -> Leaves {
    let mut leaves = Leaves { one: BTreeMap::new(), two: BTreeMap::new() };
    for spec in gpt::build(config.gpt_shape(vocabulary)).parts.iter().flat_map(|p| p.parameters()) {
        let rng = Rng::keyed(config.seed, &spec.name);
        let value = |i: u64| match &spec.init {
            Init::Zeros => 0.0,
            Init::Ones => 1.0,
            Init::Normal(std) => std * rng.normal_at(i),
            other => panic!("the GPT has no {other:?}"),
        };
        let values: Vec<f32> = (0..spec.len() as u64).map(value).collect();
        let data = TensorData::new(values, spec.shape.clone());
        let device = Device::flex().autodiff();
        if spec.shape.len() == 1 {
            let leaf = Tensor::<1>::from_data(data, &device).require_grad();
            leaves.one.insert(spec.name, leaf);
        } else {
            let leaf = Tensor::<2>::from_data(data, &device).require_grad();
            leaves.two.insert(spec.name, leaf);
        }
    }
    leaves
}

fn linear(x: Tensor<3>, l: &Leaves, name: &str) -> Tensor<3> {
    let bias = l.one[&format!("{name}.bias")].clone();
    module::linear(x, l.two[&format!("{name}.weight")].clone(), Some(bias))
}

fn norm(x: Tensor<3>, l: &Leaves, name: &str) -> Tensor<3> {
    let (w, b) = (&l.one[&format!("{name}.weight")], &l.one[&format!("{name}.bias")]);
    let mean = x.clone().mean_dim(2);
    let centred = x - mean;
    let variance = centred.clone().powi_scalar(2).mean_dim(2);
    centred / (variance + 1e-5).sqrt() * w.clone().unsqueeze::<3>() + b.clone().unsqueeze::<3>()
}

fn attention(qkv: Tensor<3>, heads: usize) -> Tensor<3> {
    let [b, s, h3] = qkv.dims();
    let h = h3 / 3;
    let d = h / heads;
    let part = |i: usize| {
        let x = qkv.clone().slice([0..b, 0..s, i * h..(i + 1) * h]);
        x.reshape([b, s, heads, d]).swap_dims(1, 2)
    };
    let (q, k, v) = (part(0), part(1), part(2));
    let scores = q.matmul(k.swap_dims(2, 3)) / (d as f64).sqrt();
    let mask = Tensor::<2, Int>::ones([s, s], &qkv.device()).triu(1).bool().unsqueeze::<4>();
    let p = activation::softmax(scores.mask_fill(mask, -1e30), 3);
    p.matmul(v).swap_dims(1, 2).reshape([b, s, h])
}

fn gelu(x: Tensor<3>, kind: Activation) -> Tensor<3> {
    match kind {
        Activation::Gelu => activation::gelu(x),
        Activation::Swiglu => unreachable!("a GPT has none"),
        Activation::GeluTanh => {
            let c = (2.0 / std::f64::consts::PI).sqrt();
            let inner = (x.clone() + x.clone().powi_scalar(3) * 0.044715) * c;
            x * 0.5 * (inner.tanh() + 1.0)
        }
    }
}

/// Loss and gradients of the first step's whole batch.
fn oracle(config: &Config) -> (f64, Weights) {
    let config = config.resolved();
    let dataset = config.dataset().unwrap();
    let vocabulary = dataset.vocabulary();
    let sampler = config.sampler();
    let (n, s, h) = (config.samples_per_step(), config.seq, config.hidden);
    let (mut ids, mut targets) = (Vec::new(), Vec::new());
    for i in 0..n {
        let (x, y) = sampler.sample(&dataset, 0, i).unwrap();
        ids.extend(x.into_iter().map(|t| t as i32));
        targets.extend(y.into_iter().map(|t| t as i32));
    }
    let l = leaves(&config, vocabulary);
    let device = Device::flex().autodiff();
    let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [n, s]), &device);
    let wte = l.two["wte.weight"].clone();
    let wpe = l.two["wpe.weight"].clone();
    let mut x = module::embedding(wte.clone(), ids) + wpe.unsqueeze::<3>();
    for i in 0..config.layers {
        let name = |part: &str| format!("h.{i}.{part}");
        let qkv = linear(norm(x.clone(), &l, &name("ln_1")), &l, &name("attn.c_attn"));
        x = x + linear(attention(qkv, config.heads), &l, &name("attn.c_proj"));
        let up = linear(norm(x.clone(), &l, &name("ln_2")), &l, &name("mlp.c_fc"));
        x = x + linear(gelu(up, config.activation), &l, &name("mlp.c_proj"));
    }
    let x = norm(x, &l, "ln_f").reshape([n * s, h]);
    let head = if config.tied { wte } else { l.two["lm_head.weight"].clone() };
    let logits = x.matmul(head.transpose());
    let targets = Tensor::<2, Int>::from_data(TensorData::new(targets, [n * s, 1]), &device);
    let picked = activation::log_softmax(logits, 1).gather(1, targets);
    let loss = picked.mean().neg();
    let value = loss.clone().inner().into_scalar::<f32>();
    let grads = loss.backward();
    let mut all = Weights::new();
    for (name, leaf) in &l.one {
        let g = leaf.grad(&grads).unwrap().into_data().try_to_vec::<f32>().unwrap();
        all.insert(name.clone(), g);
    }
    for (name, leaf) in &l.two {
        let g = leaf.grad(&grads).unwrap().into_data().try_to_vec::<f32>().unwrap();
        all.insert(name.clone(), g);
    }
    (f64::from(value), all)
}

/// Largest difference over the largest value.
fn relative(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let scale = b.iter().fold(0f32, |m, x| m.max(x.abs()));
    a.iter().zip(b).fold(0f32, |m, (x, y)| m.max((x - y).abs())) / scale
}

fn check(config: Config) {
    let (loss, expected) = oracle(&config);
    let (metrics, gradients) = Trainer::new(config.clone()).unwrap().first_gradients().unwrap();
    assert!((metrics.loss - loss).abs() <= 2e-6 * loss, "{} against {loss}", metrics.loss);
    assert_eq!(
        gradients.keys().collect::<Vec<_>>(),
        expected.keys().collect::<Vec<_>>(),
        "the same parameters"
    );
    for (name, g) in &gradients {
        let error = relative(g, &expected[name]);
        assert!(error <= 2e-6, "{name}: {error:e}");
    }
    let norm: f64 = expected.values().flatten().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
    assert!((metrics.grad_norm - norm).abs() <= 2e-6 * norm, "{} {norm}", metrics.grad_norm);
}

fn small() -> Config {
    Config { layers: 4, hidden: 32, heads: 4, seq: 16, micro_batch_size: 2, ..tiny() }
}

#[test]
fn one_rank() {
    check(small());
    check(Config { activation: Activation::Gelu, tied: true, ..small() });
}

#[test]
fn a_pipeline_with_shards() {
    check(Config { pp: 2, virtual_stages: Some(2), zero3: 2, ..small() });
    check(Config { pp: 2, zero3: 3, tied: true, recompute: Recompute::Full, ..small() });
}

#[test]
fn replicas() {
    check(Config { pp: 2, dp: 2, virtual_stages: Some(2), ..small() });
    check(Config { zero3: 2, dp: 2, zero1: true, tied: true, ..small() });
}
