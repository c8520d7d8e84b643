//! The facts of a run before its first step.

use zeropp_core::metrics::{Plan, RunHeader};

use crate::config::Config;

/// The header of a run of `plan` that began at `wall_time`, after `done` steps where it goes on.
pub(crate) fn header(config: &Config, plan: &Plan, wall_time: f64, done: Option<u64>) -> RunHeader {
    let settings = config.resolved().texts();
    let settings = settings.filter_map(|(option, text)| Some((option.key.to_owned(), text?)));
    RunHeader {
        name: config.run_name(),
        command: std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect(),
        version: env!("CARGO_PKG_VERSION").into(),
        wall_time,
        resumed_step: done,
        pp: plan.pp,
        zero3: plan.zero3,
        dp: plan.dp,
        schedule: plan.schedule.clone(),
        parameters: plan.parameters,
        tokens_per_step: config.tokens_per_step() as u64,
        steps: config.steps,
        settings: settings.collect(),
    }
}
