//! Damaged and hostile files: each refused with its name and what is wrong, none read beyond its
//! end, none that takes memory for what it only claims.

use proptest::prelude::*;
use serde_json::json;
use zeropp_weights::{Family, Import, ParameterShape, Weights};

use super::common::{F32s, Gguf, folder, safetensors, text, with_header};

/// Opens the file of this content, which is to be refused.
fn refused(name: &str, bytes: Vec<u8>) -> String {
    let dir = folder(&[(name, bytes)]);
    let error = Weights::open(&dir.path().join(name)).unwrap_err().to_string();
    assert!(error.contains(name), "{error} does not name the file");
    error
}

fn reported(cases: Vec<(&str, String)>) {
    for (message, error) in cases {
        assert!(error.contains(message), "{message:?} is not in: {error}");
        assert!(error.contains("; "), "{error} says nothing that would work");
    }
}

#[test]
fn damaged_safetensors_are_refused_by_name() {
    let good = safetensors(&[F32s("a", &[2, 3], 0.0), F32s("b", &[4], 9.0)]);
    let file = |bytes| refused("w.safetensors", bytes);
    let claims = |n: u64| [&n.to_le_bytes(), &good[8..]].concat();
    let header = |text: &str| file(with_header(text, &[0; 8]));
    let tensor = |shape, offsets| {
        let info = json!({ "dtype": "F32", "shape": shape, "data_offsets": offsets });
        header(&json!({ "a": info }).to_string())
    };
    reported(vec![
        ("too short", file(vec![1, 2, 3])),
        ("its tensors take 40 bytes, and 39 follow", file(good[..good.len() - 1].to_vec())),
        ("and 41 follow", file([good.clone(), vec![0]].concat())),
        ("its header claims 1152921504606846976", file(claims(1 << 60))),
        ("its header claims 18446744073709551615", file(claims(u64::MAX))),
        // The bits of a NaN where the length of the header is.
        ("its header claims 9221120237041090560", file(claims(f64::NAN.to_bits()))),
        ("is not safetensors'", header("{\"a\": ")),
        ("is not safetensors'", header(&"[".repeat(100_000))),
        ("is not safetensors'", tensor(json!([2]), json!([0, 4]))),
        ("is not safetensors'", tensor(json!([1u64 << 60, 1u64 << 60]), json!([0, 8]))),
        ("is not safetensors'", tensor(json!([2]), json!([8, 0]))),
        ("is not safetensors'", {
            let info = |offsets| json!({ "dtype": "F32", "shape": [1], "data_offsets": offsets });
            header(&json!({ "a": info([0, 4]), "b": info([0, 4]) }).to_string())
        }),
    ]);
}

#[test]
fn folders_whose_index_leads_astray_are_refused_by_name() {
    let one = || safetensors(&[F32s("a", &[2], 0.0)]);
    let open = |index: serde_json::Value| {
        let index = index.to_string().into_bytes();
        let dir = folder(&[("model.safetensors.index.json", index), ("x.safetensors", one())]);
        Weights::open(dir.path()).unwrap_err().to_string()
    };
    let map = |map: serde_json::Value| open(json!({ "weight_map": map }));
    reported(vec![
        ("\"../x.safetensors\", which is not beside it", map(json!({ "a": "../x.safetensors" }))),
        ("which is not beside it", map(json!({ "a": "/etc/passwd" }))),
        ("which is not beside it", map(json!({ "a": "" }))),
        ("gone.safetensors: cannot be read", map(json!({ "a": "gone.safetensors" }))),
        ("x.safetensors: it lacks the tensor b", {
            map(json!({ "a": "x.safetensors", "b": "x.safetensors" }))
        }),
        ("x.safetensors: it lacks the tensor b", map(json!({ "b": "x.safetensors" }))),
        ("it is not an index of weights (unknown field `weightmap`", {
            open(json!({ "weight_map": { "a": "x.safetensors" }, "weightmap": {} }))
        }),
        ("it lists no file", map(json!({}))),
        ("it is not an index", open(json!({ "weight_map": [1, 2] }))),
        ("neither model.safetensors nor", {
            Weights::open(folder(&[]).path()).unwrap_err().to_string()
        }),
        ("may run code", {
            let dir = folder(&[("pytorch_model.bin", vec![1])]);
            Weights::open(dir.path()).unwrap_err().to_string()
        }),
    ]);
}

#[test]
fn damaged_gguf_files_are_refused_by_name() {
    let file = |gguf: Gguf| refused("m.gguf", gguf.bytes());
    let f32s = |n: usize| vec![1.0; n];
    let good = || Gguf::new().word("general.name", "x").f32s("a", &[8], &f32s(8));
    let raw = |at: usize, bytes: &[u8]| {
        let mut whole = good().bytes();
        whole[at..at + bytes.len()].copy_from_slice(bytes);
        refused("m.gguf", whole)
    };
    let huge = (1u64 << 60).to_le_bytes();
    let llama = || Gguf::new().word("general.architecture", "llama");
    let heads = "llama.attention.head_count";
    let blocks = |n: u32| file(llama().number(heads, 2).number("llama.block_count", n));
    reported(vec![
        ("its GGUF version is 50331648", raw(4, &3u32.to_be_bytes())),
        ("it is damaged", raw(8, &huge)),
        ("it is damaged", raw(16, &huge)),
        ("claims 1152921504606846976 bytes", raw(24, &huge)),
        ("of 0 on", refused("m.gguf", good().bytes()[..96].to_vec())),
        ("is there twice", file(good().f32s("a", &[8], &f32s(8)))),
        ("overlaps the one before", file(good().row("b", &[8], 0, 0))),
        ("begins at byte 4", file(good().row("b", &[1], 0, 4))),
        ("from 64 of 32 on", file(good().row("b", &[8], 0, 64))),
        ("from 9223372036854775808 of 32 on", file(good().row("b", &[8], 0, 1 << 63))),
        ("impossible shape", file(good().row("b", &[1 << 60, 1 << 60], 0, 32))),
        ("9 dimensions", file(good().row("b", &[1; 9], 0, 32))),
        ("unknown type 77", file(good().row("b", &[8], 77, 32))),
        ("Q4_0 needs 32s", file(good().row("b", &[31], 2, 32))),
        ("its llama.block_count is 16385; a model has 1 to 16384", blocks(16_385)),
        ("its llama.block_count is 0;", blocks(0)),
        ("not a power of two", file(good().number("general.alignment", 24))),
        ("is there twice", file(good().word("general.name", "y"))),
        ("has the unknown type 99", file(good().key("k", 99, &[]))),
        ("nested too deep", {
            let mut nested = Vec::new();
            for _ in 0..9 {
                nested.extend([&9u32.to_le_bytes()[..], &1u64.to_le_bytes()].concat());
            }
            file(good().key("k", 9, &nested))
        }),
        (" are left", {
            let array = [&6u32.to_le_bytes()[..], &(1u64 << 62).to_le_bytes()].concat();
            file(good().key("k", 9, &array))
        }),
        ("k at byte 100 claims", {
            let strings = [&8u32.to_le_bytes()[..], &u64::MAX.to_le_bytes(), &text("a")].concat();
            file(good().key("k", 9, &strings))
        }),
        ("head_count is missing", file(llama())),
        ("blk.0.attn_x.weight is unknown", {
            file(llama().number(heads, 2).f32s("blk.0.attn_x.weight", &[8], &f32s(8)))
        }),
        ("is not 3 heads of rows", {
            file(llama().number(heads, 3).f32s("blk.0.attn_q.weight", &[8, 1], &f32s(8)))
        }),
        ("is not 0 heads of rows", {
            file(llama().number(heads, 0).f32s("blk.0.attn_q.weight", &[8, 1], &f32s(8)))
        }),
        ("rope_freqs", file(llama().number(heads, 2).f32s("rope_freqs.weight", &[8], &f32s(8)))),
    ]);
}

#[test]
fn keys_and_names_of_gguf_files_beyond_any_use_are_refused_by_name() {
    let file = |gguf: Gguf| refused("m.gguf", gguf.bytes());
    let good = || Gguf::new().word("general.name", "x").f32s("a", &[8], &[1.0; 8]);
    let llama = || Gguf::new().word("general.architecture", "llama");
    let heads = "llama.attention.head_count";
    reported(vec![
        ("head_count_kv is no whole number", {
            file(llama().number(heads, 2).word("llama.attention.head_count_kv", "two"))
        }),
        ("it is one of 3 parts of a split GGUF; merge them with llama-gguf-split", {
            file(good().number("split.count", 3))
        }),
        ("claims 16777216 bytes, more than 1024", {
            let name = "n".repeat(1 << 24);
            file(good().row(&name, &[8], 0, 32))
        }),
        ("claims 2000 bytes, more than 1024", { file(good().number(&"k".repeat(2000), 1)) }),
    ]);
}

/// A model of two parameters from a file of these tensors.
fn imported(tensors: &[F32s], vocabulary: usize) -> Result<Import, String> {
    let dir = folder(&[("model.safetensors", safetensors(tensors))]);
    let weights = Weights::open(dir.path()).unwrap();
    let shape =
        |name: &str, shape: &[usize]| ParameterShape { name: name.into(), shape: shape.into() };
    let parameters = [
        shape("model.embed_tokens.weight", &[4, 2]),
        shape("model.layers.0.mlp.up_proj.weight", &[2, 3]),
    ];
    Import::new(weights, Family::Llama, &parameters, vocabulary).map_err(|e| e.to_string())
}

#[test]
fn weights_of_another_model_are_refused_by_tensor() {
    let embedding = F32s("model.embed_tokens.weight", &[3, 2], 0.0);
    let up = || F32s("model.layers.0.mlp.up_proj.weight", &[3, 2], 0.0);
    let with = |tensors: Vec<F32s>| imported(&tensors, 3);
    let embed = || F32s(embedding.0, embedding.1, 0.0);
    assert!(with(vec![embed(), up()]).is_ok());
    let error = |tensors| with(tensors).unwrap_err();
    let missing = "it has no tensor model.layers.0.mlp.up_proj.weight";
    let across = F32s("model.layers.0.mlp.up_proj.weight", &[2, 3], 0.0);
    let bias = F32s("model.layers.0.mlp.up_proj.bias", &[3], 0.0);
    reported(vec![
        (missing, error(vec![embed()])),
        ("up_proj.weight is [2, 3], and the model needs [3, 2]", error(vec![embed(), across])),
        ("up_proj.bias [3] is not in the model", error(vec![embed(), up(), bias])),
        ("lm_head.weight is not the embedding", {
            error(vec![embed(), up(), F32s("lm_head.weight", &[3, 2], 5.0)])
        }),
        ("is [3, 2], and the model needs [4, 2]", imported(&[embed(), up()], 4).unwrap_err()),
    ]);
    // A tied head that is saved all the same, and a constant.
    let tied = F32s("lm_head.weight", &[3, 2], 0.0);
    let frequencies = F32s("model.layers.0.self_attn.rotary_emb.inv_freq", &[2], 0.0);
    assert!(with(vec![embed(), up(), tied, frequencies]).is_ok());
}

#[test]
fn a_missing_a_surplus_and_a_turned_expert_are_refused_by_tensor() {
    let shape =
        |name: &str, shape: &[usize]| ParameterShape { name: name.into(), shape: shape.into() };
    let parameters = [
        shape("model.embed_tokens.weight", &[3, 2]),
        shape("model.layers.0.mlp.experts.up_proj.weight", &[2, 2, 3]),
    ];
    let named = |expert| format!("model.layers.0.mlp.experts.{expert}.up_proj.weight");
    let with = |shapes: &[&[usize]]| {
        let names: Vec<_> = (0..shapes.len()).map(named).collect();
        let experts = names.iter().zip(shapes).map(|(name, shape)| F32s(name, shape, 0.0));
        let embedding = F32s("model.embed_tokens.weight", &[3, 2], 0.0);
        let tensors: Vec<_> = std::iter::once(embedding).chain(experts).collect();
        let dir = folder(&[("model.safetensors", safetensors(&tensors))]);
        let weights = Weights::open(dir.path()).unwrap();
        Import::new(weights, Family::Llama, &parameters, 3).map_err(|e| e.to_string())
    };
    let (right, turned): (&[usize], &[usize]) = (&[3, 2], &[2, 3]);
    assert!(with(&[right; 2]).is_ok());
    let error = |shapes| with(shapes).unwrap_err();
    let missing = format!("it has no tensor {}", named(1));
    let surplus = format!("{} [3, 2] is not in the model", named(2));
    let across = format!("{} is [2, 3], and the model needs [3, 2]", named(1));
    reported(vec![
        (&missing, error(&[right])),
        (&surplus, error(&[right; 3])),
        (&across, error(&[right, turned])),
    ]);
}

#[test]
fn numbers_that_are_not_finite_are_refused_by_tensor() {
    let tensors = [
        F32s("model.embed_tokens.weight", &[3, 2], 0.0),
        F32s("model.layers.0.mlp.up_proj.weight", &[3, 2], f32::NAN),
    ];
    let import = imported(&tensors, 3).unwrap();
    let error = import.read("model.layers.0.mlp.up_proj.weight", 0, &mut [0.0; 6]).unwrap_err();
    assert!(error.to_string().contains("up_proj.weight has numbers that are not finite"));
    // Rows beyond the vocabulary are zero.
    let mut embedding = [7.0; 8];
    import.read("model.embed_tokens.weight", 0, &mut embedding).unwrap();
    assert_eq!(embedding, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 0.0]);
    import.read("model.embed_tokens.weight", 7, &mut embedding[..1]).unwrap();
    assert_eq!(embedding[0], 0.0);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Any change of any bytes is read or refused, and nothing panics or runs over.
    #[test]
    fn changed_files_are_read_or_refused(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut: prop::sample::Index, is_cut: bool, is_gguf: bool,
    ) {
        let mut bytes = match is_gguf {
            true => Gguf::new()
                .word("general.architecture", "llama")
                .number("llama.attention.head_count", 2)
                .f32s("blk.0.attn_q.weight", &[8, 2], &[0.5; 16])
                .f32s("token_embd.weight", &[3, 2], &[0.25; 6])
                .bytes(),
            false => safetensors(&[F32s("a", &[2, 3], 0.0), F32s("b", &[4], 9.0)]),
        };
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if is_cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let dir = folder(&[("w", bytes)]);
        if let Ok(weights) = Weights::open(&dir.path().join("w")) {
            for tensor in weights.tensors() {
                let mut values = vec![0.0; tensor.elements()];
                let _ = weights.read(tensor, 0, &mut values);
            }
        }
    }
}
