//! The forms in which a line has a conversation: `messages` of roles and contents, ShareGPT's
//! `conversations` of `from` and `value`, and Alpaca's `instruction`, `input` and `output`.

use std::collections::BTreeSet;

use minijinja::value::{Value, ValueKind};

use super::python::MARKS;

/// A conversation as a template takes it.
#[derive(Debug)]
pub(super) struct ConversationLine {
    pub(super) messages: Vec<Value>,
    /// Of each message, whether it is an answer that is scored.
    pub(super) scored: Vec<bool>,
    pub(super) tools: Value,
    pub(super) documents: Value,
    /// Other values that the line gives the template, by name.
    pub(super) options: Value,
}

/// Roles of messages that are no answers, whether a template names them or not.
const ROLES: [&str; 6] = ["system", "developer", "user", "tool", "function", "ipython"];
/// Other names of the assistant.
const ASSISTANTS: [&str; 7] = ["assistant", "model", "gpt", "chatgpt", "bot", "chatbot", "ai"];
/// Keys of a message that say nothing of its text or of what is scored.
const IDLE_KEYS: [&str; 11] = [
    "id",
    "message_id",
    "uuid",
    "timestamp",
    "created_at",
    "create_time",
    "index",
    "turn",
    "lang",
    "language",
    "source",
];
/// Keys that say whether an answer is scored.
const SCORED_KEYS: [&str; 2] = ["weight", "train"];

/// The names that a template knows.
pub(super) struct Known<'a> {
    pub(super) words: &'a BTreeSet<String>,
    pub(super) has_marks: bool,
}

impl ConversationLine {
    /// The conversation of a line, whose messages say nothing that the template would not write.
    ///
    /// # Errors
    /// In words, what the line is in place of a conversation, or which key or role is not known.
    pub(super) fn read(line: &Value, known: &Known) -> Result<ConversationLine, String> {
        let messages = messages_of(line)?;
        if messages.is_empty() {
            return Err("there are no messages".into());
        }
        let text = serde_json::to_string(line).map_err(|e| e.to_string())?;
        if text.contains(|c: char| MARKS.contains(&c)) {
            return Err("it has a character of U+FDD0 to U+FDD3, which are no characters".into());
        }
        let scored = messages.iter().enumerate().map(|(i, message)| {
            let role = role_of(message).ok_or_else(|| format!("message {i} has no role"))?;
            check_role(i, &role, known)?;
            check_keys(i, message, known)?;
            is_scored(i, &role, message)
        });
        let scored = scored.collect::<Result<_, _>>()?;
        let field = |name: &str| field(line, name).unwrap_or(Value::from(()));
        if !is_empty(&field("functions")) {
            return Err("functions is not read; write them as tools".into());
        }
        Ok(ConversationLine {
            scored,
            tools: tools_of(field("tools"))?,
            documents: field("documents"),
            options: field("chat_template_kwargs"),
            messages,
        })
    }
}

/// A key of an object, unless it is not there or null.
fn field(object: &Value, name: &str) -> Option<Value> {
    let value = object.get_item(&Value::from(name)).ok()?;
    (!value.is_undefined() && !value.is_none()).then_some(value)
}

fn role_of(message: &Value) -> Option<String> {
    Some(field(message, "role")?.as_str()?.to_owned())
}

/// Whether nothing is lost where a value is not written.
fn is_empty(value: &Value) -> bool {
    value.is_undefined() || !value.is_true() && value.kind() != ValueKind::Number
}

fn list_of(value: &Value, name: &str) -> Result<Vec<Value>, String> {
    match value.kind() {
        ValueKind::Seq => Ok(value.try_iter().map_err(|e| e.to_string())?.collect()),
        _ => Err(format!("{name} is no list")),
    }
}

fn keys_of(object: &Value) -> Vec<String> {
    let keys = object.try_iter().into_iter().flatten();
    keys.filter_map(|key| Some(key.as_str()?.to_owned())).collect()
}

fn messages_of(line: &Value) -> Result<Vec<Value>, String> {
    if line.kind() != ValueKind::Map {
        return Err(format!("it is a {}, and no object of JSON", line.kind()));
    }
    if let Some(messages) = field(line, "messages") {
        return list_of(&messages, "messages");
    }
    let system = field(line, "system").filter(|system| !is_empty(system));
    let system = system.map(|content| message("system", content));
    if let Some(turns) = field(line, "conversations") {
        let turns = list_of(&turns, "conversations")?;
        let turns: Vec<Value> = turns
            .iter()
            .enumerate()
            .map(|(i, turn)| sharegpt(i, turn))
            .collect::<Result<_, _>>()?;
        let begins = turns.first().and_then(role_of).is_some_and(|role| role == "system");
        return Ok(system.filter(|_| !begins).into_iter().chain(turns).collect());
    }
    if let (Some(instruction), Some(output)) = (field(line, "instruction"), field(line, "output")) {
        let both = [instruction, field(line, "input").unwrap_or_default()];
        let history = field(line, "history").is_some_and(|history| !is_empty(&history));
        if history {
            return Err("history is not read; write the turns as messages".into());
        }
        let texts: Vec<&str> =
            both.iter().filter_map(Value::as_str).filter(|text| !text.is_empty()).collect();
        let turns = [message("user", Value::from(texts.join("\n"))), message("assistant", output)];
        return Ok(system.into_iter().chain(turns).collect());
    }
    Err(format!(
        "it has neither messages, nor ShareGPT's conversations, nor Alpaca's instruction and \
         output; its fields are {}",
        keys_of(line).join(", ")
    ))
}

fn message(role: &str, content: Value) -> Value {
    [("role", Value::from(role)), ("content", content)].into_iter().collect()
}

/// A turn of ShareGPT's as a message; one with a role stays as it is.
fn sharegpt(i: usize, turn: &Value) -> Result<Value, String> {
    let Some(from) = field(turn, "from") else { return Ok(turn.clone()) };
    let role = match from.as_str().unwrap_or_default() {
        "human" | "user" => "user",
        name if ASSISTANTS.contains(&name) => "assistant",
        "system" => "system",
        "tool" | "function" | "observation" | "function_response" => "tool",
        name => {
            return Err(format!(
                "turn {i} is from {name:?}; human, gpt, system and tool are known"
            ));
        }
    };
    let renamed = keys_of(turn).into_iter().map(|key| {
        let value = field(turn, &key).unwrap_or(Value::from(()));
        match key.as_str() {
            "from" => ("role".to_owned(), Value::from(role)),
            "value" => ("content".to_owned(), value),
            _ => (key, value),
        }
    });
    Ok(renamed.collect())
}

fn tools_of(tools: Value) -> Result<Value, String> {
    match tools.kind() {
        ValueKind::None | ValueKind::Seq => Ok(tools),
        // As data sets have them whose columns have one type.
        ValueKind::String => {
            let text = tools.as_str().unwrap_or_default();
            let read = if text.trim().is_empty() { "null" } else { text };
            let list: Value = serde_json::from_str(read)
                .map_err(|e| format!("tools is a text, no JSON ({e})"))?;
            match list.kind() {
                ValueKind::None | ValueKind::Seq => Ok(list),
                _ => Err("tools is no list".into()),
            }
        }
        _ => Err("tools is no list".into()),
    }
}

fn check_role(i: usize, role: &str, known: &Known) -> Result<(), String> {
    let is_named = known.words.contains(role);
    if role == "assistant" || ROLES.contains(&role) || is_named && known.has_marks {
        return Ok(());
    }
    if ASSISTANTS.contains(&role.to_lowercase().as_str()) {
        return Err(format!(
            "message {i} has the role {role:?}; write \"assistant\": answers are of that role"
        ));
    }
    if is_named {
        return Ok(());
    }
    Err(format!(
        "message {i} has the role {role:?}, which the template does not name; write system, user, \
         assistant or tool"
    ))
}

fn check_keys(i: usize, message: &Value, known: &Known) -> Result<(), String> {
    let mut has_text = field(message, "content").is_some();
    for key in keys_of(message) {
        let is_ours = ["role", "content"].contains(&key.as_str());
        if is_ours || SCORED_KEYS.contains(&key.as_str()) || IDLE_KEYS.contains(&key.as_str()) {
            continue;
        }
        if field(message, &key).is_none_or(|value| is_empty(&value)) {
            continue;
        }
        if !known.words.contains(&key) {
            return Err(format!(
                "message {i} has the key {key:?}, which the template does not write; remove it, or \
                 use a template that does"
            ));
        }
        has_text = true;
    }
    if has_text { Ok(()) } else { Err(format!("message {i} has no content")) }
}

/// Whether a message is an answer, and none that its `weight` or `train` leaves out.
fn is_scored(i: usize, role: &str, message: &Value) -> Result<bool, String> {
    let is_answer = role == "assistant";
    let mut reported = None;
    for key in SCORED_KEYS {
        let Some(value) = field(message, key) else { continue };
        let says = match (value.kind(), f64::try_from(value.clone())) {
            (ValueKind::Bool, _) => value.is_true(),
            (ValueKind::Number, Ok(0.0)) => false,
            (ValueKind::Number, Ok(1.0)) => true,
            _ => return Err(format!("message {i} has {key} = {value}; 0 and 1 are read")),
        };
        if says && !is_answer {
            return Err(format!(
                "message {i} of the role {role:?} has {key} = {value}; only answers of the \
                 assistant are scored, so remove it"
            ));
        }
        if reported.is_some_and(|before| before != says) {
            return Err(format!("message {i} has a weight and a train that contradict each other"));
        }
        reported = Some(says);
    }
    Ok(is_answer && reported.unwrap_or(true))
}
