//! The figures of a step in one table: what each is called in files and for those who watch.

use serde_json::Value;
use zeropp_core::metrics::StepMetrics;

/// A figure of a step.
pub(super) struct Key {
    /// In a line of JSON and as a column of CSV, that of an object inside behind a dot.
    pub(super) name: &'static str,
    /// Its value in a step, a switch as 0 or 1; none where the step has none. Of what is plotted:
    /// files have the figures of a line of JSON, which leaves some out where they are 0.
    pub(super) of: fn(&StepMetrics) -> Option<f64>,
    /// The tag of TensorBoard, which groups by what is before the slash.
    pub(super) tag: Option<&'static str>,
    /// The gauge of Prometheus behind `zeropp_`, and its help.
    pub(super) gauge: Option<(&'static str, &'static str)>,
    /// Whether every step has it, so that one without a value, as a loss of no tokens, is not a
    /// number; what other figures were stays, and before the first there is none.
    pub(super) is_in_every_step: bool,
}

/// A figure that stands in files only.
const fn key(name: &'static str) -> Key {
    Key { name, of: |_| None, tag: None, gauge: None, is_in_every_step: true }
}

/// A figure that is plotted too.
const fn plot(name: &'static str, of: fn(&StepMetrics) -> Option<f64>) -> Key {
    Key { name, of, tag: None, gauge: None, is_in_every_step: true }
}

impl Key {
    const fn tag(self, tag: &'static str) -> Key {
        Key { tag: Some(tag), ..self }
    }

    const fn gauge(self, name: &'static str, help: &'static str) -> Key {
        Key { gauge: Some((name, help)), ..self }
    }

    /// A figure of some steps only.
    const fn of_some_steps(self) -> Key {
        Key { is_in_every_step: false, ..self }
    }

    /// Its value in a step that [`values`] gave; none where a line of JSON has none.
    pub(super) fn written<'a>(&self, step: &'a Value) -> Option<&'a Value> {
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

fn switch(is_on: bool) -> Option<f64> {
    Some(f64::from(u8::from(is_on)))
}

/// All of them. A column's place is its row's, so that new ones come last.
pub(super) const KEYS: &[Key] = &[
    plot("step", |m| Some(m.step as f64)).gauge("step", "Last step of the run."),
    plot("wall_time", |m| Some(m.wall_time))
        .gauge("last_step_timestamp_seconds", "When it was done."),
    plot("loss", StepMetrics::measured_loss)
        .tag("loss/train")
        .gauge("loss", "Its loss, in nats per token."),
    plot("grad_norm", |m| Some(m.grad_norm))
        .tag("train/grad_norm")
        .gauge("grad_norm", "Its global gradient norm."),
    plot("lr", |m| Some(m.lr)).tag("train/lr").gauge("learning_rate", "Its learning rate."),
    key("tokens"),
    plot("tokens_per_s", |m| Some(m.tokens_per_s))
        .tag("speed/tokens_per_s")
        .gauge("tokens_per_second", "Its tokens per second."),
    plot("step_s", |m| Some(m.step_s)).tag("speed/step_s").gauge("step_seconds", "Its time."),
    plot("flops_util", |m| Some(m.flops_util))
        .tag("speed/flops_util")
        .gauge("flops_utilization_ratio", "Its FLOP utilisation."),
    plot("bubble", |m| Some(m.bubble))
        .tag("speed/bubble")
        .gauge("bubble_ratio", "Idle share of its pipeline."),
    key("bubble_own_span"),
    key("bubble_step"),
    key("all_gathers"),
    key("reduce_scatters"),
    key("all_reduces"),
    key("optimizer_gathers"),
    plot("comm_bytes", |m| Some(m.comm_bytes as f64)).tag("comm/bytes"),
    key("peak_bytes.parameter_shard"),
    key("peak_bytes.gathered"),
    key("peak_bytes.packed_weights"),
    key("peak_bytes.gradient"),
    key("peak_bytes.gradient_shard"),
    key("peak_bytes.optimizer"),
    plot("peak_bytes.activation", |m| Some(m.peak_bytes.activation as f64))
        .tag("memory/activation_bytes"),
    key("peak_bytes.weight_stash"),
    key("peak_bytes.communication"),
    key("peak_bytes.save"),
    plot("at_once_bytes", |m| Some(m.at_once_bytes as f64)).tag("memory/at_once_bytes"),
    key("early_bytes"),
    key("idle_bytes"),
    plot("save_blocked_s", |m| Some(m.save_blocked_s)).tag("speed/save_blocked_s"),
    plot("skipped", |m| switch(m.skipped)).tag("train/skipped"),
    plot("eval.loss", |m| Some(m.eval?.loss))
        .tag("loss/validation")
        .gauge("eval_loss", "Last validation loss, in nats per token.")
        .of_some_steps(),
    plot("eval.perplexity", |m| Some(m.eval?.perplexity)).tag("eval/perplexity").of_some_steps(),
    plot("eval.bits_per_byte", |m| m.eval?.bits_per_byte).tag("eval/bits_per_byte").of_some_steps(),
    key("eval.tokens").of_some_steps(),
    key("eval.seconds").of_some_steps(),
    key("eval.all_gathers").of_some_steps(),
    key("eval.comm_bytes").of_some_steps(),
    key("eval.best").of_some_steps(),
    key("peak_bytes.rollback"),
    plot("rolled_back", |m| switch(m.rolled_back)).tag("train/rolled_back"),
    key("redone_s"),
    plot("scored_tokens", |m| m.scored_tokens.map(|n| n as f64))
        .tag("train/scored_tokens")
        .of_some_steps(),
    key("eval.scored_tokens").of_some_steps(),
    plot("experts.balance_loss", |m| Some(m.experts.as_ref()?.balance_loss))
        .tag("experts/balance_loss")
        .of_some_steps(),
    plot("experts.z_loss", |m| Some(m.experts.as_ref()?.z_loss))
        .tag("experts/z_loss")
        .of_some_steps(),
    plot("experts.entropy", |m| Some(m.experts.as_ref()?.entropy))
        .tag("experts/entropy")
        .of_some_steps(),
    plot("experts.fullest", |m| Some(m.experts.as_ref()?.fullest))
        .tag("experts/fullest")
        .gauge("expert_load_ratio", "Tokens of the most loaded expert over the mean of its layer.")
        .of_some_steps(),
    key("experts.fullest_layer").of_some_steps(),
    plot("experts.idle", |m| Some(m.experts.as_ref()?.idle as f64))
        .tag("experts/idle")
        .of_some_steps(),
    plot("program", |m| Some(m.program as f64))
        .tag("schedule/program")
        .gauge("program", "How often its order of actions was exchanged for another by then."),
    key("peak_bytes.host_activation").of_some_steps(),
    key("peak_bytes.host_state").of_some_steps(),
];

#[cfg(test)]
mod tests {
    use zeropp_core::metrics::{Evaluation, ExpertMetrics};

    use super::*;

    /// A step all of whose figures are others.
    fn full() -> StepMetrics {
        let mut step = StepMetrics { step: 1, ..StepMetrics::default() };
        step.eval = Some(Evaluation {
            bits_per_byte: Some(1.5),
            scored_tokens: Some(1),
            ..Evaluation::default()
        });
        step.scored_tokens = Some(1);
        step.experts = Some(ExpertMetrics::default());
        (step.skipped, step.rolled_back, step.save_blocked_s) = (true, true, 1.0);
        step.program = 1;
        (step.peak_bytes.host_activation, step.peak_bytes.host_state) = (1, 1);
        let mut json = serde_json::to_value(&step).unwrap();
        let mut next = 2;
        for value in json.as_object_mut().unwrap().values_mut() {
            number(value, &mut next);
        }
        serde_json::from_value(json).unwrap()
    }

    /// Puts numbers that count up in place of numbers.
    fn number(value: &mut Value, next: &mut u64) {
        match value {
            Value::Number(_) => (*value, *next) = (Value::from(*next), *next + 1),
            Value::Object(inner) => inner.values_mut().for_each(|value| number(value, next)),
            _ => {}
        }
    }

    #[test]
    fn plotted_figures_are_those_of_their_rows() {
        let step = full();
        let values = values(&step).unwrap();
        for key in KEYS.iter().filter(|key| key.tag.is_some() || key.gauge.is_some()) {
            let written = key.written(&values).unwrap();
            let written = written.as_f64().or(written.as_bool().and_then(switch));
            assert_eq!((key.of)(&step), written, "{}", key.name);
        }
    }

    #[test]
    fn a_row_says_whether_every_step_has_its_figure() {
        let step = StepMetrics::default();
        for key in KEYS.iter().filter(|key| key.tag.is_some() || key.gauge.is_some()) {
            assert_eq!((key.of)(&step).is_some(), key.is_in_every_step, "{}", key.name);
        }
    }
}
