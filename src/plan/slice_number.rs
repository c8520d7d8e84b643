//! `slices = auto`: samples in slices where a step is predicted to be shorter so, else whole.

use zeropp_core::layer::Model;
use zeropp_plan::slices::numbers;

use crate::Error;
use crate::config::{Config, SliceCount};
use crate::own::CustomParts;
use crate::plan::blueprint::Blueprint;
use crate::plan::split::step_ns;
use crate::plan::{memory, split};

/// The least share of a step that twice as many slices have to be predicted to gain: what a slice
/// takes beside its operations is not predicted.
const GAIN: f64 = 0.03;

/// The run of these settings; of those that leave the number of slices open, with the fewest of
/// which twice as many gain little. No bit depends on it. A note says what was chosen.
///
/// # Errors
/// What is wrong with the settings.
pub(crate) fn planned(
    config: &Config,
    model: Model,
    own: &CustomParts,
) -> Result<Blueprint, Error> {
    let whole = split::planned(config, model, own)?;
    if !config.chooses_slices() {
        return Ok(whole);
    }
    let before = step_ns(&whole);
    let is_short = memory::is_short(&whole.needs());
    let mut best = whole;
    let mut least = before;
    for n in numbers(config.seq) {
        let sliced = Config { slices: SliceCount::Of(n), ..config.clone() };
        // Those that cannot be are none, such as beyond a limit on memory.
        let Ok(made) = Blueprint::new(&sliced, best.model.clone(), own) else { continue };
        let fits = !memory::is_short(&made.needs());
        let ns = step_ns(&made);
        let gains = (ns as f64) < (1.0 - GAIN) * least as f64;
        let now_fits = fits && memory::is_short(&best.needs());
        if (fits || is_short) && gains || now_fits {
            (best, least) = (made, ns);
        }
    }
    let Some(slices) = &best.slices else { return Ok(best) };
    best.plan.notes.push(format!(
        "slices = auto: samples are cut into {} slices, with which a step is predicted to take \
         {:.0} % less",
        slices.tokens().len(),
        100.0 * (1.0 - least as f64 / before.max(1) as f64)
    ));
    best.slices_chosen = true;
    Ok(best)
}

/// The same settings, with what was chosen for a run of them open again.
pub(crate) fn reopened(bp: &Blueprint) -> Config {
    let config = split::reopened(bp);
    let slices = if bp.slices_chosen { SliceCount::Auto } else { config.slices };
    Config { slices, ..config }
}
