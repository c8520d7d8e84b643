//! Whether what a message says would work does.

use super::{Config, OPTIONS, OptionKind, Table};

/// Advice can be followed: settings that the message names are some, and with the first value that
/// it says would work, or without the setting, it is not said again.
pub(super) fn followed(config: &Config, error: &str) {
    let Some((shown, rest)) = error.split_once(" = ") else { return };
    let part = OPTIONS.iter().find(|option| option.part_of == Some(shown));
    let field = part.map_or(shown, |option| option.key);
    let help = rest.rsplit("; ").next().unwrap_or_default();
    for word in help.split("set ").skip(1) {
        let key = word.split([' ', ',']).next().unwrap_or_default();
        let known = OPTIONS.iter().any(|option| option.key == key) || key == "a";
        assert!(known, "{key} is no setting: {error}");
    }
    let accepted = |key: &str, value: &str| {
        let option = OPTIONS.iter().find(|option| option.key == key)?;
        let is_text = matches!(option.kind, OptionKind::Text | OptionKind::Path);
        let is_value = !is_text || value.starts_with(|c: char| c.is_ascii_digit());
        let value = option.kind.parse(value).ok().filter(|_| is_value)?;
        config.with(Table::from_iter([(key.to_owned(), value)])).ok()
    };
    let up_to_comma = |text: &str| text.trim_end_matches(',').to_owned();
    let mut changed = Vec::new();
    for such in ["such as ", "as in "] {
        let value = help.split(such).nth(1).and_then(|text| text.split([' ', ';']).next());
        changed.extend(value.and_then(|value| accepted(field, &up_to_comma(value))));
    }
    if let Some(works) = help.strip_prefix("use ") {
        let mut words = works.split(' ').map(up_to_comma);
        let (first, second) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        changed.extend(accepted(field, &first).or_else(|| accepted(&first, &second)));
    }
    if help == "leave it out" || help.ends_with(", or leave it out") {
        changed.push(config.without(&[field]).unwrap());
    }
    for changed in changed {
        let Err(again) = changed.validate() else { continue };
        let again = again.to_string();
        assert!(!again.starts_with(&format!("{shown} = ")), "{error}: followed, it says {again}");
    }
}
