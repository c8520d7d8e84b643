//! What copies of the state in memory take (ADR 50).

use std::path::Path;

use zeropp_checkpoint::places::COPIES;
use zeropp_core::files::in_words;

use crate::plan::needs::Needs;

/// Bytes of a complete copy of what these ranks hold.
fn bytes_of(needs: &Needs, ranks: impl Iterator<Item = usize>) -> u64 {
    let mesh = needs.config.mesh();
    let saved = |rank: usize| {
        let c = mesh.coords(rank);
        (needs.config.zero1 || c.dp == 0).then(|| needs.ranks[c.pp].saved)
    };
    ranks.filter_map(saved).sum()
}

/// Bytes that the copies of these ranks will take of their machine, beside those that are there
/// from before: the complete one, and the one that is being written.
pub(crate) fn bytes_to_come(needs: &Needs, ranks: impl Iterator<Item = usize>) -> u64 {
    let Some(folder) = needs.config.copies_folder() else { return 0 };
    let all = (COPIES as u64 + 1) * bytes_of(needs, ranks);
    all.saturating_sub(bytes_below(&folder))
}

/// Bytes of a copy of the whole run, if it makes any.
pub(crate) fn predicted(needs: &Needs) -> u64 {
    let makes = needs.config.copies_folder().is_some();
    if makes { bytes_of(needs, 0..needs.config.mesh().world()) } else { 0 }
}

/// What a plan says of them.
pub(crate) fn note(needs: &Needs) -> Option<String> {
    needs.config.copies_folder()?;
    let bytes = in_words(predicted(needs));
    let often = match needs.config.copy_every {
        1 => "every step".into(),
        n => format!("every {n} steps"),
    };
    Some(format!(
        "copies: {often} the state is copied to memory, {bytes}; {} copies are there at most",
        COPIES + 1
    ))
}

fn bytes_below(folder: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    let bytes = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(meta) if meta.is_dir() => bytes_below(&entry.path()),
        Ok(meta) => meta.len(),
        Err(_) => 0,
    };
    entries.flatten().map(bytes).sum()
}
