//! A run that exchanges its program for a better one (ADR 93). All ranks measure some steps; rank 0
//! puts their times together, and a thread of its process searches by them beside the training.
//! What it finds comes to all ranks with rank 0's words at a step's end, and is taken at the end of
//! the next, where every rank has it. [`Leader`] says when. A resumed run goes on with the program
//! that was kept last.

mod background;
mod leader;
mod note;

use std::sync::Arc;

use parking_lot::Mutex;
use tracing::{debug, info, warn};
use zeropp_checkpoint::SavedProgram;
use zeropp_checkpoint::reschedule::{Copies, ExchangeOrder, Reply, Trial};
use zeropp_comm::{CommResult, Communicator};
use zeropp_pipeline::exchange::json::{self, Document};
use zeropp_pipeline::ir::Schedule;
use zeropp_pipeline::timeline::{Computed, Span};

use crate::plan::blueprint::Blueprint;
use crate::plan::reschedule::Exchangeable;
use leader::Leader;
pub(crate) use note::{EndedStep, RankNote};

/// Largest program that is sent or saved, in bytes of JSON.
const PROGRAM_BYTES_MAX: usize = 64 << 20;
/// Bytes of the head of an order: it, whether the next step is measured, how long the rest is.
const HEAD: usize = 6;

/// What the ranks of a process know of the program that was offered last: its digest, and it where
/// it may run here.
pub(crate) type Offered = Arc<Mutex<Option<(blake3::Hash, Option<Candidate>)>>>;

/// A program that may run here.
#[derive(Clone)]
pub(crate) struct Candidate {
    program: Arc<Schedule>,
    /// The blueprint with its stages; none in an emulated run.
    cut: Option<Arc<Blueprint>>,
}

/// A program and how many had taken its predecessor's place by then: 0 for the planned one.
#[derive(Clone)]
pub(crate) struct NumberedProgram {
    pub(crate) number: u64,
    pub(crate) program: Arc<Schedule>,
    /// The blueprint with its stages; none in an emulated run.
    pub(crate) cut: Option<Arc<Blueprint>>,
}

/// What rank 0 orders after a step.
#[derive(Default)]
pub(crate) struct Orders {
    /// For all ranks.
    pub(crate) words: Vec<u8>,
    /// Whether blocks move before the next step.
    pub(crate) moves: bool,
}

/// A rank's part of the exchanges of a run.
pub(crate) struct Rescheduling {
    job: Exchangeable,
    here_are_all: bool,
    copies: Copies<NumberedProgram>,
    offered: Offered,
    /// The number of the program that is taken next.
    next: u64,
    /// The step under way is measured.
    samples: bool,
    /// Something was offered after the step before.
    replies: bool,
    leader: Option<Leader>,
}

impl Rescheduling {
    /// Of a run of `job`; none where its program stays. `rank` has the ranks `here` in its process,
    /// which share `offered`; rank 0's searches run on the cores `beside` its own, or on any.
    pub(crate) fn new(
        job: Option<Exchangeable>,
        offered: &Offered,
        rank: usize,
        here: &[usize],
        beside: Vec<usize>,
    ) -> Option<Rescheduling> {
        let job = job?;
        let (program, cut) = (Arc::new(job.run.program.clone()), job.blueprint.clone());
        let planned = NumberedProgram { number: 0, program, cut };
        Some(Rescheduling {
            here_are_all: here.len() == job.mesh.world(),
            copies: Copies::new(planned),
            offered: offered.clone(),
            next: 1,
            samples: true,
            replies: false,
            leader: (rank == 0).then(|| Leader::new(&job, beside)),
            job,
        })
    }

    /// The program that runs.
    pub(crate) fn running(&self) -> &NumberedProgram {
        self.copies.running()
    }

    /// Nanoseconds of a core that rank 0's searches took.
    pub(crate) fn searched_ns(&self) -> u64 {
        self.leader.as_ref().map_or(0, Leader::spent_ns)
    }

    /// What this rank says of a step with these spans.
    pub(crate) fn note(&self, spans: &[Span], shift: impl Fn(u64) -> u64) -> RankNote {
        let times = |s: &Span| [shift(s.start_ns), shift(s.end_ns)];
        RankNote {
            refuses: self.replies && self.copies.reply() == Reply::Refused,
            busy_ns: Computed::of(spans).map_or(0, |computed| computed.busy_ns),
            times: if self.samples { spans.iter().map(times).collect() } else { Vec::new() },
        }
    }

    /// On rank 0, what all do after a step, of which ranks say this; and the program that a resumed
    /// run is to go on with, where that is another one now.
    pub(crate) fn decide(
        &mut self,
        ended: EndedStep,
        notes: Vec<RankNote>,
    ) -> (Orders, Option<SavedProgram>) {
        let number = self.running().number;
        let always = self.job.config.exchanges_always;
        let seconds = if always { as_if(number) } else { ended.seconds };
        let leader = self.leader.as_mut().expect("rank 0 decides");
        let (follows, offer) = leader.step(&self.job, EndedStep { seconds, ..ended }, notes);
        let kept = follows.tried.and_then(|tried| {
            info!("{}", in_words(&tried));
            tried.stays.then(|| saved(self.copies.running(), tried.measured_s))?
        });
        let text = offer.map(|found| {
            let text = written(&found.program, found.starts.as_deref());
            let candidate = self.candidate(found.program, found.starts);
            let candidate = candidate.inspect_err(|why| debug!("a better order is left: {why}"));
            self.offer(text, candidate.ok())
        });
        let text = text.unwrap_or_default();
        let len = (text.len() as u32).to_le_bytes();
        let words = [&[follows.order.to_byte(), follows.samples.into()], &len[..], &text].concat();
        (Orders { words, moves: follows.moves }, kept)
    }

    /// On rank 0: makes a program that was written so what is offered, where it may run here; what
    /// other ranks read.
    fn offer(&self, mut text: Vec<u8>, candidate: Option<Candidate>) -> Vec<u8> {
        let digest = blake3::hash(&text);
        *self.offered.lock() = Some((digest, candidate));
        // Processes of other ranks read it; too large a one they refuse.
        if self.here_are_all || text.len() > PROGRAM_BYTES_MAX {
            text.clear();
        }
        text.splice(0..0, *digest.as_bytes());
        text
    }

    /// A program of the stages that begin at parts `starts`, or of those that there are, where it
    /// may run here; or why it may not.
    fn candidate(
        &self,
        program: Arc<Schedule>,
        starts: Option<Vec<usize>>,
    ) -> Result<Candidate, String> {
        let cut = self.job.blueprint.clone();
        match starts.filter(|starts| cut.as_ref().is_none_or(|cut| cut.starts() != *starts)) {
            Some(starts) => {
                let cut = Some(Arc::new(self.job.recut(&starts, &program)?));
                Ok(Candidate { program, cut })
            }
            None => self.job.check(&program).map(|()| Candidate { program, cut }),
        }
    }

    /// Follows the order at the beginning of `words`, of which rank 0 has said more; the program
    /// that runs from now on, where it is another, and the rest.
    pub(crate) fn follow<'a>(&mut self, words: &'a [u8]) -> (Option<NumberedProgram>, &'a [u8]) {
        let (head, rest) = words.split_at(HEAD);
        let len = u32::from_le_bytes(head[2..].try_into().expect("four bytes")) as usize;
        let (offer, rest) = rest.split_at(len);
        let order = ExchangeOrder::from_byte(head[0]);
        self.samples = head[1] != 0;
        self.replies = order == ExchangeOrder::Offer;
        if self.replies {
            self.hear(offer);
        }
        (self.obey(order), rest)
    }

    /// Looks at a program that is offered.
    fn hear(&mut self, offer: &[u8]) {
        let number = self.next;
        let candidate = self.received(offer);
        let numbered = |Candidate { program, cut }| NumberedProgram { number, program, cut };
        self.copies.offer(candidate.map(numbered));
    }

    /// Does what is ordered; the program that runs from now on, where it is another.
    fn obey(&mut self, order: ExchangeOrder) -> Option<NumberedProgram> {
        let exchanged = self.copies.follow(order).then(|| self.copies.running().clone())?;
        let now = self.job.blueprint.as_ref().map(|cut| &cut.stages);
        if let Some(cut) = exchanged.cut.as_ref().filter(|cut| now != Some(&cut.stages)) {
            self.job = Exchangeable::of(cut).expect("it was exchangeable");
        }
        self.job.run.program = (*exchanged.program).clone();
        self.next = self.next.max(exchanged.number + 1);
        Some(exchanged)
    }

    /// Goes on after `step` with the program that was `saved` then, which rank 0 knows, where every
    /// rank can run it; that program. All ranks call it.
    ///
    /// # Errors
    /// The world's first.
    pub(crate) fn go_on(
        &mut self,
        world: &dyn Communicator,
        step: u64,
        saved: Option<&SavedProgram>,
    ) -> CommResult<Option<NumberedProgram>> {
        let offer = saved.map(|saved| {
            let text = saved.text.as_bytes();
            let candidate = self.understood(text).inspect_err(|why| {
                warn!("the order that the run had found does not suit it any more: {why}");
            });
            let offer = self.offer(text.to_vec(), candidate.ok());
            [&saved.number.to_le_bytes()[..], &offer].concat()
        });
        let all = world.exchange(offer.unwrap_or_default()).wait()?;
        let Some((number, offer)) = all[0].split_first_chunk() else { return Ok(None) };
        self.next = u64::from_le_bytes(*number);
        self.hear(offer);
        let refuses = self.copies.reply() == Reply::Refused;
        let refusals = world.exchange(vec![refuses.into()]).wait()?;
        if refusals.iter().any(|refuses| *refuses != [0]) {
            return Ok(self.obey(ExchangeOrder::Drop));
        }
        if let (Some(leader), Some(saved)) = (&mut self.leader, saved) {
            leader.go_on(step, saved.step_ns as f64 / 1e9);
            info!("the run goes on with the order that it had found ({})", saved.number);
        }
        self.samples = false;
        Ok(self.obey(ExchangeOrder::Take))
    }

    /// The program of an offer, once for all ranks of the process; none where it cannot run here.
    fn received(&self, offer: &[u8]) -> Option<Candidate> {
        let (digest, text) = offer.split_at(blake3::OUT_LEN.min(offer.len()));
        let digest = blake3::Hash::from_bytes(digest.try_into().ok()?);
        let mut offered = self.offered.lock();
        if let Some((known, candidate)) = &*offered
            && *known == digest
        {
            return candidate.clone();
        }
        let candidate = match blake3::hash(text) == digest {
            true => self.understood(text),
            false => Err("it did not arrive whole".into()),
        };
        let candidate = candidate.inspect_err(|why| {
            warn!("this process refuses the order that rank 0 has found: {why}");
        });
        let candidate = candidate.ok();
        *offered = Some((digest, candidate.clone()));
        candidate
    }

    /// The program of a text, where it may run here.
    fn understood(&self, text: &[u8]) -> Result<Candidate, String> {
        let (program, starts) = read(text)?;
        self.candidate(Arc::new(program), starts)
    }
}

/// What a step takes in a run that exchanges programs whatever they gain, for tests: of those that
/// are taken, every other one stays.
fn as_if(number: u64) -> f64 {
    if number % 2 == 1 { 1.0 / (2 + number) as f64 } else { 1.0 }
}

/// A program as it is sent and saved, behind a line with the parts that its stages begin at, where
/// these are others.
fn written(program: &Schedule, starts: Option<&[usize]>) -> Vec<u8> {
    let mut text = Vec::new();
    if let Some(starts) = starts {
        text = serde_json::to_vec(starts).expect("numbers");
        text.push(b'\n');
    }
    let document = Document { schedule: program.clone(), costs: None, measures: None };
    json::write(&document, &mut text).expect("a buffer takes everything");
    text
}

/// Reads what [`written`] gave.
fn read(text: &[u8]) -> Result<(Schedule, Option<Vec<usize>>), String> {
    let text = std::str::from_utf8(text).map_err(|e| e.to_string())?;
    let (starts, text) = match text.split_once('\n').filter(|_| text.starts_with('[')) {
        Some((starts, text)) => (Some(serde_json::from_str(starts)), text),
        None => (None, text),
    };
    let starts = starts.transpose().map_err(|e| e.to_string())?;
    Ok((json::read(text).map_err(|e| e.to_string())?.schedule, starts))
}

/// A program whose steps take so long, for a run that is resumed; none that is too large.
fn saved(running: &NumberedProgram, step_s: f64) -> Option<SavedProgram> {
    let text = written(&running.program, None);
    let text = String::from_utf8(text).expect("JSON is text");
    let (number, step_ns) = (running.number, (step_s * 1e9) as u64);
    let blocks = running.cut.as_ref().filter(|cut| cut.config.recuts()).map(|cut| cut.blocks());
    let saved = SavedProgram { number, step_ns, text, blocks };
    (saved.text.len() <= PROGRAM_BYTES_MAX).then_some(saved)
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

#[cfg(test)]
mod tests {
    use zeropp_checkpoint::reschedule::Predicted;
    use zeropp_comm::threads::{ThreadsOptions, ThreadsWorld};
    use zeropp_pipeline::simulate::{Costs, simulate};

    use super::*;
    use crate::config::Reschedule;
    use crate::{Config, Trainer};

    const PREDICTED: Predicted =
        Predicted { now_s: 0.412, then_s: 0.388, program: 1, stages: None };

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
    fn two_processes() -> [Rescheduling; 2] {
        processes_with(Reschedule::Auto, None)
    }

    fn processes_with(reschedule: Reschedule, rank_memory: Option<f64>) -> [Rescheduling; 2] {
        let config = Config {
            pp: 2,
            layers: 4,
            schedule: "gpipe".into(),
            reschedule: Some(reschedule),
            rank_memory,
            exchanges_always: true,
            micro_batches: Some(6),
            steps: 40,
            ..Config::default()
        };
        let bp = Trainer::new(config).unwrap().blueprint;
        let of = |rank: usize| {
            let job = Exchangeable::of(&bp);
            Rescheduling::new(job, &Offered::default(), rank, &[rank], Vec::new())
        };
        [0, 1].map(|rank| of(rank).expect("it is asked for"))
    }

    /// The spans of each rank in a step with its program.
    fn step(ranks: &[Rescheduling; 2]) -> [Vec<Span>; 2] {
        let program = &ranks[0].running().program;
        let costs = Costs::uniform(2, 5000, 6000, 4000, 0);
        let timeline = simulate(program, &costs).unwrap();
        [0, 1].map(|rank| timeline.ranks[rank].spans.clone())
    }

    /// Runs steps until rank 0 gives `order`; what it says then.
    fn until(ranks: &mut [Rescheduling; 2], at: &mut u64, order: ExchangeOrder) -> Vec<u8> {
        loop {
            assert!(*at < 40, "{order:?} does not come");
            *at += 1;
            let spans = step(ranks);
            // One step after the other, by one clock.
            let begun = *at * 1_000_000_000;
            let notes = [0, 1].map(|i| ranks[i].note(&spans[i], |ns| begun + ns));
            let ended = EndedStep { step: *at, seconds: 1.0, saving: false };
            let words = ranks[0].decide(ended, notes.into()).0.words;
            if words[0] == order.to_byte() {
                return words;
            }
            for rank in ranks.iter_mut() {
                assert!(rank.follow(&words).1.is_empty());
            }
        }
    }

    #[test]
    fn ranks_of_other_processes_run_the_program_that_rank_0_has_found() {
        let mut ranks = two_processes();
        let before = ranks[0].running().program.clone();
        let words = until(&mut ranks, &mut 0, ExchangeOrder::Take);
        let words = [&words[..], b"and more"].concat();
        for rank in &mut ranks {
            let (program, rest) = rank.follow(&words);
            assert!(program.is_some() && rest == b"and more");
        }
        let [mine, other] = ranks.each_ref().map(|rank| rank.running().program.clone());
        assert_eq!(mine.ranks, other.ranks);
        assert_ne!(mine.ranks, before.ranks);
        assert_eq!((&mine.units, &mine.placement), (&before.units, &before.placement));
    }

    #[test]
    fn ranks_of_other_processes_have_the_stages_that_rank_0_has_found_and_go_back_alike() {
        let mut ranks = processes_with(Reschedule::Recut, None);
        let blocks = |ranks: &[Rescheduling; 2]| {
            let of = |rank: &Rescheduling| rank.running().cut.as_ref().expect("a run").blocks();
            let all = ranks.each_ref().map(of);
            assert_eq!(all[0], all[1]);
            assert_eq!(ranks[0].job.run.bytes, ranks[1].job.run.bytes);
            all[0].clone()
        };
        let planned = blocks(&ranks);
        let at = &mut 0;
        let mut seen = vec![planned.clone()];
        for order in [ExchangeOrder::Take, ExchangeOrder::Take, ExchangeOrder::GoBack] {
            let words = until(&mut ranks, at, order);
            ranks.iter_mut().for_each(|rank| assert!(rank.follow(&words).0.is_some()));
            seen.push(blocks(&ranks));
        }
        assert_eq!(seen[1].iter().sum::<usize>(), 4);
        assert!(seen[1] != planned && seen[2] != seen[1] && seen[3] == seen[1], "{seen:?}");
    }

    /// Other stages need other memory than the plan has said: the limit is what counts.
    #[test]
    fn stages_that_a_rank_has_no_memory_for_are_refused() {
        let job = processes_with(Reschedule::Recut, None)[0].job.clone();
        let starts = |job: &Exchangeable| {
            let bp = job.blueprint.as_ref().expect("a run");
            let uneven = bp.parts.groups().sizes(&bp.stages);
            assert_eq!(uneven, [2, 2]);
            vec![0, bp.starts()[1] + 1]
        };
        let moved = job.recut(&starts(&job), &job.run.program).expect("without a limit");
        assert_eq!(moved.blocks(), [3, 1]);
        let then = moved.rank_states();
        let moving = (0..2).map(|rank| then[rank].moving(&job.run.ranks[rank])).max();
        let most = moved.needs().most().max(moving.expect("ranks"));
        let limited = |bytes: u64| {
            let mut job = job.clone();
            job.config.rank_memory = Some(bytes as f64 / (1u64 << 30) as f64);
            let mut bp = (**job.blueprint.as_ref().expect("a run")).clone();
            bp.config.rank_memory = job.config.rank_memory;
            job.blueprint = Some(Arc::new(bp));
            job.recut(&starts(&job), &job.run.program).map(drop)
        };
        assert_eq!(limited(most), Ok(()));
        assert_eq!(limited(most - 1), Err("there is too little memory for it here".into()));
    }

    #[test]
    fn an_offer_that_does_not_arrive_whole_is_refused_and_dropped_by_all() {
        let mut ranks = two_processes();
        let at = &mut 0;
        let mut words = until(&mut ranks, at, ExchangeOrder::Offer);
        ranks[0].follow(&words);
        *words.last_mut().expect("a program") = b' ';
        ranks[1].follow(&words);
        assert_eq!(ranks[1].copies.reply(), Reply::Refused);
        let words = until(&mut ranks, at, ExchangeOrder::Drop);
        for rank in &mut ranks {
            assert!(rank.follow(&words).0.is_none());
        }
    }

    #[test]
    fn ranks_of_other_processes_go_on_with_the_program_that_was_saved() {
        let mut found = two_processes();
        let words = until(&mut found, &mut 0, ExchangeOrder::Take);
        found[0].follow(&words);
        let kept = saved(found[0].running(), 0.5).expect("a small program");
        let broken = SavedProgram { text: kept.text.replace("F0", "F1"), ..kept.clone() };
        for (saved, goes_on) in [(&kept, true), (&broken, false)] {
            let worlds = ThreadsWorld::new(2, ThreadsOptions::default()).communicators();
            std::thread::scope(|scope| {
                for (mut rank, world) in two_processes().into_iter().zip(worlds) {
                    scope.spawn(move || {
                        let saved = (world.rank() == 0).then_some(saved);
                        let exchanged = rank.go_on(&*world, 9, saved).expect("all answer");
                        assert_eq!(exchanged.is_some(), goes_on, "rank {}", world.rank());
                        assert_eq!(rank.running().number, u64::from(goes_on));
                    });
                }
            });
        }
    }
}
