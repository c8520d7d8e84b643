//! Attention by the fused kernels of NVIDIA's GPUs, which compute each score twice over F and B
//! and keep none.

use burn::tensor::{Int, Tensor};

use super::hidden::MaskedKeys;
use crate::cube::FusedAttention;
use crate::kernels::attention::Dims;
use crate::split::ops::is_tracked;
use crate::split::{OpCx, custom_vjp};

/// See [`attend`](super::attend). Keeps F→B beside qkv and a number a query the output, which the
/// projection after it keeps as well where its W needs it.
pub(super) fn attention(
    qkv: Tensor<3>,
    plain: Tensor<3>,
    dims: Dims,
    masked: Option<MaskedKeys>,
    cx: &OpCx,
) -> Tensor<3> {
    let masked = masked.as_ref();
    let window = masked.and_then(MaskedKeys::window);
    let of = FusedAttention { dims, window, dropped: masked.and_then(MaskedKeys::dropped) };
    let documents = masked.and_then(MaskedKeys::documents);
    let positions: Option<Tensor<1, Int>> =
        documents.map(|documents| documents.positions_on(&plain.device()));
    let (out, sums) = of.forward(plain, positions.clone());
    if !is_tracked(&qkv) {
        return out;
    }
    let (plain, kept, sums) = (cx.keep(&qkv), cx.save(out.clone()), cx.save(sums));
    custom_vjp(qkv, out, move |dy| {
        of.backward(dy, plain.take(), positions, [kept.take(), sums.take()])
    })
}
