//! Each rule of a split head, by what breaks it.

use super::*;
use crate::ir::{Compute, HeadMessage};
use crate::lower::{LowerOptions, OptimizerSync, in_issue_order, lower};
use crate::schedules::{Shape, generate_cut, generate_split};

const WIDE: usize = 8;

/// Four ranks with two stages and a slice each, of which the root has the last one.
fn good() -> Schedule {
    let shape = Shape { pp: 4, virtual_stages: 2, micro_batches: 6, unit: 3 };
    let made = generate_split("zeropp", &shape, &[16; 4], None).unwrap();
    let program = lower(&made, &LowerOptions::default());
    verify(&program, &VerifyLimits::default()).unwrap();
    program
}

fn refused(change: impl FnOnce(&mut Schedule)) -> String {
    let mut program = good();
    change(&mut program);
    verify(&program, &VerifyLimits::default()).unwrap_err().to_string()
}

fn at(program: &Schedule, rank: usize, action: Action) -> usize {
    program.ranks[rank].iter().position(|a| *a == action).unwrap()
}

fn slice(kind: Compute, micro_batch: usize) -> Action {
    Action::compute(kind, WIDE, micro_batch)
}

fn send(message: HeadMessage, micro_batch: usize, peer: usize) -> Action {
    Action::SendHead { message, stage: WIDE, micro_batch, peer }
}

fn recv(message: HeadMessage, micro_batch: usize, peer: usize) -> Action {
    Action::RecvHead { message, stage: WIDE, micro_batch, peer }
}

/// Takes an action away.
fn without(rank: usize, action: Action) -> String {
    refused(|program| {
        let at = at(program, rank, action);
        program.ranks[rank].remove(at);
    })
}

/// Puts an action right before another one.
fn moved(rank: usize, action: Action, before: Action) -> String {
    refused(|program| {
        let from = at(program, rank, action);
        let action = program.ranks[rank].remove(from);
        let to = at(program, rank, before);
        program.ranks[rank].insert(to, action);
    })
}

#[test]
fn slices_are_blocks_of_every_rank() {
    for slices in [vec![16; 3], vec![0; 4], vec![17; 4], vec![usize::MAX; 4]] {
        let said = refused(|program| program.head_blocks = slices);
        assert!(said.contains("a split head has a number of blocks for each of 4 ranks"), "{said}");
    }
    let said = refused(|program| program.head_blocks = vec![16, 16, 32, 0]);
    assert!(said.contains("no blocks") || said.contains("no split head"), "{said}");
    let said = refused(|program| program.head_blocks = Vec::new());
    assert!(said.contains("unknown stage") || said.contains("no split head"), "{said}");
}

#[test]
fn every_rank_with_blocks_computes_f_b_and_w_once() {
    for kind in [Compute::F, Compute::B, Compute::W] {
        for rank in 0..4 {
            let said = without(rank, slice(kind, 2));
            let missing = format!("rank {rank}: 8{kind:?}2 is missing");
            assert!(said == missing, "{said}");
        }
        let said = refused(|program| program.ranks[1].push(slice(kind, 2)));
        assert!(said.contains("duplicate"), "{said}");
    }
    let said = refused(|program| {
        let at = at(program, 1, slice(Compute::B, 0));
        program.ranks[1][at] = slice(Compute::BW, 0);
    });
    assert!(said.contains("no split head"), "{said}");
}

#[test]
fn f_and_w_of_a_slice_are_in_micro_batch_order() {
    for (kind, word) in [(Compute::F, "forwards"), (Compute::W, "W of stage 8")] {
        let said = refused(|program| {
            let [one, two] = [1, 2].map(|i| at(program, 2, slice(kind, i)));
            program.ranks[2].swap(one, two);
        });
        assert!(said.contains(word) || said.contains("before it"), "{said}");
    }
}

/// Where samples are cut, the head's B come as its F, those of stages from the last slice on.
#[test]
fn slices_of_samples_are_in_order_in_the_head_and_reversed_in_stages() {
    let shape = Shape { pp: 2, virtual_stages: 1, micro_batches: 2, unit: 2 };
    let made = generate_cut("zeropp", &shape, &[256, 256, 100], &[8, 8], None).unwrap();
    let good = lower(&made, &LowerOptions::default());
    verify(&good, &VerifyLimits::default()).unwrap();
    let wide = |kind, i| at(&good, 0, Action::compute(kind, 2, i));
    assert!(wide(Compute::B, 0) < wide(Compute::B, 1) && wide(Compute::B, 1) < wide(Compute::B, 2));
    for (kind, stage, word) in [
        (Compute::F, 2, "forwards"),
        (Compute::W, 2, "W of stage 2"),
        (Compute::W, 1, "W of stage 1"),
        (Compute::B, 1, "1B2"),
    ] {
        let mut program = good.clone();
        let rank = if stage == 2 { 0 } else { 1 };
        let [one, two] = [1, 2].map(|i| at(&program, rank, Action::compute(kind, stage, i)));
        program.ranks[rank].swap(one, two);
        let said = verify(&program, &VerifyLimits::default()).unwrap_err().to_string();
        assert!(said.contains(word) || said.contains("before it"), "{kind:?} {stage}: {said}");
    }
}

#[test]
fn a_compute_comes_after_what_it_takes() {
    // Of other ranks: the input, the log-sum-exp, the sums, the gradients.
    for (rank, message, peer, taken) in [
        (1, HeadMessage::Input, 3, slice(Compute::F, 0)),
        (1, HeadMessage::Lse, 3, slice(Compute::B, 0)),
        (3, HeadMessage::Sums, 2, slice(Compute::B, 0)),
        (3, HeadMessage::Gradient, 1, Action::compute(Compute::B, 7, 0)),
    ] {
        let said = refused(|program| {
            let from = at(program, rank, recv(message, 0, peer));
            let receive = program.ranks[rank].remove(from);
            let to = at(program, rank, taken);
            program.ranks[rank].insert(to + 1, receive);
        });
        assert!(said.contains("before it"), "{message:?}: {said}");
    }
    // And of its own.
    let [b, f] = [slice(Compute::B, 0), slice(Compute::F, 0)];
    let said = moved(2, b, f);
    assert!(said.contains("no 8F0 before it"), "{said}");
    let said = moved(3, f, Action::compute(Compute::F, 7, 0));
    assert!(said.contains("no 7F0 before it"), "{said}");
    let said = moved(3, Action::compute(Compute::B, 7, 0), b);
    assert!(said.contains("no 8B0 before it"), "{said}");
}

#[test]
fn every_message_has_both_ends_once() {
    for (message, from, to) in [
        (HeadMessage::Input, 3, 1),
        (HeadMessage::Input, 1, 0),
        (HeadMessage::Sums, 0, 3),
        (HeadMessage::Lse, 3, 2),
        (HeadMessage::Gradient, 0, 1),
        (HeadMessage::Gradient, 2, 3),
    ] {
        let said = without(from, send(message, 1, to));
        assert!(said.contains("is missing"), "{said}");
        let said = without(to, recv(message, 1, from));
        assert!(said.contains("is missing") || said.contains("before it"), "{said}");
        let said = refused(|program| program.ranks[from].push(send(message, 1, to)));
        assert!(said.contains("duplicate"), "{said}");
    }
    let said = refused(|program| program.ranks[0].push(send(HeadMessage::Gradient, 1, 2)));
    assert!(said.contains("no split head of these slices has it"), "{said}");
}

#[test]
fn a_send_comes_after_what_makes_it_and_what_it_passes_on() {
    let said = moved(0, send(HeadMessage::Sums, 0, 3), slice(Compute::F, 0));
    assert!(said.contains("no 8F0 before it"), "{said}");
    let said = moved(0, send(HeadMessage::Gradient, 0, 1), slice(Compute::B, 0));
    assert!(said.contains("no 8B0 before it"), "{said}");
    let input = recv(HeadMessage::Input, 0, 3);
    let said = moved(1, send(HeadMessage::Input, 0, 0), input);
    assert!(said.contains("it passes on"), "{said}");
}

#[test]
fn the_messages_of_a_link_are_in_one_order() {
    let said = refused(|program| {
        let [one, two] = [1, 2].map(|i| at(program, 1, recv(HeadMessage::Input, i, 3)));
        program.ranks[1].swap(one, two);
    });
    assert!(said.contains("crossed") || said.contains("before it"), "{said}");
}

#[test]
fn a_slice_is_gathered_freed_and_reduced_by_units() {
    let said = without(2, Action::AllGather { stage: WIDE });
    assert!(said.contains("stage 8 is not gathered"), "{said}");
    let said = refused(|program| {
        let last = program.ranks[2].iter().rposition(|a| *a == Action::Free { stage: WIDE });
        program.ranks[2].remove(last.unwrap());
    });
    assert!(said.contains("never freed"), "{said}");
    let said = moved(2, Action::ReduceScatter { stage: WIDE }, slice(Compute::W, 2));
    assert!(said.contains("too early"), "{said}");
    let said = without(2, Action::ReduceScatter { stage: WIDE });
    assert!(
        said.contains("not reduced") || said.contains("missing") || said.contains("way"),
        "{said}"
    );
}

#[test]
fn ranks_that_wait_for_each_other_s_slices_are_a_deadlock() {
    // Rank 0 wants a later activation's work done first: its F waits for the input that it makes
    // possible itself.
    let shape = Shape { pp: 2, virtual_stages: 1, micro_batches: 2, unit: 2 };
    let mut made = generate_split("zeropp", &shape, &[1, 1], None).unwrap();
    verify(&made, &VerifyLimits::default()).unwrap();
    let rank = &mut made.ranks[0];
    let f = rank.iter().position(|a| *a == Action::compute(Compute::F, 2, 0)).unwrap();
    let slice = rank.remove(f);
    rank.insert(0, slice);
    let said = verify(&made, &VerifyLimits::default()).unwrap_err().to_string();
    assert!(said.starts_with("deadlock: "), "{said}");
    let program = lower(&made, &LowerOptions::default());
    let said = verify(&program, &VerifyLimits::default()).unwrap_err().to_string();
    assert!(said.starts_with("deadlock: "), "{said}");
}

#[test]
fn nothing_of_a_split_head_is_in_a_warm_up() {
    let shape = Shape { pp: 4, virtual_stages: 2, micro_batches: 6, unit: 3 };
    let made = generate_split("zeropp", &shape, &[16; 4], None).unwrap();
    let options = LowerOptions { sync: OptimizerSync::Late, ..LowerOptions::default() };
    let late = lower(&made, &options);
    verify(&late, &VerifyLimits::default()).unwrap();
    let ordered = in_issue_order(&late);
    verify(&ordered, &VerifyLimits::default()).unwrap();
    verify_issue_order(&ordered).unwrap();
    let mut changed = late.clone();
    let from = at(&changed, 1, recv(HeadMessage::Input, 0, 3));
    let receive = changed.ranks[1].remove(from);
    let to = at(&changed, 1, Action::Validate);
    changed.ranks[1].insert(to, receive);
    let said = verify(&changed, &VerifyLimits::default()).unwrap_err().to_string();
    assert!(said.contains("one is before the rank's validation"), "{said}");
}
