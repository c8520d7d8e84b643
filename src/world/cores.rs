//! Which cores the ranks of a machine compute on, where their threads are bound to cores (`pin`).

use std::collections::{BTreeMap, HashSet};
use std::thread::available_parallelism;
use std::time::Duration;

use crate::config::{Config, ConfigError, EngineKind};

/// Ranks whose cores a plan names.
const NAMED: usize = 8;

/// The cores of ranks, by their numbers in the world: one for each of a rank's threads, of which
/// the first is the rank's own.
pub(crate) type Cores = BTreeMap<usize, Vec<usize>>;

/// The cores that a process asks for.
pub(crate) struct CoreRequest<'a> {
    pub(crate) host: &'a str,
    pub(crate) ranks: &'a [usize],
    /// Of each rank.
    pub(crate) threads: usize,
    /// That it may use, in the order in which they are to be taken.
    pub(crate) allowed: &'a [usize],
}

/// Gives each rank the next cores that its process may use and that no rank of the same host has.
///
/// # Errors
/// The first rank that gets too few.
pub(crate) fn share(asked: &[CoreRequest<'_>]) -> Result<Cores, ConfigError> {
    let mut ranks: Vec<_> =
        asked.iter().flat_map(|asked| asked.ranks.iter().map(move |rank| (*rank, asked))).collect();
    ranks.sort_by_key(|(rank, _)| *rank);
    let mut taken = HashSet::new();
    let mut cores = Cores::new();
    for (rank, CoreRequest { host, threads, allowed, .. }) in ranks {
        let is_free = |core: &&usize| !taken.contains(&(*host, **core));
        let mine: Vec<usize> = allowed.iter().filter(is_free).take(*threads).copied().collect();
        if mine.len() < *threads {
            let problem = format!(
                "rank {rank} needs {threads} of the cores {} for itself, and {} are left",
                listed(allowed),
                mine.len()
            );
            let help = "use fewer ranks or threads on a machine, let the process use more of its \
                        cores (mpirun --bind-to none, taskset), or leave pin out";
            return Err(ConfigError::value("pin", true, problem, help));
        }
        taken.extend(mine.iter().map(|core| (*host, *core)));
        cores.insert(rank, mine);
    }
    Ok(cores)
}

/// The cores of a run whose ranks are all in this process; none where it binds no threads, or its
/// ranks are elsewhere, too.
///
/// # Errors
/// As [`share`].
pub(crate) fn of_this_process(config: &Config) -> Result<Option<Cores>, ConfigError> {
    if !config.pin || config.engine != EngineKind::Threads {
        return Ok(None);
    }
    let ranks: Vec<usize> = (0..config.mesh().world()).collect();
    let units = available_parallelism().map_or(1, |n| n.get());
    let threads = config.threads_of(ranks.len(), units);
    share(&[CoreRequest { host: "", ranks: &ranks, threads, allowed: &allowed() }]).map(Some)
}

/// The note of a plan about the cores.
pub(crate) fn note(config: &Config) -> Option<String> {
    if !config.pin {
        return None;
    }
    Some(match of_this_process(config) {
        Ok(Some(cores)) => format!("pin: {}", in_words(&cores)),
        Ok(None) => {
            "pin: each rank gets cores of its host as soon as all processes have met".into()
        }
        Err(e) => format!("{e}; a run would be refused"),
    })
}

/// The cores of the first ranks.
pub(crate) fn in_words(cores: &Cores) -> String {
    let named = cores.iter().take(NAMED);
    let named: Vec<String> =
        named.map(|(rank, cores)| format!("rank {rank} on {}", listed(cores))).collect();
    let more = match cores.len().saturating_sub(NAMED) {
        0 => String::new(),
        n => format!(", and {n} more"),
    };
    format!("{}{more}", named.join(", "))
}

/// Numbers as the system lists cores: `0-3,8`.
fn listed(cores: &[usize]) -> String {
    let mut sorted = cores.to_vec();
    sorted.sort_unstable();
    let runs = sorted.chunk_by(|a, b| a + 1 == *b);
    let runs = runs.map(|run| match run {
        [one] => one.to_string(),
        [first, .., last] => format!("{first}-{last}"),
        [] => unreachable!("no chunk is empty"),
    });
    let text = runs.collect::<Vec<_>>().join(",");
    if text.is_empty() { "(none)".into() } else { text }
}

/// The numbers of such a list; what is none is left out.
#[cfg(target_os = "linux")]
fn numbers(list: &str) -> Vec<usize> {
    let run = |run: &str| {
        let (first, last) = run.split_once('-').unwrap_or((run, run));
        Some(first.trim().parse().ok()?..=last.trim().parse().ok()?)
    };
    list.split(',').filter_map(run).flatten().collect()
}

/// Cores before the second threads of the same cores. `siblings`: all threads of a thread's core,
/// itself included, where that is known.
#[cfg(target_os = "linux")]
fn whole_cores_first(allowed: &[usize], siblings: impl Fn(usize) -> Vec<usize>) -> Vec<usize> {
    let place = |core: &usize| {
        let mut beside = siblings(*core);
        beside.retain(|other| other < core && allowed.contains(other));
        beside.len()
    };
    let mut cores = allowed.to_vec();
    cores.sort_by_cached_key(|core| (place(core), *core));
    cores
}

/// The cores that the calling thread may use, by the system's numbers, in the order in which ranks
/// take them.
#[cfg(target_os = "linux")]
pub(crate) fn allowed() -> Vec<usize> {
    use rustix::thread::{CpuSet, sched_getaffinity};

    // A machine with more of them than a set has is treated as one that does not report them.
    let Ok(set) = sched_getaffinity(None) else { return Vec::new() };
    let allowed: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|core| set.is_set(*core)).collect();
    whole_cores_first(&allowed, |core| {
        let file = format!("/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list");
        std::fs::read_to_string(file).map_or(Vec::new(), |list| numbers(&list))
    })
}

/// Binds the calling thread to one core. What cannot be bound runs anywhere, and a line says so.
#[cfg(target_os = "linux")]
pub(crate) fn bind(core: usize) {
    if let Err(e) = set(None, &[core]) {
        tracing::warn!("pin: a thread could not be bound to core {core} ({e}) and is not");
    }
}

/// Calls `start` bound to the cores of all these ranks, where there are any: so are the threads
/// that it starts. Then the calling thread is what it was.
#[cfg(target_os = "linux")]
pub(crate) fn within<R>(cores: Option<&Cores>, start: impl FnOnce() -> R) -> R {
    use rustix::thread::{sched_getaffinity, sched_setaffinity};

    let before = cores.and_then(|cores| {
        let before = sched_getaffinity(None).ok()?;
        let all: Vec<usize> = cores.values().flatten().copied().collect();
        set(None, &all).ok().map(|()| before)
    });
    let started = start();
    if let Some(Err(e)) = before.map(|before| sched_setaffinity(None, &before)) {
        tracing::warn!("pin: the thread that starts the ranks stays bound to their cores ({e})");
    }
    started
}

/// Binds the threads of this process that the engine has started to these cores together, where it
/// started them before it knew its host's other ranks. They sleep most of the time.
#[cfg(target_os = "linux")]
pub(crate) fn bind_engine(cores: &[usize]) {
    use rustix::thread::Pid;

    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    for task in tasks {
        let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        let number = task.file_name().to_str().and_then(|name| name.parse().ok());
        let thread = number.and_then(Pid::from_raw);
        if name.starts_with(zeropp_comm::THREADS)
            && let Some(thread) = thread
            && let Err(e) = set(Some(thread), cores)
        {
            tracing::warn!("pin: {} could not be bound to {cores:?} ({e})", name.trim());
        }
    }
}

/// By how much the priority of a thread that gives way is lower, as `nice` counts it: of a core
/// that another thread wants, it gets a tenth, so that it ends also where no core is ever idle.
#[cfg(target_os = "linux")]
pub(crate) const LOWER_PRIORITY: i32 = 10;

/// Lets the calling thread give way to the others, and moves it to these cores, if there are any.
/// Where the system refuses either, the thread is as others are.
#[cfg(target_os = "linux")]
pub(crate) fn give_way(cores: &[usize]) {
    // On Linux each thread has a priority of its own, and this changes the calling one's.
    let lower = rustix::process::nice(LOWER_PRIORITY).map(drop);
    let moved = if cores.is_empty() { Ok(()) } else { set(None, cores) };
    if let Err(e) = lower.and(moved) {
        tracing::debug!("a thread in the background is as others are ({e})");
    }
}

/// Time of a core that the calling thread has taken so far.
#[cfg(unix)]
pub(crate) fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Time of a core that the calling thread has taken; not known here.
#[cfg(not(unix))]
pub(crate) fn cpu_time() -> Duration {
    Duration::ZERO
}

#[cfg(target_os = "linux")]
fn set(thread: Option<rustix::thread::Pid>, cores: &[usize]) -> rustix::io::Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    cores.iter().for_each(|core| set.set(*core));
    rustix::thread::sched_setaffinity(thread, &set)
}

/// Elsewhere the setting is refused.
#[cfg(not(target_os = "linux"))]
pub(crate) fn allowed() -> Vec<usize> {
    Vec::new()
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn give_way(_: &[usize]) {}

#[cfg(not(target_os = "linux"))]
pub(crate) fn bind(_: usize) {}

#[cfg(not(target_os = "linux"))]
pub(crate) fn within<R>(_: Option<&Cores>, start: impl FnOnce() -> R) -> R {
    start()
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn bind_engine(_: &[usize]) {}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked<'a>(host: &'a str, ranks: &'a [usize], allowed: &'a [usize]) -> CoreRequest<'a> {
        CoreRequest { host, ranks, threads: 2, allowed }
    }

    #[test]
    fn ranks_of_a_host_have_cores_of_their_own() {
        let all = [0, 1, 2, 3, 4, 5];
        // Two processes of host a that may use the same cores, and one of host b.
        let cores =
            share(&[asked("a", &[0, 2], &all), asked("b", &[3], &all), asked("a", &[1], &all)]);
        let want = [(0, vec![0, 1]), (1, vec![2, 3]), (2, vec![4, 5]), (3, vec![0, 1])];
        assert_eq!(cores.unwrap(), Cores::from(want));
        // Their launcher has given each its own.
        let cores = share(&[asked("a", &[0], &[0, 1]), asked("a", &[1], &[6, 7])]).unwrap();
        assert_eq!(cores, Cores::from([(0, vec![0, 1]), (1, vec![6, 7])]));
        assert_eq!(in_words(&cores), "rank 0 on 0-1, rank 1 on 6-7");
    }

    #[test]
    fn a_rank_without_enough_cores_is_named_with_what_would_work() {
        let problem =
            |allowed: &[usize]| share(&[asked("a", &[0, 1], allowed)]).unwrap_err().to_string();
        let help = "; use fewer ranks or threads on a machine, let the process use more of its \
                    cores (mpirun --bind-to none, taskset), or leave pin out";
        assert_eq!(
            problem(&[4, 0, 1]),
            format!(
                "threads:pin = true: rank 1 needs 2 of the cores 0-1,4 for itself, and 1 are \
                 left{help}"
            )
        );
        assert!(
            problem(&[]).starts_with("threads:pin = true: rank 0 needs 2 of the cores (none) for")
        );
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn second_threads_of_cores_come_last() {
        assert_eq!(numbers("0-2,8,10-11\n"), [0, 1, 2, 8, 10, 11]);
        // The two ways in which systems number them, and a machine that does not report it.
        let apart = |core: usize| vec![core % 4, core % 4 + 4];
        assert_eq!(whole_cores_first(&[0, 1, 2, 3, 4, 5, 6, 7], apart), [0, 1, 2, 3, 4, 5, 6, 7]);
        let beside = |core: usize| vec![core / 2 * 2, core / 2 * 2 + 1];
        assert_eq!(whole_cores_first(&[0, 1, 2, 3, 4, 5], beside), [0, 2, 4, 1, 3, 5]);
        // Of a core only the second thread may be used: then it is the first.
        assert_eq!(whole_cores_first(&[1, 2, 3], beside), [1, 2, 3]);
        assert_eq!(whole_cores_first(&[1, 2, 3], |_| Vec::new()), [1, 2, 3]);
    }
}
