//! A small server of pages that this process makes: for the figures that Prometheus asks for
//! (`prometheus`), and for the page of `zeropp playground`.
//!
//! One thread looks after all callers in turn and waits for none of them: who asks slowly, or not
//! at all, keeps no other waiting, and takes neither a thread nor, beyond a number, a connection.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long a caller may take, from the first byte of its request to the last of its answer.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// Longest head of a request.
const HEAD_MAX: usize = 16 << 10;
/// Most callers at a time; of more, the one that came first is cut off.
const CALLERS_MAX: usize = 64;
/// How often callers are looked after, while there are some.
const TICK: Duration = Duration::from_millis(4);
/// A pause where no caller can be let in, such as with too many open files.
const REFUSED: Duration = Duration::from_millis(200);

/// The head of a request.
#[derive(Debug)]
pub struct HttpRequest {
    /// `GET`, `POST`, …
    pub method: String,
    /// The path that is asked for, with the query.
    pub target: String,
    /// `Host` headers.
    hosts: Vec<String>,
}

impl HttpRequest {
    fn read(head: &[u8]) -> Option<HttpRequest> {
        let text = std::str::from_utf8(head).ok()?;
        let mut lines = text.split("\r\n");
        let mut words = lines.next()?.split(' ');
        let (method, target) = (words.next()?.into(), words.next()?.into());
        let version = words.next().filter(|version| version.starts_with("HTTP/1."));
        version.filter(|_| words.next().is_none())?;
        let header = |line: &str| {
            let (name, value) = line.split_once(':')?;
            name.eq_ignore_ascii_case("host").then(|| value.trim().to_owned())
        };
        Some(HttpRequest { method, target, hosts: lines.filter_map(header).collect() })
    }

    /// Whether the caller means this machine by its own names, `127.0.0.1` and `localhost`, with a
    /// port or without: a page elsewhere whose name leads here has another `Host`.
    pub fn is_local(&self) -> bool {
        let [host] = &self.hosts[..] else { return false };
        let name = match host.split_once(':') {
            Some((name, port)) if port.parse::<u16>().is_ok() => name,
            Some(_) => return false,
            None => host,
        };
        name == "127.0.0.1" || name.eq_ignore_ascii_case("localhost")
    }
}

/// The response to a caller.
#[derive(Debug)]
pub struct HttpResponse {
    /// Such as `200 OK`.
    pub status: &'static str,
    /// The type of the body, with its characters.
    pub kind: &'static str,
    /// The text.
    pub body: String,
}

impl HttpResponse {
    fn bytes(self) -> Vec<u8> {
        let HttpResponse { status, kind, body } = self;
        format!(
            "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\
             Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n\
             Referrer-Policy: no-referrer\r\nConnection: close\r\n\r\n{body}",
            body.len()
        )
        .into_bytes()
    }
}

/// Answers all who come to `listener`, until `ends` is set and one more has come. What is no
/// request in HTTP/1 is hung up on.
pub fn serve(
    listener: &TcpListener,
    ends: &AtomicBool,
    answer: impl Fn(&HttpRequest) -> HttpResponse,
) {
    let mut callers: VecDeque<Connection> = VecDeque::new();
    loop {
        // Without a caller there is nothing to do but to wait for one.
        let let_in = listener.set_nonblocking(!callers.is_empty()).and_then(|()| listener.accept());
        if ends.load(Ordering::SeqCst) {
            return;
        }
        match let_in {
            Ok((stream, _)) => {
                // Who has gone away already needs no answer.
                callers.extend(Connection::new(stream).ok());
                if callers.len() > CALLERS_MAX {
                    callers.pop_front();
                }
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => sleep(TICK),
            Err(_) => sleep(REFUSED),
        }
        callers.retain_mut(|caller| caller.goes_on(&answer).unwrap_or(false));
    }
}

/// Who has come, and how far it is.
struct Connection {
    stream: TcpStream,
    until: Instant,
    head: Vec<u8>,
    /// The answer, and how many bytes of it are sent.
    answer: Option<(Vec<u8>, usize)>,
}

impl Connection {
    fn new(stream: TcpStream) -> io::Result<Connection> {
        stream.set_nonblocking(true)?;
        Ok(Connection { stream, until: Instant::now() + PATIENCE, head: Vec::new(), answer: None })
    }

    /// Reads or writes what can be at once; whether something is left to do.
    fn goes_on(&mut self, answer: impl Fn(&HttpRequest) -> HttpResponse) -> io::Result<bool> {
        if Instant::now() > self.until {
            return Ok(false);
        }
        if self.answer.is_none() {
            let Some(end) = self.read_head()? else { return Ok(self.head.len() <= HEAD_MAX) };
            let Some(request) = HttpRequest::read(&self.head[..end]) else { return Ok(false) };
            self.answer = Some((answer(&request).bytes(), 0));
        }
        let Some((bytes, sent)) = &mut self.answer else { return Ok(true) };
        while *sent < bytes.len() {
            match self.stream.write(&bytes[*sent..]) {
                Ok(n) => *sent += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(true),
                Err(e) => return Err(e),
            }
        }
        self.stream.shutdown(Shutdown::Write)?;
        Ok(false)
    }

    /// Where the head of the request ends, once it is here.
    fn read_head(&mut self) -> io::Result<Option<usize>> {
        let mut part = [0; 1024];
        loop {
            let end = self.head.windows(4).position(|end| end == b"\r\n\r\n");
            if end.is_some() || self.head.len() > HEAD_MAX {
                return Ok(end);
            }
            match self.stream.read(&mut part) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(n) => self.head.extend(&part[..n]),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(e) => return Err(e),
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::net::{Ipv4Addr, SocketAddr};
    use std::sync::Arc;

    use super::*;

    /// A server for the rest of the test's process.
    fn served() -> SocketAddr {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let at = listener.local_addr().unwrap();
        let body = "x".repeat(8 << 20);
        let answer = move |request: &HttpRequest| HttpResponse {
            status: if request.is_local() { "200 OK" } else { "404 Not Found" },
            kind: "text/plain",
            body: if request.is_local() { body.clone() } else { request.target.clone() },
        };
        std::thread::spawn(move || serve(&listener, &AtomicBool::new(false), answer));
        at
    }

    /// What a server answers to these bytes.
    pub(crate) fn ask(at: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(at).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut reported = String::new();
        let _ = stream.read_to_string(&mut reported);
        reported
    }

    #[test]
    fn only_this_machines_own_names_are_local() {
        let local = |host: &str| {
            let head = format!("GET / HTTP/1.1\r\n{host}");
            HttpRequest::read(head.as_bytes()).unwrap().is_local()
        };
        for host in
            ["Host: 127.0.0.1", "host:127.0.0.1:8", "HOST: localhost:65535", "Host: LocalHost"]
        {
            assert!(local(host), "{host}");
        }
        for host in [
            "Host: 127.0.0.1.evil.example",
            "Host: localhost.evil.example:80",
            "Host: 127.0.0.1:80.evil.example",
            "Host: 127.0.0.1:",
            "Host: evil.example",
            "Host: 127.0.0.1\r\nHost: evil.example",
            "Accept: 127.0.0.1",
            "",
        ] {
            assert!(!local(host), "{host}");
        }
        for head in ["", "GET", "GET /", "GET / HTTP/2", "GET / x HTTP/1.1", "\u{fffd}"] {
            assert!(HttpRequest::read(head.as_bytes()).is_none(), "{head}");
        }
    }

    #[test]
    fn silent_callers_block_no_others_and_get_no_thread() {
        let at = served();
        let silent: Vec<_> = (0..100).map(|_| TcpStream::connect(at).unwrap()).collect();
        let begin = Instant::now();
        let reported = ask(at, "GET /a?b HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(reported.starts_with("HTTP/1.1 404") && reported.ends_with("/a?b"), "{reported}");
        assert!(begin.elapsed() < PATIENCE / 2, "{:?}", begin.elapsed());
        drop(silent);
    }

    /// Before, each byte began the patience anew.
    #[test]
    fn a_request_has_one_time_and_one_length_however_it_comes() {
        let at = served();
        let begin = Instant::now();
        let mut slow = TcpStream::connect(at).unwrap();
        while slow.write_all(b"G").is_ok() {
            assert!(begin.elapsed() < 3 * PATIENCE, "still listened to");
            sleep(Duration::from_millis(100));
        }
        assert!(begin.elapsed() > PATIENCE / 2);
        assert_eq!(ask(at, &"x".repeat(4 * HEAD_MAX)), "");
    }

    #[test]
    fn a_large_answer_reaches_a_reader_that_begins_late() {
        let at = served();
        let mut stream = TcpStream::connect(at).unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        sleep(Duration::from_millis(300));
        let mut reported = String::new();
        stream.read_to_string(&mut reported).unwrap();
        assert!(
            reported.starts_with("HTTP/1.1 200 OK") && reported.len() > 8 << 20,
            "{}",
            reported.len()
        );
    }

    #[test]
    fn a_server_that_is_to_end_does_so_when_one_more_has_come() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let at = listener.local_addr().unwrap();
        let ends = Arc::new(AtomicBool::new(false));
        let until = ends.clone();
        let served = std::thread::spawn(move || {
            serve(&listener, &until, |_| unreachable!("nobody asks"));
        });
        ends.store(true, Ordering::SeqCst);
        drop(TcpStream::connect(at).unwrap());
        served.join().unwrap();
    }
}
