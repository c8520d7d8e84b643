//! Times that no order can beat, whatever its placement of W, units and gathers.
//!
//! Memory keeps work away from both ends of a step. *Head*: before a rank's first B, which a chain
//! through all stages precedes, it can run no more forwards than memory holds. *Tail*: when its
//! last F ends, no more of its work is left than the activations and stashes that memory holds, and
//! from there a chain leads down to the last stage and back up. With equal stages this is, for any
//! placement, idle ≥ (VP + P − 1)(F + B) + W + hops − (M / M_F)(F + B + W). *Gathers* that take
//! time are one queue a rank, and where not all stages fit at once, some are gathered twice.

use super::Objective;
use super::problem::Problem;

/// A lower bound on what is minimised.
pub(super) fn bound(p: &Problem) -> i64 {
    let chains = ChainTimes::new(p);
    let stages = p.placement.len();
    let whole = chains.forward(0, stages) + chains.backward(0, stages) + p.costs.w[0] as i64;
    let first_gather = p.costs.gather[0] as i64;
    let mut least = whole;
    for r in 0..p.ranks {
        let ends = RankEnds::new(p, &chains, r);
        let own = p.work[r] + ends.own_idle();
        least = least.max(own);
        // Stage 0's rank starts with the step and ends after the chain that follows r's last F.
        let idle = if ends.apart { ends.head_end } else { ends.start };
        let across = idle + p.work[r] - ends.left + ends.after_last_f + chains.all_back;
        least = least.max(across);
        if p.objective == Objective::Makespan {
            least = least.max(ends.start + own);
        }
    }
    let queues = (0..p.ranks).map(|r| CollectiveQueue::new(p, r));
    match p.objective {
        Objective::OwnSpan => queues.map(|queue| queue.own_span()).fold(least, i64::max),
        Objective::Makespan => queues.map(|q| q.makespan()).fold(least + first_gather, i64::max),
    }
}

/// Gathers and reductions of a rank are one queue.
///
/// Every stage is gathered once on the way to the first backward of the rank's last stage. What
/// does not fit beside that stage then has gone and is gathered again for its own backward.
struct CollectiveQueue {
    /// The shortest time of all gathers.
    gathers: i64,
    /// The longest time of gathers that a rank can have behind it when its first F starts.
    ahead: i64,
    reductions: i64,
    /// The least time behind the last gather: an action that needs it, and a W.
    tail: i64,
}

impl CollectiveQueue {
    fn new(p: &Problem, r: usize) -> CollectiveQueue {
        let own = r * p.v..(r + 1) * p.v;
        let (gather, weight) = (&p.gather[own.clone()], &p.weight[own.clone()]);
        let all = gather.iter().sum::<i64>();
        let last = p.v - 1;
        let fits = p.room.min(weight.iter().sum());
        let items = |stages: std::ops::Range<usize>| {
            stages.map(|v| (gather[v], weight[v] as i64)).collect::<Vec<_>>()
        };
        let beside = knapsack(items(0..last), 1, fits.saturating_sub(weight[last]) as i64);
        let b = &p.take[r * p.classes + p.v..][..p.v];
        let least = |times: &[i64]| times.iter().min().copied().unwrap_or(0);
        CollectiveQueue {
            gathers: all + (all - gather[last] - beside).max(0),
            ahead: knapsack(items(0..p.v), 1, fits as i64),
            reductions: p.units.len() as i64 * p.reduce[own.clone()].iter().sum::<i64>(),
            tail: least(b) + least(&p.w[own]),
        }
    }

    fn makespan(&self) -> i64 {
        self.gathers + self.reductions.max(self.tail)
    }

    /// None of the gathers that come after the first F has room before that F has run; so much
    /// is certain without its time.
    fn own_span(&self) -> i64 {
        match self.gathers - self.ahead {
            ..=0 => 0,
            after => after + self.tail,
        }
    }
}

/// Times along the stages for one micro-batch.
struct ChainTimes<'a> {
    p: &'a Problem,
    /// B of all stages and a W of the first.
    all_back: i64,
}

impl ChainTimes<'_> {
    fn new(p: &Problem) -> ChainTimes<'_> {
        let mut chains = ChainTimes { p, all_back: 0 };
        chains.all_back = chains.backward(0, p.placement.len()) + p.costs.w[0] as i64;
        chains
    }

    fn take(&self, s: usize, backward: bool) -> i64 {
        let (p, r) = (self.p, self.p.placement[s]);
        let local = (0..p.v).find(|v| p.stage[r * p.v + v] == s).expect("placed there");
        p.take[r * p.classes + local + if backward { p.v } else { 0 }]
    }

    fn hops(&self, from: usize, to: usize) -> i64 {
        let p = self.p;
        let crossed = (from..to).filter(|s| p.placement[*s] != p.placement[s + 1]).count();
        crossed as i64 * p.costs.send as i64
    }

    /// F of the stages `from..to` with the messages between them.
    fn forward(&self, from: usize, to: usize) -> i64 {
        (from..to).map(|s| self.take(s, false)).sum::<i64>() + self.hops(from, to.max(1) - 1)
    }

    /// B of the stages `from..to`.
    fn backward(&self, from: usize, to: usize) -> i64 {
        (from..to).map(|s| self.take(s, true)).sum::<i64>() + self.hops(from, to.max(1) - 1)
    }
}

/// One rank's two ends.
struct RankEnds {
    /// Earliest start of its first F.
    start: i64,
    /// Time at which it has been idle since the step began, at least, when its first B starts.
    head_end: i64,
    /// Its work that can be left when its last F ends.
    left: i64,
    /// From that end to the end of the last stage's F.
    after_last_f: i64,
    /// From that end to the end of its own last W.
    tail: i64,
    /// Whether memory puts a B before its last F, so that head and tail are different times.
    apart: bool,
}

impl RankEnds {
    fn new(p: &Problem, chains: &ChainTimes, r: usize) -> RankEnds {
        let own = &p.stage[r * p.v..(r + 1) * p.v];
        let (low, high, stages) = (own[0], own[p.v - 1], p.placement.len());
        let to_low = chains.forward(0, low) + if low > 0 { chains.hops(low - 1, low) } else { 0 };
        let behind = if high + 1 < stages { chains.hops(high, high + 1) } else { 0 };
        let back = chains.backward(high + 1, stages) + behind;
        let first_b = chains.forward(0, stages) + back;
        let (forwards, all) = most_forwards(p, r);
        let after = chains.forward(high + 1, stages) + behind;
        let w = (0..p.v).map(|v| p.w[r * p.v + v]).min().unwrap_or(0);
        RankEnds {
            start: to_low,
            head_end: to_low.max(first_b - forwards),
            left: most_left(p, r),
            after_last_f: after,
            tail: after + chains.backward(low, stages) + w,
            apart: !all,
        }
    }

    fn own_idle(&self) -> i64 {
        let (head, tail) = (self.head_end - self.start, (self.tail - self.left).max(0));
        if self.apart { head + tail } else { head.max(tail) }
    }
}

/// The longest time of forwards that memory holds, and whether that is all of them.
fn most_forwards(p: &Problem, r: usize) -> (i64, bool) {
    let of = r * p.classes;
    let items = (0..p.v).map(|v| (p.take[of + v], p.need[of + v])).collect();
    let memory: i64 = (0..p.v).map(|v| p.need[of + v] * p.b as i64).sum();
    (knapsack(items, p.b as i64, p.memory), memory <= p.memory)
}

/// The longest time of B and W that can be left when no F is: of micro-batches that wait for B,
/// with all their memory, and of those that wait for W, with what B leaves of it.
fn most_left(p: &Problem, r: usize) -> i64 {
    let of = r * p.classes;
    let both = |v: usize| (p.take[of + p.v + v] + p.w[r * p.v + v], p.delta[of + v]);
    let stash = |v: usize| (p.w[r * p.v + v], p.freed[r * p.v + v]);
    let items: Vec<(i64, i64)> = (0..p.v).flat_map(|v| [both(v), stash(v)]).collect();
    let whole: i64 = (0..p.v).map(|v| both(v).0 * p.b as i64).sum();
    knapsack(items, p.b as i64, p.memory).min(whole)
}

/// The most value of `copies` of each (value, weight) within `room`, the last one in part, rounded
/// up.
fn knapsack(mut items: Vec<(i64, i64)>, copies: i64, room: i64) -> i64 {
    let worth = |a: &(i64, i64), b: &(i64, i64)| {
        (i128::from(b.0) * i128::from(a.1)).cmp(&(i128::from(a.0) * i128::from(b.1)))
    };
    items.sort_by(worth);
    let (mut left, mut value) = (room.max(0), 0i64);
    for (v, w) in items {
        let fit = if w <= 0 { copies } else { copies.min(left / w) };
        value += fit * v;
        left -= fit * w.max(0);
        if fit < copies {
            let part = i128::from(v) * i128::from(left);
            return value + ((part + i128::from(w) - 1) / i128::from(w)) as i64;
        }
    }
    value
}
