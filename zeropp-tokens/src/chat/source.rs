//! The source of a template, changed for the engine that runs it: marks of answers become filters,
//! and what `~` and `+` join passes a filter first, which writes lists as Python does and has a
//! limit. Comments, raw text and strings stay as they are.

use std::collections::BTreeSet;

/// Marks what stands in it as an answer.
pub(super) const ANSWER: &str = "zeropp_answer";
/// Lists and dicts as text; all else stays what it is.
pub(super) const TEXT: &str = "zeropp_text";
/// Its argument, if that is not too long.
pub(super) const BOUNDED: &str = "zeropp_bounded";

/// A template that is ready for the engine.
#[derive(Debug, Default)]
pub(super) struct ParsedTemplate {
    pub(super) text: String,
    /// Whether it marks answers anywhere.
    pub(super) has_marks: bool,
    /// Names and strings in its tags: a key of a message that is not among them is not written.
    pub(super) words: BTreeSet<String>,
    /// The first argument by name that is not known.
    pub(super) unknown: Option<String>,
}

/// Words that end what stands before them in an expression.
const ENDS: [&str; 8] = ["if", "else", "and", "or", "not", "in", "for", "recursive"];

/// Arguments by name that are obeyed, of filters and methods; all others are refused.
const ARGUMENTS: [(&str, &[&str]); 12] = [
    ("|tojson", &["ensure_ascii", "indent", "separators", "sort_keys"]),
    ("|default", &["default_value", "boolean"]),
    ("|d", &["default_value", "boolean"]),
    ("|join", &["d", "attribute"]),
    ("|dictsort", &["case_sensitive", "by", "reverse"]),
    ("|sort", &["reverse", "case_sensitive", "attribute"]),
    ("|indent", &["width", "first", "blank"]),
    ("|map", &["attribute", "default"]),
    ("|groupby", &["attribute", "default", "case_sensitive"]),
    ("|unique", &["case_sensitive", "attribute"]),
    ("|replace", &["count"]),
    (".split", &["sep", "maxsplit"]),
];
/// Functions of the environment, which take no argument by name. Macros and namespaces do.
const FUNCTIONS: [&str; 3] = ["range", "raise_exception", "strftime_now"];

/// The state of the expression at some depth of brackets.
#[derive(Clone, Default)]
struct Level {
    /// Behind a `~`, whose right side is not yet over.
    joined: bool,
    /// An operand has begun.
    operand: bool,
    /// It is a test, whose result is a truth.
    tested: bool,
    /// Whose arguments these are: a filter behind `|`, a method behind `.`, a test behind `is`.
    callee: Option<String>,
    /// The tokens before, without blanks.
    before: [String; 2],
}

impl Level {
    /// Begins the next operand.
    fn restart(&mut self) {
        (self.joined, self.operand, self.tested) = (false, false, false);
    }

    /// The function, filter, method or test that is called where a bracket opens here.
    fn called(&self) -> Option<String> {
        let [kind, name] = &self.before;
        match kind.as_str() {
            "|" | "filter" => Some(format!("|{name}")),
            "." if name != "format" => Some(format!(".{name}")),
            "is" | "not" => Some(format!("is {name}")),
            _ => FUNCTIONS.contains(&name.as_str()).then(|| name.clone()),
        }
    }
}

impl ParsedTemplate {
    pub(super) fn new(template: &str) -> ParsedTemplate {
        let mut source = ParsedTemplate::default();
        let mut rest = template;
        while let Some(start) = next_tag(rest) {
            source.text.push_str(&rest[..start]);
            rest = &rest[start..];
            let len = match &rest[..2] {
                "{#" => rest[2..].find("#}").map_or(rest.len(), |at| at + 4),
                _ => source.tag(rest),
            };
            if &rest[..2] == "{#" {
                source.text.push_str(&rest[..len]);
            }
            let tag = &rest[..len];
            rest = &rest[len..];
            if word_of(tag) == Some("raw") {
                let raw = end_of_raw(rest);
                source.text.push_str(&rest[..raw]);
                rest = &rest[raw..];
            }
        }
        source.text.push_str(rest);
        source
    }

    /// Writes the tag at the beginning of `rest`, and returns how long it was.
    fn tag(&mut self, rest: &str) -> usize {
        let opening = if rest[2..].starts_with(['-', '+']) { 3 } else { 2 };
        let closing = if rest.starts_with("{%") { "%}" } else { "}}" };
        self.text.push_str(&rest[..opening]);
        let from = self.text.len();
        let mut levels = vec![Level::default()];
        let mut at = opening;
        while at < rest.len() {
            let here = &rest[at..];
            let trimmed = here.strip_prefix(['-', '+']).unwrap_or(here);
            if levels.len() == 1 && trimmed.starts_with(closing) {
                self.end_operand(&mut levels[0]);
                self.answers(from);
                let len = here.len() - trimmed.len() + 2;
                self.text.push_str(&here[..len]);
                return at + len;
            }
            let len = token(here);
            if here.starts_with('=')
                && !here.starts_with("==")
                && !rest[..at].ends_with(['=', '!', '<', '>'])
            {
                self.named(levels.last().expect("one at least"));
            }
            self.token(&here[..len], &mut levels);
            self.text.push_str(&here[..len]);
            at += len;
        }
        rest.len()
    }

    /// Holds an argument's name, which stands before, against what is known of who is called.
    fn named(&mut self, level: &Level) {
        let (Some(callee), name) = (&level.callee, &level.before[1]) else { return };
        let known = ARGUMENTS.iter().find(|(known, _)| known == callee);
        if known.is_none_or(|(_, names)| !names.contains(&name.as_str())) {
            let of = callee.trim_start_matches(['|', '.']);
            let known = known.map_or(String::new(), |(_, names)| names.join(", "));
            let works = match known.as_str() {
                "" => "give it by its place".to_owned(),
                names => format!("these are obeyed: {names}"),
            };
            self.unknown.get_or_insert(format!("{of}({name}=..) is not known; {works}"));
        }
    }

    /// Prepares for the token that follows.
    fn token(&mut self, token: &str, levels: &mut Vec<Level>) {
        let first = token.chars().next().expect("not empty");
        if first.is_whitespace() {
            return;
        }
        self.filters(token, first, levels);
        let last = levels.last_mut().expect("one at least");
        last.before.rotate_left(1);
        last.before[1] = token.into();
    }

    fn filters(&mut self, token: &str, first: char, levels: &mut Vec<Level>) {
        let last = levels.last_mut().expect("one at least");
        match first {
            '"' | '\'' => {
                last.operand = true;
                self.words.insert(token.trim_matches(first).into());
            }
            c if c.is_alphanumeric() || c == '_' => {
                self.words.insert(token.into());
                if ENDS.contains(&token) {
                    self.end_operand(last);
                } else if token == "is" {
                    (last.operand, last.tested, last.joined) = (true, true, false);
                } else {
                    last.operand = true;
                }
            }
            '.' | '|' => (),
            '(' | '[' | '{' => {
                last.operand = true;
                let callee = last.called().filter(|_| first == '(');
                levels.push(Level { callee, ..Level::default() });
            }
            ')' | ']' | '}' => {
                self.end_operand(last);
                if levels.len() > 1 {
                    levels.pop();
                }
            }
            '~' => {
                if last.operand && !last.tested {
                    self.filter(TEXT);
                    self.filter(BOUNDED);
                }
                last.restart();
                last.joined = true;
            }
            '+' if last.operand => {
                let tested = last.tested;
                self.end_operand(last);
                if !tested {
                    self.filter(BOUNDED);
                }
            }
            _ if last.operand => self.end_operand(last),
            _ => (),
        }
    }

    fn end_operand(&mut self, level: &mut Level) {
        if level.joined && level.operand {
            self.filter(TEXT);
        }
        level.restart();
    }

    fn filter(&mut self, name: &str) {
        self.text.push_str(" |");
        self.text.push_str(name);
        self.text.push(' ');
    }

    /// Makes a filter of a mark of answers, whose words stand from `from` on.
    fn answers(&mut self, from: usize) {
        let words = match self.text[from..].trim() {
            "generation" => format!(" filter {ANSWER} "),
            "endgeneration" => " endfilter ".into(),
            _ => return,
        };
        if !self.text[..from].trim_end_matches(['-', '+']).ends_with("{%") {
            return;
        }
        self.has_marks = true;
        self.text.truncate(from);
        self.text.push_str(&words);
    }
}

/// Where the next tag begins.
fn next_tag(text: &str) -> Option<usize> {
    ["{{", "{%", "{#"].iter().filter_map(|tag| text.find(tag)).min()
}

/// The only word of a block's tag.
fn word_of(tag: &str) -> Option<&str> {
    let inner = tag.strip_prefix("{%")?.strip_suffix("%}")?;
    Some(inner.trim_matches(['-', '+']).trim())
}

/// Bytes of raw text before the tag that ends it.
fn end_of_raw(text: &str) -> usize {
    let mut at = 0;
    while let Some(start) = text[at..].find("{%") {
        at += start;
        let tag = text[at..].find("%}").map_or("", |len| &text[at..at + len + 2]);
        if word_of(tag) == Some("endraw") {
            return at;
        }
        at += 2;
    }
    text.len()
}

/// Bytes of the token at the beginning of `text`.
fn token(text: &str) -> usize {
    let mut characters = text.char_indices();
    let (_, first) = characters.next().expect("not empty");
    if let '"' | '\'' = first {
        let mut escaped = false;
        for (at, c) in characters {
            match c {
                _ if escaped => escaped = false,
                '\\' => escaped = true,
                c if c == first => return at + 1,
                _ => (),
            }
        }
        return text.len();
    }
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let ends = |c: char| match (is_word(first), first.is_whitespace()) {
        (true, _) => !is_word(c),
        (_, true) => !c.is_whitespace(),
        _ => true,
    };
    characters.find(|(_, c)| ends(*c)).map_or(text.len(), |(at, _)| at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_become_filters_with_their_blanks() {
        let source = "a {%- generation -%} b {% endgeneration %}{% if x %}{{ y }}{% endif %} %}";
        let expected = "a {%- filter zeropp_answer -%} b {% endfilter %}{% if x %}{{ y \
                        }}{% endif %} %}";
        let made = ParsedTemplate::new(source);
        assert_eq!((made.has_marks, made.text.as_str()), (true, expected));
        for plain in [
            "{% if generation %}",
            "{% open",
            "{%}",
            "{%-}",
            "{{}",
            "{#",
            "{",
            "{# {% generation %} #}",
            "{% raw %}{% generation %}{% endraw %}",
            "{{ '{% generation %}' }}",
            "{{ \"a\\\"}}\" }} {{ {'a': {}} }}",
            "{{ '~' }} ~ + {# a ~ b #}",
        ] {
            let made = ParsedTemplate::new(plain);
            assert_eq!((made.has_marks, made.text.as_str()), (false, plain));
        }
    }

    #[test]
    fn arguments_by_name_are_obeyed_or_refused() {
        for source in [
            "{{ x | tojson(indent=2, separators=(',', ':')) | default('', boolean=true) }}",
            "{{ f(a=1) }}{% set ns = namespace(a=1) %}{{ dict(b=2) }}{% if a == b and x(c) %}",
            "{{ x.split(sep=',')[0] }}{{ '{a}'.format(a=1) }}{% macro m(a=1) %}{% endmacro %}",
        ] {
            assert_eq!(ParsedTemplate::new(source).unknown, None, "{source}");
        }
        for (source, unknown) in [
            (
                "{{ x | tojson(indnt=2) }}",
                "tojson(indnt=..) is not known; these are obeyed: ensure",
            ),
            ("{{ x | trim(chars='a') }}", "trim(chars=..) is not known; give it by its place"),
            ("{{ x.strip(chars='a') }}", "strip(chars=..) is not known"),
            ("{{ x is divisibleby(num=3) }}", "is divisibleby(num=..)"),
            ("{% filter indent(by=2) %}{% endfilter %}", "indent(by=..)"),
            ("{{ range(stop=3) }}", "range(stop=..)"),
        ] {
            let found = ParsedTemplate::new(source).unknown.expect(source);
            assert!(found.starts_with(unknown), "{found}");
        }
    }

    #[test]
    fn joined_text_passes_a_filter() {
        let short = |source: &str| {
            let text = ParsedTemplate::new(source).text.replace("zeropp_text", "t");
            text.replace("zeropp_bounded", "b").replace("  ", " ")
        };
        for (source, expected) in [
            ("{{ a ~ b }}", "{{ a |t |b ~ b |t }}"),
            ("{{- x.y(c ~ 1)[0]~'s' -}}", "{{- x.y(c |t |b ~ 1 |t )[0] |t |b ~'s' |t -}}"),
            ("{% if a ~ b == c %}", "{% if a |t |b ~ b |t == c %}"),
            ("{{ a ~ b | f(1) if c else d }}", "{{ a |t |b ~ b | f(1) |t if c else d }}"),
            ("{{ a is defined ~ b }}", "{{ a is defined ~ b |t }}"),
            ("{{ a + -1 }}{{ +1 }}", "{{ a |b + -1 }}{{ +1 }}"),
            ("{%+ set a = [] %}", "{%+ set a = [] %}"),
        ] {
            assert_eq!(short(source), expected);
        }
    }
}
