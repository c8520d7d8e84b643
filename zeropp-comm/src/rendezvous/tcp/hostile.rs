//! Clients and hosts that do not keep to the protocol, and such as break off.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use super::client::greet;
use super::link::Link;
use super::message::WireMessage;
use super::server::AT_DOOR_MAX;
use super::tests::{TOKEN, free, job, join, member, options};
use super::*;
use crate::handshake::{HandshakeError, Keys, VERSION};
use crate::sealed::Sealer;

const PATIENCE: Duration = Duration::from_secs(60);

fn key() -> [u8; 32] {
    Token::key(Some(&Token::new(TOKEN).unwrap()))
}

fn dial(address: &Address) -> TcpStream {
    let addresses: Vec<SocketAddr> = address.resolve().unwrap();
    let stream = TcpStream::connect(&addresses[..]).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// A client's own frames.
fn sealer(keys: &Keys) -> Sealer {
    Sealer::new(keys.to_listener, BODY_BYTES_MAX)
}

/// Until the host listens.
fn wait_for(address: &Address) {
    while TcpStream::connect(("127.0.0.1", address.port())).is_err() {
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Reads until the other side hangs up.
fn all_of(mut stream: &TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    // A reset is a way to hang up.
    let _ = stream.read_to_end(&mut bytes);
    bytes
}

/// A job that still works.
fn is_well(ranks: &[Arc<dyn Rendezvous>], key: &str) {
    ranks[1].put(key, b"x").unwrap();
    assert_eq!(ranks[0].get(key, PATIENCE).unwrap(), b"x");
    assert_eq!(
        ranks[0].get("failure", Duration::ZERO).unwrap_err().to_string(),
        "nothing under failure after 0 s"
    );
}

/// A client by hand: what [`client::Client`] does, without its manners.
fn enter(address: &Address, me: &Member) -> (TcpStream, Keys) {
    let stream = dial(address);
    let (keys, _) = greet(&stream, &key(), me).unwrap();
    (stream, keys)
}

#[test]
fn nonsense_at_the_door_changes_nothing() {
    let address = free("127.0.0.1");
    let ranks = job(&options(&address), 2);
    let mut runner = TestRunner::new(ProptestConfig {
        cases: 64,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    // Random bytes, after as much of a right beginning as one likes.
    let right =
        [&b"zeropp\r\n"[..], &VERSION.to_le_bytes(), &[1; 64], &u32::MAX.to_le_bytes()].concat();
    let garbage = (0..=right.len(), prop::collection::vec(any::<u8>(), 0..3000));
    runner
        .run(&garbage, |(n, bytes)| {
            let mut stream = dial(&address);
            // It may hang up while this is being written.
            let _ = stream.write_all(&[&right[..n], &bytes].concat());
            let _ = stream.shutdown(Shutdown::Write);
            let answer = all_of(&stream);
            prop_assert!(answer.is_empty() || answer.starts_with(b"zeropp\r\n"));
            // Greeting, and at most one byte of refusal.
            prop_assert!(answer.len() <= 8 + 2 + 32 + 1, "{} bytes", answer.len());
            Ok(())
        })
        .unwrap();
    is_well(&ranks, "id");
}

#[test]
fn a_handshake_that_was_listened_to_does_not_open_the_door_again() {
    // A host made by hand receives the words of a client that knows the token.
    let spy = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = spy.local_addr().unwrap();
    let victim = std::thread::spawn(move || {
        let stream = TcpStream::connect(at).unwrap();
        greet(&stream, &key(), &member(2, 3)).map(drop)
    });
    let (mut received, _) = spy.accept().unwrap();
    let greeting = [&b"zeropp\r\n"[..], &VERSION.to_le_bytes(), &[9; 32]].concat();
    received.write_all(&greeting).unwrap();
    let mut hello = vec![0; 8 + 2 + 32 + 32 + 4];
    received.read_exact(&mut hello).unwrap();
    let length = u32::from_le_bytes(hello[74..].try_into().unwrap()) as usize;
    let mut text = vec![0; length];
    received.read_exact(&mut text).unwrap();
    // The host cannot prove that it knows the token, so the client trusts it with nothing.
    received.write_all(&[&[0][..], &[0; 32], &[0; 4]].concat()).unwrap();
    assert!(matches!(victim.join().unwrap(), Err(HandshakeError::Token)));

    let address = free("127.0.0.1");
    let options = TcpOptions { start_timeout: Duration::from_secs(2), ..options(&address) };
    let host = join(&options, member(0, 3));
    let rank = join(&options, member(1, 3));
    let mut again = loop {
        match TcpStream::connect(("127.0.0.1", address.port())) {
            Ok(stream) => break stream,
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    again.write_all(&[hello, text].concat()).unwrap();
    let answer = all_of(&again);
    assert_eq!(answer.last(), Some(&1), "refused for its token");
    assert_eq!(answer.len(), 8 + 2 + 32 + 1);
    for opened in [host, rank] {
        let error = opened.join().unwrap().err().expect("rank 2 is missing").to_string();
        assert!(error.contains("rank 2 did not come within 2 s"), "{error}");
    }
}

#[test]
fn a_slow_connection_keeps_no_other_out() {
    let address = free("127.0.0.1");
    let options = options(&address);
    let host = join(&options, member(0, 9));
    let first = join(&options, member(1, 9));
    wait_for(&address);
    // As many as there is room for say a byte and no more.
    let dawdlers: Vec<TcpStream> = (0..AT_DOOR_MAX + 8)
        .map(|_| {
            let mut stream = dial(&address);
            let _ = stream.write_all(b"z");
            stream
        })
        .collect();
    let rest: Vec<_> = (2..9).map(|rank| join(&options, member(rank, 9))).collect();
    // Those beyond are refused at once, as there is no room.
    let busy = dawdlers.iter().rev().take(4).filter(|s| all_of(s).last() == Some(&4)).count();
    assert!(busy > 0);
    let ranks: Vec<_> =
        [host, first].into_iter().chain(rest).map(|rank| rank.join().unwrap().unwrap()).collect();
    is_well(&ranks, "id");
}

#[test]
fn false_frames_end_their_connection_and_are_reported() {
    type Lie = Box<dyn Fn(&mut TcpStream, Keys)>;
    let lies: [(&str, Lie); 5] = [
        (
            "it sent a frame of 4294967295 bytes; at most",
            Box::new(|stream, _| stream.write_all(&u32::MAX.to_le_bytes()).unwrap()),
        ),
        (
            "it sent a frame that was changed on its way",
            Box::new(|stream, _| {
                stream.write_all(&[&1u32.to_le_bytes()[..], &[8; 33]].concat()).unwrap()
            }),
        ),
        (
            "it sent a message that makes no sense",
            Box::new(|stream, keys| {
                let frame = sealer(&keys).seal(&[99, 1, 2]);
                stream.write_all(&frame).unwrap();
            }),
        ),
        (
            "it broke off",
            Box::new(|stream, keys| {
                // The host's words in a client's mouth.
                let body = WireMessage::Value { key: "id".into(), value: vec![1] }.encode();
                stream.write_all(&sealer(&keys).seal(&body)).unwrap();
            }),
        ),
        (
            "its connection ",
            Box::new(|stream, keys| {
                let frame = sealer(&keys).seal(&WireMessage::Beat.encode());
                stream.write_all(&frame[..frame.len() / 2]).unwrap();
                stream.shutdown(Shutdown::Both).unwrap();
            }),
        ),
    ];
    for (how, lie) in lies {
        let address = free("127.0.0.1");
        let options = options(&address);
        let (host, other) = (join(&options, member(0, 3)), join(&options, member(1, 3)));
        wait_for(&address);
        let (mut stream, keys) = enter(&address, &member(2, 3));
        let ranks: Vec<_> =
            [host, other].into_iter().map(|rank| rank.join().unwrap().unwrap()).collect();
        let waiting: Vec<_> = ranks
            .iter()
            .map(|rank| {
                let rank = rank.clone();
                std::thread::spawn(move || rank.get("never", PATIENCE))
            })
            .collect();
        lie(&mut stream, keys);
        for got in waiting {
            let error = got.join().unwrap().unwrap_err().to_string();
            assert!(error.starts_with(&format!("lost rank 2 on node2: {how}")), "{error}");
        }
        // What was lost is final, but the reason can still be sent.
        ranks[1].put("failure", b"why").unwrap();
        assert_eq!(ranks[0].get("failure", PATIENCE).unwrap(), b"why");
    }
}

#[test]
fn a_silent_guest_is_lost_and_a_silent_host_too() {
    let address = free("127.0.0.1");
    let options = TcpOptions { silence: Duration::from_millis(400), ..options(&address) };
    let host = join(&options, member(0, 3));
    wait_for(&address);
    let other = join(&options, member(1, 3));
    // Comes in and says nothing more, as a frozen process or a cut link would.
    let (frozen, _) = enter(&address, &member(2, 3));
    // Both are kept: rank 0's end would be news of its own.
    let ranks = [host, other].map(|rank| rank.join().unwrap().unwrap());
    for rank in &ranks {
        let error = rank.get("never", PATIENCE).unwrap_err().to_string();
        assert_eq!(error, "lost rank 2 on node2: nothing came from it for 400ms");
    }
    drop(frozen);

    let (near, far) = pair();
    let link = Link::new(near, [1; 32], Duration::from_millis(300)).unwrap();
    let end = link.read_all([2; 32], |_| true);
    assert_eq!(end.as_deref(), Some("nothing came from it for 300ms"));
    drop(far);
}

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (near, listener.accept().unwrap().0)
}

#[test]
fn a_guest_that_leaves_before_all_are_here_ends_the_start() {
    let address = free("127.0.0.1");
    let options = options(&address);
    let host = join(&options, member(0, 3));
    wait_for(&address);
    drop(enter(&address, &member(1, 3)));
    let error = host.join().unwrap().err().expect("rank 1 is lost").to_string();
    assert!(error.starts_with("lost rank 1 on node1: its connection "), "{error}");
}

/// The error of rank 1 where the listener at the address answers `greeting` to all.
fn error_after_greeting(greeting: Vec<u8>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = Address::new("127.0.0.1", listener.local_addr().unwrap().port());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.write_all(&greeting);
        }
    });
    open(&options(&address), &member(1, 2)).err().expect("no host").to_string()
}

#[test]
fn strangers_at_the_port_are_reported() {
    let error = error_after_greeting(b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec());
    assert!(
        error.contains("what answers there is not zeropp; another program has this port"),
        "{error}"
    );
}

#[test]
fn another_version_is_reported() {
    let greeting = [&b"zeropp\r\n"[..], &7u16.to_le_bytes()].concat();
    let error = error_after_greeting(greeting.clone());
    let versions = format!("it speaks version 7 of the handshake, this zeropp version {VERSION}");
    assert!(error.contains(&versions), "{error}");
    // And the other way round.
    let address = free("127.0.0.1");
    let ranks = job(&options(&address), 2);
    let mut stream = dial(&address);
    stream.write_all(&greeting).unwrap();
    assert_eq!(all_of(&stream).last(), Some(&2));
    is_well(&ranks, "id");
}

/// Carries bytes from one stream to the other, through `change`, until one side hangs up.
fn carry(
    mut from: TcpStream,
    mut to: TcpStream,
    mut change: impl FnMut(&mut [u8]) + Send + 'static,
) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(n @ 1..) = from.read(&mut buffer) {
            change(&mut buffer[..n]);
            if to.write_all(&buffer[..n]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    })
}

#[test]
fn who_sits_in_between_hears_no_token_and_can_change_nothing() {
    let address = free("127.0.0.1");
    let options = options(&address);
    let host = join(&options, member(0, 2));
    let middle = TcpListener::bind("127.0.0.1:0").unwrap();
    let through = Address::new("127.0.0.1", middle.local_addr().unwrap().port());
    let client = join(&TcpOptions { address: through, ..options }, member(1, 2));
    let received = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let lie = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let near = middle.accept().unwrap().0;
    wait_for(&address);
    let far = dial(&address);
    let copy = |stream: &TcpStream| stream.try_clone().unwrap();
    let (upward, downward, lies) = (received.clone(), received.clone(), lie.clone());
    let up = carry(copy(&near), copy(&far), move |bytes| {
        upward.lock().extend_from_slice(bytes);
        if lies.load(std::sync::atomic::Ordering::SeqCst) {
            bytes[bytes.len() - 1] ^= 1;
        }
    });
    let down = carry(far, near, move |bytes| downward.lock().extend_from_slice(bytes));

    let [host, client] = [host, client].map(|rank| rank.join().unwrap().unwrap());
    client.put("id", b"a value").unwrap();
    assert_eq!(host.get("id", PATIENCE).unwrap(), b"a value");
    let hears = |secret: &[u8]| received.lock().windows(secret.len()).any(|w| w == secret);
    assert!(hears(b"a value"), "values are not encrypted, so this would hear a token too");
    assert!(!hears(TOKEN.as_bytes()) && !hears(&key()));

    lie.store(true, std::sync::atomic::Ordering::SeqCst);
    let error = client.put("id2", b"a value").unwrap_err().to_string();
    assert!(error.starts_with("lost rank 0 on 127.0.0.1:"), "{error}");
    let error = host.get("id2", PATIENCE).unwrap_err().to_string();
    assert_eq!(error, "lost rank 1 on node1: it sent a frame that was changed on its way");
    drop((host, client));
    up.join().unwrap();
    down.join().unwrap();
}

#[test]
fn the_largest_value_fits_a_frame() {
    let body = WireMessage::Put { id: 0, key: "k".repeat(256), value: vec![0; 1 << 20] }.encode();
    assert!(body.len() <= BODY_BYTES_MAX);
}
