//! Colours, textures and words that the pictures share.
//!
//! The colours are Okabe and Ito's, which the colour-blind tell apart; light ones stand beside dark
//! ones, and those of like lightness have unlike textures, so that a grey print works too. The
//! stages of one rank have the same colour in different shades, the first the darkest.

use crate::{
    ir::{Action, Compute},
    timeline::{RankTimeline, Timeline},
};

/// Red, green, blue.
pub(super) type Rgb = [u8; 3];

/// What is drawn over a colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Texture {
    Solid,
    /// Stripes that rise to the right.
    Diagonal,
    /// Stripes along the time axis.
    Horizontal,
    Dots,
}

/// How one kind of action looks.
pub(super) struct Style {
    /// For the legend.
    pub(super) name: &'static str,
    pub(super) color: Rgb,
    pub(super) texture: Texture,
}

const fn style(name: &'static str, color: u32, texture: Texture) -> Style {
    Style { name, color: [(color >> 16) as u8, (color >> 8) as u8, color as u8], texture }
}

/// Index of the forward in [`STYLES`]; an overlap is drawn as this above [`WHOLE_BACKWARD`].
pub(super) const FORWARD: usize = 0;
pub(super) const WHOLE_BACKWARD: usize = 3;
pub(super) const OVERLAP: usize = 12;

/// All styles; [`style_of`] gives an index.
pub(super) const STYLES: [Style; 14] = [
    style("F", 0x0072b2, Texture::Solid),
    style("B", 0xe69f00, Texture::Solid),
    style("W", 0x009e73, Texture::Diagonal),
    style("BW", 0xd55e00, Texture::Horizontal),
    style("R", 0x56b4e9, Texture::Dots),
    style("optimizer", 0x333333, Texture::Solid),
    style("send", 0xcc79a7, Texture::Solid),
    style("receive", 0xe3b0cc, Texture::Solid),
    style("all-gather", 0xf0e442, Texture::Solid),
    style("free", 0x999999, Texture::Solid),
    style("reduce-scatter", 0x5c4a72, Texture::Solid),
    style("replica reduce", 0x000000, Texture::Solid),
    style("F & BW overlapped", 0x0072b2, Texture::Solid),
    style("validate update", 0xb2182b, Texture::Solid),
];

/// Idle within a rank's own span.
pub(super) const IDLE: Rgb = [0xe4, 0xe4, 0xe4];

pub(super) fn style_of(action: &Action) -> usize {
    match action {
        Action::Compute { kind: Compute::F, .. } => FORWARD,
        Action::Compute { kind: Compute::B, .. } => 1,
        Action::Compute { kind: Compute::W, .. } => 2,
        Action::Compute { kind: Compute::BW, .. } => WHOLE_BACKWARD,
        Action::Compute { kind: Compute::R, .. } => 4,
        Action::OptimizerStep => 5,
        Action::Send { .. } => 6,
        Action::Recv { .. } => 7,
        Action::AllGather { .. } => 8,
        Action::Free { .. } => 9,
        Action::ReduceScatter { .. } => 10,
        Action::ReplicaReduce { .. } => 11,
        Action::Overlap { .. } => OVERLAP,
        Action::Validate => 13,
    }
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

/// Whether white text reads better than black on `color` (relative luminance, WCAG). A third power
/// stands for the screen's 2.2, as powers of fractions take 2 KB in the page's program.
pub(super) fn wants_white_text(color: Rgb) -> bool {
    let linear = color.map(|c| f64::from(c) / 255.0).map(|c| c * c * (0.75 + 0.25 * c));
    luminance(linear) < 0.24135
}

fn luminance(linear: [f64; 3]) -> f64 {
    0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
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
    fn text_is_white_where_the_luminance_on_a_screen_says_so() {
        for style in &STYLES {
            for shade in 0..=1000 {
                let color = shaded(style.color, f64::from(shade) / 1000.0);
                let linear = color.map(|c| (f64::from(c) / 255.0).powf(2.2));
                assert_eq!(wants_white_text(color), luminance(linear) < 0.24, "{color:?}");
            }
        }
    }
}
