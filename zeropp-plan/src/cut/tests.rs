use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;

/// Every stage takes the same for the same groups.
fn balance(times: &[u64], stages: usize, limit: Option<&StageLimits>) -> Option<Vec<usize>> {
    let units = IntTimes { kept: times.to_vec(), recomputed: times.to_vec(), recomputing: 0 };
    super::balance(&units, stages, limit)
}

fn in_units(times: &[f64]) -> Vec<u64> {
    let same = times.to_vec();
    IntTimes::of(&GroupTimes { kept: same.clone(), recomputed: same, recomputing: 0, tail: 0.0 })
        .kept
}

fn largest(values: &[u64], cuts: &[usize]) -> u64 {
    cuts.windows(2).map(|w| values[w[0]..w[1]].iter().sum()).max().unwrap()
}

/// The smallest possible time of the longest stage, of all cuts whose stages keep the limits.
fn optimum(times: &[u64], bytes: &[u64], limits: &[u64]) -> Option<u64> {
    let n = times.len();
    let mut best: Vec<Option<u64>> = vec![None; n + 1];
    best[0] = Some(0);
    for limit in limits {
        let longest = |from: usize, to: usize| -> Option<u64> {
            let fits = bytes[from..to].iter().sum::<u64>() <= *limit;
            fits.then_some(best[from]?.max(times[from..to].iter().sum()))
        };
        let to = |to: usize| (0..to).filter_map(|from| longest(from, to)).min();
        best = (0..=n).map(to).collect();
    }
    best[n]
}

proptest! {
    /// No cut is better than the one that is found, and one is found where there is one.
    #[test]
    fn no_cut_is_better(
        groups in prop::collection::vec((0u64..30, 1u64..20), 1..11),
        stages in 1usize..7,
        limit in prop::option::of(1u64..120),
    ) {
        prop_assume!(groups.len() >= stages);
        let (times, bytes): (Vec<u64>, Vec<u64>) = groups.into_iter().unzip();
        let limits = vec![limit.unwrap_or(u64::MAX); stages];
        let want = optimum(&times, &bytes, &limits);
        let limits = limit.map(|_| StageLimits::new(&bytes, limits));
        let cuts = balance(&times, stages, limits.as_ref());
        prop_assert_eq!(cuts.as_ref().map(|cuts| largest(&times, cuts)), want);
        if let Some(cuts) = cuts {
            prop_assert_eq!((cuts[0], cuts[stages]), (0, times.len()));
            prop_assert!(cuts.is_sorted_by(|a, b| a < b), "{:?}", cuts);
            prop_assert!(limit.is_none_or(|limit| largest(&bytes, &cuts) <= limit));
        }
    }

    /// Limits that differ between stages are kept, and a cut without a limit is not better.
    #[test]
    fn every_stage_keeps_its_own_limit(
        groups in prop::collection::vec((1u64..30, 1u64..20), 4..11),
        limits in prop::collection::vec(10u64..120, 1..5),
    ) {
        let (times, bytes): (Vec<u64>, Vec<u64>) = groups.into_iter().unzip();
        let want = optimum(&times, &bytes, &limits);
        let asked = StageLimits::new(&bytes, limits.clone());
        if let Some(cuts) = balance(&times, limits.len(), Some(&asked)) {
            for (w, limit) in cuts.windows(2).zip(&limits) {
                prop_assert!(bytes[w[0]..w[1]].iter().sum::<u64>() <= *limit);
            }
            prop_assert!(want.is_some_and(|want| want <= largest(&times, &cuts)));
        }
    }

    /// R counts in the stages that are recomputed, and in no other.
    #[test]
    fn no_cut_is_better_where_some_stages_are_recomputed(
        groups in prop::collection::vec((0u64..30, 0u64..20), 1..11),
        stages in 1usize..7,
        recomputing in 0usize..7,
    ) {
        prop_assume!(groups.len() >= stages);
        let kept: Vec<u64> = groups.iter().map(|(time, _)| *time).collect();
        let recomputed: Vec<u64> = groups.iter().map(|(time, r)| time + r).collect();
        let of_stage = |stage: usize, from: usize, to: usize| -> u64 {
            let times = if stage < recomputing { &recomputed } else { &kept };
            times[from..to].iter().sum()
        };
        // The smallest longest stage of all cuts of the first groups into so many stages.
        let mut want = vec![None; groups.len() + 1];
        want[0] = Some(0);
        for stage in 0..stages {
            let to = |to: usize| {
                let longest = |from: usize| Some(of_stage(stage, from, to).max(want[from]?));
                (0..to).filter_map(longest).min()
            };
            want = (0..=groups.len()).map(to).collect();
        }
        let units = IntTimes { kept: kept.clone(), recomputed: recomputed.clone(), recomputing };
        let cuts = super::balance(&units, stages, None).unwrap();
        let longest = cuts.windows(2).enumerate().map(|(s, w)| of_stage(s, w[0], w[1])).max();
        prop_assert_eq!(longest, want[groups.len()]);
        prop_assert!(cuts.is_sorted_by(|a, b| a < b), "{:?}", cuts);
    }

    #[test]
    fn equal_blocks_are_shared_evenly(n in 1usize..200, stages in 1usize..50) {
        prop_assume!(n >= stages);
        let cuts = balance(&vec![7; n], stages, None).unwrap();
        let sizes: Vec<usize> = cuts.windows(2).map(|w| w[1] - w[0]).collect();
        prop_assert!(sizes.iter().max().unwrap() - sizes.iter().min().unwrap() <= 1, "{sizes:?}");
    }
}

#[test]
fn a_heavy_end_gets_fewer_neighbours() {
    assert_eq!(balance(&[1, 1, 1, 3], 2, None), Some(vec![0, 3, 4]));
    // The last block is as long as all that a stage may take, and the others are about even.
    assert_eq!(balance(&[2, 2, 2, 2, 2, 2, 2, 9], 4, None), Some(vec![0, 2, 5, 7, 8]));
    assert_eq!(balance(&[1; 7], 3, None).map(|cuts| largest(&[1; 7], &cuts)), Some(3));
}

/// A limit is met by giving blocks to stages that have room, though that takes longer.
#[test]
fn a_stage_that_holds_too_much_gives_blocks_away() {
    let (times, bytes) = ([1; 8], [9, 1, 1, 1, 1, 1, 1, 1]);
    assert_eq!(balance(&times, 2, None), Some(vec![0, 4, 8]));
    let limits = |most| StageLimits::new(&bytes, vec![most; 2]);
    assert_eq!(balance(&times, 2, Some(&limits(10))), Some(vec![0, 2, 8]));
    assert_eq!(balance(&times, 2, Some(&limits(8))), None);
}

#[test]
fn times_that_are_no_numbers_end_nothing() {
    for times in [[0.0; 4], [f64::NAN; 4], [f64::INFINITY, 1.0, 1.0, 1.0], [-1.0, 1.0, 1.0, 1.0]] {
        let cuts = balance(&in_units(&times), 4, None);
        assert_eq!(cuts, Some(vec![0, 1, 2, 3, 4]), "{times:?}");
    }
    let third = in_units(&[1.0 / 3.0, 1e-30, 1e300 * 0.0]);
    assert_eq!(third, [1 << 40, 0, 0]);
}

/// A cut of as many blocks as the settings allow: O(n + S log n) for each time that is tried.
#[test]
fn many_blocks_take_no_time() {
    let times: Vec<f64> = (0..16_384).map(|i| 1.0 + f64::from(i % 7) / 10.0).collect();
    let begin = Instant::now();
    for stages in [1, 1000, 8192, 16_384] {
        assert_eq!(balance(&in_units(&times), stages, None).unwrap().len(), stages + 1);
    }
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
}

fn groups(blocks: usize) -> BlockGroups {
    let begins = (0..=blocks).map(|g| if g == 0 { 0 } else { g + 2 }).collect();
    BlockGroups { begins, tail: None }
}

#[test]
fn a_cut_by_hand_is_taken_as_it_is_or_not_at_all() {
    let three = groups(14).by_hand(&[3, 4, 4, 3]).unwrap();
    assert_eq!(three, [0..5, 5..9, 9..13, 13..16]);
    for wrong in [&[3, 4, 4, 4][..], &[3, 0, 8, 3], &[], &[usize::MAX, 15]] {
        assert_eq!(groups(14).by_hand(wrong), None, "{wrong:?}");
    }
    let ones = vec![1.0; 3];
    let times = GroupTimes { kept: ones.clone(), recomputed: ones, recomputing: 0, tail: 0.0 };
    assert!(groups(3).balanced(&times, 4, None).is_err());
}
