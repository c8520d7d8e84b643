//! Where the processes of a job are, and which ranks of the mesh each gets.

use std::collections::BTreeMap;

use zeropp_core::choice;

use zeropp_failures::mesh::Mesh;

choice! {
    /// Which process of a launched job gets which ranks of the mesh.
    Place {
        /// ZeRO-3 groups inside hosts, where the processes allow it.
        Hosts = "hosts",
        /// As the launcher numbers the processes.
        Ranks = "ranks",
    }
}

/// The hosts of processes, each by one name. A name without a domain is short for the full name
/// that begins with it, where there is one alone.
pub fn one_name_each(hosts: &[String]) -> Vec<String> {
    let mut full: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for host in hosts {
        if let Some((short, _)) = host.split_once('.') {
            let known = full.entry(short).or_default();
            if !known.contains(&host.as_str()) {
                known.push(host);
            }
        }
    }
    let name = |host: &String| match full.get(host.as_str()).map(Vec::as_slice) {
        Some([one]) => one.to_string(),
        _ => host.clone(),
    };
    hosts.iter().map(name).collect()
}

/// The processes in the order in which they get the mesh's ranks, `ranks_each` consecutive ones
/// each, so that as many ZeRO-3 groups as possible are inside a host. `hosts[i]` is the host of
/// the process that the launcher numbers i. Process 0 stays first, processes of a group keep the
/// launcher's order, and so do the groups: a launch that needs no change gets none.
pub fn by_host(hosts: &[String], ranks_each: usize, mesh: Mesh) -> Vec<usize> {
    let size = group_size(ranks_each, mesh);
    let mut of_host: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (process, host) in hosts.iter().enumerate() {
        of_host.entry(host).or_default().push(process);
    }
    let (mut groups, mut left) = (Vec::new(), Vec::new());
    for processes in of_host.into_values() {
        let whole = processes.len() / size * size;
        groups.extend(processes[..whole].chunks(size).map(<[usize]>::to_vec));
        left.extend_from_slice(&processes[whole..]);
    }
    left.sort_unstable();
    groups.extend(left.chunks(size).map(<[usize]>::to_vec));
    groups.sort();
    groups.concat()
}

/// Processes that share a ZeRO-3 group, or groups: the least number of consecutive ones that holds
/// whole groups.
fn group_size(ranks_each: usize, mesh: Mesh) -> usize {
    let (mut a, mut b) = (mesh.zero3, ranks_each);
    while b != 0 {
        (a, b) = (b, a % b);
    }
    mesh.zero3 / a
}

/// The warning for ZeRO-3 groups that are on several hosts: which, where, and what would work.
/// `hosts[i]` is the host of the process that has ranks `i * ranks_each` on.
pub fn warning(hosts: &[String], ranks_each: usize, mesh: Mesh) -> Option<String> {
    let spread = spread(hosts, ranks_each, mesh);
    let (group, on) = spread.first()?;
    let others = match spread.len() - 1 {
        0 => String::new(),
        1 => " (and 1 more group spans hosts)".into(),
        n => format!(" (and {n} more groups span hosts)"),
    };
    let order = by_host(hosts, ranks_each, mesh);
    let placed: Vec<String> = order.into_iter().map(|process| hosts[process].clone()).collect();
    let help = match self::spread(&placed, ranks_each, mesh).is_empty() {
        true => "use place = hosts".into(),
        false => format!(
            "start a multiple of {} ranks on every host, or use zero3 = {}",
            mesh.zero3,
            fitting(hosts, ranks_each, mesh)
        ),
    };
    Some(format!(
        "ZeRO-3 group {group} spans hosts {}{others}: its weights cross the network in every \
         unit; {help}",
        on.join(" and "),
    ))
}

/// ZeRO-3 groups that are on several hosts, and which.
fn spread(hosts: &[String], ranks_each: usize, mesh: Mesh) -> Vec<(usize, Vec<&str>)> {
    let host_of = |rank: usize| hosts[rank / ranks_each].as_str();
    let hosts_of = |group: usize| {
        let mut on: Vec<&str> =
            (group * mesh.zero3..(group + 1) * mesh.zero3).map(host_of).collect();
        on.sort_unstable();
        on.dedup();
        (on.len() > 1).then_some((group, on))
    };
    (0..mesh.world() / mesh.zero3).filter_map(hosts_of).collect()
}

/// The largest divisor of the ZeRO-3 size that every host's ranks are a multiple of.
fn fitting(hosts: &[String], ranks_each: usize, mesh: Mesh) -> usize {
    let mut ranks: BTreeMap<&str, usize> = BTreeMap::new();
    hosts.iter().for_each(|host| *ranks.entry(host).or_default() += ranks_each);
    let fits = |zero3: &usize| {
        let each = ranks.values().all(|ranks| ranks.is_multiple_of(*zero3));
        each && mesh.zero3.is_multiple_of(*zero3)
    };
    (1..mesh.zero3).rev().find(fits).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hosts(envelopes: &str) -> Vec<String> {
        envelopes.chars().map(String::from).collect()
    }

    fn mesh(pp: usize, zero3: usize, dp: usize) -> Mesh {
        Mesh { pp, zero3, dp }
    }

    #[test]
    fn machines_are_distinguished_by_their_full_names() {
        let named = |names: &[&str]| {
            one_name_each(&names.iter().map(|n| n.to_string()).collect::<Vec<_>>())
        };
        let apart = ["n1.rack-a", "n1.rack-b", "n1.rack-a"];
        assert_eq!(named(&apart), apart);
        // A short name is the full one where that is the only one it can be.
        assert_eq!(
            named(&["n1", "n1.rack-a", "n2", "n1.rack-a"]),
            ["n1.rack-a", "n1.rack-a", "n2", "n1.rack-a"]
        );
        let unclear = ["n1", "n1.rack-a", "n1.rack-b"];
        assert_eq!(named(&unclear), unclear);
        assert_eq!(named(&["10.0.0.1", "10.0.0.2", "10"]), ["10.0.0.1", "10.0.0.2", "10"]);
    }

    #[test]
    fn groups_are_put_inside_hosts() {
        // One rank a process, dealt out to the hosts one by one.
        assert_eq!(by_host(&hosts("abab"), 1, mesh(2, 2, 1)), [0, 2, 1, 3]);
        assert_eq!(by_host(&hosts("abcabc"), 1, mesh(3, 2, 1)), [0, 3, 1, 4, 2, 5]);
        // A launch that is right already stays as it is, whatever the hosts are called.
        assert_eq!(by_host(&hosts("bbaa"), 1, mesh(2, 2, 1)), [0, 1, 2, 3]);
        assert_eq!(by_host(&hosts("abab"), 2, mesh(4, 2, 1)), [0, 1, 2, 3]);
        // Two processes of two ranks share a group of four.
        assert_eq!(by_host(&hosts("abab"), 2, mesh(2, 4, 1)), [0, 2, 1, 3]);
        // What does not fit comes together at the end; process 0 stays first.
        assert_eq!(by_host(&hosts("abbbbbbb"), 1, mesh(2, 4, 1)), [0, 5, 6, 7, 1, 2, 3, 4]);
    }

    #[test]
    fn groups_that_span_hosts_are_reported() {
        assert_eq!(warning(&hosts("aabb"), 1, mesh(2, 2, 1)), None);
        assert_eq!(warning(&hosts("ab"), 4, mesh(2, 4, 1)), None);
        assert_eq!(
            warning(&hosts("abab"), 1, mesh(2, 2, 1)).unwrap(),
            "ZeRO-3 group 0 spans hosts a and b (and 1 more group spans hosts): its weights cross \
             the network in every unit; use place = hosts"
        );
        assert_eq!(
            warning(&hosts("ab"), 2, mesh(1, 4, 1)).unwrap(),
            "ZeRO-3 group 0 spans hosts a and b: its weights cross the network in every unit; \
             start a multiple of 4 ranks on every host, or use zero3 = 2"
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

        #[test]
        fn no_rank_is_lost_and_no_group_spans_that_need_not(
            on in proptest::collection::vec(0usize..4, 24),
            zero3 in prop_oneof![Just(1usize), Just(2), Just(3), Just(4), Just(6), Just(8)],
            ranks_each in 1usize..4,
        ) {
            let hosts: Vec<String> = on.iter().map(|host| format!("h{host}")).collect();
            let mesh = Mesh { pp: 24 * ranks_each / zero3, zero3, dp: 1 };
            prop_assume!(mesh.world() == 24 * ranks_each);
            let order = by_host(&hosts, ranks_each, mesh);
            let mut all = order.clone();
            all.sort_unstable();
            prop_assert_eq!(all, (0..24).collect::<Vec<_>>());
            prop_assert_eq!(order[0], 0);
            let size = group_size(ranks_each, mesh);
            let inside = order.chunks(size).filter(|group| {
                group.iter().all(|process| on[*process] == on[group[0]])
            });
            let most: usize = (0..4).map(|h| on.iter().filter(|o| **o == h).count() / size).sum();
            prop_assert!(inside.count() >= most);
        }
    }
}
