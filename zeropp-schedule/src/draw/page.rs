//! Pages of tables, pictures and commands, which load nothing.

use super::{escape, palette};

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// Letters of a cell that does not wrap.
const LONG: usize = 40;

/// A page with a heading and what is below it, in HTML.
pub fn page(title: &str, body: &str) -> String {
    let title = escape(title);
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title}</title>\n<style>\n{}{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n\
         {body}\n<script>\n{SCRIPT}</script>\n</body>\n</html>\n",
        palette(":root")
    )
}

/// Lines of text, each of which wraps.
pub fn lines(text: &str) -> String {
    let lines: Vec<String> = text.lines().map(escape).collect();
    if lines.is_empty() { String::new() } else { format!("<p>{}</p>", lines.join("<br>")) }
}

/// A command, with a button that copies it. Its lines break between words only.
pub fn command(text: &str) -> String {
    let words: Vec<String> =
        text.split(' ').map(|word| format!("<span>{}</span>", escape(word))).collect();
    format!("<div class=\"command\"><code>{}</code><button>Copy</button></div>", words.join(" "))
}

/// Names and what is said of each.
pub fn facts<'a>(rows: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
    let row = |(name, fact): (&str, &str)| format!("<dt>{}<dd>{}", escape(name), escape(fact));
    format!("<dl>{}</dl>", rows.into_iter().map(row).collect::<String>())
}

/// A table: a head, and rows with a cell for each of its columns, of which the first names the row.
/// Columns that are named in `less` are left out where a window is narrow; those with cells of more
/// than 40 letters wrap. Without rows nothing is there.
pub fn table(head: &[String], rows: &[Vec<String>], less: &[&str]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let is_long = |cell: &String| cell.chars().count() > LONG;
    let class = |column: usize| {
        let less = head.get(column).is_some_and(|name| less.contains(&name.as_str()));
        let long = rows.iter().any(|row| row.get(column).is_some_and(is_long));
        match (less, long) {
            (false, false) => "",
            (true, false) => " class=\"less\"",
            (false, true) => " class=\"long\"",
            (true, true) => " class=\"less long\"",
        }
    };
    let cells = |tag: &str, row: &[String]| {
        let cell =
            |(i, text): (usize, &String)| format!("<{tag}{}>{}</{tag}>", class(i), escape(text));
        row.iter().enumerate().map(cell).collect::<String>()
    };
    let body: String = rows.iter().map(|row| format!("<tr>{}</tr>\n", cells("td", row))).collect();
    format!(
        "<div class=\"wide\"><table><thead><tr>{}</tr></thead>\n<tbody>{body}</tbody></table>\
         </div>",
        cells("th", head)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_asks_for_nothing_and_holds_text_as_text() {
        let head = ["", "<a>", "b"].map(String::from);
        let rows = [vec!["x".to_string(), "1 & 2".into(), "w ".repeat(30)]];
        let body = [lines("x < y\nz"), command("run --x '<'"), table(&head, &rows, &["b"])];
        let page = page("t & u", &body.concat());
        assert!(page.contains("<p>x &lt; y<br>z</p>") && page.contains("<h1>t &amp; u</h1>"));
        assert!(page.contains(
            "<code><span>run</span> <span>--x</span> <span>'&lt;'</span></code><button>"
        ));
        assert!(page.contains("<th>&lt;a&gt;</th><th class=\"less long\">b</th>"));
        assert!(page.contains("<td class=\"less long\">w w"));
        for far in ["src=", "href=", "url("] {
            assert!(!page.contains(far), "{far}");
        }
    }
}
