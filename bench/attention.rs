//! Causal attention on the fused projection, in processor time of one thread, least of many:
//! `cargo bench --bench attention [-- PRECISION TOKENS HEADS DIMENSION REPEATS]`.
//!
//! Prints the milliseconds of the forward and of the backward of one sample. Beside PyTorch's:
//! `bench/outside/attention.py`.

use zeropp_core::kernels::attention::{Dims, keeps_probabilities, kept, recomputed};
use zeropp_core::kernels::bf16::attention as halves;
use zeropp_core::kernels::bf16::convert::narrow;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Seconds that this thread spent on a core: other processes do not count.
fn cpu_now() -> f64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9
}

/// The least milliseconds of a forward and of a backward.
fn least<O>(
    repeats: usize,
    mut forward: impl FnMut() -> O,
    mut backward: impl FnMut(&O),
) -> [f64; 2] {
    let mut best = [f64::MAX; 2];
    for _ in 0..repeats {
        let start = cpu_now();
        let out = forward();
        let middle = cpu_now();
        backward(&out);
        let times = [middle - start, cpu_now() - middle];
        for (best, time) in best.iter_mut().zip(times) {
            *best = best.min(time * 1e3);
        }
    }
    best
}

fn values(n: usize, seed: usize) -> Vec<f32> {
    let value = |i: usize| ((i * 7 + seed).wrapping_mul(2_654_435_761) >> 7) % 1000;
    (0..n).map(|i| value(i) as f32 / 500.0 - 1.0).collect()
}

fn fp32(d: Dims, repeats: usize) -> [f64; 2] {
    let (qkv, dy) = (values(d.s * d.width(), 1), values(d.s * d.out_width(), 2));
    if keeps_probabilities(d.s) {
        let forward = || {
            let mut p = Vec::new();
            (kept::attention(&qkv, d, Some(&mut p)), p)
        };
        return least(repeats, forward, |(_, p)| {
            std::hint::black_box(kept::attention_backward(&dy, &qkv, d, Some(p)));
        });
    }
    let forward = || recomputed::attention(&qkv, d, None);
    least(repeats, forward, |(_, sums)| {
        std::hint::black_box(recomputed::attention_backward(&dy, &qkv, sums, d, None));
    })
}

fn bf16(d: Dims, repeats: usize) -> [f64; 2] {
    let (qkv, dy) = (narrow(&values(d.s * d.width(), 1)), narrow(&values(d.s * d.out_width(), 2)));
    let forward = || halves::attention(&qkv, d);
    least(repeats, forward, |(_, sums)| {
        std::hint::black_box(halves::attention_backward(&dy, &qkv, sums, d));
    })
}

fn main() {
    let given: Vec<_> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let number = |i: usize, default| given.get(i).map_or(default, |n| n.parse().expect("a number"));
    let (s, heads, d, repeats) = (number(1, 1024), number(2, 16), number(3, 64), number(4, 5));
    let dims = Dims { b: 1, s, heads, groups: heads, d, place: 0 };
    let [forward, backward] = match given.first().map_or("fp32", String::as_str) {
        "bf16" => bf16(dims, repeats),
        _ => fp32(dims, repeats),
    };
    println!("{forward:.3} {backward:.3}");
}
