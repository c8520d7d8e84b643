//! The saves of one life of the ranks, as rank 0's process and all writers do them.

use std::time::Duration;

use zeropp_checkpoint::Checked;
use zeropp_checkpoint::Store;
use zeropp_checkpoint::complete::{About, Completion};
use zeropp_checkpoint::pace::{Pace, SaveDecision};
use zeropp_checkpoint::step_end::{Decision, MetStep, Rules, StepEnds, StopRequest};
use zeropp_checkpoint::under_way::{Save, SaveOutcome, UnderWay, WriterReport};

use crate::disk::SimDisk;
use crate::files::{self, save_of};
use crate::plan::Plan;
use crate::rank::Rank;

enum Job {
    Write(usize),
    Prepare(Save, Vec<WriterReport>),
    Publish(Save, Checked<std::path::PathBuf>),
}

pub(crate) struct Saves {
    store: Store,
    disk: SimDisk,
    run: String,
    under_way: UnderWay,
    ends: StepEnds,
    jobs: Vec<(u64, Job)>,
    /// The time that a write takes, in microseconds.
    pub(crate) slow: u64,
    keep: usize,
    world: usize,
    zero3: usize,
    /// The state of ranks that were left behind.
    pub(crate) left_behind: Option<Vec<Rank>>,
}

impl Saves {
    pub(crate) fn new(store: &Store, disk: &SimDisk, run: String, plan: &Plan, slow: u64) -> Saves {
        Saves {
            store: store.clone(),
            disk: disk.clone(),
            run,
            under_way: UnderWay::default(),
            ends: StepEnds::new(Rules {
                saves: Some(Pace::new(plan.every, plan.steps)),
                steps: plan.steps,
                ..Rules::default()
            }),
            jobs: Vec::new(),
            slow,
            keep: plan.keep,
            world: plan.world(),
            zero3: plan.zero3,
            left_behind: None,
        }
    }

    /// The ranks are gone.
    pub(crate) fn close(&self) {
        self.under_way.close();
        self.store.clean();
    }

    pub(crate) fn take_outcome(&self) -> Option<SaveOutcome> {
        self.under_way.take()
    }

    pub(crate) fn is_fatal(&self, outcome: &SaveOutcome, must: bool) -> bool {
        outcome.is_fatal(must, || self.store.newest().is_ok())
    }

    /// The save that is due after a step; whether the one before has to be waited for first.
    pub(crate) fn after(&mut self, step: u64, now: u64) -> bool {
        let met = MetStep { step, skipped: false, is_best: false, since: None };
        assert!(self.ends.meets(step), "updates are not validated late here");
        let request = self.ends.met(&met, StopRequest::GoOn);
        let [wanted, _] = self.ends.wanted(&met, request);
        let (saves, _) = self.ends.begins(wanted, false, self.under_way.step().is_some());
        let decision = Decision { request, saves, copies: SaveDecision::No };
        assert_eq!(self.ends.follow(&met, &decision), None, "nobody ends it");
        if saves == SaveDecision::Now {
            self.begin(step, now);
        }
        saves == SaveDecision::AfterTheOneBefore
    }

    pub(crate) fn begin(&mut self, step: u64, now: u64) {
        self.under_way.begin(save_of(step));
        let one = 50 + self.slow;
        let write = |rank| (now + one * (1 + rank as u64), Job::Write(rank));
        self.jobs.extend((0..self.world).map(write));
    }

    /// When the state is written, so that it may change.
    pub(crate) fn written_at(&self) -> Option<u64> {
        let write = |(at, job): &(u64, Job)| matches!(job, Job::Write(_)).then_some(*at);
        self.jobs.iter().filter_map(write).max()
    }

    /// When everything has ended.
    pub(crate) fn next_at(&self) -> Option<u64> {
        self.jobs.iter().map(|(at, _)| *at).min()
    }

    /// Does what is due by `now`, one call after the other, until `goes_on` says no.
    pub(crate) fn pump(&mut self, now: u64, ranks: &[Rank], goes_on: impl Fn() -> bool) {
        while goes_on() {
            let due = self.jobs.iter().enumerate().filter(|(_, (at, _))| *at <= now);
            let Some((i, _)) = due.min_by_key(|(_, (at, _))| *at) else { return };
            let (at, job) = self.jobs.remove(i);
            self.disk.set_time(at);
            self.act(at, job, ranks);
        }
    }

    fn act(&mut self, at: u64, job: Job, ranks: &[Rank]) {
        let completion =
            |save| Completion { store: &self.store, run: &self.run, keep: self.keep, save };
        match job {
            Job::Write(rank) => {
                let Some(step) = self.under_way.step() else { return };
                let of = self.left_behind.as_deref().unwrap_or(ranks);
                let parts = of[rank].parts(self.zero3);
                let pause = |wait: Duration| {
                    self.disk.pass(wait.as_micros() as u64);
                    true
                };
                let report = files::write(&self.store, step, &self.run, rank, &parts, pause);
                if let Some((save, reports)) = self.under_way.note(report, self.world) {
                    self.jobs.push((at + 50 + self.slow, Job::Prepare(save, reports)));
                }
            }
            Job::Prepare(save, reports) => {
                let prepared = completion(save).prepare(&About::default(), reports);
                self.jobs.push((at + 50 + 2 * self.slow, Job::Publish(save, prepared)));
            }
            Job::Publish(save, prepared) => {
                self.under_way.end(completion(save).publish(prepared, &self.under_way));
            }
        }
    }
}
