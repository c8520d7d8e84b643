//! What a planner has to know of a model.

use serde::Serialize;
use serde_json::{Map, Value};

use crate::PlanError;

/// The sizes of a decoder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ModelSizes {
    /// What people call it.
    pub name: String,
    /// Transformer blocks.
    pub layers: usize,
    /// Elements of a token's hidden state.
    pub hidden: usize,
    /// Attention heads.
    pub heads: usize,
    /// Heads of keys and values: as many as `heads`, or fewer where queries share them.
    pub kv_heads: usize,
    /// Elements between the products of the MLP.
    pub intermediate: usize,
    /// Whether the MLP has a gate beside its first product (SwiGLU), and no biases.
    pub gated: bool,
    /// Rows of the embedding.
    pub vocabulary: usize,
    /// Tokens in a sample.
    pub seq: usize,
    /// Whether the head shares the embedding's weights.
    pub tied: bool,
}

/// Name, layers, hidden, heads, vocabulary, sequence, tied.
type Gpt = (&'static str, usize, usize, usize, usize, usize, bool);

/// The models that are known by name: GPT-2, and those of the papers that plans are held against.
const GPTS: [Gpt; 10] = [
    ("gpt2", 12, 768, 12, 50257, 1024, true),
    ("gpt2-medium", 24, 1024, 16, 50257, 1024, true),
    ("gpt2-large", 36, 1280, 20, 50257, 1024, true),
    ("gpt2-xl", 48, 1600, 25, 50257, 1024, true),
    ("14.6b", 48, 5120, 40, 51200, 1024, false),
    ("28.3b", 64, 6144, 48, 51200, 2048, false),
    ("22b", 48, 6144, 64, 51200, 2048, false),
    ("175b", 96, 12288, 96, 51200, 2048, false),
    ("530b", 105, 20480, 128, 51200, 2048, false),
    ("1t", 128, 25600, 160, 51200, 2048, false),
];

/// Beyond this a slip of the keyboard is likelier than a model.
const SIZE_MAX: usize = 1 << 24;
/// Most blocks that are planned for.
const LAYERS_MAX: usize = 4096;

impl ModelSizes {
    /// A GPT: an MLP of four times the hidden size, biases, learned positions.
    pub fn gpt(name: &str, [layers, hidden, heads, vocabulary, seq]: [usize; 5]) -> ModelSizes {
        ModelSizes {
            name: name.into(),
            layers,
            hidden,
            heads,
            kv_heads: heads,
            intermediate: 4 * hidden,
            gated: false,
            vocabulary,
            seq,
            tied: false,
        }
    }

    /// A model that is known by name.
    ///
    /// # Errors
    /// A name that is not known, with those that are.
    pub fn named(name: &str) -> Result<ModelSizes, PlanError> {
        let found = GPTS.iter().find(|gpt| gpt.0.eq_ignore_ascii_case(name));
        let Some(&(name, layers, hidden, heads, vocabulary, seq, tied)) = found else {
            let names: Vec<&str> = GPTS.iter().map(|gpt| gpt.0).collect();
            return Err(PlanError::new(format!(
                "model = {name}: not a model that is known by name; use one of {}, or a \
                 config.json",
                names.join(", ")
            )));
        };
        let gpt = ModelSizes::gpt(name, [layers, hidden, heads, vocabulary, seq]);
        Ok(ModelSizes { tied, ..gpt })
    }

    /// The sizes in a model's `config.json`, in the form of the Hugging Face hub: GPT-2, or a LLaMA
    /// and its like. `name` stands for it in messages and tables.
    ///
    /// # Errors
    /// A file of another kind, a size that is missing or does not work.
    pub fn from_config_json(name: &str, text: &str) -> Result<ModelSizes, PlanError> {
        let wrong = |problem: String| PlanError::new(format!("model = {name}: {problem}"));
        let value: Value = serde_json::from_str(text)
            .map_err(|e| wrong(format!("it is no JSON ({e}); name a model's config.json")))?;
        let Value::Object(keys) = value else {
            return Err(wrong("it is no object of settings; name a model's config.json".into()));
        };
        let kind = keys.get("model_type").and_then(Value::as_str).unwrap_or("");
        let read = match kind {
            "gpt2" => of_gpt2(&keys),
            "llama" | "mistral" | "qwen2" | "qwen3" => of_llama(&keys),
            "" => Err("it has no model_type; name a model's config.json".into()),
            other => Err(format!(
                "model_type = {other} is not a decoder that is known here; gpt2, llama, mistral, \
                 qwen2 and qwen3 are"
            )),
        };
        let sizes = read.map_err(wrong)?;
        let sizes = ModelSizes { name: name.into(), ..sizes };
        sizes.check()?;
        Ok(sizes)
    }

    /// Refuses sizes that no model has.
    ///
    /// # Errors
    /// The first size that does not work.
    pub fn check(&self) -> Result<(), PlanError> {
        let sizes = [
            ("layers", self.layers, LAYERS_MAX),
            ("hidden", self.hidden, SIZE_MAX),
            ("heads", self.heads, SIZE_MAX),
            ("kv-heads", self.kv_heads, SIZE_MAX),
            ("intermediate", self.intermediate, SIZE_MAX),
            ("vocab", self.vocabulary, SIZE_MAX),
            ("seq", self.seq, SIZE_MAX),
        ];
        if let Some((field, value, most)) = sizes.iter().find(|(_, v, most)| *v == 0 || v > most) {
            return Err(PlanError::new(format!(
                "{field} = {value}: no model has such a size; use 1 to {most}"
            )));
        }
        if !self.hidden.is_multiple_of(self.heads) || !self.heads.is_multiple_of(self.kv_heads) {
            return Err(PlanError::new(format!(
                "heads = {}: hidden = {} is cut into heads of equal size, and heads into groups \
                 of kv-heads = {}; use numbers that divide each other",
                self.heads, self.hidden, self.kv_heads
            )));
        }
        Ok(())
    }
}

fn size(keys: &Map<String, Value>, names: &[&str]) -> Result<usize, String> {
    let Some((name, value)) = names.iter().find_map(|n| Some((n, keys.get(*n)?))) else {
        return Err(format!("{} is missing; name a model's config.json", names[0]));
    };
    let number = value.as_u64().and_then(|n| usize::try_from(n).ok());
    number.ok_or_else(|| format!("{name} = {value}: a whole number is needed"))
}

fn is_tied(keys: &Map<String, Value>, usual: bool) -> bool {
    keys.get("tie_word_embeddings").and_then(Value::as_bool).unwrap_or(usual)
}

fn of_gpt2(keys: &Map<String, Value>) -> Result<ModelSizes, String> {
    let of = |names: &[&str]| size(keys, names);
    let sizes = [
        of(&["n_layer"])?,
        of(&["n_embd"])?,
        of(&["n_head"])?,
        of(&["vocab_size"])?,
        of(&["n_positions", "n_ctx"])?,
    ];
    Ok(ModelSizes { tied: is_tied(keys, true), ..ModelSizes::gpt("gpt2", sizes) })
}

fn of_llama(keys: &Map<String, Value>) -> Result<ModelSizes, String> {
    let of = |names: &[&str]| size(keys, names);
    let heads = of(&["num_attention_heads"])?;
    Ok(ModelSizes {
        name: String::new(),
        layers: of(&["num_hidden_layers"])?,
        hidden: of(&["hidden_size"])?,
        heads,
        kv_heads: of(&["num_key_value_heads"]).unwrap_or(heads),
        intermediate: of(&["intermediate_size"])?,
        gated: true,
        vocabulary: of(&["vocab_size"])?,
        seq: of(&["max_position_embeddings"])?,
        tied: is_tied(keys, false),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_config_of_another_kind_is_refused_in_a_sentence() {
        let gpt2 = r#"{"model_type":"gpt2","n_layer":2,"n_embd":8,"n_head":2,"vocab_size":9,
                       "n_positions":4}"#;
        let sizes = ModelSizes::from_config_json("a", gpt2).unwrap();
        assert_eq!((sizes.layers, sizes.intermediate, sizes.tied), (2, 32, true));
        for (text, said) in [
            ("[]", "it is no object"),
            ("{", "it is no JSON"),
            ("{}", "it has no model_type"),
            (r#"{"model_type":"bert"}"#, "model_type = bert is not a decoder"),
            (r#"{"model_type":"llama"}"#, "num_attention_heads is missing"),
            (&gpt2.replace('8', "-8"), "n_embd = -8: a whole number"),
            (&gpt2.replace(r#""n_head":2"#, r#""n_head":3"#), "heads = 3"),
        ] {
            let error = ModelSizes::from_config_json("a", text).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
        assert!(ModelSizes::named("gpt5").unwrap_err().to_string().contains("gpt2-xl"));
    }
}
