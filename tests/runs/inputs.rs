//! Weights all the way round, and data from several sources: what comes in from outside.

use std::fs;
use std::path::Path;

use zeropp::config::Order;
use zeropp::weights::{StoreAs, Weights};
use zeropp::{Config, ExportOptions, Trainer, export_checkpoint};

/// A small GPT whose vocabulary is padded.
fn config(dir: &Path, name: &str) -> Config {
    Config {
        layers: 4,
        hidden: 32,
        heads: 2,
        seq: 16,
        unit: Some(2),
        micro_batches: Some(2),
        steps: 2,
        vocab: Some(300),
        vocab_multiple: 64,
        save: Some(dir.join(name)),
        ..Config::default()
    }
}

/// Trains so little that no weight changes.
fn still(config: Config, weights: &Path) -> Config {
    Config {
        init_from: Some(weights.into()),
        steps: 1,
        lr: 1e-30,
        min_lr: Some(0.0),
        weight_decay: 0.0,
        ..config
    }
}

fn train(config: Config) {
    Trainer::new(config).unwrap().train(|_| ()).unwrap();
}

fn export(from: &Path, to: &Path) {
    let options = ExportOptions { store_as: StoreAs::F32, like: None, ema: false };
    export_checkpoint(from, to, &options).unwrap();
}

/// The files of weights, byte by byte.
fn files(folder: &Path) -> Vec<u8> {
    fs::read(folder.join("model.safetensors")).unwrap()
}

#[test]
fn exported_weights_are_read_back_exactly_on_any_mesh() {
    for tied in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        train(Config { tied, pp: 2, zero3: 2, ..config(dir.path(), "first") });
        export(&at("first"), &at("out"));
        let weights = Weights::open(&at("out")).unwrap();
        let embedding = weights.find("transformer.wte.weight").unwrap();
        assert_eq!(embedding.shape, [300, 32], "rows that are no ids are cut");
        assert_eq!(weights.find("lm_head.weight").is_none(), tied);
        for (i, (pp, zero3, zero1, dp)) in
            [(1, 1, false, 1), (2, 2, false, 1), (4, 1, false, 1), (1, 2, true, 2)]
                .into_iter()
                .enumerate()
        {
            let name = format!("mesh{i}");
            let base = Config { tied, pp, zero3, zero1, dp, ..config(dir.path(), &name) };
            train(still(base, &at("out")));
            let back = at(&format!("out{i}"));
            export(&at(&name), &back);
            assert!(files(&back) == files(&at("out")), "pp {pp} zero3 {zero3}, tied {tied}");
        }
        let text = fs::read_to_string(at("out").join("config.json")).unwrap();
        for part in ["\"n_layer\": 4", "\"vocab_size\": 300", "\"n_head\": 2", "gelu_new"] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
    }
}

#[test]
fn a_resumed_run_takes_its_checkpoint_and_others_the_weights() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    train(config(dir.path(), "first"));
    export(&at("first"), &at("out"));
    let loss = |config: Config| {
        let mut losses = Vec::new();
        Trainer::new(config).unwrap().train(|step| losses.push(step.loss.to_bits())).unwrap();
        losses
    };
    let fresh = loss(Config { save: None, ..config(dir.path(), "") });
    let began = loss(Config { save: None, ..still(config(dir.path(), ""), &at("out")) });
    assert_ne!(began[0], fresh[0], "it began with the weights");
    let resumed = |init_from| {
        let save = at("copy");
        let _ = fs::remove_dir_all(&save);
        fs::create_dir(&save).unwrap();
        copy(&at("first"), &save);
        let resume = true.into();
        loss(Config { save: Some(save), resume, steps: 4, init_from, ..config(dir.path(), "") })
    };
    assert_eq!(resumed(Some(at("out"))), resumed(None));
}

fn copy(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => {
                fs::create_dir(&to).unwrap();
                copy(&entry.path(), &to);
            }
            false => drop(fs::copy(entry.path(), to).unwrap()),
        }
    }
}

#[test]
fn weights_of_another_model_are_refused_before_a_rank_starts() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    train(config(dir.path(), "first"));
    export(&at("first"), &at("out"));
    let base = || Config { save: None, init_from: Some(at("out")), ..config(dir.path(), "") };
    for (config, message) in [
        (Config { layers: 5, ..base() }, "layers = 5: was 4 where the weights of init-from = "),
        (Config { layers: 3, ..base() }, "layers = 3: was 4 where"),
        (Config { hidden: 34, ..base() }, "hidden = 34: was 32 where"),
        (Config { tied: true, ..base() }, "tied = true: was false where"),
        (Config { vocab: Some(301), ..base() }, "vocab = 301: was 300 where"),
        (Config { init_from: Some(at("none")), ..base() }, "none: cannot be read"),
    ] {
        let error = Trainer::new(config).err().expect("refused");
        let text = error.to_string();
        assert!(text.contains(message) && error.is_bad_input(), "{message}: {text}");
    }
    // The folder is there already.
    let options = ExportOptions { store_as: StoreAs::Bf16, like: None, ema: false };
    let error = export_checkpoint(&at("first"), &at("out"), &options).unwrap_err().to_string();
    assert!(error.contains("the folder is not empty; name a new folder"), "{error}");
}

#[test]
fn several_sources_and_epochs_are_the_same_on_any_mesh() {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in [("a", "one two three ".repeat(80)), ("b", "4 5 6 7 8 ".repeat(40))] {
        fs::write(dir.path().join(name), text).unwrap();
    }
    let path = |name: &str| dir.path().join(name).display().to_string();
    let base = || Config {
        data_mix: Some(format!("{}=0.7,{}=0.3", path("a"), path("b"))),
        split: Some("9,1".into()),
        save: None,
        vocab: None,
        micro_batches: Some(4),
        ..config(dir.path(), "")
    };
    for order in Order::ALL {
        let losses = |pp| {
            let mut losses = Vec::new();
            let config = Config { order: *order, pp, ..base() };
            Trainer::new(config).unwrap().train(|s| losses.push(s.loss.to_bits())).unwrap();
            losses
        };
        assert_eq!(losses(1), losses(4), "{order}");
    }
    let validation = base().validation_dataset().unwrap().unwrap();
    assert_eq!((base().dataset().unwrap().len(), validation.len()), (1008 + 360, 112 + 40));
    for (config, message) in [
        (Config { data: Some("x".into()), ..base() }, "data = x: data-mix also names the data"),
        (Config { split: Some("0,1".into()), ..base() }, "split = 0,1: is not two shares"),
        (
            Config { data_mix: Some("a=0.5,b".into()), ..base() },
            "\"b\" is not a path with a weight",
        ),
        (Config { data_mix: Some("a=-1".into()), ..base() }, "data = a=-1: "),
        (Config { data_mix: Some("a=inf".into()), ..base() }, "\"a=inf\" is not a path"),
    ] {
        let error = config.validate().unwrap_err().to_string();
        assert!(error.contains(message), "{message} is not in {error}");
    }
}
