use super::*;
use zeropp_schedule::action::ACTIONS;

fn ask(request: Value) -> Value {
    serde_json::from_str(&answer(&request.to_string())).unwrap()
}

fn wanted(kind: &str) -> Value {
    json!({
        "kind": kind, "pp": 4, "virtual": null, "micro_batches": 8, "unit": null,
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
