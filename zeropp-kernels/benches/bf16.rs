//! Products in bf16 by every path of this machine beside those in fp32, in interleaved rounds:
//! GFLOP/s, best and median. The machine is noisy: read the ratios.
//!
//! `cargo bench -p zeropp-kernels [-- ROUNDS]`.

use std::time::Instant;

use half::bf16;
use zeropp_kernels::bf16::convert::{narrow, widen};
use zeropp_kernels::bf16::{
    Isa, Mat, Packed, add_product, available, force, product_into, product_set, requested,
};
use zeropp_kernels::gemm::{MatMut, MatRef, StoreMode, gemm};

/// Rows, elements of a sum, columns: products of training at hidden sizes 256, 768 and 1024.
const SHAPES: [[usize; 3]; 5] =
    [[2048, 256, 1024], [2048, 1024, 256], [2048, 768, 3072], [2048, 3072, 768], [1024; 3]];

type Job<'a> = (String, Box<dyn FnMut() + 'a>);

/// Prints GFLOP/s of each job: best, median.
fn measure(flops: f64, rounds: usize, mut jobs: Vec<Job<'_>>) {
    let mut times = vec![Vec::new(); jobs.len()];
    for _ in 0..rounds {
        for ((_, job), times) in jobs.iter_mut().zip(&mut times) {
            let start = Instant::now();
            job();
            times.push(start.elapsed().as_secs_f64());
        }
    }
    for ((name, _), times) in jobs.iter().zip(&mut times) {
        times.sort_by(f64::total_cmp);
        let [best, median] = [times[0], times[rounds / 2]].map(|s| flops / s / 1e9);
        println!("  {name:<24} {best:8.0} {median:8.0}");
    }
}

fn main() {
    let rounds = std::env::args().filter_map(|arg| arg.parse().ok()).next().unwrap_or(15_usize);
    let paths: Vec<Isa> = available().iter().copied().filter(|isa| *isa != Isa::Scalar).collect();
    println!("a run would take {:?}; GFLOP/s, best and median", requested());
    for [m, k, n] in SHAPES {
        let numbers = |len: usize| (0..len).map(|i| (i % 97) as f32 / 50.0 - 1.0).collect();
        let (a, b): (Vec<f32>, Vec<f32>) = (numbers(m * k), numbers(k * n));
        let (a16, b16) = (narrow(&a), narrow(&b));
        let (a, b) = (widen(&a16), widen(&b16));
        let mut c = vec![0.0; m * n];
        println!("{m} × {k} × {n}");
        let mut jobs: Vec<Job<'_>> = vec![(
            "fp32".into(),
            Box::new(|| {
                let (a, b) = (MatRef::new(&a, m, k), MatRef::new(&b, k, n));
                gemm(MatMut::new(&mut c, m, n), StoreMode::Set, 1.0, a, b);
            }),
        )];
        for isa in &paths {
            let named = |what: &str| format!("{} {what}", isa.name());
            let pack = || {
                force(Some(*isa));
                Packed::new(Mat::new(&b16, k, n))
            };
            let left = Mat::new(&a16, m, k);
            let (packed, mut c) = (pack(), vec![0.0; m * n]);
            let product = move || product_set(&mut c, n, left, &packed);
            jobs.push((named("Y in fp32"), Box::new(product)));
            let (packed, mut c) = (pack(), vec![bf16::ZERO; m * n]);
            jobs.push((named("Y"), Box::new(move || product_into(&mut c, n, left, &packed, None))));
            jobs.push((named("packing W"), Box::new(move || drop(pack()))));
            // Xᵀ·dY of as many rows.
            let (packed, mut sums) = (pack(), vec![0.0; m * n]);
            let left = Mat::new(&a16, k, m).t();
            let product = move || add_product(&mut sums, n, left, &packed);
            jobs.push((named("dW"), Box::new(product)));
        }
        measure(2.0 * (m * k * n) as f64, rounds, jobs);
    }
    force(None);
}
