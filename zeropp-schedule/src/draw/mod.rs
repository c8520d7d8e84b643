//! Pictures of a run: a Chrome trace for Perfetto, SVG, and a self-contained HTML page. All take a
//! [`Timeline`](crate::timeline::Timeline), so a simulated and a measured run look alike. Beside
//! them charts of numbers, and pages that hold both.

mod arrows;
pub mod chart;
pub mod chrome;
pub mod chrome_read;
pub mod html;
pub mod kinds;
pub mod page;
mod palette;
mod style;
pub mod svg;

pub use palette::palette;

use crate::{
    ir::Action,
    timeline::{Lane, Span},
};

/// Text for SVG and HTML, also within quotes: no markup, and no character that XML cannot hold or a
/// terminal would obey.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\n' => out.push(c),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// A span's place in a picture: communication may overlap itself, so a lane has as many rows as
/// it takes to draw no two spans of it over each other.
#[derive(Clone, Copy)]
struct Placed {
    /// Index into the rank's spans.
    span: usize,
    /// Row within the span's lane; 0 unless something overlaps.
    row: usize,
}

/// Every span of a rank once, each in the first row that is free: those of compute, then those of
/// communication, then receives, which wait more than they work and get rows below the rest, then
/// copies, and below them the waits for them. Within
/// each of these in order of start, end and program. Spans are never lost: what overlaps opens
/// another row.
fn place(spans: &[Span]) -> Vec<Placed> {
    let class = |s: &Span| (s.lane, matches!(s.action, Action::Recv { .. } | Action::Gone { .. }));
    let mut order: Vec<usize> = (0..spans.len()).collect();
    order.sort_by_key(|i| {
        let s = &spans[*i];
        (class(s), s.start_ns, s.end_ns.max(s.start_ns), *i)
    });
    let mut free_at: Vec<u64> = Vec::new();
    let (mut now, mut first_row) = ((Lane::Compute, false), 0);
    let mut placed = Vec::with_capacity(order.len());
    for span in order {
        let s = &spans[span];
        if class(s) != now {
            first_row = if s.lane == now.0 { first_row + free_at.len() } else { 0 };
            (now, free_at) = (class(s), Vec::new());
        }
        let row = free_at.iter().position(|end| *end <= s.start_ns).unwrap_or(free_at.len());
        if row == free_at.len() {
            free_at.push(0);
        }
        free_at[row] = s.end_ns.max(s.start_ns);
        placed.push(Placed { span, row: first_row + row });
    }
    placed
}

#[cfg(test)]
pub(crate) mod samples;
