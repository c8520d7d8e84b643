//! The threads engine and the rendezvous in one process under every order of their threads that a
//! random scheduler, and one that prefers few changes, come to: results are right, and no thread
//! waits for ever. `ZEROPP_SCHEDULES` is how many of each are tried. A failure prints the one that
//! failed, which `shuttle::replay` runs again.

use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{DType, Tensor};
use shuttle::thread;
use zeropp_comm::rendezvous::{Local, Rendezvous};
use zeropp_comm::threads::{ThreadsOptions, ThreadsWorld};
use zeropp_comm::{CommError, Communicator};
use zeropp_core::cpu_tensor::from_vec;

use orders::every_order;

mod orders;

const RANKS: usize = 3;

/// Runs `rank` on every rank of a world, whose sums are done by `workers` threads.
fn ranks(workers: usize, rank: impl Fn(Arc<dyn Communicator>) + Send + Sync + Copy + 'static) {
    let timeout = Duration::from_secs(3600);
    let options = ThreadsOptions {
        timeout,
        workers: Some(workers),
        inline_bytes: 0,
        ..ThreadsOptions::default()
    };
    let world = ThreadsWorld::new(RANKS, options).communicators();
    let threads: Vec<_> =
        world.into_iter().map(|world| thread::spawn(move || rank(world))).collect();
    threads.into_iter().for_each(|thread| thread.join().expect("no rank panics"));
}

fn numbers(values: &[f32]) -> Tensor<1> {
    from_vec(values.to_vec(), [values.len()])
}

fn values(tensor: Tensor<1>) -> Vec<f32> {
    tensor.into_data().try_to_vec().expect("fp32")
}

/// Collectives that are under way at once, with and without workers.
#[test]
fn collectives_give_what_they_should_in_every_order() {
    for workers in [0, 1] {
        let scenario = move |world: Arc<dyn Communicator>| {
            let me = world.rank() as f32;
            let sum = world.all_reduce(numbers(&[me, 1.0]));
            let all = world.all_gather(numbers(&[10.0 * me]));
            let part = world.reduce_scatter(numbers(&[me, 2.0, 3.0]));
            let reported = world.exchange(vec![world.rank() as u8]);
            assert_eq!(values(part.wait().unwrap()).len(), 1);
            assert_eq!(values(all.wait().unwrap()), [0.0, 10.0, 20.0]);
            assert_eq!(values(sum.wait().unwrap()), [3.0, 3.0]);
            assert_eq!(reported.wait().unwrap().concat(), [0, 1, 2]);
            world.barrier().unwrap();
        };
        match workers {
            0 => every_order(move || ranks(0, scenario)),
            _ => every_order(move || ranks(1, scenario)),
        }
    }
}

/// Messages that meet their receives early and late, two under one name, and a sender that leaves
/// as soon as it has sent.
#[test]
fn messages_arrive_in_every_order() {
    every_order(|| {
        ranks(0, |world| match world.rank() {
            0 => {
                let late = world.recv(1, 7, 1, DType::F32);
                let first = world.recv(1, 5, 1, DType::F32);
                let second = world.recv(1, 5, 1, DType::F32);
                let other = world.recv(2, 5, 1, DType::F32);
                let got =
                    [late, first, second, other].map(|pending| values(pending.wait().unwrap()));
                assert_eq!(got.concat(), [7.0, 1.0, 2.0, 9.0]);
            }
            1 => {
                for (tag, value) in [(5, 1.0), (5, 2.0), (7, 7.0)] {
                    world.send(0, tag, numbers(&[value])).wait().unwrap();
                }
            }
            _ => world.send(0, 5, numbers(&[9.0])).wait().unwrap(),
        });
    });
}

/// Every waiting thread gets a failure, and the same one, whenever it comes.
#[test]
fn a_failure_ends_every_wait_in_every_order() {
    every_order(|| {
        ranks(1, |world| match world.rank() {
            0 => {
                let sum = world.all_reduce(numbers(&[1.0]));
                world.abort("enough");
                // All may have come before that.
                let _ = sum.wait();
                assert!(matches!(world.failure(), Some(CommError::Aborted { .. })));
            }
            1 => {
                let sum = world.all_reduce(numbers(&[2.0]));
                let never = world.recv(0, 1, 1, DType::F32);
                assert!(never.wait().unwrap_err().to_string().contains("enough"));
                let _ = sum.wait();
            }
            _ => {
                let _ = world.all_reduce(numbers(&[3.0])).wait();
                assert!(world.barrier().unwrap_err().to_string().contains("enough"));
            }
        });
    });
}

/// A rank that leaves without its part of an operation is missed by all who wait for it, and one
/// that has done its part is not.
#[test]
fn a_rank_that_leaves_is_missed_in_every_order() {
    every_order(|| {
        ranks(0, |world| match world.rank() {
            0 => {
                world.send(1, 3, numbers(&[4.0])).wait().unwrap();
                drop(world);
            }
            1 => {
                let came = world.recv(0, 3, 1, DType::F32).wait();
                // Rank 2 may have missed rank 0 before.
                if let Ok(came) = came {
                    assert_eq!(values(came), [4.0]);
                }
                let never = world.recv(0, 4, 1, DType::F32).wait();
                assert!(never.unwrap_err().to_string().contains("rank 0"));
            }
            _ => assert!(world.barrier().unwrap_err().to_string().contains("rank 0")),
        });
    });
}

/// Parts of a group are made, used and left while others still use the whole.
#[test]
fn groups_are_parted_in_every_order() {
    every_order(|| {
        ranks(0, |world| {
            let alone = world.rank() == 2;
            let part =
                world.split(if alone { "one" } else { "two" }, usize::from(alone), 0).unwrap();
            let reported = part.exchange(vec![world.rank() as u8]).wait().unwrap().concat();
            assert_eq!(reported, if alone { vec![2] } else { vec![0, 1] });
            assert_eq!(world.exchange(vec![1]).wait().unwrap().concat(), [1, 1, 1]);
        });
    });
}

/// Values are there for callers that ask before and after, and are set once.
#[test]
fn a_rendezvous_answers_in_every_order() {
    every_order(|| {
        let place = Arc::new(Local::default());
        let patience = Duration::from_secs(3600);
        let threads: Vec<_> = (0..3u8)
            .map(|me| {
                let place = place.clone();
                thread::spawn(move || {
                    let first = place.put("first", &[me]).is_ok();
                    place.put(&me.to_string(), &[10 + me]).unwrap();
                    let next = place.get(&((me + 1) % 3).to_string(), patience).unwrap();
                    assert_eq!(next, [10 + (me + 1) % 3]);
                    (first, place.get("first", patience).unwrap()[0], me)
                })
            })
            .collect();
        let all: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        let set: Vec<u8> = all.iter().filter(|(first, ..)| *first).map(|(.., me)| *me).collect();
        assert_eq!(set.len(), 1);
        assert!(all.iter().all(|(_, value, _)| *value == set[0]));
    });
}
