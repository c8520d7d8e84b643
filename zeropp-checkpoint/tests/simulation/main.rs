//! Whole runs in virtual time, on a disk and a network that fail as a seed says.
//!
//! Decisions are made by the code of real runs: the folder of checkpoints, a rank's file, the end
//! of a save, what follows a step, which checkpoint a run goes on from, whether it is started
//! again; a board of received losses, and sealed frames; and programs that the verifier has
//! accepted. Ranks compute whole numbers that show any change of order.
//!
//! `ZEROPP_SEED=n cargo test --release -p zeropp-checkpoint --test simulation seeds_of` replays a
//! seed, `ZEROPP_SEEDS=n` runs so many.

mod disk;
mod failpoints;
mod files;
mod net;
mod plan;
mod rank;
mod rendezvous;
mod reschedule;
mod rng;
mod run;
mod saves;
#[path = "../../../zeropp-comm/src/sealed.rs"]
#[allow(dead_code)]
mod sealed;
mod step;
mod step_ends;
mod patience {
    //! Time is the simulation's own: it looks at the board, and never waits at it.

    #[derive(Clone, Copy)]
    pub(crate) struct Deadline;

    impl Deadline {
        pub(crate) fn after(_: std::time::Duration) -> Deadline {
            Deadline
        }
    }
}
mod sync {
    //! The locks that the board's own crate chooses without its feature `shuttle`.
    use parking_lot::MutexGuard;
    pub(crate) use parking_lot::{Condvar, Mutex};

    pub(crate) fn wait<T>(
        _: &Condvar,
        _: &mut MutexGuard<'_, T>,
        _: super::patience::Deadline,
    ) -> bool {
        unreachable!("the simulation looks at the board, and never waits at it")
    }
}

use plan::{Bug, Plan};
use run::{End, Known, Sim};

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect("a number"))
}

/// The results of a seed's run where nothing goes wrong.
fn known(plan: &Plan) -> Known {
    let calm = Plan { faults: Vec::new(), every: 0, bug: Bug::None, ..plan.clone() };
    let nothing = Known::default();
    let (end, learned) = Sim::new(&calm, &nothing).run().expect("nothing goes wrong");
    assert!(end.done && learned.norms.len() == plan.steps as usize);
    learned
}

fn simulate(seed: u64, bug: Bug) -> Result<End, String> {
    let plan = Plan::new(seed, bug);
    let known = known(&plan);
    Sim::new(&plan, &known).run().map(|(end, _)| end)
}

#[test]
fn seeds_of_runs_that_fail_in_many_ways_lose_nothing() {
    let seeds = match number("ZEROPP_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("ZEROPP_SEEDS").unwrap_or(500),
    };
    let (mut all, mut done, n) = (End::default(), 0, seeds.end - seeds.start);
    for seed in seeds {
        let end = simulate(seed, Bug::None).unwrap_or_else(|rule| {
            let plan = Plan::new(seed, Bug::None);
            panic!(
                "seed {seed}: {rule}\nfaults {:?}\nreplay it with ZEROPP_SEED={seed}",
                plan.faults
            )
        });
        if n == 1 {
            println!("{:?}\n{end:?}", Plan::new(seed, Bug::None));
        }
        done += u64::from(end.done);
        all.failures += end.failures;
        all.saves += end.saves;
        all.zombies += end.zombies;
    }
    println!("{n} seeds: {done} runs came to their end; {all:?}");
    assert!(n == 1 || done > n * 3 / 4 && all.failures > n / 2 && all.saves > n, "{all:?}");
}

#[test]
fn a_planted_bug_is_found_within_500_seeds() {
    let bugs = [
        Bug::FileFlush,
        Bug::FolderFlush,
        Bug::Rename,
        Bug::Poison,
        Bug::Echo,
        Bug::Generation,
        Bug::HoldBack,
    ];
    let first = |bug: Bug| {
        let found = (0..500).find_map(|seed| Some((seed, simulate(seed, bug).err()?)));
        println!("{bug:?}: {found:?}");
        found.is_none().then_some(bug)
    };
    let missed: Vec<Bug> = bugs.into_iter().filter_map(first).collect();
    assert!(missed.is_empty(), "not found: {missed:?}");
}

#[test]
fn a_seed_is_the_same_run_every_time() {
    for seed in 0..20 {
        let run = || format!("{:?}", simulate(seed, Bug::None));
        assert_eq!(run(), run(), "seed {seed}");
    }
}
