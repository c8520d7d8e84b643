//! One or more runs as one self-contained HTML page: lanes on a canvas, with zoom, pan and hover.
//! With a simulated and a measured run it shows both on one time axis and compares their numbers.

use std::io::{self, BufWriter, Write};

use serde::Serialize;

use super::{
    escape, palette, place,
    style::{LOOKS, extent, hex, look_of, makespan_ns, peak, rank_name, shades, time_text},
};
use crate::action::{Operand, Texture};
use crate::timeline::{Lane, Timeline};

/// Writes one run as a page.
///
/// # Errors
/// What writing to `out` returns.
pub fn write(timeline: &Timeline, out: impl Write) -> io::Result<()> {
    page(&[timeline], out)
}

/// Writes two runs as one page, `first` above `second`, each starting at its own first span, with
/// a table of makespan and bubbles.
///
/// # Errors
/// What writing to `out` returns.
pub fn compare(first: &Timeline, second: &Timeline, out: impl Write) -> io::Result<()> {
    page(&[first, second], out)
}

const STYLE_SHEETS: [&str; 2] = [include_str!("html/page.css"), TIMELINE_STYLE];
const TIMELINE_STYLE: &str = include_str!("html/timeline.css");
const SCRIPT: [&str; 2] = [include_str!("html/draw.js"), include_str!("html/page.js")];

fn page(timelines: &[&Timeline], out: impl Write) -> io::Result<()> {
    let mut out = BufWriter::new(out);
    let titles: Vec<String> = (0..timelines.len()).map(|i| run_title(timelines, i)).collect();
    let title = escape(&titles.join(" · "));
    // The table below has the titles of two runs.
    let heading = if timelines.len() == 1 { title.as_str() } else { "Two runs on one time axis" };
    writeln!(
        out,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<title>{title}</title>\n\
         <style>\n{}{}</style>\n</head>\n<body>\n<header>\n<h1>{heading}</h1>",
        palette(":root"),
        STYLE_SHEETS.concat()
    )?;
    facts(timelines, &mut out)?;
    table(timelines, &mut out)?;
    writeln!(out, "{BAR}\n</header>\n<main>{CANVAS}</main>")?;
    script(timelines, &mut out)?;
    writeln!(out, "</body>\n</html>")?;
    out.flush()
}

const BAR: &str = "<div id=\"bar\"><div id=\"legend\"></div><div id=\"tools\"></div></div>";
const CANVAS: &str = "<canvas id=\"canvas\" tabindex=\"0\" aria-label=\"Timeline\"></canvas>\
                      <div id=\"tip\" hidden></div>";

/// One run as a part of a [`page`](super::page::page), which can have one such part.
///
/// # Errors
/// What writing the data returns.
pub fn part(timeline: &Timeline) -> io::Result<String> {
    let mut out = Vec::new();
    writeln!(out, "<style>\n{TIMELINE_STYLE}</style>")?;
    facts(&[timeline], &mut out)?;
    // Lanes as high as they are good to read, as far as a window shows them.
    let height = 28 + 88 * timeline.ranks.len();
    writeln!(
        out,
        "{BAR}<main class=\"within\" style=\"height:min({height}px,80vh)\">{CANVAS}</main>"
    )?;
    script(&[timeline], &mut out)?;
    String::from_utf8(out).map_err(io::Error::other)
}

/// The data and the program that draws it.
fn script(timelines: &[&Timeline], out: &mut impl Write) -> io::Result<()> {
    write!(out, "<script type=\"application/json\" id=\"data\">")?;
    data(timelines, out)?;
    writeln!(out, "</script>\n<script>\n{}</script>", SCRIPT.concat())
}

/// What belongs to each run, a line each.
fn facts(timelines: &[&Timeline], out: &mut impl Write) -> io::Result<()> {
    for (i, timeline) in timelines.iter().enumerate().filter(|(_, t)| !t.facts.is_empty()) {
        let letter = match timelines.len() {
            1 => String::new(),
            _ => format!("<b>{}</b> ", letter(i)),
        };
        let lines: Vec<String> = timeline.facts.iter().map(|fact| escape(fact)).collect();
        writeln!(out, "<p class=\"facts\">{letter}{}</p>", lines.join("<br>"))?;
    }
    Ok(())
}

/// A row per run: makespan, bubble, bubble_own_span, and every rank's part of the bubble.
fn table(timelines: &[&Timeline], out: &mut impl Write) -> io::Result<()> {
    let ranks = timelines.iter().map(|t| t.ranks.len()).max().unwrap_or(0);
    write!(
        out,
        "<div id=\"numbers\"><table>\n<tr><th>run<th>makespan<th>bubble<th>bubble_own_span"
    )?;
    let in_steps = timelines.iter().any(|timeline| timeline.bubble_step().is_some());
    if in_steps {
        write!(out, "<th>bubble_step")?;
    }
    // Ranks that idle as long as all together say nothing more.
    let ranks = if timelines.iter().all(|t| is_even(t)) { 0 } else { ranks };
    (0..ranks).try_for_each(|r| write!(out, "<th class=\"rank\">rank {r}"))?;
    writeln!(out)?;
    for (i, timeline) in timelines.iter().enumerate() {
        let bubbles = timeline.bubbles();
        write!(
            out,
            "<tr><td>{}<td>{}<td>{}<td>{}",
            escape(&run_title(timelines, i)),
            time_text(makespan_ns(timeline)),
            percent(timeline.bubble()),
            percent(timeline.bubble_own_span())
        )?;
        if in_steps {
            write!(out, "<td>{}", timeline.bubble_step().map_or(String::new(), percent))?;
        }
        for r in 0..ranks {
            let bubble = bubbles.get(r).map_or(String::new(), |bubble| percent(*bubble));
            write!(out, "<td class=\"rank\">{bubble}")?;
        }
        writeln!(out)?;
    }
    if let [first, second] = timelines {
        difference(first, second, ranks, in_steps, out)?;
    }
    writeln!(out, "</table></div>")
}

/// Whether every rank's part of the bubble is that of all together, as far as it is shown.
pub fn is_even(timeline: &Timeline) -> bool {
    timeline.bubbles().iter().all(|bubble| (bubble - timeline.bubble()).abs() < 5e-5)
}

/// The run's title, with the letter that its lanes carry where there are several.
fn run_title(timelines: &[&Timeline], index: usize) -> String {
    let title = &timelines[index].title;
    if timelines.len() == 1 {
        return title.clone();
    }
    format!("{}: {title}", letter(index))
}

fn letter(index: usize) -> char {
    char::from(b'A' + index as u8)
}

/// The second run against the first: makespan in per cent of the first, bubbles in points.
fn difference(
    first: &Timeline,
    second: &Timeline,
    ranks: usize,
    in_steps: bool,
    out: &mut impl Write,
) -> io::Result<()> {
    let (a, b) = (makespan_ns(first), makespan_ns(second));
    let makespan = ratio(a, b).unwrap_or_default();
    // Rounded before it is written, so that no −0.0 appears.
    let points = |a: f64, b: f64| format!("{:+.1} pt", (1000.0 * (b - a)).round() / 10.0 + 0.0);
    let bubble = points(first.bubble(), second.bubble());
    let own = points(first.bubble_own_span(), second.bubble_own_span());
    write!(out, "<tr><td>B against A<td>{makespan}<td>{bubble}<td>{own}")?;
    if in_steps {
        let both = first.bubble_step().zip(second.bubble_step());
        write!(out, "<td>{}", both.map_or(String::new(), |(a, b)| points(a, b)))?;
    }
    let (first, second) = (first.bubbles(), second.bubbles());
    for r in 0..ranks {
        match (first.get(r), second.get(r)) {
            (Some(a), Some(b)) => write!(out, "<td class=\"rank\">{}", points(*a, *b))?,
            _ => write!(out, "<td class=\"rank\">")?,
        }
    }
    writeln!(out)
}

/// `b` against `a`, in words: per cent more or less, or how many times where that would be ten or
/// more, or a tenth. None against nothing.
pub fn ratio(a: u64, b: u64) -> Option<String> {
    let times = b as f64 / a as f64;
    match (a, times) {
        (0, _) => None,
        (_, times) if (0.1..10.0).contains(&times) => {
            Some(format!("{:+.1} %", 100.0 * (b as f64 - a as f64) / a as f64))
        }
        _ => Some(format!("x {}", three_digits(times))),
    }
}

fn three_digits(x: f64) -> String {
    let decimals =
        if x >= 100.0 || x == 0.0 { 0 } else { (1.0 - x.log10().floor()).max(0.0) as usize };
    format!("{x:.decimals$}")
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// What the script draws. Times are ns from the first span of the run.
#[derive(Serialize)]
struct Page<'a> {
    styles: Vec<StyleData>,
    runs: Vec<DrawnRun<'a>>,
    /// Length of the longest run, ns.
    length: u64,
}

#[derive(Serialize)]
struct StyleData {
    name: &'static str,
    about: &'static str,
    color: String,
    texture: &'static str,
}

#[derive(Serialize)]
struct DrawnRun<'a> {
    title: &'a str,
    /// Until its last span's end, ns.
    length: u64,
    /// Largest memory of any rank of the runs whose memory is in the same unit.
    memory: u64,
    /// The same with its unit, for the axis.
    most: String,
    /// Shade of each stage, 0 to 1.
    shades: Vec<f64>,
    ranks: Vec<RankView>,
}

#[derive(Serialize)]
struct RankView {
    name: String,
    bubble: String,
    peak: String,
    /// First start and last end of the rank's own span; empty where it computes nothing.
    own: Vec<u64>,
    /// Rows of compute, then rows of communication. Six numbers a span, in order of time: start
    /// after the last span's start, length, style, stage, micro-batch (−1: none), and the index
    /// of an overlap's backward in `pairs` (−1: none).
    rows: Vec<Vec<Vec<i64>>>,
    /// Stage and micro-batch of the backward of each overlap.
    pairs: Vec<(usize, usize)>,
    /// Times and bytes by turns.
    memory: Vec<u64>,
}

/// Writes the data as JSON that cannot end the script element.
fn data(timelines: &[&Timeline], out: &mut impl Write) -> io::Result<()> {
    let texture = |t| match t {
        Texture::Solid => "solid",
        Texture::Diagonal => "diagonal",
        Texture::Horizontal => "horizontal",
        Texture::Dots => "dots",
    };
    let styles = LOOKS.iter().map(|s| StyleData {
        name: s.name,
        about: s.about,
        color: hex(s.color),
        texture: texture(s.texture),
    });
    // Runs in other units have no scale in common.
    let alike = |unit| timelines.iter().filter(move |t| t.memory_unit == unit);
    let most = |unit| alike(unit).flat_map(|t| &t.ranks).map(peak).max().unwrap_or(0);
    let runs: Vec<DrawnRun> = timelines.iter().map(|t| run(t, most(t.memory_unit))).collect();
    let page = Page {
        styles: styles.collect(),
        length: runs.iter().map(|r| r.length).max().unwrap_or(1),
        runs,
    };
    let json = serde_json::to_string(&page)?;
    out.write_all(json.replace('<', "\\u003c").as_bytes())
}

fn run(timeline: &Timeline, memory: u64) -> DrawnRun<'_> {
    let (start, end) = extent(timeline);
    let bubbles = timeline.bubbles();
    let ranks = (0..timeline.ranks.len()).map(|i| rank(timeline, i, bubbles[i], start));
    DrawnRun {
        title: &timeline.title,
        length: end - start,
        memory,
        most: timeline.memory_unit.text(memory),
        shades: shades(&timeline.placement),
        ranks: ranks.collect(),
    }
}

fn rank(timeline: &Timeline, index: usize, bubble: f64, start: u64) -> RankView {
    let rank = &timeline.ranks[index];
    let mut rows: Vec<Vec<Vec<i64>>> = vec![Vec::new(); 2];
    let mut before: [Vec<u64>; 3] = Default::default();
    let mut pairs = Vec::new();
    for p in place(&rank.spans) {
        let span = &rank.spans[p.span];
        let lane = match span.lane {
            Lane::Compute => 0,
            Lane::Communication => 1,
            Lane::Copy => 2,
        };
        rows.resize_with(rows.len().max(lane + 1), Vec::new);
        if p.row == rows[lane].len() {
            rows[lane].push(Vec::new());
            before[lane].push(start);
        }
        let pair = match span.action.parts().1 {
            Operand::Pair(_, backward) => {
                pairs.push(backward);
                pairs.len() as i64 - 1
            }
            Operand::Nothing | Operand::Stage(_) | Operand::MicroBatch(..) | Operand::Peer(..) => {
                -1
            }
        };
        let number = |n: Option<usize>| n.map_or(-1, |n| n as i64);
        rows[lane][p.row].extend([
            (span.start_ns - before[lane][p.row]) as i64,
            span.end_ns.saturating_sub(span.start_ns) as i64,
            look_of(&span.action) as i64,
            number(span.action.stage()),
            number(span.action.micro_batch()),
            pair,
        ]);
        before[lane][p.row] = span.start_ns;
    }
    let own = rank.own_span().map_or(Vec::new(), |(a, b)| vec![a - start, b - start]);
    RankView {
        name: rank_name(index, rank),
        bubble: percent(bubble),
        peak: match rank.memory.is_empty() {
            true => String::new(),
            false => timeline.memory_unit.text(peak(rank)),
        },
        own,
        rows,
        pairs,
        memory: rank.memory.iter().flat_map(|m| [m.at_ns.saturating_sub(start), m.bytes]).collect(),
    }
}

#[cfg(test)]
mod tests;
