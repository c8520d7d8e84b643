//! All kinds side by side: as a table, as data, and as a picture of bubble over memory.

mod scatter;

use serde::Serialize;
use zeropp::pipeline::draw::{chart, page};
use zeropp::pipeline::schedules::{DEFAULT, KINDS, Shape};
use zeropp::pipeline::timeline::MemoryUnit;

use super::args::ScheduleRequest;
use super::facts::{made_by, micro_batches};
use super::make::{SimulatedSchedule, make, shape};
use super::output::rate;
use crate::failure::Failure;
use crate::figures::table;

/// Values of `--format` with `--all`.
const FORMATS: [&str; 5] = ["ascii", "json", "csv", "svg", "html"];

/// Columns that a narrow window has no room for.
const LESS: [&str; 6] =
    ["V", "own span us", "bubble_own_span", "bubble_rate", "gathers", "reductions"];

/// A kind in numbers.
#[derive(Clone, Debug, Serialize)]
struct Row {
    kind: &'static str,
    #[serde(rename = "virtual")]
    virtual_stages: usize,
    makespan_us: f64,
    own_span_us: f64,
    bubble: f64,
    bubble_own_span: f64,
    bubble_rate: f64,
    /// A rate that no order is below, on the same placement and in the same memory, where
    /// anything is known.
    bubble_rate_at_least: Option<f64>,
    /// Activations and weight stashes of the rank that holds most.
    peak: u64,
    gathers: usize,
    reductions: usize,
}

/// All kinds, those with numbers as they are sorted.
#[derive(Debug, Serialize)]
struct All {
    facts: Vec<String>,
    /// Why the numbers of kinds are unlike, if anything makes them so.
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
    /// Unit of peaks.
    memory: MemoryUnit,
    kinds: Vec<Row>,
    /// Kinds that do not fit the shape, and why.
    misfits: Vec<(&'static str, String)>,
}

/// The comparison in `format`.
pub(super) fn render(
    request: &ScheduleRequest,
    format: &str,
    sort: Option<&str>,
) -> Result<Vec<u8>, Failure> {
    if !FORMATS.contains(&format) {
        return Err(Failure::bad_input(format!(
            "format = {format}: a table of all kinds has none; use {}",
            FORMATS.join(", ")
        )));
    }
    let mut all = all(request)?;
    if let Some(column) = sort {
        all.sort(column);
    }
    let text = match format {
        "json" => serde_json::to_string_pretty(&all).map_err(Failure::failed_run)?,
        "csv" => all.csv(),
        "svg" => all.svg(),
        "html" => all.html(),
        _ => all.text(),
    };
    Ok(format!("{}\n", text.trim_end()).into_bytes())
}

/// Every kind made, simulated as a whole program.
fn all(request: &ScheduleRequest) -> Result<All, Failure> {
    // Gathers and reductions are part of the same program everywhere.
    let lower = request.lower.unwrap_or_default();
    let typical = shape(request, DEFAULT, true);
    let costs = request.costs.clone().or_of_layers(same_model(&typical));
    let request = &ScheduleRequest { lower: Some(lower), costs, ..request.clone() };
    let (mut kinds, mut misfits, mut first) = (Vec::new(), Vec::new(), None);
    for kind in KINDS {
        match make(request, kind.name, shape(request, kind.name, true)) {
            Ok(made) => {
                kinds.push(Row::new(kind.name, &made));
                first.get_or_insert(made);
            }
            Err(failure) if failure.code == 2 => misfits.push((kind.name, failure.message)),
            Err(failure) => return Err(failure),
        }
    }
    let Some(first) = first else {
        // Nothing fits: one message says more than a table of complaints.
        return Err(Failure::bad_input(&misfits[0].1));
    };
    let whose = match &request.costs.layer {
        Some(layer) => format!("{} layers, the same for every kind", layer.layers),
        None => "times and memory are of one stage".into(),
    };
    let head = format!(
        "P = {}, {}, units of at most {} for zeropp; {whose}",
        typical.pp,
        micro_batches(&[typical.micro_batches]),
        typical.unit.min(typical.micro_batches),
    );
    let facts = vec![head, first.costs.clone()].into_iter().chain(made_by()).collect();
    let note = (request.costs.has_times_of_stages() && differ(&kinds)).then(|| {
        "with times of one stage, kinds with more stages run a larger model; --layers N --layer-f \
         T, -b, -w is the same model for all"
            .to_string()
    });
    Ok(All { facts, note, memory: first.timeline.memory_unit, kinds, misfits })
}

/// The fewest layers that all stages of a shape have evenly, and those of kinds with one and with
/// two stages a rank.
fn same_model(shape: &Shape) -> usize {
    let v = shape.virtual_stages;
    shape.pp.saturating_mul(if v.is_multiple_of(2) { v } else { v.saturating_mul(2) })
}

/// Whether some kinds have more stages a rank than others.
fn differ(kinds: &[Row]) -> bool {
    kinds.iter().any(|row| row.virtual_stages != kinds[0].virtual_stages)
}

impl Row {
    fn new(kind: &'static str, made: &SimulatedSchedule) -> Row {
        let m = made.measures();
        Row {
            kind,
            virtual_stages: made.shape.virtual_stages,
            makespan_us: m.makespan,
            own_span_us: m.own_span_max,
            bubble: made.timeline.bubble(),
            bubble_own_span: made.timeline.bubble_own_span(),
            bubble_rate: m.bubble_rate,
            bubble_rate_at_least: made.rate_at_least,
            peak: m.peak_activation.iter().max().copied().unwrap_or(0),
            gathers: m.all_gathers,
            reductions: m.reduce_scatters,
        }
    }

    /// The number that a column is sorted by; the kinds' names are by letters.
    fn number(&self, column: &str) -> f64 {
        match column {
            "virtual" => self.virtual_stages as f64,
            "makespan" => self.makespan_us,
            "own-span" => self.own_span_us,
            "bubble" => self.bubble,
            "bubble-own-span" => self.bubble_own_span,
            "bubble-rate" => self.bubble_rate,
            "peak" => self.peak as f64,
            "gathers" => self.gathers as f64,
            "reductions" => self.reductions as f64,
            _ => 0.0,
        }
    }

    /// As a table has them, in the order of [`COLUMNS`](super::args::COLUMNS).
    fn cells(&self, memory: MemoryUnit) -> Vec<String> {
        let least = self.bubble_rate_at_least;
        let least = least.map_or(String::new(), |least| format!(", at least {}", rate(least)));
        vec![
            self.kind.into(),
            self.virtual_stages.to_string(),
            self.makespan_us.to_string(),
            self.own_span_us.to_string(),
            rate(self.bubble),
            rate(self.bubble_own_span),
            rate(self.bubble_rate) + &least,
            match memory {
                MemoryUnit::Units => self.peak.to_string(),
                MemoryUnit::Bytes => memory.text(self.peak),
            },
            self.gathers.to_string(),
            self.reductions.to_string(),
        ]
    }
}

impl All {
    /// Smallest first; kinds that are equal stay in their order.
    fn sort(&mut self, column: &str) {
        match column {
            "kind" => self.kinds.sort_by_key(|row| row.kind),
            _ => self.kinds.sort_by(|a, b| a.number(column).total_cmp(&b.number(column))),
        }
    }

    /// The columns' names, with what they are in.
    fn head(&self) -> Vec<String> {
        let peak = match self.memory {
            MemoryUnit::Units => "peak units",
            MemoryUnit::Bytes => "peak",
        };
        let names = [
            "kind",
            "V",
            "makespan us",
            "own span us",
            "bubble",
            "bubble_own_span",
            "bubble_rate",
            peak,
            "gathers",
            "reductions",
        ];
        names.map(String::from).to_vec()
    }

    fn text(&self) -> String {
        let mut rows = vec![self.head()];
        rows.extend(self.kinds.iter().map(|row| row.cells(self.memory)));
        rows.extend(self.misfits.iter().map(|(kind, _)| vec![(*kind).into(), "-".into()]));
        let mut lines: Vec<String> = table(&rows).lines().map(String::from).collect();
        let first = 1 + self.kinds.len();
        for (line, (_, why)) in lines[first..].iter_mut().zip(&self.misfits) {
            line.push_str(&format!("  {why}"));
        }
        let head = self.facts[..2].join("\n");
        let note = self.note.as_ref().map_or(String::new(), |note| format!("\nnote: {note}"));
        format!("{head}{note}\n{}\n\n{}", lines.join("\n"), scatter::text(self))
    }

    /// Numbers as they are: times in us, shares from 0 to 1.
    fn csv(&self) -> String {
        let least = |row: &Row| row.bubble_rate_at_least.map_or(String::new(), |b| b.to_string());
        let line = |row: &Row| {
            format!(
                "{},{},{},{},{},{},{},{},{},{},{}",
                row.kind,
                row.virtual_stages,
                row.makespan_us,
                row.own_span_us,
                row.bubble,
                row.bubble_own_span,
                row.bubble_rate,
                least(row),
                row.peak,
                row.gathers,
                row.reductions
            )
        };
        let peak = match self.memory {
            MemoryUnit::Units => "peak_units",
            MemoryUnit::Bytes => "peak_bytes",
        };
        let head = format!(
            "kind,virtual,makespan_us,own_span_us,bubble,bubble_own_span,bubble_rate,\
             bubble_rate_at_least,{peak},gathers,reductions"
        );
        let lines = std::iter::once(head).chain(self.kinds.iter().map(line));
        lines.collect::<Vec<_>>().join("\n")
    }

    fn svg(&self) -> String {
        chart::svg(&[scatter::panel(self, &self.facts)], chart::WIDTHS[0])
    }

    /// A table that sorts, and the picture.
    fn html(&self) -> String {
        let rows: Vec<_> = self.kinds.iter().map(|row| row.cells(self.memory)).collect();
        let misfits = self.misfits.iter().map(|(kind, why)| (*kind, why.as_str()));
        let body = [
            page::lines(&self.facts.join("\n")),
            page::lines(self.note.as_deref().unwrap_or_default()),
            page::table(&self.head(), &rows, &LESS),
            page::facts(misfits),
            chart::both(&[scatter::panel(self, &[])]),
        ];
        page::page("All kinds of schedule", &body.concat())
    }
}
