//! Times that no schedule of one stage a rank can beat.

use super::Instance;

/// A lower bound on the largest own span (first F to last W) of any schedule, whatever its order,
/// with ranks that start their first F when they like.
///
/// Per rank: its busy time, plus the time it must wait for a gradient that cannot be there earlier
/// while memory lets it do no other work (head), plus the time it must wait for the last gradients
/// when too little work is left (tail). A head and a tail add up where memory keeps them apart.
pub(super) fn own_span(instance: &Instance) -> u64 {
    (0..instance.stages()).map(|i| rank_span(instance, i)).max().unwrap_or(0)
}

fn rank_span(instance: &Instance, i: usize) -> u64 {
    let m = instance.micro_batches;
    let heads: Vec<u64> = (1..=m).map(|n| head(instance, i, n)).collect();
    let tails: Vec<u64> = (1..=m).map(|n| tail(instance, i, n)).collect();
    let mut idle = heads.iter().chain(&tails).copied().max().unwrap_or(0);
    // Before F number `later` starts, at least `later − k` backwards have run, so what is waited
    // before one of those and what is waited after that F are different times.
    let room = instance.in_flight_max(i);
    for later in room + 1..=m {
        let head = heads[..later - room].iter().max().copied().unwrap_or(0);
        idle = idle.max(head + tails[later - 1]);
    }
    m as u64 * instance.costs.total(i) + idle
}

/// How long rank `i` idles before its n-th B starts (n from 1).
fn head(instance: &Instance, i: usize, n: usize) -> u64 {
    let (costs, m) = (instance.costs, instance.micro_batches);
    let count = n as u64;
    // A rank j behind can end its n-th B only after n F and n B, and starts after a chain of F.
    let arrival = |j: usize| {
        let there: u64 = (i..j).map(|s| costs.f[s] + costs.send).sum();
        let back: u64 = (i + 1..j).map(|s| costs.b[s] + costs.send).sum();
        there + count * (costs.f[j] + costs.b[j]) + back + costs.send
    };
    let own = count * costs.f[i] + (count - 1) * costs.b[i];
    let earliest = (i + 1..instance.stages()).map(arrival).max().unwrap_or(0).max(own);
    let forwards = (instance.in_flight_max(i) + n - 1).min(m) as u64;
    let work = forwards * costs.f[i] + (count - 1) * (costs.b[i] + costs.w[i]);
    earliest.saturating_sub(work)
}

/// How long rank `i` idles after its n-th F starts (n from 1).
fn tail(instance: &Instance, i: usize, n: usize) -> u64 {
    let (costs, m) = (instance.costs, instance.micro_batches);
    let more = (m - n + 1) as u64;
    // A rank j behind must run F and B of these micro-batches after the n-th F has come down.
    let end = |j: usize| {
        let there: u64 = (i..j).map(|s| costs.f[s] + costs.send).sum();
        let back: u64 = (i..j).map(|s| costs.b[s] + costs.send).sum();
        there + more * (costs.f[j] + costs.b[j]) + back
    };
    let earliest = (i..instance.stages()).map(end).max().unwrap_or(0) + costs.w[i];
    let work = more * costs.f[i] + m as u64 * (costs.b[i] + costs.w[i]) - freed(instance, i, n);
    earliest.saturating_sub(work)
}

/// The least time that rank `i` has spent on B and W when memory lets it start its n-th F.
fn freed(instance: &Instance, i: usize, n: usize) -> u64 {
    let costs = instance.costs;
    let all = (0..n).flat_map(|b| (0..=b).map(move |w| (b, w)));
    let enough = all.filter(|(b, w)| instance.memory(i, n, *b, *w) <= instance.limit());
    enough.map(|(b, w)| b as u64 * costs.b[i] + w as u64 * costs.w[i]).min().unwrap_or(0)
}
