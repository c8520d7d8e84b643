//! Parameters: each has a name, and what always goes together is a struct or a range.

use super::{CRATES, files, function, is_rust, is_test, product, report};

/// The functions of the product that still take a tuple apart: `file: function`.
const LEFT: [&str; 4] = [
    "zeropp-failures/src/tag.rs: tag",
    "zeropp-pipeline/src/executor/mod.rs: send",
    "zeropp-search/src/budgeted/deadlines.rs: least_work",
    "zeropp-search/src/budgeted/moves.rs: shift_entry",
];

/// Whether a parameter of the function whose name and parameters `head` begins with is a pattern of
/// a tuple.
fn takes_a_tuple_apart(head: &str) -> bool {
    let (mut before, mut depth, mut in_parameters) = (' ', 0, false);
    for c in head.chars().filter(|c| !c.is_whitespace()) {
        match c {
            '(' if depth == 0 => in_parameters = true,
            '(' if depth == 1 && in_parameters && "(,".contains(before) => return true,
            _ => {}
        }
        match c {
            '(' | '[' | '<' => depth += 1,
            '>' if before == '-' => {}
            ')' | ']' | '>' => depth -= 1,
            _ => {}
        }
        if in_parameters && depth == 0 {
            return false;
        }
        before = c;
    }
    false
}

/// A tuple's fields have no names where it is passed, and the reader has to look its order up.
#[test]
fn parameters_are_not_tuples_taken_apart() {
    assert!(
        takes_a_tuple_apart("f(a: A, (b, c): (B, C)) {") && takes_a_tuple_apart("f((a, b): T)")
    );
    assert!(takes_a_tuple_apart("f<F: Fn(A) -> B>(\n    &self,\n    (a, b): (A, B),\n) {"));
    assert!(!takes_a_tuple_apart(
        "f<F: Fn(A) -> B>(a: Map<A, (B, C)>, b: (B, C)) { g(a, (b, c)) }"
    ));
    let mut found = Vec::new();
    for (name, text) in CRATES.iter().flat_map(|folder| files(folder)) {
        if !is_rust(&name) || is_test(&name) {
            continue;
        }
        let text = product(&text);
        let mut at = 0;
        for line in text.split_inclusive('\n') {
            if let Some(function) = function(line)
                && takes_a_tuple_apart(&text[at + line.find("fn ").expect("its head") + 3..])
            {
                found.push(format!("{name}: {}", function.trim_end()));
            }
            at += line.len();
        }
    }
    let new: Vec<_> =
        found.iter().filter(|found| !LEFT.contains(&found.as_str())).cloned().collect();
    report(&new);
    // One that is mended leaves the list.
    let gone = LEFT.iter().filter(|left| !found.iter().any(|found| found == *left));
    report(&gone.map(|left| format!("{left} is mended")).collect::<Vec<_>>());
}
