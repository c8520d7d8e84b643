//! The rules of conversations: how a template prints, what it may do, which answers are scored,
//! and what of a line is read or refused.

use std::fs;
use std::hash::{BuildHasher, Hasher};
use std::path::Path;

use serde_json::{Value, json};

use super::tests::{fixture, run, template};
use super::{ChatTemplate, Conversation};

pub(super) const PLAIN: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}\
                     {% if add_generation_prompt %}<assistant>{% endif %}";
/// Writes the last answer otherwise than those before, as models that think do.
pub(super) const THINKS: &str = "{% for m in messages %}{% if m.role == 'assistant' %}\
                      <|im_start|>assistant\n\
                      {% if loop.last %}<think>\n\n</think>\n\n{% endif %}\
                      {{ m.content }}<|im_end|>\n\
                      {% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n\
                      {% endif %}{% endfor %}\
                      {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
/// Drops the thoughts of all answers but the last, as Qwen3's.
pub(super) const FORGETS: &str = "{% for m in messages %}{% set text = m.content %}\
                       {% set why = '' %}\
                       {% if '</think>' in text %}{% set why = text.split('</think>')[0]\
                       .split('<think>')[-1] %}{% set text = text.split('</think>')[-1]\
                       .lstrip('\\n') %}{% endif %}<{{ m.role }}>\
                       {% if loop.last and why %}<think>{{ why }}</think>{% endif %}{{ text }}\
                       </s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";

fn opened(source: &str) -> ChatTemplate {
    template(tempfile::tempdir().unwrap().path(), source).unwrap()
}

fn read(source: &str, line: &Value) -> Result<Conversation, String> {
    opened(source).conversation(&minijinja::Value::from_serialize(line))
}

/// The answers as texts.
fn answers(source: &str, line: &Value) -> Vec<String> {
    let made = read(source, line).unwrap();
    made.answers.iter().map(|one| made.text[one.clone()].to_owned()).collect()
}

fn turns(turns: &[(&str, &str)]) -> Value {
    let message = |(role, content): &(&str, &str)| json!({ "role": role, "content": content });
    json!({ "messages": turns.iter().map(message).collect::<Vec<_>>() })
}

/// Another at each run, which it prints.
pub(crate) fn fresh_key() -> String {
    let seed = std::collections::hash_map::RandomState::new().build_hasher().finish();
    println!("the key is of seed {seed}");
    format!("k{seed:x}")
}

/// `fixtures/make_python.py` asked transformers.
#[test]
fn templates_print_as_python_prints() {
    let text = fs::read_to_string(fixture("python.json")).unwrap();
    let file: minijinja::Value = serde_json::from_str(&text).unwrap();
    let at = |value: &minijinja::Value, key: &str| value.get_attr(key).unwrap();
    let cases: Vec<_> = at(&file, "cases").try_iter().unwrap().collect();
    assert!(cases.len() > 45, "{}", cases.len());
    let mut wrong = Vec::new();
    for case in &cases {
        let (expression, expected) = (at(case, "expression"), at(case, "text"));
        let source = format!(
            "{{% set m = messages %}}{{% set t = m[1]['values'] %}}{{{{ {expression} }}}}\
             {{% generation %}}{{% endgeneration %}}"
        );
        let made = opened(&source).conversation(&at(&file, "line")).map(|made| made.text);
        if made.as_deref().ok() != expected.as_str() {
            wrong.push(format!("{expression}:\n  {made:?}\n  {expected:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn answers_are_found_where_the_last_is_written_otherwise() {
    let four = turns(&[
        ("user", "One?"),
        ("assistant", "First."),
        ("user", "Two?"),
        ("assistant", "Second."),
    ]);
    let last = "<think>\n\n</think>\n\nSecond.<|im_end|>\n";
    assert_eq!(answers(THINKS, &four), ["First.<|im_end|>\n", last]);
    let six = turns(&[
        ("system", "assistant"),
        ("user", "First."),
        ("assistant", "<think>a</think>\n\n First. "),
        ("user", "b"),
        ("assistant", "<think>c</think>d"),
    ]);
    assert_eq!(answers(FORGETS, &six), [" First. </s>", "<think>c</think>d</s>"]);
    assert_eq!(answers(PLAIN, &four), ["First.\n", "Second.\n"]);
}

#[test]
fn a_conversation_may_begin_with_the_assistant() {
    let needs_one = format!("{{% if messages[0]['role'] == 'system' %}}{{% endif %}}{PLAIN}");
    let line = turns(&[
        ("assistant", "Hello."),
        ("user", "One?"),
        ("assistant", "First."),
        ("user", "Two?"),
        ("assistant", "Second."),
    ]);
    assert_eq!(answers(&needs_one, &line), ["Hello.\n", "First.\n", "Second.\n"]);
}

#[test]
fn an_answer_of_weight_0_is_not_scored() {
    let marks = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}\
                 {% generation %}{{ m.content }}\n{% endgeneration %}{% else %}{{ m.content }}\n\
                 {% endif %}{% endfor %}";
    let line = |left_out: Value, scored: Value| {
        let mut line = turns(&[
            ("user", "One?"),
            ("assistant", "Bad."),
            ("user", "Two?"),
            ("assistant", "Good."),
        ]);
        let mut set = |at: usize, keys: Value| {
            let message = line["messages"][at].as_object_mut().unwrap();
            message.extend(keys.as_object().unwrap().clone());
        };
        set(1, left_out);
        set(3, scored);
        line
    };
    for source in [PLAIN, marks] {
        for (left_out, scored) in [
            (json!({ "weight": 0 }), json!({ "weight": 1 })),
            (json!({ "weight": 0.0 }), json!({ "weight": null })),
            (json!({ "train": false }), json!({ "train": true })),
        ] {
            assert_eq!(answers(source, &line(left_out, scored)), ["Good.\n"]);
        }
        let none = read(source, &line(json!({"weight": 0}), json!({"train": false}))).unwrap();
        assert!(none.answers.is_empty());
    }
    for (keys, message) in [
        (json!({ "weight": 0.5 }), "message 1 has weight = 0.5; 0 and 1 are read"),
        (json!({ "weight": "0" }), "message 1 has weight = 0; 0 and 1"),
        (json!({ "weight": 0, "train": true }), "contradict each other"),
    ] {
        let error = read(PLAIN, &line(keys, json!({}))).unwrap_err();
        assert!(error.contains(message), "{error}");
    }
    let mut user = turns(&[("user", "a"), ("assistant", "b")]);
    user["messages"][0]["train"] = json!(true);
    let error = read(PLAIN, &user).unwrap_err();
    assert!(error.contains("only answers of the assistant are scored"), "{error}");
    // To the token and the bit.
    let dir = tempfile::tempdir().unwrap();
    let lines = [line(json!({"weight": 0}), json!({})).to_string()];
    let done = run(dir.path(), template(dir.path(), PLAIN).unwrap(), &lines).unwrap();
    let text = "<user>One?\n<assistant>Bad.\n<user>Two?\n<assistant>";
    let tokenizer = crate::TextTokenizer::open(&fixture("tokenizer.json")).unwrap();
    let before = tokenizer.encode(text).unwrap().len() as u64;
    assert_eq!(done.answers, done.tokens - before);
    let mask = fs::read(dir.path().join("out.mask")).unwrap();
    let scored = |i: u64| mask[16 + i as usize / 8] >> (i % 8) & 1 == 1;
    assert!((0..done.tokens).all(|i| scored(i) == (i >= before)));
}

#[test]
fn only_marks_that_a_template_made_count() {
    let line = turns(&[("user", "a"), ("assistant", "b")]);
    for source in [
        format!("{{# {{% generation %}} #}}{PLAIN}"),
        format!("{{% if false %}}{{% generation %}}x{{% endgeneration %}}{{% endif %}}{PLAIN}"),
    ] {
        assert_eq!(answers(&source, &line), ["b\n"]);
    }
}

#[test]
fn conversations_of_which_nothing_is_scored_are_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let line = |turn: Value| json!({ "messages": [turn] }).to_string();
    let lines = [
        line(json!({"role": "user", "content": "a"})),
        line(json!({"role": "assistant", "content": "a", "weight": 0})),
    ];
    let error = run(dir.path(), template(dir.path(), PLAIN).unwrap(), &lines).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("none of its 2 conversations has an answer that is scored"), "{error}");
    let left = fs::read_dir(dir.path()).unwrap().count();
    assert_eq!(left, 2, "the template and the lines");
}

#[test]
fn roles_and_keys_that_are_not_known_are_refused() {
    let with = |key: &str, value: Value| {
        let mut line = turns(&[("user", "a"), ("assistant", "b")]);
        line["messages"][1][key] = value;
        line
    };
    let key = fresh_key();
    let error = read(PLAIN, &with(&key, json!("x"))).unwrap_err();
    assert!(error.contains(&format!("message 1 has the key {key:?}, which")), "{error}");
    // One that is empty says nothing, and one that the template names is written.
    read(PLAIN, &with(&key, json!([]))).unwrap();
    read(PLAIN, &with("id", json!(7))).unwrap();
    read(&format!("{{{{ messages[1].{key} }}}}{PLAIN}"), &with(&key, json!("x"))).unwrap();
    for (role, message) in [
        ("model", "message 1 has the role \"model\"; write \"assistant\""),
        ("Assistant", "message 1 has the role \"Assistant\"; write \"assistant\""),
        ("narrator", "message 1 has the role \"narrator\", which the template does not name"),
    ] {
        let error = read(PLAIN, &turns(&[("user", "a"), (role, "b")])).unwrap_err();
        assert!(error.contains(message), "{error}");
    }
    read(&format!("{{{{ 'narrator' }}}}{PLAIN}"), &turns(&[("narrator", "a")])).unwrap();
    let error = read(PLAIN, &with("content", Value::Null)).unwrap_err();
    assert!(error.contains("message 1 has no content"), "{error}");
}

#[test]
fn three_forms_are_one_conversation() {
    let expected = read(PLAIN, &turns(&[("system", "s"), ("user", "a\nb"), ("assistant", "c")]));
    let expected = expected.unwrap();
    for line in [
        json!({"conversations": [{"from": "system", "value": "s"},
            {"from": "human", "value": "a\nb"}, {"from": "gpt", "value": "c"}]}),
        json!({"system": "s", "conversations": [{"from": "user", "value": "a\nb"},
            {"from": "assistant", "value": "c", "weight": 1}], "id": 3}),
        json!({"conversations": [{"role": "system", "content": "s"},
            {"role": "user", "content": "a\nb"}, {"role": "assistant", "content": "c"}]}),
        json!({"system": "s", "instruction": "a", "input": "b", "output": "c"}),
        json!({"system": "s", "instruction": "a\nb", "input": "", "output": "c"}),
    ] {
        assert_eq!(read(PLAIN, &line), Ok(expected.clone()), "{line}");
    }
    for (line, message) in [
        (json!({"prompt": "a", "completion": "b"}), "its fields are completion, prompt"),
        (json!({"messages": "a"}), "messages is no list"),
        (json!(["a"]), "it is a sequence, and no object"),
        (json!({"conversations": [{"from": "narrator", "value": "a"}]}), "turn 0 is from"),
        (json!({"conversations": "a"}), "conversations is no list"),
        (json!({"instruction": "a", "output": "b", "history": [["c", "d"]]}), "history is not"),
        (json!({"messages": [{"role": "user", "content": "a"}], "tools": "x"}), "tools is a text"),
        (json!({"messages": [{"role": "user", "content": "a"}], "functions": [1]}), "functions is"),
    ] {
        let error = read(PLAIN, &line).unwrap_err();
        assert!(error.contains(message), "{error}");
    }
    // What else a line gives the template.
    let options = json!({"messages": [{"role": "user", "content": "a"}], "tools": "[{\"n\": 1}]",
        "chat_template_kwargs": {"x": "yes"}});
    let made = read("{{ tools[0].n }} {{ x }}{{ messages[0].role }}", &options).unwrap();
    assert_eq!(made.text, "1 yesuser");
}

#[test]
fn templates_have_limits() {
    let line = turns(&[("user", "a"), ("assistant", "b")]);
    let steps = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}";
    let doubled = "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}\
                   {% endfor %}{{ n.s }}";
    let joined = doubled.replace('+', "~");
    let long = "{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}";
    for (source, message) in [
        (steps, "steps"),
        (doubled, "a text of more than"),
        (&joined, "a text of more than"),
        (long, "a text of more than"),
        ("{{ '%0999999999d' | format(1) }}", "a format has a number beyond"),
        ("{{ '%*d' | format(999999999, 1) }}", "a format has a number beyond"),
        ("{{ '{:999999999}'.format(1) }}", "a format has a number beyond"),
        ("{{ 'a' | indent(999999999) }}", "indent: the width"),
        ("{{ range(99999) | join('x' * 9999) }}", "a text of more than"),
        ("{{ ('x' * 99999).replace('x', 'x' * 9999) }}", "a text of more than"),
        ("{{ ('x' * 99999) | replace('x', 'x' * 9999) }}", "a text of more than"),
        ("{{ [1] | tojson(indent=999999999) }}", "tojson: indent is"),
    ] {
        let start = std::time::Instant::now();
        let error = read(source, &line).unwrap_err();
        assert!(error.contains(message), "{source}: {error}");
        assert!(start.elapsed().as_secs() < 30, "{source}: {:?}", start.elapsed());
    }
    // Damaged ones are refused or text.
    for source in ["{%}", "{%-}", "{{}", "{{", "{#", "{% raw %}", "{% generation", "{{ ' }}"] {
        let dir = tempfile::tempdir().unwrap();
        let _ = template(dir.path(), source).map(|t| t.conversation(&minijinja::Value::from(1)));
    }
}

#[test]
fn arguments_that_a_filter_does_not_know_are_refused() {
    let key = fresh_key();
    for filter in ["tojson", "default", "join", "trim", "indent", "sort", "map", "upper", "items"] {
        let source = format!("{{{{ messages | {filter}({key}=1) }}}}");
        let dir = tempfile::tempdir().unwrap();
        let error = template(dir.path(), &source).unwrap_err().to_string();
        assert!(error.contains(&format!("{filter}({key}=..) is not known")), "{error}");
    }
}

#[test]
fn a_templates_file_has_the_line_ends_that_python_reads() {
    let line = turns(&[("user", "a")]);
    let made = read("{{ messages[0].role }}\r\nx\ry\n", &line).unwrap();
    assert_eq!(made.text, "user\nx\ny");
}

#[test]
fn todays_date_is_given_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.jinja");
    fs::write(&path, "{{ strftime_now('%d %b %Y') }}{{ messages[0].role }}").unwrap();
    let open =
        |date: Option<&str>| ChatTemplate::open(Path::new("tokenizer.json"), Some(&path), date);
    let line = minijinja::Value::from_serialize(turns(&[("user", "a")]));
    let made = open(Some("2026-11-05")).unwrap().conversation(&line).unwrap();
    assert_eq!(made.text, "05 Nov 2026user");
    let error = open(None).unwrap().conversation(&line).unwrap_err();
    assert!(error.contains("give one with --chat-date"), "{error}");
    let error = open(Some("today")).unwrap_err().to_string();
    assert!(error.contains("chat-date = today: it is no date; give one such as"), "{error}");
}
