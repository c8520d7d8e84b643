//! What a forward has kept, out of memory until B needs it (ADR 101).
//!
//! Bytes go as they are, storage by storage, so that what comes back is the same tensors: views of
//! one storage are views of one again.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use zeropp_data::files::{ScratchCopy, ScratchFile, ScratchPlace};

use super::slot::{Leaving, Saved};
use crate::cpu_tensor::CpuBlock;
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
    /// Each with the place of its storage among those that are different.
    slots: Vec<(Arc<dyn Leaving>, usize)>,
    places: Vec<ScratchPlace>,
    copy: CopyState,
    meter: Arc<Meter>,
    /// Counts what is out.
    _host: Hold,
}

enum CopyState {
    Out(ScratchCopy<()>),
    Gone,
    In(ScratchCopy<Vec<CpuBlock>>, Hold),
}

impl AwayTensors {
    /// Starts copying what is still kept of a vault's to `file`.
    pub fn start_out(vault: Vault, file: &mut ScratchFile, meter: &Arc<Meter>) -> AwayTensors {
        let (mut slots, mut blocks) = (Vec::new(), Vec::<CpuBlock>::new());
        let mut known = HashMap::new();
        let noted = std::mem::take(&mut *vault.0.lock());
        for slot in noted.iter().filter_map(Weak::upgrade) {
            let Some(block) = slot.block() else { continue };
            let at = *known.entry(block.id()).or_insert(blocks.len());
            if at == blocks.len() {
                blocks.push(block);
            }
            slots.push((slot, at));
        }
        let (places, copy) = file.write(blocks);
        let bytes = places.iter().map(ScratchPlace::bytes).sum();
        let host = meter.hold(MemoryKind::HostActivation, bytes);
        let (copy, meter) = (CopyState::Out(copy), meter.clone());
        AwayTensors { slots, places, copy, meter, _host: host }
    }

    /// Whether the copy that is under way is done, if one is.
    pub fn is_copied(&mut self) -> bool {
        match &mut self.copy {
            CopyState::Out(copy) => copy.is_done(),
            CopyState::In(copy, _) => copy.is_done(),
            CopyState::Gone => true,
        }
    }

    /// Waits for the copy out and drops the tensors.
    ///
    /// # Errors
    /// What the system says, such as that the disk is full.
    pub fn finish_out(&mut self) -> io::Result<()> {
        if let CopyState::Out(copy) = std::mem::replace(&mut self.copy, CopyState::Gone) {
            copy.wait()?;
            self.slots.iter().for_each(|(slot, _)| slot.leave());
        }
        Ok(())
    }

    /// Takes memory for them and starts copying them back.
    pub fn start_in(&mut self, file: &mut ScratchFile) {
        let bytes = |place: &ScratchPlace| place.bytes() as usize;
        let blocks: Vec<CpuBlock> =
            self.places.iter().map(|place| CpuBlock::zeros(bytes(place))).collect();
        let sum = self.places.iter().map(ScratchPlace::bytes).sum();
        let hold = self.meter.hold(MemoryKind::Activation, sum);
        self.copy = CopyState::In(file.read(&self.places, blocks), hold);
    }

    /// Waits for that; what was kept is there again.
    ///
    /// # Errors
    /// What the system says.
    pub fn finish_in(self, file: &mut ScratchFile) -> io::Result<()> {
        let AwayTensors { slots, places, copy, meter, .. } = self;
        if let CopyState::In(copy, hold) = copy {
            let blocks = copy.wait()?;
            drop(hold);
            slots.iter().for_each(|(slot, at)| slot.come_back(&blocks[*at], &meter));
        }
        file.release(places);
        Ok(())
    }

    /// Waits for the copy that is under way and forgets what was copied, or could not be.
    pub fn forget(self, file: &mut ScratchFile) {
        match self.copy {
            CopyState::Out(copy) => drop(copy.wait()),
            CopyState::In(copy, _) => drop(copy.wait()),
            CopyState::Gone => {}
        }
        file.release(self.places);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu_tensor::{from_halves, from_vec, into_vec};
    use burn::tensor::{Tensor, bf16};

    fn file() -> ScratchFile {
        ScratchFile::open(&std::env::temp_dir()).unwrap()
    }

    /// Views of one storage, another type and a handle that is gone; all come back as they were,
    /// and meter and file have each storage once.
    #[test]
    fn kept_tensors_leave_memory_and_come_back_as_they_were() {
        let (meter, mut file, vault) = (Meter::new(), file(), Vault::default());
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

        let mut away = AwayTensors::start_out(vault, &mut file, &meter);
        assert_eq!((meter.now().activation, meter.now().host_activation), (all, all));
        away.finish_out().unwrap();
        assert_eq!((meter.now().activation, meter.now().host_activation), (0, all));
        assert_eq!((meter.now().total(), file.size()), (0, all));
        assert!(away.is_copied());
        away.start_in(&mut file);
        assert_eq!(meter.now().activation, all);
        away.finish_in(&mut file).unwrap();
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
        let (meter, mut file, vault) = (Meter::new(), file(), Vault::default());
        let saved = Saved::new(from_vec(vec![1.0], [1]), MemoryKind::Activation, &meter);
        vault.note(&saved);
        let mut away = AwayTensors::start_out(vault, &mut file, &meter);
        away.finish_out().unwrap();
        saved.get();
    }

    #[test]
    fn forgotten_tensors_give_their_place_back() {
        let (meter, mut file) = (Meter::new(), file());
        for stage in 0..6 {
            let vault = Vault::default();
            let saved = Saved::new(from_vec(vec![1.5; 50], [50]), MemoryKind::Activation, &meter);
            vault.note(&saved);
            let mut away = AwayTensors::start_out(vault, &mut file, &meter);
            if stage > 1 {
                away.finish_out().unwrap();
            }
            if stage > 3 {
                away.start_in(&mut file);
            }
            away.forget(&mut file);
            assert_eq!(meter.now().host_activation, 0);
            drop(saved);
            assert_eq!((meter.now().total(), file.size()), (0, 200));
        }
        let saved = Saved::new(from_vec(vec![1.5; 5], [5]), MemoryKind::Activation, &meter);
        assert_eq!(into_vec(saved.take()), [1.5; 5]);
    }
}
