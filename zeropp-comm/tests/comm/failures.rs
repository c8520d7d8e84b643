//! An error is reported once to every rank, and no rank waits for ever.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::{DType, Device, FloatDType, Tensor};
use zeropp_comm::threads::ThreadsOptions;
use zeropp_comm::{CommError, CommResult, Communicator, Pending};

use super::{PROCESSES, Rank, impatient, on_communicators, on_ranks, tensor, world};

fn error<T>(result: CommResult<T>) -> CommError {
    result.err().expect("the operation fails")
}

/// Patient ranks, all of whose communicators stay alive: nothing but the failure under test
/// ends a wait.
fn on_kept_ranks<T: Send>(
    size: usize,
    options: ThreadsOptions,
    f: impl Fn(Rank) -> T + Sync,
) -> Vec<T> {
    let ranks = world(size, options);
    let kept = ranks.clone();
    let results = on_communicators(ranks, f);
    drop(kept);
    results
}

#[test]
fn a_timeout_names_group_operation_and_missing_world_ranks() {
    let errors = on_kept_ranks(6, impatient(), |rank| {
        let half = rank.split(&format!("half[{}]", rank.rank() / 3), rank.rank() / 3, 0).unwrap();
        half.barrier().unwrap();
        // World ranks 4 and 5 stay away; the first half waits for a message that never comes.
        match rank.rank() {
            3 => Some(error(half.all_gather(tensor(vec![0.0; 8])).wait())),
            0..3 => Some(error(half.recv(0, 9, 1, DType::F32).wait())),
            _ => None,
        }
    });
    let said = |rank: usize| errors[rank].clone().unwrap();
    for rank in 0..4 {
        let (group, operation, missing) = match rank {
            3 => ("half[1]", "all_gather of 8 f32", vec![4, 5]),
            _ => ("half[0]", "recv", vec![0]),
        };
        match said(rank) {
            CommError::Timeout { group: g, operation: o, sequence, after_s, missing: m } => {
                assert_eq!((g.as_str(), o.as_str(), m), (group, operation, missing));
                assert_eq!((sequence, after_s), (if rank == 3 { 1 } else { 9 }, 0.1));
            }
            // Another rank's time was over first.
            CommError::Aborted { rank: first, reason } => {
                assert!(first < 4 && first != rank);
                assert!(reason.contains("timed out after 0.1 s"), "{reason}");
            }
            other => panic!("rank {rank}: {other}"),
        }
    }
    assert!((0..4).any(|rank| matches!(said(rank), CommError::Timeout { .. })));
}

#[test]
fn the_first_error_ends_all_groups_and_all_later_operations() {
    let errors = on_kept_ranks(4, impatient(), |rank| {
        let pair = rank.split(&format!("pair[{}]", rank.rank() / 2), rank.rank() / 2, 0).unwrap();
        if rank.rank() == 3 {
            // Never joins; later it finds the world failed, in every group and operation.
            while rank.exchange(vec![]).wait().is_ok() {}
            let shard = || tensor(vec![1.0; 2]);
            return vec![
                error(pair.barrier()),
                error(pair.all_reduce(shard()).wait()),
                error(rank.send(0, 0, shard()).wait()),
                error(rank.recv(0, 0, 2, DType::F32).wait()),
                error(rank.split("late", 0, 0)),
            ];
        }
        if rank.rank() == 2 {
            return vec![error(pair.barrier()), error(pair.barrier())];
        }
        vec![error(rank.recv(2, 0, 1, DType::F32).wait())]
    });
    // All others name the rank whose time was over first.
    let first = errors.iter().flatten().find_map(|e| match e {
        CommError::Aborted { rank, .. } => Some(*rank),
        _ => None,
    });
    let first = first.expect("someone was ended by another");
    for (rank, errors) in errors.iter().enumerate() {
        for (i, error) in errors.iter().enumerate() {
            match error {
                // Two processes may see a first error each before they receive the other's.
                CommError::Timeout { .. } => {
                    assert!(rank == first || i == 0 || PROCESSES, "{rank}: {error}");
                }
                CommError::Aborted { rank: by, .. } => assert!(*by == first || PROCESSES),
                other => panic!("rank {rank}: {other}"),
            }
        }
    }
}

/// Starts one of the operations that ranks can disagree about.
type Call = fn(&Rank) -> Pending<Tensor<1>>;

#[test]
fn ranks_that_disagree_all_see_both_sides() {
    let bf16 = |n| Tensor::<1>::zeros([n], &Device::flex()).cast(FloatDType::BF16);
    assert_eq!(bf16(1).dtype(), DType::BF16);
    let table: [(Call, Call, &str, &str); 4] = [
        (
            |r| r.all_gather(tensor(vec![0.0; 4])),
            |r| r.all_gather(tensor(vec![0.0; 5])),
            "all_gather of 4 f32",
            "all_gather of 5 f32",
        ),
        (
            |r| r.all_gather(tensor(vec![0.0; 4])),
            |r| r.all_reduce(tensor(vec![0.0; 4])),
            "all_gather of 4 f32",
            "all_reduce of 4 f32",
        ),
        (
            |r| r.broadcast(0, tensor(vec![0.0; 4])),
            |r| r.broadcast(1, tensor(vec![0.0; 4])),
            "broadcast of 4 f32 from root 0",
            "broadcast of 4 f32 from root 1",
        ),
        (
            |r| r.all_reduce(tensor(vec![0.0; 4])),
            |r| r.all_reduce(Tensor::<1>::zeros([4], &Device::flex()).cast(FloatDType::BF16)),
            "all_reduce of 4 f32",
            "all_reduce of 4 bf16",
        ),
    ];
    for (most, odd, most_says, odd_says) in table {
        let errors = on_kept_ranks(4, ThreadsOptions::default(), |rank| {
            rank.barrier().unwrap();
            let call = if rank.rank() == 2 { odd } else { most };
            error(call(&rank).wait())
        });
        let CommError::Mismatch { group, sequence, rank, mine, peer, theirs } = &errors[0] else {
            panic!("{}", errors[0]);
        };
        assert_eq!((group.as_str(), *sequence), ("world", 1));
        let (two, other) = if *rank == 2 { (mine, theirs) } else { (theirs, mine) };
        assert!(*rank == 2 || *peer == 2);
        assert_eq!((two.as_str(), other.as_str()), (odd_says, most_says));
        assert!(errors.iter().all(|error| matches!(error, CommError::Mismatch { .. })));
    }
}

#[test]
fn a_message_of_another_length_or_type_is_refused_on_both_ends() {
    for posted_first in [true, false] {
        let errors = on_kept_ranks(2, ThreadsOptions::default(), |rank| match rank.rank() {
            0 => {
                if posted_first {
                    rank.barrier().unwrap();
                }
                let sent = rank.send(1, 5, tensor(vec![0.0; 8])).wait();
                if !posted_first {
                    drop(rank.barrier());
                }
                sent.and_then(|()| rank.barrier()).err()
            }
            _ => {
                if !posted_first {
                    rank.barrier().unwrap();
                }
                let message = rank.recv(0, 5, 9, DType::BF16);
                if posted_first {
                    drop(rank.barrier());
                }
                message.wait().err()
            }
        });
        for error in errors {
            assert_eq!(
                error.unwrap().to_string(),
                "world: rank 1 called recv of 9 bf16 as operation #5, but rank 0 called send \
                 of 8 f32"
            );
        }
    }
}

#[test]
fn one_color_has_one_name() {
    let errors = on_kept_ranks(3, ThreadsOptions::default(), |rank| {
        error(rank.split(["a", "a", "b"][rank.rank()], 0, 0)).to_string()
    });
    let text = "world: rank 2 called split into b as operation #0, but rank 0 called split into a";
    assert_eq!(errors, [text; 3]);
}

#[test]
fn calls_that_no_group_can_carry_out_say_what_would_work() {
    let table: [(Call, &str); 4] = [
        (
            |r| r.reduce_scatter(tensor(vec![0.0; 10])),
            "reduce_scatter with 10 elements, which 3 ranks cannot share equally; pad to 12",
        ),
        (
            |r| r.broadcast(3, tensor(vec![0.0])),
            "broadcast with root 3; the group has ranks 0 to 2",
        ),
        (|r| r.recv(7, 0, 1, DType::F32), "recv with sender 7; the group has ranks 0 to 2"),
        (
            |r| r.all_reduce(Tensor::<1>::zeros([2], &Device::flex()).cast(FloatDType::F64)),
            "all_reduce with elements of f64; sums take f32, bf16 or f16",
        ),
    ];
    for (call, text) in table {
        let errors = on_kept_ranks(3, ThreadsOptions::default(), |rank| match rank.rank() {
            1 => error(call(&rank).wait()),
            _ => error(rank.barrier()),
        });
        let said = format!("world: rank 1 called {text}");
        assert_eq!(errors[1].to_string(), said);
        assert_eq!(errors[0], CommError::Aborted { rank: 1, reason: said });
        assert_eq!(errors[0], errors[2]);
    }
}

#[test]
fn abort_wakes_everybody_and_the_first_reason_wins() {
    let errors = on_kept_ranks(5, ThreadsOptions::default(), |rank| {
        let pair = rank.split(&format!("part[{}]", rank.rank() % 2), rank.rank() % 2, 0).unwrap();
        match rank.rank() {
            0 => {
                rank.abort("loss is not finite");
                rank.abort("again");
                error(rank.barrier())
            }
            1 => error(pair.barrier()),
            2 => error(rank.recv(0, 0, 4, DType::F32).wait()),
            3 => error(rank.all_reduce(tensor(vec![0.0; 50_000])).wait()),
            _ => {
                let mut pending = pair.exchange(vec![1]);
                while !pending.is_done() {
                    std::thread::yield_now();
                }
                let first = error(pending.wait());
                rank.abort("too late");
                assert_eq!(error(rank.barrier()), first);
                first
            }
        }
    });
    let expected = CommError::Aborted { rank: 0, reason: "loss is not finite".into() };
    assert_eq!(errors, vec![expected; 5]);
}

#[test]
fn dropped_operations_go_on_without_their_owner() {
    on_ranks(4, ThreadsOptions::default(), |rank| {
        let me = rank.rank();
        for round in 0..60 {
            let gathered = rank.all_gather(tensor(vec![me as f32; 3]));
            let reduced = rank.reduce_scatter(tensor(vec![1.0; 40_000]));
            drop(rank.recv((me + 1) % 4, 1, 1, DType::F32));
            rank.send((me + 3) % 4, 1, tensor(vec![0.0])).wait().unwrap();
            rank.send((me + 3) % 4, 1, tensor(vec![round as f32])).wait().unwrap();
            // The dropped receive took the first message.
            let second = rank.recv((me + 1) % 4, 1, 1, DType::F32).wait().unwrap();
            assert_eq!(second.into_scalar::<f32>(), round as f32);
            if (me + round) % 3 == 0 {
                drop(gathered);
                drop(reduced);
                continue;
            }
            assert_eq!(gathered.wait().unwrap().dims(), [12]);
            assert_eq!(reduced.wait().unwrap().sum().into_scalar::<f32>(), 40_000.0);
        }
    });
}

#[test]
fn a_rank_that_ends_early_is_named_to_those_that_wait_for_it() {
    for waits_first in [true, false] {
        let errors = on_ranks(4, ThreadsOptions::default(), |rank| {
            let group = rank.split(&format!("g{}", rank.rank() % 2), rank.rank() % 2, 0).unwrap();
            match rank.rank() {
                1 => {
                    drop(group);
                    if waits_first {
                        std::thread::sleep(std::time::Duration::from_millis(20));
                    }
                    None
                }
                2 => Some(error(rank.recv(1, 0, 1, DType::F32).wait())),
                3 => Some(error(group.all_gather(tensor(vec![0.0])).wait())),
                _ => Some(error(rank.barrier())),
            }
        });
        let Some(CommError::PeerLost { rank, operation, group }) = &errors[0] else {
            panic!("{errors:?}");
        };
        let names = [("world", "barrier"), ("world", "recv"), ("g1", "all_gather of 1 f32")];
        assert!(names.contains(&(group.as_str(), operation.as_str())), "{group} {operation}");
        assert_eq!(*rank, 1);
        assert!(errors[2] == errors[0] && errors[3] == errors[0]);
    }
}

#[test]
fn a_rank_may_leave_when_nothing_waits_for_it() {
    on_ranks(3, ThreadsOptions::default(), |rank| {
        match rank.rank() {
            // Its message and its share of the sum outlive it.
            0 => {
                rank.send(1, 0, tensor(vec![4.0])).wait().unwrap();
                drop(rank.all_reduce(tensor(vec![1.0; 8])));
            }
            me => {
                std::thread::sleep(std::time::Duration::from_millis(10));
                let sum = rank.all_reduce(tensor(vec![1.0; 8])).wait().unwrap();
                assert_eq!(sum.sum().into_scalar::<f32>(), 24.0);
                if me == 1 {
                    let message = rank.recv(0, 0, 1, DType::F32).wait().unwrap();
                    assert_eq!(message.into_scalar::<f32>(), 4.0);
                }
            }
        };
    });
}

#[test]
fn a_rank_that_panics_ends_the_others() {
    let errors = on_ranks(3, ThreadsOptions::default(), |rank| {
        if rank.rank() == 1 {
            let own = AssertUnwindSafe(rank);
            let panicked = catch_unwind(move || {
                let _own = own;
                std::panic::resume_unwind(Box::new("a layer failed"));
            });
            assert!(panicked.is_err());
            return None;
        }
        Some(error(rank.barrier()))
    });
    let lost = CommError::PeerLost { group: "world".into(), rank: 1, operation: "barrier".into() };
    assert_eq!(errors, [Some(lost.clone()), None, Some(lost)]);
}

#[test]
fn a_runner_that_catches_a_panic_can_say_what_it_was() {
    let errors = on_ranks(3, ThreadsOptions::default(), |rank| {
        let step = |rank: &dyn Communicator| {
            if rank.rank() == 1 {
                std::panic::resume_unwind(Box::new("stage 3: B of micro-batch 2"));
            }
            rank.barrier()
        };
        let outcome = catch_unwind(AssertUnwindSafe(|| step(rank.as_ref())));
        outcome.unwrap_or_else(|panic| {
            rank.abort(panic.downcast_ref::<&str>().unwrap());
            rank.barrier()
        })
    });
    let reason = "stage 3: B of micro-batch 2".to_owned();
    assert_eq!(errors, vec![Err(CommError::Aborted { rank: 1, reason }); 3]);
}
