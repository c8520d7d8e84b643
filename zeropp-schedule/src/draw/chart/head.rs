//! What stands above a panel's axes: its title, and all its curves' names.

use std::fmt::Write;

use super::letters::{shortened, width};
use super::parts::{Curve, Mark, Panel};
use crate::draw::escape;

/// Height of letters, of those of a title, and of a line of names.
const SIZE: f64 = 12.0;
const TITLE: f64 = 14.0;
const LINE: f64 = 18.0;
/// Where the first line stands.
const BASE: f64 = 20.0;
/// A piece of a curve, and from where on its name is.
const SAMPLE: f64 = 30.0;
const NAME: f64 = SAMPLE + 5.0;
/// Between two names.
const GAP: f64 = 16.0;
/// How wide a name may be: the first of these at which different names stay different, or all of
/// the picture.
const NAMES: [f64; 2] = [260.0, 460.0];
/// Left and right of all.
const SIDE: f64 = 8.0;

/// The head of a panel.
pub(super) struct PanelHeader<'a> {
    panel: &'a Panel,
    wide: f64,
    /// A curve, its name as it is shown, and where.
    names: Vec<(&'a Curve, String, (f64, f64))>,
    /// Of lines below the title.
    lines: usize,
}

impl PanelHeader<'_> {
    /// In a picture that is so wide.
    pub(super) fn new(panel: &Panel, all: f64) -> PanelHeader<'_> {
        let named = |c: &&Curve| c.mark != Mark::Faint && !c.name.is_empty();
        let curves: Vec<_> = panel.curves.iter().filter(named).collect();
        let names = shown(&curves, all - 2.0 * SIDE - NAME);
        let end = all - SIDE;
        let wide = |name: &String| NAME + width(name, SIZE) + GAP;
        // Bold letters are a tenth wider.
        let title = SIDE + 1.1 * width(&panel.title, TITLE) + GAP;
        let together: f64 = names.iter().map(wide).sum();
        let beside = title + together - GAP <= end;
        let below = BASE + LINE * panel.facts.len() as f64;
        let mut at = if beside { (end + GAP - together, BASE) } else { (SIDE, below + LINE) };
        let mut placed = Vec::new();
        for (curve, name) in curves.into_iter().zip(names) {
            let wide = wide(&name);
            if at.0 > SIDE && at.0 + wide - GAP > end + 0.1 {
                at = (SIDE, at.1 + LINE);
            }
            placed.push((curve, name, at));
            at.0 += wide;
        }
        let last = if beside { below } else { at.1 };
        let lines = ((last - BASE) / LINE).round() as usize;
        PanelHeader { panel, wide: all, names: placed, lines }
    }

    /// By how much it moves the axes down.
    pub(super) fn height(&self) -> f64 {
        LINE * self.lines as f64
    }

    pub(super) fn draw(&self, out: &mut String) {
        let title = escape(&shortened(&self.panel.title, 1.1 * TITLE, self.wide - 2.0 * SIDE));
        let _ = write!(out, "<text class=\"title\" x=\"{SIDE}\" y=\"{BASE}\">{title}</text>");
        for (i, fact) in self.panel.facts.iter().enumerate() {
            let fact = escape(&shortened(fact, SIZE, self.wide - 2.0 * SIDE));
            let y = BASE + LINE * (i + 1) as f64;
            let _ = write!(out, "<text x=\"{SIDE}\" y=\"{y}\">{fact}</text>");
        }
        for (curve, name, (x, y)) in &self.names {
            let middle = y - 4.0;
            let line = match curve.mark {
                Mark::Points => curve.look.colored("line broken"),
                _ => curve.look.dashed("line"),
            };
            let _ = write!(out, "<g><title>{}</title>", escape(&curve.name));
            if curve.mark == Mark::Area {
                let (look, y) = (curve.look.colored("area"), middle - 5.0);
                let _ = write!(out, "<path {look} d=\"M{x:.0} {y}h{SAMPLE}v10h-{SAMPLE}z\"/>");
            } else if curve.mark != Mark::Dots {
                let _ = write!(out, "<path {line} d=\"M{x:.0} {middle}h{SAMPLE}\"/>");
            }
            if matches!(curve.mark, Mark::Points | Mark::Dots) {
                curve.look.point(out, x + 0.5 * SAMPLE, middle);
            }
            let name = escape(name);
            let _ = write!(out, "<text x=\"{:.0}\" y=\"{y}\">{name}</text></g>", x + NAME);
        }
    }
}

/// The curves' names, long ones shortened.
fn shown(curves: &[&Curve], room: f64) -> Vec<String> {
    let whole: Vec<String> = curves.iter().map(|curve| curve.name.clone()).collect();
    let different = count_different(&whole);
    let mut names: Vec<String> = Vec::new();
    for most in NAMES.into_iter().filter(|most| *most < room).chain([room]) {
        names = whole.iter().map(|name| shortened(name, SIZE, most)).collect();
        if count_different(&names) == different {
            break;
        }
    }
    names
}

fn count_different(names: &[String]) -> usize {
    let mut names = names.to_vec();
    names.sort_unstable();
    names.dedup();
    names.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::chart::look::CurveStyle;

    const WIDE: f64 = 860.0;

    fn panel(names: &[String]) -> Panel {
        let curve = |(i, name): (usize, &String)| Curve {
            name: name.clone(),
            points: vec![(0.0, 1.0), (1.0, 2.0)],
            mark: if name.contains("validation") { Mark::Points } else { Mark::Line },
            look: CurveStyle::one_of(i, names.len()),
        };
        Panel::over_steps("Loss, nats a token", names.iter().enumerate().map(curve).collect())
    }

    #[test]
    fn every_curve_is_named_and_no_name_lies_on_another_or_on_the_title() {
        let long = |i: usize| format!("{}{i}{}", "gpt-large-".repeat(3), "-of-a-sweep".repeat(3));
        let cases: [(Vec<String>, bool); 4] = [
            (vec!["a".into(), "a, validation".into()], true),
            ((0..16).map(|i| format!("h.{i}")).collect(), false),
            ((0..4).map(long).collect(), false),
            (vec!["語".repeat(200), "x\u{1b}".repeat(500), "x".repeat(99)], false),
        ];
        for (names, beside) in cases {
            let panel = panel(&names);
            let head = PanelHeader::new(&panel, WIDE);
            assert_eq!(head.names.len(), names.len());
            assert_eq!(head.height() == 0.0, beside, "{}", names.len());
            let title = SIDE + 1.1 * width(&panel.title, TITLE);
            for (i, (_, name, (x, y))) in head.names.iter().enumerate() {
                let end = x + NAME + width(name, SIZE);
                assert!(end < WIDE, "{name}");
                assert!(*x >= if *y == BASE { title } else { SIDE }, "{name} at {x}");
                let next = head.names.get(i + 1).filter(|next| next.2.1 == *y);
                assert!(next.is_none_or(|next| next.2.0 > end), "{name}");
                assert!(y - BASE <= head.height(), "{name}");
            }
        }
    }

    #[test]
    fn a_long_name_is_shortened_as_far_as_it_stays_one_of_its_own_and_is_shown_whole_on_hover() {
        let names = ["x", "y"].map(|m| format!("{}{m}{}", "a".repeat(35), "b".repeat(35)));
        let panel = panel(&names);
        let head = PanelHeader::new(&panel, WIDE);
        assert_ne!(head.names[0].1, head.names[1].1);
        let names = ["x", "y"].map(|m| format!("{m}{}", "b".repeat(70)));
        let panel = self::panel(&names);
        let (head, mut text) = (PanelHeader::new(&panel, WIDE), String::new());
        head.draw(&mut text);
        assert!(head.names[0].1.contains('…'));
        assert!(names.iter().all(|name| text.contains(&format!("<title>{name}</title>"))));
    }
}
