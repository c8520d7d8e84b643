use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};

use super::*;

/// Every item once, whatever the number of threads, and as often as one likes.
#[test]
fn each_item_is_worked_on_once() {
    for (count, eager) in [(1, true), (2, true), (3, false), (5, true)] {
        let threads = Threads::new(count, eager);
        let _in_use = threads.install();
        for round in 0..200 {
            let mut sums = vec![0; round % 17];
            each(sums.iter_mut().enumerate(), |(i, sum)| *sum += i + 1);
            assert!(sums.iter().enumerate().all(|(i, sum)| *sum == i + 1), "{count} threads");
        }
    }
}

/// Threads work at the same time: each waits here for all the others.
#[test]
fn threads_work_at_once() {
    let (threads, together) = (Threads::new(3, false), Barrier::new(3));
    let _in_use = threads.install();
    let names = Mutex::new(HashSet::new());
    each(0..3, |_| {
        together.wait();
        names.lock().unwrap().insert(std::thread::current().id());
    });
    assert_eq!(names.lock().unwrap().len(), 3);
}

/// Within work there is one thread; after it, and on dropping, all is as it was before.
#[test]
fn work_within_work_is_alone() {
    assert_eq!((count(), piece(1000, 8, 1)), (1, 1000));
    let threads = Threads::new(2, true);
    let in_use = threads.install();
    assert_eq!((count(), piece(1000, 8, 1), piece(1000, 8, 900)), (2, 128, 904));
    let calls = AtomicUsize::new(0);
    each(0..8, |_| {
        assert_eq!(count(), 1);
        each(0..3, |_| {
            calls.fetch_add(1, Ordering::Relaxed);
        });
    });
    assert_eq!((calls.into_inner(), count()), (24, 2));
    drop(in_use);
    assert_eq!(count(), 1);
}

/// A panic of any thread is the caller's, and the threads can be used again.
#[test]
fn a_panic_ends_the_work_and_nothing_else() {
    let threads = Threads::new(3, false);
    let _in_use = threads.install();
    for bad in [0, 5, 20] {
        let run = || each(0..21, |i| assert!(i != bad, "item {i}"));
        let panic = std::panic::catch_unwind(run).unwrap_err();
        assert_eq!(panic.downcast_ref::<String>(), Some(&format!("item {bad}")));
        assert_eq!(count(), 3);
    }
}

/// A clone on a second thread is refused while the first works, which then ends as if alone.
#[test]
fn threads_at_work_are_refused_to_others() {
    for _ in 0..50 {
        let threads = Threads::new(3, false);
        let others = threads.clone();
        let (begun, refused) = (Barrier::new(2), Barrier::new(2));
        let done = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let second = scope.spawn(|| {
                let _in_use = others.install();
                begun.wait();
                let run = || each(0..4, |_| ());
                let panic = std::panic::catch_unwind(run).unwrap_err();
                refused.wait();
                assert!(panic.downcast_ref::<&str>().unwrap().contains("another thread"));
            });
            let _in_use = threads.install();
            each(0..30, |i| {
                if i == 0 {
                    begun.wait();
                    refused.wait();
                }
                done.fetch_add(1, Ordering::Relaxed);
            });
            second.join().unwrap();
        });
        assert_eq!(done.into_inner(), 30);
    }
}

#[test]
fn a_fresh_vector_is_written_in_parts() {
    let mut fresh = Fresh::new(10);
    let parts: Vec<_> = fresh.parts(4).collect();
    assert_eq!(parts.iter().map(FreshPart::len).collect::<Vec<_>>(), [4, 4, 2]);
    for (i, mut part) in parts.into_iter().enumerate().rev() {
        part.push(i);
        let rest = vec![i * 10; part.len() - 1];
        part.extend_from_slice(&rest);
    }
    assert_eq!(fresh.done(), [0, 0, 0, 0, 1, 10, 10, 10, 2, 20]);
}

#[test]
#[should_panic(expected = "elements that were written")]
fn a_part_that_is_not_written_is_noticed() {
    let mut fresh = Fresh::new(4);
    fresh.parts(2).take(1).for_each(|mut part| part.extend([1, 2].into_iter()));
    fresh.done();
}

/// Each thread reports its number once, before it works, as the binding of threads to cores needs
/// it.
#[test]
fn threads_begin_with_their_numbers() {
    let begun = Arc::new(Mutex::new(HashMap::new()));
    let reported = begun.clone();
    let begin = move |i| {
        reported.lock().unwrap().insert(std::thread::current().id(), i);
    };
    let (threads, together) = (Threads::begun_by(3, false, begin), Barrier::new(3));
    let _in_use = threads.install();
    let numbers = Mutex::new(Vec::new());
    each(0..3, |_| {
        together.wait();
        let here = std::thread::current().id();
        numbers.lock().unwrap().push(begun.lock().unwrap().get(&here).copied());
    });
    let mut numbers = numbers.into_inner().unwrap();
    numbers.sort_unstable();
    assert_eq!(numbers, [None, Some(1), Some(2)]);
}
