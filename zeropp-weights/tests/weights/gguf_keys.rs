//! Keys of GGUF files: each used, known to change nothing, or refused by name.

use proptest::prelude::*;
use serde_json::{Value, json};
use zeropp_weights::Weights;

use super::common::{Gguf, folder};

/// A llama of heads of 4 elements.
fn llama() -> Gguf {
    Gguf::new()
        .word("general.architecture", "llama")
        .number("llama.block_count", 1)
        .number("llama.context_length", 64)
        .number("llama.embedding_length", 8)
        .number("llama.feed_forward_length", 8)
        .number("llama.attention.head_count", 2)
}

fn config(gguf: Gguf) -> Result<Value, String> {
    let bytes = gguf.f32s("token_embd.weight", &[3, 8], &[0.25; 24]).bytes();
    let dir = folder(&[("m.gguf", bytes)]);
    let weights = Weights::open(&dir.path().join("m.gguf")).map_err(|e| e.to_string())?;
    weights.gguf_config().map(|config| config.expect("a llama")).map_err(|e| e.to_string())
}

#[test]
fn a_tensor_of_experts_has_as_many_as_the_key_says() {
    let experts = |count: u32, shape: &[usize], data: &[f32]| {
        config(
            llama().number("llama.expert_count", count).number("llama.expert_used_count", 2).f32s(
                "blk.0.ffn_up_exps.weight",
                shape,
                data,
            ),
        )
    };
    assert!(experts(4, &[4, 2, 8], &[0.5; 64]).is_ok());
    for (count, shape, data) in [
        (3, [4, 2, 8], &[0.5; 64][..]),
        (0, [1 << 40, 0, 8], &[]),
        (u32::MAX, [u32::MAX as usize, 0, 8], &[]),
    ] {
        let said = experts(count, &shape, data).unwrap_err();
        let expected = format!("blk.0.ffn_up_exps.weight has {} experts", shape[0]);
        assert!(said.contains(&expected) || said.contains("dimension"), "{said}");
    }
}

trait Keys {
    fn float(self, key: &str, value: f32) -> Self;
}

impl Keys for Gguf {
    fn float(self, key: &str, value: f32) -> Gguf {
        self.key(key, 6, &value.to_le_bytes())
    }
}

/// As llama.cpp reads them: a factor without a type is a linear one, and 0 is none.
#[test]
fn a_factor_of_rope_without_a_type_is_linear() {
    let scaling = |gguf: Gguf| config(gguf).unwrap().get("rope_scaling").cloned();
    let linear = Some(json!({ "rope_type": "linear", "factor": 4.0 }));
    let (factor, old, kind) =
        ("llama.rope.scaling.factor", "llama.rope.scale_linear", "llama.rope.scaling.type");
    assert_eq!(scaling(llama()), None);
    assert_eq!(scaling(llama().float(factor, 4.0)), linear);
    assert_eq!(scaling(llama().float(old, 4.0)), linear);
    assert_eq!(scaling(llama().float(old, 4.0).float(factor, 4.0)), linear);
    assert_eq!(scaling(llama().word(kind, "linear").float(factor, 4.0)), linear);
    assert_eq!(scaling(llama().word(kind, "none").float(factor, 4.0)), None);
    assert_eq!(scaling(llama().float(factor, 0.0)), None);
    assert_eq!(scaling(llama().word(kind, "linear")), None);
    let original = "llama.rope.scaling.original_context_length";
    let yarn = llama().word(kind, "yarn").float(factor, 4.0).number(original, 16);
    let expected =
        json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16 });
    assert_eq!(scaling(yarn), Some(expected));
    for (gguf, says) in [
        (llama().float(old, 4.0).float(factor, 2.0), "scale_linear is 4, and rope.scaling.factor"),
        (llama().word(kind, "longrope"), "its llama.rope.scaling.type is \"longrope\", and none,"),
        (llama().float(factor, f32::NAN), "factor is NaN, which is no number"),
        (llama().word(factor, "4"), "factor is \"4\", which is no number"),
    ] {
        let error = config(gguf).unwrap_err();
        assert!(error.contains(says), "{says}: {error}");
    }
}

#[test]
fn keys_that_ask_for_another_model_are_refused_by_name() {
    for (gguf, says) in [
        (
            llama().number("llama.expert_used_count", 2),
            "its llama.expert_used_count is 2, and a block has one MLP",
        ),
        (
            llama().number("llama.expert_count", 8).number("llama.expert_gating_func", 2),
            "its llama.expert_gating_func is 2, and scores are a softmax, 1, here",
        ),
        (
            llama().number("llama.expert_count", 8).float("llama.expert_weights_scale", 2.5),
            "its llama.expert_weights_scale is 2.5, and nothing is scaled there here",
        ),
        (
            llama().number("llama.expert_count", 8).key("llama.expert_weights_norm", 7, &[0]),
            "its llama.expert_weights_norm is false, and Mixtral divides by their sum",
        ),
        (
            llama().number("llama.expert_shared_count", 1),
            "its llama.expert_shared_count is 1, and that key is not known",
        ),
        (
            Gguf::new()
                .word("general.architecture", "dots1")
                .number("dots1.attention.head_count", 2)
                .number("dots1.expert_gating_func", 1),
            "its dots1.expert_gating_func is 1, and scores are sigmoids, 2, here",
        ),
        (llama().float("llama.logit_scale", 2.0), "its llama.logit_scale is 2, and nothing is"),
        (llama().float("llama.attention.scale", 0.25), "its llama.attention.scale is 0.25, and"),
        (
            llama().number("llama.rope.dimension_count", 2),
            "dimension_count is 2, where a head has 4",
        ),
        (
            llama().number("llama.attention.value_length", 2),
            "value_length is 2, where a head has 4",
        ),
        (llama().key("llama.attention.causal", 7, &[0]), "causal is false, and tokens see none"),
        (llama().word("llama.feed_forward_length", "8"), "is there twice"),
        (llama().float("tokenizer.ggml.eos_token_id", 2.0), "eos_token_id is 2, which is no eos_"),
    ] {
        let error = config(gguf).unwrap_err();
        assert!(error.contains(says), "{says}: {error}");
    }
    let same = llama()
        .number("llama.expert_count", 0)
        .float("llama.attention.scale", 0.5)
        .number("llama.rope.dimension_count", 4)
        .number("llama.vocab_size", 3);
    assert_eq!(config(same), config(llama()));
}

proptest! {
    // A seed of its own in every run; a failure prints its input.
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_key_of_the_architecture_that_is_not_known_is_refused_by_name(
        key in "[a-z_]{1,8}(\\.[a-z_]{1,8}){0,2}", value: f32,
    ) {
        let key = format!("llama.x{key}");
        let error = config(llama().float(&key, value)).unwrap_err();
        prop_assert!(error.contains(&format!("its {key} is ")), "{}", error);
        prop_assert!(error.contains("and that key is not known"), "{}", error);
    }
}
