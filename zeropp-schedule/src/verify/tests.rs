//! What the verifier says about one fault at a time.

use super::*;
use crate::ir::{Compute, Message};
use crate::lower::{LowerOptions, OptimizerSync, lower};
use crate::schedules::{Shape, generate, generate_sliced};

fn zeropp(pp: usize, virtual_stages: usize, micro_batches: usize, unit: usize) -> Schedule {
    generate("zeropp", &Shape { pp, virtual_stages, micro_batches, unit }).unwrap()
}

fn shape(pp: usize, virtual_stages: usize, micro_batches: usize, unit: usize) -> Shape {
    Shape { pp, virtual_stages, micro_batches, unit }
}

fn program() -> Schedule {
    let options = LowerOptions { replicas: true, ..Default::default() };
    lower(&zeropp(2, 2, 6, 3), &options)
}

/// Applies `change` and returns the message.
fn message(mut schedule: Schedule, change: impl FnOnce(&mut Schedule)) -> String {
    verify(&schedule, &VerifyLimits::default()).expect("good before the change");
    change(&mut schedule);
    verify(&schedule, &VerifyLimits::default()).unwrap_err().to_string()
}

/// Index of the first action of `rank` that prints as `text`.
fn find(schedule: &Schedule, rank: usize, text: &str) -> usize {
    schedule.ranks[rank].iter().position(|a| a.to_string() == text).expect(text)
}

fn without(rank: usize, text: &'static str) -> impl FnOnce(&mut Schedule) {
    move |s| {
        let index = find(s, rank, text);
        s.ranks[rank].remove(index);
    }
}

/// Moves the first `text` of `rank` to right before `target`.
fn moved(rank: usize, text: &'static str, target: &'static str) -> impl FnOnce(&mut Schedule) {
    move |s| {
        let index = find(s, rank, text);
        let action = s.ranks[rank].remove(index);
        let target = find(s, rank, target);
        s.ranks[rank].insert(target, action);
    }
}

#[test]
fn compute_order() {
    let good = || zeropp(2, 2, 3, 3);
    let check = |change: Box<dyn FnOnce(&mut Schedule)>, want| {
        assert_eq!(message(good(), change), want);
    };
    check(Box::new(without(1, "3W1")), "rank 1: 3W1 is missing");
    check(Box::new(without(1, "3B1")), "rank 1: 3B1 is missing");
    check(Box::new(without(0, "0F2")), "rank 0: 0F2 is missing");
    check(Box::new(moved(1, "3B0", "3F0")), "rank 1, action 3 (3B0): no 3F0 before it");
    check(Box::new(moved(0, "0W1", "0B1")), "rank 0, action 13 (0W1): no 0B1 before it");
    check(Box::new(moved(0, "0W1", "0B0")), "rank 0, action 11 (0W1): no 0B1 before it");
    check(
        Box::new(moved(1, "3W2", "3W0")),
        "rank 1, action 11 (3W0): W of stage 3 must run in micro-batch order, but 2 ran before",
    );
    check(
        Box::new(moved(1, "3F2", "3F1")),
        "rank 1, action 6 (3F1): forwards of stage 3 must run in micro-batch order, as the loss's \
         weight gradient is made in them, but 2 ran before",
    );
    check(
        Box::new(|s| s.ranks[0].push(Action::compute(Compute::F, 0, 1))),
        "rank 0, action 18 (0F1): duplicate of action 1",
    );
    check(
        Box::new(|s| s.ranks[0].push(Action::compute(Compute::F, 1, 1))),
        "rank 0, action 18 (1F1): wrong rank; stage 1 lives on rank 1",
    );
    check(
        Box::new(|s| s.ranks[0].push(Action::compute(Compute::F, 4, 1))),
        "rank 0, action 18 (4F1): unknown stage; stages are 0..4",
    );
    check(
        Box::new(|s| s.ranks[0].push(Action::compute(Compute::F, 0, 3))),
        "rank 0, action 18 (0F3): unknown micro-batch; micro-batches are 0..3",
    );
    check(
        Box::new(|s| s.ranks[0].push(Action::compute(Compute::BW, 0, 2))),
        "rank 0, action 18 (0BW2): the backward is whole there and split at action 15",
    );
    check(
        Box::new(|s| s.ranks[0].push(Action::compute(Compute::R, 0, 2))),
        "rank 0, action 18 (0R2): it recomputes for 0B2, which runs earlier",
    );
}

#[test]
fn deadlock_names_the_circle() {
    // Rank 0 wants a gradient back before it has sent what that gradient starts from.
    insta::assert_snapshot!(
        message(zeropp(2, 2, 3, 3), moved(0, "0B0", "2F0")),
        @"deadlock: rank 0, action 3 (0B0) waits for 1B0; rank 1, action 3 (3F0) waits for 2F0"
    );
    let program = lower(&zeropp(2, 2, 3, 3), &LowerOptions::default());
    let late_send = moved(0, ">A0.0", "0B0");
    insta::assert_snapshot!(
        message(program, late_send),
        @"rank 1, action 2 (<A1.0): crossed; the next message on this link is >A0.1"
    );
}

#[test]
fn program_rules() {
    let mut messages = Vec::new();
    let mut check = |change: &dyn Fn(&mut Schedule)| messages.push(message(program(), change));
    for (rank, text) in
        [(0, ">A0.1"), (1, "<A1.1"), (0, "AG2"), (0, "FREE2"), (0, "RS2"), (0, "AR2"), (0, "STEP")]
    {
        check(&|s| without(rank, text)(s));
    }
    for (rank, text, before) in [
        (0, ">A0.1", "0F1"),
        (1, "<A1.1", "<A1.0"),
        (0, "FREE2", "2B2"),
        (0, "RS2", "2W2"),
        (0, "AR2", "0B0"),
        (0, "STEP", "AR2"),
    ] {
        check(&|s| moved(rank, text, before)(s));
    }
    check(&|s| {
        let at = find(s, 0, "RS2");
        s.ranks[0].insert(at, Action::ReduceScatter { stage: 2 });
    });
    check(&|s| s.ranks[0].insert(1, Action::AllGather { stage: 0 }));
    check(&|s| s.ranks[0].insert(0, Action::Free { stage: 0 }));
    insta::assert_snapshot!(messages.join("\n"), @r"
    rank 0: >A0.1 is missing
    rank 1, action 6 (1F1): no <A1.1 before it
    rank 0, action 11 (2F0): stage 2 is not gathered
    rank 0, action 45 (AG2): stage 2 is gathered already, by action 1
    rank 0, action 36 (END2): no reduction of stage 2 is under way there
    rank 0: AR2 is missing
    rank 0: STEP is missing
    rank 0, action 4 (>A0.1): no 0F1 before it
    rank 1, action 2 (<A1.1): crossed; the next message on this link is >A0.0
    rank 0, action 30 (2B2): stage 2 is not gathered
    rank 0, action 34 (RS2): too early; 2 of the 3 micro-batches of unit 0 have had their W
    rank 0, action 32 (AR2): the gradient of unit 0 is not reduced before it
    rank 0, action 82 (STEP): the reduction of stage 2 before it is not ended by END2
    rank 0, action 36 (RS2): reduced already; nothing was added since
    rank 0, action 1 (AG0): stage 0 is gathered already, by action 0
    rank 0, action 0 (FREE0): stage 0 is not gathered
    ");
    let stray = message(program(), |s| {
        let recv = Action::Recv { message: Message::Gradient, stage: 3, micro_batch: 0 };
        s.ranks[1].insert(0, recv);
    });
    assert_eq!(
        stray,
        "rank 1, action 0 (<G3.0): superfluous; the neighbouring stage is on the same rank, or \
         there is none"
    );
}

#[test]
fn headers() {
    let check = |change: fn(&mut Schedule), want| {
        assert_eq!(message(zeropp(2, 1, 2, 2), change), want);
    };
    check(|s| s.placement[1] = 2, "schedule: stage 1 is placed on rank 2; ranks are 0..2");
    check(
        |s| s.placement[1] = 0,
        "schedule: rank 1 has no stage; place one there or take fewer ranks",
    );
    check(|s| s.units.clear(), "schedule: there are no units; at least one is needed");
    check(
        |s| s.units.push(0),
        "schedule: unit 1 has no micro-batches; give it one or leave it out",
    );
    check(
        |s| s.units[0] = usize::MAX,
        "schedule: 12 compute actions are too few for 2 stages and 18446744073709551615 \
         micro-batches; each needs an F and a backward",
    );
}

#[test]
fn limits() {
    let at_most = |schedule: &Schedule, limits: VerifyLimits| {
        verify(schedule, &limits).err().map(|e| e.to_string())
    };
    let program = lower(&zeropp(2, 2, 3, 3), &LowerOptions::default());
    let gathered = |n| VerifyLimits { gathered_max: Some(n), ..Default::default() };
    assert_eq!(at_most(&program, gathered(2)), None);
    assert_eq!(
        at_most(&program, gathered(1)).unwrap(),
        "rank 0, action 1 (AG2): 2 gathered stages are more than the limit of 1"
    );
    let alive = |n| VerifyLimits { activations_max: Some(n), ..Default::default() };
    assert_eq!(at_most(&zeropp(2, 2, 3, 3), alive(6)), None);
    assert_eq!(
        at_most(&zeropp(2, 2, 3, 3), alive(5)).unwrap(),
        "rank 0, action 5 (2F2): activations of 6 micro-batches are more than the limit of 5"
    );
    // Recomputation keeps inputs only, of every stage but the last.
    let options = LowerOptions { recompute: true, ..Default::default() };
    assert_eq!(at_most(&lower(&zeropp(2, 2, 3, 3), &options), alive(3)), None);

    let mut foreign = program;
    foreign.ranks.iter_mut().for_each(|r| r.truncate(r.len() - 1));
    assert_eq!(at_most(&foreign, VerifyLimits::default()).unwrap(), "rank 0: STEP is missing");
    let no_step = VerifyLimits { optimizer_step: false, ..Default::default() };
    assert_eq!(at_most(&foreign, no_step), None);
    // Out of order W are another tool's right.
    let mut order = zeropp(2, 2, 3, 3);
    moved(1, "3W2", "3W0")(&mut order);
    moved(1, "3F2", "3F1")(&mut order);
    assert_eq!(at_most(&order, VerifyLimits { w_in_order: false, ..Default::default() }), None);
}

/// Before, whatever was missing hid all that was out of order.
#[test]
fn a_missing_action_hides_only_its_consequences() {
    let mut schedule = zeropp(2, 2, 6, 3);
    without(0, "0W1")(&mut schedule);
    without(1, "1F2")(&mut schedule);
    moved(0, "0B4", "0F4")(&mut schedule);
    let all = verify_all(&schedule, &VerifyLimits::default(), 100);
    let all: Vec<String> = all.iter().map(ToString::to_string).collect();
    let of = |part: &str| all.iter().filter(|error| error.contains(part)).count();
    assert_eq!((of("0W1"), of("1F2")), (1, 1), "{all:#?}");
    assert!(of("0F4") == 1 && all.len() == 3, "{all:#?}");
}

#[test]
fn every_reduction_ends_before_the_next_one() {
    let good = || lower(&zeropp(2, 2, 3, 3), &LowerOptions::default());
    let check = |change: Box<dyn FnOnce(&mut Schedule)>, want: &str| {
        let said = message(good(), change);
        assert!(said.ends_with(want), "{said}");
    };
    let open = "the reduction of stage 2 before it is not ended by END2";
    check(Box::new(without(0, "END2")), open);
    check(Box::new(moved(0, "END2", "END0")), open);
    check(Box::new(moved(0, "END2", "RS2")), "(END2): no reduction of stage 2 is under way there");
    check(Box::new(without(1, "END1")), "the reduction of stage 1 before it is not ended by END1");
    let twice = |s: &mut Schedule| {
        let at = find(s, 0, "END2");
        s.ranks[0].insert(at + 1, Action::Retire { stage: 2 });
    };
    check(Box::new(twice), "(END2): no reduction of stage 2 is under way there");
    let other = |s: &mut Schedule| {
        let at = find(s, 0, "END2");
        s.ranks[0][at] = Action::Retire { stage: 0 };
    };
    check(Box::new(other), "(END0): no reduction of stage 0 is under way there");
}

#[test]
fn copies_of_activations_go_out_and_come_in_once_between_f_and_b() {
    let program = |recompute| {
        let options = LowerOptions { out: 3, recompute, ..Default::default() };
        lower(&zeropp(1, 2, 4, 4), &options)
    };
    let again = program(true);
    let check = |change: &dyn Fn(&mut Schedule)| message(program(false), change);
    let (out, gone, back) = ("OUT0.2", "GONE0.2", "IN0.2");
    for (text, said) in [
        (out, "(GONE0.2): no OUT0.2 before it"),
        (gone, "rank 0: GONE0.2 is missing"),
        (back, "rank 0: IN0.2 is missing"),
    ] {
        let said_of = check(&|s| without(0, text)(s));
        assert!(said_of.ends_with(said), "{said_of}");
        let said_of = check(&|s| {
            let index = find(s, 0, text);
            let action = s.ranks[0][index];
            s.ranks[0].insert(index, action);
        });
        assert!(said_of.contains("duplicate of action"), "{said_of}");
    }
    for (text, before, said) in [
        (out, "0F2", "(OUT0.2): no 0F2 before it"),
        (gone, out, "(GONE0.2): no OUT0.2 before it"),
        (back, gone, "(IN0.2): no GONE0.2 before it"),
        (out, back, "(GONE0.2): no OUT0.2 before it"),
    ] {
        let said_of = check(&|s| moved(0, text, before)(s));
        assert!(said_of.ends_with(said), "{text} before {before}: {said_of}");
    }
    // The backward, or the recomputation, comes before what it needs.
    let late = |s: &mut Schedule| moved(0, "IN0.2", "0W2")(s);
    let said = check(&late);
    assert!(said.ends_with("(0B2): no IN0.2 before it"), "{said}");
    let said = message(again.clone(), moved(0, "IN0.2", "0B2"));
    assert!(said.ends_with("(0R2): no IN0.2 before it"), "{said}");
    // Nothing comes in before a validation, and so nothing has to go out again.
    let late = LowerOptions { out: 3, sync: OptimizerSync::Late, ..Default::default() };
    let late = lower(&zeropp(1, 2, 4, 4), &late);
    assert!(find(&late, 0, out) < find(&late, 0, "VALID"), "copies out are a part of a warm-up");
    let said = message(late, moved(0, "IN0.0", "VALID"));
    assert!(said.contains("(IN0.0): before the update of the step before"), "{said}");
    // Not of a slice of a sample.
    let sliced = generate_sliced("zeropp", &shape(2, 1, 2, 2), &[256, 256]).unwrap();
    let put = |s: &mut Schedule| {
        let (stage, micro_batch) = (0, 0);
        let at = find(s, 0, "0F0") + 1;
        s.ranks[0].insert(at, Action::In { stage, micro_batch });
        s.ranks[0].insert(at, Action::Gone { stage, micro_batch });
        s.ranks[0].insert(at, Action::Out { stage, micro_batch });
    };
    let said = message(lower(&sliced, &LowerOptions::default()), put);
    assert!(said.contains("slices of a sample need each other"), "{said}");
}

#[test]
fn copies_change_how_much_is_alive_and_out() {
    let options = LowerOptions { out: 4, ..Default::default() };
    let program = lower(&zeropp(1, 3, 4, 4), &options);
    let said = |limits: VerifyLimits| verify(&program, &limits).err().map(|e| e.to_string());
    let alive = |n| said(VerifyLimits { activations_max: Some(n), ..Default::default() });
    let out = |n| said(VerifyLimits { out_max: Some(n), ..Default::default() });
    assert_eq!((alive(3), out(8)), (None, None));
    assert!(alive(2).unwrap().ends_with("3 micro-batches are more than the limit of 2"));
    assert!(out(7).unwrap().ends_with(
        "8 micro-batches that are copied out are more than the \
                                       limit of 7"
    ));
    // Without copies all of the first two stages are alive.
    let without = lower(&zeropp(1, 3, 4, 4), &LowerOptions::default());
    let limits = VerifyLimits { activations_max: Some(8), ..Default::default() };
    assert!(verify(&without, &limits).is_err());
}
