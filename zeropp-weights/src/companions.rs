//! Which files of a model's folder are the model's.

use std::path::Path;

/// Files that lie beside weights and are copied with them as they are.
pub const COMPANIONS: [&str; 9] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
];

/// Other files of a folder that describe a model or its tokens.
const DESCRIPTIONS: [&str; 4] = ["config.json", "adapter_config.json", "encoder.json", "vocab.bpe"];

/// How the names of files of weights and of their indices end.
const WEIGHTS: [&str; 5] = [".safetensors", ".gguf", ".index.json", ".bin", ".tiktoken"];

/// Whether a file of this name, in the folder of a model, is a part of the model: weights, their
/// index, its description or its tokenizer. Anything else may be somebody's notes.
pub fn is_of_model(path: &Path) -> bool {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return false };
    COMPANIONS.contains(&name)
        || DESCRIPTIONS.contains(&name)
        || WEIGHTS.iter().any(|end| name.ends_with(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_descriptions_and_tokenizers_are_of_the_model_and_records_of_a_run_are_not() {
        for name in ["model-00001-of-00002.safetensors", "m.gguf", "config.json", "vocab.bpe"] {
            assert!(is_of_model(Path::new(name)), "{name}");
            assert!(is_of_model(&Path::new("some/where").join(name)), "{name}");
        }
        for name in ["run.jsonl", "trace.json", "costs.toml", "config.json.old", "tokenizer"] {
            assert!(!is_of_model(Path::new(name)), "{name}");
        }
    }
}
