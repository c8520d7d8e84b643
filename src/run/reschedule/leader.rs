//! Rank 0's part of the exchanges of a run: it puts the times of all ranks together, has a better
//! program searched for, and asks the [`Rescheduler`] what follows.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use tracing::debug;
use zeropp_checkpoint::reschedule::{
    ExchangeOrder, ExchangeRules, Follows, OtherStages, Predicted, Reply, Rescheduler, StepSeen,
};
use zeropp_pipeline::costs::measured;
use zeropp_pipeline::ir::{Action, Schedule};
use zeropp_pipeline::simulate::Costs;
use zeropp_pipeline::timeline::Span;
use zeropp_plan::reschedule::{Better, Effort};

use super::background::{self, Limit};
use super::note::{EndedStep, RankNote};
use crate::plan::recut;
use crate::plan::reschedule::Exchangeable;
use crate::run::trace;

/// The share of a run's time that all searches together may take of a core.
const SEARCH_SHARE: f64 = 0.01;
/// What of the rest of it one search may take, so that those after it have some, too: a rank may
/// become slower at any time. Beside busy ranks a second of a core does a third of its work.
const SEARCH_PART: f64 = 0.4;
/// The least with which one begins, and the most that one may take, in seconds.
const SEARCH_S: (f64, f64) = (0.005, 10.0);
/// The most that a step with other stages takes of one with a better order.
const RECUT_GAIN: f64 = 0.98;
/// The least that one may take in a run that exchanges whatever it gains, in seconds.
const ALWAYS_S: f64 = 0.02;
/// Forwards and backwards that the search for kind `auto` times in a second, at least.
const TIMED_PER_S: f64 = 5e6;
/// The part of its time that the first one of these searches may take then.
const FIRST_SEARCH: f64 = 0.25;

/// Rank 0's part.
pub(super) struct Leader {
    machine: Rescheduler,
    rules: ExchangeRules,
    always: bool,
    begun: Instant,
    /// Cores of its process that are not bound to rank 0, where threads are bound.
    beside: Vec<usize>,
    /// Nanoseconds of a core that searches took.
    spent: Arc<AtomicU64>,
    /// Spans of every rank, of the steps that were measured.
    spans: Vec<Vec<Span>>,
    search: Option<Receiver<Option<Found>>>,
    found: Option<Offer>,
    /// Searches that have begun.
    searches: u64,
}

/// What a search has found.
type Found = (Better, Option<Vec<usize>>);

/// A program that is offered.
#[derive(Clone)]
pub(super) struct Offer {
    pub(super) program: Arc<Schedule>,
    /// First part of each of its stages, where these are others.
    pub(super) starts: Option<Vec<usize>>,
}

impl Leader {
    pub(super) fn new(job: &Exchangeable, beside: Vec<usize>) -> Leader {
        let (last, always) = (job.config.steps, job.config.exchanges_always);
        let mut rules = ExchangeRules { last, ..ExchangeRules::default() };
        if always {
            rules =
                ExchangeRules { samples: 2, trial: 1, rest: 1, gain: f64::MIN, drift: 0.0, last };
        }
        Leader {
            machine: Rescheduler::new(rules),
            rules,
            always,
            begun: Instant::now(),
            beside,
            spent: Arc::default(),
            spans: vec![Vec::new(); job.mesh.world()],
            search: None,
            found: None,
            searches: 0,
        }
    }

    /// Nanoseconds of a core that searches took.
    pub(super) fn spent_ns(&self) -> u64 {
        self.spent.load(Ordering::Relaxed)
    }

    /// The run goes on after `step` with a program whose steps took so long.
    pub(super) fn go_on(&mut self, step: u64, step_s: f64) {
        self.machine = Rescheduler::going_on(self.rules, step, step_s);
    }

    /// What all do after a step of `job`, and the program that is offered.
    pub(super) fn step(
        &mut self,
        job: &Exchangeable,
        ended: EndedStep,
        notes: Vec<RankNote>,
    ) -> (Follows, Option<Offer>) {
        let EndedStep { step, seconds, saving } = ended;
        let refused = notes.iter().any(|note| note.refuses);
        let busy: Vec<f64> = notes.iter().map(|note| note.busy_ns as f64 / 1e9).collect();
        self.add(job, notes);
        self.look_at_search(job);
        let reply = if refused { Reply::Refused } else { Reply::Ready };
        let follows = self.machine.step(StepSeen { step, seconds, busy: &busy, reply, saving });
        if follows.searches {
            self.search(job, seconds * self.rules.last.saturating_sub(step) as f64);
        }
        let offer = self.found.clone().filter(|_| follows.order == ExchangeOrder::Offer);
        (follows, offer)
    }

    /// Adds the times of a measured step of `job` to those before.
    fn add(&mut self, job: &Exchangeable, notes: Vec<RankNote>) {
        for (rank, note) in notes.into_iter().enumerate() {
            let program = &job.run.program.ranks[job.mesh.coords(rank).pp];
            let of = |(action, [start_ns, end_ns]): (&Action, [u64; 2])| Span {
                lane: action.lane(),
                action: *action,
                start_ns,
                end_ns: end_ns.max(start_ns),
            };
            self.spans[rank].extend(program.iter().zip(note.times).map(of));
        }
    }

    fn look_at_search(&mut self, job: &Exchangeable) {
        let Some(search) = &self.search else { return };
        let end = match self.always {
            // A test's runs exchange their programs after the same steps.
            true => search.recv().map_err(|_| TryRecvError::Disconnected),
            false => search.try_recv(),
        };
        let found = match end {
            Err(TryRecvError::Empty) => return,
            Err(TryRecvError::Disconnected) => None,
            Ok(found) => found,
        };
        self.search = None;
        let seconds = |ns: u64| ns as f64 / 1e9;
        let mine = job.blueprint.as_ref().map(|bp| bp.starts());
        self.machine.found(found.as_ref().map(|(found, starts)| {
            Predicted {
                now_s: seconds(found.now_ns),
                then_s: seconds(found.then_ns),
                program: id(&found.program, starts.as_deref()),
                stages: starts
                    .as_ref()
                    .zip(mine)
                    .filter(|(then, now)| *then != now)
                    .map(|(then, now)| OtherStages { from: stages_id(&now), to: stages_id(then) }),
            }
        }));
        self.found =
            found.map(|(found, starts)| Offer { program: Arc::new(found.program), starts });
    }

    /// Begins a search by what was measured of `job`, which takes `left_s` more.
    fn search(&mut self, job: &Exchangeable, left_s: f64) {
        let spans = self.spans.iter_mut().map(std::mem::take).collect::<Vec<_>>();
        let placement = &job.run.program.placement;
        let timeline = trace::timeline(String::new(), job.mesh, placement, spans);
        let costs = match measured(&timeline) {
            Ok(costs) => costs,
            Err(why) => {
                debug!("no better order is looked for: {why}");
                return self.machine.found(None);
            }
        };
        let all_s = (self.begun.elapsed().as_secs_f64() + left_s) * SEARCH_SHARE;
        let spent_s = self.spent_ns() as f64 / 1e9;
        let share_s = ((all_s - spent_s) * SEARCH_PART).min(SEARCH_S.1);
        let limit_s = if self.always { share_s.max(ALWAYS_S) } else { share_s };
        if limit_s < SEARCH_S.0 {
            debug!("no better order is looked for: the run is too short for a search");
            return self.machine.found(None);
        }
        let (sender, receiver) = channel();
        // A test's runs do both, and go back from both.
        self.searches += 1;
        let worse = self.machine.worse().to_vec();
        let (job, any) = (job.clone(), self.always.then_some(matches!(self.searches % 4, 1 | 2)));
        let search = move |limit: &Limit| {
            drop(sender.send(searched(&job, &costs, &worse, limit, any)));
        };
        let limit = Duration::from_secs_f64(limit_s);
        match background::start(self.beside.clone(), limit, &self.spent, search) {
            Ok(()) => self.search = Some(receiver),
            Err(refused) => {
                debug!("no thread looks for a better order: {refused}");
                self.machine.found(None);
            }
        }
    }
}

/// Which one a program is, of the stages that begin at parts `starts`.
fn id(program: &Schedule, starts: Option<&[usize]>) -> u64 {
    number(&format!("{:?} {starts:?}", program.ranks))
}

/// Which ones the stages are that begin at these parts.
fn stages_id(starts: &[usize]) -> u64 {
    number(&format!("{starts:?}"))
}

fn number(text: &str) -> u64 {
    let digest = blake3::hash(text.as_bytes());
    u64::from_le_bytes(digest.as_bytes()[..8].try_into().expect("eight bytes"))
}

/// The search of one thread for a better order than those that were `worse`, and for other stages
/// where the run may have them and they gain more. In a test's run `any` says whether it is to be
/// other stages.
fn searched(
    job: &Exchangeable,
    costs: &Costs,
    worse: &[u64],
    limit: &Limit,
    any: Option<bool>,
) -> Option<Found> {
    let limit_s = limit.left_s();
    // Other stages have the second half.
    let rest_s = if any.is_none() && job.config.recuts() { limit_s / 2.0 } else { 0.0 };
    let effort = Effort {
        timed: (limit_s * FIRST_SEARCH * TIMED_PER_S) as u64,
        left_s: Some(&|| limit.left_s() - rest_s),
        is_out: &|program| worse.contains(&id(program, None)),
        any: any.is_some(),
    };
    let order = || Some((job.run.better(costs, &effort)?, None));
    let recut = || {
        let effort = Effort { left_s: Some(&|| limit.left_s()), is_out: &|_| false, ..effort };
        // What has begun is not thrown away: where the time is over, it does not begin.
        if any.is_none() && !effort.goes_on() {
            return None;
        }
        let (better, starts) = recut::better(job, costs, &effort)?;
        // One that was tried leaves its place to the order.
        let is_out = worse.contains(&id(&better.program, Some(&starts)));
        (!is_out || any.is_some()).then_some((better, Some(starts)))
    };
    match any {
        _ if !job.config.recuts() => order(),
        Some(true) => recut().or_else(order),
        Some(false) => order(),
        None => match (order(), recut()) {
            (Some(order), Some(recut)) if !is_worth(&order.0, &recut.0) => Some(order),
            (order, recut) => recut.or(order),
        },
    }
}

/// Whether other stages gain more than a better order does, as state has to move for them.
fn is_worth(order: &Better, recut: &Better) -> bool {
    (recut.then_ns as f64) < RECUT_GAIN * order.then_ns as f64
}
