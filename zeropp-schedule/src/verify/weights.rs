//! Weights and gradients: what computes has its weights, what was gathered is freed,
//! every gradient is reduced once per stage and unit after its last W, one at a time, the step
//! comes last.

use super::{Enough, Fault, Faults, VerifyError, VerifyLimits, fault};
use crate::ir::{Action, Compute, Schedule, Task};

/// The state of one stage while its rank's program is walked.
#[derive(Clone, Default)]
struct StageWeights {
    /// Index of the AG whose weights are resident.
    gathered: Option<usize>,
    /// Units reduced so far.
    reduced: usize,
    /// W of the unit that is being added up.
    added: usize,
    /// Index of its replica reduction.
    replicas: Option<usize>,
}

/// Checks every rank's list by itself; of what is no `program`, gathers and frees only.
pub(super) fn check(
    schedule: &Schedule,
    program: bool,
    limits: &VerifyLimits,
    faults: &mut Faults,
) -> Result<(), Enough> {
    let units = schedule.unit_table();
    let reduces_replicas =
        schedule.ranks.iter().flatten().any(|a| matches!(a, Action::ReplicaReduce { .. }));
    let retires = schedule.ranks.iter().flatten().any(|a| matches!(a, Action::Retire { .. }));
    let mut stages = vec![StageWeights::default(); schedule.cells()];
    for (rank, actions) in schedule.ranks.iter().enumerate() {
        let mut walk = WeightsWalk {
            schedule,
            rank,
            program,
            limits,
            units: &units,
            stages: &mut stages,
            resident: 0,
            retires,
            reducing: None,
            stepped: false,
        };
        // The stages of which something was wrong; more of them would be what follows from it.
        let mut spoilt = Vec::new();
        for (index, action) in actions.iter().enumerate() {
            match walk.step(index, action) {
                Err(f) if !spoilt.contains(&action.stage()) => {
                    spoilt.push(action.stage());
                    faults.note(fault(schedule, rank, index, f))?;
                }
                _ => {}
            }
        }
        let (stepped, reducing) = (walk.stepped, walk.reducing.filter(|_| retires));
        if spoilt.is_empty() {
            let reduces = program && !limits.forward_only;
            faults.note(at_end(schedule, reduces, &stages, rank, reduces_replicas))?;
            let retire = reducing.map(|stage| Action::Retire { stage });
            let missing = |action| VerifyError::Missing { rank, action, unit: None };
            faults.note(retire.map_or(Ok(()), |action| Err(missing(action))))?;
        }
        if program && limits.optimizer_step && !limits.forward_only && !stepped {
            let action = Action::OptimizerStep;
            faults.note(Err(VerifyError::Missing { rank, action, unit: None }))?;
        }
    }
    Ok(())
}

/// One rank's walk.
struct WeightsWalk<'a> {
    schedule: &'a Schedule,
    rank: usize,
    program: bool,
    limits: &'a VerifyLimits,
    units: &'a [usize],
    stages: &'a mut [StageWeights],
    resident: usize,
    /// Whether reductions end where the program says so; without, at the next one.
    retires: bool,
    /// The stage whose reduction is under way.
    reducing: Option<usize>,
    stepped: bool,
}

impl WeightsWalk<'_> {
    fn step(&mut self, index: usize, action: &Action) -> Result<(), Fault> {
        if self.stepped {
            return Err(Fault::AfterStep);
        }
        match *action {
            Action::AllGather { stage } => self.gather(stage, index),
            Action::Free { stage } => {
                let state = self.stage(stage);
                state.gathered.take().ok_or(Fault::NotGathered { stage })?;
                self.resident -= usize::from(self.is_counted(stage));
                Ok(())
            }
            Action::ReduceScatter { stage } => self.reduce(stage),
            Action::ReplicaReduce { stage } => self.reduce_replicas(stage, index),
            Action::Retire { stage } => {
                match self.reducing.take_if(|under_way| *under_way == stage) {
                    Some(_) => Ok(()),
                    None => Err(Fault::NotReducing { stage }),
                }
            }
            Action::OptimizerStep => {
                self.stepped = true;
                self.retired()
            }
            Action::Send { .. }
            | Action::Recv { .. }
            | Action::SendHead { .. }
            | Action::RecvHead { .. }
            | Action::Out { .. }
            | Action::Gone { .. }
            | Action::In { .. }
            | Action::Validate => Ok(()),
            Action::Compute { .. } | Action::Overlap { .. } => {
                action.computes().try_for_each(|Task { kind, stage, micro_batch }| {
                    self.compute(kind, stage, micro_batch)
                })
            }
        }
    }

    fn stage(&mut self, stage: usize) -> &mut StageWeights {
        &mut self.stages[self.schedule.cell(self.rank, stage)]
    }

    /// Whether it is one of the stages that may be gathered at once: a slice of the head is beside
    /// them.
    fn is_counted(&self, stage: usize) -> bool {
        self.schedule.wide_stage() != Some(stage)
    }

    fn compute(&mut self, kind: Compute, stage: usize, micro_batch: usize) -> Result<(), Fault> {
        let state = &mut self.stages[self.schedule.cell(self.rank, stage)];
        if kind.needs_weights() && state.gathered.is_none() {
            return Err(Fault::NotGathered { stage });
        }
        if self.program && matches!(kind, Compute::W | Compute::BW) {
            // A W of an earlier unit cannot come: that unit was complete when it was reduced.
            if self.units[micro_batch] > state.reduced {
                return Err(Fault::NotReduced { unit: state.reduced });
            }
            state.added += 1;
        }
        Ok(())
    }

    fn gather(&mut self, stage: usize, index: usize) -> Result<(), Fault> {
        if let Some(since) = self.stage(stage).gathered.replace(index) {
            return Err(Fault::GatheredTwice { stage, since });
        }
        self.resident += usize::from(self.is_counted(stage));
        let resident = self.resident;
        match self.limits.gathered_max {
            Some(limit) if resident > limit => Err(Fault::GatheredLimit { resident, limit }),
            _ => Ok(()),
        }
    }

    /// Refuses a reduction that is still under way.
    fn retired(&mut self) -> Result<(), Fault> {
        match self.reducing.take().filter(|_| self.retires) {
            Some(stage) => Err(Fault::NotRetired { stage }),
            None => Ok(()),
        }
    }

    fn reduce(&mut self, stage: usize) -> Result<(), Fault> {
        let state = &mut self.stages[self.schedule.cell(self.rank, stage)];
        let (unit, done) = (state.reduced, state.added);
        match self.schedule.units.get(unit).copied() {
            Some(size) if done == size => {
                state.reduced += 1;
                state.added = 0;
                let retired = self.retired();
                self.reducing = Some(stage);
                retired
            }
            Some(size) if unit == 0 || done > 0 => Err(Fault::ReducedEarly { unit, done, size }),
            _ => Err(Fault::ReducedTwice),
        }
    }

    fn reduce_replicas(&mut self, stage: usize, index: usize) -> Result<(), Fault> {
        let units = self.schedule.units.len();
        let state = self.stage(stage);
        if state.reduced < units {
            return Err(Fault::NotReduced { unit: state.reduced });
        }
        match state.replicas.replace(index) {
            Some(first) => Err(Fault::Duplicate { first }),
            None => Ok(()),
        }
    }
}

/// What has to be done by the end of a rank's program.
fn at_end(
    schedule: &Schedule,
    reduces: bool,
    stages: &[StageWeights],
    rank: usize,
    replicas: bool,
) -> Result<(), VerifyError> {
    let slice = schedule.wide_stage().filter(|wide| schedule.has(rank, *wide));
    for stage in schedule.stages_of(rank).into_iter().chain(slice) {
        let state = &stages[schedule.cell(rank, stage)];
        if let Some(index) = state.gathered {
            return fault(schedule, rank, index, Fault::NeverFreed);
        }
        let units = schedule.units.len();
        if reduces && state.reduced < units {
            let action = Action::ReduceScatter { stage };
            return Err(VerifyError::Missing { rank, action, unit: Some(state.reduced) });
        }
        if replicas && state.replicas.is_none() {
            let action = Action::ReplicaReduce { stage };
            return Err(VerifyError::Missing { rank, action, unit: None });
        }
    }
    Ok(())
}
