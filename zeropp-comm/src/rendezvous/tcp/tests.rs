//! Jobs that meet as they should, and the plain mistakes.

use std::net::TcpListener;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::super::{RendezvousOptions, members, open as open_any};
use super::*;

/// Long enough for any machine; no test waits for it.
const PATIENCE: Duration = Duration::from_secs(60);
pub(super) const TOKEN: &str = "a token for tests only";

/// A port that is free, at least for now.
pub(super) fn free(host: &str) -> Address {
    let port = TcpListener::bind((host, 0)).unwrap().local_addr().unwrap().port();
    Address::new(host, port)
}

pub(super) fn options(address: &Address) -> TcpOptions {
    TcpOptions {
        address: address.clone(),
        token: Some(Token::new(TOKEN).unwrap()),
        start_timeout: PATIENCE,
        silence: PATIENCE,
        waiting: Waiting::default(),
    }
}

pub(super) fn member(rank: usize, world: usize) -> Member {
    Member {
        job: "job".into(),
        plan: format!("pp {world} x zero3 1 x dp 1"),
        world,
        first_rank: rank,
        ranks: 1,
        host: format!("node{rank}"),
        pid: 100 + rank as u32,
    }
}

type Opened = Result<Arc<dyn Rendezvous>, RendezvousError>;

pub(super) fn join(options: &TcpOptions, me: Member) -> JoinHandle<Opened> {
    let options = options.clone();
    std::thread::spawn(move || open(&options, &me))
}

/// All ranks of a job, met.
pub(super) fn job(options: &TcpOptions, world: usize) -> Vec<Arc<dyn Rendezvous>> {
    let threads: Vec<_> = (0..world).map(|rank| join(options, member(rank, world))).collect();
    threads.into_iter().map(|t| t.join().unwrap().unwrap()).collect()
}

fn refused(opened: Opened) -> String {
    opened.err().expect("it should not meet").to_string()
}

/// As a supervisor starts it: the others, and rank 0 among them, are about to end.
#[test]
fn a_process_that_is_started_again_waits_for_the_meeting_before_to_end() {
    let options = options(&free("127.0.0.1"));
    let mut before = job(&options, 3);
    drop(before.remove(1));
    let again = join(&options, Member { pid: 999, ..member(1, 3) });
    std::thread::sleep(Duration::from_millis(100));
    assert!(!again.is_finished(), "it is not refused");
    drop(before);
    let others = [0, 2].map(|rank| join(&options, member(rank, 3)));
    let again = again.join().unwrap().unwrap();
    for other in others {
        other.join().unwrap().unwrap();
    }
    assert_eq!(members(&*again).unwrap()[1].pid, 999);
}

#[test]
fn ranks_meet_and_exchange_values() {
    let ranks = job(&options(&free("127.0.0.1")), 4);
    for rank in &ranks {
        let all = members(&**rank).unwrap();
        assert_eq!(all, (0..4).map(|r| member(r, 4)).collect::<Vec<_>>());
    }
    let waiting: Vec<_> = ranks
        .iter()
        .map(|rank| {
            let rank = rank.clone();
            std::thread::spawn(move || rank.get("id", PATIENCE))
        })
        .collect();
    let long = vec![7; 1 << 20];
    ranks[2].put("id", &long).unwrap();
    ranks[2].put("id", &long).unwrap();
    for got in waiting {
        assert_eq!(got.join().unwrap().unwrap(), long);
    }
    for rank in &ranks {
        let taken = RendezvousError::Taken { key: "id".into() };
        assert_eq!(rank.put("id", b"other"), Err(taken));
        let nothing = RendezvousError::Timeout { key: "none".into(), after_s: 0 };
        assert_eq!(rank.get("none", Duration::ZERO), Err(nothing));
        assert!(matches!(rank.put(&"k".repeat(300), b""), Err(RendezvousError::TooMuch { .. })));
    }
    // A value that was looked for comes by itself.
    ranks[1].put("none", b"now").unwrap();
    assert_eq!(ranks[3].get("none", PATIENCE).unwrap(), b"now");
}

#[test]
fn a_goodbye_is_no_loss() {
    let mut ranks = job(&options(&free("127.0.0.1")), 3);
    drop(ranks.remove(1));
    ranks[1].put("id", b"x").unwrap();
    assert_eq!(ranks[0].get("id", PATIENCE).unwrap(), b"x");
    let nothing = ranks[0].get("none", Duration::from_millis(50));
    assert!(matches!(nothing, Err(RendezvousError::Timeout { .. })), "{nothing:?}");
    // Rank 0's end gets the error as well.
    let waiting = ranks[1].clone();
    let waiting = std::thread::spawn(move || waiting.get("never", PATIENCE));
    drop(ranks.remove(0));
    let end = waiting.join().unwrap().unwrap_err().to_string();
    assert!(end.ends_with("the process of rank 0 has ended"), "{end}");
}

#[test]
fn sixty_four_processes_meet() {
    let ranks = job(&options(&free("127.0.0.1")), 64);
    ranks[63].put("id", b"x").unwrap();
    assert!(ranks.iter().all(|rank| rank.get("id", PATIENCE).unwrap() == b"x"));
    // Clients first, as at the end of most jobs; or rank 0 would wait for them.
    ranks.into_iter().rev().for_each(drop);
}

#[test]
fn processes_with_several_ranks_meet_over_ipv6_and_names() {
    let mut addresses = vec![free("localhost")];
    if TcpListener::bind("[::1]:0").is_ok() {
        addresses.push(free("::1"));
    }
    for address in addresses {
        let options = options(&address);
        let two = |first_rank| Member { first_rank, ranks: 2, ..member(0, 4) };
        let client = join(&options, two(2));
        let host = open(&options, &two(0)).unwrap();
        let client = client.join().unwrap().unwrap();
        assert_eq!(members(&*client).unwrap(), [two(0), two(2)]);
        drop((client, host));
    }
}

#[test]
fn without_a_token_only_this_machine_meets() {
    let here = TcpOptions { token: None, ..options(&free("127.0.0.1")) };
    assert_eq!(job(&here, 2).len(), 2);
    let outside = TcpOptions { token: None, ..options(&Address::new("192.0.2.1", 29400)) };
    for rank in [0, 1] {
        let error = refused(open(&outside, &member(rank, 2)));
        assert!(
            error.contains("192.0.2.1 is beyond this machine, and there is no token"),
            "{error}"
        );
        assert!(
            error.contains("set ZEROPP_TOKEN or rendezvous:token-file on all nodes"),
            "{error}"
        );
    }
}

#[test]
fn a_wrong_token_is_reported_on_both_sides() {
    let address = free("127.0.0.1");
    let right = TcpOptions { start_timeout: Duration::from_secs(2), ..options(&address) };
    let host = join(&right, member(0, 2));
    let other = Token::new("another token, which is wrong").unwrap();
    for token in [Some(other), None] {
        let error = refused(open(&TcpOptions { token, ..right.clone() }, &member(1, 2)));
        assert_eq!(
            error,
            format!(
                "rendezvous at {address}: refused: its token differs; use rank 0's ZEROPP_TOKEN or \
                 rendezvous:token-file on all nodes"
            )
        );
    }
    let error = refused(host.join().unwrap());
    assert!(
        error.contains("rank 1 did not come within 2 s (of 2; processes came from node0)"),
        "{error}"
    );
    assert!(error.contains("refused: 127.0.0.1: its token differs; 127.0.0.1:"), "{error}");
}

#[test]
fn missing_ranks_are_named_to_all_that_came() {
    let address = free("127.0.0.1");
    let options = TcpOptions { start_timeout: Duration::from_secs(1), ..options(&address) };
    let came: Vec<_> = [0, 2].map(|rank| join(&options, member(rank, 6))).into();
    for rank in came {
        let error = refused(rank.join().unwrap());
        let missing = format!("rendezvous at {address}: ranks 1, 3-5 did not come within 1 s");
        assert!(error.starts_with(&missing) && error.contains("(of 6; "), "{error}");
    }
}

#[test]
fn rank_0_reports_again_and_again_for_which_ranks_it_waits() {
    let address = free("127.0.0.1");
    let (tell, reported) = std::sync::mpsc::channel();
    let waiting = Waiting::new(Duration::from_millis(200), move |line| {
        let _ = tell.send(line.to_string());
    });
    let options = TcpOptions { waiting, ..options(&address) };
    let host = join(&options, member(0, 4));
    let alone = reported.recv_timeout(PATIENCE).unwrap();
    let expected = format!("waiting for ranks 1-3 of 4 at {address} (0 of 60 s); here: rank 0 on");
    assert!(alone.starts_with(&expected), "{alone}");
    let token = Some(Token::new("another token that is wrong").unwrap());
    refused(open(&TcpOptions { token, ..options.clone() }, &member(1, 4)));
    let came = join(&options, member(2, 4));
    let knows = |line: &String| line.contains("rank 2 on node2") && line.contains("refused: 127");
    let line = reported.iter().find(knows).unwrap();
    assert!(line.starts_with("waiting for ranks 1, 3 of 4"), "{line}");
    let rest = [1, 3].map(|rank| join(&options, member(rank, 4)));
    for rank in [host, came].into_iter().chain(rest) {
        assert!(rank.join().unwrap().is_ok());
    }
}

#[test]
fn a_host_that_never_comes_is_waited_for_in_vain() {
    let address = free("127.0.0.1");
    let options = TcpOptions { start_timeout: Duration::from_millis(300), ..options(&address) };
    let error = refused(open(&options, &member(1, 2)));
    assert!(error.contains("rank 0 cannot be reached within 0 s: 127.0.0.1:"), "{error}");
    let nowhere = TcpOptions { address: Address::new("no-such-host.invalid", 1), ..options };
    let error = refused(open(&nowhere, &member(1, 2)));
    assert!(error.contains("the host is not found"), "{error}");
}

#[test]
fn two_jobs_on_one_port_are_kept_apart() {
    let address = free("127.0.0.1");
    let options = options(&address);
    let first = job(&options, 2);
    let error = refused(open(&options, &member(0, 2)));
    assert!(error.contains("is in use on this machine, perhaps by another job"), "{error}");
    for (client, reason) in [
        (Member { job: "b".into(), ..member(1, 2) }, "job \"job\" uses this place, and this"),
        (member(1, 3), "rank 0 was started for pp 2 x zero3 1 x dp 1 (2 ranks), this process for"),
        (member(1, 2), "rank 1 is taken by process 101 on node1; give every node a node-rank"),
        (Member { ranks: 5, ..member(1, 2) }, "5 ranks from 1 on are not among the 2 of the job"),
        (Member { ranks: usize::MAX, ..member(1, 2) }, "are not among the 2 of the job"),
        (Member { ranks: 0, ..member(1, 2) }, "0 ranks from 1 on are not among"),
    ] {
        let error = refused(open(&options, &client));
        assert!(error.contains(": refused: ") && error.contains(reason), "{error}");
    }
    // The first job has not noticed.
    first[1].put("id", b"x").unwrap();
    assert_eq!(first[0].get("id", PATIENCE).unwrap(), b"x");
}

#[test]
fn one_process_needs_no_address_and_several_do() {
    let options = RendezvousOptions {
        address: None,
        token: None,
        start_timeout: PATIENCE,
        silence: PATIENCE,
        waiting: Waiting::default(),
    };
    let alone = open_any(&options, &Member { ranks: 4, ..member(0, 4) }).unwrap();
    assert_eq!(members(&*alone).unwrap().len(), 1);
    let error = refused(open_any(&options, &member(0, 4)));
    assert!(error.contains("this process has 1 of 4 ranks; name rank 0's machine"), "{error}");
}

#[test]
fn who_waits_for_a_value_burns_no_core() {
    let ranks = job(&options(&free("127.0.0.1")), 3);
    let cpu = || std::fs::read_to_string("/proc/thread-self/stat").ok();
    let threads: Vec<_> = ranks
        .iter()
        .map(|rank| {
            let rank = rank.clone();
            std::thread::spawn(move || {
                let waited = Instant::now();
                let got = rank.get("never", Duration::from_millis(700));
                (got.is_err(), waited.elapsed(), cpu())
            })
        })
        .collect();
    for thread in threads {
        let (timed_out, waited, stat) = thread.join().unwrap();
        assert!(timed_out && waited >= Duration::from_millis(700));
        let Some(stat) = stat else { continue };
        // After the name in brackets: user and system time are fields 14 and 15, in 10 ms.
        let fields: Vec<_> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        let ticks: u64 = [11, 12].iter().map(|i| fields[*i].parse::<u64>().unwrap()).sum();
        assert!(ticks <= 10, "{ticks} ticks of 10 ms for waiting");
    }
}
