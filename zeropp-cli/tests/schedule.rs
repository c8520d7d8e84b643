//! `zeropp schedule`, `check` and `compare` as their users meet them: the papers' numbers, files
//! that read back, messages.

mod common;

use std::path::Path;
use zeropp::pipeline::schedules::KINDS;

use common::zeropp;
use serde_json::Value;

/// What a command that works prints.
fn works(dir: &Path, line: &str) -> String {
    let got = zeropp(dir, line);
    assert_eq!((got.code, got.err.as_str()), (Some(0), ""), "{line}: {}", got.out);
    got.out
}

fn fails(dir: &Path, line: &str, message: &str) {
    let got = zeropp(dir, line);
    assert_eq!(got.code, Some(2), "{line}: {}{}", got.out, got.err);
    assert!(got.err.starts_with("error: "), "{line}: {}", got.err);
    assert!(got.err.contains(message), "{line}: {}", got.err);
    assert_eq!(got.err.matches("error: ").count(), 1, "{line}: {}", got.err);
    assert_eq!(got.out, "", "{line}");
}

/// The JSON of `zeropp schedule` with these flags; a note on standard error is allowed.
fn json(flags: &str) -> Value {
    let got = zeropp(Path::new("."), &format!("schedule --format json {flags}"));
    assert_eq!(got.code, Some(0), "{flags}: {}", got.err);
    assert!(got.err.is_empty() || got.err.starts_with("note: "), "{flags}: {}", got.err);
    serde_json::from_str(&got.out).expect("JSON")
}

fn numbers(list: &Value) -> Vec<f64> {
    list.as_array().expect("a list").iter().map(|n| n.as_f64().expect("a number")).collect()
}

fn rate(json: &Value) -> String {
    format!("{:.4}", json["bubble_rate"].as_f64().expect("a number"))
}

/// The worked numbers: p, m, layers, times in µs, and the rates of 1F1B, interleaved, H1, H2, 1p
/// and 2p. The interleaved ones have a layer in each chunk.
#[test]
fn the_bubble_rates_of_the_papers() {
    let rows = [
        (8, 24, 24, [18522., 18086., 9337., 601.], ".2431 .1055 .1585 .1083 .1585 .0433"),
        (8, 32, 24, [18513., 18086., 9331., 626.], ".1985 .0818 .1242 .0837 .1242 .0039"),
        (8, 24, 32, [29718., 29444., 19927., 527.], ".2347 .0808 .1323 .0698 .1323 .0029"),
        (16, 48, 48, [11347., 11248., 8132., 377.], ".2552 .1104 .1397 .0672 .1397 .0066"),
    ];
    for (p, m, layers, [f, b, w, c], want) in rows {
        let rates = ["1f1b", "interleaved", "zb-h1", "zb-h2", "zb-1p", "zb-2p"].map(|kind| {
            let v = if kind == "interleaved" { layers / p } else { 1 };
            let [f, b, w] = [f, b, w].map(|t: f64| t / f64::from(v));
            rate(&json(&format!(
                "--kind {kind} --pp {p} --virtual {v} --micro-batches {m} --t-f {f} --t-b {b} \
                 --t-w {w} --t-comm {c} --mem-f 2 --mem-b -1 --mem-w -1"
            )))
        });
        let want: Vec<String> = want.split(' ').map(|rate| format!("0{rate}")).collect();
        assert_eq!(rates.to_vec(), want, "p = {p}, m = {m}");
    }
    let v = json(
        "--kind zb-v --pp 16 --virtual 2 --micro-batches 48 --t-f 14407 --t-b 14380 --t-w 9676 \
         --t-comm 1610",
    );
    assert_eq!(rate(&v), "0.0697");
}

/// Only whole messages are left out of interleaved's rate: P of them.
#[test]
fn the_rate_of_interleaved_is_the_papers_and_its_makespan_a_runs() {
    let got = json(
        "--kind interleaved --pp 8 --virtual 3 --micro-batches 24 --t-f 6174 --t-b 6028 --t-w 3112 \
         --t-comm 601",
    );
    let (makespan, rate) =
        (got["makespan"].as_f64().unwrap(), got["bubble_rate"].as_f64().unwrap());
    let work = 72. * (6174. + 6028. + 3112.);
    let cost = makespan - 8. * 601.;
    assert!((rate - (cost - work) / cost).abs() < 1e-15, "{rate}");
    // Every message on the critical path: down and up through 24 stages, and P for the rounds.
    assert_eq!(makespan, work + 7. * (6174. + 6028. + 3112.) + 46. * 601.);
}

#[test]
fn the_heuristics_worked_spans() {
    let span = |flags: &str| {
        let got = json(&format!("{flags} --mem-f 2 --mem-b -1 --mem-w -1"));
        got["own_span_max"].as_f64().unwrap()
    };
    let by_limit = |kind: &str, limit: &str| {
        span(&format!(
            "--kind {kind} --pp 4 --micro-batches 12 --t-f 5 --t-b 6 --t-w 4 --mem-limit {limit}"
        ))
    };
    for kind in ["zb-1p", "zb-2p"] {
        assert_eq!([by_limit(kind, "10"), by_limit(kind, "14")], [193., 183.]);
        // A fold of p is p whole micro-batches of two units.
        assert_eq!(by_limit(kind, "1p"), by_limit(kind, "8"));
    }
    for (p, m, want) in [(4, 8, [27., 24.]), (8, 16, [55., 48.])] {
        let got = ["zb-1p", "zb-2p"]
            .map(|kind| span(&format!("--kind {kind} --pp {p} --micro-batches {m}")));
        assert_eq!(got, want);
    }
}

#[test]
fn zb_v_by_hand() {
    let shape =
        "--kind zb-v --pp 4 --virtual 2 --micro-batches 8 --t-f 1 --t-b 1 --t-w 1 --t-comm 0";
    let got = json(&format!("{shape} --mem-f 1 --mem-b 0 --mem-w -1"));
    assert_eq!(numbers(&got["ends"]), [48., 49., 50., 51.]);
    assert_eq!(numbers(&got["idle"]), [0.; 4]);
    assert_eq!(numbers(&got["peak_activation"]), [8.; 4]);
    assert_eq!((got["makespan"].as_f64(), got["own_span_max"].as_f64()), (Some(51.), Some(48.)));
    assert_eq!(got["bubble_rate"].as_f64(), Some(0.));
}

/// ZeroPP §3.2: 2V − 1 gathers and V reductions per rank and unit, counted by lowering only.
#[test]
fn the_counts_of_zeropp() {
    let shape = "--kind zeropp --pp 4 --virtual 3 --micro-batches 16 --unit 8";
    let whole = json(&format!("{shape} --lower --prefetch 1"));
    assert_eq!(
        (whole["all_gathers"].as_u64(), whole["reduce_scatters"].as_u64()),
        (Some(40), Some(24))
    );
    let compute = json(shape);
    assert_eq!(compute["all_gathers"].as_u64(), Some(0));
    assert_eq!(whole["makespan"], compute["makespan"], "gathers cost nothing by default");
    let gathers = json(&format!("{shape} --lower --t-gather 2.5 --t-reduce 1"));
    assert!(gathers["makespan"].as_f64() > compute["makespan"].as_f64());
}

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

/// Times are added up exactly, whatever their decimals.
#[test]
fn times_are_exact() {
    for (f, m, makespan) in [
        ("0.1", 3, 0.3),
        ("0.601", 7, 4.207),
        ("0.0001", 3, 0.0003),
        ("1e-7", 3, 0.0000003),
        ("6028.6666666667", 3, 18086.0000000001),
    ] {
        let flags = format!("--kind gpipe --pp 1 --micro-batches {m} --t-f {f} --t-b 0 --t-w 0");
        assert_eq!(json(&flags)["makespan"].as_f64(), Some(makespan), "{f}");
    }
    // A forward and a message, the second rank's three forwards, a message back: six tenths.
    let tenths = "--kind gpipe --pp 2 --micro-batches 3 --t-f 0.1 --t-b 0 --t-w 0 --t-comm 0.1";
    assert_eq!(json(tenths)["makespan"].as_f64(), Some(0.6));
    let uneven = json("--kind 1f1b --pp 2 --micro-batches 1 --t-f 1,2 --t-b 3,4 --t-w 5,6");
    assert_eq!(uneven["makespan"].as_f64(), Some(21.));
    // What 64 bits cannot hold is rounded, and told.
    let got = zeropp(
        Path::new("."),
        "schedule --kind 1f1b --pp 8 --micro-batches 64 --t-f 18522.333333333333333 --format csv",
    );
    assert_eq!(got.code, Some(0));
    assert!(got.err.starts_with("note: t-f = 18522.333333333333333 is finer"), "{}", got.err);
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
        ("1f1b", "1f1b 1 33 33 27.27 % 14.60 % 27.27 %, at least ", " % 8 4 4"),
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
    // ZB-V keeps 16 units, 1F1B 8: with room for 10 only the second fits.
    let tight = works(dir.path(), "schedule --all --pp 4 --micro-batches 8 --mem-limit 10");
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
    let told = rows.len() + all["misfits"].as_array().unwrap().len();
    assert_eq!(told, kinds().count());
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
        assert!(text.starts_with(start) && text.matches("<circle").count() == rows.len(), "{name}");
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

/// The unit and the warm-up follow costs and limit.
#[test]
fn zeropp_auto_chooses_its_unit() {
    let costs = "--t-f 11347 --t-b 11248 --t-w 8132 --t-comm 377";
    let shape = "--kind zeropp-auto --pp 4 --virtual 2 --micro-batches 48";
    let free = json(&format!("{shape} {costs} --mem-limit 48"));
    let unit = free["units"][0].as_u64().unwrap();
    assert!(
        unit > 7 && numbers(&free["peak_activation"]).iter().all(|peak| *peak <= 48.),
        "{unit}"
    );
    let fixed = json(&format!("{shape} {costs} --unit 8"));
    assert_eq!(fixed["units"].as_array().unwrap().len(), 6);
    assert!(fixed["bubble_rate"].as_f64().unwrap() < 0.03);
    let by_paper =
        json(&format!("--kind zeropp --pp 4 --virtual 2 --micro-batches 48 --unit 8 {costs}"));
    assert!(fixed["makespan"].as_f64() < by_paper["makespan"].as_f64());
}

#[test]
fn a_bad_schedule_is_told_with_row_column_and_action() {
    let dir = tempfile::tempdir().unwrap();
    let file = |text: &str| std::fs::write(dir.path().join("s.csv"), text).unwrap();
    for (text, message) in [
        ("0F0,0F0,0B0\n", "s.csv: row 1, column 2 (0F0 of rank 0): duplicate of row 1, column 1"),
        ("0F0,0B0\n1B0,1F0\n", "s.csv: row 2, column 1 (1B0 of rank 1): no 1F0 before it"),
        ("0F0,0I0\n1F0,1I0,1W0\n", "rank 0: 0W0 is missing"),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
            "deadlock: row 1, column 2 (0B0 of rank 0) waits for 1B0; row 2, column 2 (1F1",
        ),
        ("0F0,0B0x\n", "row 1, column 2"),
        ("0F0,0Q0\n", "unknown kind"),
        ("0F0,1B0\n", "rank 0: 0B0 is missing"),
        ("", "s.csv: row 1"),
        ("0F0,0F1,0B1,0B0\n", "must run in micro-batch order"),
    ] {
        file(text);
        let got = zeropp(dir.path(), "check s.csv");
        assert_eq!(got.code, Some(2), "{text}: {}", got.out);
        assert!(got.err.starts_with("error: s.csv: "), "{text}: {}", got.err);
        assert!(got.err.contains(message), "{text}: {}", got.err);
    }
    assert!(works(dir.path(), "check --any-w-order s.csv").contains("1 rank, 1 stage, 2 micro-b"));
    file("0F0,0F1,0B0,0B1\n");
    works(dir.path(), "check --activations-max 2 s.csv");
    fails(dir.path(), "check --activations-max 1 s.csv", "row 1, column 2 (0F1 of rank 0)");
    for (line, message) in [
        ("check none.csv", "none.csv: "),
        ("check s.txt", "ends in .csv or .json"),
        ("check", "required"),
        ("compare s.csv none.json", "none.json: "),
        ("compare s.csv s.csv -o none/page.html", "none/page.html: cannot be written"),
    ] {
        fails(dir.path(), line, message);
    }
}

#[test]
fn check_lists_every_error_also_as_json() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    file("s.csv", "0F0,,0F1,0I1,0W1,0W0,0I0\n1I0,1F0,1W0,1F1,1I1,1W1\n");
    let got = zeropp(dir.path(), "check s.csv");
    let expected = "error: s.csv: 2 errors\n  \
                    row 1, column 6 (0W0 of rank 0): no 0I0 before it\n  \
                    row 2, column 1 (1I0 of rank 1): no 1F0 before it\n";
    assert_eq!(got.code, Some(2));
    assert_eq!(got.err, expected);

    let got = zeropp(dir.path(), "check --format json s.csv");
    let json: serde_json::Value = serde_json::from_str(&got.out).unwrap();
    let second = &json["errors"][1];
    assert_eq!((got.code, json["sound"].as_bool()), (Some(2), Some(false)));
    assert_eq!((second["row"].as_u64(), second["column"].as_u64()), (Some(2), Some(1)));
    assert_eq!((second["action"].as_str(), second["rank"].as_u64()), (Some("1I0"), Some(1)));
    assert_eq!(second["problem"], "no 1F0 before it");

    file("cells.csv", "0F0,0Q0\nx,1F0\n");
    let got = zeropp(dir.path(), "check cells.csv");
    for part in ["2 errors", "row 1, column 2: ", "row 2, column 1: "] {
        assert!(got.err.contains(part), "{part} is not in: {}", got.err);
    }
    // JSON in its own rows and columns.
    works(dir.path(), "schedule --kind 1f1b --pp 2 --micro-batches 2 -o s.json");
    let text = std::fs::read_to_string(dir.path().join("s.json")).unwrap();
    let sound = works(dir.path(), "check --format json s.json");
    let json: serde_json::Value = serde_json::from_str(&sound).unwrap();
    assert_eq!((json["sound"].as_bool(), json["errors"].as_array()), (Some(true), Some(&vec![])));
    file("s.json", &text.replace("\"1F1\"", "\"1F0\""));
    let got = zeropp(dir.path(), "check s.json");
    let row = text.lines().position(|line| line.contains("\"1F1\"")).unwrap();
    let column = text.lines().nth(row).unwrap().find("\"1F1\"").unwrap() + 1;
    let place = format!("row {}, column {column} (1F0 of rank 1): duplicate of row ", row + 1);
    assert!(got.err.contains(&place), "{place} is not in: {}", got.err);
}

/// Nothing that is compared may be overwritten by the page.
#[test]
fn a_comparison_does_not_overwrite_what_it_compares() {
    let dir = tempfile::tempdir().unwrap();
    let text = "0F0,0B0\n";
    std::fs::write(dir.path().join("s.csv"), text).unwrap();
    std::fs::hard_link(dir.path().join("s.csv"), dir.path().join("page.html")).unwrap();
    for out in ["s.csv", "./s.csv", "page.html"] {
        let line = format!("compare s.csv s.csv -o {out}");
        fails(dir.path(), &line, "is the file s.csv and would overwrite it; choose another");
        assert_eq!(std::fs::read_to_string(dir.path().join("s.csv")).unwrap(), text);
    }
}

/// Before, the place of these stood only in the sentence, where no editor finds it.
#[test]
fn errors_of_a_file_have_their_row_and_column() {
    let dir = tempfile::tempdir().unwrap();
    let cases = [
        ("0F0,0SEND_F1,0B0\n1F0,1B0\n", [1, 2], "micro-batch 1 of 1"),
        ("0F0,0B0\n0F0,1F0,1B0\n", [2, 1], "stage 0 is computed here and in row 1"),
    ];
    for (text, [row, column], problem) in cases {
        std::fs::write(dir.path().join("s.csv"), text).unwrap();
        let got = zeropp(dir.path(), "check s.csv --format json");
        let value: serde_json::Value = serde_json::from_str(&got.out).unwrap();
        let error = &value["errors"][0];
        assert_eq!((error["row"].as_u64(), error["column"].as_u64()), (Some(row), Some(column)));
        assert!(error["problem"].as_str().is_some_and(|p| p.contains(problem)), "{error}");
    }
}

/// Before, these replaced the file that was read, with exit code 0.
#[test]
fn no_command_writes_over_what_it_reads() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let files =
        [("costs.json", "{}"), ("m.jsonl", "{\"step\":1,\"loss\":2.0}\n"), ("run.toml", "")];
    for (name, text) in files {
        std::fs::write(at(name), text).unwrap();
        std::fs::hard_link(at(name), at(&format!("same-{name}"))).unwrap();
    }
    for (line, input) in [
        ("schedule --pp 2 --micro-batches 4 --costs costs.json -o same-costs.json", "costs.json"),
        ("plot m.jsonl -o ./same-m.jsonl", "m.jsonl"),
        ("plan run.toml --gpus 2 --global-batch 4 -o same-run.toml", "run.toml"),
        ("plan --gpus 2 --global-batch 4 --against m.jsonl -o m.jsonl", "m.jsonl"),
        ("plan --gpus 2 --global-batch 4 --machine costs.json -o costs.json", "costs.json"),
    ] {
        let message = format!("is the file {input} and would overwrite it; choose another");
        fails(dir.path(), line, &message);
    }
    for (name, text) in files {
        assert_eq!(std::fs::read_to_string(at(name)).unwrap(), text);
    }
}

/// Before, each of these waited for a writer for ever, or read without an end.
#[test]
#[cfg(unix)]
fn what_is_no_regular_file_is_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    fails(
        dir.path(),
        "plot fifo",
        "fifo: cannot be read (it is a pipe (FIFO), not a regular file)",
    );
    fails(dir.path(), "plot /dev/zero", "it is a device, not a regular file");
    fails(dir.path(), "why fifo", "name its folder of checkpoints or its file of metrics");
}

#[test]
fn bad_input_ends_with_code_2_and_one_message() {
    let dir = tempfile::tempdir().unwrap();
    for (flags, message) in [
        ("--kind zig-zag", "invalid value 'zig-zag' for '--kind <KIND>'"),
        ("--pp 0", "invalid value '0' for '--pp <P>': expected a whole number of at least 1"),
        ("--pp -1", "invalid value '-1' for '--pp <P>'"),
        ("--pp 100000", "pp = 100000: times virtual = 2 that is more than 65536 stages"),
        ("--pp 4000 --micro-batches 1000000", "more than 134217728 actions"),
        ("--kind 1f1b --virtual 2", "virtual = 2 does not work; it must be 1"),
        ("--kind zb-v --virtual 3", "virtual = 3 does not work"),
        ("--kind dualpipe-v --micro-batches 6", "micro-batches = 6 does not work"),
        ("--t-f -1", "invalid value '-1' for '--t-f <T>': expected a time of 0 to 1e9 us"),
        ("--t-f 1,x", "for '--t-f <T>': expected a time"),
        ("--t-f 1,2,3", "t-f = 3 numbers: there are 8 stages; give one number for all, or 8"),
        ("--t-comm 1,2", "for '--t-comm <T>'"),
        ("--t-w 1e9 --micro-batches 1000000", "t-w = 1000000000: too long for 8 stages"),
        ("--mem-f -1", "mem-f = -1 (stage 0): an F takes memory"),
        (
            "--mem-f 2 --mem-b -1 --mem-w -2",
            "mem-w = -2 (stage 0): mem-f + mem-b + mem-w must be 0",
        ),
        ("--mem-f 2 --mem-b -3", "mem-w = 1 (stage 0): a W frees memory"),
        ("--mem-input 3", "mem-input = 3 (stage 0): a part of mem-f; use 0 to 2"),
        ("--mem-f 1.5", "expected a whole number"),
        ("--mem-limit 3x", "expected a whole number, or 1p, 2p"),
        ("--kind gpipe --mem-limit 1p", "mem-limit = 8: gpipe needs 32 on rank"),
        ("--kind zb-2p --mem-limit 1", "mem_limit = 1 does not work; it must hold"),
        ("--kind zeropp-auto --virtual 2 --mem-limit 3", "mem_limit = 3"),
        (
            "--pp 2 --lower --simulate-steps 1000000",
            "simulate-steps = 1000000: with 178 actions a step that is more than 4194304 actions",
        ),
        ("--prefetch 1", "--lower"),
        ("--recompute full", "--lower"),
        ("--format png", "invalid value 'png' for '--format <FORMAT>'"),
        ("-o a.png", "out = a.png: the name does not say what to write"),
        ("-o none/a.json", "out = none/a.json: cannot be written"),
        ("--all --kind 1f1b", "cannot be used with"),
        ("--all --t-f 1,2,3", "t-f = 3 numbers"),
        ("--width 0", "'--width <COLUMNS>'"),
    ] {
        fails(dir.path(), &format!("schedule {flags}"), message);
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing was written");
}

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
    assert!(row("bubble, pp 0").ends_with("27.27 %  14.89 %     -12.38 points"), "{text}");
    // zb-h1 is the best there is in the memory of 1F1B: (p − 1)(F + B − W) for these times.
    assert!(row("bubble_rate, at").ends_with("14.89 %  14.89 %      +0.00 points"), "{text}");
    let page = std::fs::read_to_string(dir.path().join("page.html")).unwrap();
    assert!(page.contains("A: a.json (1f1b, simulated)") && page.contains("B against A"));
    // A trace of the same run is the same run.
    works(dir.path(), &format!("schedule --kind 1f1b {made} --format chrome -o trace.json"));
    let same = works(dir.path(), "compare a.json trace.json");
    assert!(same.contains("0 us (+0.0 %)") && same.matches("165 us").count() == 4, "{same}");
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
