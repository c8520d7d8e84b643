//! Dropout against a plain product with a mask that is drawn here, by the definition in
//! `Dropout`'s documentation; and what such masks are like.

use std::slice;
use std::sync::Arc;

use burn::tensor::{DType, Int, Tensor, TensorData, activation};
use proptest::prelude::*;
use zeropp_core::cpu_tensor;
use zeropp_core::meter::Meter;
use zeropp_core::rng::Rng;
use zeropp_core::split::{Documents, Dropout, DropoutPlace, Masks, OpCx, ops};

use crate::bound::bound;
use crate::cases::cases;
use crate::common::*;

const PLACE: DropoutPlace<'_> = ["h.3", "mlp"];

/// The factor of one element, by the definition.
fn factor(d: &Dropout, place: DropoutPlace<'_>, sample: usize, row: usize, column: usize) -> f64 {
    let rng = Rng::keyed(d.seed, &format!("dropout.{}.{}", place[0], place[1]));
    let (g, w, l) = (column / 64, column % 64 / 16, column % 16);
    let low = (16 * g + l) as u64 | (row as u64) << 32;
    let word = rng.block(low, (d.sample + sample) as u64 | d.step << 32)[w];
    if f64::from(word) < d.p * 2_f64.powi(32) { 0.0 } else { 1.0 / (1.0 - d.p) }
}

/// The same for all elements of a shape whose first axis are samples, each by its row and column.
fn factors<const D: usize>(
    d: &Dropout,
    dims: [usize; D],
    of: impl Fn([usize; D]) -> (usize, usize),
) -> Tensor<D> {
    let place = |i: usize| {
        let mut at = [0; D];
        let mut rest = i;
        for axis in (0..D).rev() {
            at[axis] = rest % dims[axis];
            rest /= dims[axis];
        }
        at
    };
    let value = |i: usize| {
        let (row, column) = of(place(i));
        factor(d, PLACE, place(i)[0], row, column)
    };
    let values: Vec<f64> = (0..dims.iter().product()).map(value).collect();
    let on = (&burn::tensor::Device::flex(), DType::F64);
    Tensor::from_data(TensorData::new(values, dims), on)
}

fn with(cx: &OpCx, dropout: Dropout, documents: Option<&Arc<Documents>>) -> OpCx {
    let masks = Masks { dropout: Some(dropout), documents: documents.cloned(), scored: None };
    OpCx { masks, ..cx.clone() }
}

/// Attention of `[heads, groups]` in which a query sees the keys of its document within a window,
/// by stock operations; probabilities are multiplied by `factors: [b, heads, s, s]`.
fn stock_attention(
    qkv: Tensor<3>,
    [heads, groups]: [usize; 2],
    window: usize,
    documents: &Documents,
    factors: Tensor<4>,
) -> Tensor<3> {
    let [b, s, width] = qkv.dims();
    let d = width / (heads + 2 * groups);
    let all = qkv.reshape([b, s, width / d, d]).swap_dims(1, 2);
    let shared = |first: usize| {
        let of = |head: usize| all.clone().narrow(1, first + head / (heads / groups), 1);
        Tensor::cat((0..heads).map(of).collect(), 1)
    };
    let (q, k, v) = (all.clone().narrow(1, 0, heads), shared(heads), shared(heads + groups));
    let scores = q.matmul(k.swap_dims(2, 3)) / (d as f64).sqrt();
    let hidden: Vec<i32> = (0..b * s * s)
        .map(|i| {
            let (row, key) = (i / s, i % s);
            let (query, first) = (row % s, (row % s).saturating_sub(documents.positions()[row]));
            i32::from(key > query || key < first || key + window <= query)
        })
        .collect();
    let hidden = TensorData::new(hidden, [b, 1, s, s]);
    let hidden = Tensor::<4, Int>::from_data(hidden, &scores.device()).bool();
    let p = activation::softmax(scores.mask_fill(hidden.expand([b, heads, s, s]), -1e9), 3);
    (p * factors.autodiff()).matmul(v).swap_dims(1, 2).reshape([b, s, heads * d])
}

fn attention_agrees(
    [b, s, d]: [usize; 3],
    [heads, groups]: [usize; 2],
    window: Option<usize>,
    documents: Option<Arc<Documents>>,
    (dropout, rng): (Dropout, &mut Random),
) {
    let p = Params::new(rng, &[]);
    let qkv = rng.tensor([b, s, (heads + 2 * groups) * d]);
    let dy = rng.tensor([b, s, heads * d]);
    let whole = Documents::new(s, (0..b).map(|_| [].as_slice()));
    let m =
        factors(&dropout, [b, heads, s, s], |[_, head, query, key]| (query * heads + head, key));
    let none: [Tensor<1>; 0] = [];
    let want = stock(slice::from_ref(&qkv), &none, &dy, |x, _| {
        let seen = documents.as_deref().unwrap_or(&whole);
        let window = window.unwrap_or(s);
        stock_attention(x[0].clone(), [heads, groups], window, seen, m.clone())
    });
    both_paths(|| {
        let op = |mut x: Vec<Tensor<3>>, _: &_, cx: &OpCx| {
            let cx = with(cx, dropout, documents.as_ref());
            ops::dropout_attention(x.remove(0), [heads, groups], window, PLACE, &cx)
        };
        let kept = run(slice::from_ref(&qkv), &p, &dy, false, op);
        // As without dropout; a row of kept probabilities is up to 1/(1 − p) of one.
        let scaled = bound(&[d, s, s, d, s, heads / groups * s]) / (1.0 - dropout.p);
        // A row of which all is dropped is zero, so the largest element may be a small one.
        assert_within("y", &kept.y, &want.0, scaled, 1.0);
        assert_within("dqkv", &kept.dx[0], &want.1[0], scaled, 1.0);
        // A number a query; nothing of the mask, whatever is recomputed.
        check_memory(&kept, qkv.shape().num_elements() + b * heads * s, 0);
        let again = run(slice::from_ref(&qkv), &p, &dy, true, op);
        assert_eq!((bits(&kept.y), bits(&kept.dx[0])), (bits(&again.y), bits(&again.dx[0])));
    });
}

fn any(p: f64, seed: u64) -> Dropout {
    Dropout { p, seed, step: 1 + seed % 1000, sample: (seed % 77) as usize }
}

proptest! {
    #![proptest_config(cases(60))]

    #[test]
    fn elements_are_dropped(
        b in 1..4_usize, s in 1..40_usize, h in 1..200_usize, p in 0.0..0.9_f64, seed: u64,
    ) {
        let mut rng = Random(seed);
        let params = Params::new(&mut rng, &[]);
        let (x, dy) = (rng.tensor([b, s, h]), rng.tensor([b, s, h]));
        let dropout = any(p, seed);
        let m = factors(&dropout, [b, s, h], |[_, row, column]| (row, column));
        let none: [Tensor<1>; 0] = [];
        let want = stock(slice::from_ref(&x), &none, &dy, |x, _| {
            x[0].clone() * m.clone().autodiff()
        });
        both_paths(|| {
            let run = run(slice::from_ref(&x), &params, &dy, false, |mut x, _, cx| {
                ops::dropout(x.remove(0), PLACE, &with(cx, dropout, None))
            });
            assert_within("y", &run.y, &want.0, bound(&[]), 1.0);
            assert_within("dx", &run.dx[0], &want.1[0], bound(&[]), 1.0);
            check_memory(&run, 0, 0);
        });
    }

    #[test]
    fn probabilities_are_dropped(
        b in 1..3_usize, s in 1..130_usize, d in 1..20_usize, groups in 1..3_usize,
        share in 1..3_usize, p in 0.0..0.8_f64, seed: u64,
    ) {
        let (mut rng, heads) = (Random(seed), [groups * share, groups]);
        let dropout = any(p, seed);
        attention_agrees([b, s, d], heads, None, None, (dropout, &mut rng));
        let window = Some(1 + s / 3);
        attention_agrees([b, s, d], heads, window, None, (dropout, &mut rng));
        let starts: Vec<Vec<usize>> =
            (0..b).map(|_| (0..s).filter(|_| rng.next().is_multiple_of(9)).collect()).collect();
        let documents = Arc::new(Documents::new(s, starts.iter().map(Vec::as_slice)));
        for window in [None, window] {
            let documents = Some(documents.clone());
            attention_agrees([b, s, d], heads, window, documents, (dropout, &mut rng));
        }
    }
}

/// Samples so long that they have kernels of their own.
#[test]
fn probabilities_of_long_samples_are_dropped() {
    let mut rng = Random(5);
    attention_agrees([1, 530, 8], [2, 1], None, None, (any(0.2, 9), &mut rng));
}

/// The mask of a tensor of ones, as zeros and ones.
fn mask(dropout: Dropout, place: DropoutPlace<'_>, dims: [usize; 3]) -> Vec<f64> {
    let cx = with(&context(&Meter::new(), false, false), dropout, None);
    let ones = cpu_tensor::from_vec(vec![1.0; dims.iter().product()], dims);
    let factor = (1.0 / (1.0 - dropout.p)) as f32;
    let kept = |y: f32| {
        assert!(y == 0.0 || (y - factor).abs() <= factor * 1e-6, "{y} with p = {}", dropout.p);
        if y == 0.0 { 0.0 } else { 1.0 }
    };
    values(&ops::dropout(ones, place, &cx)).into_iter().map(kept).collect()
}

/// Standard deviations that no count here is off: one of 10⁹ is off by more than six.
const DEVIATIONS: f64 = 6.0;

fn correlation(a: &[f64], b: &[f64], p: f64) -> f64 {
    let product = |(a, b): (&f64, &f64)| (a - (1.0 - p)) * (b - (1.0 - p));
    a.iter().zip(b).map(product).sum::<f64>() / (a.len() as f64 * p * (1.0 - p))
}

#[test]
fn as_many_are_kept_as_are_asked_for_and_independently() {
    let dims = [4, 64, 1024];
    let n: usize = dims.iter().product();
    for p in [0.01, 0.1, 0.5, 0.9] {
        let of = Dropout { p, seed: 3, step: 7, sample: 20 };
        let base = mask(of, PLACE, dims);
        // A count of n trials has the deviation √(n·p·(1 − p)).
        let kept = base.iter().sum::<f64>();
        let error = (n as f64 * p * (1.0 - p)).sqrt();
        assert!((kept - n as f64 * (1.0 - p)).abs() < DEVIATIONS * error, "p {p}: {kept} of {n}");
        // A sum of n products of independent elements has √n times that of one.
        let most = DEVIATIONS / (n as f64).sqrt();
        let others = [
            ("place", mask(of, ["h.3", "attention"], dims)),
            ("layer", mask(of, ["h.4", "mlp"], dims)),
            ("step", mask(Dropout { step: 8, ..of }, PLACE, dims)),
            ("sample", mask(Dropout { sample: 24, ..of }, PLACE, dims)),
            ("seed", mask(Dropout { seed: 4, ..of }, PLACE, dims)),
        ];
        for (what, other) in others {
            let found = correlation(&base, &other, p);
            assert!(found.abs() < most, "p {p}, another {what}: {found:e}");
        }
        for lag in [1, 4, 16, 64, 1024, 64 * 1024] {
            let m = n - lag;
            let found = correlation(&base[..m], &base[lag..], p) * (m as f64).sqrt();
            assert!(found.abs() < DEVIATIONS, "p {p}, {lag} elements on: {found}");
        }
    }
}

/// A sample has its mask wherever it is: alone, or among others in a micro-batch.
#[test]
fn a_mask_is_a_function_of_the_sample() {
    let of = Dropout { p: 0.3, seed: 3, step: 7, sample: 5 };
    let (s, h) = (9, 70);
    let together = mask(of, PLACE, [4, s, h]);
    for i in 0..4 {
        let alone = mask(Dropout { sample: 5 + i, ..of }, PLACE, [1, s, h]);
        assert_eq!(alone, together[i * s * h..(i + 1) * s * h]);
    }
    assert_eq!(together, mask(of, PLACE, [4, s, h]));
}
