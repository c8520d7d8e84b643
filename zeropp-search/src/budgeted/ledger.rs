//! The state of a rank between two entries, and what plans are compared by.

/// The value that orders are compared by: [`WHOLE`] times the largest span, and a little of their
/// sum, so that a plateau has a slope.
pub(super) const WHOLE: i64 = 20;
pub(super) const PART: i64 = 3;
/// Sums are weighed in this many bits of fraction.
pub(super) const SHIFT: u32 = 10;

/// A rank's state before one of its entries.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RankBefore {
    /// Start of the entry.
    pub(super) start: i64,
    /// When the rank is free.
    pub(super) now: i64,
    pub(super) memory: i64,
    /// Time waited since its first entry; −1 before it.
    pub(super) idle: i64,
    /// No entry before this one waits for its W.
    pub(super) w: u32,
    /// W that wait.
    pub(super) pending: u32,
}

/// A rank's collectives before one of its entries, where they take time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CollectiveTimes {
    /// When their queue is empty, and when the last reduction ends.
    pub(super) free: i64,
    pub(super) reduced: i64,
    /// Gathers started.
    pub(super) gathers: u32,
}

impl CollectiveTimes {
    /// Queues a reduction, which first waits for the one before it: for how long.
    pub(super) fn reduce(&mut self, now: i64, takes: i64) -> i64 {
        let stall = (self.reduced - now).max(0);
        self.free = self.free.max(now + stall) + takes;
        self.reduced = self.free;
        stall
    }
}

/// The figures of one rank.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RankFigures {
    pub(super) first: i64,
    pub(super) last: i64,
    pub(super) idle: i64,
    /// The objective.
    pub(super) value: i64,
}

/// When an entry's input arrives.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cell {
    /// In the accepted plan.
    pub(super) arrival: i64,
    /// In the trial that wrote it.
    pub(super) new_arrival: i64,
    pub(super) epoch: u32,
}

impl Cell {
    pub(super) const NEVER: Cell = Cell { arrival: i64::MAX, new_arrival: 0, epoch: 0 };
}
