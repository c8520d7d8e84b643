//! Closed forms of a kind: what planners rank layouts by, and leave them out by, before a
//! schedule is made.

use super::{Shape, idle_slots};

/// Whether planners choose among layouts of a kind.
pub enum Planning {
    /// They do, and rank them by these forms.
    With(Forms),
    /// They do not, for this reason, in words.
    Not(&'static str),
}

/// What is known of a step in closed form. [`Forms::UNKNOWN`] is safe for any kind.
#[derive(Clone, Copy)]
pub struct Forms {
    /// What a rank waits for others in a step, about, in the unit of the times.
    pub waits: fn(&Shape, &MeanTimes) -> f64,
    /// Whether a stage is gathered at most twice a unit, not once for each round of P.
    pub gathers_by_unit: bool,
    /// What a rank holds at least when it holds most, where stages are recomputed (`true`) or
    /// not; none where nothing is known of the rank. Only ranks 0 and 1 are asked for.
    pub in_flight: fn(&Shape, usize, bool) -> Option<FewestHeld>,
    /// Whether a rank holds as much again after the first W of each of its stages.
    pub refills: fn(&Shape) -> bool,
}

/// Mean times of a stage, and the time of a message.
#[derive(Clone, Copy, Debug)]
pub struct MeanTimes {
    /// A forward.
    pub f: f64,
    /// The gradient of the input.
    pub b: f64,
    /// The gradient of the weights.
    pub w: f64,
    /// A message from one stage to the next.
    pub message: f64,
}

impl MeanTimes {
    fn all(&self) -> f64 {
        self.f + self.b + self.w
    }

    /// Until the first micro-batch is on the last of `pp` ranks.
    fn fill(&self, pp: usize) -> f64 {
        before(pp) * (self.f + self.message)
    }
}

/// Micro-batches of a stage that a rank holds at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FewestHeld {
    /// Those of which it keeps everything.
    pub whole: usize,
    /// Those of which it keeps only the input.
    pub inputs: usize,
}

impl FewestHeld {
    /// Of `all` micro-batches over the stages of `rank`, of which `first` may be of stage 0, whose
    /// inputs are tokens.
    fn of(shape: &Shape, rank: usize, full: bool, [all, first]: [usize; 2]) -> FewestHeld {
        let Shape { virtual_stages, micro_batches, .. } = *shape;
        let all = all.min(virtual_stages * micro_batches);
        if !full {
            return FewestHeld { whole: all, inputs: 0 };
        }
        // Where stages are recomputed one of them is whole at a time.
        let without = if rank == 0 { first } else { 1 };
        FewestHeld { whole: 1, inputs: all.saturating_sub(without) }
    }
}

/// The ranks before the last one.
fn before(pp: usize) -> f64 {
    pp as f64 - 1.0
}

/// From this many micro-batches on a rank of most kinds holds as much again after its first W.
fn two_rounds(shape: &Shape) -> bool {
    shape.micro_batches >= 2 * shape.pp
}

impl Forms {
    /// Of a kind of which nothing is known: the bubble of 1F1B, one micro-batch held.
    pub const UNKNOWN: Forms = Forms {
        waits: |shape, times| before(shape.pp) * times.all(),
        gathers_by_unit: false,
        in_flight: |shape, rank, full| Some(FewestHeld::of(shape, rank, full, [1, 1])),
        refills: |_| false,
    };

    pub(super) const ZEROPP: Forms = Forms {
        waits: |shape, times| {
            let idle: usize =
                shape.units().iter().map(|n| idle_slots(shape.pp, shape.virtual_stages, *n)).sum();
            idle as f64 * times.all() / 3.0 + times.fill(shape.pp)
        },
        gathers_by_unit: true,
        in_flight: |shape, rank, full| {
            let Shape { pp, virtual_stages: v, .. } = *shape;
            let unit = shape.unit.min(shape.micro_batches);
            let last = unit.min(2 * pp - 1);
            let held = match full {
                // All but the last of several stages are recomputed; stage 0's inputs are tokens.
                true if v == 1 => FewestHeld { whole: 1, inputs: last - 1 },
                true => FewestHeld { whole: last, inputs: v.saturating_sub(2) * unit },
                false => FewestHeld { whole: (v - 1) * unit + last, inputs: 0 },
            };
            (rank == 0).then_some(held)
        },
        // A last unit may be a smaller one.
        refills: |shape| shape.micro_batches >= 2 * shape.unit,
    };

    pub(super) const ONE_F_ONE_B: Forms = Forms {
        waits: |shape, times| before(shape.pp) * (times.all() + 2.0 * times.message),
        in_flight: one_stage,
        refills: two_rounds,
        ..Forms::UNKNOWN
    };

    pub(super) const INTERLEAVED: Forms =
        Forms { waits: many_messages, in_flight: by_turns, refills: two_rounds, ..Forms::UNKNOWN };

    pub(super) const INTERLEAVED_ZB: Forms =
        Forms { waits: w_fills, in_flight: by_turns, refills: two_rounds, ..Forms::UNKNOWN };

    pub(super) const BREADTH_FIRST: Forms = Forms {
        waits: many_messages,
        gathers_by_unit: true,
        in_flight: |shape, rank, full| {
            let Shape { virtual_stages, micro_batches, .. } = *shape;
            let all = [virtual_stages * micro_batches, micro_batches];
            Some(FewestHeld::of(shape, rank, full, all))
        },
        ..Forms::UNKNOWN
    };

    pub(super) const ZB_H1: Forms =
        Forms { waits: w_fills, in_flight: one_stage, refills: two_rounds, ..Forms::UNKNOWN };

    pub(super) const ZB_H2: Forms = Forms {
        waits: |shape, times| {
            before(shape.pp) * (times.f + times.b - 2.0 * times.w).max(0.0) + times.fill(shape.pp)
        },
        in_flight: one_stage,
        ..Forms::UNKNOWN
    };

    pub(super) const DUALPIPE_V: Forms = Forms {
        waits: |shape, times| before(shape.pp) * (times.f + times.b - times.w).max(times.f),
        ..Forms::UNKNOWN
    };

    /// A wave has two stages on each rank: the more of them, the shorter each.
    pub(super) const HANAYO: Forms = Forms { waits: many_messages, ..Forms::UNKNOWN };

    pub(super) const ZB_V: Forms = Forms {
        waits: |shape, times| times.fill(shape.pp),
        in_flight: |shape, rank, full| folded(shape, rank, full, 1),
        refills: two_rounds,
        ..Forms::UNKNOWN
    };

    pub(super) const V_HALF: Forms = Forms {
        waits: |shape, times| 0.5 * before(shape.pp) * shape.virtual_stages as f64 * times.all(),
        in_flight: |shape, rank, full| folded(shape, rank, full, 2),
        refills: two_rounds,
        ..Forms::UNKNOWN
    };

    pub(super) const V_MIN: Forms = Forms {
        waits: |shape, times| 0.67 * before(shape.pp) * shape.virtual_stages as f64 * times.all(),
        in_flight: |shape, rank, full| folded(shape, rank, full, 3),
        refills: two_rounds,
        ..Forms::UNKNOWN
    };
}

/// Every chunk of the last micro-batch waits for a message each way.
fn many_messages(shape: &Shape, times: &MeanTimes) -> f64 {
    before(shape.pp) * (times.all() + 2.0 * times.message * shape.virtual_stages as f64)
}

/// W fills what 1F1B waits.
fn w_fills(shape: &Shape, times: &MeanTimes) -> f64 {
    before(shape.pp) * (times.f + times.b - times.w).max(0.0) + times.fill(shape.pp)
}

fn one_stage(shape: &Shape, rank: usize, full: bool) -> Option<FewestHeld> {
    Some(FewestHeld::of(shape, rank, full, [shape.pp - rank, shape.pp]))
}

fn by_turns(shape: &Shape, rank: usize, full: bool) -> Option<FewestHeld> {
    let all = shape.stages();
    Some(FewestHeld::of(shape, rank, full, [all - rank, all]))
}

/// On rank 0 of a V, the share of P micro-batches.
fn folded(shape: &Shape, rank: usize, full: bool, share: usize) -> Option<FewestHeld> {
    let all = [shape.pp.div_ceil(share), shape.pp];
    (rank == 0).then(|| FewestHeld::of(shape, rank, full, all))
}
