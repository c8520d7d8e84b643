//! The plan of a seed: a mesh, a schedule, how it saves, and which faults come when.

use zeropp_schedule::ir::Schedule;
use zeropp_schedule::lower::{LowerOptions, lower};
use zeropp_schedule::schedules::{Shape, generate};
use zeropp_schedule::verify::{VerifyLimits, verify};

use crate::rng::Rng;

const KINDS: [&str; 6] = ["zeropp", "gpipe", "1f1b", "bf-pp", "zb-h1", "interleaved-zb"];

/// Which piece of the code is taken out, for tests of the simulation itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Bug {
    #[default]
    None,
    FileFlush,
    FolderFlush,
    Rename,
    /// The rank that fails does not report it to the others.
    Poison,
    /// Frames are taken as they come.
    Echo,
    /// Ranks that were left behind save as if they were still the run's, under its name.
    Generation,
    /// The update does not wait for the writers.
    HoldBack,
}

/// A fault.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// A rank's process is killed.
    Kill(usize),
    /// A rank fails in an action.
    Error(usize),
    /// A rank stops for good, in an action.
    Hang(usize),
    /// A rank is slow from now on, but not beyond a timeout.
    Slow(usize),
    /// The power goes, everywhere.
    Power,
    /// The process that saves is killed so many calls to the disk from now.
    KillAtCall(u64),
    /// The power goes so many calls to the disk from now.
    PowerAtCall(u64),
    /// No space for so many milliseconds.
    Full(u64),
    /// Saving takes so many milliseconds more, from now on.
    SlowDisk(u64),
    /// A flush of a file, so many from now, is reported as done and is not.
    Lie(u64),
    /// The next frame between processes is lost with its connection.
    Cut,
    /// It comes twice.
    Twice,
    /// It comes after the one that follows it.
    Swapped,
    /// The clock of the day is set, which nothing may depend on.
    Clock,
}

#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) program: Schedule,
    pub(crate) zero3: usize,
    pub(crate) dp: usize,
    pub(crate) steps: u64,
    pub(crate) every: u64,
    pub(crate) keep: usize,
    pub(crate) fall_back: bool,
    /// All ranks are threads of one process, and recover in it.
    pub(crate) threads: bool,
    /// When, in actions of all ranks from the beginning, and what.
    pub(crate) faults: Vec<(u64, Fault)>,
    pub(crate) bug: Bug,
}

impl Plan {
    pub(crate) fn new(seed: u64, bug: Bug) -> Plan {
        let mut rng = Rng(seed);
        let program = program(&mut rng);
        let (zero3, dp) = (1 + rng.below(2) as usize, 1 + rng.below(2) as usize);
        let steps = 4 + rng.below(5);
        let mut plan = Plan {
            seed,
            zero3,
            dp,
            steps,
            every: 1 + rng.below(2),
            keep: 1 + rng.below(2) as usize,
            fall_back: rng.once_in(2),
            threads: rng.once_in(2),
            faults: Vec::new(),
            bug,
            program,
        };
        let actions: usize = plan.program.ranks.iter().map(Vec::len).sum();
        let ticks = (actions * plan.zero3 * plan.dp) as u64 * steps;
        let world = plan.world() as u64;
        for _ in 0..rng.below(6) {
            let at = rng.below(ticks + ticks / 4);
            let fault = fault(&mut rng, world);
            plan.faults.push((at, fault));
        }
        plan.faults.sort_by_key(|(at, _)| *at);
        plan
    }

    pub(crate) fn pp(&self) -> usize {
        self.program.pp()
    }

    pub(crate) fn world(&self) -> usize {
        self.pp() * self.zero3 * self.dp
    }
}

fn fault(rng: &mut Rng, world: u64) -> Fault {
    let rank = rng.below(world) as usize;
    match rng.below(16) {
        0 | 1 => Fault::Kill(rank),
        2 => Fault::Error(rank),
        3 => Fault::Hang(rank),
        4 => Fault::Slow(rank),
        5 => Fault::Power,
        6 => Fault::KillAtCall(rng.below(60)),
        7 | 8 => Fault::PowerAtCall(rng.below(60)),
        9 => Fault::Full(1 + rng.below(6000)),
        10 | 11 => Fault::SlowDisk(1 + rng.below(40)),
        12 => Fault::Lie(rng.below(6)),
        13 => Fault::Cut,
        14 => Fault::Twice,
        _ => match rng.once_in(4) {
            true => Fault::Clock,
            false => Fault::Swapped,
        },
    }
}

/// A program that the verifier has accepted, as for any run.
fn program(rng: &mut Rng) -> Schedule {
    loop {
        let kind = KINDS[rng.below(KINDS.len() as u64) as usize];
        let pp = 1 + rng.below(3) as usize;
        let virtual_stages = 1 + rng.below(2) as usize;
        let micro_batches = pp * (1 + rng.below(2) as usize);
        let unit = 1 + rng.below(micro_batches as u64) as usize;
        let shape = Shape { pp, virtual_stages, micro_batches, unit };
        let Ok(schedule) = generate(kind, &shape) else { continue };
        let options = LowerOptions { replicas: true, ..LowerOptions::default() };
        let program = lower(&schedule, &options);
        verify(&program, &VerifyLimits::default()).expect("a generator's program is right");
        return program;
    }
}
