//! What plans are compared with, and what zeropp does not run: Megatron's 3D parallelism with
//! tensor parallelism, and ZB-V with it. Closed forms, with the same machine and the same rates as
//! everything else.

use zeropp_schedule::costs::Machine;

use zeropp_plan::model::ModelSizes;

/// Bytes that the optimizer's pass moves of each parameter: gradients are also scaled back and
/// measured.
pub(crate) const UPDATE_BYTES: f64 = 34.0;

/// How activations are saved (Korthikanti et al. 2022).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ActivationSaving {
    /// All are kept; norms and dropout are computed on every rank of a group.
    None,
    /// Every layer is recomputed.
    Full,
    /// Sequence parallelism, all kept.
    Sequence,
    /// Sequence parallelism, and attention's scores are recomputed.
    SequenceSelective,
}

/// The kernels that layers are computed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KernelSet {
    /// Megatron's of 2022: attention writes its scores, and dropout its masks.
    Apart,
    /// Attention in one kernel, which writes no scores, and no dropout.
    Fused,
}

/// A layout with tensor parallelism.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TensorLayout {
    /// Tensor ranks.
    pub(crate) tp: usize,
    /// Pipeline ranks.
    pub(crate) pp: usize,
    /// Replicas.
    pub(crate) dp: usize,
    /// Stages on each rank.
    pub(crate) interleave: usize,
    /// Samples of a micro-batch.
    pub(crate) micro_batch: usize,
    /// How activations are saved.
    pub(crate) saving: ActivationSaving,
    /// What layers are computed with.
    pub(crate) kernels: KernelSet,
    /// Whether backwards are split and the bubble is gone (ZB-V).
    pub(crate) zero_bubble: bool,
}

/// Seconds of a micro-batch in one block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct BlockSeconds {
    /// F.
    pub(crate) forward: f64,
    /// B without W.
    pub(crate) backward: f64,
    /// W.
    pub(crate) weights: f64,
    /// What is computed again.
    pub(crate) again: f64,
    /// Bytes that F keeps.
    pub(crate) kept: f64,
    /// Bytes of one all-reduce of a group, as a rank sends them.
    pub(crate) all_reduce: f64,
}

/// A block of `model` on `tp` ranks, for micro-batches of so many samples.
pub(crate) fn block(machine: &Machine, model: &ModelSizes, layout: &TensorLayout) -> BlockSeconds {
    let (t, batch) = (layout.tp as f64, layout.micro_batch as f64);
    let (h, s) = (model.decoder.hidden as f64, model.seq as f64);
    let tokens = batch * s;
    let x = tokens * h;
    let rate = machine.flops_per_s * machine.flops_share;
    // Scores of all heads, five bytes each; Megatron computes both halves of the mask. Norms and
    // masks of dropout are on every rank of a group without sequence parallelism.
    let (scores, every) = match layout.kernels {
        KernelSet::Apart => (5.0 * model.decoder.heads as f64 * s * s * batch, 10.0 * x),
        KernelSet::Fused => (0.0, 8.0 * x),
    };
    let sequence =
        matches!(layout.saving, ActivationSaving::Sequence | ActivationSaving::SequenceSelective);
    let whole = (if sequence { every / t } else { every }) + (24.0 * x + scores) / t;
    let of_weights = 24.0 * tokens * h * h / t / rate;
    let products = of_weights + 4.0 * tokens * s * h / t / rate;
    let passes = 2.0 * whole / machine.memory_bytes_per_s;
    // Two all-reduces of the hidden state a pass, or as many gathers and reductions.
    let all_reduce = 2.0 * (t - 1.0) / t * 2.0 * x;
    let tensor = match t > 1.0 {
        true => 2.0 * (machine.collective_s + all_reduce / machine.zero3_bytes_per_s),
        false => 0.0,
    };
    let forward = products + passes + tensor + machine.layer_s;
    let selective = match layout.kernels {
        KernelSet::Apart => 4.0 * tokens * s * h / t / rate,
        KernelSet::Fused => 0.0,
    };
    let (kept, again) = match layout.saving {
        ActivationSaving::None | ActivationSaving::Sequence => (whole, 0.0),
        ActivationSaving::Full => (2.0 * x, forward),
        ActivationSaving::SequenceSelective => {
            (whole - scores / t, selective + 2.0 * scores / t / machine.memory_bytes_per_s)
        }
    };
    let backward = 2.0 * (products + passes + machine.layer_s) + tensor - of_weights;
    BlockSeconds { forward, backward, weights: of_weights, again, kept, all_reduce }
}

/// What a baseline comes to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Baseline {
    /// Seconds of a step.
    pub(crate) step_s: f64,
    /// Parameters of a rank.
    pub(crate) parameters: f64,
    /// Bytes of activations of the first pipeline rank.
    pub(crate) activations: f64,
    /// Bytes that a rank sends for tensor parallelism in a step.
    pub(crate) sent: f64,
}

/// A step of `model` with a global batch of `samples`.
pub(crate) fn step(
    machine: &Machine,
    model: &ModelSizes,
    samples: usize,
    layout: &TensorLayout,
) -> Baseline {
    let (t, p, v) = (layout.tp as f64, layout.pp as f64, layout.interleave as f64);
    let tokens = (layout.micro_batch * model.seq) as f64;
    let of = block(machine, model, layout);
    let micro_batches = samples as f64 / (layout.micro_batch * layout.dp) as f64;
    let fill = if layout.zero_bubble { 0.0 } else { (p - 1.0) / v };
    let parameters = (model.decoder.parameter_count() as f64) / (t * p);
    let update = UPDATE_BYTES * parameters / machine.memory_bytes_per_s;
    let inside = layout.tp * layout.dp <= machine.per_node;
    let link = if inside { machine.zero3_bytes_per_s } else { machine.replica_bytes_per_s };
    let replicas = if layout.dp > 1 { 2.0 * 4.0 * parameters / link } else { 0.0 };
    let passes_of_group = if layout.saving == ActivationSaving::Full { 6.0 } else { 4.0 };
    let layers = model.decoder.layers as f64 / p;
    Baseline {
        step_s: (micro_batches + fill)
            * layers
            * (of.forward + of.backward + of.weights + of.again)
            + micro_batches * head(machine, model, tokens) / t
            + update
            + replicas,
        parameters,
        activations: activations(machine, model, layout),
        sent: passes_of_group * of.all_reduce * layers * micro_batches,
    }
}

/// Seconds of F, B and W of a head for so many tokens.
pub(crate) fn head(machine: &Machine, model: &ModelSizes, tokens: f64) -> f64 {
    let (h, words) = (model.decoder.hidden as f64, model.decoder.vocabulary as f64);
    6.0 * tokens * h * words / (machine.flops_per_s * machine.flops_share)
}

/// Activations that the first pipeline rank keeps of P micro-batches, and of some more where it has
/// several stages.
fn activations(machine: &Machine, model: &ModelSizes, layout: &TensorLayout) -> f64 {
    let (p, v) = (layout.pp as f64, layout.interleave as f64);
    let more = if layout.zero_bubble || v < 2.0 { 0.0 } else { (p - 1.0) / (p * v) };
    let one_whole = match layout.saving {
        ActivationSaving::Full => {
            block(machine, model, &TensorLayout { saving: ActivationSaving::None, ..*layout }).kept
        }
        _ => 0.0,
    };
    let each = block(machine, model, layout).kept;
    model.decoder.layers as f64 * each * (1.0 + more) + one_whole
}
