//! Plans as a whole.

use std::collections::HashSet;

use proptest::prelude::*;
use zeropp_model::optimizer::{Kept, Role, StateRule, UpdateBytes, WholeUpdate};
use zeropp_model::presets::Preset;
use zeropp_schedule::ir::{self, Action};
use zeropp_schedule::lower::OptimizerSync;
use zeropp_schedule::memory::MemoryBytes;
use zeropp_schedule::schedules::{Kind, StepForm};

use crate::bytes::RunState;
use crate::exact::Simulation;
use crate::layout::{ComputeSettings, Fixed, Job, Layout, OutPlace, Packing, Recompute};
use crate::links::Links;
use crate::model::ModelSizes;
use crate::plan::{LayoutPlan, Ranked};
use crate::race::Tried;
use crate::search::Models;
use crate::stages::{ModelCosts, Stage, exchange_s, simulator};
use crate::{machines, memory};

/// A preset, or a model of a paper.
fn known(name: &str) -> ModelSizes {
    match Preset::find(name) {
        Some(preset) => ModelSizes { name: name.into(), decoder: preset.decoder, seq: 1024 },
        None => ModelSizes::of_a_paper(name).unwrap(),
    }
}

pub(crate) fn job(model: &str, gpus: usize, global_batch: usize) -> Job {
    let machine = machines::named("a800").unwrap();
    Job {
        model: known(model),
        memory: machine.memory_bytes as u64,
        machine,
        gpus,
        global_batch,
        compute: ComputeSettings::GPU,
        state: RunState::uniform(2),
        fixed: Fixed::default(),
    }
}

/// So many tensors of an element of a block's matrix and of any other; matrices are updated whole
/// where `whole` says so, as Muon does.
fn state(matrix: usize, other: usize, whole: bool) -> RunState {
    let rule = StateRule::new(move |p, role| match (role, &p.shape[..]) {
        (Role::Hidden, [rows, columns]) => {
            let short = rows.min(columns);
            let flops = 10 * (short * short * (2 * rows.max(columns) + short)) as u64;
            let needs = WholeUpdate { elements: 2 * short * (rows + columns), flops, rms: false };
            Kept { whole: whole.then_some(needs), ..Kept::tensors(matrix) }
        }
        _ => Kept::tensors(other),
    });
    RunState { rule, ..RunState::uniform(0) }
}

/// The plan of a known model on A800s.
pub(crate) fn plan_of(model: &str, gpus: usize, global_batch: usize) -> LayoutPlan {
    LayoutPlan::new(&job(model, gpus, global_batch), "").unwrap()
}

#[test]
fn a_plan_fits_explains_itself_and_sums_up() {
    let job = job("14.6b", 32, 192);
    let plan = LayoutPlan::new(&job, "").unwrap();
    assert_eq!(plan.layouts.len(), 10);
    let mut before = 0.0;
    for ranked in &plan.layouts {
        let (layout, step) = (&ranked.planned.layout, ranked.planned.step_s);
        assert_eq!(layout.pp * layout.zero3 * layout.dp, 32);
        let samples = layout.zero3 * layout.dp * layout.micro_batches * layout.micro_batch_size;
        assert_eq!(samples, 192);
        assert!(ranked.worst_bytes <= job.memory, "{layout}");
        assert!(1.01 * step > before, "{layout}: in the order of time, but for ties");
        before = step;
        let sum: f64 = ranked.terms.all().iter().map(|(_, s)| s).sum();
        assert!((sum / step - 1.0).abs() < 0.01, "{layout}: {sum} of {step}");
        assert_eq!(ranked.planned.blocks.iter().sum::<usize>(), 48);
    }
    assert!(plan.why_first.unwrap().starts_with("1 beats 2 by"));
}

/// On one rank U, V, b and the kind hardly change time and memory: what does not, is shown once.
#[test]
fn layouts_that_are_shown_differ() {
    for (model, gpus) in [("gpt2", 1), ("gpt2", 8), ("14.6b", 32)] {
        let plan = plan_of(model, gpus, 64 * gpus.min(3));
        // Of ties the one that sends less comes first; here the faster one does.
        let mut layouts: Vec<&Ranked> = plan.layouts.iter().collect();
        layouts.sort_by(|a, b| a.planned.step_s.total_cmp(&b.planned.step_s));
        for (i, other) in layouts.iter().enumerate() {
            for better in &layouts[..i] {
                let mesh = |r: &Ranked| {
                    let l = &r.planned.layout;
                    (l.pp, l.zero3, l.dp, l.zero1)
                };
                let slower = other.planned.step_s / better.planned.step_s - 1.0;
                let less = 1.0 - other.worst_bytes as f64 / better.worst_bytes as f64;
                assert!(
                    mesh(other) != mesh(better) || slower > 0.0019 || less > 0.019,
                    "{} and {}",
                    better.planned.layout,
                    other.planned.layout
                );
            }
        }
    }
}

/// Whatever a plan tells, trials decide; what fails is last.
#[test]
fn trials_decide_where_layouts_are_tried() {
    let job = job("gpt2", 4, 64);
    let mut given = Vec::new();
    // The later the faster, but the first of all fails.
    let plan = LayoutPlan::tried(&job, "", 8, |layouts| {
        given = layouts.to_vec();
        let took = |i: usize| 1.0 / i as f64;
        let tried = |i| Tried { step_s: took(i), least_s: took(i), most_s: took(i), rounds: 7 };
        (0..layouts.len()).map(|i| (i > 0).then(|| tried(i))).collect()
    });
    let plan = plan.unwrap();
    assert_eq!((given.len(), plan.layouts.len()), (8, 8));
    assert!(given.windows(2).all(|pair| pair[0].step_s <= pair[1].step_s), "told in order");
    for (ranked, asked) in plan.layouts.iter().zip(given[1..].iter().rev()) {
        assert_eq!(ranked.planned.layout, asked.layout);
    }
    let last = plan.layouts.last().unwrap();
    assert!(last.tried.is_none() && last.planned.layout == given[0].layout);
    let programs: HashSet<u64> = plan.layouts.iter().map(|ranked| ranked.program).collect();
    assert_eq!(programs.len(), 8, "all of them do different things");
    let meshes = given.iter().map(|p| (p.layout.zero3, p.layout.dp, p.layout.virtual_stages));
    assert!(meshes.collect::<HashSet<_>>().len() > 4, "not all of them of one kind");
    let text = crate::text::text(&plan, 120);
    assert!(text.contains("took s") && text.contains("failed"), "{text}");
    assert!(text.contains("1 beats 2 by 16.7 % of its step in trials"), "{text}");
    assert!(!crate::text::text(&plan_of("gpt2", 4, 64), 120).contains("took s"));
}

/// Many layouts of this job hold as little as the leanest; hash tables have them in another order
/// each time.
#[test]
fn advice_where_nothing_fits_is_deterministic() {
    let mut job = job("14.6b", 2, 2);
    job.memory = 16 << 30;
    let said: Vec<_> = (0..6).map(|_| LayoutPlan::new(&job, "").unwrap_err().to_string()).collect();
    assert!(said.iter().all(|text| *text == said[0]), "{said:#?}");
}

#[test]
fn an_impossible_job_says_how_far_it_is_off() {
    let small = Job { memory: 1 << 30, ..job("175b", 8, 8) };
    let said = LayoutPlan::new(&small, "").unwrap_err().to_string();
    assert!(said.contains("the nearest needs") && said.contains("parameter shard"), "{said}");
    let odd = job("gpt2", 13, 3);
    let said = LayoutPlan::new(&odd, "").map(|_| ()).unwrap_err().to_string();
    assert!(said.contains("use another global-batch, such as 13"), "{said}");
}

#[test]
fn absurd_jobs_are_refused_in_a_sentence() {
    let good = job("gpt2", 8, 64);
    for (job, start) in [
        (Job { gpus: 1_000_000_000_000, ..good.clone() }, "gpus = 1000000000000"),
        (Job { gpus: 0, ..good.clone() }, "gpus = 0"),
        (Job { memory: 0, ..good.clone() }, "memory = 0"),
        (Job { global_batch: 0, ..good.clone() }, "global-batch = 0"),
        (
            Job {
                fixed: Fixed { schedule: Some("best".into()), ..Fixed::default() },
                ..good.clone()
            },
            "schedule = best",
        ),
    ] {
        let said = LayoutPlan::new(&job, "").unwrap_err().to_string();
        assert!(said.starts_with(start), "{said}");
    }
}

#[test]
fn more_memory_never_makes_a_plan_slower() {
    let mut last = f64::INFINITY;
    for gib in [14, 18, 24, 40, 79] {
        let job = Job { memory: gib << 30, ..job("14.6b", 32, 192) };
        let Ok(plan) = LayoutPlan::new(&job, "") else {
            assert_eq!(last, f64::INFINITY, "{gib} GiB fits less than less did");
            continue;
        };
        let step = plan.layouts[0].planned.step_s;
        assert!(step <= last * 1.001, "{gib} GiB: {step} after {last}");
        last = step;
    }
    assert!(last.is_finite());
}

/// A step that is too long to simulate whole is predicted from two shorter ones.
#[test]
fn a_long_step_follows_from_two_shorter_ones() {
    let whole = |layout: &Layout, job: &Job| {
        let mut models = Models::new(job);
        let (stages, blocks) = models.stages(job, layout).unwrap();
        let planned = Simulation::new(job, layout, &stages).unwrap().planned(&blocks);
        (planned.step_s, planned.worst().1.total(), planned.whole)
    };
    let job = job("14.6b", 32, 8 * 1440);
    for (schedule, unit) in [("zeropp", 8), ("1f1b", 1440), ("interleaved", 1440)] {
        let v = if schedule == "1f1b" { 1 } else { 2 };
        let layout = |micro_batches: usize| Layout {
            pp: 4,
            zero3: 8,
            dp: 1,
            virtual_stages: v,
            unit: unit.min(micro_batches),
            micro_batches,
            micro_batch_size: 1,
            recompute: Recompute::None,
            zero1: false,
            schedule,
            redone: None,
            prefetch: 1,
            slices: 1,
            out: 0,
            out_later: false,
            moments: false,
        };
        let (short, _, is_whole) = whole(&layout(480), &job);
        let (middle, held, _) = whole(&layout(560), &job);
        assert!(is_whole, "{schedule}");
        let (long, held_long, is_whole) = whole(&layout(1440), &job);
        assert!(!is_whole, "{schedule}");
        let expected = middle + (1440.0 - 560.0) / 80.0 * (middle - short);
        assert!((long / expected - 1.0).abs() < 1e-6, "{schedule}: {long} and {expected}");
        assert_eq!(held, held_long, "{schedule}");
    }
}

/// The first layout of a job, as it is and with one thing changed.
fn held(job: &Job, layout: &Layout) -> (f64, Vec<MemoryBytes>) {
    let (stages, blocks) = Models::new(job).stages(job, layout).unwrap();
    let planned = Simulation::new(job, layout, &stages).unwrap().planned(&blocks);
    (planned.step_s, planned.memory)
}

#[test]
fn an_optimizer_that_keeps_less_holds_less_and_moves_less() {
    let adamw = job("gpt2", 8, 64);
    let mut layout = LayoutPlan::new(&adamw, "").unwrap().layouts[0].planned.layout.clone();
    layout.zero1 = false;
    let (adamw_s, of_adamw) = held(&adamw, &layout);
    let before = of_adamw[0].optimizer;
    for (matrix, other) in [(1, 1), (0, 0), (1, 2)] {
        let job = Job { state: state(matrix, other, false), ..adamw.clone() };
        let (step_s, memory) = held(&job, &layout);
        let kept = memory[0].optimizer as f64 / before as f64;
        match (matrix, other) {
            // Matrices of blocks are most of the parameters, but not all.
            (1, 2) => assert!(kept > 0.5 && kept < 0.8, "{kept}"),
            _ => assert_eq!(kept, matrix as f64 / 2.0),
        }
        assert!(step_s < adamw_s, "{step_s} and {adamw_s}");
        assert_eq!(memory[0].parameter_shard, of_adamw[0].parameter_shard);
    }
}

/// With ZeRO-1 a replica has a part of the sum only, half of what all of it takes, and the updated
/// parameters are gathered at the end: beside the update where a device does both at once.
#[test]
fn zero1_is_priced_by_its_halves() {
    let mut shared = job("gpt2", 8, 64);
    // Sums and gathers at one rate, and so slow that the gather outlasts the update.
    shared.machine.reduce_bytes_per_s = 1e9;
    shared.machine.zero3_bytes_per_s = 1e9;
    let mut layout = LayoutPlan::new(&shared, "").unwrap().layouts[0].planned.layout.clone();
    (layout.pp, layout.zero3, layout.dp, layout.zero1) = (1, 1, 8, false);
    let of = |job: &Job, zero1: bool| {
        let layout = Layout { zero1, ..layout.clone() };
        let (stages, _) = Models::new(job).stages(job, &layout).unwrap();
        let costs = simulator(job, &layout, &stages);
        let sums: u64 = stages.iter().map(|stage| stage.costs.replica_reduce_ns).sum();
        let elements: u64 = stages.iter().map(|stage| stage.state.elements).sum();
        (sums as f64, costs.step_ns as f64, elements as f64)
    };
    let (whole, update, elements) = of(&shared, false);
    let (half, gathered, _) = of(&shared, true);
    assert!((half / whole - 0.5).abs() < 0.01, "{half} of {whole}");
    // Seven eighths of 4 bytes an element, at one byte a nanosecond.
    let gather = 3.5 * elements;
    assert!(gather > update / 8.0 && (gathered / gather - 1.0).abs() < 0.01, "{gathered}");
    // On cores that do both one comes after the other.
    shared.machine.ranks_at_once = Some(8);
    let both = of(&shared, true).1;
    assert!((both / (gather + update / 8.0) - 1.0).abs() < 0.01, "{both}");
}

/// Newton–Schulz takes whole matrices: a rank with an eighth of a block takes all of it for a
/// moment, and what it keeps is that of the rank with the least of matrices.
#[test]
fn muon_holds_whole_matrices_while_it_updates() {
    let even = Job { state: state(1, 2, false), ..job("gpt2", 8, 64) };
    let whole = Job { state: state(1, 2, true), ..even.clone() };
    let mut layout = LayoutPlan::new(&even, "").unwrap().layouts[0].planned.layout.clone();
    (layout.pp, layout.zero3, layout.dp, layout.zero1) = (1, 8, 1, false);
    let of = |job: &Job| Models::new(job).stages(job, &layout).unwrap().0[0].clone();
    let (even, whole) = (of(&even), of(&whole));
    let most = |stage: &Stage, of: fn(&UpdateBytes) -> u64| {
        stage.state.shares.each().iter().map(of).max().unwrap()
    };
    assert_eq!((most(&even, |b| b.update), even.kept), (0, whole.kept));
    // A block of GPT-2 has 12 hidden² elements, the largest matrix 4 hidden².
    let (block, matrix) = (12 * 768 * 768, 2 * 768 * (4 * 768 + 768));
    let least = 4 * (block + matrix) as u64;
    let update = most(&whole, |b| b.update);
    assert!(update >= least && update < least * 101 / 100, "{update}");
    let kept = most(&whole, |b| b.state) as f64 / most(&even, |b| b.state) as f64;
    assert!((1.0..1.1).contains(&kept), "{kept}");
}

#[test]
fn packed_weights_are_counted_where_memory_has_room_for_them() {
    let compute =
        ComputeSettings { on_gpu: false, packing: Packing::Auto(4), ..ComputeSettings::GPU };
    let roomy = Job { compute, memory: u64::MAX, ..job("gpt2", 4, 32) };
    let layout = Layout {
        pp: 2,
        zero3: 2,
        dp: 1,
        virtual_stages: 2,
        unit: 4,
        micro_batches: 16,
        micro_batch_size: 1,
        recompute: Recompute::None,
        zero1: false,
        schedule: "zeropp",
        redone: None,
        prefetch: 1,
        slices: 1,
        out: 0,
        out_later: false,
        moments: false,
    };
    let worst = |job: &Job, layout: &Layout| {
        held(job, layout).1.into_iter().max_by_key(|rank| rank.total()).unwrap()
    };
    let packed = worst(&roomy, &layout);
    assert!(packed.packed_weights > 0);
    // One micro-batch a gather: nothing is saved by a copy.
    assert_eq!(worst(&roomy, &Layout { unit: 1, ..layout.clone() }).packed_weights, 0);
    let short = Job { memory: packed.total() - 1, ..roomy.clone() };
    assert_eq!(worst(&short, &layout).packed_weights, 0);
    let compute = ComputeSettings { packing: Packing::Always(4), ..compute };
    let always = worst(&Job { compute, ..short }, &layout);
    assert_eq!(always, packed);
}

/// What is validated late, what is dropped and what is made orthogonal costs what it does.
#[test]
fn late_updates_dropout_and_matrices_have_their_prices() {
    let cpu = ComputeSettings { on_gpu: false, element_bytes: 4, ..ComputeSettings::GPU };
    // Stages that take as long as each other, but for a small head, and W as long as F.
    let model = ModelSizes::gpt("even", [16, 2048, 16, 256, 1024]);
    let mut job = Job { compute: cpu, model, ..job("gpt2", 4, 8) };
    job.machine.layer_s = 0.0;
    job.fixed = Fixed {
        pp: Some(4),
        virtual_stages: Some(2),
        micro_batch_size: Some(1),
        schedule: Some("zeropp".into()),
        ..Fixed::default()
    };
    let plan = LayoutPlan::new(&job, "").unwrap();
    let layout = plan.layouts[0].planned.layout.clone();
    let (plain, memory) = held(&job, &layout);
    assert!(memory.iter().all(|rank| rank.rollback == 0));
    let late = plan.late.unwrap_or_else(|| panic!("{layout} of {plain} s waits for no rank"));
    job.fixed.sync = OptimizerSync::Late;
    let (step_s, memory) = held(&job, &layout);
    assert!(step_s < 0.999 * plain && step_s == late.step_s, "{step_s} {plain} {late:?}");
    assert_eq!(memory.iter().map(|rank| rank.total()).max(), Some(late.worst_bytes));
    assert!(LayoutPlan::new(&job, "").unwrap().late.is_none(), "it is asked for already");
    job.fixed.sync = OptimizerSync::Barrier;
    let drops = Job { compute: ComputeSettings { dropout: true, ..job.compute }, ..job.clone() };
    let dropped = held(&drops, &layout).0 / plain;
    assert!((1.003..1.15).contains(&dropped), "{dropped}");
    let muon = held(&Job { state: state(1, 2, true), ..job.clone() }, &layout).0;
    let (apart, _) = held(&Job { state: state(1, 2, false), ..job.clone() }, &layout);
    assert!(muon > apart, "{muon} {apart}");
}

/// A forward that is done again stops at its last product. Of 14.6b on 32 A800, with stages of one
/// layer, and of llama3-70b on 64 H100, with stages of two.
#[test]
fn full_recomputation_takes_at_most_a_quarter_longer() {
    let large = Job {
        model: ModelSizes { seq: 8192, ..known("llama3-70b") },
        machine: machines::named("h100").unwrap(),
        ..job("14.6b", 64, 256)
    };
    let layout = Layout {
        pp: 4,
        zero3: 8,
        dp: 1,
        virtual_stages: 12,
        unit: 8,
        micro_batches: 24,
        micro_batch_size: 1,
        recompute: Recompute::Full,
        zero1: false,
        schedule: "zeropp",
        redone: None,
        prefetch: 3,
        slices: 1,
        out: 0,
        out_later: false,
        moments: false,
    };
    let alone = Layout { pp: 1, zero3: 32, dp: 2, virtual_stages: 40, unit: 4, ..layout.clone() };
    let alone = Layout { micro_batches: 4, zero1: true, prefetch: 1, ..alone };
    for (job, layout, most) in [(job("14.6b", 32, 192), layout, 1.21), (large, alone, 1.26)] {
        let step_s = |recompute| {
            let layout = Layout { recompute, ..layout.clone() };
            let (stages, blocks) = Models::new(&job).stages(&job, &layout).unwrap();
            Simulation::new(&job, &layout, &stages).unwrap().planned(&blocks).step_s
        };
        let ratio = step_s(Recompute::Full) / step_s(Recompute::None);
        assert!(ratio <= most, "{layout}: {ratio}");
    }
}

/// Stages that a plan prices as recomputed are those that the program computes again.
#[test]
fn full_recomputation_is_of_the_stages_that_the_program_does_again() {
    let job = job("gpt2", 4, 64);
    for kind in Kind::planned() {
        let schedule = kind.name;
        let virtual_stages = kind.stages.default_number();
        let layout = Layout {
            pp: 2,
            zero3: 2,
            dp: 1,
            virtual_stages,
            unit: 8,
            micro_batches: 8,
            micro_batch_size: 4,
            recompute: Recompute::Full,
            zero1: false,
            schedule,
            redone: None,
            prefetch: 1,
            slices: 1,
            out: 0,
            out_later: false,
            moments: false,
        };
        let (stages, _) = Models::new(&job).stages(&job, &layout).unwrap();
        let (program, ..) = Simulation::new(&job, &layout, &stages).unwrap().run();
        let tasks = || program.ranks.iter().flatten().flat_map(Action::computes);
        for stage in 0..program.stages() {
            let again = tasks().any(|task| (task.kind, task.stage) == (ir::Compute::R, stage));
            assert_eq!(stage < layout.recomputed(), again, "{schedule}, stage {stage}");
        }
    }
}

/// A last unit of fewer micro-batches holds less beside the gradients that are there by then.
#[test]
fn a_smaller_last_unit_is_not_held_to_be_a_full_one() {
    let cpu = ComputeSettings { on_gpu: false, element_bytes: 4, ..ComputeSettings::GPU };
    let job = Job {
        compute: ComputeSettings { keeps_probabilities: true, ..cpu },
        ..job("gpt2-xl", 1, 1)
    };
    let layout = Layout {
        pp: 2,
        zero3: 1,
        dp: 1,
        virtual_stages: 3,
        unit: 3,
        micro_batches: 4,
        micro_batch_size: 1,
        recompute: Recompute::None,
        zero1: false,
        schedule: "zeropp",
        redone: None,
        prefetch: 1,
        slices: 1,
        out: 0,
        out_later: false,
        moments: false,
    };
    let (stages, _) = Models::new(&job).stages(&job, &layout).unwrap();
    let most = held(&job, &layout).1.iter().map(|rank| rank.total()).max().unwrap();
    assert!(memory::at_least(&layout, &stages, false) <= most);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    /// What is pruned in closed form would not have fitted.
    #[test]
    fn no_rank_holds_less_than_the_closed_form_says(
        (p, v, b, u) in (1usize..6, 1usize..5, 1usize..20, 1usize..20),
        (d, k, kind, samples) in (0usize..4, 1usize..3, 0..Kind::planned().count(), 1usize..3),
        (full, zero1, on_gpu) in (any::<bool>(), any::<bool>(), any::<bool>()),
        has_file in any::<bool>(),
    ) {
        let cpu = ComputeSettings {
            on_gpu: false,
            element_bytes: 4,
            keeps_probabilities: true,
            ..ComputeSettings::GPU
        };
        let compute = if on_gpu { ComputeSettings::GPU } else { cpu };
        let states = has_file.then(|| OutPlace::File("here".into()));
        let fixed = Fixed { states, ..Fixed::default() };
        let job = Job { compute, fixed, ..job("gpt2-xl", 1, 1) };
        let kind = Kind::planned().nth(kind).unwrap();
        let layout = Layout {
            pp: p,
            zero3: 1 << d,
            dp: k,
            virtual_stages: v,
            unit: if kind.step == StepForm::Units { u.min(b) } else { b },
            micro_batches: b,
            micro_batch_size: samples,
            recompute: if full { Recompute::Full } else { Recompute::None },
            zero1: zero1 && k > 1,
            schedule: kind.name,
            redone: None,
            prefetch: 1,
            slices: 1,
            out: 0,
            out_later: false,
            moments: false,
        };
        let mut models = Models::new(&job);
        let Some((stages, _)) = models.stages(&job, &layout) else { return Ok(()) };
        let Ok(simulation) = Simulation::new(&job, &layout, &stages) else { return Ok(()) };
        let most = simulation.held().iter().map(|r| r.at_once.total()).max().unwrap();
        let least = memory::at_least(&layout, &stages, false);
        prop_assert!(least <= most, "{layout}: at least {least}, and {most}");
    }
}

/// Rows of a plan are strategies: none differs from another in V and the kind alone, unless by more
/// than the model is sure of or in much memory; and of those that tie the first sends least to
/// other nodes.
#[test]
fn a_row_of_a_plan_is_a_strategy_and_ties_go_to_the_one_that_leans_least_on_links() {
    let mut job = job("llama2-70b", 64, 256);
    job.model.seq = 4096;
    job.machine = machines::named("h100").unwrap();
    for job in [job.clone(), Job { model: known("llama3-8b"), ..job }] {
        let plan = LayoutPlan::new(&job, "").unwrap();
        let strategy = |r: &Ranked| {
            let l = &r.planned.layout;
            (l.pp, l.zero3, l.dp, l.zero1, l.micro_batch_size, l.recompute)
        };
        for (i, a) in plan.layouts.iter().enumerate() {
            for b in plan.layouts[..i].iter().filter(|b| strategy(a) == strategy(b)) {
                let apart = (a.planned.step_s / b.planned.step_s - 1.0).abs();
                let held = a.worst_bytes as f64 / b.worst_bytes as f64;
                let is_leaner = !(0.81..=1.0 / 0.81).contains(&held);
                assert!(apart >= 0.99 * job.machine.margin || is_leaner, "{apart} {held}");
            }
        }
        let first = &plan.layouts[0].planned;
        for other in plan.layouts.iter().map(|r| &r.planned) {
            let is_tied = other.step_s < first.step_s;
            assert!(!is_tied || first.traffic.between < other.traffic.between, "{}", other.layout);
            assert!(first.step_s < 1.01 * other.step_s, "{}", first.layout);
        }
    }
}

/// A cut that a run makes by itself is not in its command; others are short.
#[test]
fn commands_have_no_cut_that_is_the_default() {
    let even = ModelSizes::gpt("even", [16, 2048, 16, 256, 1024]);
    let job = Job { model: even, ..job("gpt2", 4, 8) };
    let fixed = Fixed { pp: Some(4), virtual_stages: Some(2), ..Fixed::default() };
    let plan = LayoutPlan::new(&Job { fixed, ..job }, "").unwrap();
    assert!(!plan.layouts[0].command.contains("--stages"), "{}", plan.layouts[0].command);
    let flags = plan.layouts[0].planned.layout.flags(&[1, 2, 2, 2, 2, 2, 2, 1], &[], "");
    assert_eq!(flags.last().unwrap(), "--stages 1,6x2,1");
}

/// A head of 128k ids takes longer than a block. Alone in its stage, with blocks of its rank on
/// others, a step of llama3-8b on 8 pipeline ranks loses far less: loss is what a step takes beyond
/// the mean compute of a rank.
#[test]
fn a_head_that_outlasts_a_block_gets_a_stage_of_its_own() {
    for (v, before, after) in [(4, 0.37, 0.226), (3, 0.60, 0.245)] {
        let fixed = Fixed {
            pp: Some(8),
            zero3: Some(8),
            virtual_stages: Some(v),
            micro_batch_size: Some(1),
            recompute: Some(Recompute::None),
            schedule: Some("zeropp".into()),
            ..Fixed::default()
        };
        let job = Job {
            model: ModelSizes { seq: 8192, ..known("llama3-8b") },
            machine: machines::named("h100").unwrap(),
            memory: u64::MAX,
            fixed,
            ..job("14.6b", 64, 256)
        };
        let first = LayoutPlan::new(&job, "").unwrap().layouts.swap_remove(0);
        let layout = &first.planned.layout;
        let loss = |step_s: f64| step_s / first.terms.compute - 1.0;
        let least =
            [8, 11, 15, 16, 32].map(|unit| held(&job, &Layout { unit, ..layout.clone() }).0);
        let least = least.into_iter().fold(f64::INFINITY, f64::min);
        assert!(loss(least) > before, "{} where the longest stage is shortest", loss(least));
        let now = loss(first.planned.step_s);
        assert!(now < after, "{now} {:?}", first.planned.blocks);
        assert_eq!(first.planned.blocks.last(), Some(&0), "{:?}", first.planned.blocks);
        assert!(first.command.contains("--stages"), "{}", first.command);
    }
}

fn of_4_ranks(schedule: &'static str) -> Layout {
    Layout {
        pp: 4,
        zero3: 1,
        dp: 1,
        virtual_stages: 2,
        unit: 16,
        micro_batches: 16,
        micro_batch_size: 4,
        recompute: Recompute::None,
        redone: None,
        zero1: false,
        schedule,
        prefetch: 1,
        slices: 1,
        out: 0,
        out_later: false,
        moments: false,
    }
}

/// The ranks of embedding and head swap gradients; slices get the embedding's, and return weights.
#[test]
fn the_end_of_a_step_has_the_exchange_of_a_tied_weight() {
    let of = |zero3: usize, head_blocks: &[usize], tied: bool| {
        let mut job = job("gpt2", 4 * zero3, 64);
        job.model.decoder.tied = tied;
        let layout = Layout { zero3, ..of_4_ranks("zeropp") };
        let blocks = [2, 2, 2, 2, 1, 1, 1, 1];
        let stages = ModelCosts::new(&job, 4).with_head(&job, &layout, &blocks, head_blocks);
        let links = Links::new(&job.machine, &layout);
        let time = exchange_s(&job, &layout, &links, &stages);
        let rate = links.message;
        let each = move |elements: usize| job.machine.message_s + 4.0 * elements as f64 / rate;
        (time, each)
    };
    let all = 50_257 * 768;
    let (time, each) = of(1, &[], true);
    assert_eq!((time, of(1, &[], false).0), (each(all), 0.0));
    // Blocks are of 896 rows. Rank 0's own rows stay there.
    let slices = [15, 14, 14, 14];
    let own = 15 * 896 * 768;
    let (time, each) = of(1, &slices, true);
    assert_eq!((time, of(1, &slices, false).0), (2.0 * each(all - own), 0.0));
    // The second shard of its slice has rows of the first one of the whole.
    let (time, each) = of(2, &slices, true);
    assert_eq!(time, 2.0 * each(all / 2 + own / 2));
}

/// A rank of a V has other stages than one of a loop: what its update takes follows from those.
#[test]
fn the_update_of_a_rank_is_of_the_stages_that_its_kind_places_there() {
    let mut job = job("gpt2", 4, 64);
    // Gradients of a tied weight would be exchanged.
    job.model.decoder.tied = false;
    let of = |schedule| {
        let layout = of_4_ranks(schedule);
        let (stages, _) = Models::new(&job).stages(&job, &layout).unwrap();
        let moved = |s: usize| 12 * stages[s].state.elements + 2 * stages[s].kept;
        let (of_ends, costs) = (moved(0) + moved(7), simulator(&job, &layout, &stages));
        (of_ends as f64 / job.machine.update_bytes_per_s, costs.step_ns as f64 / 1e9)
    };
    // Rank 0 of a V has the embedding and the head.
    let (ends, update) = of("zb-v");
    assert!((update / (ends + job.machine.step_end_s) - 1.0).abs() < 1e-6, "{update} {ends}");
    let (ends, update) = of("interleaved");
    assert!(update < 0.9 * ends, "{update} {ends}");
}
