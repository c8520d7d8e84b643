//! Which model the settings name: a family that takes its sizes from them, a preset, or the
//! `config.json` of a Hugging Face folder.

use std::path::Path;

use toml::Table;
use zeropp_core::choice::Activation;
use zeropp_core::model::decoder::{
    Biases, Decoder, Naming, Norm, Positions, Rotary, RotaryScaling,
};
use zeropp_core::model::hf_config::{self, HfConfig};
use zeropp_core::model::presets::{PRESETS, Preset};

use super::{Config, ConfigError};

/// Longest sample that a preset or file sets by itself; its model may take longer ones.
const SEQ_DEFAULT_MAX: usize = 1024;

/// Families whose sizes are settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    Gpt,
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
}

const FAMILIES: [(&str, Family); 5] = [
    ("gpt", Family::Gpt),
    ("llama", Family::Llama),
    ("mistral", Family::Mistral),
    ("qwen2", Family::Qwen2),
    ("qwen3", Family::Qwen3),
];

/// What the setting `model` stands for.
enum Named {
    Family(Family),
    /// A preset or a file, which has sizes of its own.
    Sized(Box<HfConfig>),
}

/// Whether a value of `model` is a path: it has a slash, or ends in `.json`.
pub(super) fn is_path(model: &str) -> bool {
    model.contains(std::path::is_separator) || model.ends_with(".json")
}

impl Config {
    /// The default settings for a family, a preset or a `config.json`, with its sizes.
    ///
    /// ```
    /// use zeropp::Config;
    ///
    /// let config = Config { layers: 4, ..Config::for_model("qwen3-0.6b")? };
    /// assert_eq!((config.hidden, config.kv_heads, config.head_dim), (1024, Some(8), Some(128)));
    /// # Ok::<(), zeropp::config::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// A name that is none of these, or a file that does not describe one of the families.
    pub fn for_model(model: &str) -> Result<Config, ConfigError> {
        Config::default().with(Table::from_iter([("model".to_owned(), model.into())]))
    }

    /// The model that the settings describe, over `vocabulary` token ids.
    ///
    /// # Errors
    /// A model that is not known, a setting that contradicts it, and samples that it cannot take.
    pub fn decoder(&self, vocabulary: usize) -> Result<Decoder, ConfigError> {
        let decoder = match self.named()? {
            Named::Family(family) => self.of_family(family, vocabulary)?,
            Named::Sized(sized) => {
                self.agrees_with(&sized.decoder)?;
                Decoder {
                    layers: self.layers,
                    vocabulary,
                    vocabulary_multiple: self.vocab_multiple,
                    ..sized.decoder
                }
            }
        };
        decoder.check().map_err(|(field, problem)| {
            let value = self.get(field).map_or("default".into(), |value| value.to_string());
            ConfigError::value(field, value, problem, "use sizes that do, or another model")
        })?;
        self.check_seq(&decoder)?;
        Ok(decoder)
    }

    /// What the model's file asks for that training does not do, in sentences.
    ///
    /// # Errors
    /// As [`decoder`](Self::decoder).
    pub(crate) fn model_notes(&self) -> Result<Vec<String>, ConfigError> {
        Ok(match self.named()? {
            Named::Family(_) => Vec::new(),
            Named::Sized(sized) => sized.notes,
        })
    }

    /// The settings with the sizes of the model that they name, but for those that were `given`.
    pub(super) fn with_model_sizes(self, given: &Table) -> Result<Config, ConfigError> {
        let mut config = self;
        let absent = |key: &str| !given.contains_key(key);
        let d = match config.named()? {
            Named::Family(Family::Gpt) => return Ok(config),
            Named::Family(_) => {
                if absent("activation") {
                    config.activation = Activation::Swiglu;
                }
                return Ok(config);
            }
            Named::Sized(sized) => sized.decoder,
        };
        for (key, field, value) in [
            ("layers", &mut config.layers, d.layers),
            ("hidden", &mut config.hidden, d.hidden),
            ("heads", &mut config.heads, d.heads),
            ("seq", &mut config.seq, d.context.min(SEQ_DEFAULT_MAX)),
        ] {
            if absent(key) {
                *field = value;
            }
        }
        for (key, field, value) in [
            ("kv-heads", &mut config.kv_heads, d.kv_heads),
            ("head-dim", &mut config.head_dim, d.head_dim),
            ("intermediate", &mut config.intermediate, d.intermediate),
            ("vocab", &mut config.vocab, d.vocabulary),
        ] {
            if absent(key) {
                *field = Some(value);
            }
        }
        if absent("tied") {
            config.tied = d.tied;
        }
        if absent("activation") {
            config.activation = d.activation;
        }
        Ok(config)
    }

    fn named(&self) -> Result<Named, ConfigError> {
        let model = self.model.as_str();
        if let Some((_, family)) = FAMILIES.iter().find(|(name, _)| *name == model) {
            return Ok(Named::Family(*family));
        }
        if let Some(preset) = Preset::find(model) {
            let sized = HfConfig { decoder: preset.decoder, notes: Vec::new() };
            return Ok(Named::Sized(Box::new(sized)));
        }
        if !is_path(model) {
            let families = FAMILIES.iter().map(|(name, _)| *name);
            let known: Vec<_> = families.chain(PRESETS.iter().map(|preset| preset.name)).collect();
            let help = format!(
                "use one of {}, or the path of a config.json or of its folder, with a slash",
                known.join(", ")
            );
            return Err(ConfigError::value("model", model, "is not known", help));
        }
        match hf_config::read(Path::new(model)) {
            Ok(sized) => Ok(Named::Sized(Box::new(sized))),
            Err(error) => {
                let families = hf_config::MODEL_TYPES.join(", ");
                let help = format!("use the config.json of one of these families: {families}");
                Err(ConfigError::value("model", model, error.to_string(), help))
            }
        }
    }

    /// A model of this family with the sizes that are set.
    fn of_family(&self, family: Family, vocabulary: usize) -> Result<Decoder, ConfigError> {
        let gpt = family == Family::Gpt;
        let gated = self.activation == Activation::Swiglu;
        if gated == gpt {
            let problem = format!("is not what model {} has", self.model);
            let help = if gpt { "use gelu or gelu-tanh" } else { "use swiglu" };
            return Err(ConfigError::value("activation", self.activation, problem, help));
        }
        let hidden = self.hidden;
        // As many weights as two matrices of 4h, in steps that suit products.
        let inner = if gpt { 4 * hidden } else { (8 * hidden / 3).next_multiple_of(64) };
        let qwen = matches!(family, Family::Qwen2 | Family::Qwen3);
        let theta = if qwen { 1e6 } else { 1e4 };
        Ok(Decoder {
            naming: if gpt { Naming::Gpt2 } else { Naming::Llama },
            layers: self.layers,
            hidden,
            heads: self.heads,
            kv_heads: self.kv_heads.unwrap_or(self.heads),
            head_dim: self.head_dim.unwrap_or(hidden / self.heads.max(1)),
            intermediate: self.intermediate.unwrap_or(inner),
            vocabulary,
            vocabulary_multiple: self.vocab_multiple,
            norm: match family {
                Family::Gpt => Norm::Layer { eps: 1e-5 },
                _ => Norm::Rms { eps: if qwen { 1e-6 } else { 1e-5 } },
            },
            positions: match family {
                Family::Gpt => Positions::Learned(self.seq),
                _ => Positions::Rotary(Rotary { theta, scaling: RotaryScaling::None }),
            },
            biases: match family {
                Family::Gpt => Biases::ALL,
                Family::Qwen2 => Biases { qkv: true, ..Biases::NONE },
                _ => Biases::NONE,
            },
            qk_norm: family == Family::Qwen3,
            activation: self.activation,
            tied: self.tied,
            window: None,
            context: self.seq,
        })
    }

    /// Refuses settings that say otherwise than a preset or a file.
    fn agrees_with(&self, d: &Decoder) -> Result<(), ConfigError> {
        let sizes = [
            ("hidden", Some(self.hidden), d.hidden),
            ("heads", Some(self.heads), d.heads),
            ("kv-heads", self.kv_heads, d.kv_heads),
            ("head-dim", self.head_dim, d.head_dim),
            ("intermediate", self.intermediate, d.intermediate),
        ];
        let differs = |field: &str, ours: String, theirs: String| {
            let problem = format!("model {} has {theirs}", self.model);
            let help =
                format!("leave {field} out, or use a family, such as llama, or another model");
            Err(ConfigError::value(field, ours, problem, help))
        };
        for (field, ours, theirs) in sizes {
            if let Some(ours) = ours.filter(|ours| *ours != theirs) {
                return differs(field, ours.to_string(), theirs.to_string());
            }
        }
        if self.tied != d.tied {
            return differs("tied", self.tied.to_string(), d.tied.to_string());
        }
        if self.activation != d.activation {
            return differs("activation", self.activation.to_string(), d.activation.to_string());
        }
        Ok(())
    }

    /// Refuses samples that are longer than the model's positions or its attention reach.
    fn check_seq(&self, d: &Decoder) -> Result<(), ConfigError> {
        let refused = |longest: usize, problem: String| {
            let help = format!("use 1 to {longest}, or another model");
            Err(ConfigError::value("seq", self.seq, problem, help))
        };
        if let Positions::Learned(places) = d.positions
            && self.seq > places
        {
            return refused(places, format!("model {} has {places} positions", self.model));
        }
        match d.window {
            Some(window) if self.seq > window => {
                let problem = format!(
                    "attention of model {} slides over a window of {window} tokens, which zeropp \
                     does not do",
                    self.model
                );
                refused(window, problem)
            }
            _ => Ok(()),
        }
    }
}
