//! What a chart is made of, and its axes.

use super::look::CurveStyle;

/// How a curve is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// A line.
    Line,
    /// A line in the background: what a smoother one is made of.
    Faint,
    /// Points, joined by a broken line.
    Points,
    /// Points alone.
    Dots,
    /// All that is below it. A later curve lies on an earlier one.
    Area,
}

/// A curve. Points that are not finite are left out.
pub struct Curve {
    /// What it is of.
    pub name: String,
    /// Its points, in the order in which they are joined.
    pub points: Vec<(f64, f64)>,
    /// How it is drawn.
    pub mark: Mark,
    /// Curves of one run have one.
    pub look: CurveStyle,
}

/// A point with a name beside it.
pub struct Dot {
    /// Its name; dots at one place share a line of names.
    pub name: String,
    /// What a reader sees who points at it.
    pub about: String,
    /// Where it is.
    pub at: (f64, f64),
    /// Its colour.
    pub look: CurveStyle,
}

/// How an axis counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Equal lengths are equal differences.
    Linear,
    /// Equal lengths are equal ratios; what is not above 0 is left out.
    Log,
}

impl Scale {
    fn of(self, value: f64) -> f64 {
        if self == Scale::Log { value.log10() } else { value }
    }

    /// Whether an axis of this scale has a place for it.
    pub(super) fn has(self, value: f64) -> bool {
        value.is_finite() && (self == Scale::Linear || value > 0.0)
    }
}

/// Curves and dots over one pair of axes.
pub struct Panel {
    /// What is up, with its unit.
    pub title: String,
    /// Lines below the title: what the numbers are of.
    pub facts: Vec<String>,
    /// What is to the right, with its unit.
    pub across: String,
    /// The axis to the right.
    pub x: Scale,
    /// The axis upwards.
    pub y: Scale,
    /// The curves.
    pub curves: Vec<Curve>,
    /// Points with names.
    pub dots: Vec<Dot>,
    /// A place on the way, and what it is.
    pub mark: Option<(f64, String)>,
    /// Points that the axes reach, though nothing is drawn there.
    pub covers: Vec<(f64, f64)>,
}

impl Panel {
    /// An empty one.
    pub fn new(title: &str, across: &str) -> Panel {
        Panel {
            title: title.into(),
            facts: Vec::new(),
            across: across.into(),
            x: Scale::Linear,
            y: Scale::Linear,
            curves: Vec::new(),
            dots: Vec::new(),
            mark: None,
            covers: Vec::new(),
        }
    }

    /// Of `title` over steps.
    pub fn over_steps(title: &str, curves: Vec<Curve>) -> Panel {
        Panel { curves, ..Panel::new(title, "step") }
    }

    /// Every point that an axis has a place for.
    pub(super) fn points(&self) -> impl Iterator<Item = (f64, f64)> {
        let curves = self.curves.iter().flat_map(|c| &c.points).copied();
        let all = curves.chain(self.dots.iter().map(|dot| dot.at));
        all.chain(self.covers.iter().copied()).filter(|point| self.has(point.0, point.1))
    }

    /// Whether both axes have a place for a point.
    pub(super) fn has(&self, x: f64, y: f64) -> bool {
        self.x.has(x) && self.y.has(y)
    }
}

/// What an axis shows, from where to where, and its marks.
pub(super) struct Axis {
    scale: Scale,
    from: f64,
    to: f64,
    pub(super) marks: Vec<f64>,
}

impl Axis {
    /// For these values; marks that people count in, about `count` of them.
    pub(super) fn new(scale: Scale, values: impl Iterator<Item = f64>, count: f64) -> Axis {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in values {
            (low, high) = (low.min(value), high.max(value));
        }
        if low > high {
            (low, high) = (1.0, 1.0);
        }
        if scale == Scale::Log {
            let (from, to) = (low.log10(), high.log10());
            let (from, to) = if to - from < 0.1 { (from - 0.5, to + 0.5) } else { (from, to) };
            let decades = (from.floor() as i32..=to.ceil() as i32).map(|p| 10f64.powi(p));
            let inside = |m: &f64| (from - 1e-9..=to + 1e-9).contains(&m.log10());
            return Axis { scale, from, to, marks: decades.filter(inside).collect() };
        }
        if high - low <= 1e-12 * high.abs() {
            let around = if low == 0.0 { 1.0 } else { 0.1 * low.abs() };
            (low, high) = (low - around, high + around);
        }
        let step = nice((high - low) / count);
        let (from, to) = ((low / step).floor() * step, (high / step).ceil() * step);
        let marks = (0..=((to - from) / step).round() as i64).map(|i| from + i as f64 * step);
        Axis { scale, from, to, marks: marks.collect() }
    }

    /// Where a value lies, from 0 to 1.
    pub(super) fn place(&self, value: f64) -> f64 {
        (self.scale.of(value) - self.from) / (self.to - self.from)
    }
}

/// The 1, 2 or 5 of a decade that is not below `rough`.
fn nice(rough: f64) -> f64 {
    let decade = 10f64.powf(rough.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|n| n * decade).find(|n| *n >= rough).unwrap_or(rough)
}

/// A mark's number, short.
pub(super) fn short(value: f64) -> String {
    match value.abs() {
        x if x < 1e-12 => "0".into(),
        x if !(1e-3..1e6).contains(&x) => {
            let text = format!("{value:.2e}");
            let (digits, power) = text.split_once('e').unwrap_or((&text, "0"));
            format!("{}e{power}", digits.trim_end_matches('0').trim_end_matches('.'))
        }
        _ => {
            let text = format!("{value:.4}");
            text.trim_end_matches('0').trim_end_matches('.').into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_numbers_that_people_count_in() {
        let axis = Axis::new(Scale::Linear, [0.13, 0.97].into_iter(), 5.0);
        let marks: Vec<String> = axis.marks.iter().map(|m| short(*m)).collect();
        assert_eq!(marks, ["0", "0.2", "0.4", "0.6", "0.8", "1"]);
        let axis = Axis::new(Scale::Log, [1e-7, 0.5].into_iter(), 5.0);
        assert_eq!((axis.marks.len(), short(axis.marks[0])), (7, "1e-7".into()));
        for values in [vec![], vec![3.0], vec![0.0, 0.0], vec![-1.0, -1.0]] {
            let axis = Axis::new(Scale::Linear, values.into_iter(), 5.0);
            assert!(axis.from < axis.to && axis.marks.len() < 20);
        }
        assert_eq!(
            (short(2.5e-4), short(1e6), short(1234.5)),
            ("2.5e-4".into(), "1e6".into(), "1234.5".into())
        );
    }
}
