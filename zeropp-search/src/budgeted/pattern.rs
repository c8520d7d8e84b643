//! Patterns: list scheduling by virtual times, which makes the sequences that annealing starts
//! from.
//!
//! Each class has a virtual start time, two-level periodic in the micro-batch i:
//! a + b · rank + d · (i mod U) + D · (i div U). A free rank takes the entry with the smallest
//! virtual time, plus λ times the wait, that fits into memory and into the walk's phase; it runs a
//! W where all wait longer than a threshold. Hill climbing over these few numbers finds orders that
//! single entries would not move to.

use super::Objective;
use super::problem::Problem;
use super::random::Random;
use super::walk::{Phase, Walk};

/// The numbers of a pattern.
#[derive(Clone, Debug)]
pub(super) struct Pattern {
    /// By class: start, per rank, per micro-batch of a group.
    start: Vec<f64>,
    slope: Vec<f64>,
    pace: Vec<f64>,
    /// Per group of micro-batches, and their number.
    group: f64,
    pub(super) size: usize,
    /// The first group's size where it differs; 0 where it does not.
    head: usize,
    impatience: f64,
    /// Memory that an F of a stage leaves free, in forwards of that stage.
    reserve: Vec<f64>,
    /// The shortest wait that a W fills, in longest W.
    threshold: f64,
    pub(super) walk: Option<Walk>,
}

impl Pattern {
    /// A pattern drawn at random around the shapes that are known to be good: stages one after the
    /// other in blocks, or micro-batches one after the other.
    pub(super) fn random(p: &Problem, window: usize, random: &mut Random) -> Pattern {
        let (v, b, pp) = (p.v, p.b, p.ranks);
        let (f, back) = (mean(p, |k| k < v), mean(p, |k| k >= v));
        let work = p.work_unit();
        let w = (work - f - back).max(0.0);
        let stages = (pp * v) as f64;
        let sizes = [b, b, 2 * pp - 1, 2 * pp, pp, b / 2, b.div_ceil(3), pp + pp / 2];
        let size = match random.once_in(4) {
            true => 1 + random.below(b),
            false => sizes[random.below(8)].clamp(1, b),
        };
        let head = if random.once_in(3) { 1 + random.below(size) } else { 0 };
        let block = random.once_in(2);
        let (mut start, mut slope, mut pace) = (vec![0.0; 2 * v], vec![0.0; 2 * v], Vec::new());
        pace.resize(2 * v, v as f64 * work);
        let mut reserve = vec![0.0; v];
        let n = size as f64;
        for l in 0..v {
            let down = pp > 1 && p.stage[l] > p.stage[(pp - 1) * v + l];
            let s = (l * pp) as f64;
            let after = (v - 1 - l) as f64;
            start[l] = if block { l as f64 * n * f } else { s * f };
            start[v + l] = match block {
                true => v as f64 * n * f + after * n * (back + w),
                false => stages * f + (stages - s) * back,
            };
            slope[l] = if down { -f } else { f };
            slope[v + l] = if down { back } else { -back };
            if down {
                start[l] += (pp - 1) as f64 * f;
                start[v + l] -= (pp - 1) as f64 * back;
            }
            if block {
                pace[l] = f;
                pace[v + l] = back + w;
            }
            let fewer = if random.once_in(2) { 1.0 } else { random.below(5) as f64 / 2.0 };
            reserve[l] = after * fewer;
        }
        if random.once_in(2) {
            let earlier = (random.unit() - 0.3) * 16.0 * work;
            start[v..].iter_mut().for_each(|a| *a -= earlier);
        }
        let walks = p.tight && (p.gathers_max < usize::MAX || random.once_in(2));
        let walk = (walks && !random.once_in(5)).then(|| Walk::random(p, window, random));
        Pattern {
            start,
            slope,
            pace,
            group: n * v as f64 * work,
            size,
            head,
            impatience: if random.once_in(2) {
                random.below(3) as f64
            } else {
                3.0 * random.unit()
            },
            reserve,
            threshold: if random.once_in(2) { 1.0 } else { 0.2 + random.unit() },
            walk,
        }
    }

    /// A neighbour: one to three numbers changed.
    pub(super) fn mutated(&self, p: &Problem, window: usize, random: &mut Random) -> Pattern {
        let mut q = self.clone();
        let work = p.work_unit();
        for _ in 0..1 + random.below(3) {
            let class = random.below(p.classes);
            let by = random.unit() - 0.5;
            match random.below(10) {
                0..3 => q.start[class] += by * work * if random.once_in(2) { 2.0 } else { 12.0 },
                3 => q.slope[class] += by * work,
                4 => q.pace[class] *= 1.0 + by * if random.once_in(2) { 0.1 } else { 0.6 },
                5 => q.group *= 1.0 + by * 0.3,
                6 if random.once_in(2) => q.impatience = (q.impatience + by).max(0.0),
                6 => q.threshold = (q.threshold + 0.5 * by).max(0.05),
                7 if random.once_in(3) => {
                    let size = (q.size + random.below(5)).saturating_sub(2);
                    q.size = size.clamp(1, p.b);
                }
                7 => {
                    let l = class % p.v;
                    q.reserve[l] = (q.reserve[l] + 3.0 * by).max(0.0);
                }
                _ => match &mut q.walk {
                    Some(walk) => walk.mutate(p, window, random),
                    None => q.start[class] += by * work,
                },
            }
        }
        q
    }

    /// Virtual times of every entry, and what goes with them.
    pub(super) fn order(&self, p: &Problem, window: usize) -> Order {
        let threshold = ((self.threshold * p.longest_w_of_all() as f64) as i64).max(1);
        let mut order = Order::new(p, threshold);
        order.impatience = self.impatience;
        order.phases = self.walk.as_ref().map(|walk| walk.phases(p, window));
        for at in 0..p.ranks * p.classes {
            let (r, class) = (at / p.classes, at % p.classes);
            let spare = match self.reserve.get(class) {
                Some(reserve) => (reserve * p.need[at] as f64) as i64,
                None => 0,
            };
            for i in 0..p.b {
                let (group, within) = match i.checked_sub(self.head) {
                    Some(rest) if self.head > 0 => (1 + rest / self.size, rest % self.size),
                    None => (0, i),
                    Some(_) => (i / self.size, i % self.size),
                };
                let time = self.start[class] + self.pace[class] * within as f64;
                let time = time + self.group * group as f64 + self.slope[class] * r as f64;
                (order.keys[at * p.b + i], order.spare[at * p.b + i]) = (time, spare);
            }
        }
        order
    }
}

/// The parameters of a list.
#[derive(Clone, Debug)]
pub(super) struct Order {
    /// Virtual time of every entry, by `(rank · 2V + class) · B + i`.
    pub(super) keys: Vec<f64>,
    /// Memory that it leaves free, alike.
    pub(super) spare: Vec<i64>,
    pub(super) impatience: f64,
    /// The shortest wait that a W fills.
    pub(super) threshold: i64,
    pub(super) phases: Option<Vec<Phase>>,
}

impl Order {
    pub(super) fn new(p: &Problem, threshold: i64) -> Order {
        let (keys, spare) = (vec![0.0; p.entries()], vec![0; p.entries()]);
        Order { keys, spare, impatience: 0.0, threshold, phases: None }
    }
}

/// The weight of a list: the longest waits of a rank, this many times, and a part of all.
pub(super) const WAITS: i64 = 20;

fn mean(p: &Problem, of: impl Fn(usize) -> bool) -> f64 {
    let chosen: Vec<i64> =
        (0..p.ranks * p.classes).filter(|at| of(at % p.classes)).map(|at| p.take[at]).collect();
    chosen.iter().sum::<i64>() as f64 / chosen.len().max(1) as f64
}

/// One rank while its list is made.
#[derive(Clone, Debug, Default)]
struct PatternRank {
    now: i64,
    memory: i64,
    /// Memory that the waiting W hold.
    kept: i64,
    /// B in their order, and how many have had their W.
    order: Vec<u8>,
    done_w: usize,
    counts: Vec<u16>,
    phase: usize,
    stuck: bool,
    entries: Vec<u8>,
    /// Time waited, since the first entry where spans are the ranks' own.
    waited: i64,
}

/// The sequences that an order's keys list, and how long ranks wait in them, by [`WAITS`]. None
/// where it comes to a dead end or waits longer than `allowed`. Adds to the effort what was listed.
pub(super) fn list(
    p: &Problem,
    order: &Order,
    allowed: i64,
    effort: &mut u64,
) -> Option<(Vec<Vec<u8>>, i64)> {
    let mut arrivals = vec![i64::MAX; p.entries()];
    for r in 0..p.ranks {
        for l in (0..p.v).filter(|l| p.stage[r * p.v + l] == 0) {
            let from = (r * p.classes + l) * p.b;
            arrivals[from..from + p.b].fill(0);
        }
    }
    let rank = PatternRank { counts: vec![0; p.classes], ..PatternRank::default() };
    let mut ranks = vec![rank; p.ranks];
    let weighed = |most: i64, sum: i64| WAITS * most + 3 * sum;
    let (mut most, mut sum) = (0, 0);
    *effort += 4;
    for n in 0..p.entries() {
        let (r, class) = next(p, order, &mut ranks, &arrivals)?;
        let before = ranks[r].waited;
        let waiting = ranks[r].run(p, r, class, &mut arrivals);
        (most, sum) = (most.max(ranks[r].waited), sum + ranks[r].waited - before);
        // Each entry is charged one and a half.
        *effort += 1 + (n as u64 & 1);
        if weighed(most, sum) > allowed {
            return None;
        }
        if let Some((to, at)) = waiting
            && ranks[to].stuck
        {
            let rank = &mut ranks[to];
            rank.stuck = false;
            let before = rank.waited;
            rank.wait(p, at);
            (most, sum) = (most.max(rank.waited), sum + rank.waited - before);
        }
    }
    let entries = ranks.into_iter().map(|rank| rank.entries).collect();
    Some((entries, weighed(most, sum)))
}

/// The next entry of any rank, W before it being run; none where all ranks are stuck.
fn next(
    p: &Problem,
    order: &Order,
    ranks: &mut [PatternRank],
    arrivals: &[i64],
) -> Option<(usize, usize)> {
    loop {
        let ready = (0..p.ranks).filter(|r| !ranks[*r].stuck);
        let r = ready.min_by_key(|r| ranks[*r].now)?;
        let rank = &mut ranks[r];
        if let Some(phases) = &order.phases {
            while rank.phase + 1 < phases.len()
                && rank.counts.iter().zip(&phases[rank.phase].must).all(|(c, must)| c >= must)
            {
                rank.phase += 1;
            }
        }
        let may = order.phases.as_ref().map(|all| &all[rank.phase].may[..]);
        match choose(p, order, r, rank, arrivals, may) {
            Some((_, start)) if rank.waits_w() && start - rank.now >= order.threshold => {
                rank.run_w(p, r);
            }
            Some((class, _)) => {
                while rank.memory + p.need[r * p.classes + class] > p.memory {
                    if !rank.waits_w() {
                        return None;
                    }
                    rank.run_w(p, r);
                }
                return Some((r, class));
            }
            None if rank.waits_w() => {
                rank.run_w(p, r);
                rank.entries.push(p.classes as u8);
            }
            None => rank.stuck = true,
        }
    }
}

/// The entry to run next and its start.
fn choose(
    p: &Problem,
    order: &Order,
    r: usize,
    rank: &PatternRank,
    arrivals: &[i64],
    may: Option<&[u16]>,
) -> Option<(usize, i64)> {
    let mut best: Option<(f64, usize, i64)> = None;
    for class in 0..p.classes {
        let i = usize::from(rank.counts[class]);
        let at = r * p.classes + class;
        if i >= p.b || may.is_some_and(|may| i >= usize::from(may[class])) {
            continue;
        }
        let arrival = arrivals[at * p.b + i];
        if arrival == i64::MAX {
            continue;
        }
        if class < p.v {
            let spare = order.spare[at * p.b + i];
            if rank.memory - rank.kept + p.need[at] + spare > p.memory {
                continue;
            }
        }
        let wait = (arrival - rank.now).max(0);
        let key = order.keys[at * p.b + i] + order.impatience * wait as f64;
        if best.is_none_or(|(least, ..)| key < least) {
            best = Some((key, class, rank.now + wait));
        }
    }
    best.map(|(_, class, start)| (class, start))
}

impl PatternRank {
    fn waits_w(&self) -> bool {
        self.done_w < self.order.len()
    }

    fn run_w(&mut self, p: &Problem, r: usize) {
        let at = r * p.v + usize::from(self.order[self.done_w]);
        self.done_w += 1;
        self.now += p.w[at];
        self.memory -= p.freed[at];
        self.kept -= p.freed[at];
    }

    /// Waits until `at`.
    fn wait(&mut self, p: &Problem, at: i64) {
        let begun = !self.entries.is_empty() || p.objective == Objective::Makespan;
        self.waited += if begun { (at - self.now).max(0) } else { 0 };
        self.now = self.now.max(at);
    }

    /// Runs an entry; the rank that may have waited for it, and when it has the result.
    fn run(
        &mut self,
        p: &Problem,
        r: usize,
        class: usize,
        arrivals: &mut [i64],
    ) -> Option<(usize, i64)> {
        let at = r * p.classes + class;
        let i = usize::from(self.counts[class]);
        self.wait(p, arrivals[at * p.b + i]);
        self.now += p.take[at];
        self.memory += p.delta[at];
        self.counts[class] += 1;
        self.entries.push(class as u8);
        if class >= p.v {
            self.order.push((class - p.v) as u8);
            self.kept += p.freed[r * p.v + class - p.v];
        }
        let link = p.link[at];
        if link.rank == super::problem::NO_RANK {
            return None;
        }
        arrivals[link.cell as usize + i] = self.now + link.delay;
        Some((link.rank as usize, self.now))
    }
}
