//! Whose names a model's parameters have, and how files of that family store them.

use crate::weights::Weights;

/// Names and orientation of a family's tensors. The parameters of a model have Hugging Face's own
/// names; a linear map is `[in, out]` in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// GPT-2: `h.0.attn.c_attn.weight`, `[in, out]` in files too. In files of the class with a head
    /// all names but the head's begin with `transformer.`.
    Gpt2,
    /// LLaMA, Mistral, Qwen2, Qwen3: `model.layers.0.self_attn.q_proj.weight`, `[out, in]` in
    /// files. In files of the class without a head nothing begins with `model.`.
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

    /// Whether files have the matrix `parameter` as `[out, in]`.
    pub(crate) fn is_transposed(self, parameter: &str) -> bool {
        self == Family::Llama && parameter.ends_with("_proj.weight")
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

/// The head's weight, where it is not the embedding's.
pub(crate) const HEAD: &str = "lm_head.weight";
const GPT2_PREFIX: &str = "transformer.";
const LLAMA_PREFIX: &str = "model.";
