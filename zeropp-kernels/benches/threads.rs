//! Every kernel with one thread and with several, in interleaved rounds, at the sizes of GPT-2 124M
//! with 256 tokens: milliseconds, best of all, and how many times as fast.
//!
//! `cargo bench -p zeropp-kernels --bench threads [-- THREADS [ROUNDS]]`.

use std::hint::black_box;
use std::time::Instant;

use zeropp_kernels::adamw::{AdamWScalars, adamw};
use zeropp_kernels::attention::{Dims, kept, recomputed};
use zeropp_kernels::bf16::convert::narrow;
use zeropp_kernels::bf16::{self, Mat, Packed};
use zeropp_kernels::gemm::{MatMut, MatRef, StoreMode, affine, gemm, product};
use zeropp_kernels::threads::Threads;
use zeropp_kernels::{activation, loss, norm, reduce};

const TOKENS: usize = 256;
const HIDDEN: usize = 768;
const VOCABULARY: usize = 50_257;

type Job<'a> = (&'static str, Box<dyn FnMut() + 'a>);

fn numbers(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i % 97) as f32 / 50.0 - 1.0).collect()
}

fn measure(threads: usize, rounds: usize, jobs: Vec<Job<'_>>) {
    let several = Threads::new(threads, true);
    println!("{:<28} {:>9} {threads:>9}", "ms with threads", 1);
    for (name, mut job) in jobs {
        let mut best = [f64::MAX; 2];
        for _ in 0..rounds {
            let time = |job: &mut dyn FnMut()| {
                let start = Instant::now();
                job();
                start.elapsed().as_secs_f64() * 1e3
            };
            best[0] = best[0].min(time(&mut *job));
            let _in_use = several.install();
            best[1] = best[1].min(time(&mut *job));
        }
        println!("{name:<28} {:9.3} {:9.3}   {:.2} ×", best[0], best[1], best[0] / best[1]);
    }
}

fn main() {
    let mut given = std::env::args().filter_map(|arg| arg.parse().ok());
    let (threads, rounds) = (given.next().unwrap_or(2), given.next().unwrap_or(30));
    products(threads, rounds);
    attention(threads, rounds);
    rows(threads, rounds);
}

fn products(threads: usize, rounds: usize) {
    let (t, h, inner) = (TOKENS, HIDDEN, 4 * HIDDEN);
    let (x, w, y) = (numbers(t * h), numbers(h * inner), numbers(t * inner));
    let (mut dw, bias, table) = (numbers(h * inner), numbers(inner), numbers(VOCABULARY * h));
    let (x_view, w_view) = (MatRef::new(&x, t, h), MatRef::new(&w, h, inner));
    let y_view = MatRef::new(&y, t, inner);
    let (x16, w16) = (narrow(&x), narrow(&w));
    let w16 = Mat::new(&w16, h, inner);
    let packed = Packed::new(w16);
    let jobs: Vec<Job<'_>> = vec![
        ("x·W + b", Box::new(|| drop(affine(x_view, w_view, &bias, 4096)))),
        ("dY·Wᵀ", Box::new(|| drop(product(1.0, y_view, w_view.t())))),
        (
            "dW += xᵀ·dY",
            Box::new(|| {
                let dw = MatMut::new(&mut dw, h, inner);
                gemm(dw, StoreMode::Add, 1.0, x_view.t(), y_view);
            }),
        ),
        (
            "logits",
            Box::new(|| {
                let table = MatRef::new(&table, VOCABULARY, h);
                drop(product(1.0, x_view, table.t()));
            }),
        ),
        ("x·W in bf16", Box::new(|| drop(bf16::product(Mat::new(&x16, t, h), &packed, None)))),
        ("packing W in bf16", Box::new(|| drop(Packed::new(w16)))),
    ];
    measure(threads, rounds, jobs);
}

fn attention(threads: usize, rounds: usize) {
    let h = HIDDEN;
    let short = Dims { b: 1, s: TOKENS, heads: 12, groups: 12, d: h / 12, place: 0 };
    let long = Dims { s: 1024, ..short };
    let (qkv, dy) = (numbers(1024 * 3 * h), numbers(1024 * h));
    let (_, sums) = recomputed::attention(&qkv, long, None);
    let (few, few_dy) = (&qkv[..TOKENS * 3 * h], &dy[..TOKENS * h]);
    let jobs: Vec<Job<'_>> = vec![
        ("attention 256", Box::new(|| drop(kept::attention(few, short, None)))),
        (
            "attention 256, backward",
            Box::new(|| drop(kept::attention_backward(few_dy, few, short, None))),
        ),
        ("attention 1024", Box::new(|| drop(recomputed::attention(&qkv, long, None)))),
        (
            "attention 1024, backward",
            Box::new(|| drop(recomputed::attention_backward(&dy, &qkv, &sums, long, None))),
        ),
    ];
    measure(threads, rounds, jobs);
}

const SCALARS: AdamWScalars = AdamWScalars {
    towards1: 0.1,
    beta2: 0.999,
    towards2: 0.001,
    eps: 1e-8,
    step_size: 3e-3,
    root_bias2: 0.03,
    keep: 0.9999,
    gradient: 0.7,
};

fn rows(threads: usize, rounds: usize) {
    let (t, h, inner) = (TOKENS, HIDDEN, 4 * HIDDEN);
    let (x, y, gamma) = (numbers(t * h), numbers(t * inner), numbers(h));
    let (mut dy_a, mut dy_b, mut db) = (y.clone(), x.clone(), vec![0.0; inner]);
    let (mut logits, mut norm_sums) = (numbers(t * VOCABULARY), vec![0.0; 2 * h]);
    let targets: Vec<usize> = (0..t).map(|i| i * 191).collect();
    let (_, means, rstds) = norm::layer_norm(&x, &gamma, &gamma, 1e-5);
    let n = 1 << 23;
    let (mut p, mut m, mut v, g) = (numbers(n), numbers(n), vec![0.5; n], numbers(n));
    let jobs: Vec<Job<'_>> = vec![
        (
            "cross-entropy",
            Box::new(|| {
                black_box(loss::cross_entropy_gradient(&mut logits, VOCABULARY, &targets, 0.1));
            }),
        ),
        ("GELU", Box::new(|| drop(activation::gelu_tanh(&y)))),
        ("GELU, backward", Box::new(|| activation::gelu_tanh_backward(&mut dy_a, &y))),
        ("layer norm", Box::new(|| drop(norm::layer_norm(&x, &gamma, &gamma, 1e-5)))),
        (
            "layer norm, backward",
            Box::new(|| {
                norm::layer_norm_backward(&mut dy_b, &x, &gamma, &means, &rstds, &mut norm_sums);
            }),
        ),
        ("bias gradient", Box::new(|| reduce::add_rows(&mut db, &y))),
        ("AdamW, 8 M", Box::new(|| adamw(&mut p, &mut m, &mut v, &g, &SCALARS))),
    ];
    measure(threads, rounds, jobs);
}
