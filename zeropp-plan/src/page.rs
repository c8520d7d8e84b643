//! A plan as one page: time over memory, the first layout's schedule, its memory over time.

use zeropp_data::files::in_words;
use zeropp_schedule::draw::chart::{self, Curve, CurveStyle, Dot, Mark, Panel};
use zeropp_schedule::draw::{html, page};
use zeropp_schedule::ir::Schedule;
use zeropp_schedule::memory::{KindPoint, MemoryKind, over_time};
use zeropp_schedule::metrics::Metrics;
use zeropp_schedule::simulate::Costs;
use zeropp_schedule::timeline::{MemoryUnit, Timeline};
use zeropp_search::bound::least_bubble_rate;

use crate::PlanError;
use crate::layout::Job;
use crate::plan::{LayoutPlan, Ranked};
use crate::text;

/// Spans of a schedule's picture: some megabytes of a page.
const SPANS_MAX: usize = 100_000;
/// Kinds of memory that come and go, from the bottom up, above what is held all the time, with the
/// places of their colours.
const KINDS: [(MemoryKind, usize); 7] = [
    (MemoryKind::Gathered, 1),
    (MemoryKind::PackedWeights, 3),
    (MemoryKind::Gradient, 4),
    (MemoryKind::GradientShard, 6),
    (MemoryKind::Activation, 0),
    (MemoryKind::WeightStash, 2),
    (MemoryKind::Communication, 5),
];
/// The place of the colour of what is held all the time.
const HELD: usize = 7;
/// Ranks whose memory is listed.
const RANKS_MAX: usize = 16;
/// Columns of a terminal in which the plan's paragraphs have no line feeds of their own.
const WIDEST: usize = 200;

/// The page, which asks for nothing else.
///
/// # Errors
/// A plan without layouts.
pub fn html(plan: &LayoutPlan, job: &Job) -> Result<String, PlanError> {
    let (timeline, memory) = plan.simulation(job, 0, |simulation| {
        let (program, mut timeline, costs) = simulation.run();
        timeline.memory_unit = MemoryUnit::Bytes;
        timeline.facts = facts(plan, bubble(&program, &timeline, &costs));
        let worst = plan.layouts[0].worst_rank;
        let points = over_time(&timeline.ranks[worst], &costs.memory);
        (timeline, points)
    })?;
    let first = &plan.layouts[0];
    let comes_in = memory.iter().any(|point| point.bytes.optimizer > 0);
    let fixed = fixed(first, comes_in);
    let schedule = picture(&timeline)?;
    let text = text::text(plan, WIDEST);
    let blocks: Vec<&str> = text.split("\n\n").collect();
    let (head, remarks) = (blocks[0], &blocks[2..blocks.len() - 1]);
    let (names, rows, less) = text::cells(&plan.layouts);
    let body = [
        page::lines(head),
        page::table(&names, &rows, &less),
        remarks.iter().map(|remark| page::lines(&unwrapped(remark))).collect::<String>(),
        format!("<h2>{}</h2>", text::run_with("the first layout", first)),
        page::command(&first.command),
        "<h2>Time over memory</h2>".into(),
        chart::both(&[scatter(&plan.layouts, plan.memory)]),
        "<h2>The first layout</h2>".into(),
        explained(first),
        format!("<h2>Its schedule</h2>{schedule}"),
        format!("<h2>Its memory over time, pipeline rank {}</h2>", first.worst_rank),
        chart::both(&[areas(&memory, fixed, plan.memory)]),
    ];
    Ok(page::page(&format!("Plan: {} on {} GPUs", plan.model, plan.gpus), &body.concat()))
}

/// Text whose long lines are no longer cut.
fn unwrapped(text: &str) -> String {
    text.replace("\n    ", " ")
}

/// What a step of a layout is made of, and what its ranks hold.
fn explained(ranked: &Ranked) -> String {
    let planned = &ranked.planned;
    let head = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<Vec<_>>();
    let terms = ranked.terms.all().into_iter().map(|(name, seconds)| {
        let share = text::percent(seconds / planned.step_s);
        vec![name.to_string(), text::figure(seconds), share]
    });
    let [inside, between] =
        [planned.traffic.inside, planned.traffic.between].map(|bytes| in_words(bytes as u64));
    let held = |kind: &MemoryKind| planned.memory.iter().any(|bytes| bytes.get(*kind) > 0);
    let kinds: Vec<MemoryKind> = MemoryKind::ALL.into_iter().filter(held).collect();
    let mut columns = head(&["pipeline rank", "all"]);
    columns.extend(kinds.iter().map(|kind| kind.name().to_string()));
    let ranks = planned.memory.iter().enumerate().take(RANKS_MAX).map(|(rank, bytes)| {
        let of_kinds = kinds.iter().map(|kind| bytes.get(*kind));
        let all = std::iter::once(bytes.total()).chain(of_kinds);
        std::iter::once(rank.to_string()).chain(all.map(in_words)).collect()
    });
    let less: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
    [
        page::lines(&planned.layout.to_string()),
        page::table(
            &head(&["part of the step", "seconds", "share"]),
            &terms.collect::<Vec<_>>(),
            &[],
        ),
        page::lines(&format!(
            "{}\nA rank sends {inside} inside its node and {between} to \
             other nodes in a step",
            text::cut(planned).join("\n")
        )),
        page::lines("Memory of each pipeline rank, when it holds most"),
        page::table(&columns, &ranks.collect::<Vec<_>>(), &less),
    ]
    .concat()
}

/// What the picture of the schedule is of.
fn facts(plan: &LayoutPlan, bubble: String) -> Vec<String> {
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

/// Bytes that the worst rank of a layout holds all the time; what its optimizer keeps may come in
/// for updates alone.
fn fixed(ranked: &Ranked, comes_in: bool) -> u64 {
    let (_, worst) = ranked.planned.worst();
    worst.parameter_shard + if comes_in { 0 } else { worst.optimizer }
}

fn picture(timeline: &Timeline) -> Result<String, PlanError> {
    let spans: usize = timeline.ranks.iter().map(|r| r.spans.len()).sum();
    if spans > SPANS_MAX {
        return Ok(format!("<p>{spans} actions: more than a page can show.</p>"));
    }
    html::part(timeline).map_err(|e| PlanError::new(e.to_string()))
}

/// Every layout as a point; those that no other beats in both are joined.
fn scatter(layouts: &[Ranked], limit: u64) -> Panel {
    let at = |r: &Ranked| (gib(r.worst_bytes), r.planned.step_s);
    let dot = |(i, r): (usize, &Ranked)| Dot {
        name: (i + 1).to_string(),
        about: format!(
            "{}: {} s, {}",
            r.planned.layout,
            text::figure(r.planned.step_s),
            in_words(r.worst_bytes)
        ),
        at: at(r),
        look: CurveStyle::one_of(0, 1),
    };
    let mut front: Vec<&Ranked> = layouts.iter().filter(|r| is_best(r, layouts)).collect();
    front.sort_by_key(|r| r.worst_bytes);
    let front = Curve {
        name: "best for their memory".into(),
        points: front.into_iter().map(at).collect(),
        mark: Mark::Line,
        look: CurveStyle::one_of(1, 2),
    };
    let step_s = layouts.first().map_or(0.0, |r| r.planned.step_s);
    Panel {
        curves: vec![front],
        dots: layouts.iter().enumerate().map(dot).collect(),
        mark: Some((gib(limit), "limit".into())),
        covers: vec![(0.0, step_s), (gib(limit), step_s)],
        ..Panel::new("Seconds of a step", "memory of the worst rank, GiB")
    }
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
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

/// What a rank holds over its step, by kind, on top of what it holds all the time.
fn areas(points: &[KindPoint], fixed: u64, limit: u64) -> Panel {
    let end = points.last().map_or(0, |p| p.at_ns);
    let area = |kinds: usize, name: &str, color: usize| {
        let held = |p: &KindPoint| {
            let here = KINDS[..kinds].iter().map(|(kind, _)| p.bytes.get(*kind)).sum::<u64>();
            gib(fixed + p.bytes.optimizer + here)
        };
        let seconds = |ns: u64| ns as f64 / 1e9;
        // A point holds until the next one.
        let until = points.iter().skip(1).map(|p| p.at_ns).chain([end]);
        let steps = points.iter().zip(until);
        let steps = steps.flat_map(|(p, to)| [p.at_ns, to].map(|ns| (seconds(ns), held(p))));
        Curve {
            name: name.into(),
            points: steps.collect(),
            mark: Mark::Area,
            look: CurveStyle::one_of(color, KINDS.len() + 1),
        }
    };
    // The highest is drawn first, so that of each the part above the next one is seen.
    let kinds = KINDS.iter().enumerate().rev();
    let kinds = kinds.map(|(i, (kind, color))| area(i + 1, kind.name(), *color));
    let limit = Curve {
        name: format!("limit, {}", in_words(limit)),
        points: vec![(0.0, gib(limit)), (end as f64 / 1e9, gib(limit))],
        mark: Mark::Line,
        look: CurveStyle::one_of(1, 2),
    };
    Panel {
        curves: kinds.chain([area(0, "parameters, moments", HELD), limit]).collect(),
        covers: vec![(0.0, 0.0)],
        ..Panel::new("Memory, GiB", "seconds")
    }
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
        assert_eq!((count("<svg"), count("<div") - count("</div>")), (4, 0), "two for two widths");
        assert_eq!(count("<circle"), 2 * plan.layouts.len());
        // The schedule fits any window: no picture of a fixed width.
        assert_eq!((count("<canvas"), count("class=\"within\"")), (1, 1));
        assert_eq!(count("<pre"), 0, "tables and lines that wrap");
        let command = zeropp_schedule::draw::page::command(&plan.layouts[0].command);
        assert!(page.contains(&command), "{command}");
        let names = text::cells(&plan.layouts).0;
        assert!(names.iter().all(|name| page.contains(&format!(">{name}</th>"))), "{names:?}");
        assert!(page.contains("bubble ") && page.contains(" %, at least "));
        let figures = page.replace("Number.isNaN", "");
        for far in ["src=", "href=", "url(http", "NaN", "inf"] {
            assert!(!figures.contains(far), "{far}");
        }
        let front: Vec<_> = plan.layouts.iter().filter(|r| is_best(r, &plan.layouts)).collect();
        assert!(front.iter().any(|r| r.planned == plan.layouts[0].planned));
    }
}
