//! What no order in ZeroPP's unit structure can beat.

use super::{OrderCosts, Shape};

/// A lower bound on the largest own span of any order that runs ZeroPP's units one after the other,
/// block by block (2V − 1 gathers a unit), whatever its warm-up and places of W; gathers and
/// reductions taken as free.
///
/// A rank's n-th gradient of its last stage cannot come before the ranks behind it have run all
/// forwards of their other stages and n forwards and backwards of their last. Until then the rank
/// has no other work than its forwards, and B and W of the n − 1 gradients before.
pub fn zeropp_bound(shape: &Shape, costs: &OrderCosts) -> u64 {
    let rank_span = |r: usize| {
        let stages = (0..shape.virtual_stages).map(|v| v * shape.pp + r);
        let busy = shape.micro_batches as u64 * stages.map(|s| costs.total(s)).sum::<u64>();
        let idle = |size: usize| (1..=size).map(|n| wait(shape, costs, r, size, n)).max();
        busy + shape.units().into_iter().filter_map(idle).sum::<u64>()
    };
    (0..shape.pp).map(rank_span).max().unwrap_or(0)
}

/// How long rank `r` idles in a unit of `size` before its `n`-th B (n from 1).
fn wait(shape: &Shape, costs: &OrderCosts, r: usize, size: usize, n: usize) -> u64 {
    let (pp, last) = (shape.pp, (shape.virtual_stages - 1) * shape.pp);
    let (size, n) = (size as u64, n as u64);
    let first_forwards = |j: usize| {
        let stages = (0..shape.virtual_stages - 1).map(|v| v * pp + j);
        size * stages.map(|s| costs.f[s]).sum::<u64>()
    };
    let arrival = |j: usize| {
        let there: u64 = (r..j).map(|s| costs.f[s] + costs.send).sum();
        let back: u64 = (r + 1..j).map(|k| costs.b[last + k] + costs.send).sum();
        let own = first_forwards(j) + n * (costs.f[last + j] + costs.b[last + j]);
        there + own + back + costs.send
    };
    let earliest = (r + 1..pp).map(arrival).max().unwrap_or(0);
    let forwards = first_forwards(r) + size * costs.f[last + r];
    let work = forwards + (n - 1) * (costs.b[last + r] + costs.w[last + r]);
    earliest.saturating_sub(work)
}
