//! Bubble over memory, one point a kind.

use std::fmt::Write as _;

use super::names::{Area, RADIUS, SIZE as LETTERS, placed};
use super::{All, Row};

/// Size of the picture, and of what lies beside the plot, px.
const SIZE: (f64, f64) = (860.0, 420.0);
const LEFT: f64 = 70.0;
const RIGHT: f64 = 130.0;
const BOTTOM: f64 = 44.0;
/// Of a line of facts above the plot.
const LINE: f64 = 16.0;
/// Size of the plot in characters.
const COLUMNS: usize = 60;
const ROWS: usize = 12;
/// A picture of bubbles that are all smaller is not drawn larger.
const BUBBLE_MIN: f64 = 0.02;

/// Places of the kinds, 0 to 1 from the left and from below.
struct Places {
    most: (u64, f64),
}

impl Places {
    fn new(all: &All) -> Places {
        let memory = all.kinds.iter().map(|row| row.peak).max().unwrap_or(0).max(1);
        let bubble = all.kinds.iter().map(|row| row.bubble).fold(BUBBLE_MIN, f64::max);
        Places { most: (memory, bubble) }
    }

    fn of(&self, row: &Row) -> (f64, f64) {
        (row.peak as f64 / self.most.0 as f64, row.bubble / self.most.1)
    }
}

/// As a picture for a terminal: a letter a kind.
pub(super) fn text(all: &All) -> String {
    let places = Places::new(all);
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
    let told = letters.iter().map(|(letter, kinds)| format!("{letter} {}", kinds.join(", ")));
    lines.push(format!("{:>8}  {}", "", told.collect::<Vec<_>>().join("; ")));
    lines.join("\n")
}

/// As an SVG with lines of text above it.
pub(super) fn svg(all: &All, facts: &[String]) -> String {
    let places = Places::new(all);
    let top = 40.0 + LINE * facts.len() as f64;
    let (width, height) = (SIZE.0, SIZE.1 + top);
    let (plot_width, plot_height) = (SIZE.0 - LEFT - RIGHT, SIZE.1 - BOTTOM - 20.0);
    let base = top + 20.0 + plot_height;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         width=\"{width}\" height=\"{height}\" role=\"img\" font-size=\"{LETTERS}\" \
         font-family=\"system-ui, 'DejaVu Sans', 'Segoe UI', Helvetica, sans-serif\">\n\
         <title>Bubble over activation memory of all kinds</title>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
         <text x=\"16\" y=\"26\" font-size=\"17\" font-weight=\"bold\">All kinds: bubble over \
         memory</text>\n"
    );
    for (i, fact) in facts.iter().enumerate() {
        let y = 44.0 + LINE * i as f64;
        let _ = writeln!(out, "<text x=\"16\" y=\"{y}\" fill=\"#333\">{}</text>", escape(fact));
    }
    let (right, upper) = (LEFT + plot_width, top + 20.0);
    let most = all.memory.text(places.most.0);
    let _ = writeln!(
        out,
        "<path d=\"M{LEFT} {upper}V{base}H{right}\" fill=\"none\" stroke=\"#333\"/>\n\
         <text x=\"{LEFT}\" y=\"{:.0}\">0</text>\n\
         <text x=\"{right}\" y=\"{:.0}\" text-anchor=\"end\">{most}</text>\n\
         <text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"middle\">most activations and weight stashes \
         of a rank</text>\n\
         <text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"end\">{:.1} %</text>\n\
         <text x=\"{:.0}\" y=\"{base:.0}\" text-anchor=\"end\">0 %</text>\n\
         <text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"end\">bubble</text>",
        base + 16.0,
        base + 16.0,
        LEFT + plot_width / 2.0,
        base + 32.0,
        LEFT - 6.0,
        upper + 4.0,
        100.0 * places.most.1,
        LEFT - 6.0,
        LEFT - 6.0,
        upper + plot_height / 2.0,
    );
    let dots = all.kinds.iter().map(|row| {
        let (x, y) = places.of(row);
        (row, (LEFT + x * plot_width, base - y * plot_height))
    });
    let dots: Vec<_> = dots.collect();
    let room = Area { left: LEFT + 3.0, top: top + 4.0, right: width - 4.0, bottom: base - 2.0 };
    points(&mut out, all, &dots, room);
    out + "</svg>"
}

/// Dots with their names in `room`.
fn points(out: &mut String, all: &All, dots: &[(&Row, (f64, f64))], room: Area) {
    let named: Vec<_> = dots.iter().map(|(row, at)| (row.kind, *at)).collect();
    let names = placed(&named, room);
    for ((_, (x, y)), name) in dots.iter().zip(&names) {
        if let Some((to_x, to_y)) = name.line {
            let line = format!("M{x:.1} {y:.1}L{to_x:.1} {to_y:.1}");
            let _ = writeln!(out, "<path d=\"{line}\" stroke=\"#999\" stroke-width=\".8\"/>");
        }
    }
    for ((row, (x, y)), name) in dots.iter().zip(&names) {
        // As a picture is drawn, the font may be narrower than its estimate: a name to the left
        // ends at its dot or line.
        let (at, anchor) = match name.area {
            area if area.right <= *x => (area.right, " text-anchor=\"end\""),
            area if area.left >= *x => (area.left, ""),
            area => (0.5 * (area.left + area.right), " text-anchor=\"middle\""),
        };
        let _ = writeln!(
            out,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{RADIUS}\" fill=\"#0072b2\"><title>{}: \
             {:.2} %, {}</title></circle><text x=\"{at:.1}\" y=\"{:.1}\"{anchor}>{}</text>",
            row.kind,
            100.0 * row.bubble,
            all.memory.text(row.peak),
            name.area.bottom - 0.15 * LETTERS,
            row.kind
        );
    }
}

/// Text between tags, or in a quoted attribute.
pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
