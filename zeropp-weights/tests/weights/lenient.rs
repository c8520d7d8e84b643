//! Files of weights may have some tensors beside a model's own, and some facts in their tables,
//! without being another model's.

use proptest::prelude::*;
use serde_json::json;
use zeropp_weights::{Family, Import, ParameterShape, Weights};

use super::common::{F32s, folder, safetensors};

const INDEX: &str = "model.safetensors.index.json";
const EMBED: &str = "model.embed_tokens.weight";
const UP: &str = "model.layers.0.mlp.up_proj.weight";
const FREQUENCIES: &str = "model.layers.0.self_attn.rotary_emb.inv_freq";

/// A tied model of two parameters, out of a folder of two files.
fn imported(first: &[F32s], second: &[F32s], map: &[(&str, &str)]) -> Result<Import, String> {
    let map: serde_json::Map<String, serde_json::Value> =
        map.iter().map(|(name, file)| ((*name).to_owned(), json!(file))).collect();
    let index = json!({ "metadata": { "total_size": 1 }, "weight_map": map }).to_string();
    let dir = folder(&[
        ("1.safetensors", safetensors(first)),
        ("2.safetensors", safetensors(second)),
        (INDEX, index.into_bytes()),
    ]);
    let weights = Weights::open(dir.path()).map_err(|e| e.to_string())?;
    let shape =
        |name: &str, shape: &[usize]| ParameterShape { name: name.into(), shape: shape.into() };
    let parameters = [shape(EMBED, &[3, 2]), shape(UP, &[2, 3])];
    Import::new(weights, Family::Llama, &parameters, 3).map_err(|e| e.to_string())
}

#[test]
fn a_tensor_that_the_index_does_not_list_is_used_or_refused_as_another_models() {
    let embed = |name| F32s(name, &[3, 2], 0.0);
    let up = || F32s(UP, &[3, 2], 0.0);
    let map = [(EMBED, "1.safetensors"), (UP, "2.safetensors")];
    let frequencies = F32s(FREQUENCIES, &[1], 0.0);
    // Constants, a tied head's copy, and a weight that is only missing in the list.
    imported(&[embed(EMBED), frequencies], &[up(), embed("lm_head.weight")], &map).unwrap();
    imported(
        &[embed(EMBED), up()],
        &[F32s(FREQUENCIES, &[1], 0.0)],
        &[(EMBED, "1.safetensors"), (FREQUENCIES, "2.safetensors")],
    )
    .unwrap();
    let other = F32s("lm_head.weight", &[3, 2], 7.0);
    let error = imported(&[embed(EMBED)], &[up(), other], &map).unwrap_err();
    assert!(error.contains("lm_head.weight is not the embedding"), "{error}");
    let error = imported(&[embed(EMBED)], &[up(), embed("model.x")], &map).unwrap_err();
    assert!(error.contains("its tensor model.x [3, 2] is not in the model"), "{error}");
    let error = imported(&[embed(EMBED)], &[up(), embed(EMBED)], &map).unwrap_err();
    let says = "2.safetensors: its tensor model.embed_tokens.weight is in 1.safetensors by";
    assert!(error.contains(says) && !error.contains("damaged"), "{error}");
}

#[test]
fn constants_and_a_tied_head_may_be_listed_and_not_there() {
    let files = ([F32s(EMBED, &[3, 2], 0.0)], [F32s(UP, &[3, 2], 0.0)]);
    let map = [
        (EMBED, "1.safetensors"),
        (UP, "2.safetensors"),
        (FREQUENCIES, "2.safetensors"),
        ("lm_head.weight", "1.safetensors"),
    ];
    imported(&files.0, &files.1, &map).unwrap();
    let error = imported(&files.0, &[], &map).unwrap_err();
    assert!(error.contains("2.safetensors: it lacks the tensor model.layers.0.mlp.up"), "{error}");
}

#[test]
fn names_of_compiled_modules_are_those_of_the_modules() {
    for name in ["_orig_mod.model.layers.0.mlp.up_proj", "model.layers.0._orig_mod.mlp.up_proj"] {
        let up = format!("{name}.weight");
        let map = [(EMBED, "1.safetensors"), (up.as_str(), "2.safetensors")];
        let import =
            imported(&[F32s(EMBED, &[3, 2], 0.0)], &[F32s(&up, &[3, 2], 0.0)], &map).unwrap();
        let mut values = [0.0; 6];
        import.read(UP, 0, &mut values).unwrap();
        assert_eq!(values, [0.0, 2.0, 4.0, 1.0, 3.0, 5.0]);
    }
}

proptest! {
    // A seed of its own in every run; a failure prints its input.
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_key_of_an_index_that_is_not_known_is_refused_by_name(key in "[a-z_]{1,12}") {
        prop_assume!(key != "metadata" && key != "weight_map");
        let index = json!({ "weight_map": { EMBED: "1.safetensors" }, &key: 1 }).to_string();
        let file = safetensors(&[F32s(EMBED, &[3, 2], 0.0)]);
        let dir = folder(&[("1.safetensors", file), (INDEX, index.into_bytes())]);
        let error = Weights::open(dir.path()).unwrap_err().to_string();
        prop_assert!(error.contains(&format!("unknown field `{key}`")), "{}", error);
    }
}
