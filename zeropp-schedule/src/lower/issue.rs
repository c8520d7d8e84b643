//! Receives where one order of operations between ranks wants them.
//!
//! As lowered, a receive stands one compute action before its consumer, so that two ranks which
//! send to each other at about the same time each send first and receive then: with buffers that is
//! fine, and without them they wait for each other. Here every message has a moment, the one of its
//! sending were all computes equally long, and each rank comes to its sends, receives, gathers and
//! reductions by their moments; those before ranks validate the last step's update come first, as
//! what is sent in a warm-up is received in one. That is one order for all ranks, which
//! [`verify_issue_order`](crate::verify::verify_issue_order) proves.

use std::collections::HashMap;

use crate::action::Partners;
use crate::head::{End, HeadTree};
use crate::ir::{Action, Schedule, Task};
use crate::links::Named;

/// A message, and its two ends where it is one of a split head.
type MessageKey = (Named, Option<(usize, usize)>);

/// Whether a rank has validated the last step's update, or does not, and the computes before an
/// action on the longest way to it.
type Clock = (bool, usize);

/// When an operation takes place: by the clock of the rank that decides (a message's sender), which
/// rank that is, and the operation's place there.
type Moment = (Clock, usize, usize);

/// A lowered `program` whose receives are moved to where all ranks come to all operations in one
/// order. Nothing else moves, and no link's messages change places. A receive comes no later than
/// its consumer, and earlier by as much as it takes: its buffer is counted from there on.
///
/// # Panics
/// Panics if `program` is not one that [`verify`](crate::verify::verify) accepts.
pub fn in_issue_order(program: &Schedule) -> Schedule {
    if program.pp() == 1 {
        return program.clone();
    }
    let moments = Moments::new(program);
    let ranks = (0..program.pp()).map(|rank| moments.order(program, rank)).collect();
    Schedule { ranks, ..program.clone() }
}

/// The moments of all actions of all ranks.
struct Moments {
    head: Option<HeadTree>,
    /// By rank, of each action.
    clocks: Vec<Vec<Clock>>,
    messages: ByMessage<Moment>,
}

/// Something of each message; of those between stages in a list, as plans order programs by the
/// hundred.
struct ByMessage<T> {
    micro_batches: usize,
    of_stages: Vec<Option<T>>,
    of_head: HashMap<MessageKey, T>,
}

impl<T: Copy> ByMessage<T> {
    fn new(program: &Schedule) -> ByMessage<T> {
        let micro_batches = program.micro_batches();
        let of_stages = vec![None; 2 * program.stages() * micro_batches];
        ByMessage { micro_batches, of_stages, of_head: HashMap::new() }
    }

    fn slot(&self, key: &MessageKey) -> Option<usize> {
        let Named::Stage(message, stage, micro_batch) = key.0 else { return None };
        Some(message.slot(stage, micro_batch, self.micro_batches))
    }

    fn get(&self, key: &MessageKey) -> Option<T> {
        match self.slot(key) {
            Some(slot) => self.of_stages[slot],
            None => self.of_head.get(key).copied(),
        }
    }

    fn set(&mut self, key: MessageKey, of: T) {
        match self.slot(&key) {
            Some(slot) => self.of_stages[slot] = Some(of),
            None => drop(self.of_head.insert(key, of)),
        }
    }
}

impl Moments {
    /// Walks all ranks' programs with computes that take one each; messages take nothing.
    fn new(program: &Schedule) -> Moments {
        let head = HeadTree::of(program);
        let mut passed_on = PassedOn::new(head.as_ref());
        let mut clocks: Vec<Vec<Clock>> = vec![Vec::new(); program.pp()];
        let warms_up = |rank: &Vec<Action>| rank.contains(&Action::Validate);
        let mut validated: Vec<bool> = program.ranks.iter().map(|rank| !warms_up(rank)).collect();
        let mut now = vec![0usize; program.pp()];
        let mut messages: ByMessage<Moment> = ByMessage::new(program);
        let mut waiting: ByMessage<usize> = ByMessage::new(program);
        let mut ready: Vec<usize> = (0..program.pp()).collect();
        while let Some(rank) = ready.pop() {
            while let Some(action) = program.ranks[rank].get(clocks[rank].len()) {
                let mut inputs = taken(program, head.as_ref(), rank, action);
                let there = inputs.try_fold(0, |there, key| match messages.get(&key) {
                    Some(((_, computes), ..)) => Ok(there.max(computes)),
                    None => Err(key),
                });
                let there = match there {
                    Ok(there) => there,
                    Err(key) => {
                        waiting.set(key, rank);
                        break;
                    }
                };
                now[rank] = now[rank].max(there);
                let index = clocks[rank].len();
                validated[rank] |= *action == Action::Validate;
                clocks[rank].push((validated[rank], now[rank]));
                now[rank] += action.computes().count();
                let moment = ((validated[rank], now[rank]), rank, index);
                if let Action::Send { message, stage, micro_batch } = *action {
                    let key = (Named::Stage(message, stage, micro_batch), None);
                    messages.set(key, moment);
                    ready.extend(waiting.get(&key));
                }
                let of_head = head.as_ref().and_then(|head| head.end(rank, action));
                if let Some(Ok(End { edge, is_send: true, micro_batch })) = of_head {
                    passed_on.offer(edge, micro_batch, moment);
                    for key in passed_on.send(edge, micro_batch, &mut messages) {
                        ready.extend(waiting.get(&key));
                    }
                }
            }
        }
        let whole = |(clocks, actions): (&Vec<Clock>, &Vec<Action>)| clocks.len() == actions.len();
        assert!(clocks.iter().zip(&program.ranks).all(whole), "a verified program runs through");
        Moments { head, clocks, messages }
    }

    fn moment(&self, message: &MessageKey) -> Moment {
        self.messages.get(message).expect("a verified program sends what it receives")
    }

    /// The message whose place is to be found: of a receive, or of what a split head sends.
    fn moved(&self, program: &Schedule, rank: usize, action: &Action) -> Option<MessageKey> {
        let end = self.head.as_ref().and_then(|head| Some((head, head.end(rank, action)?)));
        match end {
            Some((head, Ok(end))) => Some(key(head, end.edge, end.micro_batch)),
            _ => received(program, action),
        }
    }

    /// The program of `rank` with its receives where their moments are.
    fn order(&self, program: &Schedule, rank: usize) -> Vec<Action> {
        let actions = &program.ranks[rank];
        let moment = |index: usize| (self.clocks[rank][index], rank, index);
        let mut receives: Vec<(Moment, Action)> = actions
            .iter()
            .filter_map(|a| Some((self.moment(&self.moved(program, rank, a)?), *a)))
            .collect();
        receives.sort_by_key(|(moment, _)| *moment);
        let is_of_head =
            |(_, action): &&(Moment, Action)| matches!(action, Action::SendHead { .. });
        let of_head: Vec<(Moment, Action)> = receives.iter().filter(is_of_head).copied().collect();
        let mut receives = receives.into_iter().peekable();
        let mut ordered = Vec::with_capacity(actions.len());
        for (index, action) in actions.iter().enumerate() {
            if self.moved(program, rank, action).is_some() {
                continue;
            }
            // Everything up to this moment comes before it.
            let until = if *action == Action::Validate {
                Some(((false, usize::MAX), usize::MAX, usize::MAX))
            } else if is_operation(action) {
                Some(moment(index))
            } else {
                // What a split head sends by then, other ranks wait for.
                let is_by_now = |(at, _): &&(Moment, Action)| at.0 <= self.clocks[rank][index];
                let sent = of_head.iter().rfind(is_by_now).map(|(at, _)| *at);
                sent.max(self.wanted_by(program, rank, index))
            };
            while let Some((_, receive)) =
                receives.next_if(|(moment, _)| until.is_some_and(|until| *moment <= until))
            {
                ordered.push(receive);
            }
            ordered.push(*action);
        }
        // What no compute takes, as the sums of a validation loss.
        ordered.extend(receives.map(|(_, action)| action));
        ordered
    }

    /// The latest message that the compute at `index` takes, or the one after it, if no operation
    /// of an earlier moment is between the two: so a receive is there before the rank waits for it.
    fn wanted_by(&self, program: &Schedule, rank: usize, index: usize) -> Option<Moment> {
        let actions = &program.ranks[rank];
        let latest = |action: &Action| {
            let taken = taken(program, self.head.as_ref(), rank, action);
            taken.map(|key| self.moment(&key)).max()
        };
        let own = latest(&actions[index]);
        let mut between = usize::MAX;
        let later = actions.iter().enumerate().skip(index + 1);
        for (at, action) in later.take_while(|(_, action)| **action != Action::Validate) {
            if is_operation(action) && received(program, action).is_none() && !is_head_recv(action)
            {
                between = between.min(at);
            } else if action.computes().next().is_some() {
                let first = (between < at).then(|| (self.clocks[rank][between], rank, between));
                let next = latest(action).filter(|m| first.is_none_or(|first| *m < first));
                return own.max(next);
            }
        }
        own
    }
}

/// What a split head passes on when it has come.
struct PassedOn<'a> {
    head: Option<&'a HeadTree>,
    waiting: Vec<Vec<usize>>,
    /// Where senders have come to messages, by edge and micro-batch.
    offered: HashMap<(usize, usize), Moment>,
}

impl<'a> PassedOn<'a> {
    fn new(head: Option<&'a HeadTree>) -> PassedOn<'a> {
        let waiting = head.map(HeadTree::waiting).unwrap_or_default();
        PassedOn { head, waiting, offered: HashMap::new() }
    }

    fn offer(&mut self, edge: usize, micro_batch: usize, moment: Moment) {
        self.offered.insert((edge, micro_batch), moment);
    }

    /// Sends a message, and all that pass it on, if they can go: those that have gone.
    fn send(&self, edge: usize, i: usize, messages: &mut ByMessage<Moment>) -> Vec<MessageKey> {
        let Some(head) = self.head else { return Vec::new() };
        let mut gone = Vec::new();
        let mut left = vec![edge];
        while let Some(edge) = left.pop() {
            let Some(moment) = self.offered.get(&(edge, i)) else { continue };
            let needs = head.edges[edge].needs.iter();
            let needs: Option<Vec<_>> =
                needs.map(|before| messages.get(&key(head, *before, i))).collect();
            let Some(needs) = needs else { continue };
            // Later than what it passes on by all that decides.
            let there = needs.into_iter().map(|((valid, n), ..)| (valid, n + 1)).max();
            let key = key(head, edge, i);
            if messages.get(&key).is_none() {
                let clock = there.map_or(moment.0, |there| there.max(moment.0));
                messages.set(key, (clock, moment.1, moment.2));
                gone.push(key);
                left.extend(&self.waiting[edge]);
            }
        }
        gone
    }
}

fn key(head: &HeadTree, edge: usize, micro_batch: usize) -> MessageKey {
    let of = &head.edges[edge];
    (Named::Head(of.message, micro_batch), Some((of.from, of.to)))
}

/// The messages that an action's computes take from other ranks.
fn taken<'a>(
    program: &'a Schedule,
    head: Option<&'a HeadTree>,
    rank: usize,
    action: &'a Action,
) -> impl Iterator<Item = MessageKey> + 'a {
    action.computes().flat_map(move |Task { kind, stage, micro_batch }| {
        let of_head = head.into_iter().flat_map(move |head| {
            let needs = head.needs(rank, kind, stage).iter();
            needs.map(move |edge| key(head, *edge, micro_batch))
        });
        let message = kind.needs(stage, program.stages());
        let message = message.filter(|message| program.source(*message, stage).is_some());
        let producer = message.and_then(|m| Some((m, m.producer(stage, program.stages())?)));
        of_head.chain(producer.map(|(m, from)| (Named::Stage(m, from, micro_batch), None)))
    })
}

/// The message that a receive is for.
fn received(program: &Schedule, action: &Action) -> Option<MessageKey> {
    let Action::Recv { message, stage, micro_batch } = *action else { return None };
    let producer = message.producer(stage, program.stages())?;
    Some((Named::Stage(message, producer, micro_batch), None))
}

fn is_head_recv(action: &Action) -> bool {
    matches!(action, Action::RecvHead { .. })
}

/// Whether other ranks take part.
fn is_operation(action: &Action) -> bool {
    action.row().partners != Partners::NoRank
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lower::{LowerOptions, OptimizerSync, lower};
    use crate::schedules::{KINDS, Shape, generate};
    use crate::verify::{VerifyLimits, verify, verify_issue_order};

    fn without_receives(program: &Schedule) -> Vec<Vec<Action>> {
        let keep = |a: &&Action| !matches!(a, Action::Recv { .. });
        program.ranks.iter().map(|rank| rank.iter().filter(keep).copied().collect()).collect()
    }

    /// Messages that a rank has posted a receive for and not taken, at most.
    fn posted(program: &Schedule) -> usize {
        let of_rank = |actions: &Vec<Action>| {
            let (mut now, mut most) = (0usize, 0);
            for action in actions {
                if let Action::Recv { .. } = action {
                    now += 1;
                    most = most.max(now);
                }
                now -= taken(program, None, 0, action).count();
            }
            most
        };
        program.ranks.iter().map(of_rank).max().unwrap_or(0)
    }

    /// Every kind has one order of operations, of which only receives move.
    #[test]
    fn all_kinds_have_one_order() {
        let mut was_none = 0;
        for kind in KINDS.iter() {
            for (pp, micro_batches, unit) in [(2, 4, 4), (4, 8, 4), (4, 9, 7), (8, 16, 16)] {
                let virtual_stages = kind.stages.default_number();
                let shape = Shape { pp, virtual_stages, micro_batches, unit };
                let Ok(compact) = generate(kind.name, &shape) else { continue };
                let syncs =
                    OptimizerSync::ALL.iter().flat_map(|sync| [(false, *sync), (true, *sync)]);
                for (recompute, sync) in syncs {
                    let options =
                        LowerOptions { recompute, replicas: recompute, sync, ..Default::default() };
                    let program = lower(&compact, &options);
                    let what = format!("{} {shape:?} {sync:?}", kind.name);
                    was_none += usize::from(verify_issue_order(&program).is_err());
                    let ordered = in_issue_order(&program);
                    verify(&ordered, &VerifyLimits::default())
                        .unwrap_or_else(|e| panic!("{what}: {e}"));
                    verify_issue_order(&ordered).unwrap_or_else(|e| panic!("{what}: {e}"));
                    assert_eq!(without_receives(&ordered), without_receives(&program), "{what}");
                    assert_eq!(in_issue_order(&ordered), ordered, "{what}");
                    // Room for what is sent and not taken, never for a whole step.
                    let (before, after) = (posted(&program), posted(&ordered));
                    assert!(after <= before.max(micro_batches), "{what}: {before} and {after}");
                }
            }
        }
        assert!(was_none > 0, "as lowered, some kind has no such order");
    }
}
