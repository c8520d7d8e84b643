//! A run that is refused for want of memory, in words that say what would fit.

use std::fmt;

use zeropp_core::files::in_words;
use zeropp_core::meter::MemoryKind;
use zeropp_core::metrics::RankPlan;

/// A run that needs more memory than there is.
#[derive(Clone, Debug)]
pub struct TooLittleMemory {
    /// The machine's ranks, or the largest rank, in words.
    pub(crate) who: String,
    /// What was chosen to need less, in words, where something was.
    pub(crate) even_with: Option<String>,
    /// Bytes they need.
    pub(crate) needed: u64,
    /// Bytes there are.
    pub(crate) room: u64,
    /// The source of the limit.
    pub(crate) limit: String,
    /// The rank that needs most.
    pub(crate) largest: RankPlan,
    /// Settings that would fit, as flags, with the bytes that are needed then.
    pub(crate) fits: Vec<(String, u64)>,
}

impl std::error::Error for TooLittleMemory {}

impl fmt::Display for TooLittleMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TooLittleMemory { who, even_with, needed, room, limit, largest, fits } = self;
        let even = even_with.as_ref().map_or_else(String::new, |with| format!(" even with {with}"));
        let (needed, room) = (in_words(*needed), in_words(*room));
        writeln!(f, "memory: {who} would need {needed}{even}, and {limit} is {room}; not started")?;
        let held = &largest.held.at_once;
        let total = held.total();
        writeln!(f, "\nPipeline rank {} at its peak:", largest.pp)?;
        let mut kinds = MemoryKind::ALL;
        kinds.sort_by_key(|kind| std::cmp::Reverse(held.get(*kind)));
        for kind in kinds.iter().filter(|kind| kind.is_in_memory() && held.get(**kind) > 0) {
            let (name, bytes) = (kind.name(), in_words(held.get(*kind)));
            writeln!(f, "  {name:17} {bytes:>11}")?;
        }
        let most = kinds.into_iter().find(|kind| kind.is_in_memory()).unwrap_or(kinds[0]);
        let share = 100.0 * held.get(most) as f64 / total.max(1) as f64;
        writeln!(f, "  {:17} {:>11}", "sum", in_words(total))?;
        writeln!(f, "\nThe largest kind is {}: {share:.0} % of it.", most.name())?;
        match fits.as_slice() {
            [] => writeln!(
                f,
                "None of the settings that were tried fits: use a smaller model, or more machines."
            )?,
            fits => {
                writeln!(f, "What would fit:")?;
                let width = fits.iter().map(|(flags, _)| flags.len()).max().unwrap_or(0);
                for (flags, needed) in fits {
                    writeln!(f, "  {flags:width$}  {:>11}", in_words(*needed))?;
                }
            }
        }
        write!(f, "--rank-memory unchecked starts the run anyway.")
    }
}
