//! Gradients against an independent single-device graph: stock Burn operations, stock autodiff,
//! every weight tracked, the whole batch at once.

use std::collections::BTreeMap;

use burn::tensor::Tensor;

use crate::common::stock::{Leaves, forward, leaves};
use crate::common::tiny;
use zeropp::config::{Activation, Recompute};
use zeropp::{Config, NamedWeights, Trainer};

/// The first step's whole batch in one graph: its loss, the parameters, and what each layer gives.
pub(crate) fn first_batch(config: &Config) -> (Tensor<1>, Leaves, BTreeMap<String, Tensor<3>>) {
    let config = config.resolved();
    let dataset = config.dataset().unwrap();
    let sampler = config.sampler();
    let n = config.samples_per_step();
    let (mut ids, mut targets) = (Vec::new(), Vec::new());
    for i in 0..n {
        let (x, y) = sampler.sample(&dataset, 0, i).unwrap();
        ids.extend(x.into_iter().map(|t| t as i32));
        targets.extend(y.into_iter().map(|t| t as i32));
    }
    let l = leaves(&config, dataset.vocabulary());
    let (loss, outputs) = forward(&config, &l, n, (ids, targets));
    (loss, l, outputs)
}

/// Loss and gradients of the first step's whole batch.
pub(crate) fn oracle(config: &Config) -> (f64, NamedWeights) {
    let (loss, l, _) = first_batch(config);
    let value = loss.clone().inner().into_scalar::<f32>();
    let grads = loss.backward();
    let mut all = NamedWeights::new();
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

pub(crate) fn check(config: Config) {
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

/// The mask is drawn by its definition and multiplied with: no code of zeropp's dropout is in it.
#[test]
fn with_dropout() {
    let dropped = Config { dropout: 0.3, ..small() };
    check(dropped.clone());
    check(Config { seq: 150, micro_batches: Some(2), unit: Some(1), ..dropped.clone() });
    check(Config { pp: 2, zero3: 2, recompute: Recompute::Full, ..dropped.clone() });
    check(Config { pp: 2, dp: 2, virtual_stages: Some(2), micro_batch_size: 1, ..dropped });
}
