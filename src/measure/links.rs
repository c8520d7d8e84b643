//! Times between ranks, over size: a latency and a bandwidth that fit.

use std::sync::Arc;
use std::time::Instant;

use burn::tensor::{DType, Device, Tensor};
use zeropp_comm::threads::{ThreadsOptions, ThreadsWorld};
use zeropp_comm::{CommResult, Communicator};
use zeropp_core::device::Devices;
use zeropp_core::threads::start_scoped;
use zeropp_pipeline::executor::StatusBoard;

use super::median;
use super::together::refused;
use crate::Error;
use crate::config::{Config, EngineKind};
use crate::world::World;

/// Bytes of a whole buffer, gathered or unreduced.
const SIZES: [usize; 4] = [16 << 10, 256 << 10, 4 << 20, 32 << 20];
/// Times that each is measured, after two that are not counted.
const ROUNDS: usize = 9;

/// Times over size, and the line through them.
#[derive(Clone, Debug, PartialEq)]
pub struct LinkFit {
    /// Seconds that no size goes below.
    pub latency_s: f64,
    /// Bytes in a second beyond it: what a rank sends and receives at once.
    pub bytes_per_s: f64,
    /// Bytes of the whole buffer, and seconds.
    pub points: Vec<(usize, f64)>,
}

/// The operations of one group.
#[derive(Clone, Debug, PartialEq)]
pub struct LinkTimes {
    /// Ranks of the group.
    pub ranks: usize,
    /// All-gathers.
    pub gather: LinkFit,
    /// Reduce-scatters.
    pub reduce: LinkFit,
    /// All-reduces.
    pub all_reduce: LinkFit,
    /// Messages from one rank to another.
    pub message: LinkFit,
}

/// Inside a process and between processes, as far as `config`'s job has either.
///
/// # Errors
/// An engine that does not start, or fails.
pub(super) fn measure(
    config: &Config,
    devices: &Devices,
) -> Result<(Option<LinkTimes>, Option<LinkTimes>), Error> {
    let ranks = config.mesh().world();
    if config.engine == EngineKind::Threads {
        if ranks < 2 {
            return Ok((None, None));
        }
        let world = ThreadsWorld::new(ranks, ThreadsOptions::default()).communicators();
        let world = World::of(world, devices);
        return Ok((Some(grouped(&world, |_| 0)?), None));
    }
    let world = World::start(config, devices, &Arc::new(StatusBoard::new(ranks)))?;
    let here = world.ranks.len();
    let inside = match here {
        1 => None,
        _ => Some(grouped(&world, |rank| rank / here)?),
    };
    let between = match ranks / here {
        1 => None,
        _ => Some(grouped(&world, |rank| rank % here)?),
    };
    Ok((inside, between))
}

/// The operations of the groups of ranks that `color` gives one number, all at once.
fn grouped(world: &World, color: impl Fn(usize) -> usize + Sync) -> Result<LinkTimes, Error> {
    let measured = std::thread::scope(|scope| {
        let of = |local: &crate::world::LocalRank| {
            let (rank, device) = (local.rank, local.device.clone());
            let (communicator, color) = (local.communicator.clone(), &color);
            let measure = move || {
                let group = communicator.split("measured", color(rank), rank)?;
                links(&group, &device)
            };
            start_scoped(scope, "measure", measure).map_err(|e| refused(&e))
        };
        let threads = world.ranks.iter().map(of).collect::<Result<Vec<_>, Error>>();
        // Who has started waits for the others.
        let threads =
            threads.inspect_err(|error| world.ranks[0].communicator.abort(&error.to_string()))?;
        let all = threads.into_iter().map(|t| t.join().expect("operations on tensors"));
        all.collect::<CommResult<Vec<LinkTimes>>>().map_err(Error::from)
    });
    Ok(measured?.swap_remove(0))
}

/// One rank's part.
fn links(group: &Arc<dyn Communicator>, device: &Device) -> CommResult<LinkTimes> {
    let n = group.size();
    let tensor = |bytes: usize| Tensor::<1>::ones([bytes / 4], (device, DType::F32));
    let share = (n - 1) as f64 / n as f64;
    let even = |bytes: usize| (bytes / 4 / n / 128).max(1) * 128 * 4;
    let gather = timed(group, |bytes| {
        drop(seen(group.all_gather(tensor(even(bytes))).wait()?));
        Ok(())
    })?;
    let reduce = timed(group, |bytes| {
        drop(seen(group.reduce_scatter(tensor(even(bytes) * n)).wait()?));
        Ok(())
    })?;
    let all_reduce = timed(group, |bytes| {
        drop(seen(group.all_reduce(tensor(bytes)).wait()?));
        Ok(())
    })?;
    let message = timed(group, |bytes| pass(group, bytes, &tensor))?;
    // There and back are two.
    let message = message.into_iter().map(|(bytes, s)| (bytes, s / 2.0)).collect();
    Ok(LinkTimes {
        ranks: n,
        gather: line(gather, share),
        reduce: line(reduce, share),
        all_reduce: line(all_reduce, 2.0 * share),
        message: line(message, 1.0),
    })
}

/// Waits until a device has what arrived.
fn seen(tensor: Tensor<1>) -> Tensor<1> {
    zeropp_core::device::wait_for(tensor.clone());
    tensor
}

/// Rank 0 sends to rank 1 and gets as much back; the others wait.
fn pass(
    group: &Arc<dyn Communicator>,
    bytes: usize,
    tensor: &impl Fn(usize) -> Tensor<1>,
) -> CommResult<()> {
    let me = group.rank();
    if me > 1 {
        return Ok(());
    }
    let send = || group.send(1 - me, 0, tensor(bytes)).wait();
    if me == 0 {
        send()?;
    }
    drop(seen(group.recv(1 - me, 0, bytes / 4, DType::F32).wait()?));
    if me == 1 {
        send()?;
    }
    Ok(())
}

/// The median of each size, of an operation that all ranks begin together.
fn timed(
    group: &Arc<dyn Communicator>,
    operation: impl Fn(usize) -> CommResult<()>,
) -> CommResult<Vec<(usize, f64)>> {
    let mut points = Vec::new();
    for bytes in SIZES {
        let mut times = Vec::new();
        for round in 0..ROUNDS + 2 {
            group.barrier()?;
            let start = Instant::now();
            operation(bytes)?;
            if round >= 2 {
                times.push(start.elapsed().as_secs_f64());
            }
        }
        points.push((bytes, median(times)));
    }
    Ok(points)
}

/// The line `latency + bytes · share / bandwidth` with the least sum of squared relative errors.
fn line(points: Vec<(usize, f64)>, share: f64) -> LinkFit {
    // Each point weighs 1/t²: t = a + x·g.
    let (mut w, mut wx, mut wxx, mut wt, mut wxt) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for (bytes, t) in &points {
        let (x, weight) = (*bytes as f64 * share, 1.0 / (t * t).max(1e-18));
        w += weight;
        wx += weight * x;
        wxx += weight * x * x;
        wt += weight * t;
        wxt += weight * x * t;
    }
    let slope = (w * wxt - wx * wt) / (w * wxx - wx * wx);
    let least = points.iter().map(|(_, t)| *t).fold(f64::INFINITY, f64::min);
    // A line below zero at no bytes: the smallest one's time is the latency.
    let intercept = (wt - slope * wx) / w;
    let latency_s = intercept.clamp(0.0, least);
    let bytes_per_s = if slope > 0.0 { 1.0 / slope } else { 1e12 };
    LinkFit { latency_s, bytes_per_s, points }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_found_again() {
        let time = |bytes: usize| 25e-6 + bytes as f64 * 0.5 / 4e9;
        let found = line(SIZES.iter().map(|n| (*n, time(*n))).collect(), 0.5);
        assert!((found.latency_s / 25e-6 - 1.0).abs() < 1e-6, "{found:?}");
        assert!((found.bytes_per_s / 4e9 - 1.0).abs() < 1e-6, "{found:?}");
    }

    #[test]
    fn a_fall_with_size_gives_no_negative_bandwidth() {
        let found = line(vec![(1024, 2e-6), (4096, 1e-6)], 1.0);
        assert!(found.latency_s >= 0.0 && found.bytes_per_s > 0.0, "{found:?}");
    }
}
