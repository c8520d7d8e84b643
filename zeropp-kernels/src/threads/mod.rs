//! The threads that a rank's kernels share their work among.
//!
//! A rank [installs](Threads::install) its threads on its own; every kernel that is called there
//! uses them, and one that is called elsewhere, or within another's work, is alone. Work is cut
//! only where outputs are independent of each other, or in blocks whose sums are added in their
//! order, so that no bit depends on how many threads there are.

#[cfg(test)]
mod bits_tests;
mod fresh;
mod pool;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex};

pub(crate) use fresh::{Fresh, FreshPart, filled};
use pool::Pool;

/// Pieces that work of many equal elements is cut into for each thread: where a core is taken away
/// for a while, the other threads take what it would have done.
const PIECES_EACH: usize = 4;

/// Some threads, of which the one that installs them is one. A clone is the same threads.
#[derive(Clone)]
pub struct Threads(Option<Arc<Pool>>);

impl Threads {
    /// `count` threads, the calling one among them; fewer where the system gives no more. Where
    /// the machine has a core for each, `eager` ones wait a few microseconds for the next kernel
    /// before they sleep.
    pub fn new(count: usize, eager: bool) -> Self {
        Self::begun_by(count, eager, |_| ())
    }

    /// The same, of which each but the calling one first calls `begin` with its number, from 1.
    pub fn begun_by(
        count: usize,
        eager: bool,
        begin: impl Fn(usize) + Send + Sync + 'static,
    ) -> Self {
        let pool = (count > 1).then(|| Arc::new(Pool::new(count - 1, eager, begin)));
        Self(pool.filter(|pool| pool.threads() > 1))
    }

    /// Makes the kernels that are called on this thread use these, until the result is dropped.
    ///
    /// They are for one thread at a time: a kernel on a second one panics while the first is in
    /// a kernel of its own.
    #[must_use = "the threads are used until this is dropped"]
    pub fn install(&self) -> Installed {
        Installed(INSTALLED.replace(self.0.clone()), PhantomData)
    }
}

/// Threads that are in use on the thread that installed them; dropped, they no longer are.
pub struct Installed(Option<Arc<Pool>>, PhantomData<*const ()>);

impl Drop for Installed {
    fn drop(&mut self) {
        INSTALLED.set(self.0.take());
    }
}

thread_local! {
    static INSTALLED: RefCell<Option<Arc<Pool>>> = const { RefCell::new(None) };
}

/// How many threads the kernels of this thread have.
pub(crate) fn count() -> usize {
    INSTALLED.with_borrow(|pool| pool.as_ref().map_or(1, |pool| pool.threads()))
}

/// The length of the pieces of `len` elements: a multiple of `unit`, at least `least` where there
/// is that much, and all of them for one thread.
pub fn piece(len: usize, unit: usize, least: usize) -> usize {
    let threads = count();
    let len = len.max(1);
    if threads == 1 {
        return len;
    }
    len.div_ceil(PIECES_EACH * threads).max(least).next_multiple_of(unit).min(len)
}

/// Calls `f` once with each of `items`, on whichever thread comes first.
pub fn each<T: Send>(items: impl IntoIterator<Item = T, IntoIter: Send>, f: impl Fn(T) + Sync) {
    each_with(items, || (), |(), item| f(item));
}

/// Calls `f` once with each of `items`, on whichever thread comes first, and with what `scratch`
/// made on that thread.
pub(crate) fn each_with<S, T: Send>(
    items: impl IntoIterator<Item = T, IntoIter: Send>,
    scratch: impl Fn() -> S + Sync,
    f: impl Fn(&mut S, T) + Sync,
) {
    let mut items = items.into_iter();
    let first = [items.next(), items.next()];
    let is_shared = first[1].is_some();
    let items = first.into_iter().flatten().chain(items);
    // Taken away while it works: within the work, kernels are alone.
    let pool = if is_shared { BorrowedThreads(INSTALLED.take()) } else { BorrowedThreads(None) };
    let Some(threads) = &pool.0 else {
        let mut own = None;
        items.for_each(|item| f(own.get_or_insert_with(&scratch), item));
        return;
    };
    let items = Mutex::new(items);
    threads.run(&|| {
        let mut own = None;
        loop {
            // The lock is free again before the work begins.
            let item = items.lock().expect("whole, as no iterator panics").next();
            let Some(item) = item else { break };
            f(own.get_or_insert_with(&scratch), item);
        }
    });
}

/// Threads that were taken away from their place, and go back to it.
struct BorrowedThreads(Option<Arc<Pool>>);

impl Drop for BorrowedThreads {
    fn drop(&mut self) {
        if let Some(pool) = self.0.take() {
            INSTALLED.set(Some(pool));
        }
    }
}
