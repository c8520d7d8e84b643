use super::*;
use zeropp_schedule::action::ACTIONS;
use zeropp_schedule::draw::chrome;
use zeropp_schedule::simulate::simulate_steps;

fn ask(request: Value) -> Value {
    serde_json::from_str(&answer(&request.to_string())).unwrap()
}

fn wanted(kind: &str) -> Value {
    json!({
        "kind": kind, "pp": 4, "virtual": null, "micro_batches": 8, "unit": null,
        "slices": 1, "pairs": 0,
        "costs": { "t_f": 1, "t_b": 1, "t_w": 1, "mem_f": 2, "mem_b": -1, "mem_w": -1 },
        "layers": null, "limit": null, "lower": false, "recompute": false, "prefetch": 1,
    })
}

fn drawing(kind: &str, key: &str, value: Value) -> Value {
    let mut wanted = wanted(kind);
    wanted[key] = value;
    ask(json!({ "ask": "draw", "wanted": wanted }))
}

#[test]
fn every_kind_is_drawn_and_stands_in_the_table() {
    for kind in KINDS {
        let row = ask(json!({ "ask": "row", "wanted": wanted(kind.name) }));
        assert_eq!(row["kind"], kind.name);
        let drawn = drawing(kind.name, "lower", true.into());
        assert_eq!(drawn["ranks"].as_array().unwrap().len(), 4, "{}: {drawn}", kind.name);
        let plain = drawing(kind.name, "lower", false.into());
        // The one kind that searches has more time for a picture than for a row.
        if kind.name != "auto" {
            assert_eq!(plain["numbers"], row["numbers"], "{}", kind.name);
        }
    }
}

#[test]
fn an_edited_schedule_is_proven_at_once() {
    let csv = drawing("1f1b", "lower", false.into())["csv"].as_str().unwrap().to_string();
    let edit = |csv: &str| ask(json!({ "ask": "edit", "csv": csv, "wanted": wanted("1f1b") }));
    let same = edit(&csv);
    assert_eq!(same["numbers"]["makespan"], 33_000, "{same}");
    let lost = csv.replacen("0F0,", "", 1);
    let said = edit(&lost)["error"].as_str().unwrap().to_string();
    assert!(said.contains("rank") || said.contains("0F0"), "{said}");
    assert!(edit("nonsense")["error"].is_string());
}

#[test]
fn samples_in_slices_are_drawn_edited_and_priced_alike() {
    let mut asked = wanted("zeropp");
    (asked["slices"], asked["pairs"]) = (4.into(), 60.into());
    asked["micro_batches"] = 2.into();
    asked["costs"] = json!({ "t_f": 100, "t_b": 120, "t_w": 80 });
    let sliced = ask(json!({ "ask": "draw", "wanted": asked }));
    assert_eq!(sliced["slices"], 4, "{sliced}");
    let mut whole = asked.clone();
    whole["slices"] = 1.into();
    let whole = ask(json!({ "ask": "draw", "wanted": whole }));
    let bubble = |drawn: &Value| drawn["numbers"]["bubble"].as_f64().unwrap();
    assert!(bubble(&sliced) < bubble(&whole), "{} {}", bubble(&sliced), bubble(&whole));
    let edited = ask(json!({ "ask": "edit", "csv": sliced["csv"], "wanted": asked }));
    assert_eq!(edited["numbers"]["makespan"], sliced["numbers"]["makespan"], "{edited}");
    assert_eq!(edited["slices"], 4);
    asked["pairs"] = 101.into();
    let error = ask(json!({ "ask": "draw", "wanted": asked }))["error"].clone();
    assert_eq!(error, "pairs = 101: no share of a time in %; use 0 to 100");
    let error = drawing("zb-v", "slices", 4.into())["error"].clone();
    assert!(error.as_str().unwrap().contains("slices"), "{error}");
}

#[test]
fn numbers_of_no_schedule_are_an_error_in_slices_too() {
    let drawn = |numbers: [usize; 5]| {
        let mut asked = wanted("zeropp");
        for (key, n) in ["pp", "virtual", "micro_batches", "unit", "slices"].iter().zip(numbers) {
            asked[*key] = n.into();
        }
        ask(json!({ "ask": "draw", "wanted": asked }))["error"].clone()
    };
    for numbers in [
        [0, 2, 8, 0, 4],
        [4, 2, 0, 0, 4],
        // 2^32 forwards.
        [1024, 64, 8192, 0, 8],
        [4, 2, 8, 0, 257],
    ] {
        let error = drawn(numbers);
        assert!(error.is_string(), "{numbers:?}: {error}");
    }
}

#[test]
fn a_fault_of_an_edited_schedule_reads_as_the_command_says_it() {
    let csv = "0F0,1F0,0B0,1B0\n";
    let mut one = wanted("1f1b");
    one["pp"] = 1.into();
    let said = ask(json!({ "ask": "edit", "csv": csv, "wanted": one }))["error"].clone();
    let faults = check::check(csv, Format::Csv, &VerifyLimits::default(), FAULTS_MAX).unwrap_err();
    assert_eq!(said, in_lines(faults));
    assert!(said.as_str().unwrap().contains("row 1, column 3 (0B0 of rank 0)"), "{said}");
}

#[test]
fn the_last_step_of_a_trace_gives_its_shape_and_its_times() {
    let mut whole = wanted("zb-v");
    (whole["lower"], whole["costs"]["t_f"]) = (true.into(), 2.into());
    (whole["costs"]["t_step"], whole["costs"]["t_reduce"]) = (5.into(), 1.into());
    let made = serde_json::from_value::<WantedSchedule>(whole).unwrap().make("zb-v").unwrap();
    let mut run = simulate_steps(&made.schedule, &made.costs, 3).unwrap();
    run.title = "zb-v · pp 4 x zero3 1 x dp 1".into();
    run.facts = vec!["4 ranks share 2 cores".into()];
    let mut text = Vec::new();
    chrome::write(&run, &mut text).unwrap();
    let text = String::from_utf8(text).unwrap();
    let simulated = text.replacen("zb-v · pp 4 x zero3 1 x dp 1", "zb-v, simulated", 1);
    let simulated = ask(json!({ "ask": "read", "text": simulated, "name": "run.json" }));
    let read = ask(json!({ "ask": "read", "text": text, "name": "run.json" }));
    assert_eq!(simulated["shape"], read["shape"], "{simulated}");
    let shape = json!({ "kind": "zb-v", "pp": 4, "virtual": 2, "micro_batches": 8, "unit": 8,
        "lower": true });
    assert_eq!(read["shape"], shape, "{read}");
    assert_eq!((&read["times"]["t_f"], &read["times"]["t_w"]), (&json!(2.0), &json!(1.0)));
    assert!(read["trace"].as_str().unwrap().ends_with(", step 3 of 3"), "{}", read["trace"]);
    assert_eq!(read["facts"][0], "4 ranks share 2 cores");
    let spans = || read["ranks"].as_array().unwrap().iter().flat_map(|r| r.as_array().unwrap());
    let ends = |at: usize| spans().map(move |s| s[at].as_u64().unwrap());
    assert_eq!(ends(3).min(), Some(0));
    assert!(ends(4).max().unwrap() < 2 * made.timeline.ranks[0].own_span().unwrap().1);
}

#[test]
fn files_that_are_no_schedule_and_no_trace_are_refused_by_what_they_are() {
    for (text, said) in [
        ("{\"t_f\": [1, 2], \"t_comm\": 0}", "a file of costs"),
        ("# measured\nt_f = [1, 2]\nt_b = 1\n", "a file of costs"),
        ("{\"run\": {\"name\": \"a\"}}\n{\"step\": 1, \"loss\": 5.5}\n", "the metrics of a run"),
        ("{\"step\": 1, \"loss\": 5.5}\n{\"step\": 2}\n", "the metrics of a run"),
        ("{\"no\": \"schedule\"}", "neither a schedule nor a trace; use a schedule"),
    ] {
        let error = ask(json!({ "ask": "read", "text": text, "name": "a.x" }))["error"].clone();
        assert!(error.as_str().unwrap().starts_with(&format!("a.x: {said}")), "{error}");
    }
}

#[test]
fn the_picture_of_all_kinds_is_that_of_the_command() {
    let dots = json!([{ "kind": "1f1b", "bubble": 0.25, "peak": 8, "chosen": true },
        { "kind": "zb-h1", "bubble": 0.1, "peak": 8, "chosen": false }]);
    let svg = ask(json!({ "ask": "scatter", "dots": dots, "wide": 400.0 }))["svg"].clone();
    let svg = svg.as_str().unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("viewBox=\"0 0 400 300\""), "{svg}");
    assert_eq!((svg.matches("<circle").count(), svg.matches(">zb-h1</text>").count()), (2, 1));
}

#[test]
fn files_are_read_and_written() {
    let mut request = json!({ "ask": "write", "csv": null, "format": "json" });
    request["wanted"] = wanted("zb-v");
    let text = ask(request.clone())["text"].as_str().unwrap().to_string();
    let read = ask(json!({ "ask": "read", "text": text, "name": "a.json" }));
    assert_eq!((&read["pp"], &read["kind"]), (&json!(4), &json!("zb-v")));
    request["format"] = "svg".into();
    assert!(ask(request)["text"].as_str().unwrap().starts_with("<svg"));
    let bad = ask(json!({ "ask": "read", "text": "hello", "name": "bad.txt" }));
    assert!(bad["error"].as_str().unwrap().starts_with("bad.txt: "), "{bad}");
}

#[test]
fn invalid_requests_are_errors_not_panics() {
    for (key, value) in [
        ("pp", json!(0)),
        ("pp", json!(100_000)),
        ("micro_batches", json!(0)),
        ("micro_batches", json!(1_000_000)),
        ("unit", json!(0)),
        ("virtual", json!(63)),
        ("layers", json!(1)),
        ("costs", json!({})),
        ("costs", json!({ "t_f": -1, "t_b": 1, "t_w": 1 })),
        ("costs", json!({ "t_f": 1, "t_b": 1, "t_w": 1, "links": 0 })),
        ("limit", json!(0)),
        ("kind", json!("best")),
        ("nonsense", json!(1)),
    ] {
        for kind in ["zeropp", "zb-v", "zb-2p", "interleaved"] {
            let drawn = drawing(kind, key, value.clone());
            let good = drawn["error"].as_str().is_some_and(|e| !e.is_empty());
            assert!(good || drawn["numbers"].is_object(), "{kind} {key}: {drawn}");
        }
    }
    assert!(answer("").contains("error"));
    for (request, start) in [
        (json!({ "ask": "draw" }), "draw: wanted is missing"),
        (json!({ "ask": "read", "text": "" }), "read: name is missing"),
        (json!({ "ask": "edit", "wanted": wanted("1f1b") }), "edit: csv is missing"),
        (json!({ "ask": "write", "wanted": wanted("1f1b") }), "write: format is missing"),
        (json!({ "ask": "why" }), "why: not a question"),
        (json!({ "ask": "kinds", "how": 1 }), "unknown field `how`"),
    ] {
        let said = ask(request)["error"].as_str().unwrap().to_string();
        assert!(said.starts_with(start), "{said}");
    }
}

#[test]
fn the_same_model_has_the_same_work_for_every_kind() {
    for (kind, v) in [("1f1b", 1), ("zeropp", 3), ("zb-v", 2)] {
        let mut wanted = wanted(kind);
        wanted["virtual"] = v.into();
        wanted["layers"] = 24.into();
        let drawn = ask(json!({ "ask": "draw", "wanted": wanted }));
        let busy: i64 = drawn["ranks"]
            .as_array()
            .unwrap()
            .iter()
            .flat_map(|r| {
                r.as_array()
                    .unwrap()
                    .iter()
                    .map(|s| s[4].as_i64().unwrap() - s[3].as_i64().unwrap())
            })
            .sum();
        assert_eq!(busy, 3 * 24 * 8 * 1000, "{kind}");
    }
}

/// The page knows actions by the numbers of their rows.
#[test]
fn the_page_has_a_name_and_a_colour_for_every_action() {
    let chart = include_str!("../../page/chart.js");
    for list in ["KINDS_OF_ACTION", "COLOURS"] {
        let items = chart.split(&format!("const {list} = [")).nth(1).unwrap();
        let items = items.split(']').next().unwrap();
        assert_eq!(items.matches('"').count(), 2 * ACTIONS.len(), "{list}");
    }
}
