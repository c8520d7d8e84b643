//! Lowering: from the compute actions of a schedule to the program that ranks run, with gathers,
//! frees, reductions, sends and receives as actions of their own.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::action::Lowering;
use crate::ir::{Action, Compute, Message, Schedule, Task};
use crate::schedules::{Kind, Objective, StepForm};

mod copies;
mod head;
mod issue;
mod recompute;
mod replicas;
mod warm_up;
mod weights;

use copies::Chosen;
use weights::keep_written;

pub use issue::in_issue_order;
pub use recompute::recomputed;
pub use replicas::with_sums_in_order_of;

/// How lowering treats weights and memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LowerOptions {
    /// Stages gathered ahead of the one in use; at most 1 + prefetch are resident at once, or two
    /// while an overlapped pair of two stages runs.
    pub prefetch: usize,
    /// Full recomputation: an R before the backward of the stages that [`recomputed`] says.
    pub recompute: bool,
    /// Of each unit only the first so many micro-batches are recomputed, if that is given, and none
    /// of the last stage's, whose head has to make its gradients in their order.
    pub redone: Option<usize>,
    /// Of so many micro-batches of each unit, what F has kept is copied out of the rank's memory
    /// and in again before it is needed, in all stages where there is time for both: of those that
    /// are not recomputed, as far apart as they can be, and where all of these are out the inputs
    /// of others. Slices of samples, which need each other's, stay.
    pub out: usize,
    /// Of the first of several units nothing goes out. As many more of it as go out of others are
    /// recomputed where `redone` says that some are: other copies have the link to themselves.
    pub out_later: bool,
    /// There are data-parallel replicas: sum every stage's gradient over them after its last unit.
    /// Copies of a stage are summed in any case.
    pub replicas: bool,
    /// When a stage's weights are dropped.
    pub residency: Residency,
    /// When ranks learn the global norm.
    pub sync: OptimizerSync,
}

/// When ranks learn the global norm of their gradients, and that it is finite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerSync {
    /// Before each update, for which all of them meet.
    #[default]
    Barrier,
    /// In the next step's first forwards: they update as soon as their own gradients are there, and
    /// go back where that was wrong.
    Late,
}

impl OptimizerSync {
    /// All values, in the order of [`Self::NAMES`].
    pub const ALL: &'static [OptimizerSync] = &[OptimizerSync::Barrier, OptimizerSync::Late];
    /// How they are spelled in files and flags.
    pub const NAMES: &'static [&'static str] = &["barrier", "late"];

    /// The spelling in files and flags.
    pub fn name(self) -> &'static str {
        OptimizerSync::NAMES[self as usize]
    }
}

impl fmt::Display for OptimizerSync {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The length that a step with such updates takes.
impl From<OptimizerSync> for Objective {
    fn from(sync: OptimizerSync) -> Objective {
        match sync {
            OptimizerSync::Barrier => Objective::Makespan,
            OptimizerSync::Late => Objective::OwnSpan,
        }
    }
}

impl Default for LowerOptions {
    fn default() -> LowerOptions {
        LowerOptions {
            prefetch: 1,
            recompute: false,
            redone: None,
            out: 0,
            out_later: false,
            replicas: false,
            residency: Residency::default(),
            sync: OptimizerSync::default(),
        }
    }
}

/// When a stage's gathered weights are dropped. A *visit* is a longest run of weight-needing
/// actions of one stage and unit on a rank; W needs no weights and does not end a visit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
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
/// * the end of each RS, and with it of the gradient's buffer, right before the rank's next RS, or
///   before the step. In kinds that take a step in units, where W are apart from B and come stage
///   after stage, it is before the first W of the next gradient: the rank has one buffer then
///   (ADR 85);
/// * a send right after what it sends was computed; a receive posted one compute action before the
///   one that takes it, or earlier where the order of the peer's sends wants it. Neighbouring
///   stages on one rank hand over without either;
/// * of a split head: AG before the first F of a unit's slice and FREE after its last B, beside the
///   stages; a send where what it sends was made or, if it is passed on, right after its receive;
///   a receive one compute action before the one that takes it;
/// * OUT after the F, and behind its send, of the micro-batches that `out` asks for, with
///   `out_later` from the second unit on; GONE before
///   the second next OUT, or, where that is earlier, three compute actions later, or as many as
///   there are F to the next one that goes out, and in units of which some stay so much later that
///   the last copies end with the last F; IN as many before the R or the backward, but never in a
///   warm-up. A micro-batch that has no time for that between its F and its backward stays
///   (ADR 101);
/// * R where `recompute` asks for it, and one optimizer step at the end, unless there are forwards
///   only;
/// * with [`OptimizerSync::Late`] a VALID after each rank's warm-up: its forwards before the first
///   backward, less those that need what another rank does after its own. Messages of the
///   warm-ups are received in them, and no others.
///
/// Actions of which the row says [`Lowering::Makes`] are dropped and made anew, so lowering twice
/// is lowering once. With [`Residency::AsWritten`] AG, FREE and R stay, with
/// [`Residency::Auto`] AG and FREE.
pub fn lower(schedule: &Schedule, options: &LowerOptions) -> Schedule {
    let written = options.residency == Residency::AsWritten;
    let kept = written || (options.residency == Residency::Auto && schedule.has_gathers());
    let programs = ComputePrograms::new(schedule, options, written);
    let residency = match options.residency {
        Residency::Auto if !kept => weights::fitting(schedule, &programs.ranks),
        chosen => chosen,
    };
    let trains = !schedule.is_forward_only();
    let late = trains && options.sync == OptimizerSync::Late;
    let warm_ups = late.then(|| warm_up::warm_ups(&programs));
    let in_units = Kind::find(&schedule.kind).is_some_and(|kind| kind.step == StepForm::Units);
    let ranks = (0..schedule.pp())
        .map(|rank| {
            let program = &programs.ranks[rank];
            let mut inserts = Inserts::default();
            programs.add_messages(rank, warm_ups.as_deref(), &mut inserts);
            if let Some(wide) = schedule.wide_stage().filter(|_| !kept) {
                weights::add_slice_gathers(schedule, program, wide, &mut inserts);
            }
            keep_written(&schedule.ranks[rank], program, kept, &mut inserts);
            if !kept {
                let mut visits = weights::visits(schedule, program);
                if schedule.slices_per_sample() > 1 && residency == Residency::LookAhead {
                    weights::join_units(&mut visits);
                }
                weights::add_gathers(&visits, options.prefetch, residency, &mut inserts);
            }
            let gradients = gradients(schedule, program, rank);
            add_reductions(&gradients, options.replicas, &mut inserts);
            let last = add_retirements(schedule, program, &gradients, in_units, &mut inserts);
            if trains && options.out > 0 && schedule.slices_per_sample() == 1 {
                let warm_up = warm_ups.as_ref().map_or(0, |ends| ends[rank]);
                let redone = if options.recompute { options.redone } else { Some(0) };
                let redone = redone.unwrap_or(usize::MAX);
                let chosen = Chosen { out: options.out, redone, later: options.out_later };
                copies::add_copies(schedule, program, chosen, warm_up, &mut inserts);
            }
            if let Some(warm_ups) = &warm_ups {
                inserts.before(warm_ups[rank], Action::Validate);
            }
            let step = trains.then_some(Action::OptimizerStep);
            inserts.merge(program).into_iter().chain(last).chain(step).collect()
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
        self.0.push((2 * position, action.row().order, action));
    }

    /// Inserts after the compute action at `position`.
    fn after(&mut self, position: usize, action: Action) {
        self.0.push((2 * position + 1, action.row().order, action));
    }

    /// Inserts before the compute action at `position`, and after all else that is.
    fn just_before(&mut self, position: usize, action: Action) {
        self.0.push((2 * position, u8::MAX, action));
    }

    /// The whole program. What goes to one place has the order of the actions' rows, then that of
    /// its insertion.
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

/// A message as its consumer knows it: what it is, the consuming stage, the micro-batch.
type MessageKey = (Message, usize, usize);

/// The compute actions of all ranks, recomputation included.
struct ComputePrograms<'a> {
    schedule: &'a Schedule,
    /// Of a step: the sum of its units, which are many where they are small.
    micro_batches: usize,
    ranks: Vec<Vec<Action>>,
    /// Where the consumer of each message is in its rank's program, by [`ComputePrograms::slot`]:
    /// places in a list, as a plan lowers hundreds of programs and hashing was a fifth of its time.
    consumers: Vec<usize>,
    head: Option<head::Places>,
}

/// A message without a consumer.
const NO_RANK: usize = usize::MAX;

impl<'a> ComputePrograms<'a> {
    /// With `written`, R stand where they stood; else where `options` ask for them.
    fn new(schedule: &'a Schedule, options: &LowerOptions, written: bool) -> ComputePrograms<'a> {
        let makes = options.recompute && !written;
        let splits = schedule.splits_backward();
        let in_unit: Vec<usize> = schedule.units.iter().flat_map(|n| 0..*n).collect();
        let stays = if options.out_later { copies::staying(schedule) } else { 0 };
        let is_redone = |stage: usize, micro_batch: usize| match options.redone {
            None => true,
            Some(first) => {
                let in_place_of_copies = if micro_batch < stays { options.out } else { 0 };
                let first = first.saturating_add(in_place_of_copies);
                in_unit[micro_batch] < first && stage + 1 < schedule.stages()
            }
        };
        let ranks = schedule.ranks.iter().enumerate().map(|(rank, actions)| {
            let kept = if makes { recompute::kept(schedule, splits, rank) } else { None };
            let mut program = Vec::with_capacity(actions.len());
            for action in actions {
                for Task { kind, stage, micro_batch } in action.computes() {
                    let backward = matches!(kind, Compute::B | Compute::BW);
                    let is_slice = schedule.wide_stage() == Some(stage);
                    let stays = is_slice || kept == Some(stage);
                    if makes && backward && !stays && is_redone(stage, micro_batch) {
                        program.push(Action::compute(Compute::R, stage, micro_batch));
                    }
                }
                let stays = match action.row().lowering {
                    Lowering::Keeps => true,
                    Lowering::Recomputes => written,
                    Lowering::Gathers | Lowering::Makes => false,
                };
                if stays && action.computes().next().is_some() {
                    program.push(*action);
                }
            }
            program
        });
        let micro_batches = schedule.micro_batches();
        let ranks = ranks.collect();
        let (consumers, head) = (Vec::new(), None);
        let mut programs = ComputePrograms { schedule, micro_batches, ranks, consumers, head };
        programs.consumers = programs.consumers();
        programs.head = head::Places::new(schedule, &programs.ranks);
        programs
    }

    fn consumers(&self) -> Vec<usize> {
        let (stages, micro_batches) = (self.schedule.stages(), self.micro_batches);
        let mut consumers = vec![NO_RANK; 2 * stages * micro_batches];
        for (position, action) in self.ranks.iter().flat_map(|rank| rank.iter().enumerate()) {
            for Task { kind, stage, micro_batch } in action.computes() {
                if let Some(message) = kind.needs(stage, stages) {
                    consumers[self.slot(message, stage, micro_batch)] = position;
                }
            }
        }
        consumers
    }

    /// The place of a message in `consumers`, by its consuming stage.
    fn slot(&self, message: Message, stage: usize, micro_batch: usize) -> usize {
        message.slot(stage, micro_batch, self.micro_batches)
    }

    /// The messages that `from` sends to `to`, in the order of its program, as their consumers
    /// know them: (message, consuming stage, micro-batch), and the place of the compute that makes
    /// each.
    fn channel(&self, from: usize, to: usize) -> impl Iterator<Item = (usize, MessageKey)> {
        let stages = self.schedule.stages();
        let actions = self.ranks[from].iter().enumerate();
        let computes = actions.flat_map(|(at, action)| action.computes().map(move |c| (at, c)));
        computes.filter_map(move |(at, Task { kind, stage, micro_batch })| {
            let message = kind.gives(stage, stages)?;
            let consumer = message.consumer(stage, stages)?;
            let is_to = self.schedule.destination(message, stage) == Some(to);
            is_to.then_some((at, (message, consumer, micro_batch)))
        })
    }

    /// Sends after what they send; receives in the order in which each peer sends, those of the
    /// peers' `warm_ups`, if there are any, in this rank's.
    fn add_messages(&self, rank: usize, warm_ups: Option<&[usize]>, inserts: &mut Inserts) {
        let stages = self.schedule.stages();
        let mut peers = Vec::new();
        let after = |warm_up: usize| warm_ups.map_or(0, |ends| ends[warm_up]);
        if let Some(head) = &self.head {
            peers = head.senders_to(rank);
        }
        for (position, action) in self.ranks[rank].iter().enumerate() {
            for Task { kind, stage, micro_batch } in action.computes() {
                if let Some(message) = kind.gives(stage, stages)
                    && self.schedule.destination(message, stage).is_some()
                {
                    inserts.after(position, Action::Send { message, stage, micro_batch });
                }
                if let Some(message) = kind.needs(stage, stages)
                    && let Some(peer) = self.schedule.source(message, stage)
                    && !peers.contains(&peer)
                {
                    peers.push(peer);
                }
            }
        }
        for peer in peers {
            // From the last message to the first, so that none is posted after a later one.
            let mut receives = Vec::new();
            let mut post = usize::MAX;
            let own = self.channel(peer, rank).map(|(made, key)| {
                let (message, stage, micro_batch) = key;
                let position = self.consumers[self.slot(message, stage, micro_batch)];
                let wanted = Some(position.saturating_sub(1)).filter(|_| position != NO_RANK);
                let is_warm_up = warm_ups.map(|ends| (made < ends[peer], ends[rank]));
                (wanted, is_warm_up, Action::Recv { message, stage, micro_batch }, 2 * made + 1)
            });
            let mut all: Vec<_> = own.collect();
            if let Some(head) = &self.head {
                let is_warm_up = warm_ups.map(|ends| (false, ends[rank]));
                let of_head = head.receives(peer, after(peer), rank);
                all.extend(
                    of_head.map(|(sent, wanted, recv)| (Some(wanted), is_warm_up, recv, sent)),
                );
                all.sort_by_key(|(.., sent)| *sent);
            }
            for (wanted, is_warm_up, recv, _) in all.into_iter().rev() {
                if let Some(wanted) = wanted {
                    post = post.min(wanted);
                    receives.push((post, is_warm_up, recv));
                }
            }
            for (post, warm_up, recv) in receives.into_iter().rev() {
                match warm_up {
                    Some((true, end)) => inserts.before(post.min(end), recv),
                    Some((false, end)) if post <= end => inserts.just_before(end, recv),
                    _ => inserts.before(post, recv),
                }
            }
        }
        // Behind the receives of what they pass on.
        if let Some(head) = &self.head {
            head.add_sends(rank, after(rank), inserts);
        }
    }
}

/// A stage's gradient of one unit: where it is first and last added to.
struct Gradient {
    stage: usize,
    first: usize,
    last: usize,
}

/// The gradients of one rank's program, in the order in which they become whole.
fn gradients(schedule: &Schedule, program: &[Action], rank: usize) -> Vec<Gradient> {
    let units = schedule.unit_table();
    let count = schedule.units.len();
    let mut places = vec![None; schedule.cells() * count];
    let mut gradients: Vec<Gradient> = Vec::new();
    for (position, action) in program.iter().enumerate() {
        let adds = |task: &Task| matches!(task.kind, Compute::W | Compute::BW);
        for Task { stage, micro_batch, .. } in action.computes().filter(adds) {
            let place = &mut places[schedule.cell(rank, stage) * count + units[micro_batch]];
            let at = *place.get_or_insert(gradients.len());
            match gradients.get_mut(at) {
                Some(gradient) => gradient.last = position,
                None => gradients.push(Gradient { stage, first: position, last: position }),
            }
        }
    }
    gradients.sort_by_key(|gradient| gradient.last);
    gradients
}

/// RS after the last W of each stage and unit; AR after the RS of the rank's last unit.
fn add_reductions(gradients: &[Gradient], replicas: bool, inserts: &mut Inserts) {
    for (i, Gradient { stage, last, .. }) in gradients.iter().enumerate() {
        inserts.after(*last, Action::ReduceScatter { stage: *stage });
        if replicas && gradients[i + 1..].iter().all(|later| later.stage != *stage) {
            inserts.after(*last, Action::ReplicaReduce { stage: *stage });
        }
    }
}

/// The end of each reduction: before the next one or, in kinds that take a step in units and where
/// a rank's gradients come one after the other, before the next gradient is begun: others were
/// timed without that wait. A split head's gradient is beside those of the stages. The last one's
/// is given back.
fn add_retirements(
    schedule: &Schedule,
    program: &[Action],
    gradients: &[Gradient],
    in_units: bool,
    inserts: &mut Inserts,
) -> Option<Action> {
    let is_own = |gradient: &&Gradient| schedule.wide_stage() != Some(gradient.stage);
    let own: Vec<&Gradient> = gradients.iter().filter(is_own).collect();
    let in_order = in_units && own.windows(2).all(|pair| pair[0].last < pair[1].first);
    for (at, pair) in gradients.windows(2).enumerate() {
        let (retire, next) = (Action::Retire { stage: pair[0].stage }, &pair[1]);
        let is_w = |at: usize| program[at].computes().all(|task| task.kind == Compute::W);
        let begun = gradients[at + 1..].iter().find(is_own).map(|begun| begun.first);
        let begun = begun.filter(|begun| {
            in_order && is_own(&&pair[0]) && *begun < next.last.max(next.first + 1) && is_w(*begun)
        });
        match begun {
            Some(begun) => inserts.before(begun, retire),
            None => inserts.after(next.last, retire),
        }
    }
    gradients.last().map(|gradient| Action::Retire { stage: gradient.stage })
}

#[cfg(test)]
mod random_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod warm_up_tests;
