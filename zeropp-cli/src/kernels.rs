//! How many kernels a GPU's first step has compiled, which can take minutes. CubeCL counts them
//! nowhere, but logs each.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use log::{LevelFilter, Log, Metadata, Record};

/// Where CubeCL's line is from, and what it says: on a GPU's thread, before it compiles a kernel
/// that neither memory nor disk has.
const SOURCE: &str = "cubecl_cuda";
const LINE: &str = "Compiling kernel";
/// Between two lines of ours.
const EVERY: Duration = Duration::from_secs(10);

static COUNTER: Counter = Counter(Mutex::new(None));

struct Counter(Mutex<Option<Compiling>>);

struct Compiling {
    kernels: u64,
    begun: Instant,
    said: Instant,
}

impl Log for Counter {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with(SOURCE)
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) || record.args().as_str() != Some(LINE) {
            return;
        }
        let mut compiling = self.0.lock().expect("nobody panics with it");
        let Some(Compiling { kernels, begun, said }) = compiling.as_mut() else { return };
        *kernels += 1;
        if said.elapsed() >= EVERY {
            *said = Instant::now();
            let seconds = begun.elapsed().as_secs();
            tracing::info!("first step: {kernels} kernels compiled so far, in {seconds} s");
        }
    }

    fn flush(&self) {}
}

/// Counts from now on, and says so every ten seconds in which kernels are compiled.
pub(crate) fn watch() {
    let now = Instant::now();
    let fresh = Compiling { kernels: 0, begun: now, said: now };
    *COUNTER.0.lock().expect("nobody panics with it") = Some(fresh);
    // Fails where there is a logger, which is this one.
    let _ = log::set_logger(&COUNTER);
    log::set_max_level(LevelFilter::Trace);
}

/// Says how many there were in the first step, which has ended.
pub(crate) fn end() {
    log::set_max_level(LevelFilter::Off);
    let counted = COUNTER.0.lock().expect("nobody panics with it").take();
    if let Some(Compiling { kernels: kernels @ 1.., begun, .. }) = counted {
        let seconds = begun.elapsed().as_secs_f64();
        tracing::info!("first step: {kernels} kernels compiled, in {seconds:.1} s");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_kernels_that_are_compiled_count() {
        watch();
        let kernels = || COUNTER.0.lock().unwrap().as_ref().map(|of| of.kernels);
        log::trace!(target: "cubecl_cuda::compute::context", "Compiling kernel");
        log::trace!(target: "cubecl_cuda::compute::context", "Using PTX cache");
        log::trace!(target: "cubecl_wgpu", "Compiling kernel");
        log::trace!(target: "cubecl_cuda::compute::context", "Compiling kernel");
        assert_eq!(kernels(), Some(2));
        end();
        log::trace!(target: "cubecl_cuda::compute::context", "Compiling kernel");
        assert_eq!(kernels(), None);
    }
}
