//! A configuration as TOML text: reading, overriding, printing.

use std::path::Path;

use toml::de::DeTable;
use toml::{Table, Value};

use super::{Config, ConfigError, OPTIONS};

impl Config {
    /// Reads a TOML file.
    ///
    /// # Errors
    /// The file cannot be read, or is not a configuration; the message has file, line and key.
    pub fn load(path: &Path) -> Result<Config, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.into(), source })?;
        Config::from_toml(&text)
            .map_err(|error| ConfigError::InFile { path: path.into(), error: Box::new(error) })
    }

    /// Reads TOML text. Keys that are left out have their defaults.
    ///
    /// # Errors
    /// Text that is not TOML, an unknown key, or a value of the wrong type.
    pub fn from_toml(text: &str) -> Result<Config, ConfigError> {
        let table = DeTable::parse(text).map_err(readable)?;
        for (key, _) in table.get_ref() {
            if !OPTIONS.iter().any(|o| o.key == key.get_ref()) {
                return Err(unknown_key(key.get_ref(), line_of(text, key.span().start)));
            }
        }
        toml::from_str(text).map_err(readable)
    }

    /// Replaces the settings named in `overrides`, as flags do.
    ///
    /// # Errors
    /// An unknown key or a value of the wrong type.
    pub fn with(&self, overrides: Table) -> Result<Config, ConfigError> {
        let mut table = self.table()?;
        table.extend(overrides);
        table.try_into().map_err(readable)
    }

    /// The configuration as a file that reads back to the same: every setting that has a value,
    /// under the headings of the manual.
    ///
    /// # Errors
    /// A path that is not UTF-8, or a number beyond TOML's 64-bit integers.
    pub fn to_toml(&self) -> Result<String, ConfigError> {
        let table = self.table()?;
        let mut text = String::new();
        let mut heading = "";
        for option in OPTIONS {
            let Some(value) = table.get(option.key) else { continue };
            if option.heading != heading {
                let blank = if heading.is_empty() { "" } else { "\n" };
                text.push_str(&format!("{blank}# {}\n", option.heading));
                heading = option.heading;
            }
            text.push_str(&format!("{} = {value}\n", option.key));
        }
        Ok(text)
    }

    /// The value of one setting in this configuration, or `None` where it has none.
    pub fn get(&self, key: &str) -> Option<Value> {
        self.table().ok()?.remove(key)
    }

    fn table(&self) -> Result<Table, ConfigError> {
        Table::try_from(self).map_err(|e| ConfigError::Toml(format!("cannot be written: {e}")))
    }
}

/// TOML's own message, with Rust's type names put into words.
fn readable(error: toml::de::Error) -> ConfigError {
    let text = error.to_string();
    let text = text.trim_end().replace("expected usize", "expected a whole number from 0");
    let text = text.replace("expected u64", "expected a whole number from 0");
    ConfigError::Toml(text.replace("expected f64", "expected a number"))
}

fn line_of(text: &str, offset: usize) -> usize {
    text[..offset].matches('\n').count() + 1
}

fn unknown_key(key: &str, line: usize) -> ConfigError {
    let wanted = key.replace('_', "-").to_lowercase();
    let distance = |o: &&super::OptionInfo| edit_distance(&wanted, o.key);
    let nearest = OPTIONS.iter().min_by_key(distance).expect("there are options");
    let help = if edit_distance(&wanted, nearest.key) <= wanted.len().max(3) / 3 {
        format!("did you mean `{}`?", nearest.key)
    } else {
        "the keys are the flags of `zeropp run --help`, without tables".into()
    };
    ConfigError::UnknownKey { key: key.into(), line, help }
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
