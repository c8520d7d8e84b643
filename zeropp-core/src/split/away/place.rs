//! Where storages go that leave memory: a file, or a GPU's host.

use std::io;
use std::path::Path;
use std::sync::Arc;

use burn::tensor::Device;
use parking_lot::Mutex;
use zeropp_data::files::{ScratchCopy, ScratchFile, ScratchPlace};

use crate::cpu_tensor::CpuBlock;
#[cfg(feature = "cuda")]
use crate::device::cuda::{GpuBlock, HostLane, HostParcel};
use crate::split::storage::Storage;

/// What carries storages out of memory and back, each copy behind the one that was started before
/// it in the same direction.
pub(super) trait Carrier: Send {
    /// Whether it is for such storages.
    fn takes(&self, storage: &Storage) -> bool;
    /// Starts copying storages out, which it takes.
    fn start_out(&mut self, storages: Vec<Storage>) -> io::Result<Box<dyn Parcel>>;
}

/// Storages that a carrier has. Once it is dropped, their place is others'.
pub(super) trait Parcel: Send {
    /// Bytes of all.
    fn bytes(&self) -> u64;
    /// Whether what follows the copy under way need not wait here.
    fn is_copied(&mut self) -> bool;
    /// After the copy out: who has the storages may give them up.
    fn finish_out(&mut self) -> io::Result<()>;
    /// Takes memory and starts copying back.
    fn start_in(&mut self);
    /// After that: the storages.
    fn finish_in(&mut self) -> io::Result<Vec<Storage>>;
    /// Waits until its bytes are out, and reads some of them.
    fn read(&mut self, from: u64, bytes: &mut [u8]) -> io::Result<()>;
}

/// A rank's place for what leaves its memory, and the copies there and back.
pub struct AwayPlace(pub(super) Box<dyn Carrier>);

impl AwayPlace {
    /// A file in `folder` that has no name, for tensors of CPUs.
    ///
    /// # Errors
    /// A folder where no file can be made, or a thread that is refused.
    pub fn file(folder: &Path) -> io::Result<AwayPlace> {
        let file = Arc::new(Mutex::new(ScratchFile::open(folder)?));
        Ok(AwayPlace(Box::new(FileCarrier(file))))
    }

    /// Pinned memory of the host for `bytes` in `parcels` that are out at once, for tensors of the
    /// NVIDIA GPU `device`. Where more is pinned later, a warning names `field`.
    ///
    /// # Errors
    /// The driver's words; another device.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub fn host(
        device: &Device,
        bytes: u64,
        parcels: usize,
        field: &'static str,
    ) -> io::Result<AwayPlace> {
        #[cfg(feature = "cuda")]
        return Ok(AwayPlace(Box::new(HostLane::open(device, bytes, parcels, field)?)));
        #[cfg(not(feature = "cuda"))]
        Err(io::Error::other("this build has no NVIDIA GPUs"))
    }
}

pub(super) struct FileCarrier(pub(super) Arc<Mutex<ScratchFile>>);

struct FileParcel {
    file: Arc<Mutex<ScratchFile>>,
    places: Vec<ScratchPlace>,
    copy: FileCopy,
}

enum FileCopy {
    Out(ScratchCopy<()>),
    None,
    In(ScratchCopy<Vec<CpuBlock>>),
}

impl Carrier for FileCarrier {
    fn takes(&self, storage: &Storage) -> bool {
        matches!(storage, Storage::Cpu(_))
    }

    fn start_out(&mut self, storages: Vec<Storage>) -> io::Result<Box<dyn Parcel>> {
        let blocks = storages.into_iter().filter_map(Storage::into_cpu);
        let (places, copy) = self.0.lock().write(blocks.collect());
        Ok(Box::new(FileParcel { file: self.0.clone(), places, copy: FileCopy::Out(copy) }))
    }
}

impl Parcel for FileParcel {
    fn bytes(&self) -> u64 {
        self.places.iter().map(ScratchPlace::bytes).sum()
    }

    fn is_copied(&mut self) -> bool {
        match &mut self.copy {
            FileCopy::Out(copy) => copy.is_done(),
            FileCopy::In(copy) => copy.is_done(),
            FileCopy::None => true,
        }
    }

    fn finish_out(&mut self) -> io::Result<()> {
        match std::mem::replace(&mut self.copy, FileCopy::None) {
            FileCopy::Out(copy) => copy.wait(),
            _ => Ok(()),
        }
    }

    fn start_in(&mut self) {
        let bytes = |place: &ScratchPlace| place.bytes() as usize;
        let blocks = self.places.iter().map(|place| CpuBlock::zeros(bytes(place))).collect();
        self.copy = FileCopy::In(self.file.lock().read(&self.places, blocks));
    }

    fn finish_in(&mut self) -> io::Result<Vec<Storage>> {
        match std::mem::replace(&mut self.copy, FileCopy::None) {
            FileCopy::In(copy) => Ok(copy.wait()?.into_iter().map(Storage::Cpu).collect()),
            _ => Ok(Vec::new()),
        }
    }

    fn read(&mut self, from: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.finish_out()?;
        let all: Vec<_> = self.places.iter().map(ScratchPlace::bytes).collect();
        let [_] = all[..] else { return Err(io::Error::other("one storage is read in parts")) };
        let place = self.places[0].part(from..from + bytes.len() as u64);
        let read = self.file.lock().read(&[place], vec![vec![0u8; bytes.len()]]);
        bytes.copy_from_slice(&read.wait()?[0]);
        Ok(())
    }
}

impl Drop for FileParcel {
    fn drop(&mut self) {
        // What was begun ends before the place is others'.
        match std::mem::replace(&mut self.copy, FileCopy::None) {
            FileCopy::Out(copy) => drop(copy.wait()),
            FileCopy::In(copy) => drop(copy.wait()),
            FileCopy::None => {}
        }
        self.file.lock().release(std::mem::take(&mut self.places));
    }
}

#[cfg(feature = "cuda")]
struct OnHost {
    parcel: HostParcel,
    /// Memory that is being filled.
    coming: Vec<GpuBlock>,
}

#[cfg(feature = "cuda")]
impl Carrier for HostLane {
    fn takes(&self, storage: &Storage) -> bool {
        matches!(storage, Storage::Gpu(_))
    }

    fn start_out(&mut self, storages: Vec<Storage>) -> io::Result<Box<dyn Parcel>> {
        let blocks = storages.into_iter().filter_map(Storage::into_gpu);
        let parcel = self.copy_out(&blocks.collect::<Vec<_>>())?;
        Ok(Box::new(OnHost { parcel, coming: Vec::new() }))
    }
}

#[cfg(feature = "cuda")]
impl Parcel for OnHost {
    fn bytes(&self) -> u64 {
        self.parcel.bytes()
    }

    /// The GPU waits.
    fn is_copied(&mut self) -> bool {
        true
    }

    fn finish_out(&mut self) -> io::Result<()> {
        self.parcel.settle();
        self.parcel.check()
    }

    fn start_in(&mut self) {
        self.coming = self.parcel.copy_back();
    }

    fn finish_in(&mut self) -> io::Result<Vec<Storage>> {
        self.parcel.settle();
        self.parcel.check()?;
        Ok(std::mem::take(&mut self.coming).into_iter().map(Storage::Gpu).collect())
    }

    fn read(&mut self, from: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.parcel.read(from, bytes)
    }
}
