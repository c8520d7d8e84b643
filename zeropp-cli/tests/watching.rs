//! Output of a run while it goes, and files for those who watch.

mod common;

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Stdio;
use std::time::{Duration, Instant};

use common::{command, zeropp};
use serde_json::Value;

const SMALL: &str = "run --layers 4 --hidden 16 --heads 2 --seq 8 --steps 30 --zero3 2";

#[test]
fn lines_are_thinned_for_people_and_files_have_every_step() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let line = format!("{SMALL} --log-every 10 --log-file run.log --metrics m.jsonl");
    let got = zeropp(at, &line);
    assert_eq!((got.code, got.err.as_str()), (Some(0), ""), "{}", got.out);
    let reported: Vec<&str> = got.out.lines().filter(|line| line.starts_with("step ")).collect();
    let steps: Vec<&str> = reported.iter().map(|line| line.split(' ').nth(1).unwrap()).collect();
    assert_eq!(steps, ["1/30", "10/30", "20/30", "30/30"], "{}", got.out);
    assert!(
        reported[1].contains("(mean of 9)") && reported[2].contains("(mean of 10)"),
        "{}",
        reported[1]
    );
    assert!(reported[1].ends_with(" left") && !reported[3].contains(" left"), "{}", reported[3]);
    let log = fs::read_to_string(at.join("run.log")).unwrap();
    let is_step = |line: &&str| line.starts_with("step ");
    let others = |text: &str| text.lines().filter(|l| !is_step(l)).collect::<Vec<_>>().join("\n");
    assert_eq!(others(&log), others(&got.out), "all else that is said");
    let steps: Vec<&str> =
        log.lines().filter(is_step).map(|l| &l[..l.find('/').unwrap()]).collect();
    assert_eq!(steps, (1..=30).map(|n| format!("step {n}")).collect::<Vec<_>>());

    let metrics = fs::read_to_string(at.join("m.jsonl")).unwrap();
    let lines: Vec<Value> = metrics.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(lines.len(), 31);
    let run = &lines[0]["run"];
    assert_eq!((&run["name"], &run["zero3"], &run["steps"]), (&"m".into(), &2.into(), &30.into()));
    assert!(run["command"].as_array().unwrap().contains(&"--log-every".into()), "{run}");
    assert_eq!((&run["settings"]["unit"], &run["settings"]["hidden"]), (&"1".into(), &"16".into()));
    let times: Vec<f64> = lines[1..].iter().map(|l| l["wall_time"].as_f64().unwrap()).collect();
    assert!(times.is_sorted() && times[0] >= run["wall_time"].as_f64().unwrap(), "{times:?}");
    // The mean of a line is that of the steps since the one before.
    let mean: f64 = lines[2..=10].iter().map(|l| l["loss"].as_f64().unwrap()).sum::<f64>() / 9.0;
    assert!(reported[1].contains(&format!("loss {mean:.4} (")), "{mean} in {}", reported[1]);

    // A quiet terminal, and the file has the lines all the same.
    let got = zeropp(at, &format!("{SMALL} --log-every 10 --log-file run.log -q"));
    assert!(got.code == Some(0) && !got.out.contains("step 1/30"), "{}", got.out);
    let log = fs::read_to_string(at.join("run.log")).unwrap();
    assert_eq!(log.matches("step 30/30  loss").count(), 1, "from its start again:\n{log}");
    assert_eq!(log.lines().filter(is_step).count(), 30, "{log}");
}

#[test]
fn a_log_goes_on_with_its_run_and_has_its_errors() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let line = format!("{SMALL} --save c --log-file run.log");
    assert_eq!(zeropp(at, &line.replace("30", "4")).code, Some(0));
    let log = || fs::read_to_string(at.join("run.log")).unwrap();
    let first = log();
    let refused = zeropp(at, &line);
    assert_eq!(refused.code, Some(2));
    let refused = format!("{first}{}", refused.err);
    assert!(first.contains("step 4/4") && refused.contains("error: "), "{refused}");
    assert_eq!(log(), refused, "what the run said, and what went wrong");
    assert_eq!(zeropp(at, &format!("{line} --resume")).code, Some(0));
    let log = log();
    assert!(log.starts_with(&refused) && log.contains("step 30/30"), "{log}");
}

/// The same command once more, by mistake: the first one's log is whole, and says so at its end.
#[test]
#[cfg(unix)]
fn a_second_start_cuts_nothing_off_the_log_of_a_run_that_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let line = format!("{SMALL} --save c --log-file run.log -q").replace("30", "1000000");
    let mut child = command(at, &line).stdout(Stdio::null()).spawn().unwrap();
    let log = || fs::read_to_string(at.join("run.log")).unwrap_or_default();
    let begin = Instant::now();
    while !log().contains("step 3/") && begin.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(2));
    }
    let before = log();
    let refused = zeropp(at, &line);
    let after = log();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(before.contains("step 1/") && before.contains("step 3/"), "{before}");
    assert_eq!(refused.code, Some(2), "{}", refused.err);
    assert!(after.starts_with(&before) && after.contains(&refused.err), "{after}");
    // One that begins anew has none of it.
    fs::remove_dir_all(at.join("c")).unwrap();
    assert_eq!(zeropp(at, &line.replace("1000000", "2")).code, Some(0));
    assert!(log().contains("step 1/2") && !log().contains("1000000"), "{}", log());
}

/// Names in a folder, with the time of each last change.
fn entries(folder: &std::path::Path) -> Vec<(std::ffi::OsString, std::time::SystemTime)> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let mut all: Vec<_> =
        entries.map(|e| (e.file_name(), e.metadata().unwrap().modified().unwrap())).collect();
    all.sort();
    all
}

#[test]
fn a_metrics_file_that_is_refused_costs_no_step_and_no_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let line = format!("{SMALL} --save c --save-every 2 --metrics m.csv --resume");
    assert_eq!(zeropp(at, &line.replace("30", "6")).code, Some(0));
    let rows = fs::read_to_string(at.join("m.csv")).unwrap();
    let other = rows.replacen(",redone_s", "", 1);
    fs::write(at.join("m.csv"), &other).unwrap();
    let before = entries(&at.join("c"));
    for _ in 0..2 {
        let got = zeropp(at, &line);
        assert_eq!((got.code, got.out.as_str()), (Some(2), ""), "{}", got.err);
        let expected = "error: metrics = m.csv: cannot be written (it has other columns";
        assert!(got.err.starts_with(expected), "{}", got.err);
        assert_eq!(entries(&at.join("c")), before);
        assert_eq!(fs::read_to_string(at.join("m.csv")).unwrap(), other);
    }
    assert!(!at.join("zeropp-failed").exists());
    fs::write(at.join("m.csv"), rows).unwrap();
    assert_eq!(zeropp(at, &line).code, Some(0));
}

#[test]
fn rows_and_events_have_every_step_and_go_on_with_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let line = format!("{SMALL} --save c --save-every 4 --metrics m.csv --tensorboard events");
    assert_eq!(zeropp(at, &line.replace("30", "6")).code, Some(0));
    let got = zeropp(at, &format!("{} --resume=4", line.replace("30", "8")));
    assert_eq!(got.code, Some(0), "{}", got.err);
    let csv = fs::read_to_string(at.join("m.csv")).unwrap();
    let rows: Vec<&str> = csv.lines().map(|row| row.split(',').next().unwrap()).collect();
    assert_eq!(rows, ["step", "1", "2", "3", "4", "5", "6", "7", "8"]);
    let mut sizes: Vec<(String, u64)> = fs::read_dir(at.join("events"))
        .unwrap()
        .map(|e| e.unwrap())
        .map(|e| (e.file_name().into_string().unwrap(), e.metadata().unwrap().len()))
        .collect();
    sizes.sort();
    assert_eq!(sizes.len(), 2, "a file for each start: {sizes:?}");
    assert!(sizes[0].1 > sizes[1].1, "six steps, and four: {sizes:?}");
}

#[test]
fn a_run_shows_what_its_model_writes() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let line =
        format!("{SMALL} --micro-batches 4 --unit 2 --metrics m.jsonl --log-every 1 --seed 7");
    let line = line.replace("30", "8");
    let with = format!("{line} --save c --save-every 2 --sample-every 4 --prompt fn");
    let got = zeropp(at, &with);
    assert_eq!(got.code, Some(0), "{}\n{}", got.err, got.out);
    // A disk that is busy may be slower than two of these steps, and is then reported.
    let disk_reported = |line: &str| line.starts_with("warning: save-every: no checkpoint after");
    assert!(got.err.lines().all(disk_reported), "{}", got.err);
    let bits = || {
        let text = fs::read_to_string(at.join("m.jsonl")).unwrap();
        let steps = text.lines().skip(1).map(|l| serde_json::from_str::<Value>(l).unwrap());
        steps.map(|s| (s["loss"].to_string(), s["grad_norm"].to_string())).collect::<Vec<_>>()
    };
    let with = bits();
    // Each text stands between its step's line and the next one's.
    let lines: Vec<&str> = got.out.lines().collect();
    let at_line = |start: &str| lines.iter().position(|l| l.starts_with(start)).expect(start);
    for step in [4, 8] {
        let text = at_line(&format!("step {step}/8  the model writes"));
        assert!(lines[text + 1].starts_with("  | fn"), "{}", got.out);
        assert!(text > at_line(&format!("step {step}/8  loss")), "{}", got.out);
    }
    assert!(at_line("step 4/8  the model writes") < at_line("step 5/8"), "{}", got.out);
    // What is shown is what the checkpoint writes, drawn at the same temperature and seed.
    let ask = "generate c/step-000008 --prompt fn --max-tokens 64 --temperature 0.8 --seed 7";
    let written = zeropp(at, ask);
    let text = written.out.trim_end().replace('\n', "\n  | ");
    assert!(got.out.contains(&format!("writes\n  | {text}")), "{}\n{}", got.out, written.out);
    let greedy = zeropp(at, "generate c/step-000008 --prompt fn --max-tokens 64");
    assert_ne!(greedy.out, written.out, "it is drawn");
    assert_eq!(zeropp(at, &line).code, Some(0));
    assert_eq!(bits(), with, "no bit depends on it");
    // Another layout, and nothing saved: the same texts.
    let other = zeropp(at, &format!("{line} --sample-every 4 --prompt fn --pp 2"));
    assert_eq!(bits(), with, "nor on the layout");
    let texts = |out: &str| {
        out.lines().filter(|l| l.starts_with("  | ")).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(texts(&other.out), texts(&got.out), "{}{}", other.out, other.err);
}

#[test]
fn runs_are_drawn() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let line = format!("{SMALL} --metrics m.jsonl --tensorboard events --log-layers 10");
    assert_eq!(zeropp(at, &line).code, Some(0));
    let got = zeropp(at, "plot m.jsonl");
    assert_eq!((got.code, got.out.as_str()), (Some(0), "m.html: 1 run\n"), "{}", got.err);
    let page = fs::read_to_string(at.join("m.html")).unwrap();
    let of_layers = ["Gradient norm by layer", "Update over weights", "<title>h.3</title>"];
    let of_steps = ["Loss, nats a token", "Gradient norm", "Learning rate", "--metrics m.jsonl"];
    for part in of_steps.into_iter().chain(of_layers) {
        assert!(page.contains(part), "{part} is not in the page");
    }
    assert!(!page.contains("src="), "it asks for nothing");
    assert!(!page.replace("Number.isNaN", "").contains("NaN"), "every figure is a number");
    assert_eq!(zeropp(at, "plot m.jsonl m.jsonl -o m.svg --log").code, Some(0));
    assert!(fs::read_to_string(at.join("m.svg")).unwrap().starts_with("<svg xmlns="));
    let got = zeropp(at, "plot m.jsonl -o m.jsonl");
    assert_eq!(got.code, Some(2), "{}", got.out);
    let got = zeropp(at, &format!("{SMALL} --dry-run=plan.html --decay wsd"));
    assert_eq!(got.code, Some(0), "{}", got.err);
    let page = fs::read_to_string(at.join("plan.html")).unwrap();
    assert!(page.contains("Learning rate") && page.contains("wsd"), "{page}");
    // What is a table in the terminal is one in the page: cell by cell.
    for cell in got.out.lines().flat_map(|line| line.split("  ")).map(str::trim) {
        assert!(page.contains(&cell.replace('&', "&amp;")), "{cell} is not in the page:\n{page}");
    }
}

#[test]
fn a_learning_rate_is_found_and_nothing_else_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    fs::write(at.join("m.jsonl"), "of another run").unwrap();
    let line = format!("{SMALL} --save c --save-every 3 --metrics m.jsonl --warmup 9 --find-lr 60");
    let got = zeropp(at, &line);
    assert_eq!((got.code, got.err.as_str()), (Some(0), ""), "{}", got.out);
    let rate = got.out.split("suggestion: --lr ").nth(1).expect(&got.out);
    let rate: f64 = rate.split_whitespace().next().unwrap().parse().unwrap();
    assert!((1e-4..5.0).contains(&rate), "{}", got.out);
    let mut names: Vec<String> =
        fs::read_dir(at).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["find-lr.csv", "find-lr.html", "m.jsonl"]);
    assert_eq!(fs::read_to_string(at.join("m.jsonl")).unwrap(), "of another run");
    let rows = fs::read_to_string(at.join("find-lr.csv")).unwrap();
    let first: Vec<f64> =
        rows.lines().nth(1).unwrap().split(',').map(|c| c.parse().unwrap()).collect();
    assert!((first[0] / 1e-7 - 1.0).abs() < 1e-9, "{rows}");
}

#[test]
fn prometheus_is_served_while_the_run_lasts() {
    let dir = tempfile::tempdir().unwrap();
    // Free a moment ago.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let line = format!("{} --prometheus {port}", SMALL.replace("30", "100000"));
    let mut run = command(dir.path(), &line).stdout(Stdio::null()).spawn().unwrap();
    let ask = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")?;
        let mut reported = String::new();
        stream.read_to_string(&mut reported)?;
        Ok(reported)
    };
    let begin = Instant::now();
    let reported = loop {
        match ask() {
            Ok(reported) if reported.contains("zeropp_loss{") => break reported,
            _ if begin.elapsed() > Duration::from_secs(60) => panic!("nothing is served"),
            _ => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    assert!(reported.contains("# TYPE zeropp_tokens_total counter"), "{reported}");
    let taken = zeropp(dir.path(), &line);
    assert_eq!(taken.code, Some(2));
    assert!(taken.err.contains(&format!("prometheus = 127.0.0.1:{port}: cannot be listened on")));
    run.kill().unwrap();
    run.wait().unwrap();
}
