//! What all ranks do at the end of a step, as a state machine without I/O: requests to the run,
//! skipped steps, validation losses and due saves go in; whether ranks meet, what is saved and
//! whether the run ends come out. Every rank has one, and all come to the same
//! (`zeropp-checkpoint/tests/simulation/step_ends.rs`).

use serde::{Deserialize, Serialize};

use crate::pace::{NextSave, Pace, SaveDecision, StepEnd};

/// What a rank's process asks of the run, as far as the rank knows; the largest of all ranks'
/// counts.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub enum StopRequest {
    /// Nothing.
    #[default]
    GoOn,
    /// Save after this step and go on.
    Save,
    /// Save after this step and end; for a signal, or for the program where it is 0.
    Stop(u8),
}

impl StopRequest {
    /// As two bytes of a message.
    pub fn to_bytes(self) -> [u8; 2] {
        match self {
            StopRequest::GoOn => [0, 0],
            StopRequest::Save => [1, 0],
            StopRequest::Stop(signal) => [2, signal],
        }
    }

    /// Reads what [`to_bytes`](Self::to_bytes) gave.
    pub fn from_bytes(bytes: [u8; 2]) -> StopRequest {
        match bytes {
            [1, _] => StopRequest::Save,
            [2, signal] => StopRequest::Stop(signal),
            _ => StopRequest::GoOn,
        }
    }

    /// The signal that asked for the end.
    pub fn signal(self) -> Option<i32> {
        match self {
            StopRequest::Stop(signal) if signal > 0 => Some(signal.into()),
            _ => None,
        }
    }
}

/// The steps in a row that were skipped because a gradient was not finite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Skipped {
    /// The first of them, where the last step was one.
    first: Option<u64>,
    /// How many.
    in_a_row: u64,
}

impl Skipped {
    fn see(&mut self, step: u64, skipped: bool) {
        *self = match (skipped, self.first) {
            (false, _) => Skipped::default(),
            (true, None) => Skipped { first: Some(step), in_a_row: 1 },
            (true, first) => Skipped { first, in_a_row: self.in_a_row + 1 },
        };
    }
}

/// What is due after which steps, as the settings say.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rules {
    /// Whether updates are validated in the step after theirs, so that not every step ends with a
    /// meeting.
    pub late: bool,
    /// The checkpoints, where the run saves.
    pub saves: Option<Pace>,
    /// The copies in memory, where it makes any.
    pub copies: Option<Pace>,
    /// Every so many steps, and after the last, a validation loss is measured; 0 is never.
    pub eval_every: u64,
    /// The last step by the settings.
    pub steps: u64,
    /// The program reads the weights every so many steps; 0 is never.
    pub read_every: u64,
    /// Every so many steps layers are looked at, in a step that is done once and is validated by
    /// its end; 0 is never.
    pub look_every: u64,
    /// Skipped steps in a row that end the run; 0 is no limit.
    pub max_skipped: u64,
    /// Validation losses in a row that are no lower and end the run; 0 is no limit.
    pub patience: u64,
}

impl Rules {
    /// Whether a validation loss is due after `step`.
    pub fn evaluates(&self, step: u64) -> bool {
        self.eval_every > 0 && (step == self.steps || step.is_multiple_of(self.eval_every))
    }

    /// Whether a checkpoint or a copy is due after `step`.
    fn saves(&self, step: u64) -> bool {
        self.saves.iter().chain(&self.copies).any(|pace| pace.is_due(step))
    }

    /// `since` where so many losses in a row that were no lower end the run.
    pub fn out_of_patience(&self, since: Option<u64>) -> Option<u64> {
        since.filter(|since| self.patience > 0 && *since >= self.patience)
    }
}

/// What all ranks know of a step at whose end they meet.
#[derive(Clone, Copy, Debug)]
pub struct MetStep {
    /// Its number.
    pub step: u64,
    /// Whether its update was skipped.
    pub skipped: bool,
    /// Whether its validation loss is the lowest so far, and its state to be kept for that.
    pub is_best: bool,
    /// Validation losses since the lowest, where there was any.
    pub since: Option<u64>,
}

/// What rank 0 decides after a step, for all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The largest request.
    pub request: StopRequest,
    /// Whether a checkpoint begins.
    pub saves: SaveDecision,
    /// Whether a copy does.
    pub copies: SaveDecision,
}

/// Why a run ends after a step before its last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// So many steps in a row were skipped, from this one on.
    Diverged {
        /// The first of them.
        first: u64,
        /// How many.
        in_a_row: u64,
    },
    /// It was asked to, by a signal where there is one, or by the program.
    Asked {
        /// The signal.
        signal: Option<i32>,
    },
    /// So many validation losses in a row were no lower.
    NoLower {
        /// How many.
        since: u64,
    },
}

/// A rank's view of the ends of steps.
#[derive(Clone, Debug)]
pub struct StepEnds {
    rules: Rules,
    last: u64,
    skipped: Skipped,
    /// A save is due as soon as a step is finite.
    save_pending: bool,
    /// A save was asked for and has not begun.
    save_asked: bool,
    /// What ranks asked for after the step before, where they left it without meeting.
    asked: StopRequest,
    /// Whether they are to meet after the next.
    meet: bool,
}

impl StepEnds {
    /// Of a run by `rules`.
    pub fn new(rules: Rules) -> StepEnds {
        StepEnds {
            rules,
            last: rules.steps,
            skipped: Skipped::default(),
            save_pending: false,
            save_asked: false,
            asked: StopRequest::GoOn,
            meet: false,
        }
    }

    /// The rules.
    pub fn rules(&self) -> &Rules {
        &self.rules
    }

    /// The ranks run steps until `last`.
    pub fn run_until(&mut self, last: u64) {
        self.last = last;
    }

    /// What is asked of the run, of what is known before the ranks of a step meet.
    pub fn asked(&self) -> StopRequest {
        self.asked
    }

    /// A step at whose end ranks did not meet, once its outcome is known: what they asked for
    /// meanwhile, and whether one of them wants to meet.
    pub fn left(&mut self, step: u64, skipped: bool, asked: StopRequest, meet: bool) {
        self.skipped.see(step, skipped);
        (self.asked, self.meet) = (asked, meet);
    }

    /// Whether ranks meet at the end of `step`, before any of them begins the next: where something
    /// may follow that all do together, or nothing at all.
    pub fn meets(&self, step: u64) -> bool {
        let Rules { late, read_every, look_every, max_skipped, .. } = self.rules;
        let is_every = |every: u64, step: u64| every > 0 && step.is_multiple_of(every);
        !late
            || step == self.last
            || self.meet
            || self.asked > StopRequest::GoOn
            || self.save_pending
            || self.save_asked
            || self.rules.saves(step)
            || self.rules.evaluates(step)
            || is_every(read_every, step)
            || is_every(look_every, step)
            || is_every(look_every, step + 1)
            || max_skipped > 0 && self.skipped.in_a_row + 1 >= max_skipped
    }

    /// Ranks have met after a step; what is asked of the run then, where its ranks asked for
    /// `asked`.
    pub fn met(&mut self, met: &MetStep, asked: StopRequest) -> StopRequest {
        self.skipped.see(met.step, met.skipped);
        let before = std::mem::take(&mut self.asked);
        self.meet = false;
        let tired = self.rules.out_of_patience(met.since);
        let stop = tired.map_or(StopRequest::GoOn, |_| StopRequest::Stop(0));
        asked.max(before).max(stop)
    }

    /// On rank 0: the checkpoint and the copy that are to follow a step after which this was asked
    /// for. A run that has diverged is not saved.
    pub fn wanted(&mut self, met: &MetStep, request: StopRequest) -> [NextSave; 2] {
        if self.diverged().is_some() {
            return [NextSave::Nothing; 2];
        }
        let ends = met.step == self.last || matches!(request, StopRequest::Stop(_));
        let (step, is_good, is_best) = (met.step, !met.skipped, met.is_best);
        let asked = request == StopRequest::Save;
        let end = StepEnd { step, is_good, asked, is_best, ends };
        let save = self.rules.saves.as_mut().map(|pace| pace.after(end));
        // The others are requests for a checkpoint, and the end of a run needs no copy.
        let end = StepEnd { asked: false, is_best: false, ..end };
        let copies = self.rules.copies.as_mut().filter(|_| is_good && !ends);
        let copy = copies.map(|pace| pace.after(end));
        [save, copy].map(|wanted| wanted.unwrap_or(NextSave::Nothing))
    }

    /// On rank 0: where blocks move after this step, a checkpoint or a copy that is `wanted`
    /// follows the next one, unless it is the last or the best: the move would have to wait for it.
    pub fn put_off(&mut self, wanted: [NextSave; 2]) -> [NextSave; 2] {
        let paces = [&mut self.rules.saves, &mut self.rules.copies];
        let mut each = paces.into_iter().zip(wanted).map(|(pace, wanted)| match (pace, wanted) {
            (Some(pace), NextSave::UnlessUnderWay) => {
                pace.put_off();
                NextSave::Nothing
            }
            (_, wanted) => wanted,
        });
        std::array::from_fn(|_| each.next().expect("two"))
    }

    /// On rank 0: whether the checkpoint, or the copy, that is `wanted` begins, where one may be
    /// `under_way`, and whether it is to be reported that it is left out for that: the first is.
    pub fn begins(
        &mut self,
        wanted: NextSave,
        is_copy: bool,
        under_way: bool,
    ) -> (SaveDecision, bool) {
        let Rules { saves, copies, .. } = &mut self.rules;
        let pace = if is_copy { copies } else { saves };
        match wanted {
            NextSave::Nothing => (SaveDecision::No, false),
            NextSave::Surely => (SaveDecision::AfterTheOneBefore, false),
            NextSave::UnlessUnderWay if !under_way => (SaveDecision::Now, false),
            NextSave::UnlessUnderWay => {
                (SaveDecision::No, pace.as_mut().is_some_and(Pace::leave_out))
            }
        }
    }

    /// What follows a step after which all do as decided: why the run ends with it, if it does.
    /// What is saved is in the decision.
    pub fn follow(&mut self, met: &MetStep, decision: &Decision) -> Option<Ending> {
        if let Some(diverged) = self.diverged() {
            return Some(diverged);
        }
        let was_due = self.save_pending || self.rules.saves(met.step);
        self.save_pending = was_due && (met.skipped || met.is_best);
        let asked = self.save_asked || decision.request == StopRequest::Save;
        self.save_asked = asked && self.rules.saves.is_some() && decision.saves == SaveDecision::No;
        let StopRequest::Stop(_) = decision.request else { return None };
        if met.step == self.last {
            return None;
        }
        let signal = decision.request.signal();
        Some(match self.rules.out_of_patience(met.since).filter(|_| signal.is_none()) {
            Some(since) => Ending::NoLower { since },
            None => Ending::Asked { signal },
        })
    }

    fn diverged(&self) -> Option<Ending> {
        let Skipped { first, in_a_row } = self.skipped;
        let limit = self.rules.max_skipped;
        let first = first.filter(|_| limit > 0 && in_a_row >= limit)?;
        Some(Ending::Diverged { first, in_a_row })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_ends_with_a_step_that_is_finite() {
        let mut ends = StepEnds::new(Rules { max_skipped: 3, ..Rules::default() });
        for (step, bad) in [(1, true), (2, true), (3, false), (4, true), (5, true), (6, true)] {
            assert_eq!(ends.diverged(), None);
            ends.left(step, bad, StopRequest::GoOn, false);
        }
        assert_eq!(ends.diverged(), Some(Ending::Diverged { first: 4, in_a_row: 3 }));
        ends.rules.max_skipped = 0;
        assert_eq!(ends.diverged(), None);
    }

    #[test]
    fn a_request_to_stop_outdoes_one_to_save_and_reads_back() {
        assert_eq!(StopRequest::Stop(15).signal(), Some(15));
        assert_eq!(StopRequest::Stop(0).signal(), None);
        let all = [0, 2].map(StopRequest::Stop).into_iter();
        for request in all.chain([StopRequest::GoOn, StopRequest::Save]) {
            assert_eq!(StopRequest::from_bytes(request.to_bytes()), request);
        }
        assert!(StopRequest::GoOn < StopRequest::Save);
        assert!(StopRequest::Save < StopRequest::Stop(0));
    }

    #[test]
    fn a_checkpoint_that_is_due_as_blocks_move_follows_the_next_step() {
        let pace = Some(Pace::new(4, 9));
        let mut ends = StepEnds::new(Rules { saves: pace, steps: 9, ..Rules::default() });
        ends.run_until(9);
        let met = |step| MetStep { step, skipped: false, is_best: false, since: None };
        let mut wanted = |step, moves| {
            let wanted = ends.wanted(&met(step), StopRequest::GoOn);
            if moves { ends.put_off(wanted) } else { wanted }
        };
        let nothing = NextSave::Nothing;
        assert_eq!(wanted(3, true), [nothing; 2]);
        assert_eq!(wanted(4, true), [nothing; 2], "put off");
        assert_eq!(wanted(5, false), [NextSave::UnlessUnderWay, nothing]);
        assert_eq!(wanted(6, false), [nothing; 2], "once");
        assert_eq!(wanted(9, true), [NextSave::Surely, nothing]);
    }
}
