//! Kinds of schedule side by side, as a chart: bubble over memory.

use super::chart::{CurveStyle, Dot, Panel};
use crate::timeline::MemoryUnit;

/// Axes of smaller bubbles, in per cent, are not drawn larger.
const BUBBLE_MIN: f64 = 2.0;

/// One kind.
#[derive(Clone, Debug)]
pub struct KindDot {
    /// Its name.
    pub kind: String,
    /// Idle share of all ranks, 0 to 1.
    pub bubble: f64,
    /// Most activations and weight stashes of a rank.
    pub peak: u64,
    /// Whether it stands out.
    pub chosen: bool,
}

/// The chart.
pub fn panel(kinds: &[KindDot], memory: MemoryUnit) -> Panel {
    let (size, unit) = match memory {
        MemoryUnit::Units => (1.0, "units"),
        MemoryUnit::Bytes => ((1u64 << 20) as f64, "MiB"),
    };
    let dot = |kind: &KindDot| Dot {
        name: kind.kind.clone(),
        about: format!("{}: {:.2} %, {}", kind.kind, 100.0 * kind.bubble, memory.text(kind.peak)),
        at: (kind.peak as f64 / size, 100.0 * kind.bubble),
        look: CurveStyle::one_of(usize::from(kind.chosen), 2),
    };
    Panel {
        dots: kinds.iter().map(dot).collect(),
        covers: vec![(0.0, 0.0), (0.0, BUBBLE_MIN)],
        ..Panel::new("Bubble, %, over memory", &format!("peak memory of a rank, {unit}"))
    }
}
