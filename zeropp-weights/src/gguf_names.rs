//! GGUF's names and settings of models, in Hugging Face's words.

use std::path::Path;

use crate::error::{Checked, damaged, wrong};
use crate::gguf_values::{GgufValue, GgufValues};
use crate::stored::RowOrder;

/// Most blocks of a model: a number beyond is a slip or an attack, and a list of the parameters of
/// so many fills the memory.
const BLOCKS_MAX: i128 = 1 << 14;

/// The facts about a model from its key-values.
pub(crate) struct Architecture {
    /// GGUF's own word.
    pub(crate) name: String,
    heads: usize,
    kv_heads: usize,
    /// Whether the rows of queries and keys are interleaved.
    interleaved: bool,
}

impl Architecture {
    /// That of the file, if it is one whose names are known.
    pub(crate) fn of(path: &Path, values: &GgufValues) -> Checked<Option<Architecture>> {
        let Some(GgufValue::Text(name)) = values.get("general.architecture") else {
            return Ok(None);
        };
        if !["dots1", "llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe"].contains(&name.as_str()) {
            return Ok(None);
        }
        let heads_key = format!("{name}.attention.head_count");
        let count = |key: &str| match values.get(key).map(GgufValue::count) {
            Some(None) => Err(damaged(path, format!("its key {key} is no whole number"))),
            Some(Some(n)) => Ok(Some(n as usize)),
            None => Ok(None),
        };
        let Some(heads) = count(&heads_key)? else {
            return Err(damaged(path, format!("its key {heads_key} is missing")));
        };
        let kv_heads = count(&format!("{heads_key}_kv"))?.unwrap_or(heads);
        let blocks_key = format!("{name}.block_count");
        if let Some(GgufValue::Whole(n)) = values.get(&blocks_key)
            && !(1..=BLOCKS_MAX).contains(n)
        {
            let help = format!("a model has 1 to {BLOCKS_MAX} blocks; get the file again");
            return Err(wrong(path, format!("its {blocks_key} is {n}"), help));
        }
        let (interleaved, name) = (name == "llama", name.clone());
        Ok(Some(Architecture { name, heads, kv_heads, interleaved }))
    }
}

/// The gate of a shared expert: one row there, a vector here.
const SHARED_GATE: &str = "mlp.shared_expert_gate";

/// Hugging Face's shape of a tensor with its name.
pub(crate) fn hf_shape(name: &str, shape: Vec<usize>) -> Vec<usize> {
    let is_gate = name.ends_with(&format!("{SHARED_GATE}.weight"));
    if is_gate && shape.len() == 1 { vec![1, shape[0]] } else { shape }
}

/// Whether a tensor has a matrix of each expert.
pub(crate) fn is_of_experts(name: &str) -> bool {
    hf_names_of_experts(name, 0).is_some()
}

/// Hugging Face's names of the matrices that a tensor has of as many experts.
pub(crate) fn hf_names_of_experts(name: &str, experts: usize) -> Option<Vec<String>> {
    let (block, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let block: usize = block.parse().ok()?;
    let map = rest.strip_prefix("ffn_")?.strip_suffix("_exps.weight")?;
    ["gate", "up", "down"].contains(&map).then(|| {
        let of = |i| format!("model.layers.{block}.mlp.experts.{i}.{map}_proj.weight");
        (0..experts).map(of).collect()
    })
}

/// Hugging Face's name of a tensor, and the order of its rows.
pub(crate) fn hf_name(architecture: &Architecture, name: &str) -> Option<(String, RowOrder)> {
    let whole = match name {
        "token_embd.weight" => Some("model.embed_tokens.weight"),
        "output_norm.weight" => Some("model.norm.weight"),
        "output.weight" => Some("lm_head.weight"),
        _ => None,
    };
    if let Some(name) = whole {
        return Some((name.into(), RowOrder::AsNamed));
    }
    let (block, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let block: usize = block.parse().ok()?;
    let (part, kind) = rest.rsplit_once('.')?;
    if !["weight", "bias"].contains(&kind) {
        return None;
    }
    let rows = |heads| match architecture.interleaved {
        true => RowOrder::Interleaved { heads },
        false => RowOrder::AsNamed,
    };
    let (part, rows) = match part {
        "attn_norm" => ("input_layernorm", RowOrder::AsNamed),
        "attn_q" => ("self_attn.q_proj", rows(architecture.heads)),
        "attn_k" => ("self_attn.k_proj", rows(architecture.kv_heads)),
        "attn_v" => ("self_attn.v_proj", RowOrder::AsNamed),
        "attn_output" => ("self_attn.o_proj", RowOrder::AsNamed),
        "attn_q_norm" => ("self_attn.q_norm", RowOrder::AsNamed),
        "attn_k_norm" => ("self_attn.k_norm", RowOrder::AsNamed),
        "ffn_norm" => ("post_attention_layernorm", RowOrder::AsNamed),
        "ffn_gate" => ("mlp.gate_proj", RowOrder::AsNamed),
        "ffn_up" => ("mlp.up_proj", RowOrder::AsNamed),
        "ffn_down" => ("mlp.down_proj", RowOrder::AsNamed),
        "ffn_gate_inp" => ("mlp.gate", RowOrder::AsNamed),
        "ffn_gate_inp_shexp" => (SHARED_GATE, RowOrder::AsNamed),
        "exp_probs_b" if kind == "bias" => {
            let name = format!("model.layers.{block}.mlp.gate.e_score_correction_bias");
            return Some((name, RowOrder::AsNamed));
        }
        "ffn_gate_shexp" | "ffn_up_shexp" | "ffn_down_shexp" => {
            let (_, map) = part.strip_suffix("_shexp")?.split_once('_')?;
            let several = if architecture.name == "dots1" { "s" } else { "" };
            let name = format!("model.layers.{block}.mlp.shared_expert{several}.{map}_proj.{kind}");
            return Some((name, RowOrder::AsNamed));
        }
        _ => return None,
    };
    Some((format!("model.layers.{block}.{part}.{kind}"), rows))
}
