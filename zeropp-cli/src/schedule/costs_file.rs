//! The costs of a request: its flags', or a file's under the flags that are typed beside it.

use std::path::Path;

use serde_json::Value;
use zeropp::pipeline::costs::{ALONE, Table, check_sums};
use zeropp::pipeline::timeline::MemoryUnit;
use zeropp::read_costs;
use zeropp_core::files::escaped_line;

use super::cost_args::{CostFlags, PerStage};
use super::costs::{Changes, ScheduleCosts};
use super::micros::{self, Micros};
use crate::failure::Failure;

impl ScheduleCosts {
    /// The costs of `stages` stages for schedules of so many micro-batches.
    pub(crate) fn new(
        flags: &CostFlags,
        stages: usize,
        micro_batches: usize,
    ) -> Result<ScheduleCosts, Failure> {
        match &flags.file {
            Some(path) => schedule_costs(flags, path, stages, micro_batches),
            None => match &flags.layer {
                Some(layer) => ScheduleCosts::of_layers(flags, layer, stages, micro_batches),
                None => ScheduleCosts::typed(&flags.times, &flags.memory, stages, micro_batches),
            },
        }
    }
}

/// The costs that the file at `path` has for so many stages, and flags over them.
fn schedule_costs(
    flags: &CostFlags,
    path: &Path,
    stages: usize,
    micro_batches: usize,
) -> Result<ScheduleCosts, Failure> {
    let mut table = read_costs(path).map_err(|e| Failure::bad_input(format!("costs = {e}")))?;
    let fail =
        |problem: String| Failure::bad_input(format!("costs = {}: {problem}", path.display()));
    set_times(&mut table, flags);
    let in_bytes = set_memory(&mut table, flags, stages)?;
    for (rate, flag) in [("zero3_bytes_per_s", "t-gather"), ("replica_bytes_per_s", "t-reduce")] {
        if table.has(rate) && !flags.typed.contains(&flag) {
            return Err(fail(format!(
                "{rate}: how many ranks share a stage is not known here; give times of gathers and \
                 reductions (t_gather, t_reduce, t_replica_reduce) in its place"
            )));
        }
    }
    let costs = table.of(stages, ALONE, None).map_err(|e| fail(e.to_string()))?;
    check_sums(&costs, micro_batches).map_err(|e| fail(e.to_string()))?;
    let source = match table.measured() {
        Some(what) => format!("costs measured: {} ({})", path.display(), escaped_line(what)),
        None => format!("costs given: {}", path.display()),
    };
    let over = match flags.typed[..] {
        [] => String::new(),
        _ => format!("; --{} as typed", flags.typed.join(", --")),
    };
    let unit = if in_bytes { MemoryUnit::Bytes } else { MemoryUnit::Units };
    Ok(ScheduleCosts::of_file(costs, source + &over, unit))
}

fn set_times(table: &mut Table, flags: &CostFlags) {
    let times = &flags.times;
    let micros = |time: &Micros| micros::micros(time.nanos());
    let list = |times: &PerStage<Micros>| match times.0[..] {
        [one] => Value::from(micros(&one)),
        _ => times.0.iter().map(micros).collect(),
    };
    let all = [
        ("t-f", "t_f", list(&times.f)),
        ("t-b", "t_b", list(&times.b)),
        ("t-w", "t_w", list(&times.w)),
        ("t-gather", "t_gather", list(&times.gather)),
        ("t-reduce", "t_reduce", list(&times.reduce)),
        ("t-comm", "t_comm", Value::from(micros(&times.comm))),
        (
            "t-overlap",
            "t_overlap",
            times.overlap.as_ref().map_or(Value::Null, |t| micros(t).into()),
        ),
    ];
    for (flag, key, value) in all {
        if flags.typed.contains(&flag) {
            table.set(key, value);
        }
    }
}

/// Where a flag for memory is typed, or the file has none, what F, B and W change is the flags'.
/// Whether it is in bytes: a file's is, and what is typed in bytes.
fn set_memory(table: &mut Table, flags: &CostFlags, stages: usize) -> Result<bool, Failure> {
    let typed = |flag: &str| flags.typed.contains(&flag);
    let has_none = !["mem_f", "mem_b", "mem_w"].iter().any(|key| table.has(key));
    let by_flags = has_none || ["mem-f", "mem-b", "mem-w"].into_iter().any(typed);
    if by_flags {
        let Changes { f, b, w, .. } = Changes::new(&flags.memory, stages)?;
        table.set("mem_f", f.into());
        table.set("mem_b", b.into());
        table.set("mem_w", w.into());
    }
    if typed("mem-input") {
        table.set("mem_input", Changes::new(&flags.memory, stages)?.input.into());
    }
    Ok(!by_flags || flags.memory.in_bytes)
}
