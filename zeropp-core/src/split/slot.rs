//! What operations keep from F to B and from B to W: tensors that are here, out of memory, or due
//! to be made.

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::tensor::Tensor;
use parking_lot::Mutex;

use super::storage::{Storage, View};
use super::vjp;
use crate::meter::{Hold, MemoryKind, Meter};

/// A handle to a tensor kept for later, which the rank's meter counts while it is there. A clone is
/// a handle to the same.
#[derive(Clone)]
pub struct Saved<const D: usize>(pub(super) Arc<Mutex<Slot<D>>>);

pub(super) enum Slot<const D: usize> {
    Here(Tensor<D>, Hold),
    /// The tensor's bytes are out of memory.
    Away(View),
    /// The tensor is made when it is first asked for.
    Due(Box<dyn FnOnce() -> Tensor<D> + Send>, Arc<Meter>),
    /// While it is made.
    Making,
}

impl<const D: usize> Saved<D> {
    /// Keeps the plain (untracked) value of `t` under `kind`.
    pub fn new(t: Tensor<D>, kind: MemoryKind, meter: &Arc<Meter>) -> Self {
        let tensor = t.inner();
        let hold = meter.hold_tensor(kind, &tensor);
        Self(Arc::new(Mutex::new(Slot::Here(tensor, hold))))
    }

    /// Keeps how to make a plain tensor.
    fn due(make: impl FnOnce() -> Tensor<D> + Send + 'static, meter: &Arc<Meter>) -> Self {
        Self(Arc::new(Mutex::new(Slot::Due(Box::new(make), meter.clone()))))
    }

    /// The tensor; what is kept stays kept. One that is made for this counts as an activation.
    pub fn get(&self) -> Tensor<D> {
        let mut slot = self.0.lock();
        let (tensor, hold) = match std::mem::replace(&mut *slot, Slot::Making) {
            Slot::Here(tensor, hold) => (tensor, hold),
            Slot::Due(make, meter) => {
                let tensor = make();
                let hold = meter.hold_tensor(MemoryKind::Activation, &tensor);
                (tensor, hold)
            }
            Slot::Away(_) => panic!("{AWAY}"),
            Slot::Making => unreachable!("no tensor is made from itself"),
        };
        *slot = Slot::Here(tensor.clone(), hold);
        tensor
    }

    /// The tensor, no longer kept by this handle.
    pub fn take(self) -> Tensor<D> {
        match Arc::try_unwrap(self.0).map(Mutex::into_inner) {
            Ok(Slot::Here(tensor, _)) => tensor,
            Ok(Slot::Due(make, _)) => make(),
            Ok(Slot::Away(_)) => panic!("{AWAY}"),
            Ok(Slot::Making) => unreachable!("no tensor is made from itself"),
            Err(shared) => Self(shared).get(),
        }
    }
}

/// The message where a tensor is wanted that is out of memory: no verified program does that.
const AWAY: &str = "a kept tensor is wanted while it is out of memory";

/// A kept tensor of any shape that can leave memory and come back.
pub(super) trait Leaving: Send + Sync {
    /// The storage that it is of, and what it is of that, if it is here.
    fn storage(&self) -> Option<(Storage, View)>;
    /// Drops the tensor, which is here, and is that of its storage.
    fn leave(&self, view: View);
    /// Makes it again of its storage, as an activation; a tensor that another handle has had, too,
    /// is `made` once.
    fn come_back(&self, storage: &Storage, meter: &Arc<Meter>, made: &mut MadeAgain);
}

/// Tensors by what they were before they left.
pub(super) type MadeAgain = HashMap<usize, Box<dyn Any>>;

impl<const D: usize> Leaving for Mutex<Slot<D>> {
    fn storage(&self) -> Option<(Storage, View)> {
        let Slot::Here(tensor, _) = &*self.lock() else { return None };
        Storage::of(tensor)
    }

    fn leave(&self, view: View) {
        let mut slot = self.lock();
        if let Slot::Here(..) = &*slot {
            *slot = Slot::Away(view);
        }
    }

    fn come_back(&self, storage: &Storage, meter: &Arc<Meter>, made: &mut MadeAgain) {
        let mut slot = self.lock();
        *slot = match std::mem::replace(&mut *slot, Slot::Making) {
            Slot::Away(view) => {
                let id = view.id();
                let known = id.and_then(|id| made.get(&id)?.downcast_ref::<Tensor<D>>());
                let tensor = known.cloned().unwrap_or_else(|| storage.tensor(view));
                id.map(|id| made.insert(id, Box::new(tensor.clone())));
                let hold = meter.hold_tensor(MemoryKind::Activation, &tensor);
                Slot::Here(tensor, hold)
            }
            other => other,
        };
    }
}

/// How B makes the outputs of elementwise operations again, while a forward is recorded that does
/// not keep them (selective recomputation).
#[derive(Clone, Default)]
pub struct Makers(Arc<Mutex<HashMap<NodeId, Box<dyn Any + Send>>>>);

impl Makers {
    /// From now on operations that would keep `y` keep how to make it.
    pub(super) fn add<const D: usize>(
        &self,
        y: &Tensor<D>,
        make: impl FnOnce() -> Tensor<D> + Send + 'static,
        meter: &Arc<Meter>,
    ) {
        if let Some(id) = vjp::id(y) {
            self.0.lock().insert(id, Box::new(Saved::due(make, meter)));
        }
    }

    /// The handle to `x`, where it is made again.
    pub(super) fn find<const D: usize>(&self, x: &Tensor<D>) -> Option<Saved<D>> {
        let id = vjp::id(x)?;
        self.0.lock().get(&id)?.downcast_ref::<Saved<D>>().cloned()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::cpu_tensor::{from_vec, into_vec};

    #[test]
    fn a_tensor_that_is_due_is_made_once_for_all_who_keep_it() {
        let (meter, made) = (Meter::new(), Arc::new(AtomicUsize::new(0)));
        let make = || {
            let made = made.clone();
            move || {
                made.fetch_add(1, Ordering::Relaxed);
                from_vec(vec![1.0, 2.0], [2])
            }
        };
        let one = Saved::due(make(), &meter);
        let other = one.clone();
        assert_eq!(meter.now().total(), 0);
        assert_eq!(into_vec(one.take()), [1.0, 2.0]);
        assert_eq!(meter.now().activation, 8, "for the other");
        assert_eq!(into_vec(other.take()), [1.0, 2.0]);
        assert_eq!((meter.now().total(), made.load(Ordering::Relaxed)), (0, 1));
        let alone = Saved::due(make(), &meter);
        alone.take();
        assert_eq!((meter.peak().total(), made.load(Ordering::Relaxed)), (8, 2), "counts nowhere");
        drop(Saved::due(make(), &meter));
        assert_eq!(made.load(Ordering::Relaxed), 2, "nobody wants it");
    }
}
