//! Settings with values of their own: in `optimizer = "adamw:beta2=0.95"` the setting is `adamw`,
//! and `beta2` a value of it. Each value is a field of [`Config`], named by its row in the table.

use toml::{Table, Value};

use super::{Config, ConfigError, OPTIONS, OptionInfo, OptionKind};

/// Stands between a setting and its values.
const BEHIND: char = ':';
/// Several sources are a list in `data`, and no value behind it.
const MIX: &str = "data-mix";

impl OptionInfo {
    /// Whether it is a setting of its own, as opposed to a value of another.
    pub fn is_setting(&self) -> bool {
        self.part_of.is_none()
    }

    /// The values that a text of this setting may have behind it, with their names there.
    pub fn values(&self) -> impl Iterator<Item = (&'static str, &'static OptionInfo)> + use<> {
        let key = self.key;
        OPTIONS.iter().filter_map(move |option| {
            let (setting, name) = option.part_of?.split_once(BEHIND)?;
            (setting == key).then_some((name, option))
        })
    }

    /// Reads the text of a flag: the setting and its values, each under its key. A text of values
    /// alone leaves the setting as it is.
    ///
    /// # Errors
    /// The setting or the value of it that does not work, and what would.
    pub fn parse(&self, text: &str) -> Result<Table, ConfigError> {
        let wrong = |why: String| self.wrong(text, &why);
        let (head, values) = self.split(text).map_err(wrong)?;
        let mut table = Table::new();
        if let Some(head) = head {
            table.insert(self.key.into(), self.kind.parse(head).map_err(wrong)?);
        }
        let mut last: Option<&OptionInfo> = None;
        for item in values.into_iter().flat_map(|values| values.split(',')) {
            let (name, value) = item.split_once('=').unwrap_or((item, ""));
            let Some((_, option)) = self.values().find(|(name, option)| starts(item, name, option))
            else {
                // The next entry of a list.
                let list = last.filter(|o| o.kind == OptionKind::Text && !item.contains('='));
                let text = list.and_then(|option| table.get_mut(option.key));
                let Some(Value::String(text)) = text else { return Err(wrong(self.unknown(name))) };
                text.push(',');
                text.push_str(item);
                continue;
            };
            let value = if item.contains('=') { value } else { "true" };
            let read = option.kind.parse(value).map_err(|why| option.wrong(value, &why))?;
            if table.insert(option.key.into(), read).is_some() {
                return Err(option.wrong(value, "is there twice; leave one of them out"));
            }
            last = Some(option);
        }
        Ok(table)
    }

    /// The text before the values and the values, of which one may be missing.
    fn split<'a>(&self, text: &'a str) -> Result<(Option<&'a str>, Option<&'a str>), String> {
        if self.values().next().is_none() {
            return Ok((Some(text), None));
        }
        let is_open = matches!(self.kind, OptionKind::Path | OptionKind::Text);
        let behind = text.match_indices(BEHIND).map(|(at, _)| at + 1);
        for at in std::iter::once(0).chain(behind) {
            let item = text[at..].split(',').next().unwrap_or_default();
            // A path may be a word alone.
            let may_be = item.contains('=') || at > 0 || !is_open;
            if may_be && self.values().any(|(name, option)| starts(item, name, option)) {
                let head = text[..at].strip_suffix(BEHIND);
                return Ok((head, Some(&text[at..])));
            }
        }
        let tail = text.rsplit(BEHIND).next().unwrap_or_default();
        let name = tail.split(['=', ',']).next().unwrap_or_default();
        let is_name = name.len() > 1
            && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
        let is_behind = tail.len() < text.len();
        let meant = match is_open {
            true => is_behind && is_name && tail[name.len()..].starts_with('='),
            false => is_behind || tail.contains('='),
        };
        if meant { Err(self.unknown(name)) } else { Ok((Some(text), None)) }
    }

    fn unknown(&self, name: &str) -> String {
        let names: Vec<&str> = self.values().map(|(name, _)| name).collect();
        format!("{name:?} is none of its values; use {}", names.join(", "))
    }
}

/// Whether an item of values gives this one: `beta2=0.95`, or of a switch its name alone.
fn starts(item: &str, name: &str, option: &OptionInfo) -> bool {
    match item.strip_prefix(name) {
        Some("") => option.kind == OptionKind::Switch,
        Some(rest) => rest.starts_with('='),
        None => false,
    }
}

/// The settings of `table` with the values in their texts under keys of their own.
///
/// # Errors
/// Values that a setting has not, or that are given by themselves too.
pub(super) fn expanded(table: Table) -> Result<Table, ConfigError> {
    let mut all = Table::new();
    for (key, value) in table {
        let option = OPTIONS.iter().find(|option| option.key == key);
        let parts = match (option, &value) {
            (Some(option), Value::String(text)) => option.parts_of(text)?,
            _ => None,
        };
        for (key, value) in parts.unwrap_or_else(|| Table::from_iter([(key, value)])) {
            insert(&mut all, key, value)?;
        }
    }
    Ok(all)
}

/// Adds a setting that must not be there yet.
///
/// # Errors
/// It is there: by itself, and as a value of another.
pub(super) fn insert(table: &mut Table, key: String, value: Value) -> Result<(), ConfigError> {
    if table.contains_key(&key) {
        let option = OPTIONS.iter().find(|option| option.key == key);
        let setting = option.and_then(|o| o.part_of?.split(BEHIND).next()).unwrap_or("the text");
        let problem = format!("{setting} has this value too");
        return Err(ConfigError::value(&key, text(&value), problem, "leave one of them out"));
    }
    table.insert(key, value);
    Ok(())
}

impl OptionInfo {
    /// Adds to `settings` what the text of a flag says of the setting and of its values.
    ///
    /// # Errors
    /// Text that [`parse`](Self::parse) does not read; a value that is there already.
    pub fn add_to(&self, settings: &mut Table, text: &str) -> Result<(), ConfigError> {
        let mut read = self.parse(text)?.into_iter();
        read.try_for_each(|(key, value)| insert(settings, key, value))
    }

    /// The setting and its values in a text of a file that has such; none for any other text.
    ///
    /// # Errors
    /// Values that the setting has not.
    pub(super) fn parts_of(&self, text: &str) -> Result<Option<Table>, ConfigError> {
        match self.split(text).map_err(|why| self.wrong(text, &why))? {
            (_, Some(_)) => self.parse(text).map(Some),
            _ => Ok(None),
        }
    }

    fn wrong(&self, text: &str, why: &str) -> ConfigError {
        let (shown, usual) =
            if text.is_empty() { ("\"\"", "is empty") } else { (text, "does not work") };
        let (problem, help) = why.split_once("; ").unwrap_or((usual, why));
        ConfigError::value(self.key, shown, problem, help.replacen("expected ", "use ", 1))
    }
}

impl Config {
    /// The settings that have a value, as a file has them: each with its own values behind it,
    /// where these are not what they are by default.
    ///
    /// # Errors
    /// As [`to_toml`](Self::to_toml).
    pub fn written(&self) -> Result<Vec<(&'static OptionInfo, Value)>, ConfigError> {
        let (mut table, defaults) = (self.table()?, Config::default().table()?);
        let mut all = Vec::new();
        if table.contains_key(MIX) && !table.contains_key("data") {
            let mix = table.remove(MIX).as_ref().map(text).unwrap_or_default();
            table.insert("data".into(), Value::Array(mix.split(',').map(Value::from).collect()));
        }
        for option in OPTIONS {
            let value = table.get(option.key);
            match (option.is_setting(), value) {
                (false, Some(mix)) if option.key == MIX => all.push((option, mix.clone())),
                (true, value) => {
                    let own = |(name, value): (&'static str, &'static OptionInfo)| {
                        let now = table.get(value.key)?;
                        (defaults.get(value.key) != Some(now)).then_some((name, now))
                    };
                    let values: Vec<_> = option.values().filter_map(own).collect();
                    all.extend(joined(value, &values).map(|value| (option, value)));
                }
                _ => {}
            }
        }
        Ok(all)
    }
}

/// A setting and its values in one; none where there is neither.
fn joined(head: Option<&Value>, values: &[(&str, &Value)]) -> Option<Value> {
    if values.is_empty() {
        return head.cloned();
    }
    let item = |(name, value): &(&str, &Value)| match (value, head) {
        (Value::Boolean(true), Some(_)) => (*name).to_owned(),
        _ => format!("{name}={}", text(value)),
    };
    let values = values.iter().map(item).collect::<Vec<_>>().join(",");
    Some(head.map_or(values.clone(), |head| format!("{}{BEHIND}{values}", text(head))).into())
}

/// A value as a flag has it.
fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A text of a setting that a value may stand behind.
    fn head(option: &OptionInfo) -> String {
        match (option.key, option.kind) {
            ("optimizer", _) => "muon".into(),
            (_, OptionKind::Path | OptionKind::Text) => "a/b:1".into(),
            (_, OptionKind::Count) => "8".into(),
            (_, OptionKind::Number) => "0.25".into(),
            (_, OptionKind::Choice(names)) => names[1].into(),
            _ => "true".into(),
        }
    }

    /// Texts of a value.
    fn samples(option: &OptionInfo) -> Vec<String> {
        let texts: &[&str] = match option.kind {
            OptionKind::Count => &["3", "4"],
            OptionKind::Number => &["0.5", "1e-8"],
            OptionKind::Switch => &["true", "false"],
            OptionKind::Choice(names) => names,
            OptionKind::Path => &["c/d"],
            OptionKind::Text => &["x", "x,y"],
            OptionKind::Steps => &["3..4"],
            OptionKind::Bytes => &["24GiB"],
            OptionKind::Slices => &["auto", "4"],
            OptionKind::Resume => unreachable!("no value of another setting"),
        };
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    fn line(option: &OptionInfo, text: &str) -> String {
        let value = option.kind.parse(text).unwrap();
        format!("{} = {value}\n", option.key)
    }

    #[test]
    fn there_are_at_most_eighty_settings() {
        let settings = OPTIONS.iter().filter(|option| option.is_setting()).count();
        assert!(settings <= 80, "{settings} settings: make the new one a value of another");
    }

    #[test]
    fn every_value_belongs_to_a_setting_under_one_name() {
        let mut names: Vec<&str> = OPTIONS.iter().filter_map(|option| option.part_of).collect();
        for name in names.iter().filter(|name| **name != "data") {
            let (setting, _) = name.split_once(BEHIND).unwrap();
            let found = OPTIONS.iter().find(|option| option.key == setting);
            assert!(found.is_some_and(OptionInfo::is_setting), "{name}");
        }
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
    }

    /// A release keeps the older names: they mean what the value means.
    #[test]
    fn a_value_means_what_its_older_key_means() {
        let mut checked = 0;
        for setting in OPTIONS {
            for (name, value) in setting.values() {
                for text in samples(value) {
                    let head = head(setting);
                    let both = format!("{}{}", line(setting, &head), line(value, &text));
                    let meant = Config::from_toml(&both).unwrap();
                    let written = format!("{head}:{name}={text}");
                    let toml = format!("{} = '{written}'", setting.key);
                    assert_eq!(Config::from_toml(&toml).unwrap(), meant, "{toml}");
                    let table = Table::from_iter([(setting.key.to_owned(), written.into())]);
                    assert_eq!(Config::default().with(table).unwrap(), meant, "{toml}");
                    let flag = setting.parse(&format!("{head}:{name}={text}")).unwrap();
                    assert_eq!(Config::default().with(flag).unwrap(), meant, "{toml}");
                    let alone = format!("{} = '{name}={text}'", setting.key);
                    let old = Config::from_toml(&line(value, &text)).unwrap();
                    assert_eq!(Config::from_toml(&alone).unwrap(), old, "{alone}");
                    for config in [meant, old] {
                        let printed = config.to_toml().unwrap();
                        assert_eq!(Config::from_toml(&printed).unwrap(), config, "{printed}");
                        assert!(!printed.contains(&format!("\n{} = ", value.key)), "{printed}");
                    }
                    checked += 1;
                }
            }
        }
        assert!(checked > 40, "{checked}");
    }

    #[test]
    fn several_values_stand_behind_a_setting() {
        for (written, apart) in [
            (
                "optimizer = 'muon:beta2=0.95,nesterov=false'",
                "optimizer = 'muon'\nbeta2 = 0.95\nnesterov = false",
            ),
            ("optimizer = 'eps=1e-6'", "eps = 1e-6"),
            ("schedule = ':mem-limit=1KiB'", "schedule = ''\nmem-limit = '1KiB'"),
            (
                "lora-rank = '8:targets=q,v,alpha=4'\nlr = 1",
                "lr = 1\nlora-rank = 8\nlora-targets = 'q,v'\nlora-alpha = 4.0",
            ),
            (
                "resume = 'must:fallback' # yes\nsave = 's'",
                "save = 's'\nresume = 'must'\nresume-fallback = true",
            ),
            ("keep = 'best'", "keep-best = true"),
            ("rank-memory = '1.5:unchecked'", "rank-memory = 1.5\nno-memory-check = true"),
            ("rendezvous = '[::1]:80:token-file=t'", "rendezvous = '[::1]:80'\ntoken-file = 't'"),
            ("data = ['a=0.5']", "data-mix = 'a=0.5'"),
        ] {
            let [written, apart] = [written, apart].map(|text| Config::from_toml(text).unwrap());
            assert_eq!(written, apart);
        }
        for plain in
            ["init-from = 'ema'", "init-from = 'a:b'", "trace = 'C:t.json'", "rendezvous = 'a:1'"]
        {
            let config = Config::from_toml(plain).unwrap();
            assert_eq!(
                config.to_toml().unwrap().lines().filter(|l| l.contains(" = ")).count(),
                {
                    let default = Config::default().to_toml().unwrap();
                    default.lines().filter(|line| line.contains(" = ")).count() + 1
                },
                "{plain}"
            );
            assert!(!config.init_ema && config.token_file.is_none());
        }
    }

    #[test]
    fn values_that_a_setting_has_not_are_refused_with_those_that_it_has() {
        for (text, said) in [
            (
                "optimizer = 'adamw:beta3=1'",
                "optimizer = adamw:beta3=1: \"beta3\" is none of its values; use beta1, beta2, \
                 momentum, nesterov, eps",
            ),
            ("optimizer = 'beta3=1'", "optimizer = beta3=1: \"beta3\" is none of its values; use"),
            ("optimizer = 'adamw:beta2'", "optimizer = adamw:beta2: \"beta2\" is none of"),
            (
                "optimizer = 'adamw:beta2=x'",
                "optimizer:beta2 = x: does not work; use a number, such as",
            ),
            (
                "optimizer = 'adam:beta2=0.9'",
                "optimizer = adam:beta2=0.9: does not work; use one of",
            ),
            (
                "optimizer = 'adamw:eps=1e-6,eps=1e-7'",
                "optimizer:eps = 1e-7: is there twice; leave one of them out",
            ),
            (
                "resume = 'true:fall'",
                "resume = true:fall: \"fall\" is none of its values; use fallback",
            ),
            (
                "trace = 't.json:from=3'",
                "trace = t.json:from=3: \"from\" is none of its values; use steps",
            ),
            (
                "beta2 = 0.9\noptimizer = 'adamw:beta2=0.95'",
                "optimizer:beta2 = 0.95: optimizer has this value too; leave one of them out",
            ),
        ] {
            let error = Config::from_toml(text).expect_err(text).to_string();
            assert!(error.starts_with(said), "{text}: {error}");
        }
        let of_another = Config::from_toml("optimizer = 'sgd:beta2=0.95'").unwrap();
        let error = of_another.validate().unwrap_err().to_string();
        let said =
            "optimizer:beta2 = 0.95: optimizer sgd has no such value; use momentum, nesterov";
        assert!(error.starts_with(said), "{error}");
    }
}
