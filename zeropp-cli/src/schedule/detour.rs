//! Replicas of which ranks are missing: one schedule around these, and what that costs.

use zeropp::pipeline::ir::Schedule;
use zeropp::pipeline::lower::lower;
use zeropp::pipeline::schedules::{Shape, around};
use zeropp::pipeline::simulate::step_period_ns;
use zeropp::search::generate_with_costs;

use super::args::Request;
use super::costs::Priced;
use super::output::rate;
use crate::Failure;
use crate::figures::count;

/// The schedule of `kind` for all `replicas` without those ranks that the request says are missing;
/// and if there are any, what a step takes beside one of all ranks, and one without whole replicas.
pub(super) fn around_missing(
    request: &Request,
    kind: &str,
    shape: Shape,
    replicas: usize,
    priced: &Priced,
) -> Result<(Schedule, Option<String>), Failure> {
    let plain = |shape: &Shape| generate_with_costs(kind, shape, &priced.generator);
    let one = plain(&shape).map_err(Failure::bad_input)?;
    let schedule = around(&one, &shape, &priced.generator, replicas, &request.missing);
    let schedule = schedule.map_err(Failure::bad_input)?;
    if request.missing.is_empty() {
        return Ok((schedule, None));
    }
    let options = request.lower.unwrap_or_default();
    let step = |schedule: &Schedule| step_period_ns(&lower(schedule, &options), &priced.simulator);
    let whole = step(&one);
    let told = |takes: u64| {
        // A kind whose backwards are whole may be faster with some of them split.
        let change = whole as f64 / takes.max(1) as f64 - 1.0;
        let how = if change > 0.0 { "more" } else { "less" };
        format!("{} us, {} {how} throughput", priced.unit.micros(takes), rate(change.abs()))
    };
    let mut lines = vec![
        format!("a step of all {} ranks: {} us", replicas * shape.pp, priced.unit.micros(whole)),
        format!("around the missing: {}", told(step(&schedule))),
    ];
    let mut shrunk: Vec<usize> = request.missing.iter().map(|at| at.replica).collect();
    shrunk.sort_unstable();
    shrunk.dedup();
    let left = replicas - shrunk.len();
    if left > 0 {
        // The same samples on fewer replicas; the first ones have more where it does not divide.
        let micro_batches = (shape.micro_batches * replicas).div_ceil(left);
        let whole_ones = count(left, "whole replica");
        let without = plain(&Shape { micro_batches, ..shape });
        lines.push(match without {
            Ok(schedule) => format!("on {whole_ones}: {}", told(step(&schedule))),
            Err(error) => format!("on {whole_ones}: not possible ({error})"),
        });
    }
    Ok((schedule, Some(lines.join("\n"))))
}
