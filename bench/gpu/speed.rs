//! How fast is it: the largest rate of a matrix product, and a GPT-2 of 124M parameters beside it.

use std::time::Instant;

use burn::tensor::{DType, Distribution, Tensor};
use zeropp::config::{Activation, Precision};
use zeropp::model::gpt::{self, GptShape};
use zeropp::{Config, Trainer};
use zeropp_core::device::wait_for;
use zeropp_core::split::ops::products::matmul;

use crate::{Bench, Outcome, row};

/// FLOP/s of a large square product in the precision that training uses.
fn peak_flops(bench: &Bench) -> Result<f64, zeropp::Error> {
    let device = bench.config().devices()?.of(0);
    let n = if bench.small { 256 } else { 8192 };
    let dtype = if bench.fast() == Precision::Bf16 { DType::BF16 } else { DType::F32 };
    // Random, as zeros and ones take less power and so less time.
    let normal = Distribution::Normal(0.0, 1.0);
    let a = Tensor::<2>::random([n, n], normal, (&device, DType::F32)).cast(dtype);
    let seconds = |products: usize| {
        let start = Instant::now();
        let mut last = a.clone();
        for _ in 0..products {
            last = matmul(a.clone(), a.clone());
        }
        wait_for(last);
        start.elapsed().as_secs_f64()
    };
    seconds(3);
    let products = 20;
    let best = (0..5).map(|_| seconds(products)).fold(f64::INFINITY, f64::min);
    Ok(2.0 * products as f64 * (n as f64).powi(3) / best)
}

/// The device's own peak.
pub(crate) fn peak(bench: &Bench) -> Outcome {
    let flops = peak_flops(bench)?;
    let what = format!("largest matrix product in {}", bench.fast());
    row(&what, format_args!("{:.1} TFLOP/s", flops / 1e12), "");
    Ok(true)
}

fn shape(bench: &Bench) -> GptShape {
    let gpt2 = GptShape {
        layers: 12,
        hidden: 768,
        heads: 12,
        seq: 1024,
        vocabulary: 50304,
        vocabulary_multiple: 1,
        tied: true,
        activation: Activation::GeluTanh,
    };
    let small = GptShape { layers: 4, hidden: 32, heads: 2, seq: 32, vocabulary: 512, ..gpt2 };
    if bench.small { small } else { gpt2 }
}

/// A GPT-2 beside which others' figures stand.
fn gpt2_of(bench: &Bench, config: Config) -> Result<Trainer, zeropp::Error> {
    let shape = shape(bench);
    let config = Config {
        layers: shape.layers,
        hidden: shape.hidden,
        heads: shape.heads,
        seq: shape.seq,
        micro_batch_size: if bench.small { 1 } else { 16 },
        steps: if bench.small { 3 } else { 12 },
        lr: 3e-4,
        precision: bench.fast(),
        ..config
    };
    Trainer::builder(config).model(gpt::build(shape)).build()
}

/// Trains for a few steps and says how fast.
fn train(bench: &Bench, what: &str, trainer: Trainer) -> Outcome {
    let plan = trainer.plan();
    let (parameters, flops) = (plan.parameters, plan.flops_per_token);
    let start = Instant::now();
    let mut first = 0.0;
    let mut rates = Vec::new();
    trainer.train(|step| {
        if rates.is_empty() {
            first = start.elapsed().as_secs_f64();
        }
        rates.push(step.tokens_per_s);
    })?;
    // The first steps compile.
    let mut settled = rates.split_off(rates.len() / 2);
    settled.sort_by(f64::total_cmp);
    let median = settled[settled.len() / 2];
    let of_peak = median * flops / peak_flops(bench)?;
    let millions = parameters as f64 / 1e6;
    let title = format!("{what}, {millions:.0} M parameters, {}", bench.fast());
    let of_peak = 100.0 * of_peak;
    row(&title, format_args!("{median:.0} tokens/s, {of_peak:.1} % of the largest product's"), "");
    row("its first step, with all compilation", format_args!("{first:.0} s"), "");
    Ok(true)
}

/// One rank.
pub(crate) fn gpt2(bench: &Bench) -> Outcome {
    let config =
        Config { micro_batches: Some(2), unit: Some(2), virtual_stages: Some(1), ..bench.config() };
    train(bench, "GPT-2, one rank", gpt2_of(bench, config)?)
}

/// Four ranks that share the device: nothing is gained by it on one card, but it is the whole job.
pub(crate) fn pipeline(bench: &Bench) -> Outcome {
    let config = Config {
        pp: 2,
        zero3: 2,
        virtual_stages: Some(2),
        micro_batches: Some(3),
        unit: Some(3),
        ..bench.config()
    };
    train(bench, "GPT-2, P 2 × D 2 on the one device", gpt2_of(bench, config)?)
}

/// Layers of LLaMA-3 8B, with fewer ids than it has: the head would hide them.
pub(crate) fn llama(bench: &Bench) -> Outcome {
    let Config { device, data, timeout_s, .. } = bench.config();
    let sizes = if bench.small {
        Config { layers: 2, hidden: 32, seq: 32, vocab: Some(512), ..Config::for_model("llama")? }
    } else {
        let (seq, vocab) = (4096, Some(32_768));
        Config { layers: 8, seq, vocab, ..Config::for_model("llama3-8b")? }
    };
    let config = Config {
        device,
        data,
        timeout_s,
        micro_batches: Some(4),
        unit: Some(4),
        virtual_stages: Some(1),
        steps: if bench.small { 3 } else { 8 },
        precision: bench.fast(),
        ..sizes
    };
    let what = format!("LLaMA-3 8B, {} layers of it, {} tokens", config.layers, config.seq);
    train(bench, &what, Trainer::new(config)?)
}
