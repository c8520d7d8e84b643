//! How ZeroPP cuts a step into units: what a size costs in idle slots, and which one to take where
//! none is given.
//!
//! A slot is the time of one F, B or W, all three alike. Only P, V, B and U enter, never times or a
//! machine: the cut is part of what a run computes, because gradients are reduced once a unit.

use super::Shape;

/// Idle slots of a rank, between its first and last action, in a unit of `size` micro-batches: none
/// from 2P − 1 on.
pub fn idle_slots(pp: usize, virtual_stages: usize, size: usize) -> usize {
    let short_of = |n: usize, of: usize| of.saturating_sub(n);
    let twice = size.saturating_mul(2);
    let last_stage = short_of(size, pp.saturating_mul(2).saturating_sub(1));
    if virtual_stages < 2 {
        return last_stage;
    }
    last_stage
        .saturating_add((virtual_stages - 1).saturating_mul(short_of(size, pp)))
        .saturating_add(short_of(twice, pp.saturating_add(1)))
        .saturating_add((virtual_stages - 2).saturating_mul(short_of(twice, pp)))
}

/// The size of unit that a step of `micro_batches` is cut into where none is given: of all sizes
/// from P to one and a half times 2P − 1, the one with the fewest idle slots in the step; of those
/// the one whose last unit is least short, and then the smallest, which holds least.
///
/// A step that is not larger than that is one unit.
pub fn default_unit(pp: usize, virtual_stages: usize, micro_batches: usize) -> usize {
    // Beyond this nothing runs; the search stays short whatever is asked for.
    let pp = pp.clamp(1, 1 << 16);
    let largest = 3 * pp - 2;
    if micro_batches <= largest {
        return micro_batches.max(1);
    }
    let cost = |unit: usize| {
        let step = Step { pp, virtual_stages, micro_batches, unit };
        (step.idle(), unit - step.last_unit(), unit)
    };
    (pp..=largest).min_by_key(|unit| cost(*unit)).expect("P is at most 3P - 2")
}

/// One step of a rank.
#[derive(Clone, Copy)]
struct Step {
    pp: usize,
    virtual_stages: usize,
    micro_batches: usize,
    unit: usize,
}

impl Step {
    /// Micro-batches of the last unit.
    fn last_unit(&self) -> usize {
        match self.micro_batches % self.unit {
            0 => self.unit,
            rest => rest,
        }
    }

    /// Idle slots of a rank.
    fn idle(&self) -> usize {
        let full = (self.micro_batches - 1) / self.unit;
        let of = |size| idle_slots(self.pp, self.virtual_stages, size);
        full.saturating_mul(of(self.unit)).saturating_add(of(self.last_unit()))
    }

    /// Idle slots of all slots, in per cent.
    fn idle_percent(&self) -> f64 {
        let work = 3.0 * self.virtual_stages as f64 * self.micro_batches as f64;
        let idle = self.idle() as f64;
        100.0 * idle / (work + idle)
    }
}

/// What the cut of `shape` into units costs where another one would cost less, in a sentence: a
/// last unit that is short, a size below 2P − 1.
pub fn unit_note(shape: &Shape) -> Option<String> {
    let Shape { pp, virtual_stages, micro_batches, unit } = *shape;
    let of = |unit: usize| Step { pp, virtual_stages, micro_batches, unit };
    let (here, most) = (of(unit.min(micro_batches)), micro_batches);
    // For each number of units the smallest size that makes it.
    let sizes = (1..=most).map(|count| most.div_ceil(count));
    let best = sizes.min_by_key(|unit| (of(*unit).idle(), *unit)).map(of)?;
    if best.idle() >= here.idle() {
        return None;
    }
    let short = match here.last_unit() {
        last if last < here.unit => {
            format!("the last unit has {last} of {} micro-batches, and ", here.unit)
        }
        _ => String::new(),
    };
    Some(format!(
        "unit = {}: {short}a rank idles {:.1} % of a step where F, B and W take as long; unit = {} \
         would idle {:.1} %, with the activations of {} micro-batches in place of {}",
        here.unit,
        here.idle_percent(),
        best.unit,
        best.idle_percent(),
        best.unit,
        here.unit,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedules::{OrderCosts, generate, timing::time};

    fn simulated(shape: &Shape) -> u64 {
        let schedule = generate("zeropp", shape).unwrap();
        let costs = OrderCosts::uniform(shape.stages(), 1, 1, 1, 0);
        let m = schedule.micro_batches();
        let t = time(&schedule.ranks, &schedule.placement, m, &costs).ok().unwrap();
        (0..shape.pp).map(|r| t.ends[r] - t.starts[r] - t.busy[r]).max().unwrap()
    }

    fn step([pp, virtual_stages, micro_batches, unit]: [usize; 4]) -> Step {
        Step { pp, virtual_stages, micro_batches, unit }
    }

    #[test]
    fn the_closed_form_is_what_a_simulation_idles() {
        for pp in 1..=5 {
            for virtual_stages in 1..=4 {
                for micro_batches in 1..=20 {
                    for unit in 1..=micro_batches {
                        let shape = Shape { pp, virtual_stages, micro_batches, unit };
                        let form = step([pp, virtual_stages, micro_batches, unit]).idle() as u64;
                        assert_eq!(simulated(&shape), form, "{shape:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn steps_are_cut_evenly_near_the_size_without_a_bubble() {
        for (pp, v, micro_batches, unit) in [
            (4, 2, 8, 8),   // Not 7 + 1.
            (4, 2, 10, 10), // Not 5 + 5.
            (4, 2, 11, 6),  // 6 + 5.
            (4, 2, 12, 6),
            (4, 2, 13, 7),
            (4, 2, 14, 7),
            (4, 2, 16, 8),
            (4, 1, 22, 8),
            (4, 2, 3, 3),
            (2, 2, 4, 4),
            (2, 2, 6, 3),
            (8, 2, 30, 15),
            (8, 2, 32, 16),
            (1, 2, 2, 1),
        ] {
            assert_eq!(default_unit(pp, v, micro_batches), unit, "P {pp} V {v} B {micro_batches}");
        }
    }

    #[test]
    fn no_default_idles_more_than_2p_1_would_or_is_far_from_it() {
        for pp in 1..=9 {
            for v in 1..=3 {
                for micro_batches in 1..=100 {
                    let unit = default_unit(pp, v, micro_batches);
                    assert!((1..=3 * pp - 2).contains(&unit) && unit <= micro_batches);
                    let by_paper = step([pp, v, micro_batches, (2 * pp - 1).min(micro_batches)]);
                    let ours = step([pp, v, micro_batches, unit]);
                    assert!(ours.idle() <= by_paper.idle(), "P {pp} V {v} B {micro_batches}");
                }
            }
        }
        for absurd in [usize::MAX, 1 << 40] {
            assert!(default_unit(absurd, absurd, 1 << 20) > 0);
            assert!(idle_slots(absurd, absurd, 3) > 0);
        }
    }

    #[test]
    fn a_better_unit_is_suggested() {
        let note = |[pp, virtual_stages, micro_batches, unit]: [usize; 4]| {
            unit_note(&Shape { pp, virtual_stages, micro_batches, unit })
        };
        let said = note([4, 2, 8, 7]).unwrap();
        assert!(said.starts_with("unit = 7: the last unit has 1 of 7 micro-batches"), "{said}");
        assert!(said.contains("unit = 8 would idle 0.0 %"), "{said}");
        let said = note([4, 2, 8, 4]).unwrap();
        assert!(said.starts_with("unit = 4: a rank idles"), "{said}");
        // A default that a larger one would beat.
        assert_eq!(default_unit(4, 2, 12), 6);
        let said = note([4, 2, 12, 6]).unwrap();
        assert!(said.contains("unit = 12 would idle 0.0 %"), "{said}");
        for none in [[4, 2, 8, 8], [4, 2, 14, 7], [4, 2, 15, 8], [1, 1, 9, 1], [4, 2, 3, 9]] {
            assert_eq!(note(none), None, "{none:?}");
        }
    }
}
