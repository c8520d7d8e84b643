//! Causal attention on tensor cores, forward and backward, whose scores never leave the registers:
//! kernels in CUDA C++ (`kernels.cu`), which CubeCL hands to NVRTC and launches as it does those
//! that it writes itself (docs/adr/0099-fused-attention-is-cuda-s-own.md).

mod launch;

use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, Cube, Dispatch, backend_extension};
use burn::tensor::{DType, Int, Shape, Tensor};
use burn_cubecl::CubeBackend;

use crate::kernels::attention::{Dims, Dropped};

/// Sizes, and what queries do not see.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FusedAttention {
    pub(crate) dims: Dims,
    /// Keys that a query sees, itself included, where those are not all before it.
    pub(crate) window: Option<usize>,
    pub(crate) dropped: Option<Dropped>,
}

impl FusedAttention {
    /// Whether there are kernels for heads of this size and for the device and type of `qkv`: bf16
    /// on an NVIDIA GPU of compute capability 8.0 or later, and heads of a multiple of 8 elements,
    /// at most 128.
    pub(crate) fn fits(qkv: &Tensor<3>, d: usize) -> bool {
        if qkv.dtype() != DType::BF16 || !launch::has_heads_of(d) {
            return false;
        }
        let fused = qkv.clone().inner().try_into_primitive::<Cube>();
        fused.is_ok_and(|fused| launch::has_products(fused.client.device()))
    }

    /// The output `[b, s, heads·d]` in bf16, and the fp32 logarithms of the sums of exponentials,
    /// `[b, heads, s]`, of `qkv: [b, s, (heads + 2·groups)·d]`. With `positions: [b·s]` of tokens
    /// in their documents, queries see their document only.
    pub(crate) fn forward(
        self,
        qkv: Tensor<3>,
        positions: Option<Tensor<1, Int>>,
    ) -> (Tensor<3>, Tensor<3>) {
        let qkv = self.checked(qkv);
        let (out, sums) = match positions {
            None => <Dispatch as AttentionKernels>::fused_attention(qkv, self),
            Some(positions) => {
                let positions = positions.into_dispatch();
                <Dispatch as AttentionKernels>::packed_attention(qkv, positions, self)
            }
        };
        (Tensor::from_dispatch(out), Tensor::from_dispatch(sums))
    }

    /// The gradient of qkv for `dy` of the output's shape and type; `out` and `sums` as from
    /// [`forward`](Self::forward).
    pub(crate) fn backward(
        self,
        dy: Tensor<3>,
        qkv: Tensor<3>,
        positions: Option<Tensor<1, Int>>,
        [out, sums]: [Tensor<3>; 2],
    ) -> Tensor<3> {
        assert_eq!((dy.dims(), dy.dtype()), (out.dims(), DType::BF16));
        let qkv = self.checked(qkv);
        let [dy, out, sums] = [dy, out, sums].map(Tensor::into_dispatch);
        Tensor::from_dispatch(match positions {
            None => {
                <Dispatch as AttentionKernels>::fused_attention_backward(dy, qkv, out, sums, self)
            }
            Some(positions) => {
                let positions = positions.into_dispatch();
                <Dispatch as AttentionKernels>::packed_attention_backward(
                    dy, qkv, out, sums, positions, self,
                )
            }
        })
    }

    fn checked(&self, qkv: Tensor<3>) -> burn::backend::DispatchTensor {
        let Dims { b, s, .. } = self.dims;
        assert_eq!((qkv.dims(), qkv.dtype()), ([b, s, self.dims.width()], DType::BF16));
        qkv.into_dispatch()
    }
}

/// With `positions`, of documents that are packed into samples.
#[backend_extension(Cube, Fusion)]
trait AttentionKernels: Backend {
    #[fusion(meta = output_of)]
    fn fused_attention(
        qkv: FloatTensor<Self>,
        of: FusedAttention,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    #[fusion(meta = packed_output_of)]
    fn packed_attention(
        qkv: FloatTensor<Self>,
        positions: IntTensor<Self>,
        of: FusedAttention,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    #[fusion(dtype = qkv, shape = qkv)]
    fn fused_attention_backward(
        dy: FloatTensor<Self>,
        qkv: FloatTensor<Self>,
        out: FloatTensor<Self>,
        sums: FloatTensor<Self>,
        of: FusedAttention,
    ) -> FloatTensor<Self>;

    #[fusion(dtype = qkv, shape = qkv)]
    fn packed_attention_backward(
        dy: FloatTensor<Self>,
        qkv: FloatTensor<Self>,
        out: FloatTensor<Self>,
        sums: FloatTensor<Self>,
        positions: IntTensor<Self>,
        of: FusedAttention,
    ) -> FloatTensor<Self>;
}

impl AttentionKernels for CubeBackend {
    fn fused_attention(
        qkv: FloatTensor<Self>,
        of: FusedAttention,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        launch::forward(qkv, None, of)
    }

    fn packed_attention(
        qkv: FloatTensor<Self>,
        positions: IntTensor<Self>,
        of: FusedAttention,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        launch::forward(qkv, Some(positions), of)
    }

    fn fused_attention_backward(
        dy: FloatTensor<Self>,
        qkv: FloatTensor<Self>,
        out: FloatTensor<Self>,
        sums: FloatTensor<Self>,
        of: FusedAttention,
    ) -> FloatTensor<Self> {
        launch::backward([dy, qkv, out, sums], None, of)
    }

    fn packed_attention_backward(
        dy: FloatTensor<Self>,
        qkv: FloatTensor<Self>,
        out: FloatTensor<Self>,
        sums: FloatTensor<Self>,
        positions: IntTensor<Self>,
        of: FusedAttention,
    ) -> FloatTensor<Self> {
        launch::backward([dy, qkv, out, sums], Some(positions), of)
    }
}

fn output_of(qkv: &TensorSpec, of: &FusedAttention) -> (TensorSpec, TensorSpec) {
    let Dims { b, s, heads, .. } = of.dims;
    let out = Shape::new([b, s, of.dims.out_width()]);
    let sums = Shape::new([b, heads, s]);
    (TensorSpec::new(out, qkv.dtype), TensorSpec::new(sums, DType::F32))
}

fn packed_output_of(
    qkv: &TensorSpec,
    _positions: &TensorSpec,
    of: &FusedAttention,
) -> (TensorSpec, TensorSpec) {
    output_of(qkv, of)
}
