//! Folders for what ranks have out of memory, and the room on their disks.

use std::path::Path;

use zeropp_core::files::{DiskRoom, in_words, room_in};
use zeropp_core::meter::{MemoryBytes, MemoryKind};

use crate::Error;
use crate::config::{Config, ConfigError};
use crate::plan::memory::ranks_here;
use crate::plan::needs::Needs;

/// What a folder is for.
struct OutFolder<'a> {
    field: &'static str,
    folder: &'a Path,
    /// What goes there.
    kind: MemoryKind,
}

fn folders(config: &Config) -> impl Iterator<Item = OutFolder<'_>> {
    let activations = ("recompute:out", config.out_folder(), MemoryKind::HostActivation);
    let states = ("optimizer:out", config.states_folder(), MemoryKind::HostState);
    [activations, states]
        .into_iter()
        .filter_map(|(field, folder, kind)| Some(OutFolder { field, folder: folder?, kind }))
}

/// Refuses a run whose ranks on this machine are predicted to put more out of memory than the disks
/// have room for.
///
/// # Errors
/// The setting whose folder is on the disk that is too small.
pub(crate) fn check(needs: &Needs) -> Result<(), Error> {
    let mut taken: Vec<(DiskRoom, u64)> = Vec::new();
    for OutFolder { field, folder, kind } in folders(needs.config) {
        let refused = |problem: String, help: &str| {
            Err(ConfigError::value(field, folder.display(), problem, help).into())
        };
        let room = match room_in(folder) {
            Ok(room) => room,
            Err(e) => return refused(format!("{e}"), "name a folder that may be written to"),
        };
        let needed = bytes_here(needs, kind);
        let before = taken.iter().filter(|(of, _)| of.system == room.system);
        let all = needed + before.map(|(_, bytes)| bytes).sum::<u64>();
        if all > room.bytes {
            let problem = format!(
                "the ranks on this machine would have {} there, and its disk has room for {}",
                in_words(all),
                in_words(room.bytes)
            );
            return refused(problem, "name a folder on a larger disk, or use a smaller model");
        }
        taken.push((room, needed));
    }
    Ok(())
}

/// A word on folders whose files lie in memory.
pub(crate) fn note(config: &Config) -> Option<String> {
    let is_memory = |out: &OutFolder<'_>| room_in(out.folder).is_ok_and(|room| room.is_memory);
    let OutFolder { field, folder, .. } = folders(config).find(is_memory)?;
    Some(format!(
        "{field} = {}: is a file system in memory, which saves no memory; name a folder on a disk",
        folder.display()
    ))
}

/// Bytes of this kind that the ranks on this machine have at most.
fn bytes_here(needs: &Needs, kind: MemoryKind) -> u64 {
    let mesh = needs.config.mesh();
    let of = |rank: usize| -> MemoryBytes { needs.ranks[mesh.coords(rank).pp].held.peaks };
    ranks_here(needs.config).0.into_iter().flatten().map(|rank| of(rank).get(kind)).sum()
}
