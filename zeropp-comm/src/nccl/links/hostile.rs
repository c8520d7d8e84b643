//! Callers that do not keep to the protocol, and such as change what others say.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, unbounded};

use super::door::{LINKS, LinkListener, STRANGERS_MAX, enter, introduction};
use super::*;
use crate::handshake::{HandshakeError, VERSION, call};

const SECRET: Secret = [3; 32];
const SIZE: usize = 2;
const PATIENCE: Duration = Duration::from_secs(20);
/// Bytes of the first words of a listener.
const GREETING: usize = 8 + 2 + 32;

/// The beginning of both sides' first words.
fn greeting() -> Vec<u8> {
    [&b"zeropp\r\n"[..], &VERSION.to_le_bytes()].concat()
}

/// A door of rank 0 that is open until this is dropped.
struct Open {
    door: Arc<LinkListener>,
    received: Receiver<Command>,
}

impl Open {
    fn new() -> Open {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (inbox, received) = unbounded();
        let address = listener.local_addr().unwrap();
        let door = Arc::new(LinkListener::new(0, SIZE, SECRET, inbox, address));
        let accepting = door.clone();
        std::thread::spawn(move || accepting.accept(&listener));
        Open { door, received }
    }

    fn address(&self) -> String {
        self.door.address.to_string()
    }

    fn hears(&self) -> NcclEvent {
        match self.received.recv_timeout(PATIENCE) {
            Ok(Command::Engine(news)) => news,
            _ => panic!("nothing was heard"),
        }
    }

    fn hears_frame(&self) -> NcclFrame {
        match self.hears() {
            NcclEvent::Frame(1, frame) => frame,
            NcclEvent::Lost(_, why) => panic!("{why}"),
            _ => panic!("something else than a frame of rank 1"),
        }
    }

    fn hears_loss(&self) -> String {
        match self.hears() {
            NcclEvent::Lost(1, why) => why,
            _ => panic!("something else than the loss of rank 1"),
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.door.closed.store(true, Ordering::Release);
        let _ = TcpStream::connect(self.door.address);
    }
}

/// The bytes that are left when the other side closes the connection.
fn all_of(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    // A reset is a way to hang up.
    let _ = stream.read_to_end(&mut bytes);
    bytes
}

/// Three frames as rank 1 would send them, on a connection of its own.
fn three(open: &Open) -> (TcpStream, [Vec<u8>; 3]) {
    let (stream, key) = enter(&open.address(), &SECRET, 1, 0).unwrap();
    let mut sealer = Sealer::new(key, FRAME_MAX);
    let frames = [NcclFrame::Ask(1), NcclFrame::Ask(2), NcclFrame::Ask(3)];
    (stream, frames.map(|frame| sealer.seal(&frame.encode())))
}

#[test]
fn frames_that_are_changed_repeated_left_out_or_reordered_end_the_connection() {
    type Lie = fn(&mut [Vec<u8>; 3]) -> Vec<u8>;
    let lies: [(usize, Lie); 5] = [
        (3, |f| f.concat()),
        (1, |f| [&f[0][..], &f[0]].concat()),
        (0, |f| [&f[1][..], &f[0]].concat()),
        (1, |f| [&f[0][..], &f[2]].concat()),
        (1, |f| {
            // The group's number, behind length and kind.
            f[1][5] ^= 4;
            f.concat()
        }),
    ];
    for (n, (good, lie)) in lies.into_iter().enumerate() {
        let open = Open::new();
        let (mut stream, mut frames) = three(&open);
        stream.write_all(&lie(&mut frames)).unwrap();
        for group in 1..=good as u64 {
            assert_eq!(open.hears_frame(), NcclFrame::Ask(group), "case {n}");
        }
        if good < 3 {
            assert_eq!(open.hears_loss(), "it sent a frame that was changed on its way");
            assert!(all_of(&mut stream).is_empty(), "it is hung up on");
        }
    }
}

#[test]
fn frames_of_another_connection_do_not_open() {
    let open = Open::new();
    let (mut stream, frames) = three(&open);
    stream.write_all(&frames[0]).unwrap();
    assert_eq!(open.hears_frame(), NcclFrame::Ask(1));
    stream.shutdown(Shutdown::Both).unwrap();
    assert_eq!(open.hears_loss(), "it closed the connection");
    // A recording, on a new connection that someone else opened rightly.
    let (mut stream, _) = three(&open);
    stream.write_all(&frames[0]).unwrap();
    assert_eq!(open.hears_loss(), "it sent a frame that was changed on its way");
}

#[test]
fn a_length_is_believed_only_within_the_limit() {
    let open = Open::new();
    let (mut stream, _) = three(&open);
    stream.write_all(&u32::MAX.to_le_bytes()).unwrap();
    let text = format!("it sent a frame of {} bytes; at most {FRAME_MAX} work", u32::MAX);
    assert_eq!(open.hears_loss(), text);
}

#[test]
fn a_handshake_that_was_listened_to_does_not_open_the_door_again() {
    // A listener made by hand receives the frames of rank 1, which knows the secret.
    let spy = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = spy.local_addr().unwrap().to_string();
    let victim = std::thread::spawn(move || enter(&at, &SECRET, 1, 0).map(drop));
    let (mut received, _) = spy.accept().unwrap();
    received.write_all(&[&greeting()[..], &[9; 32]].concat()).unwrap();
    let mut hello = [0; 8 + 2 + 32 + 32 + 4 + 8];
    received.read_exact(&mut hello).unwrap();
    received.write_all(&[0; 1 + 32 + 4]).unwrap();
    let error = victim.join().unwrap().unwrap_err().to_string();
    assert_eq!(error, "the program that listens there belongs to another job");

    let open = Open::new();
    let mut stream = TcpStream::connect(open.door.address).unwrap();
    stream.write_all(&hello).unwrap();
    let reported = all_of(&mut stream);
    assert_eq!(
        (reported.len(), reported.last()),
        (GREETING + 1, Some(&1)),
        "a number and no proof"
    );
    // Nor does a right proof for other ends, with another secret, or for something else.
    let right = introduction(1, 0);
    for (secret, purpose, words) in [
        (SECRET, LINKS, introduction(1, 7)),
        (SECRET, LINKS, introduction(5, 0)),
        (SECRET, LINKS, Vec::new()),
        ([4; 32], LINKS, right.clone()),
        (SECRET, "rendezvous", right),
    ] {
        let mut stream = TcpStream::connect(open.door.address).unwrap();
        let error = call(&stream, &secret, purpose, words, PATIENCE).err().unwrap();
        let is_known = (secret, purpose) == (SECRET, LINKS);
        assert_eq!(matches!(error, HandshakeError::Refused(_)), is_known, "{error}");
        assert_eq!(matches!(error, HandshakeError::Token), !is_known, "{error}");
        assert!(all_of(&mut stream).is_empty());
    }
    let (stream, _) = three(&open);
    drop(stream);
    assert_eq!(open.hears_loss(), "it closed the connection");
}

#[test]
fn strangers_at_the_door_are_few_and_soon_gone_and_ranks_get_in_all_the_same() {
    let open = Open::new();
    let seats = SIZE + STRANGERS_MAX;
    let begin = Instant::now();
    let mut strangers: Vec<TcpStream> =
        (0..seats + 20).map(|_| TcpStream::connect(open.door.address).unwrap()).collect();
    // Each byte comes in time for a read; all of them together do not.
    let drip: Vec<TcpStream> = strangers.iter().map(|s| s.try_clone().unwrap()).collect();
    std::thread::spawn(move || {
        for byte in [&greeting()[..8], &[1, 0, 0, 0][..]].concat() {
            drip.iter().for_each(|mut stream| drop(stream.write_all(&[byte])));
            std::thread::sleep(Duration::from_secs(1));
        }
    });
    let late = strangers.split_off(seats);
    let turned_away = |mut stream: TcpStream| all_of(&mut stream).len() <= GREETING + 1;
    assert!(late.into_iter().all(turned_away), "there are {seats} seats");
    assert!(begin.elapsed() < HANDSHAKE_TIME, "they are turned away at once");
    // A rank waits for a seat.
    let (mut stream, frames) = three(&open);
    assert!(begin.elapsed() > HANDSHAKE_TIME - Duration::from_secs(1), "{:?}", begin.elapsed());
    stream.write_all(&frames[0]).unwrap();
    assert_eq!(open.hears_frame(), NcclFrame::Ask(1));
    for mut stranger in strangers {
        assert_eq!(all_of(&mut stranger).len(), GREETING, "a number and no proof");
    }
    assert!(begin.elapsed() < HANDSHAKE_TIME + Duration::from_secs(4), "{:?}", begin.elapsed());
}
