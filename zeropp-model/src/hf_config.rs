//! The `config.json` of a Hugging Face folder as a [`Decoder`], in the form that transformers 4
//! writes and in that of transformers 5. What this program cannot honour is an error that names the
//! field; nothing is skipped in silence.

mod experts;
mod fields;
mod generation;
mod keys;
mod rope;

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use zeropp_data::files::{escaped_line, excerpt, read_text};

use crate::Activation;
use crate::decoder::{Biases, Decoder, Naming, Norm, Positions, Window};
use fields::{Fault, FieldType, Fields};
use keys::{EVERY, GPT2, HARMLESS, LLAMA, MOE};

/// Largest `config.json`, in bytes.
const BYTES_MAX: u64 = 1 << 20;
/// The `model_type`s that are read.
pub const MODEL_TYPES: [&str; 9] =
    ["dots1", "gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"];

/// The content of a `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct HfConfig {
    /// The model; its vocabulary is not padded.
    pub decoder: Decoder,
    /// Features that it asks for which only settings can switch on, in sentences: dropout.
    pub notes: Vec<String>,
}

/// A `config.json` that is not a model of this program.
#[derive(Debug, thiserror::Error)]
pub enum HfConfigError {
    /// It cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is not a JSON object.
    #[error("{}: not a JSON object: {problem}; expected a model's config.json", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The reader's message.
        problem: String,
    },
    /// A field that is missing, of another type, or asks for what is not there.
    #[error("{}: {field}: {problem}", path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// The field.
        field: String,
        /// The problem with its value, and what would work.
        problem: String,
    },
}

/// Reads the `config.json` at `path`, or in the folder `path`.
///
/// # Errors
/// A file that cannot be read, is no JSON object, or describes another model than the families
/// here, with the field.
pub fn read(path: &Path) -> Result<HfConfig, HfConfigError> {
    let path = if path.is_dir() { path.join("config.json") } else { path.into() };
    parse(&text_of(&path)?, &path)
}

/// The model that the text of a `config.json` describes; `path` is for messages.
///
/// # Errors
/// As [`read`].
pub fn parse(text: &str, path: &Path) -> Result<HfConfig, HfConfigError> {
    of_object(text, path, |fields| {
        let found = fields.model()?;
        let checked = found.decoder.check();
        checked.map_err(|(field, problem)| (field.into(), problem))?;
        Ok(found)
    })
}

/// Ids that end a text, by the `generation_config.json` and the `config.json` of `folder`: the
/// first that says some. None where neither does, or none is there.
///
/// # Errors
/// A file that cannot be read, is no JSON object, or has a field that is not known, or of another
/// type.
pub fn ends_in(folder: &Path) -> Result<Vec<u32>, HfConfigError> {
    type Ends = fn(Fields<'_>) -> Result<Vec<u32>, Fault>;
    let files: [(_, Ends); 2] = [
        ("generation_config.json", generation::ends),
        ("config.json", |fields| fields.ids("eos_token_id")),
    ];
    for (name, ends) in files {
        let path = folder.join(name);
        if !path.exists() {
            continue;
        }
        let ids = of_object(&text_of(&path)?, &path, ends)?;
        if !ids.is_empty() {
            return Ok(ids);
        }
    }
    Ok(Vec::new())
}

fn text_of(path: &Path) -> Result<String, HfConfigError> {
    read_text(path, BYTES_MAX)
        .map_err(|source| HfConfigError::Read { path: path.to_path_buf(), source })
}

/// The result of `read` for the fields of the JSON object in `text`.
fn of_object<T>(
    text: &str,
    path: &Path,
    read: impl FnOnce(Fields<'_>) -> Result<T, Fault>,
) -> Result<T, HfConfigError> {
    let object: Map<String, Value> = serde_json::from_str(text).map_err(|error| {
        let problem = escaped_line(&error.to_string()).into();
        HfConfigError::Json { path: path.into(), problem }
    })?;
    read(Fields(&object)).map_err(|(field, problem)| HfConfigError::Field {
        path: path.into(),
        field,
        problem,
    })
}

impl Fields<'_> {
    fn model(self) -> Result<HfConfig, Fault> {
        if self.get("quantization_config").is_some() {
            let problem = "quantised weights cannot be trained; use the folder of the original";
            return Err(("quantization_config".into(), problem.into()));
        }
        let known = MODEL_TYPES.join(", ");
        let not_here = "there is no encoder to look at";
        self.must_be("add_cross_attention", false, not_here)?;
        self.must_be("is_encoder_decoder", false, not_here)?;
        match self.word("model_type")? {
            Some("gpt2") => self.gpt2(),
            Some("llama") => self.llama(LlamaFamily::Llama),
            Some("mistral") => self.llama(LlamaFamily::Mistral),
            Some("mixtral") => self.llama(LlamaFamily::Mixtral),
            Some("qwen2") => self.llama(LlamaFamily::Qwen2),
            Some("qwen2_moe") => self.llama(LlamaFamily::Qwen2Moe),
            Some("dots1") => self.llama(LlamaFamily::Dots1),
            Some("qwen3") => self.llama(LlamaFamily::Qwen3),
            Some("qwen3_moe") => self.llama(LlamaFamily::Qwen3Moe),
            _ => self.fault("model_type", format!("the families here are {known}")),
        }
    }

    /// Every field is one that the family reads, or changes nothing.
    fn known(self, of_family: &[&[(&str, FieldType)]]) -> Result<(), Fault> {
        let harmless = HARMLESS.map(|field| (field, FieldType::Any));
        self.check(&[&[EVERY, &harmless][..], of_family].concat())
    }

    fn gpt2(self) -> Result<HfConfig, Fault> {
        self.known(&[GPT2])?;
        let not_here = "attention is scaled by the root of the head's size here, nothing else";
        self.must_be("scale_attn_weights", true, not_here)?;
        self.must_be("scale_attn_by_inverse_layer_idx", false, not_here)?;
        let activation = match self.word("activation_function")? {
            Some("gelu_new" | "gelu_pytorch_tanh" | "gelu_fast") => Activation::GeluTanh,
            Some("gelu") => Activation::Gelu,
            _ => return self.fault("activation_function", "gelu_new and gelu are known"),
        };
        let (hidden, heads) = (self.size("n_embd")?, self.size("n_head")?);
        let positions = self.size("n_positions")?;
        let decoder = Decoder {
            naming: Naming::Gpt2,
            layers: self.layers("n_layer")?,
            hidden,
            heads,
            kv_heads: heads,
            head_dim: self.head_dim("n_head", hidden, heads)?,
            intermediate: self.optional_size("n_inner")?.unwrap_or(4 * hidden),
            vocabulary: self.size("vocab_size")?,
            vocabulary_multiple: 1,
            norm: Norm::Layer { eps: self.number("layer_norm_epsilon")? },
            positions: Positions::Learned(positions),
            biases: Biases::ALL,
            qk_norm: false,
            activation,
            tied: self.switch("tie_word_embeddings", true)?,
            window: None,
            moe: None,
            context: positions,
        };
        let dropout = ["resid_pdrop", "embd_pdrop", "attn_pdrop"];
        Ok(HfConfig { decoder, notes: self.dropout_notes(&dropout)? })
    }

    fn llama(self, family: LlamaFamily) -> Result<HfConfig, Fault> {
        self.known(if family.has_experts() { &[LLAMA, MOE] } else { &[LLAMA] })?;
        match self.word("hidden_act")? {
            Some("silu" | "swish") => {}
            _ => return self.fault("hidden_act", "the MLP's gate is silu here"),
        }
        let (hidden, heads) = (self.size("hidden_size")?, self.size("num_attention_heads")?);
        let kv_heads = match self.optional_size("num_key_value_heads")? {
            Some(groups) => groups,
            None if family == LlamaFamily::Llama => heads,
            None => return self.fault("num_key_value_heads", "a whole number from 1 is needed"),
        };
        if !heads.is_multiple_of(kv_heads) {
            let problem = format!("does not divide num_attention_heads = {heads}");
            return self.fault("num_key_value_heads", problem);
        }
        let head_dim = match (self.optional_size("head_dim")?, family) {
            (Some(d), _) => d,
            (None, LlamaFamily::Qwen3 | LlamaFamily::Qwen3Moe) => {
                return self.fault("head_dim", "Qwen3 says it apart");
            }
            (None, _) => self.head_dim("num_attention_heads", hidden, heads)?,
        };
        if !head_dim.is_multiple_of(2) {
            let problem = format!("is {head_dim}, and rotary positions turn pairs of elements");
            return Err(("head_dim".into(), problem));
        }
        let layers = self.layers("num_hidden_layers")?;
        let context = self.size("max_position_embeddings")?;
        let none = "this family has no biases there";
        if matches!(family, LlamaFamily::Mistral | LlamaFamily::Mixtral | LlamaFamily::Qwen2Moe) {
            self.must_be("attention_bias", false, none)?;
        }
        if family != LlamaFamily::Llama {
            self.must_be("mlp_bias", false, none)?;
        }
        // Qwen2 has them at q, k and v whatever this says, and none after attention.
        let attention = self.switch("attention_bias", false)? && family != LlamaFamily::Qwen2;
        let qkv = match family {
            LlamaFamily::Qwen2 => true,
            LlamaFamily::Qwen2Moe => self.switch("qkv_bias", true)?,
            _ => attention,
        };
        let decoder = Decoder {
            naming: Naming::Llama,
            layers,
            hidden,
            heads,
            kv_heads,
            head_dim,
            intermediate: self.size("intermediate_size")?,
            vocabulary: self.size("vocab_size")?,
            vocabulary_multiple: 1,
            norm: Norm::Rms { eps: self.number("rms_norm_eps")? },
            positions: Positions::Rotary(rope::rotary(self, context)?),
            biases: Biases { qkv, out: attention, mlp: self.switch("mlp_bias", false)? },
            qk_norm: matches!(
                family,
                LlamaFamily::Qwen3 | LlamaFamily::Qwen3Moe | LlamaFamily::Dots1
            ),
            activation: Activation::Swiglu,
            tied: self.switch("tie_word_embeddings", false)?,
            window: self.window(family, layers)?,
            moe: self.moe(family)?,
            context,
        };
        let mut notes = self.dropout_notes(&["attention_dropout"])?;
        notes.extend(self.balance_note(&decoder)?);
        Ok(HfConfig { decoder, notes })
    }

    fn head_dim(self, field: &str, hidden: usize, heads: usize) -> Result<usize, Fault> {
        if hidden.is_multiple_of(heads) {
            return Ok(hidden / heads);
        }
        self.fault(field, format!("does not divide the hidden size of {hidden}"))
    }

    /// The sliding window, and which of the layers have it. What is not said is as in transformers.
    fn window(self, family: LlamaFamily, layers: usize) -> Result<Option<Window>, Fault> {
        let types = self.list("layer_types")?;
        let types = types.map(|types| first_sliding(types, layers)).transpose()?;
        let is_null = self.0.get("sliding_window").is_some_and(Value::is_null);
        let slides = !is_null
            && match family {
                LlamaFamily::Llama => false,
                LlamaFamily::Mistral => true,
                LlamaFamily::Mixtral => self.get("sliding_window").is_some(),
                LlamaFamily::Qwen2 | LlamaFamily::Qwen3 => {
                    self.switch("use_sliding_window", false)?
                }
                // Those from one on slide, whatever other fields say.
                LlamaFamily::Dots1 => true,
                LlamaFamily::Qwen2Moe | LlamaFamily::Qwen3Moe => {
                    let problem = "windows beside experts of this family are not supported";
                    self.must_be("use_sliding_window", false, problem)?;
                    false
                }
            };
        let all_slide = matches!(family, LlamaFamily::Mistral | LlamaFamily::Mixtral);
        let refused = |problem: &str| Err(("layer_types".into(), problem.into()));
        let first_layer = match types {
            Some(first) if !slides && first < layers => {
                return refused("has layers that slide, where other fields say that none does");
            }
            // Transformers does not look at them there.
            Some(1..) if slides && all_slide => {
                return refused("has layers that do not slide, where all of this model type do");
            }
            Some(first) => first,
            None if !slides => layers,
            None if all_slide => 0,
            // 0 of them are full where all slide.
            None => {
                let usual = if family == LlamaFamily::Dots1 { 62 } else { 28 };
                self.optional_count("max_window_layers", 0)?.unwrap_or(usual)
            }
        };
        if first_layer >= layers {
            return Ok(None);
        }
        let tokens = self.optional_size("sliding_window")?.unwrap_or(4096);
        Ok(Some(Window { tokens, first_layer }))
    }

    fn dropout_notes(self, fields: &[&str]) -> Result<Vec<String>, Fault> {
        let mut notes = Vec::new();
        for field in fields {
            let share = self.share(field)?;
            if share > 0.0 {
                notes.push(format!(
                    "config.json says {field} = {share}; no dropout is taken from it: set dropout \
                     (one share for all places) to train with any"
                ));
            }
        }
        Ok(notes)
    }
}

/// The first layer that slides; those after it have to, too.
fn first_sliding(types: &[Value], layers: usize) -> Result<usize, Fault> {
    let refused = |problem: String| Err(("layer_types".into(), problem));
    let known = |t: &&Value| matches!(t.as_str(), Some("full_attention" | "sliding_attention"));
    if let Some(other) = types.iter().find(|t| !known(t)) {
        let other = excerpt(&other.to_string());
        return refused(format!("{other} is not known"));
    }
    if types.len() != layers {
        return refused(format!("has {} entries for {layers} layers", types.len()));
    }
    let slides = |t: &Value| t.as_str() == Some("sliding_attention");
    let first = types.iter().position(slides).unwrap_or(layers);
    if types[first..].iter().all(slides) {
        return Ok(first);
    }
    refused("windows slide here in all layers from one on, and not in turns".into())
}

/// Families with LLaMA's names.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LlamaFamily {
    Llama,
    Mistral,
    Mixtral,
    Qwen2,
    Qwen2Moe,
    Qwen3,
    Qwen3Moe,
    Dots1,
}

impl LlamaFamily {
    fn has_experts(self) -> bool {
        use LlamaFamily::{Dots1, Mixtral, Qwen2Moe, Qwen3Moe};
        matches!(self, Mixtral | Qwen2Moe | Qwen3Moe | Dots1)
    }
}

#[cfg(test)]
mod known_tests;
#[cfg(test)]
mod tests;
