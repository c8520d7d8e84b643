//! What stands before what among simulated layouts.

use crate::exact::Planned;

/// Layouts that are shown.
pub(crate) const SHOWN: usize = 10;
/// Times as long, and memory as large, as if there were no difference.
const SAME_TIME: f64 = 1.002;
const SAME_MEMORY: f64 = 0.98;
/// As much of the memory is so little that a layout is worth telling, if it is not much slower.
const MUCH_LESS_MEMORY: f64 = 0.8;
/// Times as long as another and still as good.
const TIE: f64 = 1.01;

/// The faster first; of equals the one that holds less; and one order for all, so that a plan is
/// the same each time.
pub(super) fn in_order(a: &Planned, b: &Planned) -> std::cmp::Ordering {
    let held = |p: &Planned| p.worst().1.total();
    let words = |p: &Planned| format!("{} {}", p.layout, p.layout.prefetch);
    a.step_s.total_cmp(&b.step_s).then(held(a).cmp(&held(b))).then_with(|| words(a).cmp(&words(b)))
}

/// What holds less first; of equals the faster one.
pub(super) fn by_memory(a: &Planned, b: &Planned) -> std::cmp::Ordering {
    a.worst().1.total().cmp(&b.worst().1.total()).then_with(|| in_order(a, b))
}

/// Those that are worth a row, of layouts in the order of their time: one of a strategy, which is a
/// mesh with its micro-batches and what it computes again. One that differs in V and the kind, and
/// so in U, has a row beside a faster one where it takes longer than the margin of the model, or
/// holds much less.
pub(super) fn distinct(all: Vec<Planned>, margin: f64) -> Vec<Planned> {
    let mesh = |p: &Planned| {
        let l = &p.layout;
        (l.pp, l.zero3, l.dp, l.zero1)
    };
    let strategy =
        |p: &Planned| (mesh(p), p.layout.micro_batch_size, p.layout.recompute, p.layout.out > 0);
    let held = |p: &Planned| p.worst().1.total() as f64;
    let stands_for = |better: &Planned, other: &Planned| {
        let is = |time: f64, memory: f64| {
            other.step_s < better.step_s * time && held(other) > held(better) * memory
        };
        let is_alike = strategy(better) == strategy(other) && is(1.0 + margin, MUCH_LESS_MEMORY);
        is_alike || mesh(better) == mesh(other) && is(SAME_TIME, SAME_MEMORY)
    };
    let mut kept: Vec<Planned> = Vec::new();
    for planned in all {
        if !kept.iter().any(|better| stands_for(better, &planned)) {
            kept.push(planned);
        }
    }
    kept
}

/// Layouts in the order of their time, but of those that tie the one first that sends least to
/// other nodes: rates of links between nodes are the ones that are known least.
pub(super) fn lean_first(mut in_order: Vec<Planned>) -> Vec<Planned> {
    let mut all = Vec::new();
    while let Some(fastest) = in_order.first() {
        let tie = in_order.iter().take_while(|p| p.step_s < fastest.step_s * TIE);
        let least = |(_, a): &(usize, &Planned), (_, b): &(usize, &Planned)| {
            a.traffic.between.total_cmp(&b.traffic.between)
        };
        let at = tie.enumerate().min_by(least).map_or(0, |(at, _)| at);
        all.push(in_order.remove(at));
    }
    all
}
