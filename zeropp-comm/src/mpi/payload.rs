//! Buffers on their way into MPI and out of it.

use burn::tensor::{DType, Device, Tensor, TensorData};

use super::sys::TransferMemory;
use super::wire::INLINE_MAX;
use crate::kernels;
use crate::progress::Group;
use zeropp_core::cpu_tensor::on_cpu;

/// A flat buffer on its way into MPI.
pub(super) struct Payload {
    pub(super) memory: TransferMemory,
    pub(super) kind: DType,
    pub(super) len: usize,
    device: Device,
}

impl Payload {
    /// Views a tensor of the CPU, or copies one from elsewhere.
    pub(super) fn new(tensor: Tensor<1>) -> Payload {
        let (kind, len, device) = (tensor.dtype(), tensor.dims()[0], tensor.device());
        let memory = match on_cpu(&tensor) {
            Some(view) => TransferMemory::Tensor(view),
            None => TransferMemory::Bytes(tensor.into_data().into_bytes().to_vec()),
        };
        Payload { memory, kind, len, device }
    }

    /// The elements' bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        match &self.memory {
            TransferMemory::Tensor(view) => bytemuck::cast_slice(view.as_slice()),
            TransferMemory::Bytes(bytes) => bytes,
            TransferMemory::Pooled(_) => unreachable!("a payload is a view or a copy"),
        }
    }

    /// Whether a frame carries it.
    pub(super) fn is_small(&self) -> bool {
        self.bytes().len() <= INLINE_MAX
    }

    /// Where the tensor lived.
    pub(super) fn device(&self) -> Device {
        self.device.clone()
    }

    /// The memory that a transfer reads, and the type of its elements.
    pub(super) fn into_memory(self) -> (TransferMemory, DType) {
        (self.memory, self.kind)
    }
}

/// Room for `len` elements that MPI will write.
pub(super) fn room(group: &Group, kind: DType, len: usize) -> TransferMemory {
    match kind {
        DType::F32 => TransferMemory::Pooled(group.buffers.lend(len)),
        _ => TransferMemory::Bytes(vec![0; len * kind.size()]),
    }
}

/// The tensor over what MPI wrote or, for the root of a broadcast, read.
pub(super) fn unpack(
    group: &Group,
    memory: TransferMemory,
    kind: DType,
    device: &Device,
) -> Tensor<1> {
    match memory {
        TransferMemory::Pooled(buffer) => {
            let tensor = buffer.tensor();
            group.buffers.give_back(buffer);
            kernels::on(device, &tensor)
        }
        TransferMemory::Bytes(bytes) => from_bytes(bytes, kind, device),
        // What the root of a broadcast passed in.
        TransferMemory::Tensor(view) => view.into_tensor(),
    }
}

/// A tensor of these bytes.
pub(super) fn from_bytes(bytes: Vec<u8>, kind: DType, device: &Device) -> Tensor<1> {
    let len = bytes.len() / kind.size();
    Tensor::from_data(TensorData::from_bytes_vec(bytes, [len], kind), (device, kind))
}
