//! The automatic zero-bubble schedule for any memory limit (Zero Bubble, section 3.1).
//!
//! One stage a rank. The heuristic fills the memory with forwards before the first B, then takes
//! rounds of one F and one B a stage and puts W where a stage would wait, where memory runs out, or
//! where the wait would set a new record. Three switches turn its doubtful choices on and off; of
//! the eight runs the best one is kept: with the smallest largest own span (first F to last W), as
//! in the paper, or the smallest makespan where a barrier ends the step.

use super::costs::{Objective, OrderCosts};
use super::timing::best_within;
use super::{ScheduleError, Shape, zb_h};
use crate::ir::{Action, Compute, Schedule, looping};

/// The doubtful choices of the heuristic.
#[derive(Clone, Copy, Debug)]
struct Switches {
    /// Warm up only with forwards that end before the first B can start.
    whole_warm_up: bool,
    /// Skip a forward where the next stage is two behind and a B could come sooner.
    prefer_b: bool,
    /// Fill a gap shorter than W even where the stage has waited less than others.
    fill_short_gaps: bool,
}

/// One stage's progress. Counters are the next micro-batch of each kind.
#[derive(Clone, Debug, Default)]
struct StageProgress {
    f: usize,
    b: usize,
    w: usize,
    /// When its last action ends.
    now: u64,
    /// Activation memory held.
    memory: i64,
    /// Time waited since its first F.
    bubble: u64,
    /// When its first F starts.
    start: u64,
    /// Ends of its F and B.
    ends_f: Vec<u64>,
    ends_b: Vec<u64>,
    order: Vec<Action>,
}

struct OrderBuilder<'a> {
    costs: &'a OrderCosts,
    limit: i64,
    m: usize,
    switches: Switches,
    stages: Vec<StageProgress>,
    /// The largest bubble of any stage.
    bubble_max: u64,
}

/// What no order of one stage can avoid: memory for a first F (where W has freed all before).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct NoMemory;

/// The automatic schedule `kind` within the costs' limit, or else within the memory of `fold` · P
/// micro-batches of the stage that holds most: 1F1B's with a fold of 1. Where an order by hand
/// (ZB-H1, ZB-H2), or the automatic one of less memory, keeps the limit and is better, it is that.
pub(super) fn within(
    kind: &'static str,
    shape: &Shape,
    costs: Option<&OrderCosts>,
    fold: usize,
) -> Result<Schedule, ScheduleError> {
    let equal = || OrderCosts::uniform(shape.stages(), 1, 1, 1, 0);
    let costs = costs.cloned().unwrap_or_else(equal);
    let most = costs.mem_f.iter().max().copied().unwrap_or(0);
    let named_after = most.saturating_mul((fold * shape.pp) as i64);
    let limit = costs.mem_limit.unwrap_or(named_after);
    let searched = zb(kind, shape, &costs.clone().with_limit(limit))?;
    let less = (1..fold).map(|fold| most.saturating_mul((fold * shape.pp) as i64).min(limit));
    let less = less.filter_map(|less| zb(kind, shape, &costs.clone().with_limit(less)).ok());
    let by_hand = (1..=fold).filter_map(|depth| zb_h::generate(kind, shape, depth).ok());
    let all = std::iter::once(searched.clone()).chain(less).chain(by_hand).collect();
    Ok(best_within(all, &costs, limit).unwrap_or(searched))
}

/// The heuristic for `costs` with their memory limit (none means no limit); V must be 1, one unit
/// of B. `kind` is the name the schedule gets and errors carry.
///
/// # Errors
/// A shape with more than one stage a rank, costs that are not one a stage, a memory limit that
/// does not hold one F.
pub fn zb(
    kind: &'static str,
    shape: &Shape,
    costs: &OrderCosts,
) -> Result<Schedule, ScheduleError> {
    shape.one_stage_a_rank(kind, "`interleaved-zb`, or `zb-v` with two")?;
    costs.check(kind, shape.pp)?;
    let best = best_run(shape, costs).map_err(|NoMemory| ScheduleError::Field {
        kind,
        field: "mem_limit",
        value: costs.mem_limit.unwrap_or(0).max(0) as usize,
        works: format!(
            "it must hold the activations of one micro-batch, {}",
            costs.mem_f.iter().max().unwrap_or(&0)
        ),
    })?;
    Ok(Schedule {
        kind: kind.into(),
        placement: looping(shape.pp, 1),
        units: vec![shape.micro_batches],
        ranks: best.into_iter().map(|s| s.order).collect(),
        ..Schedule::default()
    })
}

fn best_run(shape: &Shape, costs: &OrderCosts) -> Result<Vec<StageProgress>, NoMemory> {
    let mut best: Option<((u64, u64), Vec<StageProgress>)> = None;
    for bits in 0..8 {
        let on = |bit: u32| bits >> bit & 1 == 0;
        let switches = Switches { whole_warm_up: on(2), prefer_b: on(1), fill_short_gaps: on(0) };
        let Ok(stages) = OrderBuilder::new(shape, costs, switches).finish() else { continue };
        let span = stages.iter().map(|s| s.now - s.start).max().unwrap_or(0);
        let makespan = stages.iter().map(|s| s.now).max().unwrap_or(0);
        let rank = match costs.objective {
            Objective::Makespan => (makespan, span),
            // The paper's choice, the first of equals.
            Objective::OwnSpan => (span, 0),
        };
        if best.as_ref().is_none_or(|(least, _)| rank < *least) {
            best = Some((rank, stages));
        }
    }
    best.map(|(_, stages)| stages).ok_or(NoMemory)
}

impl<'a> OrderBuilder<'a> {
    fn new(shape: &Shape, costs: &'a OrderCosts, switches: Switches) -> OrderBuilder<'a> {
        let m = shape.micro_batches;
        let stage = StageProgress {
            ends_f: Vec::with_capacity(m),
            ends_b: Vec::with_capacity(m),
            order: Vec::with_capacity(3 * m),
            ..StageProgress::default()
        };
        let limit = costs.mem_limit.unwrap_or(i64::MAX);
        OrderBuilder { costs, limit, m, switches, stages: vec![stage; shape.pp], bubble_max: 0 }
    }

    fn finish(mut self) -> Result<Vec<StageProgress>, NoMemory> {
        self.warm_up()?;
        for _ in 1..self.m {
            let wanted = self.forwards_of_round();
            for (j, f) in wanted.into_iter().enumerate() {
                if f {
                    self.make_room(j, self.costs.mem_f[j])?;
                    self.fill_gap(j, self.arrival_f(j));
                    self.put_f(j);
                }
            }
            for j in (0..self.stages.len()).rev() {
                self.make_room(j, self.costs.mem_b[j])?;
                self.fill_gap(j, self.arrival_b(j));
                if j == 0 && self.stages[0].f == self.m {
                    self.put_waiting_w(0);
                }
                self.put_b(j);
            }
        }
        (0..self.stages.len()).for_each(|j| self.put_waiting_w(j));
        Ok(self.stages)
    }

    /// The first F everywhere, more F while they fit before the first B, the first B everywhere.
    fn warm_up(&mut self) -> Result<(), NoMemory> {
        let p = self.stages.len();
        for j in 0..p {
            if self.costs.mem_f[j] > self.limit {
                return Err(NoMemory);
            }
            self.put_f(j);
        }
        let more = self.warm_up_forwards();
        for (j, n) in more.into_iter().enumerate() {
            (0..n).for_each(|_| self.put_f(j));
        }
        (0..p).rev().for_each(|j| self.put_b(j));
        Ok(())
    }

    /// Forwards of each stage between its first F and its first B.
    fn warm_up_forwards(&self) -> Vec<usize> {
        let p = self.stages.len();
        let mut more = vec![0; p];
        let mut first_b = self.stages[p - 1].now + self.costs.b[p - 1];
        for j in (0..p - 1).rev() {
            let arrival = first_b + self.costs.send;
            let (f, mem_f) = (self.costs.f[j], self.costs.mem_f[j]);
            let (mut memory, mut now) = (self.stages[j].memory, self.stages[j].now);
            let whole = self.switches.whole_warm_up;
            let in_time = |now| if whole { now + f <= arrival } else { now < arrival };
            while 1 + more[j] < self.m && memory + mem_f <= self.limit && in_time(now) {
                memory += mem_f;
                now += f;
                more[j] += 1;
            }
            first_b = now.max(arrival) + self.costs.b[j];
        }
        // A stage cannot use more forwards than the one before sends it, and should use fewer
        // unless there are no more to come.
        for j in 1..p {
            let before: usize = more[j - 1];
            let all = more[j] + 1 == self.m;
            more[j] = more[j].min(if all { before } else { before.saturating_sub(1) });
        }
        more
    }

    /// Which stages run an F in this round.
    fn forwards_of_round(&self) -> Vec<bool> {
        let mut wanted: Vec<bool> = (0..self.stages.len()).map(|j| self.wants_f(j)).collect();
        // A forward that the next stage does not take up is better done later. (A stage that has
        // none left stops none: those before it have none left either.)
        for j in (1..wanted.len()).rev() {
            wanted[j - 1] &= wanted[j];
        }
        wanted
    }

    fn wants_f(&self, j: usize) -> bool {
        let stage = &self.stages[j];
        if stage.f >= self.m {
            return false;
        }
        let Some(next) = self.stages.get(j + 1) else { return true };
        if !self.switches.prefer_b || stage.f < next.f + 2 {
            return true;
        }
        let costs = self.costs;
        let next_b = next.now + costs.f[j + 1] + costs.b[j + 1] + costs.send;
        if stage.now >= next_b {
            return false;
        }
        if stage.now + costs.f[j] + self.time_to_free(j, costs.mem_f[j]) <= next_b {
            return true;
        }
        next_b - stage.now > self.bubble_max - stage.bubble
    }

    /// How long the W take that must run before `more` memory fits, as far as there are any.
    fn time_to_free(&self, j: usize, more: i64) -> u64 {
        let stage = &self.stages[j];
        let (mut memory, mut takes) = (stage.memory + more, 0);
        for _ in stage.w..stage.b {
            if memory <= self.limit {
                break;
            }
            memory += self.costs.mem_w[j];
            takes += self.costs.w[j];
        }
        takes
    }

    /// Runs W until `more` memory fits.
    fn make_room(&mut self, j: usize, more: i64) -> Result<(), NoMemory> {
        while self.stages[j].memory + more > self.limit {
            if self.stages[j].w >= self.stages[j].b {
                return Err(NoMemory);
            }
            self.put_w(j);
        }
        Ok(())
    }

    /// Runs W while stage `j` waits for an input that arrives at `arrival`.
    fn fill_gap(&mut self, j: usize, arrival: u64) {
        let w = self.costs.w[j];
        while self.stages[j].w < self.stages[j].b && self.stages[j].now + w <= arrival {
            self.put_w(j);
        }
        let stage = &self.stages[j];
        if stage.w < stage.b && stage.now < arrival {
            let record = arrival - stage.now > self.bubble_max - stage.bubble;
            if record || self.switches.fill_short_gaps {
                self.put_w(j);
            }
        }
    }

    fn put_waiting_w(&mut self, j: usize) {
        while self.stages[j].w < self.stages[j].b {
            self.put_w(j);
        }
    }

    /// When the input of stage `j`'s next F is there.
    fn arrival_f(&self, j: usize) -> u64 {
        let before = j.checked_sub(1).map(|i| &self.stages[i]);
        before.map_or(0, |s| s.ends_f[self.stages[j].f] + self.costs.send)
    }

    /// When the input of stage `j`'s next B is there.
    fn arrival_b(&self, j: usize) -> u64 {
        let next = self.stages.get(j + 1);
        next.map_or(0, |s| s.ends_b[self.stages[j].b] + self.costs.send)
    }

    fn put_f(&mut self, j: usize) {
        let i = self.stages[j].f;
        let end = self.put(j, Compute::F, i, self.arrival_f(j), self.costs.f[j]);
        let stage = &mut self.stages[j];
        if i == 0 {
            stage.start = end - self.costs.f[j];
        }
        stage.f += 1;
        stage.memory += self.costs.mem_f[j];
        stage.ends_f.push(end);
    }

    fn put_b(&mut self, j: usize) {
        let i = self.stages[j].b;
        let end = self.put(j, Compute::B, i, self.arrival_b(j), self.costs.b[j]);
        let stage = &mut self.stages[j];
        stage.b += 1;
        stage.memory += self.costs.mem_b[j];
        stage.ends_b.push(end);
    }

    fn put_w(&mut self, j: usize) {
        let i = self.stages[j].w;
        self.put(j, Compute::W, i, 0, self.costs.w[j]);
        self.stages[j].w += 1;
        self.stages[j].memory += self.costs.mem_w[j];
    }

    fn put(&mut self, j: usize, kind: Compute, i: usize, arrival: u64, takes: u64) -> u64 {
        let stage = &mut self.stages[j];
        let start = stage.now.max(arrival);
        if stage.f > 0 {
            stage.bubble += start - stage.now;
            self.bubble_max = self.bubble_max.max(stage.bubble);
        }
        stage.now = start + takes;
        stage.order.push(Action::compute(kind, j, i));
        stage.now
    }
}
