//! Every operation against a naive reference, whatever the timing and the number of workers.

use std::sync::Arc;

use burn::tensor::{DType, FloatDType, Tensor, bf16};

use proptest::prelude::*;
use zeropp_comm::threads::ThreadsOptions;
use zeropp_comm::{AllBytes, CommResult, Pending};
use zeropp_core::cpu_tensor::storage_id;

use super::{Random, Rank, bits, on_ranks, tensor};

/// One case: how many ranks, how long the buffers are, and how the engine is set.
#[derive(Clone, Copy, Debug)]
struct Case {
    size: usize,
    /// Elements of one rank's part.
    part: usize,
    workers: usize,
    inline: bool,
    seed: u64,
}

fn cases() -> impl Strategy<Value = Case> {
    let part = prop_oneof![0usize..40, Just(4096), 4090usize..9000];
    (1usize..9, part, 0usize..4, any::<bool>(), any::<u64>())
        .prop_map(|(size, part, workers, inline, seed)| Case { size, part, workers, inline, seed })
}

impl Case {
    fn options(&self) -> ThreadsOptions {
        let inline_bytes = if self.inline { usize::MAX } else { 0 };
        ThreadsOptions { workers: Some(self.workers), inline_bytes, ..ThreadsOptions::default() }
    }

    fn numbers(&self, rank: usize) -> Random {
        Random(self.seed ^ ((rank as u64 + 1) << 32))
    }

    /// The input of `rank`: one value for each element of the whole buffer.
    fn input(&self, rank: usize) -> Vec<f32> {
        self.numbers(rank).floats(self.part * self.size)
    }

    /// Sum over ranks in rank order.
    fn sum(&self) -> Vec<f32> {
        let mut sum = self.input(0);
        for rank in 1..self.size {
            sum.iter_mut().zip(self.input(rank)).for_each(|(sum, x)| *sum += x);
        }
        sum
    }

    fn part_of<'a>(&self, whole: &'a [f32], rank: usize) -> &'a [f32] {
        &whole[rank * self.part..(rank + 1) * self.part]
    }
}

fn to_bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// The results of a rank after every collective was in flight at once, waited for in a random
/// order.
fn all_at_once(case: Case, rank: Rank) -> Vec<Vec<u32>> {
    let me = rank.rank();
    let (input, mut numbers) = (case.input(me), case.numbers(me));
    numbers.next();
    let root = case.seed as usize % case.size;
    let shard = case.part_of(&input, me).to_vec();
    let starts: [&dyn Fn() -> Pending<Tensor<1>>; 4] = [
        &|| rank.all_gather(tensor(shard.clone())),
        &|| rank.reduce_scatter(tensor(input.clone())),
        &|| rank.all_reduce(tensor(input.clone())),
        &|| rank.broadcast(root, tensor(input.clone())),
    ];
    let mut pending: Vec<(usize, Pending<Tensor<1>>)> = Vec::new();
    for (which, start) in starts.iter().enumerate() {
        numbers.stall();
        pending.push((which, start()));
    }
    let mut results = vec![Vec::new(); 4];
    while !pending.is_empty() {
        let (which, operation) = pending.swap_remove(numbers.below(pending.len()));
        results[which] = bits(&operation.wait().expect("a healthy world"));
    }
    results
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 150, failure_persistence: None, ..ProptestConfig::default()
    })]

    #[test]
    fn collectives_equal_the_reference_bit_for_bit(case in cases()) {
        let results = on_ranks(case.size, case.options(), |rank| all_at_once(case, rank));
        let gathered: Vec<f32> = (0..case.size)
            .flat_map(|rank| case.part_of(&case.input(rank), rank).to_vec())
            .collect();
        let sum = case.sum();
        let root = case.input(case.seed as usize % case.size);
        for (rank, result) in results.into_iter().enumerate() {
            prop_assert_eq!(&result[0], &to_bits(&gathered));
            prop_assert_eq!(&result[1], &to_bits(case.part_of(&sum, rank)));
            prop_assert_eq!(&result[2], &to_bits(&sum));
            prop_assert_eq!(&result[3], &to_bits(&root));
        }
    }

    #[test]
    fn bf16_sums_in_f32_and_rounds_once(case in cases()) {
        let rounded = |values: Vec<f32>| values.into_iter().map(bf16::from_f32).collect::<Vec<_>>();
        let inputs: Vec<Vec<bf16>> =
            (0..case.size).map(|rank| rounded(case.input(rank))).collect();
        let mut sum: Vec<f32> = inputs[0].iter().map(|x| x.to_f32()).collect();
        for input in &inputs[1..] {
            sum.iter_mut().zip(input).for_each(|(sum, x)| *sum += x.to_f32());
        }
        let sum = rounded(sum);
        let results = on_ranks(case.size, case.options(), |rank| {
            let me = rank.rank();
            let part = me * case.part..(me + 1) * case.part;
            let scattered = rank.reduce_scatter(bf16_tensor(&inputs[me]));
            let reduced = rank.all_reduce(bf16_tensor(&inputs[me]));
            let gathered = rank.all_gather(bf16_tensor(&sum[part]));
            [scattered, reduced, gathered].map(|p| bf16_values(&p.wait().unwrap()))
        });
        for (rank, [scattered, reduced, gathered]) in results.into_iter().enumerate() {
            prop_assert_eq!(&scattered, &sum[rank * case.part..(rank + 1) * case.part]);
            prop_assert_eq!(&reduced, &sum);
            prop_assert_eq!(&gathered, &sum);
        }
    }

    #[test]
    fn messages_match_by_peer_and_tag_in_order(size in 1usize..5, seed: u64) {
        const MESSAGES: usize = 24;
        // Of every pair of ranks: the tags of its messages in the order of sending.
        let tags = |from: usize, to: usize| {
            let mut numbers = Random(seed ^ (from * 64 + to) as u64);
            (0..MESSAGES).map(|_| numbers.below(4) as u64).collect::<Vec<_>>()
        };
        let value = |from: usize, to: usize, i: usize| (from * 10_000 + to * 1000 + i) as f32;
        on_ranks(size, ThreadsOptions::default(), |rank| {
            let me = rank.rank();
            let mut numbers = Random(seed ^ ((me as u64) << 40));
            let mut expected = Vec::new();
            for from in 0..size {
                // Receives of one tag are posted in order, different tags in any order.
                let mut order: Vec<usize> = (0..MESSAGES).collect();
                let shift = numbers.below(4) as u64;
                order.sort_by_key(|&i| (tags(from, me)[i] + shift) % 4);
                expected.extend(order.into_iter().map(|i| (from, i)));
            }
            let mut pending = Vec::new();
            let recv = |(from, i): (usize, usize)| {
                (value(from, me, i), rank.recv(from, tags(from, me)[i], 1, DType::F32))
            };
            let early = numbers.below(expected.len());
            pending.extend(expected[..early].iter().copied().map(recv));
            for i in 0..MESSAGES {
                for to in 0..size {
                    numbers.stall();
                    let sent = rank.send(to, tags(me, to)[i], tensor(vec![value(me, to, i)]));
                    sent.wait().unwrap();
                }
            }
            pending.extend(expected[early..].iter().copied().map(recv));
            for (value, message) in pending {
                assert_eq!(bits(&message.wait().unwrap()), [value.to_bits()]);
            }
        });
    }
}

fn bf16_tensor(values: &[bf16]) -> Tensor<1> {
    tensor(values.iter().map(|x| x.to_f32()).collect()).cast(FloatDType::BF16)
}

fn bf16_values(t: &Tensor<1>) -> Vec<bf16> {
    assert_eq!(t.dtype(), DType::BF16);
    t.to_data().try_to_vec::<bf16>().unwrap()
}

#[test]
fn a_sum_keeps_negative_zero() {
    let sums = on_ranks(3, ThreadsOptions::default(), |rank| {
        bits(&rank.all_reduce(tensor(vec![-0.0])).wait().unwrap())
    });
    assert_eq!(sums, vec![vec![(-0.0f32).to_bits()]; 3]);
}

#[test]
fn a_view_of_a_flat_buffer_is_gathered() {
    let results = on_ranks(2, ThreadsOptions::default(), |rank| {
        let flat = tensor((0..10).map(|i| (10 * rank.rank() + i) as f32).collect());
        bits(&rank.all_gather(flat.slice(3..5)).wait().unwrap())
    });
    assert_eq!(results, vec![to_bits(&[3.0, 4.0, 13.0, 14.0]); 2]);
}

#[test]
fn ranks_share_what_is_gathered_and_sent() {
    let ids = on_ranks(3, ThreadsOptions::default(), |rank| {
        let gathered = rank.all_gather(tensor(vec![rank.rank() as f32; 100_000])).wait().unwrap();
        rank.barrier().unwrap();
        storage_id(&gathered)
    });
    assert!(ids[0].is_some() && ids.iter().all(|id| *id == ids[0]), "{ids:?}");

    let ids = on_ranks(2, ThreadsOptions::default(), |rank| {
        let message = tensor(vec![1.0; 64]);
        let id = storage_id(&message);
        match rank.rank() {
            0 => rank.send(1, 7, message).wait().map(|()| id),
            _ => rank.recv(0, 7, 64, DType::F32).wait().map(|t| storage_id(&t)),
        }
    });
    assert_eq!(ids[0], ids[1]);
}

#[test]
fn inputs_are_unshared_again_once_the_result_is_there() {
    for inline_bytes in [0, usize::MAX] {
        let options = ThreadsOptions { inline_bytes, ..ThreadsOptions::default() };
        on_ranks(4, options, |rank| {
            let mut own = tensor(vec![1.0; 4096]);
            for _ in 0..50 {
                let id = storage_id(&own);
                drop(rank.all_gather(own.clone()).wait().unwrap());
                drop(rank.reduce_scatter(own.clone()).wait().unwrap());
                drop(rank.all_reduce(own.clone()).wait().unwrap());
                own = zeropp_core::cpu_tensor::map_in_place(own, |x| x[0] += 1.0).unwrap();
                assert_eq!(storage_id(&own), id, "written in place");
            }
        });
    }
}

#[test]
fn exchange_gives_everyone_all_bytes_in_rank_order() {
    let all = on_ranks(4, ThreadsOptions::default(), |rank| {
        rank.exchange(vec![rank.rank() as u8; rank.rank()]).wait().unwrap()
    });
    let expected: Vec<Vec<u8>> = vec![vec![], vec![1], vec![2, 2], vec![3, 3, 3]];
    assert_eq!(all, vec![AllBytes::from(expected); 4]);
    // Neighbours of a process share them: 512 copies of 512 records would be a gigabyte a step.
    assert!(Arc::ptr_eq(&all[0], &all[1]) && Arc::ptr_eq(&all[2], &all[3]));
}

#[test]
fn a_gather_gives_all_bytes_to_its_root_alone() {
    let all = on_ranks(4, ThreadsOptions::default(), |rank| {
        rank.gather(2, vec![rank.rank() as u8; rank.rank()]).wait().unwrap()
    });
    for (rank, got) in all.iter().enumerate() {
        let expected: &[&[u8]] = if rank == 2 { &[&[], &[1], &[2, 2], &[3, 3, 3]] } else { &[] };
        assert_eq!(**got, *expected, "rank {rank}");
    }
    let errors = on_ranks(2, ThreadsOptions::default(), |rank| {
        rank.gather(rank.rank(), Vec::new()).wait().unwrap_err().to_string()
    });
    assert!(errors.iter().all(|e| e.contains("gather to root ")), "{errors:?}");
}

/// Splits the world of 12 as pp 3 x zero3 2 x dp 2, ZeRO-3 innermost.
fn mesh_groups(rank: &Rank) -> CommResult<[Rank; 3]> {
    let r = rank.rank();
    let zero3 = rank.split(&format!("zero3[{}]", r / 2), r / 2, r)?;
    let pipeline = rank.split(&format!("pp[{}]", r % 2 + r / 6 * 2), r % 2 + r / 6 * 2, r)?;
    let replicas = rank.split(&format!("dp[{}]", r % 6), r % 6, 100 - r)?;
    Ok([zero3, pipeline, replicas])
}

#[test]
fn sub_groups_have_their_members_in_order_of_key() {
    let groups = on_ranks(12, ThreadsOptions::default(), |rank| {
        let members = |group: &Rank| {
            let all = group.exchange(vec![rank.rank() as u8]).wait().unwrap();
            (group.name().to_owned(), group.rank(), all.concat())
        };
        mesh_groups(&rank).unwrap().each_ref().map(members)
    });
    assert_eq!(groups[0][0], ("zero3[0]".into(), 0, vec![0, 1]));
    assert_eq!(groups[7][0], ("zero3[3]".into(), 1, vec![6, 7]));
    assert_eq!(groups[3][1], ("pp[1]".into(), 1, vec![1, 3, 5]));
    assert_eq!(groups[10][1], ("pp[2]".into(), 2, vec![6, 8, 10]));
    // The key turned the order round.
    assert_eq!(groups[2][2], ("dp[2]".into(), 1, vec![8, 2]));
    assert_eq!(groups[8][2], ("dp[2]".into(), 0, vec![8, 2]));
}

#[test]
fn groups_do_not_disturb_each_other() {
    on_ranks(12, ThreadsOptions::default(), |rank| {
        let groups = mesh_groups(&rank).unwrap();
        let mut numbers = Random(rank.rank() as u64);
        for round in 0..40 {
            let start = |group: &Rank| {
                numbers.stall();
                group.all_reduce(tensor(vec![(rank.rank() * 100 + round) as f32; 33]))
            };
            let sums = groups.each_ref().map(start).map(|p| p.wait().unwrap());
            let peers = |f: &dyn Fn(usize) -> bool| {
                let sum: usize = (0..12).filter(|&r| f(r)).map(|r| r * 100 + round).sum();
                vec![(sum as f32).to_bits(); 33]
            };
            let r = rank.rank();
            assert_eq!(bits(&sums[0]), peers(&|p| p / 2 == r / 2));
            assert_eq!(bits(&sums[1]), peers(&|p| p % 2 == r % 2 && p / 6 == r / 6));
            assert_eq!(bits(&sums[2]), peers(&|p| p % 6 == r % 6));
        }
    });
}

#[test]
fn counters_cover_every_operation() {
    let stats = on_ranks(4, ThreadsOptions::default(), |rank| {
        drop(rank.all_gather(tensor(vec![0.0; 100])).wait());
        drop(rank.reduce_scatter(tensor(vec![0.0; 400])).wait());
        drop(rank.all_reduce(tensor(vec![0.0; 10])).wait());
        drop(rank.broadcast(2, tensor(vec![0.0; 10])).wait());
        drop(rank.exchange(vec![0; 5]).wait());
        drop(rank.gather(1, vec![0; 6]).wait());
        drop(rank.send((rank.rank() + 1) % 4, 0, tensor(vec![0.0; 7])).wait());
        drop(rank.recv((rank.rank() + 3) % 4, 0, 7, DType::F32).wait());
        rank.stats()
    });
    for (rank, stats) in stats.iter().enumerate() {
        let counts = [stats.all_gather, stats.reduce_scatter, stats.all_reduce, stats.exchange];
        assert_eq!(counts.map(|count| count.ops), [1; 4]);
        assert_eq!(counts.map(|count| count.bytes), [1200, 1200, 60, 15]);
        assert_eq!(stats.broadcast.bytes, if rank == 2 { 120 } else { 0 });
        assert_eq!((stats.send.ops, stats.send.bytes), (1, 28));
        assert_eq!(stats.gather.bytes, if rank == 1 { 0 } else { 6 });
        assert_eq!(stats.bytes(), 2503 + stats.broadcast.bytes + stats.gather.bytes);
    }
}
