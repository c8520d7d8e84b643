//! Values as Python writes them: `str`, `repr`, `json.dumps`, `strftime`. Templates are written
//! for Jinja2 in Python, so their text has to be that.

use std::fmt::Write;

use minijinja::value::{Value, ValueKind};

/// Characters that no text has, with which answers are marked. They stay as they are.
pub(super) const MARKS: std::ops::RangeInclusive<char> = '\u{fdd0}'..='\u{fdd3}';

/// `str(value)`.
pub(super) fn text(value: &Value) -> String {
    match value.kind() {
        ValueKind::Seq | ValueKind::Map | ValueKind::Number => repr(value),
        _ => value.to_string(),
    }
}

/// `repr(value)`.
fn repr(value: &Value) -> String {
    match value.kind() {
        ValueKind::String => quoted(value.as_str().unwrap_or_default()),
        ValueKind::Number => number(value, ["nan", "inf"]),
        ValueKind::Seq => {
            let items: Vec<String> =
                value.try_iter().into_iter().flatten().map(|v| repr(&v)).collect();
            format!("[{}]", items.join(", "))
        }
        ValueKind::Map => {
            let pair = |key: Value| {
                let value = value.get_item(&key).unwrap_or_default();
                format!("{}: {}", repr(&key), repr(&value))
            };
            let pairs: Vec<String> = value.try_iter().into_iter().flatten().map(pair).collect();
            format!("{{{}}}", pairs.join(", "))
        }
        _ => value.to_string(),
    }
}

/// A number, with these words for what is none and for infinity.
fn number(value: &Value, [nan, infinity]: [&str; 2]) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(x) = f64::try_from(value.clone()) else { return value.to_string() };
    if x.is_nan() {
        return nan.into();
    }
    if x.is_infinite() {
        return format!("{}{infinity}", if x < 0.0 { "-" } else { "" });
    }
    let short = format!("{x:e}");
    let (digits, exponent) = short.split_once('e').expect("as it was asked for");
    match exponent.parse::<i32>() {
        Ok(-4..16) => {
            let plain = x.to_string();
            if plain.contains('.') { plain } else { format!("{plain}.0") }
        }
        Ok(e) => format!("{digits}e{}{:02}", if e < 0 { '-' } else { '+' }, e.abs()),
        Err(_) => short,
    }
}

/// A string as `repr` quotes it.
fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => out.extend(['\\', c]),
            c if MARKS.contains(&c) || is_printable(c) => out.push(c),
            c => {
                let _ = match u32::from(c) {
                    n @ ..0x100 => write!(out, "\\x{n:02x}"),
                    n @ ..0x1_0000 => write!(out, "\\u{n:04x}"),
                    n => write!(out, "\\U{n:08x}"),
                };
            }
        }
    }
    out.push(quote);
    out
}

/// `c.isprintable()`: Rust's `{:?}` of a string spells out the same characters, but for a first
/// one that joins others.
fn is_printable(c: char) -> bool {
    matches!(c, ' '..='~') || !c.is_ascii() && !format!("{:?}", format!("a{c}")).contains('\\')
}

/// The options of `json.dumps`.
pub(super) struct Dumps {
    pub(super) ensure_ascii: bool,
    pub(super) sort_keys: bool,
    /// Of each level, if there are to be lines.
    pub(super) indent: Option<String>,
    /// Behind a value, and behind a key.
    pub(super) separators: [String; 2],
}

impl Dumps {
    /// The JSON of a value; none of what Python has no JSON for.
    pub(super) fn json(&self, value: &Value) -> Option<String> {
        let mut out = String::new();
        self.write(value, 0, &mut out)?;
        Some(out)
    }

    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Option<()> {
        match value.kind() {
            ValueKind::Undefined => return None,
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value, ["NaN", "Infinity"])),
            ValueKind::String => self.string(value.as_str()?, out),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter().ok()?.collect();
                self.list("[]", &items, depth, out, |item, out| self.write(item, depth + 1, out))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter().ok()?.collect();
                if self.sort_keys {
                    keys.sort_by(|a, b| a.as_str().cmp(&b.as_str()));
                }
                self.list("{}", &keys, depth, out, |key, out| {
                    self.string(&key_text(key), out);
                    out.push_str(&self.separators[1]);
                    self.write(&value.get_item(key).ok()?, depth + 1, out)
                })?;
            }
            _ => return None,
        }
        Some(())
    }

    /// Items between brackets.
    fn list(
        &self,
        brackets: &str,
        items: &[Value],
        depth: usize,
        out: &mut String,
        mut each: impl FnMut(&Value, &mut String) -> Option<()>,
    ) -> Option<()> {
        let line = |depth: usize, out: &mut String| {
            if let Some(indent) = &self.indent {
                out.push('\n');
                out.push_str(&indent.repeat(depth));
            }
        };
        out.push_str(&brackets[..1]);
        for (i, item) in items.iter().enumerate() {
            if i > 0 {
                out.push_str(&self.separators[0]);
            }
            line(depth + 1, out);
            each(item, out)?;
        }
        if !items.is_empty() {
            line(depth, out);
        }
        out.push_str(&brackets[1..]);
        Some(())
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                '\u{7f}' if self.ensure_ascii => out.push(c),
                c if c < ' ' || self.ensure_ascii && !c.is_ascii() && !MARKS.contains(&c) => {
                    for half in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(out, "\\u{half:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// A key of a JSON object: Python takes numbers, truths and none for one.
fn key_text(key: &Value) -> String {
    match key.kind() {
        ValueKind::Bool => if key.is_true() { "true" } else { "false" }.into(),
        ValueKind::None => "null".into(),
        ValueKind::Number => number(key, ["NaN", "Infinity"]),
        _ => key.to_string(),
    }
}

/// A day, whose time is midnight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Day {
    year: u32,
    month: u32,
    day: u32,
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] =
    ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

impl Day {
    /// From `2026-11-25`.
    pub(super) fn read(text: &str) -> Option<Day> {
        let digits = |from: usize, to: usize| {
            let part = text.get(from..to).filter(|part| part.bytes().all(|b| b.is_ascii_digit()));
            part?.parse::<u32>().ok()
        };
        let is_dashed = text.len() == 10 && [4, 7].iter().all(|at| text.as_bytes()[*at] == b'-');
        let day = Day { year: digits(0, 4)?, month: digits(5, 7)?, day: digits(8, 10)? };
        let is_there = is_dashed
            && day.year > 0
            && (1..=12).contains(&day.month)
            && (1..=day.days_of_month()).contains(&day.day);
        is_there.then_some(day)
    }

    fn is_leap_year(self) -> bool {
        self.year.is_multiple_of(4) && !self.year.is_multiple_of(100)
            || self.year.is_multiple_of(400)
    }

    fn days_of_month(self) -> u32 {
        match self.month {
            2 => 28 + u32::from(self.is_leap_year()),
            4 | 6 | 9 | 11 => 30,
            _ => 31,
        }
    }

    /// From 1.
    fn day_of_year(self) -> u32 {
        let before = (1..self.month).map(|month| Day { month, ..self }.days_of_month());
        before.sum::<u32>() + self.day
    }

    /// From Monday, 0.
    fn weekday(self) -> usize {
        let years = self.year - 1;
        ((365 * years + years / 4 - years / 100 + years / 400 + self.day_of_year() + 6) % 7)
            as usize
    }

    /// `strftime(format)`; the directive that is not known, else.
    pub(super) fn format(self, format: &str) -> Result<String, String> {
        let (mut out, mut rest) = (String::new(), format.chars());
        while let Some(c) = rest.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let Day { year, month, day } = self;
            let (name, weekday) = (MONTHS[month as usize - 1], WEEKDAYS[self.weekday()]);
            let _ = match rest.next() {
                Some('Y') => write!(out, "{year}"),
                Some('y') => write!(out, "{:02}", year % 100),
                Some('m') => write!(out, "{month:02}"),
                Some('d') => write!(out, "{day:02}"),
                Some('e') => write!(out, "{day:2}"),
                Some('j') => write!(out, "{:03}", self.day_of_year()),
                Some('B') => write!(out, "{name}"),
                Some('b') => write!(out, "{}", &name[..3]),
                Some('A') => write!(out, "{weekday}"),
                Some('a') => write!(out, "{}", &weekday[..3]),
                Some('F') => write!(out, "{year}-{month:02}-{day:02}"),
                Some('H' | 'M' | 'S') => write!(out, "00"),
                Some('%') => write!(out, "%"),
                Some('-') => match rest.next() {
                    Some('d') => write!(out, "{day}"),
                    Some('m') => write!(out, "{month}"),
                    other => {
                        return Err(format!("%-{}", other.map_or(String::new(), String::from)));
                    }
                },
                other => return Err(format!("%{}", other.map_or(String::new(), String::from))),
            };
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_written_as_python_writes_them() {
        let of = |json: &str| text(&serde_json::from_str::<Value>(json).unwrap());
        for (json, expected) in [
            (
                r#"["a", 1, 1.5, true, null, {"k": "it's"}]"#,
                "['a', 1, 1.5, True, None, {'k': \"it's\"}]",
            ),
            (
                r#"["\n\\\u0000\u00ad\u200b", "'\"", "ü😀\ue000"]"#,
                "['\\n\\\\\\x00\\xad\\u200b', '\\'\"', 'ü😀\\ue000']",
            ),
            (
                "[1e16, 1e15, 0.0001, 0.00001, -2.5e-7, 1e300, 0.1, 100.0]",
                "[1e+16, 1000000000000000.0, 0.0001, 1e-05, -2.5e-07, 1e+300, 0.1, 100.0]",
            ),
            (r#""it's""#, "it's"),
            ("1e22", "1e+22"),
        ] {
            assert_eq!(of(json), expected);
        }
    }

    #[test]
    fn days_are_written_as_python_writes_them() {
        let day = Day::read("2026-11-05").unwrap();
        let format = "%d %b %Y, %A %a %B %m/%y %j %e %-d %F %H:%M %%";
        assert_eq!(
            day.format(format).unwrap(),
            "05 Nov 2026, Thursday Thu November 11/26 309  5 5 2026-11-05 00:00 %"
        );
        assert_eq!(day.format("%Q"), Err("%Q".into()));
        assert_eq!(Day::read("2024-02-29").unwrap().format("%a %j").unwrap(), "Thu 060");
        for wrong in ["2026-02-29", "2026-13-01", "2026-1-01", "26-11-2025", "x", "2026-11-31"] {
            assert_eq!(Day::read(wrong), None, "{wrong}");
        }
    }
}
