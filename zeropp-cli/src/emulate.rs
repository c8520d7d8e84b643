//! `zeropp run --emulate`.

use std::path::Path;

use zeropp::{Config, EmulatedStep, EmulationReport, read_costs};

use crate::failure::Failure;
use crate::figures::{count, percent, say};
use crate::log_file;

/// Runs the schedule with the given times, and shows what was measured beside the simulator's.
pub(crate) fn run(config: &Config, costs: &Path) -> Result<(), Failure> {
    let costs = read_costs(costs).map_err(|e| Failure::bad_input(format!("emulate = {e}")))?;
    let steps = config.steps;
    let report = zeropp::emulate(config, &costs, |step| {
        log_file::begin();
        say(format!("step {}/{steps}  {}", step.step, figures(step)));
    })?;
    say(format!("\n{}", summary(config, &report)));
    Ok(())
}

fn figures(step: &EmulatedStep) -> String {
    format!(
        "makespan {}  bubble {}  with the optimizer {}{}",
        milliseconds(step.makespan_ns),
        percent(step.bubble),
        milliseconds(step.step_ns),
        if step.program == 0 { String::new() } else { format!("  order {}", step.program) },
    )
}

/// What the search for better orders took of a core, where there was one.
fn searched(report: &EmulationReport) -> String {
    let all: u64 = report.steps.iter().map(|step| step.step_ns).sum();
    match report.exchanging_ns {
        0 => String::new(),
        ns => {
            let share = percent(ns as f64 / all as f64);
            format!("\nsearch    {} of rank 0's time for better orders: {share}", milliseconds(ns))
        }
    }
}

fn summary(config: &Config, report: &EmulationReport) -> String {
    let median = report.median();
    let excess = longer(median.makespan_ns, report.simulated_makespan_ns);
    format!(
        "{}, {} as threads, {}\n\
         makespan  {} measured (median), {} simulated{excess}\n\
         step      {} measured (median), {} simulated{}\n\
         bubble    {} measured, {} simulated\n\
         runtime   {} for an action, without waiting\n\
         lateness  {} after a wait, made up for in the next{}",
        config.schedule,
        count(config.mesh().world(), "rank"),
        count(report.steps.len(), "step"),
        milliseconds(median.makespan_ns),
        milliseconds(report.simulated_makespan_ns),
        milliseconds(report.settled_step_ns()),
        milliseconds(report.simulated_step_ns),
        longer(report.settled_step_ns(), report.simulated_step_ns),
        percent(median.bubble),
        percent(report.simulated_bubble),
        microseconds(median.runtime_ns),
        microseconds(median.late_ns),
        searched(report),
    )
}

/// How much longer than simulated.
fn longer(measured: u64, simulated: u64) -> String {
    match simulated {
        0 => String::new(),
        _ => format!(": {:+.2} %", 100.0 * (measured as f64 / simulated as f64 - 1.0)),
    }
}

fn milliseconds(ns: u64) -> String {
    format!("{:.3} ms", ns as f64 / 1e6)
}

fn microseconds(ns: u64) -> String {
    format!("{:.1} µs", ns as f64 / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measured_stands_beside_simulated() {
        let step = |step, makespan_ns| EmulatedStep {
            step,
            makespan_ns,
            step_ns: makespan_ns + 1000,
            bubble: 0.051,
            runtime_ns: 12_340,
            late_ns: 900,
            program: 0,
        };
        let report = EmulationReport {
            steps: vec![step(1, 1_300_000), step(2, 1_010_000), step(3, 1_020_000)],
            exchanging_ns: 0,
            simulated_makespan_ns: 1_000_000,
            simulated_step_ns: 1_001_000,
            simulated_bubble: 0.05,
            measured: Default::default(),
            simulated: Default::default(),
        };
        let text = summary(&Config { pp: 8, zero3: 2, ..Config::default() }, &report);
        for line in [
            "zeropp, 16 ranks as threads, 3 steps",
            "makespan  1.020 ms measured (median), 1.000 ms simulated: +2.00 %",
            "step      1.011 ms measured (median), 1.001 ms simulated: +1.00 %",
            "bubble    5.1 % measured, 5.0 % simulated",
            "runtime   12.3 µs for an action, without waiting",
            "lateness  0.9 µs after a wait, made up for in the next",
        ] {
            assert!(text.lines().any(|l| l == line), "{line:?} is not in:\n{text}");
        }
    }
}
