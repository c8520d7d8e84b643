//! Where a rank sends and receives what a split head's slices give each other.

use super::Inserts;
use crate::head::{Edge, End, HeadTree};
use crate::ir::{Action, Compute, HeadMessage, Schedule};

/// Places of a rank's computes that a split head's messages stand at, by micro-batch.
#[derive(Default)]
struct Computes {
    /// F of the slice.
    f: Vec<usize>,
    /// B of the slice.
    b: Vec<usize>,
    /// F and backward of the stage before it, on the rank that has that.
    before: [Vec<usize>; 2],
}

/// Where a split head's messages are in the programs.
pub(super) struct Places {
    head: HeadTree,
    micro_batches: usize,
    ranks: Vec<Computes>,
}

impl Places {
    /// Those of `programs`, if the schedule's head is split.
    pub(super) fn new(schedule: &Schedule, programs: &[Vec<Action>]) -> Option<Places> {
        let head = HeadTree::of(schedule)?;
        let micro_batches = schedule.micro_batches();
        let of_rank = |program: &Vec<Action>| {
            let none = || vec![0; micro_batches];
            let mut places = Computes { f: none(), b: none(), before: [none(), none()] };
            for (at, action) in program.iter().enumerate() {
                for task in action.computes() {
                    let list = match (task.kind, task.stage) {
                        (Compute::F, stage) if stage == head.stage => &mut places.f,
                        (Compute::B, stage) if stage == head.stage => &mut places.b,
                        (Compute::F, s) if s + 1 == head.stage => &mut places.before[0],
                        (Compute::B | Compute::BW, s) if s + 1 == head.stage => {
                            &mut places.before[1]
                        }
                        _ => continue,
                    };
                    list[task.micro_batch] = at;
                }
            }
            places
        };
        let ranks = programs.iter().map(of_rank).collect();
        Some(Places { head, micro_batches, ranks })
    }

    /// Before which compute of its receiver a message is received, at the latest. What is passed on
    /// after a compute is there before that.
    fn wanted(&self, edge: &Edge, micro_batch: usize) -> usize {
        let places = &self.ranks[edge.to];
        let has_blocks = self.head.has(edge.to);
        let at = match edge.message {
            HeadMessage::Input => places.f[micro_batch],
            HeadMessage::Sums if has_blocks => places.f[micro_batch],
            // The rank of the last stage, which only passes on.
            HeadMessage::Sums => places.before[0][micro_batch] + 2,
            HeadMessage::Lse => places.b[micro_batch],
            HeadMessage::Gradient if has_blocks => places.b[micro_batch],
            HeadMessage::Gradient => places.before[1][micro_batch],
        };
        at.saturating_sub(1)
    }

    /// Where its sender comes to a message: twice the place of the compute that it stands before,
    /// or one more where it is after that.
    fn sent(&self, edge: &Edge, micro_batch: usize, warm_up: usize) -> usize {
        let places = &self.ranks[edge.from];
        let slot = match edge.after {
            Some((Compute::F, stage)) if stage + 1 == self.head.stage => {
                2 * places.before[0][micro_batch] + 1
            }
            Some((Compute::F, _)) => 2 * places.f[micro_batch] + 1,
            Some(_) => 2 * places.b[micro_batch] + 1,
            None => {
                let received = |before: &usize| self.wanted(&self.head.edges[*before], micro_batch);
                2 * edge.needs.iter().map(received).max().unwrap_or(0)
            }
        };
        slot.max(2 * warm_up)
    }

    /// Ranks that send something to `rank`.
    pub(super) fn senders_to(&self, rank: usize) -> Vec<usize> {
        let edges = self.head.edges.iter().filter(|edge| edge.to == rank);
        let mut senders: Vec<usize> = edges.map(|edge| edge.from).collect();
        senders.sort_unstable();
        senders.dedup();
        senders
    }

    /// The messages with these two ends in the order of their sends: the place of each.
    fn messages(
        &self,
        is_of: impl Fn(&Edge) -> bool,
        warm_up: usize,
    ) -> Vec<(usize, usize, usize)> {
        let mut all = Vec::new();
        for (at, edge) in self.head.edges.iter().enumerate().filter(|(_, edge)| is_of(edge)) {
            let batches = 0..self.micro_batches;
            all.extend(batches.map(|i| (self.sent(edge, i, warm_up), at, i)));
        }
        all.sort_unstable();
        all
    }

    /// The receives of `rank` from `peer`, which has a warm-up of so many computes, in order: where
    /// each is sent, before which compute it is to be posted.
    pub(super) fn receives(
        &self,
        peer: usize,
        warm_up: usize,
        rank: usize,
    ) -> impl Iterator<Item = (usize, usize, Action)> {
        let all = self.messages(|edge| edge.from == peer && edge.to == rank, warm_up);
        all.into_iter().map(|(sent, edge, micro_batch)| {
            let wanted = self.wanted(&self.head.edges[edge], micro_batch);
            (sent, wanted, self.head.action(End { edge, is_send: false, micro_batch }))
        })
    }

    /// All sends of a rank with a warm-up of so many computes.
    pub(super) fn add_sends(&self, rank: usize, warm_up: usize, inserts: &mut Inserts) {
        for (sent, edge, micro_batch) in self.messages(|edge| edge.from == rank, warm_up) {
            let send = self.head.action(End { edge, is_send: true, micro_batch });
            match sent % 2 == 0 {
                true => inserts.just_before(sent / 2, send),
                false => inserts.after(sent / 2, send),
            }
        }
    }
}
