//! One rank of an emulated run.

use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use zeropp_comm::groups::Groups;
use zeropp_comm::mesh::Mesh;
use zeropp_comm::{CommResult, Communicator};
use zeropp_core::meter::Meter;
use zeropp_pipeline::executor::emulated::{EmulatedClock, EmulatedLinks, EmulatedWorker, Spent};
use zeropp_pipeline::executor::{Executor, Instruments, StatusBoard};
use zeropp_pipeline::head::HeadTree;
use zeropp_pipeline::ir::Schedule;
use zeropp_pipeline::simulate::Costs;
use zeropp_pipeline::timeline::{Computed, RankTimeline, Span, bubble};
use zeropp_plan::programs::Programs;

use super::{EmulatedStep, KEPT_STEPS};
use crate::error::RankError;
use crate::plan::reschedule::Exchangeable;
use crate::run::collect::{self, Gathering};
use crate::run::reschedule::{EndedStep, Offered, RankNote, Rescheduling};

/// Between the moment all ranks know the next start and the start.
const LEAD_NS: u64 = 5_000_000;

/// The state that all ranks share.
pub(super) struct EmulationShared {
    pub(super) steps: u64,
    pub(super) mesh: Mesh,
    pub(super) programs: Arc<Programs>,
    pub(super) costs: Arc<Costs>,
    /// From this step on actions take these times.
    pub(super) later: Option<(u64, Arc<Costs>)>,
    /// Where programs are exchanged.
    pub(super) exchangeable: Option<Exchangeable>,
    pub(super) offered: Offered,
    pub(super) status: Arc<StatusBoard>,
    pub(super) epoch: Instant,
}

impl EmulationShared {
    /// Gives the rank the times that actions take from `step` on, where they change there.
    fn change(&self, executor: &mut Executor<EmulatedWorker>, step: u64) {
        if let Some((_, costs)) = self.later.as_ref().filter(|(from, _)| *from == step) {
            executor.worker.set_costs(costs.clone());
        }
    }
}

/// What a rank leaves behind.
#[derive(Default)]
pub(super) struct RankSteps {
    /// The first step of `kept`.
    pub(super) first: u64,
    /// Its spans in each of the first steps of the last program, from the step's start.
    pub(super) kept: Vec<Vec<Span>>,
    /// That program, where it is not the planned one.
    pub(super) exchanged: Option<Arc<Schedule>>,
    /// What the exchanges took of the rank's time, and searches of a core's.
    pub(super) exchanging_ns: u64,
}

/// One rank's figures of a step, which go to rank 0 at its end.
#[derive(Serialize, Deserialize)]
struct EmulatedRankStep {
    end_ns: u64,
    step_ns: u64,
    computed: Computed,
    actions: u64,
    own_ns: u64,
    late_ns: u64,
    waits: u64,
    program: u64,
    reschedule: Option<RankNote>,
}

/// Runs all steps on one rank; on rank 0 `see` gets each of them.
pub(super) fn run_rank(
    shared: &EmulationShared,
    world: Arc<dyn Communicator>,
    mut see: impl FnMut(EmulatedStep),
) -> Result<RankSteps, RankError> {
    let groups = Groups::new(world.clone(), shared.mesh)?;
    let clock = EmulatedClock::new(shared.epoch);
    let mut executor = build(shared, &groups, &clock);
    let late = shared.programs.most.validates_late();
    let mut rescheduling = rescheduling(shared, world.rank());
    let mut end = RankSteps { first: 1, ..RankSteps::default() };
    let (mut start, mut end_before) = (0, None::<u64>);
    let mut under_way: Option<(u64, Gathering<EmulatedRankStep>)> = None;
    let mut reported = |step: u64, figures: Gathering<EmulatedRankStep>| {
        let all = figures.wait()?;
        if world.rank() == 0 {
            see(summarise(step, &all, end_before.filter(|_| late)));
            end_before = all.iter().map(|r| r.end_ns).max();
        }
        CommResult::Ok(all)
    };
    for step in 1..=shared.steps {
        shared.change(&mut executor, step);
        // Where no barrier ends a step, the next one begins at once.
        if step == 1 || !late {
            start = common_start(&*world, &clock)?;
        }
        let (begin, before) = (clock.now(), clock.spent());
        let mut spans = executor.run_step(step).map_err(RankError::Step)?.spans;
        let ended = clock.now();
        let real_end = shared.epoch.elapsed().as_nanos() as u64;
        let since = Instant::now();
        let note = rescheduling.as_ref().map(|r| r.note(&spans, |ns| ns));
        if note.is_some() {
            end.exchanging_ns += since.elapsed().as_nanos() as u64;
        }
        for span in &mut spans {
            span.start_ns = span.start_ns.saturating_sub(start);
            span.end_ns = span.end_ns.saturating_sub(start);
        }
        let timeline = RankTimeline { spans, ..RankTimeline::default() };
        let of_rank = [ended - begin, real_end - start];
        let mut mine = figures(&timeline, of_rank, before, clock.spent());
        (mine.program, mine.reschedule) =
            (rescheduling.as_ref().map_or(0, |r| r.running().number), note);
        // What the others said of the step before has long come.
        if let Some((step, figures)) = under_way.take() {
            reported(step, figures)?;
        }
        let figures = collect::start(&*world, &mine);
        if end.kept.len() < KEPT_STEPS {
            end.kept.push(timeline.spans);
        }
        if late && step < shared.steps {
            under_way = Some((step, figures));
            continue;
        }
        let all = reported(step, figures)?;
        if let Some(rescheduling) = rescheduling.as_mut().filter(|_| step < shared.steps)
            && let Some(program) = exchange(rescheduling, &*world, step, all, &mut end)?
        {
            executor.exchange(&program);
            (end.first, end.exchanged) = (step + 1, Some(program));
            end.kept.clear();
        }
    }
    executor.settle(shared.steps).map_err(RankError::Step)?;
    end.exchanging_ns += rescheduling.as_ref().map_or(0, Rescheduling::searched_ns);
    Ok(end)
}

fn rescheduling(shared: &EmulationShared, rank: usize) -> Option<Rescheduling> {
    let here: Vec<usize> = (0..shared.mesh.world()).collect();
    let exchangeable = shared.exchangeable.clone();
    Rescheduling::new(exchangeable, &shared.offered, rank, &here, Vec::new())
}

/// Does what rank 0 orders after a step of which ranks say this; the program that runs from now on,
/// where it is another.
fn exchange(
    rescheduling: &mut Rescheduling,
    world: &dyn Communicator,
    step: u64,
    all: Vec<EmulatedRankStep>,
    end: &mut RankSteps,
) -> CommResult<Option<Arc<Schedule>>> {
    let since = Instant::now();
    let mut words = Vec::new();
    if world.rank() == 0 {
        let took_ns = all.iter().map(|rank| rank.step_ns).max().unwrap_or(0);
        let notes = all.into_iter().filter_map(|rank| rank.reschedule).collect();
        let ended = EndedStep { step, seconds: took_ns as f64 / 1e9, saving: false };
        words = rescheduling.decide(ended, notes).0.words;
    }
    end.exchanging_ns += since.elapsed().as_nanos() as u64;
    let words = world.exchange(words).wait()?;
    let since = Instant::now();
    let (exchanged, _) = rescheduling.follow(&words[0]);
    end.exchanging_ns += since.elapsed().as_nanos() as u64;
    Ok(exchanged.map(|exchanged| exchanged.program))
}

fn build(
    shared: &EmulationShared,
    groups: &Groups,
    clock: &Arc<EmulatedClock>,
) -> Executor<EmulatedWorker> {
    let program = shared.programs.of(groups.coords.dp);
    let (costs, head) = (&shared.costs, HeadTree::of(program));
    let worker =
        EmulatedWorker::new(costs.clone(), clock.clone(), groups.clone(), program, head.as_ref());
    let slices = program.slices_per_sample();
    let (inner, clock) = (groups.pipeline.clone(), clock.clone());
    let links = EmulatedLinks::new(inner, costs.clone(), clock, head, slices);
    Executor::new(
        program,
        Arc::new(links),
        groups.world.rank(),
        Instruments { meter: Meter::new(), status: shared.status.clone(), epoch: shared.epoch },
        worker,
    )
}

/// Agrees on a moment soon to come, and waits for it.
fn common_start(world: &dyn Communicator, clock: &EmulatedClock) -> CommResult<u64> {
    let all = world.exchange(clock.now().to_le_bytes().to_vec()).wait()?;
    let time = |bytes: &Vec<u8>| bytes[..].try_into().map(u64::from_le_bytes).unwrap_or(0);
    let last = all.iter().map(time).max().unwrap_or(0);
    clock.wait_until(last + LEAD_NS);
    Ok(last + LEAD_NS)
}

/// The figures of a step that took the rank so long by its own time, and ended so long after its
/// start by the real one.
fn figures(
    timeline: &RankTimeline,
    [took, step_ns]: [u64; 2],
    before: Spent,
    after: Spent,
) -> EmulatedRankStep {
    EmulatedRankStep {
        end_ns: timeline.own_span().map_or(0, |(_, end)| end),
        step_ns,
        computed: Computed::of(&timeline.spans).unwrap_or_default(),
        actions: timeline.spans.len() as u64,
        own_ns: took.saturating_sub(after.waited_ns - before.waited_ns),
        late_ns: after.late_ns - before.late_ns,
        waits: after.waits - before.waits,
        program: 0,
        reschedule: None,
    }
}

/// A step of all ranks. Where it did not wait for the one before, that had `end_before`.
fn summarise(step: u64, ranks: &[EmulatedRankStep], end_before: Option<u64>) -> EmulatedStep {
    let sum = |f: fn(&EmulatedRankStep) -> u64| ranks.iter().map(f).sum::<u64>();
    let most = |f: fn(&EmulatedRankStep) -> u64| ranks.iter().map(f).max().unwrap_or(0);
    let end = most(|r| r.end_ns);
    let began = ranks.iter().map(|r| r.computed.start_ns).min().unwrap_or(0);
    // One after the other without a meeting, steps overlap: each takes what it adds.
    let (makespan_ns, step_ns) = match end_before {
        Some(before) => (end.saturating_sub(began), end - before),
        None => (end, most(|r| r.step_ns)),
    };
    EmulatedStep {
        step,
        makespan_ns,
        step_ns,
        bubble: bubble(&ranks.iter().map(|r| r.computed).collect::<Vec<_>>()),
        runtime_ns: sum(|r| r.own_ns) / sum(|r| r.actions).max(1),
        late_ns: sum(|r| r.late_ns) / sum(|r| r.waits).max(1),
        program: most(|r| r.program),
    }
}
