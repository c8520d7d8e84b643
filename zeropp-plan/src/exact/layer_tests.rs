//! What running W layer by layer hides of reductions and sums over replicas.

use super::{Simulation, Terms};
use crate::layout::{Layout, Recompute};
use crate::search::Models;
use crate::tests::job;

/// What a step is made of, with layers as the grain of reductions, and with stages. Of P 4 × D 8 ×
/// K 4, 6 micro-batches of 1, the model in bf16 on A800s.
fn both(schedule: &'static str, virtual_stages: usize, zero1: bool) -> [Terms; 2] {
    let job = job("14.6b", 128, 192);
    let layout = Layout {
        pp: 4,
        zero3: 8,
        dp: 4,
        virtual_stages,
        unit: 6,
        micro_batches: 6,
        micro_batch_size: 1,
        recompute: Recompute::None,
        zero1,
        schedule,
        redone: None,
        prefetch: virtual_stages - 1,
        slices: 1,
        out: 0,
    };
    let (stages, _) = Models::new(&job).stages(&job, &layout).unwrap();
    let layers = Simulation::new(&job, &layout, &stages).unwrap();
    let mut whole = Simulation::new(&job, &layout, &stages).unwrap();
    whole.costs.layers.clear();
    let mut costs = layers.costs.clone();
    costs.stages.iter_mut().for_each(|s| s.replica_reduce_ns = 0);
    let t = layers.timeline(&layers.programs[0], &costs);
    println!("{:?}", costs.stages[0]);
    for r in &t.ranks {
        let n = r.spans.len();
        for s in &r.spans[n.saturating_sub(30)..] {
            if s.end_ns > s.start_ns {
                print!("{}@{}-{} ", s.action, s.start_ns / 100_000, s.end_ns / 100_000);
            } else {
                print!("{} ", s.action)
            }
        }
        println!();
    }
    [layers.terms(), whole.terms()]
}

fn step(terms: &Terms) -> f64 {
    terms.all().iter().map(|(_, seconds)| seconds).sum()
}

#[test]
fn with_layers_most_of_the_reductions_and_sums_is_hidden() {
    for (schedule, v) in [("zb-h1", 1), ("zb-v", 2), ("zeropp", 2), ("1f1b", 1)] {
        for zero1 in [false] {
            let [layers, whole] = both(schedule, v, zero1);
            let share = |terms: &Terms| {
                let step = step(terms);
                [step, 100.0 * terms.reductions / step, 100.0 * terms.replicas / step]
            };
            println!(
                "{schedule} zero1 {zero1}: {:.3?} of whole stages {:.3?}",
                share(&layers),
                share(&whole)
            );
        }
    }
    panic!();
}
