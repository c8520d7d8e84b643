//! What the ranks here are going to need, held against what there is.

use std::fmt;

use zeropp_comm::mesh::Coords;
use zeropp_core::device::{self, Gpu, Room, RoomSource};
use zeropp_core::files::in_words;
use zeropp_core::meter::HeldBytes;
use zeropp_core::optimizer::Out;
use zeropp_plan::room::{Hardware, Seat, of_process};

use crate::config::{Config, DeviceKind, EngineKind};
use crate::plan::copies;
use crate::plan::needs::Needs;

/// Stack of a rank's thread: a graph of many layers is walked recursively when it is dropped.
pub(crate) const STACK_BYTES: usize = 32 << 20;
/// Stack of any other thread.
const THREAD_STACK_BYTES: u64 = 2 << 20;
/// Other threads of a rank: those that save, carry operations and watch.
const OTHER_THREADS: u64 = 3;
/// Predicted memory of this machine's ranks beside what the machine has.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryCheck {
    /// Ranks of the run on this machine, as far as the launcher tells; of GPUs those that share
    /// the one with the least to spare.
    pub ranks: usize,
    /// Bytes they need together: what ranks of a process share is counted once.
    pub needed: u64,
    /// What there is; none where the system or the GPU's driver does not tell.
    pub room: Option<Room>,
    /// Whether the ranks compute on devices with memory of their own.
    pub on_device: bool,
}

impl MemoryCheck {
    /// Looks at the machine and predicts for its ranks.
    pub(crate) fn of(needs: &Needs) -> MemoryCheck {
        tightest(needs).0
    }

    /// Whether the machine has too little.
    pub fn is_too_much(&self) -> bool {
        self.room.as_ref().is_some_and(|room| self.needed > room.bytes)
    }
}

impl fmt::Display for MemoryCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranks = match self.ranks {
            1 => "1 rank".into(),
            n => format!("{n} ranks"),
        };
        let place = match self.room.as_ref().map(|room| &room.source) {
            Some(RoomSource::Gpu(_) | RoomSource::FreeGpu(_)) => "one GPU",
            None if self.on_device => "a device",
            _ => "this machine",
        };
        write!(f, "{} for {ranks} on {place}", in_words(self.needed))?;
        match &self.room {
            Some(room) => write!(f, ", of {} ({})", in_words(room.bytes), room.source),
            None if self.on_device => {
                write!(f, " of its own, which is not here: not checked against its memory")
            }
            None => write!(f, ", which does not tell how much it has: not checked"),
        }
    }
}

/// Memory that is too little.
pub(crate) struct Shortage {
    /// Bytes that are predicted to be needed.
    pub(crate) needed: u64,
    /// Bytes that there are.
    pub(crate) room: u64,
    /// What says so.
    pub(crate) source: String,
}

/// Whether a run is predicted to need more than a rank may have or the machine has, where that is
/// looked at.
pub(crate) fn is_short(needs: &Needs) -> bool {
    shortage(needs).is_some()
}

/// What a run is predicted to need more of than there is, where that is looked at.
pub(crate) fn shortage(needs: &Needs) -> Option<Shortage> {
    if needs.config.no_memory_check {
        return None;
    }
    if let Some(room) = needs.config.rank_memory_bytes().filter(|limit| needs.most() > *limit) {
        return Some(Shortage { needed: needs.most(), room, source: "rank-memory".into() });
    }
    let check = tightest(needs).0;
    let needed = check.needed;
    let of = |Room { bytes, source }| Shortage { needed, room: bytes, source: source.to_string() };
    check.is_too_much().then_some(check.room).flatten().map(of)
}

/// Whether a rank is predicted to need more than it may have, where that is looked at.
pub(crate) fn is_above_rank_memory(needs: &Needs) -> bool {
    let beyond = needs.config.rank_memory_bytes().is_some_and(|limit| needs.most() > limit);
    !needs.config.no_memory_check && beyond
}

/// The memory with the least to spare, and the ranks that share it, process by process.
pub(crate) fn tightest(needs: &Needs) -> (MemoryCheck, Vec<Vec<usize>>) {
    let Needs { config, .. } = *needs;
    let (here, mine) = ranks_here(config);
    let places = match config.device {
        DeviceKind::Cpu => vec![(Room::find(), here)],
        kind => on_devices(device::gpus(kind), here, mine),
    };
    let checks = places.into_iter().map(|(room, ranks)| {
        let count: usize = ranks.iter().map(Vec::len).sum();
        let room = room.map(|room| without_stacks(room, count, config));
        let on_device = config.device != DeviceKind::Cpu;
        (MemoryCheck { ranks: count, needed: needed(needs, &ranks), room, on_device }, ranks)
    });
    // Where no memory is known, the place that needs most.
    let spare = |check: &MemoryCheck| {
        let of = |room: &Room| room.bytes as i128 - check.needed as i128;
        check.room.as_ref().map_or(i128::MAX - check.needed as i128, of)
    };
    checks.min_by_key(|(check, _)| spare(check)).expect("a machine has memory")
}

/// What of a limit on address space is left beside the stacks of the ranks' threads, most of which
/// are never touched and count all the same.
fn without_stacks(room: Room, ranks: usize, config: &Config) -> Room {
    if room.source != RoomSource::AddressSpace {
        return room;
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = config.threads_of(ranks, cores) as u64 - 1 + OTHER_THREADS;
    let files = [config.out_folder(), config.states_folder()];
    let updates =
        u64::from(config.states_folder().is_some() && config.states_out() == Out::Moments);
    let threads = threads + files.into_iter().flatten().count() as u64 + updates;
    let stacks = ranks as u64 * (STACK_BYTES as u64 + threads * THREAD_STACK_BYTES);
    Room { bytes: room.bytes.saturating_sub(stacks), ..room }
}

/// The ranks of each of these devices, which they take in turn; each has one of its own where the
/// memory of devices is not known. What is free counts where only ranks of process `mine` come,
/// as those of others may be there already.
fn on_devices(
    gpus: &[Gpu],
    ranks: Vec<Vec<usize>>,
    mine: usize,
) -> Vec<(Option<Room>, Vec<Vec<usize>>)> {
    if gpus.is_empty() {
        return ranks.concat().into_iter().map(|rank| (None, vec![vec![rank]])).collect();
    }
    let of_process =
        |(process, ranks): (usize, Vec<usize>)| ranks.into_iter().map(move |rank| (process, rank));
    let ranks: Vec<_> = ranks.into_iter().enumerate().flat_map(of_process).collect();
    let of = |(device, gpu): (usize, &Gpu)| {
        let own: Vec<_> = ranks.iter().skip(device).step_by(gpus.len()).collect();
        let free = gpu.free.filter(|_| own.iter().all(|(process, _)| *process == mine));
        let room = match free {
            Some(bytes) => Room { bytes, source: RoomSource::FreeGpu(device) },
            None => Room { bytes: gpu.total, source: RoomSource::Gpu(device) },
        };
        let by_process = own.chunk_by(|a, b| a.0 == b.0);
        (Some(room), by_process.map(|own| own.iter().map(|(_, rank)| *rank).collect()).collect())
    };
    let used = gpus.len().min(ranks.len().max(1));
    gpus.iter().enumerate().take(used).map(of).collect()
}

/// World ranks of this machine, process by process, as far as the launcher tells, and which of the
/// processes this one is: of those beside it the launcher says how many there are, and they are
/// taken to be its neighbours.
pub(crate) fn ranks_here(config: &Config) -> (Vec<Vec<usize>>, usize) {
    let all = || (vec![(0..config.mesh().world()).collect()], 0);
    if config.engine == EngineKind::Threads {
        return all();
    }
    let Ok(job) = config.job() else { return all() };
    let (place, processes) = job.local;
    let first = job.process.saturating_sub(place);
    let ranks = |process: usize| (process * job.ranks..(process + 1) * job.ranks).collect();
    let here = first..(first + processes.max(1)).min(job.processes);
    (here.map(ranks).collect(), job.process - first)
}

/// Bytes of these ranks, process by process.
pub(crate) fn needed(needs: &Needs, processes: &[Vec<usize>]) -> u64 {
    let Needs { config, ranks } = *needs;
    let held: Vec<HeldBytes> = ranks.iter().map(|rank| rank.held).collect();
    let place = match config.device {
        DeviceKind::Cpu => Hardware::Cpu,
        DeviceKind::Cuda => Hardware::Cuda { nccl: config.engine == EngineKind::Nccl },
        DeviceKind::Wgpu => Hardware::Other,
    };
    let mesh = config.mesh();
    let seat = |rank: &usize| {
        let Coords { pp, dp, .. } = mesh.coords(*rank);
        Seat { pp, dp }
    };
    let of_process = |ranks: &Vec<usize>| {
        let seats: Vec<Seat> = ranks.iter().map(seat).collect();
        of_process(place, &seats, &held)
    };
    let ranks = || processes.iter().flatten().copied();
    let copies = if place == Hardware::Cpu { copies::bytes_to_come(needs, ranks()) } else { 0 };
    copies + processes.iter().map(of_process).sum::<u64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(total: u64, free: Option<u64>) -> Gpu {
        Gpu { name: "GPU".into(), total, free }
    }

    #[test]
    fn ranks_take_devices_in_turn() {
        let gpus = [gpu(80, None), gpu(40, None)];
        let places = on_devices(&gpus, vec![vec![8, 9, 10], vec![11, 12]], 0);
        let of = |at: usize| places[at].clone();
        let room = |bytes, device| Some(Room { bytes, source: RoomSource::Gpu(device) });
        assert_eq!(of(0), (room(80, 0), vec![vec![8, 10], vec![12]]));
        assert_eq!(of(1), (room(40, 1), vec![vec![9], vec![11]]));
        assert_eq!(places.len(), 2);
        let eight = vec![gpu(80, None); 8];
        assert_eq!(on_devices(&eight, vec![vec![0, 1]], 0).len(), 2, "a device without ranks");
        let alone = [0, 1].map(|rank| (None, vec![vec![rank]]));
        assert_eq!(on_devices(&[], vec![vec![0, 1]], 0), alone);
    }

    /// What other processes of the job have on a card by now belongs to it, too.
    #[test]
    fn free_memory_counts_on_a_card_of_this_process_alone() {
        let gpus = [gpu(80, Some(70)), gpu(80, Some(10)), gpu(80, Some(60))];
        let places = on_devices(&gpus, vec![vec![0], vec![1], vec![2]], 2);
        let rooms: Vec<Room> = places.into_iter().map(|(room, _)| room.unwrap()).collect();
        let sources = [RoomSource::Gpu(0), RoomSource::Gpu(1), RoomSource::FreeGpu(2)];
        let expected = [80, 80, 60].into_iter().zip(sources);
        assert!(rooms.into_iter().eq(expected.map(|(bytes, source)| Room { bytes, source })));
    }
}
