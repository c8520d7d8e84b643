//! What everything costs, as a file: one form for all who need times.
//!
//! A file is a table of costs with the keys of [`json::JsonCosts`]: times in µs, fractions allowed,
//! and memory in bytes or any other unit. A key with an entry for each stage may be one number for
//! all of them. JSON is read here; of another form, such as TOML, whoever reads it gives the keys
//! ([`Table::of_keys`]):
//!
//! ```toml
//! t_f = 11347              # F, B and W: of one micro-batch on one stage
//! t_b = 11248
//! t_w = [8132, 8132, 8132, 9120]
//! t_r = 11347              # a recomputation; missing: a forward
//! t_comm = 377             # latency of a message
//! mem_message = 33554432   # its bytes,
//! bytes_per_s = 12.5e9     # and the bandwidth of a link; missing: infinite
//! links = 1                # messages a rank sends at once; missing: any number
//! file_bytes_per_s = 2e9   # of the file that activations are copied out to; missing: infinite
//! t_gather = 900           # all-gather, reduce-scatter, sum over replicas of a stage;
//! t_reduce = 1800          # or, in their place, the bytes mem_weights and mem_gradient of a
//! t_replica_reduce = 2500  # stage with zero3_bytes_per_s and replica_bytes_per_s
//! t_step = 3000            # the optimizer step
//! blocks = [4, 4, 4, 3]    # of each stage that the times are of: a run may cut others from them
//! t_head = [100, 90, 80]   # F, B and W of the head, a part of the last stage's
//! slice_pairs = [0.6, 0.7]  # shares of F and B that grow by pairs of tokens, of samples in slices
//! ```
//!
//! A schedule's JSON has such a table, and a trace has times; both are read too. A file may also
//! have what a machine does in a second, from which the times of any model follow: [`Machine`].

mod blocks;
mod layers;
mod machine;
mod measured;
mod slices;
mod split_head;

use std::io::{self, Write};

use serde::Serialize;
use serde_json::{Map, Value};

use crate::draw::chrome_read;
use crate::exchange::json;
use crate::memory::StageBytes;
use crate::simulate;
use crate::timeline::IN_SLICES;

pub use blocks::{BlockTimes, head};
pub use layers::layers_of;
pub use machine::Machine;
pub use measured::{measured, scaled_to};
pub use slices::{
    SLICE_GRID, SampleGrowth, SliceCut, TimeGrowth, cut_samples, of_slices, slices_of,
};
pub use split_head::with_slices;

/// Keys that have an entry for every stage; one number stands for all stages.
const PER_STAGE: [&str; 17] = [
    "t_f",
    "t_b",
    "t_w",
    "t_r",
    "t_gather",
    "t_reduce",
    "t_replica_reduce",
    "t_state_read",
    "t_state_add",
    "t_state_update",
    "mem_f",
    "mem_b",
    "mem_w",
    "mem_input",
    "mem_weights",
    "mem_gradient",
    "mem_message",
];
/// Keys that a file must have.
const NEEDED: [&str; 3] = ["t_f", "t_b", "t_w"];
/// Bandwidths from which collectives' times follow where they are not given.
const BANDWIDTHS: [&str; 2] = ["zero3_bytes_per_s", "replica_bytes_per_s"];
/// Says what was measured, in a file that a run wrote.
const MEASURED: &str = "measured";
/// Actions of a schedule for each stage and micro-batch: F, B, W, R, two sends, two receives, and
/// as many gathers and frees as computes where it goes to and fro.
pub const ACTIONS_EACH_MAX: usize = 16;

/// The most characters of a value that a message quotes, and of what was measured.
const FOUND_MAX: usize = 100;
const MEASURED_MAX: usize = 500;

/// A text, or its beginning where it is long.
fn excerpt(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        None => text.into(),
        Some((end, _)) => format!("{}..", &text[..end]),
    }
}

/// Costs that cannot be used, with the field, what was found and what would work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CostsError(String);

impl CostsError {
    fn new(problem: impl Into<String>) -> CostsError {
        CostsError(problem.into())
    }

    fn found(key: &str, value: &Value, works: &str) -> CostsError {
        let found = excerpt(&json::text(value), FOUND_MAX);
        CostsError(format!("{key}: found {found}; {works}"))
    }
}

/// Ranks that share a stage's weights (D), and replicas (K).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharers {
    /// D.
    pub zero3: usize,
    /// K.
    pub replicas: usize,
}

/// No rank shares anything with another.
pub const ALONE: Sharers = Sharers { zero3: 1, replicas: 1 };

/// The costs of a file, not yet those of a number of stages.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    keys: Map<String, Value>,
    measured: Option<String>,
}

/// The costs of every stage.
impl From<&simulate::Costs> for Table {
    fn from(costs: &simulate::Costs) -> Table {
        let keys = match serde_json::to_value(json::JsonCosts::from(costs)) {
            Ok(Value::Object(keys)) => keys,
            other => unreachable!("costs are an object: {other:?}"),
        };
        Table { keys, measured: None }
    }
}

impl Table {
    /// Reads a file of costs in JSON; or takes the costs of a schedule, or the times of a trace.
    ///
    /// # Errors
    /// Text that is none of these.
    pub fn from_json(text: &str) -> Result<Table, CostsError> {
        if chrome_read::is_trace(text) {
            return of_trace(text);
        }
        let keys: Map<String, Value> =
            serde_json::from_str(text).map_err(|e| CostsError::new(e.to_string()))?;
        if keys.contains_key("actions") {
            return of_schedule(text);
        }
        Table::of_keys(keys)
    }

    /// The costs with these keys, as a file has them in whichever form.
    ///
    /// # Errors
    /// A description of what was measured that is no text.
    pub fn of_keys(keys: Map<String, Value>) -> Result<Table, CostsError> {
        let mut table = Table { keys: Map::new(), measured: None };
        for (key, value) in keys {
            match value {
                value if key != MEASURED => table.set(&key, value),
                Value::String(text) => table.measured = Some(excerpt(&text, MEASURED_MAX)),
                other => {
                    return Err(CostsError::found(MEASURED, &other, "what was measured, as text"));
                }
            }
        }
        Ok(table)
    }

    /// What was measured, in words; none where the costs were given by hand.
    pub fn measured(&self) -> Option<&str> {
        self.measured.as_deref()
    }

    /// Whether the file has a key of this name.
    pub fn has(&self, key: &str) -> bool {
        self.keys.contains_key(key)
    }

    /// Sets or replaces a key.
    pub fn set(&mut self, key: &str, value: Value) {
        self.keys.insert(key.into(), value);
    }

    /// The costs of so many stages. Bytes that the table does not have are those of `known`, if
    /// any.
    ///
    /// # Errors
    /// A key that is missing or not known, a value that does not work, or a list that has not one
    /// entry a stage.
    pub fn of(
        &self,
        stages: usize,
        sharers: Sharers,
        known: Option<&[StageBytes]>,
    ) -> Result<simulate::Costs, CostsError> {
        if let Some(key) = NEEDED.iter().find(|key| !self.has(key)) {
            if self.keys.keys().any(|key| machine::is_key(key)) {
                return Err(CostsError(format!(
                    "{key} is missing: this file has the rates of a machine and no times of \
                     stages; `zeropp plan --machine` takes it"
                )));
            }
            return Err(CostsError(format!(
                "{key} is missing: t_f, t_b and t_w are needed, in us, one number for all stages \
                 or a list of {stages}; 0 where a whole backward is t_b"
            )));
        }
        // Only a run knows whether its head is split, and cuts blocks.
        let blocks = self.blocks()?;
        self.head_times()?;
        self.growth()?;
        let rates = self.rates()?;
        let mut keys = Map::new();
        for (key, value) in &self.keys {
            let name = key.as_str();
            let is_ours = [blocks::KEY, split_head::KEY, slices::KEY].contains(&name);
            if machine::is_key(name) || is_ours || BANDWIDTHS.contains(&name) {
                continue;
            }
            let value = match whole(value) {
                one if PER_STAGE.contains(&name) && one.is_number() => vec![one; stages].into(),
                value => value,
            };
            keys.insert(key.clone(), value);
        }
        let costs = json::check_costs(&Value::Object(keys), stages);
        let costs = costs.map_err(|e| CostsError(e.to_string()))?;
        let mut costs = costs.for_simulator(stages);
        let of_blocks = blocks.filter(|blocks| blocks.len() == stages);
        if let (Some(blocks), []) = (of_blocks, &costs.layers[..]) {
            let alike = simulate::LayerShare { f: 1, w: 1, weights: 1, gradient: 1 };
            let layers = |n: &usize| std::iter::repeat_n(alike, (*n).min(json::LAYERS_MAX));
            let layers = blocks.iter().map(layers);
            costs.layers = layers.map(simulate::LayerShare::of_stage).collect();
        }
        for (bytes, known) in costs.memory.iter_mut().zip(known.unwrap_or_default()) {
            self.fill_in(bytes, known);
        }
        self.time_collectives(&mut costs, rates, sharers);
        Ok(costs)
    }

    /// The bandwidths of collectives.
    fn rates(&self) -> Result<[Option<f64>; 2], CostsError> {
        let mut rates = [None; 2];
        for (rate, key) in rates.iter_mut().zip(BANDWIDTHS) {
            let Some(value) = self.keys.get(key) else { continue };
            *rate = value.as_f64().filter(|r| r.is_finite() && *r >= 1.0);
            if rate.is_none() {
                return Err(CostsError::found(key, value, "bytes in a second, 1 or more"));
            }
        }
        Ok(rates)
    }

    fn fill_in(&self, bytes: &mut StageBytes, known: &StageBytes) {
        let activations = ["mem_f", "mem_b", "mem_w"].iter().any(|key| self.has(key));
        *bytes = StageBytes {
            input: if self.has("mem_input") { bytes.input } else { known.input },
            activation: if activations { bytes.activation } else { known.activation },
            stash: if activations { bytes.stash } else { known.stash },
            weights: if self.has("mem_weights") { bytes.weights } else { known.weights },
            gradient: if self.has("mem_gradient") { bytes.gradient } else { known.gradient },
            message: if self.has("mem_message") { bytes.message } else { known.message },
            ..*known
        };
    }

    /// Collectives that have no times take what their bytes take.
    fn time_collectives(
        &self,
        costs: &mut simulate::Costs,
        [zero3, replica]: [Option<f64>; 2],
        sharers: Sharers,
    ) {
        let (d, k) = (sharers.zero3 as f64, sharers.replicas as f64);
        let ns = |bytes: u64, share: f64, rate: f64| (bytes as f64 * share / rate * 1e9) as u64;
        let untimed = |key: &str, rate: Option<f64>| rate.filter(|_| !self.has(key));
        for (times, bytes) in costs.stages.iter_mut().zip(&costs.memory) {
            if let Some(rate) = untimed("t_gather", zero3) {
                times.all_gather_ns = ns(bytes.weights, (d - 1.0) / d, rate);
            }
            if let Some(rate) = untimed("t_reduce", zero3) {
                times.reduce_scatter_ns = ns(bytes.gradient, (d - 1.0) / d, rate);
            }
            if let Some(rate) = untimed("t_replica_reduce", replica) {
                times.replica_reduce_ns = ns(bytes.gradient, 2.0 * (k - 1.0) / (k * d), rate);
            }
        }
    }
}

/// Whether stages have costs of this name.
fn is_key_of_stages(key: &str) -> bool {
    PER_STAGE.contains(&key) || ["links", "t_step", "t_overlap"].contains(&key)
}

/// Refuses times whose sums over a schedule of so many micro-batches could leave 64 bits.
///
/// # Errors
/// The longest time, and how long it may be.
pub fn check_sums(costs: &simulate::Costs, micro_batches: usize) -> Result<(), CostsError> {
    let actions = costs.stages.len() as u128 * micro_batches as u128 * ACTIONS_EACH_MAX as u128;
    let times = costs.stages.iter().flat_map(|s| {
        [s.f_ns, s.b_ns, s.w_ns, s.r_ns, s.all_gather_ns, s.reduce_scatter_ns, s.replica_reduce_ns]
    });
    let transfer = costs.memory.iter().map(|m| costs.link.transfer_ns(m.message));
    let single = [costs.link.latency_ns, costs.step_ns, costs.overlap_ns.unwrap_or(0)];
    let longest = times.chain(single).map(u128::from).chain(transfer).max().unwrap_or(0);
    // An action adds at most three such times.
    let most = u128::from(u64::MAX) / (3 * (actions + 1));
    if longest <= most {
        return Ok(());
    }
    Err(CostsError(format!(
        "a time of {} us is too long for {} stages and {micro_batches} micro-batches: at most {} \
         us fit",
        longest / 1000,
        costs.stages.len(),
        most / 1000
    )))
}

/// Writes costs as a file, a key a line, that says what was `measured`, of stages of so many
/// `blocks`, if that is known, behind which there may be slices of a split head. What is 0
/// everywhere is left out where it may be.
///
/// # Errors
/// What writing to `out` returns.
pub fn write(
    costs: &simulate::Costs,
    measured: &str,
    blocks: Option<&[usize]>,
    out: impl Write,
) -> io::Result<()> {
    let stages = blocks.map_or(costs.stages.len(), <[usize]>::len);
    let (costs, head) = split_head::with_whole_head(costs, stages);
    let mut out = io::BufWriter::new(out);
    let is_nothing = |value: &Value| match value {
        Value::Array(list) => list.iter().all(|x| x.as_f64() == Some(0.0)),
        _ => false,
    };
    write!(out, "{{\n  \"{MEASURED}\": ")?;
    Value::from(measured).serialize(&mut serde_json::Serializer::new(&mut out))?;
    let mut table = Table::from(&costs);
    blocks.into_iter().for_each(|blocks| table.set_blocks(blocks));
    if head != [0; 3] {
        table.set_head_times(head);
    }
    let mut keys: Vec<(String, Value)> = table.keys.into_iter().collect();
    let place = |key: &str| PER_STAGE.iter().position(|k| *k == key).unwrap_or(PER_STAGE.len());
    keys.sort_by_key(|(key, _)| (key.starts_with("mem_"), place(key)));
    for (key, value) in keys {
        if NEEDED.contains(&key.as_str()) || !is_nothing(&value) {
            write!(out, ",\n  \"{key}\": ")?;
            value.serialize(&mut serde_json::Serializer::new(&mut out))?;
        }
    }
    writeln!(out, "\n}}")?;
    out.flush()
}

fn of_trace(text: &str) -> Result<Table, CostsError> {
    let trace = chrome_read::read(text).map_err(|e| CostsError(e.to_string()))?;
    if trace.title.contains(IN_SLICES) {
        let problem = "this trace is of a run with samples in slices, whose times are none of \
                       stages; use one of a run with whole samples";
        return Err(CostsError::new(problem));
    }
    let (costs, head) =
        split_head::with_whole_head(&measured(&trace)?, measured::stages_of(&trace));
    let mut table = Table::from(&costs).without_bytes();
    table.measured = Some(format!("a trace of {}", trace.title));
    if head != [0; 3] {
        table.set_head_times(head);
    }
    Ok(table)
}

fn of_schedule(text: &str) -> Result<Table, CostsError> {
    let document = json::read(text).map_err(|e| CostsError(e.to_string()))?;
    let costs = document.costs.ok_or_else(|| CostsError::new("this schedule has no costs"))?;
    let slices = document.schedule.slices_per_sample();
    if slices > 1 {
        return Err(CostsError(format!(
            "sample_slices = {slices} slices: costs of slices are none of stages; use a schedule \
             of whole samples"
        )));
    }
    let stages = document.schedule.cost_entries();
    Ok(Table::from(&costs.for_simulator(stages)).without_bytes())
}

impl Table {
    /// Without the bytes that are 0 on all stages: they are not known.
    fn without_bytes(mut self) -> Table {
        let zero = |value: &Value| value.as_f64() == Some(0.0);
        self.keys.retain(|key, value| {
            !(key.starts_with("mem_") && value.as_array().is_some_and(|l| l.iter().all(zero)))
        });
        self
    }
}

/// A number without a fraction as an integer: `12.5e9` is one, but is written as a float.
fn whole(value: &Value) -> Value {
    match value {
        Value::Array(list) => Value::Array(list.iter().map(whole).collect()),
        _ => match value.as_f64() {
            Some(x) if value.is_f64() && x.fract() == 0.0 && x.abs() < 2f64.powi(53) => {
                Value::from(x as i64)
            }
            _ => value.clone(),
        },
    }
}

#[cfg(test)]
mod tests;
