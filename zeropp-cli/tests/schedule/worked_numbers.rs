//! Bubbles, spans and counts against what papers print and hands work out.

use std::path::Path;

use super::{json, numbers, rate, zeropp};

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

/// Times are added up exactly, in nanoseconds.
#[test]
fn times_are_exact() {
    for (f, m, makespan) in
        [("0.1", 3, 0.3), ("0.601", 7, 4.207), ("6028.6666666667", 3, 18086.001)]
    {
        let flags = format!("--kind gpipe --pp 1 --micro-batches {m} --t-f {f} --t-b 0 --t-w 0");
        assert_eq!(json(&flags)["makespan"].as_f64(), Some(makespan), "{f}");
    }
    // A forward and a message, the second rank's three forwards, a message back: six tenths.
    let tenths = "--kind gpipe --pp 2 --micro-batches 3 --t-f 0.1 --t-b 0 --t-w 0 --t-comm 0.1";
    assert_eq!(json(tenths)["makespan"].as_f64(), Some(0.6));
    let uneven = json("--kind 1f1b --pp 2 --micro-batches 1 --t-f 1,2 --t-b 3,4 --t-w 5,6");
    assert_eq!(uneven["makespan"].as_f64(), Some(21.));
    // Parts of a nanosecond are refused where rounding would change a time.
    let got = zeropp(Path::new("."), "schedule --kind 1f1b --pp 2 --micro-batches 4 --t-f 0.0004");
    assert_eq!(got.code, Some(2));
    assert!(got.err.contains("make all times 1000 times as long"), "{}", got.err);
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
