//! One order of operations between ranks: that every rank can start its operations strictly in the
//! order of its program, each only once the one before it has both ends.
//!
//! A library such as NCCL may keep an operation from starting until its other ends have started
//! theirs, and operations of other communicators behind it: then sends are not buffered, and the
//! proof of [`verify`](super::verify()) does not hold. A message is one thing here, which both its
//! sender and its receiver come to. If all ranks reach their ends like this, the order in which
//! they do is one that all of them share, and a library that demands less does not deadlock either.
//! Gathers and reductions are among ranks with the same program, which come to them in one order.

use super::{LocatedAction, VerifyError, place};
use crate::ir::Schedule;

/// Proves that for a program that [`verify`](super::verify()) accepts.
///
/// # Errors
/// [`VerifyError::IssueOrder`], with the circle of messages that ranks come to in different orders.
pub fn verify_issue_order(program: &Schedule) -> Result<(), VerifyError> {
    let mut next = vec![0usize; program.pp()];
    let mut ready: Vec<usize> = (0..program.pp()).collect();
    while let Some(rank) = ready.pop() {
        while let Some(action) = program.ranks[rank].get(next[rank]) {
            let Some((peer, message)) = program.other_end(action) else {
                next[rank] += 1;
                continue;
            };
            let other = program.ranks[peer].get(next[peer]).and_then(|a| program.other_end(a));
            // Who is not there yet comes back to this rank when it is.
            if other != Some((rank, message)) {
                break;
            }
            next[rank] += 1;
            next[peer] += 1;
            ready.push(peer);
        }
    }
    match (0..program.pp()).find(|rank| next[*rank] < program.ranks[*rank].len()) {
        Some(stuck) => Err(circle(program, &next, stuck)),
        None => Ok(()),
    }
}

/// The circle that `start` runs into: each of its ranks waits for the next one.
fn circle(program: &Schedule, next: &[usize], start: usize) -> VerifyError {
    let at = |rank: usize| place(program, rank, next[rank]);
    let mut path: Vec<LocatedAction> = Vec::new();
    let mut rank = start;
    while next[rank] < program.ranks[rank].len() && path.iter().all(|place| place.rank != rank) {
        path.push(at(rank));
        let (peer, _) = program.other_end(&path[path.len() - 1].action).expect("it waits for one");
        rank = peer;
    }
    let first = path.iter().position(|place| place.rank == rank).unwrap_or(0);
    VerifyError::IssueOrder(path.split_off(first))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::{Action, Compute, Message};

    /// Two ranks, an activation from 0 to 1 and gradients back.
    fn two(ranks: [Vec<Action>; 2]) -> Schedule {
        let placement = vec![0, 1];
        Schedule { placement, units: vec![2], ranks: ranks.to_vec(), ..Schedule::default() }
    }

    fn send(stage: usize, micro_batch: usize) -> Action {
        let message = if stage == 0 { Message::Activation } else { Message::Gradient };
        Action::Send { message, stage, micro_batch }
    }

    fn recv(stage: usize, micro_batch: usize) -> Action {
        let message = if stage == 1 { Message::Activation } else { Message::Gradient };
        Action::Recv { message, stage, micro_batch }
    }

    #[test]
    fn messages_that_meet_in_one_order_pass() {
        let f = Action::compute(Compute::F, 0, 0);
        let good = two([
            vec![f, send(0, 0), send(0, 1), recv(0, 0)],
            vec![recv(1, 0), recv(1, 1), send(1, 0)],
        ]);
        assert_eq!(verify_issue_order(&good), Ok(()));
    }

    #[test]
    fn a_circle_is_named_with_its_ends() {
        // Each sends first, which only buffers allow.
        let bad = two([vec![send(0, 1), recv(0, 0)], vec![send(1, 0), recv(1, 1)]]);
        let error = verify_issue_order(&bad).unwrap_err();
        let VerifyError::IssueOrder(places) = &error else { panic!("{error}") };
        assert_eq!(places.iter().map(|p| (p.rank, p.index)).collect::<Vec<_>>(), [(0, 0), (1, 0)]);
        assert!(error.to_string().starts_with("no one order of operations: rank 0, action 0 ("));
        // A message that its receiver never comes to.
        let lost = two([vec![send(0, 0)], vec![]]);
        assert!(verify_issue_order(&lost).is_err());
    }
}
