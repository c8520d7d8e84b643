//! torchtitan's published runs with FSDP: what contention on the A100, and the H100's share of its
//! peak, are fitted on, and runs that were held out.

use zeropp_model::presets::Preset;

use super::TableCell;
use zeropp_plan::bytes::RunState;
use zeropp_plan::exact::Simulation;
use zeropp_plan::layout::{ComputeSettings, Fixed, Job, Layout, Recompute};
use zeropp_plan::machines;
use zeropp_plan::model::ModelSizes;
use zeropp_plan::search::Models;
use zeropp_plan::stages::Stage;

/// What a run computed again.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Again {
    Nothing,
    /// Every second layer.
    Layers,
    /// Every second product, and all that is cheap.
    Operations,
    Everything,
}

impl Again {
    fn words(self) -> &'static str {
        match self {
            Again::Nothing => "nothing again",
            Again::Layers => "each 2nd layer again",
            Again::Operations => "each 2nd product again",
            Again::Everything => "all again",
        }
    }

    /// The share of a forward.
    fn share(self) -> f64 {
        match self {
            Again::Nothing => 0.0,
            Again::Layers | Again::Operations => 0.5,
            Again::Everything => 1.0,
        }
    }
}

/// One run: machine, model, tokens of a sample, GPUs, samples of each, recomputation, tokens in a
/// second on each GPU, and whether a number was fitted on it.
struct PublishedRun(&'static str, &'static str, usize, usize, usize, Again, f64, bool);

/// torchtitan's page on performance (A100, 80 GB) and its report of December 2024 (H100 with 500 W
/// and slower memory; compiled, bf16). Its eager runs on H100 are 14 % slower than these, and those
/// in Float8 faster.
const RUNS: [PublishedRun; 10] = [
    PublishedRun("a100", "llama3-8b", 8192, 64, 1, Again::Operations, 2973.0, true),
    PublishedRun("a100", "llama3-8b", 8192, 64, 1, Again::Layers, 2904.0, false),
    PublishedRun("a100", "llama3-70b", 8192, 64, 1, Again::Everything, 331.0, false),
    PublishedRun("a100", "llama2-13b", 4096, 64, 2, Again::Nothing, 2162.0, false),
    PublishedRun("a100", "llama2-13b", 4096, 64, 2, Again::Layers, 1914.0, false),
    PublishedRun("a100", "llama2-13b", 4096, 64, 2, Again::Operations, 1904.0, false),
    PublishedRun("a100", "llama2-70b", 4096, 64, 1, Again::Operations, 355.0, false),
    PublishedRun("a100", "llama2-70b", 4096, 64, 2, Again::Everything, 353.0, false),
    PublishedRun("h100", "llama3.1-8b", 8192, 8, 2, Again::Operations, 6667.0, true),
    PublishedRun("h100", "llama3.1-8b", 8192, 128, 2, Again::Operations, 6514.0, false),
];

/// Tokens in a second on each GPU of runs that numbers were fitted on, and of those held out.
pub(super) fn torchtitan() -> [Vec<TableCell>; 2] {
    let (fitted, held_out): (Vec<_>, Vec<_>) = RUNS.iter().partition(|run| run.7);
    [fitted, held_out].map(|runs| runs.into_iter().map(cell).collect())
}

fn cell(
    &PublishedRun(machine, model, seq, gpus, samples, again, paper, _): &PublishedRun,
) -> TableCell {
    let words = again.words();
    let name = format!("{model} on {gpus} {}, {words}", machine.to_uppercase());
    let (none, full) = (step_s(machine, model, seq, gpus, samples), again.share());
    let step_s = none[0] + full * (none[1] - none[0]);
    TableCell { name, paper, ours: (samples * seq) as f64 / step_s }
}

/// Seconds of a step as FSDP does it, a gather a block, with nothing computed again and with all.
fn step_s(machine: &str, model: &str, seq: usize, gpus: usize, samples: usize) -> [f64; 2] {
    let machine = machines::named(machine).expect("in the crate");
    let decoder = Preset::find(model).expect("a preset").decoder;
    let layers = decoder.layers;
    let job = Job {
        model: ModelSizes { name: model.into(), decoder, seq },
        memory: u64::MAX,
        machine,
        gpus,
        global_batch: gpus * samples,
        compute: ComputeSettings { redoes_outputs: true, ..ComputeSettings::GPU },
        state: RunState::uniform(2),
        fixed: Fixed::default(),
    };
    [Recompute::None, Recompute::Full].map(|recompute| {
        let layout = Layout {
            pp: 1,
            zero3: gpus,
            dp: 1,
            virtual_stages: layers,
            unit: 1,
            micro_batches: 1,
            micro_batch_size: samples,
            recompute,
            zero1: false,
            schedule: "bf-pp",
            redone: None,
            prefetch: 1,
            slices: 1,
            out: 0,
            out_later: false,
            moments: false,
        };
        let cut = Models::new(&job).stages(&job, &layout).expect("a block for each stage");
        let (stages, blocks): (&[Stage], _) = (&cut.0, &cut.1);
        let simulation = Simulation::new(&job, &layout, stages).expect("a shape that it has");
        simulation.planned(blocks).step_s
    })
}
