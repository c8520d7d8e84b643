//! Plans of long samples: in slices where that is best, and said so.

use zeropp_model::presets::Preset;
use zeropp_plan::bytes::RunState;
use zeropp_plan::layout::{ComputeSettings, Fixed, Job, Slices};
use zeropp_plan::model::ModelSizes;
use zeropp_plan::plan::LayoutPlan;
use zeropp_plan::{machines, text};

/// A model of Meta's with samples of so many tokens, on H100.
fn job(name: &str, seq: usize, gpus: usize, global_batch: usize) -> Job {
    let machine = machines::named("h100").unwrap();
    let decoder = Preset::find(name).unwrap().decoder;
    Job {
        model: ModelSizes { name: name.into(), decoder, seq },
        memory: (machine.memory_bytes - machine.reserve_bytes) as u64,
        machine,
        gpus,
        global_batch,
        compute: ComputeSettings::GPU,
        state: RunState::uniform(2),
        fixed: Fixed::default(),
    }
}

/// Where nothing of whole samples fits on GPUs a plan has what does not run there yet, and says so.
#[test]
fn llama_70b_with_long_samples_gets_layouts_on_128_gpus_and_the_plan_says_that_they_do_not_run() {
    let mut job = job("llama3-70b", 1 << 17, 128, 64);
    // The search has fewer meshes to look at than a user's.
    job.fixed = Fixed { pp: Some(16), zero3: Some(8), ..Fixed::default() };
    let whole = Fixed { slices: Slices::Number(1), ..job.fixed.clone() };
    let said = LayoutPlan::new(&Job { fixed: whole, ..job.clone() }, "").unwrap_err().to_string();
    assert!(said.contains("layouts fits; the nearest needs"), "{said}");
    let plan = LayoutPlan::new(&job, "").unwrap();
    let first = &plan.layouts[0];
    assert!(first.worst_bytes <= job.memory && first.planned.layout.slices >= 16);
    assert!(first.planned.step_s < 300.0, "{} s", first.planned.step_s);
    let text = text::text(&plan, 160);
    for said in ["  n  ", "Runs on GPUs refuse ", "CPUs only today", "Once GPUs take slices"] {
        assert!(text.contains(said), "{said}: {text}");
    }
    let n = first.planned.layout.slices;
    assert!(first.command.contains(&format!(":slices={n},head-split=")), "{}", first.command);
}
