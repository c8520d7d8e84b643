//! A run from its first start to its end, in virtual time: processes that are started again,
//! ranks that meet again, and every step by its program.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use zeropp_checkpoint::Store;
use zeropp_checkpoint::attempts::{Attempts, Remedy};
use zeropp_checkpoint::places::{StateLocation, StateStores};
use zeropp_checkpoint::resume::{self, CheckFailure, Choice, NoCandidate};

use crate::disk::{Handle, Planted, SimDisk};
use crate::files;
use crate::net::Net;
use crate::plan::{Bug, Fault, Plan};
use crate::rank::{Health, Rank};
use crate::rendezvous::Received;
use crate::rng::Rng;
use crate::saves::Saves;

/// Why something stops.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The run has failed; why, in words.
    Failed(String),
    /// The process that saves is gone, and with `power` everything.
    Killed { why: String, power: bool },
    /// A rule is broken.
    Broken(String),
}

/// The results that each step must have.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Known {
    pub(crate) norms: BTreeMap<u64, u64>,
    pub(crate) states: BTreeMap<u64, Vec<(String, Vec<f32>)>>,
}

/// How a run ended.
#[derive(Debug, Default)]
pub(crate) struct End {
    pub(crate) done: bool,
    pub(crate) why: String,
    pub(crate) failures: u64,
    pub(crate) saves: u64,
    pub(crate) zombies: u64,
}

/// The inputs that ranks have brought to a collective operation, by rank.
type Brought = BTreeMap<usize, (u64, u64)>;

pub(crate) struct Sim<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) known: &'a Known,
    pub(crate) learned: Known,
    pub(crate) disk: SimDisk,
    pub(crate) handle: Handle,
    pub(crate) rng: Rng,
    pub(crate) now: u64,
    pub(crate) ticks: u64,
    next_fault: usize,
    /// The faults so far that may be named as a cause.
    pub(crate) causes: Vec<String>,
    /// The process dies at its next call to the disk, and with it the power.
    pub(crate) dies_with_power: Option<bool>,
    pub(crate) ranks: Vec<Rank>,
    pub(crate) received: Vec<Received>,
    pub(crate) net: Net,
    pub(crate) met: HashMap<(u8, usize, usize, usize), Brought>,
    pub(crate) saves: Option<Saves>,
    zombies: Vec<Saves>,
    slow_disk: u64,
    meeting: u64,
    /// Step of the newest checkpoint that was reported.
    reported: u64,
    end: End,
}

impl<'a> Sim<'a> {
    pub(crate) fn new(plan: &'a Plan, known: &'a Known) -> Sim<'a> {
        let planted = Planted {
            no_file_flush: plan.bug == Bug::FileFlush,
            no_folder_flush: plan.bug == Bug::FolderFlush,
            no_rename: plan.bug == Bug::Rename,
        };
        let disk = SimDisk::new(planted);
        Sim {
            plan,
            known,
            learned: Known::default(),
            handle: disk.handle(),
            disk,
            rng: Rng(!plan.seed),
            now: 0,
            ticks: 0,
            next_fault: 0,
            causes: Vec::new(),
            dies_with_power: None,
            ranks: Vec::new(),
            received: Vec::new(),
            net: Net::new(0, plan.bug),
            met: HashMap::new(),
            saves: None,
            zombies: Vec::new(),
            slow_disk: 0,
            meeting: 0,
            reported: 0,
            end: End::default(),
        }
    }

    /// Runs to the end; a rule that is broken is the error.
    pub(crate) fn run(mut self) -> Result<(End, Known), String> {
        // As `zeropp supervise` does.
        let mut attempts = Attempts::new(100);
        loop {
            self.handle = self.disk.handle();
            self.dies_with_power = None;
            let lived = self.live();
            self.saves = None;
            self.zombies.clear();
            let why = match lived {
                Ok(()) => break self.end.done = true,
                Err(Stop::Broken(rule)) => return Err(rule),
                Err(Stop::Failed(why)) => why,
                Err(Stop::Killed { why, power }) => {
                    if power {
                        self.disk.crash(&mut self.rng);
                    }
                    why
                }
            };
            self.named(&why)?;
            let newest = self.check_disk()?;
            self.end.failures += 1;
            if attempts.fail(newest) != Remedy::Again {
                self.end.why = why;
                break;
            }
        }
        if self.end.done && self.plan.every > 0 {
            let newest = self.check_disk()?;
            if newest != Some(self.plan.steps) && !self.disk.has_lied() {
                return Err(format!("the run is done, and its newest checkpoint is {newest:?}"));
            }
        }
        Ok((self.end, self.learned))
    }

    /// A failure names one of the faults that came.
    fn named(&self, why: &str) -> Result<(), String> {
        match self.causes.iter().any(|cause| why.contains(cause)) {
            true => Ok(()),
            false => Err(format!("{why:?} names none of {:?}", self.causes)),
        }
    }

    /// Every checkpoint that has its name is whole and as its step left it; none that was reported
    /// is lost.
    fn check_disk(&self) -> Result<Option<u64>, String> {
        let store = Store::on(Arc::new(self.disk.handle()), "runs/ckpt");
        let steps = store.steps().map_err(|e| e.to_string())?;
        for step in &steps {
            match files::read(&store, *step) {
                Ok(read) if Some(&read) == self.known.states.get(step) => {}
                Ok(_) => return Err(format!("the checkpoint of step {step} is not its state")),
                Err(_) if self.disk.has_lied() => {}
                Err(e) => return Err(format!("after {} failures: {e}", self.end.failures)),
            }
        }
        let newest = steps.last().copied();
        match newest.unwrap_or(0) < self.reported && !self.disk.has_lied() {
            true => {
                Err(format!("step {} was told to be saved, and {newest:?} is there", self.reported))
            }
            false => Ok(newest),
        }
    }

    fn killed(&self) -> Option<Stop> {
        let power = self.dies_with_power?;
        let why = if power { "the power went" } else { "the process was killed" };
        self.handle.fuse.is_blown().then(|| Stop::Killed { why: why.into(), power })
    }

    /// The disk's error, unless the process is dead.
    fn unless_killed(&self, error: impl ToString) -> Stop {
        self.killed().unwrap_or_else(|| Stop::Failed(error.to_string()))
    }

    /// The processes from their start to their end: `zeropp run --save ckpt --resume`.
    fn live(&mut self) -> Result<(), Stop> {
        let store = Store::on(Arc::new(self.handle.clone()), "runs/ckpt");
        let steps = resume::candidates(&store, Choice::Newest).map_err(|e| match e {
            NoCandidate::Checkpoint(e) => self.unless_killed(e),
            NoCandidate::NoSuchStep(_) => Stop::Broken("no step was asked for".into()),
        })?;
        let open = |step| store.open(step)?.check_sizes().map(|()| step);
        let usable = resume::first_usable(&steps, self.plan.fall_back, open);
        let (mut first, _) = usable.map_err(|e| self.unless_killed(e))?;
        let seen = store.steps().map_err(|e| self.unless_killed(e))?.last().copied();
        let (_lock, _) = store.lock().map_err(|e| self.unless_killed(e))?;
        resume::check_unchanged(&store, true, seen).map_err(|e| self.unless_killed(e))?;
        // As with `--max-recoveries`.
        let mut attempts = Attempts::new(if self.plan.threads { 50 } else { 0 });
        loop {
            let stop = match self.epoch(&store, first) {
                Ok(()) => return Ok(()),
                Err(stop) => stop,
            };
            let Stop::Failed(why) = stop else { return Err(stop) };
            if let Some(killed) = self.killed() {
                return Err(killed);
            }
            let at = self.ranks.iter().map(|rank| rank.step).min().unwrap_or(0) + 1;
            let is_final = why.contains("checkpoint");
            if is_final || attempts.fail(Some(at)) != Remedy::Again {
                return Err(Stop::Failed(why));
            }
            self.named(&why).map_err(Stop::Broken)?;
            self.end.failures += 1;
            first = self.go_back(&store)?;
        }
    }

    /// The ranks are gone and others come: from where.
    fn go_back(&mut self, store: &Store) -> Result<Option<u64>, Stop> {
        if let Some(mut saves) = self.saves.take() {
            if self.plan.bug != Bug::Generation {
                saves.close();
            }
            // A rank that does not come back is left behind, and its writers with it.
            saves.left_behind = Some(self.ranks.clone());
            self.zombies.push(saves);
            self.end.zombies += 1;
        }
        Ok(store.steps().map_err(|e| self.unless_killed(e))?.last().copied())
    }

    /// The ranks from their meeting to their end.
    fn epoch(&mut self, store: &Store, first: Option<u64>) -> Result<(), Stop> {
        let plan = self.plan;
        self.meeting += 1;
        self.net = Net::new(self.meeting, plan.bug);
        let run = match plan.bug {
            Bug::Generation => "run".to_owned(),
            _ => format!("{:x}", self.meeting),
        };
        let processes = if plan.threads { 1 } else { plan.world() };
        self.received = (0..processes).map(|_| Received::default()).collect();
        let places =
            |i: usize| (i % plan.pp(), i / plan.pp() % plan.zero3, i / plan.pp() / plan.zero3);
        let placement = &plan.program.placement;
        self.ranks = (0..plan.world()).map(|i| Rank::new(places(i), placement)).collect();
        if plan.every > 0 {
            self.saves = Some(Saves::new(store, &self.disk, run, plan, self.slow_disk));
        }
        let step = self.load(store, first)?;
        for step in step + 1..=plan.steps {
            self.step(step)?;
            self.after_step(step)?;
        }
        self.settle(true)
    }

    /// As the ranks' loader does: all read what they need, and all take an older one where one of
    /// them finds damage.
    fn load(&mut self, store: &Store, first: Option<u64>) -> Result<u64, Stop> {
        let mut next = first;
        while let Some(step) = next {
            // Others may be at the folder meanwhile.
            self.now += 200 + self.slow_disk;
            self.pump()?;
            let all = files::read(store, step);
            if let Some(killed) = self.killed() {
                return Err(killed);
            }
            match all {
                Ok(all) => {
                    if self.known.states.get(&step) != Some(&all) {
                        return Err(Stop::Broken(format!("step {step} is not what it was")));
                    }
                    self.ranks.iter_mut().for_each(|rank| rank.load(step, &all));
                    store.set_aside(step).map_err(|e| self.unless_killed(e))?;
                    return Ok(step);
                }
                Err(e) => {
                    let verdict = CheckFailure::of(e, store.path(step));
                    let places = StateStores { checkpoints: store.clone(), copies: None };
                    let read = StateLocation::on_disk(step);
                    let older = places.before(read).map_err(|e| self.unless_killed(e))?;
                    let fallen = verdict.fall_back(read, older, self.plan.fall_back);
                    let (older, _) = fallen.map_err(|e| self.unless_killed(e))?;
                    // A reported checkpoint was damaged by a disk that lied, and is given up
                    // knowingly.
                    next = Some(older.step);
                }
            }
        }
        Ok(0)
    }

    /// The writers, and those that were left behind, do what is due.
    pub(crate) fn pump(&mut self) -> Result<(), Stop> {
        let fuse = self.handle.fuse.clone();
        for saves in self.zombies.iter_mut().chain(&mut self.saves) {
            saves.pump(self.now, &self.ranks, || !fuse.is_blown());
        }
        self.killed().map_or(Ok(()), Err)
    }

    fn conclude(&mut self, must: bool) -> Result<(), Stop> {
        let Some(saves) = &self.saves else { return Ok(()) };
        let Some(outcome) = saves.take_outcome() else { return Ok(()) };
        let is_fatal = saves.is_fatal(&outcome, must);
        match outcome.result {
            Ok(()) => {
                self.reported = self.reported.max(outcome.step);
                self.end.saves += 1;
            }
            Err(error) if is_fatal => return Err(self.unless_killed(error)),
            Err(error) => self.named(&error.to_string()).map_err(Stop::Broken)?,
        }
        Ok(())
    }

    fn after_step(&mut self, step: u64) -> Result<(), Stop> {
        let behind = self.ranks.iter().find(|rank| rank.step != step);
        if let Some(rank) = behind {
            return Err(Stop::Broken(format!("after step {step} a rank is at {}", rank.step)));
        }
        if self.plan.bug == Bug::None && self.plan.faults.is_empty() && self.plan.every == 0 {
            self.learn(step);
        } else if self.known.norms.get(&step) != self.learned.norms.get(&step) {
            return Err(Stop::Broken(format!("step {step} has other bits")));
        }
        self.pump()?;
        self.conclude(false)?;
        let now = self.now;
        let Some(saves) = &mut self.saves else { return Ok(()) };
        saves.slow = self.slow_disk;
        if saves.after(step, now) {
            self.settle(false)?;
            let now = self.now;
            self.saves.as_mut().expect("there still").begin(step, now);
        }
        Ok(())
    }

    fn learn(&mut self, step: u64) {
        let mut all: BTreeMap<String, Vec<f32>> = BTreeMap::new();
        for rank in &self.ranks {
            for part in rank.parts(self.plan.zero3) {
                let whole = all.entry(part.name).or_insert_with(|| vec![0.0; part.whole]);
                whole[part.offset..][..part.values.len()].copy_from_slice(&part.values);
            }
        }
        self.learned.states.insert(step, all.into_iter().collect());
    }

    /// Waits until the save under way has ended.
    fn settle(&mut self, must: bool) -> Result<(), Stop> {
        while let Some(at) = self.saves.as_ref().and_then(Saves::next_at) {
            self.now = self.now.max(at);
            self.pump()?;
        }
        self.conclude(must)
    }

    /// Brings on what is to go wrong by now; a rank or process that is hit ends the step.
    pub(crate) fn strike(&mut self) -> Result<(), Stop> {
        self.ticks += 1;
        while let Some((at, fault)) = self.plan.faults.get(self.next_fault).copied() {
            if at > self.ticks {
                return Ok(());
            }
            self.next_fault += 1;
            self.hit(fault)?;
        }
        Ok(())
    }

    fn hit(&mut self, fault: Fault) -> Result<(), Stop> {
        let until = |ms: u64| self.now + 1000 * ms;
        match fault {
            Fault::Clock => {}
            Fault::Slow(rank) => self.ranks[rank].health = Health::Slow,
            Fault::SlowDisk(ms) => {
                self.slow_disk = 1000 * ms;
            }
            Fault::Full(ms) => {
                self.causes.push("no storage space".into());
                self.disk.fill_until(until(ms));
            }
            Fault::Lie(flushes) => {
                self.causes.push("is damaged".into());
                self.disk.lie_in(flushes);
            }
            Fault::Cut | Fault::Twice | Fault::Swapped => {
                self.causes.push("its connection closed".into());
                self.causes.push("changed on its way".into());
                self.net.next = Some(fault);
            }
            Fault::Hang(rank) => {
                self.causes.push(format!("rank {rank} does not answer"));
                self.ranks[rank].health = Health::Hung;
            }
            Fault::Error(rank) => {
                let why = format!("rank {rank} is out of memory");
                self.causes.push(why.clone());
                self.fail(rank, &why);
            }
            Fault::Kill(rank) if !self.plan.threads && rank != 0 => {
                let why = format!("rank {rank} was killed");
                self.causes.push(why.clone());
                self.fail(rank, &why);
            }
            Fault::Kill(_) | Fault::Power => {
                let power = matches!(fault, Fault::Power);
                let why = if power { "the power went" } else { "the process was killed" };
                self.causes.push(why.into());
                return Err(Stop::Killed { why: why.into(), power });
            }
            Fault::KillAtCall(calls) | Fault::PowerAtCall(calls) => {
                let power = matches!(fault, Fault::PowerAtCall(_));
                let why = if power { "the power went" } else { "the process was killed" };
                self.causes.push(why.into());
                self.dies_with_power = Some(power);
                self.handle.fuse.blow_after(calls);
            }
        }
        Ok(())
    }

    /// A rank ends: all others are notified, with the reason.
    pub(crate) fn fail(&mut self, rank: usize, why: &str) {
        self.ranks[rank].health = Health::Gone;
        let own = self.process(rank);
        for (process, received) in self.received.iter().enumerate() {
            if process == own || self.plan.bug != Bug::Poison {
                received.receive(format!("rank {rank}"), why);
            }
        }
    }

    pub(crate) fn process(&self, rank: usize) -> usize {
        if self.plan.threads { 0 } else { rank }
    }
}
