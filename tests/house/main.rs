//! The rules of the house that no compiler knows, over all that is in git: lengths, circles between
//! modules, paths that lead nowhere, public items without a use.

mod circles;
mod names;
mod parameters;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Crates by the folder of their sources.
const CRATES: [&str; 19] = [
    "zeropp-schedule/src",
    "zeropp-search/src",
    "zeropp-kernels/src",
    "zeropp-data/src",
    "zeropp-model/src",
    "zeropp-weights/src",
    "zeropp-tokens/src",
    "zeropp-core/src",
    "zeropp-comm/src",
    "zeropp-checkpoint/src",
    "zeropp-failures/src",
    "zeropp-allocator/src",
    "zeropp-zero3/src",
    "zeropp-pipeline/src",
    "zeropp-plan/src",
    "zeropp-papers/src",
    "zeropp-playground/src",
    "src",
    "zeropp-cli/src",
];
const LINE_MAX: usize = 100;
const FUNCTION_MAX: usize = 70;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// All files under `folder` but those of builds and of git, by their paths from the root.
fn files(folder: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut folders: Vec<PathBuf> = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            if path.is_dir() {
                if !["target", ".git", ".gpu", "zeropp-failed"].contains(&name) {
                    folders.push(path);
                }
            } else if let Ok(text) = fs::read_to_string(&path) {
                let name = path.strip_prefix(root()).unwrap().to_str().unwrap().to_string();
                found.insert(name, text);
            }
        }
    }
    found
}

fn is_rust(name: &str) -> bool {
    name.ends_with(".rs")
}

fn is_test(name: &str) -> bool {
    let tests = ["tests", "_tests.rs", "hostile.rs", "samples.rs", "closed_forms.rs"];
    tests.iter().any(|part| name.contains(part))
}

/// A source without its comments and without the tests at its end.
fn product(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap();
    text.lines().map(|l| l.split("//").next().unwrap()).collect::<Vec<_>>().join("\n")
}

fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// The name of the function whose head `line` is.
fn function(line: &str) -> Option<&str> {
    let mut words = line.trim_start();
    for word in ["pub(crate) ", "pub(super) ", "pub ", "const ", "async ", "unsafe "] {
        words = words.strip_prefix(word).unwrap_or(words);
    }
    words.strip_prefix("fn ")?.split(['(', '<']).next()
}

fn report(broken: &[String]) {
    assert!(broken.is_empty(), "{} found:\n{}", broken.len(), broken.join("\n"));
}

#[test]
fn no_line_is_longer_than_a_screen() {
    let mut broken = Vec::new();
    for (name, text) in files("") {
        if ![".rs", ".toml", ".py", ".c"].iter().any(|end| name.ends_with(end)) {
            continue;
        }
        for (i, line) in text.lines().enumerate().filter(|(_, l)| l.chars().count() > LINE_MAX) {
            broken.push(format!("{name}:{}: {} columns", i + 1, line.chars().count()));
        }
    }
    report(&broken);
}

/// ARCHITECTURE.md names all files and folders with `unsafe` in the product, and none without.
#[test]
fn unsafe_is_where_the_architecture_says() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let from = text.find("**`unsafe`**").expect("a paragraph about `unsafe`");
    let paragraph = text[from..].split("\n\n").next().unwrap();
    let named: Vec<_> =
        paragraph.split('`').skip(1).step_by(2).filter(|p| p.contains('/')).collect();
    let covers = |place: &str, file: &str| {
        file == place || file.strip_prefix(place).is_some_and(|rest| rest.starts_with('/'))
    };
    let is_unsafe = |text: &str| {
        let text = product(text);
        text.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe")
    };
    let mut with: Vec<String> = Vec::new();
    for folder in CRATES {
        let files = files(folder);
        let product = files.iter().filter(|(name, _)| is_rust(name) && !is_test(name));
        with.extend(product.filter(|(_, text)| is_unsafe(text)).map(|(name, _)| name.clone()));
    }
    assert!(with.len() > 10 && named.len() > 10, "{with:?} and {named:?}");
    let mut broken = Vec::new();
    for file in &with {
        if !named.iter().any(|place| covers(place, file)) {
            broken.push(format!("{file} has `unsafe`, and ARCHITECTURE.md does not name it"));
        }
    }
    for place in named {
        if !with.iter().any(|file| covers(place, file)) {
            broken.push(format!("{place} is named in ARCHITECTURE.md, and has no `unsafe`"));
        }
    }
    report(&broken);
}

#[test]
fn no_function_is_longer_than_a_page() {
    let mut broken = Vec::new();
    for (name, text) in files("").iter().filter(|(name, _)| is_rust(name)) {
        let lines: Vec<&str> = text.lines().collect();
        for (i, line) in lines.iter().enumerate() {
            let Some(function) = function(line) else { continue };
            let ends = |l: &&str| indent(l) == indent(line) && l.trim_start().starts_with('}');
            let length = lines[i..].iter().position(ends).map_or(0, |last| last + 1);
            if length > FUNCTION_MAX && !line.trim_end().ends_with(';') {
                broken.push(format!("{name}:{}: {function} has {length} lines", i + 1));
            }
        }
    }
    report(&broken);
}

/// The modules at the top of the crate in `folder`, with those that each uses.
fn modules(folder: &str) -> BTreeMap<String, BTreeSet<String>> {
    let sources = files(folder);
    let top = |name: &str| {
        let inside = name.strip_prefix(folder).unwrap().trim_start_matches('/');
        inside.split('/').next().unwrap().trim_end_matches(".rs").to_string()
    };
    let names: BTreeSet<String> = sources.keys().map(|name| top(name)).collect();
    let entry = ["lib", "main"];
    // What the root hands on by another name: `pub use error::Error` makes `crate::Error` error's.
    let mut aliases = BTreeMap::new();
    for file in entry.iter().filter_map(|e| sources.get(&format!("{folder}/{e}.rs"))) {
        for line in product(file).replace('\n', " ").split(';') {
            let Some((_, path)) = line.split_once("use ") else { continue };
            let Some((module, items)) = path.trim().split_once("::") else { continue };
            for item in items.split(|c: char| !c.is_alphanumeric() && c != '_') {
                aliases.insert(item.to_string(), module.trim_start_matches("crate::").to_string());
            }
        }
    }
    let mut graph: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (name, text) in sources.iter().filter(|(name, _)| is_rust(name) && !is_test(name)) {
        let module = top(name);
        if entry.contains(&module.as_str()) {
            continue;
        }
        let uses = graph.entry(module.clone()).or_default();
        let inside = name.strip_prefix(folder).unwrap().trim_end_matches("/mod.rs");
        let to_root = "super::".repeat(inside.matches('/').count());
        for path in product(text).replace(&to_root, "crate::").split("crate::").skip(1) {
            let group = path.strip_prefix('{').and_then(|group| group.split('}').next());
            let paths = group.map_or(vec![path], |group| group.split(',').collect());
            for path in paths {
                let ends = |c: char| !c.is_alphanumeric() && c != '_';
                let word = path.trim_start().split(ends).next().unwrap();
                let word = aliases.get(word).map_or(word, String::as_str);
                if names.contains(word) && word != module {
                    uses.insert(word.to_string());
                }
            }
        }
    }
    graph
}

/// A way from `from` back to itself, if there is one.
fn circle(graph: &BTreeMap<String, BTreeSet<String>>, from: &str) -> Option<Vec<String>> {
    let mut ways = vec![vec![from.to_string()]];
    let mut seen = BTreeSet::new();
    while let Some(way) = ways.pop() {
        for next in graph.get(way.last().unwrap()).into_iter().flatten() {
            let mut longer = way.clone();
            longer.push(next.clone());
            if next == from {
                return Some(longer);
            }
            if seen.insert(next.clone()) {
                ways.push(longer);
            }
        }
    }
    None
}

#[test]
fn no_modules_of_a_crate_use_each_other_in_a_circle() {
    let mut broken = Vec::new();
    for folder in CRATES {
        let graph = modules(folder);
        for module in graph.keys() {
            if let Some(way) = circle(&graph, module) {
                broken.push(format!("{folder}: {}", way.join(" -> ")));
            }
        }
    }
    report(&broken);
}

#[test]
fn a_planted_circle_is_seen() {
    let graph: BTreeMap<String, BTreeSet<String>> = [("a", "b"), ("b", "c"), ("c", "a")]
        .map(|(from, to)| (from.to_string(), BTreeSet::from([to.to_string()])))
        .into();
    assert_eq!(circle(&graph, "a").unwrap().join(" "), "a b c a");
    assert_eq!(circle(&BTreeMap::from([("a".into(), BTreeSet::new())]), "a"), None);
}

#[test]
fn only_the_command_prints() {
    let mut broken = Vec::new();
    for folder in CRATES.into_iter().filter(|folder| *folder != "zeropp-cli/src") {
        for (name, text) in files(folder).iter().filter(|(n, _)| is_rust(n) && !is_test(n)) {
            let product = product(text);
            let prints = |line: &&str| {
                ["print!(", "println!(", "stdout()", "stderr()"].iter().any(|w| line.contains(w))
            };
            broken.extend(product.lines().filter(prints).map(|l| format!("{name}: {}", l.trim())));
        }
    }
    report(&broken);
}

/// Crates know those below them only.
#[test]
fn dependencies_run_one_way() {
    let mut broken = Vec::new();
    let below: [(&str, &[&str]); 19] = [
        ("zeropp-schedule", &[]),
        ("zeropp-search", &["schedule"]),
        ("zeropp-kernels", &[]),
        ("zeropp-data", &[]),
        ("zeropp-model", &["data"]),
        ("zeropp-weights", &["data"]),
        ("zeropp-tokens", &["data"]),
        ("zeropp-core", &["kernels", "data", "model", "schedule"]),
        ("zeropp-failures", &["data", "schedule"]),
        ("zeropp-allocator", &[]),
        ("zeropp-comm", &["core", "failures"]),
        ("zeropp-checkpoint", &["data"]),
        ("zeropp-zero3", &["core", "comm", "checkpoint"]),
        ("zeropp-pipeline", &["core", "comm", "failures", "zero3", "schedule"]),
        ("zeropp-plan", &["schedule", "search", "model", "data"]),
        ("zeropp-papers", &["schedule", "search", "model", "plan"]),
        ("zeropp-playground", &["schedule", "search"]),
        (
            ".",
            &[
                "core",
                "comm",
                "failures",
                "checkpoint",
                "zero3",
                "schedule",
                "search",
                "pipeline",
                "plan",
                "weights",
            ],
        ),
        (
            "zeropp-cli",
            &[
                "core",
                "comm",
                "checkpoint",
                "zero3",
                "schedule",
                "search",
                "pipeline",
                "weights",
                "plan",
                "papers",
                "playground",
                "allocator",
            ],
        ),
    ];
    for (folder, allowed) in below {
        let manifest = fs::read_to_string(root().join(folder).join("Cargo.toml")).unwrap();
        let section = manifest.split("[dependencies]").nth(1).unwrap();
        let section = section.split("\n[").next().unwrap();
        for line in section.lines().filter_map(|l| l.strip_prefix("zeropp-")) {
            let name = line.split(['.', ' ']).next().unwrap();
            if !allowed.contains(&name) {
                broken.push(format!("{folder} depends on zeropp-{name}"));
            }
        }
    }
    report(&broken);
}

/// The compiler's own rules, among them that every public item is documented, hold in all crates.
#[test]
fn every_crate_keeps_the_workspaces_lints() {
    let rules = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    assert!(rules.contains("[workspace.lints.rust]\nmissing_docs = \"warn\""));
    let gate = fs::read_to_string(root().join("ci/run")).unwrap();
    assert!(gate.contains("cargo clippy --release --locked --workspace"), "warnings end the gate");
    let keeps = |folder: &&str| {
        let home = root().join(folder.trim_end_matches("src"));
        let manifest = fs::read_to_string(home.join("Cargo.toml")).unwrap();
        manifest.contains("\n[lints]\nworkspace = true")
    };
    let broken: Vec<String> =
        CRATES.iter().filter(|folder| !keeps(folder)).map(|f| f.to_string()).collect();
    report(&broken);
}

/// Paths in prose and comments that begin with a folder of the project lead somewhere.
#[test]
fn every_path_that_is_named_is_there() {
    let folders = ["docs/", "tests/", "bench/", "examples/", "zeropp-", ".ci/", "ci/", "src/"];
    let mut broken = Vec::new();
    for (name, text) in files("") {
        let read = is_rust(&name) || name.ends_with(".md");
        if !read || name == "CHANGELOG.md" || name.starts_with("docs/benchmarks/") {
            continue;
        }
        let home = Path::new(&name).parent().unwrap();
        for (i, line) in text.lines().enumerate() {
            let comment =
                if is_rust(&name) { line.split_once("//").map(|l| l.1) } else { Some(line) };
            for word in comment.unwrap_or("").split(['`', ' ', '(', ')', ',', '[', ']', '"', ';']) {
                let word = word.trim_end_matches(['.', ':', '\'']).split('#').next().unwrap();
                let is_path = folders.iter().any(|f| word.starts_with(f)) && word.contains('/');
                let plain = word.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c));
                let there = |base: &Path| base.join(word).exists();
                if is_path && plain && !there(root()) && !there(&root().join(home)) {
                    broken.push(format!("{name}:{}: {word}", i + 1));
                }
            }
        }
    }
    report(&broken);
}

/// The guides name types, functions and tests; each is a word of some source.
#[test]
fn whatever_the_guides_name_is_in_the_sources() {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    let all = files("");
    let is_source =
        |name: &str| is_rust(name) || name.ends_with(".toml") || name.starts_with("ci/");
    let sources = all.iter().filter(|(name, _)| is_source(name));
    let words: BTreeSet<&str> = sources.flat_map(|(_, text)| text.split(|c| !is_part(c))).collect();
    let mut broken = Vec::new();
    for guide in ["ARCHITECTURE.md", "CONTRIBUTING.md"] {
        let spans = all[guide].split('`').skip(1).step_by(2);
        for name in spans.filter(|span| span.chars().all(|c| is_part(c) || c == ':')) {
            if name.split("::").any(|word| !words.contains(word)) {
                broken.push(format!("{guide}: {name}"));
            }
        }
    }
    report(&broken);
}

/// The index of decisions has every page under its own number, and no number twice.
#[test]
fn every_decision_is_in_the_index() {
    let index = fs::read_to_string(root().join("docs/adr/README.md")).unwrap();
    let rows: Vec<&str> = index.lines().filter(|l| l.contains("](0")).collect();
    let mut broken = Vec::new();
    let mut numbers = BTreeSet::new();
    for (path, text) in files("docs/adr").iter().filter(|(path, _)| !path.ends_with("README.md")) {
        let name = path.rsplit('/').next().unwrap();
        let number: u32 = name.split('-').next().unwrap().parse().unwrap();
        let title = text.lines().next().unwrap().trim_start_matches(&format!("# {number}. "));
        let row = format!("- [{number}. {title}]({name})");
        if !rows.contains(&row.as_str()) {
            broken.push(format!("docs/adr/README.md has no row {row}"));
        }
        if !numbers.insert(number) {
            broken.push(format!("{path}: number {number} is taken; use the next free one"));
        }
    }
    if rows.len() > numbers.len() {
        broken.push(format!("{} rows for {} decisions", rows.len(), numbers.len()));
    }
    report(&broken);
}

/// Links between documents lead to files that are there.
#[test]
fn every_link_between_documents_leads_somewhere() {
    let mut broken = Vec::new();
    for (name, text) in files("").iter().filter(|(name, _)| name.ends_with(".md")) {
        let home = root().join(Path::new(name).parent().unwrap());
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let path = link.split('#').next().unwrap();
            let elsewhere = link.contains("://") || path.is_empty();
            if !elsewhere && !home.join(path).exists() {
                broken.push(format!("{name}: {link}"));
            }
        }
    }
    // The tests that hold a promise have no links there, which would widen the table.
    let promises = fs::read_to_string(root().join("docs/stability.md")).unwrap();
    let held = promises.split('`').skip(1).step_by(2).filter(|path| path.contains('/'));
    let lost = held.filter(|path| !root().join(path).exists());
    broken.extend(lost.map(|path| format!("docs/stability.md: {path}")));
    report(&broken);
}

/// Functions that are public for those who write schedules and layers of their own: nothing here
/// calls them from another crate.
const OFFERED: [&str; 17] = [
    "by_decay",
    "custom_source",
    "custom_vjp2",
    "custom_vjp3",
    "idle_slots",
    "integer_program",
    "interleaved_as_printed",
    "on_kernels",
    "over_time",
    "strided",
    "to_toml",
    "unit_of",
    "v_half",
    "v_min",
    "with_cost",
    "zb_v",
    "zeropp_bound",
];

/// A public function is called outside of its crate's sources, by tests or examples at least, or
/// is offered.
#[test]
fn nothing_is_public_without_a_use_outside() {
    let all: Vec<_> = files("").into_iter().filter(|(name, _)| is_rust(name)).collect();
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let words: Vec<(&String, BTreeSet<&str>)> =
        all.iter().map(|(n, text)| (n, text.split(|c| !is_word(c)).collect())).collect();
    // The command is no library.
    let libraries = CRATES.iter().filter(|folder| !folder.starts_with("zeropp-cli"));
    let mut broken = Vec::new();
    for folder in libraries {
        let inside = |name: &str| name.starts_with(&format!("{folder}/"));
        let outside = |called: &str| {
            words.iter().any(|(name, words)| !inside(name) && words.contains(called))
        };
        for (name, text) in all.iter().filter(|(name, _)| inside(name) && !is_test(name)) {
            for line in product(text).lines() {
                let Some(item) = line.trim_start().strip_prefix("pub ") else { continue };
                let item = item.trim_start_matches("const ").trim_start_matches("unsafe ");
                let Some(item) = item.strip_prefix("fn ") else { continue };
                let called = item.split(['(', '<']).next().unwrap();
                if !outside(called) && !called.starts_with('$') && !OFFERED.contains(&called) {
                    broken.push(format!("{name}: {called}"));
                }
            }
        }
    }
    report(&broken);
}

/// The name of the public type, trait, constant or static that `line` declares.
fn declared(line: &str) -> Option<&str> {
    let item = line.trim_start().strip_prefix("pub ")?;
    let kinds = ["struct ", "enum ", "trait ", "type ", "const ", "static "];
    let name = kinds.iter().find_map(|kind| item.strip_prefix(kind))?;
    let name = name.split(|c: char| !c.is_alphanumeric() && c != '_').next()?;
    // A function that is `const` has its name after the next word.
    (name != "fn").then_some(name)
}

/// What others see of a source: its public heads, and all of a public enum or trait.
fn public_part(text: &str) -> String {
    let mut shown = String::new();
    // The indent of the item that is open, and whether all that is in it is shown.
    let mut open: Option<(usize, bool)> = None;
    for line in product(text).lines() {
        let words = line.trim_start();
        if let Some((at, whole)) = open {
            let ends = indent(line) == at && words.starts_with([')', '}']);
            if whole || !line.contains('=') {
                shown.extend([line, "\n"]);
            }
            if ends && (whole || line.ends_with(['{', ';', '}'])) {
                open = None;
            }
        } else if words.starts_with("pub ") {
            shown.extend([line, "\n"]);
            let has_body = ["pub enum ", "pub trait "].iter().any(|w| words.starts_with(w));
            if !line.ends_with([';', ',', '}']) && (has_body || !line.ends_with('{')) {
                open = Some((indent(line), has_body));
            }
        }
    }
    shown
}

/// A public type, trait or constant is named outside of its crate, or in what is public of it: a
/// struct that a function returns need not be named to be used.
#[test]
fn no_type_is_public_that_is_not_met_outside() {
    let all: Vec<_> = files("").into_iter().filter(|(name, _)| is_rust(name)).collect();
    let words = |text: &str| -> BTreeMap<String, usize> {
        let mut count = BTreeMap::new();
        for word in text.split(|c: char| !c.is_alphanumeric() && c != '_') {
            *count.entry(word.to_string()).or_default() += 1;
        }
        count
    };
    let everywhere: Vec<_> = all.iter().map(|(name, text)| (name, words(text))).collect();
    let mut broken = Vec::new();
    for folder in CRATES.iter().filter(|folder| !folder.starts_with("zeropp-cli")) {
        let inside = |name: &str| name.starts_with(&format!("{folder}/"));
        let own = || all.iter().filter(|(name, _)| inside(name) && !is_test(name));
        let shown = words(&own().map(|(_, text)| public_part(text)).collect::<String>());
        for (name, text) in own() {
            let text = product(text);
            for item in text.lines().filter_map(declared).filter(|item| !item.starts_with('$')) {
                let outside = everywhere.iter().any(|(n, w)| !inside(n) && w.contains_key(item));
                if !outside && shown.get(item).copied().unwrap_or(0) < 2 {
                    broken.push(format!("{name}: {item}"));
                }
            }
        }
    }
    report(&broken);
}

/// Every page of the documents is in their index, dated measurements too.
#[test]
fn every_document_is_in_the_index() {
    let index = fs::read_to_string(root().join("docs/README.md")).unwrap();
    let mut broken = Vec::new();
    for name in files("docs").keys().filter(|name| name.ends_with(".md")) {
        let page = name.strip_prefix("docs/").unwrap();
        // Decisions have an index of their own.
        let listed = index.contains(&format!("]({page})")) || page.starts_with("adr/0");
        if !listed && page != "README.md" {
            broken.push(format!("docs/README.md does not name {page}"));
        }
    }
    report(&broken);
}
