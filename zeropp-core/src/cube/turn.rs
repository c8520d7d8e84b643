//! Rotary position embedding of rows in place. The tables of angles stay where the rows are.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, Dispatch, backend_extension};
use burn::tensor::{DType, Int as Whole, Tensor as Plain, bf16, f16};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::rows::{StridedRows, addresses, vector_size};
use crate::kernels::rope::Turned;

/// Which heads of rows turn, and by which rows of the tables of angles.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TurnedRows {
    /// The first heads of a row.
    pub(crate) heads: Turned,
    /// The row of the tables that is that of position 0.
    pub(crate) first: usize,
    /// Rows after which the positions begin again: that many are read.
    pub(crate) period: usize,
    /// Whether by the negative angles.
    pub(crate) back: bool,
}

/// A unit turns a vector of elements of a head's first half and the one of its second half.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
fn turn_kernel<F: Float, I: Int, N: Size>(
    x: &mut Tensor<Vector<F, N>>,
    cos: &Tensor<Vector<f32, N>>,
    sin: &Tensor<Vector<f32, N>>,
    positions: &Tensor<I>,
    units: usize,
    heads: usize,
    half: usize,
    pitch: usize,
    first: usize,
    period: usize,
    sign: f32,
) {
    if ABSOLUTE_POS >= units {
        terminate!();
    }
    let lane = ABSOLUTE_POS % half;
    let head = ABSOLUTE_POS / half;
    let row = head / heads;
    let position = first + u32::cast_from(positions[row % period]) as usize;
    let c = cos[position * half + lane];
    let s = sin[position * half + lane] * Vector::new(sign);
    let at = row * pitch + head % heads * 2 * half + lane;
    let low = Vector::<f32, N>::cast_from(x[at]);
    let high = Vector::<f32, N>::cast_from(x[at + half]);
    x[at] = Vector::cast_from(low * c - high * s);
    x[at + half] = Vector::cast_from(high * c + low * s);
}

#[backend_extension(Cube, Fusion)]
trait TurnKernel: Backend {
    #[fusion(dtype = x, shape = x)]
    fn turn_rows(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        positions: IntTensor<Self>,
        by: TurnedRows,
    ) -> FloatTensor<Self>;
}

impl TurnKernel for CubeBackend {
    fn turn_rows(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        positions: IntTensor<Self>,
        by: TurnedRows,
    ) -> FloatTensor<Self> {
        turn(x, cos, sin, positions, by)
    }
}

/// The rows of `x: [.., width]` with their first heads turned `by` the angles of their positions,
/// in place where nothing else holds `x`: by fp32 `cos` and `sin`, `[angles, d/2]`, and row i by
/// those of position `positions[i mod period]`.
pub(crate) fn turn_rows<const D: usize>(
    x: Plain<D>,
    [cos, sin]: [Plain<2>; 2],
    positions: Plain<1, Whole>,
    by: TurnedRows,
) -> Plain<D> {
    let (t, angles) = (by.heads, cos.dims()[0]);
    assert_eq!((x.dims()[D - 1], cos.dims(), sin.dims()), (t.width, [angles, t.d / 2], cos.dims()));
    assert_eq!([cos.dtype(), sin.dtype()], [DType::F32; 2]);
    let fits = t.heads * t.d <= t.width && by.period > 0 && by.period <= positions.dims()[0];
    assert!(fits, "{by:?} for {:?}, {} positions", x.dims(), positions.dims()[0]);
    let (cos, sin, positions) =
        (cos.into_dispatch(), sin.into_dispatch(), positions.into_dispatch());
    let turned = <Dispatch as TurnKernel>::turn_rows(x.into_dispatch(), cos, sin, positions, by);
    Plain::from_dispatch(turned)
}

fn turn(
    x: CubeTensor,
    cos: CubeTensor,
    sin: CubeTensor,
    positions: CubeTensor,
    by: TurnedRows,
) -> CubeTensor {
    let x = StridedRows::of(x).tensor;
    let x = StridedRows::of(if x.can_mut() { x } else { x.copy() });
    let [cos, sin, positions] = [cos, sin, positions].map(into_contiguous);
    let (heads, half) = (by.heads.heads, by.heads.d / 2);
    let vector = vector_size(&[&x.tensor, &cos, &sin], &[half, x.pitch]);
    let units = x.n * heads * (half / vector);
    let client = x.tensor.client.clone();
    let dim = CubeDim::new(&client, units);
    let count = cubecl::calculate_cube_count_elemwise(&client, units, dim);
    let kernel = match (x.tensor.dtype, positions.dtype) {
        (DType::F32, DType::I32) => turn_kernel::launch_unchecked::<f32, i32>,
        (DType::F32, DType::I64) => turn_kernel::launch_unchecked::<f32, i64>,
        (DType::BF16, DType::I32) => turn_kernel::launch_unchecked::<bf16, i32>,
        (DType::BF16, DType::I64) => turn_kernel::launch_unchecked::<bf16, i64>,
        (DType::F16, DType::I32) => turn_kernel::launch_unchecked::<f16, i32>,
        (DType::F16, DType::I64) => turn_kernel::launch_unchecked::<f16, i64>,
        other => panic!("rotary embedding in {other:?}: f32, bf16 or f16, by i32 or i64"),
    };
    // SAFETY: a unit stays below the rows of `x`, and in those in the heads; the tables have a row
    // for each position, of which there are `period`.
    unsafe {
        kernel(
            &client,
            count,
            dim,
            addresses(&[&x.tensor]),
            vector,
            x.tensor.clone().into_tensor_arg(),
            cos.into_tensor_arg(),
            sin.into_tensor_arg(),
            positions.into_tensor_arg(),
            units,
            heads,
            half / vector,
            x.pitch / vector,
            by.first,
            by.period,
            if by.back { -1.0 } else { 1.0 },
        );
    }
    x.tensor
}
