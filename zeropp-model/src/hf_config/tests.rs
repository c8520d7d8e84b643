use super::*;
use crate::decoder::{Moe, Rotary, RotaryScaling};
use crate::presets::Preset;

fn read_text_of(text: &str) -> Result<HfConfig, String> {
    parse(text, Path::new("config.json")).map_err(|error| error.to_string())
}

/// Llama-3.2-1B's as transformers 4 wrote it.
const LLAMA_1B: &str = r#"{
    "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
    "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "tie_word_embeddings": true, "torch_dtype": "bfloat16", "vocab_size": 128256}"#;

/// Qwen2.5-0.5B's as transformers 4 wrote it.
const QWEN: &str = r#"{
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu",
    "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
    "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": true,
    "use_sliding_window": false, "vocab_size": 151936}"#;

#[test]
fn the_form_of_transformers_4_is_the_preset() {
    for (text, preset) in [(LLAMA_1B, "llama-1b"), (QWEN, "qwen2.5-0.5b")] {
        let found = read_text_of(text).unwrap();
        assert_eq!(found.decoder, Preset::find(preset).unwrap().decoder);
        assert_eq!(found.notes, [""; 0]);
    }
    let five = LLAMA_1B.replace("rope_scaling", "rope_parameters");
    let five = five.replace(r#""rope_theta": 500000.0,"#, "");
    let five = five.replace(r#""factor": 32.0"#, r#""rope_theta": 500000.0, "factor": 32.0"#);
    assert_eq!(read_text_of(&five), read_text_of(LLAMA_1B), "the form of transformers 5");
}

/// Each a change of a good file, and what the message says.
#[test]
fn unsupported_fields_are_refused_by_name() {
    let cases = [
        (LLAMA_1B, r#""llama""#, r#""gemma2""#, "model_type: \"gemma2\" the families here"),
        (
            LLAMA_1B,
            r#""rope_type": "llama3""#,
            r#""rope_type": "dynamic""#,
            "rope_scaling.rope_type: \"dynamic\" is not known; default, linear, llama3 and yarn",
        ),
        (
            LLAMA_1B,
            r#""rope_type": "llama3""#,
            r#""type": "longrope""#,
            "rope_scaling.type: \"longrope\"",
        ),
        (LLAMA_1B, r#""silu""#, r#""gelu""#, "hidden_act: \"gelu\""),
        (LLAMA_1B, r#""hidden_size": 2048,"#, "", "hidden_size: is missing"),
        (LLAMA_1B, r#""hidden_size": 2048"#, r#""hidden_size": -1"#, "hidden_size: -1 is no"),
        (LLAMA_1B, "16,", "1152921504606846976,", "num_hidden_layers: 1152921504606846976 is no"),
        (LLAMA_1B, "16,", "16777216,", "num_hidden_layers: 16777216 is more than 16384"),
        (LLAMA_1B, "_heads\": 8", "_heads\": 5", "num_key_value_heads: 5 does not divide"),
        (LLAMA_1B, r#""mlp_bias": false"#, r#""mlp_bias": 1"#, "mlp_bias: 1 is neither"),
        (
            LLAMA_1B,
            r#""pretraining_tp": 1"#,
            r#""quantization_config": {"bits": 4}"#,
            "quantization_config: quantised weights",
        ),
        (LLAMA_1B, r#""head_dim": 64"#, r#""head_dim": 63"#, "head_dim: is 63"),
        (QWEN, r#""num_key_value_heads": 2,"#, "", "num_key_value_heads: is missing"),
        (
            QWEN,
            r#""use_sliding_window": false"#,
            r#""layer_types": ["linear_attention"]"#,
            "layer_types: \"linear_attention\" is not known",
        ),
        (QWEN, "{", "[", "not a JSON object"),
    ];
    for (good, from, to, says) in cases {
        let text = good.replacen(from, to, 1);
        assert_ne!(text, good, "{from}");
        let error = read_text_of(&text).unwrap_err();
        assert!(error.starts_with("config.json: ") && error.contains(says), "{says}: {error}");
    }
}

#[test]
fn windows_are_found_where_they_slide() {
    let window = |text: &str| read_text_of(text).unwrap().decoder.window;
    let of = |first_layer| Some(Window { tokens: 32_768, first_layer });
    assert_eq!(window(QWEN), None);
    let on = QWEN.replace(r#""use_sliding_window": false"#, r#""use_sliding_window": true"#);
    assert_eq!(window(&on), None, "max_window_layers are all");
    let none_full = on.replace(r#""max_window_layers": 24"#, r#""max_window_layers": 0"#);
    assert_eq!(window(&none_full).map(|window| window.first_layer), Some(0));
    assert_eq!(
        window(&on.replace(r#""max_window_layers": 24"#, r#""max_window_layers": 9"#)),
        of(9)
    );
    let mistral = QWEN.replace("qwen2", "mistral");
    assert_eq!(window(&mistral), of(0));
    assert_eq!(window(&mistral.replace("\": 32768, \"tie", "\": null, \"tie")), None);
    let unsaid = mistral.replace("\"sliding_window\": 32768, ", "");
    assert_eq!(window(&unsaid), Some(Window { tokens: 4096, first_layer: 0 }), "as transformers");
    let types = |config: &str, kinds: &str| {
        let name = |k| if k == 's' { "\"sliding_attention\"" } else { "\"full_attention\"" };
        let list: Vec<_> = kinds.chars().map(name).collect();
        config.replace("{", &format!("{{\"layer_types\": [{}], ", list.join(", ")))
    };
    let [full, some] = ["f".repeat(24), format!("{}{}", "f".repeat(20), "s".repeat(4))];
    assert_eq!(window(&types(&on, &full)), None);
    assert_eq!(window(&types(&on, &some)), of(20));
    assert_eq!(window(&types(&mistral, &"s".repeat(24))), of(0));
    let llama = QWEN.replace("qwen2", "llama");
    for (config, kinds, problem) in [
        (&on, "sf".repeat(12).as_str(), "not in turns"),
        (&on, "sss", "has 3 entries for 24 layers"),
        (&mistral, &some, "has layers that do not slide"),
        (&llama, &some, "has layers that slide, where"),
        (&QWEN.to_owned(), &some, "has layers that slide, where"),
    ] {
        let error = read_text_of(&types(config, kinds)).unwrap_err();
        assert!(error.contains("layer_types: ") && error.contains(problem), "{error}");
    }
}

#[test]
fn dropout_is_reported() {
    let gpt2 = r#"{"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12,
        "n_positions": 1024, "n_ctx": 1024, "layer_norm_epsilon": 1e-05, "vocab_size": 50257,
        "activation_function": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.1,
        "attn_pdrop": 0.0}"#;
    let found = read_text_of(gpt2).unwrap();
    assert_eq!(found.decoder, Preset::find("gpt2").unwrap().decoder);
    let note = "config.json says resid_pdrop = 0.1; no dropout is taken from it: set dropout (one \
                share for all places) to train with any";
    assert_eq!((found.notes.len(), found.notes[0].as_str()), (2, note));
    let scaled = gpt2.replace("{", r#"{"scale_attn_by_inverse_layer_idx": true, "#);
    assert!(read_text_of(&scaled).unwrap_err().contains("scale_attn_by_inverse_layer_idx: true"));
}

/// Objects that say how heads turn, laid over a file that says nothing of it.
fn turned(rope: &str) -> Result<Rotary, String> {
    let text = QWEN.replace(r#""rope_theta": 1000000.0,"#, rope);
    let Positions::Rotary(rotary) = read_text_of(&text)?.decoder.positions else { unreachable!() };
    Ok(rotary)
}

const YARN: &str = r#"{"rope_type": "yarn", "factor": 4.0,
    "original_max_position_embeddings": 64}"#;

/// As a model card says, YaRN is written into a file of transformers 5.
#[test]
fn rope_scaling_is_read_beside_rope_parameters_that_scale_nothing() {
    let beside = |parameters: &str, scaling: &str, more: &str| {
        turned(&format!(r#""rope_parameters": {parameters}, "rope_scaling": {scaling},{more}"#))
    };
    let plain = r#"{"rope_type": "default", "rope_theta": 10000.0}"#;
    let rotary = beside(plain, YARN, "").unwrap();
    let RotaryScaling::Yarn(yarn) = rotary.scaling else { panic!("{rotary:?}") };
    assert_eq!((rotary.theta, yarn.factor, yarn.context), (1e4, 4.0, 64.0));
    assert_eq!((yarn.fast, yarn.slow, yarn.truncated), (32.0, 1.0, true));
    assert_eq!(yarn.attention, 0.1 * 4f64.ln() + 1.0);
    assert_eq!(beside(YARN, YARN, "").unwrap(), rotary, "said twice");
    for nothing in ["null", "{}"] {
        assert_eq!(beside(YARN, nothing, "").unwrap(), rotary);
    }
    let far = plain.replace("10000", "1000000");
    let far_yarn = YARN.replace("{", "{\"rope_theta\": 1000000.0, ");
    assert_eq!(beside(&far, &far_yarn, "").unwrap().theta, 1e6);
    assert_eq!(beside(&far, YARN, "\"rope_theta\": 1000000.0,").unwrap().theta, 1e6);
    let linear = r#"{"type": "linear", "factor": 4.0}"#;
    for (parameters, scaling, more, says) in [
        (linear, YARN, "", "rope_scaling: {\"factor\":4.0,"),
        (YARN, plain, "", "contradicts rope_parameters"),
        (&far, YARN, "", "rope_scaling.rope_theta: is missing: rope_parameters has 1000000"),
        (&far, plain, "", "rope_scaling.rope_theta: 10000 contradicts rope_parameters.rope_theta"),
        (plain, "null", "\"rope_theta\": 5,", "rope_theta: 5 contradicts rope_parameters.rope_"),
    ] {
        let error = beside(parameters, scaling, more).unwrap_err();
        assert!(error.contains(says), "{says}: {error}");
    }
}

#[test]
fn rope_parameters_by_layer_type_are_read_where_all_layers_turn_alike() {
    let nested = |full: &str, sliding: &str| {
        turned(&format!(
            r#""rope_parameters": {{"full_attention": {full}, "sliding_attention": {sliding}}},"#
        ))
    };
    assert_eq!(nested(YARN, YARN), turned(&format!(r#""rope_parameters": {YARN},"#)));
    assert_eq!(nested(YARN, "null"), nested(YARN, YARN));
    let error = nested(YARN, r#"{"rope_type": "default"}"#).unwrap_err();
    assert!(error.contains("rope_parameters.sliding_attention: turns in another way"), "{error}");
    let error = nested(YARN, "3").unwrap_err();
    assert!(error.contains("sliding_attention: 3 is no object"), "{error}");
    let error = turned(r#""rope_parameters": {"linear_attention": {}},"#).unwrap_err();
    assert!(error.contains("rope_parameters.linear_attention: is no kind of layer"), "{error}");
}

#[test]
fn a_field_of_rope_that_its_type_does_not_use_is_refused() {
    for (rope, says) in [
        (r#"{"factor": 4.0}"#, "rope_scaling.rope_type: is missing: factor has a type"),
        (r#"{"type": "default", "factor": 2}"#, "factor: 2 changes nothing with rope_type default"),
        (
            r#"{"type": "linear", "factor": 2, "beta_fast": 2}"#,
            "rope_scaling.beta_fast: 2 changes nothing with rope_type linear",
        ),
        (r#"{"type": "linear"}"#, "rope_scaling.factor: is missing"),
        (r#"{"type": "yarn"}"#, "rope_scaling.factor: is missing"),
        (r#"{"type": "yarn", "rope_type": "linear"}"#, "type: \"yarn\" contradicts rope_type"),
        (r#"{"type": "default", "partial_rotary_factor": 0.5}"#, "rotary_factor: 0.5 heads turn"),
    ] {
        let error = turned(&format!(r#""rope_scaling": {rope},"#)).unwrap_err();
        assert!(error.contains(says), "{says}: {error}");
    }
    let scales = YARN.replace("}", r#", "mscale": 2.0, "mscale_all_dim": 0.5}"#);
    let scaling = turned(&format!(r#""rope_scaling": {scales},"#)).unwrap().scaling;
    let RotaryScaling::Yarn(yarn) = scaling else { panic!("{scaling:?}") };
    assert_eq!(yarn.attention, (0.2 * 4f64.ln() + 1.0) / (0.05 * 4f64.ln() + 1.0));
}

/// Qwen3-30B-A3B's as transformers 4 wrote it, in short, and in the names of 5.24.
#[test]
fn experts_are_read_under_the_names_of_all_versions() {
    let qwen = r#"{
        "attention_bias": false, "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
        "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "output_router_logits": false, "rms_norm_eps": 1e-06,
        "rope_scaling": null, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "sliding_window": null, "tie_word_embeddings": false, "use_sliding_window": false,
        "vocab_size": 151936}"#;
    let read = read_text_of(qwen).unwrap();
    assert_eq!(read.notes, [""; 0]);
    let d = read.decoder;
    let moe = Moe::new(128, 8, 768);
    assert_eq!((d.moe, d.qk_norm), (Some(moe), true));
    assert_eq!(d.parameter_count(), 30_532_122_624);
    // 3.3 billion of them are multiplied with a token, or looked up.
    let active = d.flops_per_token(1) / 6.0 + (d.hidden * d.vocabulary) as f64;
    assert!((active / 3.35e9 - 1.0).abs() < 0.01, "{active}");
    let renamed = qwen.replace("num_experts\"", "num_local_experts\"");
    assert_eq!(read_text_of(&renamed).unwrap().decoder, d);
    let change = |from: &str, to: &str| read_text_of(&qwen.replace(from, to));
    let some = change("\"mlp_only_layers\": []", "\"mlp_only_layers\": [0, 1]").unwrap().decoder;
    let some = Decoder { moe: some.moe.map(|moe| Moe { every: 2, ..moe }), ..some };
    let with_experts = (0..6).map(|layer| some.moe_of(layer).is_some());
    assert_eq!(with_experts.collect::<Vec<_>>(), [false, false, false, true, false, true]);
    let noted = change("router_logits\": false", "router_logits\": true").unwrap().notes;
    assert!(noted[0].contains("balance = micro-batch:weight=1.67e-4 is as"), "{noted:?}");
    for (from, to, says) in [
        ("\"mlp_only_layers\": []", "\"mlp_only_layers\": [3]", "mlp_only_layers: [3] are not the"),
        ("tok\": 8", "tok\": 129", "num_experts_per_tok: 129 is more than there are experts, 128"),
        (
            "null, \"tie_word_embeddings\": false, \"use_sliding_window\": false",
            "4096, \"use_sliding_window\": true",
            "use_sliding_window: true windows beside",
        ),
        (
            "\"num_experts\": 128",
            "\"num_experts\": 128, \"num_local_experts\": 64",
            "num_experts: 128 where num_local_experts = 64 says another number",
        ),
        (
            "\"num_experts\": 128",
            "\"num_experts\": 128, \"router_jitter_noise\": 0.1",
            "router_jitter_noise: 0.1 noise before the router is not supported",
        ),
    ] {
        let error = change(from, to).unwrap_err();
        assert!(error.contains(says), "{to}: {error}");
    }
}
