//! Curves as SVG: panels above each other, readable on light and dark ground.

use std::fmt::Write;

use zeropp_core::files::escaped_line;

use super::head::Head;
use super::look::{self, Look};

/// Of a panel, in pixels of the picture's own.
pub(super) const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 300.0;
pub(super) const LEFT: f64 = 76.0;
pub(super) const RIGHT: f64 = 16.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 44.0;
/// Points of a curve that are drawn; beyond, the lowest and highest of each of half as many spans.
const POINTS_MAX: usize = 1600;
/// A page shows the picture at least this wide, so that its text stays readable on a phone.
const SHOWN_MIN: f64 = 720.0;

/// How a curve is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    /// A line.
    Line,
    /// A line in the background: what a smoother one is made of.
    Faint,
    /// Points, joined by a broken line.
    Points,
}

/// A curve. Points that are not finite are left out.
pub(crate) struct Curve {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
    pub(crate) mark: Mark,
    /// Curves of one run have one.
    pub(crate) look: Look,
}

/// A pair of axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scale {
    Linear,
    Log,
}

impl Scale {
    fn of(self, value: f64) -> f64 {
        if self == Scale::Log { value.log10() } else { value }
    }
}

/// Curves over one pair of axes.
pub(crate) struct Panel {
    pub(crate) title: String,
    /// What is to the right.
    pub(crate) across: String,
    pub(crate) x: Scale,
    pub(crate) y: Scale,
    pub(crate) curves: Vec<Curve>,
    /// A place on the way, and what it is.
    pub(crate) mark: Option<(f64, String)>,
}

impl Panel {
    /// Of `title` over steps.
    pub(crate) fn over_steps(title: &str, curves: Vec<Curve>) -> Panel {
        let (title, across) = (title.into(), "step".into());
        Panel { title, across, x: Scale::Linear, y: Scale::Linear, curves, mark: None }
    }
}

/// All panels as one picture.
pub(crate) fn svg(panels: &[Panel]) -> String {
    let heads: Vec<Head> = panels.iter().map(Head::new).collect();
    let height: f64 = heads.iter().map(|head| HEIGHT + head.height()).sum();
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" viewBox=\"0 0 {WIDTH} {height}\" \
         width=\"{WIDTH}\" height=\"{height}\"><style>{}</style>\
         <rect class=\"ground\" width=\"{WIDTH}\" height=\"{height}\"/>\n",
        style()
    );
    let mut top = 0.0;
    for (panel, head) in panels.iter().zip(&heads) {
        let _ = writeln!(out, "<g transform=\"translate(0 {top})\">");
        head.draw(&mut out);
        let _ = writeln!(out, "<g transform=\"translate(0 {})\">", head.height());
        draw(&mut out, panel);
        out.push_str("</g></g>\n");
        top += HEIGHT + head.height();
    }
    out.push_str("</svg>\n");
    out
}

/// A page that asks for nothing else: the picture, and text above it.
pub(crate) fn page(title: &str, text: &str, panels: &[Panel]) -> String {
    let (title, text) = (escape(title), escape(text));
    let text = if text.is_empty() { text } else { format!("<pre>{text}</pre>") };
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" \
         content=\"width=device-width, initial-scale=1\"><title>{title}</title><style>\
         :root{{color-scheme:light dark}}body{{font:15px/1.45 system-ui,sans-serif;\
         margin:1.2rem auto;max-width:56rem;padding:0 1rem;background:#fff;color:#111}}\
         h1{{overflow-wrap:anywhere}}.wide{{overflow-x:auto}}svg{{display:block;max-width:100%;\
         min-width:{SHOWN_MIN}px;height:auto}}pre{{overflow-x:auto;background:#f3f3f3;\
         padding:.7rem}}\
         @media(prefers-color-scheme:dark){{body{{background:#14161a;color:#eee}}\
         pre{{background:#1e2127}}}}</style></head><body><h1>{title}</h1>{text}\n\
         <div class=\"wide\">{}</div></body></html>\n",
        svg(panels)
    )
}

fn style() -> String {
    format!(
        "text{{font:12px system-ui,sans-serif;fill:#222}}.title{{font-weight:600;font-size:14px}}\
         .ground{{fill:#fff}}.grid{{stroke:#ddd}}.axis{{stroke:#666;fill:none}}.line{{fill:none;\
         stroke:var(--c);stroke-width:1.6;stroke-linejoin:round}}.faint{{stroke-width:1;\
         opacity:.35}}.broken{{stroke-dasharray:5 4}}.dot{{fill:var(--c)}}\
         .place{{stroke:#d55e00;stroke-dasharray:3 3}}{}\
         @media(prefers-color-scheme:dark){{text{{fill:#ddd}}.ground{{fill:#14161a}}\
         .grid{{stroke:#333}}.axis{{stroke:#999}}{}}}",
        look::style(false),
        look::style(true)
    )
}

/// What an axis shows, from where to where, and its marks.
struct Axis {
    scale: Scale,
    from: f64,
    to: f64,
    marks: Vec<f64>,
}

impl Axis {
    /// For these values; marks that people count in, about `count` of them.
    fn new(scale: Scale, values: impl Iterator<Item = f64>, count: f64) -> Axis {
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
    fn place(&self, value: f64) -> f64 {
        (self.scale.of(value) - self.from) / (self.to - self.from)
    }
}

/// The 1, 2 or 5 of a decade that is not below `rough`.
fn nice(rough: f64) -> f64 {
    let decade = 10f64.powf(rough.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|n| n * decade).find(|n| *n >= rough).unwrap_or(rough)
}

/// A mark's number, short.
fn told(value: f64) -> String {
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

fn draw(out: &mut String, panel: &Panel) {
    let is_shown = |(x, y): &(f64, f64)| {
        let fits = |value: f64, scale| value.is_finite() && (scale == Scale::Linear || value > 0.0);
        fits(*x, panel.x) && fits(*y, panel.y)
    };
    let all = || panel.curves.iter().flat_map(|c| &c.points).copied().filter(is_shown);
    let x_axis = Axis::new(panel.x, all().map(|p| p.0), 8.0);
    let y_axis = Axis::new(panel.y, all().map(|p| p.1), 5.0);
    let x = |value: f64| LEFT + x_axis.place(value) * (WIDTH - LEFT - RIGHT);
    let y = |value: f64| HEIGHT - BOTTOM - y_axis.place(value) * (HEIGHT - TOP - BOTTOM);
    let (base, end) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
    for mark in &y_axis.marks {
        let at = y(*mark);
        let _ = write!(
            out,
            "<path class=\"grid\" d=\"M{LEFT} {at:.1}H{end}\"/><text x=\"{}\" y=\"{:.1}\" \
             text-anchor=\"end\">{}</text>",
            LEFT - 6.0,
            at + 4.0,
            told(*mark)
        );
    }
    for mark in &x_axis.marks {
        let _ = write!(
            out,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            x(*mark),
            base + 16.0,
            told(*mark)
        );
    }
    let _ = write!(
        out,
        "<path class=\"axis\" d=\"M{LEFT} {TOP}V{base}H{end}\"/><text x=\"{end}\" y=\"{}\" \
         text-anchor=\"end\">{}</text>",
        base + 34.0,
        escape(&panel.across)
    );
    for curve in &panel.curves {
        let points: Vec<_> = curve.points.iter().copied().filter(is_shown).collect();
        let points: Vec<_> = thinned(&points).into_iter().map(|p| (x(p.0), y(p.1))).collect();
        curve_of(out, curve, &points);
    }
    if let Some((at, what)) = &panel.mark {
        let at = x(*at);
        let _ = write!(
            out,
            "<path class=\"place\" d=\"M{at:.1} {TOP}V{base}\"/><text x=\"{:.1}\" y=\"{}\">{}\
             </text>",
            at + 5.0,
            TOP + 12.0,
            escape(what)
        );
    }
}

fn curve_of(out: &mut String, curve: &Curve, points: &[(f64, f64)]) {
    let line: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let look = match curve.mark {
        Mark::Line => curve.look.dashed("line"),
        // A dash is lost in noise.
        Mark::Faint => curve.look.colored("line faint"),
        Mark::Points => curve.look.colored("line broken"),
    };
    let _ = write!(
        out,
        "<polyline {look} points=\"{}\"><title>{}</title></polyline>",
        line.join(" "),
        escape(&curve.name)
    );
    // A line of one point is none.
    if curve.mark == Mark::Points || points.len() == 1 {
        points.iter().for_each(|point| curve.look.point(out, *point));
    }
}

/// The points that a picture has room for: of many, the lowest and the highest of each span.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    if points.len() <= POINTS_MAX {
        return points.to_vec();
    }
    let span = points.len().div_ceil(POINTS_MAX / 2);
    let extremes = |part: &[(f64, f64)]| {
        let by = |a: &&(f64, f64), b: &&(f64, f64)| a.1.total_cmp(&b.1);
        let (low, high) = (part.iter().min_by(by).unwrap(), part.iter().max_by(by).unwrap());
        if low.0 <= high.0 { [*low, *high] } else { [*high, *low] }
    };
    points.chunks(span).flat_map(extremes).collect()
}

pub(super) fn escape(text: &str) -> String {
    let text = text.lines().map(escaped_line).collect::<Vec<_>>().join("\n");
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(points: Vec<(f64, f64)>, mark: Mark) -> Curve {
        Curve { name: "a <b>".into(), points, mark, look: Look::one_of(0, 1) }
    }

    #[test]
    fn marks_are_numbers_that_people_count_in() {
        let axis = Axis::new(Scale::Linear, [0.13, 0.97].into_iter(), 5.0);
        let marks: Vec<String> = axis.marks.iter().map(|m| told(*m)).collect();
        assert_eq!(marks, ["0", "0.2", "0.4", "0.6", "0.8", "1"]);
        let axis = Axis::new(Scale::Log, [1e-7, 0.5].into_iter(), 5.0);
        assert_eq!((axis.marks.len(), told(axis.marks[0])), (7, "1e-7".into()));
        for values in [vec![], vec![3.0], vec![0.0, 0.0], vec![-1.0, -1.0]] {
            let axis = Axis::new(Scale::Linear, values.into_iter(), 5.0);
            assert!(axis.from < axis.to && axis.marks.len() < 20);
        }
        assert_eq!(
            (told(2.5e-4), told(1e6), told(1234.5)),
            ("2.5e-4".into(), "1e6".into(), "1234.5".into())
        );
    }

    #[test]
    fn a_picture_leaves_out_what_is_not_finite_and_thins_what_is_long() {
        let points = (0..100_000).map(|i| (f64::from(i), f64::from(i % 10))).collect();
        let nan = vec![(1.0, f64::NAN), (2.0, 1.0), (3.0, f64::INFINITY)];
        let curves = vec![curve(points, Mark::Line), curve(nan, Mark::Points)];
        let text = svg(&[Panel::over_steps("loss & co", curves)]);
        assert!(text.len() < 60_000, "{}", text.len());
        for wrong in ["NaN", "inf", "<b>"] {
            assert!(!text.contains(wrong), "{wrong}");
        }
        assert!(text.contains("loss &amp; co") && text.contains("a &lt;b&gt;"));
        assert_eq!(text.matches("class=\"dot").count(), 2, "of the curve and beside its name");
        let page = page("t", "x < y", &[]);
        assert!(page.contains("<pre>x &lt; y</pre>") && !page.contains("src="));
    }

    #[test]
    fn thinning_keeps_the_extremes_and_the_order() {
        let mut points: Vec<(f64, f64)> = (0..10_000).map(|i| (f64::from(i), 0.0)).collect();
        points[5003].1 = 9.0;
        points[5004].1 = -9.0;
        let few = thinned(&points);
        assert!(few.len() <= POINTS_MAX + 2 && few.is_sorted_by(|a, b| a.0 <= b.0));
        assert!(few.contains(&(5003.0, 9.0)) && few.contains(&(5004.0, -9.0)));
    }
}
