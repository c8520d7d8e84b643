//! Weights in, as a model has them, and out again.

use std::path::Path;

use proptest::prelude::*;
use zeropp_weights::export::{self, Exported};
use zeropp_weights::{
    Container, Family, GgufValue, Import, ParameterShape, StoreAs, Tensor, Weights, WeightsError,
    write_folder,
};

use super::common::{Gguf, folder};

fn shape(name: &str, shape: &[usize]) -> ParameterShape {
    ParameterShape { name: name.into(), shape: shape.into() }
}

/// A LLaMA of one block and h = 6, with 5 ids in 8 rows.
fn llama() -> Vec<ParameterShape> {
    vec![
        shape("model.embed_tokens.weight", &[8, 6]),
        shape("model.layers.0.self_attn.q_proj.weight", &[6, 40]),
        shape("model.layers.0.self_attn.q_proj.bias", &[40]),
        shape("model.layers.0.mlp.down_proj.weight", &[33, 6]),
        shape("model.norm.weight", &[6]),
        shape("lm_head.weight", &[8, 6]),
    ]
}

/// Elements that identify their tensor and place, exact in bfloat16.
fn element(tensor: usize, i: usize) -> f32 {
    ((i * 7 + tensor * 31) % 251) as f32 / 8.0 - 9.0
}

fn write(folder: &Path, tensors: &[Tensor], limit: usize) {
    let n = |i: usize| tensors[i].shape.iter().product::<usize>();
    let values =
        |i: usize| Ok::<_, WeightsError>((0..n(i)).map(|j| element(i, j)).collect::<Vec<_>>());
    write_folder(folder, tensors, limit, &[("config.json", b"{}".to_vec())], values).unwrap();
}

/// All bytes of all tensors by name.
fn bits(weights: &Weights) -> Vec<(String, Vec<usize>, Vec<u32>)> {
    let read = |tensor: &zeropp_weights::StoredTensor| {
        let mut values = vec![0.0; tensor.elements()];
        weights.read(tensor, 0, &mut values).unwrap();
        let bits = values.iter().map(|x: &f32| x.to_bits()).collect();
        (tensor.name.clone(), tensor.shape.clone(), bits)
    };
    weights.tensors().map(read).collect()
}

#[test]
fn weights_round_trip_with_any_limit_and_type() {
    let dir = tempfile::tempdir().unwrap();
    for (i, (limit, store_as, files)) in
        [(1 << 30, StoreAs::F32, 1), (600, StoreAs::F32, 5), (1, StoreAs::Bf16, 6)]
            .into_iter()
            .enumerate()
    {
        let plan = export::tensors(Family::Llama, &llama(), 5, store_as);
        let tensors: Vec<Tensor> = plan.iter().map(|e| e.tensor.clone()).collect();
        let (first, second) = (dir.path().join(format!("a{i}")), dir.path().join(format!("b{i}")));
        write(&first, &tensors, limit);
        let names = std::fs::read_dir(&first).unwrap().map(|e| e.unwrap().path());
        let shards = names.filter(|name| name.extension().is_some_and(|e| e == "safetensors"));
        assert_eq!(shards.count(), files);
        let import =
            Import::new(Weights::open(&first).unwrap(), Family::Llama, &llama(), 5).unwrap();
        let values = |j: usize| {
            let Exported { parameter, .. } = &plan[j];
            let mut values = vec![0.0; plan[j].elements()];
            import.read(parameter, 0, &mut values)?;
            Ok::<_, WeightsError>(plan[j].arranged(values))
        };
        write_folder(&second, &tensors, limit, &[], values).unwrap();
        let [a, b] = [&first, &second].map(|folder| bits(&Weights::open(folder).unwrap()));
        assert!(a == b, "limit {limit}");
        assert_eq!(Weights::open(&first).unwrap().container(), Container::Folder);
    }
}

#[test]
fn a_linear_map_is_transposed_and_rows_that_are_no_ids_are_zero() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("w");
    let plan = export::tensors(Family::Llama, &llama(), 5, StoreAs::F32);
    let tensors: Vec<Tensor> = plan.iter().map(|e| e.tensor.clone()).collect();
    assert_eq!(tensors[1].shape, [40, 6]);
    assert_eq!(tensors[0].shape, [5, 6]);
    write(&folder, &tensors, usize::MAX);
    let import = Import::new(Weights::open(&folder).unwrap(), Family::Llama, &llama(), 5).unwrap();
    let mut q = vec![0.0; 240];
    import.read("model.layers.0.self_attn.q_proj.weight", 0, &mut q).unwrap();
    for (i, x) in q.iter().enumerate() {
        assert_eq!(*x, element(1, i % 40 * 6 + i / 40));
    }
    let mut embedding = vec![1.0; 48];
    import.read("model.embed_tokens.weight", 0, &mut embedding).unwrap();
    assert!(embedding[30..].iter().all(|x| *x == 0.0) && embedding[29] == element(0, 29));
}

#[test]
fn gpt_2_is_read_with_and_without_its_prefix_and_without_its_masks() {
    let parameters = [shape("wte.weight", &[4, 2]), shape("h.0.attn.c_attn.weight", &[2, 6])];
    for prefix in ["transformer.", ""] {
        let dir = tempfile::tempdir().unwrap();
        let names = ["wte.weight", "h.0.attn.c_attn.weight", "h.0.attn.bias"];
        let shapes: [&[usize]; 3] = [&[4, 2], &[2, 6], &[3]];
        let tensors: Vec<Tensor> = names
            .iter()
            .zip(shapes)
            .map(|(name, shape)| Tensor {
                name: format!("{prefix}{name}"),
                shape: shape.into(),
                store_as: StoreAs::F32,
            })
            .collect();
        write(&dir.path().join("w"), &tensors, usize::MAX);
        let weights = Weights::open(&dir.path().join("w")).unwrap();
        let import = Import::new(weights, Family::Gpt2, &parameters, 4).unwrap();
        let mut values = vec![0.0; 12];
        import.read("h.0.attn.c_attn.weight", 0, &mut values).unwrap();
        assert!(values.iter().enumerate().all(|(i, x)| *x == element(1, i)));
    }
}

/// llama.cpp stores rows 0, d/2, 1, d/2 + 1 … of each head of q and k.
#[test]
fn llamas_queries_and_keys_come_in_their_own_order_from_gguf() {
    let (heads, head, columns) = (2, 6, 3);
    let named: Vec<f32> = (0..heads * head * columns).map(|i| i as f32).collect();
    let mut stored = Vec::new();
    for h in 0..heads {
        for pair in 0..head / 2 {
            for half in 0..2 {
                let row = h * head + half * head / 2 + pair;
                stored.extend(&named[row * columns..][..columns]);
            }
        }
    }
    let gguf = |architecture: &str| {
        Gguf::new()
            .word("general.architecture", architecture)
            .number(&format!("{architecture}.attention.head_count"), 2)
            .number(&format!("{architecture}.embedding_length"), 3)
            .number(&format!("{architecture}.attention.sliding_window"), 9)
            .number("tokenizer.ggml.eos_token_id", 1)
            .f32s("token_embd.weight", &[2, 3], &[0.0; 6])
            .f32s("blk.3.attn_q.weight", &[12, 3], &stored)
            .bytes()
    };
    let dir = folder(&[("llama.gguf", gguf("llama")), ("qwen.gguf", gguf("qwen2"))]);
    let q = |file: &str, start, len| {
        let weights = Weights::open(&dir.path().join(file)).unwrap();
        let tensor = weights.find("model.layers.3.self_attn.q_proj.weight").unwrap();
        let mut values = vec![0.0; len];
        weights.read(tensor, start, &mut values).unwrap();
        values
    };
    assert_eq!(q("llama.gguf", 0, 36), named);
    assert_eq!(q("llama.gguf", 7, 20), named[7..27]);
    assert_eq!(q("qwen.gguf", 0, 36), stored, "only llama's are interleaved");
    let weights = Weights::open(&dir.path().join("llama.gguf")).unwrap();
    assert_eq!(weights.gguf_values()["llama.embedding_length"], GgufValue::Whole(3));
    let config = weights.gguf_config().unwrap().unwrap();
    assert_eq!((&config["model_type"], &config["hidden_size"]), (&"mistral".into(), &3.into()));
    assert_eq!((&config["sliding_window"], &config["eos_token_id"]), (&9.into(), &1.into()));
    assert_eq!((&config["vocab_size"], &config["tie_word_embeddings"]), (&2.into(), &true.into()));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Any slice of a parameter is that part of the whole, transposed or not.
    #[test]
    fn a_slice_is_that_part_of_the_whole(
        which in 0usize..6, from: prop::sample::Index, to: prop::sample::Index,
    ) {
        static WRITTEN: std::sync::OnceLock<tempfile::TempDir> = std::sync::OnceLock::new();
        let dir = WRITTEN.get_or_init(|| {
            let dir = tempfile::tempdir().unwrap();
            let plan = export::tensors(Family::Llama, &llama(), 5, StoreAs::Bf16);
            let tensors: Vec<Tensor> = plan.iter().map(|e| e.tensor.clone()).collect();
            write(&dir.path().join("w"), &tensors, 300);
            dir
        });
        let weights = Weights::open(&dir.path().join("w")).unwrap();
        let import = Import::new(weights, Family::Llama, &llama(), 5).unwrap();
        let parameter = &llama()[which];
        let n: usize = parameter.shape.iter().product();
        let mut whole = vec![f32::NAN; n];
        import.read(&parameter.name, 0, &mut whole).unwrap();
        let (a, b) = (from.index(n + 1), to.index(n + 1));
        let (a, b) = (a.min(b), a.max(b));
        let mut part = vec![f32::NAN; b - a];
        import.read(&parameter.name, a, &mut part).unwrap();
        prop_assert_eq!(&part, &whole[a..b]);
    }
}
