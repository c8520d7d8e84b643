//! What running W, and last backwards, layer by layer hides of reductions and sums over replicas.

use super::{Simulation, Terms};
use zeropp_schedule::ir::LayerRun;

use crate::layout::{Job, Layout, Recompute};
use crate::search::Models;
use crate::tests::job;

/// What a step is made of, with layers as the grain of reductions, and with stages. Of P 4 × D 8 ×
/// K 4, 6 micro-batches of 1, the model in bf16 on A800s whose products are as fast beside others'
/// work as alone: so that reductions and sums are what no work hides.
fn both(schedule: &'static str, virtual_stages: usize, zero1: bool) -> [Terms; 2] {
    let (job, layout) = large(schedule, virtual_stages, zero1);
    let (stages, _) = Models::new(&job).stages(&job, &layout).unwrap();
    let layers = Simulation::new(&job, &layout, &stages).unwrap();
    let mut whole = Simulation::new(&job, &layout, &stages).unwrap();
    whole.costs.layers.clear();
    [layers.terms(), whole.terms()]
}

fn large(schedule: &'static str, virtual_stages: usize, zero1: bool) -> (Job, Layout) {
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
        out_later: false,
        moments: false,
    };
    (job, layout)
}

fn step(terms: &Terms) -> f64 {
    terms.all().iter().map(|(_, seconds)| seconds).sum()
}

/// The goals were a third of the reductions, half of the sums, and a layer's gathers.
#[test]
fn layers_hide_gathers_reductions_and_sums_over_replicas() {
    // Seconds of the step, of reductions, sums and gathers, of what they are with whole stages.
    for (schedule, v, zero1, most) in [
        ("zb-h1", 1, false, [0.87, 0.16, 0.74, 0.15]),
        ("zb-h1", 1, true, [0.87, 0.16, 0.48, 0.15]),
        ("zb-v", 2, false, [0.95, 0.18, 0.94, 0.28]),
        ("zb-v", 2, true, [0.95, 0.18, 0.80, 0.28]),
        ("zeropp", 2, false, [0.94, 0.43, 0.97, 0.28]),
        ("interleaved-zb", 2, false, [0.93, 0.29, 0.77, 0.28]),
        ("1f1b", 1, false, [0.89, 0.16, 0.74, 0.15]),
        ("interleaved", 2, false, [0.94, 0.29, 0.77, 0.28]),
    ] {
        let [layers, whole] = both(schedule, v, zero1);
        let share = [
            step(&layers) / step(&whole),
            layers.reductions / whole.reductions,
            layers.replicas / whole.replicas,
            layers.gathers / whole.gathers,
        ];
        let s = |terms: &Terms| [step(terms), terms.reductions, terms.replicas, terms.gathers];
        let of_step = 100.0 * layers.reductions / step(&layers);
        println!(
            "{schedule} zero1 {zero1}: {:.3?} of {:.3?}: {share:.3?}; {of_step:.1} % reductions",
            s(&layers),
            s(&whole)
        );
        let within = share.iter().zip(most).all(|(share, most)| *share <= most);
        assert!(within, "{schedule} zero1 {zero1}: {share:.3?}");
    }
}

/// A bound, while a layer's reduction begins behind its last W: the first rank of ZB-H1 has one B
/// and its W left at its end, and a block's reduction takes longer than both.
#[test]
fn zb_h1_leaves_of_its_reductions_what_one_b_and_w_cannot_hide() {
    let (job, layout) = large("zb-h1", 1, false);
    let (stages, _) = Models::new(&job).stages(&job, &layout).unwrap();
    let simulation = Simulation::new(&job, &layout, &stages).unwrap();
    let program = &simulation.programs[0].ranks[0];
    let run = (0..program.len()).find_map(|at| LayerRun::at(program, at)).unwrap();
    assert_eq!((run.stage, run.backward), (0, true));
    let (costs, last) = (stages[0].costs, stages[0].layers.len() - 1);
    let both = costs.b_ns + costs.w_ns;
    let first = simulation.costs.w_of_layer(0, last, both);
    let left = (costs.reduce_scatter_ns + first - both) as f64 / 1e9;
    let [reductions, both] = [costs.reduce_scatter_ns, both].map(|ns| ns as f64 / 1e9);
    let found = simulation.terms().reductions;
    println!("{found:.4} s of {reductions:.4} s beside {both:.4} s; the bound is {left:.4} s");
    assert!((found - left).abs() < 0.02 * left, "{found} s, and {left} s cannot be hidden");
}
