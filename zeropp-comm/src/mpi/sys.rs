//! The calls to MPI, each made by the communication thread (the end of the job excepted).
//!
//! A [`Transfer`] owns the memory that MPI reads or writes until MPI says it is done, so that
//! nothing outside this file has to be careful.

use std::os::raw::{c_char, c_int, c_void};
use std::ptr::null_mut;

use ::mpi::ffi;
use burn::tensor::DType;

use crate::CommError;
use zeropp_core::cpu_tensor::{CpuBuffer, CpuTensor};

/// A return code of an MPI call other than success.
#[derive(Clone, Debug)]
pub(super) struct MpiError {
    call: &'static str,
    code: c_int,
}

impl MpiError {
    /// As the error of an operation between ranks.
    pub(super) fn in_operation(&self, operation: String) -> CommError {
        CommError::Backend {
            engine: "mpi".into(),
            operation,
            code: i64::from(self.code),
            text: format!("{}: {}", self.call, error_text(self.code)),
        }
    }
}

type MpiResult<T> = Result<T, MpiError>;

fn check(code: c_int, call: &'static str) -> MpiResult<()> {
    if code == ffi::MPI_SUCCESS as c_int { Ok(()) } else { Err(MpiError { call, code }) }
}

fn error_text(code: c_int) -> String {
    let mut text = [0u8; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut len = 0;
    // SAFETY: the buffer holds MPI_MAX_ERROR_STRING characters, and both pointers are to locals.
    let rc = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &mut len) };
    if rc != ffi::MPI_SUCCESS as c_int {
        return "unknown".into();
    }
    String::from_utf8_lossy(&text[..len as usize]).into_owned()
}

/// Starts MPI on this thread. Any thread may then end the job.
pub(super) fn init() -> MpiResult<()> {
    let mut provided = 0;
    // SAFETY: MPI takes null for the arguments; called once a process (see `start`).
    unsafe {
        let wanted = ffi::RSMPI_THREAD_MULTIPLE;
        let rc = ffi::MPI_Init_thread(null_mut(), null_mut(), wanted, &mut provided);
        check(rc, "MPI_Init_thread")?;
        let rc = ffi::MPI_Comm_set_errhandler(ffi::RSMPI_COMM_WORLD, ffi::RSMPI_ERRORS_RETURN);
        check(rc, "MPI_Comm_set_errhandler")
    }
}

/// Ends MPI in good order; every rank calls it, with nothing under way.
pub(super) fn finalize() -> MpiResult<()> {
    // SAFETY: called once, by the thread that called `init`.
    check(unsafe { ffi::MPI_Finalize() }, "MPI_Finalize")
}

/// Ends all processes of the job with exit code 1; from any thread.
pub(super) fn end_job() -> ! {
    // An MPI that cannot reach its launcher any more may not come back from MPI_Abort.
    let end_anyway = || {
        std::thread::sleep(std::time::Duration::from_secs(3));
        std::process::abort();
    };
    // Without a thread it may have to be ended from outside.
    let _ = zeropp_core::threads::start("end of the job", end_anyway);
    // SAFETY: MPI was initialised for several threads; the call needs nothing else.
    unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, 1) };
    std::process::abort();
}

/// An MPI communicator. Copies mean the same one.
#[derive(Clone, Copy)]
pub(super) struct Comm(ffi::MPI_Comm);

impl Comm {
    /// All processes of the job.
    pub(super) fn world() -> Comm {
        // SAFETY: a constant of the library.
        Comm(unsafe { ffi::RSMPI_COMM_WORLD })
    }

    pub(super) fn rank(self) -> MpiResult<usize> {
        let mut rank = 0;
        // SAFETY: a valid communicator and a pointer to a local.
        check(unsafe { ffi::MPI_Comm_rank(self.0, &mut rank) }, "MPI_Comm_rank")?;
        Ok(rank as usize)
    }

    pub(super) fn size(self) -> MpiResult<usize> {
        let mut size = 0;
        // SAFETY: a valid communicator and a pointer to a local.
        check(unsafe { ffi::MPI_Comm_size(self.0, &mut size) }, "MPI_Comm_size")?;
        Ok(size as usize)
    }

    /// The host of every process, by rank. Blocks until all have called it.
    pub(super) fn all_hosts(self) -> MpiResult<Vec<String>> {
        const LEN: usize = ffi::MPI_MAX_PROCESSOR_NAME as usize;
        let mut mine = [0u8; LEN];
        let mut len = 0;
        let name = mine.as_mut_ptr().cast();
        // SAFETY: room for the longest name, and a pointer to a local.
        let rc = unsafe { ffi::MPI_Get_processor_name(name, &mut len) };
        check(rc, "MPI_Get_processor_name")?;
        let mut all = vec![0u8; LEN * self.size()?];
        // SAFETY: `mine` holds LEN bytes and `all` as many for every rank; both outlive the call.
        let rc = unsafe {
            let (n, kind) = (LEN as c_int, ffi::RSMPI_UINT8_T);
            let (from, to) = (mine.as_ptr().cast(), all.as_mut_ptr().cast());
            ffi::MPI_Allgather(from, n, kind, to, n, kind, self.0)
        };
        check(rc, "MPI_Allgather")?;
        let text = |name: &[u8]| {
            let end = name.iter().position(|byte| *byte == 0).unwrap_or(LEN);
            String::from_utf8_lossy(&name[..end]).into_owned()
        };
        Ok(all.chunks_exact(LEN).map(text).collect())
    }

    /// The same ranks with messages of their own. Blocks until all have called it.
    pub(super) fn duplicate(self) -> MpiResult<Comm> {
        let mut raw = self.0;
        // SAFETY: a valid communicator and a pointer to a local; error codes are inherited.
        check(unsafe { ffi::MPI_Comm_dup(self.0, &mut raw) }, "MPI_Comm_dup")?;
        Ok(Comm(raw))
    }

    /// The ranks that give this `color`, ordered by `key`. Blocks until all have called it.
    pub(super) fn split(self, color: usize, key: usize) -> MpiResult<Comm> {
        let mut raw = self.0;
        let (color, key) = (color as c_int, key as c_int);
        // SAFETY: a valid communicator, a color that is not negative, and a pointer to a local.
        check(unsafe { ffi::MPI_Comm_split(self.0, color, key, &mut raw) }, "MPI_Comm_split")?;
        Ok(Comm(raw))
    }
}

/// Memory that a transfer reads or writes.
pub(super) enum TransferMemory {
    /// A tensor of `f32` elements: read only.
    Tensor(CpuTensor),
    /// A buffer of `f32` elements.
    Pooled(CpuBuffer),
    /// Elements of any type.
    Bytes(Vec<u8>),
}

impl TransferMemory {
    fn read(&self) -> (*const c_void, usize) {
        match self {
            TransferMemory::Tensor(t) => (t.as_slice().as_ptr().cast(), size_of_val(t.as_slice())),
            TransferMemory::Bytes(b) => (b.as_ptr().cast(), b.len()),
            TransferMemory::Pooled(_) => unreachable!("pooled buffers are only written"),
        }
    }

    fn write(&mut self) -> (*mut c_void, usize) {
        match self {
            TransferMemory::Pooled(buffer) => {
                let slice = buffer.as_mut_slice().expect("a lent buffer has one owner");
                (slice.as_mut_ptr().cast(), size_of_val(slice))
            }
            TransferMemory::Bytes(b) => (b.as_mut_ptr().cast(), b.len()),
            TransferMemory::Tensor(_) => unreachable!("tensors are only read"),
        }
    }
}

/// Where memory without elements is, as it is given to MPI.
static NOTHING: [u64; 2] = [0; 2];

/// The address of some memory, or of `nothing` where it has no bytes: Rust gives such memory small
/// addresses that are equal to each other or to MPI's constants.
fn real(address: *const c_void, bytes: usize, nothing: &'static u64) -> *const c_void {
    if bytes == 0 { std::ptr::from_ref(nothing).cast() } else { address }
}

/// How many elements go to or come from each rank, and where they are.
struct Counts {
    counts: Box<[c_int]>,
    places: Box<[c_int]>,
}

impl Counts {
    fn new(lens: &[usize]) -> Counts {
        let mut start = 0;
        let place = |len: &usize| {
            start += len;
            (start - len) as c_int
        };
        let places = lens.iter().map(place).collect();
        Counts { counts: lens.iter().map(|len| *len as c_int).collect(), places }
    }
}

/// Elements of each rank's part if `len` elements are cut into `size` parts, the last ones shorter.
pub(super) fn parts(len: usize, size: usize) -> Vec<usize> {
    let most = len.div_ceil(size).max(1);
    (0..size).map(|i| len.saturating_sub(i * most).min(most)).collect()
}

/// How what is read and what is written are cut.
type Cuts = [Option<Counts>; 2];
/// The memory that a transfer reads, the one that it writes, and how both are cut.
type Used = (Option<TransferMemory>, Option<TransferMemory>, Cuts);

/// An operation under way in MPI, with the memory it uses. Dropped early, it gives that memory to
/// MPI for good: only a world that has failed does so.
pub(super) struct Transfer {
    raw: ffi::MPI_Request,
    call: &'static str,
    active: bool,
    received: (usize, usize),
    memory: Option<Used>,
}

impl Transfer {
    fn start(
        call: &'static str,
        mut source: Option<TransferMemory>,
        mut target: Option<TransferMemory>,
        cuts: Cuts,
        post: impl FnOnce(*const c_void, *mut c_void, &Cuts, *mut ffi::MPI_Request) -> c_int,
    ) -> MpiResult<Transfer> {
        let from = source.as_mut().map_or(std::ptr::null(), |m| {
            let (from, bytes) = m.read();
            real(from, bytes, &NOTHING[0])
        });
        let to = target.as_mut().map_or(null_mut(), |m| {
            let (to, bytes) = m.write();
            real(to.cast_const(), bytes, &NOTHING[1]).cast_mut()
        });
        // SAFETY: a constant of the library.
        let mut raw = unsafe { ffi::RSMPI_REQUEST_NULL };
        check(post(from, to, &cuts, &mut raw), call)?;
        let memory = Some((source, target, cuts));
        Ok(Transfer { raw, call, active: true, received: (0, 0), memory })
    }

    /// Sends bytes to world rank `to`.
    pub(super) fn send(
        comm: Comm,
        to: usize,
        tag: i32,
        bytes: TransferMemory,
        kind: DType,
    ) -> MpiResult<Self> {
        let count = bytes.read().1 / kind.size();
        Self::start("MPI_Isend", Some(bytes), None, [None, None], |from, _, _, raw| {
            // SAFETY: `from` holds `count` elements and lives in the transfer until it is done.
            unsafe {
                ffi::MPI_Isend(from, count as c_int, element(kind), to as c_int, tag, comm.0, raw)
            }
        })
    }

    /// Receives into `target` from world rank `from`, or from any.
    pub(super) fn receive(
        comm: Comm,
        from: Option<usize>,
        tag: i32,
        mut target: TransferMemory,
        kind: DType,
    ) -> MpiResult<Self> {
        let count = target.write().1 / kind.size();
        Self::start("MPI_Irecv", None, Some(target), [None, None], |_, to, _, raw| {
            // SAFETY: `to` has room for `count` elements, lives in the transfer until it is done,
            // and is seen by nothing else.
            unsafe {
                let from = from.map_or(ffi::RSMPI_ANY_SOURCE, |rank| rank as c_int);
                ffi::MPI_Irecv(to, count as c_int, element(kind), from, tag, comm.0, raw)
            }
        })
    }

    /// Concatenates all ranks' sources, `count` elements each, in `target`.
    pub(super) fn all_gather(
        comm: Comm,
        count: usize,
        kind: DType,
        source: TransferMemory,
        target: TransferMemory,
    ) -> MpiResult<Self> {
        let memory = (Some(source), Some(target));
        Self::start("MPI_Iallgather", memory.0, memory.1, [None, None], |from, to, _, raw| {
            let (n, kind) = (count as c_int, element(kind));
            // SAFETY: `from` holds `count` elements, `to` has room for as many from every rank,
            // and both live in the transfer until it is done.
            unsafe { ffi::MPI_Iallgather(from, n, kind, to, n, kind, comm.0, raw) }
        })
    }

    /// The same with sources of different `lens`, in elements, known to all ranks.
    pub(super) fn all_gather_parts(
        comm: Comm,
        lens: &[usize],
        kind: DType,
        source: TransferMemory,
        target: TransferMemory,
    ) -> MpiResult<Self> {
        let count = source.read().1 / kind.size();
        let cuts = [None, Some(Counts::new(lens))];
        Self::start("MPI_Iallgatherv", Some(source), Some(target), cuts, |from, to, cuts, raw| {
            let cut = cuts[1].as_ref().expect("given above");
            let (counts, places) = (cut.counts.as_ptr(), cut.places.as_ptr());
            let (n, kind) = (count as c_int, element(kind));
            // SAFETY: as in `all_gather`, with room for the sum of `lens`; the arrays have one
            // entry a rank and live in the transfer, too.
            unsafe { ffi::MPI_Iallgatherv(from, n, kind, to, counts, places, kind, comm.0, raw) }
        })
    }

    /// Concatenates all ranks' bytes, of different `lens` that all know, in `root`'s target.
    pub(super) fn gather_parts(
        comm: Comm,
        root: usize,
        lens: &[usize],
        source: TransferMemory,
        target: TransferMemory,
    ) -> MpiResult<Self> {
        let count = source.read().1;
        let cuts = [None, Some(Counts::new(lens))];
        Self::start("MPI_Igatherv", Some(source), Some(target), cuts, |from, to, cuts, raw| {
            let cut = cuts[1].as_ref().expect("given above");
            let (counts, places) = (cut.counts.as_ptr(), cut.places.as_ptr());
            let (n, kind, root) = (count as c_int, element(DType::U8), root as c_int);
            // SAFETY: as in `all_gather_parts`; MPI writes to the root's target only.
            unsafe { ffi::MPI_Igatherv(from, n, kind, to, counts, places, kind, root, comm.0, raw) }
        })
    }

    /// Sends rank i the i-th part of `source` and writes what comes from it at i in `target`:
    /// parts of `mine` elements each come in, parts of `lens` go out.
    pub(super) fn all_to_all(
        comm: Comm,
        lens: &[usize],
        mine: usize,
        kind: DType,
        source: TransferMemory,
        target: TransferMemory,
    ) -> MpiResult<Self> {
        let kind = element(kind);
        let memory = (Some(source), Some(target));
        if lens.iter().all(|len| *len == mine) {
            return Self::start(
                "MPI_Ialltoall",
                memory.0,
                memory.1,
                [None, None],
                |from, to, _, raw| {
                    let n = mine as c_int;
                    // SAFETY: both hold `mine` elements for every rank and live in the transfer.
                    unsafe { ffi::MPI_Ialltoall(from, n, kind, to, n, kind, comm.0, raw) }
                },
            );
        }
        let cuts = [Some(Counts::new(lens)), Some(Counts::new(&vec![mine; lens.len()]))];
        Self::start("MPI_Ialltoallv", memory.0, memory.1, cuts, |from, to, cuts, raw| {
            let [Some(out), Some(into)] = cuts else { unreachable!("given above") };
            let (a, b) = (out.counts.as_ptr(), out.places.as_ptr());
            let (c, d) = (into.counts.as_ptr(), into.places.as_ptr());
            // SAFETY: `from` holds the sum of `lens` elements, `to` has room for `mine` from every
            // rank; the arrays have one entry a rank; all live in the transfer until it is done.
            unsafe { ffi::MPI_Ialltoallv(from, a, b, kind, to, c, d, kind, comm.0, raw) }
        })
    }

    /// Sends the root's `source`, or receives it into `target`.
    pub(super) fn broadcast(
        comm: Comm,
        root: usize,
        kind: DType,
        source: Option<TransferMemory>,
        mut target: Option<TransferMemory>,
    ) -> MpiResult<Self> {
        let bytes = match (&source, &mut target) {
            (Some(source), _) => source.read().1,
            (None, Some(target)) => target.write().1,
            (None, None) => unreachable!("a rank sends or receives"),
        };
        let count = (bytes / kind.size()) as c_int;
        Self::start("MPI_Ibcast", source, target, [None, None], |from, to, _, raw| {
            let buffer = if from.is_null() { to } else { from.cast_mut() };
            // SAFETY: the buffer holds `count` elements and lives in the transfer; MPI only reads
            // the root's.
            unsafe { ffi::MPI_Ibcast(buffer, count, element(kind), root as c_int, comm.0, raw) }
        })
    }

    /// Whether MPI is done; gives it a chance to make progress.
    pub(super) fn test(&mut self) -> MpiResult<bool> {
        if !self.active {
            return Ok(true);
        }
        let mut flag = 0;
        // SAFETY: all fields of a status are integers.
        let mut status: ffi::MPI_Status = unsafe { std::mem::zeroed() };
        // SAFETY: an active request and pointers to locals.
        let rc = unsafe { ffi::MPI_Test(&mut self.raw, &mut flag, &mut status) };
        if rc != ffi::MPI_SUCCESS as c_int {
            self.active = flag == 0;
            return check(rc, self.call).map(|()| false);
        }
        if flag != 0 {
            self.active = false;
            let mut bytes = 0;
            if self.call == "MPI_Irecv" {
                // SAFETY: the status of a receive that is done, and a pointer to a local.
                let rc = unsafe { ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut bytes) };
                check(rc, "MPI_Get_count")?;
            }
            self.received = (status.MPI_SOURCE.max(0) as usize, bytes.max(0) as usize);
        }
        Ok(!self.active)
    }

    /// World rank that a completed receive came from, and its bytes where it was of bytes.
    pub(super) fn received(&self) -> (usize, usize) {
        self.received
    }

    /// The memory of a completed transfer: what was read, and what was written.
    pub(super) fn into_memory(mut self) -> (Option<TransferMemory>, Option<TransferMemory>) {
        assert!(!self.active, "MPI still uses the memory");
        let (source, target, _) = self.memory.take().expect("taken once");
        (source, target)
    }

    /// Takes back a receive that nothing will match.
    pub(super) fn cancel(&mut self) -> MpiResult<()> {
        if self.active {
            // SAFETY: an active request of this thread.
            check(unsafe { ffi::MPI_Cancel(&mut self.raw) }, "MPI_Cancel")?;
            // SAFETY: as above; a cancelled receive completes without a peer.
            let rc = unsafe { ffi::MPI_Wait(&mut self.raw, ffi::RSMPI_STATUS_IGNORE) };
            check(rc, "MPI_Wait")?;
            self.active = false;
        }
        Ok(())
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if self.active {
            std::mem::forget(self.memory.take());
        }
    }
}

/// The MPI type of elements of `kind`'s size: data is moved, never added up, by MPI.
fn element(kind: DType) -> ffi::MPI_Datatype {
    // SAFETY: constants of the library.
    unsafe {
        match kind.size() {
            1 => ffi::RSMPI_UINT8_T,
            2 => ffi::RSMPI_UINT16_T,
            4 => ffi::RSMPI_UINT32_T,
            8 => ffi::RSMPI_UINT64_T,
            size => unreachable!("elements of {size} bytes were refused"),
        }
    }
}
