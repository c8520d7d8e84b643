//! What a forward has kept, out of memory until B needs it (ADR 101).
//!
//! Bytes go as they are, storage by storage, so that what comes back is the same tensors: views of
//! one storage are views of one again.

mod alone;
mod place;

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

pub use self::alone::AwayTensor;
pub use self::place::AwayPlace;
use self::place::Parcel;
use super::slot::{Leaving, MadeAgain, Saved};
use super::storage::{Storage, View};
use crate::meter::{Hold, MemoryKind, Meter};

/// Handles to what one forward keeps, without keeping it. A clone is a handle to the same.
#[derive(Clone, Default)]
pub struct Vault(Arc<Mutex<Vec<Weak<dyn Leaving>>>>);

impl Vault {
    /// Notes a tensor that is kept.
    pub fn note<const D: usize>(&self, saved: &Saved<D>) {
        let slot: Arc<dyn Leaving> = saved.0.clone();
        self.0.lock().push(Arc::downgrade(&slot));
    }
}

/// Tensors on their way out of memory, there, or on their way back. Until
/// [`finish_in`](Self::finish_in) nobody may ask for them.
pub struct AwayTensors {
    /// Each with the place of its storage among those that are different, and what it is of that
    /// until it leaves.
    slots: Vec<(Arc<dyn Leaving>, usize, Option<View>)>,
    parcel: Box<dyn Parcel>,
    /// Counts what is coming in.
    coming: Option<Hold>,
    meter: Arc<Meter>,
    /// Counts what is out.
    _host: Hold,
}

impl AwayTensors {
    /// Starts copying what is still kept of a vault's to `place`.
    ///
    /// # Errors
    /// A place that has no room.
    pub fn start_out(
        vault: Vault,
        place: &mut AwayPlace,
        meter: &Arc<Meter>,
    ) -> io::Result<AwayTensors> {
        let (mut slots, mut storages) = (Vec::new(), Vec::<Storage>::new());
        let mut known = HashMap::new();
        let noted = std::mem::take(&mut *vault.0.lock());
        for slot in noted.iter().filter_map(Weak::upgrade) {
            let Some((storage, view)) = slot.storage() else { continue };
            if !place.0.takes(&storage) {
                continue;
            }
            let at = *known.entry(storage.id()).or_insert(storages.len());
            match storages.get_mut(at) {
                Some(known) => known.join(&storage),
                None => storages.push(storage),
            }
            slots.push((slot, at, Some(view)));
        }
        let parcel = place.0.start_out(storages)?;
        let host = meter.hold(MemoryKind::HostActivation, parcel.bytes());
        Ok(AwayTensors { slots, parcel, coming: None, meter: meter.clone(), _host: host })
    }

    /// Whether what follows the copy that is under way need not wait here, if one is.
    pub fn is_copied(&mut self) -> bool {
        self.parcel.is_copied()
    }

    /// After the copy out drops the tensors. A GPU's later work waits for it, and not the caller.
    ///
    /// # Errors
    /// What the system says, such as that the disk is full.
    pub fn finish_out(&mut self) -> io::Result<()> {
        self.parcel.finish_out()?;
        for (slot, _, view) in &mut self.slots {
            view.take().into_iter().for_each(|view| slot.leave(view));
        }
        Ok(())
    }

    /// Takes memory for them and starts copying them back.
    pub fn start_in(&mut self) {
        self.coming = Some(self.meter.hold(MemoryKind::Activation, self.parcel.bytes()));
        self.parcel.start_in();
    }

    /// After that what was kept is there again.
    ///
    /// # Errors
    /// What the system says.
    pub fn finish_in(mut self) -> io::Result<()> {
        let storages = self.parcel.finish_in()?;
        drop(self.coming.take());
        let mut made = MadeAgain::new();
        for (slot, at, _) in &self.slots {
            slot.come_back(&storages[*at], &self.meter, &mut made);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use zeropp_data::files::ScratchFile;

    use super::place::FileCarrier;
    use super::*;
    use crate::cpu_tensor::{from_halves, from_vec, into_vec};
    use burn::tensor::{Tensor, bf16};

    /// A place, and how long its file has been.
    fn place() -> (AwayPlace, impl Fn() -> u64) {
        let file = Arc::new(Mutex::new(ScratchFile::open(&std::env::temp_dir()).unwrap()));
        let size = file.clone();
        (AwayPlace(Box::new(FileCarrier(file))), move || size.lock().size())
    }

    /// Views of one storage, another type and a handle that is gone; all come back as they were,
    /// and meter and file have each storage once.
    #[test]
    fn kept_tensors_leave_memory_and_come_back_as_they_were() {
        let (meter, (mut place, size), vault) = (Meter::new(), place(), Vault::default());
        let whole = from_vec((0..600).map(|i| i as f32).collect(), [2, 3, 100]);
        let keep = |t: Tensor<3>| {
            let saved = Saved::new(t, MemoryKind::Activation, &meter);
            vault.note(&saved);
            saved
        };
        let first = keep(whole.clone());
        let part = keep(whole.clone().narrow(2, 40, 7).swap_dims(0, 1));
        let halves = from_halves(vec![bf16::from_f32(-0.5); 64], [1, 1, 64]);
        let halves = keep(halves);
        drop(keep(from_vec(vec![9.0; 8], [1, 1, 8])));
        drop(whole);
        let texts = |all: [&Saved<3>; 3]| all.map(|saved| saved.get().to_data().to_string());
        let before = texts([&first, &part, &halves]);
        let all = 2400 + 128;
        assert_eq!(meter.now().activation, all);

        let mut away = AwayTensors::start_out(vault, &mut place, &meter).unwrap();
        assert_eq!((meter.now().activation, meter.now().host_activation), (all, all));
        away.finish_out().unwrap();
        assert_eq!((meter.now().activation, meter.now().host_activation), (0, all));
        assert_eq!((meter.now().total(), size()), (0, all));
        assert!(away.is_copied());
        away.start_in();
        assert_eq!(meter.now().activation, all);
        away.finish_in().unwrap();
        assert_eq!((meter.now().activation, meter.now().host_activation), (all, 0));
        assert_eq!(meter.peak().activation, all + 32, "never more than was kept");
        assert_eq!(texts([&first, &part, &halves]), before);
        drop((first, halves));
        assert_eq!(meter.now().activation, 2400, "a part keeps all of its storage");
        part.take();
        assert_eq!(meter.now().total(), 0);
    }

    #[test]
    #[should_panic(expected = "while it is out of memory")]
    fn a_tensor_that_is_away_is_not_given() {
        let (meter, (mut place, _), vault) = (Meter::new(), place(), Vault::default());
        let saved = Saved::new(from_vec(vec![1.0], [1]), MemoryKind::Activation, &meter);
        vault.note(&saved);
        let mut away = AwayTensors::start_out(vault, &mut place, &meter).unwrap();
        away.finish_out().unwrap();
        saved.get();
    }

    #[test]
    fn forgotten_tensors_give_their_place_back() {
        let (meter, (mut place, size)) = (Meter::new(), place());
        for stage in 0..6 {
            let vault = Vault::default();
            let saved = Saved::new(from_vec(vec![1.5; 50], [50]), MemoryKind::Activation, &meter);
            vault.note(&saved);
            let mut away = AwayTensors::start_out(vault, &mut place, &meter).unwrap();
            if stage > 1 {
                away.finish_out().unwrap();
            }
            if stage > 3 {
                away.start_in();
            }
            drop(away);
            assert_eq!(meter.now().host_activation, 0);
            drop(saved);
            assert_eq!((meter.now().total(), size()), (0, 200));
        }
        let saved = Saved::new(from_vec(vec![1.5; 5], [5]), MemoryKind::Activation, &meter);
        assert_eq!(into_vec(saved.take()), [1.5; 5]);
    }
}
