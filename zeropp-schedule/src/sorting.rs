//! Sorting, in less code where that counts.
//!
//! In WebAssembly, which a page carries along, one sort of places serves all types: the standard
//! library's is made anew for every type and key, of 2 to 4 KB each. Both are stable, so that both
//! leave the same order. Elsewhere it is the standard library's, which is faster.

use std::cmp::Ordering;

/// Sorts what cannot be told apart where it is equal.
pub(crate) fn plain<T: Ord>(items: &mut [T]) {
    if cfg!(target_arch = "wasm32") {
        small(items, T::cmp);
    } else {
        items.sort_unstable();
    }
}

/// Sorts by a key; what has the same one keeps its order.
pub(crate) fn by_key<T, K: Ord>(items: &mut [T], key: impl Fn(&T) -> K) {
    if cfg!(target_arch = "wasm32") {
        small(items, |a, b| key(a).cmp(&key(b)));
    } else {
        items.sort_by_key(key);
    }
}

/// Sorts as `order` says; what is equal keeps its order.
pub(crate) fn by<T>(items: &mut [T], order: impl Fn(&T, &T) -> Ordering) {
    if cfg!(target_arch = "wasm32") {
        small(items, order);
    } else {
        items.sort_by(order);
    }
}

fn small<T>(items: &mut [T], order: impl Fn(&T, &T) -> Ordering) {
    let mut places = merged(items.len(), &|a, b| order(&items[a], &items[b]).is_gt());
    for to in 0..items.len() {
        // What was swapped away from its place is where the swap put it.
        let mut from = places[to];
        while from < to {
            from = places[from];
        }
        places[to] = from;
        items.swap(to, from);
    }
}

/// The places 0 to `count`, sorted by merging ever longer parts; `later` says of two places
/// whether what is at the first belongs after the other.
fn merged(count: usize, later: &dyn Fn(usize, usize) -> bool) -> Vec<usize> {
    let mut sorted: Vec<usize> = (0..count).collect();
    let mut next = sorted.clone();
    let mut length = 1;
    while length < count {
        for start in (0..count).step_by(2 * length) {
            let middle = count.min(start + length);
            let end = count.min(middle + length);
            let (mut left, mut right) = (start, middle);
            for place in &mut next[start..end] {
                let rest = left < middle;
                let take_right = right < end && (!rest || later(sorted[left], sorted[right]));
                let from = if take_right { &mut right } else { &mut left };
                *place = sorted[*from];
                *from += 1;
            }
        }
        std::mem::swap(&mut sorted, &mut next);
        length *= 2;
    }
    sorted
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_small_sort_leaves_the_order_of_the_standard_one(
            keys in prop::collection::vec(0u8..20, 0..200)
        ) {
            let mut items: Vec<(u8, usize)> = keys.into_iter().zip(0..).collect();
            let mut expected = items.clone();
            expected.sort_by_key(|(key, _)| *key);
            small(&mut items, |a, b| a.0.cmp(&b.0));
            prop_assert_eq!(items, expected);
        }
    }
}
