//! Changes are timed as whole plans are.

use super::decode::OrderTimes;
use super::moves::{Changed, change};
use super::pattern::{Pattern, list};
use super::problem::Problem;
use super::random::Random;
use super::residency::ResidencyCounter;
use super::sequence::RankOrders;
use super::{Budgets, Objective};
use zeropp_schedule::ir::{looping, vee};
use zeropp_schedule::schedules::{OrderCosts, Shape};

/// A problem and a plan that runs, drawn at random.
pub(super) fn drawn(random: &mut Random) -> Option<(Problem, RankOrders)> {
    let (pp, v) = (1 + random.below(4), 1 + random.below(4));
    let b = 1 + random.below(3 * pp);
    let shape = Shape { pp, virtual_stages: v, micro_batches: b, unit: 1 + random.below(b) };
    let mut costs = OrderCosts::uniform(pp * v, 20, 20, 10, random.below(4) as u64);
    if random.once_in(2) {
        for s in 0..pp * v {
            costs.f[s] = 1 + random.below(30) as u64;
            costs.b[s] = 1 + random.below(30) as u64;
            costs.w[s] = random.below(30) as u64;
        }
    }
    let mut budgets = Budgets::default();
    if random.once_in(2) {
        costs.gather = (0..pp * v).map(|_| random.below(40) as u64).collect();
        costs.reduce = (0..pp * v).map(|_| random.below(40) as u64).collect();
        budgets.gradients = random.once_in(2).then(|| 1 + random.below(v));
    }
    let costs = costs.with_limit((2 * v * (1 + random.below(2 * pp))) as i64);
    budgets.gathered = random.once_in(2).then(|| 1 + random.below(v) as u64);
    let objective = if random.once_in(2) { Objective::Makespan } else { Objective::OwnSpan };
    let placement = if random.once_in(2) { looping(pp, v) } else { vee(pp, v) };
    let p = Problem::new(&shape, &costs, &budgets, placement, objective);
    let window = p.window();
    let pattern = Pattern::random(&p, window, random);
    let order = pattern.order(&p, window);
    let (sequences, _) = list(&p, &order, i64::MAX, &mut 0)?;
    let plan = RankOrders::new(&p, sequences, order.threshold)?;
    OrderTimes::new(&p).load(&p, &plan, &mut ResidencyCounter::default())?;
    Some((p, plan))
}

#[test]
fn changes_are_timed_as_whole_plans_are() {
    let mut random = Random::new(3);
    let mut residency = ResidencyCounter::default();
    let (mut taken, mut refused, mut timed, mut hasty) = (0, 0, 0, 0);
    for _ in 0..120 {
        let Some((p, mut plan)) = drawn(&mut random) else { continue };
        timed += usize::from(p.timed);
        let mut decoder = OrderTimes::new(&p);
        let mut score = decoder.load(&p, &plan, &mut residency).unwrap();
        let mut changed = Changed::new();
        for _ in 0..100 {
            let before = plan.clone();
            if !change(&p, &mut plan, &decoder, &mut random, &mut changed) {
                plan = before;
                continue;
            }
            let allowed = score + score / 10;
            let mut fresh = OrderTimes::new(&p);
            let whole = fresh.load(&p, &plan, &mut residency).filter(|s| *s <= allowed);
            decoder.patient = random.once_in(2);
            let found = decoder.attempt(&p, &plan, &changed, allowed, &mut residency);
            if decoder.patient || found.is_some() {
                assert_eq!(found, whole, "{:?} {changed:?} {before:?}", p.placement);
            } else {
                hasty += usize::from(whole.is_some());
            }
            match found {
                Some(new) if random.once_in(2) => {
                    taken += 1;
                    score = new;
                    decoder.accept(&p, &plan);
                    assert_eq!(decoder.spans(), fresh.spans());
                }
                _ => {
                    refused += 1;
                    plan = before;
                    decoder.reject();
                }
            }
        }
    }
    assert!(taken > 500 && refused > 500 && timed > 20, "{taken} {refused} {timed}");
    assert!(hasty < taken / 10, "{hasty} of {taken} given up too early");
}
