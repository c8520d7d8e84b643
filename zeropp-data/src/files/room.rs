//! How much a folder's file system has room for.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Magic numbers of file systems whose files lie in memory: tmpfs and ramfs.
#[cfg(target_os = "linux")]
const IN_MEMORY: [u64; 2] = [0x0102_1994, 0x8584_58f6];

/// What a file system has free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskRoom {
    /// Bytes that may be written.
    pub bytes: u64,
    /// Whether they are memory: a tmpfs.
    pub is_memory: bool,
    /// A number of the file system on this machine.
    pub system: u64,
}

/// The room where `folder` is, or would be once it is made.
///
/// # Errors
/// What the system says.
pub fn room_in(folder: &Path) -> io::Result<DiskRoom> {
    let absolute = std::path::absolute(folder)?;
    let is_there = absolute.ancestors().find(|path| path.exists());
    let there = is_there.unwrap_or(Path::new("/"));
    let system = rustix::fs::statvfs(there)?;
    let bytes = system.f_bavail.saturating_mul(system.f_frsize);
    let is_memory = is_memory(there)?;
    Ok(DiskRoom { bytes, is_memory, system: there.metadata()?.dev() })
}

#[cfg(target_os = "linux")]
fn is_memory(path: &Path) -> io::Result<bool> {
    // 32 bits of it are the number, whatever the type.
    let kind = rustix::fs::statfs(path)?.f_type as u64 & 0xffff_ffff;
    Ok(IN_MEMORY.contains(&kind))
}

#[cfg(not(target_os = "linux"))]
fn is_memory(_: &Path) -> io::Result<bool> {
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_to_be_made_has_the_room_of_the_one_it_will_be_in() {
        let temp = std::env::temp_dir();
        let inside = temp.join("zeropp-no-such-folder").join("deeper");
        let (room, of_parent) = (room_in(&inside).unwrap(), room_in(&temp).unwrap());
        let same = |of: &DiskRoom| (of.is_memory, of.system);
        assert_eq!(same(&room), same(&of_parent));
        assert!(room.bytes > 0 && of_parent.bytes > 0);
        let shm = Path::new("/dev/shm");
        if cfg!(target_os = "linux") && shm.is_dir() {
            assert!(room_in(shm).unwrap().is_memory, "a tmpfs");
        }
    }
}
