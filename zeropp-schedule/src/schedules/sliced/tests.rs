use std::io::Write as _;

use super::*;
use crate::exchange::{csv, json};
use crate::lower::{LowerOptions, OptimizerSync, in_issue_order, lower};
use crate::memory::{HeadBytes, Ledger, MemoryBytes, StageBytes};
use crate::schedules::{
    KINDS, forwards_of, generate, generate_cut, generate_sliced, generate_split,
};
use crate::simulate::{self, simulate};
use crate::verify::{VerifyLimits, verify, verify_issue_order};

/// A stream of numbers that a printed seed gives again.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) % n as u64) as usize
    }

    /// Blocks of each rank: any, with none on some ranks, up to all that there may be.
    fn slices(&mut self, pp: usize) -> Vec<usize> {
        loop {
            let most = 1 + self.below(BLOCKS_MAX / pp);
            let one = |numbers: &mut Numbers| match numbers.below(4) {
                0 => 0,
                _ => numbers.below(most + 1),
            };
            let slices: Vec<usize> = (0..pp).map(|_| one(self)).collect();
            if slices.iter().sum::<usize>() > 0 {
                return slices;
            }
        }
    }
}

/// Sizes of everything that a stage, or a slice, has.
fn sizes(cells: usize) -> Vec<StageBytes> {
    let stage = StageBytes {
        input: 2,
        activation: 7,
        stash: 5,
        weights: 11,
        gradient: 13,
        gradient_shard: 3,
        message: 2,
        head: HeadBytes { input: 2, sums: 1, lse: 1, gradient: 4 },
        ..StageBytes::default()
    };
    vec![stage; cells]
}

/// Everything that holds for the order of a split head, whatever its slices.
fn check_all(compact: &Schedule) {
    verify(compact, &VerifyLimits::default()).unwrap();
    let cells = compact.cost_entries();
    let costs =
        simulate::Costs { memory: sizes(cells), ..simulate::Costs::uniform(cells, 5, 6, 4, 1) };
    simulate(compact, &costs).unwrap();
    for (recompute, replicas) in [(false, false), (true, true)] {
        for sync in [OptimizerSync::Barrier, OptimizerSync::Late] {
            let options = LowerOptions { recompute, replicas, sync, ..LowerOptions::default() };
            let program = lower(compact, &options);
            let limits = VerifyLimits { gathered_max: Some(2), ..VerifyLimits::default() };
            verify(&program, &limits).unwrap();
            assert_eq!(lower(&program, &options), program, "lowering twice is lowering once");
            let ordered = in_issue_order(&program);
            verify(&ordered, &VerifyLimits::default()).unwrap();
            verify_issue_order(&ordered).unwrap();
            simulate(&program, &costs).unwrap();
            read_back(&program);
            for (rank, actions) in program.ranks.iter().enumerate() {
                let mut ledger = Ledger::of(&program, rank, &costs.memory);
                actions.iter().for_each(|action| ledger.run(action));
                assert_eq!(ledger.now(), MemoryBytes::default(), "rank {rank} holds nothing");
            }
        }
    }
    let forwards = forwards_of(compact);
    let limits = VerifyLimits { forward_only: true, ..VerifyLimits::default() };
    verify(&forwards, &limits).unwrap();
    let program = lower(&forwards, &LowerOptions::default());
    verify(&program, &limits).unwrap();
    verify_issue_order(&in_issue_order(&program)).unwrap();
    simulate(&program, &costs).unwrap();
}

fn read_back(program: &Schedule) {
    let mut text = Vec::new();
    csv::write(program, csv::Dialect::Zeropp, &mut text).unwrap();
    let back = csv::read(std::str::from_utf8(&text).unwrap()).unwrap();
    assert_eq!(back, Schedule { kind: "file".into(), ..program.clone() });
    let mut text = Vec::new();
    let document = json::Document { schedule: program.clone(), costs: None, measures: None };
    json::write(&document, &mut text).unwrap();
    assert_eq!(json::read(std::str::from_utf8(&text).unwrap()).unwrap(), document);
    text.flush().unwrap();
}

/// All kinds that have orders for it, all shapes of up to 6 ranks, 3 stages a rank and 12
/// micro-batches, with slices of any sizes.
#[test]
fn every_split_head_is_verified_lowered_simulated_and_read_back() {
    let seed = std::env::var("SPLIT_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(31);
    println!("SPLIT_SEED={seed}");
    let mut numbers = Numbers(seed);
    for kind in KINDS.iter().filter(|kind| kind.ahead.is_some()) {
        for pp in 1..=6 {
            for virtual_stages in 1..=3 {
                for micro_batches in 1..=12 {
                    let unit = 1 + numbers.below(micro_batches);
                    let shape = Shape { pp, virtual_stages, micro_batches, unit };
                    let slices = numbers.slices(pp);
                    println!("{} {shape:?} {slices:?}", kind.name);
                    match generate_split(kind.name, &shape, &slices, None) {
                        Ok(compact) => check_all(&compact),
                        Err(e) => assert_eq!(generate(kind.name, &shape), Err(e)),
                    }
                }
            }
        }
    }
}

/// The same of samples that are cut into slices.
#[test]
fn every_split_head_of_samples_in_slices_is_verified_lowered_simulated_and_read_back() {
    let seed = std::env::var("SPLIT_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(96);
    println!("SPLIT_SEED={seed}");
    let mut numbers = Numbers(seed);
    for kind in KINDS.iter().filter(|kind| kind.in_slices.is_some()) {
        for pp in 1..=5 {
            for virtual_stages in 1..=3 {
                for micro_batches in 1..=4 {
                    let unit = 1 + numbers.below(micro_batches);
                    let shape = Shape { pp, virtual_stages, micro_batches, unit };
                    let (slices, n) = (numbers.slices(pp), 2 + numbers.below(5));
                    let cut: Vec<u64> =
                        (0..n).map(|_| 256 * (1 + numbers.below(3)) as u64).collect();
                    println!("{} {shape:?} {slices:?} {cut:?}", kind.name);
                    match generate_cut(kind.name, &shape, &cut, &slices, None) {
                        Ok(compact) => check_all(&compact),
                        Err(e) => assert_eq!(generate_sliced(kind.name, &shape, &cut), Err(e)),
                    }
                }
            }
        }
    }
}

#[test]
fn a_slice_has_at_most_three_micro_batches_between_f_and_w() {
    let shape = Shape { pp: 4, virtual_stages: 2, micro_batches: 14, unit: 7 };
    let made = generate_split("zeropp", &shape, &[16; 4], None).unwrap();
    for actions in &made.ranks {
        let mut pending = 0;
        for task in actions.iter().flat_map(Action::computes).filter(|t| t.stage == 8) {
            match task.kind {
                Compute::F => pending += 1,
                Compute::W => pending -= 1,
                _ => {}
            }
            assert!((0..=PENDING_MAX as i32).contains(&pending));
        }
    }
}

#[test]
fn a_kind_without_such_an_order_names_those_that_have_one() {
    let shape = Shape { pp: 2, virtual_stages: 2, micro_batches: 4, unit: 4 };
    let error = |kind: &str, slices: &[usize]| {
        generate_split(kind, &shape, slices, None).unwrap_err().to_string()
    };
    assert_eq!(
        error("zb-v", &[8, 8]),
        "schedule zb-v: its head is always whole; split heads are for zeropp, 1f1b and zb-h1"
    );
    assert_eq!(
        error("zeropp", &[8, 8, 8]),
        "schedule zeropp: head-split = 24 does not work; give a number for each rank, 1 to 64 in \
         all"
    );
    assert!(error("1f1b", &[8, 8]).contains("virtual"));
}

/// Without slices nothing is different.
#[test]
fn no_slices_are_a_whole_head() {
    let shape = Shape { pp: 2, virtual_stages: 2, micro_batches: 6, unit: 3 };
    assert_eq!(generate_split("zeropp", &shape, &[], None), generate("zeropp", &shape));
}
