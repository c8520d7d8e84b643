//! The operations on a GPU against the same operations on the CPU, with fused kernels and with
//! tensor operations. Any device that wgpu drives will do, a software one too.

#[path = "common/cases.rs"]
mod cases;
#[path = "common/close.rs"]
mod close;
#[path = "common/random.rs"]
mod random;

use std::sync::Arc;

use burn::tensor::{DType, Device, DeviceKind, Int, Tensor, TensorData};
use cases::cases;
use close::assert_within;
use proptest::prelude::*;
use random::Random;
use zeropp_core::cpu_tensor;
use zeropp_core::meter::Meter;
use zeropp_core::params::{FlatLayout, Init, ParamSpec};
use zeropp_core::split::ops::{self, force_generic};
use zeropp_core::split::{Grads, LayerWeights, Masks, OpCx, WQueue, seed_backward};

/// Largest difference allowed, relative to the largest element of the CPU's result: both have
/// errors as `bound` of the CPU tests says, of sums of some hundred elements.
const TOLERANCE: f64 = 1e-5;

/// Numbers and their shape, on no device yet.
struct Data<const D: usize>(Vec<f32>, [usize; D]);

impl<const D: usize> Data<D> {
    fn new(rng: &mut Random, shape: [usize; D]) -> Self {
        Self(rng.normals(shape.iter().product()), shape)
    }

    fn on(&self, device: &Device) -> Tensor<D> {
        Tensor::from_data(TensorData::new(self.0.clone(), self.1), (device, DType::F32))
    }
}

fn values<const D: usize>(t: Tensor<D>) -> Vec<f32> {
    t.inner().into_data().iter::<f32>().collect()
}

/// Output, gradients of the inputs, gradients of the weights, bytes kept from F to B.
type Run = (Vec<f32>, Vec<Vec<f32>>, Vec<f32>, u64);

/// Runs `op` and its backward on `device`; checks that the same forward without gradients gives
/// the same bits and keeps nothing.
fn run<const D: usize, const DY: usize>(
    device: &Device,
    xs: &[Data<D>],
    weights: &[Data<1>],
    dy: &Data<DY>,
    op: &impl Fn(Vec<Tensor<D>>, &LayerWeights, &OpCx) -> Tensor<DY>,
) -> Run {
    let specs = (0..weights.len())
        .map(|i| ParamSpec::new(format!("w{i}"), &weights[i].1, Init::Zeros))
        .collect();
    let layout = Arc::new(FlatLayout::new(specs, 1));
    let mut flat = vec![0.0; layout.len];
    for (place, w) in layout.params.iter().zip(weights) {
        flat[place.offset..][..w.0.len()].copy_from_slice(&w.0);
    }
    let layer = LayerWeights::new("layer", 0, layout.clone());
    let n = flat.len();
    layer.set(Data(flat, [n]).on(device));
    let meter = Meter::new();
    let context = |tracked: bool| {
        let token = Tensor::<1>::zeros([1], (device, DType::F32));
        let token = if tracked { token.autodiff().require_grad() } else { token };
        OpCx {
            queue: WQueue::default(),
            meter: meter.clone(),
            token,
            makers: None,
            vault: None,
            output_wanted: true,
            forward_grads: None,
            masks: Masks::default(),
            routers: None,
            slice: None,
        }
    };
    let plain = values(op(xs.iter().map(|x| x.on(device)).collect(), &layer, &context(false)));
    assert_eq!(meter.peak().total(), 0, "a forward without gradients keeps nothing");

    let cx = context(true);
    let leaves: Vec<_> = xs.iter().map(|x| x.on(device).autodiff().require_grad()).collect();
    let y = op(leaves.clone(), &layer, &cx);
    let kept = meter.now().activation;
    let tracked = values(y.clone());
    let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&plain), bits(&tracked), "tracked and untracked forward");
    let mut graph = seed_backward(y).backward(dy.on(device));
    let dx = leaves.iter().map(|x| values(x.grad_remove(&mut graph).expect("a gradient")));
    let dx = dx.collect();
    let mut grads = Grads::new(vec![layout], device, &Meter::new());
    cx.queue.run(&mut grads);
    let dw = if weights.is_empty() { vec![] } else { values(grads.into_flat().0.remove(0)) };
    assert_eq!(meter.now().total(), 0, "nothing is kept after W");
    (tracked, dx, dw, kept)
}

/// Compares the GPU, on both paths, with the CPU; gives the bytes that the GPU's kernels kept.
fn compare<const D: usize, const DY: usize>(
    xs: &[Data<D>],
    weights: &[Data<1>],
    dy: &Data<DY>,
    op: impl Fn(Vec<Tensor<D>>, &LayerWeights, &OpCx) -> Tensor<DY>,
) -> u64 {
    let gpu = Device::wgpu(DeviceKind::DefaultDevice);
    let want = run(&Device::flex(), xs, weights, dy, &op);
    let mut kept = 0;
    for generic in [true, false] {
        force_generic(generic);
        let got = run(&gpu, xs, weights, dy, &op);
        force_generic(false);
        let path = if generic { "tensor operations" } else { "kernels" };
        assert_within(&format!("{path}: y"), &got.0, &want.0, TOLERANCE, 0.0);
        for (i, (got, want)) in got.1.iter().zip(&want.1).enumerate() {
            assert_within(&format!("{path}: dx {i}"), got, want, TOLERANCE, 0.0);
        }
        assert_within(&format!("{path}: dw"), &got.2, &want.2, TOLERANCE, 0.0);
        kept = got.3;
    }
    kept
}

fn attention_case(b: usize, s: usize, groups: usize, share: usize, d: usize, seed: u64) {
    let mut rng = Random(seed);
    let heads = groups * share;
    let width = (heads + 2 * groups) * d;
    let (qkv, dy) = (Data::new(&mut rng, [b, s, width]), Data::new(&mut rng, [b, s, heads * d]));
    let kept = compare(&[qkv], &[], &dy, |mut x, _, cx| {
        ops::grouped_attention(x.remove(0), heads, groups, cx)
    });
    assert_eq!(kept, (b * s * (width + heads) * 4) as u64, "q, k, v and one number a query");
}

/// One block of queries, and several of which the last one is short. Few shapes: products are tuned
/// for each. The kernels between them are tested on many more, and so is the order of blocks, on
/// the CPU.
#[test]
fn attention() {
    attention_case(1, 300, 2, 2, 9, 2);
}

proptest! {
    #![proptest_config(cases(4))]

    #[test]
    fn cross_entropy(b in 1..3_usize, s in 1..20_usize, v in 1..3000_usize, seed: u64) {
        let mut rng = Random(seed);
        let logits = Data::new(&mut rng, [b, s, v]);
        let ids: Vec<i64> = (0..b * s).map(|_| (rng.next() % v as u64) as i64).collect();
        compare(&[logits], &[], &Data(vec![0.5], [1]), |mut x, _, cx| {
            let x = x.remove(0);
            let targets = TensorData::new(ids.clone(), [b, s]);
            let targets = Tensor::<2, Int>::from_data(targets, &x.clone().inner().device());
            ops::cross_entropy(x, targets, cx)
        });
    }

    #[test]
    fn norms(b in 1..3_usize, s in 1..20_usize, h in 8..3000_usize, seed: u64) {
        let mut rng = Random(seed);
        let (x, dy) = (Data::new(&mut rng, [b, s, h]), Data::new(&mut rng, [b, s, h]));
        let weights = [Data::new(&mut rng, [h]), Data::new(&mut rng, [h])];
        compare(&[x], &weights, &dy, |mut x, w, cx| {
            ops::layer_norm(x.remove(0), &w.weight("w0"), &w.weight("w1"), 1e-5, cx)
        });
        let (x, dy) = (Data::new(&mut rng, [b, s, h]), Data::new(&mut rng, [b, s, h]));
        compare(&[x], &weights[..1], &dy, |mut x, w, cx| {
            ops::rms_norm(x.remove(0), &w.weight("w0"), 1e-5, cx)
        });
    }
}

/// A tensor that is kept twice counts once, as on the CPU.
#[test]
fn a_shared_input_is_kept_once() {
    let gpu = Device::wgpu(DeviceKind::DefaultDevice);
    let x = Data::new(&mut Random(1), [1, 4, 40]).on(&gpu).autodiff().require_grad();
    let cx = OpCx {
        queue: WQueue::default(),
        meter: Meter::new(),
        token: cpu_tensor::from_vec(vec![0.0], [1]),
        makers: None,
        vault: None,
        output_wanted: true,
        forward_grads: None,
        masks: Masks::default(),
        routers: None,
        slice: None,
    };
    let y = ops::swiglu(x.clone(), x, &cx);
    assert_eq!(cx.meter.now().activation, 4 * 40 * 4);
    seed_backward(y.clone()).backward(y.inner());
    assert_eq!(cx.meter.now().total(), 0);
}

/// A target that is no token cannot be refused without waiting for the GPU; the loss says so.
#[test]
fn an_unknown_target_gives_no_number() {
    let gpu = Device::wgpu(DeviceKind::DefaultDevice);
    for (target, known) in [(4_i64, true), (5, false), (-1, false)] {
        let logits = Tensor::<3>::zeros([1, 2, 5], (&gpu, DType::F32));
        let targets = Tensor::<2, Int>::from_data([[0, target]], &gpu);
        let cx = OpCx {
            queue: WQueue::default(),
            meter: Meter::new(),
            token: cpu_tensor::from_vec(vec![0.0], [1]),
            makers: None,
            vault: None,
            output_wanted: true,
            forward_grads: None,
            masks: Masks::default(),
            routers: None,
            slice: None,
        };
        let loss = values(ops::cross_entropy(logits, targets, &cx))[0];
        assert_eq!(loss.is_finite(), known, "target {target}: {loss}");
    }
}
