//! Text of foreign files as it may be printed. A terminal obeys control characters: a file could
//! move the cursor, hide what stands before it, or forge lines that look like zeropp's own.

use std::borrow::Cow;

/// `text` with every control character but line feeds and tabs spelled as in JSON (`\u001b`), and
/// those that change the direction of what follows.
pub fn escaped(text: &str) -> Cow<'_, str> {
    escape(text, |c| is_control(c) && !matches!(c, '\n' | '\t'))
}

/// [`escaped`], with line feeds and tabs spelled too: for names, which have a line of others to
/// stand in.
pub fn escaped_line(text: &str) -> Cow<'_, str> {
    escape(text, is_control)
}

/// The most characters of an [`excerpt`].
const EXCERPT_MAX: usize = 80;

/// The beginning of a text of a file, which may be of any length, for messages: at most 80
/// characters, [`escaped_line`].
pub fn excerpt(text: &str) -> String {
    match text.char_indices().nth(EXCERPT_MAX) {
        None => escaped_line(text).into_owned(),
        Some((end, _)) => format!("{} … ({} bytes)", escaped_line(&text[..end]), text.len()),
    }
}

fn escape(text: &str, is_bad: impl Fn(char) -> bool + Copy) -> Cow<'_, str> {
    if !text.contains(is_bad) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match is_bad(c) {
            true => out.push_str(&format!("\\u{:04x}", u32::from(c))),
            false => out.push(c),
        }
    }
    Cow::Owned(out)
}

/// Control characters, line and paragraph separators, and marks that turn the direction of text.
fn is_control(c: char) -> bool {
    c.is_control() || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_spelled_out() {
        for (text, shown) in [
            ("plain, Grüße, 日本", "plain, Grüße, 日本"),
            ("a\u{1b}[31mred\r\u{7f}", "a\\u001b[31mred\\u000d\\u007f"),
            ("\u{9b}2J\u{202e}txt", "\\u009b2J\\u202etxt"),
            ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ] {
            assert_eq!(escaped(text), shown);
        }
        assert!(matches!(escaped("plain"), Cow::Borrowed(_)));
        let long = excerpt(&"\u{7f}".repeat(81));
        assert_eq!(long, format!("{} … (81 bytes)", "\\u007f".repeat(80)));
        assert_eq!(excerpt("a\nb"), "a\\u000ab");
        assert_eq!(escaped_line("name\nerror: forged\t"), "name\\u000aerror: forged\\u0009");
    }

    #[test]
    fn escaped_json_stays_json() {
        let text = serde_json::to_string("c1 \u{9b} del \u{7f}").unwrap();
        let back: String = serde_json::from_str(&escaped(&text)).unwrap();
        assert_eq!(back, "c1 \u{9b} del \u{7f}");
    }
}
