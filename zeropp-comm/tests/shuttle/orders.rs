//! A scenario in many orders of its threads.

use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, Runner};

/// Tries `scenario` with schedules of both kinds.
pub(crate) fn every_order(scenario: impl Fn() + Send + Sync + Copy + 'static) {
    let schedules = std::env::var("ZEROPP_SCHEDULES").map_or(300, |n| n.parse().expect("a number"));
    let random = RandomScheduler::new_from_seed(1, schedules);
    let few_changes = PctScheduler::new_from_seed(2, 3, schedules);
    assert_eq!(tried(random, scenario), schedules);
    assert_eq!(tried(few_changes, scenario), schedules);
}

/// How many schedules there were, all of which ended well.
fn tried(
    scheduler: impl Scheduler + 'static,
    scenario: impl Fn() + Send + Sync + 'static,
) -> usize {
    // Tensors are made on the ranks' stacks.
    let mut config = Config::new();
    config.stack_size = 1 << 20;
    Runner::new(scheduler, config).run(scenario)
}
