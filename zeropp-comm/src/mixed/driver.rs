//! The thread that carries collectives between processes on while the ranks compute.

use std::sync::{Arc, Weak};
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, TryRecvError};

use super::engine::Engine;
use super::flight::Flight;

/// Looks without a pause after something has happened, then a pause each.
const EAGER_LOOKS: u32 = 20;
/// Pause between looks while an operation is under way.
const BUSY_PAUSE: Duration = Duration::from_micros(50);
/// Pause between looks for a failure while there is none.
const WATCH_PAUSE: Duration = Duration::from_millis(50);

/// Starts the thread. It ends once nobody can hand it anything more.
pub(super) fn start(arriving: Receiver<Arc<Flight>>, engine: Weak<Engine>) {
    let body = move || run(&arriving, &engine);
    let thread = std::thread::Builder::new().name("comm-mixed".into()).spawn(body);
    thread.expect("the system can start a thread");
}

fn run(arriving: &Receiver<Arc<Flight>>, engine: &Weak<Engine>) {
    let mut flights: Vec<Arc<Flight>> = Vec::new();
    let mut idle = 0;
    loop {
        let known = flights.len();
        loop {
            match arriving.try_recv() {
                Ok(flight) => flights.push(flight),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return,
            }
        }
        let mut moved = flights.len() > known;
        flights.retain(|flight| {
            moved |= flight.poll();
            !flight.is_over()
        });
        idle = if moved { 0 } else { idle + 1 };
        if !flights.is_empty() && idle <= EAGER_LOOKS {
            std::thread::yield_now();
            continue;
        }
        let pause = if flights.is_empty() { WATCH_PAUSE } else { BUSY_PAUSE };
        match arriving.recv_timeout(pause) {
            Ok(flight) => flights.push(flight),
            Err(RecvTimeoutError::Timeout) if flights.is_empty() => match engine.upgrade() {
                Some(engine) => engine.watch(),
                None => return,
            },
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
