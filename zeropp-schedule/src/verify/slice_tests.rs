//! Every rule of samples that are cut into slices, broken.

use super::*;
use crate::ir::Compute;
use crate::lower::{LowerOptions, lower};
use crate::schedules::{Shape, generate_sliced};

/// Two samples of four slices in rounds, on two ranks with two stages each.
fn rounds() -> Schedule {
    let shape = Shape { pp: 2, virtual_stages: 2, micro_batches: 2, unit: 2 };
    generate_sliced("interleaved-zb", &shape, &[1024, 512, 512, 256]).unwrap()
}

fn index(schedule: &Schedule, rank: usize, text: &str) -> usize {
    schedule.ranks[rank].iter().position(|a| a.to_string() == text).expect(text)
}

/// What is said of `good` after two actions of a rank have changed places.
fn swapped(mut good: Schedule, rank: usize, one: &str, other: &str) -> String {
    verify(&good, &VerifyLimits::default()).expect("good before the change");
    let (one, other) = (index(&good, rank, one), index(&good, rank, other));
    good.ranks[rank].swap(one, other);
    verify(&good, &VerifyLimits::default()).unwrap_err().to_string()
}

fn of_header(change: impl FnOnce(&mut Schedule)) -> String {
    let mut schedule = rounds();
    change(&mut schedule);
    verify(&schedule, &VerifyLimits::default()).unwrap_err().to_string()
}

#[test]
fn forwards_of_a_sample_s_slices_run_in_their_order() {
    let said = swapped(rounds(), 0, "0F1", "0F2");
    let want = "(0F2): no 0F1 before it, whose keys and values it needs: a slice of the same";
    assert!(said.contains(want), "{said}");
    // Another sample's slices do not matter.
    let mut other = rounds();
    let (one, later) = (index(&other, 0, "2F3"), index(&other, 0, "0F4"));
    other.ranks[0].swap(one, later);
    let said = verify(&other, &VerifyLimits::default());
    assert!(said.is_ok() || !said.unwrap_err().to_string().contains("keys"));
}

#[test]
fn backwards_of_a_sample_s_slices_run_from_the_last_to_the_first() {
    for rank in [0, 1] {
        let [one, other] = [3, 2].map(|slice| format!("{}B{slice}", 2 + rank));
        let said = swapped(rounds(), rank, &one, &other);
        let want =
            format!("no {one} before it, which adds to the gradients of its keys and values");
        assert!(said.contains(&want), "{said}");
    }
}

#[test]
fn whole_backwards_run_from_the_last_slice_to_the_first() {
    let shape = Shape { pp: 2, virtual_stages: 1, micro_batches: 2, unit: 2 };
    let mut good = generate_sliced("1f1b", &shape, &[256; 3]).unwrap();
    for rank in &mut good.ranks {
        rank.retain(|a| a.computes().all(|task| task.kind != Compute::W));
        for action in rank {
            if let Action::Compute { kind, .. } = action
                && *kind == Compute::B
            {
                *kind = Compute::BW;
            }
        }
    }
    let said = swapped(good, 1, "1BW2", "1BW1");
    assert!(said.contains("(1BW1): no 1BW2 before it, which adds"), "{said}");
}

#[test]
fn weight_gradients_are_summed_by_samples_from_the_last_slice() {
    let mut late = rounds();
    // All W at the end, in micro-batch order: what whole samples want.
    for rank in &mut late.ranks {
        let is_w = |a: &Action| a.computes().any(|task| task.kind == Compute::W);
        let mut weights: Vec<Action> = rank.iter().filter(|a| is_w(a)).copied().collect();
        rank.retain(|a| !is_w(a));
        weights.sort_by_key(Action::micro_batch);
        rank.extend(weights);
    }
    let said = verify(&late, &VerifyLimits::default()).unwrap_err().to_string();
    assert!(said.contains("from the last slice of each to the first, but 0 ran before"), "{said}");
    let any = VerifyLimits { w_in_order: false, ..VerifyLimits::default() };
    assert_eq!(verify(&late, &any), Ok(()));
    // The order of whole samples is refused of slices, and the other way round.
    late.sample_slices.clear();
    assert_eq!(verify(&late, &VerifyLimits::default()), Ok(()));
    let mut whole = rounds();
    whole.sample_slices.clear();
    let said = verify(&whole, &VerifyLimits::default()).unwrap_err().to_string();
    assert!(said.contains("must run in micro-batch order"), "{said}");
}

/// So keys and values of all slices before it are there.
#[test]
fn a_slice_is_recomputed_between_its_forward_and_its_backward() {
    let lowered = || {
        let options = LowerOptions { recompute: true, ..LowerOptions::default() };
        lower(&rounds(), &options)
    };
    let said = swapped(lowered(), 0, "0R2", "0B2");
    assert!(said.contains("0R2): it recomputes for 0B2, which runs earlier"), "{said}");
    let said = swapped(lowered(), 0, "0R0", "0F0");
    assert!(said.contains("(0R0): no 0F0 before it"), "{said}");
}

#[test]
fn the_head_makes_its_gradient_in_the_order_of_slices() {
    let mut redone = rounds();
    let last = index(&redone, 1, "3B3");
    redone.ranks[1].insert(last, "3R3".parse_action());
    let next = index(&redone, 1, "3B2");
    redone.ranks[1].insert(next, "3R2".parse_action());
    let said = verify(&redone, &VerifyLimits::default()).unwrap_err().to_string();
    assert!(said.contains("forwards of stage 3 must run in micro-batch order"), "{said}");
}

trait ParseAction {
    fn parse_action(self) -> Action;
}

impl ParseAction for &str {
    fn parse_action(self) -> Action {
        crate::exchange::parse(self).unwrap()
    }
}

#[test]
fn units_are_of_whole_samples_and_slices_have_tokens() {
    let said = of_header(|s| s.units = vec![2, 6]);
    assert!(
        said.contains("units[0] = 2: units are of whole samples of 4 slices; use multiples of 4"),
        "{said}"
    );
    let said = of_header(|s| s.sample_slices[2] = 0);
    assert!(
        said.contains("sample_slices[2] = 0: each slice has tokens; use a number above 0"),
        "{said}"
    );
    let said = of_header(|s| s.sample_slices[2] = u64::MAX);
    assert!(said.contains("too many for a sample; use 1099511627776 at most"), "{said}");
}
