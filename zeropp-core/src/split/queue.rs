//! Queued weight-gradient work (W) and the fp32 buffers it adds to.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};
use parking_lot::Mutex;

use crate::cpu_tensor;
use crate::kernels;
use crate::meter::{Hold, MemoryKind, Meter};
use crate::params::FlatLayout;

/// A parameter of a stage: the layer's place in the stage and the parameter's in the layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParamSlot {
    /// Index of the layer within its stage.
    pub layer: usize,
    /// Index of the parameter within its layer.
    pub param: usize,
}

type WTask = Box<dyn FnOnce(&mut Grads) + Send>;

/// The W work of one stage and one micro-batch, queued by B. A clone is a handle to the same queue.
#[derive(Clone, Default)]
pub struct WQueue {
    /// With the layer that each is of.
    tasks: Arc<Mutex<Vec<(usize, WTask)>>>,
    layer: usize,
}

impl WQueue {
    /// A handle to the same queue for the operations of a layer, by its place in the stage. The
    /// queue's first handle is the first layer's.
    pub fn of_layer(&self, layer: usize) -> WQueue {
        WQueue { tasks: self.tasks.clone(), layer }
    }

    /// Queues work for W.
    pub fn push(&self, task: impl FnOnce(&mut Grads) + Send + 'static) {
        self.tasks.lock().push((self.layer, Box::new(task)));
    }

    /// Number of queued tasks.
    pub fn len(&self) -> usize {
        self.tasks.lock().len()
    }

    /// Whether nothing is queued.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Runs what is queued, in order. May be called on another thread than the queueing one.
    pub fn run(&self, grads: &mut Grads) {
        let tasks = std::mem::take(&mut *self.tasks.lock());
        for (_, task) in tasks {
            task(grads);
        }
    }

    /// Runs what is queued of a layer, in order.
    pub fn run_layer(&self, layer: usize, grads: &mut Grads) {
        let mut queued = self.tasks.lock();
        let (tasks, others) = queued.drain(..).partition(|(of, _)| *of == layer);
        *queued = others;
        drop(queued);
        let tasks: Vec<(usize, WTask)> = tasks;
        for (_, task) in tasks {
            task(grads);
        }
    }
}

/// The gradient of one layer: a flat fp32 buffer.
enum LayerGrads {
    /// Nothing was added yet.
    None,
    Host(Vec<f32>),
    Device(DeviceGrads),
}

impl LayerGrads {
    fn zeros(layout: &FlatLayout, device: &Device) -> Self {
        match *device == Device::flex() {
            true => LayerGrads::Host(kernels::zeros(layout.len)),
            false => LayerGrads::Device(DeviceGrads::new(layout, device)),
        }
    }
}

/// A layer's gradient off the CPU.
struct DeviceGrads {
    /// Taken while it is changed, so that nothing else holds it. Padding is zero.
    flat: Option<Tensor<1>>,
    /// Of which parameters something was added; the places of the others have any numbers.
    begun: Vec<bool>,
}

impl DeviceGrads {
    fn new(layout: &FlatLayout, device: &Device) -> Self {
        let elements: usize = layout.params.iter().map(|place| place.spec.len()).sum();
        let (shape, at) = ([layout.len], (device, DType::F32));
        // Without padding nothing has to be zero before it is written.
        let flat = match elements == layout.len {
            true => Tensor::empty(shape, at),
            false => Tensor::zeros(shape, at),
        };
        Self { flat: Some(flat), begun: vec![false; layout.params.len()] }
    }

    /// The places of parameters of which something was added, or nothing.
    fn ranges<'a>(
        &'a self,
        layout: &'a FlatLayout,
        begun: bool,
    ) -> impl Iterator<Item = Range<usize>> + 'a {
        let places = layout.params.iter().zip(&self.begun).filter(move |(_, of)| **of == begun);
        places.map(|(place, _)| place.offset..place.offset + place.spec.len())
    }

    fn has_fault(&self, layout: &FlatLayout) -> bool {
        let flat = self.flat.as_ref().expect("not being changed");
        self.ranges(layout, true).any(|range| !is_finite(&flat.clone().slice([range])))
    }

    /// The buffer, zero where nothing was added.
    fn into_flat(mut self, layout: &FlatLayout) -> Tensor<1> {
        let flat = self.flat.take().expect("not being changed");
        self.ranges(layout, false).fold(flat, zeroed)
    }
}

/// `flat` with zeros in a part of it; on a GPU in place, with nothing of its size beside it.
fn zeroed(flat: Tensor<1>, part: Range<usize>) -> Tensor<1> {
    #[cfg(feature = "cube")]
    if crate::cube::is_on(&flat) {
        return crate::cube::zero_part(flat, part);
    }
    let zeros = Tensor::zeros([part.len()], (&flat.device(), DType::F32));
    if part.len() == flat.dims()[0] { zeros } else { flat.slice_assign([part], zeros) }
}

/// The place of a parameter's gradient off the CPU, to add to.
pub(crate) struct GradientPlace {
    /// The gradients of its layer, which nothing else holds: what is changed is so in place.
    pub(crate) flat: Tensor<1>,
    /// Its elements there.
    pub(crate) part: Range<usize>,
    /// Whether there is a sum to add to; else what is there is to be overwritten.
    pub(crate) begun: bool,
}

impl GradientPlace {
    /// The buffer with `g`, of any float type, added.
    fn add(self, g: Tensor<1>) -> Tensor<1> {
        let Self { flat, part, begun } = self;
        #[cfg(feature = "cube")]
        if crate::cube::is_on(&flat) {
            return crate::cube::add_to_part(flat, g, part.start, begun);
        }
        let g = g.cast(DType::F32);
        let sum = if begun { flat.clone().slice([part.clone()]) + g } else { g };
        flat.slice_assign([part], sum)
    }

    /// The buffer, with a sum to add to.
    #[cfg(feature = "cube")]
    pub(crate) fn or_zeros(self) -> Tensor<1> {
        if self.begun { self.flat } else { zeroed(self.flat, self.part) }
    }
}

/// The unreduced fp32 weight gradients of one stage, summed in the order in which W runs (a head's,
/// which are made in F, in that of its F). A layer's buffer is there, and metered, from what is
/// first added to it.
pub struct Grads {
    layouts: Vec<Arc<FlatLayout>>,
    layers: Vec<LayerGrads>,
    device: Device,
    hold: Hold,
}

impl Grads {
    /// Zero gradients for layers of the given layouts on `device`, metered as gradients.
    pub fn new(layouts: Vec<Arc<FlatLayout>>, device: &Device, meter: &Arc<Meter>) -> Self {
        Self::counted_as(MemoryKind::Gradient, layouts, device, meter)
    }

    /// Like [`new`](Self::new), metered as `kind`.
    pub fn counted_as(
        kind: MemoryKind,
        layouts: Vec<Arc<FlatLayout>>,
        device: &Device,
        meter: &Arc<Meter>,
    ) -> Self {
        let layers = layouts.iter().map(|_| LayerGrads::None).collect();
        Self { layouts, layers, device: device.clone(), hold: meter.hold(kind, 0) }
    }

    /// Makes the buffers of all layers, as the first W of a unit does.
    pub fn open(&mut self) {
        (0..self.layers.len()).for_each(|layer| {
            self.layer(layer);
        });
    }

    /// The gradient of a layer, zero at first.
    fn layer(&mut self, layer: usize) -> &mut LayerGrads {
        if let LayerGrads::None = self.layers[layer] {
            let layout = &self.layouts[layer];
            let made = LayerGrads::zeros(layout, &self.device);
            self.hold.grow(match &made {
                LayerGrads::Host(flat) => flat.capacity() as u64 * 4,
                _ => layout.len as u64 * 4,
            });
            self.layers[layer] = made;
        }
        &mut self.layers[layer]
    }

    /// Adds `g` (any float type, any shape with the parameter's number of elements).
    pub fn add<const D: usize>(&mut self, slot: ParamSlot, g: Tensor<D>) {
        let n = self.layouts[slot.layer].params[slot.param].spec.len();
        let g: Tensor<1> = g.inner().reshape([n]);
        if let Some(acc) = self.host_mut(slot) {
            let g = cpu_tensor::on_cpu(&g.cast(DType::F32));
            kernels::add(acc, g.expect("host gradients come from CPU tensors").as_slice());
            return;
        }
        self.change(slot, |place| place.add(g));
    }

    /// Lets `add` add to the gradient of one parameter off the CPU; it gives the buffer back.
    ///
    /// # Panics
    /// Panics on the CPU; [`host_mut`](Self::host_mut) is for that.
    pub(crate) fn change(&mut self, slot: ParamSlot, add: impl FnOnce(GradientPlace) -> Tensor<1>) {
        let (start, begun) = self.begin(slot);
        let part = start..start + self.layouts[slot.layer].params[slot.param].spec.len();
        let LayerGrads::Device(all) = self.layer(slot.layer) else { panic!("on the CPU") };
        let flat = all.flat.take().expect("changed by one at a time");
        let as_before = (flat.dims(), flat.dtype());
        let flat = add(GradientPlace { flat, part, begun });
        assert_eq!((flat.dims(), flat.dtype()), as_before, "the gradient of {slot:?}");
        all.flat = Some(flat);
    }

    /// Where the gradient of a parameter off the CPU begins in that of its layer, and whether there
    /// is a sum to add to: from now on there is.
    pub(crate) fn begin(&mut self, slot: ParamSlot) -> (usize, bool) {
        let start = self.layouts[slot.layer].params[slot.param].offset;
        let LayerGrads::Device(all) = self.layer(slot.layer) else { panic!("on the CPU") };
        (start, std::mem::replace(&mut all.begun[slot.param], true))
    }

    /// The accumulator of one parameter as a slice to add into; `None` off the CPU.
    pub(crate) fn host_mut(&mut self, slot: ParamSlot) -> Option<&mut [f32]> {
        let place = &self.layouts[slot.layer].params[slot.param];
        let (offset, len) = (place.offset, place.spec.len());
        match self.layer(slot.layer) {
            LayerGrads::Host(flat) => Some(&mut flat[offset..][..len]),
            LayerGrads::Device(_) | LayerGrads::None => None,
        }
    }

    /// The same of two parameters of a layer.
    pub(crate) fn host_mut_both(&mut self, slots: [ParamSlot; 2]) -> Option<[&mut [f32]; 2]> {
        let layer = slots[0].layer;
        assert_eq!(layer, slots[1].layer, "parameters of one layer");
        let ranges = slots.map(|slot| {
            let place = &self.layouts[layer].params[slot.param];
            place.offset..place.offset + place.spec.len()
        });
        match self.layer(layer) {
            LayerGrads::Host(flat) => Some(flat.get_disjoint_mut(ranges).expect("two places")),
            LayerGrads::Device(_) | LayerGrads::None => None,
        }
    }

    /// The last layer, as places in the stage go, whose gradient so far has an element that is not
    /// finite. Reads all of it: for the search for a fault, not for every step.
    pub fn last_not_finite(&self) -> Option<usize> {
        let is_bad = |(layer, layout): (&LayerGrads, &Arc<FlatLayout>)| match layer {
            LayerGrads::Host(flat) => flat.iter().any(|x| !x.is_finite()),
            LayerGrads::Device(all) => all.has_fault(layout),
            LayerGrads::None => false,
        };
        self.layers.iter().zip(&self.layouts).rposition(is_bad)
    }

    /// The flat gradient buffer of every layer, padding zero, in layer order, and the guard that
    /// counts them, to be dropped when the buffers are.
    pub fn into_flat(mut self) -> (Vec<Tensor<1>>, Hold) {
        let flat = (0..self.layers.len()).map(|layer| self.flat(layer).0).collect();
        (flat, self.hold)
    }

    /// The flat gradient buffer of a layer to which nothing more is added, padding zero, and the
    /// guard that counts it.
    pub fn take_flat(&mut self, layer: usize) -> (Tensor<1>, Hold) {
        let (flat, bytes) = self.flat(layer);
        (flat, self.hold.split_off(bytes))
    }

    /// The buffer of a layer, with the bytes that it is counted as.
    fn flat(&mut self, layer: usize) -> (Tensor<1>, u64) {
        self.layer(layer);
        let layout = &self.layouts[layer];
        match std::mem::replace(&mut self.layers[layer], LayerGrads::None) {
            LayerGrads::Host(flat) => {
                let bytes = flat.capacity() as u64 * 4;
                (cpu_tensor::from_vec(flat, [layout.len]), bytes)
            }
            LayerGrads::Device(all) => (all.into_flat(layout), layout.len as u64 * 4),
            LayerGrads::None => unreachable!("just opened"),
        }
    }
}

/// Where an operation puts the weight gradients that it makes in F, and what it has to know for
/// that: the gradient that its output will get in B.
#[derive(Clone)]
pub struct ForwardGrads {
    /// The gradients of the stage and of the unit that the micro-batch belongs to. F of the last
    /// stage comes in micro-batch order in every schedule, which is the order of the sum.
    pub grads: Arc<Mutex<Grads>>,
    /// The gradient of the micro-batch's loss: one over the micro-batches of the step.
    pub loss_scale: f32,
}

/// Whether all elements of an f32 tensor are finite; reads it from its device.
pub fn is_finite<const D: usize>(t: &Tensor<D>) -> bool {
    let values = t.clone().inner().cast(DType::F32).into_data().try_to_vec::<f32>();
    values.expect("just cast").iter().all(|x| x.is_finite())
}
