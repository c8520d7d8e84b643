use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::draw::samples::{any_timeline, gpipe};

fn text(timelines: &[&Timeline]) -> String {
    let mut out = Vec::new();
    page(timelines, &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

fn data_of(page: &str) -> Value {
    let start = page.find("id=\"data\">").unwrap() + "id=\"data\">".len();
    let end = page[start..].find("</script>").unwrap();
    serde_json::from_str(&page[start..start + end]).unwrap()
}

/// Start, length, kind, stage and micro-batch of every span of a rank, sorted.
fn spans_of(rank: &Value, styles: &Value) -> Vec<(i64, i64, String, i64, i64)> {
    let mut spans = Vec::new();
    for row in rank["rows"].as_array().unwrap().iter().flat_map(|lane| lane.as_array().unwrap()) {
        let numbers: Vec<i64> =
            row.as_array().unwrap().iter().map(|n| n.as_i64().unwrap()).collect();
        let (mut start, mut free_at) = (0, 0);
        for span in numbers.chunks_exact(6) {
            start += span[0];
            assert!(start >= free_at, "no overlap within a row");
            free_at = start + span[1];
            let name = styles[span[2] as usize]["name"].as_str().unwrap().to_string();
            spans.push((start, span[1], name, span[3], span[4]));
        }
    }
    spans.sort();
    spans
}

fn check(timeline: &Timeline, run: &Value, styles: &Value) {
    let from = extent(timeline).0;
    for (rank, drawn) in timeline.ranks.iter().zip(run["ranks"].as_array().unwrap()) {
        let number = |n: Option<usize>| n.map_or(-1, |n| n as i64);
        let mut wanted: Vec<_> = rank
            .spans
            .iter()
            .map(|s| {
                let style = LOOKS[look_of(&s.action)].name.to_string();
                let start = (s.start_ns - from) as i64;
                let length = (s.end_ns - s.start_ns) as i64;
                (start, length, style, number(s.action.stage()), number(s.action.micro_batch()))
            })
            .collect();
        wanted.sort();
        assert_eq!(spans_of(drawn, styles), wanted);
        assert_eq!(drawn["memory"].as_array().unwrap().len(), 2 * rank.memory.len());
    }
}

#[test]
fn every_span_is_in_the_page() {
    let timeline = gpipe(3, 2, 4, 2);
    let page = text(&[&timeline]);
    let data = data_of(&page);
    assert_eq!(data["runs"][0]["ranks"].as_array().unwrap().len(), 6);
    check(&timeline, &data["runs"][0], &data["styles"]);
    assert!(page.contains("<h1>gpipe &quot;3&quot; × 4</h1>"));
}

#[test]
fn a_part_of_a_page_has_every_span_and_leaves_the_wheel_to_the_page() {
    let timeline = gpipe(3, 2, 4, 2);
    let part = part(&timeline).unwrap();
    let data = data_of(&part);
    check(&timeline, &data["runs"][0], &data["styles"]);
    assert!(part.contains("<main class=\"within\" style=\"height:min(556px,80vh)\">"), "{part}");
    assert!(SCRIPT.concat().contains("if (within && !e.ctrlKey && !e.shiftKey) return;"));
    assert!(!part.contains("<h1>") && !part.contains("<body>"));
}

#[test]
fn nothing_is_loaded_from_elsewhere() {
    let page = text(&[&gpipe(2, 1, 2, 1)]);
    for outside in ["http:", "https:", "src=", "href=", "@import", "url(", "fetch("] {
        assert!(!page.contains(outside), "{outside}");
    }
}

#[test]
fn a_comparison_has_both_runs_and_their_numbers() {
    let (mut a, mut b) = (gpipe(2, 1, 2, 1), gpipe(2, 1, 2, 1));
    (a.title, b.title) = ("simulated".into(), "measured".into());
    // Twice as slow, and it starts later.
    for rank in &mut b.ranks {
        for span in &mut rank.spans {
            span.start_ns = 2 * span.start_ns + 5_000_000;
            span.end_ns = 2 * span.end_ns + 5_000_000;
        }
    }
    let mut out = Vec::new();
    compare(&a, &b, &mut out).unwrap();
    let page = String::from_utf8(out).unwrap();
    let data = data_of(&page);
    check(&a, &data["runs"][0], &data["styles"]);
    check(&b, &data["runs"][1], &data["styles"]);
    assert!(page.contains("<tr><td>A: simulated<td>") && page.contains("<tr><td>B: measured<td>"));
    // Both ranks idle as long as all together, so that they have no columns.
    assert!(page.contains("<tr><td>B against A<td>+100.0 %<td>+0.0 pt<td>+0.0 pt\n"));
    assert!(!page.contains("rank\">rank 0"));
    assert_eq!(data["runs"][1]["ranks"][0]["rows"][1][0][0], 0, "both start at 0");
}

#[test]
fn a_comparison_of_unequal_runs_leaves_cells_empty() {
    let (mut a, b) = (gpipe(2, 1, 2, 1), gpipe(3, 1, 2, 1));
    a.ranks[1].spans.retain(|span| span.action.micro_batch() != Some(1));
    let page = text(&[&a, &b]);
    assert!(page.contains("<th class=\"rank\">rank 2"));
    let last = page.lines().find(|l| l.starts_with("<tr><td>B against A")).unwrap();
    assert!(last.ends_with("pt<td class=\"rank\">"), "{last}");
}

#[test]
fn styles_agree_with_the_script() {
    let script = SCRIPT.concat();
    for (name, index) in [("FORWARD", 0), ("WHOLE_BACKWARD", 3), ("OVERLAP", 12), ("STEP", 5)] {
        assert!(script.contains(&format!("{name} = {index}")), "{name}");
    }
    use crate::draw::style;
    assert_eq!((style::FORWARD, style::WHOLE_BACKWARD, style::OVERLAP), (0, 3, 12));
    assert_eq!(LOOKS[5].name, "optimizer");
}

#[test]
fn a_page_has_the_facts_and_the_scale_of_memory_of_each_run() {
    let (mut a, mut b) = (gpipe(2, 1, 2, 1), gpipe(2, 1, 2, 1));
    (a.facts, b.facts) = (vec!["P 2 & V 1".into(), "zeropp 1".into()], vec!["P 2".into()]);
    let page = text(&[&a, &b]);
    assert!(page.contains("<p class=\"facts\"><b>A</b> P 2 &amp; V 1<br>zeropp 1</p>"));
    assert!(page.contains("<p class=\"facts\"><b>B</b> P 2</p>"));
    let most = a.ranks.iter().map(peak).max().unwrap();
    assert_eq!(data_of(&page)["runs"][0]["most"], format!("{most} units"));
    // Runs in different units share no scale.
    b.memory_unit = crate::timeline::MemoryUnit::Bytes;
    let data = data_of(&text(&[&a, &b]));
    let top = b.ranks.iter().map(peak).max().unwrap();
    let axes = [(format!("{most} units"), most), (format!("{top} B"), top)];
    for (run, (text, memory)) in data["runs"].as_array().unwrap().iter().zip(axes) {
        assert_eq!((&run["most"], &run["memory"]), (&text.into(), &memory.into()));
    }
    assert!(data["runs"][1]["ranks"][0]["peak"].as_str().unwrap().ends_with(" B"));
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 200,
        failure_persistence: None,
        ..Default::default()
    })]

    #[test]
    fn any_two_timelines_make_a_page(a in any_timeline(), b in any_timeline()) {
        let page = text(&[&a, &b]);
        prop_assert_eq!(page.matches("</script>").count(), 2, "a title cannot end the script");
        let data = data_of(&page);
        check(&a, &data["runs"][0], &data["styles"]);
        check(&b, &data["runs"][1], &data["styles"]);
    }
}
