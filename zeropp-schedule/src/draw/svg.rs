//! A run as one SVG picture: per rank a lane of computes with their micro-batch numbers, narrow
//! ones of communication and of copies, and the memory curve; above them title, legend and time
//! axis.

mod parts;

use std::{
    fmt::Write as _,
    io::{self, BufWriter, Write},
};

use super::{
    escape, palette, place,
    style::{
        FORWARD, IDLE, LOOKS, OVERLAP, WHOLE_BACKWARD, extent, hex, look_of, makespan_ns, peak,
        rank_name, shaded, shades, time_text, wants_white_text,
    },
};
use crate::action::Texture;
use crate::ir::Task;
use crate::timeline::{Lane, RankTimeline, Timeline};
use parts::{caption, clip, fill, paint, swatch, tick_step, tick_text};

/// Writes `timeline` as a self-contained SVG. Time starts at the first span.
///
/// The picture widens with the number of actions, from 1200 to 2600 px, and lanes get lower with
/// the number of ranks. All spans are drawn; a number is written where its box has room.
///
/// # Errors
/// What writing to `out` returns.
pub fn write(timeline: &Timeline, out: impl Write) -> io::Result<()> {
    let picture = Picture::new(timeline);
    let mut out = BufWriter::new(out);
    picture.head(&mut out)?;
    picture.legend(&mut out)?;
    picture.axis(&mut out)?;
    for (index, rank) in timeline.ranks.iter().enumerate() {
        picture.rank(index, rank, &mut out)?;
    }
    writeln!(out, "</svg>")?;
    out.flush()
}

/// The attributes of elements have the colours on light ground too, for programs that know no
/// variables.
const STYLE: &str = ".timeline,.memory{fill:var(--fore)}.ground{fill:var(--back)}\
.soft{fill:var(--soft)}.idle{fill:var(--idle)}.grid{stroke:var(--line)}\
.memory,.axis{stroke:var(--soft)}";

/// Of words beside the title and the lanes.
const SOFT: &str = "class=\"soft\" fill=\"#333\"";
const MARGIN: f64 = 16.0;
const HEAD_HEIGHT: f64 = 92.0;
/// Of a line below the title.
const FACT_HEIGHT: f64 = 15.0;
/// A curve of memory that is lower has no axis of its own.
const MEMORY_AXIS_MIN: f64 = 16.0;
const RIGHT_WIDTH: f64 = 150.0;
/// Communication that overlaps itself more often shares the last row.
const COMMUNICATION_ROWS_MAX: usize = 4;

/// Everything that is decided before drawing.
struct Picture<'a> {
    timeline: &'a Timeline,
    /// Time of the left and right edge, ns.
    extent: (u64, u64),
    left: f64,
    plot_width: f64,
    height: Heights,
    shades: Vec<f64>,
    /// Each rank's part of the bubble.
    bubbles: Vec<f64>,
    memory_max: u64,
}

/// Heights of a rank's parts, px.
struct Heights {
    compute: f64,
    communication: f64,
    copies: f64,
    memory: f64,
    gap: f64,
}

impl Heights {
    fn new(timeline: &Timeline) -> Heights {
        let (compute, communication, memory, gap) = match timeline.ranks.len() {
            0..=8 => (30.0, 18.0, 28.0, 16.0),
            9..=16 => (22.0, 13.0, 18.0, 12.0),
            _ => (17.0, 11.0, 12.0, 8.0),
        };
        let has = |lane| timeline.ranks.iter().flat_map(|r| &r.spans).any(|s| s.lane == lane);
        let (communicates, copies) = (has(Lane::Communication), has(Lane::Copy));
        let remembers = timeline.ranks.iter().any(|r| !r.memory.is_empty());
        Heights {
            compute,
            communication: if communicates { communication } else { 0.0 },
            copies: if copies { 0.6 * communication } else { 0.0 },
            memory: if remembers { memory } else { 0.0 },
            gap,
        }
    }

    fn rank(&self) -> f64 {
        self.lanes() + self.memory + self.gap
    }

    /// Of what is above the curve of memory.
    fn lanes(&self) -> f64 {
        self.compute + self.communication + self.copies
    }
}

/// A style in a shade, ordered so that communication is drawn last. The shade is in thousandths.
type Ink = (usize, u32);

impl<'a> Picture<'a> {
    fn new(timeline: &'a Timeline) -> Picture<'a> {
        let names = timeline.ranks.iter().enumerate().map(|(i, r)| clip(&rank_name(i, r)));
        let name_length = names.map(|n| n.chars().count()).max().unwrap_or(0);
        let computes =
            |r: &RankTimeline| r.spans.iter().filter(|s| s.lane == Lane::Compute).count();
        let most = timeline.ranks.iter().map(computes).max().unwrap_or(0);
        Picture {
            timeline,
            extent: extent(timeline),
            left: MARGIN + 12.0 + 6.6 * name_length.max(10) as f64,
            plot_width: (most as f64 * 13.0).clamp(1000.0, 2300.0),
            height: Heights::new(timeline),
            shades: shades(&timeline.placement),
            bubbles: timeline.bubbles(),
            memory_max: timeline.ranks.iter().map(peak).max().unwrap_or(0).max(1),
        }
    }

    fn x(&self, ns: u64) -> f64 {
        let (start, end) = self.extent;
        let share = ns.saturating_sub(start) as f64 / (end - start) as f64;
        self.left + self.plot_width * share
    }

    fn head_height(&self) -> f64 {
        HEAD_HEIGHT + FACT_HEIGHT * self.timeline.facts.len() as f64
    }

    fn bottom(&self) -> f64 {
        self.head_height() + self.timeline.ranks.len() as f64 * self.height.rank()
    }

    fn ink(&self, style: usize, stage: Option<usize>) -> Ink {
        // Only what belongs to computes is shaded; thin lanes are distinguished by colour alone.
        let shade = match stage {
            Some(stage) if style < 5 => self.shades.get(stage).copied().unwrap_or(0.0),
            _ => 0.0,
        };
        (style, (shade * 1000.0) as u32)
    }

    fn head(&self, out: &mut impl Write) -> io::Result<()> {
        let width = self.left + self.plot_width + RIGHT_WIDTH;
        let height = self.bottom() + MARGIN;
        writeln!(
            out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
             viewBox=\"0 0 {width:.0} {height:.0}\" \
             font-family=\"system-ui, 'DejaVu Sans', 'Segoe UI', Helvetica, sans-serif\" \
             font-size=\"11\" class=\"timeline\"><style>{}{STYLE}</style>",
            palette(".timeline")
        )?;
        writeln!(out, "<title>{}</title>", escape(&self.timeline.title))?;
        self.patterns(out)?;
        writeln!(out, "<rect class=\"ground\" width=\"100%\" height=\"100%\" fill=\"#fff\"/>")?;
        writeln!(
            out,
            "<text x=\"{MARGIN}\" y=\"26\" font-size=\"17\" font-weight=\"bold\">{}</text>",
            escape(&self.timeline.title)
        )?;
        let ranks = self.timeline.ranks.len();
        let step = self.timeline.bubble_step();
        let step = step.map_or(String::new(), |b| format!(" · bubble_step {:.1} %", 100.0 * b));
        writeln!(
            out,
            "<text x=\"{MARGIN}\" y=\"44\" {SOFT}>{ranks} ranks · makespan {} · \
             bubble {:.1} % · bubble_own_span {:.1} %{step}</text>",
            time_text(makespan_ns(self.timeline)),
            100.0 * self.timeline.bubble(),
            100.0 * self.timeline.bubble_own_span(),
        )?;
        self.timeline.facts.iter().enumerate().try_for_each(|(i, fact)| {
            let y = 44.0 + FACT_HEIGHT * (i + 1) as f64;
            writeln!(out, "<text x=\"{MARGIN}\" y=\"{y}\" {SOFT}>{}</text>", escape(fact))
        })
    }

    /// A pattern for each textured style in each shade that the placement has.
    fn patterns(&self, out: &mut impl Write) -> io::Result<()> {
        let mut shades: Vec<u32> = self.shades.iter().map(|s| (s * 1000.0) as u32).collect();
        shades.push(0);
        shades.sort_unstable();
        shades.dedup();
        writeln!(out, "<defs>")?;
        for (style, s) in LOOKS.iter().enumerate() {
            let mark = match s.texture {
                Texture::Solid => continue,
                Texture::Diagonal => {
                    "<path d=\"M-1 1l2-2M0 6l6-6M5 7l2-2\" stroke=\"#fff\" \
                     stroke-opacity=\".38\" stroke-width=\"1.3\"/>"
                }
                Texture::Horizontal => {
                    "<path d=\"M0 1.5h6M0 4.5h6\" stroke=\"#fff\" \
                     stroke-opacity=\".3\" stroke-width=\"1\"/>"
                }
                Texture::Dots => {
                    "<path d=\"M1 1h1.4v1.4h-1.4zM4 4h1.4v1.4h-1.4z\" fill=\"#000\" \
                     fill-opacity=\".3\"/>"
                }
            };
            for shade in &shades {
                let color = hex(shaded(s.color, f64::from(*shade) / 1000.0));
                writeln!(
                    out,
                    "<pattern id=\"p{style}-{shade}\" width=\"6\" height=\"6\" \
                     patternUnits=\"userSpaceOnUse\">\
                     <rect width=\"6\" height=\"6\" fill=\"{color}\"/>{mark}</pattern>"
                )?;
            }
        }
        writeln!(out, "</defs>")
    }

    /// A swatch for each style that occurs, for idle, and for the shades.
    fn legend(&self, out: &mut impl Write) -> io::Result<()> {
        let mut used = vec![false; LOOKS.len()];
        for span in self.timeline.ranks.iter().flat_map(|r| &r.spans) {
            used[look_of(&span.action)] = true;
        }
        let mut x = MARGIN;
        let y = 54.0 + FACT_HEIGHT * self.timeline.facts.len() as f64;
        for style in (0..LOOKS.len()).filter(|s| used[*s]) {
            if style == OVERLAP {
                swatch(out, x, y, 6.0, &paint(&fill(FORWARD, 0)))?;
                swatch(out, x, y + 6.0, 6.0, &paint(&fill(WHOLE_BACKWARD, 0)))?;
            } else {
                swatch(out, x, y, 12.0, &paint(&fill(style, 0)))?;
            }
            x = caption(out, x, y, LOOKS[style].name)?;
        }
        swatch(out, x, y, 12.0, &format!("class=\"idle\" fill=\"{}\"", hex(IDLE)))?;
        x = caption(out, x, y, "idle")?;
        let mut shades = self.shades.clone();
        shades.sort_by(f64::total_cmp);
        shades.dedup();
        if shades.len() > 1 {
            for (i, shade) in shades.iter().enumerate() {
                let fill = hex(shaded(LOOKS[FORWARD].color, *shade));
                swatch(out, x + 14.0 * i as f64, y, 12.0, &paint(&fill))?;
            }
            x += 14.0 * (shades.len() - 1) as f64;
            caption(out, x, y, "a rank's stages, first to last")?;
        }
        Ok(())
    }

    /// Times above the lanes and a thin line for each through all of them.
    fn axis(&self, out: &mut impl Write) -> io::Result<()> {
        let (start, end) = self.extent;
        let range = end - start;
        let step = tick_step(range, (self.plot_width / 110.0) as u64);
        let (top, bottom) = (self.head_height() - 6.0, self.bottom() - self.height.gap + 4.0);
        let mut lines = String::new();
        for tick in (0..=range / step).map(|n| n * step) {
            let x = self.x(start + tick);
            let _ = write!(lines, "M{x:.1} {top:.1}V{bottom:.1}");
            writeln!(
                out,
                "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\" {SOFT}>{}</text>",
                top - 4.0,
                tick_text(tick, step)
            )?;
        }
        writeln!(out, "<path d=\"{lines}\" class=\"grid\" stroke=\"#ccc\"/>")?;
        let right = self.left + self.plot_width;
        let memory = if self.height.memory > 0.0 { "peak memory" } else { "" };
        writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" {SOFT} text-anchor=\"end\">bubble</text>\
             <text x=\"{:.1}\" y=\"{:.1}\" {SOFT} text-anchor=\"end\">{memory}</text>",
            right + 58.0,
            top - 4.0,
            right + RIGHT_WIDTH - 8.0,
            top - 4.0
        )
    }

    fn rank(&self, index: usize, rank: &RankTimeline, out: &mut impl Write) -> io::Result<()> {
        let top = self.head_height() + index as f64 * self.height.rank();
        self.labels(index, rank, top, out)?;
        if let Some((start, end)) = rank.own_span() {
            let (x, width) = (self.x(start), self.x(end) - self.x(start));
            let (height, idle) = (self.height.compute, hex(IDLE));
            writeln!(
                out,
                "<rect class=\"idle\" x=\"{x:.2}\" y=\"{top:.1}\" width=\"{width:.2}\" \
                 height=\"{height:.1}\" fill=\"{idle}\"/>"
            )?;
        }
        let (boxes, numbers) = self.boxes(rank, top);
        for ((style, shade), path) in boxes {
            writeln!(out, "<path fill=\"{}\" d=\"{path}\"/>", fill(style, shade))?;
        }
        for (color, texts) in [("#fff", &numbers[1]), ("#000", &numbers[0])] {
            if !texts.is_empty() {
                writeln!(
                    out,
                    "<g fill=\"{color}\" text-anchor=\"middle\" stroke-width=\"2.5\" \
                     paint-order=\"stroke\">{texts}</g>"
                )?;
            }
        }
        self.memory(rank, top, out)
    }

    fn labels(
        &self,
        index: usize,
        rank: &RankTimeline,
        top: f64,
        out: &mut impl Write,
    ) -> io::Result<()> {
        let y = top + self.height.compute / 2.0 + 4.0;
        let name = clip(&rank_name(index, rank));
        writeln!(out, "<text x=\"{MARGIN}\" y=\"{y:.1}\">{}</text>", escape(&name))?;
        let right = self.left + self.plot_width;
        let bubble = 100.0 * self.bubbles[index];
        writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{y:.1}\" text-anchor=\"end\">{bubble:.1} %</text>",
            right + 58.0
        )?;
        if !rank.memory.is_empty() {
            writeln!(
                out,
                "<text x=\"{:.1}\" y=\"{y:.1}\" text-anchor=\"end\">{}</text>",
                right + RIGHT_WIDTH - 8.0,
                self.timeline.memory_unit.text(peak(rank))
            )?;
        }
        Ok(())
    }

    /// The boxes of a rank, one path per ink, and the numbers for dark `[0]` and white `[1]` text.
    fn boxes(&self, rank: &RankTimeline, top: f64) -> (Vec<(Ink, String)>, [String; 2]) {
        let placed = place(&rank.spans);
        let rows = |lane| {
            let of_lane = placed.iter().filter(|p| rank.spans[p.span].lane == lane);
            of_lane.map(|p| p.row + 1).max().unwrap_or(1)
        };
        let narrow = |lane, above: f64, tall: f64, row: usize| {
            let rows = rows(lane).min(COMMUNICATION_ROWS_MAX);
            let height = (tall - 2.0) / rows as f64;
            (height - 0.5, top + above + 1.5 + row.min(rows - 1) as f64 * height)
        };
        let Heights { compute, communication, copies, .. } = self.height;
        let of_compute = compute / rows(Lane::Compute) as f64;
        let mut boxes = Vec::<(Ink, String)>::new();
        let mut numbers = [String::new(), String::new()];
        for p in &placed {
            let span = &rank.spans[p.span];
            let (left, right) = (self.x(span.start_ns), self.x(span.end_ns.max(span.start_ns)));
            // A hair of white between boxes that have room for it; nothing is too short to see.
            let width = (right - left - (0.12 * (right - left)).min(0.8)).max(0.4);
            let (height, y) = match span.lane {
                Lane::Compute => (of_compute, top + p.row as f64 * of_compute),
                Lane::Communication => narrow(span.lane, compute, communication, p.row),
                Lane::Copy => narrow(span.lane, compute + communication, copies, p.row),
            };
            let style = look_of(&span.action);
            let mut parts = Vec::with_capacity(2);
            if style == OVERLAP {
                let halves = [(FORWARD, y), (WHOLE_BACKWARD, y + height / 2.0)];
                for (Task { stage, micro_batch, .. }, (style, y)) in
                    span.action.computes().zip(halves)
                {
                    parts.push((self.ink(style, Some(stage)), y, height / 2.0, Some(micro_batch)));
                }
            } else {
                let (stage, number) = (span.action.stage(), span.action.micro_batch());
                let number = number.filter(|_| span.lane == Lane::Compute);
                parts.push((self.ink(style, stage), y, height, number));
            }
            for (ink, y, height, number) in parts {
                let at = boxes.binary_search_by_key(&ink, |(ink, _)| *ink).unwrap_or_else(|at| {
                    boxes.insert(at, (ink, String::new()));
                    at
                });
                let path = &mut boxes[at].1;
                let _ = write!(path, "M{left:.2} {y:.1}h{width:.2}v{height:.1}h-{width:.2}z");
                let Some(number) = number else { continue };
                let digits = number.checked_ilog10().unwrap_or(0) + 1;
                let size = (height - 3.0).min(11.0).min((width - 1.6) / (0.64 * f64::from(digits)));
                if size >= 7.0 {
                    let color = shaded(LOOKS[ink.0].color, f64::from(ink.1) / 1000.0);
                    let texts = &mut numbers[usize::from(wants_white_text(color))];
                    let (x, y) = (left + width / 2.0, y + height / 2.0 + 0.36 * size);
                    // A halo of the plain colour keeps a texture from the digits.
                    let halo = match LOOKS[ink.0].texture {
                        Texture::Solid => String::new(),
                        _ => format!(" stroke=\"{}\"", hex(color)),
                    };
                    let _ = write!(
                        texts,
                        "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size:.1}\"{halo}>\
                         {number}</text>"
                    );
                }
            }
        }
        (boxes, numbers)
    }

    /// The rank's memory as a step curve; all ranks share one scale.
    fn memory(&self, rank: &RankTimeline, top: f64, out: &mut impl Write) -> io::Result<()> {
        if rank.memory.is_empty() {
            return Ok(());
        }
        let base = top + self.height.lanes() + self.height.memory;
        let scale = (self.height.memory - 4.0) / self.memory_max as f64;
        let mut path = format!("M{:.1} {base:.1}", self.x(rank.memory[0].at_ns));
        for point in &rank.memory {
            let y = base - scale * point.bytes as f64;
            let _ = write!(path, "H{:.1}V{y:.1}", self.x(point.at_ns));
        }
        let _ = write!(path, "H{:.1}V{base:.1}", self.left + self.plot_width);
        writeln!(
            out,
            "<path class=\"memory\" d=\"{path}\" fill=\"#000\" fill-opacity=\".13\" \
             stroke=\"#444\" stroke-width=\".8\"/>"
        )?;
        if self.height.memory < MEMORY_AXIS_MIN {
            return Ok(());
        }
        let most = self.timeline.memory_unit.text(self.memory_max);
        let (x, top) = (self.left - 4.0, base - self.height.memory + 4.0);
        writeln!(
            out,
            "<path class=\"axis\" d=\"M{x:.1} {top:.1}h4M{:.1} {top:.1}V{base:.1}h-4\" \
             fill=\"none\" stroke=\"#888\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" font-size=\"9\" {SOFT} \
             text-anchor=\"end\">{most}</text>\
             <text x=\"{:.1}\" y=\"{base:.1}\" font-size=\"9\" {SOFT} \
             text-anchor=\"end\">{}</text>",
            self.left,
            x - 3.0,
            top + 4.0,
            x - 3.0,
            self.timeline.memory_unit.text(0)
        )
    }
}

#[cfg(test)]
mod tests;
