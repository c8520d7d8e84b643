//! Host memory as a device, with the queues of the library that stands in for NCCL.

use std::ffi::{c_int, c_long, c_void};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use burn::backend::Flex;
use burn::tensor::{DType, Device, Tensor, TensorData};
use libloading::Library;
use zeropp_comm::nccl::{Accelerator, DeviceResult, Event, OnPinned, Pinned, RawEvent, RawStream};

macro_rules! functions {
    ($($field:ident = $name:literal: fn($($arg:ty),*) $(-> $result:ty)?;)*) => {
        /// The queues and events of the built library.
        pub(crate) struct Pretend {
            pub(crate) file: PathBuf,
            $($field: unsafe extern "C" fn($($arg),*) $(-> $result)?,)*
        }

        impl Pretend {
    /// The limit of thread blocks that the last communicator of `size` ranks was started with.
    #[allow(dead_code, reason = "not every test file asks")]
    pub(crate) fn ctas_max(&self, size: usize) -> c_int {
        // SAFETY: only looks.
        unsafe { (self.ctas_max)(size as c_int) }
    }

    /// Calls so far of communicators of `size` ranks.
    #[allow(dead_code, reason = "not every test file asks")]
    pub(crate) fn calls(&self, size: usize) -> c_int {
        // SAFETY: only looks.
        unsafe { (self.calls)(size as c_int) }
    }

            fn load(file: PathBuf) -> Pretend {
                // SAFETY: the library was built from the source beside this file.
                let library = unsafe { Library::new(&file) }.expect("the built library loads");
                let loaded = Pretend {
                    // SAFETY: the types are those of the source.
                    $($field: *unsafe { library.get(concat!($name, "\0").as_bytes()) }
                        .expect("the source has the function"),)*
                    file,
                };
                std::mem::forget(library);
                loaded
            }
        }
    };
}

functions! {
    stream = "pretendStream": fn() -> usize;
    stream_free = "pretendStreamFree": fn(usize);
    stream_one_order = "pretendStreamOneOrder": fn(usize);
    stream_fail = "pretendStreamFail": fn(usize, c_int);
    record = "pretendRecord": fn(usize) -> usize;
    wait = "pretendWait": fn(usize, usize);
    is_done = "pretendIsDone": fn(usize) -> c_int;
    join = "pretendJoin": fn(usize);
    event_free = "pretendEventFree": fn(usize);
    late_work = "pretendLateWork": fn(usize, *mut c_void, usize, c_long);
    ctas_max = "pretendCtasMax": fn(c_int) -> c_int;
    calls = "pretendCalls": fn(c_int) -> c_int;
}

impl Pretend {
    /// The library as it should be, built once.
    pub(crate) fn get() -> &'static Pretend {
        static BUILT: OnceLock<Pretend> = OnceLock::new();
        BUILT.get_or_init(|| Pretend::load(build("whole", &[])))
    }
}

/// Builds the library with these definitions.
pub(crate) fn build(name: &str, definitions: &[&str]) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let file = folder.join(format!("libpretend-{name}-{}.so", std::process::id()));
    let mut gcc = Command::new("gcc");
    gcc.args(["-O2", "-shared", "-fPIC", "-pthread"]).args(definitions).arg("-o").arg(&file);
    let started = gcc.args(["-x", "c", "-"]).stdin(Stdio::piped()).spawn();
    let mut compiler = started.expect("gcc is installed");
    let mut input = compiler.stdin.take().expect("piped above");
    input.write_all(include_bytes!("pretend.c")).expect("gcc reads its input");
    drop(input);
    let status = compiler.wait();
    assert!(status.expect("gcc is installed").success(), "{gcc:?}");
    file
}

/// Host memory of one rank, with a queue for the work that makes its buffers.
pub(crate) struct Host {
    pretend: &'static Pretend,
    compute: RawStream,
    /// Microseconds that the work on a buffer takes, during which it holds nonsense.
    pub(crate) late_us: AtomicU64,
    /// NCCL's result for the next operation, if not 0.
    pub(crate) fail: AtomicI32,
    /// Whether buffers cannot be pinned.
    pub(crate) broken: AtomicBool,
    /// Whether who has a buffer pinned waits for the work before it on the queue, as CubeCL may.
    pub(crate) pins_wait: AtomicBool,
    /// Whether the library keeps one order over all communicators, as NCCL may.
    pub(crate) one_order: AtomicBool,
    /// Buffers made for NCCL to write.
    pub(crate) rooms: AtomicU64,
    /// How often the device was started, and how often work was made to wait for NCCL since then.
    pub(crate) starts: AtomicU64,
    pub(crate) joins_since: AtomicU64,
    /// Whether later work waits for NCCL on the queue, as a GPU's does, and not its caller.
    pub(crate) joins_on_queue: AtomicBool,
}

impl Host {
    pub(crate) fn new() -> Host {
        let pretend = Pretend::get();
        // SAFETY: makes a queue.
        let compute = unsafe { (pretend.stream)() };
        Host {
            pretend,
            compute,
            late_us: AtomicU64::new(0),
            fail: AtomicI32::new(0),
            broken: AtomicBool::new(false),
            pins_wait: AtomicBool::new(false),
            one_order: AtomicBool::new(false),
            rooms: AtomicU64::new(0),
            starts: AtomicU64::new(0),
            joins_since: AtomicU64::new(0),
            joins_on_queue: AtomicBool::new(false),
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.free_stream(self.compute);
    }
}

// SAFETY: addresses are of elements of tensors that `keep` holds.
unsafe impl Accelerator for Host {
    fn enter(&self) -> DeviceResult<()> {
        Ok(())
    }

    fn room(&self, len: usize, dtype: DType) -> Tensor<1> {
        self.rooms.fetch_add(1, Ordering::Relaxed);
        let bytes = vec![0x55; len * dtype.size()];
        Tensor::from_data(TensorData::from_bytes_vec(bytes, [len], dtype), (&Device::flex(), dtype))
    }

    fn pin(&self, tensors: Vec<Tensor<1>>, then: OnPinned) {
        if self.broken.load(Ordering::Relaxed) {
            return then(Err("the memory has gone".into()));
        }
        if self.pins_wait.load(Ordering::Relaxed) {
            let before = self.record(self.compute).expect("recording never fails");
            // SAFETY: the event is alive until it is freed here.
            unsafe {
                (self.pretend.join)(before);
                (self.pretend.event_free)(before);
            }
        }
        let (mut addresses, mut keep) = (Vec::new(), Vec::new());
        for tensor in tensors {
            let flex = tensor.try_into_primitive::<Flex>().expect("a tensor of the CPU");
            assert!(flex.is_contiguous());
            let layout = flex.layout();
            let (size, width) = (layout.num_elements(), flex.dtype().size());
            let address = flex.bytes().as_ptr() as usize + layout.start_offset() * width;
            let late_us = self.late_us.load(Ordering::Relaxed) as c_long;
            if late_us > 0 {
                let address = address as *mut c_void;
                // SAFETY: the elements stay where they are while `keep` lives, and the engine
                // holds it until what follows on the queue is done.
                unsafe { (self.pretend.late_work)(self.compute, address, size * width, late_us) };
            }
            addresses.push(address);
            keep.push(flex);
        }
        let ready = self.record(self.compute).expect("recording never fails");
        then(Ok(Pinned { addresses, ready, keep: Box::new(keep) }));
    }

    fn stream(&self) -> DeviceResult<RawStream> {
        // SAFETY: makes a queue.
        let stream = unsafe { (self.pretend.stream)() };
        if self.one_order.load(Ordering::Relaxed) {
            // SAFETY: the queue is alive.
            unsafe { (self.pretend.stream_one_order)(stream) };
        }
        Ok(stream)
    }

    fn wait(&self, stream: RawStream, event: RawEvent) -> DeviceResult<()> {
        let fail = self.fail.swap(0, Ordering::Relaxed);
        // SAFETY: both are alive; the engine calls this right before the operation.
        unsafe {
            if fail != 0 {
                (self.pretend.stream_fail)(stream, fail);
            }
            (self.pretend.wait)(stream, event);
        }
        Ok(())
    }

    fn record(&self, stream: RawStream) -> DeviceResult<RawEvent> {
        // SAFETY: the queue is alive.
        Ok(unsafe { (self.pretend.record)(stream) })
    }

    fn is_done(&self, event: RawEvent) -> DeviceResult<bool> {
        // SAFETY: the event is alive.
        Ok(unsafe { (self.pretend.is_done)(event) } != 0)
    }

    fn start(&self) -> DeviceResult<()> {
        self.starts.fetch_add(1, Ordering::Relaxed);
        self.joins_since.store(0, Ordering::Relaxed);
        Ok(())
    }

    fn join(&self, _: &Tensor<1>, event: Arc<Event>) -> DeviceResult<()> {
        assert_eq!(
            self.joins_since.fetch_add(1, Ordering::Relaxed),
            0,
            "the device was not started"
        );
        // SAFETY: the event is alive while it is held, and the queue holds it, too.
        unsafe {
            match self.joins_on_queue.load(Ordering::Relaxed) {
                true => (self.pretend.wait)(self.compute, event.raw()),
                false => (self.pretend.join)(event.raw()),
            }
        }
        Ok(())
    }

    fn free_event(&self, event: RawEvent) {
        // SAFETY: the engine's last use.
        unsafe { (self.pretend.event_free)(event) };
    }

    fn free_stream(&self, stream: RawStream) {
        // SAFETY: the engine's last use.
        unsafe { (self.pretend.stream_free)(stream) };
    }
}
