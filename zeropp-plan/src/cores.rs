//! Work that is the same in any order, on all of the machine's cores.

use std::num::NonZero;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use zeropp_data::threads::start_scoped;

/// How many items are worked on at the same time.
pub(crate) fn number() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}

/// `of` of each item, in the order of the items. Each is worked out for itself, so that the number
/// of cores shows in nothing but the time.
///
/// # Panics
/// Where `of` does.
pub(crate) fn map<T: Sync, R: Send>(items: &[T], of: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(index) else { return done };
            done.push((index, of(item)));
        }
    };
    let mut all = thread::scope(|scope| {
        // With fewer threads than cores, or none, it takes longer.
        let start = |_| start_scoped(scope, "plan", work).ok();
        let others: Vec<_> = (1..number().min(items.len())).map_while(start).collect();
        let mut all = work();
        for other in others {
            all.extend(other.join().unwrap_or_else(|panic| resume_unwind(panic)));
        }
        all
    });
    all.sort_unstable_by_key(|(index, _)| *index);
    all.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_the_order_of_their_items() {
        for n in [0, 1, 2, 1000] {
            let items: Vec<usize> = (0..n).collect();
            // The first take the longest.
            let spin = |i: &usize| (0..(n - i) * 100).fold(*i, |a, b| std::hint::black_box(a ^ b));
            let squares = map(&items, |i| (spin(i), i * i).1);
            assert_eq!(squares, items.iter().map(|i| i * i).collect::<Vec<_>>());
        }
    }
}
