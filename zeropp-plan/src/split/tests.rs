use zeropp_schedule::ir::Schedule;
use zeropp_schedule::lower::in_issue_order;
use zeropp_schedule::schedules::default_unit;
use zeropp_schedule::simulate::StageCosts;
use zeropp_schedule::verify::{VerifyLimits, verify, verify_issue_order};

use super::*;
use crate::exact::{Planned, Simulation, Terms};
use crate::layout::{Fixed, HeadSplit, Job, Layout, Recompute};
use crate::machines;
use crate::model::ModelSizes;
use crate::search::Models;
use crate::stages::Stage;
use crate::tests::job;

/// llama3-8b with so many ids, cut into stages of one block, 8,192 tokens a micro-batch, 8 GPUs
/// share a stage.
fn llama(ids: usize, (pp, virtual_stages, micro_batches): (usize, usize, usize)) -> (Job, Layout) {
    let job = job("llama3-8b", 8 * pp, 8 * micro_batches);
    let mut decoder = job.model.decoder;
    decoder.vocabulary = ids;
    let model = ModelSizes { decoder, seq: 8192, ..job.model.clone() };
    let layout = Layout {
        pp,
        zero3: 8,
        dp: 1,
        virtual_stages,
        unit: default_unit(pp, virtual_stages, micro_batches),
        micro_batches,
        micro_batch_size: 1,
        recompute: Recompute::None,
        redone: None,
        zero1: false,
        schedule: "zeropp",
        prefetch: 1,
        slices: 1,
        out: 0,
        out_later: false,
        moments: false,
    };
    // All that the rows hold is beside the point here.
    let (fixed, memory) = (Fixed { head: HeadSplit::Ahead, ..Fixed::default() }, 1 << 40);
    (Job { model, machine: machines::named("h100").unwrap(), fixed, memory, ..job }, layout)
}

/// A layout simulated: what it comes to, what its step is made of, and its program.
fn simulated(job: &Job, layout: &Layout, stages: &[Stage]) -> (Planned, Terms, Schedule) {
    let simulation = Simulation::new(job, layout, stages).unwrap();
    (simulation.planned(&[]), simulation.terms(), simulation.run().0)
}

/// Step over a rank's mean compute, less 1.
fn loss((planned, terms, _): &(Planned, Terms, Schedule)) -> f64 {
    planned.step_s / terms.compute - 1.0
}

/// All stages as long as the mean one, the head among them.
fn equal(stages: &[Stage]) -> Vec<Stage> {
    let n = stages.len() as u64;
    let mean = |of: fn(&StageCosts) -> u64| stages.iter().map(|s| of(&s.costs)).sum::<u64>() / n;
    let (f_ns, b_ns, w_ns) = (mean(|c| c.f_ns), mean(|c| c.b_ns), mean(|c| c.w_ns));
    let (all_gather_ns, reduce_scatter_ns) =
        (mean(|c| c.all_gather_ns), mean(|c| c.reduce_scatter_ns));
    let of = |stage: &Stage| {
        let costs = stage.costs;
        let costs = StageCosts { f_ns, b_ns, w_ns, all_gather_ns, reduce_scatter_ns, ..costs };
        Stage { costs, ..stage.clone() }
    };
    stages.iter().map(of).collect()
}

/// The rows of the design's table for llama3-8b, with 128k and 256k ids, as a plan chooses: what is
/// uneven and the head's messages in a share of a step, and how far it is from equal stages.
#[test]
fn a_split_head_costs_little_beside_equal_stages() {
    for ids in [128_256, 256_000] {
        for shape in [(4, 4, 32), (8, 4, 32), (16, 2, 64)] {
            let (job, layout) = llama(ids, shape);
            let mut models = Models::new(&job);
            let (stages, blocks) = models.stages(&job, &layout).unwrap();
            let equal = loss(&simulated(&job, &layout, &equal(&stages)));
            let whole = simulated(&job, &layout, &stages);
            let first = Simulation::new(&job, &layout, &stages).unwrap().planned(&blocks);
            let split = models.splits(&job, &[Some(first)]).pop().flatten().unwrap();
            let stages = models.stages_of(&job, &split);
            let both = simulated(&job, &layout, &stages);
            let (_, terms, program) = &both;
            let share = (terms.imbalance + terms.head_messages) / split.step_s;
            println!(
                "P {} {ids}: loss {:.2} %, equal {:.2} %, whole {:.2} %, uneven and messages \
                 {:.2} %, slices {:?}",
                shape.0,
                100.0 * loss(&both),
                100.0 * equal,
                100.0 * loss(&whole),
                100.0 * share,
                split.head_blocks,
            );
            verify(program, &VerifyLimits::default()).unwrap();
            verify_issue_order(&in_issue_order(program)).unwrap();
            assert!(share <= 0.02, "{share}");
            assert!(loss(&both) <= loss(&whole) / 2.5, "{} {}", loss(&both), loss(&whole));
            assert!(loss(&both) <= equal + 0.015, "{} {equal}", loss(&both));
        }
    }
}

#[test]
fn the_emptiest_rank_has_most_blocks() {
    let ids = 128 * 64;
    assert_eq!(even(ids, 4), [16; 4]);
    assert_eq!(poured(ids, &[3.0, 1.0, 3.0, 3.0], 2.0), [0, 64, 0, 0]);
    assert_eq!(poured(ids, &[1.0, 1.0], 2.0), [32, 32]);
    assert_eq!(even(128_256, 8), [8, 8, 8, 8, 8, 8, 8, 7]);
}

/// A step that is as short goes on with the whole head; what fits goes before what does not.
#[test]
fn a_split_head_has_to_gain_unless_only_it_fits() {
    let of = |step: f64, fits: bool| PredictedStep { step, fits };
    let chosen = |whole, splits: &[PredictedStep]| {
        chosen(whole, splits.iter().copied().enumerate()).map(|(which, _)| which)
    };
    assert_eq!(chosen(Some(of(100.0, true)), &[of(98.0, true), of(99.0, true)]), None);
    assert_eq!(chosen(Some(of(100.0, true)), &[of(98.0, true), of(90.0, true)]), Some(1));
    assert_eq!(chosen(Some(of(100.0, true)), &[of(50.0, false), of(90.0, true)]), Some(1));
    assert_eq!(chosen(Some(of(100.0, true)), &[of(50.0, false)]), None);
    assert_eq!(chosen(Some(of(100.0, false)), &[of(50.0, false), of(120.0, true)]), Some(1));
    assert_eq!(chosen(Some(of(100.0, false)), &[of(50.0, false)]), Some(0));
    assert_eq!(chosen(Some(of(100.0, false)), &[of(99.0, false)]), None);
    assert_eq!(chosen(None, &[of(100.0, false), of(120.0, true)]), Some(1));
    assert_eq!(chosen(None, &[]), None);
    assert!(is_worth_trying(true, &[1.0, 1.1]) && !is_worth_trying(true, &[1.0, 1.05]));
    assert!(is_worth_trying(false, &[1.0, 1.05]));
}
