//! Tables in TOML, for who knows tables in JSON.

use serde_json::{Map, Value};

/// The keys of a table in TOML, as JSON has them.
///
/// # Errors
/// Text that is no TOML, and numbers that JSON has no word for, with their key.
pub fn toml_keys(text: &str) -> Result<Map<String, Value>, String> {
    let table: toml::Table = text.parse().map_err(|e: toml::de::Error| e.to_string())?;
    let is_number = |value: &toml::Value| value.as_float().is_none_or(f64::is_finite);
    let is_good = |value: &toml::Value| match value {
        toml::Value::Array(list) => list.iter().all(is_number),
        value => is_number(value),
    };
    if let Some((key, value)) = table.iter().find(|(_, value)| !is_good(value)) {
        return Err(format!("{key}: found {value}; a number is needed"));
    }
    match serde_json::to_value(table) {
        Ok(Value::Object(map)) => Ok(map),
        other => Err(format!("{other:?} is no table")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_those_of_json_and_what_json_lacks_is_named() {
        let keys = toml_keys("a = 1\nb = [2.5, 1e3]\nc = \"x\" # said\n").unwrap();
        let same: Value = serde_json::from_str(r#"{"a": 1, "b": [2.5, 1e3], "c": "x"}"#).unwrap();
        assert_eq!(Value::Object(keys), same);
        for (text, says) in [
            ("t_r = nan", "t_r: found nan; a number is needed"),
            ("t_r = [1.0, inf]", "t_r: found [1.0, inf]; a number is needed"),
        ] {
            assert_eq!(toml_keys(text).unwrap_err(), says);
        }
        assert!(toml_keys("t_f = ").unwrap_err().starts_with("TOML parse error at line 1"));
    }
}
