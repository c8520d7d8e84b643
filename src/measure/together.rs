//! Threads that measure at the same time.

use std::sync::{Condvar, Mutex, PoisonError};

use zeropp_comm::CommError;
use zeropp_core::threads::{REFUSED_HELP, start_scoped};

use crate::Error;

/// `work` of each of these ranks, on a thread each. It calls what it is given once it is ready to
/// measure, which returns when all are.
///
/// # Errors
/// The system grants too few threads.
pub(super) fn together<T: Send>(
    ranks: usize,
    work: impl Fn(usize, &dyn Fn()) -> T + Sync,
) -> Result<Vec<T>, Error> {
    // How many are not ready; none are waited for where there cannot be as many.
    let (left, bell) = (Mutex::new(ranks), Condvar::new());
    let of = || left.lock().unwrap_or_else(PoisonError::into_inner);
    let ready = || {
        let mut left = of();
        *left = left.saturating_sub(1);
        bell.notify_all();
        drop(bell.wait_while(left, |left| *left > 0));
    };
    let (work, ready) = (&work, &ready);
    std::thread::scope(|scope| {
        let start = |rank| start_scoped(scope, "measure", move || work(rank, ready));
        let threads = (0..ranks).map(start).collect::<Result<Vec<_>, _>>().map_err(|e| {
            *of() = 0;
            bell.notify_all();
            refused(&e)
        })?;
        Ok(threads.into_iter().map(|thread| thread.join().expect("measured")).collect())
    })
}

/// The system grants no thread.
pub(super) fn refused(error: &std::io::Error) -> Error {
    let reason = format!("no thread can be started ({error}); {REFUSED_HELP}");
    CommError::Unavailable { engine: "threads".into(), reason }.into()
}
