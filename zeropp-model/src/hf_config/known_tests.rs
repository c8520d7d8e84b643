//! Fields at random and values of other types, in every object that is read: refused by name, or
//! known to change nothing.

use std::fs;

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::fields::{FieldType, Known};
use super::keys::{EVERY, GPT2, HARMLESS, LLAMA, MOE, ROPE};
use super::*;

fn llama() -> Value {
    json!({
        "model_type": "llama", "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6, "vocab_size": 300, "max_position_embeddings": 128,
        "rope_scaling": { "rope_type": "yarn", "factor": 4.0 },
    })
}

fn gpt2() -> Value {
    json!({
        "model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128,
        "layer_norm_epsilon": 1e-5, "vocab_size": 300, "activation_function": "gelu_new",
    })
}

fn mixtral() -> Value {
    with(&llama(), "model_type", json!("mixtral"))
}

fn refusal(config: &Value) -> Option<String> {
    parse(&config.to_string(), Path::new("config.json")).err().map(|error| error.to_string())
}

fn with(object: &Value, field: &str, value: Value) -> Value {
    let mut object = object.as_object().unwrap().clone();
    object.insert(field.into(), value);
    Value::Object(object)
}

/// A value that is not of this kind.
fn wrong(kind: FieldType) -> Option<Value> {
    match kind {
        FieldType::Size | FieldType::Count => Some(json!(1.5)),
        FieldType::Number => Some(json!("many")),
        FieldType::Share => Some(json!(2)),
        FieldType::Switch => Some(json!(1)),
        FieldType::Word | FieldType::Object | FieldType::List => Some(json!(3)),
        FieldType::Ids => Some(json!([1, "two"])),
        FieldType::Any => None,
    }
}

#[test]
fn a_field_with_a_value_of_another_type_is_refused_by_name() {
    let families = [(llama(), LLAMA), (gpt2(), GPT2), (mixtral(), MOE)];
    let cases = families
        .iter()
        .flat_map(|(config, own)| EVERY.iter().chain(*own).map(move |field| (config, field)));
    for (config, (field, kind)) in cases {
        let Some(value) = wrong(*kind) else { continue };
        let error = refusal(&with(config, field, value)).expect(field);
        assert!(error.starts_with(&format!("config.json: {field}: ")), "{error}");
    }
    for (field, kind) in ROPE {
        let Some(value) = wrong(*kind) else { continue };
        let rope = with(&llama()["rope_scaling"], field, value);
        let error = refusal(&with(&llama(), "rope_scaling", rope)).expect(field);
        assert!(error.starts_with(&format!("config.json: rope_scaling.{field}: ")), "{error}");
    }
}

#[test]
fn a_long_value_is_not_printed_whole() {
    let error = refusal(&with(&llama(), "hidden_act", json!("x".repeat(1 << 19)))).unwrap();
    assert!(error.len() < 300 && error.contains("hidden_act"), "{error}");
    let error = refusal(&with(&llama(), &"x".repeat(1 << 19), json!(1))).unwrap();
    assert!(error.len() < 400, "{error}");
}

#[test]
fn a_text_ends_where_the_files_of_a_folder_say_or_they_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, value: Value| {
        fs::write(dir.path().join(name), value.to_string()).unwrap();
        ends_in(dir.path()).map_err(|error| error.to_string())
    };
    assert_eq!(ends_in(dir.path()).unwrap(), [0; 0]);
    assert_eq!(write("config.json", with(&llama(), "eos_token_id", json!(2))), Ok(vec![2]));
    let generation = json!({ "eos_token_id": [7, 9], "temperature": 0.6, "do_sample": true });
    assert_eq!(write("generation_config.json", generation.clone()), Ok(vec![7, 9]));
    let none = with(&generation, "eos_token_id", Value::Null);
    assert_eq!(write("generation_config.json", none), Ok(vec![2]));
    for (field, value, says) in [
        ("eos_token_id", json!("</s>"), "eos_token_id: \"</s>\" is neither a token id nor"),
        ("stop_at", json!(3), "stop_at: 3 is not known"),
    ] {
        let error = write("generation_config.json", with(&generation, field, value)).unwrap_err();
        assert!(error.contains(&format!("generation_config.json: {says}")), "{error}");
    }
    fs::write(dir.path().join("generation_config.json"), "{").unwrap();
    let error = ends_in(dir.path()).unwrap_err().to_string();
    assert!(error.contains("generation_config.json: not a JSON object"), "{error}");
}

fn is_known(field: &str, lists: &[Known<'_>]) -> bool {
    lists.iter().flat_map(|list| list.iter()).any(|(known, _)| *known == field)
}

proptest! {
    // A seed of its own in every run; a failure prints its input.
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_field_that_is_not_known_is_refused_by_name(
        field in "[a-z_]{1,12}", number: i32, kind in 0..3,
    ) {
        let value = [json!(number), json!(null), json!({ "a": number })][kind as usize].clone();
        for (config, own) in [(llama(), LLAMA), (gpt2(), GPT2)] {
            prop_assume!(!is_known(&field, &[EVERY, own]) && !HARMLESS.contains(&field.as_str()));
            let error = refusal(&with(&config, &field, value.clone())).unwrap_or_default();
            let says = format!("config.json: {field}: {value} is not known, and may change");
            prop_assert!(error.starts_with(&says), "{}", error);
        }
        prop_assume!(!is_known(&field, &[ROPE]));
        for object in ["rope_scaling", "rope_parameters"] {
            let rope: Map<String, Value> = [(field.clone(), json!(number))].into_iter().collect();
            let error = refusal(&with(&llama(), object, Value::Object(rope))).unwrap_or_default();
            let says = format!("config.json: {object}.{field}: {number} is not known");
            prop_assert!(error.starts_with(&says), "{}", error);
        }
    }
}
