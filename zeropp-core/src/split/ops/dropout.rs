//! Dropout, with masks that are made again in the backward.

use burn::tensor::{DType, Tensor, TensorData};

use super::{fast, halves, is_tracked};
use crate::cpu_tensor;
#[cfg(feature = "cube")]
use crate::cube::DroppedRows;
use crate::kernels::bf16::rows as half_rows;
use crate::kernels::dropout as kernels;
use crate::split::{DropoutPlace, OpCx, custom_vjp};

/// x with elements dropped and the others scaled, where the micro-batch has dropout
/// ([`Masks::dropout`](crate::split::Masks)); else x. Which elements follows from `place`, so a
/// place may be named once in a model. Keeps nothing: the mask is made again.
pub fn dropout(x: Tensor<3>, place: DropoutPlace<'_>, cx: &OpCx) -> Tensor<3> {
    let Some(dropout) = &cx.masks.dropout else { return x };
    let [_, s, _] = x.dims();
    let samples = kernels::SampleRows { first: dropout.sample, token: cx.first_token(), rows: s };
    let dropout = dropout.at(place);
    let out = x.clone().inner();
    let out = if cx.output_wanted { apply(out, samples, dropout) } else { out };
    if !is_tracked(&x) {
        return out;
    }
    custom_vjp(x, out, move |dy| apply(dy, samples, dropout))
}

/// x by its factors, in x's memory where nothing else holds it.
fn apply(x: Tensor<3>, samples: kernels::SampleRows, dropout: kernels::DropoutRule) -> Tensor<3> {
    let [b, s, h] = x.dims();
    if fast(&x).is_some() {
        let apply = |x: &mut [f32]| kernels::apply(x, h, samples, dropout);
        return cpu_tensor::map_in_place(x, apply).expect("on the CPU");
    }
    if halves(&x).is_some() {
        let apply = |x: &mut [_]| half_rows::drop_some(x, h, samples, dropout);
        return cpu_tensor::map_halves_in_place(x, apply).expect("on the CPU");
    }
    #[cfg(feature = "cube")]
    if super::on_gpu(&x) {
        let sample = samples.first;
        let rows = DroppedRows { rule: dropout, queries: s, heads: 1, first: 0, sample };
        return crate::cube::drop_rows(x, rows);
    }
    let factors = TensorData::new(kernels::factors(b * s, h, samples, dropout), [b, s, h]);
    let factors = Tensor::<3>::from_data(factors, (&x.device(), DType::F32));
    let dtype = x.dtype();
    (x.cast(DType::F32) * factors).cast(dtype)
}
