//! A configuration as TOML text: reading, overriding, printing.

use std::path::Path;

use toml::de::{DeTable, DeValue};
use toml::{Table, Value};

use super::model::is_path;
use super::{Config, ConfigError, OPTIONS, OptionInfo, OptionKind, foreign, lists, values};
use zeropp_core::files::{escaped, escaped_line, read_text};
use zeropp_plan::layout::HOST;

/// Largest configuration file, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// The most characters of a key that a message has.
const KEY_SHOWN_MAX: usize = 100;
/// Stands for standard output in place of a file.
const STANDARD_OUTPUT: &str = "-";

impl Config {
    /// Reads a TOML file. Relative paths in it count from its folder.
    ///
    /// # Errors
    /// The file cannot be read, or is not a configuration; the message has file, line and key.
    pub fn load(path: &Path) -> Result<Config, ConfigError> {
        let text = read_text(path, FILE_BYTES_MAX)
            .map_err(|source| ConfigError::Read { path: path.into(), source })?;
        let in_file = |error| ConfigError::InFile { path: path.into(), error: Box::new(error) };
        let text = lists::as_texts(&text).map_err(in_file)?;
        let config = Config::as_written(&text).map_err(in_file)?;
        let given: Table = text.parse().map_err(readable).map_err(in_file)?;
        let mut from_here = Table::new();
        for option in OPTIONS {
            let Some(Value::String(value)) = given.get(option.key) else { continue };
            if let Some(folder) = path.parent().filter(|_| option.key == "data-mix") {
                let from = |path: &str| folder.join(path).to_string_lossy().into_owned();
                from_here.insert(option.key.into(), Config::mix_with(value, from).into());
                continue;
            }
            let is_file = match option.key {
                "schedule" => config.schedule_file().is_some(),
                "model" => is_path(value),
                _ => false,
            };
            if !is_file && option.kind != OptionKind::Path {
                continue;
            }
            // An empty path stays one, and not the folder.
            let is_host = option.key.ends_with("-out") && value == HOST;
            if let Some(folder) = path.parent().filter(|_| !is_host && is_relative_path(value)) {
                let joined = folder.join(value).into_os_string().into_string();
                let joined = joined.map_err(|path| not_utf8(option.key, &path)).map_err(in_file)?;
                from_here.insert(option.key.into(), joined.into());
            }
        }
        let config = config.replaced(from_here)?.with_model_sizes(&given).map_err(in_file)?;
        Ok(Config { file: Some(path.into()), ..config })
    }

    /// Reads TOML text. Keys that are left out have their defaults, or the sizes of the preset or
    /// file that `model` names.
    ///
    /// # Errors
    /// Text that is not TOML, an unknown key, a value of the wrong type, or an unknown model.
    pub fn from_toml(text: &str) -> Result<Config, ConfigError> {
        let text = lists::as_texts(text)?;
        let config = Config::as_written(&text)?;
        config.with_model_sizes(&text.parse().map_err(readable)?)
    }

    fn as_written(text: &str) -> Result<Config, ConfigError> {
        let table = DeTable::parse(text).map_err(readable)?;
        for (key, value) in table.get_ref() {
            if let DeValue::Integer(n) = value.get_ref() {
                // TOML's integers have 64 bits with a sign.
                if i64::from_str_radix(n.as_str(), n.radix()).is_err() {
                    let help = format!("use at most {}", i64::MAX);
                    return Err(ConfigError::value(key.get_ref(), n, "is too large", help));
                }
            }
            let line = line_of(text, key.span().start);
            if value.get_ref().is_table() {
                let help = "it is a table; the keys are the flags of `zeropp run --help`, without \
                            tables: write `layers = 12` and no [model] above it";
                let key = escaped_line(key.get_ref()).into();
                return Err(ConfigError::UnknownKey { key, line, help: help.into() });
            }
            if !OPTIONS.iter().any(|o| o.key == key.get_ref()) {
                return Err(unknown_key(key.get_ref(), line));
            }
        }
        toml::from_str(text).map_err(readable)
    }

    /// Replaces the settings named in `overrides`, as flags do. Where another model is among them,
    /// its sizes replace what was set, but for what `overrides` says itself.
    ///
    /// # Errors
    /// An unknown key, a value of the wrong type, or an unknown model.
    pub fn with(&self, overrides: Table) -> Result<Config, ConfigError> {
        let overrides = values::expanded(overrides)?;
        if !overrides.contains_key("model") {
            return self.replaced(overrides);
        }
        self.replaced(overrides.clone())?.with_model_sizes(&overrides)
    }

    fn replaced(&self, overrides: Table) -> Result<Config, ConfigError> {
        let mut table = self.table()?;
        table.extend(overrides);
        let config = table.try_into().map_err(readable)?;
        Ok(Config { file: self.file.clone(), ..config })
    }

    /// The same configuration with these settings as they are by default, as if they were not
    /// given.
    ///
    /// # Errors
    /// As [`to_toml`](Self::to_toml).
    pub fn without(&self, keys: &[&str]) -> Result<Config, ConfigError> {
        let mut table = self.table()?;
        table.retain(|key, _| !keys.contains(&key));
        let config = table.try_into().map_err(readable)?;
        Ok(Config { file: self.file.clone(), ..config })
    }

    /// The configuration as a file that reads back to the same: every setting that has a value,
    /// under the headings of the manual.
    ///
    /// # Errors
    /// A path that is not UTF-8, or a number beyond TOML's 64-bit integers.
    pub fn to_toml(&self) -> Result<String, ConfigError> {
        self.to_toml_beside(None)
    }

    /// [`to_toml`](Self::to_toml), and as comments those settings of `resolved` that follow from
    /// others. As comments, since a value that was given no longer follows: a file that says
    /// `min-lr = 3e-4` refuses a smaller `lr`.
    ///
    /// # Errors
    /// As [`to_toml`](Self::to_toml).
    pub fn to_toml_beside(&self, resolved: Option<&Config>) -> Result<String, ConfigError> {
        let own = self.written()?;
        let follows = resolved.map_or(Ok(Vec::new()), Config::written)?;
        let find = |all: &[(_, Value)], option: &OptionInfo| {
            let found = |(other, _): &&(&OptionInfo, Value)| other.key == option.key;
            all.iter().find(found).map(|(_, value)| value.clone())
        };
        let mut text = String::new();
        let mut heading = "";
        for option in OPTIONS {
            let key = option.key;
            let own = find(&own, option);
            let follows = find(&follows, option).filter(|value| own.as_ref() != Some(value));
            // One line per key, so that it is a file, too, where every comment is taken up.
            let line = match (own, follows) {
                (Some(own), Some(follows)) => format!("{key} = {own}  # {follows}\n"),
                (Some(own), None) => format!("{key} = {own}\n"),
                (None, Some(follows)) => format!("# {key} = {follows}\n"),
                (None, None) => continue,
            };
            if option.heading != heading {
                let blank = if heading.is_empty() { "" } else { "\n" };
                text.push_str(&format!("{blank}# {}\n", option.heading));
                heading = option.heading;
            }
            text.push_str(&line);
        }
        Ok(text)
    }

    /// The value of one setting in this configuration, or `None` where it has none.
    pub fn get(&self, key: &str) -> Option<Value> {
        self.table().ok()?.remove(key)
    }

    pub(super) fn table(&self) -> Result<Table, ConfigError> {
        let no_toml = |e| {
            let help = "use paths in UTF-8, and numbers up to 9223372036854775807";
            ConfigError::Toml(format!("a setting has a value that TOML cannot hold ({e}); {help}"))
        };
        Table::try_from(self).map_err(no_toml)
    }
}

/// The settings that the text of a file gives, values of settings by their own keys.
///
/// # Errors
/// Text that is not TOML, or values that a setting has not.
pub fn as_table(text: &str) -> Result<Table, ConfigError> {
    lists::as_texts(text)?.parse().map_err(readable)
}

/// TOML's own message, with Rust's type names put into words.
fn readable(error: toml::de::Error) -> ConfigError {
    // It quotes the file.
    let text = error.to_string();
    let text = escaped(text.trim_end()).replace("expected usize", "expected a whole number from 0");
    let text = text.replace("expected u64", "expected a whole number from 0");
    ConfigError::Toml(text.replace("expected f64", "expected a number"))
}

/// Whether a path in a file counts from that file's folder.
fn is_relative_path(value: &str) -> bool {
    !value.is_empty() && value != STANDARD_OUTPUT && Path::new(value).is_relative()
}

fn not_utf8(key: &str, path: &std::ffi::OsStr) -> ConfigError {
    let help = "use a folder whose name is UTF-8, or give an absolute path";
    ConfigError::value(key, path.display(), "is not UTF-8", help)
}

fn line_of(text: &str, offset: usize) -> usize {
    text[..offset].matches('\n').count() + 1
}

fn unknown_key(key: &str, line: usize) -> ConfigError {
    let wanted = key.replace('_', "-").to_lowercase();
    let distance = |o: &&super::OptionInfo| edit_distance(&wanted, o.key);
    let nearest = OPTIONS.iter().min_by_key(distance).expect("there are options");
    let help = if let Some(advice) = foreign::lines_for(key) {
        advice
    } else if edit_distance(&wanted, nearest.key) <= wanted.len().max(3) / 3 {
        format!("did you mean `{}`?", nearest.key)
    } else {
        "the keys are the flags of `zeropp run --help`, without tables".into()
    };
    let key = escaped_line(key).chars().take(KEY_SHOWN_MAX).collect();
    ConfigError::UnknownKey { key, line, help }
}

/// Insertions, deletions and replacements of a character that turn `a` into `b`.
fn edit_distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.chars().count()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.chars().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(row[j + 1] + 1);
        }
    }
    row[b.chars().count()]
}
