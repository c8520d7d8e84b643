//! The share of each process in its machine's cores.

use std::collections::BTreeSet;

/// A process, as it sees itself.
pub(crate) struct Process<'a> {
    pub(crate) host: &'a str,
    /// How many ranks it has.
    pub(crate) ranks: usize,
    /// The cores that it may use, by the system's numbers; none where that is not known.
    pub(crate) cores: &'a [usize],
    /// How many it may use at once: fewer than those, where its time on them is limited.
    pub(crate) units: usize,
}

/// The cores of a process together with those that share cores with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CoreShare {
    pub(crate) units: usize,
    /// Of all these processes.
    pub(crate) ranks: usize,
    /// The most cores of this process alone, and its ranks.
    own: (usize, usize),
}

impl CoreShare {
    /// Cores of each rank, in parts where there are fewer than ranks.
    pub(crate) fn of_rank(&self) -> f64 {
        let part = |(units, ranks): (usize, usize)| units as f64 / ranks.max(1) as f64;
        part((self.units, self.ranks)).min(part(self.own))
    }

    /// Threads for each rank, so that none has to wait for another's.
    pub(crate) fn threads(&self) -> usize {
        (self.of_rank() as usize).max(1)
    }
}

/// The share of each of the `processes`. Those of a host share cores where their sets meet, or meet
/// the same third one, or are not known.
pub(crate) fn shares(processes: &[Process]) -> Vec<CoreShare> {
    let meets = |a: &Process, b: &Process| {
        let unknown = a.cores.is_empty() || b.cores.is_empty();
        a.host == b.host && (unknown || a.cores.iter().any(|core| b.cores.contains(core)))
    };
    let mut left: BTreeSet<usize> = (0..processes.len()).collect();
    let mut shares = vec![CoreShare { units: 0, ranks: 0, own: (0, 0) }; processes.len()];
    while let Some(first) = left.pop_first() {
        let (mut together, mut looked) = (vec![first], 0);
        while let Some(at) = together.get(looked).copied() {
            let near = left.iter().filter(|other| meets(&processes[at], &processes[**other]));
            let near: Vec<usize> = near.copied().collect();
            left.retain(|other| !near.contains(other));
            together.extend(near);
            looked += 1;
        }
        let members = || together.iter().map(|at| &processes[*at]);
        let (units, ranks) = (units(members()), members().map(|process| process.ranks).sum());
        for at in &together {
            let own = (processes[*at].units, processes[*at].ranks);
            shares[*at] = CoreShare { units, ranks, own };
        }
    }
    shares
}

/// Cores that processes which share some have together.
fn units<'a>(members: impl Iterator<Item = &'a Process<'a>>) -> usize {
    let (mut all, mut most, mut is_less) = (BTreeSet::<usize>::new(), 0, false);
    for Process { cores, units, .. } in members {
        all.extend(*cores);
        most = most.max(*units);
        // A limit on time, which processes of a group share; or nothing is known of the cores.
        is_less |= *units < cores.len() || cores.is_empty();
    }
    if is_less { most } else { all.len() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Threads for each rank of processes of these ranks, which may use these cores.
    fn threads(processes: &[(&str, usize, &[usize])]) -> Vec<usize> {
        let limited: Vec<_> = processes.iter().map(|(h, r, c)| (*h, *r, *c, c.len())).collect();
        limited_threads(&limited)
    }

    /// The same where their time is limited to that of so many cores.
    fn limited_threads(processes: &[(&str, usize, &[usize], usize)]) -> Vec<usize> {
        let process = |&(host, ranks, cores, units)| Process { host, ranks, cores, units };
        let processes: Vec<_> = processes.iter().map(process).collect();
        shares(&processes).iter().map(CoreShare::threads).collect()
    }

    #[test]
    fn a_process_on_cores_of_its_own_divides_them_by_its_own_ranks() {
        let cores: Vec<usize> = (0..64).collect();
        let bound: Vec<_> = cores.chunks(8).map(|own| ("a", 1, own)).collect();
        assert_eq!(threads(&bound), [8; 8]);
        // Two ranks a process, and a launcher that left one process more cores.
        assert_eq!(threads(&[("a", 2, &cores[..8]), ("a", 2, &cores[8..24])]), [4, 8]);
    }

    #[test]
    fn processes_that_share_cores_divide_them_by_the_ranks_of_all() {
        let cores: Vec<usize> = (0..16).collect();
        assert_eq!(threads(&[("a", 1, &cores), ("a", 1, &cores), ("b", 1, &cores)]), [8, 8, 16]);
        assert_eq!(threads(&[("a", 2, &cores), ("a", 6, &cores)]), [2, 2]);
        // More ranks than cores: one thread each.
        assert_eq!(threads(&[("a", 40, &cores)]), [1]);
        // Sets that meet in part: the first and the last do by the one between.
        let chain = [("a", 1, &cores[..6]), ("a", 1, &cores[4..12]), ("a", 1, &cores[10..])];
        assert_eq!(threads(&chain), [5, 5, 5]);
        // One that has less than its part of the whole keeps to it.
        assert_eq!(threads(&[("a", 1, &cores[..2]), ("a", 1, &cores)]), [2, 8]);
    }

    #[test]
    fn a_limit_on_time_and_unknown_cores_count_as_shared() {
        let cores: Vec<usize> = (0..64).collect();
        assert_eq!(limited_threads(&[("a", 1, &cores, 8), ("a", 1, &cores, 8)]), [4, 4]);
        assert_eq!(limited_threads(&[("a", 1, &[], 8), ("a", 3, &[], 8)]), [2, 2]);
    }
}
