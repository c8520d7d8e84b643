//! The `config.json` of a Hugging Face folder as a [`Decoder`], in the form that transformers 4
//! writes and in that of transformers 5. What this program cannot honour is an error that names the
//! field; nothing is skipped in silence.

use std::fmt;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use zeropp_data::files::{escaped_line, read_text};

use crate::Activation;
use crate::decoder::{Biases, Decoder, Naming, Norm, Positions, Rotary, RotaryScaling, Window};

/// Largest `config.json`, in bytes.
const BYTES_MAX: u64 = 1 << 20;
/// Largest size in one: products of two stay far from overflow.
const SIZE_MAX: u64 = 1 << 24;
/// Most blocks in one: a list of their parameters takes no memory to speak of.
const LAYERS_MAX: usize = 1 << 14;
/// The `model_type`s that are read.
pub const MODEL_TYPES: [&str; 5] = ["gpt2", "llama", "mistral", "qwen2", "qwen3"];

/// What a `config.json` says.
#[derive(Clone, Debug, PartialEq)]
pub struct HfConfig {
    /// The model; its vocabulary is not padded.
    pub decoder: Decoder,
    /// What it asks for that changes training and settings have to ask for, in sentences: dropout.
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
        /// What the reader says.
        problem: String,
    },
    /// A field that is missing, of another type, or asks for what is not there.
    #[error("{}: {field}: {problem}", path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// The field.
        field: String,
        /// What is wrong with its value, and what would work.
        problem: String,
    },
}

/// A field and what is wrong with it.
type Fault = (String, String);

/// Reads the `config.json` at `path`, or in the folder `path`.
///
/// # Errors
/// A file that cannot be read, is no JSON object, or describes another model than the families
/// here, with the field.
pub fn read(path: &Path) -> Result<HfConfig, HfConfigError> {
    let path = if path.is_dir() { path.join("config.json") } else { path.into() };
    let text = match read_text(&path, BYTES_MAX) {
        Ok(text) => text,
        Err(source) => return Err(HfConfigError::Read { path, source }),
    };
    parse(&text, &path)
}

/// The model that the text of a `config.json` describes; `path` is for messages.
///
/// # Errors
/// As [`read`].
pub fn parse(text: &str, path: &Path) -> Result<HfConfig, HfConfigError> {
    let object: Map<String, Value> = serde_json::from_str(text).map_err(|error| {
        let problem = escaped_line(&error.to_string()).into();
        HfConfigError::Json { path: path.into(), problem }
    })?;
    let fields = Fields(&object);
    let found = fields.model().and_then(|found| {
        let checked = found.decoder.check();
        checked.map(|()| found).map_err(|(field, problem)| (field.into(), problem))
    });
    found.map_err(|(field, problem)| HfConfigError::Field { path: path.into(), field, problem })
}

/// The fields of an object, each with what is wrong with it.
#[derive(Clone, Copy)]
struct Fields<'a>(&'a Map<String, Value>);

impl<'a> Fields<'a> {
    /// A value that is there and not null.
    fn get(self, field: &str) -> Option<&'a Value> {
        self.0.get(field).filter(|value| !value.is_null())
    }

    fn fault<T>(self, field: &str, problem: impl fmt::Display) -> Result<T, Fault> {
        let problem = match self.get(field) {
            Some(value) => format!("{} {problem}", escaped_line(&value.to_string())),
            None => format!("is missing: {problem}"),
        };
        Err((field.into(), problem))
    }

    fn optional_size(self, field: &str) -> Result<Option<usize>, Fault> {
        self.optional_count(field, 1)
    }

    fn optional_count(self, field: &str, least: u64) -> Result<Option<usize>, Fault> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_u64().filter(|n| (least..=SIZE_MAX).contains(n)) {
            Some(n) => Ok(Some(n as usize)),
            None => self.fault(field, format!("is no whole number from {least} to {SIZE_MAX}")),
        }
    }

    fn layers(self, field: &str) -> Result<usize, Fault> {
        match self.size(field)? {
            n if n <= LAYERS_MAX => Ok(n),
            _ => {
                self.fault(field, format!("is more than {LAYERS_MAX}, the most blocks of a model"))
            }
        }
    }

    fn size(self, field: &str) -> Result<usize, Fault> {
        match self.optional_size(field)? {
            Some(n) => Ok(n),
            None => self.fault(field, "a whole number from 1 is needed"),
        }
    }

    fn optional_number(self, field: &str) -> Result<Option<f64>, Fault> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_f64().filter(|x| x.is_finite() && *x > 0.0) {
            Some(x) => Ok(Some(x)),
            None => self.fault(field, "is no number above 0"),
        }
    }

    fn number(self, field: &str) -> Result<f64, Fault> {
        match self.optional_number(field)? {
            Some(x) => Ok(x),
            None => self.fault(field, "a number above 0 is needed"),
        }
    }

    fn switch(self, field: &str, default: bool) -> Result<bool, Fault> {
        match self.get(field) {
            None => Ok(default),
            Some(Value::Bool(on)) => Ok(*on),
            Some(_) => self.fault(field, "is neither true nor false"),
        }
    }

    fn word(self, field: &str) -> Result<Option<&'a str>, Fault> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::String(word)) => Ok(Some(word)),
            Some(_) => self.fault(field, "is no text"),
        }
    }

    /// Refuses a switch that is on, or off, where the other is needed.
    fn must_be(self, field: &str, wanted: bool, why: &str) -> Result<(), Fault> {
        if self.switch(field, wanted)? == wanted { Ok(()) } else { self.fault(field, why) }
    }

    fn model(self) -> Result<HfConfig, Fault> {
        if self.get("quantization_config").is_some() {
            let problem = "quantised weights cannot be trained; use the folder of the original";
            return Err(("quantization_config".into(), problem.into()));
        }
        let known = MODEL_TYPES.join(", ");
        match self.word("model_type")? {
            Some("gpt2") => self.gpt2(),
            Some("llama") => self.llama(Family::Llama),
            Some("mistral") => self.llama(Family::Mistral),
            Some("qwen2") => self.llama(Family::Qwen2),
            Some("qwen3") => self.llama(Family::Qwen3),
            _ => self.fault("model_type", format!("the families here are {known}")),
        }
    }

    fn gpt2(self) -> Result<HfConfig, Fault> {
        let not_here = "attention is scaled by the root of the head's size here, nothing else";
        self.must_be("scale_attn_weights", true, not_here)?;
        self.must_be("scale_attn_by_inverse_layer_idx", false, not_here)?;
        self.must_be("add_cross_attention", false, "there is no encoder to look at")?;
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
            context: positions,
        };
        let dropout = ["resid_pdrop", "embd_pdrop", "attn_pdrop"];
        Ok(HfConfig { decoder, notes: self.dropout_notes(&dropout) })
    }

    fn llama(self, family: Family) -> Result<HfConfig, Fault> {
        match self.word("hidden_act")? {
            Some("silu" | "swish") => {}
            _ => return self.fault("hidden_act", "the MLP's gate is silu here"),
        }
        let (hidden, heads) = (self.size("hidden_size")?, self.size("num_attention_heads")?);
        let kv_heads = match self.optional_size("num_key_value_heads")? {
            Some(groups) => groups,
            None if family == Family::Llama => heads,
            None => return self.fault("num_key_value_heads", "a whole number from 1 is needed"),
        };
        if !heads.is_multiple_of(kv_heads) {
            let problem = format!("does not divide num_attention_heads = {heads}");
            return self.fault("num_key_value_heads", problem);
        }
        let head_dim = match (self.optional_size("head_dim")?, family) {
            (Some(d), _) => d,
            (None, Family::Qwen3) => return self.fault("head_dim", "Qwen3 says it apart"),
            (None, _) => self.head_dim("num_attention_heads", hidden, heads)?,
        };
        if !head_dim.is_multiple_of(2) {
            let problem = format!("is {head_dim}, and rotary positions turn pairs of elements");
            return Err(("head_dim".into(), problem));
        }
        let layers = self.layers("num_hidden_layers")?;
        let attention = self.switch("attention_bias", false)? && family != Family::Mistral;
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
            positions: Positions::Rotary(self.rotary()?),
            biases: Biases {
                qkv: attention || family == Family::Qwen2,
                out: attention && family != Family::Qwen2,
                mlp: self.switch("mlp_bias", false)? && family == Family::Llama,
            },
            qk_norm: family == Family::Qwen3,
            activation: Activation::Swiglu,
            tied: self.switch("tie_word_embeddings", false)?,
            window: self.window(family, layers)?,
            context: self.size("max_position_embeddings")?,
        };
        Ok(HfConfig { decoder, notes: self.dropout_notes(&["attention_dropout"]) })
    }

    fn head_dim(self, field: &str, hidden: usize, heads: usize) -> Result<usize, Fault> {
        if hidden.is_multiple_of(heads) {
            return Ok(hidden / heads);
        }
        self.fault(field, format!("does not divide the hidden size of {hidden}"))
    }

    /// Transformers 5 has all of it in `rope_parameters`; 4 has `rope_theta` beside
    /// `rope_scaling`.
    fn rotary(self) -> Result<Rotary, Fault> {
        let object = |field: &str| match self.get(field) {
            None => Ok(None),
            Some(Value::Object(inner)) => Ok(Some(Fields(inner))),
            Some(_) => self.fault(field, "is no object"),
        };
        if self.optional_number("partial_rotary_factor")?.is_some_and(|part| part != 1.0) {
            return self.fault("partial_rotary_factor", "heads turn as a whole here");
        }
        let (field, inner) = match object("rope_parameters")? {
            Some(inner) => ("rope_parameters", Some(inner)),
            None => ("rope_scaling", object("rope_scaling")?),
        };
        let within = |(name, problem): Fault| (format!("{field}.{name}"), problem);
        let own = inner.and_then(|inner| inner.optional_number("rope_theta").transpose());
        let theta = match own {
            Some(theta) => theta.map_err(within)?,
            // The default of every family's class; files write it all the same.
            None => self.optional_number("rope_theta")?.unwrap_or(10_000.0),
        };
        let scaling = match inner {
            Some(inner) => inner.rotary_scaling().map_err(within)?,
            None => RotaryScaling::None,
        };
        Ok(Rotary { theta, scaling })
    }

    fn rotary_scaling(self) -> Result<RotaryScaling, Fault> {
        let field = if self.get("rope_type").is_some() { "rope_type" } else { "type" };
        match self.word(field)? {
            None | Some("default") => Ok(RotaryScaling::None),
            Some("linear") => Ok(RotaryScaling::Linear(self.number("factor")?)),
            Some("llama3") => {
                let (low, high) =
                    (self.number("low_freq_factor")?, self.number("high_freq_factor")?);
                if high <= low {
                    let problem = format!("is not above low_freq_factor = {low}");
                    return self.fault("high_freq_factor", problem);
                }
                Ok(RotaryScaling::Llama3 {
                    factor: self.number("factor")?,
                    low,
                    high,
                    context: self.number("original_max_position_embeddings")?,
                })
            }
            Some(_) => self.fault(field, "is not known; default, linear and llama3 are"),
        }
    }

    /// The sliding window, and which of the layers have it. What is not said is as in transformers.
    fn window(self, family: Family, layers: usize) -> Result<Option<Window>, Fault> {
        let types = match self.get("layer_types") {
            Some(Value::Array(types)) => Some(self.first_sliding(types, layers)?),
            Some(_) => return self.fault("layer_types", "is no list"),
            None => None,
        };
        let is_null = self.0.get("sliding_window").is_some_and(Value::is_null);
        let slides = !is_null
            && match family {
                Family::Llama => false,
                Family::Mistral => true,
                Family::Qwen2 | Family::Qwen3 => self.switch("use_sliding_window", false)?,
            };
        let refused = |problem: &str| Err(("layer_types".into(), problem.into()));
        let first_layer = match types {
            Some(first) if !slides && first < layers => {
                return refused("has layers that slide, where other fields say that none does");
            }
            // Transformers does not look at them there.
            Some(1..) if slides && family == Family::Mistral => {
                return refused("has layers that do not slide, where all of this model type do");
            }
            Some(first) => first,
            None if !slides => layers,
            None if family == Family::Mistral => 0,
            // 0 of them are full where all slide.
            None => self.optional_count("max_window_layers", 0)?.unwrap_or(28),
        };
        let tokens = self.optional_size("sliding_window")?.unwrap_or(4096);
        Ok((first_layer < layers).then_some(Window { tokens, first_layer }))
    }

    /// The first layer that slides; those after it have to, too.
    fn first_sliding(self, types: &[Value], layers: usize) -> Result<usize, Fault> {
        let refused = |problem: String| Err(("layer_types".into(), problem));
        let known = |t: &&Value| matches!(t.as_str(), Some("full_attention" | "sliding_attention"));
        if let Some(other) = types.iter().find(|t| !known(t)) {
            let other = escaped_line(&other.to_string()).into_owned();
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

    fn dropout_notes(self, fields: &[&str]) -> Vec<String> {
        let set = |field: &&&str| {
            let value = self.get(field).and_then(Value::as_f64);
            value.is_some_and(|p| p != 0.0)
        };
        let note = |field: &&str| {
            let value = self.get(field).expect("just looked at");
            format!(
                "config.json says {field} = {value}; no dropout is taken from it: set dropout (one \
                 share for all places) to train with any"
            )
        };
        fields.iter().filter(set).map(note).collect()
    }
}

/// Families with LLaMA's names.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Family {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
}

#[cfg(test)]
#[path = "hf_config_tests.rs"]
mod tests;
