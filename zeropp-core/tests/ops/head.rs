//! The last linear map with its cross-entropy, which makes its gradients in F, a chunk at a time.

use std::sync::Arc;

use burn::tensor::{DType, Device, Int, Tensor, activation};
use parking_lot::Mutex;
use proptest::prelude::*;
use zeropp_core::cpu_tensor;
use zeropp_core::meter::Meter;
use zeropp_core::split::ops::{force_head_chunk, head_chunk, linear_cross_entropy};
use zeropp_core::split::{ForwardGrads, Grads, Masks, OpCx, WQueue, seed_backward};
use zeropp_model::head::workspace_bytes;

use crate::bound::{bound, half_bound};
use crate::cases::cases;
use crate::common::*;

/// The results of a head: loss, dX and dW.
struct Given {
    loss: f32,
    dx: Vec<f32>,
    dw: Vec<f32>,
}

/// A head over the first `ids` rows of the parameter `w`.
struct Case<'a> {
    x: &'a Tensor<3>,
    targets: &'a Tensor<2, Int>,
    p: &'a Params,
    ids: usize,
    scale: f32,
}

impl Case<'_> {
    fn context(&self, meter: &Arc<Meter>, grads: Option<Arc<Mutex<Grads>>>) -> OpCx {
        let token = cpu_tensor::from_vec(vec![0.0], [1]);
        OpCx {
            queue: WQueue::default(),
            meter: meter.clone(),
            token: if grads.is_some() { leaf(&token) } else { token },
            makers: None,
            vault: None,
            output_wanted: true,
            forward_grads: grads.map(|grads| ForwardGrads { grads, loss_scale: self.scale }),
            masks: Masks::default(),
            routers: None,
            slice: None,
        }
    }

    /// F and B with chunks of so many tokens; `generic`: by tensor operations. Checks that F
    /// without gradients gives the same bits, what is kept, and that there is nothing left for W.
    fn run(&self, chunk: usize, generic: bool) -> Given {
        force_head_chunk(Some(chunk));
        let [b, s, h] = self.x.dims();
        let rows = self.p.layout.params[0].spec.shape[0];
        let w = self.p.weights.weight("w");
        let meter = Meter::new();
        let plain = self.context(&meter, None);
        let loss = linear_cross_entropy(self.x.clone(), &w, self.targets.clone(), self.ids, &plain);
        let logits = match generic {
            true => (chunk * rows * 4) as u64,
            false => workspace_bytes(chunk, self.ids, h, 4) as u64,
        };
        assert_eq!((meter.now().total(), meter.peak().total()), (0, logits));

        meter.reset_peak();
        let scratch = Meter::new();
        let grads = Grads::new(vec![self.p.layout.clone()], &Device::flex(), &scratch);
        let grads = Arc::new(Mutex::new(grads));
        let cx = self.context(&meter, Some(grads.clone()));
        let x = leaf(self.x);
        let tracked = linear_cross_entropy(x.clone(), &w, self.targets.clone(), self.ids, &cx);
        assert_eq!(bits(&values(&loss)), bits(&values(&tracked)), "tracked and untracked");
        let dx_bytes = (b * s * h * 4) as u64;
        assert_eq!((meter.now().total(), meter.now().activation), (dx_bytes, dx_bytes));
        assert_eq!(meter.peak().activation, dx_bytes + logits);
        // B needs no weights and leaves nothing for W.
        self.p.weights.free();
        let mut graph =
            seed_backward(tracked).backward(cpu_tensor::from_vec(vec![self.scale], [1]));
        let dx = values(&x.grad_remove(&mut graph).expect("a gradient"));
        assert!(cx.queue.is_empty() && meter.now().total() == 0);
        restore(self.p);
        drop(cx);
        let grads = Arc::into_inner(grads).expect("nobody else holds it").into_inner();
        let dw = cpu_tensor::into_vec(grads.into_flat().0.remove(0));
        force_head_chunk(None);
        Given { loss: values(&loss)[0], dx, dw: dw[..rows * h].to_vec() }
    }
}

proptest! {
    #![proptest_config(cases(60))]

    /// Against Burn's own graph in double precision, for any number of tokens and any chunk, also
    /// with rows that are no token ids.
    #[test]
    fn head_agrees_with_the_stock_graph(
        b in 1..4_usize, s in 1..60_usize, h in 1..40_usize, ids in 1..700_usize,
        padding in 0..9_usize, chunk in 1..150_usize, scale in 0.01..2_f32, seed: u64,
    ) {
        let mut rng = Random(seed);
        let p = Params::new(&mut rng, &[("w", &[ids + padding, h])]);
        let (x, targets) = (rng.tensor([b, s, h]), rng.ids([b, s], ids));
        let dy = cpu_tensor::from_vec(vec![scale], [1]);
        let rows = x.clone().reshape([b * s, h]);
        let want = stock(&[rows], &[p.leaf::<2>(0)], &dy, |x, w| {
            let logits = x[0].clone().matmul(w[0].clone().narrow(0, 0, ids).transpose());
            let log_p = activation::log_softmax(logits, 1);
            log_p.gather(1, targets.clone().autodiff().reshape([b * s, 1])).mean().neg()
        });
        let case = Case { x: &x, targets: &targets, p: &p, ids, scale };
        let chunk = chunk.min(b * s);
        each_path(|generic| {
            let got = case.run(chunk, generic);
            // Logits are sums of h products, probabilities of `ids` exponentials; the gradients are
            // sums of `ids` and of b·s terms that are differences themselves.
            let largest = |v: &[f32]| f64::from(v.iter().fold(0.0_f32, |m, x| m.max(x.abs())));
            let (x, w) = (largest(&values(&x)), largest(&p.values[0]));
            let slope = f64::from(scale) / (b * s) as f64;
            let logit = x * w * (h as f64).sqrt();
            assert_within("loss", &[got.loss], &want.0, bound(&[h, ids, b * s]), logit);
            // A logit's absolute error is the relative one of its probability.
            let tolerance = bound(&[h, ids, b * s]) * logit.max(1.0);
            assert_within("dx", &got.dx, &want.1[0], tolerance, slope * w);
            assert_within("dw", &got.dw, &want.2[0], tolerance, slope * x);
            assert!(got.dw[ids * h..].iter().all(|x| *x == 0.0), "of rows that are no ids");
        });
    }

    /// Rows that are no token ids change nothing, to the bit on the CPU's kernels.
    #[test]
    fn padding_takes_no_part(
        s in 1..40_usize, h in 1..20_usize, ids in 1..100_usize, padding in 1..30_usize, seed: u64,
    ) {
        let mut rng = Random(seed);
        let wide = Params::new(&mut rng, &[("w", &[ids + padding, h])]);
        let mut narrow = Params::new(&mut rng, &[("w", &[ids, h])]);
        narrow.values[0].copy_from_slice(&wide.values[0][..ids * h]);
        restore(&narrow);
        let (x, targets) = (rng.tensor([1, s, h]), rng.ids([1, s], ids));
        let run = |p: &Params| Case { x: &x, targets: &targets, p, ids, scale: 0.5 }.run(s, false);
        let (a, b) = (run(&wide), run(&narrow));
        assert_eq!(a.loss.to_bits(), b.loss.to_bits());
        assert_eq!(bits(&a.dx), bits(&b.dx));
        assert_eq!(bits(&a.dw[..ids * h]), bits(&b.dw));
    }
}

/// Gradients in bf16, of several chunks: within its rounding.
#[test]
fn head_in_bf16_is_close_to_f32() {
    let (s, h, ids) = (100, 24, 150);
    let mut rng = Random(4);
    let p = Params::new(&mut rng, &[("w", &[ids + 10, h])]);
    let (x, targets) = (rng.tensor([2, s, h]), rng.ids([2, s], ids));
    let run = |dtype: DType| {
        let rounded = |t: Tensor<1>| t.cast(DType::BF16).cast(dtype);
        p.weights.set(rounded(cpu_tensor::from_vec(p.flat(), [p.layout.len])));
        let x = x.clone().cast(DType::BF16).cast(dtype).autodiff().require_grad();
        let case = Case { x: &x, targets: &targets, p: &p, ids, scale: 0.25 };
        let grads = Grads::new(vec![p.layout.clone()], &Device::flex(), &Meter::new());
        let grads = Arc::new(Mutex::new(grads));
        let cx = case.context(&Meter::new(), Some(grads.clone()));
        force_head_chunk(Some(64));
        let w = p.weights.weight("w");
        let loss = linear_cross_entropy(x.clone(), &w, targets.clone(), ids, &cx);
        force_head_chunk(None);
        let value = values(&loss.clone().inner())[0];
        let mut graph = seed_backward(loss).backward(cpu_tensor::from_vec(vec![0.25], [1]));
        let dx = x.grad_remove(&mut graph).expect("a gradient");
        assert_eq!(dx.dtype(), dtype);
        drop(cx);
        let grads = Arc::into_inner(grads).expect("nobody else holds it").into_inner();
        let dw = cpu_tensor::into_vec(grads.into_flat().0.remove(0));
        (value, values(&dx.cast(DType::F32)), dw)
    };
    let ((loss, dx, dw), (loss16, dx16, dw16)) = (run(DType::F32), run(DType::BF16));
    restore(&p);
    assert!((loss - loss16).abs() < 0.01 * loss, "{loss} and {loss16}");
    // Of x, W, the slope and the result.
    assert_within("dx", &dx16, &dx, half_bound(4), 0.0);
    assert_within("dw", &dw16, &dw, half_bound(4), 0.0);
}

/// A loss cannot be scaled once its gradients are made.
#[test]
#[should_panic(expected = "the loss's gradient is 2, but F was made for 0.5")]
fn another_gradient_than_was_declared_is_refused() {
    let mut rng = Random(1);
    let p = Params::new(&mut rng, &[("w", &[7, 2])]);
    let (x, targets) = (rng.tensor([1, 2, 2]), rng.ids([1, 2], 7));
    let grads = Grads::new(vec![p.layout.clone()], &Device::flex(), &Meter::new());
    let case = Case { x: &x, targets: &targets, p: &p, ids: 7, scale: 0.5 };
    let cx = case.context(&Meter::new(), Some(Arc::new(Mutex::new(grads))));
    let loss = linear_cross_entropy(leaf(&x), &p.weights.weight("w"), targets.clone(), 7, &cx);
    seed_backward(loss).backward(cpu_tensor::from_vec(vec![2.0], [1]));
}

#[test]
#[should_panic(expected = "target 5, but there are logits for 5 tokens")]
fn targets_among_the_padding_are_refused() {
    let mut rng = Random(1);
    let p = Params::new(&mut rng, &[("w", &[8, 2])]);
    let (x, targets) = (rng.tensor([1, 2, 2]), Tensor::from_data([[0_i64, 5]], &Device::flex()));
    let case = Case { x: &x, targets: &targets, p: &p, ids: 5, scale: 1.0 };
    let cx = case.context(&Meter::new(), None);
    linear_cross_entropy(x.clone(), &p.weights.weight("w"), targets.clone(), 5, &cx);
}

/// The chunk does not follow from anything but sizes, type and path.
#[test]
fn chunks_have_no_other_arguments() {
    let chunks = || [true, false].map(|kernels| head_chunk(3000, [50_257, 768], 4, kernels));
    let here = chunks();
    assert_eq!(std::thread::spawn(chunks).join().expect("no panic"), here);
}
