//! What README.md says of the program is what the program is.

mod common;

use std::path::Path;

use common::{Outcome, zeropp};
use zeropp::pipeline::schedules::KINDS;

const README: &str = include_str!("../../README.md");

/// What stands between `<!-- name: begin -->` and `<!-- name: end -->`.
fn section(name: &str) -> &'static str {
    let (begin, end) = (format!("<!-- {name}: begin -->\n"), format!("<!-- {name}: end -->"));
    let from = README.find(&begin).expect("a section begins") + begin.len();
    &README[from..][..README[from..].find(&end).expect("a section ends")]
}

#[test]
fn the_list_of_schedules_is_the_table_of_kinds() {
    let row = |kind: &zeropp::pipeline::schedules::Kind| {
        format!("| `{}` | {} |\n", kind.name, kind.about)
    };
    let rows: String = KINDS.iter().map(row).collect();
    let table = format!("\n| kind | order |\n|---|---|\n{rows}\n");
    assert_eq!(section("kinds"), table, "put this into README.md:\n{table}");
}

/// The program's arguments in every line of README.md's blocks that calls it, and which other
/// program starts it, if one does.
fn calls() -> Vec<(String, bool)> {
    let blocks = README.split("```").skip(1).step_by(2);
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

/// A call of README.md in `folder`: in full where it is quick, with fewer steps or `--dry-run`
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
fn every_command_of_it_is_one_that_works() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("book.txt"), "It was a small book. ".repeat(400)).unwrap();
    let calls = calls();
    assert!(calls.len() >= 15, "{calls:?}");
    assert!(calls.iter().any(|(_, launched)| *launched), "{calls:?}");
    for (call, _) in &calls {
        let got = try_call(dir.path(), call);
        assert_eq!(got.code, Some(0), "zeropp {call}\n{}{}", got.out, got.err);
    }
}
