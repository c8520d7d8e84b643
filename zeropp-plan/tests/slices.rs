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

#[test]
fn probe() {
    for (name, gpus) in [("llama3-70b", 128), ("llama3-8b", 64)] {
        let start = std::time::Instant::now();
        let mut job = job(name, 1 << 17, gpus, 64);
        if name == "llama3-8b" {
            job.fixed.slices = Slices::Any;
        }
        match LayoutPlan::new(&job, "") {
            Ok(plan) => println!("{}", text::text(&plan, 160)),
            Err(e) => println!("{e}"),
        }
        println!("{:?}", start.elapsed());
    }
}
