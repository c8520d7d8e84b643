//! Sums over replicas that have programs of their own, in one order.

use crate::ir::{Action, Schedule};

/// `program` with its sums over the replicas in the order of `first`'s: each right after its own
/// stage's last reduction, as lowered, or after the sums before it where those are later. Both are
/// lowered programs for replicas; a kind that searches for its order may have come to different
/// ones for them. Programs with stages at different places stay as they are, and do not go together
/// ([`verify_replicas`](crate::verify::verify_replicas)).
pub fn with_sums_in_order_of(first: &Schedule, program: &Schedule) -> Schedule {
    if first.placement != program.placement {
        return program.clone();
    }
    let ranks = first.ranks.iter().zip(&program.ranks);
    let ranks = ranks.map(|(first, actions)| {
        let is_sum = |action: &&Action| matches!(action, Action::ReplicaReduce { .. });
        let mut order = first.iter().filter(is_sum).copied().peekable();
        let mut ready = Vec::new();
        let mut ordered = Vec::with_capacity(actions.len());
        for action in actions {
            if !is_sum(&action) {
                ordered.push(*action);
                continue;
            }
            ready.push(*action);
            while let Some(sum) = order.next_if(|next| ready.contains(next)) {
                ordered.push(sum);
            }
        }
        ordered
    });
    Schedule { ranks: ranks.collect(), ..program.clone() }
}
