//! Order on one rank: F before B before W, hand-over between stages of one rank, the order of W
//! and of the last stage's F, and how many activations are alive.

use super::tables::Tables;
use super::{Enough, Fault, Faults, VerifyLimits, fault};
use crate::ir::{Action, Compute, Schedule, Task};

/// Checks that nothing is there but forwards and what they need.
pub(super) fn forwards_only(schedule: &Schedule, faults: &mut Faults) -> Result<(), Enough> {
    for (rank, actions) in schedule.ranks.iter().enumerate() {
        for (index, action) in actions.iter().enumerate() {
            if !action.row().is_forward {
                faults.note(fault(schedule, rank, index, Fault::NotForward))?;
            }
        }
    }
    Ok(())
}

/// Checks every rank's list by itself. Where something is missing, which is reported already, what
/// would follow from that is left out.
pub(super) fn check(
    schedule: &Schedule,
    tables: &Tables,
    limits: &VerifyLimits,
    faults: &mut Faults,
) -> Result<(), Enough> {
    let gaps = !faults.found.is_empty();
    let is_reported = |rank: usize, fault: &Fault| match fault {
        Fault::NothingBefore(task) | Fault::NoSliceBefore(task) => {
            let cell = schedule.cell(rank, task.stage);
            tables.compute(task.kind, cell, task.micro_batch).is_none()
        }
        Fault::ActivationLimit { .. } => true,
        _ => false,
    };
    let mut last_w = vec![None; schedule.cells()];
    let mut last_head = None;
    for (rank, actions) in schedule.ranks.iter().enumerate() {
        if schedule.wide_stage().is_some() {
            last_head = None;
        }
        let mut walk = OrderWalk {
            schedule,
            rank,
            tables,
            limits,
            last_w: &mut last_w,
            head: schedule.wide_stage().unwrap_or(schedule.stages() - 1),
            last_head: &mut last_head,
            alive: 0,
        };
        for (index, action) in actions.iter().enumerate() {
            let kept = walk.copy(action).or_else(|f| fault(schedule, rank, index, f));
            faults.note(kept.or_else(|e| if gaps { Ok(()) } else { Err(e) }))?;
            for compute in action.computes() {
                let kept = before(schedule, tables, compute, rank, index)
                    .and_then(|()| walk.step(compute));
                let kept =
                    kept.or_else(|f| if gaps && is_reported(rank, &f) { Ok(()) } else { Err(f) });
                faults.note(kept.or_else(|f| fault(schedule, rank, index, f)))?;
            }
        }
    }
    Ok(())
}

/// One rank's walk.
struct OrderWalk<'a> {
    schedule: &'a Schedule,
    rank: usize,
    tables: &'a Tables,
    limits: &'a VerifyLimits,
    /// The last W of each stage.
    last_w: &'a mut [Option<usize>],
    /// The stage that has the head, and the last of its forwards with gradients, on this rank where
    /// it is split.
    head: usize,
    last_head: &'a mut Option<usize>,
    /// Micro-batches, counted per stage, whose activations are kept.
    alive: usize,
}

impl OrderWalk<'_> {
    fn step(&mut self, Task { kind, stage, micro_batch }: Task) -> Result<(), Fault> {
        let cell = self.schedule.cell(self.rank, stage);
        let place = |micro_batch| self.schedule.backward_place(stage, micro_batch);
        let is_before = |one, other| place(one) < place(other);
        if self.limits.w_in_order && matches!(kind, Compute::W | Compute::BW) {
            match self.last_w[cell].replace(micro_batch) {
                Some(after) if is_before(micro_batch, after) => {
                    let slices = self.schedule.slices_per_sample();
                    let is_wide = self.schedule.wide_stage() == Some(stage);
                    return Err(match slices {
                        _ if is_wide => Fault::WeightOrder { stage, after },
                        1 => Fault::WeightOrder { stage, after },
                        _ => Fault::SliceWeightOrder { stage, after },
                    });
                }
                _ => {}
            }
        }
        let recomputes = self.tables.compute(Compute::R, cell, micro_batch).is_some();
        let with_gradients =
            kind == Compute::R || kind == Compute::F && !recomputes && !self.limits.forward_only;
        let is_head = stage == self.head;
        if self.limits.w_in_order && with_gradients && is_head {
            match self.last_head.replace(micro_batch) {
                Some(after) if after > micro_batch => {
                    return Err(Fault::HeadOrder { stage, after });
                }
                _ => {}
            }
        }
        match kind {
            Compute::R => self.alive += 1,
            Compute::F if with_gradients => self.alive += 1,
            // An R that comes after its B, which makes this 0, is a fault of its own.
            Compute::B | Compute::BW => self.alive = self.alive.saturating_sub(1),
            Compute::F | Compute::W => {}
        }
        self.within_limit()
    }

    /// What copies out and in do to what is kept; of a stage that recomputes nothing is.
    fn copy(&mut self, action: &Action) -> Result<(), Fault> {
        let (Action::Gone { stage, micro_batch } | Action::In { stage, micro_batch }) = *action
        else {
            return Ok(());
        };
        if self.tables.compute(Compute::R, stage, micro_batch).is_some() {
            return Ok(());
        }
        match action {
            // One that is there twice, or before its F, is a fault of its own.
            Action::Gone { .. } => self.alive = self.alive.saturating_sub(1),
            _ => self.alive += 1,
        }
        self.within_limit()
    }

    fn within_limit(&self) -> Result<(), Fault> {
        let alive = self.alive;
        match self.limits.activations_max.filter(|limit| alive > *limit) {
            Some(limit) => Err(Fault::ActivationLimit { alive, limit }),
            None => Ok(()),
        }
    }
}

/// What must come before `compute` on its own rank. In an overlapped pair F comes before BW.
fn before(
    schedule: &Schedule,
    tables: &Tables,
    Task { kind, stage, micro_batch: i }: Task,
    rank: usize,
    index: usize,
) -> Result<(), Fault> {
    let at = |kind| tables.compute(kind, schedule.cell(rank, stage), i);
    let f_before = || match at(Compute::F) {
        Some(f) if f <= index => Ok(()),
        _ => Err(Fault::NothingBefore(Task { kind: Compute::F, stage, micro_batch: i })),
    };
    match kind {
        Compute::F => {}
        Compute::B | Compute::BW => f_before()?,
        Compute::W => {
            if at(Compute::B).is_none_or(|b| b > index) {
                return Err(Fault::NothingBefore(Task { kind: Compute::B, stage, micro_batch: i }));
            }
        }
        Compute::R => {
            f_before()?;
            if tables.backward(stage, i).is_some_and(|b| b < index) {
                let kind = if at(Compute::B).is_some() { Compute::B } else { Compute::BW };
                return Err(Fault::RecomputeLate(Task { kind, stage, micro_batch: i }));
            }
        }
    }
    other_slice(schedule, tables, Task { kind, stage, micro_batch: i }, rank, index)?;
    // The neighbour on the same rank must have run before.
    let here = tables.head.as_ref().and_then(|head| head.takes_here(rank, kind, stage));
    if let Some(taken) = here {
        let stage = if taken == Compute::F { stage - 1 } else { stage + 1 };
        return match tables.compute(taken, schedule.cell(rank, stage), i) {
            Some(p) if p < index => Ok(()),
            _ => Err(Fault::NothingBefore(Task { kind: taken, stage, micro_batch: i })),
        };
    }
    let Some(message) = kind.needs(stage, schedule.stages()) else { return Ok(()) };
    if schedule.source(message, stage).is_some() {
        return Ok(());
    }
    let from = message.producer(stage, schedule.stages()).expect("it needs a message");
    let producer = producer(tables, kind, from, i);
    match tables.compute(producer.kind, from, i) {
        Some(p) if p < index => Ok(()),
        _ => Err(Fault::NothingBefore(producer)),
    }
}

/// The slice of the same sample and stage that must come before `task`: for an F the one before
/// it, whose keys and values it needs; for a backward the one behind it, which adds to the
/// gradients of its keys and values. So an R, which is between the two of its own slice, finds the
/// keys and values of all slices before it. A split head has no keys and values.
fn other_slice(
    schedule: &Schedule,
    tables: &Tables,
    Task { kind, stage, micro_batch: i }: Task,
    rank: usize,
    index: usize,
) -> Result<(), Fault> {
    let slices = schedule.slices_per_sample();
    let (other, kinds) = match kind {
        _ if schedule.wide_stage() == Some(stage) => return Ok(()),
        Compute::F if i % slices > 0 => (i - 1, &[Compute::F][..]),
        Compute::B | Compute::BW if i % slices + 1 < slices => {
            (i + 1, &[Compute::B, Compute::BW][..])
        }
        _ => return Ok(()),
    };
    let cell = schedule.cell(rank, stage);
    let found = kinds.iter().find_map(|kind| Some((*kind, tables.compute(*kind, cell, other)?)));
    match found {
        Some((_, at)) if at < index => Ok(()),
        found => {
            let kind = found.map_or(kind, |(kind, _)| kind);
            Err(Fault::NoSliceBefore(Task { kind, stage, micro_batch: other }))
        }
    }
}

/// The compute action of stage `from` whose message a `kind` of its neighbour takes.
pub(super) fn producer(tables: &Tables, kind: Compute, from: usize, micro_batch: usize) -> Task {
    let split = tables.compute(Compute::B, from, micro_batch).is_some();
    let kind = match kind {
        Compute::B | Compute::BW if split => Compute::B,
        Compute::B | Compute::BW => Compute::BW,
        other => other,
    };
    Task { kind, stage: from, micro_batch }
}
