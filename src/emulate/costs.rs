//! The times of an emulated run, as a file has them.

use std::path::Path;

use crate::config::{ConfigError, Table};
use serde_json::{Map, Value};
use zeropp_comm::mesh::Mesh;
use zeropp_core::files::{escaped, escaped_line, read_text};
use zeropp_pipeline::exchange::json;
use zeropp_pipeline::simulate;

/// Largest file of costs, in bytes.
const FILE_BYTES_MAX: u64 = 16 << 20;
/// Keys that have an entry for every stage; one number stands for all stages.
const PER_STAGE: [&str; 14] = [
    "t_f",
    "t_b",
    "t_w",
    "t_r",
    "t_gather",
    "t_reduce",
    "t_replica_reduce",
    "mem_f",
    "mem_b",
    "mem_w",
    "mem_input",
    "mem_weights",
    "mem_gradient",
    "mem_message",
];
/// Bandwidths from which collectives' times follow where they are not given.
const BANDWIDTHS: [&str; 2] = ["zero3_bytes_per_s", "replica_bytes_per_s"];

/// What everything costs in an emulated run.
///
/// In a file (`.toml` or `.json`) the keys are those of `costs` in a schedule's JSON
/// ([`json::Costs`]): times in µs, fractions allowed, and bytes. A key with an entry for each stage
/// may be one number for all of them.
///
/// ```toml
/// t_f = 11347              # F, B, W and R (a recomputation takes a forward if t_r is missing)
/// t_b = 11248
/// t_w = [8132, 8132, 8132, 9120]
/// t_comm = 377             # latency of a message
/// mem_message = 33554432   # its bytes,
/// bytes_per_s = 12.5e9     # and the bandwidth of a link; missing: infinite
/// links = 1                # messages a rank sends at once; missing: any number
/// t_gather = 900           # all-gather, reduce-scatter, sum over replicas;
/// t_reduce = 1800          # or, in their place, the bytes mem_weights and mem_gradient of a
/// t_replica_reduce = 2500  # stage with zero3_bytes_per_s and replica_bytes_per_s
/// t_step = 3000            # the optimizer step
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct EmulationCosts {
    /// What errors call them.
    name: String,
    given: Given,
}

#[derive(Clone, Debug, PartialEq)]
enum Given {
    File(Map<String, Value>),
    Stages(simulate::Costs),
}

/// Costs of every stage.
impl From<simulate::Costs> for EmulationCosts {
    fn from(costs: simulate::Costs) -> Self {
        EmulationCosts { name: "costs".into(), given: Given::Stages(costs) }
    }
}

impl EmulationCosts {
    /// Reads a `.toml` or `.json` file.
    ///
    /// # Errors
    /// Another extension, a file that cannot be read, text that is no table of costs.
    pub fn load(path: &Path) -> Result<EmulationCosts, ConfigError> {
        let name = path.display().to_string();
        let fail = |problem: String| wrong(&name, problem);
        let extension = path.extension().and_then(|e| e.to_str()).map(str::to_ascii_lowercase);
        let is_toml = match extension.as_deref() {
            Some("toml") => true,
            Some("json") => false,
            _ => return Err(fail("the file's name ends in neither .toml nor .json".into())),
        };
        let text = read_text(path, FILE_BYTES_MAX).map_err(|e| fail(e.to_string()))?;
        let map = if is_toml { from_toml(&text) } else { from_json(&text) };
        Ok(EmulationCosts { given: Given::File(map.map_err(fail)?), name })
    }

    /// The costs of so many stages on this mesh.
    ///
    /// # Errors
    /// An unknown key, a value that does not work, or a list that has not one entry a stage.
    pub(super) fn of(&self, stages: usize, mesh: Mesh) -> Result<simulate::Costs, ConfigError> {
        let costs = match &self.given {
            Given::Stages(costs) => costs.clone(),
            Given::File(map) => self.of_file(map.clone(), stages, mesh)?,
        };
        // The executor runs the two halves of an overlapped pair one after the other.
        if costs.overlap_ns.is_some() {
            let problem = "t_overlap: this executor overlaps no computation; leave it out";
            return Err(wrong(&self.name, problem.into()));
        }
        Ok(costs)
    }

    fn of_file(
        &self,
        mut map: Map<String, Value>,
        stages: usize,
        mesh: Mesh,
    ) -> Result<simulate::Costs, ConfigError> {
        let mut rates = [None; 2];
        for (rate, key) in rates.iter_mut().zip(BANDWIDTHS) {
            let Some(value) = map.remove(key) else { continue };
            *rate = value.as_f64().filter(|r| r.is_finite() && *r >= 1.0);
            if rate.is_none() {
                let problem = format!("{key}: found {value}; bytes in a second, 1 or more");
                return Err(wrong(&self.name, problem));
            }
        }
        let [zero3, replica] = rates;
        let timed = ["t_gather", "t_reduce", "t_replica_reduce"].map(|key| map.contains_key(key));
        for (key, value) in &mut map {
            if PER_STAGE.contains(&key.as_str()) && value.is_number() {
                *value = Value::Array(vec![whole(value); stages]);
            } else {
                *value = whole(value);
            }
        }
        let value = Value::Object(map);
        let costs =
            json::read_costs(&value, stages).map_err(|e| escaped_line(&e.to_string()).into_owned());
        let mut costs = costs.map_err(|problem| wrong(&self.name, problem))?.for_simulator(stages);
        let (d, k) = (mesh.zero3 as f64, mesh.dp as f64);
        let ns = |bytes: u64, share: f64, rate: f64| (bytes as f64 * share / rate * 1e9) as u64;
        for (times, bytes) in costs.stages.iter_mut().zip(&costs.memory) {
            if let (Some(rate), false) = (zero3, timed[0]) {
                times.all_gather_ns = ns(bytes.weights, (d - 1.0) / d, rate);
            }
            if let (Some(rate), false) = (zero3, timed[1]) {
                times.reduce_scatter_ns = ns(bytes.gradient, (d - 1.0) / d, rate);
            }
            if let (Some(rate), false) = (replica, timed[2]) {
                times.replica_reduce_ns = ns(bytes.gradient, 2.0 * (k - 1.0) / (k * d), rate);
            }
        }
        Ok(costs)
    }
}

pub(super) fn wrong(name: &str, problem: String) -> ConfigError {
    let help = "see the manual of `emulate` for what the file has";
    // It may quote the file.
    ConfigError::value("emulate", name, escaped(&problem), help)
}

fn from_toml(text: &str) -> Result<Map<String, Value>, String> {
    let table: Table = text.parse().map_err(|e| format!("{e}"))?;
    match serde_json::to_value(table) {
        Ok(Value::Object(map)) => Ok(map),
        other => Err(format!("{other:?} is no table of costs")),
    }
}

fn from_json(text: &str) -> Result<Map<String, Value>, String> {
    serde_json::from_str(text).map_err(|e| escaped_line(&e.to_string()).into())
}

/// A number without a fraction as an integer: `12.5e9` is one, but is written as a float.
fn whole(value: &Value) -> Value {
    match value.as_f64() {
        Some(x) if value.is_f64() && x.fract() == 0.0 && x.abs() < 2f64.powi(53) => {
            Value::from(x as i64)
        }
        _ => value.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MESH: Mesh = Mesh { pp: 2, zero3: 4, dp: 2 };

    fn toml(text: &str) -> Result<simulate::Costs, ConfigError> {
        let given = Given::File(from_toml(text).expect("TOML"));
        EmulationCosts { name: "x.toml".into(), given }.of(2, MESH)
    }

    #[test]
    fn one_number_stands_for_all_stages() {
        let costs = toml(
            "t_f = 1.5\nt_b = [2, 3]\nt_w = 1\nt_comm = 377\nbytes_per_s = 12.5e9\n\
             mem_message = 8e3\nt_step = 4",
        )
        .unwrap();
        let times: Vec<_> = costs.stages.iter().map(|s| (s.f_ns, s.b_ns, s.r_ns)).collect();
        assert_eq!(times, [(1500, 2000, 1500), (1500, 3000, 1500)]);
        assert_eq!(
            (costs.link.latency_ns, costs.link.bytes_per_s),
            (377_000, Some(12_500_000_000))
        );
        assert_eq!((costs.memory[1].message, costs.step_ns), (8000, 4000));
    }

    #[test]
    fn bandwidth_stands_for_times() {
        let bytes = "mem_weights = 8000\nmem_gradient = 16000\n";
        let costs = toml(&format!("{bytes}zero3_bytes_per_s = 1e6\nreplica_bytes_per_s = 1000"));
        let stage = costs.unwrap().stages[0];
        // 3/4 of the bytes, and for the replicas twice half of a quarter of them.
        assert_eq!((stage.all_gather_ns, stage.reduce_scatter_ns), (6_000_000, 12_000_000));
        assert_eq!(stage.replica_reduce_ns, 4_000_000_000);
        let both = toml(&format!("{bytes}zero3_bytes_per_s = 1e6\nt_gather = 5")).unwrap();
        assert_eq!(both.stages[1].all_gather_ns, 5000, "a time that is given counts");
    }

    #[test]
    fn what_does_not_work_is_named() {
        let cases = [
            ("t_x = 1", "unknown field `t_x`"),
            ("\"\\u001B[31m\" = 1", "unknown field `\\u001b[31m`"),
            ("t_f = [1, 2, 3]", "costs.t_f: found [1,2,3]; one number for each of stages = 2"),
            ("t_f = -1", "costs.t_f"),
            ("t_f = 'long'", "long"),
            ("t_overlap = 5", "t_overlap: this executor overlaps no computation"),
            ("zero3_bytes_per_s = 0", "zero3_bytes_per_s: found 0; bytes in a second, 1 or more"),
        ];
        for (text, fragment) in cases {
            let error = toml(text).expect_err(text).to_string();
            assert!(error.starts_with("emulate = x.toml: "), "{error}");
            assert!(error.contains(fragment), "{text}: {error}");
        }
    }
}
