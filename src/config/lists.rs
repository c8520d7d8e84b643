//! A file of settings with what is written in another form than the fields have: an array where a
//! flag takes a list becomes the text that the flag has, and the values behind a setting become
//! settings by their own keys.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};
use toml::{Table, Value};

use super::{ConfigError, OPTIONS, values};
use zeropp_core::files::escaped_line;

/// Settings whose text is a list, entries with commas between them.
const LISTS: [&str; 6] = ["data-mix", "freeze", "lora-targets", "no-decay", "split", "stages"];
/// Several sources of it are `data-mix`, as they are where the flag is given several times.
const DATA: &str = "data";
/// The most characters of a file that a message quotes.
const QUOTED_MAX: usize = 60;

/// The text of a file with every array as the text of its flag, and the values of a setting behind
/// all lines, by their keys; all else stands on its line.
///
/// # Errors
/// An array where a setting takes one value, or with entries that no list of settings has; values
/// that a setting has not.
pub(super) fn as_texts(text: &str) -> Result<String, ConfigError> {
    let mut texts = text.to_owned();
    // What is no TOML is for its reader to say.
    let Ok(table) = DeTable::parse(text) else { return Ok(texts) };
    let mut changes: Vec<(Range<usize>, String)> = Vec::new();
    let mut behind: Vec<(String, Value)> = Vec::new();
    for (key, value) in table.get_ref() {
        let name: &str = key.get_ref();
        let Some(option) = OPTIONS.iter().find(|option| option.key == name) else { continue };
        let source = &text[value.span()];
        // As many lines, so that messages about what follows name the right one.
        let lines = "\n".repeat(source.matches('\n').count());
        match value.get_ref() {
            DeValue::Array(entries) => {
                let entries = list(name, source, entries)?;
                if name == DATA && (entries.len() > 1 || is_weighed(entries[0])) {
                    changes.push((key.span(), "data-mix".into()));
                }
                let joined = Value::String(entries.join(","));
                changes.push((value.span(), format!("{joined}{lines}")));
            }
            DeValue::String(written) => {
                let Some(mut parts) = option.parts_of(written)? else { continue };
                match parts.remove(name) {
                    Some(head) => changes.push((value.span(), format!("{head}{lines}"))),
                    None => changes.push((key.span().start..value.span().end, lines)),
                }
                behind.extend(parts);
            }
            _ => {}
        }
    }
    changes.sort_by_key(|(place, _)| std::cmp::Reverse(place.start));
    changes.into_iter().for_each(|(place, change)| texts.replace_range(place, &change));
    let mut given: Table =
        table.get_ref().keys().map(|key| (key.get_ref().to_string(), true.into())).collect();
    for (key, value) in behind {
        texts.push_str(&format!("\n{key} = {value}"));
        values::insert(&mut given, key, value)?;
    }
    Ok(texts)
}

/// The entries of an array, which stands as `source` behind the setting.
fn list<'a>(
    name: &str,
    source: &str,
    entries: &'a [Spanned<DeValue>],
) -> Result<Vec<&'a str>, ConfigError> {
    let wrong = |problem: &str, help: &str| {
        let shown: String = escaped_line(source).chars().take(QUOTED_MAX).collect();
        Err(ConfigError::value(name, shown, problem, help))
    };
    if name != DATA && !LISTS.contains(&name) {
        return wrong("is a list, and the setting takes one value", "write the value alone");
    }
    let entries: Option<Vec<&str>> = entries.iter().map(|entry| word(entry.get_ref())).collect();
    match entries {
        Some(entries) if entries.is_empty() => {
            wrong("the list is empty", "name something, or leave it out")
        }
        Some(entries) if entries.iter().all(|entry| !entry.contains(',')) => Ok(entries),
        _ => {
            let help = "use texts or numbers without a comma, such as [\"a\", \"b\"]";
            wrong("an entry is no text or number, or has a comma", help)
        }
    }
}

/// Whether an entry of `data` is a source with its weight.
fn is_weighed(entry: &str) -> bool {
    entry.rsplit_once('=').is_some_and(|(_, weight)| weight.trim().parse::<f64>().is_ok())
}

/// An entry as a flag would have it.
fn word<'a>(entry: &'a DeValue) -> Option<&'a str> {
    match entry {
        DeValue::String(text) => Some(text),
        DeValue::Integer(n) if n.radix() == 10 => Some(n.as_str()),
        DeValue::Float(x) => Some(x.as_str()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::Config;

    #[test]
    fn an_array_is_read_wherever_a_flag_takes_a_list() {
        let same = [
            ("split = [9, 1]", "split = '9,1'"),
            ("stages = [ 3,\n 4, # four\n 1 ] # in all", "stages = '3,4,1'"),
            ("no-decay = ['norms', 'biases']", "no-decay = 'norms,biases'"),
            ("lora-targets = [\"q\", \"v\"]\nlora-rank = 2", "lora-targets='q,v'\nlora-rank = 2"),
            ("freeze = ['wte', 'h.0']", "freeze = 'wte,h.0'"),
            ("data-mix = ['a=1', 'b=2']", "data-mix = 'a=1,b=2'"),
            ("data = [\"a.bin=0.7\", \"b.bin=0.3\"]", "data-mix = 'a.bin=0.7,b.bin=0.3'"),
            ("data = [\"book.txt\"]", "data = 'book.txt'"),
        ];
        for (array, text) in same {
            let [array, text] = [array, text].map(|t| Config::from_toml(t).unwrap());
            assert_eq!(array, text);
        }
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("run.toml");
        std::fs::write(&file, "data = ['a.bin=0.7', 'b.bin=0.3']").unwrap();
        let mix = Config::load(&file).unwrap().data_mix.unwrap();
        assert!(mix.starts_with(&format!("{}/a.bin=0.7,", dir.path().display())), "{mix}");
    }

    #[test]
    fn an_array_that_is_none_of_a_setting_is_named_with_what_would_work() {
        for (text, said) in [
            ("pp = [1, 2]", "pp = [1, 2]: is a list, and the setting takes one value; write"),
            ("split = []", "split = []: the list is empty; name"),
            ("split = [[9], 1]", "split = [[9], 1]: an entry is no text or number"),
            ("data = ['a,b']", "data = ['a,b']: an entry is no text or number, or has a comma"),
            ("split = [\n9,\n1]\nstepz = 1", "line 4: unknown key `stepz`"),
        ] {
            let error = Config::from_toml(text).expect_err(text).to_string();
            assert!(error.starts_with(said), "{text}: {error}");
        }
    }

    #[test]
    fn a_table_is_refused_in_one_way_whatever_its_name() {
        for name in ["model", "training", "data", "stages"] {
            for text in [format!("[{name}]\nlayers = 2"), format!("{name} = {{ layers = 2 }}")] {
                let error = Config::from_toml(&text).expect_err(&text).to_string();
                let said = format!("line 1: unknown key `{name}`; it is a table");
                assert!(error.starts_with(&said), "{text}: {error}");
                assert!(error.contains("without tables"), "{error}");
            }
        }
    }
}
