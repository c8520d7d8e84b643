//! Blocks of GPU memory in pinned memory of the host, and the copies between the two (ADR 111).
//!
//! Everything waits on the GPU: a copy for the work that the rank had queued before it, the rank's
//! later work for the copy. The rank's queue has one order, and memory is given back and taken
//! again in that order, so that no copy meets memory that others still use.

use std::any::Any;
use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

use burn::backend::DispatchDevice;
use burn::tensor::Device;
use burn_cubecl::CubeDevice;
use cubecl::cuda::CudaDevice;
use cubecl_common::device::Device as _;
use cubecl_environment::backtrace::BackTrace;
use cubecl_environment::stream::StreamId;
use cubecl_server::server::{BufferBinding, ServerError, ServerStorage};
use cubecl_server::stream::failed_writing;
use cudarc::driver::{result, sys};
use parking_lot::Mutex;

use super::super::pinned::{Run, page_bytes, pieces, pinned_bytes, runs};
use super::block::{Extent, GpuBlock};
use super::queue::{CudaServer, follow, mark, record, server, wait, words};

/// The pinned memory of one rank, and its two queues of copies.
pub(crate) struct HostLane(Arc<Lane>);

struct Lane {
    device: Device,
    cubecl: CudaDevice,
    out: Queue,
    back: Queue,
    pages: Mutex<Pages>,
    /// What it is for, in a warning.
    field: &'static str,
}

/// A queue of the GPU, as a number.
#[derive(Clone, Copy)]
struct Queue(usize);

/// Pages of pinned memory.
struct Pages {
    size: u64,
    /// Addresses of those that are free: neighbours are taken together where they can be.
    free: BTreeSet<usize>,
    /// What was taken from the system.
    slabs: Vec<usize>,
    /// Bytes for which there were pages at first.
    planned: u64,
}

/// What was copied out together: blocks, one behind the other in pages.
pub(crate) struct HostParcel {
    lane: Arc<Lane>,
    extents: Vec<Extent>,
    pages: Vec<usize>,
    runs: Arc<[Run]>,
    under_way: Arc<Mutex<UnderWay>>,
}

/// The copy that CubeCL's thread has begun last.
#[derive(Default)]
enum UnderWay {
    #[default]
    None,
    /// Until this event is reached the memory is held where it is.
    Until(usize, Box<dyn Any + Send>),
    /// It was not begun: what the GPU or CubeCL say.
    Failed(String),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Out,
    Back,
}

impl HostLane {
    /// Pins memory of the host for `bytes` in `parcels` that are out at once, and makes the queues.
    /// To pin memory waits for the GPU: where more is wanted later, that is said once.
    ///
    /// # Errors
    /// The driver's words; a device that is no NVIDIA GPU.
    pub(crate) fn open(
        device: &Device,
        bytes: u64,
        parcels: usize,
        field: &'static str,
    ) -> io::Result<HostLane> {
        let DispatchDevice::Cube(CubeDevice::Cuda(cubecl)) = device.as_dispatch() else {
            return Err(io::Error::other("there is no pinned memory for this device"));
        };
        let cubecl = cubecl.clone();
        let (size, planned) = (page_bytes(bytes), pinned_bytes(bytes, parcels));
        let mut pages = Pages { size, free: BTreeSet::new(), slabs: Vec::new(), planned };
        let index = usize::from(cubecl.to_id().index_id);
        let opened = server(&cubecl).submit_blocking(move |_| {
            enter(index)?;
            pages.grow(planned)?;
            Ok::<_, String>((Queue::new()?, Queue::new()?, pages))
        });
        let opened = opened.map_err(|error| format!("{error:?}")).and_then(|opened| opened);
        let (out, back, pages) = opened.map_err(io::Error::other)?;
        let (device, pages) = (device.clone(), Mutex::new(pages));
        Ok(HostLane(Arc::new(Lane { device, cubecl, out, back, pages, field })))
    }

    /// Starts copying these blocks out, behind what was asked of the GPU before. They are held till
    /// [`settle`](HostParcel::settle).
    ///
    /// # Errors
    /// More pinned memory is wanted, and refused.
    pub(crate) fn copy_out(&self, blocks: &[GpuBlock]) -> io::Result<HostParcel> {
        let extents: Vec<Extent> = blocks.iter().map(|block| block.extent().clone()).collect();
        let bytes = extents.iter().map(Extent::bytes).sum();
        let pages = self.0.take(bytes)?;
        let runs = runs(&pages, self.0.pages.lock().size, bytes).into();
        let lane = self.0.clone();
        let parcel = HostParcel { lane, extents, pages, runs, under_way: Arc::default() };
        parcel.start(Way::Out, blocks);
        Ok(parcel)
    }
}

impl HostParcel {
    pub(crate) fn bytes(&self) -> u64 {
        self.extents.iter().map(Extent::bytes).sum()
    }

    /// Takes memory of the GPU and starts copying into it, behind what was asked of the GPU so far:
    /// until then others may use it.
    pub(crate) fn copy_back(&self) -> Vec<GpuBlock> {
        // Tensors that were dropped give their memory back first.
        if let Err(error) = self.lane.device.flush() {
            *self.under_way.lock() = UnderWay::Failed(format!("{error:?}"));
        }
        let blocks: Vec<GpuBlock> = self.extents.iter().map(Extent::empty).collect();
        self.start(Way::Back, &blocks);
        blocks
    }

    fn start(&self, way: Way, blocks: &[GpuBlock]) {
        if blocks.is_empty() {
            return;
        }
        let bindings: Vec<_> = blocks.iter().map(|b| b.binding(way == Way::Back)).collect();
        let queue = if way == Way::Out { self.lane.out } else { self.lane.back };
        let (stream, runs) = (StreamId::current(), self.runs.clone());
        let under_way = self.under_way.clone();
        let thread = server(&self.lane.cubecl);
        thread.submit(move |server: &mut CudaServer| {
            let mut under_way = under_way.lock();
            let begun = match std::mem::take(&mut *under_way) {
                // What is out is not what it should be.
                UnderWay::Failed(error) => Err(error),
                _ => begin(server, stream, way, queue, &bindings, &runs),
            };
            *under_way = begun.unwrap_or_else(|reason| {
                if way == Way::Back {
                    let backtrace = BackTrace::capture();
                    let error = ServerError::Generic { reason: reason.clone(), backtrace };
                    failed_writing(server, stream, bindings, error);
                }
                UnderWay::Failed(reason)
            });
        });
        // Tasks are collected for a while.
        thread.flush_queue();
    }

    /// Lets the rank's later work wait for the copy that is under way, and then what the copy has
    /// held go: who gets that memory comes later in the same queue.
    pub(crate) fn settle(&self) {
        if self.extents.is_empty() {
            return;
        }
        let (stream, under_way) = (StreamId::current(), self.under_way.clone());
        server(&self.lane.cubecl).submit(move |server: &mut CudaServer| {
            let mut under_way = under_way.lock();
            match std::mem::take(&mut *under_way) {
                UnderWay::Until(event, held) => {
                    // SAFETY: the event is this copy's, which is destroyed here; the driver waits
                    // with that until it is reached.
                    let waits = unsafe {
                        let waits = follow(server, stream, event as _);
                        let _ = result::event::destroy(event as _);
                        waits
                    };
                    match waits {
                        Ok(()) => drop(held),
                        // The GPU may still copy: better lost than given to somebody else.
                        Err(_) => std::mem::forget(held),
                    }
                }
                other => *under_way = other,
            }
        });
    }

    /// Waits for the copies out, and reads bytes of this one's from `from` on. The host waits, and
    /// so may any thread.
    pub(crate) fn read(&self, from: u64, bytes: &mut [u8]) -> io::Result<()> {
        let (index, Queue(out)) = (usize::from(self.lane.cubecl.to_id().index_id), self.lane.out);
        // The copy has been begun then.
        let begun = server(&self.lane.cubecl).submit_blocking(|_| ());
        begun
            .map_err(|error| format!("{error:?}"))
            .and_then(|()| enter(index))
            // SAFETY: the queue is the lane's, which this has.
            .and_then(|()| unsafe { result::stream::synchronize(out as _) }.map_err(words))
            .map_err(io::Error::other)?;
        self.check()?;
        let wanted = Run { address: bytes.as_mut_ptr() as usize, bytes: bytes.len() as u64 };
        let skipped = Run { address: 0, bytes: from };
        for (to, from, bytes) in pieces([skipped, wanted].into_iter(), &self.runs) {
            if to >= wanted.address {
                // SAFETY: the copy out is there, and nobody writes these pages while they are this
                // parcel's; `to` is within `bytes`, which is as long as what is wanted.
                unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
            }
        }
        Ok(())
    }

    /// What went wrong so far.
    pub(crate) fn check(&self) -> io::Result<()> {
        match self.under_way.try_lock().as_deref() {
            Some(UnderWay::Failed(error)) => Err(io::Error::other(error.clone())),
            _ => Ok(()),
        }
    }
}

impl Drop for HostParcel {
    fn drop(&mut self) {
        self.settle();
        // Who takes these next copies behind work that is behind this copy.
        self.lane.pages.lock().free.extend(self.pages.drain(..));
    }
}

/// Begins a copy in `queue`, on CubeCL's thread, behind what the rank's queue has by now.
fn begin(
    server: &mut CudaServer,
    stream: StreamId,
    way: Way,
    Queue(queue): Queue,
    blocks: &[BufferBinding],
    runs: &[Run],
) -> Result<UnderWay, String> {
    let held = blocks.iter().map(|block| server.get_resource(block.clone(), stream));
    let held: Vec<_> = held.collect::<Result<_, _>>().map_err(|e| format!("{e:?}"))?;
    let device = held.iter().zip(blocks).map(|(held, block)| Run {
        address: held.resource().ptr as usize,
        bytes: block.size_in_used(),
    });
    let pieces = pieces(device, runs);
    let queue = queue as sys::CUstream;
    let before = mark(server, stream)?;
    // SAFETY: both queues are of this GPU, whose context is current on CubeCL's thread. The pinned
    // bytes are this parcel's, and `held` keeps those of the GPU where they are until the event
    // behind the copies is reached, or they have been waited for.
    unsafe {
        let waits = wait(queue, before);
        let _ = result::event::destroy(before);
        waits?;
        let asked = pieces.into_iter().try_for_each(|(device, host, bytes)| {
            let asked = match way {
                Way::Out => sys::cuMemcpyDtoHAsync_v2(host as *mut _, device as u64, bytes, queue),
                Way::Back => {
                    sys::cuMemcpyHtoDAsync_v2(device as u64, host as *const _, bytes, queue)
                }
            };
            asked.result().map_err(words)
        });
        match asked.and_then(|()| record(queue)) {
            Ok(done) => Ok(UnderWay::Until(done as usize, Box::new(held))),
            Err(error) => {
                let _ = result::stream::synchronize(queue);
                Err(error)
            }
        }
    }
}

impl Lane {
    /// Pages for so many bytes.
    fn take(&self, bytes: u64) -> io::Result<Vec<usize>> {
        let mut pages = self.pages.lock();
        let (size, count) = (pages.size, bytes.div_ceil(pages.size) as usize);
        if pages.free.len() < count {
            let more = (count - pages.free.len()) as u64 * size;
            let planned = pages.planned;
            tracing::warn!(
                "{} = host: {more} bytes of pinned memory more than the {planned} that were \
                 planned; taking them waits for the GPU",
                self.field
            );
            pages.planned += more;
            let index = usize::from(self.cubecl.to_id().index_id);
            enter(index).and_then(|()| pages.grow(more)).map_err(io::Error::other)?;
        }
        Ok((0..count).filter_map(|_| pages.free.pop_first()).collect())
    }
}

impl Pages {
    /// Pins pages for so many bytes more.
    fn grow(&mut self, bytes: u64) -> Result<(), String> {
        let count = bytes.div_ceil(self.size) as usize;
        if count == 0 {
            return Ok(());
        }
        let size = self.size as usize;
        // SAFETY: the caller has made the GPU's context current. All GPUs of the process may copy
        // to and from it.
        let slab = unsafe { result::malloc_host(count * size, sys::CU_MEMHOSTALLOC_PORTABLE) };
        let slab = slab.map_err(|error| {
            format!("{} bytes of pinned memory are refused: {}", count * size, words(error))
        })? as usize;
        self.slabs.push(slab);
        self.free.extend((0..count).map(|page| slab + page * size));
        Ok(())
    }
}

impl Queue {
    fn new() -> Result<Queue, String> {
        let kind = result::stream::StreamKind::NonBlocking;
        let stream = result::stream::create(kind).map_err(words)?;
        Ok(Queue(stream as usize))
    }
}

/// Makes the primary context of a GPU the calling thread's.
fn enter(index: usize) -> Result<(), String> {
    let gpu = result::device::get(index as i32).map_err(words)?;
    // SAFETY: the GPU was found; its primary context is CubeCL's, and is kept as CubeCL keeps it.
    unsafe {
        let context = result::primary_ctx::retain(gpu).map_err(words)?;
        result::ctx::set_current(context).map_err(words)
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let (queues, slabs) =
            ([self.out, self.back], std::mem::take(&mut self.pages.get_mut().slabs));
        // Where CubeCL's thread is gone the process ends, and its memory goes with it.
        let _ = server(&self.cubecl).submit_blocking(move |_| {
            let idle = queues.iter().all(|Queue(queue)| {
                // SAFETY: the queue is this lane's, and not used again.
                unsafe {
                    let idle = result::stream::synchronize(*queue as _).is_ok();
                    idle && result::stream::destroy(*queue as _).is_ok()
                }
            });
            for slab in slabs.into_iter().filter(|_| idle) {
                // SAFETY: no copy is under way, and no parcel is left.
                let _ = unsafe { result::free_host(slab as *mut _) };
            }
        });
    }
}
