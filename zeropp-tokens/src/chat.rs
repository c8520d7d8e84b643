//! Conversations to text by a model's chat template, and which parts of it are answers.
//!
//! Templates are Jinja, with the environment that Hugging Face's transformers gives them. Answers
//! are what stands between `{% generation %}` and `{% endgeneration %}`; of a template without
//! these marks, what a message of the assistant adds behind the prompt for one.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, Error, ErrorKind, context};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
use zeropp_data::files::read_text;

use crate::error::{Checked, TokensError, unreadable, wrong};
use crate::gpt2::BYTES_MAX;

/// What stands around an answer while its text is made: no characters, so no text has them.
const MARKS: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];
/// What the template is called in errors.
const NAME: &str = "chat_template";
/// Tokens that a template may name, as `tokenizer_config.json` has them.
const SPECIAL: [&str; 6] =
    ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"];

/// A chat template with the special tokens that it may name.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    environment: Arc<Environment<'static>>,
    path: PathBuf,
    /// As it stands in the file.
    source: String,
    has_marks: bool,
}

/// A conversation as text, and the bytes of it that are answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Conversation {
    pub(crate) text: String,
    pub(crate) answers: Vec<Range<usize>>,
}

impl ChatTemplate {
    /// The template of the tokenizer in `file`, its `tokenizer.json`: `chat_template.jinja` beside
    /// it, else `chat_template` in `tokenizer_config.json`; or `own`, a template's file.
    ///
    /// # Errors
    /// No template, or one that cannot be read.
    pub fn open(file: &Path, own: Option<&Path>) -> Result<ChatTemplate, TokensError> {
        let beside = file.with_file_name("tokenizer_config.json");
        let config = match beside.is_file() {
            true => {
                let text = read_text(&beside, BYTES_MAX).map_err(unreadable(&beside))?;
                serde_json::from_str(&text)
                    .map_err(|e| wrong(&beside, format!("it is no JSON ({e})"), "restore it"))?
            }
            false => serde_json::Value::Null,
        };
        let jinja = file.with_file_name("chat_template.jinja");
        let (path, source) = match own.or(jinja.is_file().then_some(jinja.as_path())) {
            Some(path) => {
                (path.to_path_buf(), read_text(path, BYTES_MAX).map_err(unreadable(path))?)
            }
            None => {
                let source = in_config(&config, &beside)?;
                (beside, source)
            }
        };
        let special = SPECIAL.into_iter().filter_map(|name| {
            let token = config.get(name)?;
            let token = token.get("content").unwrap_or(token).as_str()?;
            Some((name, token.to_owned()))
        });
        let environment = environment(&source, special.collect())
            .map_err(|e| wrong(&path, format!("its chat template is refused ({e:#})"), HELP))?;
        let has_marks = marked(&source).0;
        Ok(ChatTemplate { environment: Arc::new(environment), path, source, has_marks })
    }

    /// The template as it stands in its file.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The file that it was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The conversation of a line of JSON, whose `messages` these are.
    ///
    /// # Errors
    /// In words, what the template refuses, or which answer cannot be told from the rest.
    pub(crate) fn conversation(
        &self,
        messages: &Value,
        tools: &Value,
    ) -> Result<Conversation, String> {
        let all = messages_of(messages)?;
        let render = |count: usize, prompt: bool| {
            self.render(&all[..count], tools, prompt).map_err(|e| format!("{e:#}"))
        };
        let whole = render(all.len(), false)?;
        if self.has_marks {
            return without_marks(&whole);
        }
        let mut answers = Vec::new();
        for (i, _) in all.iter().enumerate().filter(|(_, message)| is_answer(message)) {
            let (before, after) = (render(i, true)?, render(i + 1, false)?);
            if !after.starts_with(&before) || !whole.starts_with(&after) {
                return Err(format!(
                    "the template writes message {i} in another way once others follow, or begins \
                     it otherwise than the prompt for it; mark answers in the template with \
                     {{% generation %}}"
                ));
            }
            answers.push(before.len()..after.len());
        }
        Ok(Conversation { text: whole, answers })
    }

    fn render(&self, messages: &[Value], tools: &Value, prompt: bool) -> Result<String, Error> {
        let template = self.environment.get_template(NAME)?;
        let tools = if tools.is_undefined() { Value::from(()) } else { tools.clone() };
        template.render(context! {
            messages => messages,
            tools => tools,
            documents => Value::from(()),
            add_generation_prompt => prompt,
        })
    }
}

const HELP: &str = "use the template that the model came with";

/// The template in `tokenizer_config.json`: a text, or a list of named ones with a default.
fn in_config(config: &serde_json::Value, path: &Path) -> Checked<String> {
    let template = config.get("chat_template");
    let named = |list: &Vec<serde_json::Value>| {
        let default = list.iter().find(|one| one.get("name").is_some_and(|n| n == "default"));
        Some(default?.get("template")?.as_str()?.to_owned())
    };
    let found = match template {
        Some(serde_json::Value::String(text)) => Some(text.clone()),
        Some(serde_json::Value::Array(list)) => named(list),
        _ => None,
    };
    let problem = "the tokenizer has no chat template there, nor in chat_template.jinja";
    found.ok_or_else(|| wrong(path, problem, "name one with --chat-template"))
}

/// Whether a template marks answers, and the same template with a filter for each mark.
fn marked(source: &str) -> (bool, String) {
    let (mut out, mut rest, mut found) = (String::new(), source, false);
    while let Some(start) = rest.find("{%") {
        let Some(len) = rest[start..].find("%}") else { break };
        let (before, tag) = (&rest[..start], &rest[start..start + len + 2]);
        let inner = &tag[2..tag.len() - 2];
        let [left, right] = [inner.starts_with(['-', '+']), inner.ends_with(['-', '+'])];
        let word =
            inner[usize::from(left)..inner.len() - usize::from(right && inner.len() > 1)].trim();
        let replaced = match word {
            "generation" => Some("filter answer_of_the_assistant"),
            "endgeneration" => Some("endfilter"),
            _ => None,
        };
        out.push_str(before);
        match replaced {
            None => out.push_str(tag),
            Some(words) => {
                found = true;
                out.push_str("{%");
                out.push_str(if left { &inner[..1] } else { "" });
                out.push_str(&format!(" {words} "));
                out.push_str(if right { &inner[inner.len() - 1..] } else { "" });
                out.push_str("%}");
            }
        }
        rest = &rest[start + len + 2..];
    }
    out.push_str(rest);
    (found, out)
}

/// What transformers gives a template: Python's methods, its filters and functions, its rules for
/// blanks.
fn environment(
    source: &str,
    special: Vec<(&'static str, String)>,
) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_unknown_method_callback(unknown_method_callback);
    environment.add_filter("tojson", to_json);
    environment.add_filter("answer_of_the_assistant", |text: String| {
        format!("{}{text}{}", MARKS[0], MARKS[1])
    });
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    for (name, token) in special {
        environment.add_global(name, token);
    }
    environment.add_template_owned(NAME, marked(source).1)?;
    Ok(environment)
}

/// Python's `json.dumps(value, ensure_ascii=False)`, with its indentation.
fn to_json(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let failed = |e: serde_json::Error| Error::new(ErrorKind::BadSerialization, e.to_string());
    let mut out = Vec::new();
    match indent {
        Some(n) => {
            let blanks = " ".repeat(n);
            let formatter = PrettyFormatter::with_indent(blanks.as_bytes());
            value.serialize(&mut Serializer::with_formatter(&mut out, formatter))
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut out, OneLine)),
    }
    .map_err(failed)?;
    Ok(Value::from_safe_string(String::from_utf8(out).expect("JSON is UTF-8")))
}

/// A line of JSON as Python writes it: a blank after each comma and colon.
struct OneLine;

impl Formatter for OneLine {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
    ) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}

/// The messages, each with a role.
fn messages_of(messages: &Value) -> Result<Vec<Value>, String> {
    let all: Vec<Value> = match messages.kind() {
        minijinja::value::ValueKind::Seq => {
            messages.try_iter().map_err(|e| e.to_string())?.collect()
        }
        _ => return Err("messages is no list".into()),
    };
    for (i, message) in all.iter().enumerate() {
        let role = message.get_attr("role").ok();
        if role.is_none_or(|role| role.as_str().is_none()) {
            return Err(format!("message {i} has no role"));
        }
        let text = serde_json::to_string(message).map_err(|e| e.to_string())?;
        if text.contains(MARKS) {
            return Err(format!("message {i} has U+FDD0 or U+FDD1, which are no characters"));
        }
    }
    if all.is_empty() { Err("there are no messages".into()) } else { Ok(all) }
}

fn is_answer(message: &Value) -> bool {
    message.get_attr("role").is_ok_and(|role| role.as_str() == Some("assistant"))
}

/// The text without the marks around its answers.
fn without_marks(marked: &str) -> Result<Conversation, String> {
    let (mut text, mut answers, mut open) = (String::with_capacity(marked.len()), Vec::new(), None);
    for character in marked.chars() {
        match (character == MARKS[0], character == MARKS[1], open) {
            (true, _, None) => open = Some(text.len()),
            (_, true, Some(start)) => {
                answers.push(start..text.len());
                open = None;
            }
            (false, false, _) => text.push(character),
            _ => return Err("the template has an answer within an answer".into()),
        }
    }
    Ok(Conversation { text, answers })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_become_filters_with_their_blanks() {
        let source = "a {%- generation -%} b {% endgeneration %}{% if x %}{{ y }}{% endif %} %}";
        let expected = "a {%- filter answer_of_the_assistant -%} b {% endfilter %}{% if x %}{{ y \
                        }}{% endif %} %}";
        assert_eq!(marked(source), (true, expected.to_owned()));
        assert_eq!(marked("{% if generation %}"), (false, "{% if generation %}".into()));
        assert_eq!(marked("{% open"), (false, "{% open".into()));
    }

    #[test]
    fn json_is_python_s() {
        let environment =
            environment("{{ x | tojson }}|{{ x | tojson(indent=2) }}", vec![]).unwrap();
        let x: Value = serde_json::from_str(r#"{"b": [1, "ü<"], "a": null}"#).unwrap();
        let text = environment.get_template(NAME).unwrap().render(context! { x }).unwrap();
        let one_line = r#"{"b": [1, "ü<"], "a": null}"#;
        assert_eq!(
            text,
            format!("{one_line}|{{\n  \"b\": [\n    1,\n    \"ü<\"\n  ],\n  \"a\": null\n}}")
        );
    }
}
