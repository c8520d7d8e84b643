//! After which steps a save begins: rank 0 decides, and all ranks do the same.

/// Whether a save begins after a step; the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum SaveDecision {
    /// None does.
    No,
    /// One does.
    Now,
    /// One that must not be left out: the ranks wait for the one before.
    AfterTheOneBefore,
}

impl SaveDecision {
    /// Reads the byte of a message.
    pub fn from_byte(byte: u8) -> SaveDecision {
        match byte {
            1 => SaveDecision::Now,
            2 => SaveDecision::AfterTheOneBefore,
            _ => SaveDecision::No,
        }
    }
}

/// The end of a step, as far as it decides whether a save follows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepEnd {
    /// Steps behind it.
    pub(crate) step: u64,
    /// Whether it was not skipped.
    pub(crate) is_good: bool,
    /// Whether somebody asked for a save.
    pub(crate) asked: bool,
    /// Whether its validation loss is the lowest so far, and its state to be kept for that.
    pub(crate) is_best: bool,
    /// Whether the run ends with it.
    pub(crate) ends: bool,
}

/// The save that is to follow a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextSave {
    /// No save.
    Nothing,
    /// A save, unless one is under way.
    UnlessUnderWay,
    /// A save that is not left out.
    Surely,
}

/// After which steps saves are due, by their number and because they were asked for. It knows
/// nothing of how they are written.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    every: u64,
    last: u64,
    /// A checkpoint was due and could not be written.
    save_pending: bool,
    /// One was asked for and has not begun.
    asked: bool,
    /// The one that is to begin was asked for.
    answers: bool,
    reported_late: bool,
}

impl Pace {
    /// Every so many steps, none with 0, and after the `last`.
    pub fn new(every: u64, last: u64) -> Pace {
        Pace {
            every,
            last,
            save_pending: false,
            asked: false,
            answers: false,
            reported_late: false,
        }
    }

    /// Whether a save is to follow a step for its number.
    pub(crate) fn is_due(&self, step: u64) -> bool {
        step == self.last || self.every > 0 && step.is_multiple_of(self.every)
    }

    /// The save that is to follow a step. In a row of skipped steps the state is that of the last
    /// good one, so what is due waits for the next good one; where it cannot wait, no older
    /// checkpoint goes for it. What is the best of all validation losses, or the run's last, is not
    /// left out.
    pub(crate) fn after(&mut self, end: StepEnd) -> NextSave {
        let StepEnd { step, is_good, asked, is_best, ends } = end;
        self.answers = std::mem::take(&mut self.asked) || asked;
        if ends || is_best {
            return NextSave::Surely;
        }
        let due = self.is_due(step) || self.save_pending;
        self.save_pending = due && !is_good;
        if self.answers || due && is_good { NextSave::UnlessUnderWay } else { NextSave::Nothing }
    }

    /// A save follows the next step instead, as blocks move after this one.
    pub(crate) fn put_off(&mut self) {
        (self.asked, self.save_pending) = (std::mem::take(&mut self.answers), true);
    }

    /// A save is left out, as one is under way; one that a person asked for is made up for. True
    /// the first time, which is to be reported.
    pub(crate) fn leave_out(&mut self) -> bool {
        self.asked = std::mem::take(&mut self.answers);
        !std::mem::replace(&mut self.reported_late, true)
    }
}
