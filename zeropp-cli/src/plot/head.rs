//! What stands above a panel's axes: its title, and all its curves' names.

use std::collections::HashSet;
use std::fmt::Write;

use zeropp_core::files::escaped_line;

use super::chart::{Curve, LEFT, Mark, Panel, RIGHT, WIDTH, escape};
use crate::letters::{shortened, width};

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
/// How wide a name may be: the first of these at which different names stay different.
const NAMES: [f64; 3] = [260.0, 460.0, WIDTH - LEFT - RIGHT - NAME];

/// The head of a panel.
pub(super) struct Head<'a> {
    panel: &'a Panel,
    /// A curve, its name as it is shown, and where.
    names: Vec<(&'a Curve, String, (f64, f64))>,
    /// Of lines below the title.
    lines: usize,
}

impl Head<'_> {
    pub(super) fn new(panel: &Panel) -> Head<'_> {
        let curves: Vec<_> = panel.curves.iter().filter(|c| c.mark != Mark::Faint).collect();
        let names = shown(&curves);
        let wide = |name: &String| NAME + width(name, SIZE) + GAP;
        // Bold letters are a tenth wider.
        let title = LEFT + 1.1 * width(&panel.title, TITLE) + GAP;
        let all: f64 = names.iter().map(wide).sum();
        let beside = title + all - GAP <= WIDTH - RIGHT;
        let mut at = if beside { (WIDTH - RIGHT + GAP - all, BASE) } else { (LEFT, BASE + LINE) };
        let mut placed = Vec::new();
        for (curve, name) in curves.into_iter().zip(names) {
            let wide = wide(&name);
            if at.0 > LEFT && at.0 + wide - GAP > WIDTH - RIGHT + 0.1 {
                at = (LEFT, at.1 + LINE);
            }
            placed.push((curve, name, at));
            at.0 += wide;
        }
        let lines = if beside { 0 } else { ((at.1 - BASE) / LINE).round() as usize };
        Head { panel, names: placed, lines }
    }

    /// By how much it moves the axes down.
    pub(super) fn height(&self) -> f64 {
        LINE * self.lines as f64
    }

    pub(super) fn draw(&self, out: &mut String) {
        let title = escape(&self.panel.title);
        let _ = write!(out, "<text class=\"title\" x=\"{LEFT}\" y=\"{BASE}\">{title}</text>");
        for (curve, name, (x, y)) in &self.names {
            let middle = y - 4.0;
            let line = match curve.mark {
                Mark::Points => curve.look.colored("line broken"),
                _ => curve.look.dashed("line"),
            };
            let _ = write!(out, "<g><title>{}</title>", escape(&curve.name));
            let _ = write!(out, "<path {line} d=\"M{x:.0} {middle}h{SAMPLE}\"/>");
            if curve.mark == Mark::Points {
                curve.look.point(out, (x + 0.5 * SAMPLE, middle));
            }
            let name = escape(name);
            let _ = write!(out, "<text x=\"{:.0}\" y=\"{y}\">{name}</text></g>", x + NAME);
        }
    }
}

/// The curves' names, long ones shortened.
fn shown(curves: &[&Curve]) -> Vec<String> {
    let whole: Vec<_> = curves.iter().map(|curve| escaped_line(&curve.name)).collect();
    let different = whole.iter().collect::<HashSet<_>>().len();
    let mut names: Vec<String> = Vec::new();
    for most in NAMES {
        names = whole.iter().map(|name| shortened(name, SIZE, most)).collect();
        if names.iter().collect::<HashSet<_>>().len() == different {
            break;
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plot::look::Look;

    fn panel(names: &[String]) -> Panel {
        let curve = |(i, name): (usize, &String)| Curve {
            name: name.clone(),
            points: vec![(0.0, 1.0), (1.0, 2.0)],
            mark: if name.contains("validation") { Mark::Points } else { Mark::Line },
            look: Look::one_of(i, names.len()),
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
            let head = Head::new(&panel);
            assert_eq!(head.names.len(), names.len());
            assert_eq!(head.height() == 0.0, beside, "{}", names.len());
            let title = LEFT + 1.1 * width(&panel.title, TITLE);
            for (i, (_, name, (x, y))) in head.names.iter().enumerate() {
                let end = x + NAME + width(name, SIZE);
                assert!(end < WIDTH, "{name}");
                assert!(*x >= if *y == BASE { title } else { LEFT }, "{name} at {x}");
                let next = head.names.get(i + 1).filter(|next| next.2.1 == *y);
                assert!(next.is_none_or(|next| next.2.0 > end), "{name}");
                assert!(y - BASE <= head.height() && !name.contains('\u{1b}'), "{name}");
            }
        }
    }

    #[test]
    fn a_long_name_is_shortened_as_far_as_it_stays_one_of_its_own_and_told_whole() {
        let names = ["x", "y"].map(|m| format!("{}{m}{}", "a".repeat(35), "b".repeat(35)));
        let panel = panel(&names);
        let head = Head::new(&panel);
        assert_ne!(head.names[0].1, head.names[1].1);
        let names = ["x", "y"].map(|m| format!("{m}{}", "b".repeat(70)));
        let panel = self::panel(&names);
        let (head, mut text) = (Head::new(&panel), String::new());
        head.draw(&mut text);
        assert!(head.names[0].1.contains('…'));
        assert!(names.iter().all(|name| text.contains(&format!("<title>{name}</title>"))));
    }
}
