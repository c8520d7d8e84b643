//! Which link a byte takes, for the clock and for the table of traffic alike.
//!
//! Ranks are placed as a run places them: those of a ZeRO-3 group are neighbours, then those of a
//! pipeline, then replicas; a node has the next `per_node` of them. A collective passes its bytes
//! around a ring in every order that uses all cards: of a group with `n` ranks in a node, each rank
//! sends 1/n of its bytes through its own card and the others inside. Where a group's ranks lie
//! unevenly the node with the fewest is the slowest, and counts for both.

use zeropp_schedule::costs::Machine;

use crate::layout::Layout;

/// Where each kind of traffic goes, and how fast.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Links {
    /// The share of a ZeRO-3 group's bytes that leaves a rank's node, 0 to 1.
    pub zero3_between: f64,
    /// The same of sums over replicas, and of gathers from them.
    pub replicas_between: f64,
    /// Bytes in a second of a gather.
    pub zero3: f64,
    /// Of a reduce-scatter.
    pub reduce: f64,
    /// Of a message, by the slowest link that one takes.
    pub message: f64,
    /// Of a sum over replicas, or of a gather from them.
    pub replica: f64,
    /// Of a reduce-scatter over replicas.
    pub replica_reduce: f64,
    /// Ranks of a node; none where all ranks are in one.
    node: Option<usize>,
    /// Ranks of a ZeRO-3 group.
    zero3_ranks: usize,
    /// Whether all replicas lie alike on their nodes, and all ranks of a group.
    is_even: bool,
}

impl Links {
    /// Of `layout` on such machines.
    pub fn new(machine: &Machine, layout: &Layout) -> Links {
        let (node, zero3) = (machine.per_node, layout.zero3);
        let pipeline = zero3 * layout.pp;
        let node = (pipeline * layout.dp > node).then_some(node);
        let zero3_between = node.map_or(0.0, |node| between(zero3, 1, node));
        let replicas_between = node.map_or(0.0, |node| between(layout.dp, pipeline, node));
        let links = Links {
            zero3_between,
            replicas_between,
            zero3: rate(machine, zero3_between, machine.zero3_bytes_per_s),
            reduce: rate(machine, zero3_between, machine.reduce_bytes_per_s),
            message: 0.0,
            replica: rate(machine, replicas_between, machine.zero3_bytes_per_s),
            replica_reduce: rate(machine, replicas_between, machine.reduce_bytes_per_s),
            node,
            zero3_ranks: zero3,
            is_even: node.is_none_or(|node| {
                divides(node, zero3) && (layout.dp == 1 || divides(node, pipeline))
            }),
        };
        let pairs = || (0..layout.pp).map(|p| (p, (p + 1) % layout.pp));
        let leaves = pairs().any(|(from, to)| links.leaves_node(from, to));
        let message = if leaves { machine.bytes_per_s } else { machine.zero3_bytes_per_s };
        Links { message, ..links }
    }

    /// Whether a message from one pipeline rank to another goes to another node.
    pub(crate) fn leaves_node(&self, from: usize, to: usize) -> bool {
        let Some(node) = self.node else { return false };
        let node_of = |rank: usize| rank * self.zero3_ranks / node;
        // Where they do not, some rank's message does.
        from != to && (!self.is_even || node_of(from) != node_of(to))
    }
}

/// The share of its bytes that a rank sends to other nodes: one of a group of `ranks` ranks, each
/// `stride` behind the one before, on more than one node of `node` ranks.
fn between(ranks: usize, stride: usize, node: usize) -> f64 {
    if ranks == 1 {
        return 0.0;
    }
    if !node.is_multiple_of(stride) {
        return 1.0;
    }
    let places = node / stride;
    match places.is_multiple_of(ranks) {
        true => 0.0,
        false => 1.0 / greatest_common_divisor(ranks, places) as f64,
    }
}

/// Whether one of two numbers divides the other.
fn divides(a: usize, b: usize) -> bool {
    a.is_multiple_of(b) || b.is_multiple_of(a)
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// Bytes in a second of a collective of which this share leaves the node through a rank's card.
fn rate(machine: &Machine, between: f64, inside: f64) -> f64 {
    match between > 0.0 {
        true => (machine.replica_bytes_per_s / between).min(inside),
        false => inside,
    }
}

/// Bytes that a rank sends for one stage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sent {
    /// In one gather.
    pub gather: f64,
    /// In one reduce-scatter.
    pub reduce: f64,
    /// In the sum over replicas.
    pub replicas: f64,
    /// At the step's end, to gather parameters that other replicas have updated.
    pub update: f64,
}

impl Sent {
    /// For a stage with so many bytes of gathered weights, of its gradient and of its parameters
    /// in fp32. Replicas that share the optimizer have a part of the sum each, and gather what
    /// they made of it.
    pub fn new(layout: &Layout, [weights, gradient, parameters]: [u64; 3]) -> Sent {
        let others = |bytes: f64, ranks: usize| bytes * (ranks as f64 - 1.0) / ranks as f64;
        let shard = others(parameters as f64 / layout.zero3 as f64, layout.dp);
        Sent {
            gather: others(weights as f64, layout.zero3),
            reduce: others(gradient as f64, layout.zero3),
            replicas: if layout.zero1 { shard } else { 2.0 * shard },
            update: if layout.zero1 { shard } else { 0.0 },
        }
    }
}

#[cfg(test)]
mod tests {
    use zeropp_schedule::ir::Action;

    use super::*;
    use crate::exact::{RankTraffic, Simulation};
    use crate::layout::Recompute;
    use crate::machines;
    use crate::plan::LayoutPlan;
    use crate::search::Models;
    use crate::tests::job;

    fn layout(pp: usize, zero3: usize, dp: usize) -> Layout {
        Layout {
            pp,
            zero3,
            dp,
            virtual_stages: 2,
            unit: 4,
            micro_batches: 4,
            micro_batch_size: 1,
            recompute: Recompute::None,
            zero1: false,
            schedule: "zeropp",
            redone: None,
            prefetch: 1,
            slices: 1,
            out: 0,
            out_later: false,
            moments: false,
        }
    }

    /// The share that leaves its node through the busiest card: every group placed rank by rank.
    fn counted(groups: impl Iterator<Item = Vec<usize>>, node: usize) -> f64 {
        let share = |group: Vec<usize>| {
            let in_node = |rank: &usize| group.iter().filter(|r| *r / node == rank / node).count();
            let fewest = group.iter().map(in_node).min().unwrap_or(1);
            if fewest == group.len() { 0.0 } else { 1.0 / fewest as f64 }
        };
        groups.map(share).fold(0.0, f64::max)
    }

    #[test]
    fn shares_of_links_are_those_of_ranks_that_are_placed_one_by_one() {
        for node in [1, 2, 4, 8] {
            let machine = Machine { per_node: node, ..machines::named("h100").unwrap() };
            for (pp, zero3, dp) in [1, 2, 3, 4, 8].into_iter().flat_map(|p| {
                [1, 2, 3, 4, 8, 16, 24]
                    .into_iter()
                    .flat_map(move |d| [1, 2, 4, 8].map(|k| (p, d, k)))
            }) {
                let links = Links::new(&machine, &layout(pp, zero3, dp));
                let world = pp * zero3 * dp;
                // Nodes are full.
                if !world.is_multiple_of(node) {
                    continue;
                }
                let name = format!("P {pp} D {zero3} K {dp}, nodes of {node}");
                let groups = (0..world / zero3).map(|g| (g * zero3..(g + 1) * zero3).collect());
                assert_eq!(links.zero3_between, counted(groups, node), "{name}");
                let stride = pp * zero3;
                let groups = (0..stride).map(|r| (r..world).step_by(stride).collect());
                let replicas = counted(groups, node);
                // A stride that no node is a multiple of may have more in some nodes.
                assert!(links.replicas_between >= replicas, "{name}");
                if node.is_multiple_of(stride) || stride.is_multiple_of(node) {
                    assert_eq!(links.replicas_between, replicas, "{name}");
                }
                let node_of = |rank: usize| rank / node;
                let leaves = |p: usize| {
                    let to = (p + 1) % pp;
                    let of = |k: usize, d: usize| {
                        node_of((k * pp + p) * zero3 + d) != node_of((k * pp + to) * zero3 + d)
                    };
                    (0..dp).any(|k| (0..zero3).any(|d| of(k, d)))
                };
                let any = (0..pp).any(leaves);
                assert!(!any || links.message == machine.bytes_per_s, "{name}");
            }
        }
    }

    /// The table's bytes and the clock's times of collectives are of the same links, where cards
    /// are slower than what is inside a node.
    #[test]
    fn bytes_between_nodes_take_as_long_as_the_clock_says() {
        for card in [3e9, 15e9] {
            let mut job = job("14.6b", 32, 192);
            job.machine.replica_bytes_per_s = card;
            job.machine.collective_s = 0.0;
            for (pp, zero3, dp) in
                [(1, 32, 1), (1, 16, 2), (2, 8, 2), (1, 8, 4), (2, 4, 4), (1, 2, 16)]
            {
                let layout = Layout {
                    pp,
                    zero3,
                    dp,
                    virtual_stages: 2,
                    unit: 6,
                    micro_batches: 192 / zero3 / dp,
                    micro_batch_size: 1,
                    recompute: Recompute::None,
                    zero1: false,
                    schedule: "bf-pp",
                    redone: None,
                    prefetch: 1,
                    slices: 1,
                    out: 0,
                    out_later: false,
                    moments: false,
                };
                let (stages, blocks) = Models::new(&job).stages(&job, &layout).unwrap();
                let simulation = Simulation::new(&job, &layout, &stages).unwrap();
                let traffic = simulation.planned(&blocks).traffic;
                let (program, ..) = simulation.run();
                // What passes through cards without messages, in seconds of all ranks.
                let mut sent_s = 0.0;
                for action in program.ranks.iter().flatten() {
                    let Some(stage) = action.stage() else { continue };
                    let costs = &stages[stage].costs;
                    sent_s += match action {
                        Action::AllGather { .. } if zero3 > 8 => costs.all_gather_ns,
                        Action::ReduceScatter { .. } if zero3 > 8 => costs.reduce_scatter_ns,
                        Action::ReplicaReduce { .. } => costs.replica_reduce_ns,
                        _ => 0,
                    } as f64
                        / 1e9;
                }
                let links = Links::new(&job.machine, &layout);
                let messages: f64 = (program.ranks.iter().enumerate())
                    .flat_map(|(rank, actions)| actions.iter().map(move |a| (rank, a)))
                    .filter(|(rank, a)| {
                        matches!(a, Action::Send { .. })
                            && links.leaves_node(*rank, (rank + 1) % pp)
                    })
                    .map(|(_, a)| stages[a.stage().unwrap()].bytes.message as f64)
                    .sum();
                let between_s = (traffic.between - messages / pp as f64) / card;
                let sent_s = sent_s / pp as f64;
                assert!(
                    (between_s - sent_s).abs() <= 0.01 * sent_s + 1e-6,
                    "{layout}: {between_s} {sent_s}"
                );
            }
        }
    }

    /// A step is not shorter than its bytes at the rate of a rank's card, and of a group over whole
    /// nodes most bytes stay inside.
    #[test]
    fn a_step_outlasts_its_bytes_between_nodes() {
        let mut job = job("llama3-70b", 64, 512);
        job.model.seq = 8192;
        job.machine = Machine { bytes_per_s: 3e9, ..machines::named("h100").unwrap() };
        job.machine.replica_bytes_per_s = 3e9;
        let plan = LayoutPlan::new(&job, "").unwrap();
        for ranked in &plan.layouts {
            let RankTraffic { inside, between } = ranked.planned.traffic;
            let layout = &ranked.planned.layout;
            assert!(between / 3e9 < ranked.planned.step_s, "{layout}: {between}");
            assert!(inside > between || layout.zero3 == 1, "{layout}: {inside} {between}");
        }
    }
}
