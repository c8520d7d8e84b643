//! Where every action is; finds duplicates, strangers and gaps on the way.

use super::{Enough, Fault, Faults, VerifyError, fault};
use crate::action::{ACTIONS, ActionKind, Operand};
use crate::head::{End, HeadTree};
use crate::ir::{Action, Compute, Message, Schedule};

const NOWHERE: u32 = u32::MAX;

/// The index, in its rank's list, of everything that may occur once per stage and micro-batch.
pub(super) struct Tables {
    micro_batches: usize,
    /// A table for each kind of action, by its row.
    index: Vec<Vec<u32>>,
    /// The messages of a split head.
    pub(super) head: Option<HeadTree>,
    /// Where each is sent, and where it is received.
    head_ends: [Vec<u32>; 2],
}

fn end_of(is_send: bool, message: Message) -> ActionKind {
    match (is_send, message) {
        (true, Message::Activation) => ActionKind::SendActivation,
        (true, Message::Gradient) => ActionKind::SendGradient,
        (false, Message::Activation) => ActionKind::RecvActivation,
        (false, Message::Gradient) => ActionKind::RecvGradient,
    }
}

impl Tables {
    /// Tables of a schedule whose actions all name known stages and micro-batches on the right
    /// ranks, none twice, with one F and one backward each. Those that do not are faults, and not
    /// in the tables. With `forward_only` there are no backwards.
    pub(super) fn new(
        schedule: &Schedule,
        forward_only: bool,
        faults: &mut Faults,
    ) -> Result<Tables, Enough> {
        // A table costs nothing until its kind occurs.
        let index = vec![Vec::new(); ACTIONS.len()];
        let (head, micro_batches) = (HeadTree::of(schedule), schedule.micro_batches());
        let edges = head.as_ref().map_or(0, |head| head.edges.len());
        let head_ends = [(); 2].map(|()| vec![NOWHERE; edges * micro_batches]);
        let mut tables = Tables { micro_batches, index, head, head_ends };
        for (rank, actions) in schedule.ranks.iter().enumerate() {
            for (index, action) in actions.iter().enumerate() {
                let entered = tables.enter(schedule, rank, index, action);
                faults.note(entered.or_else(|f| fault(schedule, rank, index, f)))?;
            }
        }
        tables.complete(schedule, forward_only, faults)?;
        Ok(tables)
    }

    fn enter(
        &mut self,
        schedule: &Schedule,
        rank: usize,
        index: usize,
        action: &Action,
    ) -> Result<(), Fault> {
        let size = schedule.cells() * self.micro_batches;
        let at_home = |stage: usize| match schedule.placement.get(stage) {
            _ if schedule.has(rank, stage) => Ok(()),
            Some(home) => Err(Fault::WrongRank { stage, home: *home }),
            None => Err(Fault::NoBlocks),
        };
        if let Some(end) = self.head.as_ref().and_then(|head| head.end(rank, action)) {
            let End { edge, is_send, micro_batch } = end.map_err(|()| Fault::NotOfHead)?;
            self.known(schedule, 0, micro_batch)?;
            let ends = &mut self.head_ends[usize::from(!is_send)];
            return enter(&mut ends[edge * self.micro_batches + micro_batch], index);
        }
        if let Operand::Peer(..) = action.parts().1 {
            return Err(Fault::NotOfHead);
        }
        for (table, stage, micro_batch) in entries(action) {
            self.known(schedule, stage, micro_batch)?;
            at_home(stage)?;
            if schedule.wide_stage() == Some(stage) && !is_of_slice(table) {
                return Err(Fault::NotOfHead);
            }
            let table = &mut self.index[table as usize];
            if table.is_empty() {
                table.resize(size, NOWHERE);
            }
            let cell = schedule.cell(rank, stage);
            enter(&mut table[cell * self.micro_batches + micro_batch], index)?;
        }
        if let Some(stage) = bare_stage(action) {
            self.known(schedule, stage, 0)?;
            at_home(stage)?;
        }
        Ok(())
    }

    fn known(&self, schedule: &Schedule, stage: usize, micro_batch: usize) -> Result<(), Fault> {
        let (stages, micro_batches) = (schedule.stages(), self.micro_batches);
        if stage >= stages && schedule.wide_stage() != Some(stage) {
            return Err(Fault::UnknownStage { stages });
        }
        if micro_batch >= micro_batches {
            return Err(Fault::UnknownMicroBatch { micro_batches });
        }
        Ok(())
    }

    /// Index of a compute action of a stage or, by its place ([`Schedule::cell`]), of a slice.
    pub(super) fn compute(&self, kind: Compute, cell: usize, micro_batch: usize) -> Option<usize> {
        self.get(kind.action(), cell, micro_batch)
    }

    /// Index of the send or the receive of a split head's message.
    pub(super) fn head_end(&self, End { edge, is_send, micro_batch }: End) -> Option<usize> {
        let ends = &self.head_ends[usize::from(!is_send)];
        let index = ends[edge * self.micro_batches + micro_batch];
        (index != NOWHERE).then_some(index as usize)
    }

    /// Index of B or BW.
    pub(super) fn backward(&self, stage: usize, micro_batch: usize) -> Option<usize> {
        let find = |kind| self.compute(kind, stage, micro_batch);
        find(Compute::B).or_else(|| find(Compute::BW))
    }

    /// Index of the send of what `stage` produces.
    pub(super) fn send(&self, message: Message, stage: usize, micro_batch: usize) -> Option<usize> {
        self.get(end_of(true, message), stage, micro_batch)
    }

    /// Index of the receive of what `stage` takes.
    pub(super) fn recv(&self, message: Message, stage: usize, micro_batch: usize) -> Option<usize> {
        self.get(end_of(false, message), stage, micro_batch)
    }

    /// Index of an action that names a stage of whole samples and a micro-batch.
    pub(super) fn of_kind(
        &self,
        kind: ActionKind,
        stage: usize,
        micro_batch: usize,
    ) -> Option<usize> {
        self.get(kind, stage, micro_batch)
    }

    fn get(&self, table: ActionKind, stage: usize, micro_batch: usize) -> Option<usize> {
        let index = *self.index[table as usize].get(stage * self.micro_batches + micro_batch)?;
        (index != NOWHERE).then_some(index as usize)
    }

    /// Each stage and micro-batch needs F, and either BW or both B and W.
    fn complete(
        &self,
        schedule: &Schedule,
        forward_only: bool,
        faults: &mut Faults,
    ) -> Result<(), Enough> {
        let own = (0..schedule.stages()).map(|stage| (schedule.placement[stage], stage));
        let ranks = schedule.wide_stage().into_iter().flat_map(|wide| {
            (0..schedule.pp()).filter(move |rank| schedule.has(*rank, wide)).map(move |r| (r, wide))
        });
        for (rank, stage) in own.chain(ranks) {
            for micro_batch in 0..self.micro_batches {
                let found = self.complete_one(schedule, rank, stage, micro_batch, forward_only);
                faults.note(found)?;
            }
        }
        Ok(())
    }

    fn complete_one(
        &self,
        schedule: &Schedule,
        rank: usize,
        stage: usize,
        micro_batch: usize,
        forward_only: bool,
    ) -> Result<(), VerifyError> {
        let at = |kind| self.compute(kind, schedule.cell(rank, stage), micro_batch);
        let is_slice = schedule.wide_stage() == Some(stage);
        let missing = |what: Compute| {
            let action = Action::compute(what, stage, micro_batch);
            Err(VerifyError::Missing { rank, action, unit: None })
        };
        if at(Compute::F).is_none() {
            return missing(Compute::F);
        }
        if forward_only {
            return Ok(());
        }
        match (at(Compute::BW), at(Compute::B), at(Compute::W)) {
            (Some(whole), Some(other), _) | (Some(whole), None, Some(other)) => {
                fault(schedule, rank, whole, Fault::WholeAndSplit { other })
            }
            (Some(_), None, None) | (None, Some(_), Some(_)) => Ok(()),
            (None, None, None) if !is_slice && !self.index[ActionKind::BW as usize].is_empty() => {
                missing(Compute::BW)
            }
            (None, None, _) => missing(Compute::B),
            (None, Some(_), None) => missing(Compute::W),
        }
    }
}

fn enter(slot: &mut u32, index: usize) -> Result<(), Fault> {
    if *slot != NOWHERE {
        return Err(Fault::Duplicate { first: *slot as usize });
    }
    *slot = index as u32;
    Ok(())
}

/// Whether slices of a head have it: F, B and W, each by itself.
fn is_of_slice(kind: ActionKind) -> bool {
    matches!(kind, ActionKind::F | ActionKind::B | ActionKind::W)
}

/// What an action enters into which table: (table, stage, micro-batch).
fn entries(action: &Action) -> impl Iterator<Item = (ActionKind, usize, usize)> + use<> {
    let (kind, place) = action.parts();
    let one = match place {
        Operand::MicroBatch(stage, micro_batch) => Some((kind, stage, micro_batch)),
        // The computes of a pair are entered one by one.
        Operand::Nothing | Operand::Stage(_) | Operand::Peer(..) | Operand::Pair(..) => None,
    };
    let pair = action.computes().filter(move |_| one.is_none());
    pair.map(|task| (task.kind.action(), task.stage, task.micro_batch)).chain(one)
}

/// The stage of an action that has no micro-batch.
fn bare_stage(action: &Action) -> Option<usize> {
    match action.parts().1 {
        Operand::Stage(stage) => Some(stage),
        Operand::Nothing | Operand::MicroBatch(..) | Operand::Peer(..) | Operand::Pair(..) => None,
    }
}
