//! Conversations to text by a model's chat template, and which parts of it are answers.
//!
//! Templates are Jinja, with the environment that Hugging Face's transformers gives them. Answers
//! are what stands between `{% generation %}` and `{% endgeneration %}`; where a template marks
//! none, what a message of the assistant adds behind the prompt for one.

mod answers;
mod environment;
mod forms;
#[cfg(test)]
mod mutated_tests;
mod python;
#[cfg(test)]
pub(crate) mod rules_tests;
mod source;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use minijinja::value::Value;
use minijinja::{Environment, context};
use zeropp_data::files::read_text;

use crate::error::{Checked, TokensError, unreadable, wrong};
use crate::gpt2::BYTES_MAX;

use answers::{RenderedChat, without};
use environment::{ANSWER_MARKS, Bounded, environment, in_words};
use forms::{ConversationLine, Known};
use python::Day;
use source::ParsedTemplate;

/// The template's name in errors.
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
    /// The day that it writes as today's.
    day: Option<Day>,
    has_marks: bool,
    /// Names and strings in its tags.
    words: Arc<BTreeSet<String>>,
}

/// A conversation as text, and the bytes of it that are answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Conversation {
    pub(crate) text: String,
    pub(crate) answers: Vec<Range<usize>>,
}

impl ChatTemplate {
    /// The template of the tokenizer in `file`, its `tokenizer.json`: `chat_template.jinja` beside
    /// it, else `chat_template` in `tokenizer_config.json`; or `own`, a template's file. `date`,
    /// as `2026-11-25`, is what a template that asks for today's gets.
    ///
    /// # Errors
    /// No template, or one that cannot be read or is not obeyed; a date that is none.
    pub fn open(
        file: &Path,
        own: Option<&Path>,
        date: Option<&str>,
    ) -> Result<ChatTemplate, TokensError> {
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
                let text = read_text(path, BYTES_MAX).map_err(unreadable(path))?;
                // Python reads a text file so.
                (path.to_path_buf(), text.replace("\r\n", "\n").replace('\r', "\n"))
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
        let refused = |problem: String| {
            wrong(&path, format!("its chat template is refused ({problem})"), HELP)
        };
        let day = date.map(|text| {
            let problem = format!("chat-date = {text}: it is no date");
            Day::read(text).ok_or_else(|| wrong(&path, problem, "give one such as 2026-11-25"))
        });
        let day = day.transpose()?;
        let ready = ParsedTemplate::new(&source);
        if let Some(problem) = ready.unknown {
            return Err(refused(problem));
        }
        let mut environment = environment(special.collect(), day);
        environment
            .add_template_owned(NAME, ready.text)
            .map_err(|error| refused(in_words(&error)))?;
        Ok(ChatTemplate {
            environment: Arc::new(environment),
            path,
            source,
            day,
            has_marks: ready.has_marks,
            words: Arc::new(ready.words),
        })
    }

    /// The template as it stands in its file.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The file that it was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A text that differs between templates.
    pub(crate) fn key(&self) -> String {
        format!("{:?} {:?}", self.source, self.day)
    }

    /// The conversation of a line of JSON.
    ///
    /// # Errors
    /// In words: what the line has in place of a conversation, what the template refuses, or which
    /// answer cannot be distinguished from the rest.
    pub(crate) fn conversation(&self, line: &Value) -> Result<Conversation, String> {
        let known = Known { words: &self.words, has_marks: self.has_marks };
        let line = ConversationLine::read(line, &known)?;
        let render = |messages: &[Value], prompt: bool| self.render(&line, messages, prompt);
        let marked = render(&line.messages, false)?;
        let (text, marks) = without(&marked, ANSWER_MARKS);
        let scored = || (0..line.messages.len()).filter(|i| line.scored[*i]);
        if marks.is_empty() {
            let whole = RenderedChat { messages: &line.messages, whole: &text, render: &render };
            let answers = whole.answers(scored())?;
            return Ok(Conversation { text, answers });
        }
        let mut answers = pairs(&marks)?;
        let plain = |messages: &[Value], prompt: bool| {
            render(messages, prompt).map(|marked| without(&marked, ANSWER_MARKS).0)
        };
        let whole = RenderedChat { messages: &line.messages, whole: &text, render: &plain };
        let is_left_out = |i: &usize| is_answer(&line.messages[*i]) && !line.scored[*i];
        for i in (0..line.messages.len()).filter(is_left_out) {
            let texts = whole.texts(&line.messages, i, &text).ok_or_else(|| {
                format!("message {i} is not to be scored, and its place is not found; leave it out")
            })?;
            answers.retain(|one| one.end < texts.start || texts.end < one.start);
        }
        Ok(Conversation { text, answers })
    }

    fn render(
        &self,
        line: &ConversationLine,
        messages: &[Value],
        prompt: bool,
    ) -> Result<String, String> {
        let write = || {
            let template = self.environment.get_template(NAME)?;
            let mut out = Bounded::default();
            let given = context! {
                messages => messages,
                tools => line.tools,
                documents => line.documents,
                add_generation_prompt => prompt,
            };
            let given = context! { ..given, ..line.options.clone() };
            template.render_captured_to(given, &mut out)?;
            Ok(out.0)
        };
        let bytes = write().map_err(|error| in_words(&error))?;
        String::from_utf8(bytes).map_err(|e| e.to_string())
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

fn is_answer(message: &Value) -> bool {
    message.get_attr("role").is_ok_and(|role| role.as_str() == Some("assistant"))
}

/// The spans between the marks of a template.
fn pairs(marks: &[(char, usize)]) -> Result<Vec<Range<usize>>, String> {
    let pair = |pair: &[(char, usize)]| match pair {
        [(first, start), (last, end)] if [*first, *last] == ANSWER_MARKS => Ok(*start..*end),
        _ => Err("the template has an answer within an answer".into()),
    };
    marks.chunks(2).map(pair).collect()
}
