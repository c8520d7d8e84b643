//! The one backend extension: a node whose pullback is a closure over plain tensors, in Burn's
//! graph or on a tape of this thread.
//!
//! The output is computed outside the graph; the node only links it to its inputs. Pullbacks get
//! and return plain (untracked) tensors. A pullback that builds a graph of its own may use fresh
//! leaves only: anything tracked that crosses threads or graphs can deadlock Burn's server.

use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients as GraphGradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::{
    Autodiff, AutodiffBackend, Backend, BackendTensor, Dispatch, DispatchKindConversion,
    DispatchTensor, Flex, backend_extension, ops::FloatTensorOps, tensor::FloatTensor,
};
use burn::tensor::{Gradients, Tensor};
use parking_lot::Mutex;

use super::tape;
use crate::cpu_tensor;

type PullBack<const N: usize> =
    Box<dyn FnOnce(DispatchTensor) -> [Option<DispatchTensor>; N] + Send>;

/// A pullback that runs once. It is `Clone` only because the graph's state type must be.
pub(super) struct Vjp<const N: usize>(Arc<Mutex<Option<PullBack<N>>>>);

impl<const N: usize> Clone for Vjp<N> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<const N: usize> core::fmt::Debug for Vjp<N> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Vjp")
    }
}

impl<const N: usize> Vjp<N> {
    fn new(f: impl FnOnce(DispatchTensor) -> [Option<DispatchTensor>; N] + Send + 'static) -> Self {
        Self(Arc::new(Mutex::new(Some(Box::new(f)))))
    }

    fn call(self, dy: DispatchTensor) -> [Option<DispatchTensor>; N] {
        let f = self.0.lock().take().expect("a graph is walked once");
        f(dy)
    }

    fn for_tape(self) -> tape::PullBack {
        Box::new(move |dy| self.call(dy).into())
    }
}

/// Links an output to its inputs, on a tape where one is recorded, else in Burn's graph. Plain
/// backends have no graph: identity.
#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub(super) trait VjpBackend: Backend {
    /// `x` as what a tape begins with.
    fn tape_input(x: FloatTensor<Self>) -> FloatTensor<Self>;
    /// `x`, whose number is put into `id` where it has one.
    fn identified(x: FloatTensor<Self>, id: Arc<Mutex<Option<NodeId>>>) -> FloatTensor<Self>;
    /// x + y, linked to both.
    fn sum(x: FloatTensor<Self>, y: FloatTensor<Self>) -> FloatTensor<Self>;
    /// `out` as a function of `x`.
    fn vjp1(x: FloatTensor<Self>, out: FloatTensor<Self>, f: Vjp<1>) -> FloatTensor<Self>;
    /// `out` as a function of `x` and `y`.
    fn vjp2(
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        out: FloatTensor<Self>,
        f: Vjp<2>,
    ) -> FloatTensor<Self>;
    /// `out` as a function of `x`, `y` and `z`.
    fn vjp3(
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        z: FloatTensor<Self>,
        out: FloatTensor<Self>,
        f: Vjp<3>,
    ) -> FloatTensor<Self>;
}

macro_rules! without_a_graph {
    ($backend:ty, $sum:path) => {
        impl VjpBackend for $backend {
            fn tape_input(_x: FloatTensor<Self>) -> FloatTensor<Self> {
                unreachable!("the inputs of a tape are on an autodiff device")
            }
            fn identified(
                x: FloatTensor<Self>,
                _id: Arc<Mutex<Option<NodeId>>>,
            ) -> FloatTensor<Self> {
                x
            }
            fn sum(x: FloatTensor<Self>, y: FloatTensor<Self>) -> FloatTensor<Self> {
                $sum(x, y)
            }
            fn vjp1(x: FloatTensor<Self>, out: FloatTensor<Self>, f: Vjp<1>) -> FloatTensor<Self> {
                assert!(!tape::is_recording(), "{}", tape::UNKNOWN);
                drop((x, f));
                out
            }
            fn vjp2(
                x: FloatTensor<Self>,
                y: FloatTensor<Self>,
                out: FloatTensor<Self>,
                f: Vjp<2>,
            ) -> FloatTensor<Self> {
                assert!(!tape::is_recording(), "{}", tape::UNKNOWN);
                drop((x, y, f));
                out
            }
            fn vjp3(
                x: FloatTensor<Self>,
                y: FloatTensor<Self>,
                z: FloatTensor<Self>,
                out: FloatTensor<Self>,
                f: Vjp<3>,
            ) -> FloatTensor<Self> {
                assert!(!tape::is_recording(), "{}", tape::UNKNOWN);
                drop((x, y, z, f));
                out
            }
        }
    };
}

without_a_graph!(Flex, cpu_tensor::sum);
#[cfg(feature = "cube")]
without_a_graph!(burn::backend::Cube, Self::float_add);

#[derive(Debug)]
struct VjpOp;

impl<B: Backend, const N: usize> Backward<B, N> for VjpOp
where
    DispatchTensor: DispatchKindConversion<B>,
{
    type State = Vjp<N>;

    fn backward(self, ops: Ops<Vjp<N>, N>, grads: &mut GraphGradients, _c: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let dy = BackendTensor::Float(dy);
        let dy = <DispatchTensor as DispatchKindConversion<B>>::from_backend(dy);
        let outs = ops.state.call(dy);
        for (parent, g) in ops.parents.into_iter().zip(outs) {
            if let (Some(parent), Some(g)) = (parent, g) {
                let g = <DispatchTensor as DispatchKindConversion<B>>::try_into_backend(g)
                    .expect("pullbacks return plain tensors")
                    .float();
                grads.register::<B>(parent.id, g);
            }
        }
    }
}

impl<B: VjpBackend, C: CheckpointStrategy> VjpBackend for Autodiff<B, C>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    fn tape_input(x: FloatTensor<Self>) -> FloatTensor<Self> {
        tape::begin_with(x.id());
        x
    }

    fn identified(x: FloatTensor<Self>, id: Arc<Mutex<Option<NodeId>>>) -> FloatTensor<Self> {
        *id.lock() = Some(x.id());
        x
    }

    fn sum(x: FloatTensor<Self>, y: FloatTensor<Self>) -> FloatTensor<Self> {
        if !tape::is_recording() {
            return Self::float_add(x, y);
        }
        let inputs = [x.id(), y.id()];
        let out = B::sum(x.into_primitive(), y.into_primitive());
        let out = <Self as AutodiffBackend>::from_inner(out);
        tape::record(out.id(), &inputs, Box::new(|dy| vec![Some(dy.clone()), Some(dy)]));
        out
    }

    fn vjp1(x: FloatTensor<Self>, out: FloatTensor<Self>, f: Vjp<1>) -> FloatTensor<Self> {
        if tape::is_recording() {
            tape::record(out.id(), &[x.id()], f.for_tape());
            return out;
        }
        let out = out.into_primitive();
        let op = Backward::<B, 1>::prepare::<C>(VjpOp, [x.node()]);
        match op.compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(f, out),
            OpsKind::UnTracked(prep) => prep.finish(out),
        }
    }

    fn vjp2(
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        out: FloatTensor<Self>,
        f: Vjp<2>,
    ) -> FloatTensor<Self> {
        if tape::is_recording() {
            tape::record(out.id(), &[x.id(), y.id()], f.for_tape());
            return out;
        }
        let out = out.into_primitive();
        let op = Backward::<B, 2>::prepare::<C>(VjpOp, [x.node(), y.node()]);
        match op.compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(f, out),
            OpsKind::UnTracked(prep) => prep.finish(out),
        }
    }

    fn vjp3(
        x: FloatTensor<Self>,
        y: FloatTensor<Self>,
        z: FloatTensor<Self>,
        out: FloatTensor<Self>,
        f: Vjp<3>,
    ) -> FloatTensor<Self> {
        if tape::is_recording() {
            tape::record(out.id(), &[x.id(), y.id(), z.id()], f.for_tape());
            return out;
        }
        let out = out.into_primitive();
        let op = Backward::<B, 3>::prepare::<C>(VjpOp, [x.node(), y.node(), z.node()]);
        match op.compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(f, out),
            OpsKind::UnTracked(prep) => prep.finish(out),
        }
    }
}

/// Whether a gradient of `x` is wanted: whether it is in a graph, or on the tape being recorded.
pub(super) fn is_tracked<const D: usize>(x: &Tensor<D>) -> bool {
    tape::is_recording() || x.is_tracked()
}

/// Makes `x` what the tape of this thread begins with.
pub(super) fn tape_input<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let x = x.autodiff().into_dispatch();
    Tensor::from_dispatch(<Dispatch as VjpBackend>::tape_input(x))
}

/// The number of `x` among the tensors of its autodiff device, which no other ever has; none where
/// no gradient is wanted.
pub(super) fn id<const D: usize>(x: &Tensor<D>) -> Option<NodeId> {
    if !is_tracked(x) {
        return None;
    }
    let id = Arc::<Mutex<Option<NodeId>>>::default();
    <Dispatch as VjpBackend>::identified(x.clone().into_dispatch(), Arc::clone(&id));
    id.lock().take()
}

/// x + y, as [`ops::add`](super::ops::add) says.
pub(super) fn sum<const D: usize>(x: Tensor<D>, y: Tensor<D>) -> Tensor<D> {
    let (x, y) = (x.into_dispatch(), y.into_dispatch());
    Tensor::from_dispatch(<Dispatch as VjpBackend>::sum(x, y))
}

/// Puts `out` (plain) into the graph as a function of `x`, with pullback `f`: dY in, dX out.
/// On an untracked `x` it returns `out` and drops `f`.
pub fn custom_vjp<const DX: usize, const DY: usize>(
    x: Tensor<DX>,
    out: Tensor<DY>,
    f: impl FnOnce(Tensor<DY>) -> Tensor<DX> + Send + 'static,
) -> Tensor<DY> {
    if !is_tracked(&x) {
        return out;
    }
    let f = Vjp::<1>::new(move |dy| [Some(f(Tensor::from_dispatch(dy)).into_dispatch())]);
    link1(x.into_dispatch(), out, f)
}

/// Like [`custom_vjp`] for an operation without a tensor input (embedding): its parent is a tracked
/// one-element leaf whose gradient is never read.
pub fn custom_source<const DY: usize>(
    token: &Tensor<1>,
    out: Tensor<DY>,
    f: impl FnOnce(Tensor<DY>) + Send + 'static,
) -> Tensor<DY> {
    if !is_tracked(token) {
        return out;
    }
    let f = Vjp::<1>::new(move |dy| {
        f(Tensor::from_dispatch(dy));
        [None]
    });
    link1(token.clone().into_dispatch(), out, f)
}

fn link1<const DY: usize>(parent: DispatchTensor, out: Tensor<DY>, f: Vjp<1>) -> Tensor<DY> {
    Tensor::from_dispatch(<Dispatch as VjpBackend>::vjp1(parent, out.into_dispatch(), f))
}

/// Like [`custom_vjp`] for a function of two tensors of one rank.
pub fn custom_vjp2<const D: usize, const DY: usize>(
    xs: [Tensor<D>; 2],
    out: Tensor<DY>,
    f: impl FnOnce(Tensor<DY>) -> [Tensor<D>; 2] + Send + 'static,
) -> Tensor<DY> {
    if !xs.iter().any(is_tracked) {
        return out;
    }
    let f = Vjp::<2>::new(move |dy| f(Tensor::from_dispatch(dy)).map(|g| Some(g.into_dispatch())));
    let [x, y] = xs.map(|x| x.into_dispatch());
    Tensor::from_dispatch(<Dispatch as VjpBackend>::vjp2(x, y, out.into_dispatch(), f))
}

/// Like [`custom_vjp`] for a function of three tensors of one rank.
pub fn custom_vjp3<const D: usize, const DY: usize>(
    xs: [Tensor<D>; 3],
    out: Tensor<DY>,
    f: impl FnOnce(Tensor<DY>) -> [Tensor<D>; 3] + Send + 'static,
) -> Tensor<DY> {
    if !xs.iter().any(is_tracked) {
        return out;
    }
    let f = Vjp::<3>::new(move |dy| f(Tensor::from_dispatch(dy)).map(|g| Some(g.into_dispatch())));
    let [x, y, z] = xs.map(|x| x.into_dispatch());
    Tensor::from_dispatch(<Dispatch as VjpBackend>::vjp3(x, y, z, out.into_dispatch(), f))
}

/// A graph that waits for its upstream gradient. It does not keep the output's elements alive.
pub struct Seed<const D: usize> {
    scalar: Tensor<1>,
    dy: Arc<Mutex<Option<Tensor<D>>>>,
}

/// Turns the tracked output `y` into a [`Seed`], to be given dY later.
pub fn seed_backward<const D: usize>(y: Tensor<D>) -> Seed<D> {
    let dy = Arc::new(Mutex::new(None));
    let scalar = Tensor::<1>::zeros([1], (&y.clone().inner().device(), y.dtype()));
    let cell = dy.clone();
    let scalar = custom_vjp(y, scalar, move |_one| {
        cell.lock().take().expect("backward sets the gradient first")
    });
    Seed { scalar, dy }
}

impl<const D: usize> Seed<D> {
    /// Walks the graph from dY (plain, of y's shape).
    pub fn backward(self, dy: Tensor<D>) -> Gradients {
        *self.dy.lock() = Some(dy);
        self.scalar.backward()
    }
}
