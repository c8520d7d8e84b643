//! Errors when a rank is late, wrong or gone.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::time::Instant;

use zeropp_comm::CommError;
use zeropp_comm::rendezvous::RendezvousError;

use super::*;

/// NCCL's result codes.
const INTERNAL: i32 = 3;
const REMOTE: i32 = 6;

fn floats_of(len: usize) -> Tensor<1> {
    tensor(&vec![1.0; len], DType::F32)
}

/// The first error that a rank which goes on working gets.
fn until_it_fails(all: &Group) -> CommError {
    let start = Instant::now();
    loop {
        if let Err(error) = all.all_reduce(floats_of(100)).wait() {
            return error;
        }
        if let Err(error) = all.barrier() {
            return error;
        }
        assert!(start.elapsed() < Duration::from_secs(30), "nothing fails");
    }
}

/// Keeps a communicator until the world has failed.
fn until_reported(all: &Group) -> CommError {
    let start = Instant::now();
    loop {
        // An operation that is complete at once where the world is well.
        let alone = all.send(all.rank(), 9, floats_of(1)).wait();
        let taken = alone.and_then(|()| all.recv(all.rank(), 9, 1, DType::F32).wait());
        if let Err(error) = taken {
            return error;
        }
        std::thread::sleep(Duration::from_millis(5));
        assert!(start.elapsed() < Duration::from_secs(30), "nobody tells");
    }
}

#[test]
fn a_rank_that_does_not_join_is_named() {
    let errors = on_ranks(3, impatient(), |all, _| {
        all.all_reduce(floats_of(10)).wait().unwrap();
        if all.rank() == 1 { until_reported(&all) } else { until_it_fails(&all) }
    });
    let reported = |error: &CommError| match error {
        CommError::Timeout { missing, sequence, group, after_s, operation } => {
            assert_eq!((group.as_str(), *sequence, *after_s), ("world", 1, 1.0), "{error}");
            assert_eq!(operation, "all_reduce of 100 f32");
            missing.clone()
        }
        other => panic!("{other}"),
    };
    // One of the two sees it first; the others are notified.
    let first = errors.iter().find(|e| matches!(e, CommError::Timeout { .. })).expect("a timeout");
    assert_eq!(reported(first), [1]);
    for error in &errors {
        assert!(error.to_string().contains("rank 1 has not arrived"), "{error}");
    }
}

#[test]
fn a_rank_whose_device_is_busy_for_ever_is_named() {
    let errors = on_ranks(2, impatient(), |all, device| {
        all.all_reduce(floats_of(10)).wait().unwrap();
        if all.rank() == 1 {
            device.late_us.store(4_000_000, Ordering::Relaxed);
        }
        let result = all.all_reduce(floats_of(10)).wait();
        result.expect_err("rank 1 does not begin in time")
    });
    for error in &errors {
        assert!(
            error.to_string().contains("#1 timed out after 1 s; rank 1 has not arrived"),
            "{error}"
        );
    }
}

#[test]
fn a_message_that_is_never_sent_is_reported() {
    let errors = on_ranks(2, impatient(), |all, _| match all.rank() {
        0 => all.recv(1, 5, 10, DType::F32).wait().unwrap_err(),
        _ => until_reported(&all),
    });
    assert_eq!(errors[0].to_string(), "world: recv #5 timed out after 1 s; rank 1 has not arrived");
    assert!(matches!(&errors[1], CommError::Aborted { rank: 0, .. }), "{}", errors[1]);
}

#[test]
fn an_exchange_that_a_rank_does_not_join_is_reported() {
    let errors = on_ranks(3, impatient(), |all, _| match all.rank() {
        // The first rank of the group, which would send the result.
        0 => until_reported(&all),
        _ => all.exchange(vec![1]).wait().unwrap_err(),
    });
    let found = errors.iter().any(
        |e| matches!(e, CommError::Timeout { missing, sequence: 0, .. } if missing.contains(&0)),
    );
    assert!(found, "{errors:?}");
}

#[test]
fn different_calls_are_reported_though_nccl_hangs() {
    let start = Instant::now();
    let errors = on_ranks(2, patient(), |all, _| match all.rank() {
        0 => all.all_reduce(floats_of(10)).wait().unwrap_err(),
        _ => all.all_reduce(floats_of(11)).wait().unwrap_err(),
    });
    assert!(start.elapsed() < Duration::from_secs(20), "long before the timeout");
    assert_eq!(errors[0], errors[1]);
    let CommError::Mismatch { group, sequence: 0, .. } = &errors[0] else {
        panic!("{}", errors[0])
    };
    assert_eq!(group, "world");
    let text = errors[0].to_string();
    assert!(
        text.contains("all_reduce of 10 f32") && text.contains("all_reduce of 11 f32"),
        "{text}"
    );
}

#[test]
fn a_message_of_another_length_is_reported() {
    let errors = on_ranks(2, patient(), |all, _| {
        if all.rank() == 0 {
            all.send(1, 4, floats_of(10)).wait().unwrap();
            return until_reported(&all);
        }
        all.recv(0, 4, 12, DType::F32).wait().unwrap_err()
    });
    let text =
        "world: rank 1 called recv of 12 f32 as operation #4, but rank 0 called send of 10 f32";
    assert_eq!(errors[1].to_string(), text);
    assert_eq!(errors[0], errors[1]);
}

#[test]
fn an_error_that_nccl_finds_later_ends_all_ranks() {
    let errors = on_ranks(3, patient(), |all, device| {
        all.all_reduce(floats_of(10)).wait().unwrap();
        all.barrier().unwrap();
        if all.rank() == 2 {
            device.fail.store(INTERNAL, Ordering::Relaxed);
        }
        until_it_fails(&all)
    });
    let text = "nccl error 3 in world: all_reduce of 100 f32: an operation under way: internal \
                error (the pretended library's last words)";
    for error in &errors {
        assert_eq!(error.to_string(), text);
    }
}

#[test]
fn a_peer_s_own_word_comes_before_nccl_s_guess() {
    let errors = on_ranks(2, patient(), |all, device| {
        all.all_reduce(floats_of(10)).wait().unwrap();
        if all.rank() == 0 {
            device.fail.store(REMOTE, Ordering::Relaxed);
            return until_it_fails(&all);
        }
        std::thread::sleep(Duration::from_millis(200));
        all.abort("the loss is not finite");
        until_reported(&all)
    });
    let aborted = CommError::Aborted { rank: 1, reason: "the loss is not finite".into() };
    assert_eq!(errors, [aborted.clone(), aborted]);
}

#[test]
fn nccl_s_guess_is_reported_where_the_peer_says_nothing() {
    let errors = on_ranks(2, patient(), |all, device| {
        all.all_reduce(floats_of(10)).wait().unwrap();
        if all.rank() == 0 {
            device.fail.store(REMOTE, Ordering::Relaxed);
            return until_it_fails(&all);
        }
        until_reported(&all)
    });
    let is_remote = |e: &CommError| matches!(e, CommError::Backend { code: 6, .. });
    assert!(errors.iter().all(is_remote), "{errors:?}");
}

#[test]
fn buffers_that_cannot_be_pinned_are_reported() {
    let errors = on_ranks(2, patient(), |all, device| {
        device.broken.store(all.rank() == 0, Ordering::Relaxed);
        all.all_gather(floats_of(3)).wait().unwrap_err()
    });
    for error in &errors {
        let text = error.to_string();
        assert!(text.ends_with("all_gather of 3 f32: the memory has gone"), "{text}");
    }
}

#[test]
fn a_rank_that_leaves_is_named_and_nothing_waits_for_it() {
    let start = Instant::now();
    let errors = on_ranks(3, patient(), |all, _| {
        all.barrier().unwrap();
        if all.rank() == 2 {
            return None;
        }
        Some(all.exchange(vec![]).wait().unwrap_err())
    });
    assert!(start.elapsed() < Duration::from_secs(20), "long before the timeout");
    for error in errors.iter().flatten() {
        assert!(matches!(error, CommError::PeerLost { rank: 2, .. }), "{error}");
    }
}

#[test]
fn an_abort_ends_what_is_on_the_device() {
    let errors = on_ranks(2, patient(), |all, _| {
        all.all_reduce(floats_of(10)).wait().unwrap();
        if all.rank() == 1 {
            std::thread::sleep(Duration::from_millis(50));
            all.abort("enough");
            all.abort("and again");
            return until_reported(&all);
        }
        // Begun, and waiting for its peer on the device.
        all.all_gather(floats_of(100_000)).wait().unwrap_err()
    });
    let aborted = CommError::Aborted { rank: 1, reason: "enough".into() };
    assert_eq!(errors, [aborted.clone(), aborted]);
}

/// Each group's operation waits on the device for the one of the group before, and the first for a
/// rank that is late: no communicator's abort ends before the first one's. Eight, as the engine has
/// them in any order.
#[test]
fn operations_that_wait_for_each_other_on_the_device_are_aborted() {
    let ended = std::sync::mpsc::channel();
    let run = move || {
        let errors = on_ranks(2, patient(), |all, device| {
            let groups =
                ["a", "b", "c", "d", "e", "f", "g", "h"].map(|name| all.split(name, 0, 0).unwrap());
            for group in [&all].into_iter().chain(&groups) {
                group.all_reduce(floats_of(10)).wait().unwrap();
            }
            device.joins_on_queue.store(true, Ordering::Relaxed);
            device.late_us.store([0, 4_000_000][all.rank()], Ordering::Relaxed);
            for group in &groups {
                group.all_reduce(floats_of(10)).wait().unwrap();
                device.late_us.store(0, Ordering::Relaxed);
            }
            // What was issued is on both devices.
            all.exchange(vec![]).wait().unwrap();
            if all.rank() == 1 {
                all.abort("enough");
            }
            until_reported(&all)
        });
        ended.0.send(errors).unwrap();
    };
    std::thread::spawn(run);
    let errors = ended.1.recv_timeout(Duration::from_secs(60)).expect("no abort hangs");
    let aborted = CommError::Aborted { rank: 1, reason: "enough".into() };
    assert_eq!(errors, [aborted.clone(), aborted]);
}

/// Room for a message is made on a device that waits for an operation, which waits for a rank that
/// is late: the failure of that rank is heard meanwhile.
#[test]
fn a_device_that_waits_while_it_makes_room_keeps_no_failure_back() {
    const LATE: Duration = Duration::from_secs(4);
    let errors = on_ranks(2, patient(), |all, device| {
        all.all_reduce(floats_of(10)).wait().unwrap();
        let start = Instant::now();
        device.joins_on_queue.store(true, Ordering::Relaxed);
        if all.rank() == 0 {
            all.all_reduce(floats_of(10)).wait().unwrap();
            device.pins_wait.store(true, Ordering::Relaxed);
            let message = all.recv(1, 3, 10, DType::F32);
            all.exchange(vec![]).wait().unwrap();
            let error = message.wait().unwrap_err();
            assert!(
                start.elapsed() < LATE - Duration::from_secs(1),
                "the late rank's device ended it"
            );
            return error;
        }
        let message = all.send(0, 3, floats_of(10));
        device.late_us.store(LATE.as_micros() as u64, Ordering::Relaxed);
        all.all_reduce(floats_of(10)).wait().unwrap();
        all.exchange(vec![]).wait().unwrap();
        std::thread::sleep(Duration::from_millis(50));
        all.abort("enough");
        drop(message);
        until_reported(&all)
    });
    let aborted = CommError::Aborted { rank: 1, reason: "enough".into() };
    assert_eq!(errors, [aborted.clone(), aborted]);
}

#[test]
fn calls_that_cannot_be_carried_out_are_reported() {
    let errors = on_ranks(2, patient(), |all, _| match all.rank() {
        0 => all.reduce_scatter(floats_of(5)).wait().unwrap_err(),
        _ => until_reported(&all),
    });
    let text = "world: rank 0 called reduce_scatter with 5 elements, which 2 ranks cannot share \
                equally; pad to 6";
    assert_eq!(errors[0].to_string(), text);
    assert_eq!(errors[1], CommError::Aborted { rank: 0, reason: text.into() });
}

#[test]
fn ranks_that_do_not_come_are_named() {
    let options = NcclOptions { start_timeout: Duration::from_millis(200), ..patient() };
    let started = rank(options, (1, 4), &Local::default(), Arc::new(Host::new()), |_, _| ());
    let text = "engine nccl is not available: ranks [0, 2, 3] did not arrive within 0.2 s";
    assert_eq!(started.unwrap_err().to_string(), text);
}

/// A rendezvous that another job has used.
struct Used(Local);

impl Rendezvous for Used {
    fn put(&self, key: &str, _: &[u8]) -> Result<(), RendezvousError> {
        Err(RendezvousError::Taken { key: key.into() })
    }
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, RendezvousError> {
        self.0.get(key, timeout)
    }
    fn key(&self) -> [u8; 32] {
        self.0.key()
    }
}

#[test]
fn the_rendezvous_own_words_are_reported() {
    let used = Used(Local::default());
    let started = rank(patient(), (0, 2), &used, Arc::new(Host::new()), |_, _| ());
    assert!(started.unwrap_err().to_string().contains("nccl/address/0 is set already"));
}

#[test]
fn strangers_are_refused_and_do_no_harm() {
    let rendezvous = Local::default();
    let (rendezvous, stranger) = (&rendezvous, &std::sync::Barrier::new(3));
    std::thread::scope(|scope| {
        for place in 0..2 {
            scope.spawn(move || {
                let device = Arc::new(Host::new());
                rank(patient(), (place, 2), rendezvous, device, |all, _| {
                    all.barrier().unwrap();
                    stranger.wait();
                    stranger.wait();
                    check_sum(&all);
                })
                .unwrap();
            });
        }
        stranger.wait();
        let address = rendezvous.get("nccl/address/1", Duration::ZERO).unwrap();
        let address = String::from_utf8(address).unwrap();
        let mut streams: Vec<_> = (0..8).map(|_| TcpStream::connect(&address).unwrap()).collect();
        for (i, stream) in streams.iter_mut().enumerate() {
            // The right words and rank 0's name, but without the secret; or nonsense; or nothing.
            let mut hello = b"zeropp\r\n".to_vec();
            hello.extend(4u16.to_le_bytes());
            hello.extend(vec![i as u8; 64]);
            hello.extend(0u32.to_le_bytes());
            hello.truncate(hello.len() * (i % 4) / 3);
            stream.write_all(&hello).unwrap();
        }
        for (i, stream) in streams.iter_mut().enumerate().filter(|(i, _)| i % 4 == 3) {
            let mut answer = Vec::new();
            stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            let _ = stream.read_to_end(&mut answer);
            // The listener's greeting, and one byte that says that the token differs.
            assert_eq!(answer.len(), 42 + 1, "stranger {i} gets a number and no proof");
        }
        stranger.wait();
    });
}

fn check_sum(all: &Group) {
    let sum = all.all_reduce(floats_of(7)).wait().unwrap();
    assert_eq!(floats(sum), [2.0; 7]);
}
