//! Charts as SVG: curves, areas and dots with names over a pair of axes, in panels above each
//! other, readable on light and dark ground.

mod head;
mod labels;
mod letters;
mod look;
mod parts;

use std::fmt::Write;

use super::{escape, palette};
use head::PanelHeader;
use labels::{Area, RADIUS, SIZE, placed};
pub use look::CurveStyle;
use parts::{Axis, short};
pub use parts::{Curve, Dot, Mark, Panel, Scale};

/// How wide a picture is on a desk and on a phone, in pixels of its own.
pub const WIDTHS: [f64; 2] = [860.0, 400.0];
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 44.0;
/// Points of a curve that are drawn; beyond, the lowest and highest of each of half as many spans.
const POINTS_MAX: usize = 1600;

/// All panels as one picture that is so wide.
pub fn svg(panels: &[Panel], wide: f64) -> String {
    let heads: Vec<PanelHeader> =
        panels.iter().map(|panel| PanelHeader::new(panel, wide)).collect();
    let height: f64 = heads.iter().map(|head| HEIGHT + head.height()).sum();
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"chart\" role=\"img\" \
         viewBox=\"0 0 {wide} {height}\" width=\"{wide}\" height=\"{height}\"><style>{}</style>\
         <rect class=\"ground\" width=\"{wide}\" height=\"{height}\"/>\n",
        style()
    );
    let mut top = 0.0;
    for (panel, head) in panels.iter().zip(&heads) {
        let _ = writeln!(out, "<g transform=\"translate(0 {top})\">");
        head.draw(&mut out);
        let _ = writeln!(out, "<g transform=\"translate(0 {})\">", head.height());
        PanelAxes::new(panel, wide).draw(&mut out);
        out.push_str("</g></g>\n");
        top += HEIGHT + head.height();
    }
    out.push_str("</svg>\n");
    out
}

/// The picture for a page: one for wide windows and one for narrow ones, of which
/// [`page`](super::page::page) shows the one that fits.
pub fn both(panels: &[Panel]) -> String {
    let [broad, narrow] = WIDTHS.map(|wide| svg(panels, wide));
    format!("<div class=\"broad\">{broad}</div><div class=\"narrow\">{narrow}</div>")
}

fn style() -> String {
    format!(
        "{}.chart text{{font:{SIZE}px system-ui,sans-serif;fill:var(--fore)}}.chart \
         .title{{font-weight:600;font-size:14px}}.ground{{fill:var(--back)}}\
         .grid{{stroke:var(--line)}}.axis{{stroke:var(--soft);fill:none}}\
         .line{{fill:none;stroke:var(--c);stroke-width:1.6;stroke-linejoin:round}}\
         .faint{{stroke-width:1;opacity:.35}}.broken{{stroke-dasharray:5 4}}.dot{{fill:var(--c)}}\
         .area{{fill:var(--c)}}.to{{stroke:var(--soft);stroke-width:.8}}\
         .place{{stroke:#d55e00;stroke-dasharray:3 3}}{}\
         @media(prefers-color-scheme:dark){{{}}}",
        palette(".chart"),
        look::style(false),
        look::style(true)
    )
}

/// A panel's axes in a picture.
struct PanelAxes<'a> {
    panel: &'a Panel,
    axes: [Axis; 2],
    /// The right end of the axis.
    end: f64,
}

/// Where the axis to the right lies.
const BASE: f64 = HEIGHT - BOTTOM;

impl PanelAxes<'_> {
    fn new(panel: &Panel, wide: f64) -> PanelAxes<'_> {
        let x = Axis::new(panel.x, panel.points().map(|p| p.0), wide / 108.0);
        let y = Axis::new(panel.y, panel.points().map(|p| p.1), 5.0);
        PanelAxes { panel, axes: [x, y], end: wide - RIGHT }
    }

    fn x(&self, value: f64) -> f64 {
        LEFT + self.axes[0].place(value) * (self.end - LEFT)
    }

    fn y(&self, value: f64) -> f64 {
        BASE - self.axes[1].place(value) * (BASE - TOP)
    }

    fn draw(&self, out: &mut String) {
        let end = self.end;
        for mark in &self.axes[1].marks {
            let (at, low, text) = (self.y(*mark), self.y(*mark) + 4.0, short(*mark));
            let _ = write!(
                out,
                "<path class=\"grid\" d=\"M{LEFT} {at:.1}H{end}\"/><text x=\"{}\" y=\"{low:.1}\" \
                 text-anchor=\"end\">{text}</text>",
                LEFT - 6.0,
            );
        }
        for curve in &self.panel.curves {
            self.curve(out, curve);
        }
        for mark in &self.axes[0].marks {
            let (at, low, text) = (self.x(*mark), BASE + 16.0, short(*mark));
            let _ =
                write!(out, "<text x=\"{at:.1}\" y=\"{low}\" text-anchor=\"middle\">{text}</text>");
        }
        let _ = write!(
            out,
            "<path class=\"axis\" d=\"M{LEFT} {TOP}V{BASE}H{end}\"/><text x=\"{end}\" y=\"{}\" \
             text-anchor=\"end\">{}</text>",
            BASE + 34.0,
            escape(&self.panel.across)
        );
        self.dots(out);
        if let Some((at, what)) = &self.panel.mark {
            let (at, top) = (self.x(*at), TOP + 12.0);
            // The words stand where there is more room.
            let (to, anchor) = if at > 0.5 * end { (at - 5.0, "end") } else { (at + 5.0, "start") };
            let _ = write!(
                out,
                "<path class=\"place\" d=\"M{at:.1} {TOP}V{BASE}\"/><text x=\"{to:.1}\" \
                 y=\"{top}\" text-anchor=\"{anchor}\">{}</text>",
                escape(what)
            );
        }
    }

    fn curve(&self, out: &mut String, curve: &Curve) {
        let points: Vec<_> =
            curve.points.iter().copied().filter(|p| self.panel.has(p.0, p.1)).collect();
        let points: Vec<_> =
            thinned(&points).into_iter().map(|p| (self.x(p.0), self.y(p.1))).collect();
        let mut line: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        if let (Mark::Area, [first, .., last]) = (curve.mark, points.as_slice()) {
            line.extend([last, first].map(|(x, _)| format!("{x:.1},{BASE}")));
        }
        let look = match curve.mark {
            Mark::Line => curve.look.dashed("line"),
            // A dash is lost in noise.
            Mark::Faint => curve.look.colored("line faint"),
            Mark::Points | Mark::Dots => curve.look.colored("line broken"),
            Mark::Area => curve.look.colored("area"),
        };
        if curve.mark != Mark::Dots {
            let _ = write!(
                out,
                "<polyline {look} points=\"{}\"><title>{}</title></polyline>",
                line.join(" "),
                escape(&curve.name)
            );
        }
        // A line of one point is none.
        let has_points = matches!(curve.mark, Mark::Points | Mark::Dots) || points.len() == 1;
        if has_points {
            points.iter().for_each(|point| curve.look.point(out, point.0, point.1));
        }
    }

    /// Points with their names; those at one place share a line of names.
    fn dots(&self, out: &mut String) {
        let mut named: Vec<(String, (f64, f64))> = Vec::new();
        let shown = || self.panel.dots.iter().filter(|dot| self.panel.has(dot.at.0, dot.at.1));
        for dot in shown() {
            let at = (self.x(dot.at.0), self.y(dot.at.1));
            let near =
                |other: &(f64, f64)| (other.0 - at.0).abs().max((other.1 - at.1).abs()) < 1.5;
            match named.iter_mut().find(|(_, other)| near(other)) {
                Some((names, _)) => names.extend([", ", dot.name.as_str()]),
                None => named.push((dot.name.clone(), at)),
            }
        }
        let room = Area { left: LEFT + 3.0, top: TOP - 8.0, right: self.end + 14.0, bottom: BASE };
        for ((name, at), place) in named.iter().zip(placed(&named, room)) {
            if let Some((x, y)) = place.line {
                let from = format!("M{:.1} {:.1}", at.0, at.1);
                let _ = write!(out, "<path class=\"to\" d=\"{from}L{x:.1} {y:.1}\"/>");
            }
            // The reader's font may be narrower than its estimate: a name to the left ends at its
            // dot or line.
            let (x, anchor) = match place.area {
                area if area.right <= at.0 => (area.right, "end"),
                area => (area.left, "start"),
            };
            let (y, name) = (place.area.bottom - 0.15 * SIZE, escape(name));
            let _ = write!(
                out,
                "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{name}</text>"
            );
        }
        for dot in shown() {
            let (x, y, look) = (self.x(dot.at.0), self.y(dot.at.1), dot.look.colored("dot"));
            let _ = write!(
                out,
                "<circle {look} cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{RADIUS}\"><title>{}</title>\
                 </circle>",
                escape(&dot.about)
            );
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(points: Vec<(f64, f64)>, mark: Mark) -> Curve {
        Curve { name: "a <b>".into(), points, mark, look: CurveStyle::one_of(0, 1) }
    }

    #[test]
    fn a_picture_leaves_out_what_is_not_finite_and_thins_what_is_long() {
        let points = (0..100_000).map(|i| (f64::from(i), f64::from(i % 10))).collect();
        let nan = vec![(1.0, f64::NAN), (2.0, 1.0), (3.0, f64::INFINITY)];
        let curves = vec![curve(points, Mark::Line), curve(nan, Mark::Points)];
        let text = svg(&[Panel::over_steps("loss & co", curves)], WIDTHS[0]);
        assert!(text.len() < 60_000, "{}", text.len());
        for wrong in ["NaN", "inf", "<b>"] {
            assert!(!text.contains(wrong), "{wrong}");
        }
        assert!(text.contains("loss &amp; co") && text.contains("a &lt;b&gt;"));
        assert_eq!(text.matches("class=\"dot").count(), 2, "of the curve and beside its name");
    }

    #[test]
    fn dots_at_one_place_share_a_line_of_names_and_each_is_shown_on_hover() {
        let dot = |name: &str, at| Dot {
            name: name.into(),
            about: format!("about {name}"),
            at,
            look: CurveStyle::one_of(0, 1),
        };
        let dots = vec![dot("a", (1.0, 2.0)), dot("b", (3.0, 4.0)), dot("c", (1.0, 2.0))];
        let panel = Panel { dots, covers: vec![(0.0, 0.0)], ..Panel::new("bubble, %", "memory") };
        for wide in WIDTHS {
            let text = svg(&[Panel { dots: Vec::new(), ..Panel::new("", "") }], wide);
            assert!(!text.contains("<circle"));
            let text = svg(std::slice::from_ref(&panel), wide);
            assert!(text.contains(">a, c</text>") && text.contains(">b</text>"), "{text}");
            assert_eq!(text.matches("<circle").count(), 3);
            assert!(["a", "b", "c"].iter().all(|n| text.contains(&format!("about {n}</title>"))));
        }
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
