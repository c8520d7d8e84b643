//! Where weights are gathered and freed.

use super::{Inserts, Residency};
use crate::action::Lowering;
use crate::ir::{Action, Compute, Schedule, Task};

/// A longest run of weight-needing actions of one stage and unit on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Visit {
    stage: usize,
    unit: usize,
    /// Position of its first action in the rank's program.
    first: usize,
    /// Position of its last action.
    last: usize,
}

/// The visits of one rank's program, in order. The two halves of an overlapped pair are two visits
/// at one position.
pub(super) fn visits(schedule: &Schedule, program: &[Action]) -> Vec<Visit> {
    let units = schedule.unit_table();
    let mut visits: Vec<Visit> = Vec::new();
    for (position, action) in program.iter().enumerate() {
        let is_own = |t: &Task| t.kind.needs_weights() && schedule.wide_stage() != Some(t.stage);
        for Task { stage, micro_batch, .. } in action.computes().filter(is_own) {
            let unit = units[micro_batch];
            match visits.last_mut() {
                Some(v) if v.stage == stage && (v.unit == unit || v.last == position) => {
                    v.last = position;
                }
                _ => visits.push(Visit { stage, unit, first: position, last: position }),
            }
        }
    }
    visits
}

/// Where forwards of a sample and backwards of the one before it come in turn, their units are no
/// boundary for weights: a stage that both need stays.
pub(super) fn join_units(visits: &mut [Visit]) {
    visits.iter_mut().for_each(|visit| visit.unit = 0);
}

/// Per-visit gathering where the schedule is blockwise: no rank has more than 2V − 1 visits in a
/// unit.
pub(super) fn fitting(schedule: &Schedule, programs: &[Vec<Action>]) -> Residency {
    let blockwise = programs.iter().enumerate().all(|(rank, program)| {
        let mut count = vec![0; schedule.units.len()];
        visits(schedule, program).iter().for_each(|v| count[v.unit] += 1);
        let limit = 2 * schedule.stages_of(rank).len();
        count.into_iter().all(|n| n < limit)
    });
    if blockwise { Residency::PerVisit } else { Residency::LookAhead }
}

/// Inserts the AG and FREE of all visits.
pub(super) fn add_gathers(
    visits: &[Visit],
    prefetch: usize,
    residency: Residency,
    inserts: &mut Inserts,
) {
    match residency {
        Residency::LookAhead => look_ahead(visits, prefetch, inserts),
        Residency::Auto | Residency::AsWritten | Residency::PerVisit => {
            per_visit(visits, prefetch, inserts)
        }
    }
}

/// AG before the first F of each unit's slice of a split head, FREE after its last B; where the
/// next unit's F begin before that, or right behind it, they have what is there.
pub(super) fn add_slice_gathers(
    schedule: &Schedule,
    program: &[Action],
    wide: usize,
    inserts: &mut Inserts,
) {
    let units = schedule.unit_table();
    let mut all: Vec<Option<(usize, usize)>> = vec![None; schedule.units.len()];
    for (position, action) in program.iter().enumerate() {
        let needs = |t: &Task| t.kind.needs_weights() && t.stage == wide;
        for task in action.computes().filter(needs) {
            all[units[task.micro_batch]].get_or_insert((position, position)).1 = position;
        }
    }
    let mut spans: Vec<(usize, usize)> = Vec::new();
    for (first, last) in all.into_iter().flatten() {
        // A gather stands one action ahead.
        match spans.last_mut().filter(|span| first <= span.1 + 1) {
            Some(span) => span.1 = span.1.max(last),
            None => spans.push((first, last)),
        }
    }
    for (first, last) in spans {
        inserts.before(first.saturating_sub(1), Action::AllGather { stage: wide });
        inserts.after(last, Action::Free { stage: wide });
    }
}

/// What lowering keeps of one rank's actions beside computes, between the same F, B and W of its
/// `program` as before: AG and FREE if it keeps `gathers`, and all that it never makes itself.
pub(super) fn keep_written(
    actions: &[Action],
    program: &[Action],
    gathers: bool,
    inserts: &mut Inserts,
) {
    let mut position = 0;
    for (at, action) in actions.iter().enumerate() {
        if action.computes().next().is_some() {
            // An R may have been added before it, or dropped.
            let other = |a: &Action| is_recomputation(a) && a != action;
            position += program[position..].iter().take_while(|a| other(a)).count();
            position += usize::from(program.get(position) == Some(action));
            continue;
        }
        match action.row().lowering {
            // A gather ahead of a reduction stays there: both are one queue.
            Lowering::Gathers if gathers && matches!(action, Action::AllGather { .. }) => {
                match position > 0 && reduces_next(&actions[at..]) {
                    true => inserts.after(position - 1, *action),
                    false => inserts.before(position, *action),
                }
            }
            Lowering::Gathers if gathers && position > 0 => inserts.after(position - 1, *action),
            Lowering::Keeps if position > 0 => inserts.after(position - 1, *action),
            Lowering::Keeps => inserts.before(position, *action),
            Lowering::Gathers | Lowering::Recomputes | Lowering::Makes => {}
        }
    }
}

/// Whether a reduction comes before the next computation.
fn reduces_next(actions: &[Action]) -> bool {
    let before = actions.iter().take_while(|a| a.computes().next().is_none());
    before.into_iter().any(|a| matches!(a, Action::ReduceScatter { .. }))
}

fn is_recomputation(action: &Action) -> bool {
    matches!(action, Action::Compute { kind: Compute::R, .. })
}

/// AG before the first action of the visit `prefetch` places earlier, FREE after the last action.
fn per_visit(visits: &[Visit], prefetch: usize, inserts: &mut Inserts) {
    let stages = visits.iter().map(|visit| visit.stage + 1).max().unwrap_or(0);
    let mut freed_after = vec![None; stages];
    for (j, visit) in visits.iter().enumerate() {
        let stage = visit.stage;
        let early = visits[j.saturating_sub(prefetch)].first;
        let gather = Action::AllGather { stage };
        match freed_after[stage].replace(visit.last) {
            // Still resident there: right after the free, ahead of any W that follows it.
            Some(freed) if freed >= early => inserts.after(freed, gather),
            _ => inserts.before(early, gather),
        }
        inserts.after(visit.last, Action::Free { stage });
    }
}

/// Before each visit: FREE what is not among the next 1 + `prefetch` stages, AG what is missing.
fn look_ahead(visits: &[Visit], prefetch: usize, inserts: &mut Inserts) {
    let mut resident: Vec<Key> = Vec::new();
    let mut window = PrefetchWindow::default();
    for (j, visit) in visits.iter().enumerate() {
        window.advance(visits, j, prefetch);
        // Not at j = 0: nothing is resident then.
        resident.retain(|key| {
            let keep = window.contains(*key);
            if !keep {
                inserts.after(visits[j - 1].last, Action::Free { stage: key.0 });
            }
            keep
        });
        // Within an overlapped pair, what only comes later waits for the frees after it.
        let pair = j > 0 && visits[j - 1].last >= visit.first;
        for (key, _) in &window.keys {
            if resident.contains(key) {
                continue;
            }
            resident.push(*key);
            let gather = Action::AllGather { stage: key.0 };
            if pair && key.0 != visit.stage {
                inserts.after(visits[j - 1].last, gather);
            } else {
                inserts.before(visit.first, gather);
            }
        }
    }
    if let Some(end) = visits.last() {
        for (stage, _) in resident {
            inserts.after(end.last, Action::Free { stage });
        }
    }
}

/// A stage in one unit.
type Key = (usize, usize);

/// The next 1 + prefetch distinct keys from a visit on, in the order of their first use; cut before
/// a key whose stage is in it for another unit, because that stage is freed and gathered anew at
/// the boundary. Its end only moves forward, so that all windows together cost one pass.
#[derive(Default)]
struct PrefetchWindow {
    /// Keys with the number of visits they have in the window.
    keys: Vec<(Key, usize)>,
    /// The first visit after the window.
    end: usize,
}

impl PrefetchWindow {
    /// Moves the start from visit j − 1 to visit j.
    fn advance(&mut self, visits: &[Visit], j: usize, prefetch: usize) {
        if let Some(left) = j.checked_sub(1) {
            let key = (visits[left].stage, visits[left].unit);
            self.keys.iter_mut().filter(|(k, _)| *k == key).for_each(|(_, n)| *n -= 1);
            self.keys.retain(|(_, n)| *n > 0);
        }
        while let Some(visit) = visits.get(self.end) {
            let key = (visit.stage, visit.unit);
            if let Some((_, n)) = self.keys.iter_mut().find(|(k, _)| *k == key) {
                *n += 1;
            } else if self.keys.len() > prefetch
                || self.keys.iter().any(|((stage, _), _)| *stage == visit.stage)
            {
                break;
            } else {
                self.keys.push((key, 1));
            }
            self.end += 1;
        }
    }

    fn contains(&self, key: Key) -> bool {
        self.keys.iter().any(|(k, _)| *k == key)
    }
}
