//! How long steps take within how much memory: a study's table, and what plans make of it.

use zeropp_model::optimizer::{Kept, StateRule};
use zeropp_model::presets::Preset;
use zeropp_plan::bytes::RunState;
use zeropp_plan::layout::{ComputeSettings, Fixed, Job, OutPlace, Recompute};
use zeropp_plan::machines;
use zeropp_plan::model::ModelSizes;
use zeropp_plan::plan::{LayoutPlan, Ranked};
use zeropp_plan::search::Search;

const GIB: f64 = (1u64 << 30) as f64;
/// How far plans may be above the study.
const WITHIN: f64 = 1.02;

/// What may be out of memory.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Outside {
    Nothing,
    States,
    /// Activations, and where they are wanted states, at so many GB/s each way.
    Activations(f64),
}

/// What AdamW keeps of a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Moments {
    Fp32,
    /// In 8 bits, as `adamw8bit` does: of each 256 a scale and as many bytes, twice.
    Eight,
}

impl Moments {
    fn state(self) -> RunState {
        let eight = Kept { block_words: 2 * (1 + 256 / 4), ..Kept::default() };
        match self {
            Moments::Fp32 => RunState::uniform(2),
            Moments::Eight => {
                RunState { rule: StateRule::new(move |_, _| eight), ..RunState::uniform(2) }
            }
        }
    }
}

/// One way to look for a place in the table: states out or not, and units of 8 or of any size.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Way {
    states: bool,
    unit: Option<usize>,
}

/// A model of the ZeroPP paper on A800s in its layout.
fn job(name: &str, gib: f64, outside: Outside, way: Way) -> Job {
    let mut machine = machines::named("a800").unwrap();
    let (out, gb_per_s) = match outside {
        Outside::Nothing | Outside::States => (None, 24.0),
        Outside::Activations(gb_per_s) => (Some(OutPlace::Host), gb_per_s),
    };
    machine.host_bytes_per_s = Some(gb_per_s * 1e9);
    let is_small = name == "14.6b";
    let gpus = if is_small { 32 } else { 64 };
    let fixed = Fixed {
        pp: Some(4),
        zero3: Some(8),
        dp: Some(gpus / 32),
        virtual_stages: Some(if is_small { 12 } else { 16 }),
        unit: way.unit,
        micro_batch_size: Some(1),
        schedule: Some("zeropp".into()),
        out,
        states: way.states.then_some(OutPlace::Host),
        ..Fixed::default()
    };
    Job {
        model: ModelSizes::of_a_paper(name).unwrap(),
        memory: (gib * GIB) as u64,
        machine,
        gpus,
        global_batch: if is_small { 192 } else { 256 },
        compute: ComputeSettings::GPU,
        state: Moments::Fp32.state(),
        fixed,
    }
}

fn best(job: &Job) -> Option<Ranked> {
    let layouts = LayoutPlan::new(job, "").ok()?.layouts;
    layouts.into_iter().min_by(|a, b| a.planned.step_s.total_cmp(&b.planned.step_s))
}

fn best_s(job: &Job) -> f64 {
    let found = Search::new(job).unwrap().within(job.memory).best;
    found.iter().map(|planned| planned.step_s).fold(f64::INFINITY, f64::min)
}

/// Seconds of a step that keeps all, in units of 8.
fn none_s(name: &str) -> f64 {
    let mut all = job(name, 80.0, Outside::Nothing, EIGHT);
    all.fixed.recompute = Some(Recompute::None);
    best_s(&all)
}

/// Model, GiB, what may be out, the study's times over a step that keeps all, and a way there.
type Place = (&'static str, f64, Outside, f64, Way);

const EIGHT: Way = Way { states: false, unit: Some(8) };
const ANY: Way = Way { states: false, unit: None };
const STATES: Way = Way { states: true, unit: Some(8) };
const ANY_STATES: Way = Way { states: true, unit: None };
const ALL: [Way; 4] = [EIGHT, ANY, STATES, ANY_STATES];

const PLACES: [Place; 19] = [
    ("14.6b", 11.3, Outside::States, 1.207, STATES),
    ("14.6b", 11.3, Outside::Activations(12.0), 1.137, ANY_STATES),
    ("14.6b", 11.3, Outside::Activations(24.0), 1.033, ANY_STATES),
    ("14.6b", 16.0, Outside::Nothing, 1.169, EIGHT),
    ("14.6b", 16.0, Outside::States, 1.093, STATES),
    ("14.6b", 16.0, Outside::Activations(12.0), 1.023, STATES),
    ("14.6b", 16.0, Outside::Activations(24.0), 1.013, EIGHT),
    ("14.6b", 20.0, Outside::Nothing, 1.081, EIGHT),
    ("14.6b", 20.0, Outside::States, 1.017, STATES),
    ("14.6b", 20.0, Outside::Activations(12.0), 1.009, EIGHT),
    ("14.6b", 20.0, Outside::Activations(24.0), 1.004, EIGHT),
    ("28.3b", 22.2, Outside::Nothing, 1.22, EIGHT),
    ("28.3b", 22.2, Outside::States, 1.207, STATES),
    ("28.3b", 22.2, Outside::Activations(12.0), 1.128, ANY),
    ("28.3b", 22.2, Outside::Activations(24.0), 1.018, ANY_STATES),
    ("28.3b", 28.0, Outside::Nothing, 1.170, ANY),
    ("28.3b", 28.0, Outside::States, 1.165, STATES),
    ("28.3b", 28.0, Outside::Activations(12.0), 1.082, EIGHT),
    ("28.3b", 28.0, Outside::Activations(24.0), 1.011, EIGHT),
];

/// The study's table, with moments out as runs copy them, on the link of activations: beside the
/// computes of stages before theirs, and waited for by the rank's queue. The study has no such
/// copies.
#[test]
fn plans_are_as_fast_as_the_study_within_its_memory() {
    let all_s = ["14.6b", "28.3b"].map(|name| (name, none_s(name)));
    let mut missed = Vec::new();
    for (name, gib, outside, asked, way) in PLACES {
        let all_s = all_s.iter().find(|(of, _)| *of == name).unwrap().1;
        let reached = best_s(&job(name, gib, outside, way)) / all_s;
        if reached > WITHIN * asked {
            missed.push(format!("{name}, {gib} GiB, {outside:?}: {reached:.3?} of {asked}"));
        }
    }
    assert!(missed.is_empty(), "{missed:#?}");
}

/// All ways to each place: `cargo test --release -p zeropp-plan --test memory -- --ignored
/// --nocapture`.
#[test]
#[ignore = "prints the table and checks nothing"]
fn every_way_to_every_place_of_the_table() {
    for (name, gib, outside, asked, _) in PLACES {
        let all_s = none_s(name);
        println!("{name} within {gib} GiB, {outside:?} out: asked {asked:.3}");
        for way in ALL.into_iter().filter(|way| !way.states || outside != Outside::Nothing) {
            let Some(Ranked { planned, terms, .. }) = best(&job(name, gib, outside, way)) else {
                println!("  nothing fits: {way:?}");
                continue;
            };
            let (times, most) = (planned.step_s / all_s, planned.worst().1.total());
            let [most, out] = [most, planned.outside()].map(|bytes| bytes as f64 / GIB);
            let mark = if times <= WITHIN * asked { ' ' } else { '!' };
            println!("{mark} {times:.3}: {}; {most:.2} GiB, {out:.2} out, {way:?}", planned.layout);
            let terms = terms.all().into_iter().filter(|(_, s)| s / all_s > 5e-4);
            let terms: Vec<String> =
                terms.map(|(what, s)| format!("{what} {:.3}", s / all_s)).collect();
            println!("    {}", terms.join(", "));
        }
    }
}

/// LLaMA 3 8B with 8,192 tokens on eight cards of 24 GB without NVLink, of hosts with so many GiB
/// for each; without a host memory has no end, and nothing is done again.
fn on_cards(host_gib: Option<f64>, moments: Moments) -> Job {
    let text = "flops_per_s = 165e12\nmemory_bytes = 24e9\nmemory_bytes_per_s = 0.9e12\n\
                zero3_bytes_per_s = 12e9\nhost_bytes_per_s = 12e9\nt_comm = 10\n\
                t_collective = 20\nt_layer = 420";
    let mut machine = machines::read("cards.toml", text).unwrap();
    machine.host_bytes = host_gib.map(|gib| 8.0 * gib * GIB);
    let place = host_gib.map(|_| OutPlace::Host);
    let states = place.clone().filter(|_| moments == Moments::Fp32);
    let recompute = host_gib.is_none().then_some(Recompute::None);
    let fixed =
        Fixed { pp: Some(1), zero3: Some(8), recompute, out: place, states, ..Fixed::default() };
    let memory = (machine.memory_bytes - machine.reserve_bytes) as u64;
    let decoder = Preset::find("llama3-8b").unwrap().decoder;
    Job {
        model: ModelSizes { name: "llama3-8b".into(), decoder, seq: 8192 },
        memory: if host_gib.is_some() { memory } else { 1 << 45 },
        machine,
        gpus: 8,
        global_batch: 64,
        compute: ComputeSettings::GPU,
        state: moments.state(),
        fixed,
    }
}

/// The study has 1.032 with 18 GiB of the host for each card, 1.073 with 9, and the optimizer's
/// moments alone among them.
#[test]
#[ignore = "prints a table and checks nothing"]
fn a_model_of_8_billion_on_cards_of_24_gb() {
    let all_s = best(&on_cards(None, Moments::Fp32)).unwrap().planned.step_s;
    for moments in [Moments::Fp32, Moments::Eight] {
        for gib in [9.0, 18.0, 24.0, 64.0] {
            let found = best(&on_cards(Some(gib), moments)).map(|ranked| ranked.planned);
            let found = found.map(|p| format!("{:.3}: {}", p.step_s / all_s, p.layout));
            println!("{gib} GiB of the host, moments {moments:?}: {found:?}");
        }
    }
}
