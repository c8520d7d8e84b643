//! No kernel shows in its bits how many threads it had: against one thread, for odd sizes.

use half::bf16 as Half;
use proptest::prelude::*;

use super::Threads;
use crate::attention::{Dims, Dropped, kept, recomputed};
use crate::bf16::convert::{narrow, widen};
use crate::bf16::{self, Mat, Packed, rows};
use crate::dropout::{self, DropoutRule};
use crate::gemm::{MatMut, MatRef, StoreMode, affine, gemm, product};
use crate::head_norm::{HeadRow, head_norm, head_norm_backward};
use crate::rope::{ByPosition, Turned, angles, inverse_frequencies, rope};
use crate::{activation, adamw, lion, loss, muon, norm, reduce, sgd};

fn numbers(n: usize, seed: u32) -> Vec<f32> {
    let hash = |i: usize| (i as u32 ^ seed.wrapping_mul(77)).wrapping_mul(2_654_435_761);
    (0..n).map(|i| hash(i).rotate_left(13) as f32 / u32::MAX as f32 * 2.0 - 1.0).collect()
}

fn halves(n: usize, seed: u32) -> Vec<Half> {
    narrow(&numbers(n, seed))
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// The bits of what `f` gives are the same for 1, 2, 3 and 5 threads.
fn same(what: &str, f: impl Fn() -> Vec<Vec<f32>>) {
    let all = |results: Vec<Vec<f32>>| results.iter().map(|x| bits(x)).collect::<Vec<_>>();
    let want = all(f());
    for count in [2, 3, 5] {
        let threads = Threads::new(count, false);
        let _in_use = threads.install();
        assert!(all(f()) == want, "{what}: other bits with {count} threads");
    }
}

fn products(m: usize, k: usize, n: usize, pad: usize) {
    let (a, b) = (numbers(m * (k + pad), 1), numbers(k * (n + pad), 2));
    let (a_turned, b_turned) = (numbers(k * (m + pad), 3), numbers(n * (k + pad), 4));
    let views_of_a =
        [MatRef::strided(&a, m, k, k + pad), MatRef::strided(&a_turned, k, m, m + pad).t()];
    let views_of_b =
        [MatRef::strided(&b, k, n, n + pad), MatRef::strided(&b_turned, n, k, k + pad).t()];
    let old = numbers(m * (n + pad), 5);
    for (i, a) in views_of_a.into_iter().enumerate() {
        for (j, b) in views_of_b.into_iter().enumerate() {
            same(&format!("{m} × {k} × {n}, views {i} and {j}"), || {
                let mut c = old.clone();
                let to = MatMut::strided(&mut c, m, n, n + pad);
                gemm(to, StoreMode::Add, 0.5, a, b);
                vec![c, product(1.0, a, b), affine(a, b, &old[..n], 100)]
            });
        }
    }
}

/// Sizes around those at which the crate of products changes its way.
#[test]
fn products_of_all_sizes() {
    let sizes = [
        (256, 768, 97),
        (16, 513, 481),
        (97, 768, 256),
        (64, 1000, 1024),
        (1024, 513, 64),
        (65, 2000, 193),
        (200, 1, 5000),
        (5000, 2, 200),
        (16, 300, 2001),
        (15, 300, 2001),
        (1, 3000, 3000),
        (193, 64, 1024),
        (2000, 700, 17),
        (3, 5, 7),
        (255, 257, 4096),
        (48, 2048, 5000),
        (5120, 1024, 40),
    ];
    sizes.into_iter().for_each(|(m, k, n)| products(m, k, n, 0));
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 8,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_products(m in 1..600_usize, k in 1..600_usize, n in 1..600_usize, pad in 0..3_usize) {
        products(m, k, n, pad);
    }

    #[test]
    fn any_products_of_bf16(
        m in 1..300_usize, k in 1..300_usize, n in 1..300_usize, pad in 0..3_usize,
    ) {
        let (a, b) = (halves(m * (k + pad), 1), halves(k * (n + pad), 2));
        let (a_turned, bias) = (halves(k * (m + pad), 3), halves(n, 4));
        let b = Mat::strided(&b, k, n, n + pad);
        let views = [Mat::strided(&a, m, k, k + pad), Mat::strided(&a_turned, k, m, m + pad).t()];
        for isa in bf16::available() {
            bf16::force(Some(*isa));
            for a in views {
                same(&format!("{m} × {k} × {n} in bf16 by {isa:?}"), || {
                    let packed = Packed::new(b);
                    let mut c = numbers(m * (n + pad), 5);
                    bf16::add_product(&mut c, n + pad, a, &packed);
                    let mut set = c.clone();
                    bf16::product_set(&mut set, n + pad, a, &packed);
                    let rounded = widen(&bf16::product(a, &packed, Some(&bias)));
                    vec![c, set, rounded]
                });
            }
            bf16::force(None);
        }
    }

    #[test]
    fn any_attention(
        b in 1..3_usize, s in 1..200_usize, groups in 1..4_usize, share in 1..3_usize,
        d in 1..40_usize,
    ) {
        let dims = Dims { b, s, heads: groups * share, groups, d, place: 0 };
        let qkv = numbers(b * s * dims.width(), 1);
        let dy = numbers(b * s * dims.out_width(), 2);
        let (half_qkv, half_dy) = (narrow(&qkv), narrow(&dy));
        same(&format!("attention, {dims:?}"), || {
            let mut p = Vec::new();
            let out = kept::attention(&qkv, dims, Some(&mut p));
            let gradient = kept::attention_backward(&dy, &qkv, dims, Some(&p));
            let (again, sums) = recomputed::attention(&qkv, dims, None);
            let gradient_again = recomputed::attention_backward(&dy, &qkv, &sums, dims, None);
            let (half, half_sums) = bf16::attention::attention(&half_qkv, dims);
            let half_gradient =
                bf16::attention::attention_backward(&half_dy, &half_qkv, &half_sums, dims);
            let (half, half_gradient) = (widen(&half), widen(&half_gradient));
            vec![out, p, gradient, again, sums, gradient_again, half, half_sums, half_gradient]
        });
        let dropout = DropoutRule::new([s as u32, 1], 3, 0.2);
        let dropped = Some(Dropped { dropout, sample: 1, token: d });
        same(&format!("dropout, {dims:?}"), || {
            let (out, sums) = recomputed::attention(&qkv, dims, dropped);
            let gradient = recomputed::attention_backward(&dy, &qkv, &sums, dims, dropped);
            let (mut x, mut half) = (dy.clone(), half_dy.clone());
            let samples = dropout::SampleRows { first: 1, token: 0, rows: s };
            dropout::apply(&mut x, dims.out_width(), samples, dropout);
            rows::drop_some(&mut half, dims.out_width(), samples, dropout);
            vec![out, gradient, x, widen(&half)]
        });
    }

    #[test]
    fn any_rows(n in 1..700_usize, h in 1..200_usize) {
        let (x, dy, gamma) = (numbers(n * h, 1), numbers(n * h, 2), numbers(h, 3));
        same(&format!("norms of {n} rows of {h}"), || {
            let (y, means, rstds) = norm::layer_norm(&x, &gamma, &gamma, 1e-5);
            let mut dx = dy.clone();
            let [mut of_layer, mut of_rms] = [2 * h, h].map(|n| vec![0.0; n]);
            norm::layer_norm_backward(&mut dx, &x, &gamma, &means, &rstds, &mut of_layer);
            let (z, rrms) = norm::rms_norm(&x, &gamma, 1e-5);
            let mut dz = dy.clone();
            norm::rms_norm_backward(&mut dz, &x, &gamma, &rrms, &mut of_rms);
            let mut sums = gamma.clone();
            reduce::add_rows(&mut sums, &x);
            vec![y, means, rstds, dx, of_layer, z, rrms, dz, of_rms, sums]
        });
        let targets: Vec<usize> = (0..n).map(|i| i * 7 % h).collect();
        same(&format!("loss of {n} rows of {h}"), || {
            let mut slope = x.clone();
            let loss = loss::cross_entropy_gradient(&mut slope, h, &targets, 0.3);
            let bits = (loss.to_bits(), loss::cross_entropy(&x, h, &targets).to_bits());
            assert_eq!(bits.0, bits.1);
            let parts = [bits.0 as u32, (bits.0 >> 32) as u32].map(f32::from_bits);
            vec![slope, parts.to_vec()]
        });
        let (x, dy) = (narrow(&x), narrow(&dy));
        same(&format!("norms of {n} rows of {h} in bf16"), || {
            let normed = rows::layer_norm(&x, &gamma, &gamma, 1e-5);
            let (means, rstds) = (&normed.means, &normed.inverses);
            let mut dx = dy.clone();
            let [mut of_layer, mut of_rms] = [2 * h, h].map(|n| vec![0.0; n]);
            rows::layer_norm_backward(&mut dx, &x, &gamma, means, rstds, &mut of_layer);
            let scaled = rows::rms_norm(&x, &gamma, 1e-5);
            let mut dz = dy.clone();
            rows::rms_norm_backward(&mut dz, &x, &gamma, &scaled.inverses, &mut of_rms);
            let mut sums = gamma.clone();
            rows::add_rows(&mut sums, &x);
            let wide = [widen(&normed.out), widen(&dx), widen(&scaled.out), widen(&dz)];
            wide.into_iter().chain([of_layer, of_rms, sums]).collect()
        });
    }

    #[test]
    fn any_heads(
        n in 1..300_usize, heads in 1..5_usize, groups in 1..4_usize, pairs in 1..20_usize,
    ) {
        let (d, at) = (2 * pairs, HeadRow { heads, groups });
        let width = (heads + 2 * groups) * d;
        let (x, dy) = (numbers(2 * n * width, 1), numbers(2 * n * width, 2));
        let (q, k) = (numbers(d, 3), numbers(d, 4));
        let (cos, sin) = angles(n, &inverse_frequencies(d, 1e4));
        same(&format!("{} rows of {heads} and {groups} heads of {d}", 2 * n), || {
            let (mut y, rrms) = head_norm(&x, at, &q, &k, 1e-5);
            let mut dx = dy.clone();
            let mut sums = vec![0.0; 2 * d];
            head_norm_backward(&mut dx, &x, at, &q, &k, &rrms, &mut sums);
            let by = ByPosition { cos: &cos, sin: &sin, positions: None };
            rope(&mut y, Turned { width, heads: heads + groups, d }, by, false);
            vec![y, rrms, dx, sums]
        });
    }

    #[test]
    fn any_matrix(rows in 1..90_usize, cols in 1..300_usize) {
        let x = numbers(rows * cols, 1);
        same(&format!("{rows} x {cols} made orthogonal"), || {
            vec![muon::orthogonal(&x, [rows, cols])]
        });
    }

    #[test]
    fn any_elements(n in 1..200_000_usize) {
        let (x, dy, z) = (numbers(n, 1), numbers(n, 2), numbers(n, 3));
        same(&format!("{n} elements"), || {
            let mut slopes = [dy.clone(), dy.clone(), dy.clone(), dy.clone()];
            activation::gelu_backward(&mut slopes[0], &x);
            activation::gelu_tanh_backward(&mut slopes[1], &x);
            activation::silu_backward(&mut slopes[2], &x);
            let dgate = activation::swiglu_backward(&mut slopes[3], &x, &z);
            let made = [activation::gelu(&x), activation::silu(&x), activation::swiglu(&x, &z)];
            let mut sum = x.clone();
            crate::add(&mut sum, &dy);
            crate::add(&mut sum, &z);
            let mut state = [x.clone(), dy.clone(), z.iter().map(|z| z * z).collect()];
            let [p, m, v] = &mut state;
            adamw::adamw(p, m, v, &z, &adamw::EARLY);
            let mut others = std::array::from_fn::<_, 8, _>(|_| x.clone());
            let [p, m, q, r, n1, out, n2, mean] = &mut others;
            sgd::sgd_with_momentum(p, m, &z, &sgd::SOME);
            sgd::sgd(q, &z, &sgd::SOME);
            lion::lion(r, n1, &z, &lion::SOME);
            muon::direction(out, n2, &z, 0.7, 0.95, true);
            muon::apply(n2, &z, 0.99, 0.1);
            crate::lerp(mean, &z, 0.1);
            let rest = [dgate, sum, crate::zeros(n)];
            let made = slopes.into_iter().chain(made).chain(state);
            made.chain(others).chain(rest).collect()
        });
        let (x, dy, z) = (narrow(&x), narrow(&dy), narrow(&z));
        same(&format!("{n} elements in bf16"), || {
            let mut slope = dy.clone();
            activation::gelu_backward(&mut slope, &x);
            let mut dup = dy.clone();
            let dgate = activation::swiglu_backward(&mut dup, &x, &z);
            let made =
                [activation::gelu(&x), activation::swiglu(&x, &z), slope, dup, dgate];
            made.iter().map(|x| widen(x)).collect()
        });
    }
}
