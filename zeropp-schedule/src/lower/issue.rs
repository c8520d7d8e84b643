//! Receives where one order of operations between ranks wants them.
//!
//! As lowered, a receive stands one compute action before its consumer, so that two ranks which
//! send to each other at about the same time each send first and receive then: with buffers that is
//! fine, and without them they wait for each other. Here every message has a moment, the one of its
//! sending were all computes equally long, and each rank comes to its sends, receives, gathers and
//! reductions by their moments. That is one order for all ranks, which
//! [`verify_issue_order`](crate::verify::verify_issue_order) proves.

use std::collections::HashMap;

use crate::action::Partners;
use crate::ir::{Action, Message, Schedule, Task};

/// A message by its producing stage.
type Key = (Message, usize, usize);

/// When an operation takes place: the computes before it on the longest way to it, the rank that
/// decides (a message's sender), and its place there.
type Moment = (usize, usize, usize);

/// A lowered `program` whose receives are moved to where all ranks come to all operations in one
/// order. Nothing else moves, and no link's messages change places. A receive comes no later than
/// its consumer, and earlier by as much as it takes: its buffer is counted from there on.
///
/// # Panics
/// Panics if `program` is not one that [`verify`](crate::verify::verify) accepts.
pub fn in_issue_order(program: &Schedule) -> Schedule {
    let moments = Moments::new(program);
    let ranks = (0..program.pp()).map(|rank| moments.order(program, rank)).collect();
    Schedule { ranks, ..program.clone() }
}

/// The moments of all actions of all ranks.
struct Moments {
    /// By rank, of each action: the computes before it.
    clocks: Vec<Vec<usize>>,
    /// Of each message.
    messages: HashMap<Key, Moment>,
}

impl Moments {
    /// Walks all ranks' programs with computes that take one each; messages take nothing.
    fn new(program: &Schedule) -> Moments {
        let stages = program.stages();
        let mut clocks: Vec<Vec<usize>> = vec![Vec::new(); program.pp()];
        let mut now = vec![0usize; program.pp()];
        let mut messages: HashMap<Key, Moment> = HashMap::new();
        let mut waiting: HashMap<Key, usize> = HashMap::new();
        let mut ready: Vec<usize> = (0..program.pp()).collect();
        while let Some(rank) = ready.pop() {
            while let Some(action) = program.ranks[rank].get(clocks[rank].len()) {
                let missing = action
                    .computes()
                    .filter_map(|c| taken(program, c))
                    .find(|key| !messages.contains_key(key));
                if let Some(key) = missing {
                    waiting.insert(key, rank);
                    break;
                }
                let inputs = action.computes().filter_map(|c| taken(program, c));
                let there = inputs.map(|key| messages[&key].0).max().unwrap_or(0);
                now[rank] = now[rank].max(there);
                let index = clocks[rank].len();
                clocks[rank].push(now[rank]);
                now[rank] += action.computes().count();
                if let Action::Send { message, stage, micro_batch } = *action {
                    debug_assert!(stage < stages);
                    let key = (message, stage, micro_batch);
                    messages.insert(key, (now[rank], rank, index));
                    ready.extend(waiting.remove(&key));
                }
            }
        }
        let whole = |(clocks, actions): (&Vec<usize>, &Vec<Action>)| clocks.len() == actions.len();
        assert!(clocks.iter().zip(&program.ranks).all(whole), "a verified program runs through");
        Moments { clocks, messages }
    }

    /// The program of `rank` with its receives where their moments are.
    fn order(&self, program: &Schedule, rank: usize) -> Vec<Action> {
        let actions = &program.ranks[rank];
        let moment = |index: usize| (self.clocks[rank][index], rank, index);
        let mut receives: Vec<(Moment, Action)> = actions
            .iter()
            .filter_map(|action| Some((self.messages[&received(program, action)?], *action)))
            .collect();
        receives.sort_by_key(|(moment, _)| *moment);
        let mut receives = receives.into_iter().peekable();
        let mut ordered = Vec::with_capacity(actions.len());
        for (index, action) in actions.iter().enumerate() {
            if received(program, action).is_some() {
                continue;
            }
            // Everything up to this moment comes before it.
            let until = if is_operation(action) {
                Some(moment(index))
            } else {
                self.wanted_by(program, rank, index)
            };
            while let Some((_, receive)) =
                receives.next_if(|(moment, _)| until.is_some_and(|until| *moment <= until))
            {
                ordered.push(receive);
            }
            ordered.push(*action);
        }
        ordered
    }

    /// The latest message that the compute at `index` takes, or the one after it, if no operation
    /// of an earlier moment is between the two: so a receive is there before the rank waits for it.
    fn wanted_by(&self, program: &Schedule, rank: usize, index: usize) -> Option<Moment> {
        let actions = &program.ranks[rank];
        let latest = |action: &Action| {
            let taken = action.computes().filter_map(|c| taken(program, c));
            taken.map(|key| self.messages[&key]).max()
        };
        let own = latest(&actions[index]);
        let mut between = usize::MAX;
        for (at, action) in actions.iter().enumerate().skip(index + 1) {
            if is_operation(action) && received(program, action).is_none() {
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

/// The message that a compute takes from another rank.
fn taken(program: &Schedule, Task { kind, stage, micro_batch }: Task) -> Option<Key> {
    let message = kind.needs(stage, program.stages())?;
    program.source(message, stage)?;
    Some((message, message.producer(stage, program.stages())?, micro_batch))
}

/// The message that a receive is for.
fn received(program: &Schedule, action: &Action) -> Option<Key> {
    let Action::Recv { message, stage, micro_batch } = *action else { return None };
    Some((message, message.producer(stage, program.stages())?, micro_batch))
}

/// Whether other ranks take part.
fn is_operation(action: &Action) -> bool {
    action.row().partners != Partners::Nobody
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lower::{LowerOptions, lower};
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
                now -= action.computes().filter_map(|c| taken(program, c)).count();
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
                for (recompute, replicas) in [(false, false), (true, true)] {
                    let options = LowerOptions { recompute, replicas, ..LowerOptions::default() };
                    let program = lower(&compact, &options);
                    let what = format!("{} {shape:?}", kind.name);
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
