//! Constants on devices: copied there once, and not at every use.

use std::thread::{self, ThreadId};

use burn::tensor::Device;
use parking_lot::Mutex;

/// Tensors of numbers that never change, on each device where they are used. Each thread that uses
/// them has its own, as a tensor belongs to a thread (docs/adr/0010-tensors-between-threads.md).
pub(crate) struct OnDevices<T>(Mutex<Vec<(ThreadId, Device, T)>>);

impl<T: Clone> OnDevices<T> {
    /// This thread's tensors on `device`, by `make` where there are none yet.
    pub(crate) fn get(&self, device: &Device, make: impl FnOnce() -> T) -> T {
        let (me, mut all) = (thread::current().id(), self.0.lock());
        if let Some((.., made)) = all.iter().find(|(who, at, _)| *who == me && at == device) {
            return made.clone();
        }
        let made = make();
        all.push((me, device.clone(), made.clone()));
        made
    }
}

impl<T> Default for OnDevices<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}
