//! The bytes of a CPU tensor, without a copy.
//!
//! This is the only place that looks inside a Burn tensor of the flex (CPU) backend. Everything
//! else either works on `Tensor` or on the slices handed out here.

use std::marker::PhantomData;

use burn::backend::Flex;
use burn::backend::flex::{FlexTensor, Layout};
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType, Device, Element, Int, Shape, Tensor, TensorData, bf16};
use bytemuck::Pod;

use crate::kernels;

/// A plain (untracked) contiguous tensor on the CPU whose elements can be read as a slice.
pub struct CpuTensor<E = f32>(FlexTensor, PhantomData<E>);

impl<E: Element + Pod> CpuTensor<E> {
    /// All elements in row-major order.
    pub fn as_slice(&self) -> &[E] {
        self.0.as_slice::<E>().expect("made contiguous, of this type, by `view`")
    }

    /// A tensor that shares the elements, which must be one-dimensional.
    pub fn into_tensor(self) -> Tensor<1> {
        Tensor::from_primitive::<Flex>(self.0)
    }

    /// Address of the storage this tensor is a view of: equal for two tensors that share it.
    pub fn storage_id(&self) -> usize {
        self.0.bytes().as_ptr() as usize
    }
}

/// Whether `t` lives on the CPU.
pub(crate) fn is_on_cpu<const D: usize>(t: &Tensor<D>) -> bool {
    // Without a GPU backend there is nowhere else.
    !cfg!(feature = "cube") || t.device().without_autodiff() == Device::flex()
}

/// Views `t` as `f32` elements, or `None` where it does not live on the CPU in `f32`.
///
/// Copies only when the tensor is not contiguous (a transposed view, say).
pub fn on_cpu<const D: usize>(t: &Tensor<D>) -> Option<CpuTensor> {
    view(t)
}

/// The same for `bf16` elements.
pub(crate) fn halves_on_cpu<const D: usize>(t: &Tensor<D>) -> Option<CpuTensor<bf16>> {
    view(t)
}

fn view<E: Element, const D: usize>(t: &Tensor<D>) -> Option<CpuTensor<E>> {
    if t.dtype() != E::dtype() || !is_on_cpu(t) {
        return None;
    }
    let flex = t.clone().inner().try_into_primitive::<Flex>().ok()?;
    let flex = if flex.is_contiguous() { flex } else { flex.to_contiguous() };
    Some(CpuTensor(flex, PhantomData))
}

/// A CPU tensor of the given shape over the elements of `v`; the vector is not copied.
pub fn from_vec<const D: usize>(v: Vec<f32>, shape: [usize; D]) -> Tensor<D> {
    Tensor::from_data(TensorData::new(v, shape), (&Device::flex(), DType::F32))
}

/// The same over `bf16` elements.
pub(crate) fn from_halves<const D: usize>(v: Vec<bf16>, shape: [usize; D]) -> Tensor<D> {
    Tensor::from_data(TensorData::new(v, shape), (&Device::flex(), DType::BF16))
}

/// The elements of an integer tensor as indices, row-major; copies.
///
/// # Panics
/// Panics if an element is negative.
pub fn indices<const D: usize>(t: Tensor<D, Int>) -> Vec<usize> {
    let index = |i: i64| usize::try_from(i).unwrap_or_else(|_| panic!("negative index {i}"));
    t.into_data().iter::<i64>().map(index).collect()
}

/// Applies `f` to the elements of a CPU tensor in place; copies first where the storage is shared.
///
/// Returns the tensor unchanged as `Err` where it is not an `f32` tensor on the CPU.
pub fn map_in_place<const D: usize>(
    t: Tensor<D>,
    f: impl FnOnce(&mut [f32]),
) -> Result<Tensor<D>, Tensor<D>> {
    change(t, f)
}

/// The same for `bf16` elements.
pub(crate) fn map_halves_in_place<const D: usize>(
    t: Tensor<D>,
    f: impl FnOnce(&mut [bf16]),
) -> Result<Tensor<D>, Tensor<D>> {
    change(t, f)
}

fn change<E: Element + Pod, const D: usize>(
    t: Tensor<D>,
    f: impl FnOnce(&mut [E]),
) -> Result<Tensor<D>, Tensor<D>> {
    if t.dtype() != E::dtype() || !is_on_cpu(&t) {
        return Err(t);
    }
    let Ok(mut flex) = t.clone().try_into_primitive::<Flex>() else { return Err(t) };
    drop(t);
    if !is_whole(&flex) {
        flex = flex.to_contiguous();
    }
    f(flex.storage_mut::<E>());
    Ok(Tensor::from_primitive::<Flex>(flex))
}

/// Whether the tensor is all of its storage, in order.
fn is_whole(t: &FlexTensor) -> bool {
    let layout = t.layout();
    t.is_contiguous()
        && layout.start_offset() == 0
        && t.bytes().len() == layout.num_elements() * t.dtype().size()
}

/// The elements of `t` as an owned vector, taken without a copy where nothing else holds them.
///
/// # Panics
/// Panics if `t` is not an `f32` tensor on the CPU.
pub fn into_vec(t: Tensor<1>) -> Vec<f32> {
    let (bytes, _, _) = t.into_data().into_parts();
    bytes.try_into_vec::<f32>().unwrap_or_else(|bytes| bytemuck::pod_collect_to_vec(&bytes))
}

/// Identity of the CPU storage behind `t`, equal for tensors that share it; `None` off the CPU.
pub fn storage_id<const D: usize>(t: &Tensor<D>) -> Option<usize> {
    storage(t).map(|(id, _)| id)
}

/// That identity, and the bytes of all of the storage, of which `t` may be a part.
pub(crate) fn storage<const D: usize>(t: &Tensor<D>) -> Option<(usize, u64)> {
    if !is_on_cpu(t) {
        return None;
    }
    let flex = t.clone().inner().try_into_primitive::<Flex>().ok()?;
    let bytes = flex.bytes();
    Some((bytes.as_ptr() as usize, bytes.len() as u64))
}

/// The bytes of the storage behind one tensor or several, all of it.
#[derive(Clone)]
pub(crate) struct CpuBlock(FlexTensor);

/// A tensor without its storage: its shape, its type, and which elements of the storage it has.
pub(crate) struct CpuView {
    layout: Layout,
    dtype: DType,
}

impl CpuBlock {
    /// Of `t`, and what `t` is of it; none off the CPU.
    pub(crate) fn of<const D: usize>(t: &Tensor<D>) -> Option<(CpuBlock, CpuView)> {
        if !is_on_cpu(t) {
            return None;
        }
        let flex = t.clone().inner().try_into_primitive::<Flex>().ok()?;
        let view = CpuView { layout: flex.layout().clone(), dtype: flex.dtype() };
        Some((CpuBlock(flex), view))
    }

    /// A new one of `bytes` zeros.
    pub(crate) fn zeros(bytes: usize) -> CpuBlock {
        CpuBlock(FlexTensor::zeros(Shape::new([bytes]), DType::U8))
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.0.bytes().len() as u64
    }

    /// The same for two that are of one storage.
    pub(crate) fn id(&self) -> usize {
        self.0.bytes().as_ptr() as usize
    }

    /// The tensor that `view` is of it.
    pub(crate) fn tensor<const D: usize>(&self, view: CpuView) -> Tensor<D> {
        let CpuView { layout, dtype } = view;
        Tensor::from_primitive::<Flex>(FlexTensor::from_arc(self.0.data_arc(), layout, dtype))
    }
}

impl AsRef<[u8]> for CpuBlock {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl AsMut<[u8]> for CpuBlock {
    /// Copies first where the storage is shared, so it is for new ones.
    fn as_mut(&mut self) -> &mut [u8] {
        self.0.storage_mut::<u8>()
    }
}

/// `sum + more`, element by element, in `sum`'s memory where nothing else holds it.
pub fn add_in_place(sum: Tensor<1>, more: Tensor<1>) -> Tensor<1> {
    let Some(values) = on_cpu(&more) else { return sum + more };
    let add = |sum: &mut [f32]| kernels::add(sum, values.as_slice());
    map_in_place(sum, add).unwrap_or_else(|sum| sum + more)
}

/// x + y for two tensors of one shape, as the backend has it, in the memory of one that nothing
/// else holds, and by all threads of the rank.
pub(crate) fn sum(x: FlexTensor, y: FlexTensor) -> FlexTensor {
    let (mut sum, more) = if y.is_unique() { (y, x) } else { (x, y) };
    let are_alike = sum.layout().shape() == more.layout().shape() && sum.dtype() == more.dtype();
    if are_alike && is_whole(&sum) && sum.is_unique() {
        if let Some(more) = more.as_slice::<f32>() {
            kernels::add(sum.storage_mut(), more);
            return sum;
        }
        if let Some(more) = more.as_slice::<bf16>() {
            kernels::bf16::rows::add(sum.storage_mut(), more);
            return sum;
        }
    }
    Flex::float_add(sum, more)
}

/// `t` in bf16, or itself off the CPU or in another type than fp32, to be cast there.
pub fn rounded(t: Tensor<1>) -> Tensor<1> {
    match on_cpu(&t) {
        Some(x) => from_halves(kernels::bf16::convert::round(x.as_slice()), t.dims()),
        None => t,
    }
}

/// A flat CPU `f32` buffer that is written once, handed out as tensors, and written again when
/// the last of them is gone. Fresh large buffers cost page faults, this one does not.
pub struct CpuBuffer(FlexTensor);

impl CpuBuffer {
    /// A new buffer of `len` zeros.
    pub fn zeros(len: usize) -> Self {
        Self(FlexTensor::zeros(Shape::new([len]), DType::F32))
    }

    /// Number of elements.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.0.layout().num_elements()
    }

    /// Whether no tensor handed out by [`tensor`](Self::tensor), nor any view of one, is left.
    pub fn is_free(&self) -> bool {
        self.0.is_unique()
    }

    /// The elements, to be written; `None` while a tensor that was handed out is alive.
    pub fn as_mut_slice(&mut self) -> Option<&mut [f32]> {
        self.0.try_storage_mut::<f32>()
    }

    /// A tensor that shares the elements.
    pub fn tensor(&self) -> Tensor<1> {
        Tensor::from_primitive::<Flex>(self.0.clone())
    }
}
