//! From sequences to times: the inner loop of the search.
//!
//! A changed sequence changes nothing before the moment at which its rank comes to the change. So
//! every rank goes on from its first entry that starts at that moment or later, reading the times
//! of everything before from the plan it came from. Ranks go on window of time by window: where all
//! have come to where they were in that plan, the rest is what it was; and a change is given up as
//! soon as waits alone make it worse than what the search would accept, or are likely to. Nothing
//! is allocated. Where collectives take time, there is one window.

use super::Objective;
use super::ledger::{Cell, CollectiveTimes, RankBefore, RankFigures, SHIFT, WHOLE};
use super::problem::{NO_RANK, Problem, ResultTarget};
use super::residency::{Gather, ResidencyCounter};
use super::sequence::{Change, RankOrders, RankSequence};
use super::waiting::WaitingWeights;

/// The share of the waits ahead that a change is taken to leave as they are.
const AGAIN: (i64, i64) = (19, 20);

/// No input is waited for.
const FREE: u32 = u32::MAX;

/// Why a rank stopped.
#[derive(PartialEq, Eq)]
enum Stop {
    Done,
    Waits,
    Parked,
    TooLate,
}

/// Times of a plan and of its changes.
pub(super) struct OrderTimes {
    capacity: usize,
    epoch: u32,
    /// Entries that start before this time stand.
    since: i64,
    /// Ranks stop before entries that start at this time or later.
    until: i64,
    cells: Vec<Cell>,
    written: Vec<u32>,
    slots: Vec<RankBefore>,
    new_slots: Vec<RankBefore>,
    /// Beside the slots, where collectives take time.
    lanes: Vec<CollectiveTimes>,
    new_lanes: Vec<CollectiveTimes>,
    ends: Vec<RankFigures>,
    new_ends: Vec<RankFigures>,
    /// Arrival of each gather, by rank and number; old ones of this trial.
    ready: Vec<Vec<i64>>,
    old_ready: Vec<(u32, u32, i64)>,
    /// Gathers of each rank's sequence, where they take time; old ones of this trial.
    gathers: Vec<Vec<Gather>>,
    old_gathers: Vec<(usize, Vec<Gather>)>,
    /// The first entry of each rank that is run again, and the one it has come to.
    cut: Vec<usize>,
    reached: Vec<usize>,
    /// Where each rank's sequence is the accepted one again.
    same: Vec<usize>,
    /// The cell that a rank waits for.
    blocked: Vec<u32>,
    queue: Vec<u32>,
    parked: Vec<u32>,
    /// Ranks with entries that are run again.
    running: Vec<u32>,
    /// Spans that are certain: largest and sum.
    most: i64,
    sum: i64,
    allowed: i64,
    /// Gives up only what is certain to be too late.
    pub(super) patient: bool,
    /// Entries run, the measure of effort.
    pub(super) effort: u64,
}

impl OrderTimes {
    pub(super) fn new(p: &Problem) -> OrderTimes {
        // As many W may be asked for as there are, and the state at the end is kept, too.
        let capacity = p.b * (p.classes + p.v) + 1;
        let mut cells = vec![Cell::NEVER; p.entries()];
        let first = p.stage.iter().position(|s| *s == 0).expect("there is a stage 0");
        let from = (first / p.v * p.classes + first % p.v) * p.b;
        cells[from..from + p.b].fill(Cell { arrival: 0, ..Cell::NEVER });
        let lanes = if p.timed { p.ranks * capacity } else { 0 };
        let ready = if p.timed { p.b * p.classes } else { 0 };
        OrderTimes {
            capacity,
            epoch: 0,
            since: 0,
            until: i64::MAX,
            cells,
            written: Vec::with_capacity(p.entries()),
            slots: vec![RankBefore::default(); p.ranks * capacity],
            new_slots: vec![RankBefore::default(); p.ranks * capacity],
            lanes: vec![CollectiveTimes::default(); lanes],
            new_lanes: vec![CollectiveTimes::default(); lanes],
            ends: vec![RankFigures::default(); p.ranks],
            new_ends: vec![RankFigures::default(); p.ranks],
            ready: vec![vec![0; ready]; p.ranks],
            old_ready: Vec::new(),
            gathers: vec![Vec::new(); p.ranks],
            old_gathers: Vec::new(),
            cut: vec![0; p.ranks],
            reached: vec![0; p.ranks],
            same: vec![0; p.ranks],
            blocked: vec![FREE; p.ranks],
            queue: Vec::with_capacity(p.ranks + 1),
            parked: Vec::with_capacity(p.ranks + 1),
            running: Vec::with_capacity(p.ranks),
            most: 0,
            sum: 0,
            allowed: i64::MAX,
            patient: false,
            effort: 0,
        }
    }

    /// Times a whole plan and takes it as the one that changes refer to. The score; none where it
    /// cannot run, and changes refer to nothing then.
    pub(super) fn load(
        &mut self,
        p: &Problem,
        plan: &RankOrders,
        r: &mut ResidencyCounter,
    ) -> Option<i64> {
        // All but what is there from the beginning.
        for cell in self.cells.iter_mut().filter(|cell| cell.arrival > 0) {
            cell.arrival = i64::MAX;
        }
        (self.since, self.until) = (0, i64::MAX);
        self.cut.fill(0);
        self.allowed = i64::MAX;
        for rank in 0..p.ranks {
            self.slots[rank * self.capacity] = RankBefore { idle: -1, ..RankBefore::default() };
            if p.timed {
                self.lanes[rank * self.capacity] = CollectiveTimes::default();
                r.count(p, rank, &plan.sequences[rank], true);
                self.gathers[rank].clone_from(&r.gathers);
            }
        }
        self.old_gathers.clear();
        let score = self.run(p, plan)?;
        self.accept(p, plan);
        Some(score)
    }

    /// Times `plan`, which differs from the accepted one by `changes`. The score, if it is at most
    /// `allowed`; a change that is likely to be worse may be given up, unless `patient`. To be
    /// followed by [`OrderTimes::accept`] or [`OrderTimes::reject`].
    pub(super) fn attempt(
        &mut self,
        p: &Problem,
        plan: &RankOrders,
        changes: &[Change],
        allowed: i64,
        r: &mut ResidencyCounter,
    ) -> Option<i64> {
        self.allowed = allowed;
        self.since = i64::MAX;
        self.old_gathers.clear();
        for change in changes {
            let mut at = change.from;
            if p.timed {
                at = at.min(self.change_gathers(p, plan, change.rank, r));
            }
            let slot = &self.slots[change.rank * self.capacity + at];
            self.since = self.since.min(slot.now);
        }
        self.same.fill(0);
        changes.iter().for_each(|change| self.same[change.rank] = change.to);
        self.until = if p.timed { i64::MAX } else { self.since + p.step };
        for rank in 0..p.ranks {
            let n = plan.sequences[rank].entries.len();
            // What is known of a changed sequence ends where it changes.
            let known = changes.iter().find(|c| c.rank == rank).map_or(n, |c| c.from);
            let slots = &self.slots[rank * self.capacity..][..known];
            self.cut[rank] = slots.partition_point(|slot| slot.start < self.since);
        }
        self.run(p, plan)
    }

    /// Finds the gathers of a changed sequence; the first entry before which they differ.
    fn change_gathers(
        &mut self,
        p: &Problem,
        plan: &RankOrders,
        rank: usize,
        r: &mut ResidencyCounter,
    ) -> usize {
        r.count(p, rank, &plan.sequences[rank], true);
        let old = &self.gathers[rank];
        let alike = old.iter().zip(&r.gathers).take_while(|(a, b)| a == b).count();
        let gate = |all: &[Gather]| all.get(alike).map_or(usize::MAX, |g| g.gate as usize);
        let at = gate(old).min(gate(&r.gathers));
        let new = r.gathers.clone();
        self.old_gathers.push((rank, std::mem::replace(&mut self.gathers[rank], new)));
        at
    }

    fn run(&mut self, p: &Problem, plan: &RankOrders) -> Option<i64> {
        self.restart(p, plan);
        if self.score(p) > self.allowed {
            return None;
        }
        let mut step = p.step;
        while self.window(p, plan)? {
            if self.rejoins(p) {
                self.end_as_accepted(p);
                return Some(self.score(p)).filter(|score| *score <= self.allowed);
            }
            if !self.patient && self.unlikely(p) {
                return None;
            }
            step += step / 2;
            self.until += step;
            std::mem::swap(&mut self.queue, &mut self.parked);
        }
        let all = |rank: usize| self.reached[rank] == plan.sequences[rank].entries.len();
        (0..p.ranks).all(all).then(|| self.score(p)).filter(|score| *score <= self.allowed)
    }

    /// Puts every rank before the first of its entries that is run again.
    fn restart(&mut self, p: &Problem, plan: &RankOrders) {
        self.epoch += 1;
        self.written.clear();
        self.old_ready.clear();
        self.queue.clear();
        self.parked.clear();
        self.running.clear();
        self.new_ends.copy_from_slice(&self.ends);
        (self.most, self.sum) = (0, 0);
        for rank in 0..p.ranks {
            let cut = self.cut[rank];
            self.reached[rank] = cut;
            self.blocked[rank] = FREE;
            if cut < plan.sequences[rank].entries.len() {
                let first = rank * self.capacity + cut;
                let slot = self.slots[first];
                self.new_slots[first] = slot;
                if p.timed {
                    self.new_lanes[first] = self.lanes[first];
                }
                self.queue.push(rank as u32);
                self.running.push(rank as u32);
                let ends = &mut self.new_ends[rank];
                ends.idle = slot.idle.max(0);
                let start = if slot.idle < 0 { 0 } else { start_of(p, ends.first) };
                ends.value = p.work[rank] + ends.idle + start;
            }
            let ends = &self.new_ends[rank];
            self.most = self.most.max(ends.value);
            self.sum += p.work[rank] + ends.idle;
        }
    }

    /// Runs all ranks as far as they get before the window ends; true where some then go on, none
    /// where it is too late.
    fn window(&mut self, p: &Problem, plan: &RankOrders) -> Option<bool> {
        // First in, first out: until its turn a rank gets more inputs than the one it waited for.
        let mut turn = 0;
        while let Some(&rank) = self.queue.get(turn) {
            turn += 1;
            let stop = match p.timed {
                true => self.advance::<true>(p, plan, rank as usize),
                false => self.advance::<false>(p, plan, rank as usize),
            };
            match stop {
                Stop::TooLate => return None,
                Stop::Parked => self.parked.push(rank),
                Stop::Done | Stop::Waits => {}
            }
        }
        self.queue.clear();
        Some(!self.parked.is_empty())
    }

    /// The actions that are left end as in the accepted plan.
    fn end_as_accepted(&mut self, p: &Problem) {
        self.new_ends.copy_from_slice(&self.ends);
        self.most = self.ends.iter().map(|ends| ends.value).max().unwrap_or(0);
        self.sum = self.ends.iter().zip(&p.work).map(|(ends, work)| work + ends.idle).sum();
    }

    /// Whether ranks would have to make up for more than they are likely to: of the waits that are
    /// still ahead of a rank in the accepted plan, most come again, but for what more waiting W
    /// could fill.
    fn unlikely(&self, p: &Problem) -> bool {
        let (mut most, mut sum) = (self.most, self.sum);
        for &r in &self.running {
            let r = r as usize;
            let place = r * self.capacity + self.reached[r];
            let (new, old) = (&self.new_slots[place], &self.slots[place]);
            let filled = i64::from(new.pending.saturating_sub(old.pending)) * p.longest_w[r];
            let ahead = (self.ends[r].idle - old.idle.max(0) - filled).max(0);
            let more = new.idle.max(0) + ahead * AGAIN.0 / AGAIN.1 - self.new_ends[r].idle;
            sum += more;
            most = most.max(self.new_ends[r].value + more);
        }
        self.weigh(p, most, sum) > self.allowed
    }

    /// Whether every rank is where it was before the same entry of the accepted plan, and inputs
    /// that are there at another time are there before they are needed. Then all goes on as there.
    fn rejoins(&self, p: &Problem) -> bool {
        let place = |r: usize| r * self.capacity + self.reached[r];
        let alike = |&r: &u32| {
            let r = r as usize;
            let (new, old) = (&self.new_slots[place(r)], &self.slots[place(r)]);
            // W that wait are the same ones, or it does not matter which ones wait.
            let same_w = p.same_w[r] || new.w == old.w && new.w as usize >= self.same[r];
            self.reached[r] >= self.same[r]
                && new.now == old.now
                && new.idle == old.idle
                && new.memory == old.memory
                && new.pending == old.pending
                && same_w
        };
        let in_time = |&at: &u32| {
            let cell = &self.cells[at as usize];
            let now = self.new_slots[place(at as usize / (p.classes * p.b))].now;
            cell.new_arrival == cell.arrival || cell.new_arrival.max(cell.arrival) <= now
        };
        self.running.iter().all(alike) && self.written.iter().all(in_time)
    }

    fn score(&self, p: &Problem) -> i64 {
        self.weigh(p, self.most, self.sum)
    }

    fn weigh(&self, p: &Problem, most: i64, sum: i64) -> i64 {
        WHOLE * most + ((sum * p.part) >> SHIFT)
    }

    /// Takes the plan that was timed last.
    pub(super) fn accept(&mut self, p: &Problem, plan: &RankOrders) {
        for rank in 0..p.ranks {
            let (cut, n) = (self.cut[rank], plan.sequences[rank].entries.len());
            let from = rank * self.capacity;
            if cut < n {
                let reached = self.reached[rank];
                let new = from + cut..from + reached + usize::from(reached == n);
                self.slots[new.clone()].copy_from_slice(&self.new_slots[new.clone()]);
                if p.timed {
                    self.lanes[new.clone()].copy_from_slice(&self.new_lanes[new]);
                }
            }
        }
        for &cell in &self.written {
            let cell = &mut self.cells[cell as usize];
            cell.arrival = cell.new_arrival;
        }
        self.ends.copy_from_slice(&self.new_ends);
    }

    /// Gives up the plan that was timed last.
    pub(super) fn reject(&mut self) {
        for (rank, gathers) in self.old_gathers.drain(..) {
            self.gathers[rank] = gathers;
        }
        for &(rank, gather, at) in self.old_ready.iter().rev() {
            self.ready[rank as usize][gather as usize] = at;
        }
    }

    /// The objective of the plan that was timed last.
    pub(super) fn value(&self) -> i64 {
        self.most
    }

    /// How long rank `r` waits before its entry `at` in the accepted plan.
    pub(super) fn wait(&self, r: usize, at: usize) -> i64 {
        let slots = &self.slots[r * self.capacity + at..];
        slots[1].idle - slots[0].idle.max(0)
    }

    /// When the entry `at` of rank `r` starts in the accepted plan.
    pub(super) fn start(&self, r: usize, at: usize) -> i64 {
        self.slots[r * self.capacity + at].start
    }

    /// The rank that decides the accepted plan's span.
    pub(super) fn longest(&self) -> usize {
        let values = self.ends.iter().enumerate();
        values.max_by_key(|(_, ends)| ends.value).map_or(0, |(r, _)| r)
    }

    /// The accepted plan's largest own span, and the last end of any rank's computing.
    #[cfg(test)]
    pub(super) fn spans(&self) -> (i64, i64) {
        let own = self.ends.iter().map(|e| e.last - e.first).max().unwrap_or(0);
        let last = self.ends.iter().map(|e| e.last).max().unwrap_or(0);
        (own, last)
    }

    /// How many W the accepted plan runs before each entry of a rank, W that the sequence asks for
    /// included.
    pub(super) fn w_before(&self, p: &Problem, r: usize, sequence: &RankSequence) -> Vec<usize> {
        let slots = &self.slots[r * self.capacity..];
        let count = |(at, entry): (usize, &u8)| {
            let b = (p.v..p.classes).contains(&usize::from(*entry));
            slots[at].pending as usize + usize::from(b) - slots[at + 1].pending as usize
        };
        sequence.entries.iter().enumerate().map(count).collect()
    }

    /// Runs a rank until its end, until an input is missing, or until it is too late.
    fn advance<const TIMED: bool>(&mut self, p: &Problem, plan: &RankOrders, r: usize) -> Stop {
        let (sequence, n) = (&plan.sequences[r], plan.sequences[r].entries.len());
        let table = &p.table[r * p.classes..][..p.classes];
        let (begin, from) = (r * self.capacity, self.reached[r]);
        let mut at = from;
        let mut s = self.new_slots[begin + at];
        let mut lane = if TIMED { self.new_lanes[begin + at] } else { CollectiveTimes::default() };
        self.blocked[r] = FREE;
        let waiting = WaitingWeights { p, r, sequence, table, same: p.same_w[r] };
        let mut stop = Stop::Done;
        while at < n {
            let class = usize::from(sequence.entries[at]);
            self.new_slots[begin + at] = RankBefore { start: s.now, ..s };
            if TIMED {
                self.new_lanes[begin + at] = lane;
                self.start_gathers(&mut lane, s.now, r, at);
            }
            if s.now >= self.until {
                stop = Stop::Parked;
                break;
            }
            if class == p.classes {
                if s.pending > 0 {
                    waiting.run_w::<TIMED>(&mut s, &mut lane, false);
                }
                at += 1;
                continue;
            }
            let id = (r * p.classes + class) * p.b + usize::from(sequence.batch[at]);
            let facts = &table[class];
            let Some(mut arrival) = self.arrival(id, facts.lag) else {
                self.blocked[r] = id as u32;
                stop = Stop::Waits;
                break;
            };
            if s.memory + facts.need > p.memory
                && !waiting.make_room::<TIMED>(facts.need, &mut s, &mut lane)
            {
                stop = Stop::TooLate;
                break;
            }
            if TIMED {
                arrival = arrival.max(self.gathered(r, lane.gathers, at));
            }
            while arrival - s.now >= sequence.threshold && s.pending > 0 {
                waiting.run_w::<TIMED>(&mut s, &mut lane, false);
            }
            let start = s.now.max(arrival);
            self.new_slots[begin + at].start = start;
            s.idle = match s.idle {
                0.. => s.idle + start - s.now,
                _ => self.begin(p, r, start),
            };
            s.now = start + facts.take;
            s.memory += facts.delta;
            s.pending += u32::from(class >= p.v);
            self.hand_over(facts.link, sequence.batch[at], s.now);
            at += 1;
            if s.idle > self.new_ends[r].idle && self.late(p, r, s.idle) {
                stop = Stop::TooLate;
                break;
            }
        }
        self.effort += (at - from) as u64;
        self.reached[r] = at;
        if stop != Stop::Done {
            return stop;
        }
        self.tail::<TIMED>(&waiting, s, lane, begin + n)
    }

    /// The W that are left when all entries have run.
    fn tail<const TIMED: bool>(
        &mut self,
        waiting: &WaitingWeights,
        mut s: RankBefore,
        mut lane: CollectiveTimes,
        end: usize,
    ) -> Stop {
        // For the writer of the schedule: how many they are.
        self.new_slots[end] = RankBefore { start: i64::MAX, ..s };
        while s.pending > 0 {
            waiting.run_w::<TIMED>(&mut s, &mut lane, true);
        }
        self.finish(waiting.p, waiting.r, s.now, s.idle, lane.free)
    }

    /// When an input arrives, if it has been made: in this trial, or `lag` before its arrival and
    /// so before the trial departs from the accepted plan.
    #[inline(always)]
    fn arrival(&self, id: usize, lag: i64) -> Option<i64> {
        let cell = &self.cells[id];
        if cell.epoch == self.epoch {
            return Some(cell.new_arrival);
        }
        (cell.arrival - lag < self.since).then_some(cell.arrival)
    }

    /// Hands an action's result on, and wakes the rank that waits for it.
    #[inline(always)]
    fn hand_over(&mut self, to: ResultTarget, i: u16, end: i64) {
        if to.rank == NO_RANK {
            return;
        }
        let id = to.cell + u32::from(i);
        let cell = &mut self.cells[id as usize];
        (cell.new_arrival, cell.epoch) = (end + to.delay, self.epoch);
        self.written.push(id);
        if self.blocked[to.rank as usize] == id {
            self.blocked[to.rank as usize] = FREE;
            self.queue.push(to.rank);
        }
    }

    /// Starts the gathers whose room is free.
    fn start_gathers(&mut self, lane: &mut CollectiveTimes, now: i64, r: usize, at: usize) {
        while let Some(gather) = self.gathers[r].get(lane.gathers as usize) {
            if gather.gate as usize > at {
                break;
            }
            lane.free = lane.free.max(now) + gather.take;
            let ready = &mut self.ready[r][lane.gathers as usize];
            self.old_ready.push((r as u32, lane.gathers, *ready));
            *ready = lane.free;
            lane.gathers += 1;
        }
    }

    /// When the weights for entry `at` are there, if it is the first to need them.
    fn gathered(&self, r: usize, started: u32, at: usize) -> i64 {
        let started = &self.gathers[r][..started as usize];
        // Those still to be used are the last few.
        match started.iter().rposition(|g| g.entry as usize <= at) {
            Some(g) if started[g].entry as usize == at => self.ready[r][g],
            _ => 0,
        }
    }

    /// Notes when a rank starts, before which it does not wait.
    fn begin(&mut self, p: &Problem, r: usize, start: i64) -> i64 {
        let ends = &mut self.new_ends[r];
        ends.first = start;
        ends.value = p.work[r] + start_of(p, start);
        self.most = self.most.max(ends.value);
        0
    }

    /// Counts a rank's waits; true where they are too long already.
    fn late(&mut self, p: &Problem, r: usize, idle: i64) -> bool {
        let ends = &mut self.new_ends[r];
        let more = idle - ends.idle;
        ends.idle = idle;
        ends.value += more;
        self.sum += more;
        self.most = self.most.max(ends.value);
        self.score(p) > self.allowed
    }

    fn finish(&mut self, p: &Problem, r: usize, now: i64, idle: i64, lane: i64) -> Stop {
        let late = self.late(p, r, idle.max(self.new_ends[r].idle));
        let ends = &mut self.new_ends[r];
        ends.last = now;
        if p.timed && p.objective == Objective::Makespan {
            ends.value = ends.value.max(lane);
            self.most = self.most.max(ends.value);
        }
        if late { Stop::TooLate } else { Stop::Done }
    }
}

/// A rank's start as a part of the objective.
fn start_of(p: &Problem, first: i64) -> i64 {
    match p.objective {
        Objective::Makespan => first,
        Objective::OwnSpan => 0,
    }
}
