//! The setting `model`: what it fills in, what may differ from it, what is refused.

use super::*;
use zeropp_core::model::decoder::{Decoder, Positions};
use zeropp_core::model::presets::PRESETS;

const QWEN: &str = r#"{"model_type": "qwen2", "hidden_act": "silu", "hidden_size": 48,
    "intermediate_size": 80, "max_position_embeddings": 512, "num_attention_heads": 6,
    "num_hidden_layers": 5, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "tie_word_embeddings": true, "vocab_size": 300}"#;

fn refusal(toml: &str) -> String {
    let config = Config::from_toml(toml).and_then(|config| config.validate());
    config.expect_err(toml).to_string()
}

#[test]
fn a_preset_brings_its_sizes_and_some_may_differ() {
    for preset in PRESETS {
        let config = Config::for_model(preset.name).unwrap();
        config.validate().unwrap();
        assert_eq!(config.decoder(preset.decoder.vocabulary).unwrap(), preset.decoder);
        assert_eq!(config.seq, preset.decoder.context.min(1024));
        let text = config.to_toml().unwrap();
        assert_eq!(Config::from_toml(&text).unwrap(), config, "{}", preset.name);
        let doc = OPTIONS.iter().find(|option| option.key == "model").unwrap().doc;
        let doc: Vec<_> = doc.iter().flat_map(|line| line.split([' ', ',', '.'])).collect();
        let name = preset.name.split('.').next().unwrap();
        assert!(doc.contains(&name), "{} is not in the manual", preset.name);
    }
    let smaller = "model = \"llama-1b\"\nlayers = 4\nseq = 2048\nvocab = 500\nvocab-multiple = 128";
    let smaller = Config::from_toml(smaller).unwrap();
    smaller.validate().unwrap();
    let decoder = smaller.decoder(500).unwrap();
    assert_eq!((decoder.layers, decoder.rows(), smaller.seq), (4, 512, 2048));
    assert_eq!((decoder.kv_heads, decoder.tied), (8, true));
    let long = Config { seq: 8192, ..Config::for_model("llama2-7b").unwrap() };
    assert_eq!(
        long.model_notes().unwrap(),
        ["seq = 8192: model llama2-7b was made for 4096 tokens"]
    );
    assert_eq!(smaller.model_notes().unwrap(), [""; 0]);
}

/// Flags are laid over a file: another model's sizes replace the file's, not the flags' own.
#[test]
fn a_model_in_a_flag_replaces_the_sizes_of_the_file() {
    let file = Config::from_toml("model = \"gpt2\"\nsteps = 7").unwrap();
    let flags = "model = \"qwen3-0.6b\"\nlayers = 2".parse::<Table>().unwrap();
    let config = file.with(flags).unwrap();
    assert_eq!((config.layers, config.hidden, config.heads, config.steps), (2, 1024, 16, 7));
    assert_eq!((config.head_dim, config.activation), (Some(128), Activation::Swiglu));
    let layers = "layers = 3".parse::<Table>().unwrap();
    assert_eq!(config.with(layers).unwrap().hidden, 1024, "no model, no sizes");
}

#[test]
fn families_take_the_sizes_that_are_set() {
    let toml = "model = \"qwen3\"\nhidden = 96\nheads = 8\nkv-heads = 2\nhead-dim = 32\nlayers = 3";
    let decoder = Config::from_toml(toml).unwrap().decoder(100).unwrap();
    let sizes = (decoder.heads, decoder.kv_heads, decoder.head_dim, decoder.intermediate);
    assert_eq!(sizes, (8, 2, 32, 256));
    assert!(decoder.qk_norm && matches!(decoder.positions, Positions::Rotary(_)));
    let gpt = Config::default();
    assert_eq!(gpt.decoder(256).unwrap(), Decoder::from(gpt.gpt_shape(256)));
}

#[test]
fn a_folder_is_read_and_counts_from_the_file_that_names_it() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("qwen")).unwrap();
    std::fs::write(dir.path().join("qwen/config.json"), QWEN).unwrap();
    let toml = dir.path().join("run.toml");
    for path in ["./qwen", "qwen/config.json"] {
        std::fs::write(&toml, format!("model = \"{path}\"\nlayers = 2")).unwrap();
        let config = Config::load(&toml).unwrap();
        config.validate().unwrap();
        let sizes = (config.layers, config.hidden, config.kv_heads, config.vocab, config.seq);
        assert_eq!(sizes, (2, 48, Some(2), Some(300), 512));
        let decoder = config.decoder(300).unwrap();
        assert!(decoder.biases.qkv && !decoder.biases.out && decoder.tied);
    }
    let file = dir.path().join("qwen/config.json");
    let over = Config { metrics: Some(file.clone()), ..Config::load(&toml).unwrap() };
    let text = over.validate().unwrap_err().to_string();
    assert!(text.contains("is the file of `model` too and would overwrite it"), "{text}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), QWEN);
    let sliding = QWEN.replace("qwen2", "mistral").replace("{", "{\"sliding_window\": 64, ");
    std::fs::write(dir.path().join("qwen/config.json"), sliding).unwrap();
    let config = Config::load(&toml).unwrap();
    config.validate().unwrap();
    assert_eq!(config.decoder(300).unwrap().window_of(0), Some(64));
    std::fs::write(dir.path().join("qwen/config.json"), QWEN.replace("1e-06", "\"small\""))
        .unwrap();
    let text = Config::load(&toml).unwrap_err().to_string();
    assert!(text.contains("config.json: rms_norm_eps: \"small\" is no number"), "{text}");
}

#[test]
fn contradictions_to_the_model_are_refused() {
    let cases = [
        ("model = \"lama\"", "model = lama: is not known; use one of gpt, llama, "),
        ("model = \"nowhere/\"", "model = nowhere/: No such file or directory"),
        ("model = \"nowhere.gguf\"", "model = nowhere.gguf: cannot be read (No such file"),
        ("model = \"gpt2\"\nhidden = 512", "hidden = 512: model gpt2 has 768; leave hidden out"),
        ("model = \"llama-1b\"\nkv-heads = 4", "kv-heads = 4: model llama-1b has 8"),
        ("model = \"llama-1b\"\ntied = false", "tied = false: model llama-1b has true"),
        (
            "model = \"qwen3-8b\"\nactivation = \"gelu\"",
            "activation = gelu: model qwen3-8b has swiglu",
        ),
        (
            "model = \"gpt2\"\nseq = 1025",
            "seq = 1025: model gpt2 has 1024 positions; use 1 to 1024",
        ),
        (
            "model = \"llama\"\nactivation = \"gelu\"",
            "activation = gelu: is not what model llama has",
        ),
        ("activation = \"swiglu\"", "activation = swiglu: is not what model gpt has; use gelu or"),
        ("kv-heads = 3", "kv-heads = 3: does not divide heads = 4"),
        ("kv-heads = 0", "kv-heads = 0: at least 1"),
        (
            "model = \"qwen3-moe\"\nexperts-per-token = 9",
            "experts:per-token = 9: a token goes to 1 to 8 of experts = 8",
        ),
        ("model = \"mixtral\"\nexperts = 5000", "experts = 5000: a layer has at most 4096"),
        (
            "model = \"qwen3\"\nexperts = 4",
            "experts = 4: model qwen3 has no experts; leave experts",
        ),
        ("model = \"gpt2\"\nexperts = 4", "experts = 4: model gpt2 has 0"),
        (
            "model = \"mixtral\"\nlora-rank = 4\nlora-targets = \"q,gate\"",
            "lora-rank:targets = q,gate: gate is of experts, which have no adapters; use maps of",
        ),
        (
            "model = \"dots1\"\nlora-rank = 4\nlora-targets = \"mlp.experts.up_proj\"",
            "lora-rank:targets = mlp.experts.up_proj: mlp.experts.up_proj is of experts, which",
        ),
        (
            "model = \"qwen3-moe\"\nbalance = \"bias\"",
            "balance = bias: model qwen3-moe has no bias in its choice of experts; use micro-batch",
        ),
        (
            "model = \"dots1\"\nbalance = \"bias\"\nlora-rank = 4",
            "balance = bias: with lora-rank the adapters alone train, and biases stand; use none",
        ),
        (
            "model = \"dots1\"\nrouter-z = 0.1",
            "balance:z = 0.1: model dots1 has sigmoids of logits as scores; leave it out",
        ),
        (
            "model = \"dots1\"\nexperts = 1\nexperts-per-token = 1",
            "experts = 1: are not 1 groups of",
        ),
        ("model = \"mixtral\"\ndevice = \"cuda\"", "device = cuda: model mixtral has"),
        ("model = \"llama\"\nhead-dim = 7", "head-dim = 7: rotary positions turn pairs"),
    ];
    for (toml, says) in cases {
        let text = refusal(toml);
        assert!(text.starts_with(says), "{toml}: {text}");
    }
}
