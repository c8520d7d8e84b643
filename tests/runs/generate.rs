//! What a model writes: with the past kept, the same text as from the whole each time, and the same
//! from a checkpoint as from the folder that it is exported to.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use self::files::Gguf;
use crate::common::{run, text_file, tiny};
use burn::tensor::{Device, Int, Tensor, TensorData};
use zeropp::config::Activation;
use zeropp::model::decoder::Decoder;
use zeropp::weights::StoreAs;
use zeropp::{
    Config, ExportOptions, Generator, NamedWeights, Sampling, Trainer, config_of,
    export_checkpoint, model,
};

#[expect(dead_code, reason = "what makes other kinds of files")]
#[path = "../../zeropp-weights/tests/weights/common.rs"]
mod files;

/// Families that differ in all that the past has to do with: positions, groups, head norms.
fn families(data: &Path) -> Vec<Config> {
    let base = Config {
        data: Some(data.into()),
        layers: 3,
        hidden: 32,
        heads: 4,
        seq: 48,
        steps: 120,
        lr: 1e-2,
        ..tiny()
    };
    let gated = Config { activation: Activation::Swiglu, kv_heads: Some(2), ..base.clone() };
    vec![
        base,
        Config { model: "llama".into(), ..gated.clone() },
        Config { model: "qwen3".into(), head_dim: Some(12), tied: true, ..gated },
    ]
}

fn written(generator: &mut Generator, prompt: &[u32], most: usize, how: &Sampling) -> Vec<u32> {
    generator.generate(prompt, most, how, |_| ControlFlow::Continue(())).unwrap()
}

/// The token with the largest logit, by a forward of all of the text.
fn likeliest(config: &Config, weights: &NamedWeights, text: &[u32]) -> u32 {
    let model = model::build(config.decoder(256).unwrap());
    let ids: Vec<i64> = text.iter().map(|id| i64::from(*id)).collect();
    let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [1, text.len()]), &Device::flex());
    let logits = model::logits(&model, weights, ids).unwrap();
    let logits = logits.into_data().try_to_vec::<f32>().unwrap();
    let last = &logits[(text.len() - 1) * 256..];
    let best = last.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap();
    best.0 as u32
}

#[test]
fn greedy_text_is_what_the_whole_forward_gives() {
    let dir = tempfile::tempdir().unwrap();
    let text = text_file(&dir, 4000);
    for config in families(&text) {
        let name = config.model.clone();
        let save = dir.path().join(&name);
        let trained = run(Config { save: Some(save.clone()), pp: 1, ..config.clone() });
        let described = config_of(&save).unwrap();
        let mut generator = Generator::new(&described).unwrap();
        let prompt: Vec<u32> = b"stage shard unit ".iter().map(|b| u32::from(*b)).collect();
        let found = written(&mut generator, &prompt, 24, &Sampling::default());
        let mut whole = prompt.clone();
        for (i, id) in found.iter().enumerate() {
            assert_eq!(*id, likeliest(&config, &trained.weights, &whole), "{name}, token {i}");
            whole.push(*id);
        }
        assert_eq!(found.len(), 24);
        assert!(found.windows(2).any(|w| w[0] != w[1]), "{name}: it has learned words");
        // A text begins anew, however far the last one went.
        assert_eq!(written(&mut generator, &prompt, 24, &Sampling::default()), found, "{name}");

        let folder = dir.path().join(format!("{name}-hf"));
        if name == "gpt" {
            let options = ExportOptions { store_as: StoreAs::F32, like: None, ema: false };
            export_checkpoint(&save, &folder, &options).unwrap();
            let mut exported = Generator::new(&config_of(&folder).unwrap()).unwrap();
            assert_eq!(written(&mut exported, &prompt, 24, &Sampling::default()), found);
        }

        let drawn = Sampling { temperature: 1.0, top_k: 20, top_p: 0.95, seed: 5 };
        let one = written(&mut generator, &prompt, 24, &drawn);
        assert_eq!(written(&mut generator, &prompt, 24, &drawn), one, "{name}: the same seed");
        let other = Sampling { seed: 6, ..drawn };
        assert_ne!(written(&mut generator, &prompt, 24, &other), one, "{name}: another");
        let only = Sampling { top_k: 1, ..drawn };
        assert_eq!(written(&mut generator, &prompt, 24, &only), found, "{name}: top-k 1");
    }
}

/// A GGUF file of a Qwen3 of bytes, whose texts end at the end of a line.
fn gguf(decoder: &Decoder, weights: &NamedWeights) -> Vec<u8> {
    let number = |of: f32| of.to_le_bytes();
    let sizes = [
        ("embedding_length", decoder.hidden),
        ("feed_forward_length", decoder.intermediate),
        ("block_count", decoder.layers),
        ("attention.head_count", decoder.heads),
        ("attention.head_count_kv", decoder.kv_heads),
        ("attention.key_length", decoder.head_dim),
        ("context_length", decoder.context),
    ];
    let mut file = Gguf::new()
        .word("general.architecture", "qwen3")
        .number("tokenizer.ggml.eos_token_id", u32::from(b'\n'))
        .key("qwen3.attention.layer_norm_rms_epsilon", 6, &number(1e-6))
        .key("qwen3.rope.freq_base", 6, &number(1e6));
    for (key, size) in sizes {
        file = file.number(&format!("qwen3.{key}"), size as u32);
    }
    for tensor in decoder.tensors() {
        let (values, [rows, columns]) = (
            &weights[&tensor.name],
            match tensor.shape[..] {
                [n] => [1, n],
                [rows, columns] => [rows, columns],
                _ => unreachable!("a vector or a matrix"),
            },
        );
        let mut name = tensor.name.replace("model.layers.", "blk.");
        for (ours, theirs) in GGUF_NAMES {
            name = name.replace(ours, theirs);
        }
        if tensor.transposed_in_files {
            let of_column = |c: usize| (0..rows).map(move |r| values[r * columns + c]);
            let values: Vec<f32> = (0..columns).flat_map(of_column).collect();
            file = file.f32s(&name, &[columns, rows], &values);
        } else {
            file = file.f32s(&name, &tensor.shape, values);
        }
    }
    file.bytes()
}

const GGUF_NAMES: [(&str, &str); 12] = [
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("mlp.", "ffn_"),
    ("_proj", ""),
];

/// A GGUF file is a model with its weights: it writes and is measured as the checkpoint that it was
/// made of, and says which token ends a text; so it does for a run that began with it.
#[test]
fn a_gguf_file_is_a_model_and_its_weights() {
    let dir = tempfile::tempdir().unwrap();
    let text = text_file(&dir, 4000);
    let [saved, after] = ["saved", "after"].map(|name| dir.path().join(name));
    let config = Config { save: Some(saved.clone()), pp: 1, ..families(&text).remove(2) };
    let trained = run(config.clone());
    let file = dir.path().join("tiny.gguf");
    std::fs::write(&file, gguf(&config.decoder(256).unwrap(), &trained.weights)).unwrap();

    let [of_run, of_file] = [&saved, &file].map(|path| config_of(path).unwrap());
    let prompt: Vec<u32> = b"stage shard unit ".iter().map(|b| u32::from(*b)).collect();
    let [by_run, by_file] = [&of_run, &of_file].map(|config| {
        written(&mut Generator::new(config).unwrap(), &prompt, 24, &Sampling::default())
    });
    assert_eq!(by_run, by_file);
    let ends = |config: &Config| Generator::new(config).unwrap().ends().to_vec();
    assert_eq!((ends(&of_run), ends(&of_file)), (vec![], vec![u32::from(b'\n')]));

    let measured = |described: &Config| {
        let (data, steps) = (Some(text.clone()), 1);
        let eval_data = data.clone();
        let base = Config { data, eval_data, steps, warmup: None, seq: 48, ..described.clone() };
        let config = Config { eval_every: 1, eval_steps: 2, vocab: Some(256), ..base };
        Trainer::new(config).unwrap().evaluate().unwrap().loss
    };
    assert_eq!(measured(&of_run).to_bits(), measured(&of_file).to_bits());

    let begun = Config { init_from: Some(file), save: Some(after.clone()), steps: 1, ..config };
    run(Config { warmup: None, ..begun });
    assert_eq!(ends(&config_of(&after).unwrap()), [u32::from(b'\n')]);
    std::fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    let exported = dir.path().join("exported");
    let options = ExportOptions { store_as: StoreAs::F32, like: None, ema: false };
    zeropp::export_checkpoint(&after, &exported, &options).unwrap();
    assert_eq!(std::fs::read(exported.join("tokenizer.json")).unwrap(), b"{}");
}

/// A model that is nothing but settings has a `config.json` of its own when it is exported, and is
/// the same model when that is read.
#[test]
fn a_model_of_settings_alone_is_exported_whole() {
    let dir = tempfile::tempdir().unwrap();
    let text = text_file(&dir, 4000);
    for model in
        ["gpt", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2-moe", "qwen3-moe", "dots1"]
    {
        let (save, exported) = (dir.path().join(model), dir.path().join(format!("{model}-out")));
        let gated = model != "gpt";
        run(Config {
            model: model.into(),
            activation: if gated { Activation::Swiglu } else { Activation::Gelu },
            kv_heads: gated.then_some(1),
            data: Some(text.clone()),
            steps: 2,
            warmup: None,
            save: Some(save.clone()),
            ..tiny()
        });
        let options = ExportOptions { store_as: StoreAs::F32, like: None, ema: false };
        zeropp::export_checkpoint(&save, &exported, &options).unwrap();
        let measured = |weights: &Path| {
            let described = config_of(weights).unwrap();
            let (data, eval_data) = (Some(text.clone()), Some(text.clone()));
            let base = Config { data, eval_data, steps: 1, warmup: None, seq: 8, ..described };
            let config = Config { eval_every: 1, eval_steps: 2, vocab: Some(256), ..base };
            Trainer::new(config).unwrap().evaluate().unwrap().loss
        };
        assert_eq!(measured(&save).to_bits(), measured(&exported).to_bits(), "{model}");
    }
}

/// Weights to begin with fit other settings than their own, which the export then has; and a model
/// that a file describes is no longer the one that was trained once the file is another.
#[test]
fn an_export_describes_the_model_that_was_trained() {
    let dir = tempfile::tempdir().unwrap();
    let (text, at) = (text_file(&dir, 4000), |name: &str| dir.path().join(name));
    let train = |config: Config, name: &str| {
        let (data, save) = (Some(text.clone()), Some(at(name)));
        run(Config { data, save, steps: 1, warmup: None, ..config });
    };
    let export = |from: &str, to: &str, like: Option<PathBuf>| {
        let options = ExportOptions { store_as: StoreAs::F32, like, ema: false };
        zeropp::export_checkpoint(&at(from), &at(to), &options)
    };
    let config = |folder: &str| -> serde_json::Value {
        let text = std::fs::read_to_string(at(folder).join("config.json")).unwrap();
        serde_json::from_str(&text).unwrap()
    };
    train(Config { heads: 2, ..tiny() }, "two");
    export("two", "base", None).unwrap();
    assert_eq!(config("base")["n_head"], 2);
    train(Config { heads: 4, init_from: Some(at("base")), ..tiny() }, "four");
    export("four", "four-out", None).unwrap();
    assert_eq!(config("four-out")["n_head"], 4);
    let error = export("four", "never", Some(at("base"))).unwrap_err().to_string();
    assert!(error.contains("its n_head differs") && !at("never").exists(), "{error}");
    export("two", "two-out", Some(at("base"))).unwrap();

    let model = at("base").display().to_string();
    let named = Config::for_model(&format!("{model}/")).unwrap();
    train(Config { init_from: Some(at("base")), seq: tiny().seq, ..named }, "named");
    config_of(&at("named")).unwrap();
    let text = std::fs::read_to_string(at("base").join("config.json")).unwrap();
    let other = text.replace("0.00001", "0.001");
    assert_ne!(other, text);
    std::fs::write(at("base").join("config.json"), other).unwrap();
    let error = config_of(&at("named")).unwrap_err().to_string();
    assert!(error.contains("describes another model"), "{error}");
    let error = export("named", "never", Some(at("base"))).unwrap_err().to_string();
    assert!(error.contains("is another model") && !at("never").exists(), "{error}");
    std::fs::write(at("base").join("config.json"), text).unwrap();
    export("named", "named-out", None).unwrap();
}

/// Learned positions end; a text goes on up to there, and stops where it is asked to.
#[test]
fn text_ends_where_it_must_or_should() {
    let dir = tempfile::tempdir().unwrap();
    let text = text_file(&dir, 2000);
    let save = dir.path().join("saved");
    let config = Config { data: Some(text), seq: 12, steps: 2, save: Some(save.clone()), ..tiny() };
    run(config);
    let mut generator = Generator::new(&config_of(&save).unwrap()).unwrap();
    let ten: Vec<u32> = (60..70).collect();
    assert_eq!(written(&mut generator, &ten, 50, &Sampling::default()).len(), 3);
    let mut seen = 0;
    let stop = |_| {
        seen += 1;
        if seen == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    assert_eq!(generator.generate(&ten[..2], 9, &Sampling::default(), stop).unwrap().len(), 2);
    let mut refused = |prompt: &[u32], part: &str| {
        let flow = |_| ControlFlow::Continue(());
        let error = generator.generate(prompt, 1, &Sampling::default(), flow).unwrap_err();
        assert!(error.is_bad_input() && error.to_string().contains(part), "{error}");
    };
    refused(&[], "the prompt is empty");
    refused(&[1; 13], "the model takes 12 at most");
    refused(&[256], "token id 256, and the model knows 256");
}

/// A run begins with the weights of a checkpoint, and what is measured on them is what the run that
/// wrote it has measured.
#[test]
fn a_checkpoint_is_weights_to_begin_with() {
    let dir = tempfile::tempdir().unwrap();
    let text = text_file(&dir, 4000);
    let save = dir.path().join("saved");
    let config = Config {
        data: Some(text.clone()),
        split: Some("9,1".into()),
        eval_every: 4,
        eval_steps: 2,
        steps: 4,
        save: Some(save.clone()),
        ..tiny()
    };
    let trained = run(Config { pp: 2, zero3: 2, micro_batches: Some(3), ..config.clone() });
    let measured = trained.steps[3].eval.unwrap().loss;
    let begun = Config { save: None, init_from: Some(save.clone()), seed: 99, ..config };
    let again = Trainer::new(begun.clone()).unwrap().evaluate().unwrap();
    assert_eq!(again.loss.to_bits(), measured.to_bits());
    let other = Config { hidden: 32, init_from: Some(save), ..begun };
    let error = Trainer::new(other).err().unwrap().to_string();
    assert!(error.contains("hidden = 32: was 16 where the weights of init-from"), "{error}");
}
