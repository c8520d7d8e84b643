//! Costs as users meet them: saved by a run, read by others, compared with what was measured.

mod common;

use std::path::Path;

use common::zeropp;
use serde_json::Value;

fn works(dir: &Path, line: &str) -> (String, String) {
    let got = zeropp(dir, line);
    assert_eq!(got.code, Some(0), "{line}: {}{}", got.out, got.err);
    (got.out, got.err)
}

const SMALL: &str = "--layers 4 --hidden 16 --heads 2 --seq 8 --steps 4 --pp 2";

#[test]
fn a_run_s_costs_are_taken_by_runs_and_schedules() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (out, _) =
        works(dir, &format!("run {SMALL} --zero3 2 --save-costs run.json --trace t.json"));
    assert!(out.contains("\ncosts estimated from FLOP: "), "{out}");
    let (out, _) = works(dir, &format!("run {SMALL} --zero3 2 --costs run.json --dry-run"));
    let line = out.lines().find(|l| l.starts_with("costs ")).unwrap_or_default();
    assert!(
        line.starts_with("costs     measured: run.json (steps 2 to 4 of a run: zeropp"),
        "{out}"
    );
    // A trace says the same; gathers and all.
    let (out, _) = works(dir, &format!("run {SMALL} --zero3 2 --costs t.json --dry-run"));
    assert!(out.contains("costs     measured: t.json (a trace of zeropp"), "{out}");
    let schedule = "schedule --kind zeropp-auto --pp 2 --virtual 2 --unit 3 --format json";
    let costs = |flags: &str| -> (Value, String) {
        let (out, err) = works(dir, &format!("{schedule} {flags}"));
        (serde_json::from_str::<Value>(&out).unwrap()["costs"].clone(), err)
    };
    let (saved, note) = costs("--costs run.json");
    assert!(note.starts_with("note: costs measured: run.json (steps 2 to 4"), "{note}");
    let (traced, _) = costs("--costs t.json");
    for key in ["t_f", "t_b", "t_w", "t_r", "t_gather", "t_reduce", "t_comm", "t_step"] {
        assert_eq!(saved[key], traced[key], "{key}");
    }
    assert!(saved["t_f"].as_array().unwrap().len() == 4 && saved["t_comm"].as_f64() > Some(0.0));
    assert!(saved["mem_f"][0].as_i64() > Some(1000), "bytes: {saved}");
    // What is typed wins over what was measured.
    let (typed, note) = costs("--costs run.json --t-comm 377 --t-w 1,2,3,4");
    assert!(note.contains("; --t-w, --t-comm as typed"), "{note}");
    assert_eq!((typed["t_comm"].as_f64(), &typed["t_f"]), (Some(377.0), &saved["t_f"]));
    assert_eq!(typed["t_w"], serde_json::json!([1.0, 2.0, 3.0, 4.0]));
    let got = zeropp(dir, "schedule --kind 1f1b --pp 3 --costs run.json");
    assert!(got.err.starts_with("error: costs = run.json: t_f: found ["), "{}", got.err);
    assert!(got.err.contains("one number for each of stages = 3"), "{}", got.err);
}

#[test]
fn a_file_by_hand_is_read_and_a_limit_in_bytes_kept() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let text = "t_f = 100\nt_b = 110\nt_w = 90\nt_comm = 5\nmem_f = 1073741824\n\
                mem_b = -536870912\nmem_w = -536870912\nbytes_per_s = 1e9\nmem_message = 1e3\n";
    std::fs::write(dir.join("by_hand.toml"), text).unwrap();
    let line = "schedule --kind zb-2p --pp 4 --micro-batches 12 --costs by_hand.toml --format json";
    let peak = |flags: &str| {
        let (out, note) = works(dir, &format!("{line} {flags}"));
        assert_eq!(note, "note: costs given: by_hand.toml\n");
        let json: Value = serde_json::from_str(&out).unwrap();
        let peaks = json["peak_activation"].as_array().unwrap().clone();
        peaks.iter().map(|peak| peak.as_u64().unwrap()).max().unwrap()
    };
    assert!(peak("") > 5 << 30);
    assert!(peak("--mem-limit 5GiB") <= 5 << 30);
    std::fs::write(dir.join("rates.toml"), format!("{text}zero3_bytes_per_s = 1e9\n")).unwrap();
    let got = zeropp(dir, "schedule --pp 4 --costs rates.toml");
    assert!(got.err.contains("rates.toml: zero3_bytes_per_s: how many ranks share"), "{}", got.err);
}

/// Computes take longer than waking up for them.
const RUN: &str = "run --layers 4 --hidden 64 --seq 128 --steps 3 --pp 2 --unit 3";

/// The example of the help: a plan with no times of its own takes the run's.
#[test]
fn a_plan_is_compared_with_a_run_in_the_run_s_times() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    works(dir, &format!("{RUN} --trace measured.json --save-costs c.json"));
    works(dir, "schedule --kind zeropp --pp 2 --unit 3 --lower -o planned.json");
    let (out, _) = works(dir, "compare planned.json measured.json -o page.html");
    let title = "A: planned.json (zeropp, simulated with the times of measured.json (zeropp";
    assert!(out.starts_with(title), "{out}");
    let row = |out: &str, name: &str| {
        out.lines().find(|l| l.starts_with(name)).unwrap_or_default().to_owned()
    };
    // The same work; what is left is who waited, which on a busy machine is for cores, too.
    assert!(row(&out, "busiest rank").ends_with(" %)"), "{out}");
    // Both lanes can be seen: neither run is a sliver of the other.
    let page = std::fs::read_to_string(dir.join("page.html")).unwrap();
    assert!(page.contains("simulated with the times of measured.json"), "the page says it");
    let data = page.split("id=\"data\">").nth(1).unwrap().split("</script>").next().unwrap();
    let data: Value = serde_json::from_str(data).unwrap();
    let whole = data["length"].as_u64().unwrap();
    for run in data["runs"].as_array().unwrap() {
        assert!(run["length"].as_u64().unwrap() * 30 > whole, "{} of {whole}", run["length"]);
    }
    // Stages that the run does not have: scaled to its work.
    works(dir, "schedule --kind 1f1b --pp 2 --micro-batches 6 --lower -o other.json");
    let (out, _) = works(dir, "compare measured.json other.json");
    assert!(out.contains("B: other.json (1f1b, simulated with its times x "), "{out}");
    assert!(out.contains("so that both work as long)"), "{out}");
    assert!(row(&out, "busiest rank").ends_with(" %)"), "{out}");
    // What is given wins, and what is of another scale is reported in times.
    let (out, _) = works(dir, "compare planned.json measured.json --t-f 1 --t-b 1 --t-w 1");
    assert!(out.starts_with("A: planned.json (zeropp, simulated)\n"), "{out}");
    let makespan = row(&out, "makespan");
    assert!(makespan.contains("(x ") && !makespan.contains('%'), "{makespan}");
    let (out, _) = works(dir, "compare planned.json measured.json --costs c.json");
    assert!(out.starts_with("A: planned.json (zeropp, simulated)\n"), "{out}");
    assert!(row(&out, "busiest rank").ends_with(" %)"), "{out}");
}

#[test]
fn layouts_are_tried_and_ranked_by_what_they_took() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let small = "--layers 2 --hidden 16 --heads 2 --seq 8 --gpus 2 --global-batch 4 --try 3";
    let (out, err) = works(dir, &format!("plan --cpu {small} --json"));
    assert!(err.contains("round 1 of trials") && err.contains("round 7 of trials"), "{err}");
    let plan: Value = serde_json::from_str(&out).unwrap();
    let layouts = plan["layouts"].as_array().unwrap();
    assert_eq!(layouts.len(), 3);
    let mut before = 0.0;
    for layout in layouts {
        let tried = &layout["tried"];
        let [took, least, most] = ["step_s", "least_s", "most_s"].map(|k| tried[k].as_f64());
        assert!(before <= took.unwrap() && least <= took && took <= most, "{layout}");
        assert_eq!(tried["rounds"], 7);
        before = took.unwrap();
    }
    // The run that is planned takes the first; nothing is saved or written by the trials.
    let run_to_plan = "--save kept --metrics m.jsonl --steps 3 --plan=a100";
    let (out, _) = works(dir, &format!("run {run_to_plan} {small}"));
    assert!(out.contains("took s") && out.contains("3 steps in"), "{out}");
    let lines = std::fs::read_to_string(dir.join("m.jsonl")).unwrap();
    assert_eq!(lines.lines().filter(|line| line.contains("\"step_s\"")).count(), 3, "{lines}");
    let mut found: Vec<_> =
        std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name()).collect();
    found.sort();
    assert_eq!(found, ["kept", "m.jsonl"]);
    let got = zeropp(dir, &format!("plan {small}"));
    assert_eq!(got.code, Some(2));
    assert!(got.err.starts_with("error: try = 3: with engine = nccl ranks are"), "{}", got.err);
    let got = zeropp(dir, &format!("plan --cpu {}", small.replace("--try 3", "--try 257")));
    assert!(got.err.starts_with("error: try = 257: "), "{}", got.err);
    // Layouts of which none runs: the first one says why, and leaves nothing.
    let got = zeropp(dir, &format!("plan --cpu {small} --vocab 64"));
    assert_eq!(got.code, Some(1), "{}", got.err);
    assert!(got.err.contains("warning: 3 of 3 layouts failed; "), "{}", got.err);
    assert!(got.err.contains("is not below vocab = 64; use a larger vocab"), "{}", got.err);
    assert_eq!(std::fs::read_dir(dir).unwrap().count(), 2);
    let got = zeropp(dir, &format!("run --plan=a100 {small} --data nowhere.txt"));
    assert_eq!(got.code, Some(2), "{}", got.err);
    assert!(got.err.contains("nowhere.txt"), "{}", got.err);
}
