//! Properties of operations together: a block, bf16, threads, neighbours, alignment, bad input.

use std::sync::{Arc, Mutex};

use burn::tensor::{DType, Device, Tensor, activation, module};
use proptest::prelude::*;
use zeropp_core::cpu_tensor;
use zeropp_core::meter::Meter;
use zeropp_core::split::{Grads, LayerWeights, OpCx, custom_vjp, ops, seed_backward};

use crate::bound::{bound, half_bound};
use crate::cases::cases;
use crate::common::*;
use crate::{attention_keeps, stock_attention};

const HEADS: usize = 2;

/// Names and shapes of a block's parameters, in the order of [`stock_block`].
fn block_shapes(h: usize) -> Vec<(&'static str, Vec<usize>)> {
    vec![
        ("ln_1.g", vec![h]),
        ("ln_1.b", vec![h]),
        ("qkv.w", vec![h, 3 * h]),
        ("qkv.b", vec![3 * h]),
        ("proj.w", vec![h, h]),
        ("proj.b", vec![h]),
        ("ln_2.g", vec![h]),
        ("ln_2.b", vec![h]),
        ("fc.w", vec![h, 4 * h]),
        ("fc.b", vec![4 * h]),
        ("out.w", vec![4 * h, h]),
        ("out.b", vec![h]),
    ]
}

pub(crate) fn block_params(rng: &mut Random, h: usize) -> Params {
    let shapes = block_shapes(h);
    let shapes: Vec<_> = shapes.iter().map(|(n, s)| (*n, s.as_slice())).collect();
    let mut p = Params::new(rng, &shapes);
    for (place, v) in p.layout.params.iter().zip(&mut p.values) {
        let matrix = place.spec.shape.len() == 2;
        let scale = if matrix { 1.0 / (place.spec.shape[0] as f32).sqrt() } else { 1.0 };
        v.iter_mut().for_each(|v| *v *= scale);
    }
    restore(&p);
    p
}

pub(crate) fn block(x: Tensor<3>, w: &LayerWeights, cx: &OpCx) -> Tensor<3> {
    let lin = |x, name: &str| {
        let bias = w.weight(&format!("{name}.b"));
        ops::linear(x, &w.weight(&format!("{name}.w")), Some(&bias), cx)
    };
    let norm = |x, name: &str| {
        let (g, b) = (w.weight(&format!("{name}.g")), w.weight(&format!("{name}.b")));
        ops::layer_norm(x, &g, &b, 1e-5, cx)
    };
    let a = ops::attention(lin(norm(x.clone(), "ln_1"), "qkv"), HEADS, cx);
    let x = ops::add(x, lin(a, "proj"));
    let m = ops::gelu(lin(norm(x.clone(), "ln_2"), "fc"), cx);
    ops::add(x, lin(m, "out"))
}

fn stock_block(x: Tensor<3>, p: &[Tensor<1>], h: usize) -> Tensor<3> {
    let vector = |i: usize| p[i].clone();
    let lin = |x: Tensor<3>, i: usize, shape: [usize; 2]| {
        module::linear(x, vector(i).reshape(shape), Some(vector(i + 1)))
    };
    let norm = |x, i: usize| module::layer_norm(x, vector(i), Some(vector(i + 1)), 1e-5);
    let a = stock_attention(lin(norm(x.clone(), 0), 2, [h, 3 * h]), HEADS);
    let x = x + lin(a, 4, [h, h]);
    let m = activation::gelu(lin(norm(x.clone(), 6), 8, [h, 4 * h]));
    x + lin(m, 10, [4 * h, h])
}

proptest! {
    #![proptest_config(cases(25))]

    /// Also: residual sums keep nothing, and what two operations keep counts once.
    #[test]
    fn block_agrees_with_the_stock_graph(
        b in 1..3_usize, s in 1..60_usize, d in 4..24_usize, seed: u64,
    ) {
        let mut rng = Random(seed);
        let h = HEADS * d;
        let p = block_params(&mut rng, h);
        let (x, dy) = (rng.tensor([b, s, h]), rng.tensor([b, s, h]));
        let tensor = |v: &Vec<f32>| cpu_tensor::from_vec(v.clone(), [v.len()]);
        let flat: Vec<_> = p.values.iter().map(tensor).collect();
        let xs = std::slice::from_ref(&x);
        let want = stock(xs, &flat, &dy, |x, w| stock_block(x[0].clone(), &w, h));
        let n = b * s;
        each_path(|generic| {
            let kept = run(xs, &p, &dy, false, |mut x, w, cx| block(x.remove(0), w, cx));
            // Norm, products and attention forth, and back again, over rows and columns.
            let forth = [h, h, d, s, h, h, h, 4 * h];
            let back = [4 * h, h, h, h, h, s, s, h, h, n];
            compare(&kept, &want, bound(&[&forth[..], &back].concat()));
            // x, ln_1, qkv, attention, x + attention, ln_2, fc, gelu, four row statistics.
            let [scores, _] = attention_keeps(generic, b * HEADS, s);
            let activations = n * h * (1 + 1 + 3 + 1 + 1 + 1 + 4 + 4) + 4 * n + scores;
            // Inputs and output gradients of four linear maps, dγ and dβ of two norms.
            let stash = n * h * (1 + 1 + 1 + 4 + 3 + 1 + 4 + 1) + 4 * h;
            check_memory(&kept, activations, stash);
            let again = run(xs, &p, &dy, true, |mut x, w, cx| block(x.remove(0), w, cx));
            assert_eq!(bits(&kept.dx[0]), bits(&again.dx[0]));
            for (a, b) in kept.dw.iter().zip(&again.dw) {
                assert_eq!(bits(a), bits(b));
            }
        });
    }

    /// The other samples of the batch, and the places of tensors in memory, change no bit.
    #[test]
    fn samples_do_not_depend_on_neighbours_or_alignment(
        s in 1..40_usize, d in 1..24_usize, shift in 1..16_usize, seed: u64,
    ) {
        let mut rng = Random(seed);
        let h = HEADS * d;
        let p = block_params(&mut rng, h);
        let (x, dy) = (rng.tensor([2, s, h]), rng.tensor([2, s, h]));
        let n = s * h;
        let replaced = |t: &Tensor<3>, rng: &mut Random| {
            let mut v = rng.normals(shift);
            v.extend(values(t)[..n].iter());
            v.extend(rng.normals(n));
            let len = v.len();
            cpu_tensor::from_vec(v, [len]).slice([shift..len]).reshape([2, s, h])
        };
        let (x2, dy2) = (replaced(&x, &mut rng), replaced(&dy, &mut rng));
        let forward_backward = |x: Tensor<3>, dy: Tensor<3>| {
            let cx = context(&Meter::new(), false, true);
            let x = x.autodiff().require_grad();
            let y = block(x.clone(), &p.weights, &cx);
            let y_values = values(&y);
            let mut graph = seed_backward(y).backward(dy);
            (y_values, values(&x.grad_remove(&mut graph).expect("a gradient")))
        };
        let (y, dx) = forward_backward(x, dy);
        let (y2, dx2) = forward_backward(x2, dy2);
        assert_eq!(bits(&y[..n]), bits(&y2[..n]));
        assert_eq!(bits(&dx[..n]), bits(&dx2[..n]));
    }
}

/// bf16 takes kernels of its own: close to f32, and gradients still arrive in f32.
#[test]
fn bf16_is_close_to_f32() {
    let (b, s, h) = (2, 17, 32);
    let mut rng = Random(5);
    let p = block_params(&mut rng, h);
    let (x, dy) = (rng.tensor([b, s, h]), rng.tensor([b, s, h]));
    let run = |dtype: DType| {
        p.weights.set(cpu_tensor::from_vec(p.flat(), [p.layout.len]).cast(dtype));
        let meter = Meter::new();
        let cx = context(&meter, false, true);
        let x = x.clone().cast(dtype).autodiff().require_grad();
        let y = block(x.clone(), &p.weights, &cx);
        assert_eq!(y.dtype(), dtype);
        let activations = meter.now().activation;
        let mut graph = seed_backward(y).backward(dy.clone().cast(dtype));
        let dx = x.grad_remove(&mut graph).expect("a gradient");
        assert_eq!(dx.dtype(), dtype);
        let mut grads = Grads::new(vec![p.layout.clone()], &Device::flex(), &meter);
        cx.queue.run(&mut grads);
        let flat = cpu_tensor::into_vec(grads.into_flat().0.remove(0));
        assert_eq!(meter.now().total(), 0);
        (values(&dx.cast(DType::F32)), flat, activations)
    };
    let (dx, dw, bytes) = run(DType::F32);
    let (dx16, dw16, bytes16) = run(DType::BF16);
    // Of x, a weight, and each of the ten results of operations, there and back.
    let bound = half_bound(22);
    assert_within("dx", &dx16, &dx, bound, 0.0);
    assert_within("dw", &dw16, &dw, bound, 0.0);
    // All but the row statistics are half as big, and of attention only such are kept.
    let [scores, sums] = [false, true].map(|generic| attention_keeps(generic, b * HEADS, s)[0]);
    assert_eq!(bytes16 * 2 - bytes, ((4 * b * s + 2 * sums - scores) * 4) as u64);
}

/// Several blocks of queries in bf16: within its rounding of fp32, and one fp32 number a query
/// kept.
#[test]
fn long_attention_in_bf16_is_close_to_f32() {
    let (b, s, heads, groups, d) = (1, 300, 4, 2, 16);
    let mut rng = Random(8);
    let width = (heads + 2 * groups) * d;
    let (qkv, dy) = (rng.tensor([b, s, width]), rng.tensor([b, s, heads * d]));
    let run = |dtype: DType| {
        let meter = Meter::new();
        // Both start from numbers that bf16 can hold.
        let [qkv, dy] = [&qkv, &dy].map(|t| t.clone().cast(DType::BF16).cast(dtype));
        let x = qkv.autodiff().require_grad();
        let y = ops::grouped_attention(x.clone(), heads, groups, &context(&meter, false, true));
        let kept = meter.now().activation;
        let out = values(&y.clone().inner().cast(DType::F32));
        let mut graph = seed_backward(y).backward(dy);
        let dx = x.grad_remove(&mut graph).expect("a gradient");
        assert_eq!(dx.dtype(), dtype);
        (out, values(&dx.cast(DType::F32)), kept)
    };
    let (y, dx, _) = run(DType::F32);
    let (y16, dx16, kept) = run(DType::BF16);
    // Of probabilities and of the result; of both, of their gradient and of its result.
    assert_within("y", &y16, &y, half_bound(2), 0.0);
    assert_within("dx", &dx16, &dx, half_bound(4), 0.0);
    assert_eq!(kept, (b * s * (width * 2 + heads * 4)) as u64);
}

/// W may run on another thread than F and B, to the same bits.
#[test]
fn weight_gradients_do_not_depend_on_the_thread() {
    let mut rng = Random(9);
    let p = block_params(&mut rng, 24);
    let (x, dy) = (rng.tensor([2, 30, 24]), rng.tensor([2, 30, 24]));
    let gradient = |elsewhere: bool| {
        let meter = Meter::new();
        let cx = context(&meter, false, true);
        let y = block(leaf(&x), &p.weights, &cx);
        seed_backward(y).backward(dy.clone());
        let mut grads = Grads::new(vec![p.layout.clone()], &Device::flex(), &meter);
        let queue = cx.queue.clone();
        if elsewhere {
            grads = std::thread::spawn(move || {
                queue.run(&mut grads);
                grads
            })
            .join()
            .expect("no panic");
        } else {
            queue.run(&mut grads);
        }
        bits(&cpu_tensor::into_vec(grads.into_flat().0.remove(0)))
    };
    assert_eq!(gradient(false), gradient(true));
}

/// The gradient of the loss takes the place of the logits where nothing else holds them.
#[test]
fn the_loss_gradient_replaces_the_logits() {
    let mut rng = Random(3);
    let cx = context(&Meter::new(), false, true);
    let out = rng.tensor([2, 3, 50]);
    let place = cpu_tensor::storage_id(&out);
    let arrived = Arc::new(Mutex::new(None));
    let seen = arrived.clone();
    let x = leaf(&rng.tensor([2, 3, 50]));
    let logits = custom_vjp(x, out, move |dy| {
        *seen.lock().expect("no panic") = cpu_tensor::storage_id(&dy);
        dy
    });
    ops::cross_entropy(logits, rng.ids([2, 3], 50), &cx).backward();
    assert_eq!(*arrived.lock().expect("no panic"), place);
}

/// A second operand that is not part of the graph is no obstacle.
#[test]
fn swiglu_takes_one_untracked_operand() {
    let mut rng = Random(1);
    let cx = context(&Meter::new(), false, true);
    let (gate, up, dy) = (rng.tensor([1, 2, 3]), rng.tensor([1, 2, 3]), rng.tensor([1, 2, 3]));
    let up_leaf = leaf(&up);
    let y = ops::swiglu(gate.clone(), up_leaf.clone(), &cx);
    let mut graph = seed_backward(y).backward(dy.clone());
    let got = values(&up_leaf.grad_remove(&mut graph).expect("a gradient"));
    assert_within("dup", &got, &values(&(activation::silu(gate) * dy)), bound(&[]), 0.0);
}

#[test]
#[should_panic(expected = "token id 7, but the embedding has 7 rows")]
fn unknown_tokens_are_refused() {
    let mut rng = Random(1);
    let p = Params::new(&mut rng, &[("wte", &[7, 2])]);
    let ids = Tensor::from_data([[0_i64, 7]], &Device::flex());
    ops::embedding(ids, &p.weights.weight("wte"), &context(&Meter::new(), false, false));
}

#[test]
#[should_panic(expected = "target 5, but there are logits for 5 tokens")]
fn unknown_targets_are_refused() {
    let mut rng = Random(1);
    let targets = Tensor::from_data([[0_i64, 5]], &Device::flex());
    ops::cross_entropy(rng.tensor([1, 2, 5]), targets, &context(&Meter::new(), false, false));
}
