//! Masks of a micro-batch: packed documents give what each gives alone, and tokens that are not
//! scored count for nothing.

use std::slice;
use std::sync::Arc;

use burn::tensor::{DType, Int, Tensor, TensorData, activation};
use parking_lot::Mutex;
use proptest::prelude::*;
use zeropp_core::cpu_tensor;
use zeropp_core::kernels::rope::inverse_frequencies;
use zeropp_core::meter::Meter;
use zeropp_core::split::ops::{self, Projection, Rotation, Turns};
use zeropp_core::split::{Documents, ForwardGrads, Grads, Masks, OpCx, seed_backward};

use crate::bound::bound;
use crate::cases::cases;
use crate::common::*;
use crate::{stock_rope, stock_windowed_attention};

/// The same context with documents.
fn within(cx: &OpCx, documents: &Arc<Documents>) -> OpCx {
    let masks = Masks { documents: Some(documents.clone()), ..Masks::default() };
    OpCx { masks, ..cx.clone() }
}

/// Random documents of `b` samples of `s` tokens.
fn documents(rng: &mut Random, b: usize, s: usize) -> Arc<Documents> {
    let starts: Vec<Vec<usize>> =
        (0..b).map(|_| (0..s).filter(|_| rng.next().is_multiple_of(5)).collect()).collect();
    Arc::new(Documents::new(s, starts.iter().map(Vec::as_slice)))
}

/// `f` of each document alone, `[1, n, ..]`, put together again as `[b, s, ..]`.
fn alone(x: Tensor<3>, documents: &Documents, f: impl Fn(Tensor<3>) -> Tensor<3>) -> Tensor<3> {
    let [b, s, width] = x.dims();
    let x = x.reshape([1, b * s, width]);
    let each = documents.ranges().map(|rows| f(x.clone().narrow(1, rows.start, rows.len())));
    let y = Tensor::cat(each.collect(), 1);
    let [_, _, width] = y.dims();
    y.reshape([b, s, width])
}

/// With a window of so many tokens, if there is one.
fn attention_agrees(
    [b, s, d, heads]: [usize; 4],
    window: Option<usize>,
    documents: &Arc<Documents>,
    rng: &mut Random,
) {
    let h = heads * d;
    let p = Params::new(rng, &[]);
    let (qkv, dy) = (rng.tensor([b, s, 3 * h]), rng.tensor([b, s, h]));
    let none: [Tensor<1>; 0] = [];
    let want = stock(slice::from_ref(&qkv), &none, &dy, |x, _| {
        alone(x[0].clone(), documents, |x| stock_windowed_attention(x, heads, window))
    });
    both_paths(|| {
        let op = |mut x: Vec<Tensor<3>>, _: &_, cx: &OpCx| {
            ops::windowed_attention(x.remove(0), [heads; 2], window, &within(cx, documents))
        };
        let kept = run(slice::from_ref(&qkv), &p, &dy, false, op);
        compare(&kept, &want, bound(&[d, s, s, d, s, s]));
        // A number a query, wherever documents begin and whatever is recomputed.
        check_memory(&kept, b * s * 3 * h + b * heads * s, 0);
        let again = run(slice::from_ref(&qkv), &p, &dy, true, op);
        assert_eq!((bits(&kept.y), bits(&kept.dx[0])), (bits(&again.y), bits(&again.dx[0])));
    });
}

proptest! {
    #![proptest_config(cases(60))]

    #[test]
    fn attention_stays_inside_a_document(
        b in 1..4_usize, s in 1..90_usize, d in 1..20_usize, heads in 1..4_usize, seed: u64,
    ) {
        let mut rng = Random(seed);
        let documents = documents(&mut rng, b, s);
        attention_agrees([b, s, d, heads], None, &documents, &mut rng);
        attention_agrees([b, s, d, heads], Some(1 + s / 8), &documents, &mut rng);
    }

    /// Of whole samples, with keys that several heads share.
    #[test]
    fn a_window_slides(
        b in 1..3_usize, s in 2..120_usize, d in 1..20_usize, groups in 1..3_usize,
        share in 1..3_usize, window in 1..60_usize, seed: u64,
    ) {
        let mut rng = Random(seed);
        let (heads, window) = (groups * share, window.min(s - 1));
        let p = Params::new(&mut rng, &[]);
        let (n, dy) = (heads + 2 * groups, rng.tensor([b, s, heads * d]));
        let qkv = rng.tensor([b, s, n * d]);
        let none: [Tensor<1>; 0] = [];
        let want = stock(slice::from_ref(&qkv), &none, &dy, |x, _| {
            let part = |first: usize| x[0].clone().narrow(2, first * d, d);
            let shared = |first: usize| (0..heads).map(move |i| first + i / share);
            let parts = (0..heads).chain(shared(heads)).chain(shared(heads + groups));
            stock_windowed_attention(Tensor::cat(parts.map(part).collect(), 2), heads, Some(window))
        });
        both_paths(|| {
            let op = |mut x: Vec<Tensor<3>>, _: &_, cx: &OpCx| {
                ops::windowed_attention(x.remove(0), [heads, groups], Some(window), cx)
            };
            let kept = run(slice::from_ref(&qkv), &p, &dy, false, op);
            compare(&kept, &want, bound(&[d, s, s, d, s, share * s]));
            check_memory(&kept, b * s * n * d + b * heads * s, 0);
        });
    }

    /// Learned and rotary positions.
    #[test]
    fn positions_begin_anew_with_each_document(
        b in 1..4_usize, s in 1..40_usize, half in 4..10_usize, spare in 0..4_usize, seed: u64,
    ) {
        let mut rng = Random(seed);
        let (documents, h) = (documents(&mut rng, b, s), 2 * half);
        let p = Params::new(&mut rng, &[("w", &[s + spare, h])]);
        let (x, dy) = (rng.tensor([b, s, h]), rng.tensor([b, s, h]));
        let want = stock(slice::from_ref(&x), &[p.leaf::<2>(0)], &dy, |x, w| {
            let add = |x: Tensor<3>| {
                let [_, n, _] = x.dims();
                x + w[0].clone().narrow(0, 0, n).unsqueeze()
            };
            stock_rope(alone(x[0].clone(), &documents, add), h)
        });
        let maps = Params::new(&mut rng, &[("q", &[h, h])]);
        let turned = stock(slice::from_ref(&x), &[maps.leaf::<2>(0)], &dy, |x, w| {
            let map = |x: Tensor<3>| stock_rope(x.matmul(w[0].clone().unsqueeze()), h);
            alone(x[0].clone(), &documents, map)
        });
        let rotation = Rotation::new(inverse_frequencies(h, 10_000.0));
        let turns = Turns { rotation: &rotation, heads: 1, first: 0 };
        both_paths(|| {
            let learned = run(slice::from_ref(&x), &p, &dy, false, |mut x, w, cx| {
                let x = ops::position_embedding(
                    x.remove(0), &w.weight("w"), &within(cx, &documents),
                );
                ops::rope(x, 1, h, 10_000.0)
            });
            compare(&learned, &want, bound(&[b * s, 2]));
            check_memory(&learned, 0, s * h);
            let rotary = run(slice::from_ref(&x), &maps, &dy, false, |mut x, w, cx| {
                let map = [Projection { weight: w.weight("q"), bias: None }];
                ops::projections(x.remove(0), &map, Some(turns), &within(cx, &documents))
            });
            compare(&rotary, &turned, bound(&[h.max(b * s), 2]));
        });
    }

    /// The mean over the tokens that are scored, by the head and by logits.
    #[test]
    fn tokens_that_are_not_scored_count_for_nothing(
        b in 1..4_usize, s in 1..20_usize, h in 1..20_usize, v in 2..60_usize,
        whole in 1..100_usize, seed: u64,
    ) {
        let mut rng = Random(seed);
        let p = Params::new(&mut rng, &[("w", &[v, h])]);
        let (x, targets) = (rng.tensor([b, s, h]), rng.ids([b, s], v));
        let hidden: Vec<bool> = (0..b * s).map(|_| rng.next().is_multiple_of(3)).collect();
        let known: Vec<i64> = targets.clone().into_data().iter::<i64>().collect();
        let given = known.iter().zip(&hidden).map(|(id, h)| if *h { -100 } else { *id });
        let on = targets.device();
        let given: Vec<i64> = given.collect();
        let given = Tensor::<2, Int>::from_data(TensorData::new(given, [b, s]), &on);
        let ones: Vec<f32> = hidden.iter().map(|h| if *h { 0.0 } else { 1.0 }).collect();
        let ones = cpu_tensor::from_vec(ones, [b * s, 1]);
        // As of a step whose micro-batches have so many in the mean.
        let divisor = whole as f64;
        let up = cpu_tensor::from_vec(vec![0.5], [1]);
        let rows = x.clone().reshape([b * s, h]);
        let want = stock(&[rows], &[p.leaf::<2>(0)], &up, |x, w| {
            let log_p = activation::log_softmax(x[0].clone().matmul(w[0].clone().transpose()), 1);
            let ones = ones.clone().cast(DType::F64).autodiff();
            let each = log_p.gather(1, targets.clone().autodiff().reshape([b * s, 1])) * ones;
            each.sum().neg() / divisor
        });
        both_paths(|| {
            let meter = Meter::new();
            let scratch = Meter::new();
            let grads = Grads::new(vec![p.layout.clone()], &on, &scratch);
            let grads = Arc::new(Mutex::new(grads));
            let masks = Masks { scored: Some(divisor), ..Masks::default() };
            let forward_grads = Some(ForwardGrads { grads: grads.clone(), loss_scale: 0.5 });
            let cx = OpCx { masks, forward_grads, ..context(&meter, false, true) };
            let (w, input) = (p.weights.weight("w"), leaf(&x));
            let loss = ops::linear_cross_entropy(input.clone(), &w, given.clone(), v, &cx);
            let tolerance = bound(&[h, v, b * s]) * 100.0;
            assert_within("loss", &values(&loss), &want.0, tolerance, 1.0);
            let mut graph = seed_backward(loss).backward(up.clone());
            let dx = values(&input.grad_remove(&mut graph).expect("a gradient"));
            assert_within("dx", &dx, &want.1[0], tolerance, 0.5 / divisor);
            drop(cx);
            let grads = Arc::into_inner(grads).expect("nobody else holds it").into_inner();
            let dw = cpu_tensor::into_vec(grads.into_flat().0.remove(0));
            assert_within("dw", &dw[..v * h], &want.2[0], tolerance, 0.5 / divisor);
            // By logits, and with no gradient: the same loss.
            let masks = Masks { scored: Some(divisor), ..Masks::default() };
            let cx = OpCx { masks, ..context(&meter, false, false) };
            let logits = ops::linear_transposed(x.clone(), &w, &cx);
            let loss = ops::cross_entropy(logits.clone(), given.clone(), &cx);
            assert_within("loss of logits", &values(&loss), &want.0, tolerance, 1.0);
            let again = ops::linear_cross_entropy(x.clone(), &w, given.clone(), v, &cx);
            assert_within("loss without gradients", &values(&again), &want.0, tolerance, 1.0);
        });
    }
}

/// Documents of more than a block of queries, on samples of the length where kernels change.
#[test]
fn long_documents() {
    let mut rng = Random(3);
    let starts: [&[usize]; 2] = [&[0, 70, 400], &[513]];
    let documents = Arc::new(Documents::new(530, starts));
    attention_agrees([2, 530, 9, 2], None, &documents, &mut rng);
    attention_agrees([2, 530, 9, 2], Some(100), &documents, &mut rng);
}

/// In bf16 a window is that of fp32 but for rounding.
#[test]
fn a_window_in_bf16_is_that_of_fp32() {
    let mut rng = Random(4);
    let (b, s, heads, d, window) = (2, 300, 2, 16, 37);
    let (qkv, dy) = (rng.tensor([b, s, 3 * heads * d]), rng.tensor([b, s, heads * d]));
    let meter = Meter::new();
    let of = |dtype: DType| {
        let input = leaf(&qkv.clone().cast(dtype));
        let cx = context(&meter, false, true);
        let y = ops::windowed_attention(input.clone(), [heads; 2], Some(window), &cx);
        let out = wide(&y.clone().inner());
        let mut graph = seed_backward(y).backward(dy.clone().cast(dtype));
        (out, wide(&input.grad_remove(&mut graph).expect("a gradient")))
    };
    let (halves, floats) = (of(DType::BF16), of(DType::F32));
    assert_within("y", &halves.0, &floats.0, 0.02, 0.0);
    assert_within("dx", &halves.1, &floats.1, 0.03, 0.0);
}

/// In bf16 a document in a sample has the output's bits of the document alone. Gradients are sums
/// of blocks of the sample.
#[test]
fn bf16_documents_have_the_bits_of_each_alone() {
    let mut rng = Random(8);
    let (b, s, heads, d) = (2, 150, 2, 16);
    let width = 3 * heads * d;
    let starts: [&[usize]; 2] = [&[0, 3, 140], &[]];
    let documents = Arc::new(Documents::new(s, starts));
    let qkv = rng.normals(b * s * width);
    let dy = rng.normals(b * s * heads * d);
    let meter = Meter::new();
    let of = |rows: std::ops::Range<usize>, dims: [usize; 2], cx: &OpCx| {
        let part = |all: &[f32], width: usize| -> Tensor<3> {
            let part = all[rows.start * width..rows.end * width].to_vec();
            cpu_tensor::from_vec(part, [dims[0], dims[1], width]).cast(DType::BF16)
        };
        let input = leaf(&part(&qkv, width));
        let y = ops::attention(input.clone(), heads, cx);
        let out = wide(&y.clone().inner());
        let mut graph = seed_backward(y).backward(part(&dy, heads * d));
        (out, wide(&input.grad_remove(&mut graph).expect("a gradient")))
    };
    let tracked = context(&meter, false, true);
    let packed = of(0..b * s, [b, s], &within(&tracked, &documents));
    let (mut out, mut dqkv) = (Vec::new(), Vec::new());
    for rows in documents.ranges() {
        let (y, dx) = of(rows.clone(), [1, rows.len()], &tracked);
        out.extend(y);
        dqkv.extend(dx);
    }
    assert!(packed.0 == out);
    assert_within("dqkv", &packed.1, &dqkv, 0.01, 0.0);
}

/// The elements in fp32.
fn wide(t: &Tensor<3>) -> Vec<f32> {
    t.clone().cast(DType::F32).into_data().try_to_vec().expect("fp32")
}
