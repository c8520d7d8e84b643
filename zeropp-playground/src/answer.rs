//! Answers to the page: one object in JSON in, one out.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use zeropp_schedule::check::{self, TextFault};
use zeropp_schedule::costs::{
    ALONE, SampleGrowth, SliceCut, Table, cut_samples, layers_of, measured, of_slices,
};
use zeropp_schedule::draw::kinds::KindDot;
use zeropp_schedule::draw::{self, chart, chrome_read, svg};
use zeropp_schedule::exchange::Format;
use zeropp_schedule::exchange::csv::{self, Dialect};
use zeropp_schedule::exchange::json::{self as document, Document};
use zeropp_schedule::ir::{Action, Schedule};
use zeropp_schedule::lower::{LowerOptions, lower};
use zeropp_schedule::metrics::Metrics;
use zeropp_schedule::report::{first_pipeline, measures, step, steps};
use zeropp_schedule::schedules::{
    self, KINDS, Limits, Shape, StagesPerRank, StepForm, default_unit, generate_sliced,
};
use zeropp_schedule::simulate::{Costs, StageCosts, simulate};
use zeropp_schedule::timeline::{MemoryUnit, Span, Timeline};
use zeropp_schedule::verify::VerifyLimits;
use zeropp_search::generate_with_costs;

/// Most micro-batches times stages of a picture: beyond it a slip of the hand is likelier.
const SIZE_MAX: usize = 1 << 17;
/// Tokens of a sample in slices, as `zeropp schedule` has them by itself.
const SAMPLE_TOKENS: u64 = 32768;
/// Computes that a search may time for a row of the table.
const TABLE_COMPUTES: usize = 2_000_000;
/// Faults that are reported of an edited schedule.
const FAULTS_MAX: usize = 8;

/// The questions, and what each needs.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Query {
    ask: String,
    /// The schedule to draw, to tell in numbers or to write, and the costs of one in CSV.
    wanted: Option<WantedSchedule>,
    /// A schedule by hand.
    csv: Option<String>,
    /// The format to write.
    format: Option<String>,
    /// A file's content and its name.
    text: Option<String>,
    name: Option<String>,
    /// Kinds side by side, and how wide their picture is.
    dots: Option<Vec<Point>>,
    wide: Option<f64>,
}

/// A kind in the picture of all kinds.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Point {
    kind: String,
    bubble: f64,
    peak: u64,
    chosen: bool,
}

/// A schedule and its costs.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WantedSchedule {
    kind: String,
    pp: usize,
    #[serde(rename = "virtual")]
    virtual_stages: Option<usize>,
    micro_batches: usize,
    unit: Option<usize>,
    /// Slices that every sample, which a micro-batch then is, is cut into.
    slices: usize,
    /// The share of pairs of tokens in the times of F and B, %.
    pairs: f64,
    /// The keys of a file of costs.
    costs: Map<String, Value>,
    /// Costs are of one of so many layers, not of a stage.
    layers: Option<usize>,
    limit: Option<i64>,
    /// The whole program, with gathers, reductions and messages.
    lower: bool,
    recompute: bool,
    prefetch: usize,
}

/// A schedule with its run.
struct AnsweredSchedule {
    shape: Shape,
    schedule: Schedule,
    costs: Costs,
    timeline: Timeline,
}

/// Answers a request. What does not work is `{"error": …}`, in a sentence.
pub fn answer(request: &str) -> String {
    let answer = match serde_json::from_str(request) {
        Ok(request) => answered(request),
        Err(e) => Err(e.to_string()),
    };
    let answer = answer.unwrap_or_else(|error| json!({ "error": error }));
    serde_json::to_string(&answer).unwrap_or_else(|e| e.to_string())
}

fn answered(request: Query) -> Result<Value, String> {
    let Query { ask, wanted, csv, format, text, name, dots, wide } = request;
    let needs = |what: &str| format!("{ask}: {what} is missing");
    let wanted = || wanted.as_ref().ok_or_else(|| needs("wanted"));
    match ask.as_str() {
        "kinds" => Ok(kinds()),
        // A schedule of a kind, or one in CSV, proven; priced and drawn.
        "draw" => {
            let wanted = wanted()?;
            Ok(drawn(&wanted.make(&wanted.kind)?))
        }
        // A schedule of a kind in numbers: a row of the table of all kinds.
        "row" => Ok(row(wanted()?)),
        "edit" => Ok(drawn(&edited(&csv.ok_or_else(|| needs("csv"))?, wanted()?)?)),
        // A schedule or a trace.
        "read" => {
            let text = text.ok_or_else(|| needs("text"))?;
            read(&text, &name.ok_or_else(|| needs("name"))?)
        }
        "write" => {
            let wanted = wanted()?;
            let made = match csv {
                Some(csv) => edited(&csv, wanted)?,
                None => wanted.make(&wanted.kind)?,
            };
            let text = written(&made, &format.ok_or_else(|| needs("format"))?)?;
            Ok(json!({ "text": text }))
        }
        // Bubble over memory of all kinds, as SVG.
        "scatter" => {
            let dots = dots.ok_or_else(|| needs("dots"))?;
            Ok(json!({ "svg": scatter(dots, wide.ok_or_else(|| needs("wide"))?) }))
        }
        _ => Err(format!(
            "{ask}: not a question; ask kinds, draw, row, edit, read, write or scatter"
        )),
    }
}

fn kinds() -> Value {
    let row = |kind: &schedules::Kind| {
        let (stages, only) = match kind.stages {
            StagesPerRank::Exactly(v) => (v, true),
            StagesPerRank::MultipleOf(v) | StagesPerRank::Any(v) => (v, false),
        };
        json!({
            "name": kind.name, "about": kind.about, "stages": stages, "only": only,
            "units": kind.step == StepForm::Units, "limit": kind.obeys_limit,
            "slices": kind.in_slices.is_some(),
        })
    };
    json!({ "kinds": KINDS.iter().map(row).collect::<Vec<_>>() })
}

impl WantedSchedule {
    fn shape(&self, kind: &str) -> Result<Shape, String> {
        let row = schedules::Kind::find(kind).ok_or_else(|| format!("{kind}: no such kind"))?;
        let given = self.virtual_stages.filter(|v| row.stages.allows(*v));
        let virtual_stages = given.unwrap_or(row.stages.default_number());
        let parts = [self.pp, virtual_stages, self.micro_batches, self.slices.max(1)];
        let is_huge = parts.iter().zip([1024, 64, 8192, 256]).any(|(n, most)| *n > most);
        // The page's program counts in 32 bits, in which the product need not fit.
        let all = parts.iter().map(|n| *n as u64).product::<u64>();
        if is_huge || all > SIZE_MAX as u64 {
            let slices = match self.slices {
                0 | 1 => String::new(),
                n => format!(" of {n} slices"),
            };
            return Err(format!(
                "P {}, V {virtual_stages} and B {}{slices} make more than {SIZE_MAX} forwards: the \
                 command `zeropp schedule` draws them",
                self.pp, self.micro_batches
            ));
        }
        let unit = self.unit.filter(|u| *u > 0).unwrap_or_else(|| match self.slices {
            0 | 1 => default_unit(self.pp, virtual_stages, self.micro_batches),
            n => (2 * self.pp).saturating_sub(1).div_ceil(n),
        });
        let micro_batches = self.micro_batches;
        Ok(Shape { pp: self.pp, virtual_stages, micro_batches, unit })
    }

    fn costs(&self, stages: usize) -> Result<Costs, String> {
        let table = Table::of_keys(self.costs.clone()).map_err(|e| e.to_string())?;
        let table = match self.layers {
            Some(layers) => {
                let cut = layers_of(layers, stages).map_err(|e| e.to_string())?;
                table.of_layers(&cut).map_err(|e| e.to_string())?
            }
            None => table,
        };
        table.of(stages, ALONE, None).map_err(|e| e.to_string())
    }

    fn make(&self, kind: &str) -> Result<AnsweredSchedule, String> {
        self.make_within(kind, None)
    }

    /// The schedule of `kind`; where it searches, with so many evaluations.
    fn make_within(
        &self,
        kind: &str,
        evaluations: Option<u64>,
    ) -> Result<AnsweredSchedule, String> {
        let shape = self.shape(kind)?;
        let costs = self.costs(shape.stages())?;
        if self.slices > 1 {
            return self.make_sliced(kind, shape, &costs);
        }
        let limits = Limits { evaluations, ..Limits::default() };
        let (mem_limit, costs_of) = (self.limit, schedules::OrderCosts::from(&costs));
        let weighed = schedules::OrderCosts { mem_limit, limits, ..costs_of };
        let weighed = match self.lower {
            true => weighed.with_objective(self.options().sync.into()),
            false => weighed,
        };
        let made = generate_with_costs(kind, &shape, &weighed).map_err(|e| e.to_string())?;
        run(shape, self.lowered(made), costs)
    }

    /// The schedule of `kind` with samples in slices, where a sample has these costs.
    fn make_sliced(
        &self,
        kind: &str,
        shape: Shape,
        costs: &Costs,
    ) -> Result<AnsweredSchedule, String> {
        let pairs = [self.share_of_pairs()?; 2];
        let (costs, tokens) = cut_samples(
            costs,
            costs.stages.len(),
            SAMPLE_TOKENS,
            self.slices,
            SliceCut::default(),
            pairs,
        )?;
        let made = generate_sliced(kind, &shape, &tokens).map_err(|e| e.to_string())?;
        run(shape, self.lowered(made), costs)
    }

    fn share_of_pairs(&self) -> Result<f64, String> {
        let percent = Some(self.pairs).filter(|percent| (0.0..=100.0).contains(percent));
        let problem = || format!("pairs = {}: no share of a time in %; use 0 to 100", self.pairs);
        Ok(percent.ok_or_else(problem)? / 100.0)
    }

    fn options(&self) -> LowerOptions {
        let (recompute, prefetch) = (self.recompute, self.prefetch);
        LowerOptions { recompute, prefetch, ..LowerOptions::default() }
    }

    fn lowered(&self, made: Schedule) -> Schedule {
        if self.lower { lower(&made, &self.options()) } else { made }
    }
}

fn run(shape: Shape, schedule: Schedule, costs: Costs) -> Result<AnsweredSchedule, String> {
    let timeline = simulate(&schedule, &costs).map_err(|e| e.to_string())?;
    Ok(AnsweredSchedule { shape, schedule, costs, timeline })
}

/// A schedule by hand: every fault that the verifier finds, or its run.
fn edited(text: &str, wanted: &WantedSchedule) -> Result<AnsweredSchedule, String> {
    let limits = VerifyLimits::default();
    let checked = check::check(text, Format::Csv, &limits, FAULTS_MAX).map_err(in_lines)?;
    let schedule = checked.schedule;
    let pp = schedule.pp();
    let shape = Shape {
        pp,
        virtual_stages: schedule.stages().div_ceil(pp),
        micro_batches: schedule.micro_batches(),
        unit: schedule.units.first().copied().unwrap_or(1),
    };
    let costs = wanted.costs(schedule.stages())?;
    let costs = match schedule.sample_slices.as_slice() {
        [] => costs,
        tokens => {
            let share = wanted.share_of_pairs()?;
            let growth = SampleGrowth::of_pairs(share, share);
            of_slices(&costs, costs.stages.len(), &growth, tokens)
        }
    };
    run(shape, schedule, costs)
}

fn in_lines(faults: Vec<TextFault>) -> String {
    faults.into_iter().map(|fault| fault.message).collect::<Vec<_>>().join("\n")
}

fn read(text: &str, name: &str) -> Result<Value, String> {
    let named = |e: String| format!("{name}: {e}");
    if chrome_read::is_trace(text) {
        let timeline = chrome_read::read(text).map_err(|e| named(e.to_string()))?;
        return Ok(traced(&timeline));
    }
    if let Some(what) = other_file(text) {
        return Err(named(what.into()));
    }
    let is_json = text.trim_start().starts_with('{');
    let format = if is_json { Format::Json } else { Format::Csv };
    let parsed = check::parsed(text, format, FAULTS_MAX);
    let schedule = parsed.map_err(|faults| named(in_lines(faults)))?.schedule;
    let pp = schedule.pp();
    Ok(json!({ "csv": as_csv(&schedule)?, "pp": pp,
        "virtual": schedule.stages().div_ceil(pp.max(1)),
        "micro_batches": schedule.micro_batches(), "kind": schedule.kind }))
}

/// Kind of a file that is neither a schedule nor a trace.
fn other_file(text: &str) -> Option<&'static str> {
    let first_line = text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
    let object = |text: &str| serde_json::from_str::<Map<String, Value>>(text).ok();
    let (whole, first) = (object(text), object(first_line));
    let has = |object: &Option<Map<String, Value>>, key: &str| {
        object.as_ref().is_some_and(|object| object.contains_key(key))
    };
    let is_toml = text.lines().any(|line| line.trim_start().starts_with("t_f ="));
    if has(&whole, "actions") {
        None
    } else if is_toml || ["t_f", "measured", "t_comm"].iter().any(|key| has(&whole, key)) {
        Some("a file of costs, which this page does not read; `zeropp schedule --costs` does")
    } else if ["run", "step"].iter().any(|key| has(&first, key)) {
        Some("the metrics of a run; `zeropp plot` draws them")
    } else if whole.is_some() {
        Some(
            "neither a schedule nor a trace; use a schedule (CSV, or JSON of `zeropp schedule -o`) \
             or a trace of `zeropp run --trace`",
        )
    } else {
        None
    }
}

/// The last whole step of a trace's first pipeline, from time 0, and what the controls have to say
/// for a schedule of the same shape and times.
fn traced(trace: &Timeline) -> Value {
    let number = steps(trace);
    let mut one = first_pipeline(&match number {
        0 => trace.clone(),
        n => step(trace, n - 1),
    });
    let spans_of = |one: &Timeline| one.ranks.iter().flat_map(|r| r.spans.clone()).collect();
    let all: Vec<Span> = spans_of(&one);
    let start = all.iter().map(|span| span.start_ns).min().unwrap_or(0);
    for span in one.ranks.iter_mut().flat_map(|rank| &mut rank.spans) {
        span.start_ns -= start;
        span.end_ns -= start;
    }
    let (pp, stages) = (one.ranks.len(), one.placement.len());
    let micro_batches = all.iter().filter_map(|span| span.action.micro_batch()).max();
    let units = all.iter().filter(|s| s.action == Action::ReduceScatter { stage: 0 }).count();
    let micro_batches = micro_batches.map_or(1, |last| last + 1);
    // The title of a run, or of a simulation.
    let kind = one.title.split([' ', ',']).next().and_then(schedules::Kind::find);
    let which = if number > 1 { format!(", step {number} of {number}") } else { String::new() };
    json!({
        "trace": format!("{}{which}", one.title), "facts": one.facts, "ranks": spans(&one),
        "bubble": one.bubble(), "own_span": one.bubble_own_span(), "placement": one.placement,
        "shape": {
            "kind": kind.map(|kind| kind.name), "pp": pp, "virtual": stages.div_ceil(pp.max(1)),
            "micro_batches": micro_batches, "unit": micro_batches.div_ceil(units.max(1)),
            "lower": units > 0,
        },
        "times": times(&one),
    })
}

/// Times of a step's actions, µs: one number, or one for each stage.
fn times(one: &Timeline) -> Value {
    let Ok(costs) = measured(one) else { return Value::Null };
    let of_stages = |of: fn(&StageCosts) -> u64| {
        let all: Vec<Value> = costs.stages.iter().map(|s| micros(of(s)).into()).collect();
        let same = all.iter().all(|time| *time == all[0]);
        if same { all[0].clone() } else { Value::Array(all) }
    };
    json!({
        "t_f": of_stages(|s| s.f_ns), "t_b": of_stages(|s| s.b_ns), "t_w": of_stages(|s| s.w_ns),
        "t_gather": of_stages(|s| s.all_gather_ns), "t_reduce": of_stages(|s| s.reduce_scatter_ns),
        "t_comm": micros(costs.link.latency_ns), "t_step": micros(costs.step_ns),
    })
}

fn micros(ns: u64) -> f64 {
    ns as f64 / 1000.0
}

fn scatter(dots: Vec<Point>, wide: f64) -> String {
    let dot = |Point { kind, bubble, peak, chosen }| KindDot { kind, bubble, peak, chosen };
    let dots: Vec<KindDot> = dots.into_iter().map(dot).collect();
    chart::svg(&[draw::kinds::panel(&dots, MemoryUnit::Units)], wide)
}

fn as_csv(schedule: &Schedule) -> Result<String, String> {
    let mut text = Vec::new();
    csv::write(schedule, Dialect::Zeropp, &mut text).map_err(|e| e.to_string())?;
    String::from_utf8(text).map_err(|e| e.to_string())
}

fn written(made: &AnsweredSchedule, format: &str) -> Result<String, String> {
    let mut out = Vec::new();
    let written = match format {
        "csv" => csv::write(&made.schedule, Dialect::Zeropp, &mut out),
        "torch" => csv::write(&made.schedule, Dialect::Torch, &mut out),
        "svg" => svg::write(&made.timeline, &mut out),
        _ => {
            let measures = measures(&made.schedule, &made.timeline, &made.costs, micros);
            let costs = document::JsonCosts::from(&made.costs);
            let schedule = made.schedule.clone();
            let whole = Document { schedule, costs: Some(costs), measures: Some(measures) };
            document::write(&whole, &mut out)
        }
    };
    written.map_err(|e| e.to_string())?;
    String::from_utf8(out).map_err(|e| e.to_string())
}

/// Numbers of a run, the same for the picture and the table.
#[derive(Serialize)]
struct Numbers {
    makespan: u64,
    own_span: u64,
    bubble: f64,
    bubble_own_span: f64,
    bubble_own_span_max: f64,
    bubble_rate: f64,
    peak: u64,
    gathers: usize,
    reductions: usize,
    #[serde(rename = "virtual")]
    virtual_stages: usize,
    unit: usize,
}

fn numbers(made: &AnsweredSchedule) -> Numbers {
    let metrics = Metrics::new(&made.schedule, &made.timeline, &made.costs);
    Numbers {
        makespan: metrics.makespan_ns,
        own_span: metrics.own_span_max_ns,
        bubble: made.timeline.bubble(),
        bubble_own_span: made.timeline.bubble_own_span(),
        bubble_own_span_max: made.timeline.bubble_own_span_max(),
        bubble_rate: metrics.bubble_rate,
        peak: metrics.peak_activation.iter().copied().max().unwrap_or(0),
        gathers: metrics.all_gathers,
        reductions: metrics.reduce_scatters,
        virtual_stages: made.shape.virtual_stages,
        unit: made.shape.unit.min(made.shape.micro_batches),
    }
}

fn drawn(made: &AnsweredSchedule) -> Value {
    let memory: Vec<Vec<[u64; 2]>> = made
        .timeline
        .ranks
        .iter()
        .map(|r| r.memory.iter().map(|m| [m.at_ns, m.bytes]).collect())
        .collect();
    json!({
        "kind": made.schedule.kind, "placement": made.schedule.placement,
        "units": made.schedule.units, "slices": made.schedule.slices_per_sample(),
        "ranks": spans(&made.timeline), "memory": memory,
        "numbers": numbers(made), "bubbles": made.timeline.bubbles(),
        "csv": as_csv(&made.schedule).unwrap_or_default(),
    })
}

/// Every span as `[action, stage, micro-batch, start, end]`, the action by its row's number, and
/// the stage and micro-batch of an overlap's backward; -1 where there is none. Times are ns.
fn spans(timeline: &Timeline) -> Vec<Vec<Vec<i64>>> {
    let number = |n: Option<usize>| n.map_or(-1, |n| n as i64);
    let span = |s: &Span| {
        let action = &s.action;
        let mut row = vec![
            action.kind() as i64,
            number(action.stage()),
            number(action.micro_batch()),
            s.start_ns as i64,
            s.end_ns as i64,
        ];
        if let Action::Overlap { backward: (stage, micro_batch), .. } = action {
            row.extend([*stage as i64, *micro_batch as i64]);
        }
        row
    };
    timeline.ranks.iter().map(|rank| rank.spans.iter().map(span).collect()).collect()
}

/// A table asks for every kind in turn, so no kind searches for long in it.
fn row(wanted: &WantedSchedule) -> Value {
    let made = wanted.shape(&wanted.kind).and_then(|shape| {
        let computes = 3 * shape.stages() * shape.micro_batches;
        let evaluations = (TABLE_COMPUTES / computes.max(1)).max(2) as u64;
        wanted.make_within(&wanted.kind, Some(evaluations))
    });
    match made {
        Ok(made) => json!({ "kind": wanted.kind, "numbers": numbers(&made) }),
        Err(error) => json!({ "kind": wanted.kind, "error": error }),
    }
}

#[cfg(test)]
mod tests;
