//! Any kind for given costs.

use super::costs::Costs;
use super::{ScheduleError, Shape, generate, v_half, v_min, zb, zb_v, zeropp_auto};
use crate::ir::Schedule;

/// The schedule `kind` for `shape`, made for `costs` where the kind weighs them: `zb-1p`, `zb-2p`,
/// `zb-v`, `v-half`, `v-min` and `zeropp-auto`. All others are what [`generate`] makes.
///
/// `zb-1p` and `zb-2p` keep p or 2p times the activations of the largest stage's micro-batch, or
/// the costs' own limit where they have one.
///
/// # Errors
/// As [`generate`]; for the kinds above also costs that are not one a stage, and a memory limit
/// that is too low.
pub fn generate_with_costs(
    kind: &str,
    shape: &Shape,
    costs: &Costs,
) -> Result<Schedule, ScheduleError> {
    let folds = |name, fold: i64| {
        shape.check(name)?;
        let most = costs.mem_f.iter().max().copied().unwrap_or(0);
        let limit = costs.mem_limit.unwrap_or(fold * shape.pp as i64 * most);
        zb(name, shape, &costs.clone().with_limit(limit))
    };
    let checked = |name, make: fn(&Shape, &Costs) -> Result<Schedule, ScheduleError>| {
        shape.check(name)?;
        make(shape, costs)
    };
    match kind {
        "zb-1p" => folds("zb-1p", 1),
        "zb-2p" => folds("zb-2p", 2),
        "zb-v" => checked("zb-v", zb_v),
        "v-half" => checked("v-half", v_half),
        "v-min" => checked("v-min", v_min),
        "zeropp-auto" => checked("zeropp-auto", zeropp_auto),
        _ => generate(kind, shape),
    }
}
