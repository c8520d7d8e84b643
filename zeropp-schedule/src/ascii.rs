//! A run as text: a row per rank, a column per time slot.
//!
//! Cells read kind, then micro-batch: `F3`, `B3`, `W3`, `BW3`, `R3`; where a rank has several
//! stages, a letter for the chunk goes first (`aF3` is the rank's lowest stage). A cell longer than
//! its text is filled with `-`, idle time is `.`. A run that does not fit the width is scaled down:
//! spans too short for their text show the letters of their kind (a whole backward an `X`). Where
//! not even each has a column, a column shows what took most of its time, and a line below says so:
//! letters of some of the spans would read as an order that never happened.

use std::fmt::Write;

use crate::ir::{Action, Compute, Task};
use crate::timeline::{Lane, RankTimeline, Span, Timeline};

/// Draws the compute lane of every rank at most `width_max` columns wide (names not counted).
///
/// Where all times are multiples of some slot, the chart is exact if it fits with a cell, or at
/// least a column, a slot; otherwise a column is a share of the makespan, and times are rounded.
/// Below the width where every span has a column, a last line says so, and which width that is.
pub fn chart(timeline: &Timeline, width_max: usize) -> String {
    let scale = ColumnScale::fitting(timeline, width_max.max(1));
    let names = timeline.ranks.iter().map(|r| r.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for rank in &timeline.ranks {
        let row = match scale.whole {
            None => row(timeline, rank, &scale),
            Some(_) => dominated(rank, &scale),
        };
        let _ = writeln!(text, "{:names$} |{row}|", rank.name);
    }
    if let Some(whole) = scale.whole {
        let width = scale.width;
        let _ = writeln!(
            text,
            "{width} columns are too few for every action: a letter is what took most of its \
             column's time. {whole} columns show all."
        );
    }
    text
}

/// Columns per nanosecond, as a fraction.
struct ColumnScale {
    columns: u128,
    per_ns: u128,
    /// Width of the whole chart.
    width: usize,
    /// Where some span has no column: the width from which on all have one.
    whole: Option<u64>,
}

impl ColumnScale {
    fn fitting(timeline: &Timeline, width_max: usize) -> ColumnScale {
        let spans = || timeline.ranks.iter().flat_map(drawn);
        let end = spans().map(|s| s.end_ns).max().unwrap_or(0);
        let slot = spans().flat_map(|s| [s.start_ns, s.end_ns]).fold(0, gcd).max(1);
        // A cell a slot, as wide as the widest text needs.
        let cell = spans().filter(|s| s.end_ns > s.start_ns).map(|s| {
            let slots = ((s.end_ns - s.start_ns) / slot) as usize;
            label(timeline, s).len().div_ceil(slots)
        });
        let cell = cell.max().unwrap_or(1);
        // Failing that a column a slot, which still is exact; failing that, rounded.
        let slots = usize::try_from(end / slot).unwrap_or(usize::MAX);
        for cell in [cell, 1] {
            if let Some(width) = slots.checked_mul(cell).filter(|width| *width <= width_max) {
                return ColumnScale {
                    columns: cell as u128,
                    per_ns: slot.into(),
                    width,
                    whole: None,
                };
            }
        }
        // A span as long as a column contains the start of one.
        let shortest = spans().map(|s| s.end_ns - s.start_ns).filter(|ns| *ns > 0).min();
        let whole = shortest.map_or(0, |ns| end.div_ceil(ns));
        let whole = Some(whole).filter(|whole| *whole > width_max as u64);
        ColumnScale { columns: width_max as u128, per_ns: end.into(), width: width_max, whole }
    }

    fn column(&self, ns: u64) -> usize {
        (u128::from(ns) * self.columns / self.per_ns) as usize
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The spans that the chart shows.
fn drawn(rank: &RankTimeline) -> impl Iterator<Item = &Span> {
    rank.spans.iter().filter(|s| s.lane == Lane::Compute && s.action != Action::OptimizerStep)
}

fn row(timeline: &Timeline, rank: &RankTimeline, scale: &ColumnScale) -> String {
    let mut row = vec![b'.'; scale.width];
    for span in drawn(rank) {
        let cell = &mut row[scale.column(span.start_ns)..scale.column(span.end_ns)];
        let label = label(timeline, span);
        if label.len() <= cell.len() {
            cell.fill(b'-');
            cell[..label.len()].copy_from_slice(label.as_bytes());
        } else {
            cell.fill(short(span));
        }
    }
    String::from_utf8(row).expect("ASCII only")
}

/// What took most of each column's time; of two that took the same, what came first.
fn dominated(rank: &RankTimeline, scale: &ColumnScale) -> String {
    // Times in parts of a nanosecond, so that columns end at whole ones.
    let column = scale.per_ns;
    let mut shares = vec![Vec::<(u8, u128)>::new(); scale.width];
    for span in drawn(rank) {
        let [mut at, end] = [span.start_ns, span.end_ns].map(|ns| u128::from(ns) * scale.columns);
        while at < end {
            let i = (at / column) as usize;
            let until = end.min((i as u128 + 1) * column);
            let letter = short(span);
            match shares[i].iter_mut().find(|share| share.0 == letter) {
                Some(share) => share.1 += until - at,
                None => shares[i].push((letter, until - at)),
            }
            at = until;
        }
    }
    let most = |shares: Vec<(u8, u128)>| {
        let busy: u128 = shares.iter().map(|share| share.1).sum();
        let idle = (b'.', column.saturating_sub(busy));
        let larger = |a: (u8, u128), b: (u8, u128)| if b.1 > a.1 { b } else { a };
        char::from(shares.into_iter().chain([idle]).fold((b'.', 0), larger).0)
    };
    shares.into_iter().map(most).collect()
}

/// The text of a span's cell.
fn label(timeline: &Timeline, span: &Span) -> String {
    let mut label = String::new();
    for (i, Task { kind, stage, micro_batch }) in span.action.computes().enumerate() {
        let home = timeline.placement[stage];
        let on_rank = |s: &&usize| **s == home;
        let chunk = timeline.placement[..stage].iter().filter(on_rank).count();
        let chunks = timeline.placement.iter().filter(on_rank).count();
        let amp = if i > 0 { "&" } else { "" };
        // Beyond 26 chunks a letter no longer tells them apart; a number then does.
        let chunk = match (chunks, u8::try_from(chunk)) {
            (1, _) => String::new(),
            (..=26, Ok(n)) => char::from(b'a' + n).to_string(),
            _ => format!("{chunk}"),
        };
        let _ = write!(label, "{amp}{chunk}{kind:?}{micro_batch}");
    }
    label
}

/// One letter for a span that is too short for its text.
fn short(span: &Span) -> u8 {
    match span.action.computes().next().map(|task| task.kind) {
        Some(Compute::F) if matches!(span.action, Action::Overlap { .. }) => b'&',
        Some(Compute::F) => b'F',
        Some(Compute::B) => b'B',
        Some(Compute::W) => b'W',
        Some(Compute::BW) => b'X',
        Some(Compute::R) => b'R',
        None => b'?',
    }
}

#[cfg(test)]
mod tests;
