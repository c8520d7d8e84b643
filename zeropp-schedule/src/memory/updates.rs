//! What comes into a rank's memory for updates alone, of what a device has on its host.

use super::Ledger;

/// The updates of a rank in a step, in their order, which is that of its stages.
pub(super) struct Updates {
    /// Stages for which something comes in, and its bytes.
    of: Vec<(usize, u64)>,
    /// The next of them.
    next: usize,
    /// What goes out of the last that was updated.
    leaving: u64,
}

impl Updates {
    /// Those of stages with so many bytes to come in.
    pub(super) fn new(of: impl Iterator<Item = (usize, u64)>) -> Updates {
        Updates { of: of.filter(|(_, bytes)| *bytes > 0).collect(), next: 0, leaving: 0 }
    }

    /// Bytes of what comes in next.
    pub(super) fn coming(&self) -> u64 {
        self.of.get(self.next).map_or(0, |(_, bytes)| *bytes)
    }
}

impl Ledger<'_> {
    /// The updates up to that of a stage, of those for which something comes in: that of the next
    /// one comes in meanwhile.
    pub(super) fn update_to(&mut self, stage: usize) {
        let is_due = |next: &&(usize, u64)| next.0 <= stage;
        while let Some((_, bytes)) = self.updates.of.get(self.updates.next).filter(is_due).copied()
        {
            self.updated();
            self.updates.leaving = bytes;
            self.updates.next += 1;
            self.read_ahead();
        }
    }

    /// The step's last backward is done: what its first update takes comes in.
    pub(super) fn backwards_end(&mut self) {
        self.updated();
        self.updates.next = 0;
        self.read_ahead();
    }

    fn read_ahead(&mut self) {
        self.now.optimizer += self.updates.coming();
        self.mark();
    }

    /// What was updated last has gone out.
    pub(super) fn updated(&mut self) {
        self.now.optimizer -= std::mem::take(&mut self.updates.leaving);
    }
}
