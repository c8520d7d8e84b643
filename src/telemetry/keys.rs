//! The figures of a step in one table: what each is called in files and for those who watch.

use serde_json::Value;
use zeropp_core::metrics::StepMetrics;

/// A figure of a step.
pub(super) struct Key {
    /// In a line of JSON and as a column of CSV, that of an object inside behind a dot.
    pub(super) name: &'static str,
    /// The tag of TensorBoard, which groups by what is before the slash.
    pub(super) tag: Option<&'static str>,
    /// The gauge of Prometheus behind `zeropp_`, and its help.
    pub(super) gauge: Option<(&'static str, &'static str)>,
}

const fn key(name: &'static str) -> Key {
    Key { name, tag: None, gauge: None }
}

impl Key {
    const fn tag(self, tag: &'static str) -> Key {
        Key { tag: Some(tag), ..self }
    }

    const fn gauge(self, name: &'static str, help: &'static str) -> Key {
        Key { gauge: Some((name, help)), ..self }
    }

    /// Its value in a step that [`values`] gave; none where the step has none.
    pub(super) fn of<'a>(&self, step: &'a Value) -> Option<&'a Value> {
        self.name.split('.').try_fold(step, |value, key| value.get(key))
    }
}

/// A step by keys, as in its line of JSON, whose numbers read back to the same bits. A loss of no
/// tokens, and what is not finite, is `null`.
pub(super) fn values(step: &StepMetrics) -> serde_json::Result<Value> {
    let mut values = serde_json::to_value(step)?;
    if step.measured_loss().is_none() {
        values["loss"] = Value::Null;
    }
    Ok(values)
}

/// A value as a number; a switch that is on is 1, and NaN stands for what is not finite.
pub(super) fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(if *value == Value::Bool(true) { 1.0 } else { f64::NAN })
}

/// All of them. A column's place is its row's, so that new ones come last.
pub(super) const KEYS: &[Key] = &[
    key("step").gauge("step", "Last step of the run."),
    key("wall_time").gauge("last_step_timestamp_seconds", "When it was done."),
    key("loss").tag("loss/train").gauge("loss", "Its loss, in nats per token."),
    key("grad_norm").tag("train/grad_norm").gauge("grad_norm", "Its global gradient norm."),
    key("lr").tag("train/lr").gauge("learning_rate", "Its learning rate."),
    key("tokens"),
    key("tokens_per_s")
        .tag("speed/tokens_per_s")
        .gauge("tokens_per_second", "Its tokens per second."),
    key("step_s").tag("speed/step_s").gauge("step_seconds", "Its time."),
    key("flops_util")
        .tag("speed/flops_util")
        .gauge("flops_utilization_ratio", "Its FLOP utilisation."),
    key("bubble").tag("speed/bubble").gauge("bubble_ratio", "Idle share of its pipeline."),
    key("bubble_own_span"),
    key("bubble_step"),
    key("all_gathers"),
    key("reduce_scatters"),
    key("all_reduces"),
    key("optimizer_gathers"),
    key("comm_bytes").tag("comm/bytes"),
    key("peak_bytes.parameter_shard"),
    key("peak_bytes.gathered"),
    key("peak_bytes.packed_weights"),
    key("peak_bytes.gradient"),
    key("peak_bytes.gradient_shard"),
    key("peak_bytes.optimizer"),
    key("peak_bytes.activation").tag("memory/activation_bytes"),
    key("peak_bytes.weight_stash"),
    key("peak_bytes.communication"),
    key("peak_bytes.save"),
    key("at_once_bytes").tag("memory/at_once_bytes"),
    key("early_bytes"),
    key("idle_bytes"),
    key("save_blocked_s").tag("speed/save_blocked_s"),
    key("skipped").tag("train/skipped"),
    key("eval.loss")
        .tag("loss/validation")
        .gauge("eval_loss", "Last validation loss, in nats per token."),
    key("eval.perplexity").tag("eval/perplexity"),
    key("eval.bits_per_byte").tag("eval/bits_per_byte"),
    key("eval.tokens"),
    key("eval.seconds"),
    key("eval.all_gathers"),
    key("eval.comm_bytes"),
    key("eval.best"),
    key("peak_bytes.rollback"),
    key("rolled_back").tag("train/rolled_back"),
    key("redone_s"),
    key("scored_tokens").tag("train/scored_tokens"),
    key("eval.scored_tokens"),
];
