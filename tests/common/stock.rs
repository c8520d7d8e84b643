//! GPT-2 as a single-device graph of stock Burn operations, with stock autodiff: what runs are held
//! against.

use std::collections::BTreeMap;

use burn::tensor::{Device, Int, Tensor, TensorData, activation, module};
use zeropp::Config;
use zeropp::config::Activation;
use zeropp::model::gpt;
use zeropp::params::Init;
use zeropp::rng::Rng;

/// A tracked leaf per parameter, with the values that zeropp starts from.
pub(crate) struct Leaves {
    pub(crate) one: BTreeMap<String, Tensor<1>>,
    pub(crate) two: BTreeMap<String, Tensor<2>>,
}

pub(crate) fn leaves(config: &Config, vocabulary: usize) -> Leaves {
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

/// The mean loss of `n` samples, whose ids and targets follow each other.
pub(crate) fn loss(
    config: &Config,
    l: &Leaves,
    n: usize,
    tokens: (Vec<i32>, Vec<i32>),
) -> Tensor<1> {
    forward(config, l, n, tokens).0
}

/// That loss, and what each layer gives `[n, s, h]`, by name.
pub(crate) fn forward(
    config: &Config,
    l: &Leaves,
    n: usize,
    (ids, targets): (Vec<i32>, Vec<i32>),
) -> (Tensor<1>, BTreeMap<String, Tensor<3>>) {
    let mut outputs = BTreeMap::new();
    let mut seen = |name: &str, x: &Tensor<3>| drop(outputs.insert(name.into(), x.clone().inner()));
    let (s, h) = (config.seq, config.hidden);
    let device = Device::flex().autodiff();
    let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [n, s]), &device);
    let wte = l.two["wte.weight"].clone();
    let wpe = l.two["wpe.weight"].clone();
    let mut x = module::embedding(wte.clone(), ids);
    seen("wte", &x);
    x = x + wpe.unsqueeze::<3>();
    seen("wpe", &x);
    for i in 0..config.layers {
        let name = |part: &str| format!("h.{i}.{part}");
        let qkv = linear(norm(x.clone(), l, &name("ln_1")), l, &name("attn.c_attn"));
        x = x + linear(attention(qkv, config.heads), l, &name("attn.c_proj"));
        let up = linear(norm(x.clone(), l, &name("ln_2")), l, &name("mlp.c_fc"));
        x = x + linear(gelu(up, config.activation), l, &name("mlp.c_proj"));
        seen(&format!("h.{i}"), &x);
    }
    let x = norm(x, l, "ln_f");
    seen("ln_f", &x);
    let x = x.reshape([n * s, h]);
    let head = if config.tied { wte } else { l.two["lm_head.weight"].clone() };
    let logits = x.matmul(head.transpose());
    let targets = Tensor::<2, Int>::from_data(TensorData::new(targets, [n * s, 1]), &device);
    let picked = activation::log_softmax(logits, 1).gather(1, targets);
    (picked.mean().neg(), outputs)
}
