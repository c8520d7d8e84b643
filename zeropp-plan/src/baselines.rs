//! What plans are compared with, and what zeropp does not run: Megatron's 3D parallelism with
//! tensor parallelism, and ZB-V with it. Closed forms, with the same machine and the same rates as
//! everything else.

use zeropp_schedule::costs::Machine;

use crate::model::ModelSizes;

/// Bytes that mixed precision keeps of a parameter: fp16 and its fp32 gradient, an fp32 copy and
/// two moments.
const PARAMETER_BYTES: f64 = 18.0;
/// Bytes that the optimizer's pass moves of each: gradients are also scaled back and measured.
const UPDATE_BYTES: f64 = 34.0;

/// How activations are saved (Korthikanti et al. 2022).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Saving {
    /// All are kept; norms and dropout are computed on every rank of a group.
    None,
    /// Every layer is recomputed.
    Full,
    /// Sequence parallelism, all kept.
    Sequence,
    /// Sequence parallelism, and attention's scores are recomputed.
    SequenceSelective,
}

/// A layout with tensor parallelism.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorLayout {
    /// Tensor ranks.
    pub tp: usize,
    /// Pipeline ranks.
    pub pp: usize,
    /// Replicas.
    pub dp: usize,
    /// Stages on each rank.
    pub interleave: usize,
    /// Samples of a micro-batch.
    pub micro_batch: usize,
    /// How activations are saved.
    pub saving: Saving,
    /// Whether backwards are split and the bubble is gone (ZB-V).
    pub zero_bubble: bool,
}

/// What a baseline comes to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Baseline {
    /// Seconds of a step.
    pub step_s: f64,
    /// Bytes of the first pipeline rank.
    pub bytes: f64,
    /// Bytes that a rank sends for tensor parallelism in a step.
    pub sent: f64,
}

/// A step of `model` with a global batch of `samples`.
pub fn step(
    machine: &Machine,
    model: &ModelSizes,
    samples: usize,
    layout: &TensorLayout,
) -> Baseline {
    let t = layout.tp as f64;
    let (layers, h, s) =
        (model.decoder.layers as f64, model.decoder.hidden as f64, model.seq as f64);
    let (p, v) = (layout.pp as f64, layout.interleave as f64);
    let batch = layout.micro_batch as f64;
    let tokens = batch * s;
    let rate = machine.flops_per_s * machine.flops_share;
    // Scores of all heads, five bytes each; Megatron computes both halves of the mask.
    let scores = 5.0 * model.decoder.heads as f64 * s * s * batch;
    let products = (24.0 * tokens * h * h + 4.0 * tokens * s * h) / t / rate;
    let kept = match layout.saving {
        Saving::None | Saving::Full => 10.0 * tokens * h + (24.0 * tokens * h + scores) / t,
        Saving::Sequence | Saving::SequenceSelective => (34.0 * tokens * h + scores) / t,
    };
    let passes = 2.0 * kept / machine.memory_bytes_per_s;
    // Two all-reduces of the hidden state a pass, or as many gathers and reductions.
    let all_reduce = 2.0 * (t - 1.0) / t * 2.0 * tokens * h;
    let tensor = match t > 1.0 {
        true => 2.0 * (machine.collective_s + all_reduce / machine.zero3_bytes_per_s),
        false => 0.0,
    };
    let forward = products + passes + tensor;
    let again = match layout.saving {
        Saving::Full => forward,
        Saving::SequenceSelective => {
            4.0 * tokens * s * h / t / rate + 2.0 * scores / t / machine.memory_bytes_per_s
        }
        Saving::None | Saving::Sequence => 0.0,
    };
    let layer = forward + 2.0 * (products + passes) + tensor + again;
    let head = 6.0 * tokens * h * model.decoder.vocabulary as f64 / t / rate;
    let micro_batches = samples as f64 / (batch * layout.dp as f64);
    let fill = if layout.zero_bubble { 0.0 } else { (p - 1.0) / v };
    let parameters = (model.decoder.parameter_count() as f64) / (t * p);
    let update = UPDATE_BYTES * parameters / machine.memory_bytes_per_s;
    let inside = layout.tp * layout.dp <= machine.per_node;
    let link = if inside { machine.zero3_bytes_per_s } else { machine.replica_bytes_per_s };
    let replicas = if layout.dp > 1 { 2.0 * 4.0 * parameters / link } else { 0.0 };
    let passes_of_group = if layout.saving == Saving::Full { 6.0 } else { 4.0 };
    Baseline {
        step_s: (micro_batches + fill) * layers / p * layer
            + micro_batches * head
            + update
            + replicas,
        bytes: PARAMETER_BYTES * parameters + activations(model, layout, tokens, scores),
        sent: passes_of_group * all_reduce * layers / p * micro_batches,
    }
}

/// Activations that the first pipeline rank keeps of P micro-batches, and of some more where it has
/// several stages.
fn activations(model: &ModelSizes, layout: &TensorLayout, tokens: f64, scores: f64) -> f64 {
    let (t, p, v) = (layout.tp as f64, layout.pp as f64, layout.interleave as f64);
    let x = tokens * model.decoder.hidden as f64;
    let each = match layout.saving {
        Saving::None => 10.0 * x + (24.0 * x + scores) / t,
        Saving::Full => 2.0 * x,
        Saving::Sequence => (34.0 * x + scores) / t,
        Saving::SequenceSelective => 34.0 * x / t,
    };
    let layers = model.decoder.layers as f64;
    let more = if layout.zero_bubble || v < 2.0 { 0.0 } else { (p - 1.0) / (p * v) };
    let one_whole = match layout.saving {
        Saving::Full => 10.0 * x + (24.0 * x + scores) / t,
        _ => 0.0,
    };
    layers * each * (1.0 + more) + one_whole
}
