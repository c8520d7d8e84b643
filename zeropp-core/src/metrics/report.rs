//! The figures of a run.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Deserializer, Serialize};

use crate::meter::{HeldBytes, MemoryBytes};

/// The description of a run: the first line of its metrics, and of what each resumed run adds to
/// them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunHeader {
    /// The name of the run.
    pub name: String,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Of zeropp.
    pub version: String,
    /// When its first step began: seconds since 1970 (UTC), to the millisecond.
    pub wall_time: f64,
    /// The step of the checkpoint that it goes on from, if it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resumed_step: Option<u64>,
    /// Pipeline ranks.
    pub pp: usize,
    /// Ranks of a ZeRO-3 group.
    pub zero3: usize,
    /// Replicas.
    pub dp: usize,
    /// Schedule kind.
    pub schedule: String,
    /// All parameters of the model.
    pub parameters: u64,
    /// Tokens of a step over all ranks.
    pub tokens_per_step: u64,
    /// The step that is to be the last.
    pub steps: u64,
    /// All settings that have a value, those that follow from others too, each as a person would
    /// write it.
    pub settings: BTreeMap<String, String>,
}

/// Seconds since 1970 (UTC), to the millisecond.
pub fn wall_time() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_millis() as f64 / 1e3
}

/// One step, as written to `--metrics`. Counts and bytes are totals over all ranks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Step, from 1.
    pub step: u64,
    /// When the step was done: seconds since 1970 (UTC), to the millisecond, by the clock of rank
    /// 0's machine.
    #[serde(default)]
    pub wall_time: f64,
    /// Mean loss in nats a token over the whole batch, before the update.
    #[serde(deserialize_with = "nan_from_null")]
    pub loss: f64,
    /// Global gradient norm before clipping.
    #[serde(deserialize_with = "nan_from_null")]
    pub grad_norm: f64,
    /// Learning rate of this step.
    pub lr: f64,
    /// Tokens of this step over all ranks.
    pub tokens: u64,
    /// Those of them that are scored: what `loss` is the mean of. Left out where all are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scored_tokens: Option<u64>,
    /// Tokens per second over all ranks.
    pub tokens_per_s: f64,
    /// Wall-clock seconds of the step.
    pub step_s: f64,
    /// Model FLOP/s over the peak of all ranks, 0 to 1; recomputation does not count as work.
    pub flops_util: f64,
    /// Measured idle share of all ranks from the first start to the last end of a compute on any.
    pub bubble: f64,
    /// Measured idle share between each rank's own first and last compute, averaged over ranks.
    #[serde(default)]
    pub bubble_own_span: f64,
    /// As `bubble`, from this step's start to the next one's: optimizer and reductions included.
    #[serde(default)]
    pub bubble_step: f64,
    /// Stage-level all-gathers.
    pub all_gathers: u64,
    /// Stage-level reduce-scatters.
    pub reduce_scatters: u64,
    /// Stage-level replica reductions.
    pub all_reduces: u64,
    /// All-gathers that made matrices whole for an optimizer that needs them so (Muon). Left out
    /// where there is none.
    #[serde(default, skip_serializing_if = "is_none")]
    pub optimizer_gathers: u64,
    /// Bytes sent by all ranks, those included.
    pub comm_bytes: u64,
    /// Largest over ranks, by kind.
    pub peak_bytes: MemoryBytes,
    /// Largest over ranks of the sum of all kinds at one time.
    #[serde(default)]
    pub at_once_bytes: u64,
    /// Largest over ranks, and over the steps so far, of messages that came before they were asked
    /// for: beside `peak_bytes`, since it is a matter of timing.
    #[serde(default)]
    pub early_bytes: u64,
    /// Buffers that engines keep for later and that are not in use after the step, of all ranks;
    /// beside `peak_bytes`, too.
    #[serde(default)]
    pub idle_bytes: u64,
    /// Longest over ranks that saving kept one from its work in this step: handing the state of the
    /// step before to the writer, and holding the update back until that is written. Left out
    /// where nothing was saved.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub save_blocked_s: f64,
    /// Every layer in the model's order, in the steps in which layers are looked at (`log-layers`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerMetrics>,
    /// How tokens were spread over experts, in a model that has some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertMetrics>,
    /// The validation loss after this step's update, where it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval: Option<Evaluation>,
    /// Whether the update was skipped on all ranks because a gradient was not finite.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub skipped: bool,
    /// Whether the update was done before the norm was known, proved wrong, and was taken back.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub rolled_back: bool,
    /// Longest over ranks of the time that it had worked on this step when the update before it
    /// was taken back, which it did again. Left out where there was none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub redone_s: f64,
    /// The program that the ranks ran: the n-th that took another one's place in this run. Left out
    /// where it is the planned one, which is 0.
    #[serde(default, skip_serializing_if = "is_none")]
    pub program: u64,
}

impl StepMetrics {
    /// The loss, where a token of the step was scored: else there is none, and `loss` is 0.
    pub fn measured_loss(&self) -> Option<f64> {
        (self.scored_tokens != Some(0)).then_some(self.loss)
    }
}

/// How a step's tokens were spread over the experts of all layers that have some.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExpertMetrics {
    /// The balance loss, without its weight: the mean over layers and micro-batches of E·Σ f·P,
    /// which is 1 where all of the E experts are alike.
    pub balance_loss: f64,
    /// The mean squared log-sum-exp of the routers' logits.
    pub z_loss: f64,
    /// Mean entropy of the experts' mean scores in a micro-batch, in nats; ln E at most.
    pub entropy: f64,
    /// Tokens of a layer's most loaded expert over the mean of its experts, in the layer where that
    /// is largest.
    pub fullest: f64,
    /// That layer.
    pub fullest_layer: String,
    /// Experts of all layers that no token of the step went to.
    pub idle: usize,
}

/// The figures of one layer in a step: the embedding, a block, the final norm, the head. A number
/// that is not finite is written as null.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LayerMetrics {
    /// The layer's name, with which its parameters begin.
    pub name: String,
    /// Norm of the gradient of all that trains in it, before clipping. Left out where nothing
    /// does; a tied head's is in the embedding's.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "some_nan_from_null"
    )]
    pub grad_norm: Option<f64>,
    /// Norm of what the update changed, over the norm of what trains before it. 0 where the update
    /// was skipped. Left out where `grad_norm` is.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "some_nan_from_null"
    )]
    pub update_ratio: Option<f64>,
    /// Root mean square of the elements of its output, over all tokens of the step. Left out for
    /// the head, which ends in the loss.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "some_nan_from_null"
    )]
    pub activation_rms: Option<f64>,
}

fn is_none(n: &u64) -> bool {
    *n == 0
}

fn is_zero(x: &f64) -> bool {
    *x == 0.0
}

/// The result of evaluating a model on data that it is not trained on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Mean loss in nats a token.
    #[serde(deserialize_with = "nan_from_null")]
    pub loss: f64,
    /// e to the power of the loss.
    #[serde(deserialize_with = "nan_from_null")]
    pub perplexity: f64,
    /// The loss in bits a byte of text, where each token is a byte.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits_per_byte: Option<f64>,
    /// Tokens that were predicted.
    pub tokens: u64,
    /// Those of them that are scored: what `loss` is the mean of. Left out where all are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scored_tokens: Option<u64>,
    /// Wall-clock seconds that it took.
    pub seconds: f64,
    /// Stage-level all-gathers, over all ranks.
    pub all_gathers: u64,
    /// Bytes sent by all ranks.
    pub comm_bytes: u64,
    /// Whether no earlier one of this run had a lower loss.
    pub best: bool,
}

/// How a run measures its validation loss.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EvaluationPlan {
    /// Steps from one evaluation to the next.
    pub every: u64,
    /// Batches of one evaluation.
    pub batches: u64,
    /// Tokens that one evaluation predicts.
    pub tokens: u64,
    /// All-gathers one rank issues in a batch.
    pub all_gathers_per_rank: u64,
    /// Simulated `bubble` of a batch, 0 to 1.
    pub bubble: f64,
    /// Predicted bytes of each pipeline rank where it holds most, its shards and the optimizer's
    /// state included.
    #[serde(default)]
    pub held: Vec<u64>,
}

/// The prediction for one pipeline rank: what it holds and does.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankPlan {
    /// Pipeline rank.
    pub pp: usize,
    /// Names of the layers of each of its stages, keyed by stage.
    pub stages: Vec<(usize, Vec<String>)>,
    /// Parameters of its stages (whole, not sharded).
    pub parameters: u64,
    /// Bytes that each of its ranks which saves writes of a checkpoint.
    #[serde(default)]
    pub saved: u64,
    /// Predicted bytes by kind.
    #[serde(flatten)]
    pub held: HeldBytes,
}

/// Everything known before a rank starts; `--dry-run` shows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Pipeline, ZeRO-3 and replica sizes.
    pub pp: usize,
    /// ZeRO-3 group size.
    pub zero3: usize,
    /// Replicas.
    pub dp: usize,
    /// Schedule kind.
    pub schedule: String,
    /// Stages on each rank (V).
    pub virtual_stages: usize,
    /// Micro-batches of each unit of a step; of a replica that has the most of them.
    pub units: Vec<usize>,
    /// Micro-batches of a step on each rank of every replica.
    #[serde(default)]
    pub micro_batches: Vec<usize>,
    /// Samples in a micro-batch.
    pub micro_batch_size: usize,
    /// Tokens in a sample.
    pub seq: usize,
    /// All parameters of the model.
    pub parameters: u64,
    /// Training FLOP of one token.
    pub flops_per_token: f64,
    /// How the model was cut into stages, in words.
    #[serde(default)]
    pub cut: String,
    /// Blocks of each stage.
    #[serde(default)]
    pub blocks: Vec<usize>,
    /// Time of the longest stage, of the mean: what the cut costs where stages are not equal.
    #[serde(default)]
    pub longest_stage: f64,
    /// Simulated `bubble`, as in the metrics, with the times that `costs` names, 0 to 1.
    pub bubble: f64,
    /// Whether the times that the schedule was made for were given, measured or estimated, in a
    /// line.
    #[serde(default)]
    pub costs: String,
    /// All-gathers and reduce-scatters one rank issues in a step.
    pub all_gathers_per_rank: u64,
    /// Reduce-scatters one rank issues in a step.
    pub reduce_scatters_per_rank: u64,
    /// The most all-gathers that one rank's optimizer issues in a step, to make matrices whole.
    #[serde(default)]
    pub optimizer_gathers_per_rank: u64,
    /// The most bytes that one rank sends for them.
    #[serde(default)]
    pub optimizer_bytes_per_rank: u64,
    /// The validation loss, where it is asked for.
    #[serde(default)]
    pub evaluation: Option<EvaluationPlan>,
    /// Each pipeline rank.
    pub ranks: Vec<RankPlan>,
    /// Notes, a sentence each: that a setting has no effect here, or that another would do better.
    #[serde(default)]
    pub notes: Vec<String>,
}

/// The figures at the end of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Steps done in this run.
    pub steps: u64,
    /// Loss of the first step of this run.
    pub first_loss: f64,
    /// Loss of the last step.
    pub last_loss: f64,
    /// Median tokens per second over the steps after the first.
    pub tokens_per_s: f64,
    /// Median FLOP utilisation.
    pub flops_util: f64,
    /// Median measured bubble.
    pub bubble: f64,
    /// Median measured bubble of the ranks' own spans.
    #[serde(default)]
    pub bubble_own_span: f64,
    /// Median measured bubble from one step's start to the next one's.
    #[serde(default)]
    pub bubble_step: f64,
    /// Bubble simulated before the run.
    pub predicted_bubble: f64,
    /// Bubble simulated with the measured mean times of each stage's F, B and W.
    #[serde(default)]
    pub timed_bubble: f64,
    /// All-gathers per rank and unit, measured.
    pub all_gathers_per_unit: f64,
    /// Reduce-scatters per rank and unit, measured.
    pub reduce_scatters_per_unit: f64,
    /// Largest measured peak over ranks and steps, by kind.
    pub peak_bytes: MemoryBytes,
    /// Largest predicted peak over ranks, by kind.
    pub predicted_bytes: MemoryBytes,
    /// Largest measured sum of all kinds at one time, over ranks and steps.
    #[serde(default)]
    pub at_once_bytes: u64,
    /// Largest measured `early_bytes` of a step.
    #[serde(default)]
    pub early_bytes: u64,
    /// Largest measured `idle_bytes` of a step.
    #[serde(default)]
    pub idle_bytes: u64,
    /// `at_once_bytes` as predicted, over ranks.
    #[serde(default)]
    pub predicted_at_once_bytes: u64,
    /// Seconds from the first step's start to the last one's end.
    pub total_s: f64,
    /// Checkpoints that it wrote.
    #[serde(default)]
    pub saves: u64,
    /// Sum over the steps of `save_blocked_s`, which is of checkpoints and copies.
    #[serde(default)]
    pub save_blocked_s: f64,
    /// Steps whose update was done early, proved wrong and was taken back.
    #[serde(default)]
    pub rollbacks: u64,
    /// Sum over the steps of `redone_s`.
    #[serde(default)]
    pub redone_s: f64,
    /// Seconds of CPU that the writers of all ranks took beside the ranks' own threads.
    #[serde(default)]
    pub save_cpu_s: f64,
    /// Copies of the state that it made in memory.
    #[serde(default)]
    pub copies: u64,
    /// Bytes of the largest copy.
    #[serde(default)]
    pub copy_bytes: u64,
    /// `copy_bytes` as predicted.
    #[serde(default)]
    pub predicted_copy_bytes: u64,
    /// Seconds of CPU that the writers of all copies took.
    #[serde(default)]
    pub copy_cpu_s: f64,
    /// Times that its ranks failed, met again and went on.
    #[serde(default)]
    pub recoveries: u64,
    /// Replicas that it went on without.
    #[serde(default)]
    pub lost_replicas: u64,
    /// Steps that were done again after a failure; they are no part of `steps`.
    #[serde(default)]
    pub steps_redone: u64,
    /// Seconds from the failures to the first step that was done after each.
    #[serde(default)]
    pub recovery_s: f64,
    /// The last validation loss, if one was measured, and its step.
    #[serde(default)]
    pub last_eval: Option<(u64, Evaluation)>,
    /// The lowest validation loss of this run, and its step.
    #[serde(default)]
    pub best_eval: Option<(u64, Evaluation)>,
    /// Why it ended before its last step, if it did.
    #[serde(default)]
    pub stopped: Option<Stopped>,
    /// The newest checkpoint that it wrote.
    #[serde(default)]
    pub checkpoint: Option<PathBuf>,
}

/// A run that was stopped before its last step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stopped {
    /// The step after which it ended.
    pub step: u64,
    /// The signal that asked for it; none where the program did, or no stop was asked for.
    pub signal: Option<i32>,
    /// Where it ended because the validation loss fell no more: how many in a row were no lower
    /// than the lowest before.
    #[serde(default)]
    pub no_lower: Option<u64>,
}

/// JSON writes what is not finite as null; it comes back as NaN.
fn nan_from_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// The same where the number may be left out.
fn some_nan_from_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    nan_from_null(deserializer).map(Some)
}
