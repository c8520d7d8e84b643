//! The parameters of a [`Decoder`] as data: names, shapes, starting values, and how Hugging Face
//! stores them. What is trained, imported, exported and counted comes from this one list.
//!
//! **Orientation.** A linear map's weight is stored `[in, out]` here, as Burn's `Linear` has it.
//! LLaMA and its relatives store `[out, in]` in files: their matrices are transposed on the way in
//! and out. GPT-2's are `[in, out]` in files, too. Embedding and head are `[V, h]` everywhere.

use crate::decoder::{Decoder, Naming, Norm, Positions};
use crate::params::{Init, ParamSpec};

/// Standard deviation of initial weights.
const INIT_STD: f32 = 0.02;

/// One parameter of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderTensor {
    /// Name, without a prefix such as GPT-2's `transformer.`; the family's own.
    pub name: String,
    /// Dimensions here.
    pub shape: Vec<usize>,
    /// Whether a file of the family holds the matrix, or each expert's, transposed: `[out, in]`.
    pub transposed_in_files: bool,
    /// How it starts.
    pub init: Init,
    /// Whether it trains.
    pub trains: bool,
}

impl DecoderTensor {
    pub(crate) fn new(name: String, shape: &[usize], init: Init) -> Self {
        Self { name, shape: shape.to_vec(), transposed_in_files: false, init, trains: true }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The parameter that a layer declares.
    pub fn spec(self) -> ParamSpec {
        let trains = self.trains;
        ParamSpec { trains, ..ParamSpec::new(self.name, &self.shape, self.init) }
    }
}

/// The names that differ between families.
pub struct TensorNames {
    /// The token embedding.
    pub embedding: &'static str,
    /// Learned positions.
    pub positions: &'static str,
    /// The name of blocks before their index.
    pub block: &'static str,
    /// The norm before attention.
    pub norm_1: &'static str,
    /// The norm before the MLP.
    pub norm_2: &'static str,
    /// q, k and v: one matrix, or three.
    pub qkv: &'static [&'static str],
    /// The projection after attention.
    pub out: &'static str,
    /// The linear maps into the MLP: up, or gate and up.
    pub up: &'static [&'static str],
    /// The linear map out of it.
    pub down: &'static str,
    /// The norm before the head.
    pub final_norm: &'static str,
    /// The head, where it has a weight of its own.
    pub head: &'static str,
}

const GPT2: TensorNames = TensorNames {
    embedding: "wte",
    positions: "wpe",
    block: "h",
    norm_1: "ln_1",
    norm_2: "ln_2",
    qkv: &["attn.c_attn"],
    out: "attn.c_proj",
    up: &["mlp.c_fc"],
    down: "mlp.c_proj",
    final_norm: "ln_f",
    head: "lm_head",
};

const LLAMA: TensorNames = TensorNames {
    embedding: "model.embed_tokens",
    positions: "model.embed_positions",
    block: "model.layers",
    norm_1: "input_layernorm",
    norm_2: "post_attention_layernorm",
    qkv: &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    out: "self_attn.o_proj",
    up: &["mlp.gate_proj", "mlp.up_proj"],
    down: "mlp.down_proj",
    final_norm: "model.norm",
    head: "lm_head",
};

impl TensorNames {
    /// The linear maps of a block, in the order of their parameters.
    pub(crate) fn linears(&self) -> impl Iterator<Item = &'static str> {
        let [out, down] = [[self.out], [self.down]];
        self.qkv.iter().copied().chain(out).chain(self.up.iter().copied()).chain(down)
    }
}

/// The router of a block with experts: `[h, E]`.
pub const ROUTER: &str = "mlp.gate";
/// Gate and up `[E, h, f]` and down `[E, f, h]` of all experts of a block. Files of the families
/// have a matrix for each expert.
pub const EXPERTS: [&str; 3] =
    ["mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj"];

/// What is added to the scores of experts where they are compared: `[E]`. It has no gradient, and
/// moves where `balance = bias` says so.
pub const CHOICE_BIAS: &str = "mlp.gate.e_score_correction_bias";
/// The gate of a shared expert: `[h, 1]`.
pub const SHARED_GATE: &str = "mlp.shared_expert_gate";

/// Gate, up and down of an MLP, of a shared expert with a gate and of one without: those of one
/// place are one target of adapters.
const MLP_MAPS: [[&str; 3]; 3] = [
    ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"],
    ["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"],
    ["mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"],
];

/// Gate, up and down of a shared expert, by whether it has a gate.
pub const fn shared_maps(gated: bool) -> &'static [&'static str; 3] {
    if gated { &MLP_MAPS[1] } else { &MLP_MAPS[2] }
}

/// The linear maps that one target of adapters stands for, by the name of an MLP's.
pub fn alike(map: &'static str) -> Vec<&'static str> {
    let place = MLP_MAPS[0].iter().position(|name| *name == map);
    place.map_or(vec![map], |place| MLP_MAPS.iter().map(|maps| maps[place]).collect())
}

/// The weights of the norms of q and of k.
pub const QK_NORMS: [&str; 2] = ["self_attn.q_norm", "self_attn.k_norm"];

impl Decoder {
    /// The family's names of its parts.
    pub fn names(&self) -> &'static TensorNames {
        match self.naming {
            Naming::Gpt2 => &GPT2,
            Naming::Llama => &LLAMA,
        }
    }

    /// All parameters, from the embedding to the head, in the order in which they are laid out. A
    /// tied weight comes once, as the embedding's.
    pub fn tensors(&self) -> Vec<DecoderTensor> {
        let mut all = vec![self.embedding_tensor()];
        all.extend(self.position_tensor());
        all.extend((0..self.layers).flat_map(|i| self.block_tensors(i)));
        all.extend(self.final_norm_tensors());
        if !self.tied {
            all.push(self.head_tensor());
        }
        all
    }

    pub(crate) fn embedding_tensor(&self) -> DecoderTensor {
        let name = format!("{}.weight", self.names().embedding);
        DecoderTensor::new(name, &[self.rows(), self.hidden], Init::Normal(INIT_STD))
    }

    /// The head's weight, which may be the embedding's.
    pub(crate) fn head_tensor(&self) -> DecoderTensor {
        let embedding = self.embedding_tensor();
        match self.tied {
            true => embedding,
            false => DecoderTensor { name: format!("{}.weight", self.names().head), ..embedding },
        }
    }

    pub(crate) fn position_tensor(&self) -> Option<DecoderTensor> {
        let Positions::Learned(places) = self.positions else { return None };
        let name = format!("{}.weight", self.names().positions);
        Some(DecoderTensor::new(name, &[places, self.hidden], Init::Normal(INIT_STD / 2.0)))
    }

    pub(crate) fn final_norm_tensors(&self) -> Vec<DecoderTensor> {
        self.norm_tensors(self.names().final_norm)
    }

    fn norm_tensors(&self, name: &str) -> Vec<DecoderTensor> {
        let part =
            |end: &str, init| DecoderTensor::new(format!("{name}.{end}"), &[self.hidden], init);
        let mut parts = vec![part("weight", Init::Ones)];
        if let Norm::Layer { .. } = self.norm {
            parts.push(part("bias", Init::Zeros));
        }
        parts
    }

    /// The parameters of block `i`.
    pub(crate) fn block_tensors(&self, i: usize) -> Vec<DecoderTensor> {
        let names = self.names();
        let block = format!("{}.{i}", names.block);
        let (h, f, q, k) = (self.hidden, self.intermediate, self.query_width(), self.key_width());
        // Two residual additions a block: their sum keeps unit variance over the depth.
        let residual = INIT_STD / (2.0 * self.layers as f32).sqrt();
        let linear = |name: &str, [input, output]: [usize; 2], std: f32, bias: bool| {
            let weight = DecoderTensor {
                transposed_in_files: self.naming == Naming::Llama,
                ..DecoderTensor::new(
                    format!("{block}.{name}.weight"),
                    &[input, output],
                    Init::Normal(std),
                )
            };
            let bias = bias.then(|| {
                DecoderTensor::new(format!("{block}.{name}.bias"), &[output], Init::Zeros)
            });
            [Some(weight), bias].into_iter().flatten()
        };
        let widths: &[usize] = if names.qkv.len() == 1 { &[self.qkv_width()] } else { &[q, k, k] };
        let mut all = self.norm_tensors(&format!("{block}.{}", names.norm_1));
        for (name, width) in names.qkv.iter().zip(widths) {
            all.extend(linear(name, [h, *width], INIT_STD, self.biases.qkv));
        }
        if self.qk_norm {
            let weight = |name| format!("{block}.{name}.weight");
            let norm = |name| DecoderTensor::new(weight(name), &[self.head_dim], Init::Ones);
            all.extend(QK_NORMS.map(norm));
        }
        all.extend(linear(names.out, [q, h], residual, self.biases.out));
        all.extend(self.norm_tensors(&format!("{block}.{}", names.norm_2)));
        if let Some(moe) = self.moe_of(i) {
            all.extend(linear(ROUTER, [h, moe.experts], INIT_STD, false));
            if moe.sigmoid.is_some() {
                let name = format!("{block}.{CHOICE_BIAS}");
                all.push(DecoderTensor::new(name, &[moe.experts], Init::Zeros));
            }
            let stds = [INIT_STD, INIT_STD, residual];
            let sizes = [[h, moe.inner], [h, moe.inner], [moe.inner, h]];
            for ((name, [input, output]), std) in EXPERTS.into_iter().zip(sizes).zip(stds) {
                let (name, shape) =
                    (format!("{block}.{name}.weight"), [moe.experts, input, output]);
                all.push(DecoderTensor {
                    transposed_in_files: true,
                    ..DecoderTensor::new(name, &shape, Init::Normal(std))
                });
            }
            if let Some(shared) = moe.shared {
                let sizes = [[h, shared.inner], [h, shared.inner], [shared.inner, h]];
                for ((name, size), std) in shared_maps(shared.gated).iter().zip(sizes).zip(stds) {
                    all.extend(linear(name, size, std, false));
                }
                let gate = shared.gated.then(|| linear(SHARED_GATE, [h, 1], INIT_STD, false));
                all.extend(gate.into_iter().flatten());
            }
            return all;
        }
        for name in names.up {
            all.extend(linear(name, [h, f], INIT_STD, self.biases.mlp));
        }
        all.extend(linear(names.down, [f, h], residual, self.biases.mlp));
        all
    }
}
