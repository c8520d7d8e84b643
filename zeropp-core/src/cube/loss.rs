//! Cross-entropy of rows of logits, with its gradient in their place.

use burn::tensor::{DType, Shape, bf16, f16};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::rows::{ExpSum, StridedRows, addresses, empty, lane_of_unit, row_sum, vector_size};

/// The gradient of `weight` times the sum takes the place of the logits if `gradient`; a target
/// that is no column makes the row's loss `unknown`, which WGSL has no literal for.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
fn cross_entropy_kernel<F: Float, I: Int, N: Size>(
    logits: &mut Tensor<Vector<F, N>>,
    targets: &Tensor<I>,
    losses: &mut Tensor<f32>,
    rows: usize,
    width: usize,
    pitch: usize,
    unknown: f32,
    weight: f32,
    #[comptime] gradient: bool,
    #[comptime] n: usize,
    #[comptime] dim: CubeDim,
) {
    let (row, start, step) = lane_of_unit();
    let from = row * pitch;
    let mut end = 0usize.runtime();
    let mut target = width * n;
    if row < rows {
        end = width;
        // A negative id becomes one that is too large.
        target = u32::cast_from(targets[row]) as usize;
    }
    let (its_vector, its_place) = (target / n, target % n);
    let mut part = ExpSum::empty();
    let mut chosen = 0.0f32.runtime();
    let mut i = start;
    while i < end {
        let values = Vector::<f32, N>::cast_from(logits[from + i]);
        part.add_vector::<N>(values, n);
        if i == its_vector {
            #[unroll]
            for place in 0..n {
                if place == its_place {
                    chosen = values.extract(place);
                }
            }
        }
        i += step;
    }
    let (row_top, row_total) = part.of_row(dim);
    chosen = row_sum(chosen, dim);
    if its_vector >= width {
        chosen = unknown;
    }
    if start == 0 && row < rows {
        losses[row] = row_top + row_total.ln() - chosen;
    }
    if comptime!(gradient) {
        let scale = Vector::<f32, N>::new(weight / row_total);
        i = start;
        while i < end {
            let values = Vector::<f32, N>::cast_from(logits[from + i]);
            let mut slopes = (values - Vector::new(row_top)).exp() * scale;
            if i == its_vector {
                #[unroll]
                for place in 0..n {
                    if place == its_place {
                        let slope = slopes.extract(place) - weight;
                        slopes.insert(place, slope);
                    }
                }
            }
            logits[from + i] = Vector::cast_from(slopes);
            i += step;
        }
    }
}

#[cfg(test)]
pub(super) static COPIES: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

/// The logits, or a copy where somebody else holds them.
fn own(logits: CubeTensor) -> CubeTensor {
    if logits.can_mut() {
        return logits;
    }
    #[cfg(test)]
    COPIES.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
    logits.copy()
}

/// See [`cross_entropy`](super::cross_entropy). Without `gradient` the logits come back as they
/// are.
pub(super) fn cross_entropy(
    logits: CubeTensor,
    targets: CubeTensor,
    gradient: bool,
    weight: f32,
) -> (CubeTensor, CubeTensor) {
    let logits = if gradient { own(logits) } else { logits };
    let logits = StridedRows::of(logits);
    let targets = into_contiguous(targets);
    let losses = empty(&logits.tensor, Shape::new([logits.n]), DType::F32);
    let at = logits.launch();
    let n = vector_size(&[&logits.tensor], &[logits.width, logits.pitch]);
    let kernel = match (logits.tensor.dtype, targets.dtype) {
        (DType::F32, DType::I32) => cross_entropy_kernel::launch_unchecked::<f32, i32>,
        (DType::F32, DType::I64) => cross_entropy_kernel::launch_unchecked::<f32, i64>,
        (DType::BF16, DType::I32) => cross_entropy_kernel::launch_unchecked::<bf16, i32>,
        (DType::BF16, DType::I64) => cross_entropy_kernel::launch_unchecked::<bf16, i64>,
        (DType::F16, DType::I32) => cross_entropy_kernel::launch_unchecked::<f16, i32>,
        (DType::F16, DType::I64) => cross_entropy_kernel::launch_unchecked::<f16, i64>,
        other => panic!("cross-entropy of {other:?}: f32, bf16 or f16 logits, i32 or i64 targets"),
    };
    // SAFETY: a unit stays below the sizes of `logits`; `losses` and `targets` have an element for
    // each of its rows, and a target is compared with the width.
    unsafe {
        kernel(
            &at.client,
            at.count,
            at.dim,
            addresses(&[&logits.tensor]),
            n,
            logits.tensor.clone().into_tensor_arg(),
            targets.into_tensor_arg(),
            losses.clone().into_tensor_arg(),
            logits.n,
            logits.width / n,
            logits.pitch / n,
            f32::NAN,
            weight,
            gradient,
            n,
            at.dim,
        );
    }
    (losses, logits.tensor)
}
