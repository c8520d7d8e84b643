//! DualPipeV: two chunks a rank in the shape of a V, forwards overlapped with backwards.
//!
//! Rank r holds stages r and 2N − 1 − r. In the steady state every action is a pair of an F of one
//! chunk and a whole backward of the other, so that the communication of one hides behind the
//! computation of the other. Backwards are split only where a W fills the pipeline's ends.

use super::vee::{VeeRank, two_chunks};
use super::{ScheduleError, Shape};
use crate::ir::{Action, Compute, Schedule, vee};
use std::collections::VecDeque;

/// DualPipeV for any P, V = 2 and B ≥ 2P. One unit of B.
pub(super) fn generate(shape: &Shape) -> Result<Schedule, ScheduleError> {
    let kind = "dualpipe-v";
    two_chunks(kind, shape)?;
    let Shape { pp, micro_batches, .. } = *shape;
    if micro_batches < 2 * pp {
        let works = format!("with pp = {pp} it must be at least {}", 2 * pp);
        let (field, value) = ("micro-batches", micro_batches);
        return Err(ScheduleError::Field { kind, field, value, works });
    }
    Ok(Schedule {
        kind: kind.into(),
        placement: vee(pp, 2),
        units: vec![micro_batches],
        ranks: (0..pp).map(|rank| rank_order(rank, pp, micro_batches)).collect(),
        ..Schedule::default()
    })
}

fn rank_order(rank: usize, pp: usize, m: usize) -> Vec<Action> {
    use Compute::{B, BW, F, W};
    let mut r = VeeRank::new(rank, pp, m);
    let behind = pp - 1 - rank;
    // 1 to 3: fill. The first backwards come from this rank's own second chunk.
    r.repeat(2 * behind, &[(F, 0)]);
    r.repeat(rank + 1, &[(F, 0), (F, 1)]);
    r.repeat(behind, &[(B, 1), (W, 1), (F, 1)]);
    // 4: steady state. On the last rank, whose second chunk follows its first at once, the first
    // pair is run apart: its BW would otherwise wait for nothing but its own partner.
    for i in 0..m + rank + 1 - 2 * pp {
        if i == 0 && behind == 0 {
            r.repeat(1, &[(F, 0), (BW, 1)]);
        } else {
            r.push_pair(0, 1);
        }
        r.push_pair(1, 0);
    }
    // 5 to 8: drain. From the middle of phase 6 on backwards are split, and the W wait in one queue
    // for the gaps.
    for _ in 0..behind {
        r.push(BW, 1);
        r.push_pair(1, 0);
    }
    let mut waiting = VecDeque::new();
    for i in 0..2 * (rank + 1) {
        let chunk = 1 - i % 2;
        if i <= rank {
            r.push(BW, chunk);
        } else {
            r.push(B, chunk);
            waiting.push_back(chunk);
        }
    }
    for _ in 0..behind {
        let chunk = waiting.pop_front().expect("phase 6 leaves a W");
        r.push(W, chunk);
        r.push(B, 0);
        waiting.push_back(0);
    }
    for chunk in waiting {
        r.push(W, chunk);
    }
    r.order
}
