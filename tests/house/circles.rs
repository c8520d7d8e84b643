//! Circles of files: those that are left are listed in ARCHITECTURE.md, and none is added.

use std::collections::{BTreeMap, BTreeSet};

use super::{CRATES, files, is_rust, is_test, product, report, root};

/// The modules of a crate: their paths, with the files that they are in.
type Modules = BTreeMap<Vec<String>, String>;
/// The files that each file uses.
type Uses = BTreeMap<String, BTreeSet<String>>;

fn module_path(folder: &str, name: &str) -> Vec<String> {
    let inside = name.strip_prefix(folder).unwrap().trim_start_matches('/');
    let mut path: Vec<String> =
        inside.trim_end_matches(".rs").split('/').map(String::from).collect();
    if path.last().is_some_and(|last| last == "mod") || ["lib", "main"].contains(&&*path[0]) {
        path.pop();
    }
    path
}

/// The paths that `text` names from `crate`, `self` or `super` on, each of a group apart.
fn paths(text: &str) -> Vec<Vec<String>> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut found = Vec::new();
    for base in ["crate::", "self::", "super::"] {
        for (at, _) in text.match_indices(base) {
            let before = &text[..at];
            if before.ends_with("::") || before.ends_with(is_word) {
                continue;
            }
            let rest = &text[at..];
            let end = rest.find(|c: char| !is_word(c) && c != ':').unwrap_or(rest.len());
            let head: Vec<String> =
                rest[..end].split("::").filter(|w| !w.is_empty()).map(String::from).collect();
            let group = rest[end..].strip_prefix('{').filter(|_| rest[..end].ends_with("::"));
            let Some(group) = group else {
                found.push(head);
                continue;
            };
            let (mut depth, mut item) = (0, String::new());
            for c in group.chars() {
                match c {
                    '}' if depth == 0 => break,
                    '{' => depth += 1,
                    '}' => depth -= 1,
                    ',' if depth == 0 => {
                        found.push(joined(&head, &std::mem::take(&mut item)));
                        continue;
                    }
                    _ => {}
                }
                item.push(c);
            }
            found.push(joined(&head, &item));
        }
    }
    found
}

/// A group's item behind the path before the group.
fn joined(head: &[String], item: &str) -> Vec<String> {
    let item = item.split(['{', ' ']).find(|w| !w.trim().is_empty()).unwrap_or("");
    let words = item.split("::").map(str::trim).filter(|w| !w.is_empty() && *w != "self");
    head.iter().cloned().chain(words.map(String::from)).collect()
}

/// The module that `path` leads to from `from`, as far as modules go; what a module only hands on
/// is that of its home.
fn leads_to(
    modules: &Modules,
    texts: &BTreeMap<String, String>,
    from: &[String],
    path: &[String],
) -> Option<String> {
    let up = path.iter().take_while(|word| *word == "super").count();
    let base = match path[0].as_str() {
        "crate" => Vec::new(),
        "self" => from.to_vec(),
        _ => from[..from.len().checked_sub(up)?].to_vec(),
    };
    let whole: Vec<String> = base.into_iter().chain(path[up.max(1)..].iter().cloned()).collect();
    let known = (0..=whole.len()).rev().find(|n| modules.contains_key(&whole[..*n]))?;
    let file = &modules[&whole[..known]];
    let Some(name) = whole.get(known) else { return Some(file.clone()) };
    let text = &texts[file];
    for line in text.replace('\n', " ").split(';') {
        let Some((_, used)) = line.split_once("use ") else { continue };
        let is_named = used.split(|c: char| !c.is_alphanumeric() && c != '_').any(|w| w == name);
        let Some((module, _)) = used.trim().split_once("::").filter(|_| is_named) else { continue };
        let mut home = whole[..known].to_vec();
        home.push(module.to_string());
        if let Some(home) = modules.get(&home) {
            return Some(home.clone());
        }
    }
    Some(file.clone())
}

fn uses(folder: &str) -> Uses {
    let sources = files(folder).into_iter().filter(|(name, _)| is_rust(name) && !is_test(name));
    let texts: BTreeMap<String, String> = sources.map(|(n, text)| (n, product(&text))).collect();
    let modules: Modules = texts.keys().map(|n| (module_path(folder, n), n.clone())).collect();
    let of = |(path, file): (&Vec<String>, &String)| {
        let named = paths(&texts[file]).into_iter();
        let to = named.filter_map(|named| leads_to(&modules, &texts, path, &named));
        (file.clone(), to.filter(|to| to != file).collect())
    };
    modules.iter().map(of).collect()
}

/// All that can be reached from `from`.
fn reached(uses: &Uses, from: &str) -> BTreeSet<String> {
    let (mut seen, mut open) = (BTreeSet::new(), vec![from.to_string()]);
    while let Some(file) = open.pop() {
        for next in uses.get(&file).into_iter().flatten() {
            if seen.insert(next.clone()) {
                open.push(next.clone());
            }
        }
    }
    seen
}

/// The files of each circle.
fn circles(uses: &Uses) -> BTreeSet<BTreeSet<String>> {
    let all: BTreeMap<&String, BTreeSet<String>> =
        uses.keys().map(|file| (file, reached(uses, file))).collect();
    let with = |file: &String| {
        let both = all[file].iter().filter(|other| all[*other].contains(file));
        both.cloned().collect::<BTreeSet<_>>()
    };
    uses.keys().map(with).filter(|circle| circle.len() > 1).collect()
}

/// The folder that all files of a circle are in.
fn folder_of(circle: &BTreeSet<String>) -> String {
    let folder = |file: &String| file.rsplit_once('/').unwrap().0.to_string();
    circle.iter().map(folder).min_by_key(String::len).unwrap()
}

/// The list of ARCHITECTURE.md: folders, with the files of their largest circle.
fn listed() -> BTreeMap<String, usize> {
    let text = std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let Some(from) = text.find("**Circles of files**") else { return BTreeMap::new() };
    let paragraph = text[from..].split("\n\n").next().unwrap();
    let entries = paragraph.split_whitespace().filter_map(|word| word.strip_prefix('`'));
    let entry = |word: &str| {
        let (folder, rest) = word.split_once("`:")?;
        Some((folder.to_string(), rest.trim_end_matches([',', '.']).parse().ok()?))
    };
    entries.filter_map(entry).collect()
}

#[test]
fn circles_of_files_are_listed_and_none_is_added() {
    let listed = listed();
    let mut found: BTreeMap<String, usize> = BTreeMap::new();
    for circle in CRATES.iter().flat_map(|folder| circles(&uses(folder))) {
        let most = found.entry(folder_of(&circle)).or_default();
        *most = circle.len().max(*most);
    }
    let mut broken = Vec::new();
    for (folder, files) in &found {
        match listed.get(folder) {
            Some(most) if files <= most => {}
            most => broken.push(format!("{folder}: a circle of {files} files, listed: {most:?}")),
        }
    }
    let gone = listed.keys().filter(|folder| !found.contains_key(*folder));
    broken.extend(gone.map(|folder| format!("{folder}: listed, and has no circle any more")));
    report(&broken);
}

#[test]
fn planted_paths_and_circles_of_files_are_seen() {
    let of = |text: &str| {
        let shown = paths(text).into_iter().map(|path| path.join(" "));
        shown.collect::<Vec<_>>()
    };
    assert_eq!(of("use crate::a::{b::C, d};"), ["crate a b C", "crate a d"]);
    assert_eq!(of("super::super::x(y) + other::super::z"), ["super super x"]);
    let set = |names: &[&str]| names.iter().map(|n| n.to_string()).collect::<BTreeSet<_>>();
    let uses: Uses = [("a", set(&["b"])), ("b", set(&["c"])), ("c", set(&["b"]))]
        .map(|(file, to)| (file.to_string(), to))
        .into();
    assert_eq!(circles(&uses), BTreeSet::from([set(&["b", "c"])]));
}
