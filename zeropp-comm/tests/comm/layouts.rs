//! The hybrid engine gives the threads engine's bits however ranks are spread over processes and
//! groups over ranks.

use burn::tensor::{DType, FloatDType};
use proptest::prelude::*;
use zeropp_comm::CommError;
use zeropp_comm::threads::{ThreadsOptions, ThreadsWorld};

use super::{Random, Rank, bits, impatient, mixed_world, on_communicators, tensor};

/// A world, and a way to cut it into groups.
#[derive(Clone, Debug)]
struct Case {
    processes: usize,
    each: usize,
    /// Color and key of each rank.
    split_requests: Vec<(usize, usize)>,
    /// Elements of one rank's part.
    part: usize,
    wide: bool,
    inline: bool,
    seed: u64,
}

fn cases() -> impl Strategy<Value = Case> {
    let part = prop_oneof![Just(0usize), 1usize..60, 1000usize..3000];
    (1usize..5, 1usize..5, part, any::<bool>(), any::<bool>(), any::<u64>()).prop_map(
        |(processes, each, part, wide, inline, seed)| {
            let mut numbers = Random(seed);
            let colors = numbers.below(3) + 1;
            let split_request = |_| (numbers.below(colors), numbers.below(4));
            let split_requests = (0..processes * each).map(split_request).collect();
            Case { processes, each, split_requests, part, wide, inline, seed }
        },
    )
}

/// The bits of every operation on a rank's sub-group, all under way at once, and its description of
/// the group.
fn operations(case: &Case, rank: Rank) -> Vec<Vec<u32>> {
    let (color, key) = case.split_requests[rank.rank()];
    let group = rank.split(&format!("group[{color}]"), color, key).unwrap();
    let (me, size) = (group.rank(), group.size());
    let mut numbers = Random(case.seed ^ ((rank.rank() as u64 + 1) << 32));
    let full = numbers.floats(case.part * size);
    let cast = |values: &[f32]| match case.wide {
        true => tensor(values.to_vec()),
        false => tensor(values.to_vec()).cast(FloatDType::BF16),
    };
    let kind = if case.wide { DType::F32 } else { DType::BF16 };
    let root = case.seed as usize % size;
    let (next, last) = ((me + 1) % size, (me + size - 1) % size);
    let uneven = &full[..full.len() - full.len().min(1)];
    let mail = group.recv(last, 7, case.part, kind);
    let gathered = group.all_gather(cast(&full[..case.part]));
    numbers.stall();
    let summed = group.all_reduce(cast(uneven));
    let scattered = group.reduce_scatter(cast(&full));
    numbers.stall();
    let everyone = rank.all_reduce(cast(&[1.5; 300]));
    let sent = group.broadcast(root, cast(&full));
    group.send(next, 7, cast(&full[..case.part])).wait().unwrap();
    let said = group.exchange(vec![rank.rank() as u8; me * 40]).wait().unwrap();
    let brought = group.gather(root, vec![rank.rank() as u8; me * 40]).wait().unwrap();
    let mut results: Vec<Vec<u32>> = [mail, sent, everyone, scattered, summed, gathered]
        .into_iter()
        .map(|pending| bits(&pending.wait().unwrap().cast(FloatDType::F32)))
        .collect();
    group.barrier().unwrap();
    results.push(said.concat().into_iter().map(u32::from).collect());
    results.push(brought.concat().into_iter().map(u32::from).collect());
    results.push(vec![me as u32, size as u32]);
    let pair = group.split(&format!("pair[{}]", me / 2), me / 2, size - me).unwrap();
    results.push(bits(&pair.all_reduce(tensor(numbers.floats(400))).wait().unwrap()));
    results
}

#[test]
fn a_timeout_names_the_ranks_and_not_their_processes() {
    // Ranks 2 and 3 share a process; 3 stays away.
    for (groups, missing) in [(1, 3), (2, 3)] {
        let ranks = mixed_world(4, 2, impatient());
        let kept = ranks.clone();
        let errors = on_communicators(ranks, |rank| {
            let me = rank.rank();
            let group = rank.split(&format!("g[{}]", me % groups), me % groups, 0).unwrap();
            match me {
                3 => None,
                _ if groups == 2 && me != 1 => None,
                _ => group.all_reduce(tensor(vec![0.0; 1000])).wait().err(),
            }
        });
        drop(kept);
        let text = format!("timed out after 0.1 s; rank {missing} has not arrived");
        for error in errors.iter().flatten() {
            assert!(error.to_string().contains(&text), "{errors:?}");
        }
        assert_eq!(errors.iter().flatten().count(), if groups == 1 { 3 } else { 1 });
    }
}

#[test]
fn the_first_failure_is_the_same_in_all_processes() {
    let errors = on_communicators(mixed_world(6, 3, ThreadsOptions::default()), |rank| {
        let here = rank.split(&format!("here[{}]", rank.rank() / 3), rank.rank() / 3, 0).unwrap();
        match rank.rank() {
            4 => rank.abort("loss is not finite"),
            // Ranks that wait only for their own process.
            0 => drop(here.recv(1, 5, 1, DType::F32).wait()),
            5 => drop(here.all_gather(tensor(vec![0.0; 4])).wait()),
            _ => drop(rank.barrier()),
        }
        rank.all_reduce(tensor(vec![0.0; 4])).wait().unwrap_err()
    });
    let expected = CommError::Aborted { rank: 4, reason: "loss is not finite".into() };
    assert_eq!(errors, vec![expected; 6]);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 120, failure_persistence: None, ..ProptestConfig::default()
    })]

    #[test]
    fn any_layout_gives_the_bits_of_threads(case in cases()) {
        let inline_bytes = if case.inline { usize::MAX } else { 0 };
        let options = ThreadsOptions { inline_bytes, workers: Some(2), ..Default::default() };
        let size = case.processes * case.each;
        let threads = ThreadsWorld::new(size, options.clone()).communicators();
        let expected = on_communicators(threads, |rank| operations(&case, rank));
        let mixed = mixed_world(size, case.each, options);
        let results = on_communicators(mixed, |rank| operations(&case, rank));
        prop_assert_eq!(results, expected);
    }
}
