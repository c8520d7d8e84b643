//! Attention of a slice of a sample, by the CPU's kernels: its queries see the keys and values of
//! the slices before it, too, and its backward adds to their gradients.

use burn::tensor::Tensor;

use super::super::is_tracked;
use super::row_kernel::RowKernel;
use crate::kernels::attention::{Dims, Dropped, EarlierSums};
use crate::meter::MemoryKind;
use crate::split::{DropoutPlace, OpCx, Saved, SliceCx, custom_vjp};

/// The output for `qkv`, whose plain value is `plain`. Keeps F→B: qkv, and an fp32 number of each
/// query and head. Where the forward keeps nothing now, as it is done again, keys and values until
/// then.
///
/// # Panics
/// Panics off the CPU.
pub(super) fn attend(
    qkv: Tensor<3>,
    plain: Tensor<3>,
    kernel: RowKernel,
    slice: &SliceCx,
    cx: &OpCx,
) -> Tensor<3> {
    let keys = slice.keys(kernel.columns());
    let forward = kernel.forward(&keys.earlier(), &plain);
    let (out, sums) = forward.expect("slices are for the CPU's kernels");
    if !is_tracked(&qkv) {
        let meter = &cx.meter;
        keys.keep(|| Saved::new(kernel.keys_of(&plain), MemoryKind::Activation, meter));
        return out;
    }
    // Where it is done again all of the row is there from now on.
    keys.forget();
    let (plain, sums) = (cx.save(plain), cx.save(sums));
    keys.keep(|| plain.clone());
    custom_vjp(qkv, out, move |dy| {
        let (qkv, sums, earlier) = (plain.get(), sums.take(), keys.earlier());
        let dqkv = keys.with_sums(|own, others| {
            let handed = EarlierSums { own, earlier: others };
            kernel.backward(&earlier, [&qkv, &sums, &dy], handed)
        });
        keys.forget();
        drop(plain);
        dqkv
    })
}

/// The kernel of a slice, of `window` where that is shorter than the sample.
pub(super) fn kernel(
    d: Dims,
    window: Option<usize>,
    place: Option<DropoutPlace<'_>>,
    slice: &SliceCx,
    cx: &OpCx,
) -> RowKernel {
    let dropped = place.zip(cx.masks.dropout.as_ref()).map(|(place, dropout)| Dropped {
        dropout: dropout.at(place),
        sample: dropout.sample,
        token: 0,
    });
    let window = window.filter(|window| *window < slice.sample_tokens());
    RowKernel::new(d, slice.tokens().start, cx.masks.documents.as_deref(), window, dropped)
}
