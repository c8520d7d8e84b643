//! The model that the key-values of a GGUF file describe, in the words of a `config.json`. Every
//! key of the architecture is used, known to change nothing, or refused by name.

use serde_json::{Map, Value, json};
use zeropp_data::files::excerpt;

use crate::gguf_values::{GgufValue, GgufValues};

/// The type of a key's value.
#[derive(Clone, Copy)]
enum ValueType {
    /// A whole number from 0 to 2³² − 1.
    Count,
    /// A number from 0.
    Number,
    /// True or false.
    Truth,
    /// Text.
    Word,
}

/// The keys of an architecture that are read, without its name: `llama.block_count` is
/// `block_count`. What is not here is refused.
const KNOWN: [(&str, ValueType); 33] = [
    ("block_count", ValueType::Count),
    ("context_length", ValueType::Count),
    ("embedding_length", ValueType::Count),
    ("feed_forward_length", ValueType::Count),
    ("attention.head_count", ValueType::Count),
    ("attention.head_count_kv", ValueType::Count),
    ("attention.key_length", ValueType::Count),
    ("attention.value_length", ValueType::Count),
    ("attention.sliding_window", ValueType::Count),
    ("attention.layer_norm_rms_epsilon", ValueType::Number),
    ("attention.scale", ValueType::Number),
    ("attention.causal", ValueType::Truth),
    ("expert_count", ValueType::Count),
    ("expert_used_count", ValueType::Count),
    ("expert_feed_forward_length", ValueType::Count),
    ("expert_shared_feed_forward_length", ValueType::Count),
    ("expert_weights_norm", ValueType::Truth),
    ("expert_weights_scale", ValueType::Number),
    ("expert_gating_func", ValueType::Count),
    ("expert_shared_count", ValueType::Count),
    ("expert_group_count", ValueType::Count),
    ("expert_group_used_count", ValueType::Count),
    ("leading_dense_block_count", ValueType::Count),
    ("logit_scale", ValueType::Number),
    ("rope.dimension_count", ValueType::Count),
    ("rope.freq_base", ValueType::Number),
    ("rope.scale_linear", ValueType::Number),
    ("rope.scaling.type", ValueType::Word),
    ("rope.scaling.factor", ValueType::Number),
    ("rope.scaling.original_context_length", ValueType::Count),
    ("rope.scaling.attn_factor", ValueType::Number),
    // These two change nothing: the embedding has as many rows as it has.
    ("rope.scaling.finetuned", ValueType::Truth),
    ("vocab_size", ValueType::Count),
];

/// Keys of the tokenizer that a `config.json` has too.
const TOKENS: [(&str, &str); 2] = [
    ("tokenizer.ggml.bos_token_id", "bos_token_id"),
    ("tokenizer.ggml.eos_token_id", "eos_token_id"),
];

/// Keys that a field of a `config.json` has the value of.
const FIELDS: [(&str, &str); 12] = [
    ("embedding_length", "hidden_size"),
    ("feed_forward_length", "intermediate_size"),
    ("block_count", "num_hidden_layers"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.key_length", "head_dim"),
    ("context_length", "max_position_embeddings"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("rope.freq_base", "rope_theta"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
    ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
];

/// Keys of experts, which a model without has none of, or 0.
const OF_EXPERTS: [&str; 5] = [
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "expert_gating_func",
];
/// Fields of a `config.json` that say how large they are.
const EXPERTS: [&str; 3] =
    ["num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"];
/// Keys that dots1 alone may have, the fields of a `config.json` with their values, and these where
/// there is no key or 0.
const OF_DOTS1: [(&str, &str, u32); 4] = [
    ("expert_shared_count", "n_shared_experts", 0),
    ("expert_group_count", "n_group", 1),
    ("expert_group_used_count", "topk_group", 1),
    ("leading_dense_block_count", "first_k_dense_replace", 0),
];
/// The scores that are a softmax and those that are sigmoids, of `expert_gating_func`.
const SOFTMAX: u32 = 1;
const SIGMOID: u32 = 2;

/// A key and what is wrong with it: the problem, and what would work.
pub(crate) struct KeyProblem {
    pub(crate) problem: String,
    pub(crate) help: &'static str,
}

type Checked<T> = Result<T, KeyProblem>;

const ORIGINAL: &str = "use the model's Hugging Face folder";

fn fault<T>(problem: String, help: &'static str) -> Checked<T> {
    Err(KeyProblem { problem, help })
}

/// The `config.json` that the key-values of a GGUF file stand for; none where its architecture is
/// not known. `tied` says whether there is no head of its own, `vocabulary` the embedding's rows.
pub(crate) fn config(values: &GgufValues, tied: bool, vocabulary: usize) -> Checked<Option<Value>> {
    let Some(GgufValue::Text(name)) = values.get("general.architecture") else { return Ok(None) };
    let keys = ArchitectureKeys { values, name };
    let window = match keys.count("attention.sliding_window")? {
        None | Some(0) => None,
        Some(tokens) => Some(tokens),
    };
    // Mistral has LLaMA's architecture there, and a window where one slides.
    let experts = keys.count("expert_count")?.filter(|n| *n > 0);
    let (class, kind) = match (name.as_str(), window) {
        ("llama", _) if experts.is_some() => ("MixtralForCausalLM", "mixtral"),
        ("dots1", _) => ("Dots1ForCausalLM", "dots1"),
        ("qwen2moe", _) => ("Qwen2MoeForCausalLM", "qwen2_moe"),
        ("qwen3moe", _) => ("Qwen3MoeForCausalLM", "qwen3_moe"),
        ("llama", Some(_)) => ("MistralForCausalLM", "mistral"),
        ("llama", None) => ("LlamaForCausalLM", "llama"),
        ("qwen2", _) => ("Qwen2ForCausalLM", "qwen2"),
        ("qwen3", _) => ("Qwen3ForCausalLM", "qwen3"),
        _ => return Ok(None),
    };
    let has_experts = ["mixtral", "dots1"].contains(&kind) || kind.ends_with("_moe");
    keys.check(window.is_some_and(|_| !["mistral", "mixtral"].contains(&kind)))?;
    if kind == "dots1" {
        keys.check_dots1()?;
    } else {
        keys.check_experts(has_experts)?;
    }
    let mut config = Map::new();
    config.insert("architectures".into(), json!([class]));
    config.insert("model_type".into(), json!(kind));
    config.insert("hidden_act".into(), json!("silu"));
    config.insert("tie_word_embeddings".into(), json!(tied));
    config.insert("vocab_size".into(), json!(vocabulary));
    let of_tokens = TOKENS.map(|(key, field)| (key.to_owned(), field));
    let of_model = FIELDS.map(|(key, field)| (format!("{name}.{key}"), field));
    for (key, field) in of_tokens.into_iter().chain(of_model) {
        if let Some(value) = values.get(&key) {
            config.insert(field.into(), plain(value));
        }
    }
    if has_experts {
        config.extend(keys.experts(kind, experts)?);
    } else {
        config.retain(|field, _| !EXPERTS.contains(&field.as_str()));
    }
    if let Some(tokens) = window {
        config.insert("sliding_window".into(), json!(tokens));
    }
    if let Some(scaling) = keys.rope_scaling()? {
        config.insert("rope_scaling".into(), scaling);
    }
    Ok(Some(Value::Object(config)))
}

/// A number as JSON; anything else is null.
fn plain(value: &GgufValue) -> Value {
    match value {
        GgufValue::Whole(n) => i64::try_from(*n).map_or(Value::Null, |n| json!(n)),
        // The shortest decimal that is this f32, so that 1e-5 is 1e-5.
        GgufValue::Number(x) => {
            (*x as f32).to_string().parse::<f64>().map_or(Value::Null, |x| json!(x))
        }
        _ => Value::Null,
    }
}

/// The keys of one architecture.
#[derive(Clone, Copy)]
struct ArchitectureKeys<'a> {
    values: &'a GgufValues,
    name: &'a str,
}

impl<'a> ArchitectureKeys<'a> {
    fn get(self, key: &str) -> Option<&'a GgufValue> {
        self.values.get(&format!("{}.{key}", self.name))
    }

    fn wrong<T>(self, key: &str, what: &str) -> Checked<T> {
        let value = self.get(key).map_or(String::new(), |value| excerpt(&value.to_string()));
        fault(format!("its {}.{key} is {value}, {what}", self.name), ORIGINAL)
    }

    fn count(self, key: &str) -> Checked<Option<u32>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match value.count() {
                Some(n) => Ok(Some(n)),
                None => self.wrong(key, "which is no whole number below 2³²"),
            },
        }
    }

    fn number(self, key: &str) -> Checked<Option<f64>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match plain(value).as_f64().filter(|x| x.is_finite() && *x >= 0.0) {
                Some(x) => Ok(Some(x)),
                None => self.wrong(key, "which is no number from 0"),
            },
        }
    }

    /// Every key is known, has its type, and asks for nothing that is not here; `slides` says
    /// whether there is a window where the family has none.
    fn check(self, slides: bool) -> Checked<()> {
        for (key, value) in self.values {
            let Some(key) = key.strip_prefix(self.name).and_then(|key| key.strip_prefix('.'))
            else {
                continue;
            };
            match KNOWN.iter().find(|(known, _)| *known == key).map(|(_, kind)| kind) {
                None => {
                    return self.wrong(key, "and that key is not known; it may change the model");
                }
                Some(ValueType::Count) => drop(self.count(key)?),
                Some(ValueType::Number) => drop(self.number(key)?),
                Some(ValueType::Truth) if matches!(value, GgufValue::Truth(_)) => {}
                Some(ValueType::Word) if matches!(value, GgufValue::Text(_)) => {}
                Some(ValueType::Truth) => {
                    return self.wrong(key, "which is neither true nor false");
                }
                Some(ValueType::Word) => return self.wrong(key, "which is no text"),
            }
        }
        for (key, field) in TOKENS {
            if let Some(value) = self.values.get(key).filter(|value| value.count().is_none()) {
                let value = excerpt(&value.to_string());
                return fault(format!("its {key} is {value}, which is no {field}"), ORIGINAL);
            }
        }
        if slides {
            return self.wrong("attention.sliding_window", "and this architecture has no window");
        }
        self.check_attention()
    }

    /// The fields of a kind of model with experts beside those that keys have the value of.
    fn experts(self, kind: &str, count: Option<u32>) -> Checked<Map<String, Value>> {
        let mut fields = Map::new();
        let of_all = if kind == "dots1" { "n_routed_experts" } else { "num_local_experts" };
        fields.insert(of_all.into(), json!(count));
        // Where no key says it, as llama.cpp computes it.
        let divided = match self.get("expert_weights_norm") {
            Some(GgufValue::Truth(divided)) => *divided,
            _ => !["qwen2_moe", "dots1"].contains(&kind),
        };
        if kind != "mixtral" {
            fields.insert("norm_topk_prob".into(), json!(divided));
        } else if !divided {
            return self.wrong("expert_weights_norm", "and Mixtral divides by their sum");
        }
        if kind == "dots1" {
            for (key, field, usual) in OF_DOTS1 {
                let count = self.count(key)?.filter(|n| *n > 0);
                fields.insert(field.into(), json!(count.unwrap_or(usual)));
            }
            let scale = self.number("expert_weights_scale")?.filter(|scale| *scale != 0.0);
            fields.insert("routed_scaling_factor".into(), json!(scale.unwrap_or(1.0)));
        }
        Ok(fields)
    }

    /// There are experts, chosen by sigmoids.
    fn check_dots1(self) -> Checked<()> {
        if self.count("expert_gating_func")? != Some(SIGMOID) {
            return self.wrong("expert_gating_func", "and scores are sigmoids, 2, here");
        }
        for key in ["expert_count", "expert_shared_count"] {
            if self.count(key)?.is_none_or(|n| n == 0) {
                return self.wrong(key, "and this architecture has experts");
            }
        }
        Ok(())
    }

    /// There are experts where the architecture has some, chosen as here.
    fn check_experts(self, has_some: bool) -> Checked<()> {
        for (key, ..) in OF_DOTS1 {
            if self.count(key)?.is_some_and(|n| n > 0) {
                return self.wrong(key, "and that key is not known; it may change the model");
            }
        }
        if has_some {
            if self.count("expert_count")?.is_none_or(|n| n == 0) {
                return self.wrong("expert_count", "and this architecture has experts");
            }
            if self.count("expert_gating_func")?.is_some_and(|of| of > SOFTMAX) {
                return self.wrong("expert_gating_func", "and scores are a softmax, 1, here");
            }
            return match self.number("expert_weights_scale")? {
                Some(scale) if scale != 0.0 && scale != 1.0 => {
                    self.wrong("expert_weights_scale", "and nothing is scaled there here")
                }
                _ => Ok(()),
            };
        }
        for key in OF_EXPERTS {
            if self.count(key)?.is_some_and(|n| n > 0) {
                return self.wrong(key, "and a block has one MLP here");
            }
        }
        Ok(())
    }

    /// Heads are as everywhere here: all of one size, which turn as a whole.
    fn check_attention(self) -> Checked<()> {
        if self.get("attention.causal") == Some(&GgufValue::Truth(false)) {
            return self.wrong("attention.causal", "and tokens see none that follow here");
        }
        for key in ["logit_scale", "rope.scaling.attn_factor"] {
            if self.number(key)?.is_some_and(|x| x != 0.0 && x != 1.0) {
                return self.wrong(key, "and nothing is scaled there here");
            }
        }
        let (whole, heads) = (self.count("embedding_length")?, self.count("attention.head_count")?);
        let of_sizes = whole.zip(heads).and_then(|(whole, heads)| whole.checked_div(heads));
        let Some(head_dim) = self.count("attention.key_length")?.or(of_sizes) else {
            return Ok(());
        };
        for key in ["rope.dimension_count", "attention.value_length"] {
            if self.count(key)?.is_some_and(|n| n != head_dim) {
                return self.wrong(key, &format!("where a head has {head_dim} elements"));
            }
        }
        let usual = f64::from(head_dim).sqrt().recip();
        match self.number("attention.scale")? {
            Some(scale) if scale != 0.0 && (scale - usual).abs() > 1e-6 * usual => {
                self.wrong("attention.scale", "and here it is one by the root of a head's size")
            }
            _ => Ok(()),
        }
    }

    /// The object of rotary scaling. A factor without a type is a linear one, as llama.cpp reads
    /// it, and 0 is none.
    fn rope_scaling(self) -> Checked<Option<Value>> {
        let (new, old) = (self.number("rope.scaling.factor")?, self.number("rope.scale_linear")?);
        if let (Some(new), Some(old)) = (new, old)
            && new != old
        {
            return self.wrong("rope.scale_linear", &format!("and rope.scaling.factor is {new}"));
        }
        let factor = new.or(old).filter(|factor| *factor != 0.0).unwrap_or(1.0);
        let kind = match self.get("rope.scaling.type") {
            Some(GgufValue::Text(kind)) => kind.as_str(),
            _ => "linear",
        };
        match kind {
            "none" => Ok(None),
            "linear" if factor == 1.0 => Ok(None),
            "linear" => Ok(Some(json!({ "rope_type": "linear", "factor": factor }))),
            "yarn" => {
                let original = self.count("rope.scaling.original_context_length")?;
                let context = original.or(self.count("context_length")?);
                let original = context.filter(|context| *context > 0);
                Ok(Some(json!({
                    "rope_type": "yarn",
                    "factor": factor,
                    "original_max_position_embeddings": original,
                })))
            }
            _ => self.wrong("rope.scaling.type", "and none, linear and yarn are known"),
        }
    }
}
