//! The threads engine on tensors of devices, one for each rank as far as there are: what one rank's
//! thread has asked for but its device has not done yet is what another rank's thread gets.

use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor, TensorData};
use zeropp_comm::Communicator;
use zeropp_comm::threads::{ThreadsOptions, ThreadsWorld};
use zeropp_core::device::on;

use crate::device;

const RANKS: usize = 4;
const LEN: usize = 1024;

/// Runs `f` on one thread a rank.
fn on_ranks<T: Send>(
    options: ThreadsOptions,
    f: impl Fn(Arc<dyn Communicator>) -> T + Sync,
) -> Vec<T> {
    let ranks = ThreadsWorld::new(RANKS, options).communicators();
    let f = &f;
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || f(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
    })
}

/// A tensor of whole numbers, still to be computed by a few operations: `start` + i % 7.
fn lazy(start: f32, device: &Device) -> Tensor<1> {
    let values: Vec<f32> = (0..LEN).map(|i| (i % 7) as f32).collect();
    let base = Tensor::<1>::from_data(TensorData::new(values, [LEN]), device);
    (base * 4.0 + 4.0 * start) / 2.0 - start - (Tensor::ones([LEN], device) * start)
        + half(start, device)
}

/// Half of what [`lazy`] makes, the other way round.
fn half(start: f32, device: &Device) -> Tensor<1> {
    let values: Vec<f32> = (0..LEN).map(|i| -((i % 7) as f32)).collect();
    Tensor::<1>::from_data(TensorData::new(values, [LEN]), device) + start
}

/// Fails where `t` does not hold `wanted`, with the first place.
#[track_caller]
fn check(t: Tensor<1>, wanted: &[f32], what: &str) {
    let got = t.into_data().try_to_vec::<f32>().expect("f32");
    assert_eq!(got.len(), wanted.len(), "{what}");
    if let Some(i) = (0..got.len()).find(|i| got[*i] != wanted[*i]) {
        panic!("{what}: element {i} is {}, not {}", got[i], wanted[i]);
    }
}

fn expected(start: f32) -> Vec<f32> {
    (0..LEN).map(|i| start + (i % 7) as f32).collect()
}

/// Both who does the work: the last to arrive, or the engine's own threads.
fn both(run: impl Fn(ThreadsOptions)) {
    run(ThreadsOptions { workers: Some(0), ..ThreadsOptions::default() });
    run(ThreadsOptions { workers: Some(2), inline_bytes: 0, ..ThreadsOptions::default() });
}

#[test]
fn messages_carry_what_was_asked_for() {
    both(|options| {
        on_ranks(options, |rank| {
            let (me, next, last) =
                (rank.rank(), (rank.rank() + 1) % RANKS, (rank.rank() + 3) % RANKS);
            let mut x = lazy(me as f32, &device(me));
            // Round the ring: each rank goes on computing while its tensor travels.
            for round in 0..12u64 {
                let sent = rank.send(next, round, x.clone() + 1.0);
                x = x * 0.0;
                let got = rank.recv(last, round, LEN, DType::F32).wait().unwrap();
                sent.wait().unwrap();
                // A message lies where its sender's tensors do.
                x = x + on(&device(me), got);
            }
            // Twelve steps are three times round.
            check(x, &expected(me as f32 + 12.0), &format!("rank {me}"));
        });
    });
}

#[test]
fn collectives_see_what_was_asked_for() {
    both(|options| {
        on_ranks(options, |rank| {
            let me = rank.rank();
            let mut weight = lazy(me as f32, &device(me));
            for round in 0..6 {
                let whole = rank.all_gather(weight.clone()).wait().unwrap();
                let mut wanted = Vec::new();
                (0..RANKS).for_each(|r| wanted.extend(expected((r + round) as f32)));
                // A part of each rank's, and the whole of it summed.
                let gradient = whole.clone() * 2.0;
                let part = rank.reduce_scatter(gradient).wait().unwrap();
                let sum = rank.all_reduce(part.clone()).wait().unwrap();
                check(whole, &wanted, &format!("rank {me}, round {round}"));
                let parts: Vec<f32> =
                    expected((me + round) as f32).iter().map(|x| x * 8.0).collect();
                check(part, &parts, &format!("rank {me}, round {round}"));
                let sums: Vec<f32> = (0..LEN)
                    .map(|i| {
                        (0..RANKS).map(|r| (r + round) as f32 + (i % 7) as f32).sum::<f32>() * 8.0
                    })
                    .collect();
                check(sum, &sums, &format!("rank {me}, round {round}"));
                // As an optimizer does: what was gathered changes while others may still read it.
                weight = weight + 1.0;
            }
        });
    });
}

#[test]
fn a_gather_is_made_once_and_a_change_is_not_seen_by_others() {
    on_ranks(ThreadsOptions::default(), |rank| {
        let mine = lazy(0.0, &device(rank.rank()));
        let whole = rank.all_gather(mine.clone()).wait().unwrap();
        // In place, where there was no other holder.
        let changed = whole.clone() * 0.0 + rank.rank() as f32;
        rank.barrier().unwrap();
        let zeros: Vec<f32> = (0..RANKS).flat_map(|_| expected(0.0)).collect();
        check(whole, &zeros, "the gathered");
        check(changed, &vec![rank.rank() as f32; RANKS * LEN], "the changed");
    });
}
