//! Plans that put activations out: how long steps take within how much memory, and what is said.

use zeropp_model::presets::Preset;
use zeropp_plan::bytes::RunState;
use zeropp_plan::layout::{ComputeSettings, Fixed, Job, OutPlace, Recompute};
use zeropp_plan::model::ModelSizes;
use zeropp_plan::plan::{LayoutPlan, Ranked};
use zeropp_plan::{machines, text};
use zeropp_schedule::costs::Machine;

const GIB: f64 = (1u64 << 30) as f64;

/// A model of the ZeroPP paper on its A800, in its layout, with so many bytes a second each way
/// between a device and its host.
fn job(name: &str, gpus: usize, bytes_per_s: Option<f64>) -> Job {
    let mut machine = machines::named("a800").unwrap();
    machine.host_bytes_per_s = bytes_per_s;
    let is_small = name == "14.6b";
    let fixed = Fixed {
        pp: Some(4),
        zero3: Some(8),
        dp: Some(gpus / 32),
        virtual_stages: Some(if is_small { 12 } else { 16 }),
        unit: Some(8),
        micro_batch_size: Some(1),
        schedule: Some("zeropp".into()),
        out: bytes_per_s.map(|_| OutPlace::Host),
        ..Fixed::default()
    };
    Job {
        model: ModelSizes::of_a_paper(name).unwrap(),
        memory: machine.memory_bytes as u64,
        machine,
        gpus,
        global_batch: if is_small { 192 } else { 256 },
        compute: ComputeSettings::GPU,
        state: RunState::uniform(2),
        fixed,
    }
}

fn best_s(job: &Job) -> f64 {
    let plan = LayoutPlan::new(job, "").unwrap_or_else(|e| panic!("{e}"));
    plan.layouts.iter().map(|ranked| ranked.planned.step_s).fold(f64::INFINITY, f64::min)
}

/// A model by its preset on such machines, with all that may be put out on the host.
fn on_host(name: &str, gpus: usize, global_batch: usize, machine: Machine) -> Job {
    let decoder = Preset::find(name).unwrap().decoder;
    Job {
        model: ModelSizes { name: name.into(), decoder, seq: 8192 },
        memory: (machine.memory_bytes - machine.reserve_bytes) as u64,
        machine,
        gpus,
        global_batch,
        compute: ComputeSettings::GPU,
        state: RunState::uniform(2),
        fixed: Fixed { out: Some(OutPlace::Host), ..Fixed::default() },
    }
}

/// LLaMA 3 70B on 64 H100 whose hosts have 128 GiB for each and copy 50 GB/s each way: no more than
/// 8 % of a step are not there where memory has no end; with recomputation alone a fifth are.
#[test]
fn hosts_take_recomputation_from_a_model_of_70_billion() {
    let mut machine = machines::named("h100").unwrap();
    machine.host_bytes_per_s = Some(50e9);
    machine.host_bytes = Some(8.0 * 128.0 * GIB);
    let job = on_host("llama3-70b", 64, 256, machine);
    let alone = Job { fixed: Fixed::default(), ..job.clone() };
    let endless = Job { memory: 1 << 45, ..alone.clone() };
    let [all_s, out_s, alone_s] = [&endless, &job, &alone].map(best_s);
    assert!(1.0 - all_s / out_s <= 0.08, "{out_s} s, of which {all_s} s without a limit");
    assert!(1.0 - all_s / alone_s > 0.18, "{alone_s} s");
    // States take the host's memory and the link, too: units of two micro-batches are what fits.
    let fixed = Fixed { states: Some(OutPlace::Host), ..job.fixed.clone() };
    let both_s = best_s(&Job { fixed, ..job.clone() });
    assert!(both_s / out_s < 1.04, "{both_s} s for {out_s}");
}

/// LLaMA 3 8B with 8,192 tokens on eight cards of 24 GB without NVLink: nothing fits, with copies
/// of activations something, and with states out, too, it is faster.
#[test]
fn cards_of_24_gb_train_a_model_of_8_billion() {
    let text = "flops_per_s = 165e12\nmemory_bytes = 24e9\nmemory_bytes_per_s = 0.9e12\n\
                zero3_bytes_per_s = 12e9\nhost_bytes_per_s = 12e9\nhost_bytes = 512e9\n\
                t_comm = 10\nt_collective = 20\nt_layer = 420";
    let job = on_host("llama3-8b", 8, 64, machines::read("cards.toml", text).unwrap());
    let alone = Job { fixed: Fixed::default(), ..job.clone() };
    assert!(LayoutPlan::new(&alone, "").is_err());
    let fixed = Fixed { states: Some(OutPlace::Host), ..job.fixed.clone() };
    let states = Job { fixed, ..job.clone() };
    let plan = LayoutPlan::new(&states, "").unwrap();
    let first = &plan.layouts[0].planned;
    assert!(first.outside() as f64 <= 64e9, "the host has as much for each");
    assert!(first.peaks.iter().all(|rank| rank.host_state > 0));
    assert!(best_s(&states) < best_s(&job), "{}", first.layout);
    let explained = text::explain(&plan, 0, 160).unwrap();
    assert!(explained.contains("states' copies not hidden"), "{explained}");
}

/// The host has as much as its file says, and no more; runs on GPUs do not have it yet.
#[test]
fn a_plan_keeps_to_the_host_s_memory_and_says_what_does_not_run() {
    let roomy = Job { memory: (16.0 * GIB) as u64, ..job("14.6b", 32, Some(24e9)) };
    let plan = LayoutPlan::new(&roomy, "").unwrap();
    let first = &plan.layouts[0];
    let outside = first.planned.outside();
    assert!(outside > 0 && first.planned.layout.out > 0, "{}", first.planned.layout);
    let shown = text::text(&plan, 160);
    for said in ["  out  ", " put out to pinned memory of the host", "on the host"] {
        assert!(shown.contains(said), "{said}: {shown}");
    }
    let says = format!("out=host,out-batches={}", first.planned.layout.out);
    assert!(first.command.contains(&says), "{}", first.command);
    let explained = text::explain(&plan, 0, 160).unwrap();
    assert!(explained.contains("copies not hidden"), "{explained}");
    assert!(explained.contains("host activation"), "{explained}");
    // A host with half of that has layouts that put less out.
    let mut short = roomy.clone();
    short.machine.host_bytes = Some(0.5 * outside as f64 * roomy.machine.per_node as f64);
    let plan = LayoutPlan::new(&short, "").unwrap();
    assert!(plan.layouts.iter().all(|ranked| ranked.planned.outside() <= outside / 2));
    assert!(plan.layouts[0].planned.step_s > first.planned.step_s);
    let unknown = Job {
        fixed: Fixed { out: Some(OutPlace::Host), ..Fixed::default() },
        ..job("14.6b", 32, None)
    };
    let said = LayoutPlan::new(&unknown, "").unwrap_err().to_string();
    assert!(said.starts_with("recompute:out = host: the machine's file has no host_bytes_per_s"));
}

/// Ranks of CPUs have a file, and a command that says so.
#[test]
fn plans_for_cpus_put_activations_into_a_folder() {
    let mut job = Job { memory: (16.0 * GIB) as u64, ..job("14.6b", 32, None) };
    job.compute = ComputeSettings { on_gpu: false, ..job.compute };
    job.machine.file_bytes_per_s = Some(48e9);
    job.fixed.out = Some(OutPlace::File("/scratch".into()));
    let plan = LayoutPlan::new(&job, "").unwrap();
    let first = &plan.layouts[0];
    let says = format!("out=/scratch,out-batches={}", first.planned.layout.out);
    assert!(first.planned.layout.out > 0 && first.command.contains(&says), "{}", first.command);
    assert!(!text::text(&plan, 160).contains("go out to pinned"));
}

/// States that are out take their copies' time, and memory no more of them: a machine whose file
/// does not say how fast its disk is cannot be planned for.
#[test]
fn states_in_a_folder_take_the_time_of_their_copies() {
    let mut job = Job { memory: (20.0 * GIB) as u64, ..job("14.6b", 32, None) };
    job.compute = ComputeSettings { on_gpu: false, ..job.compute };
    job.fixed.unit = Some(24);
    job.fixed.recompute = Some(Recompute::Full);
    let here = LayoutPlan::new(&job, "").unwrap();
    job.fixed.states = Some(OutPlace::File("/scratch".into()));
    let said = LayoutPlan::new(&job, "").unwrap_err().to_string();
    assert!(
        said.starts_with("optimizer:out = /scratch: the machine's file has no file_bytes_per_s")
    );
    job.machine.file_bytes_per_s = Some(10e9);
    let moments = LayoutPlan::new(&job, "").unwrap();
    job.fixed.moments = Some(false);
    let out = LayoutPlan::new(&job, "").unwrap();
    let [here, moments, out] = [&here, &moments, &out].map(|plan| &plan.layouts[0]);
    // Of each of 14.6e9 / 32 parameters: nearly two gathers' reads, a reduction's write, the norm's
    // read, and of the update 16 bytes read and 12 written, beside which it computes: 44 bytes.
    let seconds = 44.0 * 14.6e9 / 32.0 / 10e9;
    let longer = out.planned.step_s - here.planned.step_s;
    assert!((0.8..1.1).contains(&(longer / seconds)), "{longer} {seconds}");
    assert!((out.terms.states / longer - 1.0).abs() < 0.05, "{:?}", out.terms);
    let held = |of: &Ranked| of.planned.memory.iter().map(|rank| rank.total()).max().unwrap();
    assert!(held(here) - held(out) > 5 << 30, "16 bytes of each parameter, less pieces");
    // Of moments alone 16 bytes, and of those the stages' that are gathered before any computes.
    let longer = (moments.planned.step_s - here.planned.step_s) / (16.0 / 44.0 * seconds);
    assert!(moments.planned.layout.moments && (0.1..0.3).contains(&longer), "{longer}");
    assert!(held(here) - held(moments) > 3 << 30, "8 bytes of each parameter, less pieces");
    assert!(out.planned.out_to.is_none() && !out.planned.on_host);
}
