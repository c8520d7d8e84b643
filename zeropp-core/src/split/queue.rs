//! Queued weight-gradient work (W) and the fp32 buffers it adds to.

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

/// The gradient of one layer: a flat fp32 buffer on the CPU, one accumulator a parameter elsewhere.
enum LayerGrads {
    /// Nothing was added yet.
    None,
    Host(Vec<f32>),
    Device(Vec<Option<Tensor<1>>>),
}

impl LayerGrads {
    fn zeros(layout: &FlatLayout, on_host: bool) -> Self {
        if on_host {
            LayerGrads::Host(kernels::zeros(layout.len))
        } else {
            LayerGrads::Device(vec![None; layout.params.len()])
        }
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
            let made = LayerGrads::zeros(layout, self.device == Device::flex());
            self.hold.grow(match &made {
                LayerGrads::Host(flat) => flat.capacity() as u64 * 4,
                // Parameter by parameter as W comes to it, and whole where it is reduced.
                _ => layout.len as u64 * 4,
            });
            self.layers[layer] = made;
        }
        &mut self.layers[layer]
    }

    /// Adds `g` (any float type, any shape with the parameter's number of elements).
    pub fn add<const D: usize>(&mut self, slot: ParamSlot, g: Tensor<D>) {
        let n = self.layouts[slot.layer].params[slot.param].spec.len();
        let g: Tensor<1> = g.inner().cast(DType::F32).reshape([n]);
        if let Some(acc) = self.host_mut(slot) {
            let g = cpu_tensor::on_cpu(&g).expect("host gradients come from CPU tensors");
            kernels::add(acc, g.as_slice());
            return;
        }
        let LayerGrads::Device(params) = self.layer(slot.layer) else { unreachable!() };
        let acc = &mut params[slot.param];
        *acc = Some(match acc.take() {
            Some(acc) => acc + g,
            None => g,
        });
    }

    /// Lets `add` add to the accumulator of one parameter off the CPU, flat, and none at first,
    /// which nothing else holds: so in place.
    ///
    /// # Panics
    /// Panics on the CPU; [`host_mut`](Self::host_mut) is for that.
    #[cfg(feature = "cube")]
    pub(crate) fn change(
        &mut self,
        slot: ParamSlot,
        add: impl FnOnce(Option<Tensor<1>>) -> Tensor<1>,
    ) {
        let n = self.layouts[slot.layer].params[slot.param].spec.len();
        let LayerGrads::Device(params) = self.layer(slot.layer) else { panic!("on the CPU") };
        let sum = add(params[slot.param].take());
        assert_eq!((sum.dims(), sum.dtype()), ([n], DType::F32), "the gradient of {slot:?}");
        params[slot.param] = Some(sum);
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
        let is_bad = |layer: &LayerGrads| match layer {
            LayerGrads::Host(flat) => flat.iter().any(|x| !x.is_finite()),
            LayerGrads::Device(params) => params.iter().flatten().any(|grad| !is_finite(grad)),
            LayerGrads::None => false,
        };
        self.layers.iter().rposition(is_bad)
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
            LayerGrads::Device(params) => {
                (flatten(params, layout, &self.device), layout.len as u64 * 4)
            }
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

fn flatten(params: Vec<Option<Tensor<1>>>, layout: &FlatLayout, device: &Device) -> Tensor<1> {
    let ends = layout.params.iter().skip(1).map(|p| p.offset).chain([layout.len]);
    let mut parts = Vec::new();
    for ((grad, place), end) in params.into_iter().zip(&layout.params).zip(ends) {
        let n = place.spec.len();
        let zeros = |n: usize| Tensor::<1>::zeros([n], (device, DType::F32));
        parts.push(grad.unwrap_or_else(|| zeros(n)));
        if place.offset + n < end {
            parts.push(zeros(end - place.offset - n));
        }
    }
    if parts.is_empty() {
        return Tensor::zeros([layout.len], (device, DType::F32));
    }
    Tensor::cat(parts, 0)
}
