//! The papers' figures as text.

use super::*;
use crate::lower::{LowerOptions, lower};
use crate::schedules::{Shape, generate};
use crate::simulate::{Costs, simulate};

fn picture(kind: &str, shape: Shape, options: Option<LowerOptions>, width: usize) -> String {
    let schedule = generate(kind, &shape).unwrap();
    let schedule = options.map_or(schedule.clone(), |o| lower(&schedule, &o));
    let costs = Costs::uniform(shape.stages(), 1, 1, 1, 0);
    chart(&simulate(&schedule, &costs).unwrap(), width)
}

fn shape(pp: usize, virtual_stages: usize, micro_batches: usize, unit: usize) -> Shape {
    Shape { pp, virtual_stages, micro_batches, unit }
}

#[test]
fn zeropp_two_ranks() {
    insta::assert_snapshot!(picture("zeropp", shape(2, 2, 3, 3), None, 200), @r"
    pp 0 |aF0aF1aF2bF0bF1bF2bB0bW0bB1bW1bB2aB0bW2aB1aW0aB2aW1aW2...|
    pp 1 |...aF0aF1aF2bF0bB0bF1bB1bF2bB2aB0bW0aB1bW1aB2bW2aW0aW1aW2|
    ");
}

#[test]
fn zeropp_four_ranks_one_stage() {
    insta::assert_snapshot!(picture("zeropp", shape(4, 1, 7, 7), None, 200), @r"
    pp 0 |F0F1F2F3F4F5F6B0W0B1W1B2W2B3W3B4W4B5W5B6W6......|
    pp 1 |..F0F1F2F3F4B0F5B1F6B2W0B3W1B4W2B5W3B6W4W5W6....|
    pp 2 |....F0F1F2B0F3B1F4B2F5B3F6B4W0B5W1B6W2W3W4W5W6..|
    pp 3 |......F0B0F1B1F2B2F3B3F4B4F5B5F6B6W0W1W2W3W4W5W6|
    ");
}

#[test]
fn zeropp_recomputes() {
    let options = LowerOptions { recompute: true, ..Default::default() };
    insta::assert_snapshot!(picture("zeropp", shape(2, 2, 3, 3), Some(options), 200), @r"
    pp 0 |aF0aF1aF2bF0bF1bF2bB0bW0bB1bW1bB2aR0aB0bW2aR1aB1aW0aR2aB2aW1aW2...|
    pp 1 |...aF0aF1aF2bF0bB0bF1bB1bF2bB2aR0aB0bW0aR1aB1bW1aR2aB2bW2aW0aW1aW2|
    ");
}

#[test]
fn one_f_one_b() {
    insta::assert_snapshot!(picture("1f1b", shape(4, 1, 5, 5), None, 200), @r"
    pp 0 |F0F1F2F3............BW0-F4BW1-..BW2-..BW3-..BW4-|
    pp 1 |..F0F1F2........BW0-F3BW1-F4BW2-..BW3-..BW4-....|
    pp 2 |....F0F1....BW0-F2BW1-F3BW2-F4BW3-..BW4-........|
    pp 3 |......F0BW0-F1BW1-F2BW2-F3BW3-F4BW4-............|
    ");
}

#[test]
fn gpipe() {
    insta::assert_snapshot!(picture("gpipe", shape(3, 1, 4, 4), None, 200), @r"
    pp 0 |F0F1F2F3............BW0-BW1-BW2-BW3-|
    pp 1 |..F0F1F2F3......BW0-BW1-BW2-BW3-....|
    pp 2 |....F0F1F2F3BW0-BW1-BW2-BW3-........|
    ");
}

#[test]
fn a_column_a_slot() {
    insta::assert_snapshot!(picture("zeropp", shape(3, 2, 5, 5), None, 72), @r"
    pp 0 |FFFFFFFFFFBWBWBWBWBBWBWBWBWBWW..|
    pp 1 |.FFFFFFFFBFBFBWBWBBWBWBWBWBWWWW.|
    pp 2 |..FFFFFFBFBFBFBFBBWBWBWBWBWWWWWW|
    ");
}

/// Letters of some of the actions would read as an order that never happens: FFBBWWWWW.
#[test]
fn too_narrow_for_every_action_shows_what_took_most_and_says_so() {
    let text = picture("zeropp", shape(4, 2, 21, 7), None, 72);
    let (rows, note) = text.trim_end().rsplit_once('\n').unwrap();
    assert_eq!(
        note,
        "72 columns are too few for every action: a letter is what took most of its column's time. \
         129 columns show all."
    );
    assert!(rows.lines().all(|row| row.len() == 72 + "pp 0 ||".len()), "{rows}");
    let whole = picture("zeropp", shape(4, 2, 21, 7), None, 129);
    assert_eq!(whole.lines().count(), 4, "the width that it names shows all, without a note");
    let actions = |row: &str| row.chars().filter(|c| "FBW".contains(*c)).count();
    assert!(whole.lines().all(|row| actions(row) == 3 * 2 * 21), "{whole}");
}

/// F and B of one slot each, then a W of six: in columns of four slots, half idle.
#[test]
fn a_column_shows_what_took_most_of_its_time() {
    let span = |kind, start_ns, end_ns| {
        let action = Action::compute(kind, 0, 0);
        Span { lane: action.lane(), action, start_ns, end_ns }
    };
    let spans = vec![
        span(Compute::F, 0, 1),
        span(Compute::B, 1, 2),
        span(Compute::W, 2, 8),
        span(Compute::F, 11, 12),
    ];
    let timeline = Timeline {
        placement: vec![0],
        ranks: vec![RankTimeline { name: "pp 0".into(), spans, ..RankTimeline::default() }],
        ..Timeline::default()
    };
    let drawn = chart(&timeline, 3);
    assert!(drawn.starts_with("pp 0 |WW.|\n3 columns are too few"), "{drawn}");
    assert!(drawn.ends_with(" 12 columns show all.\n"), "{drawn}");
    assert_eq!(chart(&timeline, 12), "pp 0 |FBW0----...F|\n");
}

#[test]
fn an_overlapped_pair_is_one_cell() {
    let span =
        |action: Action, start_ns, end_ns| Span { lane: action.lane(), action, start_ns, end_ns };
    let overlap = Action::Overlap { forward: (0, 3), backward: (1, 2) };
    let spans = vec![
        span(Action::compute(Compute::F, 0, 1), 0, 1),
        span(overlap, 1, 4),
        span(Action::OptimizerStep, 9, 10),
    ];
    let timeline = Timeline {
        placement: vec![0, 0],
        ranks: vec![RankTimeline { name: "pp 0".into(), spans, ..RankTimeline::default() }],
        ..Timeline::default()
    };
    assert_eq!(chart(&timeline, 80), "pp 0 |aF1aF3&bBW2-|\n");
    assert_eq!(chart(&timeline, 4), "pp 0 |F&&&|\n");
    assert_eq!(chart(&Timeline::default(), 80), "");
}
