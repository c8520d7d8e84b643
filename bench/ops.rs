//! Core time of every operation and of one transformer block in F, B and W beside the time of its
//! matrix products alone, on one core: `cargo bench --bench ops [-- FILTER]`.
//!
//! Also the tokens a second of a whole small GPT step that these operations allow (8 blocks and the
//! tied head, no optimizer).

use std::sync::Arc;
use std::time::Instant;

use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Device, Int, Tensor, TensorData, activation, module};
use zeropp_core::cpu_tensor;
use zeropp_core::kernels::gemm::{MatMut, MatRef, StoreMode, gemm, product};
use zeropp_core::meter::Meter;
use zeropp_core::params::{FlatLayout, Init, ParamPlace, ParamSpec};
use zeropp_core::split::{Grads, LayerWeights, Masks, OpCx, WQueue, ops, seed_backward};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const HIDDEN: usize = 256;
const HEADS: usize = 4;
const SEQ: usize = 128;
const VOCABULARY: usize = 256;
const BLOCKS: usize = 8;

/// Seconds on a core: the least of many repetitions.
#[derive(Clone, Copy, Default)]
struct Times {
    f: f64,
    b: f64,
    w: f64,
}

impl Times {
    fn total(self) -> f64 {
        self.f + self.b + self.w
    }

    fn min(self, o: Times) -> Times {
        Times { f: self.f.min(o.f), b: self.b.min(o.b), w: self.w.min(o.w) }
    }
}

/// Seconds that this thread spent on a core, page faults included: other processes do not count.
fn cpu_now() -> f64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9
}

fn seconds<R>(f: impl FnOnce() -> R) -> (f64, R) {
    let start = cpu_now();
    let r = f();
    (cpu_now() - start, r)
}

fn values(n: usize, seed: u32) -> Vec<f32> {
    let hash = |i: usize| (i as u32 ^ seed).wrapping_mul(2_654_435_761).rotate_left(13);
    (0..n).map(|i| hash(i).wrapping_mul(2_246_822_519) as f32 / u32::MAX as f32 - 0.5).collect()
}

fn tensor<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    cpu_tensor::from_vec(values(shape.iter().product(), 7), shape)
}

/// Weights of one block (and of the head), scaled to keep activations of size one.
fn weights() -> (Arc<FlatLayout>, LayerWeights) {
    let h = HIDDEN;
    let shapes: [(&str, &[usize]); 13] = [
        ("ln_1.weight", &[h]),
        ("ln_1.bias", &[h]),
        ("attn.weight", &[h, 3 * h]),
        ("attn.bias", &[3 * h]),
        ("proj.weight", &[h, h]),
        ("proj.bias", &[h]),
        ("ln_2.weight", &[h]),
        ("ln_2.bias", &[h]),
        ("fc.weight", &[h, 4 * h]),
        ("fc.bias", &[4 * h]),
        ("out.weight", &[4 * h, h]),
        ("out.bias", &[h]),
        ("head.weight", &[VOCABULARY, h]),
    ];
    let specs = shapes.iter().map(|(n, s)| ParamSpec::new(*n, s, Init::Zeros)).collect();
    let layout = Arc::new(FlatLayout::new(specs, 1));
    let flat = values(layout.len, 3).into_iter().map(|v| v * 0.2).collect();
    let weights = LayerWeights::new("block", 0, layout.clone());
    weights.set(cpu_tensor::from_vec(flat, [layout.len]));
    (layout, weights)
}

/// Least time of F, B and W of `op`.
fn time<const D: usize, const DY: usize>(
    x: [usize; D],
    op: impl Fn(Tensor<D>, &LayerWeights, &OpCx) -> Tensor<DY>,
) -> Times {
    let (layout, weights) = weights();
    let meter = Meter::new();
    let (x, token) = (tensor(x), tensor([1]));
    let device = Device::flex();
    let mut grads = Grads::new(vec![layout], &device, &meter);
    let mut best = Times { f: f64::MAX, b: f64::MAX, w: f64::MAX };
    let start = Instant::now();
    let mut repetitions = 0;
    while repetitions < 10 || start.elapsed().as_secs_f64() < 0.7 {
        let cx = OpCx {
            queue: WQueue::default(),
            meter: meter.clone(),
            token: token.clone().autodiff().require_grad(),
            makers: None,
            vault: None,
            output_wanted: true,
            forward_grads: None,
            masks: Masks::default(),
            routers: None,
            slice: None,
        };
        let leaf = x.clone().autodiff().require_grad();
        let (f, y) = seconds(|| op(leaf, &weights, &cx));
        let dy = cpu_tensor::from_vec(values(y.shape().num_elements(), 5), y.dims());
        let seed = seed_backward(y);
        let (b, _) = seconds(|| seed.backward(dy));
        let (w, ()) = seconds(|| cx.queue.run(&mut grads));
        best = best.min(Times { f, b, w });
        repetitions += 1;
    }
    best
}

/// Time of the three products of a linear map of `n` rows.
fn linear_products(n: usize, input: usize, output: usize) -> Times {
    let (x, w, dy) = (values(n * input, 1), values(input * output, 2), values(n * output, 3));
    let mut dw = vec![0.0; input * output];
    let mut best = Times { f: f64::MAX, b: f64::MAX, w: f64::MAX };
    let start = Instant::now();
    while start.elapsed().as_secs_f64() < 0.4 {
        let (xm, wm) = (MatRef::new(&x, n, input), MatRef::new(&w, input, output));
        let dym = MatRef::new(&dy, n, output);
        let (f, _) = seconds(|| product(1.0, xm, wm));
        let (b, _) = seconds(|| product(1.0, dym, wm.t()));
        let (w, ()) = seconds(|| {
            gemm(MatMut::new(&mut dw, input, output), StoreMode::Add, 1.0, xm.t(), dym);
        });
        best = best.min(Times { f, b, w });
    }
    best
}

/// One GPT-2 block.
fn block(x: Tensor<3>, w: &LayerWeights, cx: &OpCx) -> Tensor<3> {
    let a = ops::layer_norm(x.clone(), &w.weight("ln_1.weight"), &w.weight("ln_1.bias"), 1e-5, cx);
    let a = ops::linear(a, &w.weight("attn.weight"), Some(&w.weight("attn.bias")), cx);
    let a = ops::attention(a, HEADS, cx);
    let a = ops::linear(a, &w.weight("proj.weight"), Some(&w.weight("proj.bias")), cx);
    let x = x + a;
    let m = ops::layer_norm(x.clone(), &w.weight("ln_2.weight"), &w.weight("ln_2.bias"), 1e-5, cx);
    let m = ops::linear(m, &w.weight("fc.weight"), Some(&w.weight("fc.bias")), cx);
    let m = ops::gelu_tanh(m, cx);
    let m = ops::linear(m, &w.weight("out.weight"), Some(&w.weight("out.bias")), cx);
    x + m
}

fn head(x: Tensor<3>, w: &LayerWeights, cx: &OpCx, targets: &Tensor<2, Int>) -> Tensor<1> {
    let logits = ops::linear_transposed(x, &w.weight("head.weight"), cx);
    ops::cross_entropy(logits, targets.clone(), cx)
}

fn targets(b: usize) -> Tensor<2, Int> {
    let ids: Vec<i64> = (0..b * SEQ).map(|i| (i * 37 % VOCABULARY) as i64).collect();
    Tensor::from_data(TensorData::new(ids, [b, SEQ]), &Device::flex())
}

struct Table {
    filter: String,
}

impl Table {
    fn row(&self, name: &str, t: impl FnOnce() -> Times, gemm: impl FnOnce() -> Times) {
        if !name.contains(&self.filter) {
            return;
        }
        let (t, g) = (t(), gemm());
        let share = if g.total() > 0.0 { 100.0 * g.total() / t.total() } else { 0.0 };
        let us = |s: f64| s * 1e6;
        println!(
            "{name:<18} {:>9.1} {:>9.1} {:>9.1} {:>9.1} | {:>9.1} {:>9.1} {:>9.1}  {share:>4.0} %",
            us(t.f),
            us(t.b),
            us(t.w),
            us(t.total()),
            us(g.f),
            us(g.b),
            us(g.w)
        );
    }

    fn all(&self, b: usize) {
        let (n, h) = (b * SEQ, HIDDEN);
        let x = [b, SEQ, h];
        println!("\nb = {b}, h = {h}, heads = {HEADS}, s = {SEQ}; microseconds");
        println!(
            "{:<18} {:>9} {:>9} {:>9} {:>9} | products F, B, W, share",
            "", "F", "B", "W", "sum"
        );
        let none = Times::default;
        let lin = |name: &'static str, bias: &'static str| {
            move |x: Tensor<3>, w: &LayerWeights, cx: &OpCx| {
                ops::linear(x, &w.weight(name), Some(&w.weight(bias)), cx)
            }
        };
        self.row(
            "linear h-3h",
            || time(x, lin("attn.weight", "attn.bias")),
            || linear_products(n, h, 3 * h),
        );
        self.row(
            "linear h-h",
            || time(x, lin("proj.weight", "proj.bias")),
            || linear_products(n, h, h),
        );
        self.row(
            "linear h-4h",
            || time(x, lin("fc.weight", "fc.bias")),
            || linear_products(n, h, 4 * h),
        );
        self.row(
            "linear 4h-h",
            || time([b, SEQ, 4 * h], lin("out.weight", "out.bias")),
            || linear_products(n, 4 * h, h),
        );
        self.row(
            "layer_norm",
            || {
                time(x, |x, w, cx| {
                    ops::layer_norm(x, &w.weight("ln_1.weight"), &w.weight("ln_1.bias"), 1e-5, cx)
                })
            },
            none,
        );
        self.row(
            "rms_norm",
            || time(x, |x, w, cx| ops::rms_norm(x, &w.weight("ln_1.weight"), 1e-6, cx)),
            none,
        );
        self.row("gelu 4h", || time([b, SEQ, 4 * h], |x, _, cx| ops::gelu(x, cx)), none);
        self.row("gelu_tanh 4h", || time([b, SEQ, 4 * h], |x, _, cx| ops::gelu_tanh(x, cx)), none);
        self.row(
            "attention",
            || time([b, SEQ, 3 * h], |x, _, cx| ops::attention(x, HEADS, cx)),
            || attention_products(b),
        );
        let t = targets(b);
        self.row(
            "head + loss",
            || time(x, |x, w, cx| head(x, w, cx, &t)),
            || linear_products(n, h, VOCABULARY),
        );
        self.row("block", || time(x, block), || block_products(b));
        self.step(b);
    }

    fn step(&self, b: usize) {
        if !"step".contains(&self.filter) {
            return;
        }
        let t = targets(b);
        let times = time([b, SEQ, HIDDEN], |mut x, w, cx| {
            for _ in 0..BLOCKS {
                x = block(x, w, cx);
            }
            head(x, w, cx, &t)
        });
        let rate = (b * SEQ) as f64 / times.total();
        println!(
            "step of {BLOCKS} blocks: F {:.2} B {:.2} W {:.2} ms, {rate:.0} tokens/s; \
             in Burn's own graph {:.0}",
            times.f * 1e3,
            times.b * 1e3,
            times.w * 1e3,
            stock_step(b)
        );
    }
}

/// The same block as Burn's own graph computes it.
fn stock_block(x: Tensor<3>, p: &[Tensor<1>]) -> Tensor<3> {
    let h = HIDDEN;
    let lin = |x, i: usize, shape: [usize; 2]| {
        module::linear(x, p[i].clone().reshape(shape), Some(p[i + 1].clone()))
    };
    let norm = |x, i: usize| module::layer_norm(x, p[i].clone(), Some(p[i + 1].clone()), 1e-5);
    let qkv = lin(norm(x.clone(), 0), 2, [h, 3 * h]);
    let [b, s, _] = qkv.dims();
    let heads = |i: usize| {
        qkv.clone().narrow(2, i * h, h).reshape([b, s, HEADS, h / HEADS]).swap_dims(1, 2)
    };
    let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
    let a = module::attention(heads(0), heads(1), heads(2), None, None, options);
    let x = x + lin(a.swap_dims(1, 2).reshape([b, s, h]), 4, [h, h]);
    let m = activation::gelu_approximate(lin(norm(x.clone(), 6), 8, [h, 4 * h]));
    x + lin(m, 10, [4 * h, h])
}

/// Forward and backward of the step in Burn's own graph with all weights tracked.
fn stock_step(b: usize) -> f64 {
    let (layout, _) = weights();
    let flat = values(layout.len, 3);
    let leaves = || -> Vec<Tensor<1>> {
        let slice = |p: &ParamPlace| &flat[p.offset..][..p.spec.len()];
        let leaf = |p| {
            let v: Vec<f32> = slice(p).iter().map(|v| v * 0.2).collect();
            cpu_tensor::from_vec(v, [p.spec.len()]).autodiff().require_grad()
        };
        layout.params.iter().map(leaf).collect()
    };
    let blocks: Vec<_> = (0..BLOCKS).map(|_| leaves()).collect();
    let targets = targets(b).autodiff().reshape([b * SEQ, 1]);
    let x: Tensor<3> = tensor([b, SEQ, HIDDEN]);
    let mut best = f64::MAX;
    for _ in 0..6 {
        let (t, _) = seconds(|| {
            let x = blocks.iter().fold(x.clone().autodiff(), |x, p| stock_block(x, p));
            let head = blocks[0][12].clone().reshape([VOCABULARY, HIDDEN]);
            let logits = module::linear(x, head.transpose(), None);
            let log_p = activation::log_softmax(logits.reshape([b * SEQ, VOCABULARY]), 1);
            log_p.gather(1, targets.clone()).mean().neg().backward()
        });
        best = best.min(t);
    }
    (b * SEQ) as f64 / best
}

/// Full (not causal) products of attention, each one a whole head.
fn attention_products(b: usize) -> Times {
    let d = HIDDEN / HEADS;
    let (q, p) = (values(SEQ * d, 1), values(SEQ * SEQ, 2));
    let mut best = f64::MAX;
    for _ in 0..200 {
        let (t, ()) = seconds(|| {
            let (q, p) = (MatRef::new(&q, SEQ, d), MatRef::new(&p, SEQ, SEQ));
            let _scores = product(1.0, q, q.t());
            let _out = product(1.0, p, q);
        });
        best = best.min(t * (b * HEADS) as f64);
    }
    Times { f: best, b: 2.0 * best, w: 0.0 }
}

fn block_products(b: usize) -> Times {
    let (n, h) = (b * SEQ, HIDDEN);
    let parts = [
        linear_products(n, h, 3 * h),
        linear_products(n, h, h),
        linear_products(n, h, 4 * h),
        linear_products(n, 4 * h, h),
        attention_products(b),
    ];
    parts.iter().fold(Times::default(), |s, t| Times { f: s.f + t.f, b: s.b + t.b, w: s.w + t.w })
}

/// Starts this program again with an allocator that keeps freed pages: given back to the system,
/// they return as page faults, about a tenth of a step. The option is read before `main` runs.
fn keep_pages() {
    const OPTION: &str = "MIMALLOC_PURGE_DELAY";
    if cfg!(unix) && std::env::var_os(OPTION).is_none() {
        use std::os::unix::process::CommandExt;
        let program = std::env::current_exe().expect("the path of this program");
        let mut again = std::process::Command::new(program);
        let error = again.args(std::env::args_os().skip(1)).env(OPTION, "-1").exec();
        panic!("cannot start again: {error}");
    }
}

fn main() {
    keep_pages();
    // Cargo passes --bench; anything else selects rows.
    let filter = std::env::args().skip(1).find(|a| !a.starts_with('-')).unwrap_or_default();
    let table = Table { filter };
    for b in [2, 16] {
        table.all(b);
    }
}
