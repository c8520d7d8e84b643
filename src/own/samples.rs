//! Samples of a program's own.

use std::sync::Arc;

use zeropp_core::data::{DataError, Dataset, Hidden, Sample};

/// Samples whose ids tell the data from other data.
const LOOKED_AT: u64 = 4;
/// Tokens of each of them.
const TOKENS: usize = 64;

/// Why a program could not give a sample, in words that stand in the error with which the run ends.
pub type SampleError = Box<dyn std::error::Error + Send + Sync>;

/// Data of a program's own: any rank, of any process and of any mesh, may ask for any sample, at
/// any time and as often as it likes, and gets the same answer. So a run that is resumed, or
/// started on another mesh, is trained on the same.
pub trait Samples: Send + Sync + 'static {
    /// Its name in messages.
    fn name(&self) -> &str;
    /// Number of token ids: one more than the largest that a sample may have.
    fn vocabulary(&self) -> usize;
    /// Sample number `n` of the run, from 0, so many tokens. Each but the last is an input, and the
    /// one after it its target.
    ///
    /// # Errors
    /// The sample cannot be had: the run ends with these words, the sample's number and the rank.
    fn sample(&self, n: u64, tokens: usize) -> Result<Vec<u32>, SampleError>;
}

/// Bytes that stand for `samples` where a run is held against a checkpoint, or a process against
/// another: its name and its first samples, as bytes.
///
/// # Errors
/// A sample that cannot be had.
pub(crate) fn stand_in(samples: &dyn Samples) -> Result<Dataset, DataError> {
    let mut bytes = Vec::new();
    for n in 0..LOOKED_AT {
        let ids = samples.sample(n, TOKENS).map_err(|error| failed(samples, n, &error))?;
        bytes.extend(ids.into_iter().flat_map(u32::to_le_bytes));
    }
    bytes.extend(samples.name().bytes());
    Ok(Dataset::from_bytes(bytes).with_vocabulary(samples.vocabulary()))
}

/// Sample `n` of `seq` tokens, with what is hidden of it.
///
/// # Errors
/// It cannot be had; too few or too many tokens, or an id beyond the vocabulary.
pub(crate) fn sample(
    samples: &dyn Samples,
    n: u64,
    seq: usize,
    hidden: Hidden,
) -> Result<Sample, DataError> {
    let ids = samples.sample(n, seq + 1).map_err(|error| failed(samples, n, &error))?;
    let (found, vocabulary) = (ids.len(), samples.vocabulary());
    if found != seq + 1 {
        let problem = format!("has {found} tokens, and {} were asked for", seq + 1);
        return Err(wrong(samples, n, &problem));
    }
    if let Some(id) = ids.iter().find(|id| **id as usize >= vocabulary) {
        let problem = format!("has token id {id}, which is not below {vocabulary}");
        return Err(wrong(samples, n, &problem));
    }
    Ok(Sample::new(ids, hidden, Vec::new(), None))
}

fn failed(samples: &dyn Samples, n: u64, error: &SampleError) -> DataError {
    wrong(samples, n, &format!("cannot be had ({error})"))
}

fn wrong(samples: &dyn Samples, n: u64, problem: &str) -> DataError {
    DataError::Malformed { path: samples.name().into(), problem: format!("sample {n} {problem}") }
}

/// The first samples of a program's own, on which a validation loss is measured.
#[derive(Clone)]
pub(crate) struct FirstSamples {
    pub(crate) samples: Arc<dyn Samples>,
    /// The data that stands for them.
    pub(crate) stand_in: Dataset,
    pub(crate) number: usize,
    pub(crate) seq: usize,
    pub(crate) hidden: Hidden,
}

impl FirstSamples {
    /// Sample `n`.
    ///
    /// # Errors
    /// As [`sample`].
    pub(crate) fn sample(&self, n: usize) -> Result<Sample, DataError> {
        sample(&*self.samples, n as u64, self.seq, self.hidden)
    }

    /// Tokens that are scored. Where all are, no sample is asked for.
    ///
    /// # Errors
    /// As [`sample`].
    pub(crate) fn scored(&self) -> Result<usize, DataError> {
        match self.hidden.documents {
            false => Ok(self.number * self.seq),
            true => (0..self.number).map(|n| Ok(self.sample(n)?.scored())).sum(),
        }
    }
}
