//! Projections side by side, norms of heads and their turn by position, against Burn's own graph.

use std::slice;

use burn::tensor::{Tensor, module};
use proptest::prelude::*;
use zeropp_core::kernels::rope::inverse_frequencies;
use zeropp_core::split::ops::{self, HeadNorms, Projection, Rotation, Turns};

use crate::bound::bound;
use crate::cases::cases;
use crate::common::*;
use crate::stock_rope;

/// θ of [`stock_rope`].
const THETA: f64 = 10_000.0;

proptest! {
    #![proptest_config(cases(80))]

    #[test]
    fn projections(
        b in 1..3_usize, s in 8..30_usize, i in 2..30_usize, half in 2..8_usize,
        groups in 1..3_usize, share in 1..3_usize, bias: bool, turned: bool, seed: u64,
    ) {
        let mut rng = Random(seed);
        let (heads, d) = (groups * share, 2 * half);
        let widths = [heads * d, groups * d, groups * d];
        let names = ["q", "k", "v", "q.b", "k.b", "v.b"];
        let shapes: Vec<Vec<usize>> =
            widths.iter().map(|w| vec![i, *w]).chain(widths.iter().map(|w| vec![*w])).collect();
        let count = if bias { 6 } else { 3 };
        let shapes: Vec<_> =
            names.iter().copied().zip(shapes.iter().map(Vec::as_slice)).take(count).collect();
        let p = Params::new(&mut rng, &shapes);
        let width = widths.iter().sum();
        let (x, dy) = (rng.tensor([b, s, i]), rng.tensor([b, s, width]));
        let mut ws: Vec<Tensor<2>> = (0..3).map(|n| p.leaf::<2>(n)).collect();
        if bias {
            ws.extend((0..3).map(|n| p.leaf::<1>(3 + n).reshape([1, widths[n]])));
        }
        let want = stock(slice::from_ref(&x), &ws, &dy, |x, w| {
            let map = |n: usize| {
                let bias = w.get(3 + n).map(|b| b.clone().reshape([widths[n]]));
                let y = module::linear(x[0].clone(), w[n].clone(), bias);
                if turned && n < 2 { stock_rope(y, d) } else { y }
            };
            Tensor::cat(vec![map(0), map(1), map(2)], 2)
        });
        let rotation = Rotation::new(inverse_frequencies(d, THETA));
        let turns = Turns { rotation: &rotation, heads: heads + groups, first: 0 };
        let turns = turned.then_some(turns);
        both_paths(|| {
            let run = run(slice::from_ref(&x), &p, &dy, false, |mut x, w, cx| {
                let maps = ["q", "k", "v"].map(|name| Projection {
                    weight: w.weight(name),
                    bias: bias.then(|| w.weight(&format!("{name}.b"))),
                });
                ops::projections(x.remove(0), &maps, turns, cx)
            });
            compare(&run, &want, bound(&[i.max(width).max(b * s), 2]));
            check_memory(&run, b * s * i, b * s * (i + width));
        });
    }

    #[test]
    fn head_norm(
        b in 1..3_usize, s in 1..20_usize, half in 4..20_usize, groups in 1..3_usize,
        share in 1..3_usize, turned: bool, seed: u64,
    ) {
        let mut rng = Random(seed);
        let (heads, d) = (groups * share, 2 * half);
        let p = Params::new(&mut rng, &[("q", &[d]), ("k", &[d])]);
        let width = (heads + 2 * groups) * d;
        let (qkv, dy) = (rng.tensor([b, s, width]), rng.tensor([b, s, width]));
        let want = stock(slice::from_ref(&qkv), &[p.leaf::<1>(0), p.leaf(1)], &dy, |x, w| {
            let part = |first: usize, n: usize| x[0].clone().narrow(2, first * d, n * d);
            let normed = |x: Tensor<3>, n: usize, w: &Tensor<1>| {
                let x = x.reshape([b, s, n, d]);
                let rms = (x.clone().square().mean_dim(3) + 1e-6).sqrt();
                let y = (x / rms * w.clone().unsqueeze()).reshape([b, s, n * d]);
                if turned { stock_rope(y, d) } else { y }
            };
            let (q, k) = (part(0, heads), part(heads, groups));
            let values = part(heads + groups, groups);
            Tensor::cat(vec![normed(q, heads, &w[0]), normed(k, groups, &w[1]), values], 2)
        });
        let rotation = Rotation::new(inverse_frequencies(d, THETA));
        let turns = Turns { rotation: &rotation, heads: heads + groups, first: 0 };
        let turns = turned.then_some(turns);
        both_paths(|| {
            let run = run(slice::from_ref(&qkv), &p, &dy, false, |mut x, w, cx| {
                let (q, k) = (w.weight("q"), w.weight("k"));
                let norms = HeadNorms { heads, groups, q, k, eps: 1e-6 };
                ops::head_norm(x.remove(0), &norms, turns, cx)
            });
            compare(&run, &want, bound(&[d, d, (b * s * heads).max(d), 2]));
            check_memory(&run, b * s * (width + heads + groups), 2 * d);
        });
    }
}
