//! Models that are read from files, as a person meets them: which model weights are of, what is
//! written for others, what is refused.

mod common;

use std::fs;
use std::path::Path;

use common::zeropp;
use serde_json::{Value, json};

const TRAIN: &str = "run --model llama --layers 2 --hidden 16 --heads 2 --seq 16 --data text \
                     --steps 1 --pp 1 --micro-batches 2";

/// Output of the command where it works.
fn works(at: &Path, line: &str) -> String {
    let done = zeropp(at, line);
    assert_eq!(done.code, Some(0), "{line}: {}", done.err);
    format!("{}{}", done.out, done.err)
}

/// Message of the command for input that it refuses.
fn refused(at: &Path, line: &str) -> String {
    let done = zeropp(at, line);
    assert_eq!(done.code, Some(2), "{line}: {}{}", done.out, done.err);
    done.err
}

/// A checkpoint `saved` of a llama, and the folder `hf` that it is exported to.
fn model() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let text: String = (0..900).map(|i| format!("{} ", i * 7919 % 311)).collect();
    fs::write(dir.path().join("text"), text).unwrap();
    works(dir.path(), &format!("{TRAIN} --save saved"));
    works(dir.path(), "export saved -o hf");
    dir
}

fn config(folder: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(folder.join("config.json")).unwrap()).unwrap()
}

fn change(folder: &Path, change: impl FnOnce(&mut serde_json::Map<String, Value>)) {
    let mut config = config(folder);
    change(config.as_object_mut().unwrap());
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

#[test]
fn without_a_model_it_is_that_of_the_weights_and_what_contradicts_them_is_said_by_setting() {
    let dir = model();
    let at = dir.path();
    let begin = "run --data text --steps 1 --pp 1 --micro-batches 2";
    for from in ["hf", "saved"] {
        works(at, &format!("{begin} --init-from {from} --seq 16"));
        let said = refused(at, &format!("{begin} --init-from {from} --seq 16 --layers 3"));
        let says = format!("layers = 3: was 2 where the weights of init-from = {from} lie");
        assert!(said.contains(&says), "{said}");
    }
    let said = refused(at, &format!("{begin} --init-from hf --seq 16 --model llama"));
    assert!(said.contains("layers = 8: was 2 where"), "{said}");
    // Weights that fit, for a model that turns otherwise.
    fs::create_dir(at.join("far")).unwrap();
    fs::copy(at.join("hf/config.json"), at.join("far/config.json")).unwrap();
    change(&at.join("far"), |config| {
        config.insert("rope_theta".into(), json!(5e5));
        config["rope_parameters"]["rope_theta"] = json!(5e5);
    });
    let said = works(at, &format!("{begin} --init-from hf --seq 16 --model far/"));
    assert!(said.contains("rope_theta = 500000.0, was 10000.0 where the weights"), "{said}");
    change(&at.join("hf"), |config| drop(config.insert("attention_sinks".into(), json!(4))));
    let said = refused(at, &format!("{begin} --init-from hf --seq 16"));
    assert!(said.contains("attention_sinks: 4 is not known, and may change the model"), "{said}");
}

/// Before, `run` trained a model of other tokens on bytes, where `eval` refused them.
#[test]
fn text_is_no_data_for_a_model_of_other_tokens_in_run_and_eval_alike() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let ids: Vec<u8> = (0..900u16).flat_map(|i| (i * 7 % 300).to_le_bytes()).collect();
    fs::write(at.join("ids.bin"), ids).unwrap();
    fs::write(at.join("text"), "A text. ".repeat(200)).unwrap();
    let of = "--tokenizer u16 --vocab 300 --save saved";
    works(at, &TRAIN.replace("--data text", &format!("--data ids.bin {of}")));
    works(at, "export saved -o hf");
    let run = "run --init-from hf --seq 16 --steps 1 --pp 1 --micro-batches 2 --data";
    for line in [&format!("{run} text"), "eval hf --data text --seq 16"] {
        let said = refused(at, line);
        assert!(said.contains("data = text: the tokens of this model are not bytes"), "{said}");
    }
    works(at, &format!("{run} text --tokenizer bytes"));
    works(at, &format!("{run} ids.bin --tokenizer u16"));
}

#[test]
fn scaled_rope_is_read_beside_rope_parameters_and_written_for_both_versions() {
    let dir = model();
    let at = dir.path();
    let loss = |folder: &str| {
        let done = zeropp(at, &format!("eval {folder} --data text --seq 16 --json"));
        let said: Value =
            serde_json::from_str(&done.out).unwrap_or_else(|_| panic!("{}", done.err));
        said["loss"].as_f64().expect("a loss").to_bits()
    };
    let plain = loss("hf");
    let yarn = json!({
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8,
    });
    // As transformers 5 saves it, with YaRN written in as model cards say.
    change(&at.join("hf"), |config| {
        config.remove("rope_theta");
        config.insert("rope_scaling".into(), yarn.clone());
    });
    let scaled = loss("hf");
    assert_ne!(scaled, plain);
    let said = works(at, "export hf -o again");
    assert!(said.contains("again: 21 tensors") && !said.contains("step"), "{said}");
    let again = config(&at.join("again"));
    assert_eq!(again["rope_scaling"], again["rope_parameters"]);
    assert_eq!(again["rope_theta"], json!(10_000.0));
    assert_eq!(again["rope_scaling"]["rope_type"], "yarn");
    assert_eq!(loss("again"), scaled);
}

#[test]
fn export_like_a_model_whose_config_is_broken_is_refused() {
    let dir = model();
    let at = dir.path();
    fs::create_dir(at.join("like")).unwrap();
    fs::write(at.join("like/config.json"), "{\"model_type\": ").unwrap();
    let said = refused(at, "export saved -o out --like like");
    assert!(said.contains("like/config.json: it is not a JSON object"), "{said}");
    assert!(!at.join("out").exists());
}

#[test]
fn adapters_of_a_base_that_peft_cannot_open_are_exported_with_a_note() {
    let dir = model();
    let at = dir.path();
    for (base, noted) in [("saved", true), ("hf", false)] {
        let save = format!("of-{base}");
        let line = "run --data text --seq 16 --steps 1 --pp 1 --micro-batches 2 --lora-rank 2";
        works(at, &format!("{line} --init-from {base} --save {save}"));
        let said = works(at, &format!("export {save} -o {save}-adapter --adapter"));
        assert_eq!(said.contains("which is no Hugging Face folder, so"), noted, "{said}");
    }
}

#[test]
fn inspect_says_what_it_checked_and_verifies_all_where_it_is_asked_to() {
    let dir = model();
    let at = dir.path();
    let said = works(at, "inspect saved");
    assert!(
        said.contains("checked: the manifest and the files' sizes; not checked: what"),
        "{said}"
    );
    let said = works(at, "inspect saved --verify");
    assert!(said.contains("every byte of all files"), "{said}");
    let step = fs::read_dir(at.join("saved/step-000001")).unwrap().map(|e| e.unwrap().path());
    let state = step.into_iter().find(|path| path.extension().is_none_or(|end| end != "json"));
    let state = state.expect("a file of a rank");
    let mut bytes = fs::read(&state).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&state, bytes).unwrap();
    works(at, "inspect saved");
    let said = refused(at, "inspect saved --verify");
    assert!(said.contains(&state.file_name().unwrap().to_string_lossy().into_owned()), "{said}");
    let said = works(at, "inspect hf");
    assert!(said.contains("not checked: the numbers in them (--verify does)"), "{said}");
    let said = works(at, "inspect hf --verify");
    assert!(said.contains("and that all numbers are finite"), "{said}");
    let mut weights = fs::read(at.join("hf/model.safetensors")).unwrap();
    let end = weights.len();
    weights[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(at.join("hf/model.safetensors"), weights).unwrap();
    let said = refused(at, "inspect hf --verify");
    assert!(said.contains("is not finite; get it again"), "{said}");
}
