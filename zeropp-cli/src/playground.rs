//! `zeropp playground`: the page of schedules, served or written.

use std::io::Read;
use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use clap::{Arg, ArgMatches, Command, value_parser};
use zeropp::http::{self, HttpRequest, HttpResponse};
use zeropp_playground::page;

use crate::failure::Failure;
use crate::figures::say;
use crate::output::write;

const ABOUT: &str = "See, compare and edit schedules on a page\n\n\
Serves one page to this machine only, at an address that nobody can guess, until Ctrl-C; or writes \
the same page as one file that works without a network.";

/// The flags of `zeropp playground`.
pub(crate) fn command() -> Command {
    Command::new("playground")
        .about("See, compare and edit schedules in a browser")
        .long_about(ABOUT)
        .arg(
            Arg::new("out")
                .short('o')
                .long("out")
                .value_name("FILE.html")
                .value_parser(value_parser!(PathBuf))
                .help("Write the page to this file instead of serving it"),
        )
        .arg(
            Arg::new("port")
                .long("port")
                .value_name("PORT")
                .default_value("0")
                .value_parser(port)
                .help("The port to serve at; 0 picks a free one"),
        )
}

/// A port, or 0 for any that is free.
fn port(text: &str) -> Result<u16, String> {
    text.parse().map_err(|_| "expected a port, 1 to 65535, or 0 for a free one".into())
}

/// Serves or writes the page.
pub(crate) fn run(matches: &ArgMatches) -> Result<(), Failure> {
    let page = page();
    if let Some(path) = matches.get_one::<PathBuf>("out") {
        return write(path, page.as_bytes());
    }
    let port = *matches.get_one::<u16>("port").expect("has a default");
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).map_err(|e| {
        Failure::bad_input(format!("port = {port}: cannot be opened ({e}); use 0 for a free one"))
    })?;
    let token = token().map_err(Failure::failed_run)?;
    let at = listener.local_addr().map_err(Failure::failed_run)?;
    say(format!("The playground is at http://{at}/{token}/ until Ctrl-C."));
    let path = format!("/{token}/");
    http::serve(&listener, &AtomicBool::new(false), |request| answer(request, &path, &page));
    Ok(())
}

/// 128 bits from the system, in hexadecimal digits.
fn token() -> std::io::Result<String> {
    let mut bytes = [0u8; 16];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|b| format!("{b:02x}")).collect())
}

fn answer(request: &HttpRequest, path: &str, page: &str) -> HttpResponse {
    // A page elsewhere whose name leads here is not to read this one.
    match request.is_local() && request.method == "GET" && request.target == path {
        true => {
            let kind = "text/html; charset=utf-8";
            HttpResponse { status: "200 OK", kind, body: page.into() }
        }
        false => {
            let kind = "text/plain; charset=utf-8";
            HttpResponse { status: "404 Not Found", kind, body: "not here".into() }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpStream;

    use super::*;

    fn ask(request: &str) -> String {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        std::thread::spawn(move || {
            let ends = AtomicBool::new(false);
            http::serve(&listener, &ends, |request| answer(request, "/secret/", "the page"));
        });
        client.write_all(request.as_bytes()).unwrap();
        let mut reported = String::new();
        client.read_to_string(&mut reported).unwrap();
        reported
    }

    #[test]
    fn only_who_knows_the_address_gets_the_page() {
        let reported = ask("GET /secret/ HTTP/1.1\r\nHost: 127.0.0.1:8\r\n\r\n");
        assert!(
            reported.starts_with("HTTP/1.1 200") && reported.ends_with("the page"),
            "{reported}"
        );
        for request in [
            "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
            "GET /secret/ HTTP/1.1\r\nHost: elsewhere.example\r\n\r\n",
            "POST /secret/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
            "GET /secret/ HTTP/1.1\r\nHost: 127.0.0.1.evil.example\r\n\r\n",
        ] {
            let reported = ask(request);
            assert!(
                reported.starts_with("HTTP/1.1 404") && !reported.contains("the page"),
                "{reported}"
            );
        }
        assert_eq!(token().unwrap().len(), 32);
        assert_ne!(token().unwrap(), token().unwrap());
    }
}
