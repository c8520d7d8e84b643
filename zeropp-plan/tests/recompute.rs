//! Between all activations and the layers' inputs alone a plan finds what fits, at its price.

use zeropp_plan::bytes::RunState;
use zeropp_plan::layout::{ComputeSettings, Fixed, Job, Recompute};
use zeropp_plan::machines;
use zeropp_plan::model::ModelSizes;
use zeropp_plan::plan::{LayoutPlan, Ranked};

/// 14.6b on 32 A800s in the paper's layout, within so many GiB.
fn paper(gib: f64, recompute: Option<Recompute>) -> Ranked {
    let machine = machines::named("a800").unwrap();
    let fixed = Fixed {
        pp: Some(4),
        zero3: Some(8),
        virtual_stages: Some(12),
        unit: Some(8),
        micro_batch_size: Some(1),
        schedule: Some("zeropp".into()),
        recompute,
        ..Fixed::default()
    };
    let job = Job {
        model: ModelSizes::of_a_paper("14.6b").unwrap(),
        memory: (gib * (1u64 << 30) as f64) as u64,
        machine,
        gpus: 32,
        global_batch: 192,
        compute: ComputeSettings::GPU,
        state: RunState::uniform(2),
        fixed,
    };
    LayoutPlan::new(&job, "").unwrap().layouts.swap_remove(0)
}

#[test]
fn less_memory_costs_as_little_time_as_the_cheapest_recomputation_that_fits() {
    let none = paper(60.0, None).planned;
    assert_eq!(none.layout.recompute, Recompute::None, "where memory does not bind");
    for (gib, recompute, most) in
        [(22.0, Recompute::Selective, 1.03), (20.0, Recompute::Full, 1.09)]
    {
        let within = paper(gib, None);
        let (layout, ratio) = (&within.planned.layout, within.planned.step_s / none.step_s);
        println!("{gib} GiB: {layout}, {ratio:.4}, {:?}", within.planned.worst().1.total());
        assert_eq!(layout.recompute, recompute, "{layout}");
        assert!(ratio > 1.0 && ratio <= most, "{gib} GiB: {layout} takes {ratio} times as long");
    }
    let part = paper(20.0, None).planned.layout.redone;
    assert!(part.is_some_and(|first| first < 8), "{part:?}");
}

#[test]
fn recomputed_work_has_a_row_of_its_own() {
    let terms = paper(22.0, Some(Recompute::Selective)).terms;
    assert!(terms.selective > 0.0 && terms.recompute == 0.0, "{terms:?}");
    assert!(terms.selective < 0.03 * terms.compute, "{terms:?}");
    let none = paper(60.0, Some(Recompute::None)).terms;
    assert_eq!((none.selective, none.recompute), (0.0, 0.0));
    let apart = (none.compute / terms.compute - 1.0).abs();
    assert!(apart < 1e-3, "the rest of a step is the same: {apart}");
}
