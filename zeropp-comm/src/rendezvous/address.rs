//! Where processes meet: `HOST:PORT`.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::str::FromStr;

/// A host's name or address, and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    host: String,
    port: u16,
}

impl Address {
    /// A host's name or address, and a port.
    pub fn new(host: impl Into<String>, port: u16) -> Address {
        Address { host: host.into(), port }
    }

    /// The host's name or address.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Whether it means the same on every machine: a number, or `localhost`.
    pub(super) fn is_plain(&self) -> bool {
        self.host == "localhost" || self.host.parse::<IpAddr>().is_ok()
    }

    /// All socket addresses it stands for.
    pub(super) fn resolve(&self) -> io::Result<Vec<SocketAddr>> {
        let found: Vec<_> = (self.host.as_str(), self.port).to_socket_addrs()?.collect();
        match found.is_empty() {
            true => Err(io::Error::new(io::ErrorKind::NotFound, "the name has no address")),
            false => Ok(found),
        }
    }
}

impl FromStr for Address {
    type Err = String;

    /// Reads `node0:29400`, `10.0.0.1:29400` or `[fd00::1]:29400`.
    fn from_str(text: &str) -> Result<Address, String> {
        let form = "use HOST:PORT, such as node0:29400, 10.0.0.1:29400 or [fd00::1]:29400";
        let (host, port) = text.rsplit_once(':').ok_or_else(|| format!("has no port; {form}"))?;
        let (bare, in_brackets) = match host.strip_prefix('[').and_then(|h| h.strip_suffix(']')) {
            Some(bare) => (bare, true),
            None => (host, false),
        };
        if bare.contains(':') != in_brackets {
            return Err(format!("brackets are for IPv6 addresses, and those need them; {form}"));
        }
        if bare.is_empty() || bare.contains(|c: char| c.is_whitespace() || "/@[]".contains(c)) {
            return Err(format!("`{bare}` is not a host; {form}"));
        }
        match port.parse() {
            Ok(port @ 1..) => Ok(Address::new(bare, port)),
            _ => Err(format!("`{port}` is not a port from 1 to 65535; {form}")),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_and_numbers_are_read() {
        for text in ["node0:29400", "10.0.0.1:1", "[::1]:65535", "a.b-c.example:80"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        let plain = |text: &str| text.parse::<Address>().unwrap().is_plain();
        assert!(plain("[::1]:9") && plain("localhost:9") && !plain("node0:9"));
        for (text, problem) in [
            ("node0", "has no port"),
            ("node0:", "`` is not a port"),
            ("node0:0", "`0` is not a port"),
            ("node0:65536", "`65536` is not a port"),
            ("::1:29400", "brackets are for IPv6"),
            ("[node0]:29400", "brackets are for IPv6"),
            (":29400", "`` is not a host"),
            ("http://a:1", "brackets are for IPv6"),
            ("a b:1", "`a b` is not a host"),
        ] {
            let error = text.parse::<Address>().expect_err(text);
            assert!(error.starts_with(problem) && error.contains("use HOST:PORT"), "{error}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 256,
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        #[test]
        fn any_text_is_read_or_refused(text: String) {
            if let Ok(address) = text.parse::<Address>() {
                prop_assert_eq!(address.to_string().parse::<Address>(), Ok(address));
            }
        }
    }
}
