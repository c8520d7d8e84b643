//! All kinds by name: those with a generator of their own, and the one that is searched for.

use zeropp_schedule::ir::Schedule;
use zeropp_schedule::schedules::{self, Kind, OrderCosts, ScheduleError, Shape};

use crate::budgeted;

/// The compute-only schedule `kind` for `shape`, made for equal stages: what
/// [`schedules::generate`] makes, and kind `auto`.
///
/// # Errors
/// As [`schedules::generate`].
pub fn generate(kind: &str, shape: &Shape) -> Result<Schedule, ScheduleError> {
    match searched(kind) {
        Some(row) => {
            shape.check(row.name)?;
            search(shape, &OrderCosts::uniform(shape.stages(), 1, 1, 1, 0))
        }
        None => schedules::generate(kind, shape),
    }
}

/// Like [`generate`], with costs: what [`schedules::generate_with_costs`] makes, and kind `auto`.
///
/// # Errors
/// As [`schedules::generate_with_costs`].
pub fn generate_with_costs(
    kind: &str,
    shape: &Shape,
    costs: &OrderCosts,
) -> Result<Schedule, ScheduleError> {
    match searched(kind) {
        Some(row) => {
            shape.check(row.name)?;
            search(shape, costs)
        }
        None => schedules::generate_with_costs(kind, shape, costs),
    }
}

fn searched(kind: &str) -> Option<&'static Kind> {
    Kind::find(kind).filter(|row| row.is_searched())
}

fn search(shape: &Shape, costs: &OrderCosts) -> Result<Schedule, ScheduleError> {
    budgeted::auto(shape, costs).map(|found| found.schedule)
}
