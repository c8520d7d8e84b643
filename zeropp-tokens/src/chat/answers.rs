//! Which bytes of a conversation are answers, where the template does not say so.
//!
//! An answer is what its message adds behind the prompt for it. A template may write a message in
//! another way once others follow, as those of models that think do; what it wrote of a message is
//! then found by marks at the ends of its texts.

use std::ops::Range;

use minijinja::value::{Value, ValueKind};

/// At the begin and the end of the texts of a message.
const ENDS: [char; 2] = ['\u{fdd2}', '\u{fdd3}'];
/// Keys whose texts a template compares with others.
const COMPARED: [&str; 4] = ["role", "type", "id", "tool_call_id"];

/// Writes the first messages with a prompt for an answer behind, or without.
pub(super) type Render<'a> = dyn Fn(&[Value], bool) -> Result<String, String> + 'a;

/// The text that a template makes of a conversation.
pub(super) struct RenderedChat<'a> {
    pub(super) messages: &'a [Value],
    /// As the template writes all of them, with what marks it has itself.
    pub(super) whole: &'a str,
    pub(super) render: &'a Render<'a>,
}

impl RenderedChat<'_> {
    /// The bytes of these answers, which are messages by number, in their order.
    ///
    /// # Errors
    /// In words, the message that cannot be distinguished from the rest.
    pub(super) fn answers(
        &self,
        answers: impl Iterator<Item = usize>,
    ) -> Result<Vec<Range<usize>>, String> {
        let mut found: Vec<Range<usize>> = Vec::new();
        for i in answers {
            let behind = found.last().map_or(0, |last| last.end);
            let one = self.answer(i).filter(|one| behind <= one.start && one.start < one.end);
            found.push(one.ok_or_else(|| {
                format!(
                    "the template writes message {i} in another way once others follow, so that \
                     its place is not found; mark answers in the template with {{% generation %}}"
                )
            })?);
        }
        Ok(found)
    }

    fn answer(&self, i: usize) -> Option<Range<usize>> {
        let (messages, whole) = (self.messages, self.whole);
        let before = (self.render)(&messages[..i], true).ok();
        let after = (self.render)(&messages[..=i], false).ok();
        if let (Some(before), Some(after)) = (&before, &after)
            && after.starts_with(before.as_str())
            && whole.starts_with(after.as_str())
        {
            return Some(before.len()..after.len());
        }
        let texts = self.texts(messages, i, whole)?;
        // The end of a turn, as it stands behind the message where that is the last.
        let last = after.as_ref().and_then(|after| self.texts(&messages[..=i], i, after));
        let tail = last.zip(after.as_ref()).map_or("", |(last, after)| &after[last.end..]);
        let end = texts.end + common(tail, &whole[texts.end..]);
        let known = before.filter(|b| whole.starts_with(b.as_str()) && b.len() <= texts.start);
        let start = match known {
            Some(before) => before.len(),
            None => self.behind_prompt(i, texts.start),
        };
        Some(start..end)
    }

    /// Where the prompt ends that stands between the message before `i` and the texts of `i`, which
    /// begin at `start`: there, if none is found.
    fn behind_prompt(&self, i: usize, start: usize) -> usize {
        let all = (self.render)(self.messages, true).unwrap_or_default();
        let prompt = all.strip_prefix(self.whole).unwrap_or_default();
        let from = match i {
            0 => 0,
            _ => self.texts(self.messages, i - 1, self.whole).map_or(0, |before| before.end),
        };
        let between = self.whole.get(from..start).unwrap_or_default();
        match between.rfind(prompt) {
            Some(at) if !prompt.is_empty() => from + at + prompt.len(),
            // Or as much of it as the template writes of an earlier answer.
            _ => start,
        }
    }

    /// From the begin of the first text of message `i` to the end of the last, in `plain`, which
    /// the template writes of these messages.
    pub(super) fn texts(&self, messages: &[Value], i: usize, plain: &str) -> Option<Range<usize>> {
        // A template may look at the begin of a text, or cut it there.
        [[true, true], [false, true], [true, false]].into_iter().find_map(|ends| {
            let mut marked = messages.to_vec();
            marked[i] = with_ends(&messages[i], ends);
            let (text, places) = without(&(self.render)(&marked, false).ok()?, ENDS);
            let (first, last) = (places.first()?, places.last()?);
            // Where only one end is left, what is between it and the other is not known.
            let [start, end] = match [first.0, last.0] {
                [a, b] if a == ENDS[0] && b == ENDS[1] => [first.1, last.1],
                [_, b] if b == ENDS[1] => [last.1, last.1],
                _ => return None,
            };
            (text == plain).then_some(start..end)
        })
    }
}

/// A message with marks at the ends of its texts that are asked for.
fn with_ends(value: &Value, ends: [bool; 2]) -> Value {
    match value.kind() {
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            let core = text.trim();
            if core.is_empty() {
                return value.clone();
            }
            // Inside of the blanks, which templates take away.
            let (lead, trail) = text.split_at(text.len() - text.trim_start().len());
            let trail = &trail[core.len()..];
            let [first, last] = ENDS.map(String::from);
            let [first, last] = [ends[0].then_some(first), ends[1].then_some(last)];
            let [first, last] = [first, last].map(Option::unwrap_or_default);
            Value::from(format!("{lead}{first}{core}{last}{trail}"))
        }
        ValueKind::Seq => {
            let items = value.try_iter().into_iter().flatten();
            items.map(|item| with_ends(&item, ends)).collect()
        }
        ValueKind::Map => {
            let pair = |key: Value| {
                let inner = value.get_item(&key).unwrap_or_default();
                let is_compared = key.as_str().is_some_and(|key| COMPARED.contains(&key));
                let inner = if is_compared { inner } else { with_ends(&inner, ends) };
                (key, inner)
            };
            value.try_iter().into_iter().flatten().map(pair).collect()
        }
        _ => value.clone(),
    }
}

/// The text without these marks, and where they stood.
pub(super) fn without(marked: &str, marks: [char; 2]) -> (String, Vec<(char, usize)>) {
    let (mut text, mut places) = (String::with_capacity(marked.len()), Vec::new());
    for c in marked.chars() {
        if marks.contains(&c) {
            places.push((c, text.len()));
        } else {
            text.push(c);
        }
    }
    (text, places)
}

/// Bytes that two texts begin with in common.
fn common(a: &str, b: &str) -> usize {
    let same = a.chars().zip(b.chars()).take_while(|(a, b)| a == b);
    same.map(|(c, _)| c.len_utf8()).sum()
}
