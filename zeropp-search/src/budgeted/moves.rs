//! Small changes of a plan.

use super::decode::OrderTimes;
use super::problem::Problem;
use super::random::Random;
use super::sequence::{Change, RankOrders, RankSequence};

pub(super) type Changed = Vec<Change>;

/// Makes one random change of `plan`, a third of them where a rank waits in the plan that the
/// decoder accepted last; false where it came out impossible. The sequences named in
/// `changed` may be spoilt then.
pub(super) fn change(
    p: &Problem,
    plan: &mut RankOrders,
    decoder: &OrderTimes,
    random: &mut Random,
    out: &mut Changed,
) -> bool {
    out.clear();
    if random.once_in(3) {
        return at_a_wait(p, plan, decoder, random, out);
    }
    let rank = random.below(p.ranks);
    match random.below(100) {
        0..45 => {
            let by = distance(random);
            block(p, &mut plan.sequences[rank], rank, 1, by, random, out) && !out.is_empty()
        }
        45..60 => {
            let (len, by) = (2 + random.below(6), distance(random));
            block(p, &mut plan.sequences[rank], rank, len, by, random, out) && !out.is_empty()
        }
        60..78 => on_several_ranks(p, plan, rank, random, out),
        78..86 => range_of_batches(p, plan, rank, random, out),
        86..91 => insert_w(p, &mut plan.sequences[rank], rank, random, out),
        91..96 => remove_w(p, &mut plan.sequences[rank], rank, random, out),
        _ => {
            let w = p.longest_w[rank];
            let any = 1 + random.below(2 * w.clamp(1, 1 << 30) as usize) as i64;
            plan.sequences[rank].threshold = if random.once_in(3) { w.max(1) } else { any };
            out.push(Change { rank, from: 0, to: usize::MAX });
            true
        }
    }
}

/// A change where a rank waits: another entry into the gap, or what it waits for earlier.
fn at_a_wait(
    p: &Problem,
    plan: &mut RankOrders,
    decoder: &OrderTimes,
    random: &mut Random,
    out: &mut Changed,
) -> bool {
    let mut rank = if random.once_in(2) { decoder.longest() } else { random.below(p.ranks) };
    let n = plan.sequences[rank].entries.len();
    let from = random.below(n);
    let found = (0..n).map(|k| (from + k) % n).find(|&at| decoder.wait(rank, at) > 0);
    let Some(mut at) = found else { return false };
    let far = 1 + (random.exponential() * if random.once_in(4) { 8.0 } else { 2.0 }) as isize;
    let filled = match random.below(4) {
        0 => {
            let Some(from) = at.checked_add_signed(far).filter(|from| *from < n) else {
                return false;
            };
            shift(p, &mut plan.sequences[rank], rank, from, -far, 1, out)
        }
        1 => shift(p, &mut plan.sequences[rank], rank, at, far, 1, out),
        _ => {
            // Back along the chain that it waits for, and one entry of the chain earlier.
            loop {
                let sequence = &plan.sequences[rank];
                let class = usize::from(sequence.entries[at]);
                let waits = at > 0 && class < p.classes && decoder.wait(rank, at) > 0;
                if waits || at == 0 {
                    let Some((q, k)) = p.source.get(rank * p.classes + class).copied().flatten()
                    else {
                        return false;
                    };
                    let i = usize::from(sequence.batch[at]);
                    rank = q as usize;
                    let Some(there) = plan.sequences[rank].position(k as usize, i) else {
                        return false;
                    };
                    at = there;
                } else if random.once_in(3) {
                    break;
                } else {
                    at -= 1;
                }
            }
            shift(p, &mut plan.sequences[rank], rank, at, -far, 1, out)
        }
    };
    filled && !out.is_empty()
}

/// How far an entry moves: mostly a few places, sometimes a dozen.
fn distance(random: &mut Random) -> isize {
    let mean = if random.once_in(4) { 12.0 } else { 2.5 };
    let far = 1 + (random.exponential() * mean) as isize;
    if random.once_in(2) { far } else { -far }
}

fn block(
    p: &Problem,
    sequence: &mut RankSequence,
    rank: usize,
    len: usize,
    by: isize,
    random: &mut Random,
    out: &mut Changed,
) -> bool {
    let from = random.below(sequence.entries.len());
    shift(p, sequence, rank, from, by, len, out)
}

fn shift(
    p: &Problem,
    sequence: &mut RankSequence,
    rank: usize,
    from: usize,
    by: isize,
    len: usize,
    out: &mut Changed,
) -> bool {
    let to = from as isize + by;
    if to < 0 || to as usize + len > sequence.entries.len() || from + len > sequence.entries.len() {
        return false;
    }
    // Most of a block is entries of one kind, and moving one among its like changes nothing.
    let (low, high) = (from.min(to as usize), from.max(to as usize) + len);
    if sequence.entries[low..high].iter().all(|entry| *entry == sequence.entries[low]) {
        return true;
    }
    mark(out, rank, low, high);
    sequence.shift(p.v, from, to, len)
}

fn mark(out: &mut Changed, rank: usize, from: usize, to: usize) {
    match out.iter_mut().find(|change| change.rank == rank) {
        Some(change) => (change.from, change.to) = (from.min(change.from), to.max(change.to)),
        None => out.push(Change { rank, from, to }),
    }
}

/// Shifts the entry of one class and micro-batch, where the rank has it and there is room; false
/// where that comes out impossible.
fn shift_entry(
    p: &Problem,
    plan: &mut RankOrders,
    rank: usize,
    (class, batch): (usize, usize),
    by: isize,
    out: &mut Changed,
) -> bool {
    let sequence = &mut plan.sequences[rank];
    let Some(at) = sequence.position(class, batch) else { return true };
    let to = at as isize + by;
    let inside = to >= 0 && (to as usize) < sequence.entries.len();
    !inside || shift(p, sequence, rank, at, by, 1, out)
}

/// The same entry on neighbouring ranks, by the same number of places.
fn on_several_ranks(
    p: &Problem,
    plan: &mut RankOrders,
    rank: usize,
    random: &mut Random,
    out: &mut Changed,
) -> bool {
    let last = (rank + 1 + random.below(p.ranks)).min(p.ranks - 1);
    let (class, i, by) = (random.below(p.classes), random.below(p.b), distance(random));
    (rank..=last).all(|r| shift_entry(p, plan, r, (class, i), by, out)) && !out.is_empty()
}

/// A range of micro-batches of one class, on one rank or several.
fn range_of_batches(
    p: &Problem,
    plan: &mut RankOrders,
    rank: usize,
    random: &mut Random,
    out: &mut Changed,
) -> bool {
    let (class, first) = (random.below(p.classes), random.below(p.b));
    // Neighbours, or what comes at the same place of every period.
    let periodic = plan.stride > 0 && plan.stride < p.b && random.once_in(2);
    let (first, step, last) = match periodic {
        true => (first % plan.stride, plan.stride, p.b - 1),
        false => (first, 1, (first + 1 + random.below(8)).min(p.b - 1)),
    };
    let count = (last - first) / step;
    let far = 1 + random.below(3) as isize;
    let by = if random.once_in(2) { far } else { -far };
    let end = match random.once_in(3) {
        true => (rank + 1 + random.below(p.ranks)).min(p.ranks - 1),
        false => rank,
    };
    for r in rank..=end {
        for n in 0..=count {
            let i = first + step * if by > 0 { count - n } else { n };
            if !shift_entry(p, plan, r, (class, i), by, out) {
                return false;
            }
        }
    }
    !out.is_empty()
}

fn insert_w(
    p: &Problem,
    sequence: &mut RankSequence,
    rank: usize,
    random: &mut Random,
    out: &mut Changed,
) -> bool {
    // More W than there are would ask for nothing.
    if sequence.entries.len() >= p.b * (p.classes + p.v) {
        return false;
    }
    let at = random.below(sequence.entries.len());
    sequence.entries.insert(at, p.classes as u8);
    sequence.batch.insert(at, 0);
    out.push(Change { rank, from: at, to: usize::MAX });
    true
}

fn remove_w(
    p: &Problem,
    sequence: &mut RankSequence,
    rank: usize,
    random: &mut Random,
    out: &mut Changed,
) -> bool {
    let n = sequence.entries.len();
    let from = random.below(n);
    let found = (0..n).map(|k| (from + k) % n).find(|&at| sequence.entries[at] == p.classes as u8);
    // The last entry stays, so that there is one to time.
    let Some(at) = found.filter(|at| at + 1 < n) else { return false };
    sequence.entries.remove(at);
    sequence.batch.remove(at);
    out.push(Change { rank, from: at, to: usize::MAX });
    true
}
