use proptest::prelude::*;

use super::*;
use crate::{
    draw::samples::{any_timeline, gpipe},
    ir::Action,
    timeline::Span,
};

fn text(timeline: &Timeline) -> String {
    let mut out = Vec::new();
    write(timeline, &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

/// Every element of the picture: its name and its attributes as written. Fails on text that is not
/// well-formed.
fn elements(svg: &str) -> Vec<(&str, &str)> {
    let mut open = Vec::new();
    let mut found = Vec::new();
    let mut rest = svg;
    while let Some(start) = rest.find('<') {
        let (before, after) = rest.split_at(start);
        assert!(!before.contains('>'), "stray > in {before:?}");
        let end = after.find('>').expect("a tag ends");
        let tag = &after[1..end];
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name), "closes what was opened");
        } else {
            let name = tag.split([' ', '/']).next().unwrap();
            assert!(tag.matches('"').count().is_multiple_of(2), "attributes end: {tag}");
            if !tag.ends_with('/') {
                open.push(name);
            }
            found.push((name, &tag[name.len()..]));
        }
        rest = &after[end + 1..];
    }
    assert!(open.is_empty(), "{open:?} stays open");
    found
}

/// All boxes of the lanes: x, width and fill.
fn boxes(svg: &str) -> Vec<(f64, f64, String)> {
    let mut boxes = Vec::new();
    for (name, attributes) in elements(svg) {
        let Some(at) = attributes.strip_prefix(" fill=\"").filter(|_| name == "path") else {
            continue;
        };
        let (fill, path) = at.split_once("\" d=\"").unwrap();
        for part in path.trim_end_matches(['"', '/']).split('M').skip(1) {
            let (x, rest) = part.split_once(' ').unwrap();
            let width = rest.split(['h', 'v']).nth(1).unwrap();
            boxes.push((x.parse().unwrap(), width.parse().unwrap(), fill.to_string()));
        }
    }
    boxes
}

#[test]
fn every_span_is_a_box_inside_the_picture() {
    for (pp, groups, m) in [(2, 1, 5), (4, 1, 25), (32, 1, 16), (3, 4, 4)] {
        let timeline = gpipe(pp, groups, m, 1);
        let svg = text(&timeline);
        let boxes = boxes(&svg);
        let spans: usize = timeline.ranks.iter().map(|r| r.spans.len()).sum();
        assert_eq!(boxes.len(), spans);
        let picture = Picture::new(&timeline);
        for (x, width, _) in boxes {
            assert!(x >= picture.left - 0.01 && width > 0.0);
            assert!(x + width <= picture.left + picture.plot_width + 0.5);
        }
    }
}

#[test]
fn numbers_are_written_where_they_fit() {
    let few = text(&gpipe(2, 1, 3, 1));
    for i in 0..3 {
        // F, B and W of both ranks.
        assert_eq!(few.matches(&format!(">{i}</text>")).count(), 6, "micro-batch {i}");
    }
    let many = text(&gpipe(2, 1, 2000, 1));
    assert!(!many.contains(">1999</text>"), "no room");
}

#[test]
fn an_overlap_is_two_boxes_in_two_colours() {
    let mut timeline = gpipe(1, 1, 1, 1);
    timeline.placement = vec![0, 0];
    let action = Action::Overlap { forward: (0, 3), backward: (1, 4) };
    let span = Span { lane: Lane::Compute, action, start_ns: 0, end_ns: 1000 };
    timeline.ranks[0].spans = vec![span];
    timeline.ranks[0].memory.clear();
    let svg = text(&timeline);
    let boxes = boxes(&svg);
    assert_eq!(boxes.len(), 2);
    assert_ne!(boxes[0].2, boxes[1].2);
    assert!(svg.contains(">3</text>") && svg.contains(">4</text>"));
    assert!(svg.contains("F &amp; BW overlapped"));
}

#[test]
fn stages_of_a_rank_have_different_shades() {
    let mut timeline = gpipe(1, 1, 1, 1);
    timeline.placement = vec![0, 0, 0];
    let forward = |stage| Span {
        lane: Lane::Compute,
        action: Action::compute(crate::ir::Compute::F, stage, 0),
        start_ns: 1000 * stage as u64,
        end_ns: 1000 * stage as u64 + 900,
    };
    timeline.ranks[0].spans = (0..3).map(forward).collect();
    let mut fills: Vec<String> = boxes(&text(&timeline)).into_iter().map(|b| b.2).collect();
    fills.dedup();
    assert_eq!(fills.len(), 3);
    assert_eq!(fills[0], "#0072b2");
}

#[test]
fn ticks_are_round_and_few() {
    for (range, ticks, step) in
        [(999, 10, 100), (1_000, 10, 100), (1_234_567, 9, 200_000), (1, 9, 1)]
    {
        assert_eq!(tick_step(range, ticks), step, "{range}");
    }
    assert_eq!(tick_text(1_500_000, 500_000), "1500 µs");
    assert_eq!(tick_text(20_000_000, 10_000_000), "20 ms");
    assert!(u64::MAX / tick_step(u64::MAX, 9) <= 9);
}

#[test]
fn names_cannot_break_the_picture() {
    assert_eq!(escape("a<b> & \"c\"\u{7}"), "a&lt;b&gt; &amp; &quot;c&quot;\u{fffd}");
    assert_eq!(clip(&"é".repeat(40)).chars().count(), 33);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 200,
        failure_persistence: None,
        ..Default::default()
    })]

    #[test]
    fn any_timeline_is_a_sound_picture(timeline in any_timeline()) {
        let svg = text(&timeline);
        let overlaps = timeline.ranks.iter().flat_map(|r| &r.spans);
        let overlaps = overlaps.filter(|s| matches!(s.action, Action::Overlap { .. })).count();
        let spans: usize = timeline.ranks.iter().map(|r| r.spans.len()).sum();
        prop_assert_eq!(boxes(&svg).len(), spans + overlaps);
        prop_assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }
}

#[test]
fn a_picture_has_its_facts_and_a_memory_axis_with_its_unit() {
    use crate::timeline::MemoryUnit;
    let mut timeline = gpipe(2, 1, 3, 1);
    timeline.facts = vec!["P 2, V 1".into(), "zeropp 1 <schedule>".into()];
    timeline.memory_unit = MemoryUnit::Bytes;
    let most = timeline.ranks.iter().map(peak).max().unwrap();
    let svg = text(&timeline);
    assert!(svg.contains(">P 2, V 1</text>") && svg.contains("zeropp 1 &lt;schedule&gt;</text>"));
    let axis = format!(">{}</text>", MemoryUnit::Bytes.text(most));
    // Once on the axis of each rank, once as the peak of the ranks that have it.
    assert!(svg.matches(&axis).count() > timeline.ranks.len(), "{axis}");
    let plain = text(&Timeline { facts: Vec::new(), ..timeline.clone() });
    let height = |svg: &str| elements(svg)[0].1.split("height=\"").nth(1).unwrap().to_string();
    let [with, without] =
        [&svg, &plain].map(|svg| height(svg).split('"').next().unwrap().parse::<f64>().unwrap());
    assert_eq!(with - without, 2.0 * FACT_HEIGHT);
}
