//! The cost of packing a weight, as a share of the products that it takes part in, at the shapes of
//! three models: fp32 by the crate `gemm`, which packs within each product, and bf16.
//!
//! Of fp32 the time of a product is a line in the rows of its left factor, t(r) = packing + r·rate;
//! two points of it, the rows of a micro-batch and four times as many, give what does not grow.
//!
//! `cargo bench -p zeropp-kernels --bench packing [-- ROUNDS]`.

use std::time::Instant;

use zeropp_kernels::bf16::convert::narrow;
use zeropp_kernels::bf16::{Mat, Packed, product as product16};
use zeropp_kernels::gemm::{MatRef, product};

/// Model, rows of a micro-batch, and the weights of a block, `[in, out]` each.
const MODELS: [(&str, usize, [[usize; 2]; 4]); 3] = [
    ("hidden 256, 2 × 128 tokens", 256, [[256, 768], [256, 256], [256, 1024], [1024, 256]]),
    ("hidden 768, 256 tokens", 256, [[768, 2304], [768, 768], [768, 3072], [3072, 768]]),
    ("hidden 1024, 1024 tokens", 1024, [[1024, 3072], [1024, 1024], [1024, 4096], [4096, 1024]]),
];

fn numbers(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i % 97) as f32 / 50.0 - 1.0).collect()
}

/// The least milliseconds of each job, in interleaved rounds.
fn least<const N: usize>(rounds: usize, mut jobs: [&mut dyn FnMut(); N]) -> [f64; N] {
    let mut best = [f64::MAX; N];
    for _ in 0..rounds {
        for (job, best) in jobs.iter_mut().zip(&mut best) {
            let start = Instant::now();
            job();
            *best = best.min(start.elapsed().as_secs_f64() * 1e3);
        }
    }
    best
}

fn main() {
    let rounds = std::env::args().filter_map(|arg| arg.parse().ok()).next().unwrap_or(20);
    for (model, rows, weights) in MODELS {
        println!("{model}: ms of packing / of the product");
        let mut sums = [[0.0; 2]; 4];
        for [k, n] in weights {
            let (x, dy, w) = (numbers(4 * rows * k), numbers(4 * rows * n), numbers(k * n));
            let (x16, dy16, w16) = (narrow(&x), narrow(&dy), narrow(&w));
            let w_view = MatRef::new(&w, k, n);
            let y = |rows: usize| drop(product(1.0, MatRef::new(&x[..rows * k], rows, k), w_view));
            let dx = |rows: usize| {
                drop(product(1.0, MatRef::new(&dy[..rows * n], rows, n), w_view.t()));
            };
            let w16 = Mat::new(&w16, k, n);
            let (packed, turned) = (Packed::new(w16), Packed::new(w16.t()));
            let (x16, dy16) =
                (Mat::new(&x16[..rows * k], rows, k), Mat::new(&dy16[..rows * n], rows, n));
            let t = least(
                rounds,
                [
                    &mut || y(rows),
                    &mut || y(4 * rows),
                    &mut || dx(rows),
                    &mut || dx(4 * rows),
                    &mut || drop(Packed::new(w16)),
                    &mut || drop(product16(x16, &packed, None)),
                    &mut || drop(Packed::new(w16.t())),
                    &mut || drop(product16(dy16, &turned, None)),
                ],
            );
            let fixed = |one: f64, four: f64| (one - (four - one) / 3.0).max(0.0);
            let pairs = [
                [fixed(t[0], t[1]), t[0]],
                [fixed(t[2], t[3]), t[2]],
                [t[4], t[4] + t[5]],
                [t[6], t[6] + t[7]],
            ];
            print!("  {k:4} × {n:4} ");
            for ([packing, whole], sum) in pairs.iter().zip(&mut sums) {
                print!("  {packing:6.2} / {whole:6.2}");
                (sum[0], sum[1]) = (sum[0] + packing, sum[1] + whole);
            }
            println!();
        }
        let shares = sums.map(|[packing, whole]| format!("{:.1} %", 100.0 * packing / whole));
        println!("  share of Y, dX in fp32 and of Y, dX in bf16: {}", shares.join(", "));
    }
}
