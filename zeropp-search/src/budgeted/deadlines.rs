//! Deadlines for the judge of small cases: whether what is left can still end in time.
//!
//! The actions that follow an action for certain, on its own rank and along the stages, say when it
//! must have ended. What precedes it says when it can start, and for an F that memory has no room
//! for yet, as many B as free enough do. Then each rank alone, allowed to interrupt what it runs,
//! takes the action with the earliest deadline first: where one comes too late there, no order is
//! in time (Jackson 1955, Carlier 1982).

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::judged::{NEVER, SearchState};
use super::problem::Problem;

/// Deadlines of all F and B, and room to work in.
pub(super) struct Deadlines {
    /// Rank and rank's stage of each stage.
    place: Vec<(usize, usize)>,
    /// When a rank starts, at the earliest and in any order.
    first: Vec<i64>,
    /// Latest end by `(rank · 2V + class) · B + i` of an order whose largest own span is 0.
    late: Vec<i64>,
    /// Earliest start in the state that was looked at last.
    heads: Vec<i64>,
    /// Of one rank: earliest start, latest end, time.
    jobs: Vec<(i64, i64, i64)>,
    ready: BinaryHeap<Reverse<(i64, i64)>>,
    /// Ends of B of one rank.
    ends: Vec<i64>,
    /// Memory of an F that a B and its W free, where all stages are alike.
    freed: Option<(i64, i64)>,
}

impl Deadlines {
    pub(super) fn new(p: &Problem) -> Deadlines {
        let stages = p.placement.len();
        let at = |s: usize| p.stage.iter().position(|stage| *stage == s).expect("placed");
        let place: Vec<_> = (0..stages).map(|s| (at(s) / p.v, at(s) % p.v)).collect();
        // The first stage of every rank comes before the second of any, so nothing delays it.
        assert!((0..p.ranks).all(|r| p.stage[r * p.v] < p.ranks));
        let mut first = vec![0; p.ranks];
        for s in 1..p.ranks {
            let before = place[s - 1].0;
            let at = before * p.classes;
            first[place[s].0] = first[before] + p.take[at] + p.link[at].delay;
        }
        let b = |r: usize, l: usize| r * p.classes + p.v + l;
        let like = |at: usize| (-p.delta[b(at / p.v, at % p.v)], p.freed[at]);
        let alike = (0..p.stage.len()).all(|at| like(at) == like(0));
        let mut deadlines = Deadlines {
            place,
            first,
            late: vec![NEVER; p.entries()],
            heads: vec![0; p.entries()],
            jobs: Vec::new(),
            ready: BinaryHeap::new(),
            ends: Vec::new(),
            freed: alike.then(|| like(0)),
        };
        for i in (0..p.b).rev() {
            (0..stages).for_each(|s| deadlines.set_late(p, s, true, i));
            (0..stages).rev().for_each(|s| deadlines.set_late(p, s, false, i));
        }
        deadlines
    }

    fn set_late(&mut self, p: &Problem, s: usize, backward: bool, i: usize) {
        let (r, l) = self.place[s];
        let (f, b) = (r * p.classes, r * p.classes + p.v);
        let whole = |k: usize| p.take[b + k] + p.w[r * p.v + k];
        let left = (p.b - i) as i64;
        // On its own rank: later micro-batches, and the stages that come after it.
        let after = match backward {
            true => left * (0..=l).map(whole).sum::<i64>() - p.take[b + l],
            false => {
                let forwards: i64 = p.take[f + l..b].iter().sum();
                left * (forwards + (0..p.v).map(whole).sum::<i64>()) - p.take[f + l]
            }
        };
        let class = if backward { p.v + l } else { l };
        let cell = (r * p.classes + class) * p.b + i;
        let mut late = self.first[r] - after;
        if i + 1 < p.b {
            late = late.min(self.late[cell + 1] - p.take[f + class]);
        }
        let next = match backward {
            true => s.checked_sub(1).map(|s| (s, p.v)),
            false if s + 1 < p.placement.len() => Some((s + 1, 0)),
            false => Some((s, p.v)),
        };
        if let Some((s, row)) = next {
            let (q, k) = self.place[s];
            let to = q * p.classes + row + k;
            late = late.min(self.late[to * p.b + i] - p.take[to] - p.link[f + class].delay);
        }
        self.late[cell] = late;
    }

    /// Whether no order that goes on from here, nothing starting before `now`, has a largest own
    /// span below `best`.
    pub(super) fn missed(&mut self, p: &Problem, state: &SearchState, now: i64, best: i64) -> bool {
        let stages = p.placement.len();
        for i in 0..p.b {
            let forward = (0..stages).map(|s| (s, false));
            for (s, backward) in forward.chain((0..stages).rev().map(|s| (s, true))) {
                let (r, l) = self.place[s];
                if state.ranks[r].done(usize::from(backward), l) > i {
                    continue;
                }
                let Some(head) = self.head(p, state, now, s, backward, i) else { return true };
                let class = r * p.classes + l + if backward { p.v } else { 0 };
                let cell = class * p.b + i;
                self.heads[cell] = head;
                if head + p.take[class] > best - 1 + self.late[cell] {
                    return true;
                }
            }
        }
        (0..p.ranks).any(|r| state.ranks[r].left > 0 && self.missed_alone(p, state, now, best, r))
    }

    /// The largest own span where all is done.
    pub(super) fn own_span(&self, state: &SearchState) -> i64 {
        let spans = state.ranks.iter().zip(&self.first).map(|(rank, first)| rank.now - first);
        spans.max().unwrap_or(0)
    }

    /// The earliest start of an action that is not done; none where memory never has room.
    fn head(
        &mut self,
        p: &Problem,
        state: &SearchState,
        now: i64,
        s: usize,
        backward: bool,
        i: usize,
    ) -> Option<i64> {
        let (r, l) = self.place[s];
        let rank = &state.ranks[r];
        let class = l + if backward { p.v } else { 0 };
        let (at, free) = (r * p.classes + class, rank.now.max(now));
        let cell = at * p.b + i;
        let mut head = match state.arrivals[cell] {
            NEVER => {
                let (q, k) = p.source[at].expect("only the first stage has no source");
                let from = q as usize * p.classes + k as usize;
                self.heads[from * p.b + i] + p.take[from] + p.link[from].delay
            }
            arrival => arrival,
        };
        if i > rank.done(usize::from(backward), l) {
            head = head.max(self.heads[cell - 1] + p.take[at]);
        }
        // What its own rank must have done before.
        let left = |row: usize, k: usize, upto: usize| upto.saturating_sub(rank.done(row, k));
        let mut before = 0;
        for k in 0..p.v {
            let take = |row: usize| p.take[r * p.classes + row * p.v + k];
            let earlier = if backward { k > l } else { k < l };
            let own = |row: usize| match () {
                () if earlier => left(row, k, i + 1),
                () if k == l => left(row, k, i),
                () => 0,
            };
            let forwards = if backward { left(0, k, i + 1) } else { own(0) };
            before += forwards as i64 * take(0);
            before += if backward { own(1) as i64 * take(1) } else { 0 };
        }
        if backward {
            return Some(head.max(free + before));
        }
        let (end, work) = self.room_at(p, state, r, l, i)?;
        Some(head.max(free + before + work).max(end))
    }

    /// When memory has room for an F of micro-batch `i` at the earliest, by the B before it, and
    /// the time that its rank must spend on B and W until then. None where it never has.
    fn room_at(
        &mut self,
        p: &Problem,
        state: &SearchState,
        r: usize,
        l: usize,
        i: usize,
    ) -> Option<(i64, i64)> {
        let Some((by_b, by_w)) = self.freed.filter(|(by_b, by_w)| *by_b > 0 && *by_w > 0) else {
            return Some((0, 0));
        };
        let (rank, at) = (&state.ranks[r], r * p.classes);
        // With what must precede it; other forwards only take more.
        let upto = |k: usize| if k < l { i + 1 } else { i };
        let certain =
            |k: usize| if k <= l { upto(k).max(rank.done(0, k)) } else { rank.done(0, k) };
        let more =
            (0..=l).map(|k| (upto(k).saturating_sub(rank.done(0, k))) as i64 * p.delta[at + k]);
        let mut missing = rank.memory + more.sum::<i64>() + p.need[at + l] - p.memory;
        if missing <= 0 {
            return Some((0, 0));
        }
        let waiting: i64 = (0..p.v).map(|k| rank.waiting_w(k) as i64).sum();
        let w = (0..p.v).map(|k| p.w[r * p.v + k]).min().unwrap_or(0);
        let b = p.take[at + p.v..][..p.v].iter().min().copied().unwrap_or(0);
        let whole = missing;
        missing -= waiting * by_w;
        if missing <= 0 {
            return Some((0, least_work(whole, waiting, (by_b, b), (by_w, w))));
        }
        // So many B at least, of micro-batches before this one whose F do not fill it again.
        let count = (missing + by_b + by_w - 1) / (by_b + by_w);
        self.ends.clear();
        for k in 0..p.v {
            let class = at + p.v + k;
            let range = rank.done(1, k)..i.min(certain(k));
            self.ends.extend(range.map(|j| self.heads[class * p.b + j] + p.take[class]));
        }
        self.ends.sort_unstable();
        let end = *self.ends.get(count as usize - 1)?;
        Some((end, least_work(whole, waiting, (by_b, b), (by_w, w))))
    }

    /// Whether rank `r` alone, with interruptions, misses a deadline.
    fn missed_alone(
        &mut self,
        p: &Problem,
        state: &SearchState,
        now: i64,
        best: i64,
        r: usize,
    ) -> bool {
        let rank = &state.ranks[r];
        let (free, end) = (rank.now.max(now), best - 1 + self.first[r]);
        self.jobs.clear();
        for class in 0..p.classes {
            let (at, l, row) = (r * p.classes + class, class % p.v, class / p.v);
            let w = p.w[r * p.v + l];
            if row == 1 {
                self.jobs.push((free, end, w * rank.waiting_w(l) as i64));
            }
            for cell in at * p.b + rank.done(row, l)..(at + 1) * p.b {
                let head = self.heads[cell];
                self.jobs.push((head, best - 1 + self.late[cell], p.take[at]));
                if row == 1 {
                    self.jobs.push((head + p.take[at], end, w));
                }
            }
        }
        self.jobs.sort_unstable();
        self.ready.clear();
        let (mut now, mut next) = (free, 0);
        loop {
            while let Some(&(head, late, take)) = self.jobs.get(next).filter(|job| job.0 <= now) {
                debug_assert!(head <= now);
                self.ready.push(Reverse((late, take)));
                next += 1;
            }
            let until = self.jobs.get(next).map_or(NEVER, |job| job.0);
            let Some(Reverse((late, take))) = self.ready.pop() else {
                if until == NEVER {
                    return false;
                }
                now = until;
                continue;
            };
            let run = take.min(until - now);
            now += run;
            if now > late {
                return true;
            }
            if run < take {
                self.ready.push(Reverse((late, take - run)));
            }
        }
    }
}

/// The least time of B and W that free `missing`, of W at most those that wait and those of the B.
fn least_work(missing: i64, waiting: i64, (by_b, b): (i64, i64), (by_w, w): (i64, i64)) -> i64 {
    let with = |count: i64| {
        let rest = (missing - count * by_b).max(0);
        let ws = (rest + by_w - 1) / by_w;
        (ws <= waiting + count).then_some(count * b + ws * w)
    };
    (0..=(missing + by_b - 1) / by_b).filter_map(with).min().unwrap_or(0)
}
