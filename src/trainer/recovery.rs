//! Going on after a rank has failed: the ranks of this process end, meet again and go on from the
//! newest complete checkpoint (ADR 35).

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tracing::warn;
use zeropp_checkpoint::attempts::{self, Attempts, SAME_PLACE};
use zeropp_checkpoint::places::StateLocation;
use zeropp_core::metrics::StepMetrics;

use crate::Error;
use crate::config::EngineKind;
use crate::plan::blueprint::Blueprint;
use crate::run::shared::Export;

/// Most steps whose bits are kept, to be held against those of steps that are done again.
const BITS_MAX: usize = 4096;

/// The recoveries of a run.
pub(crate) struct Recoveries {
    /// None where the run cannot recover; a place is the step that was under way.
    attempts: Attempts,
    /// Steps that were done again.
    pub(crate) redone: u64,
    /// Seconds from failures to the first step that was done after them.
    pub(crate) seconds: f64,
    /// The last step that any rank 0 has reported, also one that was done again.
    at: u64,
    /// The last step that was reported to the program.
    reported: u64,
    /// Since when there is a failure without a step after it.
    since: Option<Instant>,
    /// Those of the last steps.
    bits: VecDeque<StepBits>,
    differed: bool,
}

/// The bits of a step's loss and gradient norm.
#[derive(Clone, Copy, PartialEq)]
struct StepBits {
    step: u64,
    loss: u64,
    grad_norm: u64,
}

/// The answer to a failure.
pub(crate) enum RecoveryAnswer {
    /// To recover.
    Recover,
    /// To end; in these words more, where there are any.
    End(Option<String>),
}

impl Recoveries {
    /// Those of a run whose ranks are all in this process, as threads that it has started; others
    /// cannot be brought together again.
    pub(crate) fn new(bp: &Blueprint, export: Export, is_given: bool) -> Recoveries {
        let threads = bp.config.engine == EngineKind::Threads && !is_given;
        let can = threads && !matches!(export, Export::Gradients | Export::Evaluation);
        Recoveries {
            attempts: Attempts::new(if can { bp.config.max_recoveries } else { 0 }),
            redone: 0,
            seconds: 0.0,
            at: 0,
            reported: 0,
            since: None,
            bits: VecDeque::new(),
            differed: false,
        }
    }

    /// How many there were.
    pub(crate) fn made(&self) -> u64 {
        self.attempts.made()
    }

    /// The run begins after step `done`.
    pub(crate) fn begin(&mut self, done: u64) {
        (self.at, self.reported) = (done, done);
    }

    /// Whether an epoch that has ended with `error`, of which the first sign was at `at`, is to be
    /// recovered from: where a rank has failed, and not by what would come again.
    pub(crate) fn remedy(&mut self, error: &Error, at: Instant) -> RecoveryAnswer {
        let max = self.attempts.max();
        let may = matches!(error, Error::Rank { failure, .. } if !failure.comes_again());
        if max == 0 || !may {
            return RecoveryAnswer::End(None);
        }
        let step = self.at + 1;
        match self.attempts.fail(Some(step)) {
            attempts::Remedy::Again => {
                self.since.get_or_insert(at);
                RecoveryAnswer::Recover
            }
            attempts::Remedy::SamePlace => RecoveryAnswer::End(Some(format!(
                "step {step} has failed {SAME_PLACE} times, so the run ends"
            ))),
            attempts::Remedy::UsedUp => RecoveryAnswer::End(Some(format!(
                "max-recoveries = {max}: this many recoveries were made already"
            ))),
        }
    }

    /// How long the ranks wait before they are started again.
    pub(crate) fn pause(&self) -> Duration {
        self.attempts.pause()
    }

    /// Whether the ranks are where the program is: at the step that was reported to it last.
    pub(crate) fn is_caught_up(&self) -> bool {
        self.at >= self.reported
    }

    /// The ranks go on after step `done` again.
    pub(crate) fn go_back(&mut self, done: u64) {
        self.at = done;
    }

    /// The ranks go on in another shape: what they do again has other bits.
    pub(crate) fn change_shape(&mut self) {
        self.bits.clear();
        self.attempts.go_on_with_fewer();
    }

    /// Tells of a recovery that begins, from the state of a step or anew; in other words, `without`
    /// whom.
    pub(crate) fn tell(&self, error: &Error, from: Option<StateLocation>, without: Option<&str>) {
        let from = match from {
            Some(StateLocation { step, in_memory: true }) => {
                format!("step {step}, copied in memory")
            }
            Some(StateLocation { step, .. }) => format!("step {step}"),
            None => "the beginning".into(),
        };
        let (made, max) = (self.made(), self.attempts.max());
        let who = without
            .map_or("the ranks go on".into(), |lost| format!("the run goes on without {lost},"));
        warn!("{error}\nrecovery {made} of {max}: {who} from {from}");
    }

    /// Whether a step is one that the program has seen; it is done again then, to the same bits.
    pub(crate) fn is_redone(&mut self, m: &StepMetrics) -> bool {
        self.at = m.step;
        if let Some(since) = self.since.take() {
            self.seconds += since.elapsed().as_secs_f64();
        }
        if self.attempts.max() == 0 {
            return false;
        }
        let (loss, grad_norm) = (m.loss.to_bits(), m.grad_norm.to_bits());
        let bits = StepBits { step: m.step, loss, grad_norm };
        if m.step > self.reported {
            self.reported = m.step;
            self.bits.push_back(bits);
            if self.bits.len() > BITS_MAX {
                self.bits.pop_front();
            }
            return false;
        }
        self.redone += 1;
        let before = self.bits.iter().find(|known| known.step == m.step);
        let same = before.is_none_or(|known| *known == bits);
        if !same && !std::mem::replace(&mut self.differed, true) {
            warn!(
                "step {} was repeated with a different result (loss {} now): a device or a program \
                 whose results vary. This is reported once",
                m.step, m.loss
            );
        }
        true
    }
}
