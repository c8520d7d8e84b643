//! Where the names of dots stand: beside their dots, or at the end of a line.

use super::letters::width;

/// Height of the letters, px.
pub(super) const SIZE: f64 = 12.0;
/// Of a dot.
pub(super) const RADIUS: f64 = 4.0;
/// Between a dot and its name.
const GAP: f64 = 3.0;
/// Lines get this much longer at each try, up to the longest, in so many directions.
const STEP: f64 = 6.0;
const FAR: f64 = 240.0;
const DIRECTIONS: usize = 24;

/// A part of the picture.
#[derive(Clone, Copy, Debug)]
pub(super) struct Area {
    pub(super) left: f64,
    pub(super) top: f64,
    pub(super) right: f64,
    pub(super) bottom: f64,
}

impl Area {
    fn around(x: f64, y: f64, by: f64) -> Area {
        Area { left: x - by, top: y - by, right: x + by, bottom: y + by }
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
pub(super) struct LabelPlace {
    pub(super) area: Area,
    /// The end of the line from the dot, if the name is not beside it.
    pub(super) line: Option<(f64, f64)>,
}

impl LabelPlace {
    /// With its left or its right edge's middle at a point.
    fn at(name: &str, x: f64, y: f64, to_the_right: bool) -> LabelPlace {
        let (wide, half) = (width(name, SIZE), 0.5 * SIZE);
        let left = if to_the_right { x } else { x - wide };
        let area = Area { left, top: y - half, right: left + wide, bottom: y + half };
        LabelPlace { area, line: None }
    }

    /// Small areas along the line from `dot`, near enough that nothing fits between them.
    fn along_line(&self, dot: (f64, f64)) -> Vec<Area> {
        let Some(end) = self.line else { return Vec::new() };
        let (across, down) = (end.0 - dot.0, end.1 - dot.1);
        let count = (across.hypot(down) / 2.0).ceil();
        let at = |i: usize| i as f64 / count;
        let points = (0..=count as usize).map(|i| (dot.0 + at(i) * across, dot.1 + at(i) * down));
        points.map(|(x, y)| Area::around(x, y, 1.0)).collect()
    }
}

/// Places for the name of a dot, the best first.
type Tries = fn(&str, f64, f64) -> Vec<LabelPlace>;

/// A place for the name of each of `dots` in `room`.
///
/// The rule: a name stands right or left of its dot where it lies on no dot and no other name; all
/// others stand at the end of the shortest line that crosses nothing; in a crowd that leaves no way
/// out, of the shortest line. Where there is no room at all, a name stands to the right of its dot.
pub(super) fn placed(dots: &[(String, (f64, f64))], room: Area) -> Vec<LabelPlace> {
    let mut taken: Vec<Area> =
        dots.iter().map(|(_, at)| Area::around(at.0, at.1, RADIUS)).collect();
    let mut places: Vec<Option<LabelPlace>> = vec![None; dots.len()];
    let passes: [(Tries, bool); 3] = [(beside, true), (at_lines, true), (at_lines, false)];
    for (tries, crosses_nothing) in passes {
        for (i, (name, at)) in dots.iter().enumerate() {
            if places[i].is_some() {
                continue;
            }
            let free = |place: &LabelPlace| {
                let line = if crosses_nothing { place.along_line(*at) } else { Vec::new() };
                let mut others = taken.iter().enumerate();
                place.area.is_in(&room)
                    && others.all(|(j, other)| {
                        let crossed = j != i && line.iter().any(|part| part.meets(other));
                        !place.area.meets(other) && !crossed
                    })
            };
            places[i] = tries(name, at.0, at.1).into_iter().find(free);
            if let Some(place) = places[i] {
                taken.push(place.area);
                taken.extend(place.along_line(*at));
            }
        }
    }
    let all = places.into_iter().zip(dots);
    all.map(|(place, (name, at))| place.unwrap_or(beside(name, at.0, at.1)[0])).collect()
}

fn beside(name: &str, x: f64, y: f64) -> Vec<LabelPlace> {
    let off = RADIUS + GAP;
    vec![LabelPlace::at(name, x + off, y, true), LabelPlace::at(name, x - off, y, false)]
}

fn at_lines(name: &str, x: f64, y: f64) -> Vec<LabelPlace> {
    let rings = (2..).map(|ring| STEP * f64::from(ring)).take_while(|far| *far <= FAR);
    let ends = rings.flat_map(|far| {
        (0..DIRECTIONS).map(move |i| {
            // Half a step from the level, so that no line runs along an axis or a row of dots.
            let angle = (i as f64 + 0.5) / DIRECTIONS as f64 * std::f64::consts::TAU;
            (x + far * angle.cos(), y - far * angle.sin())
        })
    });
    ends.map(|end| {
        let to_the_right = end.0 > x;
        let start = if to_the_right { end.0 + 2.0 } else { end.0 - 2.0 };
        LabelPlace { line: Some(end), ..LabelPlace::at(name, start, end.1, to_the_right) }
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: Area = Area { left: 0.0, top: 0.0, right: 800.0, bottom: 400.0 };

    /// How many names have a line. No name may lie on a name or a dot, and no line may cross a name
    /// or a dot, but in a `crowd`.
    fn check(dots: &[(String, (f64, f64))], crowd: bool) -> usize {
        let places = placed(dots, ROOM);
        let around = |i: usize, by| Area::around(dots[i].1.0, dots[i].1.1, by);
        for (i, place) in places.iter().enumerate() {
            let name = &dots[i].0;
            assert!(place.area.is_in(&ROOM), "{name} at {place:?}");
            for (j, other) in places.iter().enumerate().filter(|(j, _)| *j != i) {
                let dot = around(j, RADIUS);
                assert!(!place.area.meets(&other.area), "{name} on {}", dots[j].0);
                assert!(!place.area.meets(&dot), "{name} on the dot of {}", dots[j].0);
                if crowd {
                    continue;
                }
                for part in other.along_line(dots[j].1) {
                    assert!(!place.area.meets(&part), "{name} on the line of {}", dots[j].0);
                }
                let line = place.along_line(dots[i].1);
                assert!(!line.iter().any(|part| part.meets(&dot)), "{name} crosses {}", dots[j].0);
            }
            if place.line.is_none() {
                let near = around(i, RADIUS + GAP + 1.0);
                assert!(place.area.meets(&near), "{name} is far from its dot");
            }
        }
        places.iter().filter(|place| place.line.is_some()).count()
    }

    fn named(dots: &[(&str, (f64, f64))]) -> Vec<(String, (f64, f64))> {
        dots.iter().map(|(name, at)| (name.to_string(), *at)).collect()
    }

    #[test]
    fn a_name_is_beside_its_dot_where_there_is_room() {
        let dots = [("gpipe", (790.0, 200.0)), ("1f1b", (100.0, 8.0)), ("zeropp", (400.0, 390.0))];
        assert_eq!(check(&named(&dots), false), 0);
    }

    #[test]
    fn every_other_name_is_joined_to_its_dot_by_a_line_that_crosses_nothing() {
        let close = ["zb-h2", "zb-2p", "zb-v", "auto", "zb-1p", "zb-h1"].iter().enumerate();
        let close = close.map(|(i, name)| {
            let (x, y) = (i % 3, i / 3);
            (name.to_string(), (300.0 + 11.0 * x as f64, 200.0 + 9.0 * y as f64))
        });
        assert!(check(&close.collect::<Vec<_>>(), false) > 0);
        let crowd: Vec<_> = (0..17)
            .map(|i| {
                let (x, y) = (i * 37 % 90, i * 23 % 80);
                (format!("some-kind-{i}"), (500.0 + 2.0 * x as f64, 200.0 + 2.0 * y as f64))
            })
            .collect();
        assert!(check(&crowd, true) > 0);
        let row: Vec<_> =
            (0..8).map(|i| (format!("kind-{i}"), (300.0 + 20.0 * f64::from(i), 390.0))).collect();
        assert!(check(&row, true) > 0);
    }
}
