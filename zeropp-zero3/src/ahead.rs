//! What is updated part after part of what is out: the next part is read meanwhile, and the one
//! before is written.

use std::ops::Range;

use zeropp_comm::CommResult;

use crate::layer_state::{LayerState, OwnedRange};
use crate::rule::ParameterGroups;
use crate::state_file::StateFile;
use crate::words::{PartOut, Reading, Words, Written, put};

/// What is updated, part after part.
pub(crate) trait Parts {
    type Read;
    /// Starts reading a part.
    fn start(&self, part: usize) -> Self::Read;
    /// Updates it, and says what is to be written.
    fn update(&mut self, part: usize, read: Self::Read) -> CommResult<Vec<Written>>;
}

/// How far such an update is, one part ahead.
pub(crate) struct Ahead<R> {
    next: usize,
    of: usize,
    reading: Option<R>,
}

impl<R> Ahead<R> {
    /// Of so many parts, the first of which may be on its way.
    pub(crate) fn of(parts: usize, reading: Option<R>) -> Ahead<R> {
        Ahead { next: 0, of: parts, reading }
    }

    /// The part that is updated next.
    pub(crate) fn next(&self) -> usize {
        self.next
    }

    /// Begins to read that, if there is one.
    pub(crate) fn read(&mut self, parts: &impl Parts<Read = R>) {
        if self.reading.is_none() && self.next < self.of {
            self.reading = Some(parts.start(self.next));
        }
    }

    /// Updates it; the one after it is read meanwhile, or not.
    pub(crate) fn step(
        &mut self,
        parts: &mut impl Parts<Read = R>,
        file: &StateFile,
        reads_ahead: bool,
    ) -> CommResult<()> {
        self.read(parts);
        let (part, Some(read)) = (self.next, self.reading.take()) else { return Ok(()) };
        self.next += 1;
        if file.is_host {
            // What comes in takes the memory of what has gone out.
            file.settle();
        }
        if reads_ahead {
            self.read(parts);
        }
        put(file, parts.update(part, read)?);
        Ok(())
    }
}

/// Some words on their way in from where they are put again.
pub(crate) struct PartRead {
    pub(crate) part: PartOut,
    pub(crate) reading: Reading,
}

/// What is kept of a piece, on its way in.
pub(crate) struct KeptRead {
    words: Vec<PartRead>,
    ema: Option<PartRead>,
}

/// The same when it is there, and where it is put again.
pub(crate) struct KeptHere {
    pub(crate) state: LayerState,
    parts: Vec<PartOut>,
}

impl PartRead {
    pub(crate) fn start(words: &Words, range: &Range<usize>) -> PartRead {
        let part = PartOut { words: words.clone(), range: range.clone() };
        PartRead { part, reading: words.start_use(range.clone()) }
    }
}

impl KeptRead {
    /// Of the elements `range`, of which `here` are the words that are kept.
    pub(crate) fn start(
        words: &[Words],
        ema: Option<&Words>,
        here: &[Range<usize>],
        range: &Range<usize>,
    ) -> KeptRead {
        let words = words.iter().zip(here).map(|(words, here)| PartRead::start(words, here));
        KeptRead { words: words.collect(), ema: ema.map(|ema| PartRead::start(ema, range)) }
    }

    /// What is to be written where nothing changes it.
    pub(crate) fn unchanged(self) -> impl Iterator<Item = Written> {
        let all = self.words.into_iter().chain(self.ema);
        let is_out = |read: &PartRead| matches!(read.reading, Reading::Away(_));
        let written = |PartRead { part, reading }| Written { part, values: reading.wait() };
        all.filter(is_out).map(written)
    }

    /// Waits for it.
    pub(crate) fn here(self, owned: OwnedRange<'_>, parameters: &ParameterGroups) -> KeptHere {
        let mut parts = Vec::new();
        let mut wait = |PartRead { part, reading }: PartRead| {
            parts.push(part);
            reading.wait()
        };
        let words = self.words.into_iter().map(&mut wait).collect();
        let ema = self.ema.map(&mut wait);
        KeptHere { state: LayerState::here(owned, parameters, words, ema), parts }
    }
}

impl KeptHere {
    /// What is to be written of it.
    pub(crate) fn written(self) -> Vec<Written> {
        let values = self.state.words.into_iter().chain(self.state.ema);
        let all = self.parts.into_iter().zip(values.map(Words::into_tensor));
        let is_out = |part: &PartOut| part.words.file().is_some() && !part.range.is_empty();
        all.filter(|(part, _)| is_out(part))
            .map(|(part, values)| Written { part, values })
            .collect()
    }
}
