//! The file of costs that a run writes: what everything took in it.

use std::path::Path;

use zeropp_core::files::write_whole;
use zeropp_pipeline::costs;
use zeropp_pipeline::simulate::Costs;
use zeropp_pipeline::timeline::Timeline;

use crate::Error;
use crate::plan::blueprint::Blueprint;
use crate::run::shared::traced_steps;

/// Writes to `path` the times in `timeline`, of `steps` steps after `done`. Returns the reason
/// where nothing was written, as the timeline has too little for a file of costs.
///
/// # Errors
/// [`Error::Output`] where the file cannot be written.
pub(crate) fn write(
    path: &Path,
    blueprint: &Blueprint,
    timeline: &Timeline,
    done: u64,
    steps: u64,
) -> Result<Option<String>, Error> {
    let traced = traced_steps(&blueprint.config, done);
    let (first, last) = (traced.first.max(done + 1), traced.last.min(done + steps));
    let timed = match costs::measured(timeline) {
        _ if first > last => return Ok(Some("no step that is traced was run".into())),
        Err(e) => return Ok(Some(e.to_string())),
        Ok(timed) => timed,
    };
    let costs = Costs { memory: blueprint.all_bytes(), ..timed };
    let when = match last - first {
        0 => format!("step {first}"),
        1 => format!("step {last}"),
        _ => format!("steps {} to {last}", first + 1),
    };
    let what = format!("{when} of a run: {}", timeline.title);
    let blocks = Some(blueprint.plan.blocks.as_slice());
    let written = write_whole(path, |out| costs::write(&costs, &what, blocks, out));
    written.map_err(|source| Error::Output { path: path.to_path_buf(), source })?;
    Ok(None)
}
