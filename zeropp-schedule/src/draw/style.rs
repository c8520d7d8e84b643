//! Colours, textures and words that the pictures share.
//!
//! The colours are Okabe and Ito's, which the colour-blind tell apart; light ones stand beside dark
//! ones, and those of like lightness have unlike textures, so that a grey print works too. The
//! stages of one rank have the same colour in different shades, the first the darkest.

use std::sync::LazyLock;

use crate::{
    action::{ACTIONS, ActionStyle},
    ir::Action,
    timeline::{RankTimeline, Timeline},
};

/// Red, green, blue.
pub(super) type Rgb = [u8; 3];

/// Where the forward's look is in [`LOOKS`]; an overlap is drawn as this above
/// [`WHOLE_BACKWARD`].
pub(super) const FORWARD: usize = 0;
pub(super) const WHOLE_BACKWARD: usize = 3;
pub(super) const OVERLAP: usize = 12;

/// All looks of actions in the order of legends; [`look_of`] gives an index.
pub(super) static LOOKS: LazyLock<Vec<&ActionStyle>> = LazyLock::new(|| {
    let mut looks: Vec<&ActionStyle> = ACTIONS.iter().map(|row| &row.look).collect();
    looks.sort_by_key(|look| look.place);
    looks.dedup();
    looks
});

/// Idle within a rank's own span.
pub(super) const IDLE: Rgb = [0xe4, 0xe4, 0xe4];

/// The place of an action's look in [`LOOKS`].
pub(super) fn look_of(action: &Action) -> usize {
    action.row().look.place
}

/// The shade of each stage, 0 (the rank's first stage) to 1 (its last, of the rank with most).
pub(super) fn shades(placement: &[usize]) -> Vec<f64> {
    let place =
        |stage: usize| placement[..stage].iter().filter(|rank| **rank == placement[stage]).count();
    let places: Vec<usize> = (0..placement.len()).map(place).collect();
    let last = places.iter().copied().max().unwrap_or(0).max(1);
    places.into_iter().map(|p| p as f64 / last as f64).collect()
}

/// `color` in a shade: up to half way to white.
pub(super) fn shaded(color: Rgb, shade: f64) -> Rgb {
    color.map(|c| (f64::from(c) + 0.55 * shade * (255.0 - f64::from(c))).round() as u8)
}

/// Whether white text reads better than black on `color` (relative luminance, WCAG).
pub(super) fn wants_white_text(color: Rgb) -> bool {
    let [r, g, b] = color.map(|c| (f64::from(c) / 255.0).powf(2.2));
    0.2126 * r + 0.7152 * g + 0.0722 * b < 0.24
}

/// `#rrggbb`.
pub(super) fn hex([r, g, b]: Rgb) -> String {
    format!("#{r:02x}{g:02x}{b:02x}")
}

/// A duration with the unit that suits it and at least three digits.
pub(super) fn time_text(ns: u64) -> String {
    let (value, unit) = match ns {
        0..1_000 => return format!("{ns} ns"),
        1_000..1_000_000 => (ns as f64 / 1e3, "µs"),
        1_000_000..1_000_000_000 => (ns as f64 / 1e6, "ms"),
        _ => (ns as f64 / 1e9, "s"),
    };
    let decimals = if value < 10.0 {
        2
    } else if value < 100.0 {
        1
    } else {
        0
    };
    format!("{value:.decimals$} {unit}")
}

/// A rank's label.
pub(super) fn rank_name(index: usize, rank: &RankTimeline) -> String {
    if rank.name.is_empty() { format!("rank {index}") } else { rank.name.clone() }
}

/// First start and last end of anything, ns; (0, 1) where nothing happens.
pub(super) fn extent(timeline: &Timeline) -> (u64, u64) {
    let spans = || timeline.ranks.iter().flat_map(|r| &r.spans);
    let points = timeline.ranks.iter().flat_map(|r| &r.memory);
    let start = spans().map(|s| s.start_ns).min().unwrap_or(0);
    let end = spans().map(|s| s.end_ns).chain(points.map(|m| m.at_ns)).max().unwrap_or(0);
    (start, end.max(start + 1))
}

/// From the first pipeline compute of any rank to the last, ns.
pub(super) fn makespan_ns(timeline: &Timeline) -> u64 {
    let spans = || timeline.ranks.iter().filter_map(RankTimeline::own_span);
    let start = spans().map(|s| s.0).min().unwrap_or(0);
    spans().map(|s| s.1).max().unwrap_or(0).saturating_sub(start)
}

/// A rank's largest memory.
pub(super) fn peak(rank: &RankTimeline) -> u64 {
    rank.memory.iter().map(|m| m.bytes).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_look_is_at_its_place_and_actions_that_share_one_share_all_of_it() {
        for (i, look) in LOOKS.iter().enumerate() {
            assert_eq!(look.place, i, "{}", look.name);
        }
    }
}
