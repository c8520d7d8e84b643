//! Any kind for replicas of which single ranks are missing: their micro-batches take a detour.
//!
//! Ranks at one place of several pipelines have the same stages, so that each of them can compute
//! for all. Where one is missing, its micro-batches are dealt out to the others at its place, and
//! go on in their own pipeline behind that (ReCycle, SOSP 2024). So one schedule has the ranks
//! of all replicas, and its stages have *copies* on several of them.
//!
//! Micro-batch j of replica k is number j·K + k. The order of each rank is a list schedule: by the
//! times that the kind itself has for its actions, or, where that is shorter and takes no more
//! memory on any rank, whatever can run first, with W in the gaps. Backwards that are whole may be
//! split for that.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::costs::Costs;
use super::kinds::{Kind, StepForm};
use super::shape::{ScheduleError, Shape};
use super::timing::{duration, memory_change, time};
use crate::ir::{Action, Compute, Schedule, Task};

/// A rank by its place in the pipeline and its replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReplicaRank {
    /// ReplicaRank in the pipeline, 0..P.
    pub pp: usize,
    /// Replica, 0..K.
    pub replica: usize,
}

/// What another order than the kind's own has to save of the makespan, one part in this many.
const WORTH: u64 = 100;

/// The compute actions of `replicas` pipelines like `plain`, a schedule that a kind of the table
/// makes for `shape`, together, each with the micro-batches of
/// `shape`, without the ranks `missing`. Ranks are numbered through all that are left, replica by
/// replica. Gathers that the kind writes are left out, as `lower` adds them anew, and pairs that
/// overlap run one after the other.
///
/// # Errors
/// Ranks that there are not, or a place that nobody is left at.
///
/// # Panics
/// Panics where `plain` is of no kind.
pub fn around(
    plain: &Schedule,
    shape: &Shape,
    costs: &Costs,
    replicas: usize,
    missing: &[ReplicaRank],
) -> Result<Schedule, ScheduleError> {
    let kind = &plain.kind;
    let row = Kind::find(kind).expect("a schedule of a kind");
    let fail = |field, value, works: &str| {
        Err(ScheduleError::Field { kind: row.name, field, value, works: works.into() })
    };
    if replicas == 0 {
        return fail("dp", 0, "it must be at least 1");
    }
    if plain.is_forward_only() {
        return fail("dp", replicas, "what trains nothing has no replicas");
    }
    let all = Shape { micro_batches: shape.micro_batches.saturating_mul(replicas), ..*shape };
    if all.check(row.name).is_err() {
        let works = "it makes more actions than a schedule may have; make it smaller";
        return fail("dp", replicas, works);
    }
    let hosts = Hosts::new(row.name, shape.pp, replicas, missing)?;
    let routes = hosts.routes(&plain.placement, shape.micro_batches);
    let joint = Joint::new(plain, costs, &routes, replicas);
    let own = joint.run(Choice::OwnOrder, None).expect("what needs another starts after it");
    // Units are there for few gathers, which another order would have more of.
    let found = match row.step {
        _ if missing.is_empty() => None,
        StepForm::Units => None,
        StepForm::Whole | StepForm::Rounds => {
            let split = Joint::new(&split(plain), costs, &routes, replicas);
            let all = [&joint, &split].into_iter().flat_map(|joint| {
                let choices = [Choice::First, Choice::WeightsLast].into_iter();
                choices.filter_map(|choice| joint.run(choice, Some(&own.peaks)))
            });
            all.min_by_key(|order| order.makespan)
        }
    };
    let worth = own.makespan - own.makespan / WORTH;
    let best = found.filter(|order| order.makespan < worth).unwrap_or(own);
    let gone: Vec<_> = missing.iter().map(|at| format!("({}, {})", at.pp, at.replica)).collect();
    Ok(Schedule {
        kind: match gone.is_empty() {
            true => format!("{kind} x {replicas}"),
            false => format!("{kind} x {replicas} around {}", gone.join(", ")),
        },
        placement: routes[0].clone(),
        units: plain.units.iter().map(|unit| unit * replicas).collect(),
        routes,
        ranks: best.ranks,
    })
}

/// The same with every backward in two halves, so that W can wait for a gap: ReCycle's
/// decoupled backward.
fn split(plain: &Schedule) -> Schedule {
    let halves = |action: &Action| -> Vec<Action> {
        let of = |task: Task| match task.kind {
            Compute::BW => vec![
                Task { kind: Compute::B, ..task }.into(),
                Task { kind: Compute::W, ..task }.into(),
            ],
            _ => vec![task.into()],
        };
        action.computes().flat_map(of).collect()
    };
    let ranks = plain.ranks.iter().map(|actions| actions.iter().flat_map(halves).collect());
    Schedule { ranks: ranks.collect(), ..plain.clone() }
}

/// Who computes for whom.
struct Hosts {
    pp: usize,
    replicas: usize,
    /// The number of each rank by replica and place; none where it is missing.
    number: Vec<Option<usize>>,
}

impl Hosts {
    fn new(
        kind: &'static str,
        pp: usize,
        replicas: usize,
        missing: &[ReplicaRank],
    ) -> Result<Hosts, ScheduleError> {
        let fail = |field: &'static str, value: usize, works: String| {
            Err(ScheduleError::Field { kind, field, value, works })
        };
        let mut here = vec![true; pp * replicas];
        for at in missing {
            if at.pp >= pp {
                return fail("missing rank's place", at.pp, format!("places are 0..{pp}"));
            }
            if at.replica >= replicas {
                let works = format!("replicas are 0..{replicas}");
                return fail("missing rank's replica", at.replica, works);
            }
            here[at.replica * pp + at.pp] = false;
        }
        if let Some(place) = (0..pp).find(|p| (0..replicas).all(|k| !here[k * pp + p])) {
            let works = "one rank of each place must be left, to compute for the others".into();
            return fail("missing rank's place", place, works);
        }
        let mut next = 0..;
        let number = here.iter().map(|here| if *here { next.next() } else { None }).collect();
        Ok(Hosts { pp, replicas, number })
    }

    /// For each micro-batch the rank of every stage. Those of a missing rank are dealt out to the
    /// others at its place one by one.
    fn routes(&self, placement: &[usize], micro_batches: usize) -> Vec<Vec<usize>> {
        let at = |replica: usize, place: usize| self.number[replica * self.pp + place];
        let left = |place: usize| (0..self.replicas).filter_map(|k| at(k, place)).collect();
        let hosts: Vec<Vec<usize>> = (0..self.pp).map(left).collect();
        let mut dealt = vec![0; self.pp];
        let mut route = |micro_batch: usize| -> Vec<usize> {
            let mut ranks = Vec::with_capacity(self.pp);
            for (place, hosts) in hosts.iter().enumerate() {
                ranks.push(at(micro_batch % self.replicas, place).unwrap_or_else(|| {
                    dealt[place] += 1;
                    hosts[(dealt[place] - 1) % hosts.len()]
                }));
            }
            placement.iter().map(|place| ranks[*place]).collect()
        };
        (0..micro_batches * self.replicas).map(&mut route).collect()
    }
}

/// Which of a rank's actions runs next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choice {
    /// The next one by the kind's own times, whether or not it can run yet.
    OwnOrder,
    /// The first by these times of those that can run.
    First,
    /// The same, with W where nothing else can.
    WeightsLast,
}

/// An order of every rank.
#[derive(Clone)]
struct Order {
    ranks: Vec<Vec<Action>>,
    makespan: u64,
    /// The most memory of each rank, in the unit of the costs.
    peaks: Vec<i64>,
}

/// The order of an action among others: when the kind itself would start it, how far its
/// micro-batch has come by then, and the micro-batch.
type Key = (u64, usize, usize);

struct Item {
    task: Task,
    rank: usize,
    key: Key,
    /// How many others it needs.
    needs: usize,
    /// Those that need it.
    needed_by: Vec<usize>,
}

/// All computes of all replicas, and which of them need which.
struct Joint<'a> {
    costs: &'a Costs,
    ranks: usize,
    items: Vec<Item>,
}

impl<'a> Joint<'a> {
    fn new(
        plain: &Schedule,
        costs: &'a Costs,
        routes: &[Vec<usize>],
        replicas: usize,
    ) -> Joint<'a> {
        let (stages, each) = (plain.stages(), plain.micro_batches());
        let timing = time(&plain.ranks, &plain.placement, each, costs);
        let timing = timing.expect("generated schedules run through");
        let mut items = Vec::new();
        for (actions, spans) in plain.ranks.iter().zip(&timing.spans) {
            for (action, (start, _)) in actions.iter().zip(spans) {
                for task in action.computes().filter(|task| task.kind != Compute::R) {
                    for replica in 0..replicas {
                        let micro_batch = task.micro_batch * replicas + replica;
                        items.push(Item {
                            task: Task { micro_batch, ..task },
                            rank: routes[micro_batch][task.stage],
                            key: (*start, depth(task, stages), micro_batch),
                            needs: 0,
                            needed_by: Vec::new(),
                        });
                    }
                }
            }
        }
        items.sort_by_key(|item| item.key);
        let ranks = routes.iter().flatten().max().map_or(0, |last| last + 1);
        let mut joint = Joint { costs, ranks, items };
        joint.connect(stages, each * replicas);
        joint
    }

    /// Enters what each item needs: its own micro-batch's way through the stages, and on each copy
    /// of a stage W in micro-batch order, as the last stage's F, which is part of a sum, too.
    fn connect(&mut self, stages: usize, micro_batches: usize) {
        let slot = |kind: Compute, stage: usize, micro_batch: usize| {
            let of = match kind {
                Compute::F | Compute::R => 0,
                Compute::B | Compute::BW => 1,
                Compute::W => 2,
            };
            (of * stages + stage) * micro_batches + micro_batch
        };
        let mut at = vec![usize::MAX; 3 * stages * micro_batches];
        for (index, Item { task, .. }) in self.items.iter().enumerate() {
            at[slot(task.kind, task.stage, task.micro_batch)] = index;
        }
        let mut pairs = Vec::new();
        for Item { task: Task { kind, stage, micro_batch: m }, .. } in &self.items {
            let own = at[slot(*kind, *stage, *m)];
            let mut needs = |kind: Compute, stage: usize| {
                pairs.push((at[slot(kind, stage, *m)], own));
            };
            match kind {
                Compute::F if *stage > 0 => needs(Compute::F, stage - 1),
                Compute::F | Compute::R => {}
                Compute::W => needs(Compute::B, *stage),
                Compute::B | Compute::BW => {
                    needs(Compute::F, *stage);
                    if stage + 1 < stages {
                        needs(Compute::B, stage + 1);
                    }
                }
            }
        }
        let mut last = vec![usize::MAX; 2 * stages * self.ranks];
        let sums = (0..micro_batches).flat_map(|m| (0..stages).map(move |stage| (m, stage)));
        for (m, stage) in sums {
            let backward = at[slot(Compute::B, stage, m)];
            let whole = self.items[backward].task.kind == Compute::BW;
            let adds = if whole { backward } else { at[slot(Compute::W, stage, m)] };
            let head = (stage + 1 == stages).then(|| (1, at[slot(Compute::F, stage, m)]));
            for (which, index) in [(0, adds)].into_iter().chain(head) {
                let copy = (which * stages + stage) * self.ranks + self.items[index].rank;
                match std::mem::replace(&mut last[copy], index) {
                    usize::MAX => {}
                    before => pairs.push((before, index)),
                }
            }
        }
        for (before, after) in pairs {
            self.items[before].needed_by.push(after);
            self.items[after].needs += 1;
        }
    }

    /// Runs all items on their ranks; none where a rank would take more than `most` of memory
    /// otherwise.
    fn run(&self, choice: Choice, most: Option<&[i64]>) -> Option<Order> {
        let mut run = Run::new(self, choice, most);
        while let Some(Reverse((now, rank))) = run.wakes.pop() {
            if run.free[rank] <= now {
                run.start_one(rank, now);
            }
        }
        let all = run.order.ranks.iter().map(Vec::len).sum::<usize>() == self.items.len();
        all.then_some(run.order)
    }
}

/// How far a micro-batch has come when this task of it runs.
fn depth(Task { kind, stage, .. }: Task, stages: usize) -> usize {
    match kind {
        Compute::F | Compute::R => stage,
        Compute::B | Compute::BW => 2 * stages - stage,
        Compute::W => 2 * stages + 1,
    }
}

/// One walk through all items.
struct Run<'a> {
    joint: &'a Joint<'a>,
    choice: Choice,
    most: Option<&'a [i64]>,
    /// Moments at which a rank may find something to run.
    wakes: BinaryHeap<Reverse<(u64, usize)>>,
    /// When each rank is free.
    free: Vec<u64>,
    /// What each item still waits for, and when the rest of it is there.
    waits: Vec<(usize, u64)>,
    /// Items of each rank that wait for nothing but their time; with [`Choice::OwnOrder`] all that
    /// have not run, the next one last.
    ready: Vec<Vec<usize>>,
    memory: Vec<i64>,
    order: Order,
}

impl<'a> Run<'a> {
    fn new(joint: &'a Joint, choice: Choice, most: Option<&'a [i64]>) -> Run<'a> {
        let Joint { ranks, items, .. } = joint;
        let mut ready = vec![Vec::new(); *ranks];
        for (index, item) in items.iter().enumerate().rev() {
            if choice == Choice::OwnOrder || item.needs == 0 {
                ready[item.rank].push(index);
            }
        }
        Run {
            joint,
            choice,
            most,
            wakes: (0..*ranks).map(|rank| Reverse((0, rank))).collect(),
            free: vec![0; *ranks],
            waits: items.iter().map(|item| (item.needs, 0)).collect(),
            ready,
            memory: vec![0; *ranks],
            order: Order { ranks: vec![Vec::new(); *ranks], makespan: 0, peaks: vec![0; *ranks] },
        }
    }

    /// Runs what `rank` runs next, if it can run anything `now`.
    fn start_one(&mut self, rank: usize, now: u64) {
        let Some(at) = self.next(rank, now) else { return };
        let index = self.ready[rank].remove(at);
        let (joint, costs) = (self.joint, self.joint.costs);
        let Item { task, needed_by, .. } = &joint.items[index];
        let end = now + duration(costs, task.kind, task.stage);
        self.order.ranks[rank].push((*task).into());
        self.memory[rank] += memory_change(costs, task.kind, task.stage);
        self.order.peaks[rank] = self.order.peaks[rank].max(self.memory[rank]);
        self.order.makespan = self.order.makespan.max(end);
        self.free[rank] = end;
        self.wakes.push(Reverse((end, rank)));
        for other in needed_by {
            let to = joint.items[*other].rank;
            let there = if to == rank { end } else { end + costs.send };
            let (waits, ready) = &mut self.waits[*other];
            (*waits, *ready) = (*waits - 1, (*ready).max(there));
            if *waits == 0 {
                self.wakes.push(Reverse((*ready, to)));
                if self.choice != Choice::OwnOrder {
                    self.ready[to].push(*other);
                }
            }
        }
    }

    /// Where in `ready` the next item of `rank` is.
    fn next(&self, rank: usize, now: u64) -> Option<usize> {
        let items = &self.joint.items;
        let is_there = |index: usize| self.waits[index].0 == 0 && self.waits[index].1 <= now;
        if self.choice == Choice::OwnOrder {
            let last = self.ready[rank].len().checked_sub(1)?;
            return is_there(self.ready[rank][last]).then_some(last);
        }
        let room = self.most.map_or(i64::MAX, |most| most[rank] - self.memory[rank]);
        let can = |index: usize| {
            let Task { kind, stage, .. } = items[index].task;
            is_there(index) && memory_change(self.joint.costs, kind, stage) <= room.max(0)
        };
        let all = self.ready[rank].iter().enumerate().filter(|(_, index)| can(**index));
        let last = |index: usize| {
            self.choice == Choice::WeightsLast && items[index].task.kind == Compute::W
        };
        let first = all.min_by_key(|(_, index)| (last(**index), items[**index].key));
        first.map(|(at, _)| at)
    }
}

#[cfg(test)]
mod tests;
