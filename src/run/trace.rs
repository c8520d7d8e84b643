//! What a run writes and how a rank's panic reads, the same for training and emulation.

use std::any::Any;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use zeropp_comm::mesh::Mesh;
use zeropp_pipeline::draw::chrome;
use zeropp_pipeline::timeline::{RankTimeline, Span, Timeline};

use crate::Error;

/// Writes `timeline` to `path` as a Chrome trace.
///
/// # Errors
/// [`Error::Output`] where the file cannot be written.
pub(crate) fn write(path: &Path, timeline: &Timeline) -> Result<(), Error> {
    let written = File::create(path).and_then(|file| {
        let mut out = BufWriter::new(file);
        chrome::write(timeline, &mut out)?;
        out.flush()
    });
    written.map_err(|source| Error::Output { path: path.to_path_buf(), source })
}

/// What every rank did, by the `spans` of each.
pub(crate) fn timeline(
    title: String,
    mesh: Mesh,
    placement: &[usize],
    spans: impl IntoIterator<Item = Vec<Span>>,
) -> Timeline {
    let rank = |(rank, spans)| {
        let c = mesh.coords(rank);
        RankTimeline {
            name: format!("pp {} · zero3 {} · dp {}", c.pp, c.zero3, c.dp),
            pp: c.pp,
            group: c.dp * mesh.zero3 + c.zero3,
            spans,
            ..RankTimeline::default()
        }
    };
    let ranks = spans.into_iter().enumerate().map(rank).collect();
    Timeline { title, placement: placement.to_vec(), ranks }
}

/// The message that a thread panicked with.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string()))
        .unwrap_or_else(|| "no message".into())
}
