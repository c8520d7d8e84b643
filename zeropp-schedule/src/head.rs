//! A head that is split over ranks: which messages a micro-batch has there, and what waits for
//! which of them.
//!
//! The head's rows are cut into blocks, and each rank has some that follow each other
//! ([`Schedule::head_blocks`]). Its stage, S, is computed by every rank with blocks: F makes the
//! logits of its rows, B the gradients of the input by its blocks, W those of its rows. Between
//! them the root, which has the last stage, gives the input along a tree of ranks, takes the sums
//! of the blocks and gives their log-sum-exp. The gradient of the input is a binary tree over
//! *blocks*, so that its bits know no ranks; a sum lives with the rank of its last block, and what
//! another rank has of it goes there. Where slices are aligned to the tree of blocks both trees are
//! the same.

use std::collections::HashMap;
use std::ops::Range;

use crate::action::HeadMessage;
use crate::ir::{Action, Compute, Schedule};

/// One message that every micro-batch has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edge {
    /// What it is.
    pub message: HeadMessage,
    /// The rank that sends it.
    pub from: usize,
    /// The rank that takes it.
    pub to: usize,
    /// Tensors in it: blocks of sums, or sums of gradients.
    pub tensors: u64,
    /// The blocks that each of its sums of gradients is over, in the order in which they are in it.
    pub sums: Vec<Range<usize>>,
    /// The compute of its sender that it comes after, by kind and stage, if there is one.
    pub after: Option<(Compute, usize)>,
    /// What else it waits for: messages to its sender, by their places among all.
    pub needs: Vec<usize>,
}

/// The messages of a split head.
#[derive(Clone, Debug)]
pub struct HeadTree {
    /// Its stage, S.
    pub stage: usize,
    /// The rank of the stage before it.
    pub root: usize,
    pub(crate) slices: Vec<usize>,
    /// All messages of a micro-batch.
    pub edges: Vec<Edge>,
    by_ends: HashMap<(HeadMessage, usize, usize), usize>,
    /// What F and B of each rank's slice take, and B of the stage before.
    f: Vec<Vec<usize>>,
    b: Vec<Vec<usize>>,
    before: Vec<usize>,
    trains: bool,
}

impl HeadTree {
    /// That of `schedule`, if its head is split. With forwards alone there are no messages but
    /// inputs and sums.
    pub fn of(schedule: &Schedule) -> Option<HeadTree> {
        let stage = schedule.wide_stage()?;
        let root = *schedule.placement.last()?;
        let trains = !schedule.is_forward_only();
        let mut head = HeadTree {
            stage,
            root,
            slices: schedule.head_blocks.clone(),
            edges: Vec::new(),
            by_ends: HashMap::new(),
            f: vec![Vec::new(); schedule.pp()],
            b: vec![Vec::new(); schedule.pp()],
            before: Vec::new(),
            trains,
        };
        head.add_trees(trains);
        if trains {
            head.add_gradients();
        }
        Some(head)
    }

    /// The ranks that have blocks in the order of these, which ends with the root's, if it has any.
    fn in_order_of_rows(&self) -> impl Iterator<Item = usize> + use<'_> {
        let ranks = self.slices.len();
        let all = (1..=ranks).map(move |n| (self.root + n) % ranks);
        all.filter(|rank| self.has(*rank))
    }

    /// The blocks of a rank. Those of the rank behind the root are the first, the root's the last.
    pub fn blocks_of(&self, rank: usize) -> Range<usize> {
        let before = self.in_order_of_rows().take_while(|other| *other != rank);
        let start = before.map(|other| self.slices[other]).sum();
        match self.has(rank) {
            true => start..start + self.slices[rank],
            false => start..start,
        }
    }

    /// The blocks of all ranks.
    pub fn blocks(&self) -> usize {
        self.slices.iter().sum()
    }

    /// The sums of gradients that a rank makes of its own blocks: those branches of the tree over
    /// all blocks that are its own, as large as they can be, first blocks first.
    pub fn own_sums(&self, rank: usize) -> Vec<Range<usize>> {
        let mut all = Vec::new();
        branches(0..self.blocks(), &self.blocks_of(rank), &mut all);
        all
    }

    /// Messages with sums of blocks to the root, first blocks first.
    pub fn sums_to(&self, rank: usize) -> Vec<usize> {
        let is_it =
            |at: &usize| self.edges[*at].message == HeadMessage::Sums && self.edges[*at].to == rank;
        let mut all: Vec<usize> = (0..self.edges.len()).filter(is_it).collect();
        all.sort_by_key(|at| self.blocks_of(self.edges[*at].from).start);
        all
    }

    /// Whether a rank has blocks.
    pub fn has(&self, rank: usize) -> bool {
        self.slices.get(rank).is_some_and(|n| *n > 0)
    }

    fn add(&mut self, edge: Edge) -> usize {
        let at = self.edges.len();
        self.by_ends.insert((edge.message, edge.from, edge.to), at);
        self.edges.push(edge);
        at
    }

    /// The input along a binomial tree, whose largest branch is sent to first; sums and their
    /// log-sum-exp.
    fn add_trees(&mut self, trains: bool) {
        let mut ranks: Vec<usize> = self.in_order_of_rows().collect();
        ranks.retain(|rank| *rank != self.root);
        ranks.push(self.root);
        ranks.reverse();
        let parent = |at: usize| at & (at - 1);
        let n = ranks.len();
        let one = |message, from, to| Edge {
            message,
            from,
            to,
            tensors: 1,
            sums: Vec::new(),
            after: None,
            needs: Vec::new(),
        };
        // From the root on: a parent has a smaller place than its children, of which the last
        // has most below it.
        let mut inputs = vec![None; n];
        for at in 0..n {
            for child in (at + 1..n).rev().filter(|child| parent(*child) == at) {
                let mut edge = one(HeadMessage::Input, ranks[at], ranks[child]);
                edge.after = (at == 0).then_some((Compute::F, self.stage - 1));
                edge.needs.extend(inputs[at]);
                inputs[child] = Some(self.add(edge));
            }
        }
        for (at, input) in inputs.iter().enumerate() {
            self.f[ranks[at]].extend(input);
        }
        // A few numbers a token: straight to the root and back, as whoever passes them on may
        // compute just then.
        let mut sums = Vec::new();
        for from in ranks[1..].iter().rev() {
            let mut edge = one(HeadMessage::Sums, *from, self.root);
            edge.tensors = self.slices[*from] as u64;
            edge.after = Some((Compute::F, self.stage));
            sums.push(self.add(edge));
        }
        if !trains {
            return;
        }
        for to in &ranks[1..] {
            let mut edge = one(HeadMessage::Lse, self.root, *to);
            edge.after = self.has(self.root).then_some((Compute::F, self.stage));
            edge.needs.clone_from(&sums);
            let lse = self.add(edge);
            self.b[*to].push(lse);
        }
        self.b[self.root] = sums;
    }

    /// The sums of the gradient of the input.
    fn add_gradients(&mut self) {
        // The rank of each block.
        let owners: Vec<usize> = self
            .in_order_of_rows()
            .flat_map(|rank| std::iter::repeat_n(rank, self.slices[rank]))
            .collect();
        let Some(last) = owners.last().copied() else { return };
        let all = 0..owners.len();
        let mut into = self.sum(&owners, all.clone());
        if last != self.root {
            into = vec![self.gradient(last, self.root, all, into)];
        }
        into.sort_unstable();
        into.dedup();
        self.before = into;
    }

    /// The sum over these blocks, of those that `owners` says the ranks of: the messages to the
    /// last one's that it takes.
    fn sum(&mut self, owners: &[usize], blocks: Range<usize>) -> Vec<usize> {
        let Some([left, right]) = halves(&blocks) else { return Vec::new() };
        let (from, to) = (owners[left.end - 1], owners[right.end - 1]);
        let mut taken = self.sum(owners, left.clone());
        if from != to {
            taken = vec![self.gradient(from, to, left, taken)];
        }
        taken.extend(self.sum(owners, right));
        taken
    }

    /// One more sum, over these blocks, from one rank to another, which go together.
    fn gradient(
        &mut self,
        from: usize,
        to: usize,
        blocks: Range<usize>,
        needs: Vec<usize>,
    ) -> usize {
        let key = (HeadMessage::Gradient, from, to);
        let at = match self.by_ends.get(&key) {
            Some(at) => *at,
            None => {
                let after = self.has(from).then_some((Compute::B, self.stage));
                let (message, sums, needs) = (HeadMessage::Gradient, Vec::new(), Vec::new());
                self.add(Edge { message, from, to, tensors: 0, sums, after, needs })
            }
        };
        let edge = &mut self.edges[at];
        edge.tensors += 1;
        edge.sums.push(blocks);
        edge.needs.extend(needs);
        edge.needs.sort_unstable();
        edge.needs.dedup();
        at
    }

    /// The message between two ranks.
    pub fn edge(&self, message: HeadMessage, from: usize, to: usize) -> Option<usize> {
        self.by_ends.get(&(message, from, to)).copied()
    }

    /// The message that a send or a receive of `rank` is of, with whether it sends and its
    /// micro-batch; `Err` where there is no such message, none for other actions.
    pub(crate) fn end(&self, rank: usize, action: &Action) -> Option<Result<End, ()>> {
        let (is_send, message, stage, micro_batch, peer) = match *action {
            Action::SendHead { message, stage, micro_batch, peer } => {
                (true, message, stage, micro_batch, peer)
            }
            Action::RecvHead { message, stage, micro_batch, peer } => {
                (false, message, stage, micro_batch, peer)
            }
            _ => return None,
        };
        let (from, to) = if is_send { (rank, peer) } else { (peer, rank) };
        let edge = self.edge(message, from, to).filter(|_| stage == self.stage);
        Some(edge.map(|edge| End { edge, is_send, micro_batch }).ok_or(()))
    }

    /// Whether gradients come back.
    pub fn trains(&self) -> bool {
        self.trains
    }

    /// How many sends and computes of its receiver take a message.
    pub fn takers(&self, edge: usize) -> usize {
        let Edge { to, .. } = self.edges[edge];
        let sends = self.edges.iter().filter(|e| e.from == to && e.needs.contains(&edge)).count();
        let before: &[usize] = if to == self.root { &self.before } else { &[] };
        let slice = if self.has(to) { [&self.f[to][..], &self.b[to]] } else { [&[][..]; 2] };
        let computes = [slice[0], slice[1], before];
        sends + computes.iter().filter(|of| of.contains(&edge)).count()
    }

    /// What a compute of `rank` takes from other ranks.
    pub fn needs(&self, rank: usize, kind: Compute, stage: usize) -> &[usize] {
        match kind {
            Compute::F if stage == self.stage => &self.f[rank],
            Compute::B if stage == self.stage => &self.b[rank],
            Compute::B | Compute::BW if stage + 1 == self.stage => &self.before,
            _ => &[],
        }
    }

    /// What a compute of `rank` takes of another stage of the same rank.
    pub(crate) fn takes_here(&self, rank: usize, kind: Compute, stage: usize) -> Option<Compute> {
        match kind {
            Compute::F if stage == self.stage && rank == self.root => Some(Compute::F),
            Compute::B | Compute::BW if stage + 1 == self.stage && self.has(self.root) => {
                Some(Compute::B)
            }
            _ => None,
        }
    }

    /// These messages and all that have to be sent before them.
    pub(crate) fn with_all_before(&self, edges: &[usize]) -> Vec<usize> {
        let mut all = edges.to_vec();
        let mut at = 0;
        while at < all.len() {
            for before in &self.edges[all[at]].needs {
                if !all.contains(before) {
                    all.push(*before);
                }
            }
            at += 1;
        }
        all
    }

    /// The messages that wait for each one.
    pub(crate) fn waiting(&self) -> Vec<Vec<usize>> {
        let mut waiting = vec![Vec::new(); self.edges.len()];
        for (at, edge) in self.edges.iter().enumerate() {
            edge.needs.iter().for_each(|before| waiting[*before].push(at));
        }
        waiting
    }

    /// The action at one end of a message.
    pub(crate) fn action(&self, End { edge, is_send, micro_batch }: End) -> Action {
        let Edge { message, from, to, .. } = self.edges[edge];
        let stage = self.stage;
        match is_send {
            true => Action::SendHead { message, stage, micro_batch, peer: to },
            false => Action::RecvHead { message, stage, micro_batch, peer: from },
        }
    }
}

/// The blocks of the two sums that the sum over these is made of: the first 2ⁿ, as many as are
/// fewer than all, and the others; none of one block.
pub fn halves(blocks: &Range<usize>) -> Option<[Range<usize>; 2]> {
    let half = blocks.len().next_power_of_two() / 2;
    let middle = blocks.start + half;
    (blocks.len() > 1).then_some([blocks.start..middle, middle..blocks.end])
}

/// Adds the branches of the tree over `all` that are within `own`.
fn branches(all: Range<usize>, own: &Range<usize>, found: &mut Vec<Range<usize>>) {
    if all.is_empty() || all.end <= own.start || own.end <= all.start {
        return;
    }
    if own.start <= all.start && all.end <= own.end {
        return found.push(all);
    }
    let halves = halves(&all).expect("of one block all is within or without");
    halves.into_iter().for_each(|half| branches(half, own, found));
}

/// One end of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct End {
    pub(crate) edge: usize,
    pub(crate) is_send: bool,
    pub(crate) micro_batch: usize,
}

impl HeadTree {
    /// That of slices of so many blocks, whose last stage is on rank `root`; none of no ranks.
    pub fn of_slices(slices: &[usize], root: usize) -> Option<HeadTree> {
        let pp = slices.len();
        let placement = (0..pp).map(|n| (root + 1 + n) % pp).collect();
        let (ranks, head_blocks) = (vec![Vec::new(); pp], slices.to_vec());
        HeadTree::of(&Schedule { placement, ranks, head_blocks, ..Schedule::default() })
    }

    /// Sums of gradients that a micro-batch has sent to `rank`.
    pub fn gradients_to(&self, rank: usize) -> u64 {
        let is_to = |e: &&Edge| e.message == HeadMessage::Gradient && e.to == rank;
        self.edges.iter().filter(is_to).map(|e| e.tensors).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(slices: &[usize], root: usize) -> HeadTree {
        HeadTree::of_slices(slices, root).unwrap()
    }

    fn pairs(head: &HeadTree, message: HeadMessage) -> Vec<(usize, usize)> {
        let mut of: Vec<_> = head
            .edges
            .iter()
            .filter(|e| e.message == message)
            .map(|e| (e.from.min(e.to), e.from.max(e.to)))
            .collect();
        of.sort_unstable();
        of
    }

    #[test]
    fn aligned_slices_have_one_tree_of_ranks() {
        for pp in [2, 4, 8, 16] {
            let head = head(&vec![64 / pp; pp], pp - 1);
            let tree = pairs(&head, HeadMessage::Input);
            assert_eq!((tree.len(), &tree), (pp - 1, &pairs(&head, HeadMessage::Gradient)));
            // What is small passes no rank on its way.
            let straight: Vec<_> = (0..pp - 1).map(|rank| (rank, pp - 1)).collect();
            assert_eq!(pairs(&head, HeadMessage::Sums), straight);
            assert_eq!(pairs(&head, HeadMessage::Lse), straight);
            let gradients = |e: &&Edge| e.message == HeadMessage::Gradient;
            assert!(head.edges.iter().filter(gradients).all(|e| e.tensors == 1));
        }
    }

    #[test]
    fn other_slices_send_more_sums() {
        let sums = |slices: &[usize]| {
            let root = slices.len() - 1;
            (0..slices.len()).map(|rank| head(slices, root).gradients_to(rank)).sum::<u64>()
        };
        assert_eq!(sums(&[21, 21, 22]), 6);
        assert_eq!(sums(&[10, 11, 11, 10, 11, 11]), 11);
        assert_eq!(sums(&[16; 4]), 3);
        // The last stage's rank has no blocks: one more, to it.
        assert_eq!(sums(&[32, 32, 0]), 2);
    }

    /// Whatever the slices, every rank with blocks has its messages, and none waits in a circle.
    #[test]
    fn every_rank_with_blocks_is_in_the_trees() {
        for (slices, root) in [
            (vec![3, 0, 7, 1, 0, 9], 5),
            (vec![3, 0, 7, 1, 0, 9], 0),
            (vec![1, 0, 7, 1, 0, 0], 5),
            (vec![5], 0),
            (vec![0, 13], 1),
            (vec![13, 0], 1),
        ] {
            let head = head(&slices, root);
            for (rank, blocks) in slices.iter().enumerate() {
                let others = rank != root && *blocks > 0;
                assert_eq!(head.needs(rank, Compute::F, head.stage).len(), usize::from(others));
                let b = head.needs(rank, Compute::B, head.stage).len();
                assert!(rank == root || b == usize::from(others));
            }
            let last = head.with_all_before(head.needs(root, Compute::B, head.stage - 1));
            let gradients = head.edges.iter().filter(|e| e.message == HeadMessage::Gradient);
            assert_eq!(last.len(), gradients.count(), "{slices:?}: all sums come to the root");
            let mut done = vec![false; head.edges.len()];
            for _ in 0..head.edges.len() {
                for (at, edge) in head.edges.iter().enumerate() {
                    done[at] |= edge.needs.iter().all(|before| done[*before]);
                }
            }
            assert!(done.iter().all(|done| *done), "{slices:?}");
        }
    }
}
