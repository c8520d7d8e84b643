//! A rank's file for parameters, optimizer state and reduced gradients between their uses
//! (ADR 107), or pinned memory of its GPU's host for what the optimizer keeps. What cannot be read
//! or written is told by `StateFile::check`, which everything asks before others may see what came
//! of it.

use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Weak};

use burn::tensor::{Device, Tensor};
use parking_lot::Mutex;
use zeropp_comm::{CommError, CommResult};
use zeropp_core::files::{ScratchCopy, ScratchFile, ScratchPlace};
use zeropp_core::meter::{Hold, MemoryKind, Meter};
use zeropp_core::optimizer::Out;
use zeropp_core::split::{AwayPlace, AwayTensor};

/// The file, which has no name, or that memory. Its bytes count as *host state*.
pub struct StateFile {
    /// What is in it, where there are no other replicas.
    pub(crate) out: Out,
    /// Whether whole tensors come in and go out, by queues of the device.
    pub(crate) is_host: bool,
    inner: Mutex<FileState>,
    meter: Arc<Meter>,
}

struct FileState {
    store: Store,
    /// The last copy out, with what goes out meanwhile in memory.
    writing: Option<ScratchCopy<()>>,
    /// The same of whole tensors.
    leaving: Vec<Weak<AwayWords>>,
    failed: Option<CommError>,
}

enum Store {
    File(ScratchFile),
    Host(AwayPlace),
}

/// Words that go out whole, for as long as somebody has this.
pub(crate) struct AwayWords {
    file: Arc<StateFile>,
    words: usize,
    device: Device,
    /// None while they are updated.
    tensor: Mutex<Option<AwayTensor>>,
    /// Counts what of them is in memory for an update beside the next step.
    here: Mutex<Option<Hold>>,
    _counted: Hold,
}

/// fp32 numbers as the bytes that they are.
pub(crate) struct Floats(pub(crate) Vec<f32>);

impl AsRef<[u8]> for Floats {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

impl AsMut<[u8]> for Floats {
    fn as_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.0)
    }
}

/// Where words lie in the file, for as long as somebody has this.
pub(crate) struct StatePlace {
    file: Arc<StateFile>,
    place: ScratchPlace,
    _counted: Hold,
}

impl StateFile {
    /// Makes a file in `folder` for what is to be `out`, and that folder if it is missing.
    ///
    /// # Errors
    /// A folder where no file can be made, or a thread that is refused.
    pub fn open(folder: &Path, out: Out, meter: &Arc<Meter>) -> io::Result<Arc<StateFile>> {
        Ok(StateFile::of(Store::File(ScratchFile::open(folder)?), out, meter))
    }

    /// The same with a place of which whole tensors come in.
    pub fn on_host(place: AwayPlace, out: Out, meter: &Arc<Meter>) -> Arc<StateFile> {
        StateFile::of(Store::Host(place), out, meter)
    }

    fn of(store: Store, out: Out, meter: &Arc<Meter>) -> Arc<StateFile> {
        let is_host = matches!(store, Store::Host(_));
        let inner = FileState { store, writing: None, leaving: Vec::new(), failed: None };
        Arc::new(StateFile { out, is_host, inner: Mutex::new(inner), meter: meter.clone() })
    }

    /// The first fault, if there was one.
    ///
    /// # Errors
    /// What the system said, such as that the disk is full.
    pub(crate) fn check(&self) -> CommResult<()> {
        self.inner.lock().failed.clone().map_or(Ok(()), Err)
    }

    /// A place of `words` words, to be written before it is read.
    pub(crate) fn place(self: &Arc<Self>, words: usize) -> Arc<StatePlace> {
        let place = self.inner.lock().file().place(4 * words as u64);
        self.counted(place)
    }

    /// A place of `words` zeros.
    pub(crate) fn zeros(self: &Arc<Self>, words: usize) -> Arc<StatePlace> {
        let place = {
            let mut inner = self.inner.lock();
            inner.file().zeros(4 * words as u64).unwrap_or_else(|e| {
                inner.failed.get_or_insert_with(|| failed(&e));
                inner.file().place(4 * words as u64)
            })
        };
        self.counted(place)
    }

    fn counted(self: &Arc<Self>, place: ScratchPlace) -> Arc<StatePlace> {
        let counted = self.meter.hold(MemoryKind::HostState, place.bytes());
        Arc::new(StatePlace { file: self.clone(), place, _counted: counted })
    }

    /// Starts writing values to places of as many words, once what was written before is there: no
    /// more than the values of two calls are in memory.
    pub(crate) fn write(&self, all: Vec<(ScratchPlace, Vec<f32>)>) {
        self.settle();
        let (places, values): (Vec<_>, Vec<_>) =
            all.into_iter().map(|(place, values)| (place, Floats(values))).unzip();
        let mut inner = self.inner.lock();
        inner.writing = Some(inner.file().write_to(&places, values));
    }

    /// Starts copying these whole words out, as they are now.
    pub(crate) fn leave(&self, words: Arc<AwayWords>, values: Tensor<1>) {
        words.start_out(values);
        self.inner.lock().leaving.push(Arc::downgrade(&words));
    }

    /// Waits for what is being written.
    pub(crate) fn settle(&self) {
        let (writing, leaving) = {
            let mut inner = self.inner.lock();
            (inner.writing.take(), std::mem::take(&mut inner.leaving))
        };
        if let Some(Err(e)) = writing.map(ScratchCopy::wait) {
            self.note(&e);
        }
        for words in leaving.iter().filter_map(Weak::upgrade) {
            words.with(AwayTensor::finish_out);
            *words.here.lock() = None;
        }
    }

    /// Words that go out whole, and are these.
    pub(crate) fn away(self: &Arc<Self>, t: Tensor<1>) -> Arc<AwayWords> {
        let words = Arc::new(AwayWords {
            file: self.clone(),
            words: t.dims()[0],
            device: t.device(),
            tensor: Mutex::default(),
            here: Mutex::default(),
            _counted: self.meter.hold(MemoryKind::HostState, 4 * t.dims()[0] as u64),
        });
        words.start_out(t);
        words.with(AwayTensor::finish_out);
        words
    }

    pub(crate) fn note(&self, error: &io::Error) {
        self.inner.lock().failed.get_or_insert_with(|| failed(error));
    }
}

impl FileState {
    /// The file; whole tensors never ask for it.
    fn file(&mut self) -> &mut ScratchFile {
        match &mut self.store {
            Store::File(file) => file,
            Store::Host(_) => unreachable!("pinned memory has tensors, and no places"),
        }
    }
}

impl AwayWords {
    pub(crate) fn words(&self) -> usize {
        self.words
    }

    pub(crate) fn file(&self) -> &Arc<StateFile> {
        &self.file
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// What `f` says of what is out; a fault is noted.
    fn with<T>(&self, f: impl FnOnce(&mut AwayTensor) -> io::Result<T>) -> Option<T> {
        let said = self.tensor.lock().as_mut().map(f)?;
        said.map_err(|e| self.file.note(&e)).ok()
    }

    /// Takes memory and starts copying in.
    pub(crate) fn start_in(&self) {
        if self.file.out == Out::Behind {
            let bytes = 4 * self.words as u64;
            *self.here.lock() = Some(self.file.meter.hold(MemoryKind::Optimizer, bytes));
        }
        self.with(AwayTensor::start_in);
    }

    /// After that the words, which are to be put out again.
    pub(crate) fn finish_in(&self) -> Tensor<1> {
        let tensor = self.tensor.lock().take();
        let there = tensor.and_then(|t| t.finish_in().map_err(|e| self.file.note(&e)).ok());
        there.unwrap_or_else(|| Tensor::zeros([self.words], &self.device))
    }

    /// Starts copying out what the words are now.
    fn start_out(&self, t: Tensor<1>) {
        let leaving = match &mut self.file.inner.lock().store {
            Store::Host(place) => AwayTensor::start_out(t, place),
            Store::File(_) => unreachable!("it goes out whole"),
        };
        *self.tensor.lock() = leaving.map_err(|e| self.file.note(&e)).ok();
    }

    /// Some of them, in memory of the CPU; zeros where they cannot be read.
    pub(crate) fn read(&self, range: Range<usize>) -> Vec<f32> {
        let n = range.len();
        self.with(|tensor| tensor.read(range)).unwrap_or_else(|| vec![0.0; n])
    }
}

impl StatePlace {
    pub(crate) fn file(&self) -> &Arc<StateFile> {
        &self.file
    }

    /// The place of some of the words.
    pub(crate) fn part(&self, range: Range<usize>) -> ScratchPlace {
        self.place.part(4 * range.start as u64..4 * range.end as u64)
    }

    pub(crate) fn words(&self) -> usize {
        self.place.bytes() as usize / 4
    }

    /// Starts reading some of the words.
    pub(crate) fn start_read(&self, range: Range<usize>) -> ScratchCopy<Vec<Floats>> {
        let values = Floats(vec![0.0; range.len()]);
        self.file.inner.lock().file().read(&[self.part(range)], vec![values])
    }
}

impl Drop for StatePlace {
    fn drop(&mut self) {
        self.file.inner.lock().file().release(vec![self.place]);
    }
}

/// The fault in the words of an engine, as the ranks that wait for this one are told it.
pub(crate) fn failed(error: &io::Error) -> CommError {
    CommError::Backend {
        engine: "optimizer:out".into(),
        operation: "a copy out of memory or back in".into(),
        code: error.raw_os_error().unwrap_or_default().into(),
        text: format!("{error}; name a place with more room, or a disk that works"),
    }
}
