//! How much memory this process may still take: what the machine has free, and the limits that
//! were put on the process.

use std::fmt;
use std::fs::read_to_string;
use std::path::{Component, Path, PathBuf};

/// The figure of version 1 of cgroups where there is no limit: the largest multiple of a page.
const NO_LIMIT_V1: u64 = i64::MAX as u64 / 65536 * 65536;

/// Memory that may still be taken, and who says so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Room {
    /// Bytes.
    pub bytes: u64,
    /// Where the figure stands.
    pub source: RoomSource,
}

/// Where the smallest figure was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RoomSource {
    /// `MemAvailable`: what is free or can be had without swapping.
    Machine,
    /// The limit of this cgroup, less what its processes use: a container's or a job's.
    Cgroup(PathBuf),
    /// The limit on the process's address space (`ulimit -v`), less what it has.
    AddressSpace,
    /// All memory of the CUDA device of this number.
    Gpu(usize),
    /// What of it no process used before this one.
    FreeGpu(usize),
}

impl fmt::Display for RoomSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RoomSource::Machine => write!(f, "MemAvailable of this machine"),
            RoomSource::Cgroup(path) => write!(f, "the memory limit of {}", path.display()),
            RoomSource::AddressSpace => write!(f, "the limit of ulimit -v"),
            RoomSource::Gpu(index) => write!(f, "the memory of CUDA device {index}"),
            RoomSource::FreeGpu(index) => write!(f, "free on CUDA device {index}"),
        }
    }
}

impl Room {
    /// The smallest figure of this process's machine, cgroups and limits; none where the system
    /// does not report it, as only Linux does.
    pub fn find() -> Option<Room> {
        Self::under(Path::new("/"))
    }

    /// The same of a file system whose root is elsewhere.
    fn under(root: &Path) -> Option<Room> {
        let machine = available(&read_to_string(root.join("proc/meminfo")).ok()?)
            .map(|bytes| Room { bytes, source: RoomSource::Machine });
        let all = machine.into_iter().chain(cgroups(root)).chain(address_space(root));
        // Of equal ones the first: a limit that does not bind is not worth a word.
        all.min_by_key(|room| room.bytes)
    }
}

/// `MemAvailable` in bytes.
fn available(meminfo: &str) -> Option<u64> {
    field(meminfo, "MemAvailable:").map(|kib| kib.saturating_mul(1024))
}

/// The first number behind a name at the start of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_whitespace().next()?.parse().ok()
}

fn address_space(root: &Path) -> Option<Room> {
    let limits = read_to_string(root.join("proc/self/limits")).ok()?;
    let limit = field(&limits, "Max address space")?;
    let status = read_to_string(root.join("proc/self/status")).ok()?;
    let used = field(&status, "VmSize:")?.saturating_mul(1024);
    Some(Room { bytes: limit.saturating_sub(used), source: RoomSource::AddressSpace })
}

/// The room that is left in every cgroup around the process that has a limit.
fn cgroups(root: &Path) -> Vec<Room> {
    let own = read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mut rooms = Vec::new();
    for line in own.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (base, files) = match controllers {
            "" => ("sys/fs/cgroup", &V2),
            names if names.split(',').any(|name| name == "memory") => ("sys/fs/cgroup/memory", &V1),
            _ => continue,
        };
        // A container may not see the folders above its own, nor know its own by that name.
        let inside = Path::new(path).components().filter(|c| matches!(c, Component::Normal(_)));
        let inside: PathBuf = inside.collect();
        for folder in inside.ancestors() {
            rooms.extend(files.left(&root.join(base).join(folder)));
        }
    }
    rooms
}

/// Names of a cgroup's files.
struct CgroupFiles {
    limit: &'static str,
    used: &'static str,
    /// In `memory.stat`: pages of files that go when memory is needed.
    cache: &'static str,
}

const V2: CgroupFiles =
    CgroupFiles { limit: "memory.max", used: "memory.current", cache: "inactive_file " };
const V1: CgroupFiles = CgroupFiles {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cache: "total_inactive_file ",
};

impl CgroupFiles {
    fn left(&self, folder: &Path) -> Option<Room> {
        let number = |name| read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
        // Without a limit version 2 says `max`.
        let limit = number(self.limit).filter(|limit| *limit < NO_LIMIT_V1)?;
        let stat = read_to_string(folder.join("memory.stat")).unwrap_or_default();
        let cache = field(&stat, self.cache).unwrap_or(0);
        let used = number(self.used)?.saturating_sub(cache);
        let source = RoomSource::Cgroup(folder.join(self.limit));
        Some(Room { bytes: limit.saturating_sub(used), source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal:  1000 kB\nMemFree: 10 kB\nMemAvailable:    400 kB\n";

    fn machine(files: &[(&str, &str)]) -> Option<Room> {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        Room::under(dir.path())
    }

    fn source(room: &Room) -> &'static str {
        match &room.source {
            RoomSource::Machine => "machine",
            RoomSource::Cgroup(_) => "cgroup",
            RoomSource::AddressSpace => "address space",
            RoomSource::Gpu(_) | RoomSource::FreeGpu(_) => unreachable!("files tell of no GPU"),
        }
    }

    #[test]
    fn the_smallest_figure_counts() {
        let check = |more: &[(&str, &str)], bytes: u64, from: &str| {
            let files = [&[("proc/meminfo", MEMINFO)], more].concat();
            let room = machine(&files).unwrap();
            assert_eq!((room.bytes, source(&room)), (bytes, from), "{more:?}");
        };
        let free = 400 * 1024;
        check(&[], free, "machine");
        let v2 = |own: &'static str, limit: &'static str| {
            [
                ("proc/self/cgroup", own),
                ("sys/fs/cgroup/job/memory.max", limit),
                ("sys/fs/cgroup/job/memory.current", "90000\n"),
                ("sys/fs/cgroup/job/memory.stat", "anon 1\ninactive_file 40000\n"),
            ]
        };
        check(&v2("0::/job\n", "max\n"), free, "machine");
        check(&v2("0::/job\n", "150000\n"), 100_000, "cgroup");
        // The limit of a folder above holds, too; what is used beyond it leaves nothing.
        check(&v2("0::/job/step/0\n", "150000\n"), 100_000, "cgroup");
        check(&v2("0::/job\n", "1000\n"), 0, "cgroup");
        check(&v2("0::/other\n", "150000\n"), free, "machine");
        let v1 = |limit: &'static str| {
            [
                ("proc/self/cgroup", "5:cpu:/x\n4:memory:/slurm/7\n"),
                ("sys/fs/cgroup/memory/slurm/7/memory.limit_in_bytes", limit),
                ("sys/fs/cgroup/memory/slurm/7/memory.usage_in_bytes", "1000\n"),
            ]
        };
        check(&v1("9223372036854771712\n"), free, "machine");
        check(&v1("5000\n"), 4000, "cgroup");
        let ulimit = [
            ("proc/self/limits", "Max address space         102400    unlimited    bytes\n"),
            ("proc/self/status", "VmPeak:  70 kB\nVmSize:\t  60 kB\n"),
        ];
        check(&ulimit, 40 * 1024, "address space");
        let unlimited = [("proc/self/limits", "Max address space  unlimited  unlimited  bytes\n")];
        check(&unlimited, free, "machine");
    }

    #[test]
    fn a_system_that_does_not_tell_is_none() {
        assert_eq!(machine(&[]), None);
        assert_eq!(machine(&[("proc/meminfo", "nothing known\n")]), None);
        if cfg!(target_os = "linux") {
            assert!(Room::find().is_some_and(|room| room.bytes > 0), "this machine tells");
        }
    }
}
