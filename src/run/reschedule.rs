//! A run that exchanges its program for a better one (ADR 93). All ranks measure some steps; rank 0
//! puts their times together, and a thread of its process searches by them beside the training.
//! What it finds comes to all ranks with rank 0's words at a step's end, and is taken at the end of
//! the next, where every rank has it. [`Rescheduler`] decides when.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tracing::{debug, info, warn};
use zeropp_checkpoint::reschedule::{
    Copies, ExchangeOrder, ExchangeRules, Follows, Predicted, Reply, Rescheduler, StepSeen, Trial,
};
use zeropp_core::threads;
use zeropp_pipeline::costs::measured;
use zeropp_pipeline::exchange::json::{self, Document};
use zeropp_pipeline::ir::{Action, Schedule};
use zeropp_pipeline::simulate::Costs;
use zeropp_pipeline::timeline::Span;
use zeropp_plan::reschedule::{Better, Effort, RunningProgram};

use crate::plan::blueprint::Blueprint;
use crate::plan::reschedule;
use crate::run::trace;

/// The share of the time that is left of a run that one search may take.
const SEARCH_SHARE: f64 = 0.01;
/// The least and the most that it may take, in seconds.
const SEARCH_S: (f64, f64) = (0.1, 10.0);
/// Forwards and backwards that the search for kind `auto` times in a second, at least.
const TIMED_PER_S: f64 = 5e6;
/// Largest program that is sent, in bytes of JSON.
const PROGRAM_BYTES_MAX: usize = 64 << 20;
/// Bytes of the head of an order: it, whether the next step is measured, how long the rest is.
const HEAD: usize = 6;

/// What the ranks of a process know of the program that was offered last: its digest, and it where
/// it may run here.
pub(crate) type Offered = Arc<Mutex<Option<(blake3::Hash, Option<Arc<Schedule>>)>>>;

/// What a rank says at the end of a step.
#[derive(Serialize, Deserialize)]
pub(crate) struct RankNote {
    /// It cannot run what was offered.
    refuses: bool,
    /// Start and end of each action of its program, by rank 0's clock, where the step is measured.
    times: Vec<[u64; 2]>,
}

/// A rank's part of the exchanges of a run.
pub(crate) struct Rescheduling {
    run: RunningProgram,
    here_are_all: bool,
    copies: Copies<Arc<Schedule>>,
    offered: Offered,
    /// The step under way is measured.
    samples: bool,
    /// Something was offered after the step before.
    replies: bool,
    leader: Option<Leader>,
}

impl Rescheduling {
    /// Of a run of `bp`; none where its program stays. `rank` has the ranks `here` in its process,
    /// which share `offered`.
    pub(crate) fn new(
        bp: &Blueprint,
        offered: &Offered,
        rank: usize,
        here: &[usize],
    ) -> Option<Rescheduling> {
        if !reschedule::is_on(&bp.config) {
            return None;
        }
        let run = reschedule::run(bp);
        Some(Rescheduling {
            here_are_all: here.len() == bp.mesh.world(),
            copies: Copies::new(Arc::new(run.program.clone())),
            offered: offered.clone(),
            samples: true,
            replies: false,
            leader: (rank == 0).then(|| Leader::new(bp)),
            run,
        })
    }

    /// What this rank says of a step with these spans.
    pub(crate) fn note(&self, spans: &[Span], shift: impl Fn(u64) -> u64) -> RankNote {
        let times = |s: &Span| [shift(s.start_ns), shift(s.end_ns)];
        RankNote {
            refuses: self.replies && self.copies.reply() == Reply::Refused,
            times: if self.samples { spans.iter().map(times).collect() } else { Vec::new() },
        }
    }

    /// On rank 0, what all do after a step that took so long, of which ranks say this.
    pub(crate) fn decide(
        &mut self,
        bp: &Blueprint,
        step: u64,
        seconds: f64,
        notes: Vec<RankNote>,
    ) -> Vec<u8> {
        let leader = self.leader.as_mut().expect("rank 0 decides");
        let (follows, offer) = leader.step(bp, &self.run, step, seconds, notes);
        if let Some(tried) = &follows.tried {
            info!("{}", in_words(tried));
        }
        let mut text = Vec::new();
        if let Some(program) = offer {
            let document = Document { schedule: (*program).clone(), costs: None, measures: None };
            json::write(&document, &mut text).expect("a buffer takes everything");
            let digest = blake3::hash(&text);
            let checked = reschedule::check(bp, &self.run, &program);
            let checked = checked.inspect_err(|why| debug!("a better order is left: {why}"));
            *self.offered.lock() = Some((digest, checked.ok().map(|()| program)));
            // Processes of other ranks read it; too large a one they refuse.
            if self.here_are_all || text.len() > PROGRAM_BYTES_MAX {
                text.clear();
            }
            text.splice(0..0, *digest.as_bytes());
        }
        let len = (text.len() as u32).to_le_bytes();
        [&[follows.order.to_byte(), follows.samples.into()], &len[..], &text].concat()
    }

    /// Follows the order at the beginning of `words`, of which rank 0 has said more; the program
    /// that runs from now on, where it is another, and the rest.
    pub(crate) fn follow<'a>(
        &mut self,
        bp: &Blueprint,
        words: &'a [u8],
    ) -> (Option<Arc<Schedule>>, &'a [u8]) {
        let (head, rest) = words.split_at(HEAD);
        let len = u32::from_le_bytes(head[2..].try_into().expect("four bytes")) as usize;
        let (offer, rest) = rest.split_at(len);
        let order = ExchangeOrder::from_byte(head[0]);
        self.samples = head[1] != 0;
        self.replies = order == ExchangeOrder::Offer;
        if self.replies {
            let program = self.received(bp, offer);
            self.copies.offer(program);
        }
        let exchanged = self.copies.follow(order).then(|| self.copies.running().clone());
        if let Some(program) = &exchanged {
            self.run.program = (**program).clone();
        }
        (exchanged, rest)
    }

    /// The program of an offer, once for all ranks of the process; none where it cannot run here.
    fn received(&self, bp: &Blueprint, offer: &[u8]) -> Option<Arc<Schedule>> {
        let (digest, text) = offer.split_at(blake3::OUT_LEN.min(offer.len()));
        let digest = blake3::Hash::from_bytes(digest.try_into().ok()?);
        let mut offered = self.offered.lock();
        if let Some((known, program)) = &*offered
            && *known == digest
        {
            return program.clone();
        }
        let read = || -> Result<Schedule, String> {
            if blake3::hash(text) != digest {
                return Err("it did not arrive whole".into());
            }
            let text = std::str::from_utf8(text).map_err(|e| e.to_string())?;
            let program = json::read(text).map_err(|e| e.to_string())?.schedule;
            reschedule::check(bp, &self.run, &program)?;
            Ok(program)
        };
        let program = read().inspect_err(|why| {
            warn!("this process refuses the order that rank 0 has found: {why}");
        });
        let program = program.ok().map(Arc::new);
        *offered = Some((digest, program.clone()));
        program
    }
}

/// The line about a program that was tried.
fn in_words(tried: &Trial) -> String {
    let Trial { after, predicted, before_s, measured_s, stays } = tried;
    let ms = |seconds: f64| match seconds * 1e3 {
        ms if ms < 100.0 => format!("{ms:.1}"),
        ms => format!("{ms:.0}"),
    };
    let (now, then) = (ms(predicted.now_s), ms(predicted.then_s));
    let (step, before, measured) = (after + 1, ms(*before_s), ms(*measured_s));
    let changed = if *stays { "order changed" } else { "order changed and changed back" };
    format!("step {step}: {changed}, {now} → {then} ms predicted, {before} → {measured} measured")
}

/// Rank 0's part.
struct Leader {
    machine: Rescheduler,
    last: u64,
    always: bool,
    /// Spans of every rank, of the steps that were measured.
    spans: Vec<Vec<Span>>,
    search: Option<Receiver<Option<Better>>>,
    found: Option<Arc<Schedule>>,
}

impl Leader {
    fn new(bp: &Blueprint) -> Leader {
        let (last, always) = (bp.config.steps, bp.config.exchanges_always);
        let mut rules = ExchangeRules { last, ..ExchangeRules::default() };
        if always {
            rules =
                ExchangeRules { samples: 2, trial: 2, rest: 1, gain: f64::MIN, drift: 0.0, last };
        }
        Leader {
            machine: Rescheduler::new(rules),
            last,
            always,
            spans: vec![Vec::new(); bp.mesh.world()],
            search: None,
            found: None,
        }
    }

    /// What all do after a step of `run`, and the program that is offered.
    fn step(
        &mut self,
        bp: &Blueprint,
        run: &RunningProgram,
        step: u64,
        seconds: f64,
        notes: Vec<RankNote>,
    ) -> (Follows, Option<Arc<Schedule>>) {
        let refused = notes.iter().any(|note| note.refuses);
        self.add(bp, run, notes);
        self.look_at_search();
        let reply = if refused { Reply::Refused } else { Reply::Ready };
        let follows = self.machine.step(StepSeen { step, seconds, reply });
        if follows.searches {
            self.search(bp, run, seconds * self.last.saturating_sub(step) as f64);
        }
        let offer = self.found.clone().filter(|_| follows.order == ExchangeOrder::Offer);
        (follows, offer)
    }

    /// Adds the times of a measured step of `run` to those before.
    fn add(&mut self, bp: &Blueprint, run: &RunningProgram, notes: Vec<RankNote>) {
        for (rank, note) in notes.into_iter().enumerate() {
            let program = &run.program.ranks[bp.mesh.coords(rank).pp];
            let of = |(action, [start_ns, end_ns]): (&Action, [u64; 2])| Span {
                lane: action.lane(),
                action: *action,
                start_ns,
                end_ns: end_ns.max(start_ns),
            };
            self.spans[rank].extend(program.iter().zip(note.times).map(of));
        }
    }

    fn look_at_search(&mut self) {
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
        let id = |program: &Schedule| {
            let digest = blake3::hash(format!("{:?}", program.ranks).as_bytes());
            u64::from_le_bytes(digest.as_bytes()[..8].try_into().expect("eight bytes"))
        };
        let seconds = |ns: u64| ns as f64 / 1e9;
        self.machine.found(found.as_ref().map(|found| Predicted {
            now_s: seconds(found.now_ns),
            then_s: seconds(found.then_ns),
            program: id(&found.program),
        }));
        self.found = found.map(|found| Arc::new(found.program));
    }

    /// Begins a search by what was measured of `run`, which takes `left_s` more.
    fn search(&mut self, bp: &Blueprint, run: &RunningProgram, left_s: f64) {
        let spans = self.spans.iter_mut().map(std::mem::take).collect::<Vec<_>>();
        let placement = &run.program.placement;
        let timeline = trace::timeline(String::new(), bp.mesh, placement, spans);
        let costs = match measured(&timeline) {
            Ok(costs) => costs,
            Err(why) => {
                debug!("no better order is looked for: {why}");
                return self.machine.found(None);
            }
        };
        let (sender, receiver) = channel();
        let (run, any) = (run.clone(), self.always);
        let limit_s = (left_s * SEARCH_SHARE).clamp(SEARCH_S.0, SEARCH_S.1);
        let search = move || drop(sender.send(searched(&run, &costs, limit_s, any)));
        match threads::start("reschedule", search) {
            Ok(_) => self.search = Some(receiver),
            Err(refused) => {
                debug!("no thread looks for a better order: {refused}");
                self.machine.found(None);
            }
        }
    }
}

/// The search of one thread, which may take so many seconds.
fn searched(run: &RunningProgram, costs: &Costs, limit_s: f64, any: bool) -> Option<Better> {
    let (begun, limit) = (Instant::now(), Duration::from_secs_f64(limit_s));
    let goes_on = || begun.elapsed() < limit;
    let timed = (limit_s / 2.0 * TIMED_PER_S) as u64;
    run.better(costs, &Effort { timed, goes_on: &goes_on, any })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, Trainer};
    use zeropp_pipeline::simulate::simulate;

    const PREDICTED: Predicted = Predicted { now_s: 0.412, then_s: 0.388, program: 1 };

    #[test]
    fn a_change_is_reported_in_one_line() {
        let tried = Trial {
            after: 36,
            predicted: PREDICTED,
            before_s: 0.415,
            measured_s: 0.0904,
            stays: true,
        };
        let words = "step 37: order changed, 412 → 388 ms predicted, 415 → 90.4 measured";
        assert_eq!(in_words(&tried), words);
        let back = in_words(&Trial { stays: false, ..tried });
        assert!(back.starts_with("step 37: order changed and changed back, 412"), "{back}");
    }

    /// Two ranks, each in a process of its own, of a run that exchanges at every chance.
    fn two_processes() -> (Arc<Blueprint>, [Rescheduling; 2]) {
        let config = Config {
            pp: 2,
            layers: 4,
            schedule: "gpipe".into(),
            reschedule: crate::config::Reschedule::Auto,
            exchanges_always: true,
            micro_batches: Some(6),
            steps: 40,
            ..Config::default()
        };
        let bp = Trainer::new(config).unwrap().blueprint;
        let of = |rank: usize| Rescheduling::new(&bp, &Offered::default(), rank, &[rank]);
        let ranks = [0, 1].map(|rank| of(rank).expect("it is asked for"));
        (bp, ranks)
    }

    /// The spans of each rank in a step with its program.
    fn step(ranks: &[Rescheduling; 2]) -> [Vec<Span>; 2] {
        let program = ranks[0].copies.running();
        let costs = Costs::uniform(2, 5000, 6000, 4000, 0);
        let timeline = simulate(program, &costs).unwrap();
        [0, 1].map(|rank| timeline.ranks[rank].spans.clone())
    }

    /// Runs steps until rank 0 gives `order`; what it says then.
    fn until(
        bp: &Blueprint,
        ranks: &mut [Rescheduling; 2],
        at: &mut u64,
        order: ExchangeOrder,
    ) -> Vec<u8> {
        loop {
            assert!(*at < 40, "{order:?} does not come");
            *at += 1;
            let spans = step(ranks);
            // One step after the other, by one clock.
            let begun = *at * 1_000_000_000;
            let notes = [0, 1].map(|i| ranks[i].note(&spans[i], |ns| begun + ns));
            let words = ranks[0].decide(bp, *at, 1.0, notes.into());
            if words[0] == order.to_byte() {
                return words;
            }
            for rank in ranks.iter_mut() {
                assert!(rank.follow(bp, &words).1.is_empty());
            }
        }
    }

    #[test]
    fn ranks_of_other_processes_run_the_program_that_rank_0_has_found() {
        let (bp, mut ranks) = two_processes();
        let before = ranks[0].copies.running().clone();
        let words = until(&bp, &mut ranks, &mut 0, ExchangeOrder::Take);
        let words = [&words[..], b"and more"].concat();
        for rank in &mut ranks {
            let (program, rest) = rank.follow(&bp, &words);
            assert!(program.is_some() && rest == b"and more");
        }
        let [mine, other] = ranks.each_ref().map(|rank| rank.copies.running().clone());
        assert_eq!(mine.ranks, other.ranks);
        assert_ne!(mine.ranks, before.ranks);
        assert_eq!((&mine.units, &mine.placement), (&before.units, &before.placement));
    }

    #[test]
    fn an_offer_that_does_not_arrive_whole_is_refused_and_dropped_by_all() {
        let (bp, mut ranks) = two_processes();
        let at = &mut 0;
        let mut words = until(&bp, &mut ranks, at, ExchangeOrder::Offer);
        ranks[0].follow(&bp, &words);
        *words.last_mut().expect("a program") = b' ';
        ranks[1].follow(&bp, &words);
        assert_eq!(ranks[1].copies.reply(), Reply::Refused);
        let words = until(&bp, &mut ranks, at, ExchangeOrder::Drop);
        for rank in &mut ranks {
            assert!(rank.follow(&bp, &words).0.is_none());
        }
    }
}
