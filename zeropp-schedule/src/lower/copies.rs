//! Which activations leave a rank's memory between forward and backward, and when.

use std::collections::VecDeque;

use super::Inserts;
use crate::ir::{Action, Compute, Schedule, Task};

/// Compute actions that a copy has for itself, at most.
const COPY_COMPUTES: usize = 3;
/// Copies out that are under way at once, at most.
const COPIES_MAX: usize = 2;

/// A stage and micro-batch with the places of its F and of what first needs what that keeps.
struct Kept {
    stage: usize,
    micro_batch: usize,
    forward: usize,
    needed: usize,
}

/// Copies of the first `out` micro-batches of each unit. Those that come in do so behind the first
/// `warm_up` compute actions, which may have to run again.
pub(super) fn add_copies(
    schedule: &Schedule,
    program: &[Action],
    out: usize,
    warm_up: usize,
    inserts: &mut Inserts,
) {
    let mut under_way: VecDeque<(Action, usize)> = VecDeque::new();
    for Kept { stage, micro_batch, forward, needed } in kept(schedule, program, out) {
        // There is time for the copy out, and for the one in behind the warm-up.
        let comes = needed.saturating_sub(COPY_COMPUTES);
        let last = forward + COPY_COMPUTES;
        if comes <= last || comes < warm_up {
            continue;
        }
        under_way.retain(|(gone, last)| {
            let is_over = *last < forward;
            if is_over {
                inserts.after(*last, *gone);
            }
            !is_over
        });
        if under_way.len() == COPIES_MAX
            && let Some((gone, _)) = under_way.pop_front()
        {
            inserts.after(forward, gone);
        }
        inserts.after(forward, Action::Out { stage, micro_batch });
        under_way.push_back((Action::Gone { stage, micro_batch }, last));
        inserts.before(comes, Action::In { stage, micro_batch });
    }
    under_way.into_iter().for_each(|(gone, last)| inserts.after(last, gone));
}

/// What the program keeps of the first `out` micro-batches of each unit, in the order of their F. A
/// split head's slices are not among them: they run forward and backward at once.
fn kept(schedule: &Schedule, program: &[Action], out: usize) -> Vec<Kept> {
    let in_unit: Vec<usize> = schedule.units.iter().flat_map(|n| 0..*n).collect();
    let micro_batches = schedule.micro_batches();
    let mut at = vec![None; schedule.stages() * micro_batches];
    let mut kept: Vec<Kept> = Vec::new();
    for (position, action) in program.iter().enumerate() {
        for Task { kind, stage, micro_batch } in action.computes() {
            if schedule.wide_stage() == Some(stage) || in_unit[micro_batch] >= out {
                continue;
            }
            let place = &mut at[stage * micro_batches + micro_batch];
            match kind {
                Compute::F => {
                    *place = Some(kept.len());
                    let needed = usize::MAX;
                    kept.push(Kept { stage, micro_batch, forward: position, needed });
                }
                Compute::R | Compute::B | Compute::BW => {
                    if let Some(at) = *place {
                        kept[at].needed = kept[at].needed.min(position);
                    }
                }
                Compute::W => {}
            }
        }
    }
    kept.retain(|kept| kept.needed < usize::MAX);
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lower::{LowerOptions, OptimizerSync, lower};
    use crate::memory::{StageBytes, predict};
    use crate::schedules::{KINDS, Shape, generate};
    use crate::timeline::Lane;
    use crate::verify::{VerifyLimits, verify};

    fn text(program: &[Action]) -> String {
        let shown = program.iter().filter(|a| a.lane() != Lane::Communication);
        shown.map(Action::to_string).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn copies_stand_where_the_rule_says() {
        let shape = Shape { pp: 1, virtual_stages: 2, micro_batches: 4, unit: 4 };
        let compact = generate("zeropp", &shape).unwrap();
        let all = lower(&compact, &LowerOptions { out: 3, ..LowerOptions::default() });
        assert_eq!(
            text(&all.ranks[0]),
            "0F0 OUT0.0 0F1 OUT0.1 0F2 GONE0.0 OUT0.2 0F3 1F0 GONE0.1 1B0 GONE0.2 1F1 1B1 1F2 \
             IN0.0 1B2 1F3 IN0.1 1B3 0B0 IN0.2 1W0 0B1 1W1 0B2 1W2 0B3 1W3 0W0 0W1 0W2 0W3 STEP"
        );
    }

    /// With copies a program does the same computes and messages in the same order, is verified,
    /// and holds no more at any time; none is asked for, none is there.
    #[test]
    fn copies_change_nothing_else_and_hold_less() {
        let bytes = StageBytes { input: 10, activation: 100, stash: 70, ..Default::default() };
        let mut gained = 0;
        for kind in KINDS.iter() {
            for (pp, micro_batches, unit) in [(1, 6, 6), (2, 8, 4), (4, 8, 8)] {
                let virtual_stages = kind.stages.default_number();
                let shape = Shape { pp, virtual_stages, micro_batches, unit };
                let Ok(compact) = generate(kind.name, &shape) else { continue };
                for (recompute, sync, out) in [
                    (false, OptimizerSync::Barrier, usize::MAX),
                    (false, OptimizerSync::Late, 2),
                    (true, OptimizerSync::Barrier, 3),
                ] {
                    let options = LowerOptions { recompute, sync, ..LowerOptions::default() };
                    let plain = lower(&compact, &options);
                    let copies = lower(&compact, &LowerOptions { out, ..options });
                    let what = format!("{} {shape:?} {recompute} {out}", kind.name);
                    verify(&copies, &VerifyLimits::default()).expect(&what);
                    assert_eq!(lower(&copies, &options).ranks, plain.ranks, "{what}");
                    let stays = |a: &&Action| a.lane() != Lane::Copy;
                    let rest = copies.ranks.iter().map(|r| r.iter().filter(stays).copied());
                    assert!(rest.map(Vec::from_iter).eq(plain.ranks.iter().cloned()), "{what}");
                    let stages = vec![bytes; shape.stages()];
                    let held = predict(&copies, &stages).into_iter().zip(predict(&plain, &stages));
                    for (copied, plain) in held {
                        assert!(copied.activation <= plain.activation, "{what}");
                        gained += plain.activation - copied.activation;
                        let is_less = copied.activation < plain.activation;
                        assert!(!is_less || copied.host_activation > 0, "{what}");
                    }
                }
            }
        }
        assert!(gained > 10_000, "{gained}");
    }

    #[test]
    fn the_first_of_each_unit_go_out() {
        let shape = Shape { pp: 2, virtual_stages: 2, micro_batches: 8, unit: 4 };
        let compact = generate("zeropp", &shape).unwrap();
        let out = |out| {
            let program = lower(&compact, &LowerOptions { out, ..LowerOptions::default() });
            let of = |a: &Action| match a {
                Action::Out { micro_batch, .. } => Some(*micro_batch),
                _ => None,
            };
            program.ranks.iter().flatten().filter_map(of).collect::<std::collections::BTreeSet<_>>()
        };
        assert!(out(0).is_empty());
        assert!(out(2).into_iter().eq([0, 1, 4, 5]));
        assert!(out(9).into_iter().eq(0..8));
    }
}
