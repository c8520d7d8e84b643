//! From the flags for costs to what generators, simulator and files take.

use zeropp::pipeline::costs::{ACTIONS_EACH_MAX, cut_samples, layers_of};
use zeropp::pipeline::exchange::json;
use zeropp::pipeline::memory::StageBytes;
use zeropp::pipeline::schedules;
use zeropp::pipeline::simulate::{self, LinkCosts, StageCosts};
use zeropp::pipeline::timeline::MemoryUnit;

use super::cost_args::{CostFlags, LayerTimes, MemoryArgs, PerStage, TimeArgs};
use super::micros::{Micros, micros};
use super::slice_args::SliceArgs;
use crate::failure::Failure;

/// Every stage's costs.
pub(crate) struct ScheduleCosts {
    /// For generators that weigh costs.
    pub(super) generator: schedules::OrderCosts,
    /// For the simulator.
    pub(crate) simulator: simulate::Costs,
    /// Which file the costs are from.
    pub(super) note: Option<String>,
    /// Unit of memory.
    pub(crate) memory_unit: MemoryUnit,
    /// The costs are a file's, whose times of R, replicas and the step they have, too, or those of
    /// slices: the simulator has all that there is.
    is_of_file: bool,
}

impl ScheduleCosts {
    /// The costs of stages of so many layers as there are for each.
    pub(super) fn of_layers(
        flags: &CostFlags,
        layer: &LayerTimes,
        stages: usize,
        micro_batches: usize,
    ) -> Result<ScheduleCosts, Failure> {
        let cut = layers_of(layer.layers, stages).map_err(Failure::bad_input)?;
        let times_of = |one: Micros| PerStage(cut.iter().map(|n| one.times(*n)).collect());
        let all_times = |name, list: &PerStage<Micros>| {
            one(name, list).map(|one| PerStage(cut.iter().map(|n| one.times(*n)).collect()))
        };
        let all_units = |name, list: &PerStage<i64>| {
            one(name, list).map(|one| PerStage(cut.iter().map(|n| one * *n as i64).collect()))
        };
        let given = |name, list: &Option<PerStage<i64>>| {
            list.as_ref().map(|list| all_units(name, list)).transpose()
        };
        let [f, b, w] = layer.times.map(times_of);
        let TimeArgs { gather, reduce, comm, overlap, .. } = &flags.times;
        let (gather, reduce) = (all_times("t-gather", gather)?, all_times("t-reduce", reduce)?);
        let times = TimeArgs { f, b, w, gather, reduce, comm: *comm, overlap: *overlap };
        let memory = MemoryArgs {
            f: all_units("mem-f", &flags.memory.f)?,
            b: given("mem-b", &flags.memory.b)?,
            w: given("mem-w", &flags.memory.w)?,
            input: flags.memory.input.clone(),
            in_bytes: flags.memory.in_bytes,
        };
        ScheduleCosts::typed(&times, &memory, stages, micro_batches)
    }

    /// The costs of a file, in nanoseconds.
    pub(super) fn of_file(
        simulator: simulate::Costs,
        note: String,
        memory_unit: MemoryUnit,
    ) -> ScheduleCosts {
        let generator = schedules::OrderCosts::from(&simulator);
        ScheduleCosts { generator, simulator, note: Some(note), memory_unit, is_of_file: true }
    }

    pub(super) fn typed(
        times: &TimeArgs,
        memory: &MemoryArgs,
        stages: usize,
        micro_batches: usize,
    ) -> Result<ScheduleCosts, Failure> {
        let [f, b, w, gather, reduce] = [
            ("t-f", &times.f),
            ("t-b", &times.b),
            ("t-w", &times.w),
            ("t-gather", &times.gather),
            ("t-reduce", &times.reduce),
        ]
        .map(|(name, list)| per_stage(name, list, stages));
        let lists =
            [("t-f", f?), ("t-b", b?), ("t-w", w?), ("t-gather", gather?), ("t-reduce", reduce?)];
        let single = [("t-comm", Some(times.comm)), ("t-overlap", times.overlap)];
        let single = single.iter().filter_map(|(name, time)| Some((*name, (*time)?)));
        let listed = lists.iter().flat_map(|(name, list)| list.iter().map(|t| (*name, *t)));
        let all: Vec<(&str, Micros)> = listed.chain(single).collect();
        sum_fits(&all, stages, micro_batches)?;
        let [f, b, w, gather, reduce] =
            lists.map(|(_, list)| list.iter().map(|t| t.nanos()).collect::<Vec<u64>>());
        let change = Changes::new(memory, stages)?;
        let generator = schedules::OrderCosts {
            f,
            b,
            w,
            send: times.comm.nanos(),
            head: [times.comm.nanos(); 4],
            gather,
            reduce,
            mem_f: change.f,
            mem_b: change.b,
            mem_w: change.w,
            mem_limit: None,
            limits: schedules::Limits::default(),
            objective: schedules::Objective::default(),
        };
        let simulator = simulator(&generator, &change.input, times.overlap.map(Micros::nanos));
        let memory_unit = if memory.in_bytes { MemoryUnit::Bytes } else { MemoryUnit::Units };
        Ok(ScheduleCosts { generator, simulator, note: None, memory_unit, is_of_file: false })
    }

    /// Adds those of a split head's slices of so many blocks, which take together what the last
    /// stage takes. Their messages take as long as any, of no bytes.
    pub(super) fn add_slices(&mut self, slices: &[usize]) {
        let blocks = slices.iter().fold(0usize, |sum, n| sum.saturating_add(*n)).max(1);
        let last = self.simulator.stages.len() - 1;
        for n in slices {
            let part = |whole: u64| {
                let part = u128::from(whole) * *n as u128 / blocks as u128;
                u64::try_from(part).expect("a part of it")
            };
            let of = self.simulator.stages[last];
            self.simulator.stages.push(StageCosts {
                f_ns: part(of.f_ns),
                b_ns: part(of.b_ns),
                w_ns: part(of.w_ns),
                r_ns: part(of.r_ns),
                all_gather_ns: part(of.all_gather_ns),
                reduce_scatter_ns: part(of.reduce_scatter_ns),
                replica_reduce_ns: part(of.replica_reduce_ns),
            });
            let of = self.simulator.memory[last];
            self.simulator.memory.push(StageBytes {
                input: part(of.input),
                activation: part(of.activation),
                stash: part(of.stash),
                weights: part(of.weights),
                gradient: part(of.gradient),
                ..StageBytes::default()
            });
        }
        if !slices.is_empty() {
            self.order_by_simulator();
        }
    }

    /// Makes what an order is made for what it is simulated with.
    fn order_by_simulator(&mut self) {
        let generator = schedules::OrderCosts::from(&self.simulator);
        let schedules::OrderCosts { mem_limit, limits, objective, .. } = self.generator;
        self.generator = schedules::OrderCosts { mem_limit, limits, objective, ..generator };
    }

    /// Cuts samples, whose costs these are, of so many stages and any slices of a head, into
    /// slices; returns the tokens of each.
    pub(super) fn cut(&mut self, slices: &SliceArgs, stages: usize) -> Result<Vec<u64>, Failure> {
        let SliceArgs { number, cut, tokens, pairs } = *slices;
        if number == 1 {
            return Ok(Vec::new());
        }
        let (costs, sample_slices) =
            cut_samples(&self.simulator, stages, tokens, number, cut, pairs)
                .map_err(Failure::bad_input)?;
        self.simulator = costs;
        self.order_by_simulator();
        self.is_of_file = true;
        Ok(sample_slices)
    }

    /// The costs as a file has them.
    pub(super) fn document(&self) -> json::JsonCosts {
        if self.is_of_file {
            return json::JsonCosts::from(&self.simulator);
        }
        let all = |list: &[u64]| list.iter().map(|t| micros(*t)).collect::<Vec<f64>>();
        let or_none =
            |list: &[u64]| if list.iter().all(|t| *t == 0) { Vec::new() } else { all(list) };
        let costs = &self.generator;
        let input = self.simulator.memory.iter().map(|m| m.input as i64).collect::<Vec<_>>();
        json::JsonCosts {
            t_f: all(&costs.f),
            t_b: all(&costs.b),
            t_w: all(&costs.w),
            t_gather: or_none(&costs.gather),
            t_reduce: or_none(&costs.reduce),
            t_comm: micros(costs.send),
            t_overlap: self.simulator.overlap_ns.map(micros),
            mem_f: costs.mem_f.clone(),
            mem_b: costs.mem_b.clone(),
            mem_w: costs.mem_w.clone(),
            mem_input: if input.iter().all(|m| *m == 0) { Vec::new() } else { input },
            ..json::JsonCosts::default()
        }
    }
}

/// Refuses times whose sum over all actions could leave 64 bits.
fn sum_fits(all: &[(&str, Micros)], stages: usize, micro_batches: usize) -> Result<(), Failure> {
    let actions = stages.saturating_mul(micro_batches).saturating_mul(ACTIONS_EACH_MAX);
    // Three times a time is the most that an action can add (an overlapped pair).
    let most = u64::MAX / (actions as u64).saturating_add(1).saturating_mul(3);
    match all.iter().max_by_key(|(_, time)| *time) {
        Some((name, longest)) if longest.nanos() > most => Err(Failure::bad_input(format!(
            "{name} = {longest}: too long for {stages} stages and {micro_batches} micro-batches in \
             nanoseconds; use shorter times or fewer micro-batches"
        ))),
        _ => Ok(()),
    }
}

fn simulator(
    costs: &schedules::OrderCosts,
    input: &[i64],
    overlap: Option<u64>,
) -> simulate::Costs {
    let stages = 0..costs.f.len();
    let time = |s: usize| StageCosts {
        f_ns: costs.f[s],
        b_ns: costs.b[s],
        w_ns: costs.w[s],
        r_ns: costs.f[s],
        all_gather_ns: costs.gather[s],
        reduce_scatter_ns: costs.reduce[s],
        replica_reduce_ns: 0,
    };
    let memory = |s: usize| StageBytes {
        input: input[s].unsigned_abs(),
        activation: costs.mem_f[s].unsigned_abs(),
        stash: costs.mem_w[s].unsigned_abs(),
        ..StageBytes::default()
    };
    simulate::Costs {
        stages: stages.clone().map(time).collect(),
        memory: stages.map(memory).collect(),
        link: LinkCosts { latency_ns: costs.send, ..LinkCosts::default() },
        file_bytes_per_s: None,
        layers: Vec::new(),
        copies_apart: false,
        states: Vec::new(),
        overlap_ns: overlap,
        step_ns: 0,
    }
}

/// The one number of a flag that is about a layer.
fn one<T: Copy>(name: &str, list: &PerStage<T>) -> Result<T, Failure> {
    match list.0[..] {
        [one] => Ok(one),
        _ => Err(Failure::bad_input(format!(
            "{name} = {} numbers: with --layer-f it is that of a layer; give one number",
            list.0.len()
        ))),
    }
}

/// One entry a stage of a flag's value.
pub(super) fn per_stage<T: Copy>(
    name: &str,
    list: &PerStage<T>,
    stages: usize,
) -> Result<Vec<T>, Failure> {
    match list.0[..] {
        [one] => Ok(vec![one; stages]),
        _ if list.0.len() == stages => Ok(list.0.clone()),
        _ => Err(Failure::bad_input(format!(
            "{name} = {} numbers: there are {stages} stages; give one number for all, or {stages}",
            list.0.len()
        ))),
    }
}

/// Changes of memory of every stage.
pub(super) struct Changes {
    pub(super) f: Vec<i64>,
    pub(super) b: Vec<i64>,
    pub(super) w: Vec<i64>,
    pub(super) input: Vec<i64>,
}

impl Changes {
    /// Values that are not given follow: B frees half of an F's memory, or all that W does not.
    pub(super) fn new(memory: &MemoryArgs, stages: usize) -> Result<Changes, Failure> {
        let f = per_stage("mem-f", &memory.f, stages)?;
        let input = per_stage("mem-input", &memory.input, stages)?;
        let given = |name, list: &Option<PerStage<i64>>| {
            list.as_ref().map(|list| per_stage(name, list, stages)).transpose()
        };
        let (b, w) = (given("mem-b", &memory.b)?, given("mem-w", &memory.w)?);
        let rest = |x: &[i64]| f.iter().zip(x).map(|(f, x)| -f - x).collect::<Vec<i64>>();
        let (b, w) = match (b, w) {
            (Some(b), Some(w)) => (b, w),
            (Some(b), None) => (b.clone(), rest(&b)),
            (None, Some(w)) => (rest(&w), w),
            (None, None) => {
                let w: Vec<i64> = f.iter().map(|f| -(f / 2)).collect();
                (rest(&w), w)
            }
        };
        for s in 0..stages {
            let [f, b, w, input] = [f[s], b[s], w[s], input[s]];
            let fail = |field: &str, value: i64, problem: &str| {
                let at = if stages > 1 { format!(" (stage {s})") } else { String::new() };
                Err(Failure::bad_input(format!("{field} = {value}{at}: {problem}")))
            };
            if f < 0 {
                return fail("mem-f", f, "an F takes memory; use 0 or more");
            }
            if f + b + w != 0 {
                let problem = format!(
                    "mem-f + mem-b + mem-w must be 0, but {f} + {b} + {w} is {}; leave mem-b or \
                     mem-w out and it follows",
                    f + b + w
                );
                return fail("mem-w", w, &problem);
            }
            if w > 0 {
                return fail("mem-w", w, "a W frees memory; use 0 or less");
            }
            if input < 0 || input > f {
                return fail("mem-input", input, &format!("a part of mem-f; use 0 to {f}"));
            }
        }
        Ok(Changes { f, b, w, input })
    }
}

#[cfg(test)]
mod tests {
    use super::super::command;
    use super::*;

    fn flags(line: &str) -> Result<CostFlags, String> {
        let words = std::iter::once("schedule").chain(line.split(' '));
        let matches = command().try_get_matches_from(words).map_err(|e| e.to_string())?;
        Ok(CostFlags::new(&matches))
    }

    #[test]
    fn layers_cost_the_same_in_however_many_stages_they_are() {
        let line = "--layers 24 --layer-f 2.5 --layer-w 1 --t-gather 3 --mem-f 4 --mem-input 1";
        let flags = flags(line).unwrap();
        for stages in [1, 4, 7, 24] {
            let schedule_costs =
                ScheduleCosts::new(&flags, stages, 8).unwrap_or_else(|f| panic!("{}", f.message));
            let costs = &schedule_costs.generator;
            let sum = |list: &[u64]| micros(list.iter().sum());
            // B is as long as the first that is given.
            assert_eq!([&costs.f, &costs.b, &costs.w].map(|l| sum(l)), [60.0, 60.0, 24.0]);
            assert_eq!((sum(&costs.gather), costs.mem_f.iter().sum()), (72.0, 96));
            assert!(schedule_costs.simulator.memory.iter().all(|m| m.input == 1));
        }
        let few = ScheduleCosts::new(&flags, 25, 8).map(|_| ()).unwrap_err().message;
        assert!(few.starts_with("layers = 24: 25 stages"), "{few}");
    }

    #[test]
    fn costs_are_of_a_layer_or_of_a_stage() {
        assert!(flags("--layers 4 --layer-f 1 --t-f 1").is_err());
        assert!(flags("--layer-f 1").unwrap_err().contains("--layers"));
        let lists = flags("--layers 4 --layer-f 1 --mem-f 2,2").unwrap();
        let said = ScheduleCosts::new(&lists, 2, 4).map(|_| ()).unwrap_err().message;
        assert!(said.starts_with("mem-f = 2 numbers: with --layer-f"), "{said}");
    }
}
