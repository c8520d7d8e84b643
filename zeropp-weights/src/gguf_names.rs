//! GGUF's names and settings of models, in Hugging Face's words.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::error::{Checked, damaged, wrong};
use crate::gguf_values::{GgufValue, GgufValues};
use crate::stored::Rows;

/// Most blocks of a model: a number beyond is a slip or an attack, and whoever lists the parameters
/// of so many fills the memory.
const BLOCKS_MAX: i128 = 1 << 14;

/// What is known of a model from its key-values.
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
        if !["llama", "qwen2", "qwen3"].contains(&name.as_str()) {
            return Ok(None);
        }
        let heads_key = format!("{name}.attention.head_count");
        let Some(heads) = count(values, &heads_key) else {
            return Err(damaged(path, format!("its key {heads_key} is missing or no number")));
        };
        let kv_heads = count(values, &format!("{heads_key}_kv")).unwrap_or(heads);
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

/// A number of up to 2³² that a key has.
fn count(values: &GgufValues, key: &str) -> Option<usize> {
    match values.get(key)? {
        GgufValue::Whole(n) => u32::try_from(*n).ok().map(|n| n as usize),
        _ => None,
    }
}

/// Hugging Face's name of a tensor, and the order of its rows.
pub(crate) fn hf_name(architecture: &Architecture, name: &str) -> Option<(String, Rows)> {
    let whole = match name {
        "token_embd.weight" => Some("model.embed_tokens.weight"),
        "output_norm.weight" => Some("model.norm.weight"),
        "output.weight" => Some("lm_head.weight"),
        _ => None,
    };
    if let Some(name) = whole {
        return Some((name.into(), Rows::AsNamed));
    }
    let (block, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let block: usize = block.parse().ok()?;
    let (part, kind) = rest.rsplit_once('.')?;
    if !["weight", "bias"].contains(&kind) {
        return None;
    }
    let rows = |heads| match architecture.interleaved {
        true => Rows::Interleaved { heads },
        false => Rows::AsNamed,
    };
    let (part, rows) = match part {
        "attn_norm" => ("input_layernorm", Rows::AsNamed),
        "attn_q" => ("self_attn.q_proj", rows(architecture.heads)),
        "attn_k" => ("self_attn.k_proj", rows(architecture.kv_heads)),
        "attn_v" => ("self_attn.v_proj", Rows::AsNamed),
        "attn_output" => ("self_attn.o_proj", Rows::AsNamed),
        "attn_q_norm" => ("self_attn.q_norm", Rows::AsNamed),
        "attn_k_norm" => ("self_attn.k_norm", Rows::AsNamed),
        "ffn_norm" => ("post_attention_layernorm", Rows::AsNamed),
        "ffn_gate" => ("mlp.gate_proj", Rows::AsNamed),
        "ffn_up" => ("mlp.up_proj", Rows::AsNamed),
        "ffn_down" => ("mlp.down_proj", Rows::AsNamed),
        _ => return None,
    };
    Some((format!("model.layers.{block}.{part}.{kind}"), rows))
}

/// The `config.json` that the key-values of a GGUF file stand for; none where its architecture is
/// not known. `tied` says whether there is no head of its own, `vocabulary` the embedding's rows.
pub(crate) fn config(values: &GgufValues, tied: bool, vocabulary: usize) -> Option<Value> {
    let Some(GgufValue::Text(name)) = values.get("general.architecture") else { return None };
    // Mistral has LLaMA's architecture there, and a window where one slides.
    let slides = values.contains_key("llama.attention.sliding_window");
    let (class, kind) = match name.as_str() {
        "llama" if slides => ("MistralForCausalLM", "mistral"),
        "llama" => ("LlamaForCausalLM", "llama"),
        "qwen2" => ("Qwen2ForCausalLM", "qwen2"),
        "qwen3" => ("Qwen3ForCausalLM", "qwen3"),
        _ => return None,
    };
    let mut config = Map::new();
    config.insert("architectures".into(), json!([class]));
    config.insert("model_type".into(), json!(kind));
    config.insert("hidden_act".into(), json!("silu"));
    config.insert("tie_word_embeddings".into(), json!(tied));
    config.insert("vocab_size".into(), json!(vocabulary));
    for (key, setting) in [
        ("embedding_length", "hidden_size"),
        ("feed_forward_length", "intermediate_size"),
        ("block_count", "num_hidden_layers"),
        ("attention.head_count", "num_attention_heads"),
        ("attention.head_count_kv", "num_key_value_heads"),
        ("attention.key_length", "head_dim"),
        ("context_length", "max_position_embeddings"),
        ("attention.sliding_window", "sliding_window"),
        ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
        ("rope.freq_base", "rope_theta"),
        ("tokenizer.ggml.bos_token_id", "bos_token_id"),
        ("tokenizer.ggml.eos_token_id", "eos_token_id"),
    ] {
        let of_model = format!("{name}.{key}");
        let key = if key.starts_with("tokenizer.") { key } else { &of_model };
        let value = match values.get(key) {
            Some(GgufValue::Whole(n)) => json!(i64::try_from(*n).ok()?),
            // The shortest decimal that is this f32, so that 1e-5 is 1e-5.
            Some(GgufValue::Number(x)) => json!((*x as f32).to_string().parse::<f64>().ok()?),
            _ => continue,
        };
        config.insert(setting.into(), value);
    }
    if let Some(GgufValue::Text(kind)) = values.get(&format!("{name}.rope.scaling.type"))
        && kind != "none"
    {
        config.insert("rope_scaling".into(), json!({ "rope_type": kind }));
    }
    Some(Value::Object(config))
}
