//! The simulator's costs as a file has them: µs, and one list per cost.

use serde::{Deserialize, Serialize};

use super::micros;
use crate::{
    ir::HeadMessage,
    memory::{HeadBytes, StageBytes},
    simulate::{self, LayerShare, LinkCosts, StageCosts, StateCopies},
};

/// Costs of one micro-batch. Times are µs, fractions allowed, down to the nanosecond; memory is in
/// any one unit. Each list has one entry per stage, or is empty where the cost is 0.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct JsonCosts {
    /// F.
    pub t_f: Vec<f64>,
    /// B.
    pub t_b: Vec<f64>,
    /// W.
    pub t_w: Vec<f64>,
    /// R; where the list is empty, a recomputation costs a forward.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub t_r: Vec<f64>,
    /// All-gather of a stage's weights.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub t_gather: Vec<f64>,
    /// Reduce-scatter of a stage's gradients.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub t_reduce: Vec<f64>,
    /// Sum of a stage's gradient shard over the replicas.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub t_replica_reduce: Vec<f64>,
    /// Of each stage's layers what they have of F, W, gathers and reductions, in any unit, from
    /// which their times follow; missing: a stage is one layer.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<Vec<[u64; 4]>>,
    /// Read of a stage's shard before each gather, where states are out.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub t_state_read: Vec<f64>,
    /// Write of its reduced gradient, or read of the sum before.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub t_state_add: Vec<f64>,
    /// Read, or write, of what an update takes that is done behind the next step.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub t_state_update: Vec<f64>,
    /// Whether a rank computes nothing while it reads a shard.
    #[serde(skip_serializing_if = "is_false")]
    pub state_waits: bool,
    /// Latency of one message from rank to rank.
    pub t_comm: f64,
    /// Bandwidth of one link; missing: infinite.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_per_s: Option<u64>,
    /// Messages that a rank sends at once; missing: any number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub links: Option<usize>,
    /// Bandwidth of the file that a rank's activations are copied out to, both ways together;
    /// missing: infinite.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_bytes_per_s: Option<u64>,
    /// Whether copies out and in go beside each other, at that rate each.
    #[serde(skip_serializing_if = "is_false")]
    pub copies_apart: bool,
    /// An overlapped F and BW; missing: one after the other.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub t_overlap: Option<f64>,
    /// The optimizer step.
    pub t_step: f64,
    /// Change of the activation memory at F.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mem_f: Vec<i64>,
    /// Change at B, negative; what is then left is W's stash.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mem_b: Vec<i64>,
    /// Change at W: all that is left, so that the three sum to 0.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mem_w: Vec<i64>,
    /// The part of `mem_f` that a stage keeps which recomputes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mem_input: Vec<i64>,
    /// Gathered weights.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mem_weights: Vec<i64>,
    /// Unreduced gradient.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mem_gradient: Vec<i64>,
    /// One message.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mem_message: Vec<i64>,
    /// Messages of a split head: input, sums of a block, log-sum-exp, gradient of the input.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mem_head: Option<[u64; 4]>,
}

/// The most layers of a stage by which its times are told apart: a file may say any number.
pub(crate) const LAYERS_MAX: usize = 1024;

/// The longest time a file may give: 10⁹ µs is a quarter of an hour for one action, and far from
/// what nanoseconds in 64 bits can hold.
const TIME_MAX: f64 = 1e9;

impl JsonCosts {
    /// The first field that does not work for so many stages, one number for `each`, and what
    /// would.
    pub(super) fn fault(&self, stages: usize, each: &str) -> Option<(&'static str, String)> {
        for (name, list) in self.times() {
            if !list.is_empty() && list.len() != stages {
                return Some((name, format!("one number for each {each}, or none")));
            }
            if !list.iter().all(|t| (0.0..=TIME_MAX).contains(t)) {
                return Some((name, format!("a time is 0 to {TIME_MAX} µs")));
            }
        }
        if self.layers.len() > stages || self.layers.iter().any(|of| of.len() > LAYERS_MAX) {
            let works = format!("a list for each {each}, of {LAYERS_MAX} layers at most, or none");
            return Some(("layers", works));
        }
        let single = [("t_comm", self.t_comm), ("t_step", self.t_step)];
        for (name, t) in single.into_iter().chain(self.t_overlap.map(|t| ("t_overlap", t))) {
            if !(0.0..=TIME_MAX).contains(&t) {
                return Some((name, format!("a time is 0 to {TIME_MAX} µs")));
            }
        }
        if self.bytes_per_s == Some(0) {
            return Some(("bytes_per_s", "1 or more, or none".into()));
        }
        if self.file_bytes_per_s == Some(0) {
            return Some(("file_bytes_per_s", "1 or more, or none".into()));
        }
        if self.links == Some(0) {
            return Some(("links", "1 or more, or none".into()));
        }
        for (name, list) in self.memory() {
            if !list.is_empty() && list.len() != stages {
                return Some((name, format!("one number for each {each}, or none")));
            }
            let falls = name == "mem_b" || name == "mem_w";
            if !falls && list.iter().any(|m| *m < 0) {
                return Some((name, "memory is 0 or more".into()));
            }
        }
        let changes = |s: usize| [&self.mem_f, &self.mem_b, &self.mem_w].map(|m| at(m, s));
        let wrong = (0..stages).find(|s| {
            let [f, b, w] = changes(*s);
            w > 0 || f.checked_add(b).and_then(|sum| sum.checked_add(w)) != Some(0)
        });
        let given = [&self.mem_f, &self.mem_b, &self.mem_w].iter().any(|m| !m.is_empty());
        match wrong {
            Some(s) if given => {
                let [f, b, w] = changes(s);
                let works = format!(
                    "mem_w is 0 or less, and mem_f + mem_b + mem_w is 0; stage {s} has {f}, \
                     {b}, {w}"
                );
                Some(("mem_w", works))
            }
            _ => None,
        }
    }

    fn times(&self) -> [(&'static str, &Vec<f64>); 10] {
        [
            ("t_f", &self.t_f),
            ("t_b", &self.t_b),
            ("t_w", &self.t_w),
            ("t_r", &self.t_r),
            ("t_gather", &self.t_gather),
            ("t_reduce", &self.t_reduce),
            ("t_replica_reduce", &self.t_replica_reduce),
            ("t_state_read", &self.t_state_read),
            ("t_state_add", &self.t_state_add),
            ("t_state_update", &self.t_state_update),
        ]
    }

    fn memory(&self) -> [(&'static str, &Vec<i64>); 7] {
        [
            ("mem_f", &self.mem_f),
            ("mem_b", &self.mem_b),
            ("mem_w", &self.mem_w),
            ("mem_input", &self.mem_input),
            ("mem_weights", &self.mem_weights),
            ("mem_gradient", &self.mem_gradient),
            ("mem_message", &self.mem_message),
        ]
    }

    /// The costs as the simulator takes them, for a schedule of so many stages. The costs must be
    /// those of a file that was read, or of [`JsonCosts::from`].
    pub fn for_simulator(&self, stages: usize) -> simulate::Costs {
        let stage = |s: usize| StageCosts {
            f_ns: nanos(at(&self.t_f, s)),
            b_ns: nanos(at(&self.t_b, s)),
            w_ns: nanos(at(&self.t_w, s)),
            r_ns: nanos(at(if self.t_r.is_empty() { &self.t_f } else { &self.t_r }, s)),
            all_gather_ns: nanos(at(&self.t_gather, s)),
            reduce_scatter_ns: nanos(at(&self.t_reduce, s)),
            replica_reduce_ns: nanos(at(&self.t_replica_reduce, s)),
        };
        let units = |list: &[i64], s| at(list, s).max(0) as u64;
        let memory = |s: usize| StageBytes {
            input: units(&self.mem_input, s),
            activation: units(&self.mem_f, s),
            stash: at(&self.mem_w, s).unsigned_abs(),
            weights: units(&self.mem_weights, s),
            gradient: units(&self.mem_gradient, s),
            message: units(&self.mem_message, s),
            head: self.mem_head.map_or_else(HeadBytes::default, |[input, sums, lse, gradient]| {
                HeadBytes { input, sums, lse, gradient }
            }),
            ..StageBytes::default()
        };
        let of_stage = |of: &Vec<_>| LayerShare::of_stage(of.iter().copied().map(LayerShare::of));
        let layers = self.layers.iter().map(of_stage);
        let state = |s: usize| StateCopies {
            read_ns: nanos(at(&self.t_state_read, s)),
            add_ns: nanos(at(&self.t_state_add, s)),
            update_ns: nanos(at(&self.t_state_update, s)),
            waits: self.state_waits,
        };
        let are_out = [&self.t_state_read, &self.t_state_add, &self.t_state_update];
        let are_out = are_out.iter().any(|times| !times.is_empty());
        simulate::Costs {
            stages: (0..stages).map(stage).collect(),
            memory: (0..stages).map(memory).collect(),
            link: LinkCosts {
                latency_ns: nanos(self.t_comm),
                bytes_per_s: self.bytes_per_s,
                parallel_max: self.links,
            },
            file_bytes_per_s: self.file_bytes_per_s,
            layers: layers.collect(),
            copies_apart: self.copies_apart,
            states: (0..if are_out { stages } else { 0 }).map(state).collect(),
            overlap_ns: self.t_overlap.map(nanos),
            step_ns: nanos(self.t_step),
        }
    }
}

impl From<&simulate::Costs> for JsonCosts {
    fn from(costs: &simulate::Costs) -> JsonCosts {
        let times =
            |of: fn(&StageCosts) -> u64| costs.stages.iter().map(|s| micros(of(s))).collect();
        let memory = |of: fn(&StageBytes) -> i64| costs.memory.iter().map(of).collect();
        JsonCosts {
            t_f: times(|s| s.f_ns),
            t_b: times(|s| s.b_ns),
            t_w: times(|s| s.w_ns),
            t_r: times(|s| s.r_ns),
            t_gather: times(|s| s.all_gather_ns),
            t_reduce: times(|s| s.reduce_scatter_ns),
            t_replica_reduce: times(|s| s.replica_reduce_ns),
            layers: costs.layers.iter().map(|of| LayerShare::own(of)).collect(),
            t_state_read: costs.states.iter().map(|of| micros(of.read_ns)).collect(),
            t_state_add: costs.states.iter().map(|of| micros(of.add_ns)).collect(),
            t_state_update: costs.states.iter().map(|of| micros(of.update_ns)).collect(),
            state_waits: costs.states.iter().any(|of| of.waits),
            copies_apart: costs.copies_apart,
            t_comm: micros(costs.link.latency_ns),
            bytes_per_s: costs.link.bytes_per_s,
            links: costs.link.parallel_max,
            file_bytes_per_s: costs.file_bytes_per_s,
            t_overlap: costs.overlap_ns.map(micros),
            t_step: micros(costs.step_ns),
            mem_f: memory(|m| m.activation as i64),
            mem_b: memory(|m| m.stash as i64 - m.activation as i64),
            mem_w: memory(|m| -(m.stash as i64)),
            mem_input: memory(|m| m.input as i64),
            mem_weights: memory(|m| m.weights as i64),
            mem_gradient: memory(|m| m.gradient as i64),
            mem_message: memory(|m| m.message as i64),
            mem_head: costs
                .memory
                .last()
                .map(|m| m.head)
                .filter(|h| h.longest() > 0)
                .map(|head| HeadMessage::ALL.map(|message| head.of(message))),
        }
    }
}

fn is_false(value: &bool) -> bool {
    !value
}

/// A stage's entry; an empty list is 0 everywhere.
fn at<T: Copy + Default>(list: &[T], stage: usize) -> T {
    list.get(stage).copied().unwrap_or_default()
}

fn nanos(micros: f64) -> u64 {
    (micros * 1000.0).round() as u64
}
