//! What the processes of a run settle before its first step: how fast all of them can be, that
//! they go on from the same step and see the same folder, and how far their clocks are apart.

use std::time::Instant;

use burn::tensor::{Device, Tensor};
use serde::{Deserialize, Serialize};
use zeropp_comm::{CommResult, Communicator};
use zeropp_core::cpu_tensor::into_vec;
use zeropp_core::kernels::threads::Threads;
use zeropp_zero3::checkpoint::CheckpointError;

use crate::config::DeviceKind;
use crate::error::RankError;
use crate::plan::peak::Peak;
use crate::run::rank::Shared;

/// Pings to rank 0; the fastest says most about its clock.
const PINGS: usize = 16;
/// Tag of the pings, which no action of a schedule has.
const TAG: u64 = u64::MAX - 2;

/// What a rank tells all others.
#[derive(Serialize, Deserialize)]
struct Card {
    /// First rank of its process.
    process: usize,
    host: String,
    /// Cores or GPUs of its host.
    units: usize,
    /// FLOP/s of each at its best.
    unit_flops: f64,
    /// Its setting; on a GPU 1.
    threads: Option<usize>,
    /// Step that it goes on from.
    resumed: Option<u64>,
}

impl Card {
    /// Threads of this rank, on a host of so many.
    fn threads(&self, ranks: usize) -> usize {
        self.threads.unwrap_or((self.units / ranks).max(1))
    }
}

/// What a rank knows of all when they have met.
pub(crate) struct Met {
    /// FLOP/s of all ranks at their best.
    pub(crate) peak_flops: f64,
    /// The threads of this rank.
    pub(crate) threads: Threads,
}

/// This process's clock beside rank 0's.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Clock {
    /// What to add to a time of this process, in ns.
    offset_ns: i64,
    /// How wrong that may be.
    pub(crate) error_ns: u64,
}

impl Clock {
    /// A time of this process as rank 0's clock shows it; times before its start count as that.
    pub(crate) fn shift(&self, ns: u64) -> u64 {
        ns.saturating_add_signed(self.offset_ns)
    }
}

/// Settles all that. All ranks call it.
///
/// # Errors
/// Processes that go on from different steps, or do not see each other's files.
pub(crate) fn meet(
    shared: &Shared,
    world: &dyn Communicator,
    device: &Device,
) -> Result<Met, RankError> {
    let (Peak { units, unit_flops }, ranks) = (shared.peak, world.size());
    let config = &shared.blueprint.config;
    if shared.here.len() == ranks {
        let threads = config.threads_of(ranks, units);
        let peak_flops = shared.peak.of(ranks * threads);
        return Ok(Met { peak_flops, threads: Threads::new(threads, ranks * threads <= units) });
    }
    let resumed = shared.loader.as_ref().and_then(|loader| loader.first());
    let host = shared.host.clone();
    let threads = if config.device == DeviceKind::Cpu { config.threads } else { Some(1) };
    let card = Card { process: shared.here[0], host, units, unit_flops, threads, resumed };
    let bytes = serde_json::to_vec(&card).expect("plain data");
    let cards: Vec<Card> = world
        .exchange(bytes)
        .wait()?
        .iter()
        .map(|bytes| serde_json::from_slice(bytes).expect("written by every rank"))
        .collect();
    if let Some(saver) = &shared.saver {
        check_resumed(saver.folder(), &cards)?;
        saver.check_shared(world, &shared.host)?;
    }
    if shared.is_traced() {
        let firsts = (0..ranks).filter(|rank| cards[*rank].process == *rank);
        let firsts: Vec<usize> = firsts.collect();
        if let Some(clock) = compare_clocks(world, &firsts, shared.epoch, device)? {
            shared.clock.get_or_init(|| clock);
        }
    }
    let here = ranks_of(&cards, &shared.host);
    let threads = config.threads_of(here, units);
    let threads = Threads::new(threads, here * threads <= units);
    Ok(Met { peak_flops: peak_flops(&cards), threads })
}

/// Ranks on a host.
fn ranks_of(cards: &[Card], host: &str) -> usize {
    cards.iter().filter(|card| card.host == host).count()
}

/// The ranks of a host cannot do more than its cores or GPUs.
fn peak_flops(cards: &[Card]) -> f64 {
    let share = |card: &Card| {
        let ranks = ranks_of(cards, &card.host);
        let most = card.units as f64 / ranks as f64;
        card.unit_flops * most.min(card.threads(ranks) as f64)
    };
    cards.iter().map(share).sum()
}

/// Some see checkpoints, and others none: they look at different folders. Which of several they go
/// on from, rank 0 says later.
fn check_resumed(folder: &std::path::Path, cards: &[Card]) -> Result<(), CheckpointError> {
    let first = &cards[0];
    let differs = |card: &Card| card.resumed.is_some() != first.resumed.is_some();
    let Some(rank) = cards.iter().position(differs) else { return Ok(()) };
    let words = |card: &Card| card.resumed.map_or("no step".into(), |step| format!("step {step}"));
    let other = &cards[rank];
    Err(CheckpointError::Folder {
        folder: folder.to_path_buf(),
        problem: format!(
            "rank 0 on {} goes on from {}, rank {rank} on {} from {}; use a folder that all hosts \
             share",
            first.host,
            words(first),
            other.host,
            words(other)
        ),
    })
}

/// Pings of each process's first rank to rank 0, one process after the other. Returns the clock
/// to the first ranks: between a ping's two ends rank 0 said its time, so the middle is right
/// within half the time it took.
fn compare_clocks(
    world: &dyn Communicator,
    firsts: &[usize],
    epoch: Instant,
    device: &Device,
) -> CommResult<Option<Clock>> {
    let now = || epoch.elapsed().as_nanos() as u64;
    let words =
        |ns: u64| Tensor::from_data([ns as u32, (ns >> 32) as u32].map(f32::from_bits), device);
    let kind = burn::tensor::DType::F32;
    if world.rank() == 0 {
        for first in &firsts[1..] {
            for _ in 0..PINGS {
                drop(world.recv(*first, TAG, 2, kind).wait()?);
                world.send(*first, TAG, words(now())).wait()?;
            }
        }
        return Ok(Some(Clock::default()));
    }
    if !firsts.contains(&world.rank()) {
        return Ok(None);
    }
    let mut best: Option<Clock> = None;
    for _ in 0..PINGS {
        let asked = now();
        world.send(0, TAG, words(asked)).wait()?;
        let answer = into_vec(world.recv(0, TAG, 2, kind).wait()?);
        let heard = now();
        let [low, high] = [0, 1].map(|i: usize| u64::from(answer[i].to_bits()));
        let error_ns = (heard - asked).div_ceil(2);
        let offset_ns = (low | high << 32) as i64 - (asked + error_ns) as i64;
        if best.is_none_or(|best| error_ns < best.error_ns) {
            best = Some(Clock { offset_ns, error_ns });
        }
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use zeropp_comm::threads::{ThreadsOptions, ThreadsWorld};

    use super::*;

    #[test]
    fn a_clock_that_started_later_is_put_right() {
        let ranks = ThreadsWorld::new(4, ThreadsOptions::default()).communicators();
        let early = Instant::now();
        std::thread::sleep(Duration::from_millis(30));
        // Ranks 2 and 3 are a process that started later.
        let late = Instant::now();
        let clocks: Vec<Option<Clock>> = std::thread::scope(|scope| {
            let threads: Vec<_> = ranks
                .into_iter()
                .map(|world| {
                    let epoch = if world.rank() < 2 { early } else { late };
                    scope.spawn(move || {
                        compare_clocks(&*world, &[0, 2], epoch, &Device::flex()).unwrap()
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!((clocks[0], clocks[1], clocks[3]), (Some(Clock::default()), None, None));
        let clock = clocks[2].unwrap();
        let truth = (late - early).as_nanos() as u64;
        assert!(clock.shift(0).abs_diff(truth) <= clock.error_ns, "{clock:?}, {truth}");
    }

    #[test]
    fn hosts_are_no_faster_than_their_cores() {
        let card = |host: &str, units, threads| Card {
            process: 0,
            host: host.into(),
            units,
            unit_flops: 10.0,
            threads,
            resumed: None,
        };
        let peak = |a, b, threads| {
            peak_flops(&[card("a", a, threads), card("a", a, threads), card("b", b, threads)])
        };
        assert_eq!((peak(2, 8, Some(1)), peak(1, 8, Some(1))), (30.0, 20.0));
        // Without the setting a rank has its share of the cores, and more threads are no more.
        assert_eq!((peak(5, 8, None), peak(2, 8, Some(3))), (120.0, 50.0));
    }

    #[test]
    fn processes_that_go_on_from_different_folders_are_named() {
        let card = |host: &str, resumed| Card {
            process: 0,
            host: host.into(),
            units: 1,
            unit_flops: 1.0,
            threads: None,
            resumed,
        };
        let folder = std::path::Path::new("ckpt");
        assert!(check_resumed(folder, &[card("a", Some(5)), card("b", Some(4))]).is_ok());
        let error = check_resumed(folder, &[card("a", Some(5)), card("b", None)]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "save = ckpt: rank 0 on a goes on from step 5, rank 1 on b from no step; use a folder \
             that all hosts share"
        );
    }
}
