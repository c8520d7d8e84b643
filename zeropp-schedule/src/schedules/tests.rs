//! The generators against the orders that their papers print.

use super::*;

fn text(kind: &str, pp: usize, v: usize, micro_batches: usize, unit: usize) -> Vec<String> {
    let shape = Shape { pp, virtual_stages: v, micro_batches, unit };
    let schedule = generate(kind, &shape).unwrap();
    assert_eq!(schedule.kind, kind);
    assert_eq!(schedule.micro_batches(), micro_batches);
    let line = |rank: &Vec<crate::ir::Action>| {
        rank.iter().map(|a| a.to_string()).collect::<Vec<_>>().join(" ")
    };
    schedule.ranks.iter().map(line).collect()
}

#[test]
fn zeropp_prints_the_worked_example() {
    assert_eq!(
        text("zeropp", 2, 2, 3, 3),
        [
            "0F0 0F1 0F2 2F0 2F1 2F2 2B0 2W0 2B1 2W1 2B2 0B0 2W2 0B1 0W0 0B2 0W1 0W2",
            "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 3W0 1B1 3W1 1B2 3W2 1W0 1W1 1W2",
        ]
    );
}

#[test]
fn zeropp_with_one_stage_a_rank_and_a_short_last_unit() {
    assert_eq!(
        text("zeropp", 2, 1, 3, 2),
        ["0F0 0F1 0B0 0W0 0B1 0W1 0F2 0B2 0W2", "1F0 1B0 1F1 1B1 1W0 1W1 1F2 1B2 1W2"]
    );
}

#[test]
fn gpipe_runs_stages_breadth_first() {
    assert_eq!(
        text("gpipe", 2, 2, 2, 1),
        ["0F0 0F1 2F0 2F1 2BW0 2BW1 0BW0 0BW1", "1F0 1F1 3F0 3F1 3BW0 3BW1 1BW0 1BW1"]
    );
}

#[test]
fn one_f_one_b_keeps_p_minus_r() {
    assert_eq!(
        text("1f1b", 3, 1, 3, 3),
        ["0F0 0F1 0F2 0BW0 0BW1 0BW2", "1F0 1F1 1BW0 1F2 1BW1 1BW2", "2F0 2BW0 2F1 2BW1 2F2 2BW2",]
    );
    assert_eq!(text("1f1b", 3, 1, 1, 1), ["0F0 0BW0", "1F0 1BW0", "2F0 2BW0"]);
}

#[test]
fn errors_name_field_value_and_remedy() {
    let check = |kind: &str, pp, virtual_stages, micro_batches, unit, want: &str| {
        let shape = Shape { pp, virtual_stages, micro_batches, unit };
        assert_eq!(generate(kind, &shape).unwrap_err().to_string(), want);
    };
    check(
        "1f1b",
        2,
        2,
        4,
        4,
        "schedule 1f1b: virtual = 2 does not work; it must be 1, or take `gpipe` or `zeropp`",
    );
    check(
        "zeropp",
        2,
        2,
        0,
        4,
        "schedule zeropp: micro-batches = 0 does not work; it must be at least 1",
    );
    check("zeropp", 2, 2, 4, 0, "schedule zeropp: unit = 0 does not work; it must be at least 1");
    check(
        "gpipe",
        1 << 40,
        1 << 40,
        4,
        4,
        "micro-batches = 4: with pp = 1099511627776 and virtual = 1099511627776 schedule gpipe \
         has more than 33554432 actions; make one of them smaller",
    );
    let unknown = generate("gpip", &Shape { pp: 1, virtual_stages: 1, micro_batches: 1, unit: 1 });
    let message = unknown.unwrap_err().to_string();
    assert!(message.starts_with("schedule: unknown kind `gpip`; known kinds: zeropp, gpipe, 1f1b"));
}
