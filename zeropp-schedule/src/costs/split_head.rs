//! A split head in a file of costs. The times of stages are those with a whole head, which the last
//! stage has, whether the run that they are of split it or not; `t_head` says what of them is the
//! head's. So a file is for any slices.

use serde_json::Value;

use super::{CostsError, Table};
use crate::memory::{HeadBytes, StageBytes};
use crate::simulate::{Costs, StageCosts};

/// F, B and W of the head, in µs.
pub(super) const KEY: &str = "t_head";
/// The longest time, as of stages.
const US_MAX: f64 = 1e9;

impl Table {
    /// Nanoseconds of the head's F, B and W, which are a part of those of the last stage; none
    /// where the file does not say.
    ///
    /// # Errors
    /// What is no list of three times.
    pub fn head_times(&self) -> Result<Option<[u64; 3]>, CostsError> {
        let Some(value) = self.keys.get(KEY) else { return Ok(None) };
        let time = |value: &Value| value.as_f64().filter(|t| (0.0..=US_MAX).contains(t));
        let times: Option<Vec<f64>> =
            value.as_array().and_then(|list| list.iter().map(time).collect());
        match times.as_deref() {
            Some([f, b, w]) => Ok(Some([f, b, w].map(|us| (us * 1000.0).round() as u64))),
            _ => {
                let works = "the head's F, B and W, each 0 to 1000000000 us";
                Err(CostsError::found(KEY, value, works))
            }
        }
    }

    pub(super) fn set_head_times(&mut self, times: [u64; 3]) {
        self.set(KEY, times.iter().map(|ns| *ns as f64 / 1000.0).collect());
    }
}

/// The costs of stages with a whole head, of those of so many stages and behind them of slices; and
/// F, B and W of all slices together.
pub(super) fn with_whole_head(costs: &Costs, stages: usize) -> (Costs, [u64; 3]) {
    let mut whole = costs.clone();
    let slices = whole.stages.split_off(stages.min(costs.stages.len()));
    let bytes = whole.memory.split_off(stages.min(costs.memory.len()));
    let sum = |of: fn(&StageCosts) -> u64| slices.iter().map(of).sum::<u64>();
    let head = [sum(|s| s.f_ns), sum(|s| s.b_ns), sum(|s| s.w_ns)];
    if let Some(last) = whole.stages.last_mut() {
        last.f_ns += head[0];
        last.b_ns += head[1];
        last.w_ns += head[2];
        // The ranks gather their slices at the same time, and one gathers a whole head.
        last.all_gather_ns += sum(|s| s.all_gather_ns);
        last.reduce_scatter_ns += sum(|s| s.reduce_scatter_ns);
        last.replica_reduce_ns += sum(|s| s.replica_reduce_ns);
    }
    if let Some(last) = whole.memory.last_mut() {
        for slice in bytes {
            last.activation += slice.activation;
            last.stash += slice.stash;
            last.weights += slice.weights;
            last.gradient += slice.gradient;
        }
    }
    (whole, head)
}

/// Costs with slices of so many blocks behind the stages, of those with a whole head in the last
/// stage, of whose times `head` are F, B and W of the head; those of all slices together are
/// `sliced`. A slice's other costs are 0, but for messages, which are as long as the last stage's.
pub fn with_slices(whole: &Costs, head: [u64; 3], sliced: [u64; 3], blocks: &[usize]) -> Costs {
    let mut costs = whole.clone();
    if let Some(last) = costs.stages.last_mut() {
        last.f_ns = last.f_ns.saturating_sub(head[0]);
        last.b_ns = last.b_ns.saturating_sub(head[1]);
        last.w_ns = last.w_ns.saturating_sub(head[2]);
    }
    let all = blocks.iter().fold(0, |sum: usize, n| sum.saturating_add(*n)).max(1);
    let message = whole.memory.last().map_or(0, |last| last.message);
    for n in blocks {
        let [f_ns, b_ns, w_ns] =
            sliced.map(|ns| (u128::from(ns) * *n as u128 / all as u128) as u64);
        costs.stages.push(StageCosts { f_ns, b_ns, w_ns, ..StageCosts::default() });
        let head = HeadBytes { input: message, gradient: message, ..HeadBytes::default() };
        costs.memory.push(StageBytes { head, ..StageBytes::default() });
    }
    costs
}

#[cfg(test)]
mod tests {
    use super::super::{ALONE, tests::table};
    use super::*;

    fn costs() -> Costs {
        let stage = |f_ns, b_ns, w_ns| StageCosts { f_ns, b_ns, w_ns, ..StageCosts::default() };
        let stages = vec![stage(10, 11, 12), stage(20, 21, 22), stage(3, 6, 9), stage(1, 2, 3)];
        Costs { stages, memory: vec![StageBytes::default(); 4], ..Costs::default() }
    }

    #[test]
    fn slices_and_a_whole_head_are_made_of_each_other() {
        let (whole, head) = with_whole_head(&costs(), 2);
        let last = whole.stages[1];
        assert_eq!((last.f_ns, last.b_ns, last.w_ns, head), (24, 29, 34, [4, 8, 12]));
        let back = with_slices(&whole, head, head, &[48, 16]);
        assert_eq!(back.stages, costs().stages);
    }

    #[test]
    fn the_head_s_times_are_three() {
        let text = |head: &str| format!("t_f = [1, 2]\nt_b = 1\nt_w = 1\nt_head = {head}");
        let one = table(&text("[0.5, 0.25, 1]")).unwrap();
        assert_eq!(one.head_times().unwrap(), Some([500, 250, 1000]));
        assert_eq!(one.of(2, ALONE, None).unwrap().stages[1].f_ns, 2000, "those of stages stand");
        for wrong in ["[1, 2]", "3", "[1, 2, -1]", "[1, 2, 1e10]"] {
            let error = table(&text(wrong)).unwrap().head_times().unwrap_err().to_string();
            assert!(error.starts_with("t_head: found"), "{error}");
        }
    }
}
