//! The cut into stages, as far as the settings say it.

use super::validate::number;
use super::{Config, ConfigError};

/// Most memory of a rank that can be asked for, in GiB: a pebibyte.
const RANK_MEMORY_GIB_MAX: f64 = 1048576.0;
/// Most equal stages in a row: as many as the largest model has layers.
const STAGES_MAX: usize = 1 << 14;

impl Config {
    /// Blocks of each stage, where the cut is given by hand.
    ///
    /// # Errors
    /// A text that is no list of whole numbers from 1, of which the last may be 0.
    pub(crate) fn stage_blocks(&self) -> Result<Option<Vec<usize>>, ConfigError> {
        let Some(text) = &self.stages else { return Ok(None) };
        let number = |word: &str| word.trim().parse().ok();
        // `8x2`: eight stages of two blocks.
        let some = |word: &str| match word.split_once('x') {
            Some((stages, blocks)) => {
                let stages = number(stages).filter(|n| (1..=STAGES_MAX).contains(n))?;
                Some(vec![number(blocks)?; stages])
            }
            None => Some(vec![number(word)?]),
        };
        let blocks: Option<Vec<Vec<usize>>> = text.split(',').map(some).collect();
        let blocks = blocks.map(|some| some.concat());
        let has_blocks = |blocks: &Vec<usize>| match &blocks[..] {
            [some @ .., _] if !some.is_empty() => !some.contains(&0),
            all => !all.contains(&0),
        };
        let blocks = blocks.filter(has_blocks);
        let problem = "expected the blocks of each stage, whole numbers from 1 (the last may be 0: \
                       the head alone)";
        let help = "use a list such as 3,4,4,3 or 3,2x4,3";
        let wrong = || ConfigError::value("stages", text, problem, help);
        blocks.map(Some).ok_or_else(wrong)
    }

    /// The most bytes of a rank, where that is given.
    pub(crate) fn rank_memory_bytes(&self) -> Option<u64> {
        self.rank_memory.map(|gib| (gib * (1u64 << 30) as f64) as u64)
    }

    /// Stages on each rank of a cut by hand, if it has as many on each.
    pub(super) fn given_stages_each(&self) -> Option<usize> {
        let stages = self.stage_blocks().ok()??.len();
        (self.pp > 0 && stages.is_multiple_of(self.pp)).then(|| stages / self.pp)
    }

    pub(super) fn check_cut(&self) -> Result<(), ConfigError> {
        self.stage_blocks()?;
        let Some(gib) = self.rank_memory else { return Ok(()) };
        let range = format!("more than 0, up to {RANK_MEMORY_GIB_MAX}");
        number("rank-memory", gib, gib > 0.0 && gib <= RANK_MEMORY_GIB_MAX, &range)
    }
}
