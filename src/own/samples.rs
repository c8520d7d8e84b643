//! Samples of a program's own.

use zeropp_core::data::{DataError, Dataset, Hidden, Sample};

/// Samples whose ids tell the data from other data.
const LOOKED_AT: u64 = 4;
/// Tokens of each of them.
const TOKENS: usize = 64;

/// Data of a program's own: any rank, of any process and of any mesh, may ask for any sample, at
/// any time and as often as it likes, and gets the same answer. So a run that is resumed, or
/// started on another mesh, is trained on the same.
pub trait Samples: Send + Sync + 'static {
    /// What messages call it.
    fn name(&self) -> &str;
    /// Number of token ids: one more than the largest that a sample may have.
    fn vocabulary(&self) -> usize;
    /// Sample number `n` of the run, from 0, so many tokens. Each but the last is an input, and the
    /// one after it its target.
    fn sample(&self, n: u64, tokens: usize) -> Vec<u32>;
}

/// What stands for `samples` where a run is held against a checkpoint, or a process against
/// another: its name and its first samples, as bytes.
pub(crate) fn stand_in(samples: &dyn Samples) -> Dataset {
    let ids = (0..LOOKED_AT).flat_map(|n| samples.sample(n, TOKENS));
    let mut bytes: Vec<u8> = ids.flat_map(u32::to_le_bytes).collect();
    bytes.extend(samples.name().bytes());
    Dataset::from_bytes(bytes).with_vocabulary(samples.vocabulary())
}

/// Sample `n` of `seq` tokens, with what is hidden of it.
///
/// # Errors
/// Too few or too many tokens, or an id beyond the vocabulary.
pub(crate) fn sample(
    samples: &dyn Samples,
    n: u64,
    seq: usize,
    hidden: Hidden,
) -> Result<Sample, DataError> {
    let ids = samples.sample(n, seq + 1);
    let (found, vocabulary) = (ids.len(), samples.vocabulary());
    let wrong = |problem: String| {
        let path = samples.name().into();
        Err(DataError::Malformed { path, problem: format!("sample {n} {problem}") })
    };
    if found != seq + 1 {
        return wrong(format!("has {found} tokens, and {} were asked for", seq + 1));
    }
    if let Some(id) = ids.iter().find(|id| **id as usize >= vocabulary) {
        return wrong(format!("has token id {id}, which is not below {vocabulary}"));
    }
    Ok(Sample::new(ids, hidden, Vec::new(), None))
}
