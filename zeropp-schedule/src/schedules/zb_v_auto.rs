//! ZB-V for unequal times: the automatic V schedule (Pipeline Parallelism with Controllable
//! Memory).
//!
//! The shape of ZB-V by hand, but every W is placed by the clock, as in [`super::zb_auto`]: rounds
//! of one B and one F a rank, W where a rank would wait, where memory runs out, or where a wait
//! would set a new record. Two switches make four runs; each is repeated with the waits of the run
//! before as allowance, as long as that helps.

use super::Shape;
use super::costs::OrderCosts;
use crate::ir::{Action, Compute, Task};
use std::collections::VecDeque;

const NOT_YET: u64 = u64::MAX;

/// One rank's progress. Pairs are by chunk: 0 the way down (stage r), 1 the way up.
#[derive(Clone, Debug, Default)]
struct ZbvRank {
    f: [usize; 2],
    b: [usize; 2],
    w: [usize; 2],
    /// Chunks whose B has run and whose W has not, first in, first out.
    waiting: VecDeque<usize>,
    now: u64,
    memory: i64,
    /// Time waited since its first F.
    bubble: u64,
    order: Vec<Action>,
}

/// A run came to a choice it cannot make: an input not yet scheduled, or memory that no W frees.
struct NoChoiceLeft;

struct ZbvBuilder<'a> {
    costs: &'a OrderCosts,
    limit: i64,
    m: usize,
    /// Fill short gaps before an F, before a B of the way up.
    fill_f: bool,
    fill_b: bool,
    /// Waits that a rank may have without being called the longest.
    allowance: &'a [u64],
    ranks: Vec<ZbvRank>,
    /// Ends of F and B by `stage · m + micro-batch`.
    ends_f: Vec<u64>,
    ends_b: Vec<u64>,
}

/// The order that ends first, and the one with the shortest longest wait after a rank's first F:
/// the runs are greedy, so that either may be the better one for any objective. None where every
/// run came to a dead end, as few micro-batches can make it.
pub(super) fn best(shape: &Shape, costs: &OrderCosts) -> Vec<Vec<Vec<Action>>> {
    let mut best: [Option<(Vec<Vec<Action>>, u64)>; 2] = [None, None];
    for (fill_b, fill_f) in [(true, true), (true, false), (false, true), (false, false)] {
        let mut allowance = vec![0; shape.pp];
        let mut least = u64::MAX;
        while let Ok(ranks) = ZbvBuilder::new(shape, costs, fill_f, fill_b, &allowance).finish() {
            let longest = ranks.iter().map(|r| r.bubble).max().unwrap_or(0);
            if longest >= least {
                break;
            }
            least = longest;
            allowance = ranks.iter().map(|r| r.bubble).collect();
            let end = ranks.iter().map(|r| r.now).max().unwrap_or(0);
            for (best, value) in best.iter_mut().zip([end, longest]) {
                if best.as_ref().is_none_or(|(_, least)| value < *least) {
                    *best = Some((ranks.iter().map(|r| r.order.clone()).collect(), value));
                }
            }
        }
    }
    best.into_iter().flatten().map(|(ranks, _)| ranks).collect()
}

impl<'a> ZbvBuilder<'a> {
    fn new(
        shape: &Shape,
        costs: &'a OrderCosts,
        fill_f: bool,
        fill_b: bool,
        allowance: &'a [u64],
    ) -> ZbvBuilder<'a> {
        let (p, m) = (shape.pp, shape.micro_batches);
        // Without a limit: what ZB-V by hand holds, the activations of p whole micro-batches.
        let by_hand = 2 * p as i64 * costs.mem_f.iter().max().copied().unwrap_or(0);
        ZbvBuilder {
            costs,
            limit: costs.mem_limit.unwrap_or(by_hand),
            m,
            fill_f,
            fill_b,
            allowance,
            ranks: vec![ZbvRank::default(); p],
            ends_f: vec![NOT_YET; 2 * p * m],
            ends_b: vec![NOT_YET; 2 * p * m],
        }
    }

    fn finish(mut self) -> Result<Vec<ZbvRank>, NoChoiceLeft> {
        self.warm_up_first_arm()?;
        self.warm_up_second_arm()?;
        for _ in 0..2 * self.m {
            self.backward_round()?;
            self.forward_round()?;
        }
        for r in 0..self.ranks.len() {
            while !self.ranks[r].waiting.is_empty() {
                self.put_w(r);
            }
        }
        Ok(self.ranks)
    }

    /// The first micro-batch down and up the V; on the way up, ranks that would wait take more
    /// forwards of the way down.
    fn warm_up_first_arm(&mut self) -> Result<(), NoChoiceLeft> {
        let p = self.ranks.len();
        for r in 0..p {
            self.put_f(r, 0)?;
        }
        self.put_f(p - 1, 1)?;
        for r in (0..p - 1).rev() {
            let (f, mem_f) = (self.costs.f[r], self.costs.mem_f[r]);
            let arrival = self.input_f(r, 1).ok_or(NoChoiceLeft)?;
            while self.ranks[r].memory + mem_f * (2 + 2 * r as i64) <= self.limit
                && self.ranks[r].now + f <= arrival
                && self.ranks[r].f[0] < self.m
            {
                (0..=r).try_for_each(|j| self.put_f(j, 0))?;
            }
            self.put_f(r, 1)?;
        }
        Ok(())
    }

    /// Forwards of both arms in turn until each rank has as many as the one before it.
    fn warm_up_second_arm(&mut self) -> Result<(), NoChoiceLeft> {
        let p = self.ranks.len();
        let mut chunk = 0;
        for r in 1..p {
            loop {
                let (here, before) = (&self.ranks[r], &self.ranks[r - 1]);
                let fewer = here.f[0] + here.f[1] < before.f[0] + before.f[1];
                let behind = here.f[1] <= before.f[1] && before.f[1] < self.m;
                if !(fewer || behind) {
                    break;
                }
                for j in (r..p).rev() {
                    if self.ranks[j].f[chunk] < self.m {
                        self.put_f(j, chunk)?;
                    }
                }
                chunk = 1 - chunk;
            }
        }
        Ok(())
    }

    /// One B on every rank: those of the way down from the last rank, then those of the way up.
    fn backward_round(&mut self) -> Result<(), NoChoiceLeft> {
        let p = self.ranks.len();
        for r in 0..p {
            let mem_b = self.costs.mem_b[self.stage(r, 0)].max(self.costs.mem_b[self.stage(r, 1)]);
            self.make_room(r, mem_b)?;
        }
        let down: Vec<bool> = (0..p).map(|r| self.wants_b_down(r)).collect();
        let first = (0..p).rev().filter(|r| down[*r]).map(|r| (r, 0));
        let then = (0..p).filter(|r| !down[*r]).map(|r| (r, 1));
        for (r, chunk) in first.chain(then) {
            let outside = if chunk == 0 { r + 1 < p } else { r > 0 };
            if outside {
                let arrival = self.input_b(r, chunk).ok_or(NoChoiceLeft)?;
                self.fill_gap(r, arrival, chunk == 0 || self.fill_b);
            }
            self.put_b(r, chunk)?;
        }
        Ok(())
    }

    /// Whether rank `r` runs a B of the way down (of stage r) next.
    fn wants_b_down(&self, r: usize) -> bool {
        let b = self.ranks[r].b;
        if b[0] >= b[1] {
            return false;
        }
        r + 1 == self.ranks.len() || self.input_b(r, 0).is_some() || b[1] >= self.m
    }

    /// One F on every rank that has any left and its input.
    fn forward_round(&mut self) -> Result<(), NoChoiceLeft> {
        for r in 0..self.ranks.len() {
            let Some(chunk) = self.next_forward(r) else { continue };
            self.make_room(r, self.costs.mem_f[self.stage(r, chunk)])?;
            let outside = if chunk == 0 { r > 0 } else { r + 1 < self.ranks.len() };
            if outside {
                let arrival = self.input_f(r, chunk).ok_or(NoChoiceLeft)?;
                self.fill_gap(r, arrival, self.fill_f);
            }
            self.put_f(r, chunk)?;
        }
        Ok(())
    }

    fn next_forward(&self, r: usize) -> Option<usize> {
        let f = self.ranks[r].f;
        if f[1] >= self.m {
            None
        } else if f[1] >= f[0] {
            Some(0)
        } else if self.input_f(r, 1).is_some() {
            Some(1)
        } else {
            (f[0] < self.m && self.input_f(r, 0).is_some()).then_some(0)
        }
    }

    fn make_room(&mut self, r: usize, more: i64) -> Result<(), NoChoiceLeft> {
        while self.ranks[r].memory + more > self.limit {
            if self.ranks[r].waiting.is_empty() {
                return Err(NoChoiceLeft);
            }
            self.put_w(r);
        }
        Ok(())
    }

    /// Runs W while rank `r` waits for an input; one that does not fit whole only if the wait
    /// would be a record and `short` allows it.
    fn fill_gap(&mut self, r: usize, arrival: u64, short: bool) {
        while let Some(&chunk) = self.ranks[r].waiting.front() {
            if self.ranks[r].now + self.costs.w[self.stage(r, chunk)] > arrival {
                break;
            }
            self.put_w(r);
        }
        let rank = &self.ranks[r];
        let gap = arrival.saturating_sub(rank.now);
        if short && !rank.waiting.is_empty() && gap > 0 && rank.bubble + gap > self.longest(r) {
            self.put_w(r);
        }
    }

    /// The longest wait so far, or what rank `r` is allowed, if that is more.
    fn longest(&self, r: usize) -> u64 {
        let so_far = self.ranks.iter().map(|r| r.bubble).max().unwrap_or(0);
        let most = self.allowance.iter().max().copied().unwrap_or(0);
        so_far.max(most - self.allowance[r])
    }

    fn stage(&self, r: usize, chunk: usize) -> usize {
        if chunk == 0 { r } else { 2 * self.ranks.len() - 1 - r }
    }

    /// When the input of rank `r`'s next F of `chunk` is there, `None` while it is not made.
    fn input_f(&self, r: usize, chunk: usize) -> Option<u64> {
        let (stage, i) = (self.stage(r, chunk), self.ranks[r].f[chunk]);
        if stage == 0 {
            return Some(0);
        }
        self.input(&self.ends_f, (stage - 1) * self.m + i, chunk == 1 && r + 1 == self.ranks.len())
    }

    /// When the input of rank `r`'s next B of `chunk` is there.
    fn input_b(&self, r: usize, chunk: usize) -> Option<u64> {
        let (stage, i) = (self.stage(r, chunk), self.ranks[r].b[chunk]);
        let forward = self.input(&self.ends_f, stage * self.m + i, true)?;
        if stage + 1 == 2 * self.ranks.len() {
            return Some(forward);
        }
        let here = chunk == 0 && r + 1 == self.ranks.len();
        self.input(&self.ends_b, (stage + 1) * self.m + i, here)
    }

    fn input(&self, ends: &[u64], at: usize, here: bool) -> Option<u64> {
        let end = *ends.get(at)?;
        let send = if here { 0 } else { self.costs.send };
        (end != NOT_YET).then(|| end + send)
    }

    fn put_f(&mut self, r: usize, chunk: usize) -> Result<(), NoChoiceLeft> {
        let (stage, i) = (self.stage(r, chunk), self.ranks[r].f[chunk]);
        if i >= self.m {
            return Err(NoChoiceLeft);
        }
        let arrival = self.input_f(r, chunk).ok_or(NoChoiceLeft)?;
        let task = Task { kind: Compute::F, stage, micro_batch: i };
        let end = self.put(r, task, arrival, self.costs.f[stage]);
        self.ends_f[stage * self.m + i] = end;
        self.ranks[r].f[chunk] += 1;
        self.hold(r, self.costs.mem_f[stage])
    }

    fn put_b(&mut self, r: usize, chunk: usize) -> Result<(), NoChoiceLeft> {
        let (stage, i) = (self.stage(r, chunk), self.ranks[r].b[chunk]);
        if i >= self.m {
            return Err(NoChoiceLeft);
        }
        let arrival = self.input_b(r, chunk).ok_or(NoChoiceLeft)?;
        let task = Task { kind: Compute::B, stage, micro_batch: i };
        let end = self.put(r, task, arrival, self.costs.b[stage]);
        self.ends_b[stage * self.m + i] = end;
        self.ranks[r].b[chunk] += 1;
        self.ranks[r].waiting.push_back(chunk);
        self.hold(r, self.costs.mem_b[stage])
    }

    /// Runs the W that has waited longest; there must be one.
    fn put_w(&mut self, r: usize) {
        let chunk = self.ranks[r].waiting.pop_front().expect("a W waits");
        let (stage, i) = (self.stage(r, chunk), self.ranks[r].w[chunk]);
        self.put(r, Task { kind: Compute::W, stage, micro_batch: i }, 0, self.costs.w[stage]);
        self.ranks[r].w[chunk] += 1;
        self.ranks[r].memory += self.costs.mem_w[stage];
    }

    fn hold(&mut self, r: usize, more: i64) -> Result<(), NoChoiceLeft> {
        let memory = &mut self.ranks[r].memory;
        *memory += more;
        if *memory <= self.limit { Ok(()) } else { Err(NoChoiceLeft) }
    }

    fn put(&mut self, r: usize, task: Task, arrival: u64, takes: u64) -> u64 {
        let rank = &mut self.ranks[r];
        let start = rank.now.max(arrival);
        if rank.f[0] > 0 {
            rank.bubble += start - rank.now;
        }
        rank.now = start + takes;
        rank.order.push(task.into());
        rank.now
    }
}
