//! The registry with costs: kinds that weigh one order against another made for given times.

use super::{Costs, KINDS, Schedule, ScheduleError, Shape, generate};
use super::{v_half, v_min, zb, zb_v, zeropp_auto};

/// Like [`generate`], with `zb-1p`, `zb-2p`, `zb-v`, `v-half`, `v-min` and `zeropp-auto` made for
/// `costs`; the other kinds have one order whatever it costs. Without a memory limit in `costs`,
/// `zb-1p` and `zb-2p` take the ones they are named after: P and 2P micro-batches of the stage that
/// holds most.
///
/// # Errors
/// As [`generate`]; also costs that do not fit the shape, and a memory limit that is too small.
pub fn generate_with_costs(
    kind: &str,
    shape: &Shape,
    costs: &Costs,
) -> Result<Schedule, ScheduleError> {
    if let Some(found) = KINDS.iter().find(|k| k.name == kind) {
        shape.check(found.name)?;
    }
    let within = |micro_batches: usize| {
        let most = costs.mem_f.iter().max().copied().unwrap_or(0);
        let limit = costs.mem_limit.unwrap_or(most.saturating_mul(micro_batches as i64));
        costs.clone().with_limit(limit)
    };
    match kind {
        "zb-1p" => zb("zb-1p", shape, &within(shape.pp)),
        "zb-2p" => zb("zb-2p", shape, &within(2 * shape.pp)),
        "zb-v" => zb_v(shape, costs),
        "v-half" => v_half(shape, costs),
        "v-min" => v_min(shape, costs),
        "zeropp-auto" => zeropp_auto(shape, costs),
        _ => generate(kind, shape),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unit_costs_give_the_registry_s_own_orders() {
        for kind in KINDS {
            for v in [1, 2] {
                let shape = Shape { pp: 4, virtual_stages: v, micro_batches: 8, unit: 8 };
                let costs = Costs::uniform(shape.stages(), 1, 1, 1, 0);
                match generate(kind.name, &shape) {
                    // ZB-V's own entry is the order by hand.
                    Ok(own) if kind.name != "zb-v" => {
                        assert_eq!(generate_with_costs(kind.name, &shape, &costs), Ok(own));
                    }
                    Ok(own) => {
                        let made = generate_with_costs(kind.name, &shape, &costs).unwrap();
                        assert_eq!(made.placement, own.placement);
                    }
                    Err(e) => assert_eq!(generate_with_costs(kind.name, &shape, &costs), Err(e)),
                }
            }
        }
    }

    #[test]
    fn costs_change_what_weighs_them() {
        let shape = Shape { pp: 4, virtual_stages: 1, micro_batches: 12, unit: 12 };
        let even = generate("zb-2p", &shape).unwrap();
        let uneven = generate_with_costs("zb-2p", &shape, &Costs::uniform(4, 5, 9, 2, 1)).unwrap();
        assert_ne!(even.ranks, uneven.ranks);
        let error =
            generate_with_costs("zb-1p", &shape, &Costs::uniform(3, 1, 1, 1, 0)).unwrap_err();
        assert!(error.to_string().contains("costs"), "{error}");
    }
}
