//! Which model the settings name: a family that takes its sizes from them, a preset, the
//! `config.json` of a Hugging Face folder, or a GGUF file.

use std::path::{Path, PathBuf};

use toml::Table;
use zeropp_core::choice::Activation;
use zeropp_core::model::decoder::{
    Biases, Decoder, Moe, Naming, Norm, Positions, Rotary, RotaryScaling, SharedExpert,
    SigmoidScores,
};
use zeropp_core::model::hf_config::{self, HfConfig};
use zeropp_core::model::presets::{PRESETS, Preset};
use zeropp_weights::Weights;

use super::{Config, ConfigError};

/// Longest sample that a preset or file sets by itself; its model may take longer ones.
const SEQ_DEFAULT_MAX: usize = 1024;

/// Families whose sizes are settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SizedFamily {
    Gpt,
    Llama,
    Mistral,
    Mixtral,
    Qwen2,
    Qwen2Moe,
    Qwen3,
    Qwen3Moe,
    Dots1,
}

impl SizedFamily {
    fn has_experts(self) -> bool {
        use SizedFamily::{Dots1, Mixtral, Qwen2Moe, Qwen3Moe};
        matches!(self, Mixtral | Qwen2Moe | Qwen3Moe | Dots1)
    }
}

const FAMILIES: [(&str, SizedFamily); 9] = [
    ("gpt", SizedFamily::Gpt),
    ("llama", SizedFamily::Llama),
    ("mistral", SizedFamily::Mistral),
    ("mixtral", SizedFamily::Mixtral),
    ("qwen2", SizedFamily::Qwen2),
    ("qwen3", SizedFamily::Qwen3),
    ("qwen2-moe", SizedFamily::Qwen2Moe),
    ("qwen3-moe", SizedFamily::Qwen3Moe),
    ("dots1", SizedFamily::Dots1),
];

/// The meaning of the setting `model`.
enum Named {
    Family(SizedFamily),
    /// A preset or a file, which has sizes of its own.
    Sized(Box<HfConfig>),
}

/// Whether a value of `model` is a path: it has a slash, or ends in `.json` or `.gguf`.
pub(crate) fn is_path(model: &str) -> bool {
    let has_end = model.ends_with(".json") || is_gguf(Path::new(model));
    has_end || model.contains(std::path::is_separator)
}

/// Whether a path is named as GGUF files are.
pub(crate) fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|end| end == "gguf")
}

impl Config {
    /// The `config.json` or GGUF file that `model` names.
    pub(super) fn model_file(&self) -> Option<PathBuf> {
        let path = is_path(&self.model).then(|| PathBuf::from(&self.model))?;
        Some(if path.is_dir() { path.join("config.json") } else { path })
    }

    /// The folder or GGUF file that `model` names, a folder also by its `config.json`.
    pub(crate) fn model_place(&self) -> Option<PathBuf> {
        let file = self.model_file()?;
        if is_gguf(&file) { Some(file) } else { file.parent().map(Path::to_path_buf) }
    }

    /// The default settings for a family, a preset, a `config.json` or a GGUF file, with its sizes.
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

    /// Notes in sentences: features of the model's file that training does not have, and samples
    /// that are longer than the model was made for.
    ///
    /// # Errors
    /// As [`decoder`](Self::decoder).
    pub(crate) fn model_notes(&self) -> Result<Vec<String>, ConfigError> {
        Ok(match self.named()? {
            Named::Family(_) => Vec::new(),
            Named::Sized(mut sized) => {
                let (seq, context) = (self.seq, sized.decoder.context);
                if seq > context {
                    let made = format!("model {} was made for {context} tokens", self.model);
                    sized.notes.push(format!("seq = {seq}: {made}"));
                }
                sized.notes
            }
        })
    }

    /// The settings with the sizes of the model that they name, but for those that were `given`.
    pub(super) fn with_model_sizes(self, given: &Table) -> Result<Config, ConfigError> {
        let mut config = self;
        let absent = |key: &str| !given.contains_key(key);
        let d = match config.named()? {
            Named::Family(SizedFamily::Gpt) => return Ok(config),
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
        for (key, field, value) in [
            ("experts", &mut config.experts, d.moe.map(|moe| moe.experts)),
            ("experts-per-token", &mut config.experts_per_token, d.moe.map(|moe| moe.chosen)),
        ] {
            if absent(key) {
                *field = value;
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
            if Path::new(model).is_dir() {
                let help = format!("for the folder of this name write {model}/");
                return Err(ConfigError::value("model", model, "is not known", help));
            }
            let families = FAMILIES.iter().map(|(name, _)| *name);
            let known: Vec<_> = families.chain(PRESETS.iter().map(|preset| preset.name)).collect();
            let help = format!(
                "use one of {}, or the path of a config.json, of its folder, with a slash, or of a \
                 GGUF file",
                known.join(", ")
            );
            return Err(ConfigError::value("model", model, "is not known", help));
        }
        let path = Path::new(model);
        let (sized, what) = match is_gguf(path) {
            true => (described_by_gguf(path), "a whole GGUF file"),
            false => (hf_config::read(path).map_err(|error| error.to_string()), "the config.json"),
        };
        match sized {
            Ok(sized) => Ok(Named::Sized(Box::new(sized))),
            Err(said) => {
                // The value is the path; that of a folder's file is another.
                let problem = said.strip_prefix(&format!("{model}: ")).unwrap_or(&said);
                let families = hf_config::MODEL_TYPES.join(", ");
                let help = format!("use {what} of one of these families: {families}");
                Err(ConfigError::value("model", model, problem, help))
            }
        }
    }

    /// A model of this family with the sizes that are set.
    fn of_family(&self, family: SizedFamily, vocabulary: usize) -> Result<Decoder, ConfigError> {
        let gpt = family == SizedFamily::Gpt;
        let gated = self.activation == Activation::Swiglu;
        if gated == gpt {
            let problem = format!("is not what model {} has", self.model);
            let help = if gpt { "use gelu or gelu-tanh" } else { "use swiglu" };
            return Err(ConfigError::value("activation", self.activation, problem, help));
        }
        let hidden = self.hidden;
        let moe = self.moe_of_family(family)?;
        // As many weights as two matrices of 4h, in steps that suit products.
        let inner = if gpt { 4 * hidden } else { (8 * hidden / 3).next_multiple_of(64) };
        let intermediate = self.intermediate.unwrap_or(match moe {
            // About as many weights are multiplied with a token as without experts.
            Some(moe) => {
                let experts = moe.chosen.max(1) + usize::from(moe.shared.is_some());
                inner.div_ceil(experts).next_multiple_of(64)
            }
            None => inner,
        });
        let qwen =
            !matches!(family, SizedFamily::Llama | SizedFamily::Mistral | SizedFamily::Mixtral);
        let theta = if qwen { 1e6 } else { 1e4 };
        Ok(Decoder {
            naming: if gpt { Naming::Gpt2 } else { Naming::Llama },
            layers: self.layers,
            hidden,
            heads: self.heads,
            kv_heads: self.kv_heads.unwrap_or(self.heads),
            head_dim: self.head_dim.unwrap_or(hidden / self.heads.max(1)),
            intermediate,
            vocabulary,
            vocabulary_multiple: self.vocab_multiple,
            norm: match family {
                SizedFamily::Gpt => Norm::Layer { eps: 1e-5 },
                _ => Norm::Rms { eps: if qwen { 1e-6 } else { 1e-5 } },
            },
            positions: match family {
                SizedFamily::Gpt => Positions::Learned(self.seq),
                _ => Positions::Rotary(Rotary { theta, scaling: RotaryScaling::None }),
            },
            biases: match family {
                SizedFamily::Gpt => Biases::ALL,
                SizedFamily::Qwen2 | SizedFamily::Qwen2Moe => Biases { qkv: true, ..Biases::NONE },
                _ => Biases::NONE,
            },
            qk_norm: matches!(
                family,
                SizedFamily::Qwen3 | SizedFamily::Qwen3Moe | SizedFamily::Dots1
            ),
            activation: self.activation,
            tied: self.tied,
            window: None,
            // A shared expert is as large as one of the others.
            moe: moe.map(|moe| Moe {
                inner: intermediate,
                shared: moe.shared.map(|of| SharedExpert { inner: intermediate, ..of }),
                ..moe
            }),
            context: self.seq,
        })
    }

    /// The experts of a family that has some, without their size.
    fn moe_of_family(&self, family: SizedFamily) -> Result<Option<Moe>, ConfigError> {
        if family.has_experts() {
            let experts = self.experts.unwrap_or(8);
            let chosen = self.experts_per_token.unwrap_or(2);
            let shared = |gated| Some(SharedExpert { inner: 0, gated });
            let moe = Moe::new(experts, chosen, 0);
            return Ok(Some(match family {
                SizedFamily::Qwen2Moe => Moe { shared: shared(true), ..moe },
                SizedFamily::Dots1 => {
                    let sigmoid = Some(SigmoidScores::PLAIN);
                    Moe { sigmoid, shared: shared(false), ..moe }
                }
                _ => moe,
            }));
        }
        let given = [("experts", self.experts), ("experts-per-token", self.experts_per_token)];
        match given.into_iter().find_map(|(field, given)| Some((field, given?))) {
            Some((field, given)) => {
                let problem = format!("model {} has no experts", self.model);
                let help = format!("leave {field} out, or use model qwen3-moe or mixtral");
                Err(ConfigError::value(field, given, problem, help))
            }
            None => Ok(None),
        }
    }

    /// Refuses settings that say otherwise than a preset or a file.
    fn agrees_with(&self, d: &Decoder) -> Result<(), ConfigError> {
        let sizes = [
            ("hidden", Some(self.hidden), d.hidden),
            ("heads", Some(self.heads), d.heads),
            ("kv-heads", self.kv_heads, d.kv_heads),
            ("head-dim", self.head_dim, d.head_dim),
            ("intermediate", self.intermediate, d.intermediate),
            ("experts", self.experts, d.moe.map_or(0, |moe| moe.experts)),
            ("experts-per-token", self.experts_per_token, d.moe.map_or(0, |moe| moe.chosen)),
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

    /// Refuses samples that are longer than the model's positions.
    fn check_seq(&self, d: &Decoder) -> Result<(), ConfigError> {
        match d.positions {
            Positions::Learned(places) if self.seq > places => {
                let problem = format!("model {} has {places} positions", self.model);
                let help = format!("use 1 to {places}, or another model");
                Err(ConfigError::value("seq", self.seq, problem, help))
            }
            _ => Ok(()),
        }
    }
}

/// The model in a GGUF file, by its key-values.
fn described_by_gguf(path: &Path) -> Result<HfConfig, String> {
    let weights = Weights::open(path).map_err(|error| error.to_string())?;
    let Some(config) = weights.gguf_config().map_err(|error| error.to_string())? else {
        return Err(
            "its key-values do not say which llama, qwen2, qwen3, qwen2moe or qwen3moe this is"
                .into(),
        );
    };
    hf_config::parse(&config.to_string(), path).map_err(|error| error.to_string())
}
