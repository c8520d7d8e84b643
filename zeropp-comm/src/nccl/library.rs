//! libnccl, found and loaded when the engine starts: nothing of NCCL is needed to build.
//!
//! Results are read as plain numbers: a library newer than this code may have more of them.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::offset_of;
use std::ptr;
use std::sync::Arc;

use libloading::Library;
use zeropp_core::device::LibrarySearch;
use zeropp_core::library_functions;
use zeropp_core::threads::start_scoped;

use crate::CommError;

/// Oldest NCCL that will do, as NCCL writes its versions: 2.14 brought communicators whose calls
/// return at once. With an older one a rank that is late hangs the others inside NCCL, where
/// nothing can end them.
const VERSION_MIN: c_int = 21400;

/// The variable that names the library.
const VARIABLE: &str = "ZEROPP_NCCL_LIB";

/// The first NCCL with a limit of a communicator's thread blocks.
const VERSION_CTAS: c_int = 21700;

/// Most thread blocks of a communicator for messages. A receive's run from when it is issued until
/// its message is there, on multiprocessors that then compute nothing; NCCL would take up to 32.
/// NCCL_MAX_CTAS overrides it.
const PAIR_CTAS_MAX: c_int = 4;

/// NCCL's result for a call that goes on in the background.
const IN_PROGRESS: c_int = 7;
/// NCCL's result for an error that another process caused.
const REMOTE_ERROR: c_int = 6;
/// NCCL's numbers of the element types it is asked for.
const UINT8: c_int = 1;
const FLOAT32: c_int = 7;
/// NCCL's number of the sum.
const SUM: c_int = 0;

/// Where to look for libnccl: what `ZEROPP_NCCL_LIB` names alone where it is set; else
/// `libnccl.so.2`, `libnccl.so`, and the folder of NVIDIA's Python package.
pub(super) fn search_from_env() -> LibrarySearch {
    let names = ["libnccl.so.2", "libnccl.so"];
    LibrarySearch::from_env(VARIABLE, &names, Vec::new(), "nvidia/nccl/lib")
}

/// An error that NCCL returned from a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NcclError {
    call: &'static str,
    code: c_int,
    text: String,
}

impl NcclError {
    /// The error of `operation`.
    pub(super) fn in_operation(&self, operation: String) -> CommError {
        CommError::Backend {
            engine: "nccl".into(),
            operation,
            code: i64::from(self.code),
            text: format!("{}: {}", self.call, self.text),
        }
    }

    /// Whether another process is to blame, which may be about to say why.
    pub(super) fn is_remote(&self) -> bool {
        self.code == REMOTE_ERROR
    }
}

/// The identity of a communicator before it exists.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct UniqueId(pub(super) [u8; 128]);

type RawComm = *mut c_void;

/// The settings of a communicator as NCCL 2.17 knew them; newer versions take the rest as unset.
/// 2.14 knew those up to `blocking`.
#[repr(C)]
struct Settings {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cluster_size: c_int,
    ctas_min: c_int,
    ctas_max: c_int,
    net_name: *const c_char,
}

library_functions! {
    get_unique_id = "ncclGetUniqueId": fn(*mut UniqueId) -> c_int;
    get_error_string = "ncclGetErrorString": fn(c_int) -> *const c_char;
    get_last_error = "ncclGetLastError": fn(RawComm) -> *const c_char;
    init_rank = "ncclCommInitRankConfig":
        fn(*mut RawComm, c_int, UniqueId, c_int, *mut Settings) -> c_int;
    async_error = "ncclCommGetAsyncError": fn(RawComm, *mut c_int) -> c_int;
    finalize = "ncclCommFinalize": fn(RawComm) -> c_int;
    destroy = "ncclCommDestroy": fn(RawComm) -> c_int;
    abort = "ncclCommAbort": fn(RawComm) -> c_int;
    all_gather = "ncclAllGather":
        fn(*const c_void, *mut c_void, usize, c_int, RawComm, *mut c_void) -> c_int;
    reduce_scatter = "ncclReduceScatter":
        fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, *mut c_void) -> c_int;
    all_reduce = "ncclAllReduce":
        fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, *mut c_void) -> c_int;
    broadcast = "ncclBroadcast":
        fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, *mut c_void) -> c_int;
    begin_group = "ncclGroupStart": fn() -> c_int;
    end_group = "ncclGroupEnd": fn() -> c_int;
    send = "ncclSend": fn(*const c_void, usize, c_int, c_int, RawComm, *mut c_void) -> c_int;
    recv = "ncclRecv": fn(*mut c_void, usize, c_int, c_int, RawComm, *mut c_void) -> c_int;
}

/// A loaded libnccl.
pub(super) struct Nccl {
    functions: Functions,
    version: c_int,
}

impl Nccl {
    /// Loads the first library that `search` finds.
    ///
    /// # Errors
    /// `Unavailable`, with everything that was tried and what the loader said to each; also for a
    /// library that is too old or lacks a function.
    pub(super) fn load(search: &LibrarySearch) -> Result<Arc<Nccl>, CommError> {
        let (library, name) = search.open().map_err(|tried| {
            unavailable(format!(
                "libnccl was not found ({tried}); install NCCL, or set {VARIABLE} to its file"
            ))
        })?;
        Self::bind(library, &name)
    }

    fn bind(library: Library, name: &str) -> Result<Arc<Nccl>, CommError> {
        let mut version = 0;
        // SAFETY: the type is NCCL's declaration of the function, which writes one number.
        let code = unsafe {
            library
                .get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"ncclGetVersion\0")
                .map(|get_version| get_version(&mut version))
        };
        if code.map_err(|_| unavailable(format!("{name} is not NCCL: no ncclGetVersion")))? != 0 {
            return Err(unavailable(format!("{name} does not tell its version")));
        }
        if version < VERSION_MIN {
            return Err(unavailable(format!(
                "{name} is NCCL {}, and {} or newer is needed: the calls of older ones can block \
                 for ever; install a newer one, or set {VARIABLE} to its file",
                dotted(version),
                dotted(VERSION_MIN)
            )));
        }
        let functions = Functions::find(&library)
            .map_err(|why| unavailable(format!("{name} (NCCL {}): {why}", dotted(version))))?;
        // NCCL's own threads may outlive the engine: its code stays.
        std::mem::forget(library);
        Ok(Arc::new(Nccl { functions, version }))
    }

    /// The library's version, such as 2.27.3.
    pub(super) fn version(&self) -> String {
        dotted(self.version)
    }

    /// A new identity for a communicator.
    pub(super) fn unique_id(&self) -> Result<UniqueId, NcclError> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: NCCL writes one id.
        let code = unsafe { (self.functions.get_unique_id)(&mut id) };
        self.check("ncclGetUniqueId", code, ptr::null_mut()).map(|()| id)
    }

    /// Starts to make this rank's end of a communicator of `size` ranks, on the device of the
    /// calling thread; `messages` are all that it is for, or not. It is ready once
    /// [`NcclComm::is_ready`] says so.
    pub(super) fn start(
        self: &Arc<Self>,
        id: UniqueId,
        size: usize,
        rank: usize,
        messages: bool,
    ) -> Result<NcclComm, NcclError> {
        let mut raw = ptr::null_mut();
        let (version, bytes) = match self.version >= VERSION_CTAS {
            true => (VERSION_CTAS, size_of::<Settings>()),
            false => (VERSION_MIN, offset_of!(Settings, ctas_min)),
        };
        let unset = c_int::MIN;
        let mut settings = Settings {
            size: bytes,
            magic: 0xcafe_beef,
            version: version as u32,
            blocking: 0,
            cluster_size: unset,
            ctas_min: unset,
            ctas_max: if messages { PAIR_CTAS_MAX } else { unset },
            net_name: ptr::null(),
        };
        let (size, rank) = (size as c_int, rank as c_int);
        // SAFETY: NCCL writes a handle, and reads as much of the settings as their size says.
        let code = unsafe { (self.functions.init_rank)(&mut raw, size, id, rank, &mut settings) };
        self.check("ncclCommInitRankConfig", code, raw)?;
        Ok(NcclComm { nccl: self.clone(), raw })
    }

    /// An error for every code but those of success and of work in the background.
    fn check(&self, call: &'static str, code: c_int, comm: RawComm) -> Result<(), NcclError> {
        if code == 0 || code == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: both return text of the library, or nothing.
        let (kind, last) = unsafe {
            let functions = &self.functions;
            (text((functions.get_error_string)(code)), text((functions.get_last_error)(comm)))
        };
        let text = if last.is_empty() { kind } else { format!("{kind} ({last})") };
        Err(NcclError { call, code, text })
    }
}

/// Which operation NCCL carries out, and what it must know beside addresses and length. Moves
/// count bytes, sums count `f32` elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NcclTransfer {
    AllGather,
    ReduceScatter,
    AllReduce,
    Broadcast { root: usize },
    Send { to: usize },
    Recv { from: usize },
}

/// This rank's end of one NCCL communicator. Dropping it aborts what is under way.
pub(super) struct NcclComm {
    nccl: Arc<Nccl>,
    raw: RawComm,
}

impl NcclComm {
    /// Whether nothing goes on in the background.
    ///
    /// # Errors
    /// The fault there, or in an operation under way.
    pub(super) fn is_ready(&self) -> Result<bool, NcclError> {
        let mut state = 0;
        // SAFETY: the handle is alive until `self` is dropped; NCCL writes one number.
        let code = unsafe { (self.nccl.functions.async_error)(self.raw, &mut state) };
        self.nccl.check("ncclCommGetAsyncError", code, self.raw)?;
        self.nccl.check("an operation under way", state, self.raw)?;
        Ok(state != IN_PROGRESS)
    }

    /// Queues an operation on `stream`. `count` is per rank: what an all-gather reads, what a
    /// reduce-scatter writes.
    ///
    /// # Safety
    /// `stream` is alive and of this communicator's device. `source` and `target` are addresses
    /// there, of as many elements as the operation reads and writes, and stay so until it is done.
    pub(super) unsafe fn issue(
        &self,
        transfer: NcclTransfer,
        source: usize,
        target: usize,
        count: usize,
        stream: usize,
    ) -> Result<(), NcclError> {
        let Functions { all_gather, reduce_scatter, all_reduce, broadcast, send, recv, .. } =
            &self.nccl.functions;
        let (from, to) = (source as *const c_void, target as *mut c_void);
        let (comm, stream) = (self.raw, stream as *mut c_void);
        // SAFETY: the caller's promise; the handle is alive until `self` is dropped.
        let (call, code) = unsafe {
            match transfer {
                NcclTransfer::AllGather => {
                    ("ncclAllGather", all_gather(from, to, count, UINT8, comm, stream))
                }
                NcclTransfer::ReduceScatter => (
                    "ncclReduceScatter",
                    reduce_scatter(from, to, count, FLOAT32, SUM, comm, stream),
                ),
                NcclTransfer::AllReduce => {
                    ("ncclAllReduce", all_reduce(from, to, count, FLOAT32, SUM, comm, stream))
                }
                NcclTransfer::Broadcast { root } => {
                    let root = root as c_int;
                    ("ncclBroadcast", broadcast(from, to, count, UINT8, root, comm, stream))
                }
                NcclTransfer::Send { to: peer } => {
                    ("ncclSend", send(from, count, UINT8, peer as c_int, comm, stream))
                }
                NcclTransfer::Recv { from: peer } => {
                    ("ncclRecv", recv(to, count, UINT8, peer as c_int, comm, stream))
                }
            }
        };
        self.nccl.check(call, code, self.raw)
    }

    /// Begins a group: what is issued until its end is one call, as all ranks make it.
    pub(super) fn begin_group(&self) -> Result<(), NcclError> {
        // SAFETY: the function takes nothing.
        let code = unsafe { (self.nccl.functions.begin_group)() };
        self.nccl.check("ncclGroupStart", code, self.raw)
    }

    /// Ends it. The call goes on in the background, as a single operation does.
    pub(super) fn end_group(&self) -> Result<(), NcclError> {
        // SAFETY: the function takes nothing, and ends the group that this thread has begun.
        let code = unsafe { (self.nccl.functions.end_group)() };
        self.nccl.check("ncclGroupEnd", code, self.raw)
    }

    /// Starts to end a communicator in good order: it is over once [`is_ready`](Self::is_ready).
    pub(super) fn finalize(&self) -> Result<(), NcclError> {
        // SAFETY: the handle is alive until `self` is dropped.
        let code = unsafe { (self.nccl.functions.finalize)(self.raw) };
        self.nccl.check("ncclCommFinalize", code, self.raw)
    }

    /// Frees what is left of a communicator that was finalized.
    pub(super) fn destroy(self) {
        // SAFETY: the handle is alive, and is not used again.
        unsafe { (self.nccl.functions.destroy)(self.raw) };
        std::mem::forget(self);
    }
}

// SAFETY: NCCL knows no thread of a communicator; its calls come one after another, from its owner.
unsafe impl Send for NcclComm {}

/// Aborts communicators, all at once: NCCL waits until the kernels of each have stopped, and those
/// may come after another's on the device.
pub(super) fn abort(comms: Vec<NcclComm>) {
    std::thread::scope(|scope| {
        for comm in comms {
            // Where the system refuses a thread, the communicator is dropped here.
            drop(start_scoped(scope, "abort", move || drop(comm)));
        }
    });
}

impl Drop for NcclComm {
    fn drop(&mut self) {
        // SAFETY: the handle is alive, and is not used again.
        unsafe { (self.nccl.functions.abort)(self.raw) };
    }
}

/// # Safety
/// `pointer` is null or a text that stays.
unsafe fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().trim().to_owned()
}

/// A version in NCCL's notation since 2.9 (2.8 and older wrote thousands).
fn dotted(version: c_int) -> String {
    let (major, rest) = if version < 10_000 {
        (version / 1000, version % 1000)
    } else {
        (version / 10_000, version % 10_000)
    };
    format!("{major}.{}.{}", rest / 100, rest % 100)
}

fn unavailable(reason: String) -> CommError {
    CommError::Unavailable { engine: "nccl".into(), reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_read_as_people_write_them() {
        assert_eq!(dotted(2708), "2.7.8");
        assert_eq!(dotted(21400), "2.14.0");
        assert_eq!(dotted(22703), "2.27.3");
    }
}
