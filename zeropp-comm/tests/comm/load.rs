//! Many ranks and groups at once, and buffers that are used again.

use burn::tensor::{DType, Tensor};
use zeropp_comm::Pending;
use zeropp_comm::threads::ThreadsOptions;

use super::{PROCESSES, Random, Rank, on_ranks, tensor};

/// A value that says who sent it in which round.
fn value(rank: usize, round: usize) -> f32 {
    ((rank + 1) * 7 + round % 13) as f32
}

/// The operations of a round that are still to be waited for.
struct Round {
    round: usize,
    gathered: Pending<Tensor<1>>,
    scattered: Pending<Tensor<1>>,
    message: Pending<Tensor<1>>,
}

impl Round {
    fn start(round: usize, len: usize, zero3: &Rank, pipeline: &Rank, me: usize) -> Self {
        let v = value(me, round);
        let gathered = zero3.all_gather(tensor(vec![v; len]));
        let scattered = zero3.reduce_scatter(tensor(vec![v; len * zero3.size()]));
        let (p, size) = (pipeline.rank(), pipeline.size());
        let tag = round as u64 % 3;
        let message = pipeline.recv((p + size - 1) % size, tag, len, DType::F32);
        pipeline.send((p + 1) % size, tag, tensor(vec![v; len])).wait().unwrap();
        Self { round, gathered, scattered, message }
    }

    fn check(self, zero3: &Rank, pipeline: &Rank, me: usize) {
        let base = me - zero3.rank();
        let peers = (0..zero3.size()).map(|d| value(base + d, self.round));
        let gathered = self.gathered.wait().unwrap();
        let len = gathered.dims()[0] / zero3.size();
        let expected: Vec<f32> = peers.clone().flat_map(|v| vec![v; len]).collect();
        assert_eq!(gathered.to_data().try_to_vec::<f32>().unwrap(), expected);
        let sum: f32 = peers.sum();
        let scattered = self.scattered.wait().unwrap();
        assert_eq!(scattered.to_data().try_to_vec::<f32>().unwrap(), vec![sum; len]);
        let (p, size) = (pipeline.rank(), pipeline.size());
        let from = me + (p + size - 1) % size * zero3.size() - p * zero3.size();
        let message = self.message.wait().unwrap();
        assert_eq!(
            message.to_data().try_to_vec::<f32>().unwrap(),
            vec![value(from, self.round); len]
        );
    }
}

/// 32 ranks as pp 4 x zero3 8, two rounds in flight, some buffers for the workers and some not:
/// 3 operations a rank and round, and a world-wide exchange now and then.
#[test]
fn thirty_two_ranks_in_four_groups() {
    const ROUNDS: usize = 60;
    on_ranks(32, ThreadsOptions::default(), |rank| {
        let me = rank.rank();
        let zero3 = rank.split(&format!("zero3[{}]", me / 8), me / 8, me).unwrap();
        let pipeline = rank.split(&format!("pp[{}]", me % 8), me % 8, me).unwrap();
        let mut numbers = Random(me as u64);
        let mut before: Option<Round> = None;
        for round in 0..ROUNDS {
            numbers.stall();
            let len = if round % 4 == 0 { 3000 } else { 17 };
            let next = Round::start(round, len, &zero3, &pipeline, me);
            if let Some(before) = before.replace(next) {
                before.check(&zero3, &pipeline, me);
            }
            if round % 8 == 0 {
                let all = rank.exchange(vec![me as u8]).wait().unwrap();
                assert_eq!(all.concat(), (0..32).collect::<Vec<u8>>());
            }
        }
        before.unwrap().check(&zero3, &pipeline, me);
    });
}

#[test]
fn buffers_are_made_once_and_used_again() {
    const ROUNDS: usize = 100;
    for inline_bytes in [0, usize::MAX] {
        let options = ThreadsOptions { inline_bytes, ..ThreadsOptions::default() };
        let fresh = on_ranks(4, options, |rank| {
            let mut alive = None;
            for _ in 0..ROUNDS {
                // One gathered buffer is in use while the next one comes in.
                let next = rank.all_gather(tensor(vec![1.0; 1000])).wait().unwrap();
                alive = Some(next);
                drop(rank.reduce_scatter(tensor(vec![1.0; 8000])).wait().unwrap());
            }
            drop(alive);
            rank.barrier().unwrap();
            rank.stats().fresh_buffers
        });
        if PROCESSES {
            // Besides, what goes to the other process: as much as may be under way at a time.
            assert!(fresh.iter().all(|fresh| (4..=12).contains(fresh)), "{fresh:?}");
            continue;
        }
        // Gathered: the one in use and the one coming in; scattered: one a rank.
        assert_eq!(fresh, [2 + 4; 4]);
    }
}
