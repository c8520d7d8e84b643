//! Routing of tokens to experts, and the experts' MLPs, on the CPU's kernels.
//!
//! Each token goes to k of E experts and none is dropped, so that there are n·k rows, however they
//! spread: what is sent, gathered and kept does not depend on the routing.

use std::sync::Arc;

use burn::tensor::{DType, Tensor, bf16};

use super::linear::{Matrix, packed};
use super::{Later, is_tracked, link, wants_gradient};
use crate::cpu_tensor::{self, CpuTensor};
use crate::kernels::balance;
use crate::kernels::bf16::{Mat, Packed, convert, product_set};
use crate::kernels::experts::{self as kernel, Element, Rows, WeightedChoice};
use crate::kernels::gemm::{MatRef, product};
use crate::kernels::routing::{self, ChosenExperts};
use crate::meter::{Hold, MemoryKind};
use crate::split::weight::Side;
use crate::split::{Grads, OpCx, RouterCx, Saved, Weight, custom_source, custom_vjp2};

pub use crate::kernels::routing::{Routing, Score};

/// The experts of each token of a micro-batch, as [`route`] chose them.
#[derive(Clone)]
pub struct Routed {
    choice: Arc<ChosenExperts>,
    /// Counts it as long as a backward will need it.
    _hold: Option<Arc<Hold>>,
}

/// The weights by which tokens are sent to experts.
#[derive(Clone)]
pub struct Router {
    /// `[h, E]`.
    pub weight: Weight<2>,
    /// Added to the scores where they are compared, `[E]`. Where it trains, W adds to its gradient
    /// how many more choices than the mean each expert has, as whole numbers
    /// ([`excess`](routing::excess)).
    pub bias: Option<Weight<1>>,
}

/// Sends each token of `x: [b, s, h]` to k experts: the weights of what they give, `[b, s, k]` in
/// fp32, and which they are. The router's logits are fp32 sums, whatever the type of x; of equal
/// scores the expert with the lower index is chosen.
///
/// B adds the gradients of the router's losses ([`RouterCx`](crate::split::RouterCx)), which the
/// context has.
///
/// Keeps F→B: x, the choice (12·n·k + 4·E + 4 bytes for n tokens), the weights (4·n·k), the scores
/// and a number of each token (4·n·(E + 1)). Keeps B→W: x and the gradient of the logits, in the
/// type of x, and of a bias that trains 4·E bytes.
pub fn route(x: Tensor<3>, router: &Router, routing: Routing, cx: &OpCx) -> (Tensor<3>, Routed) {
    let [b, s, _] = x.dims();
    let mut scores = logits(&x.clone().inner(), &router.weight);
    let bias = router.bias.as_ref().map(|bias| bias.get().cast(DType::F32));
    let bias = bias.as_ref().map(floats);
    let bias = bias.as_ref().map(CpuTensor::as_slice);
    let (weights, choice, sums) = routing::route(&mut scores, bias, routing);
    let out = cpu_tensor::from_vec(weights, [b, s, routing.chosen]);
    let choice = Arc::new(choice);
    if !wants_gradient(&x, cx) {
        return (out, Routed { choice, _hold: None });
    }
    if let Some(cx) = &cx.routers {
        let figures = balance::figures([&scores, &sums], routing.score, &choice, cx.losses.group);
        cx.figures.lock().insert((router.weight.layer(), cx.micro_batch), figures);
    }
    let hold = cx.meter.hold(MemoryKind::Activation, choice.bytes() as u64);
    let routed = Routed { choice, _hold: Some(Arc::new(hold)) };
    let scores = cpu_tensor::from_vec(scores, [b * s, routing.experts]);
    let kept = KeptRoute {
        x: router.weight.trains().then(|| cx.save(x.clone())),
        scores: [cx.save(scores), cx.save(cpu_tensor::from_vec(sums, [b * s, 1]))],
        weights: cx.save(out.clone()),
        routed: routed.clone(),
        router: router.clone(),
        routing,
        dtype: x.dtype(),
        routers: cx.routers.clone(),
        later: Later::new(cx),
    };
    (link(x, out, cx, move |dw| kept.pull(dw)), routed)
}

/// What routing keeps for its backward.
struct KeptRoute {
    x: Option<Saved<3>>,
    /// Scores and a number of each token.
    scores: [Saved<2>; 2],
    weights: Saved<3>,
    routed: Routed,
    router: Router,
    routing: Routing,
    dtype: DType,
    routers: Option<RouterCx>,
    later: Later,
}

impl KeptRoute {
    /// The gradient of x by that of the weights; those of the router are queued.
    fn pull(self, dw: Tensor<3>) -> Tensor<3> {
        let KeptRoute { x, scores, weights, routed, router, routing, later, .. } = self;
        let [b, s, _] = dw.dims();
        let [dw, weights] = [dw, weights.get()].map(|t| floats(&t));
        let scores = scores.map(|kept| floats(&kept.get()));
        let [scores, sums] = scores.each_ref().map(CpuTensor::as_slice);
        let (dw, weights) = (dw.as_slice(), weights.as_slice());
        let choice = &routed.choice;
        let mut dlogits = routing::route_backward(dw, weights, scores, choice, routing);
        if let Some(RouterCx { losses, loss_scale, .. }) = self.routers {
            let of = [scores, sums];
            balance::add_gradient(&mut dlogits, losses, routing.score, loss_scale, of, choice);
        }
        let dims = [b, s, routing.experts];
        let dlogits = match self.dtype {
            DType::F32 => cpu_tensor::from_vec(dlogits, dims),
            _ => cpu_tensor::from_halves(convert::narrow(&dlogits), dims),
        };
        let matrix = Matrix { w: router.weight, transposed: false };
        let dx = matrix.input_gradient(&dlogits);
        if let Some(bias) = router.bias.filter(Weight::trains) {
            later.queue_add(&bias, cpu_tensor::from_vec(routing::excess(choice), [dims[2]]));
        }
        if let Some(x) = x {
            let (x, dlogits) = (later.stash(x.take()), later.stash(dlogits));
            later.queue.push(move |grads| matrix.weight_gradient(None, x, dlogits, grads));
        }
        dx
    }
}

/// The router's logits, `[n, E]`.
fn logits(x: &Tensor<3>, router: &Weight<2>) -> Vec<f32> {
    let [h, experts] = router.shape();
    if x.dtype() == DType::F32 {
        let (x, w) = (floats(x), floats(&router.get()));
        let (x, w) = (x.as_slice(), w.as_slice());
        return product(1.0, MatRef::new(x, x.len() / h, h), MatRef::new(w, h, experts));
    }
    let x = bf16::view(x);
    let n = x.as_slice().len() / h;
    let mut logits = vec![0.0; n * experts];
    let w = packed(router, false, Side::Forward);
    product_set(&mut logits, experts, Mat::new(x.as_slice(), n, h), &w[0]);
    logits
}

fn floats<const D: usize>(t: &Tensor<D>) -> CpuTensor {
    f32::view(t)
}

/// Types of elements that experts have on the CPU.
trait OnCpu: Element {
    /// The elements of a tensor of this type.
    fn view<const D: usize>(t: &Tensor<D>) -> CpuTensor<Self>;
    fn slice(view: &CpuTensor<Self>) -> &[Self];
    fn tensor<const D: usize>(elements: Vec<Self>, shape: [usize; D]) -> Tensor<D>;
    /// Calls `f` with each expert's weight of some maps, as products on one side read it.
    fn with<R, const N: usize>(
        maps: [&Weight<3>; N],
        side: Side,
        f: impl FnOnce([&[Self::Factor<'_>]; N]) -> R,
    ) -> R;
}

/// Runs of experts are refused on other devices before a rank starts.
const ON_CPU: &str = "experts compute on the CPU, in fp32 or bf16";

impl OnCpu for f32 {
    fn view<const D: usize>(t: &Tensor<D>) -> CpuTensor {
        cpu_tensor::on_cpu(t).expect(ON_CPU)
    }

    fn slice(view: &CpuTensor) -> &[f32] {
        view.as_slice()
    }

    fn tensor<const D: usize>(elements: Vec<f32>, shape: [usize; D]) -> Tensor<D> {
        cpu_tensor::from_vec(elements, shape)
    }

    fn with<R, const N: usize>(
        maps: [&Weight<3>; N],
        side: Side,
        f: impl FnOnce([&[MatRef<'_>]; N]) -> R,
    ) -> R {
        let values = maps.map(|w| (w.shape(), Self::view(&w.get())));
        let all = values.each_ref().map(|([_, rows, columns], values)| {
            let of = |m| {
                let m = MatRef::new(m, *rows, *columns);
                if side == Side::Backward { m.t() } else { m }
            };
            values.as_slice().chunks(rows * columns).map(of).collect::<Vec<_>>()
        });
        f(all.each_ref().map(|all| &all[..]))
    }
}

impl OnCpu for bf16 {
    fn view<const D: usize>(t: &Tensor<D>) -> CpuTensor<bf16> {
        cpu_tensor::halves_on_cpu(t).expect(ON_CPU)
    }

    fn slice(view: &CpuTensor<bf16>) -> &[bf16] {
        view.as_slice()
    }

    fn tensor<const D: usize>(elements: Vec<bf16>, shape: [usize; D]) -> Tensor<D> {
        cpu_tensor::from_halves(elements, shape)
    }

    fn with<R, const N: usize>(
        maps: [&Weight<3>; N],
        side: Side,
        f: impl FnOnce([&[&Packed]; N]) -> R,
    ) -> R {
        let packed = maps.map(|w| {
            w.packed(side, || {
                let ([_, rows, columns], values) = (w.shape(), Self::view(&w.get()));
                let of = |m| {
                    let m = Mat::new(m, rows, columns);
                    Packed::new(if side == Side::Backward { m.t() } else { m })
                };
                values.as_slice().chunks(rows * columns).map(of).collect()
            })
        });
        let all = packed.each_ref().map(|packed| packed.iter().collect::<Vec<_>>());
        f(all.each_ref().map(|all| &all[..]))
    }
}

/// Σ w·(silu(x·gate)·(x·up))·down over the experts of each token, for `x: [b, s, h]` and the
/// weights `w: [b, s, k]` of [`route`]; gate and up are `[E, h, f]`, down is `[E, f, h]`. A token's
/// sum is in the order of its experts, in fp32, and rounded once.
///
/// Keeps F→B: x, w, the choice, and for gate and up n·k·f elements each. Keeps B→W: x, dY, the
/// choice, the gradients of those, and as many inner values. x is for gate and up, dY and inner
/// values are for down, where these train.
pub fn experts(
    x: Tensor<3>,
    w: Tensor<3>,
    routed: &Routed,
    maps: [&Weight<3>; 3],
    cx: &OpCx,
) -> Tensor<3> {
    match x.dtype() {
        DType::F32 => apply::<f32>(x, w, routed, maps, cx),
        _ => apply::<bf16>(x, w, routed, maps, cx),
    }
}

fn apply<E: OnCpu>(
    x: Tensor<3>,
    w: Tensor<3>,
    routed: &Routed,
    maps: [&Weight<3>; 3],
    cx: &OpCx,
) -> Tensor<3> {
    let (xi, wi) = (x.clone().inner(), w.clone().inner());
    let (dims, [_, h, f]) = (xi.dims(), maps[0].shape());
    let made = forward::<E>(&xi, &wi, &routed.choice, maps, cx.output_wanted);
    let out = match cx.output_wanted {
        true => E::tensor(made.y, dims),
        false => OpCx::stand_in(&xi, dims),
    };
    if !wants_gradient(&x, cx) && !is_tracked(&w) {
        return out;
    }
    let rows = [routed.choice.tokens() * routed.choice.chosen(), f];
    let trains = maps.map(Weight::trains);
    let kept = Kept::<E> {
        x: (trains[0] || trains[1]).then(|| cx.save(xi)),
        w: cx.save(wi),
        made: [made.gate, made.up].map(|made| cx.save(E::tensor(made, rows))),
        routed: routed.clone(),
        maps: maps.map(Weight::clone),
        sizes: [h, f],
        later: Later::new(cx),
        elements: std::marker::PhantomData,
    };
    if is_tracked(&x) || is_tracked(&w) {
        return custom_vjp2([x, w], out, move |dy| kept.pull(dy));
    }
    custom_source(&cx.token, out, move |dy| drop(kept.pull(dy)))
}

fn forward<E: OnCpu>(
    x: &Tensor<3>,
    w: &Tensor<3>,
    choice: &ChosenExperts,
    [gate, up, down]: [&Weight<3>; 3],
    output_wanted: bool,
) -> kernel::Forward<E> {
    let (x, w) = (E::view(x), floats(w));
    let [_, h, f] = gate.shape();
    E::with([gate, up], Side::Forward, |[gate, up]| {
        let run = |down: Option<&[E::Factor<'_>]>| {
            let routed = WeightedChoice { choice, weights: w.as_slice() };
            kernel::forward(E::slice(&x), routed, gate, up, down, [h, f])
        };
        match output_wanted {
            true => E::with([down], Side::Forward, |[down]| run(Some(down))),
            false => run(None),
        }
    })
}

/// What a forward keeps for its backward.
struct Kept<E> {
    x: Option<Saved<3>>,
    w: Saved<3>,
    /// x·gate and x·up of each row.
    made: [Saved<2>; 2],
    routed: Routed,
    maps: [Weight<3>; 3],
    sizes: [usize; 2],
    later: Later,
    elements: std::marker::PhantomData<E>,
}

impl<E: OnCpu> Kept<E> {
    /// The gradients of x and w; those of the weights are queued.
    fn pull(self, dy: Tensor<3>) -> [Tensor<3>; 2] {
        let ([h, f], choice) = (self.sizes, self.routed.choice.clone());
        let (dy_view, w) = (E::view(&dy), floats(&self.w.get()));
        let made = self.made.each_ref().map(|made| E::view(&made.get()));
        let back = E::with(self.maps.each_ref(), Side::Backward, |[gate, up, down]| {
            let made = made.each_ref().map(|made| E::slice(made));
            let routed = WeightedChoice { choice: &choice, weights: w.as_slice() };
            kernel::backward(E::slice(&dy_view), routed, made, gate, up, down, [h, f])
        });
        let kernel::Backward { dx, dw, dgate, dup, inner } = back;
        let (dims, weights) = (dy.dims(), [dy.dims()[0], dy.dims()[1], choice.chosen()]);
        self.queue([dgate, dup, inner], dy);
        [E::tensor(dx, dims), cpu_tensor::from_vec(dw, weights)]
    }

    /// Queues W of what trains.
    fn queue(self, made: [Vec<E>; 3], dy: Tensor<3>) {
        let Kept { x, maps, later, sizes: [_, f], .. } = self;
        let trains = maps.each_ref().map(Weight::trains);
        if !trains.contains(&true) {
            return;
        }
        let choice = self.routed.choice.clone();
        let rows = [choice.tokens() * choice.chosen(), f];
        let mut made = made.into_iter().zip(trains);
        let made = std::array::from_fn::<_, 3, _>(|_| {
            let (made, trains) = made.next().expect("three of each");
            trains.then(|| later.stash(E::tensor(made, rows)))
        });
        let x = x.map(|x| later.stash(x.take()));
        let dy = trains[2].then(|| later.stash(dy));
        let hold = later.meter.hold(MemoryKind::WeightStash, choice.bytes() as u64);
        later.queue.push(move |grads| {
            let _hold = hold;
            weight_gradients::<E>(&maps, [x, dy], made, &choice, grads);
        });
    }
}

/// W: adds Xᵀ·dgate, Xᵀ·dup and innerᵀ·dY of each expert's rows, of what trains.
fn weight_gradients<E: OnCpu>(
    maps: &[Weight<3>; 3],
    [x, dy]: [Option<Saved<3>>; 2],
    made: [Option<Saved<2>>; 3],
    choice: &ChosenExperts,
    grads: &mut Grads,
) {
    let [x, dy] = [x, dy].map(|t| t.map(|t| E::view(&t.take())));
    let made = made.map(|made| made.map(|made| E::view(&made.take())));
    let [gate, up, inner] = made.each_ref().map(|t| t.as_ref().map(|t| Rows::OfRows(E::slice(t))));
    let [x, dy] = [&x, &dy].map(|t| t.as_ref().map(|t| Rows::OfTokens(E::slice(t))));
    let kept = "kept where it trains";
    let size = |i: usize| maps[i].shape();
    let on_cpu = "gradients of CPU tensors are on the CPU";
    if let [Some(gate), Some(up)] = [gate, up] {
        let slots = [maps[0].slot(), maps[1].slot()];
        let ([_, a, b], dw) = (size(0), grads.host_mut_both(slots).expect(on_cpu));
        kernel::add_weight_gradients(dw, x.expect(kept), [gate, up], choice, [a, b]);
    } else {
        for (i, rows) in [gate, up].into_iter().enumerate() {
            let Some(rows) = rows else { continue };
            let ([_, a, b], dw) = (size(i), grads.host_mut(maps[i].slot()).expect(on_cpu));
            kernel::add_weight_gradients([dw], x.expect(kept), [rows], choice, [a, b]);
        }
    }
    if let Some(inner) = inner {
        let ([_, a, b], dw) = (size(2), grads.host_mut(maps[2].slot()).expect(on_cpu));
        kernel::add_weight_gradients([dw], inner, [dy.expect(kept)], choice, [a, b]);
    }
}
