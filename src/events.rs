//! A run's events through `tracing`: how it begins, each step, each checkpoint, and how it ends.

use std::path::Path;

use tracing::info;
use zeropp_core::metrics::{Plan, StepMetrics, Summary};

use crate::config::{Config, Resume};

/// The target of the events that report a run's progress, of level `INFO`: `run begins`, `step`,
/// `checkpoint saved` and `run ends`, with their figures as fields. Whatever else a run has to say
/// has the path of its module as its target, and all that it wants to be read in its message.
/// Events come within the spans `run`, `rank`, `step` and `checkpoint`. Errors that a function
/// returns are no events.
pub const RUN_EVENTS: &str = "zeropp::progress";

/// A run of `plan` begins, after `done` steps where it goes on from a checkpoint.
pub(crate) fn begin(config: &Config, plan: &Plan, done: Option<u64>) {
    let begins_anew = done.is_none() && config.resume != Resume::No;
    info!(
        target: RUN_EVENTS,
        pp = plan.pp,
        zero3 = plan.zero3,
        dp = plan.dp,
        schedule = plan.schedule,
        parameters = plan.parameters,
        predicted_bubble = plan.bubble,
        predicted_bytes = plan.ranks.iter().map(|rank| rank.held.peaks.total()).max(),
        steps = config.steps,
        resumed_step = done,
        begins_anew,
        "run begins"
    );
}

/// One of `steps` steps is done.
pub(crate) fn step(m: &StepMetrics, steps: u64) {
    info!(
        target: RUN_EVENTS,
        step = m.step,
        steps,
        loss = m.loss,
        grad_norm = m.grad_norm,
        lr = m.lr,
        tokens_per_s = m.tokens_per_s,
        bubble = m.bubble,
        skipped = m.skipped,
        eval_loss = m.eval.map(|eval| eval.loss),
        eval_perplexity = m.eval.map(|eval| eval.perplexity),
        "step"
    );
}

/// The checkpoint after `step` is whole.
pub(crate) fn saved(step: u64, path: &Path) {
    info!(target: RUN_EVENTS, step, path = %path.display(), "checkpoint saved");
}

/// A run has ended as it should.
pub(crate) fn end(summary: &Summary) {
    let stopped = summary.stopped.as_ref();
    info!(
        target: RUN_EVENTS,
        steps = summary.steps,
        loss = summary.last_loss,
        tokens_per_s = summary.tokens_per_s,
        bubble = summary.bubble,
        peak_bytes = summary.peak_bytes.total(),
        total_s = summary.total_s,
        stopped_after = stopped.map(|stopped| stopped.step),
        signal = stopped.and_then(|stopped| stopped.signal),
        evaluations_no_lower = stopped.and_then(|stopped| stopped.no_lower),
        checkpoint = summary.checkpoint.as_ref().map(|path| path.display().to_string()),
        "run ends"
    );
}
