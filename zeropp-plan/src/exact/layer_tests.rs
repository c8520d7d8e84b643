//! What running W layer by layer hides of reductions and sums over replicas.

use super::{Simulation, Terms};
use crate::layout::{Layout, Recompute};
use crate::search::Models;
use crate::tests::job;

/// What a step is made of, with layers as the grain of reductions, and with stages. Of P 4 × D 8 ×
/// K 4, 6 micro-batches of 1, the model in bf16 on A800s whose products are as fast beside others'
/// work as alone: so that reductions and sums are what no work hides.
fn both(schedule: &'static str, virtual_stages: usize, zero1: bool) -> [Terms; 2] {
    let mut job = job("14.6b", 128, 192);
    job.machine.contention = 0.0;
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
    [layers.terms(), whole.terms()]
}

fn step(terms: &Terms) -> f64 {
    terms.all().iter().map(|(_, seconds)| seconds).sum()
}

/// The goals were a third of the reductions and half of the sums; ZB-H1's first rank has one W left
/// at its end, behind which not all of its layers' reductions hide.
#[test]
fn layers_hide_reductions_and_sums_over_replicas() {
    // Seconds of the step, of reductions and of sums, of what they are with whole stages.
    for (schedule, v, zero1, most) in [
        ("zb-h1", 1, false, [0.94, 0.67, 0.77]),
        ("zb-h1", 1, true, [0.94, 0.67, 0.50]),
        ("zb-v", 2, false, [0.97, 0.60, 0.97]),
        ("zb-v", 2, true, [0.97, 0.60, 0.90]),
        ("zeropp", 2, false, [0.97, 0.60, 0.97]),
    ] {
        let [layers, whole] = both(schedule, v, zero1);
        let share = [
            step(&layers) / step(&whole),
            layers.reductions / whole.reductions,
            layers.replicas / whole.replicas,
        ];
        let s = |terms: &Terms| [step(terms), terms.reductions, terms.replicas];
        println!("{schedule} zero1 {zero1}: {:.3?} of {:.3?}: {share:.3?}", s(&layers), s(&whole));
        let within = share.iter().zip(most).all(|(share, most)| *share <= most);
        assert!(within, "{schedule} zero1 {zero1}: {share:.3?}");
    }
}
