//! The exchanges of a run's processes before its first step: where each is, how fast all of them
//! can be, that they go on from the same step and see the same folder.

use std::path::Path;
use std::sync::Arc;

use zeropp_comm::Communicator;
use zeropp_core::kernels::threads::Threads;
use zeropp_zero3::checkpoint::CheckpointError;

use crate::checkpoint::copies;
use crate::config::DeviceKind;
use crate::error::RankError;
use crate::run::shared::RunShared;
use crate::world::cores;
use crate::world::hello::{self, Hello, Power, Roster};

/// Settles all that; also says whether the ranks make copies in memory. All ranks call it.
///
/// # Errors
/// Processes that go on from different steps, or do not see each other's files.
pub(crate) fn meet(
    shared: &RunShared,
    world: &dyn Communicator,
) -> Result<(Arc<Roster>, bool), RankError> {
    let roster = hello::meet(world, || hello(shared), &shared.here, &shared.roster)?;
    if let Some(recorder) = &shared.recorder {
        recorder.has_met(world.rank(), &roster);
    }
    if let Some(saver) = &shared.saver {
        check_resumed(saver.folder(), &roster.hellos)?;
        saver.meet(world, &roster)?;
    }
    let copies = make_copies(shared, world, &roster)?;
    Ok((roster, copies))
}

/// Whether the ranks make copies in memory: all of them do, on one machine, or none.
fn make_copies(
    shared: &RunShared,
    world: &dyn Communicator,
    roster: &Roster,
) -> Result<bool, RankError> {
    let tells = world.rank() == 0;
    if roster.hellos.iter().all(|hello| !hello.copies) {
        return Ok(false);
    }
    let first = &roster.hellos[0].peer.host;
    let lacking = roster.hellos.iter().find(|hello| !hello.copies);
    let elsewhere = roster.hellos.iter().find(|hello| hello.peer.host != *first);
    let why = match (lacking, elsewhere) {
        (None, None) => {
            let copier = shared.copier.as_ref().expect("this process has said so");
            match copier.find_blind(world, roster)? {
                None => return Ok(true),
                Some(rank) => format!("rank {rank} does not see the memory of rank 0's"),
            }
        }
        (Some(hello), _) => format!("rank {} has no folder for them", hello.ranks[0]),
        (_, Some(hello)) => {
            format!("rank {} is on another machine, {}", hello.ranks[0], hello.peer.host)
        }
    };
    if tells {
        copies::without(&why);
    }
    Ok(false)
}

fn hello(shared: &RunShared) -> Hello {
    let config = &shared.blueprint.config;
    let threads = if config.device == DeviceKind::Cpu { config.threads } else { Some(1) };
    let (units, unit_flops) = (shared.peak.units, shared.peak.unit_flops);
    let power = Power { units, unit_flops, threads };
    let resumed = shared.loader.as_ref().and_then(|loader| loader.first());
    let hello = Hello::new(&shared.host, &shared.here, shared.epoch, power);
    let cores = match config.device {
        DeviceKind::Cpu => cores::allowed(),
        _ => Vec::new(),
    };
    hello
        .named(&shared.run)
        .after(resumed)
        .with_copies(shared.copier.is_some())
        .on_cores(cores, config.pin)
}

/// The threads of `rank`, which is the calling one's: bound to cores of their own where the
/// settings say so.
///
/// # Errors
/// Ranks without enough cores.
pub(crate) fn threads(
    shared: &RunShared,
    roster: &Roster,
    rank: usize,
) -> Result<Threads, RankError> {
    let (threads, share) = roster.threads();
    let eager = is_eager(share.ranks, threads, share.units);
    let all = roster.cores().map_err(|e| RankError::Program(e.to_string()))?;
    let Some(own) = all.get(&rank).cloned() else { return Ok(Threads::new(threads, eager)) };
    let elsewhere = shared.here.len() < roster.processes.len();
    if elsewhere && rank == shared.here[0] {
        let here = shared.here.iter().flat_map(|rank| &all[rank]);
        cores::bind_engine(&here.copied().collect::<Vec<_>>());
    }
    if rank == 0 {
        tracing::debug!("pin: {}", cores::in_words(&all));
    }
    cores::bind(own[0]);
    Ok(Threads::begun_by(threads, eager, move |i| cores::bind(own[i])))
}

/// What a rank that computes on a GPU draws its weights with, on the host: its share of the cores,
/// which it needs no more after that. `None` on CPUs, whose ranks have their threads.
pub(crate) fn starting_threads(shared: &RunShared, roster: &Roster) -> Option<Threads> {
    let ranks = roster.threads().1.ranks.max(1);
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let on_gpu = shared.blueprint.config.device != DeviceKind::Cpu;
    on_gpu.then(|| Threads::new((cores / ranks).max(1), false))
}

/// Whether threads that find nothing to do may look for more instead of sleeping: where a host has
/// a core for each thread of its ranks.
fn is_eager(ranks: usize, threads: usize, units: usize) -> bool {
    ranks * threads <= units
}

/// Some see checkpoints, and others none: they look at different folders. Which of several they go
/// on from, rank 0 says later.
fn check_resumed(folder: &Path, hellos: &[Hello]) -> Result<(), CheckpointError> {
    let first = &hellos[0];
    let differs = |hello: &&Hello| hello.resumed.is_some() != first.resumed.is_some();
    let Some(other) = hellos.iter().find(differs) else { return Ok(()) };
    let words =
        |hello: &Hello| hello.resumed.map_or("no step".into(), |step| format!("step {step}"));
    Err(CheckpointError::Folder {
        folder: folder.to_path_buf(),
        problem: format!(
            "rank 0 on {} goes on from {}, rank {} on {} from {}; use a folder that all hosts \
             share",
            first.peer.host,
            words(first),
            other.ranks[0],
            other.peer.host,
            words(other)
        ),
    })
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn processes_that_go_on_from_different_folders_are_named() {
        let said = |rank: usize, host: &str, resumed| {
            let power = Power { units: 1, unit_flops: 1.0, threads: None };
            Hello::new(host, &[rank], Instant::now(), power).after(resumed)
        };
        let folder = Path::new("ckpt");
        assert!(check_resumed(folder, &[said(0, "a", Some(5)), said(1, "b", Some(4))]).is_ok());
        let error = check_resumed(folder, &[said(0, "a", Some(5)), said(1, "b", None)]);
        assert_eq!(
            error.unwrap_err().to_string(),
            "save = ckpt: rank 0 on a goes on from step 5, rank 1 on b from no step; use a folder \
             that all hosts share"
        );
    }
    #[test]
    fn ranks_that_share_cores_do_not_look_for_work() {
        assert!(is_eager(1, 2, 2) && is_eager(2, 1, 2) && is_eager(2, 2, 8));
        assert!(!is_eager(1, 3, 2) && !is_eager(2, 2, 2) && !is_eager(32, 1, 2));
    }
}
