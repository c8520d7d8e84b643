//! Tokens per second side by side, in one run: a plain Burn training loop with stock modules on
//! one core, zeropp on one rank, zeropp on two pipeline ranks. Also the measured bubble of the
//! pipeline beside the one simulated with the measured times.
//!
//! `cargo bench --bench throughput [ROUNDS]`. The machine is noisy: read the ratios.

use std::time::Instant;

use burn::module::Module;
use burn::nn::{
    Embedding, EmbeddingConfig, Gelu, LayerNorm, LayerNormConfig, Linear, LinearConfig,
    loss::CrossEntropyLossConfig,
};
use burn::tensor::{Device, Int, Tensor, TensorData, module, ops::AttentionModuleOptions};
use burn_optim::{AdamWConfig, GradientsParams};
use zeropp::config::Activation;
use zeropp::{Config, Trainer};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const LAYERS: usize = 8;
const HIDDEN: usize = 256;
const HEADS: usize = 4;
const SEQ: usize = 128;
const VOCABULARY: usize = 256;
const BATCH: usize = 16;
const STEPS: u64 = 6;

#[derive(Module, Debug)]
struct Block {
    ln_1: LayerNorm,
    qkv: Linear,
    proj: Linear,
    ln_2: LayerNorm,
    fc: Linear,
    act: Gelu,
    out: Linear,
}

#[derive(Module, Debug)]
struct Gpt {
    wte: Embedding,
    wpe: Embedding,
    blocks: Vec<Block>,
    ln_f: LayerNorm,
    head: Linear,
}

impl Gpt {
    fn new(device: &Device) -> Gpt {
        let norm = || LayerNormConfig::new(HIDDEN).init(device);
        let linear = |i, o| LinearConfig::new(i, o).init(device);
        Gpt {
            wte: EmbeddingConfig::new(VOCABULARY, HIDDEN).init(device),
            wpe: EmbeddingConfig::new(SEQ, HIDDEN).init(device),
            blocks: (0..LAYERS)
                .map(|_| Block {
                    ln_1: norm(),
                    qkv: linear(HIDDEN, 3 * HIDDEN),
                    proj: linear(HIDDEN, HIDDEN),
                    ln_2: norm(),
                    fc: linear(HIDDEN, 4 * HIDDEN),
                    act: Gelu::new_approximate(),
                    out: linear(4 * HIDDEN, HIDDEN),
                })
                .collect(),
            ln_f: norm(),
            head: LinearConfig::new(HIDDEN, VOCABULARY).with_bias(false).init(device),
        }
    }

    fn forward(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let [b, s] = ids.dims();
        let positions = Tensor::<1, Int>::arange(0..s as i64, &ids.device()).unsqueeze::<2>();
        let mut x = self.wte.forward(ids) + self.wpe.forward(positions);
        let causal = AttentionModuleOptions { scale: None, softcap: None, is_causal: true };
        for block in &self.blocks {
            let qkv = block.qkv.forward(block.ln_1.forward(x.clone()));
            let part = |i: usize| {
                let x = qkv.clone().slice([0..b, 0..s, i * HIDDEN..(i + 1) * HIDDEN]);
                x.reshape([b, s, HEADS, HIDDEN / HEADS]).swap_dims(1, 2)
            };
            let y = module::attention(part(0), part(1), part(2), None, None, causal);
            x = x + block.proj.forward(y.swap_dims(1, 2).reshape([b, s, HIDDEN]));
            let up = block.act.forward(block.fc.forward(block.ln_2.forward(x.clone())));
            x = x + block.out.forward(up);
        }
        self.head.forward(self.ln_f.forward(x))
    }
}

/// Median tokens per second of the stock loop.
fn plain_burn() -> f64 {
    let device = Device::flex().autodiff();
    device.seed(1);
    let mut model = Gpt::new(&device);
    let mut optimizer = AdamWConfig::new().init();
    let tokens: Vec<i32> = (0..BATCH * SEQ).map(|i| (i * 7919 % 251) as i32).collect();
    let ids = || {
        let data = TensorData::new(tokens.clone(), [BATCH, SEQ]);
        Tensor::<2, Int>::from_data(data, &device)
    };
    let loss = CrossEntropyLossConfig::new().init(&device);
    let mut times = Vec::new();
    for _ in 0..STEPS {
        let start = Instant::now();
        let logits = model.forward(ids()).reshape([BATCH * SEQ, VOCABULARY]);
        let l = loss.forward(logits, ids().reshape([BATCH * SEQ]));
        let grads = GradientsParams::from_grads(l.backward(), &model);
        model = optimizer.step(3e-4, model, grads);
        times.push(start.elapsed().as_secs_f64());
    }
    (BATCH * SEQ) as f64 / median(times[1..].to_vec())
}

fn config(pp: usize) -> Config {
    Config {
        pp,
        layers: LAYERS,
        hidden: HIDDEN,
        heads: HEADS,
        seq: SEQ,
        micro_batch_size: 2,
        micro_batches: Some(8),
        unit: Some(8),
        virtual_stages: Some(if pp == 1 { 1 } else { 2 }),
        steps: STEPS,
        activation: Activation::GeluTanh,
        ..Config::default()
    }
}

/// Median tokens per second, measured and simulated bubble of zeropp.
fn zeropp(pp: usize) -> (f64, f64, f64) {
    let trainer = Trainer::new(config(pp)).expect("a good configuration");
    let summary = trainer.train(|_| ()).expect("a run that ends well");
    (summary.tokens_per_s, summary.bubble, summary.timed_bubble)
}

fn median(mut v: Vec<f64>) -> f64 {
    v.sort_by(f64::total_cmp);
    v[v.len() / 2]
}

fn main() {
    let rounds = std::env::args().filter_map(|a| a.parse().ok()).next().unwrap_or(5);
    let (mut plain, mut one, mut two) = (Vec::new(), Vec::new(), Vec::new());
    let (mut one_by_plain, mut two_by_one) = (Vec::new(), Vec::new());
    let (mut bubbles, mut timed) = (Vec::new(), Vec::new());
    for round in 1..=rounds {
        let (a, b, c) = (plain_burn(), zeropp(1), zeropp(2));
        println!(
            "round {round}: plain Burn {a:.0}, zeropp P=1 {:.0}, P=2 {:.0} tokens/s; \
             bubble {:.1} %, simulated {:.1} %",
            b.0,
            c.0,
            100.0 * c.1,
            100.0 * c.2
        );
        one_by_plain.push(b.0 / a);
        two_by_one.push(c.0 / b.0);
        plain.push(a);
        one.push(b.0);
        two.push(c.0);
        bubbles.push(100.0 * c.1);
        timed.push(100.0 * c.2);
    }
    println!("\nmedians over {rounds} rounds");
    println!("plain Burn, one core        {:8.0} tokens/s", median(plain));
    println!("zeropp, one rank            {:8.0} tokens/s", median(one));
    println!("zeropp, P = 2, V = 2, U = 8 {:8.0} tokens/s", median(two));
    println!("one rank / plain Burn       {:8.2}", median(one_by_plain));
    println!("P = 2 / one rank            {:8.2}", median(two_by_one));
    println!("bubble measured, simulated  {:8.1} % {:.1} %", median(bubbles), median(timed));
}
