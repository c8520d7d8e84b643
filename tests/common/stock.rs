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

/// `x`, whose elements lie in `rows(index)` of their sample, by the mask that the first step's
/// dropout has at this place; by its definition in `split::Dropout`.
fn drop_some<const D: usize>(
    x: Tensor<D>,
    config: &Config,
    place: &str,
    at: impl Fn(usize) -> [usize; 3],
) -> Tensor<D> {
    if config.dropout == 0.0 {
        return x;
    }
    let rng = Rng::keyed(config.seed, &format!("dropout.{place}"));
    let factor = |i: usize| {
        let [sample, row, column] = at(i).map(|n| n as u64);
        let block = 16 * (column / 64) + column % 16;
        let word = rng.block(block + (row << 32), sample + (1 << 32))[column as usize % 64 / 16];
        let is_dropped = f64::from(word) < config.dropout * 2_f64.powi(32);
        if is_dropped { 0.0 } else { (1.0 / (1.0 - config.dropout)) as f32 }
    };
    let mask: Vec<f32> = (0..x.shape().num_elements()).map(factor).collect();
    let mask = TensorData::new(mask, x.dims());
    x * Tensor::from_data(mask, &Device::flex().autodiff())
}

/// The same for `x: [n, s, h]`.
fn drop_hidden(x: Tensor<3>, config: &Config, place: &str) -> Tensor<3> {
    let [_, s, h] = x.dims();
    drop_some(x, config, place, |i| [i / (s * h), i / h % s, i % h])
}

fn attention(qkv: Tensor<3>, config: &Config, block: &str) -> Tensor<3> {
    let heads = config.heads;
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
    let p = drop_some(p, config, &format!("{block}.probabilities"), |i| {
        let (sample, head, query) = (i / (heads * s * s), i / (s * s) % heads, i / s % s);
        [sample, query * heads + head, i % s]
    });
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

/// The mean loss of `n` samples, whose ids and targets follow each other, with the dropout of the
/// first step if the settings have any.
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
    x = drop_hidden(x + wpe.unsqueeze::<3>(), config, "embedding.output");
    seen("wpe", &x);
    for i in 0..config.layers {
        let name = |part: &str| format!("h.{i}.{part}");
        let qkv = linear(norm(x.clone(), l, &name("ln_1")), l, &name("attn.c_attn"));
        let attended = attention(qkv, config, &format!("h.{i}"));
        let attended = linear(attended, l, &name("attn.c_proj"));
        x = x + drop_hidden(attended, config, &name("attention"));
        let up = linear(norm(x.clone(), l, &name("ln_2")), l, &name("mlp.c_fc"));
        let down = linear(gelu(up, config.activation), l, &name("mlp.c_proj"));
        x = x + drop_hidden(down, config, &name("mlp"));
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
