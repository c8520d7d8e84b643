//! AdamW, as `zeropp_kernels::adamw`: parameters and moments are read and written once.

use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, Dispatch, backend_extension};
use burn::tensor::{DType, Int as Whole, Tensor as Plain};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::rows::{addresses, empty, vector_size};
use crate::kernels::adamw::AdamWScalars;
use crate::params::BLOCK;

/// A unit updates a vector of elements. Weight decay begins and ends at blocks `changes`, and
/// applies to those before the first of them where `decays` is 1.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
fn adamw_kernel<I: Int, N: Size>(
    p: &Tensor<Vector<f32, N>>,
    m: &Tensor<Vector<f32, N>>,
    v: &Tensor<Vector<f32, N>>,
    g: &Tensor<Vector<f32, N>>,
    changes: &Tensor<I>,
    new_p: &mut Tensor<Vector<f32, N>>,
    new_m: &mut Tensor<Vector<f32, N>>,
    new_v: &mut Tensor<Vector<f32, N>>,
    units: usize,
    changes_len: usize,
    decays: u32,
    towards1: f32,
    beta2: f32,
    towards2: f32,
    eps: f32,
    step_size: f32,
    root_bias2: f32,
    decayed: f32,
    gradient: f32,
) {
    if ABSOLUTE_POS >= units {
        terminate!();
    }
    let block = (ABSOLUTE_POS * N::value() / BLOCK) as u32;
    let mut decay = decays;
    let mut i = 0usize.runtime();
    while i < changes_len {
        if block >= u32::cast_from(changes[i]) {
            decay = 1 - decay;
        }
        i += 1;
    }
    let mut keep = 1.0f32.runtime();
    if decay == 1 {
        keep = decayed;
    }
    let g = g[ABSOLUTE_POS] * Vector::new(gradient);
    let before = m[ABSOLUTE_POS];
    let m = before + (g - before) * Vector::new(towards1);
    let v = v[ABSOLUTE_POS] * Vector::new(beta2) + Vector::new(towards2) * g * g;
    let root = v.sqrt() / Vector::new(root_bias2) + Vector::new(eps);
    new_p[ABSOLUTE_POS] = p[ABSOLUTE_POS] * Vector::new(keep) - Vector::new(step_size) * (m / root);
    new_m[ABSOLUTE_POS] = m;
    new_v[ABSOLUTE_POS] = v;
}

/// Parameters and moments after an update.
type Updated<T> = (T, T, T);

#[backend_extension(Cube, Fusion)]
trait AdamWKernel: Backend {
    #[fusion(meta = updated_of)]
    fn adamw(
        p: FloatTensor<Self>,
        m: FloatTensor<Self>,
        v: FloatTensor<Self>,
        g: FloatTensor<Self>,
        changes: IntTensor<Self>,
        decays: bool,
        scalars: AdamWScalars,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
}

impl AdamWKernel for CubeBackend {
    fn adamw(
        p: FloatTensor<Self>,
        m: FloatTensor<Self>,
        v: FloatTensor<Self>,
        g: FloatTensor<Self>,
        changes: IntTensor<Self>,
        decays: bool,
        scalars: AdamWScalars,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        update([p, m, v, g], changes, decays, scalars)
    }
}

fn updated_of(
    p: &TensorSpec,
    m: &TensorSpec,
    v: &TensorSpec,
    _g: &TensorSpec,
    _changes: &TensorSpec,
    _decays: &bool,
    _scalars: &AdamWScalars,
) -> Updated<TensorSpec> {
    (p.clone(), m.clone(), v.clone())
}

/// fp32 parameters `p` and moments `m` and `v` after an update by the gradient `g`, `[n]` each, in
/// place where nothing else holds them. `changes` are the blocks of [`BLOCK`] elements where weight
/// decay begins or ends, in order, with the bits of a u32, and may lie behind the last; it applies
/// to block 0 if `decays`.
pub(crate) fn adamw(
    [p, m, v, g]: [Plain<1>; 4],
    changes: Plain<1, Whole>,
    decays: bool,
    scalars: AdamWScalars,
) -> [Plain<1>; 3] {
    let n = p.dims();
    for t in [&p, &m, &v, &g] {
        assert_eq!((t.dims(), t.dtype()), (n, DType::F32));
    }
    let [p, m, v, g] = [p, m, v, g].map(Plain::into_dispatch);
    let changes = changes.into_dispatch();
    let (p, m, v) = <Dispatch as AdamWKernel>::adamw(p, m, v, g, changes, decays, scalars);
    [p, m, v].map(Plain::from_dispatch)
}

fn update(
    [p, m, v, g]: [CubeTensor; 4],
    changes: CubeTensor,
    decays: bool,
    s: AdamWScalars,
) -> Updated<CubeTensor> {
    let [p, m, v, g] = [p, m, v, g].map(into_contiguous);
    let changes = into_contiguous(changes);
    let n = p.meta.num_elements();
    // In place where nothing else holds what was there.
    let out = |t: &CubeTensor| match t.can_mut() {
        true => None,
        false => Some(empty(t, t.meta.shape().clone(), DType::F32)),
    };
    let new = [&p, &m, &v].map(out);
    let fresh = new.iter().flatten();
    let all: Vec<&CubeTensor> = [&p, &m, &v, &g].into_iter().chain(fresh).collect();
    // Parameters begin at multiples of a block, so that a vector is of one of them.
    let vector = vector_size(&all, &[n, BLOCK]);
    let units = n / vector;
    let client = p.client.clone();
    let dim = CubeDim::new(&client, units);
    let count = cubecl::calculate_cube_count_elemwise(&client, units, dim);
    let written = |place: usize| match (&new[place], [&p, &m, &v][place]) {
        (Some(new), _) => new.clone().into_tensor_arg(),
        (None, old) => old.as_tensor_alias(place),
    };
    let arg = |t: &CubeTensor| t.clone().into_tensor_arg();
    let kernel = match changes.dtype {
        DType::I64 => adamw_kernel::launch_unchecked::<i64>,
        _ => adamw_kernel::launch_unchecked::<i32>,
    };
    // SAFETY: a unit stays below the elements, which all tensors but `changes` have.
    unsafe {
        kernel(
            &client,
            count,
            dim,
            addresses(&all),
            vector,
            arg(&p),
            arg(&m),
            arg(&v),
            arg(&g),
            arg(&changes),
            written(0),
            written(1),
            written(2),
            units,
            changes.meta.num_elements(),
            u32::from(decays),
            s.towards1,
            s.beta2,
            s.towards2,
            s.eps,
            s.step_size,
            s.root_bias2,
            s.keep,
            s.gradient,
        );
    }
    let [new_p, new_m, new_v] = new;
    (new_p.unwrap_or(p), new_m.unwrap_or(m), new_v.unwrap_or(v))
}
