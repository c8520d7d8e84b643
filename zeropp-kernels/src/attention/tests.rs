use super::{Dims, Dropped, kept, recomputed, windowed};
use crate::dropout::DropoutRule;

fn values(n: usize, seed: u32) -> Vec<f32> {
    let hash = |i: usize| (i as u32 ^ seed).wrapping_mul(2_654_435_761).rotate_left(13);
    (0..n).map(|i| hash(i).wrapping_mul(2_246_822_519) as f32 / u32::MAX as f32 - 0.5).collect()
}

/// Output and gradient by the definition, in double precision; probabilities are multiplied by
/// those of `factors`, if there are any.
fn definition(
    qkv: &[f32],
    dy: &[f32],
    d: Dims,
    window: usize,
    factors: Option<&[f32]>,
) -> (Vec<f64>, Vec<f64>) {
    let (width, out_width, share) = (d.width(), d.out_width(), d.heads / d.groups);
    let mut out = vec![0.0; dy.len()];
    let mut dqkv = vec![0.0; qkv.len()];
    for (b, head) in (0..d.b).flat_map(|b| (0..d.heads).map(move |h| (b, h))) {
        let (q, k, v) = (d.query(head), d.key(head / share), d.value(head / share));
        let at = |row: usize, column: usize| (b * d.s + row) * width + column;
        let x = |row, column| f64::from(qkv[at(row, column)]);
        let scale = 1.0 / (d.d as f64).sqrt();
        for i in 0..d.s {
            let dot = |j| (0..d.d).map(|c| x(i, q + c) * x(j, k + c)).sum::<f64>() * scale;
            let first = (i + 1).saturating_sub(window);
            let exp = |j: usize| if j < first { 0.0 } else { dot(j).exp() };
            let e: Vec<f64> = (0..=i).map(exp).collect();
            let sum: f64 = e.iter().sum();
            let p: Vec<f64> = e.iter().map(|e| e / sum).collect();
            let row = (b * d.s + i) * out_width + head * d.d;
            let dy = |c: usize| f64::from(dy[row + c]);
            let row_of_factors = ((b * d.heads + head) * d.s + i) * d.s;
            let m = |j: usize| factors.map_or(1.0, |m| f64::from(m[row_of_factors + j]));
            let dropped = |j: usize| (0..d.d).map(|c| dy(c) * x(j, v + c)).sum::<f64>();
            let dp: Vec<f64> = (0..=i).map(|j| dropped(j) * m(j)).collect();
            let mean: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
            for j in 0..=i {
                let ds = (dp[j] - mean) * p[j] * scale;
                for c in 0..d.d {
                    out[row + c] += p[j] * m(j) * x(j, v + c);
                    dqkv[at(j, v + c)] += p[j] * m(j) * dy(c);
                    dqkv[at(i, q + c)] += ds * x(j, k + c);
                    dqkv[at(j, k + c)] += ds * x(i, q + c);
                }
            }
        }
    }
    (out, dqkv)
}

#[test]
fn agrees_with_the_definition() {
    let sizes = [
        (1, 1, 1, 1, 1),
        (2, 3, 2, 1, 5),
        (1, 40, 4, 2, 32),
        (1, 131, 2, 2, 64),
        (2, 257, 3, 1, 33),
        (1, 300, 1, 1, 300),
        (1, 530, 1, 1, 16),
    ];
    for (b, s, heads, groups, d) in sizes {
        let dims = Dims { b, s, heads, groups, d, place: 0 };
        let qkv: Vec<f32> = values(b * s * dims.width(), 1).iter().map(|x| x * 4.0).collect();
        let dy = values(b * s * dims.out_width(), 2);
        let (want, want_gradient) = definition(&qkv, &dy, dims, s, None);
        let mut p = Vec::new();
        let out = kept::attention(&qkv, dims, Some(&mut p));
        let gradient = kept::attention_backward(&dy, &qkv, dims, Some(&p));
        assert_eq!(gradient, kept::attention_backward(&dy, &qkv, dims, None));
        let (out_again, sums) = recomputed::attention(&qkv, dims, None);
        let gradient_again = recomputed::attention_backward(&dy, &qkv, &sums, dims, None);
        for (name, got, want) in [
            ("out", out, &want),
            ("gradient", gradient, &want_gradient),
            ("out with sums", out_again, &want),
            ("gradient with sums", gradient_again, &want_gradient),
        ] {
            let scale = want.iter().fold(0.0_f64, |a, x| a.max(x.abs()));
            for (i, (got, want)) in got.iter().zip(want).enumerate() {
                let error = (f64::from(*got) - want).abs();
                assert!(error < 1e-5 * scale, "{dims:?} {name}[{i}]: {got} and not {want}");
            }
        }
    }
}

#[test]
fn a_window_agrees_with_the_definition() {
    let sizes =
        [(2, 3, 2, 1, 5, 1), (1, 131, 4, 2, 33, 7), (2, 257, 3, 1, 16, 64), (1, 530, 1, 1, 8, 529)];
    for (b, s, heads, groups, d, window) in sizes {
        let dims = Dims { b, s, heads, groups, d, place: 0 };
        let qkv: Vec<f32> = values(b * s * dims.width(), 1).iter().map(|x| x * 4.0).collect();
        let dy = values(b * s * dims.out_width(), 2);
        let (want, want_gradient) = definition(&qkv, &dy, dims, window, None);
        let (out, sums) = windowed::attention(&qkv, dims, window, None);
        let gradient = windowed::attention_backward(&dy, &qkv, &sums, dims, window, None);
        for (got, want) in [(out, want), (gradient, want_gradient)] {
            let scale = want.iter().fold(0.0_f64, |a, x| a.max(x.abs()));
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                let error = (f64::from(*got) - want).abs();
                assert!(error < 1e-5 * scale, "{dims:?} {window} [{i}]: {got} and not {want}");
            }
        }
    }
}

/// With dropped probabilities: of long and of windowed samples, and of documents, which begin
/// anywhere in a sample.
#[test]
fn dropped_probabilities_agree_with_the_definition() {
    let sizes = [
        (2, 3, 2, 1, 5, 1),
        (1, 131, 4, 2, 33, 131),
        (2, 257, 3, 1, 16, 64),
        (1, 530, 1, 1, 8, 530),
        (1, 530, 2, 1, 8, 300),
    ];
    for (b, s, heads, groups, d, window) in sizes {
        for token in [0, 37] {
            let dims = Dims { b, s, heads, groups, d, place: 0 };
            let qkv: Vec<f32> = values(b * s * dims.width(), 1).iter().map(|x| x * 4.0).collect();
            let dy = values(b * s * dims.out_width(), 2);
            let dropout = DropoutRule::new([token as u32, 1], 3, 0.3);
            let dropped = Dropped { dropout, sample: 5, token };
            let factors = dropped.factors(dims, 0..s, s);
            let want = definition(&qkv, &dy, dims, window, Some(&factors));
            let dropped = Some(dropped);
            let (out, sums, gradient) = if window == s {
                let (out, sums) = recomputed::attention(&qkv, dims, dropped);
                let gradient = recomputed::attention_backward(&dy, &qkv, &sums, dims, dropped);
                (out, sums, gradient)
            } else {
                let (out, sums) = windowed::attention(&qkv, dims, window, dropped);
                let gradient =
                    windowed::attention_backward(&dy, &qkv, &sums, dims, window, dropped);
                (out, sums, gradient)
            };
            assert!(sums.iter().all(|sum| sum.is_finite()));
            for (got, want) in [(out, want.0), (gradient, want.1)] {
                let scale = want.iter().fold(0.0_f64, |a, x| a.max(x.abs()));
                for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                    let error = (f64::from(*got) - want).abs();
                    assert!(error < 1e-5 * scale, "{dims:?} {window} [{i}]: {got}, not {want}");
                }
            }
        }
    }
}

/// A document has the factors of its place in the sample, and a block those of its queries.
#[test]
fn factors_are_those_of_a_place_in_the_sample() {
    let dropout = DropoutRule::new([1, 2], 3, 0.4);
    let whole = Dims { b: 2, s: 90, heads: 3, groups: 1, d: 1, place: 0 };
    let all = Dropped { dropout, sample: 4, token: 0 }.factors(whole, 0..90, 90);
    let one = Dims { b: 1, s: 50, ..whole };
    let part = Dropped { dropout, sample: 5, token: 17 }.factors(one, 3..40, 40);
    for (head, query, key) in
        (0..3).flat_map(|h| (3..40).flat_map(move |q| (0..40).map(move |k| (h, q, k))))
    {
        let in_part = (head * 37 + query - 3) * 40 + key;
        let in_all = ((3 + head) * 90 + 17 + query) * 90 + 17 + key;
        assert_eq!(part[in_part], all[in_all], "{head} {query} {key}");
    }
}

/// The output of a sample does not depend on others beside it, nor that of a query on those after
/// it.
#[test]
fn samples_and_later_tokens_change_no_bit() {
    let d = Dims { b: 2, s: 150, heads: 2, groups: 1, d: 24, place: 0 };
    let qkv = values(d.b * d.s * d.width(), 1);
    let (out, sums) = recomputed::attention(&qkv, d, None);
    let (one, short) = (Dims { b: 1, ..d }, Dims { b: 1, s: 70, ..d });
    let half = d.s * d.width();
    assert_eq!(recomputed::attention(&qkv[half..], one, None).0, out[d.s * d.out_width()..]);
    assert_eq!(
        recomputed::attention(&qkv[..short.s * d.width()], short, None).0,
        out[..short.s * d.out_width()]
    );
    assert_eq!(sums.len(), d.b * d.heads * d.s);
}

/// A query with large scores has a large logarithm, whose rounding would make all of its
/// probabilities too large or too small; they are as exact as where all are kept.
#[test]
fn probabilities_that_are_computed_again_are_as_exact_as_kept_ones() {
    let d = Dims { b: 1, s: 300, heads: 1, groups: 1, d: 32, place: 0 };
    let mut qkv: Vec<f32> = values(d.s * d.width(), 1).iter().map(|x| x * 4.0).collect();
    // The same for all keys of a query, which it makes about 90 larger.
    for row in qkv.chunks_exact_mut(d.width()) {
        (row[0], row[d.d]) = (row[0].abs() + 20.0, 25.0);
    }
    let dy = values(d.s * d.out_width(), 2);
    let (_, want) = definition(&qkv, &dy, d, d.s, None);
    let error = |gradient: &[f32]| -> f64 {
        let apart = gradient.iter().zip(&want).map(|(a, b)| (f64::from(*a) - b).powi(2));
        apart.sum::<f64>().sqrt()
    };
    let of_kept = error(&kept::attention_backward(&dy, &qkv, d, None));
    let (_, sums) = recomputed::attention(&qkv, d, None);
    let of_recomputed = error(&recomputed::attention_backward(&dy, &qkv, &sums, d, None));
    let (_, sums) = windowed::attention(&qkv, d, d.s, None);
    let of_windowed = error(&windowed::attention_backward(&dy, &qkv, &sums, d, d.s, None));
    let most = 1.05 * of_kept;
    assert!(
        of_recomputed < most && of_windowed < most,
        "kept {of_kept}, recomputed {of_recomputed}, windowed {of_windowed}"
    );
}

/// The errors of PyTorch's eager attention are those that
/// `zeropp-kernels/tests/fixtures/attention_errors.py` prints for the same inputs: the output's and
/// the gradient's, over the norm of the right one.
#[test]
fn gradients_of_long_samples_are_as_exact_as_pytorch_s() {
    // Tokens, window, what makes scores large, and PyTorch's two errors.
    let cases = [
        (64, 64, 0.0, [1.89e-7, 2.71e-7]),
        (64, 48, 20.0, [8.69e-6, 1.19e-5]),
        (512, 512, 0.0, [2.16e-7, 3.35e-7]),
        (512, 512, 20.0, [6.04e-6, 1.04e-5]),
        (512, 48, 0.0, [2.12e-7, 2.78e-7]),
        (512, 48, 20.0, [8.55e-6, 1.22e-5]),
        (600, 600, 0.0, [2.14e-7, 3.38e-7]),
        (600, 600, 20.0, [5.76e-6, 1.01e-5]),
        (600, 48, 0.0, [2.10e-7, 2.77e-7]),
        (600, 48, 20.0, [8.45e-6, 1.21e-5]),
    ];
    for (s, window, tilt, torch) in cases {
        let d = Dims { b: 1, s, heads: 2, groups: 2, d: 32, place: 0 };
        let mut qkv: Vec<f32> = values(s * d.width(), 1).iter().map(|x| x * 4.0).collect();
        // As in the test before: large scores, by the same for all keys of a query.
        for row in qkv.chunks_exact_mut(d.width()).filter(|_| tilt > 0.0) {
            for head in 0..d.heads {
                row[d.query(head)] = row[d.query(head)].abs() + tilt;
                row[d.key(head)] = 25.0;
            }
        }
        let dy = values(s * d.out_width(), 2);
        let (right, right_gradient) = definition(&qkv, &dy, d, window, None);
        let error = |got: &[f32], right: &[f64]| {
            let apart = got.iter().zip(right).map(|(a, b)| (f64::from(*a) - b).powi(2));
            (apart.sum::<f64>() / right.iter().map(|x| x * x).sum::<f64>()).sqrt()
        };
        let mut ways = Vec::new();
        let (out, sums) = windowed::attention(&qkv, d, window, None);
        let gradient = windowed::attention_backward(&dy, &qkv, &sums, d, window, None);
        ways.push(("windowed", out, gradient));
        if window == s {
            let (out, sums) = recomputed::attention(&qkv, d, None);
            let gradient = recomputed::attention_backward(&dy, &qkv, &sums, d, None);
            ways.push(("recomputed", out, gradient));
            let out = kept::attention(&qkv, d, None);
            ways.push(("kept", out, kept::attention_backward(&dy, &qkv, d, None)));
        }
        for (way, out, gradient) in ways {
            let errors = [error(&out, &right), error(&gradient, &right_gradient)];
            for ((error, torch), most) in errors.into_iter().zip(torch).zip([1.5, 1.1]) {
                let times = error / torch;
                assert!(times < most, "{way}, {s} tokens, {window}, {tilt}: {times} times");
            }
        }
    }
}
