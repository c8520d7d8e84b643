//! A line chart as SVG: points over two axes, with a name beside each line.

use std::fmt::Write;

/// Points of one line.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Series {
    /// What they are.
    pub(super) name: String,
    /// In the order in which they are joined.
    pub(super) points: Vec<[f64; 2]>,
}

/// Colours that the colour-blind can tell apart.
const COLOURS: [&str; 6] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#555555"];
const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 400.0;
/// Room on the left, at the top, on the right, and at the bottom.
const ROOM: [f64; 4] = [64.0, 40.0, 24.0, 104.0];

/// A chart with a title, the axes' names, lines, and points that nothing joins.
pub(super) fn chart(title: &str, axes: [&str; 2], lines: &[Series], points: &[Series]) -> String {
    let all = || lines.iter().chain(points).flat_map(|s| &s.points);
    let most = |i: usize| all().map(|p| p[i]).fold(1e-9, f64::max) * 1.05;
    let (right, top) = (most(0), most(1));
    let [l, t, r, b] = ROOM;
    let x = |v: f64| l + v / right * (WIDTH - l - r);
    let y = |v: f64| HEIGHT - b - v / top * (HEIGHT - t - b);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"12\" role=\"img\">\n<title>{title}</title>\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#fff\"/>\n\
         <text x=\"{l}\" y=\"22\" font-size=\"15\" fill=\"#111\">{title}</text>\n"
    );
    for tick in ticks(right) {
        let (at, base) = (x(tick), HEIGHT - b);
        let _ = writeln!(
            out,
            "<path d=\"M{at:.1} {t}V{base}\" stroke=\"#ddd\"/><text x=\"{at:.1}\" y=\"{:.1}\" \
             text-anchor=\"middle\" fill=\"#333\">{tick}</text>",
            base + 16.0
        );
    }
    for tick in ticks(top) {
        let at = y(tick);
        let _ = writeln!(
            out,
            "<path d=\"M{l} {at:.1}H{:.1}\" stroke=\"#ddd\"/><text x=\"{:.1}\" y=\"{:.1}\" \
             text-anchor=\"end\" fill=\"#333\">{tick}</text>",
            WIDTH - r,
            l - 6.0,
            at + 4.0
        );
    }
    let _ = writeln!(
        out,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#111\">{}</text>\n\
         <text transform=\"translate(16 {:.1}) rotate(-90)\" text-anchor=\"middle\" \
         fill=\"#111\">{}</text>",
        (l + WIDTH - r) / 2.0,
        HEIGHT - b + 36.0,
        axes[0],
        (t + HEIGHT - b) / 2.0,
        axes[1]
    );
    for (i, series) in lines.iter().chain(points).enumerate() {
        draw(&mut out, (i, series), i < lines.len(), [&x, &y]);
    }
    out.push_str("</svg>\n");
    out
}

/// One line, or its points alone, and its name below the axes.
fn draw(
    out: &mut String,
    (i, series): (usize, &Series),
    joined: bool,
    [x, y]: [&dyn Fn(f64) -> f64; 2],
) {
    let colour = COLOURS[i % COLOURS.len()];
    if joined {
        let path: Vec<String> =
            series.points.iter().map(|p| format!("{:.1},{:.1}", x(p[0]), y(p[1]))).collect();
        let _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
            path.join(" ")
        );
    }
    for p in &series.points {
        let size = if joined { 3.0 } else { 6.0 };
        let _ = writeln!(
            out,
            "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"{size}\" fill=\"{colour}\"/>",
            x(p[0]),
            y(p[1])
        );
    }
    let (at, down) =
        (ROOM[0] + (i % 2) as f64 * 330.0, HEIGHT - ROOM[3] + 56.0 + (i / 2) as f64 * 17.0);
    let _ = writeln!(
        out,
        "<circle cx=\"{at:.1}\" cy=\"{:.1}\" r=\"5\" fill=\"{colour}\"/><text x=\"{:.1}\" \
         y=\"{down:.1}\" fill=\"#111\">{}</text>",
        down - 4.0,
        at + 10.0,
        series.name
    );
}

/// Round numbers from 0 to `most`, about six.
fn ticks(most: f64) -> Vec<f64> {
    let rough = most / 6.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|n| n * power).into_iter().find(|s| *s >= rough);
    let step = step.unwrap_or(10.0 * power);
    let round = |n: usize| (n as f64 * step * 1e6).round() / 1e6;
    (0..).map(round).take_while(|tick| *tick <= most).collect()
}
