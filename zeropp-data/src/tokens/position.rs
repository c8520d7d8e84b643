//! Where a run is in its data. It is kept, and not worked out from today's settings: those may be
//! others than the ones that the samples before were taken with.

use serde::{Deserialize, Serialize};

/// The samples that a run has taken so far, in its order of the data.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// Samples of one length each, the first ones first.
    stretches: Vec<Stretch>,
}

/// Samples that follow each other and are equally long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stretch {
    /// How many.
    pub samples: u64,
    /// Tokens of each.
    pub seq: usize,
}

impl Position {
    /// After so many samples of `seq` tokens from the beginning.
    pub fn after(samples: u64, seq: usize) -> Position {
        Position::default().and(samples, seq)
    }

    /// After so many more samples of `seq` tokens.
    #[must_use]
    pub fn and(mut self, samples: u64, seq: usize) -> Position {
        match self.stretches.last_mut() {
            _ if samples == 0 => {}
            Some(last) if last.seq == seq => last.samples = last.samples.saturating_add(samples),
            _ => self.stretches.push(Stretch { samples, seq }),
        }
        self
    }

    /// All samples so far.
    pub fn samples(&self) -> u64 {
        self.stretches.iter().fold(0, |all, stretch| all.saturating_add(stretch.samples))
    }

    /// The samples by their lengths, in their order.
    pub fn stretches(&self) -> &[Stretch] {
        &self.stretches
    }
}
