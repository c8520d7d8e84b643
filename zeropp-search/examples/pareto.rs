//! The picture of docs/scheduler.md: bubble over activation memory under budgets of gathered
//! weights, beside the kinds that there are.
//!
//! `cargo run --release -p zeropp-schedule --example pareto > docs/pictures/pareto.svg`

use std::fmt::Write;

use zeropp_schedule::ir::Schedule;
use zeropp_schedule::metrics::Metrics;
use zeropp_schedule::schedules::{OrderCosts, Shape};
use zeropp_schedule::simulate::{self, simulate};
use zeropp_search::bound::least_bubble_rate;
use zeropp_search::budgeted::{
    Budgets, Objective, Placement, Request, default_evaluations, schedule,
};
use zeropp_search::generate_with_costs;

/// F, B and W of a rank and a message, in ns: the Zero Bubble paper's models.
const MODELS: [(&str, [u64; 4]); 2] = [
    ("14.6B", [1_134_700, 1_124_800, 813_200, 37_700]),
    ("28.3B", [2_972_000, 2_944_000, 1_992_000, 52_700]),
];
const RANKS: usize = 4;
const BATCHES: usize = 12;

/// Activation memory in what 1F1B holds, P micro-batches; bubble in per cent.
type Point = (f64, f64);

/// Points of one colour; a line where they are found for falling limits.
struct Series {
    name: String,
    colour: &'static str,
    line: bool,
    points: Vec<Point>,
}

fn shape(v: usize, unit: usize) -> Shape {
    Shape { pp: RANKS, virtual_stages: v, micro_batches: BATCHES, unit }
}

/// Costs of a rank's work in `v` equal stages.
fn costs([f, b, w, c]: [u64; 4], v: usize) -> OrderCosts {
    let n = v as u64;
    OrderCosts::uniform(RANKS * v, f / n, b / n, w / n, c)
}

/// Where a schedule lies in the picture.
fn point(made: &Schedule, costs: &OrderCosts, v: usize) -> Point {
    let mut simulator =
        simulate::Costs::uniform(costs.f.len(), costs.f[0], costs.b[0], costs.w[0], costs.send);
    simulator.memory.iter_mut().for_each(|m| (m.activation, m.stash) = (2, 1));
    let timeline = simulate(made, &simulator).expect("a good schedule");
    let metrics = Metrics::new(made, &timeline, &simulator);
    let work = (costs.f[0] + costs.b[0] + costs.w[0]) * (v * BATCHES) as u64;
    let bubble = 100.0 * (1.0 - work as f64 / metrics.own_span_max_ns as f64);
    let least = least_bubble_rate(made, &metrics, &simulator, None);
    let peak = metrics.peak_activation.iter().max().copied().unwrap_or(0);
    let peak = peak as f64 / (2 * v * RANKS) as f64;
    eprintln!(
        "V {v}, {} at {peak:.2}: own span {bubble:.2} %; as its paper counts {:.2} %, at least \
         {:.2} %",
        made.kind,
        100.0 * metrics.bubble_rate,
        100.0 * least.unwrap_or(0.0)
    );
    (peak, bubble)
}

/// The search's results within `gathered` stages and rising memory.
fn found(model: [u64; 4], v: usize, gathered: usize, colour: &'static str) -> Series {
    let mut points = Vec::new();
    for quarters in [2, 3, 4, 5, 6, 8, 10, 12] {
        let most = 100 * (2 * v * RANKS * BATCHES) as u64;
        let limit = (quarters * 2 * v * RANKS / 4) as i64;
        let costs = costs(model, v).with_limit(limit);
        let budgets = Budgets { gathered: Some(gathered as u64), ..Budgets::default() };
        let request = Request {
            shape: &shape(v, BATCHES),
            costs: &costs,
            budgets: &budgets,
            objective: Objective::OwnSpan,
            placement: Placement::Either,
            seed: 1,
            // Beyond that, sharper lines would not show.
            evaluations: Some(default_evaluations(&shape(v, BATCHES)).min(most)),
        };
        let Ok(found) = schedule(&request) else { continue };
        let (gathers, bubble) = (found.gathers(), 100.0 * found.bubble());
        eprintln!("V {v}, {gathered} gathered, {quarters}/4: {found}, {gathers} gathers");
        points.push((quarters as f64 / 4.0, bubble));
    }
    Series { name: format!("auto, {gathered} gathered"), colour, line: true, points }
}

/// The kinds that there are: with units, one point for each number of them.
fn known(model: [u64; 4], v: usize) -> Vec<Series> {
    let kinds = [
        ("zeropp, 2 gathered", "#999999", v),
        ("interleaved-zb, V gathered", "#000000", v),
        ("zb-v (V = 2)", "#b00020", 2),
        ("v-half (V = 2)", "#e07a00", 2),
        ("v-min (V = 2)", "#c8b400", 2),
    ];
    let series = kinds.map(|(name, colour, v)| {
        let kind = name.split([' ', ',']).next().unwrap_or(name);
        let costs = costs(model, v);
        let units: &[usize] = if kind == "zeropp" { &[2, 3, 4, 6, 12] } else { &[BATCHES] };
        let made = units.iter().map(|unit| generate_with_costs(kind, &shape(v, *unit), &costs));
        let points = made.flatten().map(|made| point(&made, &costs, v)).collect();
        Series { name: name.into(), colour, line: false, points }
    });
    series.into()
}

const WIDTH: f64 = 400.0;
const HEIGHT: f64 = 260.0;
const MEMORY_MAX: f64 = 3.1;
const BUBBLE_MAX: f64 = 50.0;

fn place((memory, bubble): Point) -> Point {
    (WIDTH * memory / MEMORY_MAX, HEIGHT * (1.0 - bubble.min(BUBBLE_MAX) / BUBBLE_MAX))
}

/// One panel with its upper left corner at `corner`.
fn panel(svg: &mut String, corner: Point, title: &str, series: &[Series]) {
    let _ = write!(svg, "<g transform='translate({} {})'>", corner.0, corner.1);
    let _ = write!(svg, "<text x='0' y='-8' font-weight='bold'>{title}</text>");
    for bubble in [0.0, 10.0, 20.0, 30.0, 40.0, 50.0] {
        let (_, y) = place((0.0, bubble));
        let _ = write!(svg, "<path d='M0 {y}H{WIDTH}' stroke='#dddddd'/>");
        let _ = write!(svg, "<text x='-6' y='{}' text-anchor='end'>{bubble} %</text>", y + 4.0);
    }
    for memory in [0.5, 1.0, 1.5, 2.0, 2.5, 3.0] {
        let (x, _) = place((memory, 0.0));
        let _ = write!(svg, "<path d='M{x} 0V{HEIGHT}' stroke='#eeeeee'/>");
        let y = HEIGHT + 16.0;
        let _ = write!(svg, "<text x='{x}' y='{y}' text-anchor='middle'>{memory}</text>");
    }
    for one in series {
        let places: Vec<Point> = one.points.iter().map(|p| place(*p)).collect();
        if one.line {
            let path: Vec<String> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let path = path.join(" ");
            let colour = one.colour;
            let _ = write!(
                svg,
                "<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2'/>"
            );
        }
        for (x, y) in places {
            let radius = if one.line { 2.5 } else { 4.5 };
            let colour = one.colour;
            let _ = write!(svg, "<circle cx='{x:.1}' cy='{y:.1}' r='{radius}' fill='{colour}'/>");
        }
    }
    svg.push_str("</g>");
}

fn main() {
    let mut svg = String::new();
    let mut names: Vec<(String, &str)> = Vec::new();
    for (row, (model, times)) in MODELS.into_iter().enumerate() {
        for (column, v) in [4, 8].into_iter().enumerate() {
            let budgets = [(2, "#0060c0"), (3, "#00a080"), (v, "#7030c0")];
            let mut series = known(times, v);
            series.extend(budgets.map(|(gathered, colour)| found(times, v, gathered, colour)));
            let corner = (60.0 + 480.0 * column as f64, 40.0 + 330.0 * row as f64);
            let title = format!("{model}, V = {v}");
            panel(&mut svg, corner, &title, &series);
            let gathered = format!("auto, {v} gathered");
            let common = |name: String| {
                if name == gathered { "auto, all V gathered".to_string() } else { name }
            };
            names = series.into_iter().map(|s| (common(s.name), s.colour)).collect();
        }
    }
    for (at, (name, colour)) in names.iter().enumerate() {
        let (x, y) = (60.0 + 230.0 * (at % 4) as f64, 696.0 + 22.0 * (at / 4) as f64);
        let _ = write!(svg, "<circle cx='{x}' cy='{}' r='5' fill='{colour}'/>", y - 4.0);
        let _ = write!(svg, "<text x='{}' y='{y}'>{name}</text>", x + 10.0);
    }
    let axis = "<text x='60' y='672'>Across: activation memory of a rank, in that of 1F1B. \
                Up: bubble, idle share of the largest own span.</text>";
    println!(
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 1000 740' font-family='sans-serif' \
         font-size='13'><rect width='1000' height='740' fill='white'/>{svg}{axis}</svg>"
    );
}
