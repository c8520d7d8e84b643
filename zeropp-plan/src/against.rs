//! What was predicted beside what a run measured, term by term.

use serde_json::Value;
use zeropp_data::files::in_words;
use zeropp_schedule::memory::{MemoryBytes, MemoryKind};

use crate::PlanError;
use crate::plan::LayoutPlan;

/// Steps at a run's start that do not count: they build kernels and buffers.
const WARM_UP: usize = 1;
/// The row of a share, whose difference is in points.
const BUBBLE: &str = "bubble";

/// A table of layout `index`, from 0, beside a run's metrics, one object a line.
///
/// # Errors
/// An index beyond the last layout, or metrics without a step behind the first one.
pub fn text(plan: &LayoutPlan, index: usize, metrics: &str) -> Result<String, PlanError> {
    let Some(ranked) = plan.layouts.get(index) else {
        return Err(PlanError::new(format!(
            "explain = {}: the plan has {} layouts",
            index + 1,
            plan.layouts.len()
        )));
    };
    let mut steps = Vec::new();
    for (i, line) in metrics.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let step: Value = serde_json::from_str(line).map_err(|e| {
            PlanError::new(format!("against: line {} is no object of metrics ({e})", i + 1))
        })?;
        steps.extend(step.get("step_s").is_some().then_some(step));
    }
    let steps = steps.get(WARM_UP..).unwrap_or_default();
    if steps.is_empty() {
        let works = "against: no step but the first; give the metrics of two steps or more";
        return Err(PlanError::new(works));
    }
    let of = |step: &Value, path: &[&str]| {
        path.iter().try_fold(step, |value, key| value.get(key)).and_then(Value::as_f64)
    };
    let median = |path: &[&str]| {
        let mut all: Vec<f64> = steps.iter().filter_map(|step| of(step, path)).collect();
        all.sort_by(f64::total_cmp);
        all.get(all.len() / 2).copied()
    };
    let planned = &ranked.planned;
    let mut lines = vec![format!("{}", planned.layout), row("", "predicted", "measured", "")];
    let seconds = |s: f64| format!("{s:.4} s");
    let mut tell = |name: &str, mine: f64, path: &[&str], words: &dyn Fn(f64) -> String| {
        let Some(theirs) = median(path) else { return };
        // A share of which there is hardly any is not off by a share of it.
        let off = match theirs.abs() > 0.0 {
            _ if name == BUBBLE => format!("{:+.2} points", 100.0 * (mine - theirs)),
            // Rounded before: what is off by less is +0.0, and not −0.0.
            true => format!("{:+.1} %", (1e3 * (mine / theirs - 1.0)).round() / 10.0 + 0.0),
            false => String::new(),
        };
        lines.push(row(name, &words(mine), &words(theirs), &off));
    };
    tell("step", planned.step_s, &["step_s"], &seconds);
    tell("tokens/s", ranked.tokens_per_s, &["tokens_per_s"], &|x| format!("{x:.0}"));
    tell(BUBBLE, planned.bubble, &["bubble"], &|x| format!("{:.2} %", 100.0 * x));
    let bytes = |x: f64| in_words(x as u64);
    let most = planned.peaks.iter().fold(MemoryBytes::default(), |most, rank| most.max(rank));
    let keys = serde_json::to_value(MemoryKind::ALL).map_err(|e| PlanError::new(e.to_string()))?;
    let keys = keys.as_array().into_iter().flatten().filter_map(Value::as_str);
    for ((kind, predicted), key) in most.kinds().zip(keys).filter(|((k, _), _)| k.is_in_memory()) {
        tell(kind.name(), predicted as f64, &["peak_bytes", key], &bytes);
    }
    tell("most at once", ranked.worst_bytes as f64, &["at_once_bytes"], &bytes);
    Ok(lines.join("\n"))
}

fn row(name: &str, predicted: &str, measured: &str, off: &str) -> String {
    format!("{name:16}{predicted:>14}{measured:>14}{off:>14}").trim_end().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::plan_of;

    #[test]
    fn measured_values_stand_beside_predictions() {
        let plan = plan_of("gpt2", 8, 64);
        let step = plan.layouts[0].planned.step_s;
        let line = |s: f64| format!("{{\"step\": 1, \"step_s\": {s}, \"bubble\": 0.5}}\n");
        let metrics = [line(100.0), line(step), line(step), line(step)].concat();
        let reported = text(&plan, 0, &metrics).unwrap();
        assert!(reported.contains("+0.0 %"), "{reported}");
        let points = 100.0 * (plan.layouts[0].planned.bubble - 0.5);
        assert!(reported.contains(&format!("{points:+.2} points")), "{reported}");
        for (metrics, said) in [("", "no step"), ("{}", "no step"), ("hello", "line 1")] {
            let error = text(&plan, 0, metrics).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
        assert!(text(&plan, 10, &metrics).is_err());
    }
}
