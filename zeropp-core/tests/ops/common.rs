//! Runs an operation and its stock counterpart on the same random numbers and compares them.

use std::sync::Arc;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use zeropp_core::cpu_tensor;
use zeropp_core::meter::{MemoryBytes, Meter};
use zeropp_core::params::{FlatLayout, Init, ParamSpec};
use zeropp_core::split::ops::force_generic;
use zeropp_core::split::{Grads, LayerWeights, Makers, Masks, OpCx, WQueue, seed_backward};

pub(crate) use crate::close::assert_within;
pub(crate) use crate::random::Random;

impl Random {
    pub(crate) fn tensor<const D: usize>(&mut self, shape: [usize; D]) -> Tensor<D> {
        cpu_tensor::from_vec(self.normals(shape.iter().product()), shape)
    }

    pub(crate) fn ids(&mut self, shape: [usize; 2], below: usize) -> Tensor<2, Int> {
        let ids: Vec<i64> =
            (0..shape[0] * shape[1]).map(|_| (self.next() % below as u64) as i64).collect();
        Tensor::from_data(TensorData::new(ids, shape), &Device::flex())
    }
}

pub(crate) fn leaf<const D: usize>(x: &Tensor<D>) -> Tensor<D> {
    x.clone().inner().autodiff().require_grad()
}

fn double<const D: usize>(x: &Tensor<D>) -> Tensor<D> {
    x.clone().inner().cast(DType::F64).autodiff().require_grad()
}

pub(crate) fn values<const D: usize>(t: &Tensor<D>) -> Vec<f32> {
    cpu_tensor::on_cpu(t).expect("f32 on the CPU").as_slice().to_vec()
}

/// The largest product of elements of tensors of one shape.
pub(crate) fn largest_product(tensors: &[&Tensor<3>]) -> f64 {
    let all: Vec<_> = tensors.iter().map(|t| values(t)).collect();
    let product = |i: usize| all.iter().map(|v| f64::from(v[i].abs())).product::<f64>();
    (0..all[0].len()).map(product).fold(0.0, f64::max)
}

pub(crate) fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|x| x.to_bits()).collect()
}

/// One layer's parameters with values.
pub(crate) struct Params {
    pub(crate) layout: Arc<FlatLayout>,
    pub(crate) weights: LayerWeights,
    pub(crate) values: Vec<Vec<f32>>,
}

impl Params {
    pub(crate) fn new(rng: &mut Random, shapes: &[(&str, &[usize])]) -> Self {
        let specs =
            shapes.iter().map(|(n, shape)| ParamSpec::new(*n, shape, Init::Zeros)).collect();
        let layout = Arc::new(FlatLayout::new(specs, 1));
        let values: Vec<_> = layout.params.iter().map(|p| rng.normals(p.spec.len())).collect();
        let weights = LayerWeights::new("layer", 0, layout.clone());
        let params = Self { layout, weights, values };
        restore(&params);
        params
    }

    /// The flat buffer.
    pub(crate) fn flat(&self) -> Vec<f32> {
        let mut flat = vec![0.0; self.layout.len];
        for (p, v) in self.layout.params.iter().zip(&self.values) {
            flat[p.offset..][..v.len()].copy_from_slice(v);
        }
        flat
    }

    /// Parameter `i` as a tracked leaf.
    pub(crate) fn leaf<const D: usize>(&self, i: usize) -> Tensor<D> {
        let shape = self.layout.params[i].spec.shape.clone();
        let shape = <[usize; D]>::try_from(shape).expect("dimensions");
        leaf(&cpu_tensor::from_vec(self.values[i].clone(), shape))
    }
}

/// The results of one forward and backward.
pub(crate) struct Run {
    pub(crate) y: Vec<f32>,
    pub(crate) dx: Vec<Vec<f32>>,
    pub(crate) dw: Vec<Vec<f32>>,
    /// Metered after F.
    pub(crate) after_f: MemoryBytes,
    /// Metered after B.
    pub(crate) after_b: MemoryBytes,
}

pub(crate) fn context(meter: &Arc<Meter>, selective: bool, tracked: bool) -> OpCx {
    let token = cpu_tensor::from_vec(vec![0.0], [1]);
    OpCx {
        queue: WQueue::default(),
        meter: meter.clone(),
        token: if tracked { leaf(&token) } else { token },
        makers: selective.then(Makers::default),
        vault: None,
        output_wanted: true,
        forward_grads: None,
        masks: Masks::default(),
        routers: None,
        slice: None,
    }
}

/// Runs `op` on tracked `xs` and pulls `dy` back; then W. Checks that the same forward without
/// gradients gives the same bits and keeps nothing, and that nothing is kept in the end.
pub(crate) fn run<const D: usize, const DY: usize>(
    xs: &[Tensor<D>],
    params: &Params,
    dy: &Tensor<DY>,
    selective: bool,
    op: impl Fn(Vec<Tensor<D>>, &LayerWeights, &OpCx) -> Tensor<DY>,
) -> Run {
    let meter = Meter::new();
    let cx = context(&meter, selective, false);
    let plain = xs.iter().map(|x| cpu_tensor::from_vec(values(x), x.dims())).collect();
    let untracked = values(&op(plain, &params.weights, &cx));
    assert_eq!(meter.peak().total(), 0, "a forward without gradients keeps nothing");

    let mut cx = context(&meter, selective, true);
    let leaves: Vec<_> = xs.iter().map(leaf).collect();
    let y = op(leaves.clone(), &params.weights, &cx);
    // As in a step, what is made again is known while the forward is recorded.
    cx.makers = None;
    let y_values = values(&y);
    assert_eq!(bits(&untracked), bits(&y_values), "tracked and untracked forward");
    let after_f = meter.now();
    let seed = seed_backward(y);
    let mut graph = seed.backward(cpu_tensor::from_vec(values(dy), dy.dims()));
    let dx = leaves.iter().map(|x| values(&x.grad_remove(&mut graph).expect("a gradient")));
    let dx = dx.collect();
    let after_b = meter.now();
    // Weights may be freed once B is done.
    params.weights.free();
    let scratch = Meter::new();
    let mut grads = Grads::new(vec![params.layout.clone()], &Device::flex(), &scratch);
    cx.queue.run(&mut grads);
    assert_eq!(meter.now().total(), 0, "nothing is kept after W");
    let flat = cpu_tensor::into_vec(grads.into_flat().0.remove(0));
    let places = params.layout.params.iter();
    let dw = places.map(|p| flat[p.offset..][..p.spec.len()].to_vec()).collect();
    restore(params);
    Run { y: y_values, dx, dw, after_f, after_b }
}

/// Gathers the weights (again).
pub(crate) fn restore(params: &Params) {
    params.weights.set(cpu_tensor::from_vec(params.flat(), [params.layout.len]));
}

/// The same through Burn's own graph in double precision; `op` gets tracked inputs and does its own
/// parameter leaves.
pub(crate) fn stock<const D: usize, const DY: usize, const DW: usize>(
    xs: &[Tensor<D>],
    ws: &[Tensor<DW>],
    dy: &Tensor<DY>,
    op: impl Fn(Vec<Tensor<D>>, Vec<Tensor<DW>>) -> Tensor<DY>,
) -> (Vec<f32>, Vec<Vec<f32>>, Vec<Vec<f32>>) {
    let leaves: Vec<_> = xs.iter().map(double).collect();
    let weights: Vec<_> = ws.iter().map(double).collect();
    let y = op(leaves.clone(), weights.clone());
    let dy = dy.clone().inner().cast(DType::F64).autodiff();
    let graph = (y.clone() * dy).sum().backward();
    let single = |t: Tensor<1>| values(&t.cast(DType::F32));
    let dx = leaves
        .iter()
        .map(|x| single(x.grad(&graph).expect("a gradient").inner().flatten(0, D - 1)));
    let dw = weights
        .iter()
        .map(|w| single(w.grad(&graph).expect("a gradient").inner().flatten(0, DW - 1)));
    (single(y.inner().flatten(0, DY - 1)), dx.collect(), dw.collect())
}

/// Runs `check` with the CPU kernels and with tensor operations.
pub(crate) fn both_paths(check: impl Fn()) {
    each_path(|_| check());
}

/// The same for a check that wants to know which: true with tensor operations.
pub(crate) fn each_path(check: impl Fn(bool)) {
    for generic in [false, true] {
        force_generic(generic);
        check(generic);
    }
    force_generic(false);
}

/// The results of stock operations: output, gradients of inputs and of weights.
type Stock = (Vec<f32>, Vec<Vec<f32>>, Vec<Vec<f32>>);

/// Compares a run with the stock result; `tolerance` is relative to the largest element of each
/// output and gradient.
pub(crate) fn compare(run: &Run, want: &Stock, tolerance: f64) {
    compare_terms(run, want, tolerance, 0.0);
}

/// The same where gradients of inputs are differences of terms as large as `terms`.
pub(crate) fn compare_terms(run: &Run, want: &Stock, tolerance: f64, terms: f64) {
    assert_within("y", &run.y, &want.0, tolerance, 0.0);
    for (i, (got, want)) in run.dx.iter().zip(&want.1).enumerate() {
        assert_within(&format!("dx {i}"), got, want, tolerance, terms);
    }
    assert_eq!(run.dw.len(), want.2.len());
    for (i, (got, want)) in run.dw.iter().zip(&want.2).enumerate() {
        assert_within(&format!("dw {i}"), got, want, tolerance, 0.0);
    }
}

/// Bytes that the meter should show: activations after F, stash after B.
pub(crate) fn check_memory(run: &Run, activation_elements: usize, stash_elements: usize) {
    let bytes = |kept: MemoryBytes| (kept.activation, kept.weight_stash, kept.total());
    let (a, w) = (activation_elements as u64 * 4, stash_elements as u64 * 4);
    assert_eq!(bytes(run.after_f), (a, 0, a), "kept from F to B");
    assert_eq!(bytes(run.after_b), (0, w, w), "kept from B to W");
}
