//! README.md and the pages for users say what the program does.

mod common;

use std::path::Path;

use common::{Outcome, zeropp};
use zeropp::pipeline::schedules::KINDS;

const README: &str = include_str!("../../README.md");
const RUNNING: &str = include_str!("../../docs/running.md");
const SCHEDULES: &str = include_str!("../../docs/schedules.md");
const LAUNCH: &str = include_str!("../../docs/launch.md");

/// The text between `<!-- name: begin -->` and `<!-- name: end -->` in docs/schedules.md.
fn section(name: &str) -> &'static str {
    let (begin, end) = (format!("<!-- {name}: begin -->\n"), format!("<!-- {name}: end -->"));
    let from = SCHEDULES.find(&begin).expect("a section begins") + begin.len();
    &SCHEDULES[from..][..SCHEDULES[from..].find(&end).expect("a section ends")]
}

#[test]
fn the_list_of_schedules_is_the_table_of_kinds() {
    let row = |kind: &zeropp::pipeline::schedules::Kind| {
        format!("| `{}` | {} |\n", kind.name, kind.about)
    };
    let rows: String = KINDS.iter().map(row).collect();
    let table = format!("\n| kind | order |\n|---|---|\n{rows}\n");
    assert_eq!(section("kinds"), table, "put this into docs/schedules.md:\n{table}");
}

/// The program's arguments in every line of a page's shell blocks that calls it, and whether
/// another program starts it.
fn calls(page: &str) -> Vec<(String, bool)> {
    let blocks = page.split("```").skip(1).step_by(2);
    let mut shell = String::new();
    for block in blocks.filter_map(|block| block.strip_prefix("sh\n")) {
        shell.push_str(&block.replace("\\\n", " "));
    }
    let names = ["./target/release/zeropp ", "zeropp ", "cargo run --release -- "];
    let call = |line: &str| {
        let line = line.split(" #").next().unwrap_or(line).trim();
        names.iter().find_map(|name| {
            let at = line.find(name).filter(|at| *at == 0 || line[..*at].ends_with(' '))?;
            Some((line[at + name.len()..].trim().to_string(), at > 0))
        })
    };
    let calls = shell.lines().filter(|line| !line.starts_with("cargo build")).filter_map(call);
    // A program of its own, which may not be built here: the gate calls it.
    calls.filter(|(call, _)| !call.starts_with("tokenize ")).collect()
}

/// A call of a page in `folder`: in full where it is quick, with fewer steps or `--dry-run`
/// where it trains, since this is about what the flags are, and with the engine at hand.
fn try_call(folder: &Path, call: &str) -> Outcome {
    let here = call
        .replace("--engine mpi", "")
        .replace("--engine nccl", "")
        .replace("--device cuda", "")
        .replace("--nodes 2 --node-rank 0 --rendezvous node0:29400", "")
        .replace("--steps 600", "--steps 2")
        .replace("--steps 2000", "--steps 2");
    // What is saved or traced is wanted by a later line.
    let kept = ["--save", "--trace"].iter().any(|flag| here.contains(flag));
    let more = match (here.starts_with("run "), kept, here.contains("--steps")) {
        (true, false, _) => " --dry-run",
        (true, true, false) => " --steps 2",
        // It would serve its page until it is stopped.
        _ if here == "playground" => " -o playground.html",
        _ => "",
    };
    zeropp(folder, &format!("{here}{more}"))
}

#[test]
fn every_command_of_the_pages_for_users_works() {
    let pages =
        [("README", README), ("running", RUNNING), ("schedules", SCHEDULES), ("launch", LAUNCH)];
    let mut launched = 0;
    for (name, page) in pages {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("book.txt"), "It was a small book. ".repeat(400)).unwrap();
        let calls = calls(page);
        assert!(calls.len() >= 2, "{name}: {calls:?}");
        launched += calls.iter().filter(|(_, launched)| *launched).count();
        for (call, _) in &calls {
            let got = try_call(dir.path(), call);
            assert_eq!(got.code, Some(0), "{name}: zeropp {call}\n{}{}", got.out, got.err);
        }
    }
    assert!(launched >= 2, "{launched} commands by mpirun");
}
