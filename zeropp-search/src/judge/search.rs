//! Branch and bound over all eager schedules (Giffler and Thompson's active schedules).
//!
//! A node is the start of every rank's order. Of all actions that could run next, the one that
//! would end first names a rank; its actions that could start before that end are the branches. No
//! other branch is needed: an action that starts later could be preceded by the first to end
//! without delaying anything. (That holds with a memory limit, too: F run in micro-batch order, so
//! moving the next F forward passes only B and W, which free memory.) A node is cut where a rank
//! cannot end in time any more, or where an earlier node had done the same work no later.

use super::Instance;
use std::collections::HashMap;
use zeropp_schedule::ir::{Action, Compute};

const NOT_YET: u64 = u64::MAX;

/// States kept for comparison, over all and for the same work done.
const KEPT_MAX: usize = 3_000_000;
const KEPT_ALIKE_MAX: usize = 12;

/// The search's result.
pub(super) struct Outcome {
    /// An order with a smaller largest own span than the one given, if there is one.
    pub(super) better: Option<(u64, Vec<Vec<Action>>)>,
    /// Whether all eager schedules were covered.
    pub(super) complete: bool,
    /// Nodes visited.
    pub(super) nodes: u64,
}

/// Looks for eager schedules in which the largest own span of the first `counted` ranks is below
/// `span`, until `expired`; stops at one that reaches `enough`.
pub(super) fn run(
    instance: &Instance,
    counted: usize,
    span: u64,
    enough: u64,
    expired: &dyn Fn() -> bool,
) -> Outcome {
    let mut search = BranchAndBound::new(instance, counted, span, enough, expired);
    search.visit();
    Outcome { better: search.better, complete: !search.out_of_time, nodes: search.nodes }
}

/// Progress of one rank: counts of F, B and W done, and when its last action ends (before its
/// first: when that starts).
#[derive(Clone, Copy, Default)]
struct RankProgress {
    f: usize,
    b: usize,
    w: usize,
    now: u64,
}

/// F, B and W done by a rank. Counts of a schedule that can be held at all fit.
type WorkDone = [u32; 3];

/// A next action of a rank: kind, earliest start and end.
#[derive(Clone, Copy)]
struct NextAction {
    kind: Compute,
    start: u64,
    end: u64,
}

struct BranchAndBound<'a> {
    instance: &'a Instance<'a>,
    /// Start of every rank's first F: the same in all eager schedules.
    starts: Vec<u64>,
    ranks: Vec<RankProgress>,
    ends_f: Vec<u64>,
    ends_b: Vec<u64>,
    orders: Vec<Vec<Action>>,
    /// Ranks, from the first, whose own span counts.
    counted: usize,
    /// The best largest own span known.
    span: u64,
    enough: u64,
    better: Option<(u64, Vec<Vec<Action>>)>,
    /// Times of earlier nodes by the work they had done.
    seen: HashMap<Box<[WorkDone]>, Vec<Box<[u64]>>>,
    kept: usize,
    expired: &'a dyn Fn() -> bool,
    out_of_time: bool,
    nodes: u64,
}

impl<'a> BranchAndBound<'a> {
    fn new(
        instance: &'a Instance,
        counted: usize,
        span: u64,
        enough: u64,
        expired: &'a dyn Fn() -> bool,
    ) -> BranchAndBound<'a> {
        let (p, m) = (instance.stages(), instance.micro_batches);
        let mut starts = vec![0; p];
        for j in 1..p {
            starts[j] = starts[j - 1] + instance.costs.f[j - 1] + instance.costs.send;
        }
        BranchAndBound {
            instance,
            ranks: starts
                .iter()
                .map(|at| RankProgress { now: *at, ..RankProgress::default() })
                .collect(),
            starts,
            ends_f: vec![NOT_YET; p * m],
            ends_b: vec![NOT_YET; p * m],
            orders: vec![Vec::with_capacity(3 * m); p],
            counted,
            span,
            enough,
            better: None,
            seen: HashMap::new(),
            kept: 0,
            expired,
            out_of_time: false,
            nodes: 0,
        }
    }

    fn visit(&mut self) {
        self.nodes += 1;
        if self.nodes.is_multiple_of(1024) && (self.expired)() {
            self.out_of_time = true;
        }
        if self.out_of_time || self.span <= self.enough || self.bound() >= self.span {
            return;
        }
        let Some((rank, mut next)) = self.conflict() else {
            let span = self.bound();
            self.span = span;
            self.better = Some((span, self.orders.clone()));
            return;
        };
        if next.len() > 1 && self.dominated() {
            return;
        }
        // The start decides first; then B before F before W, as good schedules mostly have it.
        next.sort_by_key(|n| {
            (
                n.start,
                match n.kind {
                    Compute::B => 0,
                    Compute::F => 1,
                    _ => 2,
                },
            )
        });
        for action in next {
            let before = self.ranks[rank];
            self.apply(rank, action);
            self.visit();
            self.undo(rank, action.kind, before);
        }
    }

    /// The rank with the action that would end first, and its actions that could start before;
    /// `None` where all is done.
    fn conflict(&self) -> Option<(usize, Vec<NextAction>)> {
        let all = (0..self.ranks.len()).flat_map(|r| self.next(r).map(move |n| (r, n)));
        let (rank, first) = all.min_by_key(|(_, n)| n.end)?;
        Some((
            rank,
            self.next(rank).filter(|n| n.start < first.end || n.end == first.end).collect(),
        ))
    }

    /// The actions that rank `r` could run next.
    fn next(&self, r: usize) -> impl Iterator<Item = NextAction> {
        let RankProgress { f, b, w, now } = self.ranks[r];
        let (costs, m) = (self.instance.costs, self.instance.micro_batches);
        let p = self.ranks.len();
        let there = |ends: &[u64], from: usize, i: usize| {
            let end = ends[from * m + i];
            (end != NOT_YET).then_some(end.saturating_add(costs.send))
        };
        let room = f < m && self.instance.memory(r, f + 1, b, w) <= self.instance.limit();
        let input_f = match r {
            _ if !room => None,
            0 => Some(0),
            _ => there(&self.ends_f, r - 1, f),
        };
        let input_b = match b < f {
            false => None,
            true if r + 1 == p => Some(0),
            true => there(&self.ends_b, r + 1, b),
        };
        let input_w = (w < b).then_some(0);
        let next = move |kind, input: Option<u64>, takes| {
            input.map(|at| NextAction { kind, start: at.max(now), end: at.max(now) + takes })
        };
        let all = [
            next(Compute::F, input_f, costs.f[r]),
            next(Compute::B, input_b, costs.b[r]),
            next(Compute::W, input_w, costs.w[r]),
        ];
        all.into_iter().flatten()
    }

    fn apply(&mut self, r: usize, next: NextAction) {
        let m = self.instance.micro_batches;
        let rank = &mut self.ranks[r];
        let i = match next.kind {
            Compute::F => {
                self.ends_f[r * m + rank.f] = next.end;
                rank.f += 1;
                rank.f - 1
            }
            Compute::B => {
                self.ends_b[r * m + rank.b] = next.end;
                rank.b += 1;
                rank.b - 1
            }
            _ => {
                rank.w += 1;
                rank.w - 1
            }
        };
        rank.now = next.end;
        self.orders[r].push(Action::compute(next.kind, r, i));
    }

    fn undo(&mut self, r: usize, kind: Compute, before: RankProgress) {
        let m = self.instance.micro_batches;
        match kind {
            Compute::F => self.ends_f[r * m + before.f] = NOT_YET,
            Compute::B => self.ends_b[r * m + before.b] = NOT_YET,
            _ => {}
        }
        self.ranks[r] = before;
        self.orders[r].pop();
    }

    /// The least largest own span that this node can still lead to; exact where all is done.
    fn bound(&self) -> u64 {
        let (costs, p) = (self.instance.costs, self.ranks.len());
        let m = self.instance.micro_batches;
        let mut most = 0;
        // When the last F of each rank can end at the earliest, from the first rank on.
        let mut last_f: Vec<u64> = Vec::with_capacity(p);
        for r in 0..p {
            let left = (m - self.ranks[r].f) as u64;
            let own = self.ranks[r].now + left * costs.f[r];
            let input = r.checked_sub(1).map_or(0, |u| last_f[u] + costs.send + costs.f[r]);
            last_f.push(if left == 0 { 0 } else { own.max(input) });
        }
        let next_f = self.next_forward_ends();
        // From the last rank to the first: when its last B can end, and when its next B can start.
        let (mut last_b, mut next_b) = (0, NOT_YET);
        for r in (0..p).rev() {
            let RankProgress { f, b, w, now } = self.ranks[r];
            let (left_f, left_b, left_w) = ((m - f) as u64, (m - b) as u64, (m - w) as u64);
            let work = left_f * costs.f[r] + left_b * costs.b[r] + left_w * costs.w[r];
            let mut end = now + work;
            if left_b > 0 {
                let own = now + left_f * costs.f[r] + left_b * costs.b[r];
                let forward = last_f[r] + costs.b[r];
                let behind = if r + 1 == p { 0 } else { last_b + costs.send + costs.b[r] };
                last_b = own.max(forward).max(behind);
                end = end.max(last_b + costs.w[r]);
                let input = self.next_gradient(r, next_b).max(next_f[r]);
                end = end.max(input + work - self.work_before(r, input).min(work));
                next_b = input.max(now) + costs.b[r];
            } else {
                last_b = self.ends_b[r * m + m - 1];
                next_b = NOT_YET;
            }
            if r < self.counted {
                most = most.max(end - self.starts[r]);
            }
        }
        most
    }

    /// When the F of the micro-batch whose B is next can end at the earliest, per rank; 0 where it
    /// has run.
    fn next_forward_ends(&self) -> Vec<u64> {
        let (costs, m) = (self.instance.costs, self.instance.micro_batches);
        let end = |r: usize| {
            let RankProgress { f, b, now, .. } = self.ranks[r];
            if f > b {
                return 0;
            }
            let input = match r.checked_sub(1) {
                Some(u) if f < m => match self.ends_f[u * m + f] {
                    NOT_YET => self.ranks[u].now + costs.f[u] + costs.send,
                    end => end + costs.send,
                },
                _ => 0,
            };
            now.max(input) + costs.f[r]
        };
        (0..self.ranks.len()).map(end).collect()
    }

    /// When the gradient for rank `r`'s next B can be there; `next_b` is when the next B of the
    /// rank behind can end.
    fn next_gradient(&self, r: usize, next_b: u64) -> u64 {
        if r + 1 == self.ranks.len() {
            return 0;
        }
        let end = self.ends_b[(r + 1) * self.instance.micro_batches + self.ranks[r].b];
        let end = if end == NOT_YET { next_b } else { end };
        end.saturating_add(self.instance.costs.send)
    }

    /// How much of rank `r`'s time before `until` is busy at most: what is past, the W that wait
    /// and the F that memory allows without another B.
    fn work_before(&self, r: usize, until: u64) -> u64 {
        let RankProgress { f, b, w, now } = self.ranks[r];
        if until <= now {
            return 0;
        }
        let costs = self.instance.costs;
        let room = self.instance.limit() - self.instance.memory(r, f, b, b);
        let forwards = match costs.mem_f[r] {
            0 => usize::MAX,
            mem_f => usize::try_from(room / mem_f).unwrap_or(0),
        };
        let forwards = forwards.min(self.instance.micro_batches - f) as u64;
        (forwards * costs.f[r] + (b - w) as u64 * costs.w[r]).min(until - now)
    }

    /// Whether an earlier node had done the same work with every result at least as early. If not,
    /// this node is remembered.
    fn dominated(&mut self) -> bool {
        let m = self.instance.micro_batches;
        let key = work_done(&self.ranks);
        let mut times: Vec<u64> = self.ranks.iter().map(|r| r.now).collect();
        for r in 1..self.ranks.len() {
            let (front, back) = (self.ranks[r - 1], self.ranks[r]);
            // Results on their way between the two ranks.
            times.extend((back.f..front.f).map(|i| self.ends_f[(r - 1) * m + i]));
            times.extend((front.b..back.b).map(|i| self.ends_b[r * m + i]));
        }
        let alike = self.seen.entry(key).or_default();
        if alike.iter().any(|known| known.iter().zip(&times).all(|(k, t)| k <= t)) {
            return true;
        }
        let before = alike.len();
        alike.retain(|known| known.iter().zip(&times).any(|(k, t)| k < t));
        self.kept -= before - alike.len();
        if self.kept < KEPT_MAX && alike.len() < KEPT_ALIKE_MAX {
            alike.push(times.into_boxed_slice());
            self.kept += 1;
        }
        false
    }
}

/// A value that distinguishes two nodes' work.
fn work_done(ranks: &[RankProgress]) -> Box<[WorkDone]> {
    let count = |n: usize| u32::try_from(n).expect("a list of so many actions has no room");
    ranks.iter().map(|r| [r.f, r.b, r.w].map(count)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_of_many_micro_batches_are_distinguished() {
        let at = |f, b, w| [RankProgress { f, b, w, now: 0 }, RankProgress::default()];
        let mut keys = std::collections::HashSet::new();
        for done in [0, 1, 255, 256, 257, 512, 65_536, 1 << 20] {
            for state in [at(done, 0, 0), at(1 << 21, done, 0), at(1 << 21, 1 << 21, done)] {
                assert!(keys.insert(work_done(&state)), "{done}");
            }
        }
    }
}
