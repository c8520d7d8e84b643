//! The bytes behind tensors, on whatever device they are.

use burn::tensor::Tensor;

use crate::cpu_tensor::{CpuBlock, CpuView};
#[cfg(feature = "cuda")]
use crate::device::cuda::{GpuBlock, GpuView};

/// The storage behind one tensor or several.
pub(crate) enum Storage {
    Cpu(CpuBlock),
    #[cfg(feature = "cuda")]
    Gpu(GpuBlock),
}

/// A tensor without its storage.
pub(crate) enum View {
    Cpu(CpuView),
    #[cfg(feature = "cuda")]
    Gpu(Box<GpuView>),
}

impl View {
    /// The same for clones of one tensor, where devices tell tensors apart that share a storage.
    pub(crate) fn id(&self) -> Option<usize> {
        match self {
            View::Cpu(_) => None,
            #[cfg(feature = "cuda")]
            View::Gpu(view) => Some(view.id()),
        }
    }
}

impl Storage {
    /// Of a plain tensor, and what it is of that; none on devices whose storages are not known.
    pub(crate) fn of<const D: usize>(t: &Tensor<D>) -> Option<(Storage, View)> {
        if let Some((block, view)) = CpuBlock::of(t) {
            return Some((Storage::Cpu(block), View::Cpu(view)));
        }
        #[cfg(feature = "cuda")]
        if let Some((block, view)) = GpuBlock::of(t) {
            return Some((Storage::Gpu(block), View::Gpu(Box::new(view))));
        }
        None
    }

    /// That of a CPU's tensor.
    pub(crate) fn into_cpu(self) -> Option<CpuBlock> {
        match self {
            Storage::Cpu(block) => Some(block),
            #[cfg(feature = "cuda")]
            Storage::Gpu(_) => None,
        }
    }

    /// That of an NVIDIA GPU's tensor.
    #[cfg(feature = "cuda")]
    pub(crate) fn into_gpu(self) -> Option<GpuBlock> {
        match self {
            Storage::Gpu(block) => Some(block),
            Storage::Cpu(_) => None,
        }
    }

    /// The same for two of one device that are one.
    pub(crate) fn id(&self) -> usize {
        match self {
            Storage::Cpu(block) => block.id(),
            #[cfg(feature = "cuda")]
            Storage::Gpu(block) => block.id(),
        }
    }

    /// How many it is of.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Storage::Cpu(block) => block.bytes(),
            #[cfg(feature = "cuda")]
            Storage::Gpu(block) => block.bytes(),
        }
    }

    /// Has also what `other` knows of the same storage.
    pub(crate) fn join(&mut self, other: &Storage) {
        match (self, other) {
            #[cfg(feature = "cuda")]
            (Storage::Gpu(block), Storage::Gpu(other)) => block.join(other),
            // All of it in any case.
            _ => {}
        }
    }

    /// The tensor that `view` is of it.
    ///
    /// # Panics
    /// Panics if that is a view of another device's.
    pub(crate) fn tensor<const D: usize>(&self, view: View) -> Tensor<D> {
        match (self, view) {
            (Storage::Cpu(block), View::Cpu(view)) => block.tensor(view),
            #[cfg(feature = "cuda")]
            (Storage::Gpu(block), View::Gpu(view)) => block.tensor(*view),
            #[cfg(feature = "cuda")]
            _ => unreachable!("what went out of a device comes back to it"),
        }
    }
}
