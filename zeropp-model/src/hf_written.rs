//! A [`Decoder`] as the `config.json` of a Hugging Face folder: what is read by
//! [`hf_config`](crate::hf_config), written.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::Activation;
use crate::decoder::{
    Biases, Decoder, Moe, Norm, Positions, Rotary, RotaryScaling, SigmoidScores, Yarn,
};
use crate::hf_config::parse;

/// Tokens of the texts that a scaled model was first trained on.
const CONTEXT: &str = "original_max_position_embeddings";

/// The `config.json` of a model, without the type of its weights: in the form of transformers 5,
/// with the fields that 4 looks for beside. Rows that only pad the vocabulary are not in it. None
/// for a model that belongs to no family of transformers, which reading it again shows.
pub fn config_json(decoder: &Decoder) -> Option<Map<String, Value>> {
    let (norm, positions) = (&decoder.norm, &decoder.positions);
    let fields = match (norm, positions) {
        (Norm::Layer { eps }, Positions::Learned(places)) => gpt2(decoder, *eps, *places),
        (Norm::Rms { eps }, Positions::Rotary(rotary)) => llama(decoder, *eps, rotary),
        _ => return None,
    };
    let read = parse(&fields.to_string(), Path::new("config.json")).ok()?;
    let whole = Decoder { vocabulary_multiple: 1, ..*decoder };
    match fields {
        Value::Object(fields) if read.decoder == whole => Some(fields),
        _ => None,
    }
}

fn gpt2(decoder: &Decoder, eps: f64, places: usize) -> Value {
    let Decoder { hidden, intermediate, .. } = *decoder;
    let is_tanh = decoder.activation != Activation::Gelu;
    json!({
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": decoder.layers,
        "n_head": decoder.heads,
        "n_positions": places,
        "n_inner": (intermediate != 4 * hidden).then_some(intermediate),
        "activation_function": if is_tanh { "gelu_new" } else { "gelu" },
        "layer_norm_epsilon": eps,
        "vocab_size": decoder.vocabulary,
        "tie_word_embeddings": decoder.tied,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        // GPT-2's own, 50256, may be no id of this one.
        "bos_token_id": null,
        "eos_token_id": null,
    })
}

/// A family with LLaMA's names: the one that has what this model has.
fn llama(decoder: &Decoder, eps: f64, rotary: &Rotary) -> Value {
    let Decoder { biases, window, .. } = *decoder;
    let qkv_alone = Biases { qkv: true, out: false, mlp: false };
    let (model_type, architecture) = match window {
        _ if decoder.moe.is_some_and(|moe| moe.sigmoid.is_some()) => ("dots1", "Dots1ForCausalLM"),
        _ if decoder.moe.is_some_and(|moe| moe.shared.is_some()) => {
            ("qwen2_moe", "Qwen2MoeForCausalLM")
        }
        _ if decoder.moe.is_some() && decoder.qk_norm => ("qwen3_moe", "Qwen3MoeForCausalLM"),
        _ if decoder.moe.is_some() => ("mixtral", "MixtralForCausalLM"),
        _ if decoder.qk_norm => ("qwen3", "Qwen3ForCausalLM"),
        _ if biases == qkv_alone => ("qwen2", "Qwen2ForCausalLM"),
        Some(_) => ("mistral", "MistralForCausalLM"),
        None => ("llama", "LlamaForCausalLM"),
    };
    let mut fields = json!({
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": decoder.hidden,
        "num_hidden_layers": decoder.layers,
        "num_attention_heads": decoder.heads,
        "num_key_value_heads": decoder.kv_heads,
        "head_dim": decoder.head_dim,
        "intermediate_size": decoder.intermediate,
        "hidden_act": "silu",
        "rms_norm_eps": eps,
        "vocab_size": decoder.vocabulary,
        "max_position_embeddings": decoder.context,
        "tie_word_embeddings": decoder.tied,
        "attention_dropout": 0.0,
        "bos_token_id": null,
        "eos_token_id": null,
    });
    insert_rope(fields.as_object_mut().expect("made above"), rotary);
    match model_type {
        "llama" => {
            fields["attention_bias"] = json!(biases.qkv);
            fields["mlp_bias"] = json!(biases.mlp);
        }
        "mistral" | "mixtral" => {
            fields["sliding_window"] = json!(window.map(|window| window.tokens));
        }
        _ => {
            if model_type.starts_with("qwen3") || model_type == "dots1" {
                fields["attention_bias"] = json!(biases.qkv);
            }
            if model_type != "dots1" {
                fields["use_sliding_window"] = json!(window.is_some());
            }
            fields["sliding_window"] = json!(window.map(|window| window.tokens));
            let first = window.map_or(decoder.layers, |window| window.first_layer);
            fields["max_window_layers"] = json!(first);
        }
    }
    if let Some(moe) = decoder.moe {
        insert_experts(fields.as_object_mut().expect("made above"), &moe, model_type);
        if model_type == "qwen2_moe" {
            fields["qkv_bias"] = json!(biases.qkv);
        }
    }
    fields
}

/// The fields of experts, under the names of all versions of transformers.
fn insert_experts(fields: &mut Map<String, Value>, moe: &Moe, model_type: &str) {
    let mut insert = |field: &str, value: Value| fields.insert(field.into(), value);
    let Moe { sigmoid, shared, .. } = *moe;
    if sigmoid.is_none() {
        insert("num_local_experts", json!(moe.experts));
    }
    insert("num_experts_per_tok", json!(moe.chosen));
    if let Some(SigmoidScores { groups, groups_chosen, scale }) = sigmoid {
        insert("n_routed_experts", json!(moe.experts));
        insert("moe_intermediate_size", json!(moe.inner));
        // Experts that all tokens go to are one MLP of as many inner sizes.
        let whole = shared.filter(|of| of.inner.is_multiple_of(moe.inner));
        insert("n_shared_experts", json!(whole.map(|of| of.inner / moe.inner)));
        insert("norm_topk_prob", json!(moe.divided));
        insert("n_group", json!(groups));
        insert("topk_group", json!(groups_chosen));
        insert("routed_scaling_factor", json!(scale));
        insert("first_k_dense_replace", json!(moe.first));
        return;
    }
    if let Some(shared) = shared {
        insert("shared_expert_intermediate_size", json!(shared.inner));
    }
    if model_type != "mixtral" {
        insert("num_experts", json!(moe.experts));
        insert("moe_intermediate_size", json!(moe.inner));
        insert("norm_topk_prob", json!(moe.divided));
        insert("decoder_sparse_step", json!(moe.every));
        insert("mlp_only_layers", json!((0..moe.first).collect::<Vec<_>>()));
    }
}

/// Says in `fields` how `rotary` turns so that transformers 4 and 5 both read it: 5 in
/// `rope_parameters`, 4 in `rope_theta` and `rope_scaling`.
pub fn write_rope(fields: &mut Map<String, Value>, rotary: &Rotary) {
    insert_rope(fields, rotary);
    for field in ["rope_parameters", "rope_scaling"] {
        let context = fields.get_mut(field).and_then(|rope| rope.get_mut(CONTEXT));
        // Transformers wants a whole number of tokens. Below 2⁵³ it is the same number.
        if let Some((context, n)) = context.and_then(|value| value.as_f64().map(|n| (value, n)))
            && n.fract() == 0.0
            && n < 9e15
        {
            *context = json!(n as u64);
        }
    }
}

/// As the digests of models have it that checkpoints keep: its numbers stay as they are.
fn insert_rope(fields: &mut Map<String, Value>, rotary: &Rotary) {
    let rope = rope_parameters(rotary);
    let scaled = rotary.scaling != RotaryScaling::None;
    fields.insert("rope_theta".into(), json!(rotary.theta));
    fields.insert("rope_scaling".into(), json!(scaled.then_some(&rope)));
    fields.insert("rope_parameters".into(), rope);
}

fn rope_parameters(rotary: &Rotary) -> Value {
    let theta = rotary.theta;
    match rotary.scaling {
        RotaryScaling::None => json!({ "rope_type": "default", "rope_theta": theta }),
        RotaryScaling::Linear(factor) => {
            json!({ "rope_type": "linear", "rope_theta": theta, "factor": factor })
        }
        RotaryScaling::Llama3 { factor, low, high, context } => json!({
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            CONTEXT: context,
        }),
        RotaryScaling::Yarn(yarn) => {
            let Yarn { factor, context, fast, slow, attention, truncated } = yarn;
            json!({
                "rope_type": "yarn",
                "rope_theta": theta,
                "factor": factor,
                CONTEXT: context,
                "attention_factor": attention,
                "beta_fast": fast,
                "beta_slow": slow,
                "truncate": truncated,
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::{Naming, SharedExpert, Window};

    fn llama() -> Decoder {
        let rotary = Rotary { theta: 5e5, scaling: RotaryScaling::None };
        Decoder {
            naming: Naming::Llama,
            layers: 4,
            hidden: 48,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            intermediate: 80,
            vocabulary: 300,
            vocabulary_multiple: 64,
            norm: Norm::Rms { eps: 1e-6 },
            positions: Positions::Rotary(rotary),
            biases: Biases::NONE,
            qk_norm: false,
            activation: Activation::Swiglu,
            tied: true,
            window: None,
            moe: None,
            context: 128,
        }
    }

    #[test]
    fn written_configs_read_back_as_the_same_model() {
        let llama = llama();
        let scaled = |scaling| Decoder {
            positions: Positions::Rotary(Rotary { theta: 1e4, scaling }),
            ..llama
        };
        let qkv = Biases { qkv: true, ..Biases::NONE };
        let attention = Biases { out: true, ..qkv };
        let slides = |first_layer| Some(Window { tokens: 9, first_layer });
        let (experts, chosen, inner) = (6, 2, 40);
        let moe = Moe::new(experts, chosen, inner);
        let shared = |inner, gated| Some(SharedExpert { inner, gated });
        let beside = Moe { shared: shared(70, true), ..moe };
        let sigmoid = Some(SigmoidScores { groups: 3, groups_chosen: 2, scale: 2.5 });
        let groups = Moe { sigmoid, shared: shared(80, false), first: 2, ..moe };
        let sparse = Moe { divided: false, first: 1, every: 2, ..moe };
        let gpt2 = Decoder {
            naming: Naming::Gpt2,
            kv_heads: 4,
            head_dim: 12,
            norm: Norm::Layer { eps: 1e-5 },
            positions: Positions::Learned(128),
            biases: Biases::ALL,
            activation: Activation::Gelu,
            ..llama
        };
        for (decoder, model_type) in [
            (llama, "llama"),
            (scaled(RotaryScaling::Linear(2.0)), "llama"),
            (
                scaled(RotaryScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, context: 32.0 }),
                "llama",
            ),
            (
                scaled(RotaryScaling::Yarn(Yarn {
                    factor: 4.0,
                    context: 32.5,
                    fast: 30.0,
                    slow: 2.0,
                    attention: 1.25,
                    truncated: false,
                })),
                "llama",
            ),
            (Decoder { biases: Biases::ALL, ..llama }, "llama"),
            (Decoder { biases: attention, ..llama }, "llama"),
            (Decoder { window: slides(0), ..llama }, "mistral"),
            (Decoder { biases: qkv, ..llama }, "qwen2"),
            (Decoder { biases: qkv, window: slides(2), ..llama }, "qwen2"),
            (Decoder { qk_norm: true, ..llama }, "qwen3"),
            (Decoder { qk_norm: true, window: slides(0), biases: attention, ..llama }, "qwen3"),
            (Decoder { intermediate: 40, moe: Some(moe), ..llama }, "mixtral"),
            (Decoder { intermediate: 40, moe: Some(moe), window: slides(0), ..llama }, "mixtral"),
            (Decoder { moe: Some(moe), qk_norm: true, ..llama }, "qwen3_moe"),
            (Decoder { moe: Some(sparse), qk_norm: true, ..llama }, "qwen3_moe"),
            (Decoder { moe: Some(beside), biases: qkv, ..llama }, "qwen2_moe"),
            (Decoder { moe: Some(beside), ..llama }, "qwen2_moe"),
            (Decoder { moe: Some(groups), qk_norm: true, window: slides(1), ..llama }, "dots1"),
            (Decoder { moe: Some(groups), qk_norm: true, biases: attention, ..llama }, "dots1"),
            (gpt2, "gpt2"),
            (Decoder { activation: Activation::GeluTanh, intermediate: 192, ..gpt2 }, "gpt2"),
        ] {
            let written = config_json(&decoder).unwrap_or_else(|| panic!("{decoder:?}"));
            assert_eq!(written["model_type"], model_type);
        }
    }

    /// Transformers 4 reads `rope_theta` and `rope_scaling` alone, and 5 takes `rope_scaling` in
    /// place of `rope_parameters`.
    #[test]
    fn scaled_rope_is_written_for_transformers_4_and_5_alike() {
        let scaling = RotaryScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, context: 32.0 };
        let mut fields = Map::new();
        fields.insert("rope_scaling".into(), json!({ "rope_type": "yarn" }));
        write_rope(&mut fields, &Rotary { theta: 5e5, scaling });
        assert_eq!(fields["rope_theta"], json!(5e5));
        assert_eq!(fields["rope_scaling"], fields["rope_parameters"]);
        assert_eq!(fields["rope_scaling"]["rope_theta"], json!(5e5));
        assert_eq!(fields["rope_scaling"]["original_max_position_embeddings"], json!(32));
        write_rope(&mut fields, &Rotary { theta: 1e4, scaling: RotaryScaling::None });
        assert_eq!(fields["rope_scaling"], Value::Null);
    }

    #[test]
    fn unknown_architectures_are_not_exported() {
        let llama = llama();
        let out = Biases { out: true, ..Biases::NONE };
        // Shared experts of no whole number, and none where the family has a gate.
        let shared = Some(SharedExpert { inner: 50, gated: false });
        let odd = Moe { sigmoid: Some(SigmoidScores::PLAIN), shared, ..Moe::new(6, 2, 40) };
        let late = Some(Window { tokens: 9, first_layer: 2 });
        for decoder in [
            Decoder { biases: out, ..llama },
            Decoder { moe: Some(Moe { sigmoid: None, ..odd }), qk_norm: true, ..llama },
            Decoder { moe: Some(odd), qk_norm: true, ..llama },
            Decoder { window: late, ..llama },
            Decoder { norm: Norm::Layer { eps: 1e-5 }, ..llama },
        ] {
            assert_eq!(config_json(&decoder), None, "{decoder:?}");
        }
    }
}
