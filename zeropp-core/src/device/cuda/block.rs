//! The memory behind tensors, as blocks of bytes, and tensors that are made of such blocks again.

use std::ops::Range;

use burn::backend::Cube;
use burn::tensor::Tensor;
use burn_cubecl::fusion::{CubeFusionHandle, FusionCubeRuntime};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use burn_fusion::NoOp;
use burn_fusion::custom::{CustomOpIr, OperationIr, StreamId, TensorIr};
use cubecl::client::Client;
use cubecl::server::Handle;
use cubecl_server::server::BufferBinding;

/// What CubeCL's blocks are aligned to: so are ours within them, and views as they were before.
const ALIGNMENT: u64 = 512;

/// What tensors that share memory have of it. Keeps it while it is alive.
#[derive(Clone)]
pub(crate) struct GpuBlock {
    handle: Handle,
    extent: Extent,
}

/// Which bytes of some memory a block has, and who gives memory.
#[derive(Clone)]
pub(super) struct Extent {
    client: Client,
    range: Range<u64>,
}

/// A tensor without its memory: its layout, and which bytes of the memory it has.
pub(crate) struct GpuView {
    /// It has a handle of no memory.
    tensor: CubeTensor,
    fused: burn_fusion::Client<FusionCubeRuntime>,
    range: Range<u64>,
    id: usize,
}

impl GpuView {
    /// The same for clones of one tensor.
    pub(crate) fn id(&self) -> usize {
        self.id
    }
}

impl Extent {
    pub(super) fn bytes(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// New memory for as many bytes, of any values.
    pub(super) fn empty(&self) -> GpuBlock {
        let handle = self.client.empty(self.bytes() as usize);
        GpuBlock { handle, extent: self.clone() }
    }
}

impl GpuBlock {
    /// Of a plain tensor, whose work is queued first, and what it is of that; none where it is not
    /// on an NVIDIA GPU.
    pub(crate) fn of<const D: usize>(t: &Tensor<D>) -> Option<(GpuBlock, GpuView)> {
        let tensor = t.clone().inner().try_into_primitive::<Cube>().ok()?;
        let (fused, id) = (tensor.client.clone(), tensor.id.value() as usize);
        let tensor: CubeTensor = fused.resolve_tensor_float::<CubeBackend>(tensor);
        if !matches!(tensor.device, CubeDevice::Cuda(_)) {
            return None;
        }
        let handle = tensor.handle.clone();
        let range = handle.clone().binding().range();
        let nothing = Handle::new(handle.service, handle.stream, 0);
        let client = tensor.client.clone();
        let view = GpuView {
            tensor: CubeTensor { handle: nothing, ..tensor },
            fused,
            range: range.clone(),
            id,
        };
        let range = range.start / ALIGNMENT * ALIGNMENT..range.end;
        Some((GpuBlock { handle, extent: Extent { client, range } }, view))
    }

    /// The same for two that are of one memory.
    pub(crate) fn id(&self) -> usize {
        self.handle.clone().binding().memory.id().value
    }

    /// Has also what `other` has of the same memory.
    pub(crate) fn join(&mut self, other: &GpuBlock) {
        let (range, more) = (&mut self.extent.range, &other.extent.range);
        *range = range.start.min(more.start)..range.end.max(more.end);
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.extent.bytes()
    }

    pub(super) fn extent(&self) -> &Extent {
        &self.extent
    }

    /// Its bytes, as CubeCL's thread finds them: those of tensors, or of a block that is `new`.
    pub(super) fn binding(&self, new: bool) -> BufferBinding {
        let start = if new { 0 } else { self.extent.range.start };
        self.part(start..start + self.extent.bytes()).binding()
    }

    /// These bytes of the memory.
    fn part(&self, range: Range<u64>) -> Handle {
        let mut handle = self.handle.clone();
        handle.offset_end = Some(handle.size() - range.end);
        handle.offset_start = Some(range.start);
        handle
    }

    /// The tensor that `view` is of the bytes, which are in new memory.
    pub(crate) fn tensor<const D: usize>(&self, view: GpuView) -> Tensor<D> {
        let GpuView { tensor, fused, range, .. } = view;
        let before = self.extent.range.start;
        let handle = self.part(range.start - before..range.end - before);
        let tensor = CubeTensor { handle, ..tensor };
        let (shape, dtype) = (tensor.meta.shape().clone(), tensor.dtype);
        let id = fused.register_tensor_handle(CubeFusionHandle::from(tensor));
        // An operation that does nothing: so a tensor is made of a handle.
        let made = CustomOpIr::new("come_back", &[], &[TensorIr::uninit(id, shape, dtype)]);
        let nothing = NoOp::<CubeBackend>::new();
        let made = fused.register(StreamId::current(), OperationIr::Custom(made), nothing);
        let made = made.into_iter().next().expect("an operation gives its outputs");
        Tensor::from_primitive::<Cube>(made)
    }
}
