//! Lowering: from the compute actions of a schedule to the program that ranks run, with gathers,
//! frees, reductions, sends and receives as actions of their own.

use std::collections::{HashMap, HashSet};

use crate::ir::{Action, Compute, Message, Schedule, Task};

mod issue;
mod weights;

pub use issue::in_issue_order;

/// How lowering treats weights and memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LowerOptions {
    /// Stages gathered ahead of the one in use; at most 1 + prefetch are resident at once, or two
    /// while an overlapped pair of two stages runs.
    pub prefetch: usize,
    /// Full recomputation: an R before the backward of every stage but, in schedules that split B
    /// and W, the last one of each rank, whose backward follows its forward closely (ZeroPP §3.3).
    pub recompute: bool,
    /// There are data-parallel replicas: sum every stage's gradient over them after its last unit.
    pub replicas: bool,
    /// When a stage's weights are dropped.
    pub residency: Residency,
}

impl Default for LowerOptions {
    fn default() -> LowerOptions {
        LowerOptions {
            prefetch: 1,
            recompute: false,
            replicas: false,
            residency: Residency::default(),
        }
    }
}

/// When a stage's gathered weights are dropped. A *visit* is a longest run of weight-needing
/// actions of one stage and unit on a rank; W needs no weights and does not end a visit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Residency {
    /// Gathers and frees stay where the schedule has them, if it has any. Else `PerVisit` where a
    /// rank has at most 2V − 1 visits in every unit, `LookAhead` otherwise.
    #[default]
    Auto,
    /// Every visit gathers and frees: ZeroPP's 2V − 1 gathers per rank and unit.
    PerVisit,
    /// Gathers, frees and recomputation stand where the schedule has them, which was made with a
    /// limit on them in mind; `prefetch` and `recompute` are not looked at.
    AsWritten,
    /// A stage stays while it is among the next 1 + prefetch distinct stages of the unit, for
    /// schedules that go to and fro between stages with every micro-batch.
    LookAhead,
}

/// The program of every rank for the compute actions of `schedule`, which must be a schedule that
/// [`verify`](crate::verify::verify) accepts.
///
/// * AG and FREE around each visit, as [`Residency`] says, AG `prefetch` visits ahead but never
///   while the stage is still resident;
/// * RS right after the last W of a stage and unit, AR right after the RS of the last unit;
/// * a send right after what it sends was computed; a receive posted one compute action before the
///   one that takes it, or earlier where the order of the peer's sends wants it. Neighbouring
///   stages on one rank hand over without either;
/// * R where `recompute` asks for it, and one optimizer step at the end, unless there are forwards
///   only.
///
/// Anything but F, B, W and BW in the input is dropped and made anew, so lowering twice is lowering
/// once. With [`Residency::AsWritten`] its AG, FREE and R stay, with [`Residency::Auto`] its AG and
/// FREE.
pub fn lower(schedule: &Schedule, options: &LowerOptions) -> Schedule {
    let written = options.residency == Residency::AsWritten;
    let kept = written || (options.residency == Residency::Auto && schedule.has_gathers());
    let programs = Programs::new(schedule, options.recompute, written);
    let residency = match options.residency {
        Residency::Auto if !kept => weights::fitting(schedule, &programs.ranks),
        chosen => chosen,
    };
    let trains = !schedule.is_forward_only();
    let ranks = (0..schedule.pp())
        .map(|rank| {
            let program = &programs.ranks[rank];
            let mut inserts = Inserts::default();
            programs.add_messages(rank, &mut inserts);
            if kept {
                weights::keep_gathers(&schedule.ranks[rank], program, &mut inserts);
            } else {
                let visits = weights::visits(schedule, program);
                weights::add_gathers(&visits, options.prefetch, residency, &mut inserts);
            }
            add_reductions(schedule, program, options.replicas, &mut inserts);
            let step = trains.then_some(Action::OptimizerStep);
            inserts.merge(program).into_iter().chain(step).collect()
        })
        .collect();
    Schedule { ranks, ..schedule.clone() }
}

/// Actions to insert before or after the compute actions of one rank.
#[derive(Default)]
struct Inserts(Vec<(usize, u8, Action)>);

impl Inserts {
    /// Inserts before the compute action at `position`.
    fn before(&mut self, position: usize, action: Action) {
        self.0.push((2 * position, order(&action), action));
    }

    /// Inserts after the compute action at `position`.
    fn after(&mut self, position: usize, action: Action) {
        self.0.push((2 * position + 1, order(&action), action));
    }

    /// The whole program. What goes to one place keeps the order of [`order`], then that of its
    /// insertion.
    fn merge(mut self, program: &[Action]) -> Vec<Action> {
        self.0.sort_by_key(|(slot, order, _)| (*slot, *order));
        let mut merged = Vec::with_capacity(program.len() + self.0.len());
        let mut inserts = self.0.into_iter().peekable();
        for (position, compute) in program.iter().enumerate() {
            while let Some((_, _, a)) = inserts.next_if(|(slot, ..)| *slot <= 2 * position) {
                merged.push(a);
            }
            merged.push(*compute);
        }
        merged.extend(inserts.map(|(_, _, action)| action));
        merged
    }
}

/// The order of actions inserted at one place: what other ranks wait for first, a gather only after
/// the free that makes room for it, and before the reduction, which nobody waits for yet.
fn order(action: &Action) -> u8 {
    match action {
        Action::Send { .. } => 0,
        Action::Free { .. } => 1,
        Action::AllGather { .. } => 2,
        Action::ReduceScatter { .. } => 3,
        Action::ReplicaReduce { .. } => 4,
        _ => 5,
    }
}

/// The compute actions of all ranks, recomputation included.
struct Programs<'a> {
    schedule: &'a Schedule,
    ranks: Vec<Vec<Action>>,
}

impl<'a> Programs<'a> {
    /// With `written`, R stand where they stood; else where `recompute` asks for them.
    fn new(schedule: &'a Schedule, recompute: bool, written: bool) -> Programs<'a> {
        let splits = schedule.splits_backward();
        let ranks = schedule.ranks.iter().enumerate().map(|(rank, actions)| {
            let kept = schedule.stages_of(rank).last().copied().filter(|_| splits);
            let mut program = Vec::with_capacity(actions.len());
            for action in actions {
                for Task { kind, stage, micro_batch } in action.computes() {
                    let backward = matches!(kind, Compute::B | Compute::BW);
                    if recompute && !written && backward && kept != Some(stage) {
                        program.push(Action::compute(Compute::R, stage, micro_batch));
                    }
                }
                let old_r = matches!(action, Action::Compute { kind: Compute::R, .. });
                if action.computes().next().is_some() && (written || !old_r) {
                    program.push(*action);
                }
            }
            program
        });
        Programs { schedule, ranks: ranks.collect() }
    }

    /// The messages that `from` sends to `to`, in the order of its program, as their consumers
    /// know them: (message, consuming stage, micro-batch).
    fn channel(&self, from: usize, to: usize) -> impl Iterator<Item = (Message, usize, usize)> {
        let stages = self.schedule.stages();
        self.ranks[from].iter().flat_map(|a| a.computes()).filter_map(
            move |Task { kind, stage, micro_batch }| {
                let message = kind.gives(stage, stages)?;
                let consumer = message.consumer(stage, stages)?;
                (self.schedule.destination(message, stage) == Some(to)).then_some((
                    message,
                    consumer,
                    micro_batch,
                ))
            },
        )
    }

    /// Sends after what they send; receives in the order in which each peer sends.
    fn add_messages(&self, rank: usize, inserts: &mut Inserts) {
        let stages = self.schedule.stages();
        let mut consumers = HashMap::new();
        let mut peers = Vec::new();
        for (position, action) in self.ranks[rank].iter().enumerate() {
            for Task { kind, stage, micro_batch } in action.computes() {
                if let Some(message) = kind.gives(stage, stages)
                    && self.schedule.destination(message, stage).is_some()
                {
                    inserts.after(position, Action::Send { message, stage, micro_batch });
                }
                if let Some(message) = kind.needs(stage, stages)
                    && let Some(peer) = self.schedule.source(message, stage)
                {
                    consumers.insert((message, stage, micro_batch), position);
                    if !peers.contains(&peer) {
                        peers.push(peer);
                    }
                }
            }
        }
        for peer in peers {
            // From the last message to the first, so that none is posted after a later one.
            let mut receives = Vec::new();
            let mut post = usize::MAX;
            for (message, stage, micro_batch) in
                self.channel(peer, rank).collect::<Vec<_>>().into_iter().rev()
            {
                if let Some(position) = consumers.get(&(message, stage, micro_batch)) {
                    post = post.min(position.saturating_sub(1));
                    receives.push((post, Action::Recv { message, stage, micro_batch }));
                }
            }
            receives.into_iter().rev().for_each(|(post, recv)| inserts.before(post, recv));
        }
    }
}

/// RS after the last W of each stage and unit; AR after the RS of the last unit.
fn add_reductions(schedule: &Schedule, program: &[Action], replicas: bool, inserts: &mut Inserts) {
    let units = schedule.unit_table();
    let mut reduced = HashSet::new();
    for (position, action) in program.iter().enumerate().rev() {
        for Task { kind, stage, micro_batch } in action.computes() {
            let unit = units[micro_batch];
            let adds = matches!(kind, Compute::W | Compute::BW);
            if adds && reduced.insert((stage, unit)) {
                inserts.after(position, Action::ReduceScatter { stage });
                if replicas && unit + 1 == schedule.units.len() {
                    inserts.after(position, Action::ReplicaReduce { stage });
                }
            }
        }
    }
}

#[cfg(test)]
mod random_tests;
#[cfg(test)]
mod tests;
