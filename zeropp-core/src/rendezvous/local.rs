//! The rendezvous of ranks that are threads of one process.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::{Rendezvous, RendezvousError};

/// Names and values in this process's memory.
#[derive(Default)]
pub struct Local {
    values: Mutex<HashMap<String, Vec<u8>>>,
    set: Condvar,
}

impl Rendezvous for Local {
    fn put(&self, key: &str, value: &[u8]) -> Result<(), RendezvousError> {
        let mut values = self.values.lock();
        match values.get(key) {
            Some(old) if old == value => Ok(()),
            Some(_) => Err(RendezvousError::Taken { key: key.into() }),
            None => {
                values.insert(key.into(), value.into());
                self.set.notify_all();
                Ok(())
            }
        }
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, RendezvousError> {
        let deadline = Instant::now() + timeout;
        let mut values = self.values.lock();
        loop {
            if let Some(value) = values.get(key) {
                return Ok(value.clone());
            }
            if self.set.wait_until(&mut values, deadline).timed_out() {
                let after_s = timeout.as_secs_f64().round() as u64;
                return Err(RendezvousError::Timeout { key: key.into(), after_s });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_value_is_waited_for_and_set_once() {
        let there = Arc::new(Local::default());
        let here = there.clone();
        let reader = std::thread::spawn(move || here.get("id", Duration::from_secs(10)));
        there.put("id", b"abc").unwrap();
        there.put("id", b"abc").unwrap();
        assert_eq!(reader.join().unwrap().unwrap(), b"abc");
        assert_eq!(there.put("id", b"x"), Err(RendezvousError::Taken { key: "id".into() }));
        let nothing = there.get("other", Duration::ZERO);
        assert_eq!(nothing, Err(RendezvousError::Timeout { key: "other".into(), after_s: 0 }));
    }
}
