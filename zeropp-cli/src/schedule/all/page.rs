//! The comparison as a page: a table that sorts, and bubble over memory.

use super::scatter::{escape, svg};
use super::{All, COLUMNS};

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// The page, which loads nothing.
pub(super) fn html(all: &All) -> String {
    let facts: Vec<String> = all.facts.iter().map(|fact| escape(fact)).collect();
    let names = all.head();
    let head = names.iter().zip(COLUMNS).map(|(name, column)| {
        format!("<th scope=\"col\" data-by=\"{column}\"><button>{}</button>", escape(name))
    });
    let rows = all.kinds.iter().map(|row| {
        let cells = row.cells(all.memory).into_iter().zip(COLUMNS).map(|(text, column)| {
            let by = match column {
                "kind" => row.kind.to_string(),
                _ => row.number(column).to_string(),
            };
            format!("<td data-by=\"{by}\">{}", escape(&text))
        });
        format!("<tr>{}", cells.collect::<String>())
    });
    let misfits = all.misfits.iter().map(|(kind, why)| {
        let columns = COLUMNS.len() - 1;
        format!("<tr class=\"misfit\"><td>{kind}<td colspan=\"{columns}\">{}", escape(why))
    });
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<title>All kinds of \
         schedule</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<h1>All kinds of \
         schedule</h1>\n<p>{}</p>\n<div id=\"table\"><table>\n<thead><tr>{}</thead>\n\
         <tbody>\n{}\n</tbody>\n</table></div>\n<div id=\"picture\">{}</div>\n\
         <script>\n{SCRIPT}</script>\n</body>\n</html>",
        facts.join("<br>"),
        head.collect::<String>(),
        rows.chain(misfits).collect::<Vec<_>>().join("\n"),
        svg(all, &[]),
    )
}
