//! Which activations leave a rank's memory between forward and backward, and when.

use std::collections::VecDeque;

use super::Inserts;
use crate::ir::{Action, Compute, Schedule, Task};
use crate::schedules::{Kind, StepForm};

/// Compute actions that a copy has for itself, at least.
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

/// Copies of as many micro-batches of each unit as `chosen` says. Those that come in do so behind
/// the first `warm_up` compute actions, which may have to run again.
pub(super) fn add_copies(
    schedule: &Schedule,
    program: &[Action],
    chosen: Chosen,
    warm_up: usize,
    inserts: &mut Inserts,
) {
    let mut under_way: VecDeque<(Action, usize)> = VecDeque::new();
    let unit = schedule.units.iter().copied().max().unwrap_or(1);
    // As many as there are to the next one's: a link that is as fast as that is never waited for.
    let computes = COPY_COMPUTES.max(chosen.apart(unit));
    let phases = phases(schedule, program, chosen.leaves_some(unit));
    for Kept { stage, micro_batch, forward, needed } in kept(schedule, program, chosen) {
        // There is time for the copy out, and for the one in behind the warm-up.
        let comes = needed.saturating_sub(computes);
        let soonest = forward + computes;
        if comes <= soonest || comes < warm_up {
            continue;
        }
        let later = phases[micro_batch].later(forward);
        let last = (soonest + later).min(comes - 1);
        under_way.retain(|(gone, last)| {
            let is_over = *last < forward;
            if is_over {
                inserts.after(*last, *gone);
            }
            !is_over
        });
        if under_way.len() >= COPIES_MAX + later / computes
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

/// Where a rank's forwards of a unit begin, its first backward, and its last forward.
#[derive(Clone, Copy, Default)]
struct Phase {
    begins: usize,
    backward: usize,
    ends: usize,
}

impl Phase {
    /// How much later a copy out that begins at `forward` may end: a rank holds most when its last
    /// forward is done, as what W of its last stage need is there by then. So copies may fall
    /// behind its other stages' forwards as long as they are through by that.
    fn later(self, forward: usize) -> usize {
        let Phase { begins, backward, ends } = self;
        match ends > backward && backward > begins {
            true => forward.saturating_sub(begins) * (ends - backward) / (backward - begins),
            false => 0,
        }
    }
}

/// That of each micro-batch's unit, in a kind that goes through a step in units, where some of a
/// unit stay: else there is as little in memory as can be, and no time.
fn phases(schedule: &Schedule, program: &[Action], leaves_some: bool) -> Vec<Phase> {
    let mut phases = vec![Phase::default(); schedule.units.len()];
    let of_unit = |(unit, size): (usize, &usize)| std::iter::repeat_n(unit, *size);
    let units: Vec<usize> = schedule.units.iter().enumerate().flat_map(of_unit).collect();
    let in_units = Kind::find(&schedule.kind).is_some_and(|kind| kind.step == StepForm::Units);
    let mut begun = vec![false; phases.len()];
    let program = if in_units && leaves_some { program } else { &[] };
    for (position, action) in program.iter().enumerate() {
        for Task { kind, micro_batch, .. } in action.computes() {
            let (phase, begun) = (&mut phases[units[micro_batch]], &mut begun[units[micro_batch]]);
            match kind {
                Compute::F if !*begun => (phase.begins, *begun) = (position, true),
                Compute::F => phase.ends = position,
                _ if phase.backward == 0 => phase.backward = position,
                _ => {}
            }
        }
    }
    units.into_iter().map(|unit| phases[unit]).collect()
}

/// How many micro-batches of each unit go out: as many of which R makes nothing again, as far apart
/// as they can be, so that a link is always as busy; and, where all of these do, the first of the
/// others, of which there are inputs.
#[derive(Clone, Copy)]
pub(super) struct Chosen {
    pub(super) out: usize,
    pub(super) redone: usize,
    /// None of the first of several units.
    pub(super) later: bool,
}

/// The micro-batches of the first of several units.
pub(super) fn staying(schedule: &Schedule) -> usize {
    schedule.units.first().filter(|_| schedule.units.len() > 1).copied().unwrap_or(0)
}

impl Chosen {
    /// How many of a unit R makes again, of the others how many go out, and of how many.
    fn of(self, unit: usize) -> (usize, usize, usize) {
        let first = self.redone.min(unit);
        (first, self.out.min(unit - first), unit - first)
    }

    /// Whether micro-batch `index` of a unit of `unit` is one of them.
    fn has(self, index: usize, unit: usize) -> bool {
        let (first, out, others) = self.of(unit);
        match index.checked_sub(first) {
            Some(index) => index * out % others < out,
            None => index < self.out - out,
        }
    }

    /// From one whole one to the next in a unit of `unit`, and one more where these are not all as
    /// far apart; 0 where only inputs go out.
    fn apart(self, unit: usize) -> usize {
        match self.of(unit) {
            (_, 0, _) => 0,
            (0, out, others) if others.is_multiple_of(out) => others / out,
            (_, out, _) => unit.div_ceil(out) + 1,
        }
    }

    /// Whether some whole ones of a unit stay.
    fn leaves_some(self, unit: usize) -> bool {
        let (_, out, others) = self.of(unit);
        out < others
    }
}

/// What the program keeps of the micro-batches that go out, in the order of their F. A split head's
/// slices are not among them: they run forward and backward at once.
fn kept(schedule: &Schedule, program: &[Action], chosen: Chosen) -> Vec<Kept> {
    let of_unit = |unit: &usize| (0..*unit).map(|i| chosen.has(i, *unit)).collect::<Vec<_>>();
    let mut goes_out: Vec<bool> = schedule.units.iter().flat_map(of_unit).collect();
    if chosen.later {
        goes_out[..staying(schedule)].fill(false);
    }
    let micro_batches = schedule.micro_batches();
    let mut at = vec![None; schedule.stages() * micro_batches];
    let mut kept: Vec<Kept> = Vec::new();
    for (position, action) in program.iter().enumerate() {
        for Task { kind, stage, micro_batch } in action.computes() {
            if schedule.wide_stage() == Some(stage) || !goes_out[micro_batch] {
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
    use crate::simulate::{Costs, simulate};
    use crate::timeline::{Lane, Span};
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
            "0F0 OUT0.0 0F1 0F2 OUT0.2 0F3 OUT0.3 GONE0.0 1F0 1B0 1F1 1B1 GONE0.2 1F2 IN0.0 1B2 \
             GONE0.3 1F3 1B3 0B0 IN0.2 1W0 0B1 IN0.3 1W1 0B2 1W2 0B3 1W3 0W0 0W1 0W2 0W3 STEP"
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
    fn those_that_go_out_are_as_far_apart_as_they_can_be() {
        let shape = Shape { pp: 2, virtual_stages: 2, micro_batches: 8, unit: 4 };
        let compact = generate("zeropp", &shape).unwrap();
        let again = |out, redone: Option<usize>| {
            let recompute = redone.is_some();
            let options = LowerOptions { out, recompute, redone, ..LowerOptions::default() };
            let program = lower(&compact, &options);
            let of = |a: &Action| match a {
                Action::Out { micro_batch, .. } => Some(*micro_batch),
                _ => None,
            };
            program.ranks.iter().flatten().filter_map(of).collect::<std::collections::BTreeSet<_>>()
        };
        let out = |out| again(out, None);
        assert!(out(0).is_empty());
        assert!(out(1).into_iter().eq([0, 4]));
        assert!(out(2).into_iter().eq([0, 2, 4, 6]));
        assert!(out(9).into_iter().eq(0..8));
        // Those that R makes again have inputs alone, which go out behind the others.
        assert!(again(2, Some(2)).into_iter().eq([2, 3, 6, 7]));
        assert!(again(2, Some(1)).into_iter().eq([1, 3, 5, 7]));
        assert!(again(3, Some(2)).into_iter().eq([0, 2, 3, 4, 6, 7]));
        assert!(again(2, Some(4)).into_iter().eq([0, 1, 4, 5]));
    }

    /// What would go out of the first of several units stays, or R makes it again where R makes
    /// some of a unit; the others are as they are.
    #[test]
    fn nothing_of_a_first_unit_goes_out_where_only_later_ones_are_asked_for() {
        let at = |program: &Schedule, of: fn(&Action) -> Option<usize>| {
            let all = program.ranks.iter().flatten().filter_map(of);
            all.collect::<std::collections::BTreeSet<_>>()
        };
        let out = |action: &Action| match *action {
            Action::Out { micro_batch, .. } => Some(micro_batch),
            _ => None,
        };
        let again = |action: &Action| match *action {
            Action::Compute { kind: Compute::R, micro_batch, .. } => Some(micro_batch),
            _ => None,
        };
        let programs = |unit, redone: Option<usize>| {
            let shape = Shape { pp: 2, virtual_stages: 2, micro_batches: 8, unit };
            let compact = generate("zeropp", &shape).unwrap();
            let recompute = redone.is_some();
            let options = LowerOptions { out: 2, recompute, redone, ..LowerOptions::default() };
            [false, true].map(|out_later| {
                let program = lower(&compact, &LowerOptions { out_later, ..options });
                verify(&program, &VerifyLimits::default()).unwrap();
                (at(&program, out), at(&program, again))
            })
        };
        for redone in [None, Some(1)] {
            let [(all, again), (later, more)] = programs(4, redone);
            assert_eq!(all.len(), 4);
            assert!(later.into_iter().eq(all.into_iter().filter(|m| *m >= 4)), "{redone:?}");
            let first = redone.map_or(0, |first| first + 2);
            assert!(more.into_iter().eq((0..first).chain(again.into_iter().filter(|m| *m >= 4))));
            // Of a step that is one unit all is as it is.
            let [one, same] = programs(8, redone);
            assert_eq!(one, same);
        }
    }

    /// Where copies out take as long as all forwards together, a step waits for two of them.
    #[test]
    fn a_link_that_is_as_fast_as_the_forwards_is_hardly_waited_for() {
        let shape = Shape { pp: 1, virtual_stages: 6, micro_batches: 8, unit: 8 };
        let compact = generate("zeropp", &shape).unwrap();
        for out in 1..=8usize {
            let program = lower(&compact, &LowerOptions { out, ..LowerOptions::default() });
            let mut costs = Costs::uniform(6, 10, 10, 10, 0);
            costs.memory.iter_mut().for_each(|bytes| bytes.activation = 1000);
            let (free, takes) = (simulate(&program, &costs).unwrap().end_ns(), 80 / out as u64);
            // A forward takes 10 ns.
            costs.file_bytes_per_s = Some(1000 * 1_000_000_000 * out as u64 / 80);
            costs.copies_apart = true;
            let timeline = simulate(&program, &costs).unwrap();
            let waits = |span: &Span| matches!(span.action, Action::Gone { .. });
            let waits = timeline.ranks[0].spans.iter().filter(|span| waits(span));
            let waited: u64 = waits.map(|span| span.end_ns - span.start_ns).sum();
            assert!(waited <= 2 * takes, "{out} of 8: {waited}");
            assert!(timeline.end_ns() <= free + 2 * takes, "{out} of 8: {}", timeline.end_ns());
        }
    }
}
