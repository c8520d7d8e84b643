//! Bubble over memory, one point a kind.

use zeropp::pipeline::draw::chart::Panel;
use zeropp::pipeline::draw::kinds::{self, KindDot};

use super::{All, Row};

/// Size of the plot in characters.
const COLUMNS: usize = 60;
const ROWS: usize = 12;
/// A picture of bubbles that are all smaller is not drawn larger.
const BUBBLE_MIN: f64 = 0.02;

/// Places of the kinds, 0 to 1 from the left and from below.
struct KindPoints {
    most: (u64, f64),
}

impl KindPoints {
    fn new(all: &All) -> KindPoints {
        let memory = all.kinds.iter().map(|row| row.peak).max().unwrap_or(0).max(1);
        let bubble = all.kinds.iter().map(|row| row.bubble).fold(BUBBLE_MIN, f64::max);
        KindPoints { most: (memory, bubble) }
    }

    fn of(&self, row: &Row) -> (f64, f64) {
        (row.peak as f64 / self.most.0 as f64, row.bubble / self.most.1)
    }
}

/// As a picture for a terminal: a letter a kind.
pub(super) fn text(all: &All) -> String {
    let places = KindPoints::new(all);
    let mut grid = vec![vec![' '; COLUMNS + 1]; ROWS + 1];
    let mut letters: Vec<(char, Vec<&str>)> = Vec::new();
    for row in &all.kinds {
        let (x, y) = places.of(row);
        let (x, y) = ((x * COLUMNS as f64) as usize, ROWS - (y * ROWS as f64) as usize);
        match letters.iter_mut().find(|(letter, _)| *letter == grid[y][x]) {
            Some((_, kinds)) => kinds.push(row.kind),
            None => {
                let letter = (b'a' + letters.len() as u8) as char;
                grid[y][x] = letter;
                letters.push((letter, vec![row.kind]));
            }
        }
    }
    let top = format!("{:.1} %", 100.0 * places.most.1);
    let mut lines = Vec::new();
    for (i, row) in grid.iter().enumerate() {
        let label = if i == 0 {
            top.as_str()
        } else if i == ROWS {
            "0 %"
        } else {
            ""
        };
        let row: String = row.iter().collect();
        lines.push(format!("{label:>8} |{row}").trim_end().to_string());
    }
    lines.push(format!("{:>8} +{}", "", "-".repeat(COLUMNS + 1)));
    let most = all.memory.text(places.most.0);
    lines.push(format!("{:>8}  0{most:>COLUMNS$}", ""));
    lines.push(format!("{:>8}  bubble (up) over the most activation memory of a rank", ""));
    let reported = letters.iter().map(|(letter, kinds)| format!("{letter} {}", kinds.join(", ")));
    lines.push(format!("{:>8}  {}", "", reported.collect::<Vec<_>>().join("; ")));
    lines.join("\n")
}

/// As a chart, with what the numbers are of below its title.
pub(super) fn panel(all: &All, facts: &[String]) -> Panel {
    let dot = |row: &Row| KindDot {
        kind: row.kind.into(),
        bubble: row.bubble,
        peak: row.peak,
        chosen: false,
    };
    let dots: Vec<KindDot> = all.kinds.iter().map(dot).collect();
    Panel { facts: facts.to_vec(), ..kinds::panel(&dots, all.memory) }
}
