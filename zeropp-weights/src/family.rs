//! Whose names a model's parameters have, and how files of that family store them.

use crate::weights::Weights;

/// Names and orientation of a family's tensors. The parameters of a model have Hugging Face's own
/// names; a linear map is `[in, out]` in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// GPT-2: `h.0.attn.c_attn.weight`, `[in, out]` in files too. In files of the class with a head
    /// all names but the head's begin with `transformer.`.
    Gpt2,
    /// LLaMA and the families that share its names: `model.layers.0.self_attn.q_proj.weight`,
    /// `[out, in]` in files. In files of the class without a head nothing begins with `model.`.
    Llama,
}

impl Family {
    /// The family whose names these are.
    pub fn of(mut parameters: impl Iterator<Item = impl AsRef<str>>) -> Option<Family> {
        parameters.find_map(|name| match name.as_ref() {
            "wte.weight" => Some(Family::Gpt2),
            "model.embed_tokens.weight" => Some(Family::Llama),
            _ => None,
        })
    }

    /// Whether files have the matrix `parameter`, or that of each expert, as `[out, in]`.
    pub(crate) fn is_transposed(self, parameter: &str) -> bool {
        let ends = ["_proj.weight", ROUTER, SHARED_GATE];
        let is_map = ends.iter().any(|end| parameter.ends_with(end));
        self == Family::Llama && is_map
    }

    /// Whether the rows of `parameter` are token ids.
    pub(crate) fn is_vocabulary(self, parameter: &str) -> bool {
        parameter == self.embedding() || parameter == HEAD
    }

    /// The parameter that a tied head shares.
    pub fn embedding(self) -> &'static str {
        match self {
            Family::Gpt2 => "wte.weight",
            Family::Llama => "model.embed_tokens.weight",
        }
    }

    /// The name of `parameter` in a file that is written: that of the class with a head.
    pub fn exported(self, parameter: &str) -> String {
        match self {
            Family::Gpt2 if parameter != HEAD => format!("{GPT2_PREFIX}{parameter}"),
            _ => parameter.into(),
        }
    }

    /// The name of `parameter` in these files.
    pub(crate) fn stored(self, parameter: &str, weights: &Weights) -> String {
        let is_whole = weights.find(&self.exported(self.embedding())).is_some();
        match self {
            Family::Gpt2 if !is_whole => parameter.into(),
            Family::Llama if !is_whole => {
                parameter.strip_prefix(LLAMA_PREFIX).unwrap_or(parameter).into()
            }
            _ => self.exported(parameter),
        }
    }

    /// The names of the tensors that `parameter` of this shape is in these files: one, or those of
    /// all experts in their order.
    pub(crate) fn all_stored(
        self,
        parameter: &str,
        shape: &[usize],
        weights: &Weights,
    ) -> Vec<String> {
        let naming = |block: &str| {
            let router = format!("{block}{}", ExpertNaming::Mixtral.router());
            let is_mixtral = weights.find(&self.stored(&router, weights)).is_some();
            if is_mixtral { ExpertNaming::Mixtral } else { ExpertNaming::Qwen }
        };
        let names = of_experts(parameter, shape, naming);
        names.iter().map(|name| self.stored(name, weights)).collect()
    }

    /// The same in files that are written, for a model with these parameters.
    pub(crate) fn all_exported(
        self,
        parameter: &str,
        shape: &[usize],
        naming: ExpertNaming,
    ) -> Vec<String> {
        let names = of_experts(parameter, shape, |_| naming);
        names.iter().map(|name| self.exported(name)).collect()
    }

    /// Whether a tensor of a file is no weight but a constant that the class keeps: causal masks,
    /// frequencies of rotary positions.
    pub(crate) fn is_constant(self, name: &str) -> bool {
        let ends: &[&str] = match self {
            Family::Gpt2 => &[".attn.bias", ".attn.masked_bias"],
            Family::Llama => &[".rotary_emb.inv_freq"],
        };
        ends.iter().any(|end| name.ends_with(end))
    }
}

/// How files name the router and the experts of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExpertNaming {
    /// `mlp.gate`, `mlp.experts.0.gate_proj`, as most families have them.
    Qwen,
    /// `block_sparse_moe.gate`, `block_sparse_moe.experts.0.w1`.
    Mixtral,
}

impl ExpertNaming {
    /// That of the family whose files a model with these parameters is written as: Mixtral has
    /// neither norms of heads nor an expert that all tokens go to.
    pub(crate) fn of<'a>(mut parameters: impl Iterator<Item = &'a str>) -> ExpertNaming {
        let is_qwen = |name: &str| name.ends_with("q_norm.weight") || name.ends_with(SHARED_GATE);
        match parameters.any(is_qwen) {
            true => ExpertNaming::Qwen,
            false => ExpertNaming::Mixtral,
        }
    }

    fn router(self) -> &'static str {
        match self {
            ExpertNaming::Qwen => ROUTER,
            ExpertNaming::Mixtral => "block_sparse_moe.gate.weight",
        }
    }

    /// The name of an expert's matrix, which is `gate`, `up` or `down`.
    fn expert(self, expert: usize, map: &str) -> String {
        match (self, map) {
            (ExpertNaming::Qwen, _) => format!("mlp.experts.{expert}.{map}_proj.weight"),
            (_, "gate") => format!("block_sparse_moe.experts.{expert}.w1.weight"),
            (_, "down") => format!("block_sparse_moe.experts.{expert}.w2.weight"),
            _ => format!("block_sparse_moe.experts.{expert}.w3.weight"),
        }
    }
}

/// The names of files for a parameter: its own, a router's, or those of the matrices of all
/// experts. `naming` is that of a block, whose name it gets.
fn of_experts(
    parameter: &str,
    shape: &[usize],
    naming: impl Fn(&str) -> ExpertNaming,
) -> Vec<String> {
    if let Some(block) = parameter.strip_suffix(ROUTER) {
        return vec![format!("{block}{}", naming(block).router())];
    }
    let Some((block, map)) = parameter.split_once(EXPERTS) else { return vec![parameter.into()] };
    let Some(map) = map.strip_suffix("_proj.weight") else { return vec![parameter.into()] };
    let naming = naming(block);
    (0..shape[0]).map(|expert| format!("{block}{}", naming.expert(expert, map))).collect()
}

/// How the names of routers end in a model, and where those of experts stand.
const ROUTER: &str = "mlp.gate.weight";
const EXPERTS: &str = "mlp.experts.";
/// How the name of a shared expert's gate ends.
const SHARED_GATE: &str = "mlp.shared_expert_gate.weight";

/// The head's weight, where it is not the embedding's.
pub(crate) const HEAD: &str = "lm_head.weight";
const GPT2_PREFIX: &str = "transformer.";
const LLAMA_PREFIX: &str = "model.";
