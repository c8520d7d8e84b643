//! A kind that may hold as much as another is not slower, in what the run will pay.

use super::closed_forms::{complete, config, timed};
use super::*;
use proptest::prelude::*;

/// Stages of a rank, and kinds of which each may hold what those before it do.
const FAMILIES: [(usize, &[&str]); 2] =
    [(1, &["zb-h1", "zb-1p", "zb-h2", "zb-2p"]), (2, &["v-min", "v-half", "zb-v"])];

/// Times of up to 16 stages, each with half of what its forward keeps.
fn costs(stages: usize, each: &[(u64, u64, u64, i64)], send: u64, alike: bool) -> OrderCosts {
    let mut costs = OrderCosts::uniform(stages, 1, 1, 1, send);
    for s in 0..stages {
        let (f, b, w, half) = each[if alike { 0 } else { s }];
        (costs.f[s], costs.b[s], costs.w[s]) = (f, b, w);
        (costs.mem_f[s], costs.mem_b[s], costs.mem_w[s]) = (2 * half, -half, -half);
    }
    costs
}

proptest! {
    #![proptest_config(config(300))]

    #[test]
    fn a_kind_that_weighs_orders_is_not_slower_than_one_of_no_more_memory(
        pp in 1usize..9, micro_batches in 1usize..20, send in 0u64..30, alike in any::<bool>(),
        each in proptest::collection::vec((1u64..30, 1u64..30, 1u64..30, 1i64..4), 16),
    ) {
        for (v, family) in FAMILIES {
            let shape = Shape { pp, virtual_stages: v, micro_batches, unit: micro_batches };
            for objective in [Objective::Makespan, Objective::OwnSpan] {
                let costs = costs(shape.stages(), &each, send, alike).with_objective(objective);
                let made = |kind: &str| {
                    let schedule = generate_with_costs(kind, &shape, &costs).unwrap();
                    complete(&schedule);
                    timed(&schedule, &costs)
                };
                let all: Vec<_> = family.iter().map(|kind| (*kind, made(kind))).collect();
                let weighs = |kind: &str| Kind::find(kind).is_some_and(|kind| kind.obeys_limit);
                for (at, (kind, own)) in all.iter().enumerate().filter(|(_, a)| weighs(a.0)) {
                    for (less, other) in all[..at].iter().filter(|a| a.1.peak() <= own.peak()) {
                        let [own, other] = [own, other].map(|timing| timing.rank(objective).0);
                        prop_assert!(
                            own <= other,
                            "{kind} {own} and {less} {other}: {objective:?} of {shape:?}"
                        );
                    }
                }
            }
        }
    }

    /// The step that ends in a barrier is not longer for being made for one.
    #[test]
    fn an_order_for_a_barrier_ends_no_later_than_one_for_late_updates(
        pp in 1usize..9, micro_batches in 1usize..20, send in 0u64..30, alike in any::<bool>(),
        each in proptest::collection::vec((1u64..30, 1u64..30, 1u64..30, 1i64..4), 16),
    ) {
        for (v, family) in FAMILIES {
            let shape = Shape { pp, virtual_stages: v, micro_batches, unit: micro_batches };
            for kind in family {
                let costs = costs(shape.stages(), &each, send, alike);
                let of = |objective| {
                    let costs = costs.clone().with_objective(objective);
                    timed(&generate_with_costs(kind, &shape, &costs).unwrap(), &costs)
                };
                let (barrier, late) = (of(Objective::Makespan), of(Objective::OwnSpan));
                prop_assert!(barrier.makespan <= late.makespan, "{} of {:?}", kind, shape);
                prop_assert!(late.own_span() <= barrier.own_span(), "{} of {:?}", kind, shape);
            }
        }
    }
}
