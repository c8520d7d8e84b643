//! Files of `zeropp schedule`: JSON, CSV, tables, pictures, the manual.

use serde_json::Value;
use zeropp::pipeline::schedules::KINDS;

use super::{fails, json, works, zeropp};

#[test]
fn json_has_the_schedule_and_its_numbers() {
    let got =
        json("--kind 1f1b --pp 2 --micro-batches 2 --t-f 1.5 --t-b 2 --t-w 0.25 --t-comm 0.125");
    let keys = [
        ("kind", "\"1f1b\""),
        ("pp", "2"),
        ("stages", "2"),
        ("micro_batches", "2"),
        ("units", "[2]"),
        ("placement", "[0,1]"),
        ("makespan", "11.5"),
        ("own_span_max", "11.5"),
        ("idle", "[4.0,0.0]"),
        ("ends", "[11.5,9.125]"),
        ("peak_activation", "[4,2]"),
        ("all_gathers", "0"),
        ("reduce_scatters", "0"),
    ];
    for (key, want) in keys {
        assert_eq!(got[key].to_string(), want, "{key}");
    }
    let actions = serde_json::json!([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]);
    assert_eq!(got["actions"], actions);
    assert_eq!(got["costs"]["t_f"], serde_json::json!([1.5, 1.5]));
}

/// The name of every kind.
fn kinds() -> impl Iterator<Item = &'static str> {
    KINDS.iter().map(|kind| kind.name)
}

/// Every kind in every file format is a sound schedule, and reading it back loses nothing.
#[test]
fn every_kind_is_sound_in_every_format() {
    let dir = tempfile::tempdir().unwrap();
    for kind in kinds() {
        for lower in ["", "--lower", "--lower --prefetch 2 --recompute full"] {
            let flags = format!("schedule --kind {kind} --pp 4 --micro-batches 8 {lower}");
            for name in ["s.csv", "s.json"] {
                assert_eq!(works(dir.path(), &format!("{flags} -o {name}")), "");
                let line = works(dir.path(), &format!("check {name}"));
                assert_eq!(line.lines().count(), 1, "{line}");
                let shown = if name == "s.csv" { "file" } else { kind };
                let start = format!("{name}: sound: {shown}, 4 ranks, ");
                assert!(line.starts_with(&start), "{line}");
                assert_eq!(line.contains("a program with"), !lower.is_empty(), "{line}");
                assert_eq!(line.contains("compute only"), lower.is_empty(), "{line}");
            }
            // PyTorch's dialect has less in it, but is as sound.
            works(dir.path(), &format!("{flags} --format torch -o torch.csv"));
            let text = std::fs::read_to_string(dir.path().join("torch.csv")).unwrap();
            assert!(!text.contains('#') && !text.contains("OPTIMIZER_STEP"));
        }
    }
}

#[test]
fn a_table_of_all_kinds() {
    let dir = tempfile::tempdir().unwrap();
    let table = works(dir.path(), "schedule --all --pp 4 --micro-batches 8");
    for kind in kinds() {
        let rows = table.lines().filter(|l| l.split(' ').next() == Some(kind)).count();
        assert_eq!(rows, 1, "{kind} in:\n{table}");
    }
    let row = |table: &str, kind: &str| {
        let row = table.lines().find(|l| l.split(' ').next() == Some(kind)).unwrap();
        row.split_whitespace().map(String::from).collect::<Vec<_>>()
    };
    // Gathers and reductions are counted with or without --lower, and beside each rate stands what
    // no order can have less than.
    for (kind, start, end) in [
        ("1f1b", "1f1b 1 66 66 27.27 % 14.60 % 27.27 %, at least ", " % 16 4 4"),
        ("zb-v", "zb-v 2 51 48 5.88 % 0.00 % 0.00 %, at least 0.00", " % 16 8 8"),
    ] {
        let row = row(&table, kind).join(" ");
        assert!(row.starts_with(start) && row.ends_with(end), "{row}");
    }
    assert_eq!(works(dir.path(), "schedule --all --pp 4 --micro-batches 8 --lower"), table);
    let two = works(dir.path(), "schedule --all --pp 4 --virtual 2 --micro-batches 6 --lower");
    assert!(row(&two, "1f1b").join(" ").contains("virtual = 2 does not work"), "{two}");
    assert!(row(&two, "dualpipe-v").join(" ").contains("micro-batches = 6"), "{two}");
    assert!(row(&two, "zeropp").ends_with(&["12".into(), "8".into()]), "{two}");
    // With times of a stage ZB-V keeps 16 units, 1F1B 8: with room for 10 only the second fits.
    let stages = "schedule --all --pp 4 --micro-batches 8 --t-f 1";
    let tight = works(dir.path(), &format!("{stages} --mem-limit 10"));
    assert!(!table.contains("note:") && tight.contains("note: with times of one stage"), "{tight}");
    assert_eq!(row(&tight, "1f1b")[2], "33");
    assert!(row(&tight, "gpipe").join(" ").contains("mem-limit = 10: gpipe needs 16"), "{tight}");
    assert!(row(&tight, "zb-2p").join(" ").ends_with(" 10 4 4"), "{tight}");
}

#[test]
fn all_kinds_are_sorted_and_written_in_every_format() {
    let dir = tempfile::tempdir().unwrap();
    let made = "schedule --all --pp 4 --micro-batches 8 --layers 16 --layer-f 3 --mem-f 2KiB";
    let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
    works(dir.path(), &format!("{made} --sort peak -o a.json"));
    let all: Value = serde_json::from_str(&read("a.json")).unwrap();
    let rows = all["kinds"].as_array().unwrap();
    let peaks: Vec<u64> = rows.iter().map(|row| row["peak"].as_u64().unwrap()).collect();
    assert!(peaks.is_sorted() && peaks[0] < peaks[peaks.len() - 1], "{peaks:?}");
    assert_eq!(all["memory"], "bytes");
    let reported = rows.len() + all["misfits"].as_array().unwrap().len();
    assert_eq!(reported, kinds().count());
    // The same model: every kind that keeps its ranks busy has the same work.
    for row in rows {
        assert!(row["makespan_us"].as_f64().unwrap() >= 16. / 4. * 9. * 8., "{row}");
        assert!(row["gathers"].as_u64().unwrap() >= 4, "{row}");
    }
    works(dir.path(), &format!("{made} --sort makespan --format csv -o a.csv"));
    let csv = read("a.csv");
    assert!(csv.starts_with("kind,virtual,makespan_us,") && csv.contains(",peak_bytes,"), "{csv}");
    assert_eq!(csv.lines().count(), rows.len() + 1);
    let field = |line: &str| line.split(',').nth(2).unwrap().parse::<f64>().unwrap();
    assert!(csv.lines().skip(1).map(field).is_sorted());
    for (name, start) in [("a.svg", "<svg"), ("a.html", "<!doctype html>")] {
        works(dir.path(), &format!("{made} -o {name}"));
        let text = read(name);
        // A page has a picture for wide windows and one for narrow ones.
        let pictures = if name == "a.html" { 2 } else { 1 };
        let circles = text.matches("<circle").count();
        assert!(text.starts_with(start) && circles == pictures * rows.len(), "{name}");
        for part in [" MiB", "us of a layer of 16: F 3, B 3, W 3", "zeropp schedule --all --pp 4"] {
            assert!(text.contains(part) || part == " MiB" && text.contains(" KiB"), "{part}");
        }
    }
    let text = works(dir.path(), made);
    assert!(text.contains("bubble (up) over the most activation memory of a rank"), "{text}");
    fails(dir.path(), &format!("{made} --format torch"), "format = torch: a table of all kinds");
    fails(dir.path(), "schedule --sort peak", "--all");
}

/// A picture that is found again tells what it is of.
#[test]
fn pictures_say_shape_costs_version_and_command() {
    let dir = tempfile::tempdir().unwrap();
    let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
    let version = env!("CARGO_PKG_VERSION");
    let flags = "--kind zeropp --pp 2 --unit 3 --micro-batches 6 --t-f 1.5 --mem-f 20000";
    for name in ["a.svg", "a.html", "a.json"] {
        let line = format!("schedule {flags} --lower -o {name}");
        works(dir.path(), &line);
        let text = read(name);
        for part in [
            "zeropp, P 2, V 2, 6 micro-batches in 2 units of at most 3",
            "us of a stage: F 1.5, B 1, W 1, gather 0, reduction 0, message 0; F keeps 20000 units",
            &format!("zeropp {version}"),
            &line,
        ] {
            assert!(name == "a.json" || text.contains(part), "{name}: {part}");
        }
        assert!(
            name == "a.json" || text.contains("0 units\"") || text.contains("0 units<"),
            "{name}"
        );
    }
    works(dir.path(), "compare a.json a.json --t-f 2 -o b.html");
    let page = read("b.html");
    for part in ["<b>A</b> zeropp, P 2, V 2", "us of a stage: F 2, B 1", "compare a.json a.json"] {
        assert!(page.contains(part), "{part}");
    }
}

#[test]
fn pictures_are_what_their_names_say() {
    let dir = tempfile::tempdir().unwrap();
    for (name, flags, start, part) in [
        ("a.txt", "", "pp 0 |F0F1", "bubble 27.27 %, bubble_own_span 14.60 %"),
        ("a.svg", "", "<svg", "</svg>"),
        ("a.html", "", "<!doctype html>", "</html>"),
        ("a.trace", "--format chrome", "{\"displayTimeUnit\"", "\"0F0\""),
    ] {
        works(dir.path(), &format!("schedule --kind 1f1b --micro-batches 8 {flags} -o {name}"));
        let text = std::fs::read_to_string(dir.path().join(name)).unwrap();
        assert!(text.starts_with(start) && text.contains(part), "{name}: {text:.200}");
    }
    let chart = works(dir.path(), "schedule --kind zb-h1 --pp 2 --micro-batches 2");
    let rows: Vec<&str> = chart.lines().take(2).collect();
    assert_eq!(rows, ["pp 0 |F0F1..B0W0B1W1|", "pp 1 |..F0B0F1B1W0W1|"]);
}

#[test]
fn the_manual_has_units_numbers_and_examples_that_work() {
    let dir = tempfile::tempdir().unwrap();
    let help = works(dir.path(), "schedule --help");
    for part in ["zeropp-auto", "--t-comm", "1p|2p", "bubble_rate", "Exit codes:", "us (millionths"]
    {
        assert!(help.contains(part), "{part} is not in:\n{help}");
    }
    for command in ["schedule", "check"] {
        let help = works(dir.path(), &format!("{command} --help")).replace("\\\n", " ");
        let examples = help.split("Examples:").nth(1).unwrap().split("Exit codes:").next().unwrap();
        let lines = examples.lines().map(str::trim).filter(|l| l.starts_with("zeropp "));
        let lines: Vec<&str> = lines.collect();
        assert!(lines.len() >= 3, "{examples}");
        for line in lines {
            let got = zeropp(dir.path(), line.strip_prefix("zeropp ").unwrap());
            // It may say where costs are from.
            let is_quiet = got.err.lines().all(|line| line.starts_with("note: "));
            assert!(got.code == Some(0) && is_quiet, "{line}: {}{}", got.out, got.err);
        }
    }
}
