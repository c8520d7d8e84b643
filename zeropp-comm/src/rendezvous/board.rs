//! Names and values that are set once and waited for, in one process.

use std::collections::HashMap;
use std::time::Duration;

use super::RendezvousError;
use crate::patience::Deadline;
use crate::sync::{Condvar, Mutex, wait};

/// Longest name, in bytes.
pub(super) const KEY_BYTES_MAX: usize = 256;
/// Longest value, in bytes.
pub(super) const VALUE_BYTES_MAX: usize = 1 << 20;
/// Most names.
pub(super) const KEYS_MAX: usize = 1 << 16;
/// Most bytes of all names and values.
const BYTES_MAX: usize = 64 << 20;

/// Names and values; and the error, if any, after which nothing new is to be expected.
#[derive(Default)]
pub(super) struct Board {
    inner: Mutex<Inner>,
    changed: Condvar,
}

#[derive(Default)]
struct Inner {
    values: HashMap<String, Vec<u8>>,
    bytes: usize,
    over: Option<RendezvousError>,
}

impl Board {
    /// Sets `key`; whether it was not set before.
    pub(super) fn put(&self, key: &str, value: &[u8]) -> Result<bool, RendezvousError> {
        check_size(key, value)?;
        let mut inner = self.inner.lock();
        match inner.values.get(key) {
            Some(old) if old == value => return Ok(false),
            Some(_) => return Err(RendezvousError::Taken { key: key.into() }),
            None => {}
        }
        let more = key.len() + value.len();
        if inner.values.len() >= KEYS_MAX || inner.bytes + more > BYTES_MAX {
            let problem = format!(
                "{} values of {} bytes are there, and at most {KEYS_MAX} of {BYTES_MAX} fit",
                inner.values.len(),
                inner.bytes
            );
            return Err(RendezvousError::TooMuch { key: key.into(), problem });
        }
        inner.bytes += more;
        inner.values.insert(key.into(), value.into());
        self.changed.notify_all();
        Ok(true)
    }

    /// The value of `key`, if it is set.
    pub(super) fn look(&self, key: &str) -> Option<Vec<u8>> {
        self.inner.lock().values.get(key).cloned()
    }

    /// The value of `key`, waited for.
    pub(super) fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, RendezvousError> {
        let deadline = Deadline::after(timeout);
        let mut inner = self.inner.lock();
        loop {
            if let Some(value) = inner.values.get(key) {
                return Ok(value.clone());
            }
            if let Some(error) = &inner.over {
                return Err(error.clone());
            }
            let timed_out = wait(&self.changed, &mut inner, deadline);
            if timed_out && !inner.values.contains_key(key) && inner.over.is_none() {
                let after_s = timeout.as_secs_f64().round() as u64;
                return Err(RendezvousError::Timeout { key: key.into(), after_s });
            }
        }
    }

    /// Ends all waiting, now and from now on. The first error stays.
    pub(super) fn end(&self, error: RendezvousError) {
        self.inner.lock().over.get_or_insert(error);
        self.changed.notify_all();
    }

    /// The error that ended it.
    pub(super) fn over(&self) -> Option<RendezvousError> {
        self.inner.lock().over.clone()
    }
}

/// Whether `key` and `value` are within the limits.
pub(super) fn check_size(key: &str, value: &[u8]) -> Result<(), RendezvousError> {
    let problem = if key.len() > KEY_BYTES_MAX {
        format!("a name of {} bytes; at most {KEY_BYTES_MAX} work", key.len())
    } else if value.len() > VALUE_BYTES_MAX {
        format!("a value of {} bytes; at most {VALUE_BYTES_MAX} work", value.len())
    } else {
        return Ok(());
    };
    let key = key.chars().take(64).collect();
    Err(RendezvousError::TooMuch { key, problem })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_named() {
        let board = Board::default();
        let long = "k".repeat(KEY_BYTES_MAX + 1);
        let error = board.put(&long, b"").unwrap_err().to_string();
        assert!(error.ends_with("a name of 257 bytes; at most 256 work"), "{error}");
        let error = board.put("id", &vec![0; VALUE_BYTES_MAX + 1]).unwrap_err().to_string();
        assert_eq!(error, "id cannot be set: a value of 1048577 bytes; at most 1048576 work");
        let value = vec![0; VALUE_BYTES_MAX];
        let full = (0..).map(|i| board.put(&i.to_string(), &value)).find_map(Result::err).unwrap();
        assert!(full.to_string().contains("and at most 65536 of 67108864 fit"), "{full}");
    }

    #[test]
    fn an_end_lets_go_of_who_waits_but_keeps_what_is_there() {
        let board = std::sync::Arc::new(Board::default());
        board.put("here", b"1").unwrap();
        let waiting = board.clone();
        let waiter = std::thread::spawn(move || waiting.get("never", Duration::MAX));
        let lost = |rank: &str| RendezvousError::Lost {
            ranks: rank.into(),
            host: "node1".into(),
            how: "its connection closed".into(),
        };
        board.end(lost("rank 1"));
        board.end(lost("rank 2"));
        assert_eq!(waiter.join().unwrap(), Err(lost("rank 1")));
        assert_eq!(board.get("here", Duration::ZERO).unwrap(), b"1");
        assert_eq!(board.get("never", Duration::ZERO), Err(lost("rank 1")));
        assert!(board.put("why", b"2").unwrap(), "the reason can still be told");
    }
}
