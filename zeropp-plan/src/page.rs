//! A plan as one page: time over memory, the first layout's schedule, its memory over time.

use std::fmt::Write;

use zeropp_data::files::in_words;
use zeropp_schedule::draw::svg;
use zeropp_schedule::ir::Schedule;
use zeropp_schedule::memory::{KindPoint, MemoryKind, over_time};
use zeropp_schedule::metrics::Metrics;
use zeropp_schedule::simulate::Costs;
use zeropp_schedule::timeline::{MemoryUnit, Timeline};
use zeropp_search::bound::least_bubble_rate;

use crate::PlanError;
use crate::layout::Job;
use crate::plan::{Plan, Ranked};
use crate::text;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 340.0;
const LEFT: f64 = 80.0;
const BOTTOM: f64 = 46.0;
/// Spans of a schedule's picture: a larger one takes a browser too long.
const SPANS_MAX: usize = 12_000;
/// Kinds of memory that come and go, from the bottom up, with colours that all can tell apart.
const KINDS: [(MemoryKind, &str); 7] = [
    (MemoryKind::Gathered, "#56b4e9"),
    (MemoryKind::PackedWeights, "#cc79a7"),
    (MemoryKind::Gradient, "#e69f00"),
    (MemoryKind::GradientShard, "#d55e00"),
    (MemoryKind::Activation, "#3b8bd0"),
    (MemoryKind::WeightStash, "#2aa17b"),
    (MemoryKind::Communication, "#999999"),
];
/// Pictures do not get so small that nobody can read them, but scroll. That of a schedule is up to
/// 2600 px wide and has numbers in its boxes: it keeps its size.
const STYLE: &str = ":root{color-scheme:light dark}body{font:15px/1.45 system-ui,sans-serif;\
margin:1.2rem auto;max-width:70rem;padding:0 1rem;background:#fff;color:#111}\
h1,p{overflow-wrap:anywhere}svg{display:block;max-width:100%;min-width:600px;height:auto}\
.schedule svg{max-width:none}.wide{overflow-x:auto}\
pre{overflow-x:auto;background:#f3f3f3;padding:.7rem}\
@media(prefers-color-scheme:dark){body{background:#14161a;color:#eee}pre{background:#1e2127}}";

/// The page, which asks for nothing else.
///
/// # Errors
/// A plan without layouts.
pub fn html(plan: &Plan, job: &Job) -> Result<String, PlanError> {
    let (timeline, memory) = plan.simulation(job, 0, |simulation| {
        let (program, mut timeline, costs) = simulation.run();
        timeline.memory_unit = MemoryUnit::Bytes;
        timeline.facts = facts(plan, bubble(&program, &timeline, &costs));
        let worst = plan.layouts[0].worst_rank;
        let points = over_time(&timeline.ranks[worst], &costs.memory);
        (timeline, points)
    })?;
    let first = &plan.layouts[0];
    let fixed = fixed(first);
    let schedule = picture(&timeline)?;
    let mut page = String::new();
    let title = format!("Plan: {} on {} GPUs", plan.model, plan.gpus);
    let _ = write!(
        page,
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" \
         content=\"width=device-width, initial-scale=1\"><title>{0}</title><style>{STYLE}</style>\
         </head><body><h1>{0}</h1><pre>{1}</pre><h2>Time over memory</h2>{2}\
         <h2>The first layout</h2><pre>{3}</pre><h2>Its schedule</h2>\
         <div class=\"wide schedule\">{schedule}</div>\
         <h2>Its memory over time, pipeline rank {4}</h2>{5}</body></html>\n",
        escape(&title),
        escape(&text::text(plan, 140)),
        scatter(&plan.layouts, plan.memory),
        escape(&text::explain(plan, 0, 120).unwrap_or_default()),
        first.worst_rank,
        areas(&memory, fixed, plan.memory),
    );
    Ok(page)
}

/// What the picture of the schedule is of.
fn facts(plan: &Plan, bubble: String) -> Vec<String> {
    vec![
        plan.layouts[0].planned.layout.to_string(),
        bubble,
        format!("{} on {}; memory of activations and weight stashes", plan.model, plan.machine),
        format!("zeropp {}", env!("CARGO_PKG_VERSION")),
    ]
}

/// What ranks idle, and what they would in any other order that holds no more.
fn bubble(program: &Schedule, timeline: &Timeline, costs: &Costs) -> String {
    let metrics = Metrics::new(program, timeline, costs);
    let least = least_bubble_rate(program, &metrics, costs, None);
    let least = least.map_or(String::new(), |rate| format!(", at least {:.1} %", 100.0 * rate));
    format!(
        "bubble {:.1} %{least}, as the paper of its kind counts it",
        100.0 * metrics.bubble_rate
    )
}

/// Bytes that the worst rank of a layout holds all the time.
fn fixed(ranked: &Ranked) -> u64 {
    let (_, worst) = ranked.planned.worst();
    worst.parameter_shard + worst.optimizer
}

fn picture(timeline: &Timeline) -> Result<String, PlanError> {
    let spans: usize = timeline.ranks.iter().map(|r| r.spans.len()).sum();
    if spans > SPANS_MAX {
        return Ok(format!("<p>{spans} actions: more than a page can show.</p>"));
    }
    let mut out = Vec::new();
    svg::write(timeline, &mut out).map_err(|e| PlanError::new(e.to_string()))?;
    String::from_utf8(out).map_err(|e| PlanError::new(e.to_string()))
}

/// Every layout as a point; those that no other beats in both are joined.
fn scatter(layouts: &[Ranked], limit: u64) -> String {
    let most_bytes = layouts.iter().map(|r| r.worst_bytes).max().unwrap_or(1).max(limit) as f64;
    let times = || layouts.iter().map(|r| r.planned.step_s);
    let (least, most) = (times().fold(f64::INFINITY, f64::min), times().fold(0.0, f64::max));
    // Room at both ends, also where all take as long.
    let room = (0.15 * (most - least)).max(0.001 * least);
    let (low, high) = (least - room, most + room);
    let x = |bytes: f64| LEFT + bytes / most_bytes / 1.05 * (WIDTH - LEFT - 20.0);
    let y = |s: f64| 14.0 + (high - s) / (high - low) * (HEIGHT - BOTTOM - 14.0);
    let mut out = open("Step time over memory of the layouts, with the Pareto front");
    axes(&mut out, &format!("memory of the worst rank, 0 to {}", in_words(most_bytes as u64)));
    for s in [least, 0.5 * (least + most), most] {
        let _ = write!(
            out,
            "<text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"end\">{s:.4} s</text>",
            LEFT - 6.0,
            y(s) + 4.0
        );
    }
    let mut front: Vec<&Ranked> = layouts.iter().filter(|r| is_best(r, layouts)).collect();
    front.sort_by_key(|r| r.worst_bytes);
    let line: Vec<String> = front
        .iter()
        .map(|r| format!("{:.1},{:.1}", x(r.worst_bytes as f64), y(r.planned.step_s)))
        .collect();
    let _ = write!(
        out,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"#d55e00\" stroke-width=\"2\"/>",
        line.join(" ")
    );
    limit_line(&mut out, x(limit as f64));
    for (i, ranked) in layouts.iter().enumerate() {
        let (x, y) = (x(ranked.worst_bytes as f64), y(ranked.planned.step_s));
        let _ = write!(
            out,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"5\" fill=\"#3b8bd0\"><title>{}: {:.3} s, {}\
             </title></circle><text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            escape(&ranked.planned.layout.to_string()),
            ranked.planned.step_s,
            in_words(ranked.worst_bytes),
            x + 8.0,
            y + 4.0,
            i + 1,
        );
    }
    out.push_str("</svg></div>");
    out
}

/// Whether no other layout is both faster and smaller.
fn is_best(ranked: &Ranked, layouts: &[Ranked]) -> bool {
    !layouts.iter().any(|other| {
        let (faster, smaller) = (
            other.planned.step_s <= ranked.planned.step_s,
            other.worst_bytes <= ranked.worst_bytes,
        );
        let same = other.planned.step_s == ranked.planned.step_s
            && other.worst_bytes == ranked.worst_bytes;
        faster && smaller && !same
    })
}

/// The beginning of a picture in a box of its own.
fn open(label: &str) -> String {
    format!(
        "<div class=\"wide\"><svg role=\"img\" aria-label=\"{label}\" \
         viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         font-size=\"12\" fill=\"currentColor\">"
    )
}

fn axes(out: &mut String, across: &str) {
    let base = HEIGHT - BOTTOM;
    let _ = write!(
        out,
        "<path d=\"M{LEFT} 10V{base}H{}\" fill=\"none\" stroke=\"currentColor\"/>\
         <text x=\"{LEFT}\" y=\"{}\">{across}</text>",
        WIDTH - 10.0,
        HEIGHT - 12.0
    );
}

fn limit_line(out: &mut String, x: f64) {
    let _ = write!(
        out,
        "<path d=\"M{x:.1} 10V{}\" stroke=\"#d55e00\" stroke-dasharray=\"5 4\"/><text x=\"{:.1}\" \
         y=\"22\" text-anchor=\"end\">limit</text>",
        HEIGHT - BOTTOM,
        x - 5.0
    );
}

/// What a rank holds over its step, by kind, on top of what it holds all the time.
fn areas(points: &[KindPoint], fixed: u64, limit: u64) -> String {
    let end = points.last().map_or(1, |p| p.at_ns.max(1)) as f64;
    let held = points.iter().map(|p| p.bytes.total() + fixed).max().unwrap_or(fixed);
    let most = held.max(limit) as f64 * 1.05;
    let x = |ns: u64| LEFT + ns as f64 / end * (WIDTH - LEFT - 10.0);
    let y = |bytes: f64| HEIGHT - BOTTOM - bytes / most * (HEIGHT - BOTTOM - 14.0);
    let mut out = open("Memory of the worst rank over a step, by kind");
    axes(&mut out, &format!("time, 0 to {:.3} s", end / 1e9));
    let base = y(0.0);
    let _ = write!(
        out,
        "<rect x=\"{LEFT}\" y=\"{:.1}\" width=\"{}\" height=\"{:.1}\" fill=\"#888\" \
         fill-opacity=\".5\"/>",
        y(fixed as f64),
        WIDTH - LEFT - 10.0,
        base - y(fixed as f64)
    );
    let below = |p: &KindPoint, kinds: usize| {
        fixed + KINDS[..kinds].iter().map(|(kind, _)| p.bytes.get(*kind)).sum::<u64>()
    };
    for (kind, (_, colour)) in KINDS.iter().enumerate() {
        let mut path = String::new();
        for (i, p) in points.iter().enumerate() {
            let top = y(below(p, kind + 1) as f64);
            let _ = match i {
                0 => write!(path, "M{:.1} {top:.1}", x(p.at_ns)),
                _ => write!(path, "H{:.1}V{top:.1}", x(p.at_ns)),
            };
        }
        for (i, p) in points.iter().enumerate().rev() {
            let before = &points[i.saturating_sub(1)];
            let _ = write!(path, "L{:.1} {:.1}", x(p.at_ns), y(below(p, kind) as f64));
            let _ = write!(path, "V{:.1}", y(below(before, kind) as f64));
        }
        let _ = write!(out, "<path d=\"{path}Z\" fill=\"{colour}\"/>");
    }
    let top = y(limit as f64);
    let _ = write!(
        out,
        "<path d=\"M{LEFT} {top:.1}H{}\" stroke=\"#d55e00\" stroke-dasharray=\"5 4\"/><text \
         x=\"4\" y=\"{:.1}\">{}</text>",
        WIDTH - 10.0,
        top + 4.0,
        in_words(limit)
    );
    out.push_str("</svg></div><p>");
    for (name, colour) in
        std::iter::once(("parameters, moments", "#888")).chain(KINDS.map(|k| (k.0.name(), k.1)))
    {
        let _ = write!(
            out,
            "<span style=\"border-left:1em solid {colour};padding:0 1em 0 .4em;\
             display:inline-block\">{name}</span>"
        );
    }
    out.push_str("</p>");
    out
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{job, plan_of};

    #[test]
    fn the_page_is_whole_and_asks_for_nothing() {
        let plan = plan_of("gpt2-xl", 8, 64);
        let page = html(&plan, &job("gpt2-xl", 8, 64)).unwrap();
        let count = |what| page.matches(what).count();
        assert_eq!((count("<svg"), count("</svg></div>")), (3, 2), "each in a box that scrolls");
        assert_eq!((count("class=\"wide"), count("<div"), count("</div>")), (3, 3, 3));
        assert_eq!(page.matches("<circle").count(), plan.layouts.len());
        assert!(page.contains("bubble ") && page.contains(" %, at least "));
        for far in ["src=", "href=", "url(http", "NaN", "inf"] {
            assert!(!page.contains(far), "{far}");
        }
        let front: Vec<_> = plan.layouts.iter().filter(|r| is_best(r, &plan.layouts)).collect();
        assert!(front.iter().any(|r| r.planned == plan.layouts[0].planned));
    }
}
