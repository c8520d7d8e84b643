//! Random schedules for the tests: complete, and in an order that no verifier would pass.

use proptest::prelude::*;

use crate::{
    draw::samples::any_action,
    ir::{Action, Compute, Schedule},
};

/// Every stage with its F, B, W (or BW) of every micro-batch on its rank, shuffled among any other
/// actions; `compute_only` leaves the others out.
pub(super) fn any_schedule(compute_only: bool) -> impl Strategy<Value = Schedule> {
    (1usize..5, 1usize..4, 1usize..7).prop_flat_map(move |(pp, v, micro_batches)| {
        let stages = pp * v;
        let extras = if compute_only { 0..1 } else { 0..40 };
        (
            Just((0..stages).map(|s| s % pp).collect::<Vec<_>>()).prop_shuffle(),
            units(micro_batches),
            any::<bool>(),
            prop::collection::vec((0..pp, any_action(stages, micro_batches)), extras),
            any::<u64>(),
        )
            .prop_map(move |(placement, units, split, extras, seed)| {
                let mut ranks = vec![Vec::new(); pp];
                for (stage, rank) in placement.iter().enumerate() {
                    for i in 0..micro_batches {
                        let kinds: &[Compute] = if split {
                            &[Compute::F, Compute::B, Compute::W]
                        } else {
                            &[Compute::F, Compute::BW]
                        };
                        ranks[*rank].extend(kinds.iter().map(|k| Action::compute(*k, stage, i)));
                    }
                }
                for (rank, action) in extras {
                    if action.computes().all(|t| placement[t.stage] == rank) {
                        ranks[rank].push(action);
                    }
                }
                ranks.iter_mut().for_each(|rank| shuffle(rank, seed));
                Schedule { kind: "file".into(), placement, units, ranks, ..Schedule::default() }
            })
    })
}

/// Any way to cut the micro-batches into units.
fn units(micro_batches: usize) -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(any::<bool>(), micro_batches - 1).prop_map(|cuts| {
        let mut units = vec![1];
        for cut in cuts {
            if cut {
                units.push(1);
            } else {
                *units.last_mut().expect("never empty") += 1;
            }
        }
        units
    })
}

fn shuffle<T>(list: &mut [T], seed: u64) {
    let mut state = seed | 1;
    for i in (1..list.len()).rev() {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        list.swap(i, (state >> 33) as usize % (i + 1));
    }
}
