//! The environment that a template runs in: the functions that transformers gives it, and limits of
//! steps and sizes.

use std::io::{self, Write};

use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::python::{Day, Dumps, text};
use super::source::{ANSWER, BOUNDED, TEXT};

/// The marks around an answer while its text is made: noncharacters, so no text has them.
pub(super) const ANSWER_MARKS: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];
/// Steps of a template for one conversation.
const STEPS_MAX: u64 = 20_000_000;
/// Bytes of a conversation as text, and of a text on the way there.
pub(super) const TEXT_BYTES_MAX: usize = 16 << 20;
/// Places that a format may fill up.
const WIDTH_MAX: usize = 10_000;

/// The environment of a template: Python's methods, the filters, tests and functions that
/// transformers adds, its rules for blanks. `day` is what `strftime_now` gives.
pub(super) fn environment(
    special: Vec<(&'static str, String)>,
    day: Option<Day>,
) -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_fuel(Some(STEPS_MAX));
    environment.set_unknown_method_callback(method);
    environment.set_formatter(|out, _, value| {
        let written = if value.is_undefined() { Ok(()) } else { out.write_str(&text(value)) };
        written.map_err(|_| too_long())
    });
    // Written for people, in no way that Python has.
    environment.remove_filter("pprint");
    environment.remove_global("debug");
    environment.add_filter("tojson", to_json);
    environment.add_filter("string", |value: &Value| text(value));
    environment.add_filter("default", default);
    environment.add_filter("d", default);
    environment.add_filter("join", join);
    environment.add_filter("format", format);
    environment.add_filter("indent", indent);
    environment.add_filter("replace", replace);
    environment
        .add_filter(ANSWER, |text: String| format!("{}{text}{}", ANSWER_MARKS[0], ANSWER_MARKS[1]));
    environment.add_filter(TEXT, |value: &Value| match value.kind() {
        ValueKind::Seq | ValueKind::Map | ValueKind::Number => Value::from(text(value)),
        _ => value.clone(),
    });
    environment.add_filter(BOUNDED, |value: &Value| {
        bounded(value.as_str().map_or(0, str::len))?;
        Ok::<Value, Error>(value.clone())
    });
    // In Python a string and a dict have places, too.
    environment.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String)
    });
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", move |format: String| -> Result<String, Error> {
        let refused = |problem: String| Error::new(ErrorKind::InvalidOperation, problem);
        let day = day.ok_or_else(|| {
            refused("it writes today's date (strftime_now); give one with --chat-date".into())
        })?;
        day.format(&format).map_err(|unknown| refused(format!("strftime_now has no {unknown}")))
    });
    for (name, token) in special {
        environment.add_global(name, token);
    }
    environment
}

/// Why a template was stopped, in words.
pub(super) fn in_words(error: &Error) -> String {
    match error.kind() {
        ErrorKind::OutOfFuel => format!("the template takes more than {STEPS_MAX} steps"),
        ErrorKind::WriteFailure => too_long().detail().unwrap_or_default().into(),
        _ => format!("{error:#}"),
    }
}

fn too_long() -> Error {
    let problem = format!("the template makes a text of more than {TEXT_BYTES_MAX} bytes");
    Error::new(ErrorKind::InvalidOperation, problem)
}

/// Refuses a text of so many bytes before it is made.
fn bounded(bytes: usize) -> Result<(), Error> {
    if bytes > TEXT_BYTES_MAX { Err(too_long()) } else { Ok(()) }
}

/// Takes what a template writes, up to the limit.
#[derive(Default)]
pub(super) struct Bounded(pub(super) Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > TEXT_BYTES_MAX {
            return Err(io::Error::other("too long"));
        }
        self.0.extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// transformers' `tojson`: `json.dumps` with what it may be asked for, by place or by name.
fn to_json(value: &Value, places: Rest<Value>, names: Kwargs) -> Result<Value, Error> {
    let refused = |problem: &str| Error::new(ErrorKind::InvalidOperation, problem.to_owned());
    let argument = |at: usize, name: &str| -> Result<Option<Value>, Error> {
        let named = names.get::<Option<Value>>(name)?;
        Ok(places.get(at).cloned().or(named).filter(|value| !value.is_none()))
    };
    let [ascii, indent, separators, sorted] = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let is = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let indent = match argument(1, indent)? {
        None => None,
        Some(value) => Some(match (value.as_str(), value.as_i64()) {
            (Some(text), _) if text.len() <= WIDTH_MAX => text.to_owned(),
            (None, Some(n)) if n <= WIDTH_MAX as i64 => " ".repeat(n.max(0) as usize),
            _ => return Err(refused("tojson: indent is a small number or a text")),
        }),
    };
    let separators = match argument(2, separators)? {
        None => [if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()],
        Some(value) => {
            let both: Vec<String> = value.try_iter()?.map(|one| one.to_string()).collect();
            both.try_into().map_err(|_| refused("tojson: separators are two texts"))?
        }
    };
    let (ensure_ascii, sort_keys) = (is(argument(0, ascii)?), is(argument(3, sorted)?));
    names.assert_all_used()?;
    if places.len() > 4 {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let dumps = Dumps { ensure_ascii, sort_keys, indent, separators };
    let json = dumps.json(value).ok_or_else(|| refused("tojson: this value has no JSON"))?;
    Ok(Value::from_safe_string(json))
}

/// Jinja's `default(default_value='', boolean=False)`.
fn default(
    value: &Value,
    other: Option<Value>,
    boolean: Option<Value>,
    names: Kwargs,
) -> Result<Value, Error> {
    let other = other.or(names.get("default_value")?).unwrap_or_else(|| Value::from(""));
    let boolean = boolean.or(names.get("boolean")?).is_some_and(|value| value.is_true());
    names.assert_all_used()?;
    let is_missing = value.is_undefined() || boolean && !value.is_true();
    Ok(if is_missing { other } else { value.clone() })
}

/// Jinja's `join(d='', attribute=None)`.
fn join(
    state: &State,
    value: &Value,
    separator: Option<Value>,
    attribute: Option<Value>,
    names: Kwargs,
) -> Result<String, Error> {
    let separator = separator.or(names.get("d")?).map_or(String::new(), |d| text(&d));
    let attribute = attribute.or(names.get("attribute")?).filter(|name| !name.is_none());
    names.assert_all_used()?;
    let value = match attribute {
        None => value.clone(),
        Some(name) => {
            let by: Kwargs = [("attribute", name)].into_iter().collect();
            state.apply_filter("map", &[value.clone(), Value::from(by)])?
        }
    };
    joined(&value, &separator)
}

fn joined(items: &Value, separator: &str) -> Result<String, Error> {
    let mut out = String::new();
    for (i, item) in items.try_iter()?.enumerate() {
        let item = text(&item);
        bounded(out.len() + separator.len() + item.len())?;
        if i > 0 {
            out.push_str(separator);
        }
        out.push_str(&item);
    }
    Ok(out)
}

/// Python's `%`, of which no place is wider than a text may be.
fn format(pattern: String, values: Rest<Value>) -> Result<String, Error> {
    check_widths(&pattern, &values)?;
    let values: Vec<Value> = values.iter().map(printed).collect();
    minijinja::format_filter(minijinja::FormatStyle::Printf, &pattern, &values)
}

/// A list as text; all else stays what it is.
fn printed(value: &Value) -> Value {
    match value.kind() {
        ValueKind::Seq | ValueKind::Map => Value::from(text(value)),
        _ => value.clone(),
    }
}

/// Refuses a width or a precision, or a `*` that may be one, beyond the limit.
fn check_widths(pattern: &str, values: &[Value]) -> Result<(), Error> {
    let is_wide = |digits: &str| digits.parse::<usize>().is_ok_and(|n| n > WIDTH_MAX);
    let is_long = |digits: &str| digits.len() > 6;
    let mut numbers = pattern.split(|c: char| !c.is_ascii_digit());
    let starred = pattern.contains('*')
        && values.iter().any(|value| value.as_i64().is_some_and(|n| n.abs() > WIDTH_MAX as i64));
    if starred || numbers.any(|n| is_wide(n) || is_long(n)) {
        let problem = format!("a format has a number beyond {WIDTH_MAX}");
        return Err(Error::new(ErrorKind::InvalidOperation, problem));
    }
    Ok(())
}

/// Jinja's `indent(width=4, first=False, blank=False)`, whose width has a limit.
fn indent(
    value: String,
    width: Option<Value>,
    first: Option<bool>,
    blank: Option<bool>,
    names: Kwargs,
) -> Result<String, Error> {
    let width = width.or(names.get("width")?).unwrap_or_else(|| Value::from(4));
    let first = first.or(names.get("first")?).unwrap_or_default();
    let blank = blank.or(names.get("blank")?).unwrap_or_default();
    names.assert_all_used()?;
    let blanks = match (width.as_str(), width.as_usize()) {
        (Some(text), _) if text.len() <= WIDTH_MAX => text.to_owned(),
        (None, Some(n)) if n <= WIDTH_MAX => " ".repeat(n),
        _ => {
            let problem = format!("indent: the width is a text, or a number up to {WIDTH_MAX}");
            return Err(Error::new(ErrorKind::InvalidOperation, problem));
        }
    };
    bounded(value.len() + (value.matches('\n').count() + 1).saturating_mul(blanks.len()))?;
    // Python's rule: a line feed at the end counts as a line of its own.
    let text = format!("{value}\n");
    let mut lines = text.split_inclusive('\n').map(|line| line.trim_end_matches('\n'));
    let mut out = if first { blanks.clone() } else { String::new() };
    out.push_str(lines.next().unwrap_or_default());
    for line in lines {
        out.push('\n');
        if blank || !line.is_empty() {
            out.push_str(&blanks);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// Jinja's `replace(old, new, count=None)`.
fn replace(
    value: &Value,
    old: Value,
    new: Value,
    count: Option<usize>,
    names: Kwargs,
) -> Result<String, Error> {
    let count = count.or(names.get("count")?);
    names.assert_all_used()?;
    replaced(&text(value), &text(&old), &text(&new), count)
}

fn replaced(value: &str, old: &str, new: &str, count: Option<usize>) -> Result<String, Error> {
    let places = value.matches(old).count().min(count.unwrap_or(usize::MAX));
    bounded(value.len() + places.saturating_mul(new.len()))?;
    Ok(value.replacen(old, new, places))
}

/// Python's methods of strings, lists and dicts, those that make texts within the limit.
fn method(state: &State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    if args.last().is_some_and(Value::is_kwargs) {
        return named_method(state, value, name, args);
    }
    match (name, value.as_str(), args) {
        ("replace", Some(value), [old, new, count @ ..]) => {
            let count = count.first().and_then(Value::as_usize);
            replaced(value, &text(old), &text(new), count).map(Value::from)
        }
        ("join", Some(value), [items]) => joined(items, value).map(Value::from),
        ("format", Some(pattern), _) => {
            check_widths(pattern, args)?;
            let args: Vec<Value> = args.iter().map(printed).collect();
            unknown_method_callback(state, value, name, &args)
        }
        _ => unknown_method_callback(state, value, name, args),
    }
}

/// A method with arguments by name, which `Source` has held against those that are known.
fn named_method(state: &State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let (places, names) = args.split_at(args.len() - 1);
    let names = Kwargs::try_from(names[0].clone())?;
    match (name, value.as_str()) {
        ("split", Some(_)) => {
            let separator = places.first().cloned().or(names.get("sep")?);
            let most = places.get(1).cloned().or(names.get("maxsplit")?);
            names.assert_all_used()?;
            let args = [separator.unwrap_or(Value::from(())), most.unwrap_or(Value::from(-1))];
            unknown_method_callback(state, value, name, &args)
        }
        ("format", Some(pattern)) => {
            check_widths(pattern, places)?;
            unknown_method_callback(state, value, name, args)
        }
        _ => Err(Error::from(ErrorKind::TooManyArguments)),
    }
}
