//! A process that stands still, as at Ctrl-Z, is no rank's delay.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use burn::tensor::DType;
use zeropp_comm::CommError;
use zeropp_comm::rendezvous::{Local, Rendezvous};
use zeropp_comm::threads::{ThreadsOptions, ThreadsWorld};

use super::{Rank, on_communicators, tensor};

/// Says that this test is the process that is to be paused.
const PAUSED: &str = "ZEROPP_TEST_IS_PAUSED";
const TIMEOUT: Duration = Duration::from_secs(2);

fn on_ranks<T: Send>(size: usize, options: ThreadsOptions, f: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    on_communicators(ThreadsWorld::new(size, options).communicators(), f)
}

/// Ranks that wait for each other nearly all the time, and for much less than their timeout.
fn wait_for_each_other() {
    let options = ThreadsOptions { timeout: TIMEOUT, ..ThreadsOptions::default() };
    on_ranks(3, options, |rank| {
        for _ in 0..12 {
            if rank.rank() == 0 {
                std::thread::sleep(TIMEOUT / 5);
            }
            let _ = rank.all_reduce(tensor(vec![1.0; 8])).wait().unwrap();
            match rank.rank() {
                1 => rank.send(2, 1, tensor(vec![1.0])).wait().unwrap(),
                2 => drop(rank.recv(1, 1, 1, DType::F32).wait().unwrap()),
                _ => {}
            }
            rank.barrier().unwrap();
        }
    });
}

#[test]
fn a_pause_longer_than_the_timeout_fails_no_rank() {
    if std::env::var_os(PAUSED).is_some() {
        return wait_for_each_other();
    }
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "paused::a_pause_longer_than_the_timeout_fails_no_rank", "--nocapture"])
        .env(PAUSED, "1")
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let signal = |name: &str| {
        let sent = Command::new("kill").args(["-s", name, &child.id().to_string()]).status();
        assert!(sent.unwrap().success(), "the process is there to be paused");
    };
    std::thread::sleep(Duration::from_millis(500));
    for round in 0..3 {
        std::thread::sleep(Duration::from_millis(150 * round));
        signal("STOP");
        std::thread::sleep(5 * TIMEOUT / 2);
        signal("CONT");
    }
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_value_is_waited_for_beyond_a_timeout_only_while_the_process_runs() {
    let begin = Instant::now();
    let error = Local::default().get("never", Duration::from_millis(300)).unwrap_err();
    assert!(begin.elapsed() >= Duration::from_millis(300), "{error}");
}

/// Where kernels are compiled the first step takes long, and none after it.
#[test]
fn a_slow_first_step_has_a_longer_time_and_the_next_has_not() {
    let options = ThreadsOptions {
        timeout: Duration::from_millis(200),
        first_timeout: Some(Duration::from_secs(60)),
        ..ThreadsOptions::default()
    };
    let slow = Duration::from_millis(1500);
    let errors = on_ranks(2, options, |rank| {
        let step = || {
            if rank.rank() == 1 {
                std::thread::sleep(slow);
            }
            rank.exchange(Vec::new()).wait()
        };
        step().unwrap();
        rank.past_first_step();
        rank.barrier().unwrap();
        step().err()
    });
    let error = errors[0].clone().unwrap();
    assert!(matches!(&error, CommError::Timeout { missing, .. } if *missing == [1]), "{error}");
    assert!(error.to_string().ends_with("timed out after 0.2 s; rank 1 has not arrived"));
}
