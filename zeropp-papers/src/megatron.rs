//! Megatron's published runs (Korthikanti et al. 2022, table 5).

use super::TableCell;
use crate::baselines::{ActivationSaving, KernelSet, TensorLayout, step};
use zeropp_plan::machines;
use zeropp_plan::model::ModelSizes;

/// Name, GPUs, P, interleave, batch, micro-batch, seconds with full recomputation, seconds with
/// sequence parallelism and selective recomputation (Korthikanti et al. 2022, table 5). All four
/// were held against a second public copy of that table, the validation data of the planner
/// Calculon.
type MegatronRun = (&'static str, usize, usize, usize, usize, usize, f64, f64);
const MEGATRON: [MegatronRun; 4] = [
    ("22b", 8, 1, 1, 4, 4, 1.42, 1.10),
    ("175b", 64, 8, 3, 64, 1, 18.13, 13.75),
    ("530b", 280, 35, 3, 280, 1, 49.05, 37.83),
    ("1t", 512, 64, 1, 512, 1, 94.42, 71.49),
];

/// Megatron's published runs.
pub(super) fn megatron() -> Vec<TableCell> {
    let machine = machines::named("a100").expect("in the crate");
    let mut cells = Vec::new();
    for (name, gpus, pp, interleave, batch, micro_batch, full, sequence) in MEGATRON {
        let model = ModelSizes::of_a_paper(name).expect("known");
        for (saving, paper, words) in [
            (ActivationSaving::Full, full, "full recomputation"),
            (ActivationSaving::SequenceSelective, sequence, "sequence parallel, selective"),
        ] {
            let (tp, dp) = (8, 1);
            let kernels = KernelSet::Apart;
            let zero_bubble = false;
            let layout =
                TensorLayout { tp, pp, dp, interleave, micro_batch, saving, kernels, zero_bubble };
            let ours = step(&machine, &model, batch, &layout).step_s;
            let name = format!("{name} on {gpus} A100, {words}");
            cells.push(TableCell { name, paper, ours });
        }
    }
    cells
}
