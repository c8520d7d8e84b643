//! Output of `zeropp schedule`, shown and written.

use std::io;
use std::path::Path;

use zeropp::pipeline::ascii::chart;
use zeropp::pipeline::draw::{chrome, html, svg};
use zeropp::pipeline::exchange::csv::{self, Dialect};
use zeropp::pipeline::exchange::json;

use super::args::FORMATS;
use super::facts::micro_batches;
use super::make::SimulatedSchedule;
use crate::failure::Failure;
use crate::figures::{count, table};

/// The format that a file's name asks for.
pub(super) fn format_of(path: &Path) -> Result<&'static str, Failure> {
    let extension = path.extension().and_then(|e| e.to_str()).map(str::to_ascii_lowercase);
    match extension.as_deref() {
        Some("txt") => Ok("ascii"),
        Some("json") => Ok("json"),
        Some("csv") => Ok("csv"),
        Some("svg") => Ok("svg"),
        Some("html" | "htm") => Ok("html"),
        _ => Err(Failure::bad_input(format!(
            "out = {}: the name does not say what to write; end it in .txt, .json, .csv, .svg or \
             .html, or give --format ({})",
            path.display(),
            FORMATS.join(", ")
        ))),
    }
}

/// The whole output in `format`.
pub(super) fn render(made: &SimulatedSchedule, format: &str, width: usize) -> io::Result<Vec<u8>> {
    let mut out = Vec::new();
    match format {
        "json" => json::write(&made.document, &mut out)?,
        "csv" => csv::write(made.schedule(), Dialect::Zeropp, &mut out)?,
        "torch" => csv::write(made.schedule(), Dialect::Torch, &mut out)?,
        "svg" => svg::write(&made.timeline, &mut out)?,
        "html" => html::write(&made.timeline, &mut out)?,
        "chrome" => chrome::write(&made.timeline, &mut out)?,
        _ => {
            let found = made.found.as_ref().map_or(String::new(), |line| format!("{line}\n"));
            let chart = chart(&made.timeline, width);
            out = format!("{chart}\n{}\n{found}", numbers(made)).into_bytes();
        }
    }
    Ok(out)
}

/// The numbers below a chart.
fn numbers(made: &SimulatedSchedule) -> String {
    let (schedule, m) = (made.schedule(), made.measures());
    let step = format!(
        "{}: {}, {}, {}",
        schedule.kind,
        count(schedule.pp(), "rank"),
        count(schedule.stages(), "stage"),
        micro_batches(&schedule.units),
    );
    let times = format!(
        "makespan {} us, largest own span {} us, bubble {}, bubble_own_span {} (largest {})",
        m.makespan,
        m.own_span_max,
        rate(made.timeline.bubble()),
        rate(made.timeline.bubble_own_span()),
        rate(made.timeline.bubble_own_span_max()),
    );
    let mut rows =
        vec![["rank", "end us", "idle us", "peak activation"].map(String::from).to_vec()];
    for (rank, ((end, idle), peak)) in
        m.ends.iter().zip(&m.idle).zip(&m.peak_activation).enumerate()
    {
        rows.push(vec![rank.to_string(), end.to_string(), idle.to_string(), peak.to_string()]);
    }
    let least = made.rate_at_least.map(|least| format!(", at least {}", rate(least)));
    let counted = format!("bubble_rate {}{}", rate(m.bubble_rate), least.unwrap_or_default());
    let whole = m.bubble_step.map(|bubble| format!(", bubble_step {}", rate(bubble)));
    let counted = counted + &whole.unwrap_or_default();
    let mut lines = vec![step, times, counted];
    if m.all_gathers + m.reduce_scatters > 0 {
        let (gathers, reductions) = (m.all_gathers, m.reduce_scatters);
        lines
            .push(format!("{gathers} all-gathers and {reductions} reduce-scatters over all ranks"));
    }
    lines.push(table(&rows));
    lines.join("\n")
}

pub(super) fn rate(rate: f64) -> String {
    format!("{:.2} %", 100.0 * rate)
}
