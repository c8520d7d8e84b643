//! Names: kinds of schedule in one place, public types with one home.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use super::{CRATES, files, is_rust, is_test, product, report, root};

/// Kinds of schedule by the table's rows.
fn kinds_of_schedule() -> Vec<String> {
    let table = root().join("zeropp-schedule/src/schedules/kinds.rs");
    let table = fs::read_to_string(table).unwrap();
    let names = product(&table);
    let names = names.lines().filter_map(|line| line.trim().strip_prefix("name: \""));
    names.map(|name| name.trim_end_matches("\",").to_string()).collect()
}

/// Whether `line` has a kind's name as a string. The product's own name and `auto` are words of
/// other meaning where no schedule is spoken of.
fn names_a_kind(line: &str, kinds: &[String]) -> bool {
    let of_schedules = line.contains("schedule") || line.contains("kind");
    let mut strings = line.split('"').skip(1).step_by(2);
    strings.any(|text| {
        let is_word = ["zeropp", "auto"].contains(&text) && !of_schedules;
        kinds.iter().any(|kind| kind == text) && !is_word
    })
}

/// A kind is its file and one row of the table, so that a new one is known everywhere: no other
/// product source has its name, but for papers, whose tables are of kinds.
#[test]
fn no_kind_of_schedule_is_named_by_a_string_outside_of_its_file_and_row() {
    let kinds = kinds_of_schedule();
    assert!(kinds.len() > 15, "{kinds:?}");
    assert!(names_a_kind("    \"1f1b\" => 1,", &kinds) && !names_a_kind("x(\"zeropp\")", &kinds));
    assert!(names_a_kind("layout.schedule == \"zeropp\"", &kinds));
    let mut broken = Vec::new();
    let is_home = |name: &str| {
        name.starts_with("zeropp-schedule/src/schedules/") || name.starts_with("zeropp-papers/")
    };
    for folder in CRATES {
        for (name, text) in files(folder).iter().filter(|(n, _)| is_rust(n) && !is_test(n)) {
            if !is_home(name) {
                let product = product(text);
                let lines = product.lines().filter(|line| names_a_kind(line, &kinds));
                broken.extend(lines.map(|line| format!("{name}: {}", line.trim())));
            }
        }
    }
    report(&broken);
}

/// The public struct, enum, trait or alias that `line` declares.
fn public_type(line: &str) -> Option<&str> {
    let item = line.strip_prefix("pub ")?;
    let kinds = ["struct ", "enum ", "trait ", "type "];
    let name = kinds.iter().find_map(|kind| item.strip_prefix(kind))?;
    name.split(|c: char| !c.is_alphanumeric() && c != '_').next()
}

#[test]
fn no_public_type_name_has_two_homes() {
    let mut homes: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    // The command is no library.
    for folder in CRATES.iter().filter(|folder| !folder.starts_with("zeropp-cli")) {
        for (name, text) in files(folder).iter().filter(|(n, _)| is_rust(n) && !is_test(n)) {
            for public in product(text).lines().filter_map(public_type) {
                homes.entry(public.to_string()).or_default().insert(name.clone());
            }
        }
    }
    let mut broken = Vec::new();
    for (name, homes) in homes.iter().filter(|(_, homes)| homes.len() > 1) {
        let homes: Vec<_> = homes.iter().map(String::as_str).collect();
        broken.push(format!("{name}: {}", homes.join(", ")));
    }
    report(&broken);
}
