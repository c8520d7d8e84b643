//! zeropp's own JSON for a schedule: what the CSV has, and placement, units, costs and measures.
//!
//! ```json
//! {
//!   "kind": "1f1b", "pp": 2, "stages": 2, "micro_batches": 2, "units": [2], "placement": [0, 1],
//!   "costs": { "t_f": [1, 1], "t_b": [1, 1], "t_w": [1, 1], "t_comm": 0 },
//!   "makespan": 9, "actions": [["0F0", "0F1"], ["1F0"]]
//! }
//! ```
//! The actions are spelled as in [the module above](super). A key that is not known, or twice
//! there, is an error, as is a number that contradicts another. Numbers of up to 15 digits read
//! back to the same bits.

use std::io::{self, Write};

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;

use super::{check_places, clip, parse, spell};
use crate::{
    ir::{Action, BLOCKS_MAX, Schedule},
    metrics::Metrics,
};

mod costs;

pub use costs::JsonCosts;
pub(crate) use costs::LAYERS_MAX;

/// A schedule with what is known about it.
#[derive(Clone, Debug, PartialEq)]
pub struct Document {
    /// The schedule.
    pub schedule: Schedule,
    /// What its actions cost.
    pub costs: Option<JsonCosts>,
    /// What a simulation with these costs measured.
    pub measures: Option<Measures>,
}

/// What a simulation measured. Times are µs; lists have one entry per rank.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measures {
    /// From time 0 to the last end of a compute action over all ranks.
    pub makespan: f64,
    /// The largest over ranks of (last compute's end − first compute's start).
    pub own_span_max: f64,
    /// Idle share, 0 to 1, counted as the schedule's paper does.
    pub bubble_rate: f64,
    /// Idle share from one step's first compute to the next one's, 0 to 1; older files lack it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bubble_step: Option<f64>,
    /// Idle time within each rank's own span.
    pub idle: Vec<f64>,
    /// End of each rank's last compute action.
    pub ends: Vec<f64>,
    /// Largest sum of activations and weight stash of each rank, in the unit of the costs.
    pub peak_activation: Vec<u64>,
    /// All-gathers over all pipeline ranks; 0 before lowering.
    pub all_gathers: usize,
    /// Reduce-scatters over all pipeline ranks; 0 before lowering.
    pub reduce_scatters: usize,
}

impl From<&Metrics> for Measures {
    fn from(m: &Metrics) -> Measures {
        Measures {
            makespan: micros(m.makespan_ns),
            own_span_max: micros(m.own_span_max_ns),
            bubble_rate: m.bubble_rate,
            bubble_step: Some(m.bubble_step),
            idle: m.idle_ns.iter().copied().map(micros).collect(),
            ends: m.ends_ns.iter().copied().map(micros).collect(),
            peak_activation: m.peak_activation.clone(),
            all_gathers: m.all_gathers,
            reduce_scatters: m.reduce_scatters,
        }
    }
}

fn micros(ns: u64) -> f64 {
    ns as f64 / 1000.0
}

/// A text that is no schedule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JsonError {
    /// Not JSON, not an object, or a key that is unknown, missing or twice there.
    #[error("{0}")]
    Syntax(String),
    /// A field has a value that does not work.
    #[error("{field}: found {found}; {works}")]
    Field {
        /// The field, as in `actions[1][4]`.
        field: String,
        /// Its value, the first 40 characters.
        found: String,
        /// What would work.
        works: String,
    },
}

/// The top level; every value is looked at one by one, so that an error can name its field.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawSchedule {
    kind: Value,
    pp: Value,
    stages: Value,
    micro_batches: Value,
    units: Option<Value>,
    placement: Value,
    slices: Option<Value>,
    sample_slices: Option<Value>,
    costs: Option<Value>,
    makespan: Option<Value>,
    own_span_max: Option<Value>,
    bubble_rate: Option<Value>,
    bubble_step: Option<Value>,
    idle: Option<Value>,
    ends: Option<Value>,
    peak_activation: Option<Value>,
    all_gathers: Option<Value>,
    reduce_scatters: Option<Value>,
    actions: Value,
}

/// Reads a document. `units` may be missing (one unit of all micro-batches), as may `costs` and
/// the measures, which come all or none.
///
/// # Errors
/// Names the first field that does not work, its value and what would.
pub fn read(text: &str) -> Result<Document, JsonError> {
    let raw: RawSchedule =
        serde_json::from_str(text).map_err(|e| JsonError::Syntax(e.to_string()))?;
    let pp: usize = field("pp", &raw.pp, "a whole number above 0")?;
    let stages: usize = field("stages", &raw.stages, "a whole number above 0")?;
    let micro_batches = field("micro_batches", &raw.micro_batches, "a whole number above 0")?;
    let placement: Vec<usize> = field("placement", &raw.placement, "the rank of each stage")?;
    let rows: Vec<Vec<String>> =
        field("actions", &raw.actions, "a list of actions, as text, for each rank")?;
    let units = match &raw.units {
        Some(units) => field("units", units, "the micro-batches of each unit")?,
        None => vec![micro_batches],
    };
    let ranks = read_actions(&rows)?;
    let kind = field("kind", &raw.kind, "the schedule's name as text")?;
    let head_blocks = match &raw.slices {
        Some(blocks) => field("slices", blocks, "the head's blocks of each rank")?,
        None => Vec::new(),
    };
    let sample_slices = match &raw.sample_slices {
        Some(slices) => field("sample_slices", slices, "the tokens of each slice of a sample")?,
        None => Vec::new(),
    };
    let schedule = Schedule { kind, placement, units, ranks, head_blocks, sample_slices };
    check_numbers(&schedule, pp, stages, micro_batches)?;
    check_places(&schedule).map_err(|misfit| JsonError::Field {
        field: format!("actions[{}][{}]", misfit.rank, misfit.index),
        found: format!("{:?}", rows[misfit.rank][misfit.index]),
        works: misfit.problem,
    })?;
    let costs = match &raw.costs {
        Some(costs) => Some(read_costs(costs, &schedule)?),
        None => None,
    };
    let measures = read_measures(&raw, pp)?;
    Ok(Document { schedule, costs, measures })
}

fn field<T: DeserializeOwned>(name: &str, value: &Value, works: &str) -> Result<T, JsonError> {
    T::deserialize(value).map_err(|e| wrong(name, value, format!("{works} ({e})")))
}

fn wrong(name: &str, value: &Value, works: impl Into<String>) -> JsonError {
    let found = clip(&text(value));
    JsonError::Field { field: name.into(), found, works: works.into() }
}

/// A value on one line. Its `Display` has the printer of many lines in it, too.
pub(crate) fn text(value: &Value) -> String {
    serde_json::to_string(value).unwrap_or_else(|e| e.to_string())
}

fn read_actions(rows: &[Vec<String>]) -> Result<Vec<Vec<Action>>, JsonError> {
    let read = |rank: usize, row: &Vec<String>| {
        let actions = row.iter().enumerate().map(|(index, text)| {
            parse(text).map_err(|e| JsonError::Field {
                field: format!("actions[{rank}][{index}]"),
                found: format!("{:?}", e.found),
                works: e.problem,
            })
        });
        actions.collect()
    };
    rows.iter().enumerate().map(|(rank, row)| read(rank, row)).collect()
}

/// The numbers that say the same thing twice must agree.
fn check_numbers(
    schedule: &Schedule,
    pp: usize,
    stages: usize,
    micro_batches: usize,
) -> Result<(), JsonError> {
    let fail = |field: &str, found: String, works: String| {
        Err(JsonError::Field { field: field.into(), found: clip(&found), works })
    };
    for (name, number) in [("pp", pp), ("stages", stages), ("micro_batches", micro_batches)] {
        if number == 0 {
            return fail(name, "0".into(), "a whole number above 0".into());
        }
    }
    if schedule.ranks.len() != pp {
        let found = format!("{} ranks", schedule.ranks.len());
        return fail("actions", found, format!("one list for each of pp = {pp} ranks"));
    }
    let placement = &schedule.placement;
    if placement.len() != stages {
        let found = format!("{} entries", placement.len());
        return fail("placement", found, format!("one rank for each of stages = {stages}"));
    }
    if let Some(stage) = placement.iter().position(|rank| *rank >= pp) {
        let found = placement[stage].to_string();
        return fail(
            &format!("placement[{stage}]"),
            found,
            format!("ranks go from 0 to {}", pp - 1),
        );
    }
    if let Some(rank) = (0..pp).find(|rank| !placement.contains(rank)) {
        let works = format!("every rank holds a stage, but rank {rank} holds none");
        return fail("placement", format!("{placement:?}"), works);
    }
    let blocks = schedule.head_blocks.iter().try_fold(0usize, |sum, n| sum.checked_add(*n));
    let fit = |n: usize| (1..=BLOCKS_MAX).contains(&n) && schedule.head_blocks.len() == pp;
    if !schedule.head_blocks.is_empty() && !blocks.is_some_and(fit) {
        let works = format!("blocks of each of pp = {pp} ranks, 1 to {BLOCKS_MAX} in all");
        return fail("slices", format!("{:?}", schedule.head_blocks), works);
    }
    let sum = schedule.units.iter().try_fold(0usize, |sum, n| sum.checked_add(*n));
    if sum != Some(micro_batches) || schedule.units.contains(&0) {
        let works = format!("numbers above 0 that sum to micro_batches = {micro_batches}");
        return fail("units", format!("{:?}", schedule.units), works);
    }
    if let Some(works) = schedule.slices_fault() {
        return fail("sample_slices", format!("{:?}", schedule.sample_slices), works);
    }
    match schedule.computes_fault() {
        None => Ok(()),
        Some(works) => fail("micro_batches", micro_batches.to_string(), works),
    }
}

/// Reads costs that stand in no schedule, for one of so many stages; fields are called by their
/// own names.
///
/// # Errors
/// As [`read`].
pub(crate) fn check_costs(value: &Value, stages: usize) -> Result<JsonCosts, JsonError> {
    let costs: JsonCosts =
        JsonCosts::deserialize(value).map_err(|e| JsonError::Syntax(e.to_string()))?;
    match costs.fault(stages, &format!("of stages = {stages}")) {
        None => Ok(costs),
        Some((name, works)) => Err(wrong(name, value.get(name).unwrap_or(&Value::Null), works)),
    }
}

/// The costs of a schedule, for fields called `costs.…`.
fn read_costs(value: &Value, schedule: &Schedule) -> Result<JsonCosts, JsonError> {
    let costs: JsonCosts = field("costs", value, "an object of costs")?;
    let entries = schedule.cost_entries();
    let each = match entries == schedule.stages() {
        true => format!("of stages = {entries}"),
        false => format!("stage and slice, {entries} in all"),
    };
    match costs.fault(entries, &each) {
        None => Ok(costs),
        Some((name, works)) => {
            let found = value.get(name).unwrap_or(&Value::Null);
            Err(wrong(&format!("costs.{name}"), found, works))
        }
    }
}

fn read_measures(raw: &RawSchedule, pp: usize) -> Result<Option<Measures>, JsonError> {
    let fields = [
        ("makespan", &raw.makespan),
        ("own_span_max", &raw.own_span_max),
        ("bubble_rate", &raw.bubble_rate),
        ("idle", &raw.idle),
        ("ends", &raw.ends),
        ("peak_activation", &raw.peak_activation),
        ("all_gathers", &raw.all_gathers),
        ("reduce_scatters", &raw.reduce_scatters),
    ];
    if raw.bubble_step.is_none() && fields.iter().all(|(_, value)| value.is_none()) {
        return Ok(None);
    }
    let get = |name: &str| {
        let value = fields.iter().find(|(n, _)| *n == name).and_then(|(_, value)| value.as_ref());
        value.ok_or_else(|| wrong(name, &Value::Null, "the measures come all or none"))
    };
    let number = |name: &str| field::<f64>(name, get(name)?, "a number");
    let per_rank = |name: &str| {
        let list: Vec<f64> = field(name, get(name)?, "a number for each rank")?;
        check_length(name, get(name)?, list.len(), pp).map(|()| list)
    };
    let count = |name: &str| field::<usize>(name, get(name)?, "a whole number");
    let peaks: Vec<u64> =
        field("peak_activation", get("peak_activation")?, "a whole number for each rank")?;
    check_length("peak_activation", get("peak_activation")?, peaks.len(), pp)?;
    Ok(Some(Measures {
        makespan: number("makespan")?,
        own_span_max: number("own_span_max")?,
        bubble_rate: number("bubble_rate")?,
        bubble_step: match &raw.bubble_step {
            Some(value) => Some(field("bubble_step", value, "a number")?),
            None => None,
        },
        idle: per_rank("idle")?,
        ends: per_rank("ends")?,
        peak_activation: peaks,
        all_gathers: count("all_gathers")?,
        reduce_scatters: count("reduce_scatters")?,
    }))
}

fn check_length(name: &str, value: &Value, length: usize, pp: usize) -> Result<(), JsonError> {
    if length == pp {
        return Ok(());
    }
    Err(wrong(name, value, format!("one number for each of pp = {pp} ranks")))
}

/// Writes a document, one key or one rank's actions a line. A number that JSON cannot hold (not
/// finite) becomes `null`, which [`read`] refuses.
///
/// # Errors
/// What writing to `out` returns.
pub fn write(document: &Document, out: impl Write) -> io::Result<()> {
    let Document { schedule, costs, measures } = document;
    let mut out = Object { out: io::BufWriter::new(out), first: true };
    out.key("kind", &schedule.kind)?;
    out.key("pp", &schedule.pp())?;
    out.key("stages", &schedule.stages())?;
    out.key("micro_batches", &schedule.micro_batches())?;
    out.key("units", &schedule.units)?;
    out.key("placement", &schedule.placement)?;
    if !schedule.head_blocks.is_empty() {
        out.key("slices", &schedule.head_blocks)?;
    }
    if !schedule.sample_slices.is_empty() {
        out.key("sample_slices", &schedule.sample_slices)?;
    }
    if let Some(costs) = costs {
        out.key("costs", costs)?;
    }
    if let Some(m) = measures {
        out.key("makespan", &m.makespan)?;
        out.key("own_span_max", &m.own_span_max)?;
        out.key("bubble_rate", &m.bubble_rate)?;
        if let Some(bubble) = &m.bubble_step {
            out.key("bubble_step", bubble)?;
        }
        out.key("idle", &m.idle)?;
        out.key("ends", &m.ends)?;
        out.key("peak_activation", &m.peak_activation)?;
        out.key("all_gathers", &m.all_gathers)?;
        out.key("reduce_scatters", &m.reduce_scatters)?;
    }
    out.actions(&schedule.ranks)
}

/// The object as it is written.
struct Object<W: Write> {
    out: io::BufWriter<W>,
    first: bool,
}

impl<W: Write> Object<W> {
    fn key(&mut self, key: &str, value: &impl Serialize) -> io::Result<()> {
        self.text(key, &serde_json::to_vec(value)?)
    }

    fn text(&mut self, key: &str, value: &[u8]) -> io::Result<()> {
        let before = if self.first { "{" } else { "," };
        self.first = false;
        write!(self.out, "{before}\n  \"{key}\": ")?;
        self.out.write_all(value)
    }

    /// The last key, and the object's end.
    fn actions(mut self, ranks: &[Vec<Action>]) -> io::Result<()> {
        write!(self.out, ",\n  \"actions\": [")?;
        for (rank, actions) in ranks.iter().enumerate() {
            let comma = if rank == 0 { "" } else { "," };
            write!(self.out, "{comma}\n    ")?;
            let texts: Vec<String> = actions.iter().map(spell).collect();
            self.out.write_all(&serde_json::to_vec(&texts)?)?;
        }
        writeln!(self.out, "\n  ]\n}}")?;
        self.out.flush()
    }
}

#[cfg(test)]
mod tests;
