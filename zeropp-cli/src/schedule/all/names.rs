//! Where the names of a picture's dots stand: beside their dots, or at the end of a thin line.

use crate::letters::width;

/// Height of the letters, px.
pub(super) const SIZE: f64 = 11.0;
/// Of a dot.
pub(super) const RADIUS: f64 = 4.0;
/// Between a dot and its name.
const GAP: f64 = 2.0;
/// What two names are apart.
const APART: f64 = 1.0;
/// Ends of lines are looked for so far away, in such steps, in so many directions.
const FAR: f64 = 240.0;
const STEP: f64 = 6.0;
const DIRECTIONS: usize = 32;

/// A part of the picture.
#[derive(Clone, Copy, Debug)]
pub(super) struct Area {
    pub(super) left: f64,
    pub(super) top: f64,
    pub(super) right: f64,
    pub(super) bottom: f64,
}

impl Area {
    /// Around a point.
    fn around((x, y): (f64, f64), by: f64) -> Area {
        Area { left: x - by, top: y - by, right: x + by, bottom: y + by }
    }

    /// Of a name whose left edge's middle is here.
    fn of(name: &str, (x, y): (f64, f64)) -> Area {
        let half = 0.5 * SIZE;
        Area { left: x, top: y - half, right: x + width(name, SIZE), bottom: y + half }
    }

    fn meets(&self, other: &Area) -> bool {
        let across = self.left < other.right && other.left < self.right;
        across && self.top < other.bottom && other.top < self.bottom
    }

    fn is_in(&self, other: &Area) -> bool {
        let across = self.left >= other.left && self.right <= other.right;
        across && self.top >= other.top && self.bottom <= other.bottom
    }
}

/// Where a name stands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) area: Area,
    /// The end of a line from the dot, if the name is not beside it.
    pub(super) line: Option<(f64, f64)>,
}

impl Place {
    /// Points of the line that leads here from a dot.
    fn line_from(&self, dot: (f64, f64)) -> Vec<(f64, f64)> {
        self.line.map_or(Vec::new(), |end| points(dot, end))
    }
}

/// Places for the names of `dots` in `room`: no name lies on another, on a dot or on a line, as
/// far as there is room.
pub(super) fn placed(dots: &[(&str, (f64, f64))], room: Area) -> Vec<Place> {
    // Names above and below a dot leave no way out for lines, so it may be better to have none.
    let tries = [4, 2, 1, 0].map(|beside| Picture::new(dots, room, beside));
    let best = tries.into_iter().min_by(|a, b| a.cost.total_cmp(&b.cost));
    let places = best.into_iter().flat_map(|picture| picture.places).zip(dots);
    places.map(|(place, dot)| place.unwrap_or(sides(*dot)[0])).collect()
}

/// Right, left, above and below a dot.
fn sides((name, (x, y)): (&str, (f64, f64))) -> [Place; 4] {
    let (wide, off) = (width(name, SIZE), RADIUS + GAP);
    let up = off + 0.5 * SIZE;
    let starts =
        [(x + off, y), (x - off - wide, y), (x - 0.5 * wide, y - up), (x - 0.5 * wide, y + up)];
    starts.map(|start| Place { area: Area::of(name, start), line: None })
}

/// Ends of lines from a dot, the nearest first.
fn ends((name, (x, y)): (&str, (f64, f64))) -> impl Iterator<Item = Place> {
    let wide = width(name, SIZE);
    let rings = (3..).map(|ring| STEP * f64::from(ring)).take_while(|far| *far <= FAR);
    rings.flat_map(move |far| {
        (0..DIRECTIONS).map(move |i| {
            let (sin, cos) = (i as f64 / DIRECTIONS as f64 * std::f64::consts::TAU).sin_cos();
            let end = (x + far * cos, y - far * sin);
            // A name to the right begins where the line ends, one to the left ends there.
            let start = end.0 + 2.0 * cos.signum() - if cos < 0.0 { wide } else { 0.0 };
            Place { area: Area::of(name, (start, end.1)), line: Some(end) }
        })
    })
}

/// Dots, and the names that are placed.
struct Picture<'a> {
    dots: &'a [(&'a str, (f64, f64))],
    room: Area,
    places: Vec<Option<Place>>,
    /// How bad it looks.
    cost: f64,
}

impl<'a> Picture<'a> {
    /// With names at the first so many sides of their dots, where these are free, and the others
    /// at lines.
    fn new(dots: &'a [(&'a str, (f64, f64))], room: Area, beside: usize) -> Picture<'a> {
        let mut picture = Picture { dots, room, places: vec![None; dots.len()], cost: 0.0 };
        let free = |i: usize, picture: &Picture| {
            let sides = sides(dots[i]).into_iter().take(beside);
            sides.filter(|place| picture.is_free(i, place)).collect::<Vec<_>>()
        };
        let mut order: Vec<usize> = (0..dots.len()).collect();
        // Those with the fewest free sides choose first.
        order.sort_by_key(|&i| free(i, &picture).len());
        for &i in &order {
            picture.places[i] = free(i, &picture).first().copied();
        }
        for &i in &order {
            if picture.places[i].is_none() {
                let (place, cost) = picture.at_a_line(i);
                picture.places[i] = place;
                picture.cost += cost;
            }
        }
        picture
    }

    /// A place at the end of a line from dot `i`, and how bad it looks.
    fn at_a_line(&self, i: usize) -> (Option<Place>, f64) {
        let clear = |p: &Place| self.is_free(i, p) && self.is_clear(i, p);
        if let Some(place) = ends(self.dots[i]).find(clear) {
            return (Some(place), 1.0 + place.line_from(self.dots[i].1).len() as f64 / FAR);
        }
        // In a crowd a line may have to cross others, or go behind a name.
        if let Some(place) = ends(self.dots[i]).find(|p| self.is_free(i, p)) {
            return (Some(place), 10.0);
        }
        let behind = |p: &Place| self.is_free(i, &Place { line: None, ..*p });
        ends(self.dots[i]).find(behind).map_or((None, 1000.0), |place| (Some(place), 100.0))
    }

    /// Whether a name at `place` lies on nothing, nor the line to it from dot `i` on a name.
    fn is_free(&self, i: usize, place: &Place) -> bool {
        let area = place.area;
        let line = place.line_from(self.dots[i].1);
        let is_off = |at: (f64, f64), by: f64| !area.meets(&Area::around(at, by));
        area.is_in(&self.room)
            && self.dots.iter().all(|(_, at)| is_off(*at, RADIUS + APART))
            && self.placed().all(|(other, dot)| {
                !area.meets(&other.area)
                    && !line.iter().any(|at| other.area.meets(&Area::around(*at, APART)))
                    && other.line_from(dot).iter().all(|at| is_off(*at, APART))
            })
    }

    /// Whether the line to `place` crosses no dot and no line. Kinds that do the same share a dot,
    /// and lines of one dot meet there.
    fn is_clear(&self, i: usize, place: &Place) -> bool {
        let from = self.dots[i].1;
        let line = place.line_from(from);
        let is_off = |at: (f64, f64), by: f64| {
            let around = Area::around(at, by);
            !line.iter().any(|at| around.meets(&Area::around(*at, APART)))
        };
        self.dots.iter().all(|(_, at)| *at == from || is_off(*at, RADIUS))
            && self.placed().all(|(other, dot)| {
                dot == from || other.line_from(dot).iter().all(|at| is_off(*at, APART))
            })
    }

    /// The places that are taken, each with its dot.
    fn placed(&self) -> impl Iterator<Item = (&Place, (f64, f64))> {
        let all = self.places.iter().zip(self.dots);
        all.filter_map(|(place, (_, dot))| place.as_ref().map(|place| (place, *dot)))
    }
}

/// Points of a line, near enough that nothing fits between them.
fn points(from: (f64, f64), to: (f64, f64)) -> Vec<(f64, f64)> {
    let (across, down) = (to.0 - from.0, to.1 - from.1);
    let count = (across.hypot(down) / (2.0 * APART)).ceil().max(1.0);
    let at = |i: usize| i as f64 / count;
    (0..=count as usize).map(|i| (from.0 + at(i) * across, from.1 + at(i) * down)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: Area = Area { left: 0.0, top: 0.0, right: 800.0, bottom: 400.0 };

    /// That no name lies on a name or a dot; how many have a line, and how many lie on one.
    fn check(dots: &[(&str, (f64, f64))]) -> (usize, usize) {
        let (places, mut on_lines) = (placed(dots, ROOM), 0);
        for (i, place) in places.iter().enumerate() {
            assert!(place.area.is_in(&ROOM), "{} at {place:?}", dots[i].0);
            for (name, at) in dots {
                assert!(!place.area.meets(&Area::around(*at, RADIUS)), "{} on {name}", dots[i].0);
            }
            for (j, other) in places.iter().enumerate().filter(|(j, _)| *j != i) {
                assert!(!place.area.meets(&other.area), "{} on {}", dots[i].0, dots[j].0);
                let line = other.line_from(dots[j].1);
                let is_on = |at: &(f64, f64)| place.area.meets(&Area::around(*at, 0.5));
                on_lines += usize::from(line.iter().any(is_on));
            }
            if place.line.is_none() {
                let near = Area::around(dots[i].1, RADIUS + GAP + 1.0);
                assert!(place.area.meets(&near), "{} is far from its dot", dots[i].0);
            }
        }
        (places.iter().filter(|place| place.line.is_some()).count(), on_lines)
    }

    #[test]
    fn a_name_is_beside_its_dot_where_there_is_room() {
        let dots = [("gpipe", (790.0, 200.0)), ("1f1b", (100.0, 5.0)), ("zeropp", (400.0, 396.0))];
        assert_eq!(check(&dots), (0, 0));
        assert_eq!(check(&["a", "bb", "ccc", "dddd"].map(|name| (name, (300.0, 200.0)))), (0, 0));
    }

    #[test]
    fn names_of_dots_that_crowd_have_lines() {
        let close = ["zb-h2", "zb-2p", "zb-v", "auto", "zb-1p", "zb-h1"];
        let close = close.iter().enumerate().map(|(i, name)| {
            let (x, y) = [(0.0, 0.0), (9.0, 1.0), (4.0, 8.0)][i / 2];
            (*name, (300.0 + x, 200.0 + y))
        });
        let (lines, on_lines) = check(&close.collect::<Vec<_>>());
        assert!(lines > 0 && on_lines == 0, "{lines}, {on_lines}");
        let names: Vec<String> = (0..17).map(|i| format!("some-kind-{i}")).collect();
        let on_one: Vec<_> = names.iter().map(|name| (name.as_str(), (400.0, 200.0))).collect();
        assert!(check(&on_one).0 >= 13, "a dot has four sides");
        let crowd = names.iter().enumerate().map(|(i, name)| {
            let (x, y) = (i * 37 % 60, i * 23 % 40);
            (name.as_str(), (700.0 + x as f64, 300.0 + y as f64))
        });
        assert!(check(&crowd.collect::<Vec<_>>()).0 > 0);
    }
}
