//! `zeropp compare`: two schedules, and a measured run beside its plan.

use super::{fails, works};

#[test]
fn two_schedules_side_by_side() {
    let dir = tempfile::tempdir().unwrap();
    let made = "--pp 4 --micro-batches 8 --t-f 5 --t-b 6 --t-w 4";
    works(dir.path(), &format!("schedule --kind 1f1b {made} -o a.json"));
    works(dir.path(), "schedule --kind zb-h1 --pp 4 --micro-batches 8 -o b.csv");
    let line = "compare a.json b.csv --t-f 5 --t-b 6 --t-w 4 -o page.html";
    let text = works(dir.path(), line);
    let row = |name: &str| text.lines().find(|l| l.starts_with(name)).unwrap_or("").to_string();
    assert!(
        text.starts_with("A: a.json (1f1b, simulated)\nB: b.csv (file, simulated)\n"),
        "{text}"
    );
    // (m + p − 1) · 15 and m · 15 + (p − 1) · 7.
    assert!(row("makespan").ends_with("165 us   141 us  -24 us (-14.5 %)"), "{text}");
    assert!(row("bubble ").ends_with("27.27 %  14.89 %     -12.38 points"), "{text}");
    assert!(!text.contains("bubble, pp"), "ranks that idle as long as all are not listed: {text}");
    // zb-h1 is the best there is in the memory of 1F1B: (p − 1)(F + B − W) for these times.
    assert!(row("bubble_rate, at").ends_with("14.89 %  14.89 %      +0.00 points"), "{text}");
    let page = std::fs::read_to_string(dir.path().join("page.html")).unwrap();
    assert!(page.contains("A: a.json (1f1b, simulated)") && page.contains("B against A"));
    // A trace of the same run is the same run.
    works(dir.path(), &format!("schedule --kind 1f1b {made} --format chrome -o trace.json"));
    let same = works(dir.path(), "compare a.json trace.json");
    assert!(same.contains("0 us (+0.0 %)") && same.matches("165 us").count() == 4, "{same}");
}

#[test]
fn two_schedules_run_the_same_model_or_a_warning_says_that_they_do_not() {
    let dir = tempfile::tempdir().unwrap();
    for kind in ["1f1b", "zb-v"] {
        for end in ["csv", "json"] {
            let made = format!("schedule --kind {kind} --pp 4 --micro-batches 8 -o {kind}.{end}");
            works(dir.path(), &made);
        }
    }
    let text = works(dir.path(), "compare 1f1b.csv zb-v.csv");
    let busiest = |text: &str| {
        let row = text.lines().find(|l| l.starts_with("busiest rank")).unwrap();
        row.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(busiest(&text), "busiest rank 48 us 48 us 0 us (+0.0 %)");
    assert!(!text.contains("note:"), "{text}");
    // The files have times of a stage, of which zb-v has twice as many.
    let text = works(dir.path(), "compare 1f1b.json zb-v.json");
    assert!(text.contains("note: B computes +100.0 % against A"), "{text}");
    let text = works(dir.path(), "compare 1f1b.json zb-v.json --layers 8");
    assert_eq!(busiest(&text), "busiest rank 48 us 48 us 0 us (+0.0 %)");
    assert!(!text.contains("note:"), "{text}");
}

#[test]
fn memory_in_units_is_not_drawn_beside_memory_in_bytes() {
    let dir = tempfile::tempdir().unwrap();
    works(dir.path(), "schedule --kind 1f1b --pp 2 --micro-batches 4 -o units.json");
    let bytes = "schedule --kind 1f1b --pp 2 --micro-batches 4 --mem-f 2MiB --format chrome";
    works(dir.path(), &format!("{bytes} -o bytes.json"));
    works(dir.path(), "compare units.json bytes.json -o page.html");
    let page = std::fs::read_to_string(dir.path().join("page.html")).unwrap();
    assert!(page.contains("MiB") && !page.contains(" units\""), "{page}");
    assert!(page.contains("memory: in no unit of the other run"));
}

/// A measured run against its plan: one step of the trace, one of its two pipelines.
#[test]
fn a_measured_run_beside_its_plan() {
    let dir = tempfile::tempdir().unwrap();
    works(
        dir.path(),
        "run --layers 4 --hidden 16 --heads 2 --seq 8 --steps 3 --pp 2 --zero3 2 --unit 3 \
         --trace measured.json",
    );
    works(dir.path(), "schedule --kind zeropp --pp 2 --unit 3 --lower -o planned.json");
    let text = works(dir.path(), "compare planned.json measured.json -o page.html");
    assert!(text.contains("step 3 of 3), first of 2 pipelines"), "{text}");
    assert!(text.contains("bubble, rank 1") && !text.contains("bubble, rank 2"), "{text}");
    let first = works(dir.path(), "compare planned.json measured.json --step 1");
    assert!(first.contains("step 1 of 3"), "{first}");
    fails(dir.path(), "compare planned.json measured.json --step 4", "measured.json: step = 4");
    // Two measured runs keep all their ranks.
    let both = works(dir.path(), "compare measured.json measured.json");
    assert!(
        both.contains("makespan")
            && both.lines().filter(|l| l.starts_with("bubble, ")).count() == 4,
        "{both}"
    );
    let broken = std::fs::read_to_string(dir.path().join("measured.json")).unwrap();
    let broken = broken.replacen("\"cat\":\"compute\"", "\"cat\":\"gpu\"", 1);
    std::fs::write(dir.path().join("broken.json"), broken).unwrap();
    fails(dir.path(), "compare planned.json broken.json", "broken.json: traceEvents[");
}
