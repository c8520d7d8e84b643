//! Every operation against Burn's own graph, on both paths, with what it keeps in memory.

mod again;
mod bound;
#[path = "../common/cases.rs"]
mod cases;
mod check;
#[path = "../common/close.rs"]
mod close;
mod common;
mod documents;
mod dropout;
mod experts;
mod head;
mod head_slices;
mod heads;
#[path = "../common/random.rs"]
mod random;
mod recording;
mod whole;

use std::slice;

use bound::bound;
use burn::tensor::{DType, Int, Tensor, TensorData, activation, module};
use cases::cases;
use common::*;
use proptest::prelude::*;
use zeropp_core::cpu_tensor;
use zeropp_core::meter::Meter;
use zeropp_core::split::{Grads, OpCx, ops};

proptest! {
    #![proptest_config(cases(150))]

    #[test]
    fn linear(
        b in 1..4_usize, s in 8..40_usize, i in 1..40_usize, o in 8..40_usize, bias: bool,
        seed: u64,
    ) {
        let mut rng = Random(seed);
        let mut shapes: Vec<(&str, &[usize])> = vec![("w", &[0, 0])];
        let (w_shape, b_shape) = ([i, o], [1, o]);
        shapes[0].1 = &w_shape;
        if bias {
            shapes.push(("b", &b_shape[1..]));
        }
        let p = Params::new(&mut rng, &shapes);
        let (x, dy) = (rng.tensor([b, s, i]), rng.tensor([b, s, o]));
        let mut ws = vec![p.leaf::<2>(0)];
        if bias {
            ws.push(p.leaf::<1>(1).reshape([1, o]));
        }
        let want = stock(slice::from_ref(&x), &ws, &dy, |x, w| {
            let bias = w.get(1).map(|b| b.clone().reshape([o]));
            module::linear(x[0].clone(), w[0].clone(), bias)
        });
        both_paths(|| {
            let run = run(slice::from_ref(&x), &p, &dy, false, |mut x, w, cx| {
                let bias = bias.then(|| w.weight("b"));
                ops::linear(x.remove(0), &w.weight("w"), bias.as_ref(), cx)
            });
            compare(&run, &want, bound(&[i.max(o).max(b * s)]));
            check_memory(&run, b * s * i, b * s * (i + o));
        });
    }

    #[test]
    fn linear_transposed(
        b in 1..4_usize, s in 8..40_usize, i in 8..40_usize, o in 1..40_usize, seed: u64,
    ) {
        let mut rng = Random(seed);
        let p = Params::new(&mut rng, &[("w", &[o, i])]);
        let (x, dy) = (rng.tensor([b, s, i]), rng.tensor([b, s, o]));
        let want = stock(slice::from_ref(&x), &[p.leaf::<2>(0)], &dy, |x, w| {
            module::linear(x[0].clone(), w[0].clone().transpose(), None)
        });
        both_paths(|| {
            let run = run(slice::from_ref(&x), &p, &dy, false, |mut x, w, cx| {
                ops::linear_transposed(x.remove(0), &w.weight("w"), cx)
            });
            compare(&run, &want, bound(&[i.max(o).max(b * s)]));
            check_memory(&run, b * s * i, b * s * (i + o));
        });
    }

    #[test]
    fn layer_norm(b in 1..4_usize, s in 1..20_usize, h in 16..300_usize, seed: u64) {
        let mut rng = Random(seed);
        let p = Params::new(&mut rng, &[("gamma", &[h]), ("beta", &[h])]);
        let (x, dy) = (rng.tensor([b, s, h]), rng.tensor([b, s, h]));
        let want = stock(slice::from_ref(&x), &[p.leaf::<1>(0), p.leaf(1)], &dy, |x, w| {
            let x = x[0].clone();
            let c = x.clone() - x.mean_dim(2);
            let var = c.clone().square().mean_dim(2);
            c / (var + 1e-5).sqrt() * w[0].clone().unsqueeze() + w[1].clone().unsqueeze()
        });
        both_paths(|| {
            let run = run(slice::from_ref(&x), &p, &dy, false, |mut x, w, cx| {
                ops::layer_norm(x.remove(0), &w.weight("gamma"), &w.weight("beta"), 1e-5, cx)
            });
            // Mean and variance, then the sums of the backward.
            compare(&run, &want, bound(&[h, h, h.max(b * s)]));
            check_memory(&run, b * s * (h + 2), 2 * h);
        });
    }

    #[test]
    fn rms_norm(b in 1..4_usize, s in 1..20_usize, h in 16..300_usize, seed: u64) {
        let mut rng = Random(seed);
        let p = Params::new(&mut rng, &[("gamma", &[h])]);
        let (x, dy) = (rng.tensor([b, s, h]), rng.tensor([b, s, h]));
        let want = stock(slice::from_ref(&x), &[p.leaf::<1>(0)], &dy, |x, w| {
            let x = x[0].clone();
            let rms = (x.clone().square().mean_dim(2) + 1e-6).sqrt();
            x / rms * w[0].clone().unsqueeze()
        });
        both_paths(|| {
            let run = run(slice::from_ref(&x), &p, &dy, false, |mut x, w, cx| {
                ops::rms_norm(x.remove(0), &w.weight("gamma"), 1e-6, cx)
            });
            compare(&run, &want, bound(&[h, h.max(b * s)]));
            check_memory(&run, b * s * (h + 1), h);
        });
    }

    #[test]
    fn attention(
        b in 1..3_usize, s in 3..150_usize, d in 1..20_usize, heads in 1..4_usize, seed: u64,
    ) {
        attention_agrees([b, s, d, heads], seed);
    }

    #[test]
    fn grouped_attention_with_rope(
        b in 1..3_usize, s in 4..110_usize, half in 1..10_usize, groups in 1..4_usize,
        share in 1..4_usize, seed: u64,
    ) {
        let mut rng = Random(seed);
        let (heads, d) = (groups * share, 2 * half);
        let p = Params::new(&mut rng, &[]);
        let xs = [heads, groups, groups].map(|n| rng.tensor([b, s, n * d]));
        let dy = rng.tensor([b, s, heads * d]);
        let none: [Tensor<1>; 0] = [];
        let want = stock(&xs, &none, &dy, |x, _| {
            let repeated = |x: Tensor<3>| {
                let head = |i: usize| x.clone().narrow(2, i / share * d, d);
                Tensor::cat((0..heads).map(head).collect(), 2)
            };
            let q = stock_rope(x[0].clone(), d);
            let (k, v) = (repeated(stock_rope(x[1].clone(), d)), repeated(x[2].clone()));
            stock_attention(Tensor::cat(vec![q, k, v], 2), heads)
        });
        each_path(|generic| {
            let op = |x: Vec<Tensor<3>>, _: &_, cx: &OpCx| {
                let qkv = ops::join(x.try_into().expect("three"));
                let qkv = ops::rope(qkv, heads + groups, d, 10_000.0);
                ops::grouped_attention(qkv, heads, groups, cx)
            };
            let kept = run(&xs, &p, &dy, false, op);
            compare(&kept, &want, bound(&[d, s, s, d, s, share * s]));
            let qkv = b * s * (heads + 2 * groups) * d;
            let [scores, again_scores] = attention_keeps(generic, b * heads, s);
            check_memory(&kept, qkv + scores, 0);
            let again = run(&xs, &p, &dy, true, op);
            check_memory(&again, qkv + again_scores, 0);
            assert_eq!(bits(&kept.y), bits(&again.y));
            for (a, b) in kept.dx.iter().zip(&again.dx) {
                assert_eq!(bits(a), bits(b));
            }
        });
    }

    #[test]
    fn activations(
        b in 1..3_usize, s in 8..30_usize, h in 1..100_usize, scale in 0.1..2_f64, seed: u64,
    ) {
        type Op = fn(Tensor<3>, &OpCx) -> Tensor<3>;
        type Stock = fn(Tensor<3>) -> Tensor<3>;
        let table: [(Op, Stock); 3] = [
            (ops::gelu, activation::gelu),
            (ops::gelu_tanh, |x| {
                let u = (x.clone() + x.clone() * x.clone() * x.clone() * 0.044715)
                    * (2.0 / core::f64::consts::PI).sqrt();
                x * (u.tanh() + 1.0) * 0.5
            }),
            (ops::silu, activation::silu),
        ];
        let mut rng = Random(seed);
        let p = Params::new(&mut rng, &[]);
        let (x, dy) = (rng.tensor([b, s, h]) * scale, rng.tensor([b, s, h]));
        // A derivative is a difference of x·σ(x) and the like.
        let terms = largest_product(&[&x, &dy]);
        let none: [Tensor<1>; 0] = [];
        for (op, reference) in table {
            let want = stock(slice::from_ref(&x), &none, &dy, |x, _| reference(x[0].clone()));
            both_paths(|| {
                let run = run(slice::from_ref(&x), &p, &dy, false, |mut x, _, cx| {
                    op(x.remove(0), cx)
                });
                compare_terms(&run, &want, bound(&[]), terms);
                check_memory(&run, b * s * h, 0);
            });
        }
    }

    #[test]
    fn swiglu(b in 1..3_usize, s in 8..30_usize, h in 1..100_usize, seed: u64) {
        let mut rng = Random(seed);
        let p = Params::new(&mut rng, &[]);
        let xs = [rng.tensor([b, s, h]), rng.tensor([b, s, h])];
        let dy = rng.tensor([b, s, h]);
        let terms = largest_product(&[&xs[0], &xs[1], &dy]);
        let none: [Tensor<1>; 0] = [];
        let want = stock(&xs, &none, &dy, |x, _| activation::silu(x[0].clone()) * x[1].clone());
        both_paths(|| {
            let run = run(&xs, &p, &dy, false, |mut x, _, cx| {
                let gate = x.remove(0);
                ops::swiglu(gate, x.remove(0), cx)
            });
            compare_terms(&run, &want, bound(&[]), terms);
            check_memory(&run, 2 * b * s * h, 0);
        });
    }

    #[test]
    fn embeddings(
        b in 1..4_usize, s in 1..30_usize, h in 8..40_usize, v in 1..30_usize, spare in 0..5_usize,
        seed: u64,
    ) {
        let mut rng = Random(seed);
        let p = Params::new(&mut rng, &[("wte", &[v, h]), ("wpe", &[s + spare, h])]);
        let (ids, dy) = (rng.ids([b, s], v), rng.tensor([b, s, h]));
        let token = Tensor::<1>::zeros([1], (&dy.device(), DType::F32));
        let want = stock(slice::from_ref(&token), &[p.leaf::<2>(0), p.leaf(1)], &dy, |x, w| {
            let positions = w[1].clone().slice([0..s]).unsqueeze();
            module::embedding(w[0].clone(), ids.clone()) + positions + x[0].clone().unsqueeze()
        });
        both_paths(|| {
            // The input of the graph is the token, whose gradient is not computed.
            let meter = Meter::new();
            let cx = context(&meter, false, true);
            let forward = |cx: &OpCx| {
                let x = ops::embedding(ids.clone(), &p.weights.weight("wte"), cx);
                ops::position_embedding(x, &p.weights.weight("wpe"), cx)
            };
            let y = forward(&cx);
            assert_eq!(bits(&values(&y)), bits(&values(&forward(&context(&meter, false, false)))));
            assert_eq!(meter.peak().total(), 0);
            let got = values(&y);
            zeropp_core::split::seed_backward(y).backward(dy.clone());
            assert_eq!(meter.now().weight_stash, ((b * s * h + s * h) * 4) as u64);
            let scratch = Meter::new();
            let mut grads = Grads::new(vec![p.layout.clone()], &dy.device(), &scratch);
            cx.queue.run(&mut grads);
            assert_eq!(meter.now().total(), 0);
            let flat = cpu_tensor::into_vec(grads.into_flat().0.remove(0));
            let tolerance = bound(&[b * s]);
            assert_within("y", &got, &want.0, tolerance, 0.0);
            for (place, want) in p.layout.params.iter().zip(&want.2) {
                let got = &flat[place.offset..][..place.spec.len()];
                assert_within("dw", got, want, tolerance, 0.0);
            }
        });
    }

    #[test]
    fn cross_entropy(
        b in 1..4_usize, s in 1..20_usize, v in 1..300_usize, scale in 0.1..30_f64,
        up in 0.1..2_f32, seed: u64,
    ) {
        let mut rng = Random(seed);
        let p = Params::new(&mut rng, &[]);
        let (logits, targets) = (rng.tensor([b, s, v]) * scale, rng.ids([b, s], v));
        let dy = cpu_tensor::from_vec(vec![up], [1]);
        let none: [Tensor<1>; 0] = [];
        let want = stock(slice::from_ref(&logits), &none, &dy, |x, _| {
            stock_loss(x[0].clone(), &targets)
        });
        both_paths(|| {
            let run = run(slice::from_ref(&logits), &p, &dy, false, |mut x, _, cx| {
                ops::cross_entropy(x.remove(0), targets.clone(), cx)
            });
            let tolerance = bound(&[v, b * s]);
            // The loss is the difference of a logarithm and a logit, each as large as the logits.
            let largest = values(&logits).iter().fold(1.0_f32, |m, x| m.max(x.abs()));
            assert_within("loss", &run.y, &want.0, tolerance, f64::from(largest));
            // A logit's rounding is a relative error of its probability; an element of the gradient
            // is the difference of a probability and 0 or 1, over the tokens.
            let terms = f64::from(up) / (b * s) as f64;
            assert_within("dx", &run.dx[0], &want.1[0], tolerance, terms);
            check_memory(&run, b * s * v, 0);
        });
    }
}

fn stock_loss(logits: Tensor<3>, targets: &Tensor<2, Int>) -> Tensor<1> {
    let [b, s, v] = logits.dims();
    let log_p = activation::log_softmax(logits.reshape([b * s, v]), 1);
    log_p.gather(1, targets.clone().autodiff().reshape([b * s, 1])).mean().neg()
}

/// Attention of `heads` heads of `d` elements on `b` samples of `s` tokens, without and with
/// recomputation.
fn attention_agrees([b, s, d, heads]: [usize; 4], seed: u64) {
    let mut rng = Random(seed);
    let h = heads * d;
    let p = Params::new(&mut rng, &[]);
    let (qkv, dy) = (rng.tensor([b, s, 3 * h]), rng.tensor([b, s, h]));
    let none: [Tensor<1>; 0] = [];
    let want =
        stock(slice::from_ref(&qkv), &none, &dy, |x, _| stock_attention(x[0].clone(), heads));
    each_path(|generic| {
        let op = |mut x: Vec<Tensor<3>>, _: &_, cx: &OpCx| ops::attention(x.remove(0), heads, cx);
        let kept = run(slice::from_ref(&qkv), &p, &dy, false, op);
        // Scores, their sums, the output; in B again, then the sums over keys and queries.
        compare(&kept, &want, bound(&[d, s, s, d, s, s]));
        let [scores, again_scores] = attention_keeps(generic, b * heads, s);
        check_memory(&kept, b * s * 3 * h + scores, 0);
        let again = run(slice::from_ref(&qkv), &p, &dy, true, op);
        check_memory(&again, b * s * 3 * h + again_scores, 0);
        assert_eq!(bits(&kept.y), bits(&again.y));
        assert_eq!(bits(&kept.dx[0]), bits(&again.dx[0]));
    });
}

/// Samples so long that the CPU's kernels keep no probabilities, either.
#[test]
fn attention_on_long_samples() {
    for (sizes, seed) in [([2, 512, 5, 3], 1), ([1, 601, 33, 1], 2)] {
        attention_agrees(sizes, seed);
    }
}

/// The bytes that attention keeps beside q, k and v of `n` heads, without and with recomputation.
fn attention_keeps(generic: bool, n: usize, s: usize) -> [usize; 2] {
    if generic || s >= 512 { [n * s; 2] } else { [n * s * s, 0] }
}

fn stock_attention(qkv: Tensor<3>, heads: usize) -> Tensor<3> {
    stock_windowed_attention(qkv, heads, None)
}

fn stock_windowed_attention(qkv: Tensor<3>, heads: usize, window: Option<usize>) -> Tensor<3> {
    let [b, s, width] = qkv.dims();
    let (h, d) = (width / 3, width / 3 / heads);
    let parts = [0, 1, 2]
        .map(|i| qkv.clone().narrow(2, i * h, h).reshape([b, s, heads, d]).swap_dims(1, 2));
    let [q, k, v] = parts;
    let scores = q.matmul(k.swap_dims(2, 3)) / (d as f64).sqrt();
    let ones = Tensor::<2, Int>::ones([s, s], &scores.device());
    let later = ones.clone().triu(1).bool();
    let earlier = ones.tril(-(window.unwrap_or(s) as i64)).bool();
    let mask = later.bool_or(earlier).unsqueeze::<4>();
    let p = activation::softmax(scores.mask_fill(mask, -1e9), 3);
    p.matmul(v).swap_dims(1, 2).reshape([b, s, h])
}

/// Rotate-half: x·cos + [−high, low]·sin.
fn stock_rope(x: Tensor<3>, d: usize) -> Tensor<3> {
    let [b, s, width] = x.dims();
    let angles: Vec<f64> = (0..s * d)
        .map(|i| (i / d) as f64 / 10_000_f64.powf((i % d % (d / 2)) as f64 * 2.0 / d as f64))
        .collect();
    let on = (&x.clone().inner().device(), DType::F64);
    let angles = Tensor::<4>::from_data(TensorData::new(angles, [1, s, 1, d]), on).autodiff();
    let x = x.reshape([b, s, width / d, d]);
    let (low, high) = (x.clone().narrow(3, 0, d / 2), x.clone().narrow(3, d / 2, d / 2));
    let turned = Tensor::cat(vec![high.neg(), low], 3);
    (x * angles.clone().cos() + turned * angles.sin()).reshape([b, s, width])
}
