//! Times of the kernels, the least of many: `cargo bench -p zeropp-kernels [-- FILTER]`.

use std::time::Instant;

use zeropp_kernels::Number;
use zeropp_kernels::activation::{gelu_tanh, gelu_tanh_backward};
use zeropp_kernels::adamw::{AdamWScalars, adamw};
use zeropp_kernels::bf16::convert::narrow;

/// The least of the seconds that `f` takes within `for_s` seconds.
fn least(for_s: f64, mut f: impl FnMut()) -> f64 {
    let (start, mut best) = (Instant::now(), f64::MAX);
    while start.elapsed().as_secs_f64() < for_s {
        let t = Instant::now();
        f();
        best = best.min(t.elapsed().as_secs_f64());
    }
    best
}

/// Nanoseconds an element; the four arrays `stagger` elements apart in their pages.
fn optimizer(n: usize, stagger: usize) {
    let s = AdamWScalars {
        towards1: 0.1,
        beta2: 0.999,
        towards2: 0.001,
        eps: 1e-8,
        step_size: 3e-3,
        root_bias2: 0.03,
        keep: 0.9999,
        gradient: 0.7,
    };
    // Each starts on a page, less `stagger` elements a time.
    let room = (n + 3 * stagger).next_multiple_of(1024);
    let mut all = vec![0.5_f32; 4 * room + 1024];
    let skip = (4096 - (all.as_ptr() as usize) % 4096) / 4;
    let (p, rest) = all[skip..].split_at_mut(room);
    let (m, rest) = rest.split_at_mut(room);
    let (v, g) = rest.split_at_mut(room);
    let (p, m) = (&mut p[..n], &mut m[stagger..][..n]);
    let (v, g) = (&mut v[2 * stagger..][..n], &mut g[3 * stagger..][..n]);
    let t = least(1.0, || adamw(p, m, v, g, &s));
    println!("adamw {n} stagger {stagger}: {:.2} ns an element", t * 1e9 / n as f64);
}

/// Nanoseconds an element, forwards and backwards: where as much time is spent on numbers in the
/// first-level cache as on those of a micro-batch, a product's tile could save none by it.
fn activation<E: Number>(what: &str, x: &[E]) {
    let mut dy = x.to_vec();
    let forward = least(0.5, || drop(std::hint::black_box(gelu_tanh(x))));
    let backward = least(0.5, || gelu_tanh_backward(std::hint::black_box(&mut dy), x));
    let each = [forward, backward].map(|t| t * 1e9 / x.len() as f64);
    println!("gelu {what} {}: {:.3} and {:.3} ns an element", x.len(), each[0], each[1]);
}

fn main() {
    let filter = std::env::args().skip(1).find(|a| !a.starts_with('-')).unwrap_or_default();
    if "adamw".contains(&filter) {
        for n in [4096, 1 << 22] {
            for stagger in [0, 1088] {
                optimizer(n, stagger);
            }
        }
    }
    if "gelu".contains(&filter) {
        for n in [2048, 1 << 18, 1 << 20] {
            let x: Vec<f32> = (0..n).map(|i| (i % 97) as f32 / 16.0 - 3.0).collect();
            activation("fp32", &x);
            activation("bf16", &narrow(&x));
        }
    }
}
