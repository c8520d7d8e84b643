//! A rank's file for parameters, optimizer state and reduced gradients between their uses
//! (ADR 107). What cannot be read or written is told by `StateFile::check`, which everything asks
//! before others may see what came of it.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::Mutex;
use zeropp_comm::{CommError, CommResult};
use zeropp_core::files::{ScratchCopy, ScratchFile, ScratchPlace};
use zeropp_core::meter::{Hold, MemoryKind, Meter};
use zeropp_core::optimizer::Out;

/// The file. It has no name, and its bytes count as *host state*.
pub struct StateFile {
    /// What is in it, where there are no other replicas.
    pub(crate) out: Out,
    inner: Mutex<FileState>,
    /// An update of what it has that is done beside the next step.
    update: Mutex<Option<JoinHandle<()>>>,
    meter: Arc<Meter>,
}

struct FileState {
    file: ScratchFile,
    /// The last copy out, with what goes out meanwhile in memory.
    writing: Option<ScratchCopy<()>>,
    failed: Option<CommError>,
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
        let inner = FileState { file: ScratchFile::open(folder)?, writing: None, failed: None };
        let inner = Mutex::new(inner);
        Ok(Arc::new(StateFile { out, inner, update: Mutex::default(), meter: meter.clone() }))
    }

    /// The first fault, if there was one.
    ///
    /// # Errors
    /// What the system said, such as that the disk is full.
    pub(crate) fn check(&self) -> CommResult<()> {
        self.inner.lock().failed.clone().map_or(Ok(()), Err)
    }

    /// Starts `update` of what it has, on a thread of its own.
    pub(crate) fn start_update(&self, update: impl FnOnce() + Send + 'static) -> CommResult<()> {
        let thread = std::thread::Builder::new().name("update".into()).spawn(update);
        *self.update.lock() = Some(thread.map_err(|e| failed(&e))?);
        Ok(())
    }

    /// Returns once the update under way is done, if there is one.
    pub(crate) fn wait_for_update(&self) {
        if let Some(update) = self.update.lock().take() {
            // What one that has panicked leaves says so.
            let _ = update.join();
        }
    }

    /// A place of `words` words, to be written before it is read.
    pub(crate) fn place(self: &Arc<Self>, words: usize) -> Arc<StatePlace> {
        let place = self.inner.lock().file.place(4 * words as u64);
        self.counted(place)
    }

    /// A place of `words` zeros.
    pub(crate) fn zeros(self: &Arc<Self>, words: usize) -> Arc<StatePlace> {
        let place = {
            let mut inner = self.inner.lock();
            inner.file.zeros(4 * words as u64).unwrap_or_else(|e| {
                inner.failed.get_or_insert_with(|| failed(&e));
                inner.file.place(4 * words as u64)
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
        inner.writing = Some(inner.file.write_to(&places, values));
    }

    /// Waits for what is being written.
    pub(crate) fn settle(&self) {
        let writing = self.inner.lock().writing.take();
        if let Some(Err(e)) = writing.map(ScratchCopy::wait) {
            self.note(&e);
        }
    }

    pub(crate) fn note(&self, error: &io::Error) {
        self.inner.lock().failed.get_or_insert_with(|| failed(error));
    }
}

impl StatePlace {
    pub(crate) fn file(&self) -> &Arc<StateFile> {
        &self.file
    }

    /// The place of some of the words.
    pub(crate) fn part(&self, range: std::ops::Range<usize>) -> ScratchPlace {
        self.place.part(4 * range.start as u64..4 * range.end as u64)
    }

    pub(crate) fn words(&self) -> usize {
        self.place.bytes() as usize / 4
    }

    /// Starts reading some of the words.
    pub(crate) fn start_read(&self, range: std::ops::Range<usize>) -> ScratchCopy<Vec<Floats>> {
        let values = Floats(vec![0.0; range.len()]);
        self.file.inner.lock().file.read(&[self.part(range)], vec![values])
    }
}

impl Drop for StatePlace {
    fn drop(&mut self) {
        self.file.inner.lock().file.release(vec![self.place]);
    }
}

/// The fault in the words of an engine, as the ranks that wait for this one are told it.
pub(crate) fn failed(error: &io::Error) -> CommError {
    CommError::Backend {
        engine: "optimizer:out".into(),
        operation: "a copy between memory and its file".into(),
        code: error.raw_os_error().unwrap_or_default().into(),
        text: format!("{error}; name a folder with more room, or on a disk that works"),
    }
}
