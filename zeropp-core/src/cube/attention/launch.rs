//! The kernels' source for a size of heads, and their launches.

use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeDevice;
use burn_cubecl::kernel::{cast, into_contiguous};
use burn_cubecl::tensor::CubeTensor;
use cubecl::features::MmaConfig;
use cubecl::ir::metadata::Info;
use cubecl::ir::{FloatKind, UIntKind};
use cubecl::prelude::*;
use cubecl::server::{KernelArguments, MetadataBindingInfo};
use cubecl::{CubeKernel, PrecompiledSource};

use super::FusedAttention;
use crate::cube::rows::empty;
use crate::kernels::attention::{Dims, Dropped};

/// Threads of a block, queries or keys of a block; `kernels.cu` has the same.
const THREADS: u32 = 128;
const FORWARD_QUERIES: usize = 128;
const BACKWARD_ROWS: usize = 64;

/// Whether there are kernels for heads of `d` elements: rows of whole 16 bytes, and sums of them
/// that fit into registers.
pub(super) fn has_heads_of(d: usize) -> bool {
    d.is_multiple_of(8) && (8..=128).contains(&d)
}

/// Whether the device has the products of `kernels.cu`.
pub(super) fn has_products(device: &CubeDevice) -> bool {
    let bf16 = ElemType::Float(FloatKind::BF16);
    let f32 = ElemType::Float(FloatKind::F32);
    let product = MmaConfig { a_type: bf16, b_type: bf16, cd_type: f32, m: 16, n: 8, k: 16 };
    matches!(device, CubeDevice::Cuda(_))
        && device.client().features().matmul.mma.contains(&product)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Part {
    Forward,
    BackwardQueries,
    BackwardKeys,
}

impl Part {
    /// Its function in `kernels.cu`.
    fn name(self) -> &'static str {
        match self {
            Part::Forward => "attention_forward",
            Part::BackwardQueries => "attention_backward_queries",
            Part::BackwardKeys => "attention_backward_keys",
        }
    }
}

/// A kernel of `kernels.cu`, compiled for a size of heads and for what is hidden.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Kernel {
    part: Part,
    head: usize,
    documents: bool,
    window: bool,
    dropout: bool,
}

impl Kernel {
    fn dim() -> CubeDim {
        CubeDim::new_1d(THREADS)
    }

    fn text(&self) -> String {
        let macros = [
            ("HEAD", self.head),
            ("FORWARD", usize::from(self.part == Part::Forward)),
            ("BACKWARD_QUERIES", usize::from(self.part == Part::BackwardQueries)),
            ("BACKWARD_KEYS", usize::from(self.part == Part::BackwardKeys)),
            ("DOCUMENTS", usize::from(self.documents)),
            ("WINDOW", usize::from(self.window)),
            ("DROPOUT", usize::from(self.dropout)),
        ];
        let lines = macros.map(|(name, value)| format!("#define {name} {value}\n"));
        lines.concat() + include_str!("kernels.cu")
    }
}

impl KernelMetadata for Kernel {
    fn name(&self) -> &'static str {
        self.part.name()
    }

    fn id(&self) -> KernelId {
        KernelId::new::<Self>().cube_dim(Self::dim().0).info(*self)
    }

    fn address_type(&self) -> ElemType {
        UIntKind::U32.into()
    }
}

impl CubeKernel for Kernel {
    /// Nothing but the threads of a block: the text stands for the rest.
    fn define(&self) -> KernelDefinition {
        let settings =
            KernelSettings::new(Self::dim().0, ExecutionMode::Unchecked, AddressType::U32);
        KernelDefinition { body: Scope::root(settings.clone()), settings, info: Info::default() }
    }

    fn source(&self) -> Option<PrecompiledSource> {
        let entrypoint_name = self.part.name().to_string();
        Some(PrecompiledSource { source: self.text(), entrypoint_name, lang: "cuda" })
    }
}

impl FusedAttention {
    /// Launches `part` on contiguous buffers in the order of its arguments, `positions` the last:
    /// a block of threads for each `of_block` tokens of each of `heads`.
    fn launch(
        &self,
        part: Part,
        [of_block, heads]: [usize; 2],
        buffers: &[&CubeTensor],
        positions: Option<&CubeTensor>,
    ) {
        let kernel = Kernel {
            part,
            head: self.dims.d,
            documents: positions.is_some(),
            window: self.window.is_some(),
            dropout: self.dropped.is_some(),
        };
        let blocks = [self.dims.s.div_ceil(of_block), heads, self.dims.b].map(|n| n as u32);
        let info = self.info();
        // All of it is an argument of the kernel: nothing is copied to the device first.
        let info = MetadataBindingInfo::new(info.to_vec(), info.len());
        let handles = buffers.iter().copied().chain(positions).map(|t| t.handle.clone().binding());
        let arguments = KernelArguments::new().with_buffers(handles.collect()).with_info(info);
        let count = CubeCount::Static(blocks[0], blocks[1], blocks[2]);
        buffers[0].client.launch(Box::new(kernel), count, arguments);
    }

    /// `Info` in `kernels.cu`.
    fn info(&self) -> [u64; 6] {
        let Dims { s, heads, groups, d, .. } = self.dims;
        let scale = 1.0 / (d as f32).sqrt();
        let mut words = [0; 12];
        words[..5].copy_from_slice(&[
            s as u32,
            heads as u32,
            groups as u32,
            scale.to_bits(),
            self.window.unwrap_or_default() as u32,
        ]);
        if let Some(Dropped { dropout, sample, .. }) = self.dropped {
            let [low, high] = dropout.key;
            let kept = dropout.scale.to_bits();
            let rest = [sample as u32, dropout.step, low, high, dropout.threshold, kept];
            words[5..11].copy_from_slice(&rest);
        }
        core::array::from_fn(|i| u64::from(words[2 * i]) | u64::from(words[2 * i + 1]) << 32)
    }
}

/// `t` without gaps, and beginning where kernels may load 16 bytes.
fn ready(t: CubeTensor) -> CubeTensor {
    let t = into_contiguous(t);
    let is_aligned = t.handle.offset_start.unwrap_or(0).is_multiple_of(16);
    if is_aligned { t } else { t.copy() }
}

fn positions_of(positions: Option<CubeTensor>) -> Option<CubeTensor> {
    positions.map(|positions| into_contiguous(cast(positions, DType::I32)))
}

/// See [`FusedAttention::forward`].
pub(super) fn forward(
    qkv: CubeTensor,
    positions: Option<CubeTensor>,
    of: FusedAttention,
) -> (CubeTensor, CubeTensor) {
    let Dims { b, s, heads, .. } = of.dims;
    let (qkv, positions) = (ready(qkv), positions_of(positions));
    let out = empty(&qkv, Shape::new([b, s, of.dims.out_width()]), qkv.dtype);
    let sums = empty(&qkv, Shape::new([b, heads, s]), DType::F32);
    let (at, buffers) = ([FORWARD_QUERIES, heads], [&qkv, &out, &sums]);
    of.launch(Part::Forward, at, &buffers, positions.as_ref());
    (out, sums)
}

/// See [`FusedAttention::backward`]; of dy, qkv, out and sums.
pub(super) fn backward(
    tensors: [CubeTensor; 4],
    positions: Option<CubeTensor>,
    of: FusedAttention,
) -> CubeTensor {
    let ([dy, qkv, out, sums], positions) = (tensors.map(ready), positions_of(positions));
    let dqkv = empty(&qkv, qkv.shape(), qkv.dtype);
    let means = empty(&qkv, sums.shape(), DType::F32);
    let buffers = [&qkv, &out, &dy, &sums, &dqkv, &means];
    let at = [BACKWARD_ROWS, of.dims.heads];
    of.launch(Part::BackwardQueries, at, &buffers, positions.as_ref());
    let buffers = [&qkv, &dy, &sums, &means, &dqkv];
    let at = [BACKWARD_ROWS, of.dims.groups];
    of.launch(Part::BackwardKeys, at, &buffers, positions.as_ref());
    dqkv
}
